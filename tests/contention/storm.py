"""Eight threads, an asyncio loop and a trio loop call through the same policies at the same time.

Callers come and leave at random: calls succeed, are refused, time out, give up in the queue or inside, and are
cancelled. The callers count all outcomes, which must agree with the counts of the policies.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel

from resilience import Bulkhead, BulkheadFull, CircuitOpen, Context, DeadlineExceeded, Policy, Timeout, TimeoutExceeded
from tests.conftest import Boom, World

THREADS = 8
TASKS_PER_LOOP = 12
LOOPS = ("asyncio", "trio")

#: Seconds after which a storm counts as hanging, besides one for each thousand operations.
PATIENCE = 120.0

#: One operation of a caller: `await operation(world, random)` returns its outcome.
Operation = Callable[[World, random.Random], Awaitable[Any]]


@contextmanager
def fine_grained_switching() -> Iterator[None]:
    """Let the interpreter switch threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Gauge:
    """Counts how many calls are inside, and the most that were inside at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.inside = 0
        self.most = 0
        self.entered = 0

    def enter(self) -> None:
        with self._lock:
            self.inside += 1
            self.entered += 1
            self.most = max(self.most, self.inside)

    def leave(self) -> None:
        with self._lock:
            self.inside -= 1

    async def pass_through(self, world: World, rng: random.Random) -> None:
        """Enter, pause and leave."""
        self.enter()
        try:
            await pause(world, rng)
        finally:
            self.leave()


class Storm:
    """A number of operations, shared among threads and two event loops.

    Each caller counts the outcomes of its operations in its own book, so that no lock of the test synchronizes them.
    """

    CHUNK = 16

    def __init__(self, operation: Operation, operations: int, threads: int = THREADS) -> None:
        self._operation = operation
        self._left = operations
        self._taking = threading.Lock()
        self._books: list[Counter[Any]] = []
        self._errors: list[BaseException] = []
        self._callers = [("threads", 1)] * threads + [(name, TASKS_PER_LOOP) for name in LOOPS]
        self._patience = PATIENCE + operations / 1000

    def run(self) -> Counter[Any]:
        """Run all operations, and return their outcomes."""
        threads = [threading.Thread(target=self._work, args=it, daemon=True) for it in enumerate(self._callers)]
        end = time.monotonic() + self._patience
        with fine_grained_switching():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))
        assert not any(thread.is_alive() for thread in threads), "a world hangs"
        if self._errors:
            raise self._errors[0]
        return sum(self._books, Counter())

    def _shares(self) -> Iterator[int]:
        while not self._errors:
            with self._taking:
                share = min(self.CHUNK, self._left)
                self._left -= share
            if not share:
                return
            yield share

    def _work(self, number: int, callers: tuple[str, int]) -> None:
        name, count = callers
        world = World(name)

        async def caller(seed: str) -> None:
            rng, book = random.Random(seed), Counter[Any]()
            self._books.append(book)
            for share in self._shares():
                for _ in range(share):
                    book[await self._operation(world, rng)] += 1
                    if not world.blocking:
                        await anyio.lowlevel.checkpoint()

        async def tasks() -> None:
            async with anyio.create_task_group() as group:
                for task in range(count):
                    group.start_soon(caller, f"{number} {task}")

        try:
            world.run((lambda: caller(str(number))) if world.blocking else tasks)
        except BaseException as error:  # the test's thread raises it
            self._errors.append(error)


async def pause(world: World, rng: random.Random) -> None:
    """Do nothing, let others run, or wait for a moment."""
    chance = rng.random()
    if chance < 0.6:
        return
    await world.sleep(0 if chance < 0.9 else 0.0005)


async def call(world: World, rng: random.Random, policy: Policy[Any], gauge: Gauge, ctx: Context | None = None) -> str:
    """Make one call, which may fail, and return its outcome. Tasks may be cancelled at any point."""

    async def fn(ctx: Context) -> None:
        gauge.enter()
        try:
            await pause(world, rng)
            if rng.random() < 0.3:
                raise Boom("no")
        finally:
            gauge.leave()

    async def make() -> str:
        try:
            await world.execute(policy, fn, ctx)
        except Boom:
            return "failed"
        except BulkheadFull:
            return "full"
        except CircuitOpen:
            return "refused"
        except DeadlineExceeded:
            return "no time left"
        except TimeoutExceeded:
            return "timed out"
        return "answered"

    if world.blocking or rng.random() < 0.7:
        return await make()
    with anyio.move_on_after(rng.choice([0.0, 0.0, 0.0002, 0.001])):
        return await make()
    return "cancelled"


def through_a_bulkhead(bulkhead: Bulkhead, pipelines: list[Policy[Any]], gauge: Gauge) -> Operation:
    """Return an operation: a call through one of the pipelines, with a budget, under a `Timeout`, or through a slot.

    In threads the Timeout is cooperative: an abandoned function has no permit any more, but counts as inside.
    """
    cut_off = [Timeout(0.001).wrap(pipeline) for pipeline in pipelines]
    carried = [Timeout(0.001, cooperative=True).wrap(pipeline) for pipeline in pipelines]

    async def operation(world: World, rng: random.Random) -> str:
        chance = rng.random()
        if chance < 0.1:
            return await _through_a_slot(world, rng, bulkhead, gauge)
        ctx = Context(timeout=rng.choice([0.0003, 0.002])) if chance < 0.3 else None
        hurried = carried if world.blocking else cut_off
        return await call(world, rng, rng.choice(hurried if chance > 0.7 else pipelines), gauge, ctx)

    return operation


async def _through_a_slot(world: World, rng: random.Random, bulkhead: Bulkhead, gauge: Gauge) -> str:
    try:
        if world.blocking:
            with bulkhead.slot():
                gauge.enter()
                gauge.leave()
        else:
            async with bulkhead.slot():
                await gauge.pass_through(world, rng)
    except BulkheadFull:
        return "full"
    return "answered"
