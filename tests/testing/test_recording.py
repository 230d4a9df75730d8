"""A recorder keeps events, and its failed assertions show what happened instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from resilience import Bulkhead, CircuitBreaker, Fallback, Policy, Retry, events
from resilience.events import (
    AttemptFailed,
    CallRejected,
    CircuitChanged,
    ExecutionFinished,
    FallbackUsed,
    RetryGaveUp,
    RetryScheduled,
)
from resilience.testing import Recorder, recording, script, virtual_time
from tests.conftest import Boom


def a_run(recorder: Recorder | None = None) -> None:
    retry = Retry(3, on=Boom, backoff=[2.5])
    pipeline = Policy.wrap(Fallback("unknown"), retry, listeners=[] if recorder is None else [recorder])
    with virtual_time():
        pipeline.call(script(Boom("down"), Boom("down"), Boom("down")))


def test_a_recording_keeps_every_event_of_the_process_in_order() -> None:
    with recording() as recorder:
        a_run()
    a_run()
    failed_and_again = [AttemptFailed, RetryScheduled] * 2
    assert recorder.kinds == [*failed_and_again, AttemptFailed, RetryGaveUp, FallbackUsed, ExecutionFinished]
    assert [event.attempt for event in recorder.of(AttemptFailed)] == [1, 2, 3]
    recorder.assert_sequence(*recorder.kinds)
    recorder.clear()
    recorder.assert_sequence()


def test_a_recording_may_be_limited_to_some_kinds() -> None:
    with recording(RetryGaveUp, FallbackUsed) as recorder:
        a_run()
    assert recorder.kinds == [RetryGaveUp, FallbackUsed]


def test_a_recording_ends_with_an_error() -> None:
    """The recorder no longer listens afterwards."""
    with pytest.raises(Boom), recording(RetryGaveUp) as recorder:
        raise Boom
    a_run()
    assert recorder.events == []


def test_a_recorder_can_listen_to_one_pipeline() -> None:
    recorder = Recorder()
    a_run(recorder)
    a_run()
    recorder.assert_happened(ExecutionFinished, times=1)


def test_assertions_check_kinds_attributes_and_counts() -> None:
    recorder = Recorder()
    a_run(recorder)
    recorder.assert_happened(RetryScheduled)
    recorder.assert_happened(RetryScheduled, times=2, delay=2.5)
    recorder.assert_happened(RetryScheduled, times=1, delay=2.5, attempt=2)
    recorder.assert_happened(RetryGaveUp, reason="attempts", attempts=3, elapsed=5.0)
    recorder.assert_happened(events.Event, times=8)
    recorder.assert_never(CircuitChanged)
    recorder.assert_never(RetryScheduled, attempt=3)


def test_a_failed_assertion_shows_all_events() -> None:
    """The expectation is in the first line, then the events follow with their times."""
    recorder = Recorder()
    a_run(recorder)
    timeline = str(recorder)
    assert timeline.splitlines()[1] == "+0 s  Retry  RetryScheduled attempt=1 delay=2.5 outcome=Boom('down')"
    assert timeline.splitlines()[-1] == "+5 s  Pipeline  ExecutionFinished attempts=3 elapsed=5 outcome='unknown'"
    with pytest.raises(AssertionError) as caught:
        recorder.assert_happened(RetryScheduled, times=2, attempt=1)
    assert str(caught.value) == f"RetryScheduled attempt=1 should have happened 2 times, not 1 times, in\n{timeline}"
    with pytest.raises(AssertionError, match="CircuitChanged should have happened at least once, not 0 times"):
        recorder.assert_happened(CircuitChanged)
    with pytest.raises(AssertionError, match="RetryGaveUp should have happened 0 times, not 1 times"):
        recorder.assert_never(RetryGaveUp)
    with pytest.raises(AssertionError, match=r"^AttemptFailed, RetryGaveUp should have happened, not\n"):
        recorder.assert_sequence(AttemptFailed, RetryGaveUp)
    with pytest.raises(AssertionError, match=r"nothing should have happened, not\n"):
        recorder.assert_sequence()
    recorder.clear()
    with pytest.raises(AssertionError, match=r"in\n\(no events\)$"):
        recorder.assert_happened(RetryGaveUp)


@pytest.mark.parametrize(
    "check",
    [
        lambda recorder: recorder.assert_happened(CircuitChanged),
        lambda recorder: recorder.assert_never(AttemptFailed),
        lambda recorder: recorder.assert_sequence(CircuitChanged),
    ],
    ids=["happened", "never", "sequence"],
)
def test_pytest_shows_the_line_of_the_test_that_failed(check: Callable[[Recorder], None]) -> None:
    """And none of the library."""
    recorder = Recorder()
    a_run(recorder)
    with pytest.raises(AssertionError) as raised:
        check(recorder)
    assert [it.path.name for it in raised.traceback.filter(raised)] == ["test_recording.py"] * 2


def test_an_attribute_that_a_kind_does_not_have_is_refused() -> None:
    """Otherwise `assert_never` would hide a typing error."""
    with pytest.raises(TypeError, match="RetryGaveUp has no delay, reasn"):
        Recorder().assert_never(RetryGaveUp, delay=1, reasn="attempts")


@pytest.mark.parametrize("kind", ["RetryGaveUp", ValueError, None])
def test_a_kind_that_is_no_event_class_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"^kind must be an event class of resilience\.events, not "):
        Recorder().assert_happened(kind)


def test_a_circuit_change_is_shown_with_its_values() -> None:
    """Values of all types have a short form."""
    with virtual_time(), recording() as recorder:
        CircuitBreaker(1, on_transition=None).capture(script(Boom("down")))
    assert "CircuitBreaker  CircuitChanged old=" in str(recorder)
    assert "retry_after=30 last_failure=Boom: down" in str(recorder)


def test_attributes_without_a_value_are_not_shown() -> None:
    """For example those of the queue, in a refusal without a queue."""
    bulkhead = Bulkhead(1)
    with recording(CallRejected) as recorder:
        bulkhead.execute(lambda ctx: bulkhead.capture(lambda ctx: "never"))
    assert str(recorder) == "+0 s  Bulkhead  CallRejected reason=BulkheadFull retry_after=None"
