"""Calls that do not go well: refused, answered in their place, or made again."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cells import Cell, Result, Wanted, full, measure_each, opened, with_function
from benchmarks.functions import failing, failing_twice
from benchmarks.libraries import Library
from benchmarks.timing import WORLDS, Effort

CELLS = [
    cell
    for world in WORLDS
    for cell in (
        Cell(f"{world}, failure", "open circuit", world, entry="breaker", setting=opened),
        Cell(f"{world}, failure", "full bulkhead", world, entry="bulkhead of one", setting=full),
        Cell(f"{world}, failure", "two retries", world, entry="retry at once", setting=with_function(failing_twice)),
        Cell(f"{world}, failure", "fallback", world, entry="fallback", setting=with_function(failing), expected=None),
    )
]


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    return measure_each(CELLS, libraries, effort, wanted)
