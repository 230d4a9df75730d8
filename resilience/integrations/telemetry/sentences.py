"""What happened, in one sentence for each kind of event. Errors are named by their class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilience.events import (
    CallRejected,
    CircuitChanged,
    Event,
    ExecutionFinished,
    FallbackUsed,
    RetryGaveUp,
    RetryScheduled,
    TimedOut,
)
from resilience.integrations.telemetry.words import facts, printable, scope_of, status_of
from resilience.outcome import Failure

_RAN_OUT = {
    "attempts": "no attempt is left",
    "deadline": "the deadline leaves no time for another",
    "max_elapsed": "max_elapsed leaves no time for another",
    "unrepeatable": "it must not be repeated",
}


def _who(event: Event) -> str:
    """Name the execution: its pipeline, or else its policy, and what it is for."""
    name = event.pipeline or event.policy
    return name if event.operation is None else f"{name} ({event.operation})"


def _what(event: RetryScheduled | RetryGaveUp | FallbackUsed | ExecutionFinished) -> str:
    """Name what failed by its class, without the module, and its HTTP status where it has one."""
    outcome: Any = event.outcome
    if not isinstance(outcome, Failure):
        return "a result that was not good enough"
    status = status_of(outcome.error)
    name = type(outcome.error).__name__
    return name if status is None else f"{name} {status}"


def _scheduled(event: RetryScheduled) -> str:
    return f"{_who(event)}: attempt {event.attempt} failed with {_what(event)}, the next one is in {event.delay:.3g} s"


def _gave_up(event: RetryGaveUp) -> str:
    times = "1 attempt" if event.attempts == 1 else f"{event.attempts} attempts"
    return (
        f"{_who(event)}: {event.policy} gave up after {times} in {event.elapsed:.3g} s, as "
        f"{_RAN_OUT[event.reason]}; the last failure was {_what(event)}"
    )


def _timed_out(event: TimedOut) -> str:
    limits = {
        "attempt": f"an attempt took longer than the {event.timeout:.3g} s of {event.policy}",
        "total": f"the execution took longer than the {event.timeout:.3g} s of {event.policy}",
        "deadline": f"the deadline of the caller passed, {event.timeout:.3g} s after {event.policy} began",
    }
    unknown = f"a call took longer than the {event.timeout:.3g} s of {event.policy}"
    return f"{_who(event)}: {limits.get(scope_of(event), unknown)}"


def _rejected(event: CallRejected) -> str:
    waited = f" after {event.waited:.3g} s in the queue" if event.waited else ""
    later = "" if event.retry_after is None else f"; it may be worth a try in {event.retry_after:.3g} s"
    return f"{_who(event)}: {event.policy} refused a call with {event.reason}{waited}{later}"


def _changed(event: CircuitChanged) -> str:
    lasts = "" if event.retry_after is None else f" for {event.retry_after:.3g} s"
    why = f": {event.reason}" if event.reason else ""
    return f"circuit {event.policy}: {event.old.value} -> {event.new.value}{lasts}{why}"


def _fell_back(event: FallbackUsed) -> str:
    return f"{_who(event)}: {event.policy} answered instead of {_what(event)}"


def _finished(event: ExecutionFinished) -> str:
    times = "1 attempt" if event.attempts == 1 else f"{event.attempts} attempts"
    spent = f"after {times} in {event.elapsed:.3g} s"
    if event.outcome is None:
        by = {"caller": "by its caller", "closed": "as nobody waits for it", "interrupt": "by an interrupt"}
        return f"{_who(event)}: cancelled {by.get(event.cancelled_by or '', 'by a deadline')}, {spent}"
    return (
        f"{_who(event)}: failed {spent} with {_what(event)}"
        if isinstance(event.outcome, Failure)
        else (f"{_who(event)}: done {spent}")
    )


_SENTENCES: dict[type[Event], Callable[[Any], str]] = {
    RetryScheduled: _scheduled,
    RetryGaveUp: _gave_up,
    TimedOut: _timed_out,
    CallRejected: _rejected,
    CircuitChanged: _changed,
    FallbackUsed: _fell_back,
    ExecutionFinished: _finished,
}


def sentence(event: Event, *, messages: bool) -> str:
    """Say what happened in one line, whatever a message or a name holds.

    :param messages: whether the messages of errors are told.
    """
    text = _SENTENCES[type(event)](event)
    if messages:
        told = facts(event, messages=True)
        if "error" in told:
            text = f"{text}: {told['error']}"
        elif "last_failure" in told:
            text = f"{text}, after {told['last_failure']}"
    return printable(text)
