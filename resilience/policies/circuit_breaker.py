"""CircuitBreaker: stop calling what keeps failing, and find out carefully when it has recovered."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import TYPE_CHECKING, Any, Never, TypeVar, final

from typing_extensions import override

from resilience import checks, events
from resilience.backoff import Backoff, BackoffLike, Constant, as_backoff
from resilience.checks import exact
from resilience.clock import clock
from resilience.context import block_context
from resilience.errors import CircuitIsolated, CircuitOpen, bare_refusal
from resilience.events import watched
from resilience.matching import Matcher, On, OnResult, optional_predicate
from resilience.outcome import LONGEST_MESSAGE, Failure, Outcome, Success, describe, genuine
from resilience.policy import Call, Policy
from resilience.runtimes import forks
from resilience.state.circuit import (
    Admission,
    Circuit,
    CircuitState,
    Closed,
    HalfOpen,
    Isolated,
    Open,
    Period,
    Transition,
)
from resilience.state.counter import Counter
from resilience.state.trips import ConsecutiveFailures, Trip, as_trip

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from resilience.checks import Duration
    from resilience.context import Context
    from resilience.events import Listener

T = TypeVar("T")

_DEFAULT_TRIP = ConsecutiveFailures(5)

#: A success without a value for `on_result` to look at: a block's, and any where there is no `on_result`.
_DONE = Success(None)


@final
@dataclass(frozen=True, slots=True)
class CircuitStats:
    """What a breaker knows at one instant.

    :param state: the state of the circuit.
    :param retry_after: seconds until an open circuit admits a probe; None in the other states.
    :param last_failure: type and message of the failure that opened it; None while it is closed.
    :param probes: how many probes are out.
    :param opened: how many times it has opened since it was built.
    :param rejected: how many calls it has refused since it was built.
    """

    state: CircuitState
    retry_after: float | None
    last_failure: str | None
    probes: int
    opened: int
    rejected: int


@final
class CircuitBreaker(Policy[Never]):
    """Refuse calls for a while when too many have failed, then let a few probes find out whether it is over.

    :param trip: when to open: `ConsecutiveFailures(5)` by default (an `int` will do), `FailureRatio`, `SlowRatio`, or
        two of them with `|`.
    :param open_for: seconds for which it stays open, 30 by default; or a backoff, which grows with each re-opening
        and starts again once the circuit has closed.
    :param probes: how many calls may find out at a time whether the dependency has recovered; 1 by default.
    :param probe_successes: how many of them have to succeed to close the circuit, 1 by default. One failure opens
        it again.
    :param probe_timeout: seconds after which a probe that has not come back loses its slot, and its result no
        longer counts; by default the larger of the open period and 30 s.
    :param on: what is a failure: an exception type, a tuple of them, or a predicate over the exception. Every
        `Exception` by default; but `Rejected` and `DeadlineExceeded`, which say nothing about the dependency, only
        where they are named.
    :param on_result: a predicate over the result; true means that it is a failure.
    :param ignore: exceptions that say nothing: nothing is recorded. Every other one is a success, as the dependency
        has answered.
    :param on_transition: called with a `CircuitChanged` for each change of state, in order.
    :param name: what errors and events call this policy; "CircuitBreaker" by default.
    :raises CircuitOpen: instead of making the call, with `retry_after`; `CircuitIsolated` where a hand has opened it.

    Share one breaker between all callers of one dependency: it counts them together, in whatever world they run.
    A result counts only in the period of the circuit that admitted its call.

    >>> from resilience import CircuitBreaker
    >>> breaker = CircuitBreaker(1, open_for=30)
    >>> breaker.capture(lambda ctx: 1 / 0)
    Failure(error=ZeroDivisionError('division by zero'))
    >>> breaker.state
    <CircuitState.OPEN: 'open'>
    """

    def __init__(
        self,
        trip: Trip | int = _DEFAULT_TRIP,
        *,
        open_for: Duration | BackoffLike = 30.0,
        probes: int = 1,
        probe_successes: int = 1,
        probe_timeout: Duration | None = None,
        on: On = Exception,
        on_result: OnResult | None = None,
        ignore: On = (),
        on_transition: Listener | None = None,
        name: str | None = None,
    ) -> None:
        condition = as_trip(trip)
        self._opening = opening = _as_open_period(open_for)
        self._openings = opening.delays()
        self._circuit = Circuit(
            condition,
            next(self._openings),
            checks.whole("probes", probes),
            checks.whole("probe_successes", probe_successes),
            checks.optional_seconds("probe_timeout", probe_timeout),
        )
        self._timed = condition.slower_than < inf  # reading the clock costs 50 ns: only where slowness counts
        self._lock = threading.RLock()
        self._failures = Matcher(on, ignore)
        self._on_result = optional_predicate("on_result", on_result)
        self._on_transition = events.optional_listener("on_transition", on_transition)
        self.name: str = checks.optional_name(name) or "CircuitBreaker"
        self._opened = 0
        self._rejected = Counter()
        self._unreported: deque[tuple[Transition, Context | None]] = deque()
        self._reporting = False
        self._settings = {
            "trip": condition,
            "open_for": opening.delay if isinstance(opening, Constant) else opening,
            "probes": probes,
            "probe_successes": probe_successes,
            "probe_timeout": checks.optional_seconds("probe_timeout", probe_timeout),
            "on": on,
            "on_result": on_result,
            "ignore": ignore,
            "on_transition": on_transition,
            "name": name,
        }
        forks.begin_anew_in_child(self, CircuitBreaker._begin_anew)

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        began = clock.now() if self._timed else 0.0
        admission: Any = self._circuit.period  # of whatever state; below it is what admitted this call
        if type(admission) is not Closed:
            if type(admission) is Open and (now := clock.now()) < admission.until:
                raise self._refusal(admission, now, ctx)
            admission = self._admit(ctx)
        try:
            try:
                result = await call(ctx)
            except Exception as error:
                self._settle(admission, Failure(genuine(error)), began, ctx)
                raise
            if self._on_result is not None:
                self._settle(admission, Success(result), began, ctx)
            elif not admission.quiet:  # else it would change nothing: the common case, without the lock
                self._settle(admission, _DONE, began, ctx)
        except BaseException:
            self._release(admission)  # cancelled, or interrupted before its result was recorded
            raise
        return result

    # --- for everybody ---

    @property
    def state(self) -> CircuitState:
        """The state of the circuit. It changes when a call or a hand moves it, not with time alone."""
        return self._circuit.period.state

    def stats(self) -> CircuitStats:
        """Return what the breaker knows at this instant."""
        now = clock.now()
        with self._lock:
            period = self._circuit.period
            return CircuitStats(
                state=period.state,
                retry_after=max(0.0, period.until - now) if isinstance(period, Open) else None,
                last_failure=None if isinstance(period, Closed) else period.last_failure,
                probes=len(period.probes) if isinstance(period, HalfOpen) else 0,
                opened=self._opened,
                rejected=self._rejected.value,
            )

    def isolate(self) -> None:
        """Refuse every call until somebody calls `close`."""
        with self._lock:
            self._note_locked(self._circuit.isolate(), None)
        self._report()

    def close(self) -> None:
        """Let calls pass again, and count from zero. Results of calls that are under way no longer count."""
        with self._lock:
            self._note_locked(self._circuit.close(), None)
        self._report()

    def guard(self) -> Guard:
        """Return a block under this breaker: `with breaker.guard():` or `async with breaker.guard():`.

        Entering it raises `CircuitOpen` where a call would have been refused; what the block raises is recorded
        as what a call raises is.
        """
        return Guard(self)

    def __reduce__(self) -> Any:
        """Refuse to be copied: two breakers would each know half."""
        raise TypeError(f"{self.name} holds a circuit that all its users share; it cannot be copied or pickled")

    @override
    def settings(self) -> Mapping[str, object]:
        return self._settings

    @override
    def describe(self) -> str:
        settings, open_for = self._settings, self._settings["open_for"]
        lasts = f"{exact(open_for)} s" if isinstance(open_for, float) else repr(open_for)
        text = (
            f"{self.name}: opens on {settings['trip']!r} for {lasts}; {settings['probes']} at a time may probe, "
            f"{settings['probe_successes']} must succeed to close it"
        )
        timeout = settings["probe_timeout"]
        return f"{text}; a probe may take {exact(timeout)} s" if isinstance(timeout, float) else text

    # --- inside ---

    def _begin_anew(self) -> None:  # pragma: no cover (in the child of a fork, which tests look at from outside)
        """Forget the threads of before a fork: their locks, their probes, and what one of them was to report."""
        self._lock = threading.RLock()
        self._rejected = Counter(self._rejected.value)
        self._unreported.clear()
        self._reporting = False
        if isinstance(self._circuit.period, HalfOpen):
            self._circuit.period.probes.clear()

    def _admit(self, ctx: Context) -> Admission:
        """Admit a call that did not find the circuit closed, or raise."""
        admission = None
        try:
            with self._lock:
                now = clock.now()  # not before: whoever has opened the circuit while this one waited was earlier
                admission, transitions = self._circuit.admit(now)
                period = self._circuit.period
                self._note_locked(transitions, ctx)
            self._report()
        except BaseException:  # interrupted, here or in a listener: the call will not be made
            if admission is not None:
                self._release(admission)
            raise
        if admission is None:
            raise self._refusal(period, now, ctx)
        return admission

    def _refusal(self, period: Period, now: float, ctx: Context) -> CircuitOpen:
        """Count a call that was not made, and make its error."""
        self._rejected.add()
        kind, retry_after = CircuitOpen, None
        if type(period) is Open:
            retry_after = period.until - now
        elif type(period) is Isolated:
            kind = CircuitIsolated
        if watched.refusals or ctx._facts.listeners:
            told = {"reason": kind.__name__, "retry_after": retry_after, "waited": 0.0}
            events.emit(events.CallRejected, self.name, ctx, **told)
        error = bare_refusal(kind, period.why)
        error.policy = self.name
        error.retry_after = retry_after
        error.state = period.state
        error.last_failure = period.last_failure
        return error

    def _settle(self, admission: Admission, outcome: Outcome[Any], began: float, ctx: Context | None) -> None:
        """Record what an admitted call ended with, if it says anything about the dependency.

        If it says nothing, or a predicate raises, the caller gives the slot of a probe back.
        """
        counts, failure = self._judge(outcome)
        if counts:
            now = clock.now()
            with self._lock:
                transitions = self._circuit.record(admission, failure, now - began if self._timed else 0.0, now)
                if transitions:
                    self._note_locked(transitions, ctx)
        if self._unreported:
            self._report()

    def _judge(self, outcome: Outcome[Any]) -> tuple[bool, str | None]:
        """Say whether an outcome counts, and what it failed with, None for a success."""
        if outcome is _DONE:
            failed = False
        elif isinstance(outcome, Success):
            failed = self._on_result is not None and bool(self._on_result(outcome.value))
        else:
            failed = self._failures.handles(outcome.error)
            if not failed and self._failures.is_neutral(outcome.error):
                return False, None
        return True, _text_of(outcome) if failed else None

    def _release(self, admission: Admission) -> None:
        if type(admission) is not Closed:
            with self._lock:
                self._circuit.release(admission)

    def _note_locked(self, transitions: list[Transition], ctx: Context | None) -> None:
        for transition in transitions:
            self._unreported.append((transition, ctx))
            self._opened += transition.new is CircuitState.OPEN

    def _draw(self, new: CircuitState) -> None:
        """Draw how long the next open period will last. Outside the lock: a backoff may be a user's code."""
        circuit = self._circuit
        if new is CircuitState.OPEN:
            circuit.opens_for = next(self._openings, circuit.opens_for)
        elif new is CircuitState.CLOSED:
            self._openings = self._opening.delays()
            circuit.opens_for = circuit.opens_first_for = next(self._openings, circuit.opens_first_for)

    def _report(self) -> None:
        """Report the transitions in order, once each, outside the lock: one thread at a time holds the baton."""
        while self._unreported:
            with self._lock:
                if self._reporting or not self._unreported:
                    return  # whoever reports now will come to ours
                self._reporting = True
                transition, ctx = self._unreported.popleft()
            try:
                self._draw(transition.new)
            finally:
                try:
                    events.emit(events.CircuitChanged, self.name, ctx, self._on_transition, **transition._asdict())
                finally:
                    self._reporting = False


@final
class Guard:
    """A block under a circuit breaker."""

    def __init__(self, breaker: CircuitBreaker) -> None:
        self._breaker = breaker
        self._admission: Admission | None = None
        self._began: float

    def __enter__(self) -> None:
        if self._admission is not None:
            raise RuntimeError("this guard is in use: ask for another one")
        self._began = clock.now()
        self._admission = self._breaker._admit(block_context())  # last: nothing fails once it is admitted

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        admission, self._admission = self._admission, None
        if admission is None:
            return
        try:
            if error is None:
                if not admission.quiet:  # as in `around`
                    self._breaker._settle(admission, _DONE, self._began, block_context())
            elif isinstance(error, Exception):
                self._breaker._settle(admission, Failure(error), self._began, block_context())
        finally:
            self._breaker._release(admission)

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)


def _as_open_period(value: object) -> Backoff:
    if isinstance(value, (int, float, timedelta)):
        return Constant(checks.seconds("open_for", value))
    return as_backoff("open_for", value)


def _text_of(outcome: Outcome[Any]) -> str:
    kind, message = describe(outcome)
    return f"{kind}: {message[:LONGEST_MESSAGE]}"
