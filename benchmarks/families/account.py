"""Where the time of a call goes: the way through a policy, built up step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CoroutineType
from typing import Any, TypeVar

from benchmarks import timing
from benchmarks.cells import Result, Wanted
from benchmarks.families.layers import Through
from benchmarks.functions import FAILURE, LIMIT, answering
from benchmarks.libraries import Library
from benchmarks.timing import ASYNCIO, SYNC, Effort
from resilience import Bulkhead, Call, CircuitBreaker, Context, Fallback, Policy, Retry
from resilience.callables import PLAIN, is_awaitable
from resilience.clock import clock
from resilience.context import get_ambient
from resilience.events import watched

T = TypeVar("T")

GROUP = "where the time goes"
CELL = "so far"


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    for world, steps in ((SYNC, sync_steps), (ASYNCIO, asyncio_steps)):
        if wanted(f"{world}, {GROUP}"):

            async def main(world: str = world, steps: Steps = steps) -> dict[str, list[float]]:
                return await timing.interleaved(world, steps(answering(world)), effort)

            yield Result(f"{world}, {GROUP}", CELL, "ns", timing.run(world, main))


Steps = Callable[[Callable[..., Any]], dict[str, Callable[[], Any]]]


def sync_steps(function: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """Return the function, and more and more of what stands around it."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def looking(*args: Any, **kwargs: Any) -> Any:
        if get_ambient() is not None or watched.executions:
            raise RuntimeError("the long way is not measured here")
        return function(*args, **kwargs)

    def checking(*args: Any, **kwargs: Any) -> Any:
        if get_ambient() is not None or watched.executions:
            raise RuntimeError("the long way is not measured here")
        result = function(*args, **kwargs) if kwargs else function(*args)
        if type(result) not in PLAIN and is_awaitable(result):
            raise TypeError("an awaitable is not measured here")
        return result

    return {
        "the function": function,
        "a function around it that passes all arguments on": wrapper,
        "... and looks for a context and for listeners": looking,
        "... and at the type of what comes back": checking,
        **policies(function),
    }


def asyncio_steps(function: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """Do the same for tasks."""

    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    async def looking(*args: Any, **kwargs: Any) -> Any:
        if get_ambient() is not None or watched.executions:
            raise RuntimeError("the long way is not measured here")
        return await function(*args, **kwargs)

    async def checking(*args: Any, **kwargs: Any) -> Any:
        if get_ambient() is not None or watched.executions:
            raise RuntimeError("the long way is not measured here")
        awaitable = function(*args, **kwargs) if kwargs else function(*args)
        if type(awaitable) is not CoroutineType:
            raise TypeError("only coroutines are measured here")
        return await awaitable

    return {
        "the function": function,
        "a function around it that passes all arguments on": wrapper,
        "... and looks for a context and for listeners": looking,
        "... and at the type of what comes back": checking,
        **policies(function),
    }


class Reading(Policy):
    """What Retry has to do before the first attempt."""

    async def around(self, call: Call[T], ctx: Context) -> T:
        if clock.now() >= ctx.deadline:
            raise RuntimeError("no deadline is measured here")
        return await call(ctx)


def policies(function: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """Return the function under one policy each."""
    return {
        "all that, and a policy that does nothing": Through()(function),
        "all that, and a policy that reads the clock": Reading()(function),
        "all that, and Fallback": Fallback(None)(function),
        "all that, and Bulkhead": Bulkhead(LIMIT)(function),
        "all that, and CircuitBreaker": CircuitBreaker()(function),
        "all that, and Retry": Retry(on=FAILURE)(function),
    }
