"""Rates: when the next use may begin, compared with tables of other libraries and with all earlier uses."""

from __future__ import annotations

from math import inf

import pytest

from resilience.state.rates import EPSILON, Quota, SlidingLog, Spread


def take_now(rate: Spread | SlidingLog, cost: float, now: float) -> bool:
    """Charge a use and return true if it may begin now."""
    if rate.ready(cost, now) > now + EPSILON:
        return False
    rate.take(cost, now, now)
    return True


_TICK = 0.1  # the unit of the tests of golang.org/x/time/rate


@pytest.mark.parametrize(
    ("burst", "steps"),
    [
        (1, [(0, 1, True), (0, 1, False), (0, 1, False), (1, 1, True), (1, 1, False), (2, 1, True), (2, 1, False)]),
        (3, [(0, 2, True), (0, 2, False), (0, 1, True), (0, 1, False), (1, 2, False), (2, 1, True), (3, 1, True)]),
        (3, [(0, 3, True), (3, 1, True), (4, 3, True), (4, 1, False), (9, 3, True)]),
    ],
)
def test_bursts_are_admitted_as_in_golang(burst: int, steps: list[tuple[int, int, bool]]) -> None:
    """`TestLimiterBurst1` and `TestLimiterBurst3` of golang.org/x/time/rate: 10 a second."""
    rate = Spread(10, 1.0, burst)
    assert [take_now(rate, cost, tick * _TICK) for tick, cost, _ in steps] == [allowed for _, _, allowed in steps]


def test_a_unit_leaves_the_window_when_it_is_as_old_as_the_period() -> None:
    """With 2 in 100 ms, uses begin at 0, 60 and 100 ms, but not at 99.9 and 110 ms, as in tower-resilience."""
    window = SlidingLog(2, 0.1)
    allowed = [(at, take_now(window, 1, at)) for at in (0.0, 0.06, 0.0999, 0.1, 0.11, 0.16)]
    assert [at for at, has_turn in allowed if has_turn] == [0.0, 0.06, 0.1, 0.16]


def test_a_look_ahead_removes_no_unit_from_the_window() -> None:
    """`ready` may be called for an instant, and later for an earlier one."""
    window = SlidingLog(2, 4.0)
    for at in (0.0, 0.5):
        assert take_now(window, 1, at)
    assert window.ready(1, 4.25) <= 4.25
    assert window.ready(1, 3.75) == 4.0
    assert not take_now(window, 1, 3.75)


def test_the_memory_of_a_window_is_bounded() -> None:
    """Uses within a 1024th of the period are one entry, and expired entries are deleted."""
    window = SlidingLog(10_000, 1.0)
    for number in range(30_000):
        take_now(window, 1, number / 10_000)
    assert len(window._log) <= SlidingLog.STEPS + 1


def test_a_use_shares_the_entry_of_the_one_just_before_it() -> None:
    """Earlier entries expire separately, and each entry with its last use."""
    window = SlidingLog(3, 1.0)
    assert [take_now(window, 1, at) for at in (0.0, 0.5, 0.5001)] == [True] * 3
    assert (window.ready(1, 0.6), window.ready(2, 0.6)) == (1.0, 1.5001)
    assert take_now(window, 1, 1.50005)
    assert (window.ready(1, 1.50006), window.ready(3, 1.50006)) == (1.5001, 2.50005)


def test_a_long_row_of_close_uses_does_not_share_one_entry() -> None:
    """Each use expires in time, although each follows another within a 1024th of the period."""
    window, gap = SlidingLog(1000, 1.0), 0.5 / SlidingLog.STEPS
    for number in range(1000):
        window.take(1, number * gap, number * gap)
    assert 1.0 <= window.ready(1, 0.6) <= 1.0 + 1 / SlidingLog.STEPS


@pytest.mark.parametrize("limit", [1, 1000])
def test_rounding_errors_of_fractional_costs_refuse_no_use(limit: int) -> None:
    window = SlidingLog(limit, 1.0)
    assert [take_now(window, 0.1, 0.5) for _ in range(10 * limit + 1)] == [True] * 10 * limit + [False]


def test_rounding_errors_end_with_the_uses_that_caused_them() -> None:
    """Beside so many units, 0.3 counts as 0.5: ten of them would leave 2 units that no use has."""
    most = 2**52
    window = SlidingLog(most, 1.0)
    for place, cost in enumerate([most - 8, *[0.3] * 10]):
        assert take_now(window, cost, place / 20)
    assert [take_now(window, cost, 2.0) for cost in (most - 1, 1)] == [True, True]


@pytest.mark.parametrize("limit", [10**9, 2**52])
def test_a_large_window_is_exact_to_the_unit(limit: int) -> None:
    window = SlidingLog(limit, 60.0)
    assert [take_now(window, cost, 0.5) for cost in (limit - 1, 1, 1)] == [True, True, False]


def test_a_use_recorded_out_of_order_is_credited() -> None:
    """Also if its entry now overlaps with the one before it, which may be the one that it is in."""
    window = SlidingLog(10, 1.0)
    for at in (5.0, 5.0008, 5.0011, 5.0007):
        window.take(2, at, at)
    assert len(window._log) == 2
    for at, free in ((5.0007, 4), (5.0008, 6), (5.0011, 8), (5.0, 10)):
        window.correct(-2, at, 5.5)
        assert window.ready(free, 5.5) == -inf < window.ready(free + 0.1, 5.5)
    bucket = Spread(1, 1.0, 10)
    bucket.take(5, 5.0001, 5.0001)
    bucket.take(5, 5.0, 5.0)
    bucket.correct(-5, 5.0, 5.5)
    assert bucket.full_at == 10.0001


# --- lateness ----------------------------------------------------------------------------------


def test_a_late_turn_is_charged_by_its_schedule() -> None:
    """At most a quarter of a second is caught up, or the time of the burst if that is longer."""
    for late, burst, caught_up in [(0.125, 1, 0.125), (10.0, 1, 0.25), (10.0, 4, 0.5)]:
        rate = Spread(8, 1.0, burst)
        rate.take(burst, 0.0, 0.0)
        at = rate.ready(1, 0.0)
        assert rate.take(1, at, at + late) == late - caught_up
        assert rate.full_at == max(burst / 8, at + late - caught_up) + 0.125


def test_a_window_charges_a_late_turn_when_it_begins() -> None:
    window = SlidingLog(1, 1.0)
    assert window.take(1, 0.5, 0.75) == 0.25
    assert window.ready(1, 1.0) == 1.75


# --- corrections -------------------------------------------------------------------------------


def test_a_window_credits_unused_units_while_they_are_in_the_window() -> None:
    """Once they have left, the units of another call are not reduced."""
    window = SlidingLog(10, 1.0)
    window.take(9, 0.0, 0.0)
    window.correct(-8, 0.0, 0.5)
    assert window.ready(9, 0.5) == -inf
    window.take(9, 0.5, 0.5)
    window.correct(-5, 0.25, 0.6)  # its units have left the window
    assert (window.ready(1, 0.6), window.ready(9, 0.6)) == (1.0, 1.5)
    window.correct(-3, 0.5, 0.6)
    assert window.ready(4, 0.6) == 1.0
    window.correct(-100, 0.5, 0.6)
    assert window.ready(9, 0.6) == -inf


def test_a_credit_leaves_the_window_with_its_use() -> None:
    window = SlidingLog(10, 1.0)
    window.take(5, 0.0, 0.0)
    window.correct(-0.5, 0.0, 0.5)
    window.take(0.5, 1.25, 1.25)
    assert (window.ready(9.5, 1.25), window.ready(10, 1.25)) == (-inf, 2.25)


def test_more_units_than_expected_are_charged_once() -> None:
    window = SlidingLog(10, 1.0)
    window.take(5, 0.0, 0.0)
    window.correct(2, 0.0, 0.5)
    assert (window.ready(3, 0.6), window.ready(4, 0.6)) == (-inf, 1.0)


def test_a_window_can_be_charged_beyond_its_limit() -> None:
    window = SlidingLog(10, 1.0)
    window.take(5, 0.0, 0.0)
    window.correct(20, 0.0, 0.5)
    assert window.ready(1, 0.6) == 1.5
    window.correct(0.5, 0.0, 0.6)
    assert window.ready(10, 0.6) == 1.6


def test_a_bucket_credits_at_most_up_to_its_size() -> None:
    rate = Spread(2, 1.0, 1)
    rate.take(10, 0.0, 0.0)
    rate.correct(-4, 0.0, 2.0)
    assert rate.full_at == 3.0
    rate.correct(-100, 0.0, 2.0)
    assert rate.full_at == 2.0
    rate.correct(-1, 0.0, 3.0)  # the bucket is full
    assert rate.full_at == 2.0
    rate.correct(2, 0.0, 3.0)
    assert rate.full_at == 4.0
    rate.correct(-0.5, 3.0, 3.875)
    assert rate.full_at == 3.875
    rate.correct(0.5, 0.0, 5.0)
    assert rate.full_at == 5.25


@pytest.mark.parametrize("at", [4.0, 5.0])
@pytest.mark.parametrize("taken", ["in time", "from the queue", "beyond the cost of an earlier use"])
def test_a_bucket_does_not_credit_units_that_were_refilled_since(taken: str, at: float) -> None:
    """It was full again after the first use, whose credit must not reduce the second use."""
    rate = Spread(1, 1.0, 4)
    rate.take(4, 0.0, 0.0)
    if taken == "in time":
        assert take_now(rate, 4, at)
    elif taken == "from the queue":
        rate.take(4, at, at)
    else:
        rate.correct(4, 0.0, at)
    rate.correct(-3, 0.0, 6.0)
    assert rate.full_at == at + 4.0
    rate.correct(-3, at, 6.0)
    assert rate.full_at == 6.0


# --- changed rates -----------------------------------------------------------------------------


def test_earlier_uses_still_count_after_a_resize() -> None:
    rate = Spread(2, 1.0, 1)
    rate.take(12, 0.0, 0.0)
    rate.resize(4, 1.0, 4.0)
    assert rate.full_at == 5.0
    rate.resize(2, 1.0, 8.0)
    assert (rate.full_at, rate.interval) == (5.0, 0.5)
    window = SlidingLog(2, 1.0)
    window.take(2, 0.0, 0.0)
    window.resize(3, 1.0, 0.5)
    assert (window.ready(1, 0.5), window.ready(2, 0.5), window.ready(4, 0.5)) == (-inf, 1.0, inf)


# --- quotas of the service ---------------------------------------------------------------------


def test_of_two_reports_of_one_window_the_smaller_remainder_counts() -> None:
    """Reports whose ends differ by at most 1 s are those of one window; the latest end holds."""
    quota = Quota()
    for remaining, until in [(5, 30.0), (2, 30.9), (3, 29.5), (9, 31.0)]:
        quota.learn(remaining, until, 0.0)
    for _ in range(2):
        assert quota.ready(1, 1.0) <= 1.0
        quota.take(1, 1.0, 1.0)
    assert quota.ready(1, 1.0) == 31.0


def test_a_report_is_one_of_the_window_that_ends_nearest() -> None:
    """Both end within 1 s of it; the first one has no calls left."""
    quota = Quota()
    quota.learn(1, 7.0, 0.0)
    quota.take(1, 0.0, 0.0)
    quota.learn(6, 8.2, 0.0)
    quota.learn(5, 7.8, 0.0)
    assert quota.ready(1, 0.0) == 7.0
    assert [left for left, _, _ in quota._reports] == [0, 5]


def test_reports_of_different_windows_all_hold() -> None:
    """Two calls until 10 s and four until 60 s; a wider report does not count."""
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


@pytest.mark.parametrize("now", [10.0, 19.1])
def test_an_expired_report_is_deleted(now: float) -> None:
    """Even if its window ended less than 1 s before the next one does, as for a limit per second."""
    quota = Quota()
    quota.learn(2, now, 0.0)
    quota.learn(5, 20.0, now)
    assert quota._reports == ((5, 20.0, 20.0),)
    for remaining, until in ((3, 40.0), (3, 60.0)):  # no more calls for a longer time replace it
        quota.learn(remaining, until, 19.5)
        assert quota._reports == ((remaining, until, until),)


def test_the_number_of_reports_is_bounded() -> None:
    """Here, each reset is an hour ahead. The strictest reports and the daily limit remain."""
    quota = Quota()
    quota.learn(5000, 86400.0, 0.0)
    for now in range(0, 1000, 2):
        quota.learn(1000 + now, now + 3600.0, float(now))
    ends = [until for _, until, _ in quota._reports]
    assert ends == [*range(3600, 3600 + 2 * 63, 2), 86400]


def test_of_two_reported_pauses_the_later_end_holds() -> None:
    """A larger remainder of a later window ends no pause."""
    quota = Quota()
    quota.learn(0, 30.0, 0.0)
    quota.learn(0.5, 10.0, 0.0)
    assert (quota.has_expired(29.0), quota.has_expired(30.0)) == (False, True)
    quota.learn(5, 60.0, 0.0)
    assert quota.ready(1, 0.0) == 30.0
    assert not quota.has_expired(30.0)
