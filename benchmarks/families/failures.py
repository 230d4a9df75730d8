"""Calls that fail: refused, answered by a fallback, retried, cut off, or with an error that reaches the caller."""

from __future__ import annotations

from benchmarks.cells import Cell, full, opened, raising, with_function
from benchmarks.functions import FAILURE, failing, failing_once, failing_twice, never_answering
from benchmarks.timing import ASYNCIO, WORLDS

CELLS = [
    cell
    for world in WORLDS
    for cell in (
        Cell(f"{world}, failure", "open circuit", world, entry="breaker", setting=opened),
        Cell(f"{world}, failure", "full bulkhead", world, entry="bulkhead of one", setting=full),
        Cell(f"{world}, failure", "one retry", world, entry="retry at once", setting=with_function(failing_once)),
        Cell(f"{world}, failure", "two retries", world, entry="retry at once", setting=with_function(failing_twice)),
        Cell(f"{world}, failure", "fallback", world, entry="fallback", setting=with_function(failing), expected=None),
        Cell(f"{world}, failure", "through four", world, entry="four, unanswered", setting=raising(failing, FAILURE)),
    )
]
CELLS += [
    Cell(
        f"{ASYNCIO}, time out",
        "a timeout fires",
        ASYNCIO,
        entry="short timeout",
        setting=raising(never_answering, Exception),
    )
]
