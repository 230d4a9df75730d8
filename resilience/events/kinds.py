"""The classes of events.

Each event carries the policy's name, the operation, the call, the time, and the fields of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from resilience.circuit_state import CircuitState, TripCount
from resilience.info import Called
from resilience.outcome import Failure, Outcome

#: What cancelled a call: a ``"deadline"`` that has passed (of a Timeout around it or of the caller), an ``"interrupt"``
#: (Ctrl-C, or the end of the process), the closing of its coroutine (``"closed"``), a ``"hedge"`` whose call another
#: attempt has decided, or else the ``"caller"``.
Canceller: TypeAlias = Literal["caller", "closed", "deadline", "hedge", "interrupt"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """The fields that every event has.

    :param policy: the name of the policy that reports it.
    :param operation: the operation of the execution, by default the qualified name of the function; None for a block
        (`breaker.guard()`), unless a context around it has one.
    :param time: instant on the process clock (`time.monotonic`), in seconds.
    :param properties: the values that travel with the execution.
    :param pipeline: the name of the executed pipeline or single policy; None outside an execution.
    """

    policy: str
    operation: str | None
    time: float
    properties: Mapping[str, Any]
    pipeline: str | None = None

    @property
    def called(self) -> Called | None:
        """The function, arguments and keywords of the call; None for a block, which is not a call.

        It is not a field, so it is not shown, compared, copied or pickled: arguments may be secret, and may be any
        objects.
        """
        found = vars(self).get("_called")
        return None if found is None else Called(*found)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the call: a copy may be passed to another process, or be stored for long."""
        return {name: value for name, value in vars(self).items() if name != "_called"}


@dataclass(frozen=True, kw_only=True)
class AttemptFailed(Event):
    """An attempt under a Retry was not good enough.

    :param attempt: its number, from 1.
    :param outcome: `Failure(error)`, or the `Success(value)` that was not good enough.
    :param elapsed: seconds since the first attempt began.
    """

    attempt: int
    outcome: Outcome[Any]
    elapsed: float


@dataclass(frozen=True, kw_only=True)
class RetryScheduled(Event):
    """Another attempt will be made. `on_retry` gets this event.

    :param attempt: the number of the attempt that failed, from 1.
    :param delay: seconds until the next one.
    :param outcome: the outcome of the failed attempt.
    """

    attempt: int
    delay: float
    outcome: Outcome[Any]


@dataclass(frozen=True, kw_only=True)
class RetryGaveUp(Event):
    """The last attempt failed, and no other one will be made.

    :param attempts: how many were made.
    :param elapsed: seconds since the first one began.
    :param outcome: the outcome of the last one.
    :param reason: what is used up: ``"attempts"``, ``"deadline"`` (the next delay does not fit) or ``"max_elapsed"``;
        ``"unrepeatable"`` if the call must not be made again, ``"retry_after"`` if the server asked for a longer wait
        than `max_retry_after`, ``"circuit_open"`` if a circuit inside would have refused the next attempt, ``"budget"``
        if the retry budget is used up, ``"cap"`` if a `RepeatCap` is used up.
    """

    attempts: int
    elapsed: float
    outcome: Outcome[Any]
    reason: Literal[
        "attempts", "deadline", "max_elapsed", "unrepeatable", "retry_after", "circuit_open", "budget", "cap"
    ]


@dataclass(frozen=True, kw_only=True)
class BudgetSpent(Event):
    """A retry or hedge was not made, because its budget is used up.

    :param repeat: which of the two was not made.
    """

    repeat: Literal["retry", "hedge"]


@dataclass(frozen=True, kw_only=True)
class HedgeStarted(Event):
    """A call takes long, and another attempt begins beside it. `on_hedge` gets this event.

    :param number: the number of the attempt beside the first, from 1.
    :param elapsed: seconds since the first attempt began.
    """

    number: int
    elapsed: float


@dataclass(frozen=True, kw_only=True)
class HedgeFinished(Event):
    """A call with more than one concurrent attempt is over.

    :param won: the number of the attempt whose good result was returned, 0 for the first; None if none was good.
    :param attempts: how many were made, the first included.
    :param elapsed: seconds since the first attempt began.
    """

    won: int | None
    attempts: int
    elapsed: float


@dataclass(frozen=True, kw_only=True)
class TimedOut(Event):
    """A call was cut off. `on_timeout` gets this event.

    :param timeout: the limit that was exceeded, in seconds.
    :param by_deadline: whether the budget of the execution was used up, not the policy's own limit.
    :param scope: what the policy limits: one ``"attempt"`` of a Retry around it, or the ``"total"``; None if that is
        unknown: `pipeline` does not contain the policy, because another policy has passed its call to it.
    """

    timeout: float
    by_deadline: bool
    scope: Literal["attempt", "total"] | None = None


@dataclass(frozen=True, kw_only=True)
class CallRejected(Event):
    """A call was not let through, or, with `shadow`, would not have been.

    :param reason: the name of the error that the caller gets, such as ``"CircuitOpen"``.
    :param retry_after: seconds after which another attempt may be admitted, None if that is unknown.
    :param waited: seconds that it waited in a queue before; 0 if it was refused at once.
    :param shadow: whether the policy only observes (`observe_only=True`), so that the call was made nevertheless.
    """

    reason: str
    retry_after: float | None
    waited: float = 0.0
    shadow: bool = False


@dataclass(frozen=True, kw_only=True)
class CircuitChanged(Event):
    """The state of a circuit changed. `on_transition` gets this event.

    :param old: the state before.
    :param new: the state now.
    :param retry_after: seconds for which it will stay open; None in the other states.
    :param last_failure: type and message of the failure that opened it; None if it is now closed or isolated. Not shown
        by `repr`, because the message may contain anything.
    :param reason: why, in words without messages: ``"failures 5 of 5; the last failure was ConnectionError"``.
    :param failure_type: the name of the type of `last_failure`; None if there is none, as after slow calls.
    :param counted: the counts of the circuit when it tripped; None at every other change.
    """

    old: CircuitState
    new: CircuitState
    retry_after: float | None
    last_failure: str | None = field(repr=False)
    reason: str = ""
    failure_type: str | None = None
    counted: TripCount | None = None


@dataclass(frozen=True, kw_only=True)
class FallbackUsed(Event):
    """A Fallback answered. `on_fallback` gets this event.

    :param outcome: the outcome that it replaced: `Failure(error)`, or a `Success(value)` that was not good enough.
    """

    outcome: Outcome[Any]


@dataclass(frozen=True, kw_only=True)
class LimitChanged(Event):
    """The limit of an AdaptiveLimit went up or down. `on_change` gets this event.

    :param old: how many calls could run at once.
    :param new: how many can run at once now.
    :param reason: why, in a word or two: `"room"`, `"slow"`, `"dropped"` (the service refuses calls), `"idle"`, `"slow
        anyway"` (fewer concurrent calls have not made calls faster); or the reason that the algorithm gives.
    """

    old: int
    new: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class ChaosInjected(Event):
    """A Chaos injects a fault into a call.

    :param effect: `"error"` or `"result"` (instead of the call), `"delay"` or `"action"` (before it).
    """

    effect: Literal["error", "result", "delay", "action"]


@dataclass(frozen=True, kw_only=True)
class CacheUsed(Event):
    """A call was answered without being made.

    :param how: with a ``"fresh"`` value, a ``"stale"`` one, or the result of another caller's call, ``"shared"``.
    """

    how: Literal["fresh", "stale", "shared"]


@dataclass(frozen=True, kw_only=True)
class StreamOpened(Event):
    """A stream has delivered its first item. The `policy` of this event is the executed one.

    :param attempt: the number of the attempt that delivered it.
    :param elapsed: seconds since it was first requested, earlier attempts included.
    """

    attempt: int
    elapsed: float


@dataclass(frozen=True, kw_only=True)
class Parked(Event):
    """A task of a Supervisor has failed too often and is no longer restarted. `on_parked` gets this event.

    :param name: the name of the task; `policy` is that of the supervisor.
    :param restarts: how often it was restarted within the period of the supervisor.
    :param last: its last failure.
    """

    name: str
    restarts: int
    last: Failure


@dataclass(frozen=True, kw_only=True)
class ExecutionFinished(Event):
    """A whole execution is over.

    :param attempts: how many times the function was entered.
    :param elapsed: seconds from the beginning to the end.
    :param outcome: how it ended; None if it was cancelled or interrupted, which is not an outcome.
    :param cancelled_by: what cancelled it; None if it was not cancelled. See `Canceller`.
    :param items: how many items a stream has delivered; None for a call that is not a stream.
    """

    attempts: int
    elapsed: float
    outcome: Outcome[Any] | None
    cancelled_by: Canceller | None = None
    items: int | None = None


@dataclass(frozen=True, kw_only=True)
class CallFinished(Event):
    """One call of the function is over: an attempt that was actually made.

    It occurs in every execution, for each attempt. So it is reported only to listeners that subscribe to it by name:
    not to `subscribe` without kinds, and not to the listeners of a pipeline.

    :param attempt: its number, from 1.
    :param elapsed: seconds from its beginning to its end, or until a timeout abandoned it.
    :param remaining: seconds left until the deadline when it began; infinity if there was none.
    :param outcome: how it ended; None if it was cut off, cancelled or interrupted, which is not an outcome.
    :param cancelled_by: what cancelled it; None if it was not cancelled. See `Canceller`.
    """

    attempt: int
    elapsed: float
    remaining: float
    outcome: Outcome[Any] | None
    cancelled_by: Canceller | None = None
