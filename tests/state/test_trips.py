"""Trip conditions: when a tally says that the circuit is to open."""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience import ConsecutiveFailures, FailureRatio, SlowRatio, Trip

F, S = True, False  # failed, succeeded


def tripped_at(trip: Trip, results: list[bool], *, every: float = 0.0, took: float = 0.0) -> int | None:
    """Return the number of the first result (from 1) that trips the condition, None for none."""
    tally = trip.tally()
    for number, failed in enumerate(results):
        if tally.add(failed, took, 1000.0 + number * every):
            return number + 1
    return None


# --- consecutive failures --------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5])
def test_so_many_failures_in_a_row_trip(n: int) -> None:
    """The n-th failure in a row trips, not the one before it."""
    assert tripped_at(ConsecutiveFailures(n), [F] * 9) == n


def test_a_success_ends_the_row() -> None:
    """Failures count in a row only."""
    assert tripped_at(ConsecutiveFailures(3), [F, F, S, F, F, S, F, F, F]) == 9


def test_a_tally_is_its_own() -> None:
    """A condition may be shared: what one tally counts, another does not see."""
    trip = ConsecutiveFailures(2)
    one, other = trip.tally(), trip.tally()
    assert not one.add(F, 0.0, 0.0)
    assert not other.add(F, 0.0, 0.0)
    assert one.add(F, 0.0, 0.0)


# --- ratios over the last so many calls ------------------------------------------------------


def test_a_success_can_be_the_result_that_trips() -> None:
    """The condition is looked at after every result: the call that completes `min_calls` may have succeeded."""
    assert tripped_at(FailureRatio(0.5, min_calls=4, last=10), [F, F, F, S]) == 4


def test_min_calls_is_at_most_the_window_of_calls() -> None:
    """`last=5` with the default `min_calls=10` would never trip: five calls are then enough."""
    assert tripped_at(FailureRatio(0.5, last=5), [F] * 9) == 5
    assert tripped_at(SlowRatio(0.5, slower_than=1.0, last=5), [S] * 9, took=1.0) == 5


def test_what_left_the_window_of_calls_no_longer_counts() -> None:
    """Failures that five later calls have pushed out are forgotten."""
    assert tripped_at(FailureRatio(0.6, min_calls=5, last=5), [F, F, S, S, S, S, F, S, F, F]) == 10
    assert tripped_at(FailureRatio(0.6, min_calls=5, last=5), [F, F, S, S, S, S, S, F, F]) is None


@given(percent=st.integers(1, 100), total=st.integers(1, 200), data=st.data())
def test_the_ratio_is_exact(percent: int, total: int, data: st.DataObject) -> None:
    """7 of 25 are 0.28, in whatever way floats are rounded: one bad call less does not trip, that many do."""
    enough = -(-Fraction(percent, 100) * total // 1)  # rounded up
    bad = data.draw(st.sampled_from([int(enough), int(enough) - 1]))
    results = [S] * (total - bad) + [F] * bad
    trip = FailureRatio(float(f"{percent / 100:.2f}"), min_calls=total, last=total)
    assert tripped_at(trip, results) == (total if bad >= enough else None)


@pytest.mark.parametrize(("ratio", "bad", "total"), [(0.07, 7, 100), (0.28, 7, 25), (0.14, 7, 50), (0.55, 55, 100)])
def test_the_ratio_is_exact_where_a_product_would_be_rounded_up(ratio: float, bad: int, total: int) -> None:
    """`0.28 * 25` is a little more than 7 in floats; 7 of 25 are 0.28 all the same."""
    assert ratio * total > bad  # what makes these numbers interesting
    assert tripped_at(FailureRatio(ratio, min_calls=total, last=total), [S] * (total - bad) + [F] * bad) == total


# --- ratios over time ------------------------------------------------------------------------


def test_a_window_of_time_forgets() -> None:
    """Failures that are as old as the window do not count any more."""
    trip = FailureRatio(0.5, min_calls=4, window=10.0)
    assert tripped_at(trip, [F] * 20, every=2.0) == 4
    assert tripped_at(trip, [F] * 20, every=4.0) is None  # never four within ten seconds


@pytest.mark.parametrize("trip", [FailureRatio(0.5), SlowRatio(0.5, slower_than=1.0)])
def test_ten_calls_are_needed_by_default(trip: Trip) -> None:
    """Nine that are all bad do not trip."""
    assert tripped_at(trip, [F] * 20, took=1.0) == 10


def test_the_window_of_time_is_thirty_seconds_by_default() -> None:
    """Ten failures within thirty seconds trip, ten within a little more do not."""
    assert tripped_at(FailureRatio(1.0), [F] * 10, every=3.3) == 10
    assert tripped_at(FailureRatio(1.0), [F] * 99, every=3.4) is None


def test_a_window_may_be_a_timedelta() -> None:
    """Durations are seconds or `timedelta`."""
    trip = FailureRatio(1.0, min_calls=2, window=timedelta(minutes=1))
    assert tripped_at(trip, [F, F], every=59.0) == 2
    assert tripped_at(trip, [F, F], every=60.0) is None


# --- slowness --------------------------------------------------------------------------------


@pytest.mark.parametrize(("took", "trips"), [(1.999, False), (2.0, True), (2.5, True)])
def test_a_call_is_slow_from_the_limit_on(took: float, trips: bool) -> None:
    """`slower_than=2.0` means two seconds and more."""
    trip = SlowRatio(0.5, slower_than=2.0, min_calls=2)
    assert (tripped_at(trip, [S, S], took=took) is not None) is trips


def test_slow_failures_count_as_slow_and_fast_failures_do_not() -> None:
    """Slowness is a matter of time, not of success."""
    trip = SlowRatio(1.0, slower_than=timedelta(seconds=2), min_calls=2)
    assert tripped_at(trip, [F, S], took=2.0) == 2
    assert tripped_at(trip, [F] * 9, took=1.0) is None


def test_a_slow_failure_counts_in_both() -> None:
    """In `FailureRatio | SlowRatio` each counts it for itself."""
    trip = FailureRatio(0.75, min_calls=4, last=4) | SlowRatio(0.5, slower_than=1.0, min_calls=4, last=4)
    tally = trip.tally()
    results = [(S, 0.1), (F, 3.0), (S, 0.1), (S, 3.0)]  # one failure of four, two slow ones of four
    assert [tally.add(failed, took, 0.0) for failed, took in results] == [False, False, False, True]
    tally = trip.tally()
    results = [(F, 3.0), (F, 0.1), (F, 0.1), (S, 0.1)]  # three failures of four, one slow one
    assert [tally.add(failed, took, 0.0) for failed, took in results] == [False, False, False, True]


def test_a_circuit_is_told_what_counts_as_slow() -> None:
    """`slower_than` of a condition is infinite unless slowness trips; of two limits the smaller one holds."""
    slow, slower = SlowRatio(0.5, slower_than=1.0), SlowRatio(0.5, slower_than=2.0)
    assert ConsecutiveFailures(5).slower_than == FailureRatio(0.5).slower_than == inf
    assert (slower | slow).slower_than == (ConsecutiveFailures(5) | slow).slower_than == 1.0


# --- either ----------------------------------------------------------------------------------


def test_either_condition_trips() -> None:
    """`a | b` trips on `a` alone, and on `b` alone."""
    trip = ConsecutiveFailures(3) | FailureRatio(0.5, min_calls=6, last=6)
    assert tripped_at(trip, [F, F, F]) == 3
    assert tripped_at(trip, [F, S, F, S, F, S]) == 6


def test_three_conditions_combine() -> None:
    """`a | b | c`, in whatever order they are bracketed."""
    a, b, c = ConsecutiveFailures(9), FailureRatio(0.9, last=9), SlowRatio(0.5, slower_than=1.0, min_calls=2)
    for trip in (a | b | c, a | (b | c)):
        assert tripped_at(trip, [S, S], took=1.0) == 2
        assert tripped_at(trip, [F] * 9) == 9


def test_both_conditions_count_every_result() -> None:
    """What trips one is not hidden from the other: no short circuit in `a | b`."""
    trip = FailureRatio(1.0, min_calls=2, last=2) | ConsecutiveFailures(3)
    tally = trip.tally()
    assert [tally.add(F, 0.0, 0.0) for _ in range(2)] == [False, True]
    assert tally.add(S, 0.0, 0.0) is False
    assert [tally.add(F, 0.0, 0.0) for _ in range(2)] == [False, True]


# --- what a success would change -------------------------------------------------------------


def test_a_success_is_skipped_only_where_it_would_change_nothing() -> None:
    """A quiet tally may be left out of a success; one that keeps a window, or a row, may not."""
    streak = ConsecutiveFailures(3).tally()
    assert streak.quiet
    streak.add(F, 0.0, 0.0)
    assert not streak.quiet
    streak.add(S, 0.0, 0.0)
    assert streak.quiet
    assert not FailureRatio(0.5).tally().quiet
    assert not SlowRatio(0.5, slower_than=1.0).tally().quiet
    assert not (ConsecutiveFailures(3) | FailureRatio(0.5)).tally().quiet
    both = (ConsecutiveFailures(3) | ConsecutiveFailures(2)).tally()
    assert both.quiet
    both.add(F, 0.0, 0.0)
    assert not both.quiet


@pytest.mark.parametrize("loud", [FailureRatio(0.5), SlowRatio(0.5, slower_than=1.0)])
def test_one_side_that_wants_every_success_is_enough(loud: Trip) -> None:
    """Whichever side it stands on, at the beginning and after every result."""
    for trip in (loud | ConsecutiveFailures(9), ConsecutiveFailures(9) | loud):
        tally = trip.tally()
        assert not tally.quiet
        for failed in (S, F, S, S):
            tally.add(failed, 0.0, 0.0)
            assert not tally.quiet


# --- what it says of itself ------------------------------------------------------------------


@pytest.mark.parametrize(
    "trip",
    [
        ConsecutiveFailures(5),
        FailureRatio(0.25, min_calls=4, window=12.5),
        FailureRatio(0.25, min_calls=4, last=8),
        SlowRatio(0.5, slower_than=2.0, min_calls=4, last=8),
        ConsecutiveFailures(5) | SlowRatio(0.5, slower_than=2.0),
    ],
)
def test_the_repr_builds_the_same_condition(trip: Trip) -> None:
    """`repr` shows how it was built, with every number."""
    assert repr(eval(repr(trip))) == repr(trip)
