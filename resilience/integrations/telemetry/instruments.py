"""Which numbers there are, and what an event adds to which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple, final

from resilience.events import (
    CallFinished,
    CallRejected,
    CircuitChanged,
    Event,
    ExecutionFinished,
    FallbackUsed,
    RetryGaveUp,
    RetryScheduled,
    TimedOut,
)
from resilience.integrations.telemetry.words import ending, error_type, scope_of

#: Bounds of the histograms of seconds: those that OpenTelemetry advises for durations, and two more for long waits.
DURATION_BUCKETS: tuple[float, ...] = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(30.0, 60.0),
)


@final
@dataclass(frozen=True, slots=True)
class Instrument:
    """One of the numbers that are kept.

    :param name: dotted lower case, as OpenTelemetry writes it.
    :param kind: a counter adds up, a histogram sorts values into buckets, a gauge is what is the case now.
    :param unit: in UCUM: ``"s"``, ``"1"``, or a word in braces for what is counted.
    :param labels: the names of what the number is split by.
    """

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    unit: str
    description: str
    labels: tuple[str, ...]


class Measurement(NamedTuple):
    """A value for an instrument.

    :param value: what to add to a counter, to put into a histogram, or what a gauge shows.
    :param labels: a text for every label of the instrument, empty where there is nothing to say.
    """

    instrument: Instrument
    value: float
    labels: Mapping[str, str]


# --- the numbers -----------------------------------------------------------------------------

_WHERE = ("pipeline", "policy", "operation")

EXECUTION_DURATION = Instrument(
    "resilience.execution.duration",
    "histogram",
    "s",
    "How long executions took, attempts and waits together.",
    ("pipeline", "operation", "outcome", "error_type", "cancelled_by"),
)
ATTEMPT_DURATION = Instrument(
    "resilience.attempt.duration",
    "histogram",
    "s",
    "How long single calls of functions took.",
    ("pipeline", "operation", "outcome", "error_type", "cancelled_by"),
)
ATTEMPT_REMAINING = Instrument(
    "resilience.attempt.remaining",
    "histogram",
    "s",
    "How much time attempts had when they began, where it was limited.",
    ("pipeline", "operation"),
)
RETRIES = Instrument(
    "resilience.retries",
    "counter",
    "{attempt}",
    "Attempts that were made, or were to be made after a wait, because one had failed.",
    (*_WHERE, "error_type"),
)
GIVE_UPS = Instrument(
    "resilience.give_ups",
    "counter",
    "{execution}",
    "Retries that came to their end without success, by what ran out.",
    (*_WHERE, "reason", "error_type"),
)
TIMEOUTS = Instrument(
    "resilience.timeouts",
    "counter",
    "{timeout}",
    "Calls that ran out of time, by what timed out: attempt, total, queue or deadline.",
    (*_WHERE, "scope"),
)
REJECTIONS = Instrument(
    "resilience.rejections",
    "counter",
    "{call}",
    "Calls that were not let through, by the error that the caller got.",
    (*_WHERE, "reason"),
)
FALLBACKS = Instrument(
    "resilience.fallbacks",
    "counter",
    "{execution}",
    "Answers that were given instead of a failure.",
    (*_WHERE, "error_type"),
)
TRANSITIONS = Instrument(
    "resilience.circuit.transitions",
    "counter",
    "{transition}",
    "Changes of the state of circuits, by the state that they went to.",
    ("policy", "old_state", "state"),
)
CIRCUIT_STATE = Instrument(
    "resilience.circuit.state",
    "gauge",
    "1",
    "1 for the state that a circuit is in, 0 for the others.",
    ("pipeline", "policy", "state"),
)
IN_FLIGHT = Instrument(
    "resilience.bulkhead.in_flight", "gauge", "{call}", "Calls that run under a bulkhead.", ("pipeline", "policy")
)
QUEUED = Instrument(
    "resilience.bulkhead.queued", "gauge", "{call}", "Calls that wait for a bulkhead.", ("pipeline", "policy")
)
LIMIT = Instrument(
    "resilience.bulkhead.limit", "gauge", "{call}", "Calls that a bulkhead lets run at once.", ("pipeline", "policy")
)
ABANDONED = Instrument(
    "resilience.calls.abandoned",
    "gauge",
    "{call}",
    "Blocking calls of this process that a timeout has walked away from, and that are still running.",
    (),
)

INSTRUMENTS: tuple[Instrument, ...] = (
    *(EXECUTION_DURATION, ATTEMPT_DURATION, ATTEMPT_REMAINING),
    *(RETRIES, GIVE_UPS, TIMEOUTS, REJECTIONS, FALLBACKS, TRANSITIONS),
    *(CIRCUIT_STATE, IN_FLIGHT, QUEUED, LIMIT, ABANDONED),
)


# --- from events -----------------------------------------------------------------------------


def measurements(event: Event) -> tuple[Measurement, ...]:
    """Return what an event adds to which instruments; nothing for a kind that is not counted.

    >>> from resilience import Retry, events
    >>> from resilience.integrations.telemetry import measurements
    >>> from resilience.testing import recording, script
    >>> with recording(events.RetryScheduled) as recorder:
    ...     Retry(backoff=[0]).call(script(ConnectionError("reset"), "fine"))
    'fine'
    >>> [(it.instrument.name, it.value) for it in measurements(recorder.events[0])]
    [('resilience.retries', 1)]
    """
    read = _READERS.get(type(event))
    return () if read is None else tuple(read(event))


def _finished(event: ExecutionFinished) -> Iterator[Measurement]:
    labels = {"pipeline": event.policy, "operation": event.operation or "", **ending(event)}
    yield Measurement(EXECUTION_DURATION, event.elapsed, labels)


def _called(event: CallFinished) -> Iterator[Measurement]:
    labels = {"pipeline": event.policy, "operation": event.operation or ""}
    yield Measurement(ATTEMPT_DURATION, event.elapsed, {**labels, **ending(event)})
    if event.remaining < inf:
        yield Measurement(ATTEMPT_REMAINING, event.remaining, labels)


def _scheduled(event: RetryScheduled) -> Iterator[Measurement]:
    yield Measurement(RETRIES, 1, {**_where(event), "error_type": error_type(event.outcome)})


def _gave_up(event: RetryGaveUp) -> Iterator[Measurement]:
    labels = {**_where(event), "reason": event.reason, "error_type": error_type(event.outcome)}
    yield Measurement(GIVE_UPS, 1, labels)


def _timed_out(event: TimedOut) -> Iterator[Measurement]:
    yield Measurement(TIMEOUTS, 1, {**_where(event), "scope": scope_of(event)})


def _rejected(event: CallRejected) -> Iterator[Measurement]:
    yield Measurement(REJECTIONS, 1, {**_where(event), "reason": event.reason})
    if event.waited > 0:  # in a queue, until its own limit or the caller's
        scope = "deadline" if event.reason == "DeadlineExceeded" else "queue"
        yield Measurement(TIMEOUTS, 1, {**_where(event), "scope": scope})


def _fell_back(event: FallbackUsed) -> Iterator[Measurement]:
    yield Measurement(FALLBACKS, 1, {**_where(event), "error_type": error_type(event.outcome)})


def _changed(event: CircuitChanged) -> Iterator[Measurement]:
    labels = {"policy": event.policy, "old_state": event.old.value, "state": event.new.value}
    yield Measurement(TRANSITIONS, 1, labels)


_READERS: dict[type[Event], Callable[[Any], Iterator[Measurement]]] = {
    ExecutionFinished: _finished,
    CallFinished: _called,
    RetryScheduled: _scheduled,
    RetryGaveUp: _gave_up,
    TimedOut: _timed_out,
    CallRejected: _rejected,
    FallbackUsed: _fell_back,
    CircuitChanged: _changed,
}


#: The kinds of events that are counted.
MEASURED: tuple[type[Event], ...] = tuple(_READERS)


def _where(event: Event) -> dict[str, str]:
    return {"pipeline": event.pipeline or "", "policy": event.policy, "operation": event.operation or ""}
