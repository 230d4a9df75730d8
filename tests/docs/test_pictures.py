"""The picture of the benchmarks can be read: no text in it lies upon another."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot
from benchmarks.report import Run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_titles_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one another nor the edge of the picture, in that of the documentation."""
    from matplotlib import pyplot
    from matplotlib.text import Text

    runs = [Run.from_json(it) for it in json.loads((ROOT / "docs" / "performance.json").read_text(encoding="utf-8"))]
    monkeypatch.setattr(pyplot, "close", lambda *_: None)
    plot.draw(runs, tmp_path / "picture.svg")
    figure = pyplot.gcf()
    renderer: Any = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    titles = [it for it in figure.findobj(Text) if it.get_text() in _titles(runs)]
    boxes = {f"{it.get_text()} ({number})": it.get_window_extent(renderer) for number, it in enumerate(titles)}
    assert len(boxes) >= len(runs) * (len(plot.PANELS) + 2) + 1
    assert [(a, b) for a, b in combinations(boxes, 2) if boxes[a].overlaps(boxes[b])] == []
    assert [it for it, box in boxes.items() if box.x0 < 0 or box.x1 > figure.bbox.x1] == []


def _titles(runs: list[Run]) -> set[str]:
    panels = {title for _, title in plot.PANELS}
    return panels | {run.about["python"] for run in runs} | {"microseconds per call", plot.CHAINS}
