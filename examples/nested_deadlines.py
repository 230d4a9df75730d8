"""A deadline travels with the call: all nested calls inherit it, and can only shorten it.

Look at the numbers that each function prints. No function passes a timeout to the next one: `current_context()` returns
the deadline, through pipelines, tasks and threads. At the end, a budget is used up: no further attempt begins, and
`async with` cancels its block.
"""

from __future__ import annotations

import time

import anyio

from resilience import Context, DeadlineExceeded, Retry, Timeout, current_context, deadline

depot = Timeout(5.0, name="depot")  # longer than the deadlines around it
prices = Timeout(0.2, name="prices")  # shorter than all of them
patient = Retry(10, on=ConnectionError, backoff=[0.3], name="patient")


def say(name: str) -> None:
    remaining = current_context().remaining()
    print(f"{name:<24} {'no limit' if remaining == float('inf') else f'{remaining:.1f} s left'}")


def stock(ctx: Context) -> int:
    say("    depot")
    client_timeout = ctx.timeout(30.0)  # the timeout to pass to a client: 30 s, or the time left
    print(f"{'':24} asks its client to take at most {client_timeout:.1f} s")
    return prices.execute(price)


def price(ctx: Context) -> int:
    say("        prices")
    return 42


def checkout() -> None:
    say("checkout")
    time.sleep(0.3)  # does some work first
    depot.execute(stock)


def unreachable(ctx: Context) -> None:
    say("    attempt")
    raise ConnectionError("no route to host")


async def slow() -> None:
    say("slow")
    await anyio.sleep(5)


async def main() -> None:
    async with deadline(0.2):
        await slow()


if __name__ == "__main__":
    print("-- without a deadline")
    checkout()

    print("-- with one second for everything")
    with deadline(1.0):
        checkout()

    print("-- a later deadline inside an earlier one")
    with deadline(1.0), deadline(60.0):
        say("the earlier one applies")

    print("-- no wait beyond the deadline")
    began = time.monotonic()
    try:
        with deadline(0.8):
            patient.execute(unreachable)
    except ConnectionError as error:
        print(f"gave up after {time.monotonic() - began:.1f} s: {error.__notes__[0]}")

    print("-- a block that is cut off")
    try:
        anyio.run(main)
    except DeadlineExceeded as error:
        print(f"DeadlineExceeded: {error}")
