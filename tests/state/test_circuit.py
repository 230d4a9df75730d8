"""The circuit, against a simple model that keeps every result and evaluates all of them each time."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from operator import or_

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resilience import CircuitState, ConsecutiveFailures, FailureRatio, SlowRatio, Trip
from resilience.state.circuit import Admission, Circuit, HalfOpen, Open, Probe, Transition

CLOSED, OPEN, HALF_OPEN, ISOLATED = CircuitState

# --- the model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    failed: bool
    took: float
    at: float


@dataclass(frozen=True)
class Condition:
    """One trip condition and its meaning. Times are whole seconds, so that windows are exact."""

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
class ModelAdmission:
    """The model's admission of a call."""

    epoch: int
    lost_at: float = float("inf")
    has_ended: bool = False


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
    out: list[ModelAdmission] = field(default_factory=list)  # the probes of this epoch
    good: int = 0
    openings: int = 0  # in a row
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

    def probes_out(self, now: float) -> list[ModelAdmission]:
        return [it for it in self.out if not it.has_ended and now < it.lost_at]

    def admit(self, now: float) -> ModelAdmission | None:
        if self.state is OPEN and now >= self.until:
            self.move(HALF_OPEN)
        if self.state is CLOSED:
            return ModelAdmission(self.epoch)
        if self.state is not HALF_OPEN or len(self.probes_out(now)) >= self.probes:
            return None
        patience = max(self.lasts, 30.0) if self.probe_timeout is None else self.probe_timeout
        self.out.append(ModelAdmission(self.epoch, now + patience))
        return self.out[-1]

    def record(self, admitted: ModelAdmission, failed: bool, took: float, now: float) -> None:
        if admitted.epoch != self.epoch:
            return
        if self.state is CLOSED:
            self.results.append(Result(failed, took, now))
            if any(condition.holds(self.results) for condition in self.conditions):
                self.open(now)
            return
        lost = now >= admitted.lost_at
        admitted.has_ended = True
        if lost:
            return
        if failed or took >= min(condition.slower_than for condition in self.conditions):
            self.open(now)
            return
        self.good += 1
        if self.good >= self.successes:
            self.close()

    def release(self, admitted: ModelAdmission) -> None:
        admitted.has_ended = True


# --- the circuit beside the model ------------------------------------------------------------

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
    """Calls that are admitted, and end in any order, late or never; and manual changes of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.calls: list[tuple[Admission, ModelAdmission]] = []
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

    def check_transition(self, it: Transition | None) -> None:
        if it is not None:
            assert it.retry_after == (self.model.lasts if it.new is OPEN else None)
            assert (it.last_failure is None) is (it.new in (CLOSED, ISOLATED))
            self.moved.append((it.old, it.new))
        self.circuit.opens_for = self.model.next_period()  # the breaker does this

    @rule(seconds=st.sampled_from([0, 1, 2, 3, 5, 10, 30, 40]))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(times=st.integers(1, 4))
    def call(self, times: int) -> None:
        for _ in range(times):
            admission, transition = self.circuit.admit(self.now)
            expected = self.model.admit(self.now)
            self.check_transition(transition)
            assert (admission is None) is (expected is None)
            if admission is not None and expected is not None:
                self.calls.append((admission, expected))

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), failed=st.booleans(), took=st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0]))
    def end(self, data: st.DataObject, failed: bool, took: float) -> None:
        admission, expected = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        self.model.record(expected, failed, took, self.now)
        self.check_transition(self.circuit.record(admission, "Boom: no" if failed else None, took, self.now))

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), times=st.integers(1, 8))
    def fail_several(self, data: st.DataObject, times: int) -> None:
        """End calls with slow failures, one after another: random results rarely trip a circuit."""
        for _ in range(min(times, len(self.calls))):
            self.end(data, True, 3.0)

    @precondition(lambda self: self.model.state is CLOSED)
    @rule(wait=st.booleans())
    def begin_outage(self, wait: bool) -> None:
        """Let calls fail slowly until the circuit opens, and perhaps wait until a probe is due."""
        for _ in range(12):
            if self.model.state is CLOSED:
                self.call(1)
                admission, expected = self.calls.pop()
                self.model.record(expected, True, 3.0, self.now)
                self.check_transition(self.circuit.record(admission, "Boom: no", 3.0, self.now))
        if wait and self.model.state is OPEN:
            self.now = self.model.until
            self.call(1)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        admission, expected = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        self.model.release(expected)
        self.circuit.release(admission)

    @rule()
    def isolate(self) -> None:
        if self.model.state is not ISOLATED:
            self.model.move(ISOLATED)
        self.check_transition(self.circuit.isolate())

    @rule()
    def close(self) -> None:
        self.model.close()
        self.check_transition(self.circuit.close())

    @invariant()
    def circuit_and_model_agree(self) -> None:
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

# --- single rules ----------------------------------------------------------------------------


def make_circuit(trip: Trip | None = None, *, opens_for: float = 30.0, probes: int = 1, successes: int = 1) -> Circuit:
    return Circuit(trip or ConsecutiveFailures(1), opens_for, probes, successes, None)


def admitted(circuit: Circuit, now: float) -> Admission:
    admission, _ = circuit.admit(now)
    assert admission is not None
    return admission


def recorded(circuit: Circuit, admission: Admission, failure: str | None, took: float, now: float) -> Transition:
    transition = circuit.record(admission, failure, took, now)
    assert transition is not None
    return transition


def half_open(circuit: Circuit) -> None:
    """Trip the circuit at 0, and release a first probe at 30."""
    circuit.record(admitted(circuit, 0.0), "Boom: no", 0.0, 0.0)
    circuit.release(admitted(circuit, 30.0))
    assert circuit.period.state is HALF_OPEN


def test_a_probe_is_recorded_or_released_once() -> None:
    """To release or record it again counts nothing, and frees no other probe's slot."""
    circuit = make_circuit(probes=1, successes=3)
    half_open(circuit)
    probe = admitted(circuit, 31.0)
    circuit.record(probe, None, 0.0, 31.0)
    other = admitted(circuit, 31.0)
    circuit.release(probe)
    circuit.record(probe, None, 0.0, 31.0)
    assert circuit.admit(31.0)[0] is None  # the other probe still runs
    circuit.record(other, None, 0.0, 31.0)
    assert circuit.period.state is HALF_OPEN  # two successes, not three


def test_keep_slot_of_a_probe_that_lost_its_slot_does_nothing() -> None:
    circuit = make_circuit(probes=1, successes=3)
    half_open(circuit)
    probe = admitted(circuit, 31.0)
    assert isinstance(probe, Probe)
    circuit.keep_slot(probe, 50.0)
    assert circuit.admit(49.0)[0] is None
    other = admitted(circuit, 50.0)
    circuit.keep_slot(probe, 1000.0)
    circuit.release(other)
    assert circuit.admit(50.0)[0] is not None


@pytest.mark.parametrize("another_call", [False, True])
@pytest.mark.parametrize(("period", "patience"), [(5.0, 30.0), (40.0, 40.0)])
def test_a_probe_keeps_its_slot_for_the_open_period_or_thirty_seconds(
    period: float, patience: float, another_call: bool
) -> None:
    """The longer of the two holds, from its admission; after it the slot is free and the result is ignored."""
    for late, lost in [(patience - 0.5, False), (patience, True)]:
        circuit = make_circuit(opens_for=period)
        circuit.record(admitted(circuit, 0.0), "Boom: no", 0.0, 0.0)
        probe = admitted(circuit, period)
        if another_call:  # the slot expires both for another call and for the probe itself
            assert (circuit.admit(period + late)[0] is not None) is lost
        assert (circuit.record(probe, None, 0.0, period + late) is None) is lost
        assert (circuit.period.state is CLOSED) is not lost


def test_the_last_failure_of_a_circuit_that_slowness_opened_is_slow_calls() -> None:
    """An earlier failure has priority."""
    slow = SlowRatio(0.5, slower_than=2.0, min_calls=1)
    circuit = make_circuit(slow)
    opened = recorded(circuit, admitted(circuit, 0.0), None, 3.0, 3.0)
    assert opened.last_failure == "slow calls"
    probe = admitted(circuit, 33.0)
    assert circuit.period.last_failure == "slow calls"
    opened = recorded(circuit, probe, None, 2.0, 35.0)
    assert opened.last_failure == circuit.period.last_failure == "a slow probe"
    circuit = make_circuit(SlowRatio(0.5, slower_than=2.0, min_calls=2))
    assert circuit.record(admitted(circuit, 0.0), "Boom: no", 0.0, 0.0) is None
    opened = recorded(circuit, admitted(circuit, 0.0), None, 3.0, 3.0)
    assert opened.last_failure == "Boom: no"


@pytest.mark.parametrize("manually", [False, True])
def test_after_a_close_the_circuit_opens_for_the_first_period_again(manually: bool) -> None:
    """This holds even before the breaker has drawn the next period."""
    circuit = make_circuit(opens_for=5.0)
    circuit.record(admitted(circuit, 0.0), "Boom: no", 0.0, 0.0)
    circuit.opens_for = 40.0  # drawn by the breaker, for a second opening in a row
    if manually:
        circuit.close()
    else:
        circuit.record(admitted(circuit, 5.0), None, 0.0, 5.0)
    assert circuit.period.state is CLOSED
    opened = recorded(circuit, admitted(circuit, 6.0), "Boom: no", 0.0, 6.0)
    assert opened.retry_after == 5.0
