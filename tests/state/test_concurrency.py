"""The algorithms that learn a limit, against numbers; and the period that gathers their samples."""

from __future__ import annotations

from math import exp, inf, isfinite
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resilience import Sample, Seeking
from resilience.state.concurrency import Aimd, Period


def quick(inflight: int = 30, **numbers: Any) -> Sample:
    return Sample(0.1, inflight, **{"full": False, "dropped": False, **numbers})


def slow(latency: float = 1.0, **numbers: Any) -> Sample:
    return Sample(latency, 30, **{"full": True, "dropped": False, **numbers})


# --- AIMD ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "sample", "answer"),
    [
        (20, quick(10), (21, "room")),
        (20, quick(9), (20, "idle")),
        (30, quick(30, dropped=True), (27, "dropped")),
        (30, slow(), (27, "slow")),
        (30, Sample(0.3, 30, False, False), (31, "room")),
        (30, quick(latency_of_all=0.4), (27, "slow")),
        (16.2, quick(9), (17.2, "room")),
    ],
)
def test_aimd(limit: float, sample: Sample, answer: tuple[float, str]) -> None:
    """The first three are those of Netflix's AIMDLimitTest; 0.3 s is not longer than 0.3 s."""
    new, reason = Aimd(0.3).update(limit, sample)
    assert (new, reason) == (pytest.approx(answer[0]), answer[1])


def after(aimd: Aimd, limit: float, *samples: Sample) -> tuple[float, str]:
    reason = ""
    for sample in samples:
        limit, reason = aimd.update(limit, sample)
    return limit, reason


def test_eight_steps_down_that_make_nothing_quicker_are_taken_back() -> None:
    """And it stays there while calls are as slow as that, whatever their number."""
    aimd = Aimd(0.3)
    assert after(aimd, 30, *[slow(1.0)] * 8) == (pytest.approx(30 * 0.9**8), "slow")
    assert after(aimd, 13, slow(0.81)) == (30, "slow anyway")
    assert after(aimd, 30, *[slow(1.3)] * 20) == (30, "slow anyway")


def test_steps_are_compared_with_what_was_usual_before_them() -> None:
    """Not with the one slow sample that they began with."""
    aimd = Aimd(0.3)
    after(aimd, 30, *[Sample(0.29, 1, False, False)] * 10)
    assert after(aimd, 30, slow(0.6), *[slow(0.4)] * 8) == (30, "slow anyway")


def test_it_stays_at_what_calls_take_under_the_limit_that_it_went_back_to() -> None:
    """With more of them at once that is longer than it was in the end of the steps."""
    aimd = Aimd(0.3)
    after(aimd, 30, *[slow(1.0)] * 9)
    assert {aimd.update(30, slow(3.0)) for _ in range(20)} == {(30, "slow anyway")}


@pytest.mark.parametrize(
    ("changed", "answer"),
    [(slow(3.0), (27, "slow")), (quick(), (31, "room")), (slow(1.0, dropped=True), (27, "dropped"))],
)
def test_it_moves_again_when_calls_are_otherwise(changed: Sample, answer: tuple[float, str]) -> None:
    """Slower still, quick, or refused."""
    aimd = Aimd(0.3)
    assert after(aimd, 30, *[slow(1.0)] * 9) == (30, "slow anyway")
    after(aimd, 30, slow(1.0))
    limit, reason = 30.0, "slow anyway"
    for _ in range(5):  # the latency is smoothed
        if reason == "slow anyway":
            limit, reason = aimd.update(30, changed)
    assert (limit, reason) == (pytest.approx(answer[0]), answer[1])


@pytest.mark.parametrize(("latency", "stays"), [(0.59, False), (0.61, True), (1.59, True), (1.61, False)])
def test_it_stays_while_the_latency_is_about_the_same(latency: float, stays: bool) -> None:
    """From 0.6 to 1.6 of what it was when the limit went back, smoothed."""
    aimd = Aimd(0.3)
    after(aimd, 30, *[slow(1.0)] * 10)
    reasons = {aimd.update(30, slow(latency))[1] for _ in range(15)}
    assert (reasons == {"slow anyway"}) == stays


def test_once_it_moves_again_it_no_longer_knows_where_it_stayed() -> None:
    aimd = Aimd(0.3)
    after(aimd, 30, *[slow(1.0)] * 10)
    assert after(aimd, 30, slow(1.0, dropped=True), slow(1.0)) == (pytest.approx(30 * 0.9**2), "slow")


def test_steps_that_make_calls_a_fifth_quicker_go_on() -> None:
    """Then it is the queue of the other side, and it gets shorter."""
    aimd, limit = Aimd(0.3), 100.0
    for step in range(20):
        limit, reason = aimd.update(limit, slow(5.0 * 0.9**step))
        assert reason == "slow"
    assert limit == pytest.approx(100 * 0.9**20)


def test_while_calls_are_refused_it_only_goes_down() -> None:
    aimd = Aimd(0.3)
    assert after(aimd, 100, *[slow(dropped=True)] * 30) == (pytest.approx(100 * 0.9**30), "dropped")


def test_aimd_can_forget() -> None:
    aimd = Aimd(0.3)
    after(aimd, 30, *[slow(1.0)] * 10)
    aimd.reset()
    assert aimd.update(30, slow(1.0)) == (pytest.approx(27), "slow")


# --- Seeking -------------------------------------------------------------------------------------


def sought(throughput: Any, full: bool = True, rounds: int = 60, limit: float = 20.0) -> float:
    """Where the limit goes, the throughput being a function of it; the mean of the last rounds."""
    seeking, limits = Seeking(), []
    for _ in range(rounds):
        limit, _ = seeking.update(limit, Sample(0.1, int(limit), full, False, throughput(limit)))
        limits.append(limit)
    return sum(limits[-10:]) / 10


def test_seeking_goes_up_where_more_brings_more() -> None:
    assert sought(lambda limit: 10 * limit) > 100


def test_seeking_goes_down_where_more_brings_nothing() -> None:
    assert sought(lambda limit: 100.0, limit=60) < 10


def test_seeking_settles_at_the_knee() -> None:
    """Of a server with twenty workers, from below and from above."""
    for limit in (5.0, 80.0):
        assert 15 < sought(lambda limit: 10 * min(limit, 20), limit=limit, rounds=120) < 27


def test_seeking_stays_where_the_limit_does_not_bind_or_nothing_is_known() -> None:
    """The throughput is what comes, then, and says nothing about the limit."""
    assert sought(lambda limit: 100.0, full=False) == 20
    assert 18 < sought(lambda limit: 0.0) < 22


@example(course=[(5e-324, True, False), (2.0, True, False)])
@given(st.lists(st.tuples(st.floats(0, 1e6), st.booleans(), st.booleans()), max_size=60))
def test_a_limit_is_always_a_number(course: list[tuple[float, bool, bool]]) -> None:
    """At least 1 in Seeking, whatever the samples."""
    for algorithm in (Aimd(0.3), Seeking()):
        limit = 20.0
        for number, full, dropped in course:
            limit, reason = algorithm.update(limit, Sample(number, int(number), full, dropped, number))
            assert isfinite(limit)
            assert reason
            assert limit > 0 if isinstance(algorithm, Aimd) else limit >= 1


@pytest.mark.parametrize(
    ("limit", "throughputs", "answers"),
    [
        # The first answer is 15 % lower. What follows goes by exp(gain * (elasticity - target)).
        (20, (20, 17), (17, 20 * exp(0.25 * 0.5) * 1.15)),  # elasticity 1: as much more as there are more
        (20, (20, 20), (17, 20 * exp(0.25 * -0.5) * 1.15)),  # 0
        (20, (1, 1000), (17, 20 * exp(0.25 * -1) * 1.15)),  # no more than -2 counts, and -1 of the difference
        (20, (1000, 1), (17, 20 * exp(0.25 * 1) * 1.15)),
        (4, (1, 1), (3, 4 * exp(0.25 * -0.5) + 1)),  # by one at least
        (1.5, (1, 1), (1, 1.5 * exp(0.25 * -0.5) + 1)),  # never below one
    ],
)
def test_seeking_by_numbers(limit: float, throughputs: tuple[float, float], answers: tuple[float, float]) -> None:
    seeking, given = Seeking(), limit
    for throughput, answer in zip(throughputs, answers, strict=True):
        given, _ = seeking.update(given, slow(throughput=throughput))
        assert given == pytest.approx(answer)


def test_seeking_smooths_elasticities_between_minus_two_and_two() -> None:
    """Each weighs 0.4 against those before it."""
    seeking, limit = Seeking(gain=1.0), 100.0
    for throughput in (1, 10**9, 10**9, 1):  # from above: -2, then 2
        limit, _ = seeking.update(limit, slow(throughput=throughput))
    assert limit == pytest.approx(100 * exp(-1) * exp(-2 + 4 * 0.4 - 0.5) * 1.15)


def test_seeking_is_shown_and_can_forget() -> None:
    seeking = Seeking(gain=0.5)
    assert repr(seeking) == "Seeking(dither=0.15, gain=0.5, target=0.5)"
    first = seeking.update(20, slow(throughput=1.0))
    seeking.update(first[0], slow(throughput=100.0))
    seeking.reset()
    assert seeking.update(20, slow(throughput=1.0)) == first


# --- periods -------------------------------------------------------------------------------------


def test_a_period_gathers_what_ended_in_it() -> None:
    """The latency is what a tenth exceeded; the throughput begins with the first call that ended."""
    period = Period()
    assert period.next_evaluation == -inf
    for number in range(1, 101):
        period.note(number / 100, period, number % 7, waiters=False, now=10 + number / 10)
    assert period.sample(20.0, 1.0, rejected=False) == Sample(0.91, 6, False, False, pytest.approx(10.0), 0.91)
    assert period.next_evaluation == 21.0
    period.note(2.0, period, 1, waiters=True, now=30)
    period.dropped = True
    assert period.sample(30.0, 1.0, rejected=False) == Sample(2.0, 1, True, True, 0.0, 2.0)
    assert period.next_evaluation == 34.0


def test_calls_of_an_earlier_period_count_in_no_comparison() -> None:
    """Only in the latency of all: else the slowest of all would never be seen."""
    earlier, period = Period(), Period()
    period.note(0.1, period, 1, waiters=False, now=1.0)
    assert period.note(9.0, earlier, 1, waiters=False, now=2.0) == 1
    assert period.sample(2.0, 1.0, rejected=True) == Sample(0.1, 1, True, False, 0.0, 9.0)


def test_a_period_keeps_so_many_samples_and_no_more() -> None:
    period = Period()
    for _ in range(10_001):
        period.note(0.1, period, 1, waiters=False, now=1.0)
    assert len(period.samples) == 10_000
