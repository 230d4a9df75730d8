"""The circuit, against a slow and obvious model that keeps every result and looks at all of them each time."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from operator import or_
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resilience import CircuitState, ConsecutiveFailures, FailureRatio, SlowRatio, Trip
from resilience.state.circuit import Admission, Circuit, HalfOpen, Open, Probe

CLOSED, OPEN, HALF_OPEN, ISOLATED = CircuitState

# --- the model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    failed: bool
    took: float
    at: float


@dataclass(frozen=True)
class Condition:
    """One trip condition, and what it means in so many words. Times are whole, so that windows are exact."""

    kind: str  # streak, failures or slow
    n: int = 1
    percent: int = 50
    min_calls: int = 1
    last: int | None = None
    window: int | None = None
    slower_than: float = float("inf")

    def trip(self) -> Trip:
        ratio = self.percent / 100
        if self.kind == "streak":
            return ConsecutiveFailures(self.n)
        if self.kind == "failures":
            return FailureRatio(ratio, min_calls=self.min_calls, last=self.last, window=self.window)
        return SlowRatio(
            ratio, slower_than=self.slower_than, min_calls=self.min_calls, last=self.last, window=self.window
        )

    def holds(self, results: list[Result]) -> bool:
        """Whether the condition holds right after the last of these results."""
        if self.kind == "streak":
            return len(results) >= self.n and all(it.failed for it in results[-self.n :])
        if self.last is not None:
            seen = results[-self.last :]
        else:
            assert self.window is not None
            seen = [it for it in results if results[-1].at - it.at < self.window]
        bad = sum(it.failed if self.kind == "failures" else it.took >= self.slower_than for it in seen)
        enough = self.min_calls if self.last is None else min(self.min_calls, self.last)
        return len(seen) >= enough and Fraction(bad, len(seen)) >= Fraction(self.percent, 100)


@dataclass
class Pass:
    """What the model gives to a call that it admits."""

    epoch: int
    lost_at: float = float("inf")
    back: bool = False


@dataclass
class Model:
    conditions: list[Condition]
    periods: list[float]
    probes: int
    successes: int
    probe_timeout: float | None
    state: CircuitState = CLOSED
    epoch: int = 0
    results: list[Result] = field(default_factory=list)
    out: list[Pass] = field(default_factory=list)  # the probes of this epoch
    good: int = 0
    openings: int = 0
    lasts: float = 0.0
    until: float = 0.0
    moves: list[tuple[CircuitState, CircuitState]] = field(default_factory=list)

    def move(self, state: CircuitState) -> None:
        if state is not self.state:
            self.moves.append((self.state, state))
        self.state, self.epoch, self.results, self.out, self.good = state, self.epoch + 1, [], [], 0

    def next_period(self) -> float:
        return self.periods[min(self.openings, len(self.periods) - 1)]

    def open(self, now: float) -> None:
        self.lasts = self.next_period()
        self.until = now + self.lasts
        self.openings += 1
        self.move(OPEN)

    def close(self) -> None:
        self.openings = 0
        self.move(CLOSED)

    def probes_out(self, now: float) -> list[Pass]:
        return [it for it in self.out if not it.back and now < it.lost_at]

    def admit(self, now: float) -> Pass | None:
        if self.state is OPEN and now >= self.until:
            self.move(HALF_OPEN)
        if self.state is CLOSED:
            return Pass(self.epoch)
        if self.state is not HALF_OPEN or len(self.probes_out(now)) >= self.probes:
            return None
        patience = max(self.lasts, 30.0) if self.probe_timeout is None else self.probe_timeout
        self.out.append(Pass(self.epoch, now + patience))
        return self.out[-1]

    def record(self, admitted: Pass, failed: bool, took: float, now: float) -> None:
        if admitted.epoch != self.epoch:
            return
        if self.state is CLOSED:
            self.results.append(Result(failed, took, now))
            if any(condition.holds(self.results) for condition in self.conditions):
                self.open(now)
            return
        lost = now >= admitted.lost_at
        admitted.back = True
        if lost:
            return
        if failed or took >= min(condition.slower_than for condition in self.conditions):
            self.open(now)
            return
        self.good += 1
        if self.good >= self.successes:
            self.close()

    def release(self, admitted: Pass) -> None:
        admitted.back = True


# --- side by side ----------------------------------------------------------------------------

small = st.integers(1, 4)
streaks = st.builds(Condition, st.just("streak"), n=st.integers(1, 5))
percents = st.sampled_from([1, 28, 30, 50, 55, 75, 100])
windows: st.SearchStrategy[dict[str, int]] = st.one_of(
    st.builds(lambda n: {"last": n}, st.integers(1, 8)), st.builds(lambda n: {"window": n}, st.integers(2, 20))
)
shares = st.builds(
    lambda percent, min_calls, window: Condition("failures", percent=percent, min_calls=min_calls, **window),
    percents,
    st.integers(1, 6),
    windows,
)
slow_shares = st.builds(
    lambda percent, min_calls, window, limit: Condition(
        "slow", percent=percent, min_calls=min_calls, slower_than=limit, **window
    ),
    percents,
    st.integers(1, 6),
    windows,
    st.sampled_from([1.0, 2.0]),
)
conditions = st.lists(st.one_of(streaks, shares, slow_shares), min_size=1, max_size=3)


class CircuitAgainstModel(RuleBasedStateMachine):
    """Calls are admitted, come back in any order, late or never, and hands interfere."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.calls: list[tuple[Admission, Pass]] = []
        self.moved: list[tuple[CircuitState, CircuitState]] = []

    @initialize(
        conditions=conditions,
        periods=st.sampled_from([[5.0], [5.0, 10.0, 20.0], [1.0, 2.0], [40.0], [0.0, 3.0]]),
        probes=small,
        successes=small,
        probe_timeout=st.none() | st.sampled_from([1.0, 3.0, 10.0]),
    )
    def build(
        self,
        conditions: list[Condition],
        periods: list[float],
        probes: int,
        successes: int,
        probe_timeout: float | None,
    ) -> None:
        trip = reduce(or_, [condition.trip() for condition in conditions])
        self.circuit = Circuit(trip, periods[0], probes, successes, probe_timeout)
        self.model = Model(conditions, periods, probes, successes, probe_timeout)

    def note(self, transitions: list[Any]) -> None:
        for it in transitions:
            assert it.retry_after == (self.model.lasts if it.new is OPEN else None)
            assert (it.last_failure is None) is (it.new in (CLOSED, ISOLATED))
            self.moved.append((it.old, it.new))
        self.circuit.opens_for = self.model.next_period()  # what its owner does

    @rule(seconds=st.sampled_from([0, 1, 2, 3, 5, 10, 30, 40]))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(times=st.integers(1, 4))
    def call(self, times: int) -> None:
        for _ in range(times):
            admission, transitions = self.circuit.admit(self.now)
            expected = self.model.admit(self.now)
            self.note(transitions)
            assert (admission is None) is (expected is None)
            if admission is not None and expected is not None:
                self.calls.append((admission, expected))

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), failed=st.booleans(), took=st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0]))
    def come_back(self, data: st.DataObject, failed: bool, took: float) -> None:
        admission, expected = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        self.model.record(expected, failed, took, self.now)
        self.note(self.circuit.record(admission, "Boom: no" if failed else None, took, self.now))

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), times=st.integers(1, 8))
    def fail_in_a_row(self, data: st.DataObject, times: int) -> None:
        """As many failures as it takes, one after another: what random results rarely do."""
        for _ in range(min(times, len(self.calls))):
            self.come_back(data, True, 3.0)

    @precondition(lambda self: self.model.state is CLOSED)
    @rule(wait=st.booleans())
    def an_outage(self, wait: bool) -> None:
        """Calls that fail slowly until the circuit opens, and perhaps the time until a probe is due."""
        for _ in range(12):
            if self.model.state is CLOSED:
                self.call(1)
                admission, expected = self.calls.pop()
                self.model.record(expected, True, 3.0, self.now)
                self.note(self.circuit.record(admission, "Boom: no", 3.0, self.now))
        if wait and self.model.state is OPEN:
            self.now = self.model.until
            self.call(1)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def come_back_with_nothing(self, data: st.DataObject) -> None:
        admission, expected = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        self.model.release(expected)
        self.circuit.release(admission)

    @rule()
    def isolate(self) -> None:
        if self.model.state is not ISOLATED:
            self.model.move(ISOLATED)
        self.note(self.circuit.isolate())

    @rule()
    def close(self) -> None:
        self.model.close()
        self.note(self.circuit.close())

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "circuit"):
            return
        period = self.circuit.period
        assert period.state is self.model.state
        assert self.moved == self.model.moves
        if isinstance(period, Open):
            assert (period.until, period.lasts) == (self.model.until, self.model.lasts)
        if isinstance(period, HalfOpen):
            assert len(period.probes) <= self.model.probes
            assert len(self.model.probes_out(self.now)) <= len(period.probes)


TestCircuitAgainstModel = CircuitAgainstModel.TestCase
TestCircuitAgainstModel.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)

# --- one rule each, in a few words -----------------------------------------------------------


def circuit(trip: Trip | None = None, *, opens_for: float = 30.0, probes: int = 1, successes: int = 1) -> Circuit:
    return Circuit(trip or ConsecutiveFailures(1), opens_for, probes, successes, None)


def admitted(it: Circuit, now: float) -> Admission:
    admission, _ = it.admit(now)
    assert admission is not None
    return admission


def half_open(it: Circuit) -> None:
    """Trip the circuit at 0 and look again at 30: the one probe that this takes is given back."""
    it.record(admitted(it, 0.0), "Boom: no", 0.0, 0.0)
    it.release(admitted(it, 30.0))
    assert it.period.state is HALF_OPEN


def test_a_success_from_before_does_not_close() -> None:
    """A call that began while the circuit was closed says nothing about a half-open one."""
    it = circuit()
    slow = admitted(it, 0.0)
    half_open(it)
    assert it.record(slow, None, 31.0, 31.0) == []
    assert it.period.state is HALF_OPEN


def test_a_probe_of_an_earlier_half_open_period_moves_nothing() -> None:
    """Half-open, open, half-open again: two periods, two epochs."""
    it = circuit(opens_for=5.0, probes=2)
    it.record(admitted(it, 0.0), "Boom: no", 0.0, 0.0)
    early, failing = admitted(it, 5.0), admitted(it, 5.0)
    it.record(failing, "Boom: again", 0.0, 5.0)
    late = admitted(it, 10.0)
    assert it.record(early, None, 0.0, 11.0) == []
    assert it.period.state is HALF_OPEN
    assert [move.new for move in it.record(late, None, 0.0, 11.0)] == [CLOSED]


def test_a_result_in_the_same_state_of_another_epoch_moves_nothing() -> None:
    """Closed by hand while closed: the calls under way belong to the period that is over."""
    it = circuit()
    before = admitted(it, 0.0)
    assert it.close() == []
    assert it.record(before, "Boom: old", 0.0, 1.0) == []
    assert it.period.state is CLOSED


def test_a_probe_comes_back_once() -> None:
    """A probe that was recorded is gone: to release or record it again counts nothing, and frees nobody's slot."""
    it = circuit(probes=1, successes=3)
    half_open(it)
    probe = admitted(it, 31.0)
    it.record(probe, None, 0.0, 31.0)
    other = admitted(it, 31.0)
    it.release(probe)
    it.record(probe, None, 0.0, 31.0)
    assert it.admit(31.0)[0] is None  # the other one is still out
    it.record(other, None, 0.0, 31.0)
    assert it.period.state is HALF_OPEN  # two successes, not three


def test_a_probe_that_is_gone_keeps_no_slot() -> None:
    """It has lost it to another one meanwhile."""
    it = circuit(probes=1, successes=3)
    half_open(it)
    probe = admitted(it, 31.0)
    assert isinstance(probe, Probe)
    it.keep_slot(probe, 50.0)
    assert it.admit(49.0)[0] is None
    other = admitted(it, 50.0)
    it.keep_slot(probe, 1000.0)
    it.release(other)
    assert it.admit(50.0)[0] is not None


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize(("period", "patience"), [(5.0, 30.0), (40.0, 40.0)])
def test_a_probe_has_the_open_period_or_thirty_seconds(period: float, patience: float, asked: bool) -> None:
    """The larger of the two, counted from its admission; then its slot is somebody else's, and its result nobody's."""
    for late, lost in [(patience - 0.5, False), (patience, True)]:
        it = circuit(opens_for=period)
        it.record(admitted(it, 0.0), "Boom: no", 0.0, 0.0)
        probe = admitted(it, period)
        if asked:  # for whoever asks, and for the probe itself
            assert (it.admit(period + late)[0] is not None) is lost
        assert [move.new for move in it.record(probe, None, 0.0, period + late)] == ([] if lost else [CLOSED])


def test_a_slow_probe_opens_where_slowness_trips() -> None:
    """The limit of the condition holds for probes as well, with equality."""
    slow = SlowRatio(0.5, slower_than=2.0, min_calls=1)
    for trip, took, state in [(slow, 1.9, CLOSED), (slow, 2.0, OPEN), (ConsecutiveFailures(1), 9.0, CLOSED)]:
        it = circuit(trip)
        it.record(admitted(it, 0.0), "Boom: no", 9.0, 0.0)
        it.record(admitted(it, 30.0), None, took, 32.0)
        assert it.period.state is state


def test_a_circuit_that_slowness_opened_says_so() -> None:
    """Nothing failed, so there is no failure to name; one that was there before is named first."""
    slow = SlowRatio(0.5, slower_than=2.0, min_calls=1)
    it = circuit(slow)
    [opened] = it.record(admitted(it, 0.0), None, 3.0, 3.0)
    assert opened.last_failure == "slow calls"
    probe = admitted(it, 33.0)
    assert it.period.last_failure == "slow calls"
    [opened] = it.record(probe, None, 2.0, 35.0)
    assert opened.last_failure == it.period.last_failure == "a slow probe"
    it = circuit(SlowRatio(0.5, slower_than=2.0, min_calls=2))
    assert it.record(admitted(it, 0.0), "Boom: no", 0.0, 0.0) == []
    [opened] = it.record(admitted(it, 0.0), None, 3.0, 3.0)
    assert opened.last_failure == "Boom: no"


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_circuit_that_has_closed_opens_for_the_first_period_again(by_hand: bool) -> None:
    """At once, also before its owner has come to draw a new one."""
    it = circuit(opens_for=5.0)
    it.record(admitted(it, 0.0), "Boom: no", 0.0, 0.0)
    it.opens_for = 40.0  # drawn by the owner, for a second opening in a row
    if by_hand:
        it.close()
    else:
        it.record(admitted(it, 5.0), None, 0.0, 5.0)
    assert it.period.state is CLOSED
    [opened] = it.record(admitted(it, 6.0), "Boom: no", 0.0, 6.0)
    assert opened.retry_after == 5.0
