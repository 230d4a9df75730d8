"""The picture: the time of a request under each handler, and the throughput of each handler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cells import Result
from benchmarks.handler.apps import HANDLERS, PLAIN

#: The colours of our handlers, those of other libraries, and the one without policies.
OURS, OTHERS, BARE = "#0b6e4f", "#b8b8b8", "#555555"
_COLOURS = {PLAIN: BARE, "the same, of nopanic": OTHERS, "httpx-retries": OTHERS}


def draw(results: list[Result], path: Path) -> None:
    """Write the picture, with one panel for each number."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "benchmarks", "font.size": 8, "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(results), figsize=(10.4, 2.6), layout="constrained", sharey=True)
    for axes, result in zip(panels, results, strict=True):
        _bars(axes, result)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _bars(axes: Any, result: Result) -> None:
    names = [name for name in reversed(HANDLERS) if name in result.samples]
    medians = [result.median(name) for name in names]
    drawn = axes.barh(names, medians, color=[_COLOURS.get(name, OURS) for name in names])
    axes.bar_label(drawn, [f" {median:,.0f}" for median in medians])
    axes.set_title(result.cell, loc="left")
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)
