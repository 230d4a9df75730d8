"""Four policies, entered in each way there is: as a decorator, by `call`, by `execute`, through a proxy."""

from __future__ import annotations

from benchmarks.cells import Cell, fine
from benchmarks.timing import WORLDS

ENTRANCES = {"decorator": "four", "call": "four, call", "execute": "four, execute", "proxy": "four, proxy"}

CELLS = [
    Cell(f"{world}, four by", name, world, entry=entry, setting=fine)
    for world in WORLDS
    for name, entry in ENTRANCES.items()
]
