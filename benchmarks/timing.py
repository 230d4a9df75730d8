"""The timing core: interleaved rounds, in which each sample is the fastest of a few short batches.

A busy machine is slow for seconds at a time. So contestants are not timed one after another: each round times every
contestant once, in a new random order. The report shows the median over the rounds, and the median of the ratios within
a round. A disturbance then affects all contestants, or only a round that the median leaves out.

A sample is nanoseconds per call. For all contestants, it includes the call itself, the function, which returns at once,
and the `for` loop around it (about 10 ns). Garbage collection stays on, as in the programs that use these libraries.
All objects that exist before the first round are frozen, so that no contestant pays for the imports of another.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import repeat
from time import perf_counter_ns
from types import FunctionType
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

#: The worlds: blocking code in one thread, and the two event loops.
SYNC, ASYNCIO, TRIO = "sync", "asyncio", "trio"

#: The worlds that are installed.
WORLDS = (SYNC, ASYNCIO, TRIO) if find_spec("trio") else (SYNC, ASYNCIO)

#: The number of calls after which a task yields to its event loop, outside the timing: cancelled timers of the calls
#: accumulate until the loop runs. In real programs, it runs at least once per call.
CALLS_BETWEEN_CHECKPOINTS = 250


@dataclass(frozen=True)
class Effort:
    """How much time to spend.

    :param rounds: the number of samples per contestant.
    :param batches: the number of batches of which a sample is the fastest.
    :param batch: the approximate duration of a batch, in nanoseconds.
    :param clock: returns nanoseconds.
    """

    rounds: int = 25
    batches: int = 5
    batch: int = 2_000_000
    clock: Callable[[], int] = perf_counter_ns


SMOKE = Effort(rounds=2, batches=1, batch=50_000)


def run(world: str, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `async def main()` to its end in a world. In the blocking world, nothing in it ever suspends."""
    if world == ASYNCIO:
        return asyncio.run(main())
    if world == TRIO:
        import trio

        return trio.run(main)
    try:
        main().send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise RuntimeError("blocking code was about to suspend")


async def outcome(world: str, function: Callable[[], Any]) -> Any:
    """Call `function`, and await the result except in the blocking world."""
    return function() if world == SYNC else await function()


async def checkpoint(world: str) -> None:
    """Let the event loop run."""
    if world == ASYNCIO:
        await asyncio.sleep(0)
    elif world == TRIO:
        import trio

        await trio.lowlevel.checkpoint()


async def interleaved(world: str, functions: Mapping[str, Callable[[], Any]], effort: Effort) -> dict[str, list[float]]:
    """Return nanoseconds per call, one sample per round for each function. Must be awaited in its world."""
    loops = {name: _Loop(world, function, effort.clock) for name, function in functions.items()}
    for loop in loops.values():
        await loop.calibrate(effort.batch)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    gc.collect()
    gc.freeze()
    try:
        for _ in range(effort.rounds):
            random.shuffle(order)
            for name in order:
                samples[name].append(await loops[name].sample(effort.batches))
    finally:
        gc.unfreeze()
    return samples


class _Loop:
    """One function, and the number of its calls in a batch."""

    def __init__(self, world: str, function: Callable[[], Any], clock: Callable[[], int]) -> None:
        self._world = world
        self._clock = clock
        self._function = function
        self._spin: Spin = _own_copy(_spin if world == SYNC else _spin_awaiting)
        self._most = 1_000_000 if world == SYNC else CALLS_BETWEEN_CHECKPOINTS
        self._calls = 1

    async def calibrate(self, enough: int) -> None:
        """Find the number of calls for which a batch takes long enough.

        It uses the fastest of a few batches, because the first call may compile, import or start a thread.
        """
        while await self._fastest(3) < enough and self._calls < self._most:
            self._calls = min(2 * self._calls, self._most)

    async def sample(self, batches: int) -> float:
        """Return nanoseconds per call in the fastest of some batches."""
        return await self._fastest(batches) / self._calls

    async def _fastest(self, batches: int) -> int:
        return min([await self._batch(number) for number in range(batches)])

    async def _batch(self, number: int) -> int:
        await checkpoint(self._world)
        if self._world == SYNC:
            took: int = at_depth(DEPTHS * number, self._spin, self._function, self._calls, self._clock)
        else:
            took = await self._spin(self._function, self._calls, self._clock)
        return took


#: The difference in stack depth between the batches of a sample, in frames. CPython allocates its stack in chunks, and
#: a call that crosses the end of a chunk takes ten times as long. Which contestant this affects depends on the depth;
#: so batches are called at different depths. (In tasks, this is impossible.)
DEPTHS = 20


def at_depth(frames: int, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function below this number of additional frames."""
    return at_depth(frames - 1, function, *arguments) if frames else function(*arguments)


#: Calls a function several times, and returns the nanoseconds that this took; in a task, an awaitable of them.
Spin: TypeAlias = Callable[[Callable[[], Any], int, Callable[[], int]], Any]


def _spin(function: Callable[[], Any], calls: int, clock: Callable[[], int]) -> int:
    began = clock()
    for _ in repeat(None, calls):
        function()
    return clock() - began


async def _spin_awaiting(function: Callable[[], Any], calls: int, clock: Callable[[], int]) -> int:
    began = clock()
    for _ in repeat(None, calls):
        await function()
    return clock() - began


def _own_copy(spin: Any) -> Spin:
    """Copy a function with its code, because CPython specializes each call site for the functions called there."""
    return FunctionType(spin.__code__.replace(), spin.__globals__, spin.__name__)
