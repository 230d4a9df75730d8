"""Single rules of the circuit. `tests/policies/test_machines.py` compares it with a model."""

from __future__ import annotations

import pytest

from resilience import CircuitState, ConsecutiveFailures, SlowRatio, Trip
from resilience.state.circuit import Admission, Circuit, Probe, Transition

CLOSED, OPEN, HALF_OPEN, ISOLATED = CircuitState


def make_circuit(trip: Trip | None = None, *, opens_for: float = 30.0, probes: int = 1, successes: int = 1) -> Circuit:
    return Circuit(trip or ConsecutiveFailures(1), opens_for, probes, successes, None, checks_first=False)


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


def test_if_a_function_is_the_first_probe_only_that_one_runs_alone() -> None:
    circuit = Circuit(ConsecutiveFailures(1), 30.0, 2, 3, None, checks_first=True)
    half_open(circuit)
    first = admitted(circuit, 31.0)
    assert circuit.admit(31.0)[0] is None
    circuit.record(first, None, 0.0, 31.0)
    admitted(circuit, 31.0)
    admitted(circuit, 31.0)
    assert circuit.admit(31.0)[0] is None


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
def test_a_probe_keeps_its_slot_a_period_or_30_seconds(period: float, patience: float, another_call: bool) -> None:
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
