"""Tasks: asyncio and trio, by way of anyio. A coroutine here is what it looks like.

Cancelling is the one thing that the two do differently, and each library's clients are written for
its own way. Under trio a timer is a cancel scope. Under asyncio it does what `asyncio.timeout` does:
it cancels its task *once*, and takes the `CancelledError` for its own only if nobody else has asked
for a cancellation (`Task.uncancel` counts them). anyio's scopes deliver again and again there, which
breaks clients that clean up with an `await`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, final

import anyio
from typing_extensions import override

from resilience.callables import is_awaitable, refuse_plain
from resilience.clock import clock
from resilience.context import Context, restore_ambient, set_ambient
from resilience.events import logger
from resilience.outcome import Failure
from resilience.runtimes.base import Runtime, Timer, TimerOwner, Waiter

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from types import TracebackType

    from resilience.policy import Policy

#: A coroutine function that runs the rest of a chain.
Stage: TypeAlias = "Callable[[Context], Awaitable[Any]]"


def _asyncio_task() -> asyncio.Task[Any] | None:
    """Return the current asyncio task; None under trio, also where trio is a guest in an asyncio loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


@final
class AsyncioTimer:
    """`asyncio.timeout`, with an instant on the process clock, and without an exception of its own."""

    __slots__ = ("_alarms", "_cancelling", "_task", "deadline", "expiring", "fired")

    def __init__(self, deadline: float, task: asyncio.Task[Any], alarms: Alarms) -> None:
        self.deadline: float = deadline
        self.fired: bool = False
        self.expiring: bool = False
        self._task = task
        self._alarms = alarms

    def __enter__(self) -> Self:
        self._cancelling = self._task.cancelling()
        self._alarms.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> bool:
        task = self._task
        del self._task  # no cycle: task -> its exception -> traceback -> frame -> this timer -> task
        if not self.expiring:
            self._alarms.discard(self)
            return False
        # `<=`: whoever else has cancelled this task meanwhile is still to be served.
        mine = task.uncancel() <= self._cancelling
        self.fired = mine and kind is not None and issubclass(kind, asyncio.CancelledError)
        return self.fired

    def expire(self) -> None:
        """Cancel the task, once."""
        self.expiring = True
        self._task.cancel()


@final
class Alarms:
    """The timers of one limit in one loop. They end in the order in which they began, so one alarm serves them all.

    The alarm stays set when the timer that it was set for is done: it rings once per limit at the most, and is
    then set for the first timer that is left. So a call that ends in time costs a write to a dictionary and
    another one, where `asyncio.timeout` makes, queues and cancels a handle (2 to 3 us).

    :param limit: the limit that all of its timers have; None for the alarm of a single timer.
    """

    __slots__ = ("_handle", "_limit", "_pending", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: float | None) -> None:
        self.loop: asyncio.AbstractEventLoop = loop
        self._limit = limit
        self._pending: dict[AsyncioTimer, None] = {}  # in order
        self._handle: asyncio.TimerHandle | None = None

    def add(self, timer: AsyncioTimer) -> None:
        """Watch a timer, the last one to end."""
        self._pending[timer] = None
        if self._handle is None:
            self._set(timer)

    def discard(self, timer: AsyncioTimer) -> None:
        """Forget a timer that is done."""
        del self._pending[timer]
        if self._limit is None and self._handle is not None:
            self._handle.cancel()

    def _set(self, timer: AsyncioTimer) -> None:
        self._handle = self.loop.call_later(max(0.0, timer.deadline - clock.now()), self._ring, timer)

    def _ring(self, due: AsyncioTimer) -> None:
        self._handle = None
        now = clock.now()
        while self._pending:
            timer = next(iter(self._pending))
            if timer is not due and timer.deadline > now:
                self._set(timer)
                return
            del self._pending[timer]
            timer.expire()
        if self._limit is not None:
            _shared.by_limit.pop(self._limit, None)


class _Shared(threading.local):
    """The alarms of the loop that runs in this thread, by limit."""

    MOST = 64  # limits that are computed anew for each call get an alarm of their own

    def __init__(self) -> None:
        self.by_limit: dict[float, Alarms] = {}

    def alarms(self, loop: asyncio.AbstractEventLoop, limit: float | None) -> Alarms:
        alarms = None if limit is None else self.by_limit.get(limit)
        if alarms is None or alarms.loop is not loop:
            alarms = Alarms(loop, limit if limit in self.by_limit or len(self.by_limit) < self.MOST else None)
            if alarms._limit is not None:
                self.by_limit[alarms._limit] = alarms
        return alarms


_shared = _Shared()


@final
class ScopeTimer:
    """A cancel scope."""

    __slots__ = ("_scope", "deadline", "fired")

    def __init__(self, deadline: float) -> None:
        self.deadline: float = deadline
        self.fired: bool = False

    def __enter__(self) -> Self:
        # The loop has a clock of its own: only the seconds that remain can be handed over.
        self._scope = anyio.CancelScope(deadline=anyio.current_time() + max(0.0, self.deadline - clock.now()))
        self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> bool:
        swallowed = bool(self._scope.__exit__(kind, error, traceback))
        self.fired = swallowed and self._scope.cancelled_caught
        return swallowed


@final
class TaskWaiter(Waiter):
    """A task in a queue. Its event lives in its own loop; to set it from elsewhere is to ask that loop."""

    __slots__ = ("_event", "_is_alive", "_post")

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._post: Callable[[Callable[[], object]], object]
        self._is_alive: Callable[[], bool]
        task = _asyncio_task()
        if task is not None:
            loop = task.get_loop()
            self._post = loop.call_soon_threadsafe
            self._is_alive = lambda: not loop.is_closed()
        else:
            self._post = sys.modules["trio"].lowlevel.current_trio_token().run_sync_soon
            self._is_alive = partial(_takes_work, self._post)

    @override
    def wake(self) -> None:
        self._post(self._event.set)

    @override
    def is_alive(self) -> bool:
        return self._is_alive()

    @override
    async def wait(self, deadline: float, ctx: Context) -> bool:
        if deadline == float("inf"):
            await self._event.wait()
        else:
            with timer_until(deadline):
                await self._event.wait()
        return self._event.is_set()


def timer_until(deadline: float, limit: float | None = None) -> Timer:
    """Make a timer for a block of the current task."""
    task = _asyncio_task()
    if task is None:
        return ScopeTimer(deadline)
    return AsyncioTimer(deadline, task, _shared.alarms(task.get_loop(), limit))


def _takes_work(post: Callable[..., object]) -> bool:
    """Whether a trio run still takes work. Asking is the only way to know; asked twice it is asked once."""
    try:
        post(_nothing, idempotent=True)
    except RuntimeError:
        return False
    return True


def _nothing() -> None:
    return


@final
class TaskRuntime(Runtime):
    """The world of tasks."""

    @override
    async def sleep(self, seconds: float, ctx: Context) -> None:
        await anyio.sleep(seconds)

    @override
    def timer(self, owner: TimerOwner, deadline: float, limit: float | None) -> Timer:
        return timer_until(deadline, limit)

    @override
    def waiter(self) -> TaskWaiter:
        return TaskWaiter()

    @override
    async def run(self, function: Callable[..., Any], ctx: Context, /, *args: object) -> Any:
        token = set_ambient(ctx)
        try:
            result = function(*args)
            return await result if is_awaitable(result) else result
        finally:
            restore_ambient(token)
            del args  # they hold the failure: no cycle where the handler raises it again

    @override
    async def close(self, resource: object) -> None:
        try:
            close = getattr(resource, "aclose", None) or getattr(resource, "close", None)
            result = close() if callable(close) else None
            if is_awaitable(result):
                await result
        except Exception:
            logger.exception("closing a discarded %s raised", type(resource).__name__)


TASKS: TaskRuntime = TaskRuntime()


async def enter(ctx: Context) -> Any:
    """Make the call: the innermost stage, which finds it in the context."""
    function: Any = ctx._function
    record = ctx._facts.record
    if record is not None:
        record.attempts += 1
        record.begin_attempt()
    token = set_ambient(ctx)
    try:
        awaitable = function(ctx) if ctx._arguments is None else function(*ctx._arguments, **(ctx._keywords or {}))
        if type(awaitable) is not CoroutineType and not is_awaitable(awaitable):
            raise refuse_plain(function, awaitable)
        return await awaitable
    except Exception as error:
        ctx._note(Failure(error))
        raise
    finally:
        restore_ambient(token)


def stage(policy: Policy[Any], inner: Stage) -> Stage:
    """Return the coroutine function that runs `policy` around `inner`."""
    return partial(policy.around, inner)
