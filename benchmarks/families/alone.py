"""Each policy alone, around a function that answers."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cells import Cell, Result, Wanted, fine, measure_each
from benchmarks.libraries import Library
from benchmarks.timing import WORLDS, Effort

POLICIES = ("retry", "breaker", "breaker, ratio", "bulkhead", "fallback", "deadline", "timeout")

CELLS = [
    Cell(f"{world}, one policy", policy, world, entry=policy, setting=fine) for world in WORLDS for policy in POLICIES
]


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    return measure_each(CELLS, libraries, effort, wanted)
