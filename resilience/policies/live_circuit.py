"""A circuit for policies: the state machine behind a lock, the counts, and the ordered reports of its transitions.

Part of CircuitBreaker. The policy and the block form both use it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from math import inf
from types import FrameType
from typing import Any, Final, TypeAlias, final

from resilience import forks
from resilience.ambient import block_context
from resilience.backoff import Backoff
from resilience.circuit_state import CircuitState, CircuitStats
from resilience.clock import clock
from resilience.context import Context
from resilience.counter import Counter
from resilience.errors import CircuitIsolated, CircuitOpen, Misuse, blank
from resilience.events.dispatch import emit, report_refusal, subscribers
from resilience.events.kinds import CircuitChanged
from resilience.info import Listener
from resilience.matching import Matcher, OnResult, rejects
from resilience.outcome import LONGEST_MESSAGE, Failed, Success, type_and_message, unwrap_stop_iteration
from resilience.policies.marks import is_marked, mark
from resilience.runtimes.base import Runtime
from resilience.runtimes.tasks import replaces_cancellation
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

#: The admitted calls that enclose this code, innermost first. Child tasks inherit it, so each says when it has ended.
_enclosing: ContextVar[tuple[Admitted, ...]] = forks.context_variable("resilience.admitted", ())
get_enclosing: Callable[[], tuple[Admitted, ...]] = _enclosing.get
_set_enclosing: Callable[[tuple[Admitted, ...]], Token[tuple[Admitted, ...]]] = _enclosing.set
_reset_enclosing: Callable[[Token[tuple[Admitted, ...]]], None] = _enclosing.reset

#: The admission of a call that a circuit with `observe_only` would have refused: its result changes nothing.
PASSED: Final = Closed(ConsecutiveFailures(1).tally())

#: The admission of a call (None if it is refused), and the period and the instant of the decision.
_Answer: TypeAlias = "tuple[Admission | None, Period, float]"

#: A probe that the user's function has made, its failure as text (None for a success), and when it began.
_Probed: TypeAlias = "tuple[Probe, str | None, float]"

#: Seconds added to the duration of each call, because (now + 0.3) - now may be less than 0.3 in floats.
_ROUNDING: Final = 1e-9

#: The success of a block, which has no value for `on_result`.
DONE = Success(None)


@final
class Admitted:
    """A running call that a circuit has admitted: nested calls of the same circuit belong to it."""

    __slots__ = ("admission", "circuit", "token")

    circuit: LiveCircuit
    admission: Admission | None  # None before and after the call: this object has no effect if an interrupt comes then
    token: Any  # that resets the variable

    def leave(self) -> None:
        """End the call."""
        self.admission = None
        enclosing = get_enclosing()
        if not enclosing or enclosing[0] is not self:  # blocks in generators may end out of order
            return
        try:
            _reset_enclosing(self.token)
            self.token = None  # it refers to outer calls, and a task that outlives this call keeps this object
        except ValueError:  # another task, or the garbage collector, closes the coroutine in another context
            pass


@final
@dataclass(slots=True)  # as `RetryRules`
class CircuitRules:
    """The settings of a circuit. The fields are the parameters of `CircuitBreaker`."""

    policy: str
    trip: Trip
    open_for: Backoff
    probes: int
    probe_successes: int
    probe_timeout: float | None
    probe: Callable[[], Any] | None
    failures: Matcher
    on_result: OnResult | None
    on_transition: Listener | None
    observe_only: bool


@final
class LiveCircuit:
    """Admits calls and records their results, for any number of threads and event loops."""

    def __init__(self, rules: CircuitRules) -> None:
        self.rules: CircuitRules = rules
        self._openings = rules.open_for.delays()
        self.machine: Circuit = Circuit(
            rules.trip,
            next(self._openings),
            rules.probes,
            rules.probe_successes,
            rules.probe_timeout,
            checks_first=rules.probe is not None,
        )
        #: Whether slow calls count: only then is the clock read for each call.
        self.is_timed: bool = rules.trip.slower_than < inf
        self._lock = threading.RLock()
        #: How many failures have been counted so far.
        self.failures: int = 0
        self._opened = 0
        self._rejected = Counter()
        self._unreported: list[tuple[Transition, Context | None]] = []
        self._reporting = False
        forks.reset_after_fork(self, LiveCircuit._reset)

    def stats(self) -> CircuitStats:
        """Return a snapshot."""
        now = clock.now()
        with self._lock:
            period = self.machine.period
            return CircuitStats(
                state=period.state,
                retry_after=max(0.0, period.until - now) if isinstance(period, Open) else None,
                last_failure=period.last_failure,
                failure_type=failure_type_of(period.last_failure),
                probes=len(period.probes) if isinstance(period, HalfOpen) else 0,
                opened=self._opened,
                rejected=self._rejected.value(),
                counted=period.tally.counts(now) if isinstance(period, Closed) else (),
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

    def note_call(self) -> Admitted:
        """Note that a call begins, before it is admitted."""
        noted = Admitted()  # a constructor would be a tenth of a `guard()`
        noted.circuit = self
        noted.admission = None
        outer = get_enclosing()
        enclosing = (noted, *[it for it in outer if it.admission is not None]) if outer else (noted,)
        noted.token = _set_enclosing(enclosing)
        return noted

    def encloses_caller(self) -> bool:
        """Whether this code runs inside a call that this circuit has admitted."""
        enclosing = get_enclosing()  # usually none; to find that out with `any` would take four times as long
        return bool(enclosing) and any(it.circuit is self and it.admission is not None for it in enclosing)

    def has_counted(self, error: Exception, since: int) -> bool:
        """Whether a nested call has counted this failure, or a cause of it, since `failures` was `since`."""
        return self.failures != since and is_marked(error, id(self), since)

    async def admit(self, ctx: Context, noted: Admitted, runtime: Runtime) -> None:
        """Admit a call, which sets `noted.admission`, or raise its refusal. The user's `probe` may have to run first.

        With `observe_only`, report the refusal and let the call pass.
        """
        admission: Admission | None = None
        try:
            admission, period, now = self._ask(ctx)
            while self.rules.probe is not None and isinstance(admission, Probe) and not admission.period.successes:
                admission, period, now = await self._run_probe(admission, ctx, noted, runtime)
            noted.admission = admission if admission is not None else self._refuse(period, now, ctx)
        except BaseException:
            if admission is not None:
                self.release(admission)
            noted.leave()
            raise

    async def check(self, runtime: Runtime) -> None:
        """Run `probe` if there is one and a probe may be made now. No call follows."""
        if self.rules.probe is None or self.encloses_caller():
            return
        admission: Admission | None = None
        ctx, noted = block_context(), self.note_call()
        try:
            if not isinstance(self.machine.period, Closed):
                admission, *_ = self._ask(ctx)
                if isinstance(admission, Probe):
                    admission, *_ = await self._run_probe(admission, ctx, noted, runtime)
                if admission is not None:
                    self.release(admission)
        except BaseException:
            if admission is not None:  # perhaps a second time, as the first release may have been interrupted
                self.release(admission)
            raise
        finally:
            noted.leave()

    async def _run_probe(self, probe: Probe, ctx: Context, noted: Admitted, runtime: Runtime) -> _Answer:
        """Run the user's function in the slot of a probe, record its outcome, and decide on the call."""
        assert self.rules.probe is not None
        began, failure, timeout = clock.now(), None, probe.period.probe_timeout
        with self._lock:  # the slot outlasts the function, so that a timeout of the function counts as a failure
            self.machine.keep_slot(probe, began + 2 * timeout)
        noted.admission = probe  # its own calls under this breaker are nested calls
        try:
            try:
                if await runtime.run_within(timeout, self.rules.probe, self.rules.policy, ctx._timer) is False:
                    failure = _text_of(Success(False))
            except Misuse:
                raise
            except Exception as error:
                failure = _text_of(unwrap_stop_iteration(error))
            finally:
                noted.admission = None
            return self._ask(ctx, (probe, failure, began))
        except BaseException:
            self.release(probe)
            raise

    def _ask(self, ctx: Context, probed: _Probed | None = None) -> _Answer:
        """Let the machine decide on a call. Under the same lock, record the probe that was made for it, if any."""
        admission = None
        try:
            with self._lock:
                now = clock.now()  # read under the lock, so that it is not before the transitions of other threads
                if probed is None or self._record_probe_locked(*probed, now, ctx):
                    admission, transition = self.machine.admit(now)
                    self._note_locked(transition, ctx)
                period = self.machine.period
            self._report()
        except BaseException:  # interrupted, here or in a listener, so the call is not made
            if admission is not None:
                self.release(admission)
            raise
        return admission, period, now

    def _refuse(self, period: Period, now: float, ctx: Context) -> Admission:
        """Raise the refusal of a call. With `observe_only`, let the call pass."""
        if not self.rules.observe_only:
            raise self.refusal(period, now, ctx)  # in no variable: a frame that held it would be a cycle
        self.refusal(period, now, ctx)
        return PASSED

    def refusal(self, period: Period, now: float, ctx: Context) -> CircuitOpen:
        """Count and report a refused call, and return its error."""
        rules = self.rules
        self._rejected.add()
        error: CircuitOpen = blank(CircuitIsolated if type(period) is Isolated else CircuitOpen, period.why)
        error.policy = rules.policy
        error.retry_after = period.until - now if type(period) is Open else None
        error.state = period.state
        error.last_failure = period.last_failure
        if subscribers.refusals or ctx._info.listeners:
            report_refusal(error, ctx, shadow=rules.observe_only)
        return error

    def settle(self, admission: Admission, ended: Exception | Success[Any], began: float, ctx: Context) -> None:
        """Record the outcome of an admitted call, if it says anything about the service.

        If it says nothing, or if a predicate raises, the caller must release the slot of a probe.
        """
        if admission is PASSED:
            return
        if isinstance(ended, Exception):
            has_failed = None if replaces_cancellation(ended) else self.rules.failures.judge(ended)
        else:
            on_result = self.rules.on_result
            has_failed = ended is not DONE and on_result is not None and rejects(on_result, ended.value)
        if has_failed and (self.encloses_caller() or _is_nested(admission)):
            return  # the enclosing call counts instead
        if has_failed or (has_failed is not None and not admission.quiet):  # otherwise nothing would change
            failure = _text_of(ended) if has_failed else None
            now = clock.now()
            with self._lock:
                self._note_locked(self._record_locked(admission, failure, began, now), ctx)
                if failure is not None:
                    self.failures += 1
                    if isinstance(ended, Exception):
                        mark(ended, id(self), self.failures)
        if self._unreported:
            self._report()

    def release(self, admission: Admission) -> None:
        """Free the slot of a call that ended without a result that counts."""
        with self._lock:
            self.machine.release(admission)

    # --- private ---

    def _record_probe_locked(self, probe: Probe, failure: str | None, began: float, now: float, ctx: Context) -> bool:
        """Record a probe that the user's function has made; return whether its call may be admitted."""
        self._note_locked(self._record_locked(probe, failure, began, now), ctx)
        period = self.machine.period
        if period is probe.period and not period.successes:  # it has lost its slot
            return False
        # A failed probe refuses its call, even if it has opened the circuit for 0 s, or came too late to count.
        return failure is None or not isinstance(period, Open)

    def _record_locked(self, admission: Admission, failure: str | None, began: float, now: float) -> Transition | None:
        return self.machine.record(admission, failure, now - began + _ROUNDING if self.is_timed else 0.0, now)

    def _note_locked(self, transition: Transition | None, ctx: Context | None) -> None:
        if transition is not None:
            self._unreported.append((transition, ctx))
            self._opened += transition.new is CircuitState.OPEN

    def _report(self) -> None:
        """Report each transition once, in order and outside the lock. Only one thread reports at a time."""
        while self._unreported and self._report_next():
            pass

    def _report_next(self) -> bool:
        """Report the next transition; false if there is none, or if another thread is reporting, and will report it."""
        is_ours = False
        try:
            with self._lock:
                if self._reporting or not self._unreported:
                    return False
                self._reporting = is_ours = True  # no call in between, where an interrupt could come
            transition, ctx = self._unreported[0]
            try:
                self._set_next_opening(transition.new)
            finally:
                del self._unreported[0]
                emit(CircuitChanged, self.rules.policy, ctx, self.rules.on_transition, **transition._asdict())
            return True
        finally:
            if is_ours:
                self._reporting = False

    def _set_next_opening(self, new: CircuitState) -> None:
        """Take the length of the next open period from the backoff. Outside the lock, as a backoff may be user code."""
        machine = self.machine
        if new is CircuitState.OPEN:
            machine.opens_for = next(self._openings, machine.opens_for)
        elif new is CircuitState.CLOSED:
            self._openings = self.rules.open_for.delays()
            machine.opens_for = machine.opens_first_for = next(self._openings, machine.opens_first_for)

    def _reset(self) -> None:  # pragma: no cover (in the child of a fork, which tests check from outside)
        """Discard the lock, the probes and the unreported transitions of the threads before the fork."""
        self._lock = threading.RLock()
        self._unreported.clear()
        self._reporting = False
        if isinstance(self.machine.period, HalfOpen):
            self.machine.period.probes.clear()


def _is_nested(admission: Admission) -> bool:
    """Whether the call that `settle` records was made inside a call without an `Admitted`, in the same period.

    To set and reset the variable of an `Admitted` alone would let each successful call take half as long again, and
    nothing else tells child tasks and threads of their parent. Instead, a call that fails looks for
    `CircuitBreaker.around` with this admission, which is its period, in the frames of its thread or task.
    """
    frame: FrameType | None = sys._getframe(3)  # past this function, `settle`, and its caller
    while frame is not None and frame is not forks.starting_frame:
        code = frame.f_code
        # Only of breakers: before 3.13, reading the locals of a Retry's frame would keep its last failure alive.
        if code.co_name == "around" and "admission" in code.co_varnames:
            variables = frame.f_locals
            if variables.get("admission") is admission and variables.get("noted") is None:
                return True
        frame = frame.f_back
    return False


def _text_of(failed: Failed) -> str:
    kind, message = type_and_message(failed)
    return f"{kind}: {message[:LONGEST_MESSAGE]}"
