"""A circuit in use: the machine behind its lock, what has been counted, and its transitions reported in order.

Part of CircuitBreaker. The policy and the block form both use it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf
from types import FrameType
from typing import Any, Final, TypeAlias, final

from resilience import forks
from resilience.backoff import Backoff
from resilience.circuit_state import CircuitState
from resilience.clock import clock
from resilience.context import Context
from resilience.counter import Counter
from resilience.errors import CircuitIsolated, CircuitOpen, Misuse, bare
from resilience.events.dispatch import emit, report_refusal, subscribers
from resilience.events.kinds import CircuitChanged
from resilience.info import Listener
from resilience.matching import Matcher, OnResult
from resilience.outcome import LONGEST_MESSAGE, Failed, Success, describe, unwrap_stop_iteration
from resilience.policies.marks import is_marked, mark
from resilience.runtimes.base import Runtime
from resilience.state.circuit import (
    Admission,
    Circuit,
    Closed,
    HalfOpen,
    Isolated,
    Open,
    Period,
    Probe,
    Transition,
    failure_type_of,
)
from resilience.state.trips import ConsecutiveFailures, Trip

#: The calls around this code that a breaker has admitted. It follows tasks and threads, so each says when it is over.
_around: ContextVar[tuple[Admitted, ...]] = ContextVar("resilience.admitted", default=())
get_around: Callable[[], tuple[Admitted, ...]] = _around.get

#: What a circuit that only observes admits a call by that it would have refused: its result moves nothing.
PASSED: Final = Closed(ConsecutiveFailures(1).tally())

#: What admits a call, None where it is refused; the period, and the instant of that.
_Answer: TypeAlias = "tuple[Admission | None, Period, float]"

#: A success without a value for `on_result` to look at: a block's, and any where there is no `on_result`.
DONE = Success(None)


@final
@dataclass(frozen=True, slots=True)
class CircuitStats:
    """A snapshot of a breaker.

    :param state: the state of the circuit.
    :param retry_after: seconds until an open circuit admits a probe; None in the other states.
    :param last_failure: type and message of the failure that opened it; None while it is closed. Not shown by `repr`,
        because the message may contain anything.
    :param probes: how many probes are running.
    :param opened: how many times it has opened so far.
    :param rejected: how many calls it has refused so far.
    :param failure_type: the name of the type of `last_failure`; None if there is none, as after slow calls.
    """

    state: CircuitState
    retry_after: float | None
    last_failure: str | None = field(repr=False)
    probes: int
    opened: int
    rejected: int
    failure_type: str | None = None


@final
class Admitted:
    """A call that a circuit has admitted, for as long as it lasts: calls of the same circuit inside it belong to it."""

    __slots__ = ("_token", "admission", "circuit")

    def __init__(self, circuit: LiveCircuit) -> None:
        self.circuit: LiveCircuit = circuit
        #: None before and after the call, so that it counts for nothing, should an interrupt come in between.
        self.admission: Admission | None = None
        around = get_around()
        self._token = _around.set((*[it for it in around if it.admission is not None], self) if around else (self,))

    def leave(self) -> None:
        """End it."""
        self.admission = None
        try:
            _around.reset(self._token)
        except ValueError:  # a coroutine that another task closes, or the collector, ends in other variables
            pass


@final
class LiveCircuit:
    """Admits calls and records their results, for any number of threads and event loops.

    :param name: what errors and events call its owner.
    :param opening: for how long it opens.
    :param failures: which exceptions are failures.
    :param on_result: which results are; none, if it is None.
    :param on_transition: the owner's callback.
    :param observe_only: whether calls that it would refuse are made all the same.
    :param probe: a function that is the first probe of a half-open period, before any call is.
    """

    def __init__(
        self,
        name: str,
        trip: Trip,
        opening: Backoff,
        probes: int,
        probe_successes: int,
        probe_timeout: float | None,
        failures: Matcher,
        on_result: OnResult | None,
        on_transition: Listener | None,
        *,
        observe_only: bool = False,
        probe: Callable[[], Any] | None = None,
    ) -> None:
        self._name = name
        #: The function that is the first probe, if there is one.
        self.probe: Callable[[], Any] | None = probe
        self._opening = opening
        self._openings = opening.delays()
        self.machine: Circuit = Circuit(
            trip, next(self._openings), probes, probe_successes, probe_timeout, checks_first=probe is not None
        )
        self._failures = failures
        self._on_result = on_result
        self._on_transition = on_transition
        #: Whether a call that would be refused is made all the same.
        self.observe_only: bool = observe_only
        #: Whether slowness counts: only then is the clock read for each call.
        self.is_timed: bool = trip.slower_than < inf
        self._lock = threading.RLock()
        #: How many failures were counted since it was built.
        self.failures: int = 0
        self._opened = 0
        self._rejected = Counter()
        self._unreported: list[tuple[Transition, Context | None]] = []
        self._reporting = False
        forks.reset_after_fork(self, LiveCircuit._reset)

    @property
    def state(self) -> CircuitState:
        """The state of the circuit."""
        return self.machine.period.state

    def stats(self) -> CircuitStats:
        """Return a snapshot."""
        now = clock.now()
        with self._lock:
            period = self.machine.period
            last_failure = None if isinstance(period, Closed) else period.last_failure
            return CircuitStats(
                state=period.state,
                retry_after=max(0.0, period.until - now) if isinstance(period, Open) else None,
                last_failure=last_failure,
                failure_type=failure_type_of(last_failure),
                probes=len(period.probes) if isinstance(period, HalfOpen) else 0,
                opened=self._opened,
                rejected=self._rejected.value(),
            )

    def isolate(self) -> None:
        """Refuse every call until `close`."""
        with self._lock:
            self._note_locked(self.machine.isolate(), None)
        self._report()

    def close(self) -> None:
        """Let calls pass again, and count from zero."""
        with self._lock:
            self._note_locked(self.machine.close(), None)
        self._report()

    # --- calls ---

    def is_around(self) -> bool:
        """Whether this code runs inside a call that this circuit has admitted."""
        return any(it.circuit is self and it.admission is not None for it in get_around())

    def _is_among_callers(self) -> bool:
        """Whether the call that `settle` is asked about was made inside another one of this circuit.

        For calls that are not noted: noting them would make each that succeeds take half as long again. So one that
        fails looks for `CircuitBreaker.around` with this circuit among the frames of its thread or task.
        """
        frame: FrameType | None = sys._getframe(3)  # past this function, `settle`, and the call that asks
        while frame is not None:
            if frame.f_code.co_name == "around" and frame.f_locals.get("circuit") is self:
                return True
            frame = frame.f_back
        return False

    def has_counted(self, error: Exception, since: int) -> bool:
        """Whether this failure, or one that caused it, was counted by a call inside, after so many others.

        To be asked only where any was counted meanwhile.
        """
        return is_marked(error, id(self), since)

    def admit(self, ctx: Context) -> Admission:
        """Admit a call, or raise. A circuit that only observes announces the refusal, and lets the call pass."""
        admission, period, now = self._ask(ctx)
        # No call for one that is admitted: an interrupt in it would lose the slot of a probe.
        return admission if admission is not None else self._refuse(period, now, ctx)

    async def admit_checked(self, ctx: Context, noted: Admitted, runtime: Runtime) -> None:
        """Do so, into `noted`; where no probe has succeeded in this period, run the function that is the first one."""
        admission: Admission | None = None
        try:
            admission, period, now = self._ask(ctx)
            while isinstance(admission, Probe) and not admission.period.successes:
                admission, period, now = await self._check(admission, ctx, noted, runtime)
        except BaseException:
            if admission is not None:
                self.release(admission)
            raise
        noted.admission = admission if admission is not None else self._refuse(period, now, ctx)

    async def check(self, ctx: Context, noted: Admitted, runtime: Runtime) -> None:
        """Run that function if a probe may be made now. No call follows."""
        admission: Admission | None = None
        try:
            if self.probe is not None and not isinstance(self.machine.period, Closed):
                admission, *_ = self._ask(ctx)
                if isinstance(admission, Probe):
                    admission, *_ = await self._check(admission, ctx, noted, runtime)
                if admission is not None:
                    self.release(admission)
        except BaseException:
            if admission is not None:  # perhaps once more: it may be that which was interrupted
                self.release(admission)
            raise

    async def _check(self, probe: Probe, ctx: Context, noted: Admitted, runtime: Runtime) -> _Answer:
        """Run the user's function in the slot of a probe, record what came of it, and admit a call or not."""
        assert self.probe is not None
        began, failure = clock.now(), None
        timeout = probe.period.probe_timeout
        with self._lock:  # the slot outlasts the function: that it was cut off counts as the failure that it is
            self.machine.keep_slot(probe, began + 2 * timeout)
        noted.admission = probe  # what it calls under this breaker belongs to it
        try:
            try:
                if await runtime.run_within(timeout, self.probe, self._name, ctx._timer) is False:
                    failure = _text_of(Success(False))
            except Misuse:
                raise
            except Exception as error:
                failure = _text_of(unwrap_stop_iteration(error))
            finally:
                noted.admission = None
            return self._ask(ctx, probe, failure, began)
        except BaseException:
            self.release(probe)
            raise

    def _ask(self, ctx: Context, probe: Probe | None = None, failure: str | None = None, began: float = 0.0) -> _Answer:
        """Ask the machine to admit a call, after it has recorded a probe, if there was one."""
        admission = None
        try:
            with self._lock:
                now = clock.now()  # not before: what has opened the circuit while this one waited was earlier
                if probe is not None:
                    duration = now - began if self.is_timed else 0.0
                    self._note_locked(self.machine.record(probe, failure, duration, now), ctx)
                admission, transitions = self.machine.admit(now)
                period = self.machine.period
                self._note_locked(transitions, ctx)
            self._report()
        except BaseException:  # interrupted, here or in a listener: the call will not be made
            if admission is not None:
                self.release(admission)
            raise
        return admission, period, now

    def _refuse(self, period: Period, now: float, ctx: Context) -> Admission:
        """Refuse a call; a circuit that only observes lets it pass."""
        error = self.refusal(period, now, ctx)
        if not self.observe_only:
            raise error
        return PASSED

    def settle(self, admission: Admission, ended: Exception | Success[Any], began: float, ctx: Context | None) -> None:
        """Record what an admitted call ended with, if it says anything about the dependency.

        If it says nothing, or a predicate raises, the caller gives the slot of a probe back.
        """
        if admission is PASSED:
            return
        if isinstance(ended, Exception):
            has_failed = self._failures.judge(ended)
        else:
            has_failed = ended is not DONE and self._on_result is not None and bool(self._on_result(ended.value))
        if has_failed and admission.quiet and self._is_among_callers():
            return  # the call around it, which was not noted, is what counts
        if has_failed or (has_failed is not None and not admission.quiet):  # else it would change nothing
            failure = _text_of(ended) if has_failed else None
            now = clock.now()
            with self._lock:
                transitions = self.machine.record(admission, failure, now - began if self.is_timed else 0.0, now)
                self._note_locked(transitions, ctx)
                if failure is not None:
                    self.failures += 1
                    if isinstance(ended, Exception):
                        mark(ended, id(self), self.failures)
        if self._unreported:
            self._report()

    def release(self, admission: Admission) -> None:
        """Take back the slot of a call that ended without a result that counts."""
        if type(admission) is not Closed:
            with self._lock:
                self.machine.release(admission)

    # --- inside ---

    def refusal(self, period: Period, now: float, ctx: Context) -> CircuitOpen:
        """Count a call that was not made, and make its error."""
        self._rejected.add()
        error: CircuitOpen = bare(CircuitIsolated if type(period) is Isolated else CircuitOpen, period.why)
        error.policy = self._name
        error.retry_after = period.until - now if type(period) is Open else None
        error.state = period.state
        error.last_failure = period.last_failure
        if subscribers.refusals or ctx._info.listeners:
            report_refusal(self._name, ctx, type(error).__name__, error.retry_after, 0.0, self.observe_only)
        return error

    def _note_locked(self, transitions: list[Transition], ctx: Context | None) -> None:
        for transition in transitions:
            self._unreported.append((transition, ctx))
            self._opened += transition.new is CircuitState.OPEN

    def _report(self) -> None:
        """Report the transitions in order, once each, outside the lock: one thread at a time holds the baton."""
        while self._unreported:
            with self._lock:
                if self._reporting or not self._unreported:
                    return  # the thread that reports now will come to ours
                self._reporting = True
                transition, ctx = self._unreported.pop(0)
            try:
                self._draw(transition.new)
            finally:
                try:
                    emit(CircuitChanged, self._name, ctx, self._on_transition, **transition._asdict())
                finally:
                    self._reporting = False

    def _draw(self, new: CircuitState) -> None:
        """Draw how long the next open period will last. Outside the lock: a backoff may be a user's code."""
        circuit = self.machine
        if new is CircuitState.OPEN:
            circuit.opens_for = next(self._openings, circuit.opens_for)
        elif new is CircuitState.CLOSED:
            self._openings = self._opening.delays()
            circuit.opens_for = circuit.opens_first_for = next(self._openings, circuit.opens_first_for)

    def _reset(self) -> None:  # pragma: no cover (in the child of a fork, which tests look at from outside)
        """Forget the threads of before a fork: their locks, their probes, and what one of them was to report."""
        self._lock = threading.RLock()
        self._unreported.clear()
        self._reporting = False
        if isinstance(self.machine.period, HalfOpen):
            self.machine.period.probes.clear()


def _text_of(failed: Failed) -> str:
    kind, message = describe(failed)
    return f"{kind}: {message[:LONGEST_MESSAGE]}"
