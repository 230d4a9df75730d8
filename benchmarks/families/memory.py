"""Memory: what a call holds while it runs, what it leaves behind, and what a protected function takes.

Blocks are counted by CPython's allocator (`sys.getallocatedblocks`), bytes by `tracemalloc`. The memory of a bare call
of the function is subtracted.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

from benchmarks import timing
from benchmarks.cells import Result, Wanted
from benchmarks.functions import ANSWER, LIMIT, SECONDS, answering, failing
from benchmarks.libraries import OURS, Library, Protect, ours
from benchmarks.timing import ASYNCIO, SYNC, Effort, outcome
from resilience import Bulkhead, Fallback, Timeout

CALL = "memory of a call under four"
FUNCTION = "bytes of a protected function"
POLICY = "bytes of a policy"

REPETITIONS = 25
COPIES = 100
CALLS = 10_000


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    calls = CALLS if effort.rounds > 2 else CALLS // 100
    for world in (SYNC, ASYNCIO):
        if wanted(f"{world}, {CALL}"):
            yield from _of_calls(world, libraries, calls)
    if wanted(FUNCTION):
        yield from _of_functions(libraries)
    if wanted(POLICY):
        yield from _of_policies()


# --- calls ---


def _of_calls(world: str, libraries: list[Library], calls: int) -> Iterator[Result]:
    group = f"{world}, {CALL}"
    four = _entries("four", world, libraries)
    again = _entries("retry at once", world, libraries)

    async def main() -> Iterator[Result]:
        blocks = {name: [float(await _held(world, protect, sys.getallocatedblocks))] for name, protect in four.items()}
        tracemalloc.start()
        size = {name: [float(await _held(world, protect, _traced))] for name, protect in four.items()}
        tracemalloc.stop()
        left = {name: [await _left_behind(world, protect(answering(world)), calls)] for name, protect in four.items()}
        failed = {
            name: [await _left_behind(world, _forgiving(world, protect(failing(world))), calls)]
            for name, protect in again.items()
        }
        return iter(
            (
                Result(group, "blocks while it runs", "blocks", blocks),
                Result(group, "bytes while it runs", "bytes", size),
                Result(group, "blocks left by 1,000 calls", "blocks", left),
                Result(group, "blocks left by 1,000 calls that failed three times", "blocks", failed),
            )
        )

    yield from timing.run(world, main)


async def _held(world: str, protect: Protect, counter: Callable[[], int]) -> int:
    """Return how much more is allocated inside the function than before the call."""
    inside = 0

    def look(ctx: object = None) -> int:
        nonlocal inside
        inside = counter()
        return ANSWER

    async def look_later(ctx: object = None) -> int:
        return look()

    async def median(function: Callable[[], Any]) -> int:
        differences = []
        for _ in range(REPETITIONS):
            before = counter()
            await outcome(world, function)
            differences.append(inside - before)
        return statistics.median_low(differences)

    bare = look if world == SYNC else look_later
    return await median(protect(bare)) - await median(bare)


def _traced() -> int:
    return tracemalloc.get_traced_memory()[0]


async def _left_behind(world: str, function: Callable[[], Any], calls: int) -> float:
    """Return how many blocks 1,000 calls leave behind without the cyclic garbage collector."""
    for _ in range(100):
        await outcome(world, function)
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        for _ in repeat(None, calls):
            await outcome(world, function)
        await timing.checkpoint(world)
        return 1000 * (sys.getallocatedblocks() - before) / calls
    finally:
        gc.enable()


def _forgiving(world: str, function: Callable[[], Any]) -> Callable[[], Any]:
    def tolerant() -> None:
        try:
            function()
        except Exception:
            pass

    async def tolerant_later() -> None:
        try:
            await function()
        except Exception:
            pass

    return tolerant if world == SYNC else tolerant_later


# --- objects ---


def _of_functions(libraries: list[Library]) -> Iterator[Result]:
    for entry in ("retry", "breaker", "bulkhead", "fallback", "four", "five, deadline"):
        sizes = {}
        for name, protect in _entries(entry, SYNC, libraries).items():

            def build(protect: Protect = protect) -> object:
                protected = protect(answering(SYNC))
                protected()  # includes what the first call allocates
                return protected

            sizes[name] = [_bytes_of(build)]
        yield Result(FUNCTION, entry, "bytes", sizes)


def _of_policies() -> Iterator[Result]:
    policies: dict[str, Callable[[], object]] = {
        "Retry": ours.new_retry,
        "CircuitBreaker": ours.new_breaker,
        "Bulkhead": lambda: Bulkhead(LIMIT),
        "Fallback": lambda: Fallback(None),
        "Timeout": lambda: Timeout(SECONDS),
    }
    for name, new in policies.items():
        yield Result(POLICY, name, "bytes", {OURS: [_bytes_of(new)]})


def _bytes_of(build: Callable[[], object]) -> float:
    """Return the bytes that one more of these objects takes."""
    kept = [build()]
    gc.collect()
    tracemalloc.start()
    try:
        kept += [build() for _ in range(COPIES)]
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / COPIES
    finally:
        tracemalloc.stop()


def _entries(entry: str, world: str, libraries: list[Library]) -> dict[str, Protect]:
    return {it.name: it.entries[entry, world] for it in libraries if (entry, world) in it.entries}
