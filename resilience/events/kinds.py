"""The events: what happened, as facts.

Each carries the policy's name, the operation, what was called, the time, and the numbers of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from resilience.circuit_state import CircuitState, TripCount
from resilience.info import Called
from resilience.outcome import Failure, Outcome

#: What cancels: a ``"deadline"`` that passed (of a Timeout around, or of the caller), an ``"interrupt"`` (Ctrl-C, the
#: process ends), the end of the coroutine before its time (``"closed"``), or else the ``"caller"``.
Canceller: TypeAlias = Literal["caller", "closed", "deadline", "interrupt"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """What every event says.

    :param policy: the name of the policy that it happened in.
    :param operation: the operation of the execution, by default the qualified name of what was called; None for a block
        (`breaker.guard()`) to which no context around gave one.
    :param time: instant on the process clock (`time.monotonic`), in seconds.
    :param properties: the values that travel with the execution.
    :param pipeline: the name of what was executed, a pipeline or a policy alone. None outside an execution, and where
        no record is kept of it: it has no listeners, none for `ExecutionFinished`, and no context of its caller's.
    """

    policy: str
    operation: str | None
    time: float
    properties: Mapping[str, Any]
    pipeline: str | None = None

    @property
    def called(self) -> Called | None:
        """Function, arguments and keywords of the call; None for a block, which is no call.

        No field: it is not shown, compared, copied or pickled, as arguments may be secret, and may be anything.
        """
        found = vars(self).get("_called")
        return None if found is None else Called(*found)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was called: a copy may be for another process, or for long."""
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
    """Another attempt will be made. What `on_retry` is called with.

    :param attempt: the number of the attempt that failed, from 1.
    :param delay: seconds until the next one.
    :param outcome: what the failed attempt ended with.
    """

    attempt: int
    delay: float
    outcome: Outcome[Any]


@dataclass(frozen=True, kw_only=True)
class RetryGaveUp(Event):
    """The last attempt failed and no other will be made.

    :param attempts: how many were made.
    :param elapsed: seconds since the first one began.
    :param outcome: what the last one ended with.
    :param reason: what ran out: ``"attempts"``, ``"deadline"`` (the next delay does not fit) or ``"max_elapsed"``;
        ``"unrepeatable"`` where the failure says that the call must not be made again, ``"retry_after"`` where the
        server asked for a longer wait than `max_retry_after`, ``"circuit_open"`` where a circuit inside would have
        refused the next attempt, ``"budget"`` where the budget of retries is spent, ``"cap"`` where a `RepeatCap` is.
    """

    attempts: int
    elapsed: float
    outcome: Outcome[Any]
    reason: Literal[
        "attempts", "deadline", "max_elapsed", "unrepeatable", "retry_after", "circuit_open", "budget", "cap"
    ]


@dataclass(frozen=True, kw_only=True)
class BudgetSpent(Event):
    """A repeat was not made, as the budget that is to pay for it is spent.

    :param repeat: what was not made.
    """

    repeat: Literal["retry", "hedge"]


@dataclass(frozen=True, kw_only=True)
class HedgeStarted(Event):
    """A call takes long, and another attempt begins beside it. What `on_hedge` is called with.

    :param number: of that attempt beside the first, from 1.
    :param elapsed: seconds since the first attempt began.
    """

    number: int
    elapsed: float


@dataclass(frozen=True, kw_only=True)
class HedgeFinished(Event):
    """A call of which more than one attempt was made at once is over.

    :param won: the number of the attempt whose good result was returned, 0 for the first; None where none was good.
    :param attempts: how many were made, the first included.
    :param elapsed: seconds since the first attempt began.
    """

    won: int | None
    attempts: int
    elapsed: float


@dataclass(frozen=True, kw_only=True)
class TimedOut(Event):
    """A call was cut off. What `on_timeout` is called with.

    :param timeout: the limit that was exceeded, in seconds.
    :param by_deadline: whether it was the budget of the execution that ran out, not the policy's own limit.
    :param scope: what the policy limits: one ``"attempt"`` of a Retry around it, or the ``"total"``; None where that
        can't be known: `pipeline` is None, or does not name the policy, to which another one has handed its call on.
    """

    timeout: float
    by_deadline: bool
    scope: Literal["attempt", "total"] | None = None


@dataclass(frozen=True, kw_only=True)
class CallRejected(Event):
    """A call was not let through, or, with `shadow`, would not have been.

    :param reason: the name of the error that the caller gets, such as ``"CircuitOpen"``.
    :param retry_after: seconds after which a new try may be admitted, None where that can't be known.
    :param waited: seconds that it waited in a queue before; 0 where it was turned away at once.
    :param shadow: whether the policy only observes (`observe_only=True`): the call was made all the same.
    """

    reason: str
    retry_after: float | None
    waited: float = 0.0
    shadow: bool = False


@dataclass(frozen=True, kw_only=True)
class CircuitChanged(Event):
    """A circuit went from one state to another. What `on_transition` is called with.

    :param old: the state it left.
    :param new: the state it is in now.
    :param retry_after: seconds for which it will stay open; None in the other states.
    :param last_failure: type and message of the failure that opened it; None where it is now closed or isolated. Not
        shown by `repr`: the message may hold anything.
    :param reason: why, in words without messages: ``"failures 5 of 5; the last failure was ConnectionError"``.
    :param failure_type: the name of the type of `last_failure`; None where there is none, as after slow calls.
    :param counted: what the circuit had counted when it tripped; None at every other change.
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
    """A Fallback answered. What `on_fallback` is called with.

    :param outcome: what it answered instead of: `Failure(error)` or a `Success(value)` that was not good enough.
    """

    outcome: Outcome[Any]


@dataclass(frozen=True, kw_only=True)
class LimitChanged(Event):
    """The limit of an AdaptiveLimit went up or down. What `on_change` is called with.

    :param old: how many calls could run at once.
    :param new: how many can now.
    :param reason: why, in a word or two: `"room"`, `"slow"`, `"dropped"` (the other side refuses calls), `"idle"`,
        `"slow anyway"` (fewer at once have made no call quicker); or what the algorithm says.
    """

    old: int
    new: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class ChaosInjected(Event):
    """A Chaos does something to a call.

    :param effect: what: `"error"`, `"result"` (both instead of the call), `"delay"` or `"action"` (both before it).
    """

    effect: Literal["error", "result", "delay", "action"]


@dataclass(frozen=True, kw_only=True)
class CacheUsed(Event):
    """A call was answered without calling.

    :param how: with a value that is ``"fresh"``, with a ``"stale"`` one, or with what another caller's call brought,
        which is ``"shared"``.
    """

    how: Literal["fresh", "stale", "shared"]


@dataclass(frozen=True, kw_only=True)
class StreamOpened(Event):
    """A stream has brought its first item. Its `policy` is what is executed.

    :param attempt: the number of the attempt that brought it.
    :param elapsed: seconds since it was first asked for, earlier attempts included.
    """

    attempt: int
    elapsed: float


@dataclass(frozen=True, kw_only=True)
class Parked(Event):
    """A task of a Supervisor has failed too often, and is not restarted any more. What `on_parked` is called with.

    :param name: the name of the task; `policy` is that of the supervisor.
    :param restarts: how often it was restarted within the period of the supervisor.
    :param last: what it failed with.
    """

    name: str
    restarts: int
    last: Failure


@dataclass(frozen=True, kw_only=True)
class ExecutionFinished(Event):
    """A whole execution is over.

    :param attempts: how many times the function was entered.
    :param elapsed: seconds from the beginning to the end.
    :param outcome: how it ended; None where it was cancelled or interrupted, which is no outcome.
    :param cancelled_by: what cancelled it, None where it was not: see `Canceller`.
    :param items: how many items a stream has handed out; None for a call that is no stream.
    """

    attempts: int
    elapsed: float
    outcome: Outcome[Any] | None
    cancelled_by: Canceller | None = None
    items: int | None = None


@dataclass(frozen=True, kw_only=True)
class CallFinished(Event):
    """One call of the function is over: an attempt that was really made.

    It happens in every execution, for each attempt. So it is reported only to listeners that ask for it by name: not
    to `subscribe` without kinds, and not to the listeners of a pipeline.

    :param attempt: its number, from 1.
    :param elapsed: seconds from its beginning to its end, or until a timeout walked away from it.
    :param remaining: seconds that were left of the deadline when it began; infinity where there was none.
    :param outcome: how it ended; None where it was cut off, cancelled or interrupted, which is no outcome.
    :param cancelled_by: what cancelled it, None where it was not: see `Canceller`.
    """

    attempt: int
    elapsed: float
    remaining: float
    outcome: Outcome[Any] | None
    cancelled_by: Canceller | None = None
