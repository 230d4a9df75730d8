"""Events as sentences, one for each kind. Errors are named by their class, and each policy is named once."""

from __future__ import annotations

from typing import Any

from resilience import events
from resilience.events import Event
from resilience.formats import format_count, format_seconds
from resilience.integrations.telemetry.words import facts, printable, scope_of, status_of
from resilience.outcome import Failure, Outcome

_RAN_OUT = {
    "attempts": "no attempt is left",
    "deadline": "the deadline leaves no time for another",
    "max_elapsed": "max_elapsed leaves no time for another",
    "unrepeatable": "it must not be repeated",
    "retry_after": "the server asks for a longer wait than max_retry_after",
    "circuit_open": "a circuit inside is open",
    "budget": "the budget of retries is spent",
    "cap": "a RepeatCap allows no other",
}
_CANCELLED = {
    "caller": "by its caller",
    "closed": "as its coroutine was closed",
    "deadline": "by a deadline",
    "hedge": "as another attempt was faster",
    "interrupt": "by an interrupt",
}
_ANSWERS = {"fresh": "a value that it keeps", "stale": "an old value", "shared": "what another call has brought"}


#: The kinds whose sentence has another subject than the policy, or names it elsewhere.
_WITHOUT_SUBJECT = (events.RetryScheduled, events.TimedOut, events.CircuitChanged)


def sentence(event: Event, *, messages: bool) -> str:
    """Describe an event in one line of printable characters, even if a message or a name contains others."""
    subject = "" if isinstance(event, _WITHOUT_SUBJECT) else _subject(event)
    text = f"{_topic(event)}: {subject}{_said(event)}"
    if messages:
        known = facts(event, messages=True)
        if "error" in known:
            text = f"{text}: {known['error']}"
        elif "last_failure" in known:
            text = f"{text}, after {known['last_failure']}"
    return printable(text)


def _said(event: Event) -> str:
    """Return what the event says besides its topic and its policy."""
    match event:  # one case for each kind, the most frequent first and the rarest below
        case events.ExecutionFinished():
            return _finished(event)
        case events.RetryScheduled():
            later = format_seconds(event.delay)
            return f"attempt {event.attempt} failed with {_what(event.outcome)}, the next one is in {later}"
        case events.RetryGaveUp():
            reason = f"as {_RAN_OUT[event.reason]}; the last failure was {_what(event.outcome)}"
            return f"gave up {_spent(event)}, {reason}"
        case events.HedgeStarted():
            return f"began attempt {event.number} beside the first, after {format_seconds(event.elapsed)}"
        case events.HedgeFinished():
            which = "none was good" if event.won is None else f"attempt {event.won} was the first good one"
            return f"made {event.attempts} attempts at once in {format_seconds(event.elapsed)}: {which}"
        case events.BudgetSpent():
            return f"made no {event.repeat}, as the budget is spent"
        case events.TimedOut():
            return _timed_out(event)
        case events.CallRejected():
            return _rejected(event)
        case events.CircuitChanged():
            lasts = "" if event.retry_after is None else f" for {format_seconds(event.retry_after)}"
            why = f": {event.reason}" if event.reason else ""
            return f"{event.old.value} -> {event.new.value}{lasts}{why}"
        case events.FallbackUsed():
            return f"answered instead of {_what(event.outcome)}"
        case events.LimitChanged():
            return f"lets {format_count(event.new, 'call')} run at once, not {event.old}: {event.reason}"
        case events.ChaosInjected():
            return f"injected {'an' if event.effect in ('error', 'action') else 'a'} {event.effect}"
        case events.CacheUsed():
            return f"answered with {_ANSWERS[event.how]}"
        case events.StreamOpened():
            return f"the first item came in attempt {event.attempt}, after {format_seconds(event.elapsed)}"
    assert isinstance(event, events.Parked)
    times = format_count(event.restarts, "restart")
    return f"gave {event.name} up after {times}; the last failure was {_what(event.last)}"


def _timed_out(event: events.TimedOut) -> str:
    seconds = format_seconds(event.timeout)
    if event.by_deadline:
        return f"the deadline of the caller passed, {seconds} after {_subject(event) or 'it '}began"
    what = {"attempt": "an attempt", "total": "the execution"}.get(scope_of(event), "a call")
    name = _subject(event).rstrip()
    return f"{what} took longer than {f'the {seconds} of {name}' if name else seconds}"


def _rejected(event: events.CallRejected) -> str:
    if event.shadow:
        return f"only observes, and would have refused a call with {event.reason}"
    waited = f" after {format_seconds(event.waited)} in the queue" if event.waited else ""
    later = "" if event.retry_after is None else f"; it may be worth a try in {format_seconds(event.retry_after)}"
    return f"refused a call with {event.reason}{waited}{later}"


def _finished(event: events.ExecutionFinished) -> str:
    if event.outcome is None:
        return f"cancelled {_CANCELLED[event.cancelled_by or 'caller']}, {_spent(event)}"
    if isinstance(event.outcome, Failure):
        return f"failed {_spent(event)} with {_what(event.outcome)}"
    return f"done {_spent(event)}"


def _topic(event: Event) -> str:
    """Return how the line begins: the circuit that changed, or the pipeline (or else policy) and the operation."""
    if isinstance(event, events.CircuitChanged):
        return f"circuit {event.policy}"
    name = event.pipeline or event.policy
    return name if event.operation is None else f"{name} ({event.operation})"


def _subject(event: Event) -> str:
    """Return the name of the policy, with a space; nothing if the line begins with that name."""
    return "" if event.policy == (event.pipeline or event.policy) else f"{event.policy} "


def _spent(event: events.RetryGaveUp | events.ExecutionFinished) -> str:
    handed_out = getattr(event, "items", None)
    items = "" if handed_out is None else f" and {format_count(handed_out, 'item')}"
    return f"after {format_count(event.attempts, 'attempt')}{items} in {format_seconds(event.elapsed)}"


def _what(outcome: Outcome[Any]) -> str:
    """Return the class of the failure, without its module, and its HTTP or gRPC status if there is one."""
    if not isinstance(outcome, Failure):
        return "a result that was not good enough"
    status = status_of(outcome.error)
    name = type(outcome.error).__name__
    return name if status is None else f"{name} {status}"
