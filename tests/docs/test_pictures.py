"""The texts in the picture of the benchmarks do not overlap."""

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
    """Neither one another nor the edge, in the picture of the documentation."""
    from matplotlib import pyplot
    from matplotlib.text import Text

    written = (ROOT / "docs" / "performance.json").read_text(encoding="utf-8")
    runs = [Run.from_json(data) for data in json.loads(written)]
    monkeypatch.setattr(pyplot, "close", lambda *_: None)
    plot.draw(runs, tmp_path / "picture.svg")
    figure = pyplot.gcf()
    renderer: Any = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    titles = [text for text in figure.findobj(Text) if text.get_text() in _titles(runs)]
    boxes = {f"{title.get_text()} ({number})": title.get_window_extent(renderer) for number, title in enumerate(titles)}
    assert len(boxes) >= len(runs) * (len(plot.PANELS) + 2) + 1
    assert [(a, b) for a, b in combinations(boxes, 2) if boxes[a].overlaps(boxes[b])] == []
    assert [title for title, box in boxes.items() if box.x0 < 0 or box.x1 > figure.bbox.x1] == []


def _titles(runs: list[Run]) -> set[str]:
    panels = {title for _, title in plot.PANELS}
    return panels | {run.about["python"] for run in runs} | {"microseconds per call", plot.CHAINS}
