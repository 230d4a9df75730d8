"""CircuitBreaker: stop calling a service that keeps failing, and detect when it has recovered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from math import inf
from typing import Any, Never, TypeVar, final

from typing_extensions import override

from resilience import checks
from resilience.ambient import block_context
from resilience.backoff import Backoff, BackoffLike, Constant, as_backoff
from resilience.callables import name_of
from resilience.checks import Duration
from resilience.circuit_state import CircuitState, CircuitStats
from resilience.clock import clock
from resilience.context import Context
from resilience.errors import BlockMisuse
from resilience.events.dispatch import optional_listener
from resilience.formats import format_number
from resilience.info import BARE, Listener
from resilience.matching import Matcher, On, OnResult, optional_predicate
from resilience.outcome import Success, unwrap_stop_iteration
from resilience.policies.live_circuit import DONE, Admitted, CircuitRules, LiveCircuit, get_enclosing
from resilience.policy import Call, Policy
from resilience.runtimes.base import Runtime
from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.driving import drive
from resilience.runtimes.tasks import TASKS
from resilience.state.circuit import Closed, Isolated, Open
from resilience.state.trips import ConsecutiveFailures, Trip, as_trip

T = TypeVar("T")

_DEFAULT_TRIP = ConsecutiveFailures(5)


@final
class CircuitBreaker(Policy[Never]):
    """Refuse calls for some time when too many have failed, then let a few probes test for recovery.

    :param trip: when to open: `ConsecutiveFailures(5)` by default (an `int` will do), `FailureCount`, `FailureRatio`,
        `SlowRatio`, or two of them with `|`.
    :param open_for: seconds for which it stays open, 30 by default; or a backoff, which grows with each re-opening
        and starts again once the circuit has closed.
    :param probes: how many calls at a time may test whether the service has recovered; 1 by default.
    :param probe_successes: how many of them must succeed to close the circuit, 1 by default. One failure opens it
        again.
    :param probe_timeout: seconds after which an unfinished probe loses its slot, and its result no longer counts; by
        default the larger of the open period and 30 s.
    :param probe: a health check, a function without parameters: the first call after the open period runs it as the
        first probe, for at most `probe_timeout`, and no call is made before it has succeeded. Then the call continues.
        If it raises or returns `False`, the circuit opens again. In tasks it may be asynchronous (a plain function runs
        in the event loop); in threads it runs on a worker. None by default: calls are the probes.
    :param on: what is a failure: an exception type, a tuple of them, or a predicate over the exception. Every
        `Exception` by default; but `Rejected` and `DeadlineExceeded`, which say nothing about the service, only if
        they are named here as types: a predicate is not asked about them.
    :param on_result: a predicate over the result; true means that it is a failure.
    :param ignore: exceptions that are not recorded. Every other one counts as a success, because the service has
        answered.
    :param on_transition: called with a `CircuitChanged` for each change of state, in order.
    :param observe_only: true for a circuit that refuses nothing: it changes its state as if it did, and reports each
        call that it would have refused (`CallRejected` with `shadow`). The result of such a call changes nothing.
    :param name: the name of this policy in errors and events; "CircuitBreaker" by default.
    :raises CircuitOpen: instead of making the call, with `retry_after`; `CircuitIsolated` after `isolate()`.

    Share one breaker between all callers of one service: it counts them together, in threads and in tasks. A result
    counts only in the period of the circuit that admitted its call. A nested call, inside a call that the same breaker
    has admitted, belongs to the outer call: it is let through, and not counted separately.

    >>> from resilience import CircuitBreaker
    >>> breaker = CircuitBreaker(1, open_for=30)
    >>> breaker.capture(lambda ctx: 1 / 0)
    Failure(error=ZeroDivisionError('division by zero'))
    >>> breaker.state
    <CircuitState.OPEN: 'open'>
    """

    _resilience_foresees = True
    _resilience_shares = "circuit"
    _resilience_blocks = ("with breaker.guard():", "async with breaker.guard():")

    def __init__(
        self,
        trip: Trip | int = _DEFAULT_TRIP,
        *,
        open_for: Duration | BackoffLike = 30.0,
        probes: int = 1,
        probe_successes: int = 1,
        probe_timeout: Duration | None = None,
        probe: Callable[[], object] | None = None,
        on: On = Exception,
        on_result: OnResult | None = None,
        ignore: On = (),
        on_transition: Listener | None = None,
        observe_only: bool = False,
        name: str | None = None,
    ) -> None:
        checks.not_bare("@CircuitBreaker()", trip)
        self._resilience_set_name(name)
        rules = CircuitRules(
            policy=self.name,
            trip=as_trip(trip),
            open_for=_as_open_period(open_for),
            probes=checks.whole("probes", probes),
            probe_successes=checks.whole("probe_successes", probe_successes),
            probe_timeout=checks.optional_seconds("probe_timeout", probe_timeout),
            probe=checks.optional_callable("probe", probe, ()),
            failures=Matcher(on, ignore),
            on_result=optional_predicate("on_result", on_result),
            on_transition=optional_listener("on_transition", on_transition),
            observe_only=checks.flag("observe_only", observe_only),
        )
        self._circuit = LiveCircuit(rules)
        self._judges_results = on_result is not None

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        circuit, noted, result = self._circuit, None, None  # `_is_nested` finds `noted` and `admission` in this frame
        since, began = circuit.failures, 0.0
        admission: Any = circuit.machine.period
        if not admission.quiet or ctx._info is not BARE:
            if circuit.is_timed:  # if slow calls count, it is never quiet
                began = clock.now()
            if get_enclosing() and circuit.encloses_caller():  # a nested call: it belongs to the outer one
                return await call(ctx)
            if type(admission) is Open and (now := clock.now()) < admission.until and not circuit.rules.observe_only:
                raise circuit.refusal(admission, now, ctx)
            noted = circuit.note_call()
            if type(admission) is not Closed:
                await circuit.admit(ctx, noted, ctx.runtime)
                admission = noted.admission
        try:
            try:
                try:
                    if noted is not None:
                        noted.admission = admission
                    result = await call(ctx)
                finally:
                    if noted is not None:
                        noted.admission = None  # not in `leave`, at whose beginning an interrupt may come
                        noted.leave()
            except Exception as error:
                if noted is not None or not circuit.has_counted(error, since):
                    circuit.settle(admission, unwrap_stop_iteration(error), began, ctx)
                raise
            if self._judges_results or not admission.quiet:
                circuit.settle(admission, Success(result), began, ctx)
        except BaseException:
            if type(admission) is not Closed:
                circuit.release(admission)  # cancelled, or interrupted before the result was recorded
            if result is not None:
                await ctx.runtime.close(result)  # `settle` has raised: no caller will see it
            raise
        return result

    @override
    def _resilience_refuses_until(self) -> float:
        period = self._circuit.machine.period
        if self._circuit.rules.observe_only or not isinstance(period, (Open, Isolated)):
            return -inf
        return period.until if isinstance(period, Open) else inf

    @property
    def state(self) -> CircuitState:
        """The state of the circuit. Only a call, `isolate` or `close` changes it, never time alone."""
        return self._circuit.machine.period.state

    def stats(self) -> CircuitStats:
        """Return a snapshot of the state and the counts."""
        return self._circuit.stats()

    def isolate(self) -> None:
        """Refuse every call until `close` is called. A breaker that only observes reports the calls instead."""
        self._circuit.isolate()

    def close(self) -> None:
        """Let calls pass again, and count from zero. Results of running calls no longer count."""
        self._circuit.close()

    def check(self) -> CircuitState:
        """Run `probe` if the open period is over, and return the state. For a background loop in a thread.

        It does nothing while the circuit is closed, open, isolated, or probed by another caller, or without a `probe`.
        What `probe` raises is recorded, not raised.
        """
        drive(self._circuit.check(BLOCKING))
        return self.state

    async def acheck(self) -> CircuitState:
        """Do the same as `check` in a task; `probe` may be asynchronous."""
        await self._circuit.check(TASKS)
        return self.state

    def guard(self) -> Guard:
        """Return a block under this breaker: `with breaker.guard():` or `async with breaker.guard():`.

        Entering it raises `CircuitOpen` if a call would be refused; an error of the block is recorded like that of a
        call.
        """
        guard = Guard()
        guard._noted = None
        guard._circuit = self._circuit
        return guard

    @override
    def settings(self) -> Mapping[str, object]:
        rules = self._circuit.rules
        return {
            "trip": rules.trip,
            "open_for": rules.open_for.delay if isinstance(rules.open_for, Constant) else rules.open_for,
            "probes": rules.probes,
            "probe_successes": rules.probe_successes,
            "probe_timeout": rules.probe_timeout,
            "probe": rules.probe,
            "on": rules.failures.on,
            "on_result": rules.on_result,
            "ignore": rules.failures.ignore,
            "on_transition": rules.on_transition,
            "observe_only": rules.observe_only,
            "name": self._resilience_given_name,
        }

    @override
    def describe(self) -> str:
        rules, opening = self._circuit.rules, self._circuit.rules.open_for
        lasts = f"{format_number(opening.delay)} s" if isinstance(opening, Constant) else repr(opening)
        text = (
            f"{self.name}: opens on {rules.trip!r} for {lasts}; {rules.probes} at a time may probe, "
            f"{rules.probe_successes} must succeed to close it"
        )
        if rules.probe_timeout is not None:
            text += f"; a probe may take {format_number(rules.probe_timeout)} s"
        if rules.probe is not None:
            text += f"; {name_of(rules.probe)} probes first"
        return f"{text}; only observes" if rules.observe_only else text


@final
class Guard:
    """A block under a circuit breaker."""

    __slots__ = ("_began", "_circuit", "_noted", "_since")

    _circuit: LiveCircuit
    _noted: Admitted | None

    def __enter__(self) -> None:
        if self._begin():
            drive(self._admit(BLOCKING))

    def _begin(self) -> bool:
        """Begin the block; true if the circuit must admit it first."""
        if self._noted is not None and self._noted.admission is not None:
            raise BlockMisuse("this guard is in use: ask for another one")
        circuit = self._circuit
        if get_enclosing() and circuit.encloses_caller():
            return False  # the block is nested in an admitted call, and belongs to it
        self._began = clock.now() if circuit.is_timed else 0.0
        self._since = circuit.failures
        self._noted = noted = circuit.note_call()  # no effect if the next lines raise: it has no admission yet
        period = circuit.machine.period
        if type(period) is not Closed:
            return True
        noted.admission = period
        return False

    async def _admit(self, runtime: Runtime) -> None:
        assert self._noted is not None
        await self._circuit.admit(block_context(), self._noted, runtime)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        circuit, noted = self._circuit, self._noted
        self._noted = None
        if noted is None or (admission := noted.admission) is None:
            return
        try:
            noted.admission = None  # not in `leave`, at whose beginning an interrupt may come
            noted.leave()
            if error is None:
                if not admission.quiet:
                    circuit.settle(admission, DONE, self._began, block_context())
            elif isinstance(error, Exception) and not circuit.has_counted(error, self._since):
                circuit.settle(admission, error, self._began, block_context())
        finally:
            if type(admission) is not Closed:
                circuit.release(admission)

    def __del__(self) -> None:
        try:
            noted = self._noted
        except AttributeError:  # a signal handler raised before `_noted` was set
            return
        if noted is not None:  # one raised before the first line of `__exit__`: record nothing
            self.__exit__(GeneratorExit, GeneratorExit(), None)

    async def __aenter__(self) -> None:
        if self._begin():
            await self._admit(TASKS)

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.__exit__(kind, error, traceback)


def _as_open_period(value: object) -> Backoff:
    if isinstance(value, (int, float, timedelta)):
        return Constant(checks.seconds("open_for", value))
    return as_backoff("open_for", value)
