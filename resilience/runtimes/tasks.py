"""The runtime of tasks, in asyncio and trio; through anyio where that costs nothing.

The two differ only in how they cancel, and each library's clients expect its own way. Under trio a timer is a cancel
scope. Under asyncio it does what `asyncio.timeout` does: it cancels its task *once*, and treats the `CancelledError` as
its own only if no other code has requested a cancellation (`Task.uncancel` counts the requests). anyio's scopes cancel
again and again there, which breaks clients that clean up with an `await`.
"""

from __future__ import annotations

import contextvars
import functools
import sys
import types
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

from typing_extensions import override

from resilience.callables import maybe_await
from resilience.clock import clock
from resilience.errors import SuspensionMisuse
from resilience.log import logger
from resilience.notes import is_handled_outside
from resilience.runtimes.alarms import OTHER_LIMITS, AsyncioTimer, find_alarm
from resilience.runtimes.base import Expired, Plan, Runtime, Timer, Waiter, refuse_undeclared_race
from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.current import asyncio_task, trio_task

if TYPE_CHECKING:
    import asyncio

    from resilience.runtimes.races.asyncio_race import AsyncioRace
    from resilience.runtimes.races.trio_race import TrioRace

T = TypeVar("T")


def replaces_cancellation(error: BaseException) -> bool:
    """Whether an error was raised in place of the cancellation of the current task, as by a clean-up that failed."""
    if error.__context__ is None and not issubclass(type(error), BaseExceptionGroup):
        return False
    if trio_task() is None:
        return ends_cancellation(error)
    trio = sys.modules["trio"]
    return trio.current_effective_deadline() == -inf and _comes_from(trio.Cancelled, error)


def ends_cancellation(error: BaseException) -> bool:
    """Whether an error was raised in place of a cancellation that no later `await` would raise again.

    That is so in asyncio, which cancels a task once; trio raises it again. A timeout has ended its own cancellation.
    """
    if error.__context__ is None and not issubclass(type(error), BaseExceptionGroup):
        return False
    if (task := asyncio_task()) is None or not task.cancelling():
        return False
    return _comes_from(sys.modules["asyncio"].CancelledError, error)


def _comes_from(cancelled: type[BaseException], error: BaseException, seen: frozenset[int] = frozenset()) -> bool:
    """Whether an error has a cancellation in its contexts; a group, whether all of its errors have.

    If a child of a task group fails by itself, the group cancels its body and the other children, so the group, and the
    errors of their clean-ups, have a cancellation in their contexts, too.
    """
    each: BaseException | None = error
    while each is not None and id(each) not in seen and not isinstance(each, TimeoutError):
        if isinstance(each, cancelled):
            return not is_handled_outside(each)  # otherwise, the call was made in an `except` block
        seen |= {id(each)}
        if isinstance(each, BaseExceptionGroup):
            return all(_comes_from(cancelled, it, seen) for it in each.exceptions)
        each = each.__context__
    return False


def _library() -> Any:
    """Return trio if it runs this code, otherwise anyio, which has the same names, but takes twice as long in trio."""
    if trio_task() is not None:
        return sys.modules["trio"]
    if asyncio_task() is None:
        raise SuspensionMisuse(
            "this call is awaited outside of a task of asyncio or trio, perhaps by another event loop: await it in a "
            "task, or make a blocking call"
        )
    import anyio  # here, because it may take as long as importing all that `Retry` needs

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
        # The event loop has its own clock, so only the remaining seconds can be passed to it.
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
    """The waiter of an asyncio task. Its future belongs to one event loop; other threads set it through that loop."""

    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[bool] = loop.create_future()

    @override
    def wake(self) -> bool:
        # A task of the same loop may set the future: the loop checks what is ready before it waits again. In a signal
        # handler or a finalizer outside a task, it may wait already: only the socket of `call_soon_threadsafe` (5 us)
        # wakes it then.
        task, loop = asyncio_task(), self._future.get_loop()
        if task is None or task.get_loop() is not loop:
            try:
                loop.call_soon_threadsafe(self._end, True)
            except RuntimeError:
                if loop.is_closed():
                    return False
                raise  # a `RecursionError` of the caller, which has to try again
        elif not self._future.done():
            self._future.set_result(True)
        return True

    @override
    def is_alive(self) -> bool:
        return not self._future.get_loop().is_closed()

    @override
    def wait(self, deadline: float, timer: Timer | None) -> Awaitable[bool]:
        return self._future if deadline == inf else self._wait_until(deadline)

    async def _wait_until(self, deadline: float) -> bool:
        seconds = max(0.0, deadline - clock.now())
        # The context is empty, because a loop keeps a cancelled handle until its time has come.
        handle = self._future.get_loop().call_later(seconds, self._end, False, context=contextvars.Context())
        try:
            return await self._future
        finally:
            handle.cancel()

    def _end(self, woken: bool) -> None:
        if not self._future.done():  # done: its task was cancelled, or woken when the time was over
            self._future.set_result(woken)


@final
class TrioWaiter(Waiter):
    """The waiter of a trio task. Its event belongs to one trio run."""

    __slots__ = ("_event", "_token")

    def __init__(self) -> None:
        trio = _library()
        self._event = trio.Event()
        self._token = trio.lowlevel.current_trio_token()

    @override
    def wake(self) -> bool:
        if trio_task() is not None and sys.modules["trio"].lowlevel.current_trio_token() is self._token:
            self._event.set()
            return True
        return self._post(self._event.set)

    @override
    def is_alive(self) -> bool:
        return self._post(_nothing, idempotent=True)  # only a post can tell; an idempotent one is queued at most once

    def _post(self, function: Callable[[], object], *, idempotent: bool = False) -> bool:
        """Call a function in the trio run; false if that has ended."""
        try:
            self._token.run_sync_soon(function, idempotent=idempotent)
        except sys.modules["trio"].RunFinishedError:  # not any `RuntimeError`, such as a `RecursionError` of the caller
            return False
        return True

    @override
    async def wait(self, deadline: float, timer: Timer | None) -> bool:
        if deadline == inf:
            await self._event.wait()
        else:
            with ScopeTimer(deadline):
                await self._event.wait()
        # As in asyncio, a task that is cancelled between `wake` and this line must not go on.
        await sys.modules["trio"].lowlevel.checkpoint_if_cancelled()
        return bool(self._event.is_set())


def _nothing() -> None:
    return


@final
class TaskRuntime(Runtime):
    """The runtime of tasks in an event loop."""

    @override
    async def sleep(self, seconds: float, timer: Timer | None) -> None:
        # The code that runs an asyncio task has imported asyncio. anyio would take 700 ns to detect that asyncio runs.
        library = _library() if asyncio_task() is None else sys.modules["asyncio"]
        await library.sleep(clock.shorten(seconds))

    @override
    def timer(self, deadline: float, limit: float | None = None, policy: str = "") -> Timer:
        task = asyncio_task()
        if task is None:
            return ScopeTimer(deadline)
        timer = AsyncioTimer()
        timer.deadline = deadline
        timer.fired = False
        timer.task = task
        timer.alarm = find_alarm(task.get_loop(), limit, deadline)
        return timer

    @override
    def waiter(self) -> Waiter:
        task = asyncio_task()
        return TrioWaiter() if task is None else AsyncioWaiter(task.get_loop())

    @override
    async def race(self, call: Callable[[Any], Awaitable[Any]], ctx: Any, plan: Plan[Any]) -> None:
        refuse_undeclared_race(ctx)
        task = asyncio_task()
        if task is None:
            await _trio_race()(self, call, plan, _library()).run()
        else:
            await _asyncio_race()(self, call, plan, task).run()

    @override
    async def run(self, function: Callable[..., Any], /, *args: object) -> Any:
        try:
            return await maybe_await(function(*args))
        finally:
            del args  # no cycle if the handler raises the failure that is among them

    @override
    async def close(self, resource: object) -> None:
        try:
            close = getattr(resource, "aclose", None) or getattr(resource, "close", None)
            await maybe_await(close() if callable(close) else None)
        except Exception:
            logger.exception("closing a discarded %s raised", type(resource).__name__)

    @override
    def _shield(self) -> AbstractContextManager[object]:
        return shielded_timer(inf) or nullcontext()


@functools.cache  # imported on first use, as most programs do not race; another import would cost 400 ns
def _asyncio_race() -> type[AsyncioRace]:
    from resilience.runtimes.races.asyncio_race import AsyncioRace

    return AsyncioRace


@functools.cache
def _trio_race() -> type[TrioRace]:
    from resilience.runtimes.races.trio_race import TrioRace

    return TrioRace


TASKS: TaskRuntime = TaskRuntime()


_NOT_BEGUN: Final = object()


def split_cancellation(group: BaseExceptionGroup) -> tuple[BaseException, ExceptionGroup] | None:
    """Return the cancellation in a group of exceptions, and the failures beside it; None if it has not both.

    A nursery of trio, and a task group of anyio in it, adds to a cancellation what children raise on the way out. A
    scope that has cancelled them would take only the cancellation out of the group, and let the failures out.
    """
    import anyio  # here, as in `_library`

    cancelled, failed = group.split(anyio.get_cancelled_exc_class())
    return (cancelled, failed) if cancelled is not None and isinstance(failed, ExceptionGroup) else None


@types.coroutine
def cut_off_at(deadline: float, awaitable: Awaitable[T], late: Callable[[], Exception]) -> Generator[Any, Any, T]:
    """Await an awaitable; cut it off at `deadline`, an instant on the process clock, and raise `late()` then.

    asyncio cancels a task only where it waits. So the timer starts with the first wait, and an awaitable that does not
    wait costs none. A scope of trio has to be entered before all scopes inside it.
    """
    steps: Generator[Any, Any, T] = awaitable.__await__()
    awaited: object = _NOT_BEGUN
    try:
        if asyncio_task() is not None:
            awaited = next(steps)
        # After the deadline it gives way to no other timer: a result that has arrived meanwhile would be faster.
        with TASKS.timer(deadline, OTHER_LIMITS if clock.now() >= deadline else None):
            while awaited is not _NOT_BEGUN:
                try:
                    yield awaited
                    awaited = _NOT_BEGUN
                except BaseException as error:
                    awaited = steps.throw(error)
            return (yield from steps)
    except StopIteration as done:  # of `next` or `throw`
        return done.value  # type: ignore[no-any-return]
    raise late()


def shielded_timer(deadline: float) -> Timer | None:
    """Make a timer for a block that is shielded from cancellation from outside; None if that is not needed.

    An asyncio task is cancelled once, except by a cancel scope of anyio, which cancels every wait, as trio does.
    """
    effective = getattr(sys.modules.get("anyio"), "current_effective_deadline", None)  # None also during its import
    is_needed = trio_task() is not None or (effective is not None and effective() == -inf)
    return ScopeTimer(deadline, shield=True) if is_needed else None


def find_runtime() -> Runtime:
    """Return the runtime of the calling code."""
    return BLOCKING if asyncio_task() is None and trio_task() is None else TASKS


def _detected(method: str) -> Any:
    """Return an attribute whose value is this method of the runtime of the calling code."""
    return property(lambda self: getattr(find_runtime(), method))


@final
class DetectedRuntime(Runtime):
    """The runtime of a context outside an execution. Each use of a method detects the runtime of the calling code."""

    sleep: Any = _detected("sleep")
    timer: Any = _detected("timer")
    waiter: Any = _detected("waiter")
    race: Any = _detected("race")
    run: Any = _detected("run")
    run_within: Any = _detected("run_within")
    close: Any = _detected("close")


DETECTED: DetectedRuntime = DetectedRuntime()
