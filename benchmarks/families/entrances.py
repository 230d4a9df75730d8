"""Four policies, used in every possible way: as a decorator, with `call`, with `execute`, through a proxy."""

from __future__ import annotations

from benchmarks.cells import Cell, fine
from benchmarks.timing import WORLDS

ENTRANCES = {"decorator": "four", "call": "four, call", "execute": "four, execute", "proxy": "four, proxy"}

CELLS = [
    Cell(f"{world}, four by", name, world, entry=entry, setting=fine)
    for world in WORLDS
    for name, entry in ENTRANCES.items()
]
