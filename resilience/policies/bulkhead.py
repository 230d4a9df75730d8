"""Bulkhead: a limit on concurrent calls, across all threads, tasks and event loops together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Never, TypeVar, final

from typing_extensions import override

from resilience import checks
from resilience.checks import Duration
from resilience.context import Context
from resilience.errors import BulkheadFull, blank
from resilience.policies.live_permits import LivePermits, Slot
from resilience.policy import Call, Policy
from resilience.state.permits import ONE_PERMIT

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class BulkheadStats:
    """A snapshot of a bulkhead.

    :param limit: how many calls may run at once.
    :param in_flight: how many are running; more than `limit` only after the limit was lowered.
    :param queued: how many calls wait.
    :param rejected: how many calls have been refused so far.
    """

    limit: int
    in_flight: int
    queued: int
    rejected: int


@final
class Bulkhead(Policy[Never]):
    """Let at most `limit` calls run at once; let a few more wait, and refuse the others.

    All threads, tasks and event loops that share this object share one count. Permits are granted in the order of
    arrival, from threads and from tasks alike.

    :param limit: how many calls may run at once, at least 1.
    :param queue: how many may wait, 0 by default.
    :param max_wait: how many seconds a call may wait; by default as long as its deadline allows.
    :param observe_only: true for a bulkhead that refuses nothing, and lets no call wait: it reports each call beyond
        the limit (`CallRejected` with `shadow`), which is then made without a permit.
    :param name: the name of this policy in errors and events; "Bulkhead" by default.
    :raises BulkheadFull: if the queue is full, or `max_wait` has passed.
    :raises DeadlineExceeded: if the budget of the execution ends while it waits. A `Timeout` around it ends the wait
        with its own error.

    >>> from resilience import Bulkhead
    >>> bulkhead = Bulkhead(2)
    >>> bulkhead.execute(lambda ctx: bulkhead.stats().in_flight)
    1
    """

    _resilience_shares = "permits"
    _resilience_blocks = ("with bulkhead.slot():", "async with bulkhead.slot():")

    def __init__(
        self,
        limit: int,
        *,
        queue: int = 0,
        max_wait: Duration | None = None,
        observe_only: bool = False,
        name: str | None = None,
    ) -> None:
        checks.not_bare("@Bulkhead(10)", limit)
        self._resilience_set_name(name)
        self._permits = LivePermits(
            self.name, checks.whole("limit", limit), queue, max_wait, observe_only, _bulkhead_full
        )

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        permits = self._permits.machine
        free = permits.free
        while True:
            try:
                if free and not permits.waiting:
                    del free[-1]  # not a call: an interrupt during or after a call could lose the permit
                    break
            except IndexError:  # pragma: no cover (another thread was faster: never under the GIL)
                pass
            if permits.queue:
                await self._permits.wait(ctx, ctx.runtime)
                break
            if not self._permits.make_room(ctx):
                return await call(ctx)  # without a permit, as it only observes
        try:
            return await call(ctx)
        finally:
            free += ONE_PERMIT  # not a call either
            if permits.waiting:
                try:
                    self._permits.hand_on()
                except BaseException:  # an interrupt: without this line, a waiter might sleep for ever
                    self._permits.hand_on()
                    raise

    def slot(self) -> Slot:
        """Return a block that holds a permit: `with bulkhead.slot():` or `async with bulkhead.slot():`.

        It waits no longer than the deadline of the ambient context.
        """
        return Slot(self._permits)

    def stats(self) -> BulkheadStats:
        """Return a snapshot of the bulkhead."""
        return BulkheadStats(*self._permits.machine.counts())

    def resize(self, limit: int) -> None:
        """Let `limit` calls (at least 1) run at once from now on. Calls that already run are not stopped."""
        self._permits.resize(checks.whole("limit", limit))

    @override
    def settings(self) -> Mapping[str, object]:
        return {
            "limit": self._permits.machine.limit,
            "queue": self._permits.queue,
            "max_wait": self._permits.max_wait,
            "observe_only": self._permits.observe_only,
            "name": self._resilience_given_name,
        }

    @override
    def describe(self) -> str:
        return f"{self.name}: at most {self._permits.machine.limit} at once, {self._permits.describe()}"


def _bulkhead_full(policy: str, limit: int, queue: int, why: str) -> BulkheadFull:
    error: BulkheadFull = blank(BulkheadFull, why)
    error.policy = policy
    error.retry_after = None
    error.limit = limit
    error.queue = queue
    return error
