"""The instruments (counters, histograms, gauges), and what an event adds to which of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple, TypeAlias, final

from resilience import events
from resilience.events import Event
from resilience.integrations.telemetry.words import ENDING, ending, error_type, scope_of
from resilience.policies.adaptive_limit import AdaptiveLimit
from resilience.policies.adaptive_throttle import AdaptiveThrottle
from resilience.policies.bulkhead import Bulkhead
from resilience.policies.cache import Cache
from resilience.policies.circuit_breaker import CircuitBreaker
from resilience.policies.keyed import Keyed
from resilience.policies.rate_limiter import RateLimiter
from resilience.policy import Policy

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
    :param combine: what a gauge shows for several policies with the same labels: the sum of their values, or the
        largest one, for shares and times.
    """

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    unit: str
    description: str
    labels: tuple[str, ...]
    combine: Literal["sum", "max"] = "sum"


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

_CALLS = ("pipeline", "operation")
_POLICY = ("pipeline", "policy")
_WHERE = (*_POLICY, "operation")
_OUTCOME = (*_CALLS, *ENDING)


def _seconds(name: str, description: str, *labels: str) -> Instrument:
    return Instrument(f"resilience.{name}", "histogram", "s", description, labels)


def _count(unit: str, name: str, description: str, *labels: str) -> Instrument:
    return Instrument(f"resilience.{name}", "counter", f"{{{unit}}}", description, labels)


def _gauge(unit: str, name: str, description: str, *labels: str, combine: Literal["sum", "max"] = "sum") -> Instrument:
    return Instrument(f"resilience.{name}", "gauge", unit, description, labels, combine)


_EXECUTION = _seconds("execution.duration", "How long executions took, attempts and waits together.", *_OUTCOME)
_ATTEMPT = _seconds("attempt.duration", "How long single calls of functions took.", *_OUTCOME)
_REMAINING = _seconds("attempt.remaining", "How much time attempts had when they began, if it was limited.", *_CALLS)
_FIRST_ITEM = _seconds("stream.first_item", "How long streams took to deliver their first item.", *_CALLS)
_ITEMS = _count("item", "stream.items", "Items delivered by streams.", *_CALLS)

_TIMED_OUT = "Calls that ran out of time, by what timed out: attempt, total, queue or deadline."
_TIMEOUTS = _count("timeout", "timeouts", _TIMED_OUT, *_WHERE, "scope")
_SHADOWED = "Calls that policies which only observe would not have let through, by the error."
_SHADOW_REJECTIONS = _count("call", "shadow_rejections", _SHADOWED, *_WHERE, "reason")

_AGAIN = "Attempts that were made, or were to be made after a wait, because one had failed."
_GAVE_UP = "Retries that ended without success, by what ran out."
_HEDGED = "Calls of which more than one attempt was made at once, by which attempt won: first, hedge or none."
_SPENT = "Retries and hedges that were not made, as their budget was spent."
_REFUSED = "Calls that were not let through, by the error that the caller got."
_FELL_BACK = "Answers that were given instead of a failure."
_INJECTED = "Calls in which a Chaos has injected an effect."
_ANSWERED = "Calls that were answered without a call, by the kind of the answer: fresh, stale or shared."
_CHANGED = "Changes of the state of circuits, by the state that they went to."

#: The counter that each kind of event increments. A refusal after a wait counts as a timeout as well.
_COUNTERS: dict[type[Event], Instrument] = {
    events.CacheUsed: _count("call", "cache.answers", _ANSWERED, *_WHERE, "how"),
    events.HedgeStarted: _count("attempt", "hedges", "Attempts started beside one that took long.", *_WHERE),
    events.HedgeFinished: _count("call", "hedged.calls", _HEDGED, *_WHERE, "won"),
    events.RetryScheduled: _count("attempt", "retries", _AGAIN, *_WHERE, "error_type"),
    events.RetryGaveUp: _count("execution", "give_ups", _GAVE_UP, *_WHERE, "reason", "error_type"),
    events.BudgetSpent: _count("attempt", "budget.spent", _SPENT, *_WHERE, "repeat"),
    events.TimedOut: _TIMEOUTS,
    events.CallRejected: _count("call", "rejections", _REFUSED, *_WHERE, "reason"),
    events.FallbackUsed: _count("execution", "fallbacks", _FELL_BACK, *_WHERE, "error_type"),
    events.ChaosInjected: _count("call", "chaos.injections", _INJECTED, *_WHERE, "effect"),
    events.CircuitChanged: _count("transition", "circuit.transitions", _CHANGED, "policy", "old_state", "state"),
    events.Parked: _count("task", "supervisor.parked", "Tasks that a Supervisor has given up.", "policy"),
}

_STATE = "1 for the state that a circuit is in, 0 for the others."
_ABANDONED = "Blocking calls of this process that a timeout has abandoned, and that are still running."
_REJECTED = "The share of the calls that a throttle holds back."
_NEXT_TURN = "How long a call that comes now waits for its turn."

CIRCUIT_STATE = _gauge("1", "circuit.state", _STATE, *_POLICY, "state")
ABANDONED = _gauge("{call}", "calls.abandoned", _ABANDONED)
_REJECTION_RATE = _gauge("1", "throttle.rejection_rate", _REJECTED, *_POLICY, combine="max")

_AT_ONCE = {
    "in_flight": _gauge("{call}", "bulkhead.in_flight", "Calls that run under a bulkhead.", *_POLICY),
    "queued": _gauge("{call}", "bulkhead.queued", "Calls that wait for a bulkhead.", *_POLICY),
    "limit": _gauge("{call}", "bulkhead.limit", "Calls that a bulkhead lets run at once.", *_POLICY),
}

#: The policies with a state that can be read at any time.
Watched: TypeAlias = AdaptiveLimit | AdaptiveThrottle | Bulkhead | Cache | CircuitBreaker | Keyed | RateLimiter

#: The gauges for the statistics of each kind of them, by the name of the statistic. A circuit has one for its state.
STATISTICS: dict[type[Policy[Any]], dict[str, Instrument]] = {
    Bulkhead: _AT_ONCE,
    AdaptiveLimit: _AT_ONCE,
    AdaptiveThrottle: {"rejection_rate": _REJECTION_RATE},
    RateLimiter: {
        "queued": _gauge("{call}", "rate_limiter.queued", "Calls that wait for their turn.", *_POLICY),
        "next_turn": _gauge("s", "rate_limiter.next_turn", _NEXT_TURN, *_POLICY, combine="max"),
    },
    Cache: {"size": _gauge("{entry}", "cache.size", "Entries that a cache holds.", *_POLICY)},
    Keyed: {"keys": _gauge("{key}", "keyed.keys", "Keys that have a policy of their own.", *_POLICY)},
}

#: All metrics, with their units and labels.
INSTRUMENTS: tuple[Instrument, ...] = (
    *(_EXECUTION, _ATTEMPT, _REMAINING, _FIRST_ITEM, _ITEMS),
    *_COUNTERS.values(),
    _SHADOW_REJECTIONS,
    CIRCUIT_STATE,
    *dict.fromkeys(gauge for gauges in STATISTICS.values() for gauge in gauges.values()),
    ABANDONED,
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
    calls = event.policy, event.operation or ""  # the labels of an event whose policy is the executed one
    if isinstance(event, events.ExecutionFinished):
        whole = _EXECUTION, event.elapsed, calls + ending(event)
        return (whole, (_ITEMS, event.items, calls)) if event.items else (whole,)
    if isinstance(event, events.CallFinished):
        lasted = _ATTEMPT, event.elapsed, calls + ending(event)
        return (lasted,) if event.remaining == inf else (lasted, (_REMAINING, event.remaining, calls))
    if isinstance(event, events.StreamOpened):
        return ((_FIRST_ITEM, event.elapsed, calls),)
    if isinstance(event, events.CallRejected) and event.shadow:
        return (_count_one(_SHADOW_REJECTIONS, event),)
    counter = _COUNTERS.get(type(event))
    counted = () if counter is None else (_count_one(counter, event),)
    if isinstance(event, events.CallRejected) and event.waited > 0:
        return (*counted, _count_one(_TIMEOUTS, event))
    return counted


def _count_one(counter: Instrument, event: Event) -> Reading:
    return counter, 1, tuple([_TEXTS[it](event) if it in _TEXTS else getattr(event, it) for it in counter.labels])


def _scope(event: events.TimedOut | events.CallRejected) -> str:
    if isinstance(event, events.TimedOut):
        return scope_of(event)
    return "deadline" if event.reason == "DeadlineExceeded" else "queue"  # the limit that ended the wait


#: How the labels of a counter are read from an event, if they are not fields with these names.
_TEXTS: dict[str, Callable[[Any], str]] = {
    "pipeline": lambda event: event.pipeline or "",
    "operation": lambda event: event.operation or "",
    "error_type": lambda event: error_type(event.outcome),
    "won": lambda event: "none" if event.won is None else "hedge" if event.won else "first",
    "scope": _scope,
    "old_state": lambda event: event.old.value,
    "state": lambda event: event.new.value,
}

#: The kinds of events that are measured.
MEASURED: tuple[type[Event], ...] = (events.ExecutionFinished, events.CallFinished, events.StreamOpened, *_COUNTERS)
