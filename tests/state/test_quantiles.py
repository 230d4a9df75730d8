"""The quantile of the latest durations: what it may be off by, what it forgets, and when it is looked up anew."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from resilience.state.quantiles import REFRESH, Histogram

DURATIONS = st.lists(st.floats(1e-6, 3600), min_size=1, max_size=200)


@given(DURATIONS, st.floats(0.01, 0.99))
def test_it_is_at_most_two_per_cent_too_long(durations: list[float], share: float) -> None:
    """And never too short: so many did not exceed it."""
    quantile = Histogram(share, 60.0)
    for duration in durations:
        quantile.add(duration, 0.0)
    rank = max(1, math.ceil(share * len(durations) - 1e-9))
    exact = sorted(durations)[rank - 1]
    assert exact * (1 - 1e-9) <= quantile.value() <= exact * 1.02 * (1 + 1e-9)


def test_no_time_at_all_is_a_microsecond() -> None:
    """A clock may not have moved, or may have been put back."""
    quantile = Histogram(0.9, 60.0)
    for seconds in (0.0, -1.0):
        quantile.add(seconds, 0.0)
    assert 0 < quantile.value() < 2e-6


def test_it_forgets_by_halves() -> None:
    """What is older than the window counts no more; what is younger than half of it does."""
    quantile = Histogram(0.5, 60.0)
    quantile.add(5.0, 100.0)
    quantile.add(5.0, 110.0)
    assert quantile.count == 2
    quantile.add(0.1, 129.9)
    quantile.forget(130.0)
    assert quantile.count == 3
    quantile.add(0.1, 131.0)
    assert quantile.count == 4
    quantile.forget(160.0)
    assert (quantile.count, round(quantile.value(), 1)) == (1, 0.1)
    quantile.forget(219.9)
    assert quantile.count == 0


def test_a_long_silence_forgets_all() -> None:
    """Nothing of before is left after the window, whatever half it was in."""
    quantile = Histogram(0.5, 60.0)
    quantile.add(5.0, 100.0)
    quantile.add(5.0, 131.0)
    quantile.forget(131.0 + 60.0)
    assert quantile.count == 0


def test_an_answer_is_kept_for_so_many_durations() -> None:
    """To look it up sorts all buckets."""
    quantile = Histogram(0.5, 60.0)
    quantile.add(1.0, 0.0)
    before = quantile.value()
    for _ in range(REFRESH - 1):
        quantile.add(5.0, 0.0)
        assert quantile.value() == before
    quantile.add(5.0, 0.0)
    assert quantile.value() > 4
