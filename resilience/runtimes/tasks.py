"""Tasks: asyncio and trio, by way of anyio. A coroutine here is what it looks like.

Cancelling is the one thing that the two do differently, and each library's clients are written for
its own way. Under trio a timer is a cancel scope. Under asyncio it does what `asyncio.timeout` does:
it cancels its task *once*, and takes the `CancelledError` for its own only if nobody else has asked
for a cancellation (`Task.uncancel` counts them). anyio's scopes deliver again and again there, which
breaks clients that clean up with an `await`.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from math import inf
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, final

import anyio
from typing_extensions import override

from resilience import context
from resilience.callables import is_awaitable, refuse_plain
from resilience.clock import clock
from resilience.context import NO_FACTS, Context, get_ambient, restore_ambient, set_ambient
from resilience.events import logger
from resilience.outcome import Failure
from resilience.runtimes import lowering
from resilience.runtimes.base import Runtime, Timer, TimerOwner, Waiter
from resilience.runtimes.blocking import BLOCKING

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from types import TracebackType

    from resilience.policy import Policy

#: A coroutine function that runs the rest of a chain.
Stage: TypeAlias = "Callable[[Context], Awaitable[Any]]"


if sys.version_info >= (3, 12):

    def _asyncio_task() -> asyncio.Task[Any] | None:
        """Return the current asyncio task; None under trio, also where trio is a guest in an asyncio loop."""
        try:
            return asyncio.current_task()
        except RuntimeError:
            return None

else:
    # `asyncio.current_task` is written in Python there, and takes 250 ns.
    from asyncio.events import _get_running_loop
    from asyncio.tasks import _current_tasks  # type: ignore[attr-defined]

    def _asyncio_task() -> asyncio.Task[Any] | None:
        """Return the current asyncio task; None under trio, also where trio is a guest in an asyncio loop."""
        return _current_tasks.get(_get_running_loop())  # type: ignore[no-any-return]


def _in_trio() -> bool:
    trio = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_task())


@final
class AsyncioTimer:
    """`asyncio.timeout`, with an instant on the process clock, and without an exception of its own."""

    __slots__ = ("_alarm", "_cancelling", "_expiring", "_task", "deadline", "fired")

    def __init__(self, deadline: float, task: asyncio.Task[Any], alarm: Alarm) -> None:
        self.deadline: float = deadline
        self.fired: bool = False
        self._expiring = False
        self._task = task
        self._alarm = alarm

    def __enter__(self) -> Self:
        self._cancelling = self._task.cancelling()
        alarm = self._alarm
        alarm.pending[self] = None
        if alarm.handle is None:
            alarm.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> bool:
        task = self._task
        del self._task  # no cycle: task -> its exception -> traceback -> frame -> this timer -> task
        if not self._expiring:
            del self._alarm.pending[self]
            if self._alarm.limit is None:
                self._alarm.cancel()
            return False
        # `<=`: whoever else has cancelled this task meanwhile is still to be served.
        mine = task.uncancel() <= self._cancelling
        self.fired = mine and kind is not None and issubclass(kind, asyncio.CancelledError)
        return self.fired

    def expire(self) -> None:
        """Cancel the task, once."""
        self._expiring = True
        self._task.cancel()


@final
class Alarm:
    """Serves the timers of one limit in one loop. They end in the order in which they began, so one handle will do.

    It stays set when the timer that it was set for is done: it rings once per limit at the most, and is then set
    for the first timer that is left. So a call that ends in time costs two writes to a dictionary, where
    `asyncio.timeout` makes, queues and cancels a handle (2 to 3 us).

    What keeps it alive is its handle, which the loop drops when it is closed, and the timers that it serves.

    :param limit: the limit that all of its timers have; None for the alarm of a single timer.
    """

    __slots__ = ("__weakref__", "handle", "latest", "limit", "loop", "pending")

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: float | None) -> None:
        self.loop: asyncio.AbstractEventLoop = loop
        self.limit: float | None = limit
        self.latest: float = -inf  # the deadline of the last timer
        self.pending: dict[AsyncioTimer, None] = {}  # in order
        self.handle: asyncio.TimerHandle | None = None

    def set(self, timer: AsyncioTimer) -> None:
        """Ring when this timer is due. In no context: an alarm outlives the call that happened to set it."""
        seconds = max(0.0, timer.deadline - clock.now())
        self.handle = self.loop.call_later(seconds, self._ring, timer, context=_NO_CONTEXT)

    def cancel(self) -> None:
        """Do not ring."""
        if self.handle is not None:
            self.handle.cancel()

    def _ring(self, due: AsyncioTimer) -> None:
        self.handle = None
        now = clock.now()
        while self.pending:
            timer = next(iter(self.pending))
            if timer is not due and timer.deadline > now:
                self.set(timer)
                return
            del self.pending[timer]
            timer.expire()


class _Shared(threading.local):
    """The alarms of the loop that runs in this thread, by limit."""

    MOST = 64  # a limit that is computed anew for each call gets an alarm of its own

    def __init__(self) -> None:
        self.by_limit: dict[float, weakref.ref[Alarm]] = {}

    def alarm(self, loop: asyncio.AbstractEventLoop, limit: float, deadline: float) -> Alarm:
        """Return the alarm for a limit. Where a clock was put back, it is one that serves nobody else."""
        known = self.by_limit.get(limit)
        alarm = None if known is None else known()
        if alarm is None or alarm.loop is not loop:
            if len(self.by_limit) >= self.MOST:
                self.by_limit = {key: ref for key, ref in self.by_limit.items() if ref() is not None}
            if len(self.by_limit) >= self.MOST:
                return Alarm(loop, None)
            alarm = Alarm(loop, limit)
            self.by_limit[limit] = weakref.ref(alarm)
        elif deadline < alarm.latest:
            return Alarm(loop, None)
        alarm.latest = deadline
        return alarm


_shared = _Shared()
_NO_CONTEXT = contextvars.Context()


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
    loop = task.get_loop()
    if limit is None:
        return AsyncioTimer(deadline, task, Alarm(loop, None))
    return AsyncioTimer(deadline, task, _shared.alarm(loop, limit, deadline))


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
        await anyio.sleep(clock.shorten(seconds))

    @override
    def timer(self, owner: TimerOwner, deadline: float, limit: float | None = None) -> Timer:
        return timer_until(deadline, limit)

    @override
    def waiter(self) -> TaskWaiter:
        return TaskWaiter()

    @override
    async def run(self, function: Callable[..., Any], ctx: Context, /, *args: object) -> Any:
        outer = get_ambient()
        try:
            set_ambient(ctx)
            result = function(*args)
            return await result if is_awaitable(result) else result
        finally:
            restore_ambient(ctx, outer)
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


def find_runtime() -> Runtime:
    """Return the runtime of the world that this code runs in."""
    return TASKS if _asyncio_task() is not None or _in_trio() else BLOCKING


context.find_runtime = find_runtime


async def enter(ctx: Context) -> Any:
    """Make the call: the innermost stage, which finds it in the context."""
    function: Any = ctx._function
    record = ctx._facts.record
    if record is not None:
        record.begin_attempt()
    # Where the ambient context is the one that `current_context` makes anyway, it is left alone: see blocking.py.
    plain = ctx._arguments is not None and ctx.attempt == 1 and ctx.deadline == inf and ctx._facts is NO_FACTS
    outer = None if plain else get_ambient()
    try:
        if not plain:
            set_ambient(ctx)
        awaitable = function(ctx) if ctx._arguments is None else function(*ctx._arguments, **(ctx._keywords or {}))
        if type(awaitable) is not CoroutineType and not is_awaitable(awaitable):
            raise refuse_plain(function, awaitable)
        return await awaitable
    except Exception as error:
        if record is not None:
            record.note(Failure(error))
        raise
    finally:
        if not plain:
            restore_ambient(ctx, outer)


def stage(policy: Policy[Any], inner: Stage) -> Stage:
    """Return the coroutine function that runs `policy` around `inner`."""
    closed = lowering.close(policy.around)
    return partial(policy.around, inner) if closed is None else closed(policy, inner)
