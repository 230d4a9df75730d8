"""Blocks instead of calls: `with deadline(...)`, `with breaker.guard()`, `with bulkhead.slot()`."""

from __future__ import annotations

from benchmarks.cells import Cell, fine
from benchmarks.timing import ASYNCIO, SYNC

BLOCKS = ("deadline", "guard", "slot")

CELLS = [
    Cell(f"{world}, block", block, world, entry=f"{block}, block", setting=fine)
    for world in (SYNC, ASYNCIO)
    for block in BLOCKS
]
