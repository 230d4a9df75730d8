"""The soak in short: everything goes wrong for a moment, and nothing is left behind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.contention import soak

#: A busy machine holds calls up for longer than they have.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(f"ignore:{soak.LATE}:RuntimeWarning")]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="resources are counted in /proc")
def test_nothing_grows_while_everything_goes_wrong() -> None:
    """Threads, tasks, timers, files, objects and memory are what they were; permits and probes are back."""
    lines: list[str] = []
    measured, callers, subject = soak.run(2.0, 3, lines.append)
    assert soak.complaints(measured[1], measured[-1]) == []
    assert len(lines) == 1 + len(measured)
    outcomes = sum(callers.outcomes, Counter[str]())
    assert {"rejected", "instead", "out of time", "answered", "failed", "cancelled"} <= set(outcomes)
    assert subject.transitions > 0


def test_what_grows_and_what_is_held_is_told() -> None:
    """A report that cannot complain says nothing."""
    flat = soak.Measurement(**dict.fromkeys(soak.Measurement.__annotations__, 0))
    worse = soak.Measurement(**dict.fromkeys(soak.Measurement.__annotations__, 10**6))
    assert soak.complaints(flat, flat) == []
    told = {text.split()[0].rstrip(":") for text in soak.complaints(flat, worse)}
    assert told == set(soak.Measurement.__annotations__) - {"calls", "workers"}
