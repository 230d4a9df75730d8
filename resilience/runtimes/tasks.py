"""Tasks: asyncio and trio, by way of anyio where that costs nothing. A coroutine here is what it looks like.

Cancelling is the one thing that the two do differently, and each library's clients are written for
its own way. Under trio a timer is a cancel scope. Under asyncio it does what `asyncio.timeout` does:
it cancels its task *once*, and takes the `CancelledError` for its own only if no other code has asked
for a cancellation (`Task.uncancel` counts them). anyio's scopes deliver again and again there, which
breaks clients that clean up with an `await`.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import sys
from collections.abc import Awaitable, Callable
from math import inf
from typing import TYPE_CHECKING, Any, final

from typing_extensions import override

from resilience.callables import maybe_await
from resilience.clock import clock
from resilience.runtimes.alarms import AsyncioTimer, find_alarm
from resilience.runtimes.base import (
    DEFAULT_MAX_ABANDONED,
    Expired,
    Plan,
    Runtime,
    Timer,
    Waiter,
    refuse_undeclared_race,
)
from resilience.runtimes.blocking import BLOCKING

if TYPE_CHECKING:
    import asyncio

    from resilience.runtimes.races.asyncio_race import AsyncioRace
    from resilience.runtimes.races.trio_race import TrioRace

logger: logging.Logger = logging.getLogger("resilience")


def _first_task() -> asyncio.Task[Any] | None:
    """Return what `current_task` returns, which from then on stands in the place of this.

    Code that runs a task has imported asyncio. To import it here, where there may be none, takes as long as all else.
    """
    global current_task
    if sys.modules.get("asyncio") is None:  # None also where its import is forbidden
        return None
    from resilience.runtimes import current

    current_task = current.current_task
    return current_task()


#: Returns the current asyncio task; None, or a `RuntimeError`, where there is no loop.
current_task: Callable[[], asyncio.Task[Any] | None] = _first_task


def asyncio_task() -> asyncio.Task[Any] | None:
    """Return the current asyncio task; None under trio, also where trio is a guest in an asyncio loop."""
    try:
        return current_task()
    except RuntimeError:  # pragma: no cover (as Python 3.12 has it; measured on 3.11)
        return None


def _in_trio() -> bool:
    asked = getattr(sys.modules.get("trio.lowlevel"), "in_trio_task", None)  # None also amid its import elsewhere
    return asked is not None and bool(asked())


def _library() -> Any:
    """Return trio, where it runs this code, and else anyio, which has the same names: here it takes twice as long."""
    if _in_trio():
        return sys.modules["trio"]
    import anyio  # which may take as long as all that `Retry` needs

    return anyio


@final
class ScopeTimer(Timer):
    """A cancel scope."""

    __slots__ = ("_scope", "_shield", "deadline", "fired")

    def __init__(self, deadline: float, *, shield: bool = False) -> None:
        self.deadline: float = deadline
        self.fired: bool = False
        self._shield = shield
        self._scope: Any = None

    @override
    def start(self) -> None:
        # The loop has a clock of its own: only the seconds that remain can be handed over.
        library = _library()
        ends_at = library.current_time() + max(0.0, self.deadline - clock.now())
        scope = library.CancelScope(deadline=ends_at, shield=self._shield)
        scope.__enter__()
        self._scope = scope

    @override
    def stop(self, error: BaseException | None) -> bool:
        if self._scope is None:
            return False
        mine = isinstance(error, Expired) and error.timer is self
        ending = (None, None, None) if error is None or mine else (type(error), error, error.__traceback__)
        swallowed = bool(self._scope.__exit__(*ending)) or mine
        self.fired = mine or (swallowed and bool(self._scope.cancelled_caught))
        return swallowed


@final
class AsyncioWaiter(Waiter):
    """A task in a queue. Its future lives in its own loop; to set it from elsewhere is to ask that loop."""

    __slots__ = ("_future", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._future: asyncio.Future[bool] = loop.create_future()

    @override
    def wake(self) -> None:
        # From a task of the same loop, which will look at what is ready before it waits again. From a signal handler
        # or a finalizer it may have looked already, and only the socket of `call_soon_threadsafe` (5 us) ends its wait.
        try:
            task = current_task()  # `asyncio_task`, without its frame
        except RuntimeError:  # pragma: no cover (as Python 3.12 has it; measured on 3.11)
            task = None
        if task is None or task.get_loop() is not self._loop:
            self._loop.call_soon_threadsafe(self._end, True)
        elif not self._future.done():
            self._future.set_result(True)

    @override
    def is_alive(self) -> bool:
        return not self._loop.is_closed()

    @override
    def wait(self, deadline: float, timer: Timer | None) -> Awaitable[bool]:
        return self._future if deadline == inf else self._wait_until(deadline)

    async def _wait_until(self, deadline: float) -> bool:
        seconds = max(0.0, deadline - clock.now())
        # In an empty context: a loop keeps what was cancelled until its time has come.
        handle = self._loop.call_later(seconds, self._end, False, context=contextvars.Context())
        try:
            return await self._future
        finally:
            handle.cancel()

    def _end(self, woken: bool) -> None:
        if not self._future.done():  # its task has been cancelled, or woken as the time was over
            self._future.set_result(woken)


@final
class TrioWaiter(Waiter):
    """A task in a queue. Its event lives in its own run."""

    __slots__ = ("_event", "_token")

    def __init__(self) -> None:
        trio = sys.modules["trio"]
        self._event = trio.Event()
        self._token = trio.lowlevel.current_trio_token()

    @override
    def wake(self) -> None:
        if _in_trio() and sys.modules["trio"].lowlevel.current_trio_token() is self._token:
            self._event.set()
        else:
            self._token.run_sync_soon(self._event.set)

    @override
    def is_alive(self) -> bool:
        return _takes_work(self._token.run_sync_soon)

    @override
    async def wait(self, deadline: float, timer: Timer | None) -> bool:
        if deadline == inf:
            await self._event.wait()
        else:
            with ScopeTimer(deadline):
                await self._event.wait()
        return bool(self._event.is_set())


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
    """Tasks of an event loop."""

    @override
    async def sleep(self, seconds: float, timer: Timer | None) -> None:
        if asyncio_task() is None:
            await _library().sleep(clock.shorten(seconds))
            return
        # The code that runs this loop has imported it. anyio would take 700 ns to find out that it is this one.
        await sys.modules["asyncio"].sleep(clock.shorten(seconds))

    @override
    def timer(
        self,
        deadline: float,
        limit: float | None = None,
        policy: str = "",
        max_abandoned: int = DEFAULT_MAX_ABANDONED,
    ) -> Timer:
        try:
            task = current_task()  # `asyncio_task`, without its frame
        except RuntimeError:  # pragma: no cover (as Python 3.12 has it; measured on 3.11)
            task = None
        if task is None:
            return ScopeTimer(deadline)
        return AsyncioTimer(deadline, task, find_alarm(task.get_loop(), limit, deadline))

    @override
    def waiter(self) -> Waiter:
        try:
            task = current_task()  # `asyncio_task`, without its frame
        except RuntimeError:  # pragma: no cover (as Python 3.12 has it; measured on 3.11)
            task = None
        return TrioWaiter() if task is None else AsyncioWaiter(task.get_loop())

    @override
    async def race(self, call: Callable[[Any], Awaitable[Any]], ctx: Any, plan: Plan[Any]) -> None:
        refuse_undeclared_race(ctx)
        task = asyncio_task()
        if task is None:
            await _trio_race()(self, call, plan).run()
        else:
            await _asyncio_race()(self, call, plan, task).run()

    @override
    async def run(self, function: Callable[..., Any], /, *args: object) -> Any:
        try:
            return await maybe_await(function(*args))
        finally:
            del args  # they hold the failure: no cycle where the handler raises it again

    @override
    async def close(self, resource: object) -> None:
        try:
            close = getattr(resource, "aclose", None) or getattr(resource, "close", None)
            await maybe_await(close() if callable(close) else None)
        except Exception:
            logger.exception("closing a discarded %s raised", type(resource).__name__)


@functools.cache  # where none races, they are not needed; and to import one again would take 400 ns
def _asyncio_race() -> type[AsyncioRace]:
    from resilience.runtimes.races.asyncio_race import AsyncioRace

    return AsyncioRace


@functools.cache
def _trio_race() -> type[TrioRace]:
    from resilience.runtimes.races.trio_race import TrioRace

    return TrioRace


TASKS: TaskRuntime = TaskRuntime()


def timer_until(deadline: float, limit: float | None = None) -> Timer:
    """Make a timer for a block of the current task. For `limit`, see `Runtime.timer`."""
    return TASKS.timer(deadline, limit)


def shielded_timer(deadline: float) -> Timer | None:
    """Make a timer for a block of the current task that nothing outside cancels; None but under trio."""
    return ScopeTimer(deadline, shield=True) if _in_trio() else None


def find_runtime() -> Runtime:
    """Return the runtime of the code that asks."""
    return TASKS if asyncio_task() is not None or _in_trio() else BLOCKING


@final
class DetectedRuntime(Runtime):
    """The runtime of a context outside an execution: that of whatever code asks it for something."""

    @override
    async def sleep(self, seconds: float, timer: Timer | None) -> None:
        await find_runtime().sleep(seconds, timer)

    @override
    def timer(
        self,
        deadline: float,
        limit: float | None = None,
        policy: str = "",
        max_abandoned: int = DEFAULT_MAX_ABANDONED,
    ) -> Timer:
        return find_runtime().timer(deadline, limit, policy, max_abandoned)

    @override
    def waiter(self) -> Waiter:
        return find_runtime().waiter()

    @override
    async def race(self, call: Callable[[Any], Awaitable[Any]], ctx: Any, plan: Plan[Any]) -> None:
        await find_runtime().race(call, ctx, plan)

    @override
    async def run(self, function: Callable[..., Any], /, *args: object) -> Any:
        try:
            return await find_runtime().run(function, *args)
        finally:
            del args  # they hold the failure: no cycle where the handler raises it again

    @override
    async def run_within(
        self, seconds: float, function: Callable[[], Any], policy: str, outer: Timer | None = None
    ) -> Any:
        return await find_runtime().run_within(seconds, function, policy, outer)

    @override
    async def close(self, resource: object) -> None:
        await find_runtime().close(resource)


DETECTED: DetectedRuntime = DetectedRuntime()
