"""The quantile of recent durations: its error, its window, and when it is computed again."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from resilience.state.quantiles import REFRESH, Histogram

DURATIONS = st.lists(st.floats(1e-6, 3600), min_size=1, max_size=200)


@given(DURATIONS, st.floats(0.01, 0.99))
def test_the_quantile_is_at_most_two_per_cent_above_the_exact_one(durations: list[float], share: float) -> None:
    quantile = Histogram(share, 60.0)
    for duration in durations:
        quantile.add(duration, 0.0)
    rank = max(1, math.ceil(share * len(durations) - 1e-9))
    exact = sorted(durations)[rank - 1]
    assert exact * (1 - 1e-9) <= quantile.value() <= exact * 1.02 * (1 + 1e-9)


def test_a_duration_of_zero_or_less_counts_as_a_microsecond() -> None:
    """A clock may not have advanced, or may have been set back."""
    quantile = Histogram(0.9, 60.0)
    for seconds in (0.0, -1.0):
        quantile.add(seconds, 0.0)
    assert 0 < quantile.value() < 2e-6


def test_durations_are_forgotten_in_halves_of_the_window() -> None:
    """A duration older than the window never counts; one younger than half of it always does."""
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


def test_rare_durations_are_forgotten_in_time_too() -> None:
    """The halves begin at the same instants, whenever a duration is added."""
    quantile = Histogram(0.5, 60.0)
    for now, count in ((100.0, 1), (129.0, 2), (158.0, 3), (187.0, 2)):
        quantile.add(5.0, now)
        assert quantile.count == count


def test_a_computed_quantile_is_kept_for_some_further_durations() -> None:
    """To compute it, all buckets are sorted."""
    quantile = Histogram(0.5, 60.0)
    quantile.add(1.0, 0.0)
    before = quantile.value()
    for _ in range(REFRESH - 1):
        quantile.add(5.0, 0.0)
        assert quantile.value() == before
    quantile.add(5.0, 0.0)
    assert quantile.value() > 4
