"""What everything that exports numbers shares: which numbers there are, how events become them, what policies hold now.

Counters and histograms come from events, of the whole process: `measurements(event)` says what an event adds to
which. Gauges are read from the policies that were handed over, at the moment in which somebody asks, so a call pays
nothing for them: `Observed(*policies).gauges()`. A `Feed` is both for one place that the numbers go to.

Names and units are OpenTelemetry's (dotted lower case, UCUM units). Every label has few different values: names that
were written in code, and classes of errors. Arguments, results and messages of errors are in none of them.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any, Literal, NamedTuple, TypeAlias, final
from weakref import ref

from resilience import events
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
from resilience.outcome import Failure, Outcome
from resilience.policies.bulkhead import Bulkhead
from resilience.policies.circuit_breaker import CircuitBreaker
from resilience.policies.timeout import Timeout
from resilience.policy import Pipeline, Policy
from resilience.state.circuit import CircuitState

__all__ = [
    "DURATION_BUCKETS",
    "INSTRUMENTS",
    "Fact",
    "Feed",
    "Instrument",
    "Measurement",
    "Member",
    "Observed",
    "cancellation_reason",
    "error_type",
    "facts",
    "kind_of",
    "measurements",
    "scope_of",
]

#: A timer of an event loop may fire that much before its time, in seconds.
_EARLIEST = 0.005

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
    ("pipeline", "operation", "outcome", "error_type"),
)
ATTEMPT_DURATION = Instrument(
    "resilience.attempt.duration",
    "histogram",
    "s",
    "How long single calls of functions took.",
    ("pipeline", "operation", "outcome", "error_type"),
)
ATTEMPT_REMAINING = Instrument(
    "resilience.attempt.remaining",
    "histogram",
    "s",
    "How much time was left of the deadline when an attempt began; nothing where there was none.",
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
    labels = {"pipeline": event.policy, "operation": event.operation or "", **_ending(event.outcome)}
    yield Measurement(EXECUTION_DURATION, event.elapsed, labels)


def _called(event: CallFinished) -> Iterator[Measurement]:
    labels = {"pipeline": event.policy, "operation": event.operation or ""}
    yield Measurement(ATTEMPT_DURATION, event.elapsed, {**labels, **_ending(event.outcome)})
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


def _where(event: Event) -> dict[str, str]:
    return {"pipeline": event.pipeline or "", "policy": event.policy, "operation": event.operation or ""}


def scope_of(event: TimedOut) -> str:
    """Say what timed out: ``"attempt"``, ``"total"``, or the ``"deadline"`` of the caller; ``"unknown"`` otherwise."""
    return "deadline" if event.by_deadline else event.scope or "unknown"


def _ending(outcome: Outcome[Any] | None) -> dict[str, str]:
    """Say how something ended: what was cancelled or interrupted is no failure."""
    if outcome is None:
        return {"outcome": "cancelled", "error_type": ""}
    if isinstance(outcome, Failure):
        return {"outcome": "failure", "error_type": error_type(outcome)}
    return {"outcome": "success", "error_type": ""}


def error_type(outcome: Outcome[Any] | BaseException) -> str:
    """Name what failed: the class of an error with its module (builtins without); ``"result"`` for a result."""
    error = outcome.error if isinstance(outcome, Failure) else outcome
    if not isinstance(error, BaseException):
        return "result"
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def cancellation_reason(error: BaseException, remaining: float) -> str:
    """Say why something was cut off, as far as it can be known.

    :param error: what came through, no `Exception`.
    :param remaining: seconds that were left of the deadline of what was cut off.
    :returns: ``"interrupt"`` (Ctrl-C, the process ends), ``"closed"`` (nobody waits for the coroutine any more),
        ``"deadline"`` (of a Timeout around, or of the caller), or ``"caller"``.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return "interrupt"
    if isinstance(error, GeneratorExit):
        return "closed"
    return "deadline" if remaining <= _EARLIEST else "caller"


# --- an event in words and numbers -----------------------------------------------------------

_LONGEST_MESSAGE = 200  # characters
_LEFT_OUT = frozenset({"policy", "operation", "time", "properties", "pipeline", "outcome", "by_deadline"})
Fact: TypeAlias = str | int | float | bool


def kind_of(event: Event) -> str:
    """Return the name of an event's kind in snake case: ``"retry_scheduled"``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()


def facts(event: Event, *, messages: bool = False) -> dict[str, Fact]:
    """Return what an event tells as plain values, for a line of a log or a span; what is not known is left out.

    :param messages: whether the messages of errors are told, in `error` and `last_failure`, cut to 200 characters.
        They can hold anything; arguments and results are never told.
    """
    told: dict[str, object] = {"pipeline": event.pipeline, "policy": event.policy, "operation": event.operation}
    told |= {it.name: getattr(event, it.name) for it in fields(event) if it.name not in _LEFT_OUT}
    if isinstance(event, TimedOut):
        told["scope"] = scope_of(event)
    if isinstance(event, (CallFinished, ExecutionFinished)):
        told |= _ending(event.outcome)
    elif (outcome := getattr(event, "outcome", None)) is not None:
        told["error_type"] = error_type(outcome)
    if messages and isinstance(failure := getattr(event, "outcome", None), Failure):
        told["error"] = str(failure.error)[:_LONGEST_MESSAGE]
    if not messages:
        told.pop("last_failure", None)
    values = ((name, value.value if isinstance(value, CircuitState) else value) for name, value in told.items())
    return {name: value for name, value in values if isinstance(value, (str, int, float)) and value not in ("", inf)}


# --- from policies ---------------------------------------------------------------------------

_Watched: TypeAlias = CircuitBreaker | Bulkhead


class Member(NamedTuple):
    """A circuit breaker or bulkhead that is observed.

    :param pipeline: the name of the policy that was handed over, in which it was found.
    :param name: its own name; with a number where an earlier one in the pipeline is called the same.
    """

    pipeline: str
    name: str
    policy: _Watched


@final
class Observed:
    """The circuit breakers and bulkheads inside some policies, weakly held: it keeps none of them alive.

    :param policies: policies and pipelines. One that is no pipeline and has an attribute `policies` (a policy that
        makes others as it needs them, one for each host, say) is looked into each time.
    :raises TypeError: for what is no policy.

    >>> from resilience import Bulkhead, Policy, Retry
    >>> from resilience.integrations.telemetry import Observed
    >>> pipeline = Policy.wrap(Retry(), Bulkhead(10), name="weather")
    >>> [(member.pipeline, member.name) for member in Observed(pipeline)]
    [('weather', 'Bulkhead')]
    """

    def __init__(self, *policies: Policy[Any]) -> None:
        for policy in policies:
            if not isinstance(policy, Policy):
                raise TypeError(f"only policies can be observed, not {policy!r}")
        # The parts of a pipeline, not the pipeline: it may be made for one call only, of policies that live on.
        self._held = [(given.name, ref(part)) for given in policies for part in _parts(given)]

    def __iter__(self) -> Iterator[Member]:
        """Go over those that are alive."""
        return _members([self])

    def gauges(self) -> Iterator[Measurement]:
        """Read what they hold at this instant, and how many calls of the process are abandoned."""
        return _gauges(iter(self))

    def _found(self) -> Iterator[tuple[str, _Watched]]:
        for pipeline, reference in self._held:
            for policy in _watched(reference()):
                yield pipeline, policy


def _parts(policy: Policy[Any]) -> tuple[Policy[Any], ...]:
    return policy.policies if isinstance(policy, Pipeline) else (policy,)


def _watched(policy: object) -> Iterator[_Watched]:
    if isinstance(policy, (CircuitBreaker, Bulkhead)):
        yield policy
    else:
        for part in tuple(getattr(policy, "policies", ())):
            yield from _watched(part)


def _members(groups: list[Observed]) -> Iterator[Member]:
    """Go over what is observed in any of the groups, once for each pipeline that it is in."""
    seen: set[tuple[str, int]] = set()
    names: Counter[tuple[str, str]] = Counter()
    for pipeline, policy in (found for group in groups for found in group._found()):
        if (pipeline, id(policy)) in seen:
            continue
        seen.add((pipeline, id(policy)))
        names[pipeline, policy.name] += 1
        number = names[pipeline, policy.name]
        yield Member(pipeline, policy.name if number == 1 else f"{policy.name}-{number}", policy)


def _gauges(members: Iterator[Member]) -> Iterator[Measurement]:
    for pipeline, name, policy in members:
        labels = {"pipeline": pipeline, "policy": name}
        if isinstance(policy, CircuitBreaker):
            now = policy.state
            for state in CircuitState:
                yield Measurement(CIRCUIT_STATE, float(state is now), {**labels, "state": state.value})
        else:
            stats = policy.stats()
            yield Measurement(IN_FLIGHT, stats.in_flight, labels)
            yield Measurement(QUEUED, stats.queued, labels)
            yield Measurement(LIMIT, stats.limit, labels)
    yield Measurement(ABANDONED, Timeout.abandoned(), {})


# --- to one place ----------------------------------------------------------------------------


@final
class Feed:
    """The numbers of the process for one place that they go to, however often it is asked for.

    :param record: called with each measurement that an event makes, in the thread in which it happens.
    """

    def __init__(self, record: Callable[[Measurement], object]) -> None:
        self._record = record
        self._lock = threading.Lock()
        self._groups: list[Observed] = []
        self._unsubscribe: Callable[[], None] | None = None

    def add(self, *policies: Policy[Any]) -> Callable[[], None]:
        """Count events while at least one such addition stands, and observe these policies meanwhile.

        :returns: a function that ends it; calling it again does nothing.
        """
        group = Observed(*policies)
        with self._lock:
            self._groups = [*self._groups, group]
            if self._unsubscribe is None:
                self._unsubscribe = events.subscribe(self._tell, *_READERS)

        def remove() -> None:
            with self._lock:
                self._groups = [it for it in self._groups if it is not group]
                if not self._groups and self._unsubscribe is not None:
                    self._unsubscribe()
                    self._unsubscribe = None

        return remove

    def gauges(self) -> Iterator[Measurement]:
        """Read what the observed policies hold at this instant; nothing where nobody has asked for it."""
        groups = self._groups
        return _gauges(_members(groups)) if groups else iter(())

    def _tell(self, event: Event) -> None:
        for measurement in measurements(event):
            self._record(measurement)
