"""Reports of a run: Markdown tables for people, and one JSON object for programs."""

from __future__ import annotations

import itertools
import os
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.bars import Verdict, judge
from benchmarks.cells import Result
from benchmarks.libraries import OURS, Library


@dataclass(frozen=True)
class Run:
    """The results of one run.

    :param about: the machine, the interpreter, the versions, the number of rounds.
    :param results: the results of the cells, in the order in which they were measured.
    """

    about: dict[str, Any]
    results: list[Result]

    @property
    def verdicts(self) -> list[Verdict]:
        return list(judge(self.results, self.about["python"]))

    def to_json(self) -> dict[str, Any]:
        return {
            "about": self.about,
            "bars": [
                {
                    "cell": verdict.bar.cell,
                    "against": verdict.bar.against,
                    "opponent": verdict.opponent,
                    "limit": verdict.bar.limit,
                    "value": rounded(verdict.value),
                    "met": verdict.met,
                }
                for verdict in self.verdicts
            ],
            "cells": [
                {
                    "group": it.group,
                    "cell": it.cell,
                    "unit": it.unit,
                    "samples": {name: [rounded(value) for value in values] for name, values in it.samples.items()},
                }
                for it in self.results
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        cells = data["cells"]
        return cls(data["about"], [Result(it["group"], it["cell"], it["unit"], it["samples"]) for it in cells])


def rounded(value: float) -> float:
    """Round to four significant digits, because more would be noise."""
    return float(f"{value:.4g}")


def about(libraries: Iterable[Library], missing: list[str], rounds: int) -> dict[str, Any]:
    """Return the machine, the interpreter and the versions of a run."""
    packages = dict.fromkeys(package for library in libraries for package in library.packages)
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "versions": {package: metadata.version(package) for package in packages},
        "missing": missing,
        "rounds": rounds,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"


# --- tables ---


def introduction(about: dict[str, Any]) -> str:
    """Return the table of the machine, the interpreter and the versions."""
    rows = [["measured", ""], ["Python", about["python"]], ["machine", about["machine"]]]
    rows += [["rounds", str(about["rounds"])], *([package, version] for package, version in about["versions"].items())]
    if about["missing"]:
        rows.append(["not installed", ", ".join(about["missing"])])
    return _aligned(rows)


def table(results: list[Result]) -> str:
    """Return the table of one group: a row for each contestant, with ours / theirs in brackets."""
    contestants = dict.fromkeys(name for result in results for name in result.samples)
    rows = [[results[0].group, *(result.cell for result in results)]]
    rows += [[name, *(_entry(result, name) for result in results)] for name in contestants]
    return _aligned(rows)


def bars(verdicts: Iterable[Verdict]) -> str:
    """Return the table of the bars."""
    rows = [["cell", "against", "limit", "measured", ""]]
    for verdict in verdicts:
        bar = verdict.bar
        against = bar.against if verdict.opponent == bar.against else f"{bar.against}: {verdict.opponent}"
        limit = f"{'at least' if bar.at_least else 'at most'} {_quantity(bar.limit, bar.unit)}"
        if bar.unit not in {"", "ns"}:
            limit += f" {bar.unit}"
        rows.append([bar.title, against, limit, _quantity(verdict.value, bar.unit), "pass" if verdict.met else "FAIL"])
    return _aligned(rows)


def refreshed(page: str, runs: Sequence[Run]) -> str:
    """Return a Markdown page with new tables: those of the last run, and the bars of each run in turn."""
    shown = runs[-1]
    tables = [introduction(shown.about), *map(table, grouped(shown.results))]
    by_heading = {_heading(it): it for it in tables}
    judged = (bars(run.verdicts) for run in runs)

    def replace(found: re.Match[str]) -> str:
        heading = _heading(found[0])
        return (next(judged) if heading == "cell" else by_heading.get(heading, found[0].rstrip())) + "\n"

    return re.sub(r"(?:^\|.*\n)+", replace, page, flags=re.MULTILINE)


def grouped(results: Iterable[Result]) -> Iterator[list[Result]]:
    """Group the results by table; those of one table are adjacent."""
    return (list(group) for _, group in itertools.groupby(results, key=lambda result: result.group))


def _heading(table: str) -> str:
    return table.split("|")[1].strip()


def _entry(result: Result, name: str) -> str:
    if name not in result.samples:
        return ""
    text = _quantity(result.median(name), result.unit)
    if name == OURS or OURS not in result.samples or result.unit != "ns":
        return text
    return f"{text} ({result.ratio(OURS, name):.2f})"


def _quantity(value: float, unit: str) -> str:
    if unit != "ns":
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"  # the heading names the unit
    for limit, scale, name in ((1e3, 1, "ns"), (1e6, 1e3, "us"), (1e9, 1e6, "ms")):
        if value < limit:
            return f"{value / scale:.3g} {name}"
    return f"{value / 1e9:.3g} s"


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows]
    lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines)
