"""Chains of one to ten policies: the cost of a layer, and whether the cost of a chain is linear."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any, TypeVar

from benchmarks import timing
from benchmarks.cells import Result, Wanted
from benchmarks.functions import FAILURE, LIMIT, SECONDS, answering
from benchmarks.libraries import Library
from benchmarks.timing import SYNC, WORLDS, Effort
from resilience import Bulkhead, Call, CircuitBreaker, Context, Fallback, Policy, Retry, Timeout

T = TypeVar("T")

LENGTHS = range(1, 11)

CUSTOM = "custom policies"
REAL = "real policies"
HAND_WRITTEN = "nested functions"


class Through(Policy):
    """A user's policy that does nothing."""

    async def around(self, call: Call[T], ctx: Context) -> T:
        return await call(ctx)


def custom(length: int, world: str) -> Callable[[], Any]:
    return Policy.wrap(*(Through() for _ in range(length)))(answering(world))


def real(length: int, world: str) -> Callable[[], Any]:
    """Chain two policies of each kind, in the usual order, so that every layer is another policy."""
    kinds: tuple[Callable[[], Policy[Any]], ...] = (
        lambda: Fallback(None),
        lambda: Retry(on=FAILURE),
        CircuitBreaker,
        lambda: Bulkhead(LIMIT),
        lambda: Timeout(SECONDS, cooperative=True),
    )
    return Policy.wrap(*(kind() for kind in islice(cycle(kinds), length)))(answering(world))


def hand_written(length: int, world: str) -> Callable[[], Any]:
    """Chain functions that only call one another, as a lower bound on the cost of any layer."""
    function = answering(world)
    for _ in range(length):
        function = _around(function) if world == SYNC else _around_task(function)
    return function


def _around(inner: Callable[[], Any]) -> Callable[[], Any]:
    def outer() -> Any:
        return inner()

    return outer


def _around_task(inner: Callable[[], Any]) -> Callable[[], Any]:
    async def outer() -> Any:
        return await inner()

    return outer


CHAINS = {CUSTOM: custom, REAL: real, HAND_WRITTEN: hand_written}


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    for world in WORLDS:
        if wanted(f"{world}, chain"):
            yield from _measure(world, effort)


def _measure(world: str, effort: Effort) -> Iterator[Result]:
    async def main() -> dict[str, list[float]]:
        functions = {f"{kind} {n}": chain(n, world) for kind, chain in CHAINS.items() for n in LENGTHS}
        return await timing.interleaved(world, functions, effort)

    samples = timing.run(world, main)
    costs = {kind: [samples[f"{kind} {n}"] for n in LENGTHS] for kind in CHAINS}
    for kind, of_kind in costs.items():
        yield Result(f"{world}, chain", kind, "ns", dict(zip(map(str, LENGTHS), of_kind, strict=True)))
    slopes = {kind: [line(one_round).slope for one_round in zip(*costs[kind], strict=True)] for kind in CHAINS}
    bends = {kind: [bend([statistics.median(cost) for cost in costs[kind]])] for kind in CHAINS}
    yield Result(f"{world}, layer", "cost", "ns", slopes)
    yield Result(f"{world}, layer", "largest deviation from a straight line, %", "%", bends)


def line(costs: Sequence[float]) -> statistics.LinearRegression:
    """Return the linear regression of the costs of one to ten layers."""
    return statistics.linear_regression(LENGTHS, costs)


def bend(costs: Sequence[float]) -> float:
    """Return the largest deviation of a cost from the line, in per cent of the line."""
    slope, intercept = line(costs)
    return max(abs(cost / (intercept + slope * n) - 1) for n, cost in zip(LENGTHS, costs, strict=True)) * 100
