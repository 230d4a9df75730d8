"""Four and five policies around a function that answers, with and without a listener."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cells import Cell, Result, Wanted, fine, measure_each
from benchmarks.libraries import Library
from benchmarks.timing import WORLDS, Effort

STACKS = ("four", "four, listened", "five, deadline", "five, timeout")

CELLS = [Cell(f"{world}, stack", stack, world, entry=stack, setting=fine) for world in WORLDS for stack in STACKS]


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    return measure_each(CELLS, libraries, effort, wanted)
