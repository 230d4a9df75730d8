"""The cost that limits, throttles and chaos add to a call that they admit, beside a policy that does nothing."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import timing
from benchmarks.cells import Result, Wanted
from benchmarks.families.layers import Through
from benchmarks.functions import LIMIT, SECONDS, answering
from benchmarks.libraries import Library
from benchmarks.timing import WORLDS, Effort
from resilience import AdaptiveLimit, AdaptiveThrottle, Bulkhead, Chaos, Policy

GROUP = "limits"
CALL, ADDED = "a call", "added to a policy that does nothing"

NOTHING, BULKHEAD, LIMITED, THROTTLE, CHAOS_OFF = (
    "nothing",
    "Bulkhead",
    "AdaptiveLimit",
    "AdaptiveThrottle",
    "Chaos, off",
)


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    for world in WORLDS:
        if wanted(f"{world}, {GROUP}"):
            yield from _measure(world, effort)


def _measure(world: str, effort: Effort) -> Iterator[Result]:
    policies: dict[str, Policy[object]] = {
        NOTHING: Through(),
        BULKHEAD: Bulkhead(LIMIT),
        LIMITED: AdaptiveLimit(SECONDS),
        THROTTLE: AdaptiveThrottle(),
        CHAOS_OFF: Chaos(delay=SECONDS),
    }

    async def main() -> dict[str, list[float]]:
        functions = {name: policy(answering(world)) for name, policy in policies.items()}
        return await timing.interleaved(world, functions, effort)

    samples = timing.run(world, main)
    nothing = samples[NOTHING]
    added = {
        name: [cost - base for cost, base in zip(costs, nothing, strict=True)]
        for name, costs in samples.items()
        if name != NOTHING
    }
    yield Result(f"{world}, {GROUP}", CALL, "ns", samples)
    yield Result(f"{world}, {GROUP}", ADDED, "ns", added)
