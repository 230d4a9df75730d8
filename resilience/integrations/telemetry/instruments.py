"""The instruments (counters, histograms, gauges), and what an event adds to which of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple, TypeAlias, final

from resilience import events
from resilience.events import Event
from resilience.integrations.telemetry.words import ENDING, ending, error_type, scope_of

#: Upper bounds of the histograms, in seconds: those that OpenTelemetry advises for durations, and two for long waits.
DURATION_BUCKETS: tuple[float, ...] = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(30.0, 60.0),
)


@final
@dataclass(frozen=True, slots=True, eq=False)  # compared by identity, because every event looks instruments up
class Instrument:
    """A metric.

    :param name: dotted lower case, as in OpenTelemetry.
    :param kind: a counter is a sum, a histogram counts values by bucket, a gauge is a current value.
    :param unit: in UCUM: ``"s"``, ``"1"``, or the counted things in braces, such as ``"{call}"``.
    :param labels: the names of its labels.
    """

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    unit: str
    description: str
    labels: tuple[str, ...]


class Measurement(NamedTuple):
    """A value for an instrument.

    :param value: the amount to add to a counter, a value for a histogram, or the value of a gauge.
    :param labels: the value of every label of the instrument; empty if it does not apply.
    """

    instrument: Instrument
    value: float
    labels: Mapping[str, str]


#: A measurement with its label values in a plain tuple, in the order of the instrument's labels: cheap for calls.
Reading: TypeAlias = tuple[Instrument, float, tuple[str, ...]]


# --- instruments -----------------------------------------------------------------------------

_CALLS = ("pipeline", "operation")
_POLICY = ("pipeline", "policy")
_WHERE = (*_POLICY, "operation")
_OUTCOME = (*_CALLS, *ENDING)


def _seconds(name: str, description: str, *labels: str) -> Instrument:
    return Instrument(f"resilience.{name}", "histogram", "s", description, labels)


def _count(unit: str, name: str, description: str, *labels: str) -> Instrument:
    return Instrument(f"resilience.{name}", "counter", f"{{{unit}}}", description, labels)


def _gauge(unit: str, name: str, description: str, *labels: str) -> Instrument:
    return Instrument(f"resilience.{name}", "gauge", unit, description, labels)


EXECUTION_DURATION = _seconds("execution.duration", "How long executions took, attempts and waits together.", *_OUTCOME)
ATTEMPT_DURATION = _seconds("attempt.duration", "How long single calls of functions took.", *_OUTCOME)
ATTEMPT_REMAINING = _seconds(
    "attempt.remaining", "How much time attempts had when they began, if it was limited.", *_CALLS
)

FIRST_ITEM = _seconds("stream.first_item", "How long streams took to bring their first item.", *_CALLS)

_AGAIN = "Attempts that were made, or were to be made after a wait, because one had failed."
_GAVE_UP = "Retries that ended without success, by what ran out."
_HEDGES = "Attempts that were begun beside one that took long."
_HEDGED = "Calls of which more than one attempt was made at once, by which attempt won: first, hedge or none."
_SPENT = "Retries and hedges that were not made, as their budget was spent."
_TIMED_OUT = "Calls that ran out of time, by what timed out: attempt, total, queue or deadline."
_REFUSED = "Calls that were not let through, by the error that the caller got."
_SHADOWED = "Calls that policies which only observe would not have let through, by the error."
_ANSWERED = "Calls that were answered without a call, by the kind of the answer: fresh, stale or shared."
_CHANGED = "Changes of the state of circuits, by the state that they went to."

RETRIES = _count("attempt", "retries", _AGAIN, *_WHERE, "error_type")
GIVE_UPS = _count("execution", "give_ups", _GAVE_UP, *_WHERE, "reason", "error_type")
HEDGES = _count("attempt", "hedges", _HEDGES, *_WHERE)
HEDGED_CALLS = _count("call", "hedged.calls", _HEDGED, *_WHERE, "won")
BUDGET_SPENT = _count("attempt", "budget.spent", _SPENT, *_WHERE, "repeat")
TIMEOUTS = _count("timeout", "timeouts", _TIMED_OUT, *_WHERE, "scope")
REJECTIONS = _count("call", "rejections", _REFUSED, *_WHERE, "reason")
SHADOW_REJECTIONS = _count("call", "shadow_rejections", _SHADOWED, *_WHERE, "reason")
FALLBACKS = _count("execution", "fallbacks", "Answers that were given instead of a failure.", *_WHERE, "error_type")
INJECTIONS = _count("call", "chaos.injections", "Calls in which a Chaos has injected an effect.", *_WHERE, "effect")
CACHE_ANSWERS = _count("call", "cache.answers", _ANSWERED, *_WHERE, "how")
STREAM_ITEMS = _count("item", "stream.items", "Items that streams have handed out.", *_CALLS)
PARKED = _count("task", "supervisor.parked", "Tasks that a Supervisor has given up.", "policy")
TRANSITIONS = _count("transition", "circuit.transitions", _CHANGED, "policy", "old_state", "state")

_STATE = "1 for the state that a circuit is in, 0 for the others."
_ABANDONED = "Blocking calls of this process that a timeout has abandoned, and that are still running."

CIRCUIT_STATE = _gauge("1", "circuit.state", _STATE, *_POLICY, "state")
IN_FLIGHT = _gauge("{call}", "bulkhead.in_flight", "Calls that run under a bulkhead.", *_POLICY)
QUEUED = _gauge("{call}", "bulkhead.queued", "Calls that wait for a bulkhead.", *_POLICY)
LIMIT = _gauge("{call}", "bulkhead.limit", "Calls that a bulkhead lets run at once.", *_POLICY)
REJECTION_RATE = _gauge("1", "throttle.rejection_rate", "The share of the calls that a throttle holds back.", *_POLICY)
RATE_QUEUED = _gauge("{call}", "rate_limiter.queued", "Calls that wait for their turn.", *_POLICY)
NEXT_TURN = _gauge("s", "rate_limiter.next_turn", "How long a call that comes now waits for its turn.", *_POLICY)
CACHE_SIZE = _gauge("{entry}", "cache.size", "Entries that a cache holds.", *_POLICY)
KEYS = _gauge("{key}", "keyed.keys", "Keys that have a policy of their own.", *_POLICY)
ABANDONED = _gauge("{call}", "calls.abandoned", _ABANDONED)

INSTRUMENTS: tuple[Instrument, ...] = (
    *(EXECUTION_DURATION, ATTEMPT_DURATION, ATTEMPT_REMAINING),
    *(FIRST_ITEM, STREAM_ITEMS, CACHE_ANSWERS, CACHE_SIZE, KEYS),
    *(HEDGES, HEDGED_CALLS),
    *(RETRIES, GIVE_UPS, BUDGET_SPENT, TIMEOUTS, REJECTIONS, SHADOW_REJECTIONS, FALLBACKS, INJECTIONS, TRANSITIONS),
    PARKED,
    *(CIRCUIT_STATE, IN_FLIGHT, QUEUED, LIMIT, REJECTION_RATE, RATE_QUEUED, NEXT_TURN, ABANDONED),
)


# --- from events -----------------------------------------------------------------------------


def measurements(event: Event) -> tuple[Measurement, ...]:
    """Return what an event adds to which instruments; nothing for a kind that is not measured.

    >>> from resilience import Retry, events
    >>> from resilience.integrations.telemetry import measurements
    >>> from resilience.testing import recording, script
    >>> with recording(events.RetryScheduled) as recorder:
    ...     Retry(backoff=[0]).call(script(ConnectionError("reset"), "fine"))
    'fine'
    >>> [(it.instrument.name, it.value) for it in measurements(recorder.events[0])]
    [('resilience.retries', 1)]
    """
    found = readings(event)
    return tuple([Measurement(it, value, dict(zip(it.labels, texts, strict=True))) for it, value, texts in found])


def readings(event: Event) -> tuple[Reading, ...]:
    """Return the measurements of an event as readings."""
    if isinstance(event, (events.ExecutionFinished, events.CallFinished)):
        return _ended(event)
    if isinstance(event, events.StreamOpened):
        return ((FIRST_ITEM, event.elapsed, _calls(event)),)
    if isinstance(event, events.CallRejected) and event.shadow:
        return (_count_one(SHADOW_REJECTIONS, event),)
    counter = _COUNTERS.get(type(event))
    counted = () if counter is None else (_count_one(counter, event),)
    if isinstance(event, events.CallRejected) and event.waited > 0:
        return (*counted, _count_one(TIMEOUTS, event))
    return counted


def _ended(event: events.ExecutionFinished | events.CallFinished) -> tuple[Reading, ...]:
    calls = _calls(event)
    ended = calls + ending(event)
    if isinstance(event, events.ExecutionFinished):
        whole = EXECUTION_DURATION, event.elapsed, ended
        return (whole, (STREAM_ITEMS, event.items, calls)) if event.items else (whole,)
    lasted = ATTEMPT_DURATION, event.elapsed, ended
    return (lasted,) if event.remaining == inf else (lasted, (ATTEMPT_REMAINING, event.remaining, calls))


def _calls(event: Event) -> tuple[str, str]:
    """Return the labels `pipeline` and `operation` of an event whose policy is the executed one."""
    return event.policy, event.operation or ""


def _count_one(counter: Instrument, event: Event) -> Reading:
    return counter, 1, tuple([_TEXTS[label](event) for label in counter.labels])


def _scope(event: events.TimedOut | events.CallRejected) -> str:
    if isinstance(event, events.TimedOut):
        return scope_of(event)
    return "deadline" if event.reason == "DeadlineExceeded" else "queue"  # the limit that ended the wait


#: The counter that each kind of event increments. A refusal after a wait counts as a timeout as well.
_COUNTERS: dict[type[Event], Instrument] = {
    events.RetryScheduled: RETRIES,
    events.RetryGaveUp: GIVE_UPS,
    events.HedgeStarted: HEDGES,
    events.HedgeFinished: HEDGED_CALLS,
    events.BudgetSpent: BUDGET_SPENT,
    events.TimedOut: TIMEOUTS,
    events.CallRejected: REJECTIONS,
    events.FallbackUsed: FALLBACKS,
    events.ChaosInjected: INJECTIONS,
    events.CacheUsed: CACHE_ANSWERS,
    events.CircuitChanged: TRANSITIONS,
    events.Parked: PARKED,
}

#: How the value of each label of a counter is read from an event.
_TEXTS: dict[str, Callable[[Any], str]] = {
    "pipeline": lambda event: event.pipeline or "",
    "policy": lambda event: event.policy,
    "operation": lambda event: event.operation or "",
    "error_type": lambda event: error_type(event.outcome),
    "reason": lambda event: event.reason,
    "repeat": lambda event: event.repeat,
    "won": lambda event: "none" if event.won is None else "hedge" if event.won else "first",
    "scope": _scope,
    "effect": lambda event: event.effect,
    "how": lambda event: event.how,
    "old_state": lambda event: event.old.value,
    "state": lambda event: event.new.value,
}

#: The kinds of events that are measured.
MEASURED: tuple[type[Event], ...] = (
    events.ExecutionFinished,
    events.CallFinished,
    events.StreamOpened,
    *_COUNTERS,
)
