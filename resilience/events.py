"""What happened, told to whoever listens.

    AttemptFailed       an attempt under a Retry was not good enough
    RetryScheduled      ... and another one will be made after `delay`
    RetryGaveUp         ... and no other one will be made
    TimedOut            a Timeout cut a call off, or found the budget used up
    CallRejected        a CircuitBreaker, a Bulkhead, or a Timeout without a worker did not let a call through
    CircuitChanged      a circuit went from one state to another
    FallbackUsed        a Fallback answered instead of the call
    ExecutionFinished   a whole execution is over, however it ended
    CallFinished        one call of the function is over; told only to who asks for it by name

Listeners observe. They are plain functions of one event, called in the thread or task where it
happened, outside every lock; what they raise is logged and changes nothing. No event object is built
while nobody listens.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

from resilience import checks
from resilience.clock import clock
from resilience.context import NO_FACTS

if TYPE_CHECKING:
    from resilience.context import Context
    from resilience.outcome import Outcome
    from resilience.state.circuit import CircuitState

__all__ = [
    "AttemptFailed",
    "CallFinished",
    "CallRejected",
    "Canceller",
    "CircuitChanged",
    "Event",
    "ExecutionFinished",
    "FallbackUsed",
    "Listener",
    "RetryGaveUp",
    "RetryScheduled",
    "TimedOut",
    "subscribe",
]

logger: logging.Logger = logging.getLogger("resilience")


#: Who cancels: a ``"deadline"`` that passed (of a Timeout around, or of the caller), an ``"interrupt"`` (Ctrl-C, the
#: process ends), nobody who would wait for the coroutine any more (``"closed"``), or else the ``"caller"``.
Canceller: TypeAlias = Literal["caller", "closed", "deadline", "interrupt"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """What every event tells.

    :param policy: the name of the policy that it happened in.
    :param operation: the operation of the execution, None where it has none.
    :param time: instant on the process clock (`time.monotonic`), in seconds.
    :param properties: the values that travel with the execution.
    :param pipeline: the name of what was executed, a pipeline or a policy alone. None outside an execution, and where
        nobody keeps a record of it: it has no listeners, none for `ExecutionFinished`, and no context of its caller's.
    """

    policy: str
    operation: str | None
    time: float
    properties: Mapping[str, Any]
    pipeline: str | None = None


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
        ``"unrepeatable"`` where the failure says that the call must not be made again.
    """

    attempts: int
    elapsed: float
    outcome: Outcome[Any]
    reason: Literal["attempts", "deadline", "max_elapsed", "unrepeatable"]


@dataclass(frozen=True, kw_only=True)
class TimedOut(Event):
    """A call was cut off. What `on_timeout` is called with.

    :param timeout: the limit that was exceeded, in seconds.
    :param by_deadline: whether it was the budget of the execution that ran out, not the policy's own limit.
    :param scope: what the policy limits: one ``"attempt"`` of a Retry around it, or the ``"total"``; None where
        `pipeline` is None.
    """

    timeout: float
    by_deadline: bool
    scope: Literal["attempt", "total"] | None = None


@dataclass(frozen=True, kw_only=True)
class CallRejected(Event):
    """A call was not let through.

    :param reason: the name of the error that the caller gets, such as ``"CircuitOpen"``.
    :param retry_after: seconds after which a new try may be admitted, None where nobody can tell.
    :param waited: seconds that it waited in the queue of a Bulkhead before; 0 where it was turned away at once.
    """

    reason: str
    retry_after: float | None
    waited: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CircuitChanged(Event):
    """A circuit went from one state to another. What `on_transition` is called with.

    :param old: the state it left.
    :param new: the state it is in now.
    :param retry_after: seconds for which it will stay open; None in the other states.
    :param last_failure: type and message of the failure that opened it; None where it is now closed or isolated.
    """

    old: CircuitState
    new: CircuitState
    retry_after: float | None
    last_failure: str | None


@dataclass(frozen=True, kw_only=True)
class FallbackUsed(Event):
    """A Fallback answered. What `on_fallback` is called with.

    :param outcome: what it answered instead of: `Failure(error)` or a `Success(value)` that was not good enough.
    """

    outcome: Outcome[Any]


@dataclass(frozen=True, kw_only=True)
class ExecutionFinished(Event):
    """A whole execution is over.

    :param attempts: how many times the function was entered.
    :param elapsed: seconds from the beginning to the end.
    :param outcome: how it ended; None where it was cancelled or interrupted, which is no outcome.
    :param cancelled_by: who cancelled it, None where nobody has: see `Canceller`.
    """

    attempts: int
    elapsed: float
    outcome: Outcome[Any] | None
    cancelled_by: Canceller | None = None


@dataclass(frozen=True, kw_only=True)
class CallFinished(Event):
    """One call of the function is over: an attempt that was really made.

    It happens in every execution, for each attempt. So nobody hears it who has not asked for it by name: not
    `subscribe` without kinds, and not the listeners of a pipeline.

    :param attempt: its number, from 1.
    :param elapsed: seconds from its beginning to its end, or until a timeout walked away from it.
    :param remaining: seconds that were left of the deadline when it began; infinity where there was none.
    :param outcome: how it ended; None where it was cut off, cancelled or interrupted, which is no outcome.
    :param cancelled_by: who cancelled it, None where nobody has: see `Canceller`.
    """

    attempt: int
    elapsed: float
    remaining: float
    outcome: Outcome[Any] | None
    cancelled_by: Canceller | None = None


#: A plain function of one event.
Listener: TypeAlias = Callable[[Any], object]

_KINDS: tuple[type[Event], ...] = (
    AttemptFailed,
    RetryScheduled,
    RetryGaveUp,
    TimedOut,
    CallRejected,
    CircuitChanged,
    FallbackUsed,
    ExecutionFinished,
)
_subscribing = threading.RLock()


def _begin_anew() -> None:  # pragma: no cover (in the child of a fork)
    """Replace the lock, which a thread that is not in the child of a fork may have held."""
    global _subscribing
    _subscribing = threading.RLock()


if hasattr(os, "register_at_fork"):  # pragma: no branch (there is no fork on Windows)
    os.register_at_fork(after_in_child=_begin_anew)


@final
class _Watched:
    """What the short ways look at: whether somebody listens in this process, or all policies are off."""

    __slots__ = ("answers", "calls", "executions", "policies_off", "refusals", "retries")

    def __init__(self) -> None:
        self.executions: bool = False  # also where policies are off: it is what sends an execution the long way
        self.calls: bool = False
        self.refusals: bool = False
        self.retries: bool = False
        self.answers: bool = False
        self.policies_off: bool = False

    def switch(self, off: bool) -> bool:
        """Switch all policies of the process off, or on again; return how it was."""
        with _subscribing:
            was, self.policies_off = self.policies_off, off
            self.look()
        return was

    def look(self) -> None:
        """See who listens now."""
        self.calls = bool(_subscribers[CallFinished])
        self.refusals = bool(_subscribers[CallRejected])
        self.retries = any(_subscribers[kind] for kind in (AttemptFailed, RetryScheduled, RetryGaveUp))
        self.answers = bool(_subscribers[FallbackUsed])
        self.executions = self.policies_off or self.calls or bool(_subscribers[ExecutionFinished])


watched: _Watched = _Watched()

#: Kind of event -> who listens to it in this process. Replaced, never changed, so that reading needs no lock.
_subscribers: dict[type[Event], tuple[Listener, ...]] = dict.fromkeys((*_KINDS, CallFinished), ())


def subscribe(listener: Listener, /, *kinds: type[Event]) -> Callable[[], None]:
    """Call `listener` with every event of the given kinds in this process.

    :param listener: a plain function of one event. It runs where the event happens and should be quick.
    :param kinds: classes of events; all but `CallFinished`, where none is given.
    :returns: a function that ends the subscription; calling it again does nothing.
    :raises TypeError: for a listener that is a coroutine function, and for a kind that is no event.

    >>> from resilience import Retry, events
    >>> unsubscribe = events.subscribe(print, events.RetryScheduled)
    >>> Retry().execute(lambda ctx: "no retry, no event")
    'no retry, no event'
    >>> unsubscribe()
    """
    checks.plain_function("listener", listener)
    for kind in kinds:
        if kind not in _subscribers:
            raise TypeError(f"kinds must be event classes of resilience.events, not {kind!r}")
    chosen = frozenset(kinds or _KINDS)
    entry = _Subscription(listener)
    _change(chosen, lambda listeners: (*listeners, entry))

    def unsubscribe() -> None:
        _change(chosen, lambda listeners: tuple(it for it in listeners if it is not entry))

    return unsubscribe


_Listeners: TypeAlias = tuple[Listener, ...]


def _change(kinds: Iterable[type[Event]], change: Callable[[_Listeners], _Listeners]) -> None:
    """Change who listens. The lock is reentrant: a finalizer may do the same in the middle of this."""
    with _subscribing:
        for kind in kinds:
            _replace_locked(kind, change)
        watched.look()


def _replace_locked(kind: type[Event], change: Callable[[_Listeners], _Listeners]) -> None:
    old = _subscribers[kind]
    new = change(old)
    if _subscribers[kind] is old:
        _subscribers[kind] = new
    else:
        _replace_locked(kind, change)  # a finalizer has been here meanwhile


class _Subscription:
    """One call of `subscribe`: the same listener may be subscribed twice, and each ends by itself."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def __call__(self, event: Event) -> object:
        return self._listener(event)


def optional_listener(name: str, value: Listener | None) -> Listener | None:
    """Return a listener, or None."""
    if value is not None:
        checks.plain_function(name, value)
    return value


def emit(
    kind: type[Event], policy: str, ctx: Context | None, callback: Listener | None = None, /, **numbers: object
) -> None:
    """Build an event and tell the policy's own callback, the pipelines' listeners and the subscribers, if any."""
    listeners = _subscribers[kind]
    if ctx is not None:
        listeners = ctx._facts.listeners + listeners
    if callback is not None:
        listeners = (callback, *listeners)
    if listeners:
        announce(listeners, kind, policy, ctx, numbers)


def announce(
    listeners: _Listeners, kind: type[Event], policy: str, ctx: Context | None, numbers: Mapping[str, object]
) -> None:
    """Build an event of the numbers of its kind, and what every event tells, for these listeners."""
    facts = NO_FACTS if ctx is None else ctx._facts
    fields = {
        "policy": policy,
        "operation": facts.operation,
        "time": clock.now(),
        # Plain, so that an event can be copied and pickled. An empty one is made: its copy would take 300 ns.
        "properties": dict(facts.properties) if facts.properties else {},
        "pipeline": None if facts.record is None else facts.record.executed.name,
        **numbers,
    }
    tell(listeners, kind, fields)


#: Sets the dictionary of an object's attributes, also that of a frozen one.
_set_attributes: Callable[[object, dict[str, object]], None] = vars(Event)["__dict__"].__set__


def tell(listeners: _Listeners, kind: type[Event], fields: dict[str, object]) -> None:
    """Build an event of its fields, in their order, and call each listener with it.

    What one raises is logged; the next is called all the same.

    :param fields: all that have no default, and nothing else: what `__init__` would have refused is not noticed here.
    """
    # The event takes the dictionary over. Its `__init__` would take 1.4 us instead of 0.4 (CPython 3.13, nine fields):
    # as the class is frozen, it has to set each by `object.__setattr__`.
    event = object.__new__(kind)
    _set_attributes(event, fields)
    for listener in listeners:
        try:
            listener(event)
        except Exception:
            logger.exception("a listener raised on %s; it changes nothing", kind.__name__)
