"""A short soak: everything fails for a while, and nothing is left behind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.contention import soak

#: A busy machine delays calls past their deadlines.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(f"ignore:{soak.LATE}:RuntimeWarning")]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="resources are counted in /proc")
def test_nothing_grows_during_failures_of_all_kinds() -> None:
    """Threads, tasks, timers, files, objects and memory are as before; permits and probes are released."""
    lines: list[str] = []
    measured, callers, subject = soak.run(2.0, 3, lines.append)
    assert soak.complaints(measured[1], measured[-1]) == []
    assert len(lines) == 1 + len(measured)
    outcomes = sum(callers.outcomes, Counter[str]())
    assert {"rejected", "instead", "out of time", "answered", "failed", "cancelled"} <= set(outcomes)
    assert subject.transitions > 0


def test_growth_and_held_resources_are_reported() -> None:
    flat = soak.Measurement(**dict.fromkeys(soak.Measurement.__annotations__, 0))
    worse = soak.Measurement(**dict.fromkeys(soak.Measurement.__annotations__, 10**6))
    assert soak.complaints(flat, flat) == []
    reported = {text.split()[0].rstrip(":") for text in soak.complaints(flat, worse)}
    assert reported == set(soak.Measurement.__annotations__) - {"calls", "workers"}
