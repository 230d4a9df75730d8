"""The command line: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import clients, families, libraries, report
from benchmarks.cells import Result
from benchmarks.report import Run
from benchmarks.timing import SMOKE, Effort

DESCRIPTION = """
Measure this library side by side with hand-written code and with other libraries
(pip install -r benchmarks/requirements.txt; missing packages are left out).
In brackets after a time: ours / theirs, the median of the ratios within each round.
"""


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    runs = [run for path in options.read for run in _read(path)] or [_measured(options)]
    if options.json:
        options.json.write_text(json.dumps([run.to_json() for run in runs]) + "\n", encoding="utf-8")
    if options.page:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(report.refreshed(page, runs), encoding="utf-8")
    if options.plot:
        from benchmarks.plot import draw

        draw(runs, options.plot)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks", description=DESCRIPTION)
    parser.add_argument("--smoke", action="store_true", help="check in a few seconds that everything runs; no numbers")
    parser.add_argument("--rounds", type=int, help=f"the number of samples per contestant (default {Effort.rounds})")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="only cells whose names match: 'sync, *'")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all samples to this file")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the picture (needs matplotlib)")
    parser.add_argument("--page", metavar="FILE", type=Path, help="replace the tables on this Markdown page")
    parser.add_argument("--read", metavar="FILE", type=Path, nargs="+", default=[], help="show earlier runs instead")
    return parser


def _measured(options: argparse.Namespace) -> Run:
    effort = SMOKE if options.smoke else Effort()
    if options.rounds:
        effort = dataclasses.replace(effort, rounds=options.rounds)
    contestants, missing = libraries.load()
    about = report.about(contestants, [*missing, *clients.missing()], effort.rounds)
    return _shown(about, families.measure(contestants, effort, _wanted(options.only)), judged=not options.smoke)


def _wanted(pattern: str) -> Callable[[str], bool]:
    return lambda name: fnmatch.fnmatchcase(name, f"*{pattern}*")


def _read(path: Path) -> list[Run]:
    runs = [Run.from_json(data) for data in json.loads(path.read_text(encoding="utf-8"))]
    return [_shown(run.about, run.results, judged=True) for run in runs]


def _shown(about: dict[str, Any], results: Iterable[Result], *, judged: bool) -> Run:
    """Print each table as soon as it is complete."""
    run = Run(about, [])
    print(report.introduction(about), flush=True)
    for group in report.grouped(results):
        run.results.extend(group)
        print(f"\n{report.table(group)}", flush=True)
    if not judged:
        print("\nA smoke run: the numbers above are meaningless.")
    elif run.verdicts:
        print(f"\n{report.bars(run.verdicts)}")
    return run


if __name__ == "__main__":
    main()
