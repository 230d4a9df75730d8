"""A time budget for a block, `with deadline(8.0) as ctx:`, and a block without the outer one, `with detached(5.0):`."""

from __future__ import annotations

from math import inf
from types import TracebackType
from typing import final

from typing_extensions import override

from resilience import checks
from resilience.ambient import AmbientToken, BlockContext, block_context, current_context, enter_block, leave_block
from resilience.checks import Duration
from resilience.clock import clock
from resilience.context import Context
from resilience.errors import BlockMisuse, DeadlineExceeded, ends_with_the_deadline
from resilience.formats import format_number
from resilience.runtimes.base import TIMER_TOLERANCE, Timer
from resilience.runtimes.tasks import TASKS, shielded_timer


class _Budget:
    """A block with a deadline."""

    __slots__ = ("_ctx", "_limit", "_seconds", "_timer", "_token")

    def __init__(self, timeout: Duration) -> None:
        self._seconds = checks.seconds("timeout", timeout, zero=True, infinite=True)
        self._limit = self._seconds  # or the rest of an outer budget that ends earlier
        self._ctx: BlockContext | None = None
        self._token: AmbientToken | None = None
        self._timer: Timer | None = None

    def _open(self, ends_at: float) -> BlockContext:
        """Make the context of the block."""
        return block_context(deadline=ends_at)

    def _make_timer(self, ends_at: float) -> Timer | None:
        """Make the timer that cuts the block off, if it runs in a task."""
        if ends_at == inf:
            return None
        return TASKS.timer(ends_at, self._seconds if self._limit == self._seconds else None)

    def __enter__(self) -> Context:
        if self._ctx is not None:
            raise BlockMisuse(f"this {type(self).__name__} is in use: open another one")
        now = clock.now()
        ctx = self._open(ends_at := now + self._seconds)
        self._limit = self._seconds if ctx.deadline == ends_at else max(0.0, ctx.deadline - now)
        self._ctx = ctx
        self._token = enter_block(ctx)
        return ctx

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ctx, token = self._ctx, self._token
        if ctx is not None and token is not None:
            leave_block(ctx, token)
        self._ctx = self._token = None

    def __del__(self) -> None:
        ctx = getattr(self, "_ctx", None)  # set if a signal handler raised as the block began or ended
        if ctx is not None:
            ctx.is_over = True

    async def __aenter__(self) -> Context:
        ctx = self.__enter__()
        try:
            if ctx._timer is None or ctx._timer.deadline > ctx.deadline:  # otherwise, the outer timer fires first
                self._timer = self._make_timer(ctx.deadline)
            if self._timer is not None:
                self._timer.start()
                ctx._timer = self._timer
        except BaseException as error:  # interrupted, perhaps after the timer was started
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
        late = timer.fired
        if error is not None and ends_with_the_deadline(error):
            late = late or clock.now() >= timer.deadline - TIMER_TOLERANCE
        if late:
            raise DeadlineExceeded(f"the block did not end within {format_number(self._limit)} s", timeout=self._limit)
        return swallowed


@final
class deadline(_Budget):  # read as a verb phrase: "with deadline(8.0)"
    """Open a budget for everything in a block: each execution inside inherits the time left.

    Budgets only shorten: inside another one, or inside an execution, the earlier deadline applies.

    :param timeout: seconds from the entry of the block; 0 is already over, infinity is no limit.

    With `with`, nothing is cut off: all waits and retries inside respect the budget, and so do `ctx.check()` and
    `ctx.timeout()`. With `async with`, the block itself is cut off when the time is up, and raises `DeadlineExceeded`.

    >>> from resilience import Retry, deadline
    >>> with deadline(8.0) as ctx:
    ...     Retry().execute(lambda inner: inner.deadline == ctx.deadline)
    True
    """

    __slots__ = ()


@final
class detached(_Budget):  # read as an adjective: "with detached(timeout=5.0)"
    """Open a block that inherits no deadline: for clean-up when the time is up, and for work in the background.

    Executions inside inherit the operation and the properties, and get `timeout` as their own budget.

    :param timeout: seconds from the entry of the block; no limit by default.

    With `with`, nothing is cut off. With `async with`, the block is cut off after `timeout`, and raises
    `DeadlineExceeded`. Under trio, it is also shielded from an outer cancellation, so give it a limit. Under asyncio,
    a task is cancelled only once, so anything that it awaits after that runs to its end; an outer limit that ends while
    the block runs cuts it off. From a scope of anyio that was cancelled, and would cancel every `await`, the block is
    shielded as well.

    >>> from resilience import Retry, deadline, detached
    >>> with deadline(0.0):
    ...     with detached(timeout=5.0):
    ...         Retry().execute(lambda ctx: ctx.remaining() > 4.0)
    True
    """

    __slots__ = ()

    def __init__(self, timeout: Duration | None = None) -> None:
        super().__init__(inf if timeout is None else timeout)

    @override
    def _open(self, ends_at: float) -> BlockContext:
        fresh = Context()
        fresh._info = current_context()._info
        return block_context(fresh, deadline=ends_at)

    @override
    def _make_timer(self, ends_at: float) -> Timer | None:
        return shielded_timer(ends_at) or super()._make_timer(ends_at)
