"""Rates: when the next use may begin, against the tables of other libraries and against all uses that there were."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resilience.state.rates import Quota, Spread, Window

_TICK = 0.1  # the unit of the tests of golang.org/x/time/rate


@pytest.mark.parametrize(
    ("burst", "steps"),
    [
        (1, [(0, 1, True), (0, 1, False), (0, 1, False), (1, 1, True), (1, 1, False), (2, 1, True), (2, 1, False)]),
        (3, [(0, 2, True), (0, 2, False), (0, 1, True), (0, 1, False), (1, 2, False), (2, 1, True), (3, 1, True)]),
        (3, [(0, 3, True), (3, 1, True), (4, 3, True), (4, 1, False), (9, 3, True)]),
    ],
)
def test_bursts_as_in_golang(burst: int, steps: list[tuple[int, int, bool]]) -> None:
    """`TestLimiterBurst1` and `TestLimiterBurst3` of golang.org/x/time/rate: 10 a second."""
    rate = Spread(10, 1.0, burst)
    assert [rate.take_now(cost, tick * _TICK) for tick, cost, _ in steps] == [allowed for _, _, allowed in steps]


def test_a_unit_leaves_the_window_when_it_is_as_old_as_the_period() -> None:
    """2 in 100 ms, as in the sliding log of tower-resilience: at 0 and 60 ms; not at 99.9; at 100, not at 110."""
    window = Window(2, 0.1)
    allowed = [(at, window.take_now(1, at)) for at in (0.0, 0.06, 0.0999, 0.1, 0.11, 0.16)]
    assert [at for at, has_turn in allowed if has_turn] == [0.0, 0.06, 0.1, 0.16]


def test_who_looks_ahead_lets_nothing_leave_the_window() -> None:
    """Each rate is asked for the instant that the one before it names; for the next call it may be an earlier one."""
    window = Window(2, 4.0)
    for at in (0.0, 0.5):
        assert window.take_now(1, at)
    assert window.ready(1, 4.25) <= 4.25
    assert window.ready(1, 3.75) == 4.0
    assert not window.take_now(1, 3.75)


def test_a_window_has_no_edge_at_which_twice_the_limit_passes() -> None:
    """100 a second: 100 at 0.9 s, none at 1.1 s, 100 at 1.9 s, as in tower-resilience."""
    window = Window(100, 1.0)
    assert [sum(window.take_now(1, at) for _ in range(150)) for at in (0.9, 1.1, 1.9)] == [100, 0, 100]


@given(st.integers(1, 6), st.lists(st.tuples(st.floats(0, 0.4), st.integers(1, 3)), max_size=60))
@example(2, [(0.0, 1), (0.95, 1), (0.0, 1)])
def test_no_period_sees_more_than_the_limit(limit: int, arrivals: list[tuple[float, int]]) -> None:
    """And no unit stays longer than a 1024th of the period beyond its time."""
    window, now, taken = Window(limit, 1.0), 0.0, []
    for gap, cost in arrivals:
        now += gap
        if window.take_now(cost, now):
            taken += [now] * cost
            assert sum(at > now - 1 + 1e-6 for at in taken) <= limit
        else:
            assert sum(at > now - 1 - 1.001 / Window.STEPS for at in taken) + cost > limit


@given(st.integers(1, 4), st.lists(st.tuples(st.floats(0, 0.8), st.integers(1, 6)), max_size=60))
def test_no_span_sees_more_than_the_burst_and_its_share(burst: int, arrivals: list[tuple[float, int]]) -> None:
    """Between any two uses lie no more units than the burst, or one that is larger, and the rate times the seconds."""
    rate, now, uses = Spread(2, 1.0, burst), 0.0, []
    for gap, cost in arrivals:
        now += gap
        if rate.take_now(cost, now):
            uses.append((now, cost))
    for first in range(len(uses)):
        units = 0
        for at, cost in uses[first:]:
            assert units + min(cost, burst) <= burst + 2 * (at - uses[first][0]) + max(0, uses[first][1] - burst) + 1e-6
            units += cost


def test_what_is_larger_than_the_burst_waits_for_all_of_it_and_leaves_a_debt() -> None:
    rate = Spread(1, 1.0, 2)
    assert rate.take_now(1, 0.0)
    assert rate.ready(5, 0.5) == 1.0
    assert rate.take_now(5, 1.0)
    assert rate.ready(1, 1.0) == 5.0


def test_the_memory_of_a_window_is_bounded() -> None:
    """Uses within a 1024th of the period are one entry, and what has left is forgotten."""
    window = Window(10_000, 1.0)
    for number in range(30_000):
        window.take_now(1, number / 10_000)
    assert len(window._log) <= Window.STEPS + 1


def test_a_use_is_kept_with_the_one_just_before_it() -> None:
    """The earlier ones leave when they are as old as the period."""
    window = Window(3, 1.0)
    assert [window.take_now(1, at) for at in (0.0, 0.5, 0.5001)] == [True] * 3
    assert (window.ready(1, 0.6), window.ready(2, 0.6)) == (1.0, 1.5001)


def test_uses_that_follow_closely_are_not_all_kept_as_one() -> None:
    """Each leaves in time, though there is always one within a 1024th of the period before it."""
    window, gap = Window(1000, 1.0), 0.5 / Window.STEPS
    for number in range(1000):
        window.take(1, number * gap, number * gap)
    assert 1.0 <= window.ready(1, 0.6) <= 1.0 + 1 / Window.STEPS


def test_fractions_are_not_refused_for_the_rounding_of_their_sum() -> None:
    window = Window(1, 1.0)
    assert [window.take_now(0.1, 0.5) for _ in range(11)] == [True] * 10 + [False]


def test_a_clock_that_was_read_before_another_ones_changes_no_order() -> None:
    """Two threads read the clock, and come to the lock the other way round: the entry keeps its later instant."""
    window = Window(2, 1.0)
    window.take(1, 5.0001, 5.0001)
    window.take(1, 5.0, 5.0)
    assert window.ready(1, 6.0) == 6.0001


# --- lateness ----------------------------------------------------------------------------------


def test_a_turn_is_charged_by_its_schedule() -> None:
    """0.2 s late are caught up; of 10 s, a quarter of a second, or the burst where that is longer."""
    for late, burst, caught_up in [(0.125, 1, 0.125), (10.0, 1, 0.25), (10.0, 4, 0.5)]:
        rate = Spread(8, 1.0, burst)
        rate.take(burst, 0.0, 0.0)
        at = rate.ready(1, 0.0)
        assert rate.take(1, at, at + late) == late - caught_up
        assert rate.full_at == max(burst / 8, at + late - caught_up) + 0.125


def test_a_window_is_charged_when_the_call_begins() -> None:
    window = Window(1, 1.0)
    assert window.take(1, 0.0, 0.25) == 0.25
    assert window.ready(1, 0.5) == 1.25


# --- corrections -------------------------------------------------------------------------------


def test_a_window_gives_back_what_was_not_used_as_long_as_it_is_in_there() -> None:
    """Not from the units of another call, once its own have left."""
    window = Window(10, 1.0)
    window.take(9, 0.0, 0.0)
    window.correct(-8, 0.0, 0.5)
    assert window.ready(9, 0.5) == -inf
    window.take(9, 0.5, 0.5)
    window.correct(-5, 0.25, 0.6)  # began at an instant of which nothing is left
    assert window.ready(9, 0.6) == 1.5
    window.correct(-100, 0.5, 0.6)
    assert window.ready(9, 0.6) == -inf


def test_a_window_charges_more_beyond_its_limit() -> None:
    window = Window(10, 1.0)
    window.take(5, 0.0, 0.0)
    window.correct(20, 0.0, 0.5)
    assert window.ready(1, 0.6) == 1.5
    window.correct(0.5, 0.0, 0.6)
    assert window.ready(10, 0.6) == 1.6


def test_a_bucket_gives_back_no_more_than_it_holds() -> None:
    rate = Spread(1, 1.0, 1)
    rate.take(10, 0.0, 0.0)
    rate.correct(-4, 0.0, 2.0)
    assert rate.full_at == 6.0
    rate.correct(-100, 0.0, 2.0)
    assert rate.full_at == 2.0
    rate.correct(-1, 0.0, 3.0)  # it is full
    assert rate.full_at == 2.0
    rate.correct(2, 0.0, 3.0)
    assert rate.full_at == 5.0


@pytest.mark.parametrize("at", [4.0, 5.0])
@pytest.mark.parametrize("taken", ["in time", "from the queue"])
def test_a_bucket_gives_nothing_back_that_has_been_refilled(taken: str, at: float) -> None:
    """It was full after the first use: what the second one took is not to be given back for the first."""
    rate = Spread(1, 1.0, 4)
    rate.take(4, 0.0, 0.0)
    if taken == "in time":
        assert rate.take_now(4, at)
    else:
        rate.take(4, at, at)
    rate.correct(-3, 0.0, 6.0)
    assert rate.full_at == at + 4.0
    rate.correct(-3, at, 6.0)
    assert rate.full_at == 6.0


# --- other limits ------------------------------------------------------------------------------


def test_what_was_used_stays_used_when_the_rate_changes() -> None:
    rate = Spread(1, 1.0, 1)
    rate.take(10, 0.0, 0.0)
    rate.resize(2, 1.0, 4.0)
    assert rate.full_at == 7.0
    rate.resize(1, 1.0, 8.0)
    assert (rate.full_at, rate.interval) == (7.0, 1.0)
    window = Window(2, 1.0)
    window.take(2, 0.0, 0.0)
    window.resize(3, 1.0, 0.5)
    assert (window.ready(1, 0.5), window.ready(2, 0.5), window.ready(4, 0.5)) == (-inf, 1.0, inf)


# --- what the other side says ------------------------------------------------------------------


def test_of_one_window_the_smaller_number_counts() -> None:
    """Resets within 1 s of the one that was said first are those of one window; its latest end holds."""
    quota = Quota()
    for remaining, until in [(5, 30.0), (2, 30.9), (3, 29.5), (9, 31.0)]:
        quota.learn(remaining, until, 0.0)
    for _ in range(2):
        assert quota.ready(1, 1.0) <= 1.0
        quota.take(1, 1.0, 1.0)
    assert quota.ready(1, 1.0) == 31.0


def test_windows_that_differ_all_hold() -> None:
    """Two until 10, and four until 60: only narrower ones count, and each until its own reset."""
    quota = Quota()
    for remaining, until in [(4, 60.0), (2, 10.0), (8, 40.0)]:
        quota.learn(remaining, until, 0.0)
    began = []
    for now in (0.0, 0.0, 0.0, 10.0, 10.0, 10.0, 60.0, 60.0):
        if quota.ready(1, now) <= now:
            quota.take(1, now, now)
            began.append(now)
    assert began == [0.0, 0.0, 10.0, 10.0, 60.0, 60.0]
    assert quota.has_expired(60.0)
    assert not quota.has_expired(59.0)


def test_a_window_that_is_over_is_forgotten() -> None:
    quota = Quota()
    quota.learn(2, 10.0, 0.0)
    quota.learn(5, 20.0, 15.0)
    assert quota._reports == ((5, 20.0, 20.0),)
    quota.learn(3, 40.0, 16.0)  # fewer, and for longer
    assert quota._reports == ((3, 40.0, 40.0),)


def test_of_two_pauses_the_later_end_holds() -> None:
    """And more that is left of a later window ends none."""
    quota = Quota()
    quota.learn(0, 30.0, 0.0)
    quota.learn(0.5, 10.0, 0.0)
    quota.learn(5, 60.0, 0.0)
    assert quota.ready(1, 0.0) == 30.0
    assert not quota.has_expired(29.0)
