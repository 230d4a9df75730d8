"""Calls that do not go well: refused, answered in their place, or made again."""

from __future__ import annotations

from benchmarks.cells import Cell, full, opened, with_function
from benchmarks.functions import failing, failing_twice
from benchmarks.timing import WORLDS

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
