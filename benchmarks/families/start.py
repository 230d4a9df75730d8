"""The start: the cost of the first call of a process, and of a pipeline that is made and called once."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.cells import Cell, Result, Wanted
from benchmarks.families.imports import ROOT
from benchmarks.libraries import OURS, Library, Protect
from benchmarks.timing import ASYNCIO, SYNC, Effort

GROUP = "first call"

#: The contestants, and their modules.
MODULES = {OURS: "ours", "resilix": "resilix", "nopanic": "nopanic", "pyresilience": "pyresilience"}

PROGRAM = """
import asyncio, time
from benchmarks.functions import answering
from benchmarks.libraries.{module} import library

protect, function = library.entries["four", {world!r}], answering({world!r})
async def main():
    began = time.perf_counter_ns()
    outcome = protect(function)()
    if {world!r} == "asyncio":
        await outcome
    print(time.perf_counter_ns() - began)
asyncio.run(main())
"""


@asynccontextmanager
async def made(protect: Protect, world: str) -> AsyncIterator[Callable[[], Any]]:
    """Make a pipeline, put it around a function and call it once, which is the cost of a pipeline for each call."""

    def make_and_call() -> Any:
        return protect(lambda ctx=None: 42)()

    yield make_and_call


CELLS = [Cell("made and called once", "five, deadline", SYNC, "five, deadline", setting=made)]


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    for world in (SYNC, ASYNCIO):
        if not wanted(f"{GROUP}: {world}, four"):
            continue
        contestants = [it.name for it in libraries if it.name in MODULES]
        samples: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(max(1, effort.rounds // 2)):
            random.shuffle(contestants)
            for name in contestants:
                samples[name].append(_first_call(MODULES[name], world))
        yield Result(GROUP, f"{world}, four", "ns", samples)


def _first_call(module: str, world: str) -> float:
    """Return the nanoseconds of the first call of a new process, including the decoration but not the imports."""
    program = PROGRAM.format(module=module, world=world)
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)
    return float(run.stdout)
