"""Permits for policies: the state machine with its waiters, the refusals, and the block that holds a permit.

Part of Bulkhead and AdaptiveLimit. The policies take and release free permits themselves; everything else is here.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TypeAlias, final

from resilience import checks, forks
from resilience.ambient import block_context
from resilience.checks import Duration
from resilience.clock import clock
from resilience.context import Context, waits_until
from resilience.errors import BlockMisuse, DeadlineExceeded, Rejected
from resilience.events.dispatch import report_refusal, subscribers
from resilience.formats import format_number
from resilience.runtimes.base import Runtime, Waiter
from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.driving import drive
from resilience.runtimes.tasks import TASKS
from resilience.state.permits import GONE, GRANTED, ONE_PERMIT, TAKEN, WAITING, Permits

#: Makes the error for a call that gets no permit: of the name of the policy, the limit, the queue and the reason.
MakeRefusal: TypeAlias = Callable[[str, int, int, str], Rejected]


@final
class LivePermits:
    """Grants permits, for any number of threads and event loops.

    :param name: the name of the policy in errors and events.
    :param queue: how many calls may wait. With `observe_only` no call waits, so that none is delayed.
    :param max_wait: how many seconds a call may wait; None is as long as its deadline allows.
    :param observe_only: whether a call that gets no permit is made anyway.
    :param refusal: makes the error for a call that gets no permit.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        queue: int,
        max_wait: Duration | None,
        observe_only: bool,
        refusal: MakeRefusal,
    ) -> None:
        self.queue: int = checks.whole("queue", queue, least=0)
        self.max_wait: float | None = checks.optional_seconds("max_wait", max_wait)
        if self.max_wait is not None and queue == 0:
            raise ValueError(f"max_wait={max_wait!r} limits a wait in the queue, and there is none: give queue=10, say")
        self.observe_only: bool = checks.flag("observe_only", observe_only)
        self.machine: Permits[Waiter] = Permits(limit, 0 if observe_only else queue)
        self._name = name
        self._refusal = refusal
        forks.reset_after_fork(self, LivePermits._reset)

    def make_room(self, ctx: Context) -> bool:
        """Return true if a permit is free now; otherwise raise, or return false if the call is made without one."""
        if self.machine.make_room():
            return True
        if not self.observe_only:
            raise self._refused(ctx, "and there is no queue")  # in no variable: a frame that held it would be a cycle
        self._refused(ctx, "and there is no queue")
        return False

    async def wait(self, ctx: Context, runtime: Runtime) -> None:
        """Wait in the queue for a permit and take it; raise if the queue is full, or the wait takes too long."""
        machine, began = self.machine, clock.now()
        waiter = runtime.waiter()
        waiter.place = WAITING
        gives_up_at = inf if self.max_wait is None else began + self.max_wait
        budget = waits_until(ctx)
        try:
            if machine.join(waiter):
                self.hand_on()
            if len(machine.waiting) > machine.queue:
                self._leave_if_full(waiter)
            if waiter.place is GONE:
                raise self._refused(ctx, "and the queue is full")
            ends_at = budget if budget < gives_up_at else gives_up_at
            if waiter.place is WAITING and not await waiter.wait(ends_at, ctx._timer):
                machine.leave(waiter)
            if waiter.place is GRANTED:
                waiter.place = TAKEN
                return
        except BaseException:  # cancelled, cut off or interrupted: leave, and pass on a permit that was just granted
            try:
                self._abandon(machine, waiter)
            except BaseException:  # interrupted, perhaps once more
                self._abandon(machine, waiter)
                raise
            raise
        raise self._gave_up(ctx, clock.now() - began, is_deadline=budget <= gives_up_at)

    def hand_on(self) -> None:
        """Grant free permits to waiters, and wake them. If the event loop of one has ended, its permit is passed on.

        A caller that has released a permit calls it again after an interrupt, which may have left a waiter asleep.
        """
        waiter = None
        while (waiter := self.machine.grant(waiter)) is not None:
            if not waiter.wake():
                self.machine.drop(waiter)

    def resize(self, limit: int) -> None:
        """Change the limit."""
        self.machine.resize(limit)
        self.hand_on()

    def describe(self) -> str:
        """Return in words how many calls may wait, for how long, and whether it only observes."""
        text = f"{self.queue} may wait" if self.queue else "no queue"
        if self.max_wait is not None:
            text += f", at most {format_number(self.max_wait)} s"
        return f"{text}; only observes" if self.observe_only else text

    # --- private ---

    def _leave_if_full(self, waiter: Waiter) -> None:
        """Leave a queue that was full, unless the first ones in it will never run again: those are removed."""
        while (first := self.machine.first_if_full(waiter)) is not None and not first.is_alive():
            self.machine.drop(first)  # its event loop has ended
        if first is not None:
            self.machine.leave(waiter)

    def _abandon(self, machine: Permits[Waiter], waiter: Waiter) -> None:
        if machine is self.machine:  # pragma: no branch (not in the child of a fork, where a finalizer may call this)
            machine.abandon(waiter)
        self.hand_on()

    def _reset(self) -> None:  # pragma: no cover (in the child of a fork, which tests check from outside)
        """Discard all permits and waiters. A holder in the child releases its permit to the old machine."""
        self.machine = Permits(self.machine.limit, self.machine.queue)

    def _gave_up(self, ctx: Context, waited: float, *, is_deadline: bool) -> Exception:
        """Report the end of a wait in vain, and return its error; in no variable of a frame, which would be a cycle."""
        if is_deadline:
            why = "the deadline passed while the call waited in the queue"
            return report_refusal(DeadlineExceeded(why, policy=self._name), ctx, waited)
        return self._refused(ctx, f"after {format_number(self.max_wait or 0.0)} s in the queue", waited)

    def _refused(self, ctx: Context, why: str, waited: float = 0.0) -> Rejected:
        limit = self.machine.limit
        running = "call is" if limit == 1 else "calls are"
        error = self._refusal(self._name, limit, self.queue, f"{limit} {running} running {why}")
        if subscribers.refusals or ctx._info.listeners:
            report_refusal(error, ctx, waited, shadow=self.observe_only)
        return error


@final
class Slot:
    """A permit held for a block."""

    __slots__ = ("_held", "_permits", "_waits")

    def __init__(self, permits: LivePermits) -> None:
        self._held: Permits[Waiter] | None = None
        self._permits = permits
        self._waits = False

    @property
    def is_held(self) -> bool:
        """Whether this block holds a permit."""
        return self._held is not None

    def __enter__(self) -> None:
        if not self._begin():
            drive(self._wait(BLOCKING))

    def _begin(self) -> bool:
        """Take a permit; false if the block must wait for one."""
        if self._waits or self._held is not None:
            raise BlockMisuse("this slot is in use: ask for another one")
        return self._take(self._permits.machine)

    def _take(self, machine: Permits[Waiter]) -> bool:
        try:
            if not machine.waiting:
                del machine.free[-1]  # as in `Bulkhead.around`
                self._held = machine
                return True
        except IndexError:
            pass
        return False

    async def _wait(self, runtime: Runtime) -> None:
        machine, ctx = self._permits.machine, block_context()
        self._waits = True
        try:
            if machine.queue:
                await self._permits.wait(ctx, runtime)
                self._held = machine
            while self._held is None and self._permits.make_room(ctx):
                self._take(machine)
        finally:
            self._waits = False

    def __exit__(self, *exc: object) -> None:
        machine, self._held = self._held, None
        if machine is not None:
            machine.free += ONE_PERMIT
            if machine.waiting:
                try:
                    self._permits.hand_on()
                except BaseException:  # as in `Bulkhead.around`
                    self._permits.hand_on()
                    raise

    def __del__(self) -> None:
        try:
            is_held = self._held is not None
        except AttributeError:  # a signal handler raised before `_held` was set
            return
        if is_held:  # one raised before the first line of `__exit__`
            self.__exit__()

    async def __aenter__(self) -> None:
        if not self._begin():
            await self._wait(TASKS)

    async def __aexit__(self, *exc: object) -> None:
        self.__exit__(*exc)
