"""Gate: count the calls in progress, refuse new ones once it is shut, and wait until none is left."""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Never, TypeVar, final

from typing_extensions import override

from resilience import checks, forks
from resilience.checks import Duration
from resilience.clock import clock
from resilience.context import Context
from resilience.counter import Counter
from resilience.errors import Rejected
from resilience.events.dispatch import report_refusal
from resilience.policy import Call, Policy
from resilience.runtimes.base import Runtime, Waiter
from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.driving import drive
from resilience.runtimes.tasks import TASKS

T = TypeVar("T")

#: The admitted calls around the running code. Tasks inherit it, and may outlive these calls.
_inside: ContextVar[tuple[_Admitted, ...]] = ContextVar("resilience.gates", default=())


class ShuttingDown(Rejected):
    """A `Gate` is shut: the process is about to end, and accepts no new calls."""


@final
class _Admitted:
    is_over = True  # until the call begins, so that after an interrupt before that it is around no later call


@final
@dataclass(frozen=True, slots=True)
class GateStats:
    """A snapshot of a gate.

    :param inside: how many calls are in progress.
    :param is_shut: whether new calls are refused.
    :param rejected: how many calls have been refused so far.
    """

    inside: int
    is_shut: bool
    rejected: int


@final
class Gate(Policy[Never]):
    """Let calls through until the gate is shut; then refuse new ones, and wait for those in progress.

    Put it outermost, around work that must finish before the process ends. Shut it on SIGTERM, then drain it. A call
    inside an admitted one is let through. It counts across all threads, tasks and event loops.

    :param name: the name of this policy in errors and events; "Gate" by default.
    :raises ShuttingDown: while the gate is shut.

    >>> from resilience.work import Gate
    >>> gate = Gate()
    >>> gate.call(str.upper, "hello")
    'HELLO'
    >>> gate.drain(timeout=1.0)
    True
    """

    _resilience_shares = "count of calls"

    def __init__(self, *, name: str | None = None) -> None:
        self._resilience_set_up(locals())
        self._is_shut = False
        self._admitted: set[_Admitted] = set()
        self._drains: set[Waiter] = set()
        self._rejected = Counter()
        forks.reset_after_fork(self, Gate._reset)

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        admitted, outer = _Admitted(), _inside.get()
        if outer:
            outer = tuple(it for it in outer if not it.is_over)
        if self._is_shut and self._admitted.isdisjoint(outer):
            raise self._refusal(ctx)
        token = _inside.set((*outer, admitted))
        try:
            admitted.is_over = False
            self._admitted.add(admitted)
            # Both again: in between, a drain may have missed this call, and the call around it may have ended.
            if not self._is_shut or not self._admitted.isdisjoint(outer):
                return await call(ctx)
        finally:
            try:
                self._leave(admitted, token)
            except BaseException:  # a signal handler has raised in between: without the rest, a drain would wait
                self._leave(admitted, token)
                raise
        raise self._refusal(ctx)

    def _leave(self, admitted: _Admitted, token: Token[tuple[_Admitted, ...]]) -> None:
        """Count a call no longer, and wake the drains after the last one. May be repeated."""
        self._admitted.discard(admitted)
        admitted.is_over = True
        with suppress(ValueError, RuntimeError):  # another task closes the coroutine, in other variables; repeated
            _inside.reset(token)
        if not self._admitted:
            for drain in self._drains.copy():
                drain.wake()

    def shut(self) -> None:
        """Refuse new calls from now on. May be called in a signal handler."""
        self._is_shut = True

    def open(self) -> None:
        """Let calls through again."""
        self._is_shut = False

    def drain(self, timeout: Duration) -> bool:
        """Shut the gate, and wait until no call is in progress: true, or false after `timeout` seconds (0 or more).

        Call it outside the calls of this gate: inside one, it would wait for its own call until `timeout`.
        """
        return drive(self._drain(checks.seconds("timeout", timeout, zero=True), BLOCKING))

    async def adrain(self, timeout: Duration) -> bool:
        """Shut the gate and wait as `drain` does, in a task."""
        return await self._drain(checks.seconds("timeout", timeout, zero=True), TASKS)

    def stats(self) -> GateStats:
        """Return a snapshot of the gate."""
        return GateStats(inside=len(self._admitted), is_shut=self._is_shut, rejected=self._rejected.value())

    async def _drain(self, timeout: float, runtime: Runtime) -> bool:
        self.shut()
        ends_at = clock.now() + timeout
        while self._admitted:
            waiter = runtime.waiter()
            try:
                self._drains.add(waiter)
                if self._admitted and not await waiter.wait(ends_at, None):
                    return not self._admitted
            finally:
                self._drains.discard(waiter)
        return True

    def _refusal(self, ctx: Context) -> ShuttingDown:
        self._rejected.add()
        why = "the process is shutting down, and takes no new calls"
        return report_refusal(ShuttingDown(why, policy=self.name), ctx)

    def _reset(self) -> None:  # pragma: no cover (runs in the child of a fork, which tests observe from outside)
        """Forget the calls of other threads, which do not exist in the child."""
        self._admitted, self._drains = set(), set()

    @override
    def describe(self) -> str:
        return f"{self.name}: lets calls through until it is shut; {len(self._admitted)} inside"
