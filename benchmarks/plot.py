"""The picture of a run, or of several: what a call under four and five policies costs, and what a layer adds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.cells import Result
from benchmarks.families import layers
from benchmarks.libraries import BY_HAND, BY_HAND_COUNTING, OURS
from benchmarks.report import Run

PANELS = (
    ("sync, stack: four", "four policies, blocking"),
    ("sync, stack: five, deadline", "five policies with a deadline, blocking"),
    ("sync, stack: five, timeout", "five policies with an enforced timeout, blocking"),
    ("asyncio, stack: four", "four policies, asyncio"),
    ("asyncio, stack: five, timeout", "five policies with a timeout, asyncio"),
)

COLOURS = {OURS: "#0b6e4f", BY_HAND: "#555555", BY_HAND_COUNTING: "#555555"}
OTHERS = "#b8b8b8"
"""Ours stands out, and hand-written code; the others are one shade."""


def draw(runs: list[Run], path: Path) -> None:
    """Write the picture: one row of panels per run."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "benchmarks", "font.size": 8, "svg.fonttype": "none"})
    from matplotlib import pyplot

    width, height = len(PANELS) + 1, len(runs)
    figure, grid = pyplot.subplots(height, width, figsize=(4 * width, 2.6 * height), squeeze=False)
    for row, run in zip(grid, runs, strict=True):
        results = {result.name: result for result in run.results}
        for axes, (name, title) in zip(row, PANELS, strict=False):
            if name in results:
                _bars(axes, results[name])
            axes.set_title(f"{title}\n{run.about['python']}", loc="left")
        _lines(row[-1], results)
        row[-1].set_title(f"chains of one to ten, blocking\n{run.about['python']}", loc="left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _bars(axes: Any, result: Result) -> None:
    names = sorted(result.samples, key=result.median, reverse=True)
    medians = [result.median(name) / 1000 for name in names]
    drawn = axes.barh([_short(name) for name in names], medians, color=[COLOURS.get(name, OTHERS) for name in names])
    axes.bar_label(drawn, [f" {median:.3g}" for median in medians])
    axes.margins(x=0.15)
    axes.set_xlabel("microseconds per call")
    _without_frame(axes)


def _lines(axes: Any, results: dict[str, Result]) -> None:
    for kind, style in ((layers.REAL, "-"), (layers.CUSTOM, "--"), (layers.BY_HAND, ":")):
        result = results.get(f"sync, chain: {kind}")
        if result is not None:
            lengths: Iterable[int] = map(int, result.samples)
            costs = [result.median(length) / 1000 for length in result.samples]
            colour = COLOURS[BY_HAND if kind == layers.BY_HAND else OURS]
            axes.plot(list(lengths), costs, style, color=colour, marker=".", label=kind)
    axes.set_xlabel("policies")
    axes.set_ylabel("microseconds per call")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    _without_frame(axes)


def _short(name: str) -> str:
    return name.replace(" + semaphore + timeout", "\n+ semaphore + timeout")


def _without_frame(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
