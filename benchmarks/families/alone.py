"""Each policy alone, around a function that succeeds."""

from __future__ import annotations

from benchmarks.cells import Cell, fine
from benchmarks.timing import WORLDS

POLICIES = (
    "retry",
    "retry, budget",
    "hedge",
    "breaker",
    "breaker, ratio",
    "bulkhead",
    "rate",
    "fallback",
    "deadline",
    "timeout",
)

CELLS = [
    Cell(f"{world}, one policy", policy, world, entry=policy, setting=fine) for world in WORLDS for policy in POLICIES
]
