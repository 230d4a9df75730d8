"""The time of an import in a new process: from nothing, and after an import of anyio."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cells import Result, Wanted
from benchmarks.libraries import Library
from benchmarks.timing import Effort

GROUP = "import"
ROOT = Path(__file__).parents[2]

#: The modules that are imported before the measurement.
BEFORE = {"from nothing": (), "after anyio": ("anyio",)}

PROGRAM = """
import time
{before}
began = time.perf_counter_ns()
{imports}
print(time.perf_counter_ns() - began)
"""


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    if not wanted(GROUP):
        return
    contestants = {library.name: library.imports for library in libraries if library.imports} | {"anyio": ("anyio",)}
    if effort.rounds <= 2:
        contestants = {name: contestants[name] for name in (libraries[0].name, "anyio")}
    samples: dict[str, dict[str, list[float]]] = {where: {name: [] for name in contestants} for where in BEFORE}
    order = [(where, name) for where in BEFORE for name in contestants]
    for modules in contestants.values():
        import_time((), modules)  # writes the bytecode
    for _ in range(max(1, effort.rounds // 2)):
        random.shuffle(order)
        for where, name in order:
            samples[where][name].append(import_time(BEFORE[where], contestants[name]))
    del samples["after anyio"]["anyio"]
    for where in BEFORE:
        yield Result(GROUP, where, "ns", samples[where])


def import_time(before: tuple[str, ...], modules: tuple[str, ...]) -> float:
    """Return the nanoseconds that a new interpreter takes to import the modules."""
    program = PROGRAM.format(before=_statements(before), imports=_statements(modules))
    # With bytecode, which pip writes for installed packages, even if this process writes none.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, check=True, capture_output=True)
    return float(run.stdout)


def _statements(modules: tuple[str, ...]) -> str:
    return "\n".join(f"import {module}" for module in modules)
