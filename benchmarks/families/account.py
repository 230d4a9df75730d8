"""Where the time of a call goes: the steps of an execution, added one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from benchmarks import timing
from benchmarks.cells import Result, Wanted
from benchmarks.families.layers import Through
from benchmarks.functions import FAILURE, LIMIT, answering
from benchmarks.libraries import Library
from benchmarks.timing import ASYNCIO, SYNC, Effort
from resilience import Bulkhead, Call, CircuitBreaker, Context, Fallback, Policy, Retry
from resilience.clock import clock

T = TypeVar("T")

GROUP = "where the time goes"
CELL = "so far"


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    for world in (SYNC, ASYNCIO):
        if wanted(f"{world}, {GROUP}"):

            async def main(world: str = world) -> dict[str, list[float]]:
                return await timing.interleaved(world, steps(answering(world), world), effort)

            yield Result(f"{world}, {GROUP}", CELL, "ns", timing.run(world, main))


def steps(function: Callable[..., Any], world: str) -> dict[str, Callable[[], Any]]:
    """Return the function, and the function with more and more around it."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    async def task_wrapper(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return {
        "the function": function,
        "a function around it that passes all arguments on": wrapper if world == SYNC else task_wrapper,
        "an execution: a context, and a policy that does nothing": Through()(function),
        "the same, and a second such policy": Through().wrap(Through())(function),
        "an execution, and a policy that reads the clock": Reading()(function),
        "an execution, and Fallback": Fallback(None)(function),
        "an execution, and Bulkhead": Bulkhead(LIMIT)(function),
        "an execution, and CircuitBreaker": CircuitBreaker()(function),
        "an execution, and Retry": Retry(on=FAILURE)(function),
    }


class Reading(Policy):
    """Does what Retry must do before the first attempt."""

    async def around(self, call: Call[T], ctx: Context) -> T:
        if clock.now() >= ctx.deadline:
            raise RuntimeError("no deadline is measured here")
        return await call(ctx)
