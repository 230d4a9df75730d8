"""Four and five policies around a function that succeeds, with and without a listener."""

from __future__ import annotations

from benchmarks.cells import Cell, fine
from benchmarks.timing import WORLDS

STACKS = ("four", "four, listened", "five, deadline", "five, timeout")

CELLS = [Cell(f"{world}, stack", stack, world, entry=stack, setting=fine) for world in WORLDS for stack in STACKS]
