"""Bulkhead: at most so many calls at once, over all threads, tasks and event loops together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Never, TypeVar, final

from typing_extensions import override

from resilience import checks, forks
from resilience.ambient import block_context
from resilience.checks import Duration, format_number
from resilience.clock import clock
from resilience.context import Context
from resilience.errors import BulkheadFull, DeadlineExceeded
from resilience.events.dispatch import emit, subscribers
from resilience.events.kinds import CallRejected
from resilience.policy import Call, Policy
from resilience.runtimes.base import Runtime, Waiter
from resilience.runtimes.blocking import BLOCKING, drive
from resilience.runtimes.tasks import TASKS
from resilience.state.permits import Permits, Place, Ticket

T = TypeVar("T")

_ONE_PERMIT = (None,)


@final
@dataclass(frozen=True, slots=True)
class BulkheadStats:
    """What a bulkhead holds at one instant.

    :param limit: how many calls may run at once.
    :param in_flight: how many are running; more than `limit` only while a smaller limit takes hold.
    :param queued: how many wait.
    :param rejected: how many have been turned away since it was built.
    """

    limit: int
    in_flight: int
    queued: int
    rejected: int


@final
class Bulkhead(Policy[Never]):
    """Let at most `limit` calls run at once; let a few more wait, and turn the others away.

    The count is one for all threads, tasks and event loops that share this object. Permits are granted in the
    order of arrival, from threads and from tasks alike.

    :param limit: how many calls may run at once, at least 1.
    :param queue: how many may wait, 0 by default.
    :param max_wait: how many seconds a call may wait; by default as long as its deadline allows.
    :param name: what errors and events call this policy; "Bulkhead" by default.
    :raises BulkheadFull: where the queue is full, or `max_wait` has passed.
    :raises DeadlineExceeded: where the budget of the execution ends while it waits. A `Timeout` around ends the
        wait with its own error.

    >>> from resilience import Bulkhead
    >>> bulkhead = Bulkhead(2)
    >>> bulkhead.execute(lambda ctx: bulkhead.stats().in_flight)
    1
    """

    def __init__(
        self, limit: int, *, queue: int = 0, max_wait: Duration | None = None, name: str | None = None
    ) -> None:
        checks.not_bare("@Bulkhead(10)", limit)
        self._permits: Permits[Waiter] = Permits(checks.whole("limit", limit), checks.whole("queue", queue, least=0))
        self._max_wait = checks.optional_seconds("max_wait", max_wait)
        if self._max_wait is not None and queue == 0:
            raise ValueError(f"max_wait={max_wait!r} limits a wait in the queue, and there is none: give queue=10, say")
        self._given_name = checks.optional_name(name)
        self.name: str = name or "Bulkhead"
        forks.reset_after_fork(self, Bulkhead._reset)

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        permits, taken = self._permits, False
        free = permits.free
        try:
            if not permits.busy:
                del free[-1]  # no call: in one, and after it, an interrupt could raise, and lose the permit
                taken = True
        except IndexError:
            pass
        if not taken and self._may_wait(ctx):
            await self._wait(ctx, ctx.runtime)
        try:
            return await call(ctx)
        finally:
            free += _ONE_PERMIT  # no call either
            if permits.busy:
                self._wake(permits.settle())

    def slot(self) -> Slot:
        """Return a block that holds a permit: `with bulkhead.slot():` or `async with bulkhead.slot():`.

        It waits no longer than the deadline of the ambient context.
        """
        return Slot(self)

    def stats(self) -> BulkheadStats:
        """Return what the bulkhead holds at this instant."""
        return BulkheadStats(*self._permits.counts())

    def resize(self, limit: int) -> None:
        """Let `limit` calls (at least 1) run at once from now on. More that run already come to their own end."""
        self._wake(self._permits.resize(checks.whole("limit", limit)))

    def __reduce__(self) -> Any:
        """Refuse to be copied: two bulkheads would let twice as many calls run."""
        raise TypeError(f"{self.name} holds permits that all its users share; it cannot be copied or pickled")

    @override
    def settings(self) -> Mapping[str, object]:
        return {
            "limit": self._permits.limit,
            "queue": self._permits.queue,
            "max_wait": self._max_wait,
            "name": self._given_name,
        }

    @override
    def describe(self) -> str:
        waiting = f"{self._permits.queue} may wait" if self._permits.queue else "no queue"
        if self._permits.queue and self._max_wait is not None:
            waiting += f", at most {format_number(self._max_wait)} s"
        return f"{self.name}: at most {self._permits.limit} at once, {waiting}"

    # --- inside ---

    def _reset(self) -> None:  # pragma: no cover (in the child of a fork, which tests look at from outside)
        """Forget all permits and waiters. A holder that forked gives its permit back to what there was before."""
        self._permits = Permits(self._permits.limit, self._permits.queue)

    def _may_wait(self, ctx: Context) -> bool:
        """Whether a call without a permit may queue for one. Without a queue: take one after all (false), or refuse."""
        if self._permits.queue:
            return True
        if not self._permits.take_or_refuse():
            raise self._full(ctx, "and there is no queue")
        return False

    async def _wait(self, ctx: Context, runtime: Runtime) -> None:
        """Queue for a permit; come back with one or with an error."""
        began = clock.now()
        ticket = Ticket(runtime.waiter())
        gives_up_at = inf if self._max_wait is None else began + self._max_wait
        # A timer around this call ends the wait by itself, and then the error is its own.
        budget = inf if ctx._timer is not None and ctx._timer.deadline <= ctx.deadline else ctx.deadline
        try:
            has_joined = self._join(ticket)
            if ticket.place is Place.WAITING and not await ticket.waiter.wait(min(gives_up_at, budget), ctx._timer):
                self._permits.leave(ticket)
            if self._permits.take_up(ticket):
                return
        except BaseException:  # cancelled, cut off, interrupted: leave, and pass on what was granted meanwhile
            self._wake(self._permits.abandon(ticket))
            raise
        if not has_joined:
            raise self._full(ctx, "and the queue is full")
        waited = clock.now() - began
        if budget <= gives_up_at:
            self._report(ctx, "DeadlineExceeded", waited)
            raise DeadlineExceeded("the deadline passed while the call waited in the queue", policy=self.name)
        raise self._full(ctx, f"after {format_number(self._max_wait or 0.0)} s in the queue", waited)

    def _join(self, ticket: Ticket[Waiter]) -> bool:
        """Take a place in the queue, if there is one. Those at its head whose event loop has ended make room."""
        while (first := self._permits.first_if_full()) is not None and not first.waiter.is_alive():
            self._permits.drop(first)
        self._wake(self._permits.join(ticket))
        return ticket.place is not Place.GONE

    def _full(self, ctx: Context, why: str, waited: float = 0.0) -> BulkheadFull:
        limit, queue = self._permits.limit, self._permits.queue
        running = "1 call is running" if limit == 1 else f"{limit} calls are running"
        self._report(ctx, "BulkheadFull", waited)
        return BulkheadFull(f"{running} {why}", policy=self.name, limit=limit, queue=queue)

    def _report(self, ctx: Context, reason: str, waited: float) -> None:
        if subscribers.refusals or ctx._info.listeners:
            emit(CallRejected, self.name, ctx, reason=reason, retry_after=None, waited=waited)

    def _wake(self, tickets: list[Ticket[Waiter]] | None) -> None:
        """Wake the waiters that were granted a permit. One whose event loop has ended passes it on."""
        while tickets:
            ticket = tickets.pop(0)
            try:
                ticket.waiter.wake()
            except RuntimeError:
                tickets += self._permits.pass_on(ticket) or []


@final
class Slot:
    """A permit held for a block."""

    def __init__(self, bulkhead: Bulkhead) -> None:
        self._bulkhead = bulkhead
        self._waits = False
        self._held: Permits[Waiter] | None = None

    def __enter__(self) -> None:
        drive(self._acquire(BLOCKING))

    def __exit__(self, *exc: object) -> None:
        permits, self._held = self._held, None
        if permits is not None:
            permits.free += _ONE_PERMIT
            if permits.busy:
                self._bulkhead._wake(permits.settle())

    async def __aenter__(self) -> None:
        await self._acquire(TASKS)

    async def __aexit__(self, *exc: object) -> None:
        self.__exit__(*exc)

    async def _acquire(self, runtime: Runtime) -> None:
        if self._waits or self._held is not None:
            raise RuntimeError("this slot is in use: ask for another one")
        permits = self._bulkhead._permits
        self._waits = True
        try:
            try:
                if not permits.busy:
                    del permits.free[-1]  # as in `Bulkhead.around`
                    self._held = permits
            except IndexError:
                pass
            if self._held is None and self._bulkhead._may_wait(ctx := block_context()):
                await self._bulkhead._wait(ctx, runtime)
            self._held = permits
        finally:
            self._waits = False
