"""The algorithms that learn a limit, by numbers, and the period that collects their samples."""

from __future__ import annotations

from math import exp, inf, isfinite
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resilience import Sample, Seeking
from resilience.state.concurrency import Aimd, Period


def fast(inflight: int = 30, **numbers: Any) -> Sample:
    return Sample(0.1, inflight, **{"full": False, "dropped": False, **numbers})


def slow(latency: float = 1.0, **numbers: Any) -> Sample:
    return Sample(latency, 30, **{"full": True, "dropped": False, **numbers})


# --- AIMD ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "sample", "expected"),
    [
        (20, fast(10), (21, "room")),
        (20, fast(9), (20, "idle")),
        (30, fast(30, dropped=True), (27, "dropped")),
        (30, slow(), (27, "slow")),
        (30, Sample(0.3, 30, False, False), (31, "room")),
        (30, fast(latency_of_all=0.4), (27, "slow")),
        (16.2, fast(8), (17.2, "room")),
        (16.2, fast(7), (16.2, "idle")),
    ],
)
def test_aimd_adds_one_or_loses_a_tenth_on_overload(limit: float, sample: Sample, expected: tuple[float, str]) -> None:
    """The first three cases are those of Netflix's AIMDLimitTest. The latency limit is exclusive."""
    new, reason = Aimd(0.3).update(limit, sample)
    assert (new, reason) == (pytest.approx(expected[0]), expected[1])


def after_updates(aimd: Aimd, limit: float, *samples: Sample) -> tuple[float, str]:
    reason = ""
    for sample in samples:
        limit, reason = aimd.update(limit, sample)
    return limit, reason


def test_the_limit_only_falls_while_calls_are_dropped() -> None:
    assert after_updates(Aimd(0.3), 100, *[slow(dropped=True)] * 30) == (pytest.approx(100 * 0.9**30), "dropped")


def test_eight_decreases_that_make_no_call_faster_are_reverted() -> None:
    """The limit is kept while calls are as slow as that."""
    aimd = Aimd(0.3)
    assert after_updates(aimd, 30, *[slow(1.0)] * 8) == (pytest.approx(30 * 0.9**8), "slow")
    assert after_updates(aimd, 13, slow(0.81)) == (30, "slow anyway")
    assert after_updates(aimd, 30, *[slow(1.3)] * 20) == (30, "slow anyway")


def test_decreases_are_compared_with_the_latency_before_them() -> None:
    """They are not compared with the single slow sample that caused the first one."""
    aimd = Aimd(0.3)
    after_updates(aimd, 30, *[Sample(0.29, 1, False, False)] * 10)
    assert after_updates(aimd, 30, slow(0.6), *[slow(0.4)] * 8) == (30, "slow anyway")


def test_the_reverted_limit_is_kept_at_the_latency_of_that_limit() -> None:
    """With more concurrent calls the latency is longer than at the end of the decreases."""
    aimd = Aimd(0.3)
    after_updates(aimd, 30, *[slow(1.0)] * 9)
    assert {aimd.update(30, slow(3.0)) for _ in range(20)} == {(30, "slow anyway")}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [(slow(3.0), (27, "slow")), (fast(), (31, "room")), (slow(1.0, dropped=True), (27, "dropped"))],
)
def test_a_kept_limit_changes_with_slower_fast_or_dropped_calls(changed: Sample, expected: tuple[float, str]) -> None:
    aimd = Aimd(0.3)
    assert after_updates(aimd, 30, *[slow(1.0)] * 9) == (30, "slow anyway")
    after_updates(aimd, 30, slow(1.0))
    limit, reason = 30.0, "slow anyway"
    for _ in range(5):  # the latency is smoothed
        if reason == "slow anyway":
            limit, reason = aimd.update(30, changed)
    assert (limit, reason) == (pytest.approx(expected[0]), expected[1])


@pytest.mark.parametrize(("latency", "is_kept"), [(0.59, False), (0.61, True), (1.39, True), (1.41, False)])
def test_a_limit_is_kept_while_the_latency_is_about_the_same(latency: float, is_kept: bool) -> None:
    """The range is 0.6 to 1.4 times the smoothed latency at the time when the limit was reverted."""
    aimd = Aimd(0.3)
    after_updates(aimd, 30, *[slow(1.0)] * 10)
    reasons = {aimd.update(30, slow(latency))[1] for _ in range(15)}
    assert (reasons == {"slow anyway"}) == is_kept


@pytest.mark.parametrize("latency", [0.2, 0.29, 0.3])
def test_a_limit_is_not_kept_while_calls_are_fast_enough(latency: float) -> None:
    """The service may be fast again by the time the decreases are reverted."""
    aimd = Aimd(0.3)
    assert after_updates(aimd, 10, *[slow(0.4)] * 9, Sample(latency, 10, False, False)) == (11, "room")


def test_a_limit_that_changes_again_is_no_longer_kept() -> None:
    aimd = Aimd(0.3)
    after_updates(aimd, 30, *[slow(1.0)] * 10)
    assert after_updates(aimd, 30, slow(1.0, dropped=True), slow(1.0)) == (pytest.approx(30 * 0.9**2), "slow")


def test_decreases_after_a_revert_are_counted_from_the_first_one() -> None:
    aimd = Aimd(0.3)
    after_updates(aimd, 30, *[slow(1.0)] * 9)
    assert after_updates(aimd, 50, slow(1.0), *[slow(1.0, dropped=True)] * 8) == (pytest.approx(50 * 0.9**8), "dropped")
    assert aimd.update(20, slow(1.0)) == (50, "slow anyway")


def test_calls_that_are_fast_again_begin_a_new_row_of_decreases() -> None:
    aimd = Aimd(0.3)
    after_updates(aimd, 30, *[slow(1.0)] * 8, fast())
    assert after_updates(aimd, 30, *[slow(1.0)] * 8) == (pytest.approx(30 * 0.9**8), "slow")


def test_decreases_that_make_calls_exactly_a_fifth_faster_are_not_reverted() -> None:
    """The smoothed latency falls from 1 s to 0.8 s."""
    assert after_updates(Aimd(0.3), 30, *[slow(1.0)] * 8, slow(0.5)) == (pytest.approx(30 * 0.9**9), "slow")


def test_decreases_that_make_calls_a_fifth_faster_continue() -> None:
    """The latency is the queue of the service then, which gets shorter."""
    aimd, limit = Aimd(0.3), 100.0
    for step in range(20):
        limit, reason = aimd.update(limit, slow(5.0 * 0.9**step))
        assert reason == "slow"
    assert limit == pytest.approx(100 * 0.9**20)


def test_decreases_are_reverted_to_where_they_began_to_make_no_call_faster() -> None:
    """The first ones shorten a queue. Those after its end do not."""
    aimd, limit, reason = Aimd(0.3), 100.0, ""
    for latency in [1.0, 0.9, 0.8, 0.7, 0.6] + [0.5] * 9:
        limit, reason = aimd.update(limit, slow(latency))
        assert reason == "slow"
    assert aimd.update(limit, slow(0.5)) == (pytest.approx(100 * 0.9**6), "slow anyway")


def test_reset_of_aimd_discards_the_kept_limit() -> None:
    aimd = Aimd(0.3)
    after_updates(aimd, 30, *[slow(1.0)] * 10)
    aimd.reset()
    assert aimd.update(30, slow(1.0)) == (pytest.approx(27), "slow")


# --- Seeking -------------------------------------------------------------------------------------


def seek(throughput: Any, full: bool = True, rounds: int = 60, limit: float = 20.0) -> float:
    """Return the mean limit of the last rounds, with a throughput that is a function of the limit."""
    seeking, limits = Seeking(), []
    for _ in range(rounds):
        limit, _ = seeking.update(limit, Sample(0.1, int(limit), full, False, throughput(limit)))
        limits.append(limit)
    return sum(limits[-10:]) / 10


def test_the_throughput_of_more_calls_than_are_kept_is_exact() -> None:
    """At a thousand a second for 20 s, the first 10,000 durations are kept."""
    period = Period()
    for number in range(20_001):
        period.note(0.1, period, 5, False, number / 1000)
    period.note(0.1, Period(), 5, False, 20.5)
    assert len(period.samples) == 10_000
    assert period.sample(20.5, 1.0, False).throughput == pytest.approx(1000)


def test_seeking_settles_at_the_number_of_workers() -> None:
    """The server has twenty workers, and the limit begins below and above that."""
    for limit in (2.0, 5.0, 80.0):
        assert 15 < seek(lambda limit: 10 * min(limit, 20), limit=limit, rounds=120) < 27


def test_seeking_keeps_the_limit_if_it_is_not_reached_or_the_throughput_is_unknown() -> None:
    """The throughput is that of the demand then."""
    assert Seeking().update(20, fast(20)) == (20, "idle")
    assert seek(lambda limit: 100.0, full=False) == 20
    assert 18 < seek(lambda limit: 0.0) < 22


@example(course=[(5e-324, True, False), (2.0, True, False)])
@given(st.lists(st.tuples(st.floats(0, 1e6), st.booleans(), st.booleans()), max_size=60))
def test_a_limit_is_finite_and_positive_for_any_samples(course: list[tuple[float, bool, bool]]) -> None:
    for algorithm in (Aimd(0.3), Seeking()):
        limit = 20.0
        for number, full, dropped in course:
            limit, reason = algorithm.update(limit, Sample(number, int(number), full, dropped, number))
            assert isfinite(limit)
            assert reason
            assert limit > 0 if isinstance(algorithm, Aimd) else limit >= 1


@pytest.mark.parametrize(
    ("limit", "throughputs", "results"),
    [
        # The first result is 15 % lower. The next one is scaled by exp(gain * (elasticity - target)).
        (20, (20, 17), (17, 20 * exp(0.25 * 0.5) * 1.15)),  # elasticity 1: the throughput grows like the limit
        (20, (20, 20), (17, 20 * exp(0.25 * -0.5) * 1.15)),  # elasticity 0
        (20, (1, 1000), (17, 20 * exp(0.25 * -1) * 1.15)),  # the elasticity is at least -2, the exponent at least -1
        (20, (1000, 1), (17, 20 * exp(0.25 * 1) * 1.15)),
        (4, (1, 1), (3, 4 * exp(0.25 * -0.5) + 1)),  # the change is at least one
        (1.5, (1, 1), (1, 1.5 * exp(0.25 * -0.5) + 1)),  # the limit is at least one
        (20, (0, 5), (17, 23)),  # no call ended in one of the two periods
        (20, (5, 0), (17, 23)),
    ],
)
def test_seeking_follows_throughput(
    limit: float, throughputs: tuple[float, float], results: tuple[float, float]
) -> None:
    seeking, given = Seeking(), limit
    for throughput, result in zip(throughputs, results, strict=True):
        given, _ = seeking.update(given, slow(throughput=throughput))
        assert given == pytest.approx(result)


@pytest.mark.parametrize(
    ("least", "most", "workers", "later", "expected"),
    [(1, 20, 1000, 5, (3, 8)), (10, 1000, 2, 50, (40, 65)), (1, 1000, 1, 50, (40, 65))],
    ids=["at most", "at least", "at one"],
)
def test_seeking_moves_away_from_a_bound_when_the_server_changes(
    least: int, most: int, workers: int, later: int, expected: tuple[int, int]
) -> None:
    """At a bound, it still compares two limits. Beyond it, both would be the bound."""
    seeking, limit = Seeking(), 15.0
    for at_once in [workers] * 200 + [later] * 100:
        wanted, _ = seeking.update(limit, slow(throughput=10.0 * min(int(limit), at_once)))
        limit = min(most, max(least, wanted))
    assert expected[0] <= limit <= expected[1]


def test_seeking_returns_after_idleness_to_where_it_was() -> None:
    """Meanwhile, `headroom` has lowered the limit."""
    seeking = Seeking()
    seeking.update(100, slow(throughput=1.0))
    assert seeking.update(85, fast()) == (100, "idle")
    assert seeking.update(10, slow(throughput=1.0))[0] == pytest.approx(115)


def test_seeking_gives_the_reason_of_a_change() -> None:
    """It compares periods in pairs, and a period in which the limit was not reached belongs to no pair."""
    seeking, limit, reasons = Seeking(), 20.0, []
    for throughput in (20, 17, 20, None, 20, 1):
        sample = fast() if throughput is None else slow(throughput=throughput)
        limit, reason = seeking.update(limit, sample)
        reasons.append(reason)
    assert reasons == ["probing", "more brings more", "probing", "idle", "probing", "more brings nothing"]


def test_seeking_compares_no_periods_of_the_same_limit() -> None:
    """As with `least=20, most=20`."""
    seeking = Seeking()
    assert {seeking.update(20, slow(throughput=number))[1] for number in (5, 6, 7, 8)} == {"probing"}


def test_seeking_smooths_elasticities_between_minus_two_and_two() -> None:
    """Each has a weight of 0.4 against the earlier ones."""
    seeking, limit = Seeking(gain=1.0), 100.0
    for throughput in (1, 10**9, 10**9, 1):  # elasticities of -2, then 2
        limit, _ = seeking.update(limit, slow(throughput=throughput))
    assert limit == pytest.approx(100 * exp(-1) * exp(-2 + 4 * 0.4 - 0.5) * 1.15)


def test_repr_and_reset_of_seeking() -> None:
    seeking = Seeking(gain=0.5, target=0.25)
    assert repr(seeking) == "Seeking(dither=0.15, gain=0.5, target=0.25)"
    first = seeking.update(20, slow(throughput=1.0))
    seeking.update(first[0], slow(throughput=100.0))
    seeking.reset()
    assert seeking.update(20, slow(throughput=1.0)) == first


# --- periods -------------------------------------------------------------------------------------


def test_a_sample_of_a_period_summarizes_the_calls_that_ended_in_it() -> None:
    """The latency is the one that a tenth exceeded; the throughput counts from the end of the first call."""
    period = Period()
    assert period.next_evaluation == -inf
    for number in range(1, 101):
        period.note(number / 100, period, number % 7, waiters=False, now=10 + number / 200)
    assert period.sample(20.0, 1.0, rejected=False) == Sample(0.91, 6, False, False, pytest.approx(200.0), 0.91)
    assert period.next_evaluation == 21.0
    period.note(2.0, period, 1, waiters=True, now=30)
    period.dropped = True
    assert period.sample(30.0, 1.0, rejected=False) == Sample(2.0, 1, True, True, 0.0, 2.0)
    assert period.next_evaluation == 34.0


def test_calls_of_an_earlier_period_count_in_latency_of_all_only() -> None:
    """Otherwise the slowest calls would never count."""
    earlier, period = Period(), Period()
    period.note(0.1, period, 1, waiters=False, now=1.0)
    assert period.note(9.0, earlier, 1, waiters=False, now=2.0) == 1
    assert period.sample(2.0, 1.0, rejected=True) == Sample(0.1, 1, True, False, 0.0, 9.0)
