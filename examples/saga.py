"""A saga: flight, hotel and payment are booked one after another. If a step fails, the earlier ones are undone.

Look at `compensate`: each compensation has its own `Retry` and its own deadline, and runs even if the time of the
saga is over or its caller is gone. The services sometimes fail, and so do the compensations. At the end, the bookings
are compared with the answers that the customers got.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import anyio

from resilience import Context, Retry, Timeout, TimeoutExceeded, deadline, detached
from resilience.work import IdempotencyKey

rng = random.Random(7)
step = IdempotencyKey().wrap(Retry(6, backoff=[0.002]), Timeout(0.4))
undo = Retry(20, on=Exception, backoff=[0.002]).wrap(Timeout(0.2))


class Declined(Exception):
    pass


class Service:
    """Books orders. Some of its answers are lost. A repeated request, with the same key, books the same order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.booked: dict[str, str] = {}

    async def book(self, ctx: Context, order: str) -> None:
        await anyio.sleep(0.001)
        if order.startswith("broke") and self.name == "payment":
            raise Declined(order)
        if "slow" in order and self.name == "payment":
            await anyio.sleep(10)
        self.booked[order] = ctx.properties["idempotency_key"]
        if rng.random() < 0.1:
            raise ConnectionError("the answer is lost")

    async def cancel(self, order: str) -> None:
        await anyio.sleep(0.001)
        if rng.random() < 0.3:
            raise ConnectionError("reset")
        self.booked.pop(order, None)  # does nothing if nothing is booked


async def compensate(function: Callable[[str], Awaitable[None]], order: str) -> None:
    with anyio.CancelScope(shield=True):
        async with detached(timeout=5):
            await undo.acall(function, order)


async def book(order: str, services: list[Service]) -> None:
    async with AsyncExitStack() as compensations:
        async with deadline(20):  # for the steps alone: under asyncio, it would cut off a compensation in the middle
            for service in services:
                # Before the step, because its answer may be lost; `cancel` does nothing if there is no booking.
                compensations.push_async_callback(compensate, service.cancel, order)
                await step.aexecute(lambda ctx, it=service: it.book(ctx, order))  # type: ignore[misc]
        compensations.pop_all()


async def main() -> bool:
    services = [Service("flight"), Service("hotel"), Service("payment")]
    results: dict[str, str] = {}

    async def customer(order: str) -> None:
        try:
            with anyio.move_on_after(0.05 if order.startswith("gone") else 60):
                await book(order, services)
                results[order] = "booked"
        except (Declined, ConnectionError, TimeoutExceeded) as error:
            results[order] = type(error).__name__

    async with anyio.create_task_group() as group:
        for number in range(10):
            for kind in ("fine", "broke", "slow"):
                group.start_soon(customer, f"{kind}-{number}")
    async with anyio.create_task_group() as group:
        group.start_soon(customer, "gone-slow")
    print(f"the customer who is gone got: {results.get('gone-slow', 'nothing')}")
    booked = {it.name: set(it.booked) for it in services}
    expected = {order for order, answer in results.items() if answer == "booked"}
    for kind in ("fine", "broke", "slow"):
        answers = sorted({answer for order, answer in results.items() if order.startswith(kind)})
        print(f"{kind:6} orders got: {', '.join(answers)}")
    for name, orders in booked.items():
        print(f"{name:8} has booked {len(orders)} orders, {len(orders ^ expected)} of them wrongly")
    right = len(expected) == 10 and all(orders == expected for orders in booked.values())
    print("every order is booked everywhere or nowhere" if right else "BROKEN")
    return right


if __name__ == "__main__":
    sys.exit(not anyio.run(main))
