"""The picture of one or several runs: the cost of a call under four and five policies, and of each layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cells import Result
from benchmarks.families import layers
from benchmarks.libraries import HAND_WRITTEN, HAND_WRITTEN_COUNTING, OURS, STACK
from benchmarks.report import Run

PANELS = (
    ("sync, stack: four", "four policies, blocking"),
    ("sync, stack: five, deadline", "five policies with a deadline, blocking"),
    ("sync, stack: five, timeout", "five policies with an enforced timeout, blocking"),
    ("asyncio, stack: four", "four policies, asyncio"),
    ("asyncio, stack: five, timeout", "five policies with a timeout, asyncio"),
)

CHAINS = "chains of one to ten policies, blocking"

#: Our library and hand-written code have their own colours, all others the same one.
COLOURS = {OURS: "#0b6e4f", HAND_WRITTEN: "#555555", HAND_WRITTEN_COUNTING: "#555555"}
OTHERS = "#b8b8b8"

SHORT = {STACK: "tenacity + ..."}


def draw(runs: list[Run], path: Path) -> None:
    """Write the picture, with one column of panels per run."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "benchmarks", "font.size": 8, "svg.fonttype": "none", "axes.titlesize": "medium"}
    )
    figure = _figure(runs)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _figure(runs: list[Run]) -> Any:
    """Lay out one column per run, headed by the version of its Python."""
    from matplotlib import pyplot

    height = len(PANELS) + 1
    figure = pyplot.figure(figsize=(5.2 * len(runs), 2.1 * height), layout="constrained")
    figure.suptitle("microseconds per call", fontsize="medium")
    for column, run in zip(figure.subfigures(1, len(runs), squeeze=False)[0], runs, strict=True):
        column.suptitle(run.about["python"], fontsize="medium", color="#888888")
        _column(column.subplots(height), run)
    return figure


def _column(grid: Any, run: Run) -> None:
    results = {result.name: result for result in run.results}
    for axes, (name, title) in zip(grid, PANELS, strict=False):
        if name in results:
            _bars(axes, results[name])
        axes.set_title(title, loc="left")
    _lines(grid[-1], results)
    grid[-1].set_title(CHAINS, loc="left")


def _bars(axes: Any, result: Result) -> None:
    names = sorted(result.samples, key=result.median, reverse=True)
    medians = [result.median(name) / 1000 for name in names]
    colours = [COLOURS.get(name, OTHERS) for name in names]
    drawn = axes.barh([SHORT.get(name, name) for name in names], medians, color=colours)
    axes.bar_label(drawn, [f" {median:.3g}" for median in medians])
    axes.margins(x=0.15)
    _without_frame(axes)


def _lines(axes: Any, results: dict[str, Result]) -> None:
    for kind, style in ((layers.REAL, "-"), (layers.CUSTOM, "--"), (layers.HAND_WRITTEN, ":")):
        result = results.get(f"sync, chain: {kind}")
        if result is not None:
            costs = [result.median(length) / 1000 for length in result.samples]
            colour = COLOURS[HAND_WRITTEN if kind == layers.HAND_WRITTEN else OURS]
            axes.plot(layers.LENGTHS, costs, style, color=colour, marker=".", label=kind)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    _without_frame(axes)


def _without_frame(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
