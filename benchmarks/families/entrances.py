"""Four policies, entered in each way there is: as a decorator, by `call`, by `execute`, through a proxy."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cells import Cell, Result, Wanted, fine, measure_each
from benchmarks.libraries import Library
from benchmarks.timing import WORLDS, Effort

ENTRANCES = {"decorator": "four", "call": "four, call", "execute": "four, execute", "proxy": "four, proxy"}

CELLS = [
    Cell(f"{world}, four by", name, world, entry=entry, setting=fine)
    for world in WORLDS
    for name, entry in ENTRANCES.items()
]


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    return measure_each(CELLS, libraries, effort, wanted)
