"""The policies as blocks, for code that is not a function: loops, `with`, and `async with`.

Look at each block and the line that it prints: the retry runs its block again, the breaker refuses to enter its block,
the bulkhead makes the third of three tasks wait, and the deadline ends a loop. Tasks have the same forms with `async`.
"""

from __future__ import annotations

import time

import anyio

from resilience import Bulkhead, CircuitBreaker, CircuitOpen, DeadlineExceeded, Retry, current_context, deadline

retry = Retry(3, backoff=[0.01])
breaker = CircuitBreaker(2, open_for=30.0)
bulkhead = Bulkhead(2, queue=10)


def a_retried_block() -> None:
    for attempt in retry.attempts():
        with attempt:
            if attempt.number < 3:
                raise ConnectionError("reset by peer")
            print(f"retry: attempt {attempt.number} got through")


def a_guarded_block() -> None:
    for _ in range(2):
        try:
            with breaker.guard():
                raise ConnectionError("reset by peer")
        except ConnectionError:
            pass
    try:
        with breaker.guard():
            print("never printed: the circuit is open")
    except CircuitOpen as error:
        print(f"breaker: refused, try again in {error.retry_after:.0f} s, last failure {error.last_failure}")


def a_loop_with_a_deadline() -> None:
    rounds = 0
    with deadline(0.1) as ctx:
        while not ctx.expired:
            rounds += 1
            time.sleep(min(0.04, ctx.remaining()))
    print(f"deadline: the loop ended after {rounds} rounds")


async def blocks_in_tasks() -> None:
    inside = most = 0

    async def work() -> None:
        nonlocal inside, most
        async with bulkhead.slot():
            inside += 1
            most = max(most, inside)
            await anyio.sleep(0.02)
            inside -= 1

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(work)
    print(f"bulkhead: {most} of 3 tasks inside at once")

    async for attempt in retry.attempts():
        with attempt:
            if attempt.number < 2:
                raise ConnectionError("reset by peer")
            print(f"retry: attempt {attempt.number} got through")

    try:
        async with deadline(0.1):
            print(f"deadline: {current_context().remaining():.1f} s for this block")
            await anyio.sleep(5)
    except DeadlineExceeded as error:
        print(f"deadline: {error}")


if __name__ == "__main__":
    a_retried_block()
    a_guarded_block()
    a_loop_with_a_deadline()
    for backend in ("asyncio", "trio"):
        print(f"-- {backend}")
        anyio.run(blocks_in_tasks, backend=backend)
