"""The cost that a budget and a cap add to a call that succeeds at once, and the cost of a call under a hedge."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import timing
from benchmarks.cells import Result, Wanted
from benchmarks.families.layers import Through
from benchmarks.functions import SECONDS, answering
from benchmarks.libraries import Library
from benchmarks.timing import WORLDS, Effort
from resilience import Hedge, Policy, RepeatCap, Retry, Timeout

GROUP = "repeats"
CALL, ADDED, ADDED_TO_RETRY = "a call", "added to a policy that does nothing", "added to a Retry"

NOTHING, RETRY, BUDGET, CAP, TIMEOUT, HEDGE = (
    "nothing",
    "Retry",
    "Retry, budget",
    "RepeatCap",
    "Timeout",
    "Hedge",
)


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    for world in WORLDS:
        if wanted(f"{world}, {GROUP}"):
            yield from _measure(world, effort)


def _measure(world: str, effort: Effort) -> Iterator[Result]:
    policies: dict[str, Policy[object]] = {
        NOTHING: Through(),
        RETRY: Retry(),
        BUDGET: Retry(budget=0.1),
        CAP: RepeatCap(2),
        TIMEOUT: Timeout(SECONDS),
        HEDGE: Hedge(SECONDS),
    }

    async def main() -> dict[str, list[float]]:
        functions = {name: policy(answering(world)) for name, policy in policies.items()}
        return await timing.interleaved(world, functions, effort)

    samples = timing.run(world, main)

    def added(name: str, base: str) -> dict[str, list[float]]:
        return {name: [cost - it for cost, it in zip(samples[name], samples[base], strict=True)]}

    yield Result(f"{world}, {GROUP}", CALL, "ns", samples)
    yield Result(f"{world}, {GROUP}", ADDED, "ns", added(CAP, NOTHING))
    yield Result(f"{world}, {GROUP}", ADDED_TO_RETRY, "ns", added(BUDGET, RETRY))
