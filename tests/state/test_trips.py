"""Trip conditions: which results open a circuit."""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction
from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resilience import ConsecutiveFailures, FailureCount, FailureRatio, SlowRatio, Trip

F, S = True, False  # failed, succeeded


def tripped_at(trip: Trip, results: list[bool], *, every: float = 0.0, took: float = 0.0) -> int | None:
    """Return the number of the first result (from 1) that trips the condition, or None."""
    tally = trip.tally()
    for number, failed in enumerate(results):
        if tally.add(failed, took, 1000.0 + number * every):
            return number + 1
    return None


def test_tallies_of_one_condition_are_independent() -> None:
    """A condition may be shared by breakers."""
    trip = ConsecutiveFailures(2)
    first, second = trip.tally(), trip.tally()
    assert not first.add(F, 0.0, 0.0)
    assert not second.add(F, 0.0, 0.0)
    assert first.add(F, 0.0, 0.0)


@pytest.mark.parametrize(
    ("trip", "results", "every", "at"),
    [
        (FailureCount(2), [F, *[S] * 29, F], 1.0, None),
        (FailureCount(2), [F, *[S] * 28, F], 1.0, 30),
        (FailureCount(3, window=timedelta(minutes=1)), [F, F, F], 20.0, 3),
        (FailureCount(3, window=timedelta(minutes=1)), [F] * 9, 30.0, None),
    ],
)
def test_failures_in_a_window_trip_however_many_calls_succeed(
    trip: Trip, results: list[bool], every: float, at: int | None
) -> None:
    """The default window is 30 s."""
    assert tripped_at(trip, results, every=every) == at


def test_min_calls_is_at_most_the_size_of_a_count_window() -> None:
    """Otherwise `last=5` with the default `min_calls=10` would never trip."""
    assert tripped_at(FailureRatio(0.5, last=5), [F] * 9) == 5
    assert tripped_at(SlowRatio(0.5, slower_than=1.0, last=5), [S] * 9, took=1.0) == 5


@given(percent=st.integers(1, 100), total=st.integers(1, 200), is_enough=st.booleans())
@example(percent=28, total=25, is_enough=True)  # `0.28 * 25` is a little more than 7 in floats
@example(percent=55, total=100, is_enough=True)
def test_the_ratio_is_compared_exactly(percent: int, total: int, is_enough: bool) -> None:
    """Rounding of floats has no effect: 7 of 25 are 0.28, and 6 are less."""
    enough = int(-(-Fraction(percent, 100) * total // 1))  # rounded up
    bad = enough if is_enough else enough - 1
    trip = FailureRatio(float(f"{percent / 100:.2f}"), min_calls=total, last=total)
    assert tripped_at(trip, [S] * (total - bad) + [F] * bad) == (total if is_enough else None)


@pytest.mark.parametrize("trip", [FailureRatio(0.5), SlowRatio(0.5, slower_than=1.0)])
def test_min_calls_is_ten_by_default(trip: Trip) -> None:
    assert tripped_at(trip, [F] * 20, took=1.0) == 10


def test_slower_than_of_a_condition_is_the_smallest_limit_or_infinite() -> None:
    slow, slower = SlowRatio(0.5, slower_than=1.0), SlowRatio(0.5, slower_than=2.0)
    assert ConsecutiveFailures(5).slower_than == FailureRatio(0.5).slower_than == inf
    assert (slower | slow).slower_than == (ConsecutiveFailures(5) | slow).slower_than == 1.0


def test_both_conditions_count_each_result() -> None:
    """A result that trips the first of them counts in the second: `a | b` has no short circuit."""
    trip = FailureRatio(1.0, min_calls=2, last=2) | ConsecutiveFailures(3)
    tally = trip.tally()
    assert [tally.add(F, 0.0, 0.0) for _ in range(2)] == [False, True]
    assert tally.add(S, 0.0, 0.0) is False
    assert [tally.add(F, 0.0, 0.0) for _ in range(2)] == [False, True]


def test_a_tally_is_quiet_if_a_success_would_change_nothing() -> None:
    """A tally with a window, or with a row of failures, is not."""
    streak = ConsecutiveFailures(3).tally()
    assert streak.quiet
    streak.add(F, 0.0, 0.0)
    assert not streak.quiet
    streak.add(S, 0.0, 0.0)
    assert streak.quiet
    number = FailureCount(3, last=3).tally()
    assert number.quiet
    assert [(number.add(failed, 0.0, 0.0), number.quiet)[1] for failed in (F, S, S, S)] == [False, False, False, True]
    assert not FailureRatio(0.5).tally().quiet
    assert not SlowRatio(0.5, slower_than=1.0).tally().quiet
    assert not (ConsecutiveFailures(3) | FailureRatio(0.5)).tally().quiet
    both = (ConsecutiveFailures(3) | ConsecutiveFailures(2)).tally()
    assert both.quiet
    both.add(F, 0.0, 0.0)
    assert not both.quiet


@pytest.mark.parametrize("never_quiet", [FailureRatio(0.5), SlowRatio(0.5, slower_than=1.0)])
def test_a_combined_tally_is_quiet_only_if_both_sides_are(never_quiet: Trip) -> None:
    for trip in (never_quiet | ConsecutiveFailures(9), ConsecutiveFailures(9) | never_quiet):
        tally = trip.tally()
        assert not tally.quiet
        for failed in (S, F, S, S):
            tally.add(failed, 0.0, 0.0)
            assert not tally.quiet
