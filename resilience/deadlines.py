"""A time budget for a block, `with deadline(8.0) as ctx:`, and a block without the outer one, `with detached(5.0):`."""

from __future__ import annotations

from math import inf
from types import TracebackType
from typing import ClassVar, final

from resilience import checks
from resilience.ambient import Block, block_context, set_ambient
from resilience.checks import Duration
from resilience.clock import clock
from resilience.context import Context
from resilience.errors import BlockMisuse, DeadlineExceeded, ends_with_the_deadline
from resilience.formats import format_number
from resilience.runtimes.base import Timer, has_come
from resilience.runtimes.tasks import TASKS, shielded_timer


class _DeadlineBlock(Block):
    """A block with a deadline."""

    __slots__ = ("_began", "_seconds", "_timer")

    _is_detached: ClassVar[bool] = False

    def __init__(self, timeout: Duration) -> None:
        self._seconds = checks.budget("timeout", timeout)
        self._ctx = self._token = None
        self._timer: Timer | None = None

    def __enter__(self) -> Context:
        if self._ctx is not None:
            raise BlockMisuse(f"this {type(self).__name__} is in use: open another one")
        self._began = began = clock.now()
        self._ctx = ctx = block_context(_without_deadline() if self._is_detached else None, began + self._seconds)
        try:
            self._token = set_ambient(ctx)
        except BaseException:  # interrupted: see `Block`
            ctx.is_over = True
            raise
        return ctx

    async def __aenter__(self) -> Context:
        ctx = self.__enter__()
        ends_at, outer = ctx.deadline, ctx._timer
        try:
            timer = shielded_timer(ends_at) if self._is_detached else None
            # An outer timer that is due by then fires first.
            if timer is None and ends_at < inf and (outer is None or outer.deadline > ends_at):
                timer = TASKS.timer(ends_at, self._seconds if ends_at == self._began + self._seconds else None)
            if timer is not None:
                self._timer = timer
                timer.start()
                ctx._timer = timer
        except BaseException as error:  # interrupted, perhaps after the timer was started
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return ctx

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:  # a timer that swallows an error has fired, so another one is raised
        timer, self._timer = self._timer, None
        try:
            if timer is not None:
                timer.stop(error)
        finally:
            self.__exit__(kind, error, traceback)
        if timer is None:
            return
        if timer.fired or (error is not None and ends_with_the_deadline(error) and has_come(timer.deadline)):
            is_own = timer.deadline == self._began + self._seconds  # otherwise, an outer budget has ended the block
            limit = self._seconds if is_own else max(0.0, timer.deadline - self._began)
            raise DeadlineExceeded(f"the block did not end within {format_number(limit)} s", timeout=limit)


@final
class deadline(_DeadlineBlock):  # read as a verb phrase: "with deadline(8.0)"
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
class detached(_DeadlineBlock):  # read as an adjective: "with detached(timeout=5.0)"
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

    _is_detached: ClassVar[bool] = True

    def __init__(self, timeout: Duration | None = None) -> None:
        super().__init__(inf if timeout is None else timeout)


def _without_deadline() -> Context:
    """Return a context that inherits from the ambient one nothing but the operation and the properties."""
    ctx = Context()
    ctx._info = block_context()._info
    return ctx
