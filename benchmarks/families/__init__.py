"""The families of cells, in the order in which they are measured and reported."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cells import Result, Wanted, measure_each
from benchmarks.families import (
    account,
    alone,
    blocks,
    calls,
    clients,
    entrances,
    failures,
    imports,
    layers,
    limits,
    memory,
    queues,
    repeats,
    scale,
    stacks,
    start,
    telemetry,
    threads,
)
from benchmarks.libraries import Library
from benchmarks.timing import Effort

CELLS = [*stacks.CELLS, *alone.CELLS, *failures.CELLS, *blocks.CELLS, *entrances.CELLS, *calls.CELLS, *start.CELLS]


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    """Measure the cells that are wanted. The results of one table are adjacent."""
    yield from measure_each(CELLS, libraries, effort, wanted)
    for family in (
        *(account, layers, limits, repeats, threads, queues, telemetry, memory),
        *(scale, start, imports, clients),
    ):
        yield from family.measure(libraries, effort, wanted)
