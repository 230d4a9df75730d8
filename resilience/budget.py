"""A budget of time for a block of code: `with deadline(8.0) as ctx:`."""

from __future__ import annotations

from math import inf
from types import TracebackType
from typing import final

from resilience import checks
from resilience.ambient import AmbientToken, BlockContext, block_context, leave_block, set_ambient
from resilience.checks import Duration
from resilience.clock import clock
from resilience.context import Context
from resilience.errors import DeadlineExceeded
from resilience.runtimes.base import Timer
from resilience.runtimes.tasks import timer_until


@final
class deadline:  # read as a verb phrase: "with deadline(8.0)"
    """Open a budget for everything in a block: each execution inside inherits what is left of it.

    Budgets only shorten: inside another one, or inside an execution, the earlier deadline holds.

    :param timeout: seconds from the entry of the block; 0 is already over, infinity is no limit.

    As `with`, nothing is cut off: what waits or tries again inside obeys, as do `ctx.check()` and `ctx.timeout()`.
    As `async with`, the block itself is cut off when the time is over, and `DeadlineExceeded` is raised.

    >>> from resilience import Retry, deadline
    >>> with deadline(8.0) as ctx:
    ...     Retry().execute(lambda inner: inner.deadline == ctx.deadline)
    True
    """

    def __init__(self, timeout: Duration) -> None:
        self._seconds = checks.seconds("timeout", timeout, zero=True, infinite=True)
        self._limit = self._seconds  # or what was left of an outer budget
        self._ctx: BlockContext | None = None
        self._token: AmbientToken | None = None
        self._timer: Timer | None = None

    def __enter__(self) -> Context:
        if self._ctx is not None:
            raise RuntimeError("this deadline is in use: open another one")
        now = clock.now()
        ctx = block_context(deadline=now + self._seconds)
        self._limit = self._seconds if ctx.deadline == now + self._seconds else max(0.0, ctx.deadline - now)
        self._ctx, self._token = ctx, set_ambient(ctx)
        return ctx

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ctx, token = self._ctx, self._token
        self._ctx = self._token = None
        if ctx is not None and token is not None:
            leave_block(ctx, token)

    async def __aenter__(self) -> Context:
        ctx = self.__enter__()
        if ctx.deadline != inf:
            try:
                self._timer = timer_until(ctx.deadline, self._seconds if self._limit == self._seconds else None)
                self._timer.start()
            except BaseException as error:  # interrupted, perhaps when the timer ran already
                await self.__aexit__(type(error), error, error.__traceback__)
                raise
        return ctx

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        timer, self._timer = self._timer, None
        try:
            swallowed = timer is not None and timer.stop(error)
        finally:
            self.__exit__(kind, error, traceback)
        if timer is None:
            return False
        if timer.fired:
            raise DeadlineExceeded(f"the block did not end within {self._limit:g} s", timeout=self._limit)
        return swallowed
