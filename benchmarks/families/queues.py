"""Queues: many tasks of one event loop that wait for one permit, and the time from one task to the next."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any

import anyio

from benchmarks.cells import Result, Wanted
from benchmarks.libraries import Library, Protect
from benchmarks.timing import ASYNCIO, Effort

GROUP = "asyncio, queue"
ENTRY = "queue"
WAITERS = "10,000 waiters, each"
HANDOFFS = "a permit that goes round"

#: The semaphores that a program without a library would use.
SEMAPHORE = "asyncio.Semaphore"
ANYIO = "anyio.Semaphore"

MANY = 10_000
FEW = 20  # tasks that pass a permit around


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    if not wanted(GROUP):
        return
    contestants = {it.name: it.entries[ENTRY, ASYNCIO] for it in libraries if (ENTRY, ASYNCIO) in it.entries}
    contestants |= {SEMAPHORE: _of(lambda: asyncio.Semaphore(1)), ANYIO: _of(lambda: anyio.Semaphore(1))}
    many = MANY if effort.rounds > 2 else 100
    for cell, tasks, calls in ((WAITERS, many, many), (HANDOFFS, FEW, 2 * many)):
        samples: dict[str, list[float]] = {name: [] for name in contestants}
        order = list(contestants)
        for _ in range(effort.rounds):
            random.shuffle(order)
            for name in order:
                samples[name].append(asyncio.run(_time_per_call(contestants[name], tasks, calls)))
        yield Result(GROUP, cell, "ns", samples)


def _of(make: Callable[[], Any]) -> Protect:
    def protect(fn: Callable[..., Any]) -> Callable[..., Any]:
        semaphore = make()

        async def protected() -> Any:
            async with semaphore:
                return await fn()

        return protected

    return protect


async def _time_per_call(protect: Protect, tasks: int, calls: int) -> float:
    """Return nanoseconds per call, when a number of tasks share a number of calls.

    The first task with the permit keeps it until all others wait; from then on, the permit is never free.
    """
    done = 0

    async def work() -> None:
        nonlocal done
        if not done:
            await asyncio.sleep(0)
        done += 1

    protected = protect(work)

    async def client() -> None:
        for _ in range(calls // tasks):
            await protected()

    gc.collect()
    began = perf_counter_ns()
    await asyncio.gather(*[client() for _ in range(tasks)])
    elapsed = perf_counter_ns() - began
    assert done == calls // tasks * tasks
    return elapsed / done
