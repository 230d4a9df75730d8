"""The listeners to events, and how they are called.

Listeners only observe. They are plain functions of one event, called in the thread or task where it happened, while no
lock is held. An exception from a listener is logged, and changes nothing. Without listeners, no event object is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar, final

from resilience import checks, forks
from resilience.clock import clock
from resilience.context import Context
from resilience.errors import ResilienceError
from resilience.events.kinds import (
    AttemptFailed,
    CacheUsed,
    CallFinished,
    CallRejected,
    Event,
    ExecutionFinished,
    FallbackUsed,
    RetryGaveUp,
    RetryScheduled,
)
from resilience.info import Listener
from resilience.log import logger

R = TypeVar("R", bound=ResilienceError)

_Listeners: TypeAlias = tuple[Listener, ...]
_set: Any = object.__setattr__

#: All kinds of events, and those that a subscription without kinds is for.
_KINDS: tuple[type[Event], ...] = tuple(Event.__subclasses__())
_BY_DEFAULT = frozenset(_KINDS) - {CallFinished}


@final
class Subscribers:
    """The listeners of this process, by kind of event, and flags that executions check instead of the listeners.

    The tuples are replaced, never changed, so reading needs no lock. The lock is reentrant, because a finalizer may
    subscribe or unsubscribe while it is held.
    """

    def __init__(self) -> None:
        self.by_kind: dict[type[Event], _Listeners] = dict.fromkeys(_KINDS, ())
        self._lock = forks.lock_of(self)
        #: Whether executions must keep a record: there are listeners to executions or calls, or the policies are off.
        self.executions: bool = False
        #: Whether there are listeners to calls, to refusals, to what a Retry decides, and to answers without a call.
        self.calls: bool = False
        self.refusals: bool = False
        self.retries: bool = False
        self.fallbacks: bool = False
        self.caches: bool = False
        #: Whether all policies of the process are switched off.
        self.policies_off: bool = False
        self._times_off = 0

    def change(self, kinds: Iterable[type[Event]], change: Callable[[_Listeners], _Listeners]) -> None:
        """Change the listeners to these kinds."""
        with self._lock:
            for kind in kinds:
                self._replace_locked(kind, change)
            self._set_flags_locked()

    def switch_policies_off(self, off: bool) -> None:
        """Switch all policies of the process off, or undo one call that has done so."""
        with self._lock:
            self._times_off += 1 if off else -1
            self.policies_off = self._times_off > 0
            self._set_flags_locked()

    def _replace_locked(self, kind: type[Event], change: Callable[[_Listeners], _Listeners]) -> None:
        old = self.by_kind[kind]
        new = change(old)
        if self.by_kind[kind] is old:
            self.by_kind[kind] = new
        else:
            self._replace_locked(kind, change)  # a finalizer has changed it in the meantime

    def _set_flags_locked(self) -> None:
        self.calls = bool(self.by_kind[CallFinished])
        self.refusals = bool(self.by_kind[CallRejected])
        self.retries = any(self.by_kind[kind] for kind in (AttemptFailed, RetryScheduled, RetryGaveUp))
        self.fallbacks = bool(self.by_kind[FallbackUsed])
        self.caches = bool(self.by_kind[CacheUsed])
        self.executions = self.policies_off or self.calls or bool(self.by_kind[ExecutionFinished])


subscribers: Subscribers = Subscribers()


def subscribe(listener: Listener, /, *kinds: type[Event]) -> Callable[[], None]:
    """Call `listener` with every event of the given kinds in this process.

    :param listener: a plain function of one event. It runs in the thread or task of the event, and should be fast.
    :param kinds: classes of events; by default all except `CallFinished`. The `ExecutionFinished` of an execution, and
        the `CallFinished` of a call, may be left out if it has begun before.
    :returns: a function that ends the subscription; calling it again does nothing.
    :raises TypeError: for a listener that is a coroutine function, and for a kind that is not a class of events.

    >>> from resilience import Retry, events
    >>> unsubscribe = events.subscribe(print, events.RetryScheduled)
    >>> Retry().execute(lambda ctx: "no retry, no event")
    'no retry, no event'
    >>> unsubscribe()
    """
    checks.plain_function("listener", listener, ("event",))
    for kind in kinds:
        if kind not in _KINDS:
            raise TypeError(f"kinds must be event classes of resilience.events, not {kind!r}")
    chosen = frozenset(kinds) or _BY_DEFAULT
    entry = partial(listener)  # a new object: a listener that is subscribed twice can end each subscription separately
    subscribers.change(chosen, lambda listeners: (*listeners, entry))

    def unsubscribe() -> None:
        subscribers.change(chosen, lambda listeners: tuple(it for it in listeners if it is not entry))

    return unsubscribe


def optional_listener(name: str, value: Listener | None) -> Listener | None:
    """Return a listener, or None."""
    return checks.optional_function(name, value, ("event",))


def emit(
    kind: type[Event], policy: str, ctx: Context | None, callback: Listener | None = None, /, **fields: object
) -> None:
    """Build an event, and call the policy's own callback, the pipelines' listeners and the subscribers, if any."""
    listeners = subscribers.by_kind[kind]
    if ctx is not None:
        listeners = ctx._info.listeners + listeners
    if callback is not None:
        listeners = (callback, *listeners)
    if listeners:
        announce(listeners, kind, policy, ctx, time=clock.now(), **fields)


def report_refusal(error: R, ctx: Context, waited: float = 0.0, *, shadow: bool = False) -> R:
    """Report a call that was refused, or, with `shadow`, made nevertheless. See `CallRejected`. Return its error."""
    if subscribers.refusals or ctx._info.listeners:
        policy: Any = error.policy  # each refusal names one
        reason, retry_after = type(error).__name__, getattr(error, "retry_after", None)
        emit(CallRejected, policy, ctx, reason=reason, retry_after=retry_after, waited=waited, shadow=shadow)
    return error


def report_use(policy: str, ctx: Context, how: Literal["fresh", "stale", "shared"]) -> None:
    """Report a call that was answered without being made. See `CacheUsed`."""
    if subscribers.caches or ctx._info.listeners:
        emit(CacheUsed, policy, ctx, how=how)


def announce(listeners: _Listeners, kind: type[Event], policy: str, ctx: Context | None, /, **fields: object) -> None:
    """Build an event, and call each of these listeners with it.

    If one raises, the exception is logged, and the next one is called.

    :param fields: the time, and all fields of the kind besides those of `Event`, including those that have a default.
    """
    operation = pipeline = called = None
    properties: dict[str, Any] = {}
    if ctx is not None:
        info, operation = ctx._info, ctx.operation
        if ctx._function is not None:
            called = ctx._function, (ctx,) if ctx._arguments is None else ctx._arguments, ctx._keywords
        pipeline = None if ctx._executed is None else ctx._executed.name
        if info.properties:
            properties = dict(info.properties)  # a plain dictionary, so that an event can be copied and pickled
    fields["policy"] = policy
    fields["operation"] = operation
    fields["properties"] = properties
    fields["pipeline"] = pipeline
    fields["_called"] = called
    event = kind.__new__(kind)  # the `__init__` of a frozen dataclass would take a quarter of the call
    _set(event, "__dict__", fields)
    for listener in listeners:
        try:
            listener(event)
        except Exception:
            with suppress(Exception):  # the user's logging may raise: then `log_events` has failed, too
                logger.exception("a listener raised on %s; it changes nothing", kind.__name__)
