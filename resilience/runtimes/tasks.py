"""Tasks: asyncio and trio, by way of anyio where that costs nothing. A coroutine here is what it looks like.

Cancelling is the one thing that the two do differently, and each library's clients are written for
its own way. Under trio a timer is a cancel scope. Under asyncio it does what `asyncio.timeout` does:
it cancels its task *once*, and takes the `CancelledError` for its own only if nobody else has asked
for a cancellation (`Task.uncancel` counts them). anyio's scopes deliver again and again there, which
breaks clients that clean up with an `await`.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeAlias, final

import anyio
from typing_extensions import override

from resilience import context
from resilience.callables import is_awaitable, refuse_plain
from resilience.clock import clock
from resilience.context import NO_FACTS, Context, get_ambient, leave_ambient, reset_ambient, set_ambient, unlimited
from resilience.events import logger, watched
from resilience.outcome import Failure
from resilience.runtimes import lowering
from resilience.runtimes.alarms import AsyncioTimer, find_alarm, latest
from resilience.runtimes.base import Runtime, Timer, TimerOwner, Waiter
from resilience.runtimes.blocking import BLOCKING

if TYPE_CHECKING:
    import asyncio

    from resilience.policy import Policy

#: A coroutine function that runs the rest of a chain around the call of a function. See blocking.py.
Stage: TypeAlias = Callable[
    [Context, Callable[..., Any], tuple[Any, ...] | None, dict[str, Any] | None], Awaitable[Any]
]


def _first_task() -> asyncio.Task[Any] | None:
    """Return what `current_task` returns, which from then on stands in the place of this.

    Whoever runs a task has imported asyncio. To import it here, where nobody may, takes as long as everything else.
    """
    global current_task
    if sys.modules.get("asyncio") is None:  # None also where somebody forbids its import
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
    return sys.modules["trio"] if _in_trio() else anyio


@final
class ScopeTimer(Timer):
    """A cancel scope."""

    __slots__ = ("_scope", "deadline", "fired")

    def __init__(self, deadline: float) -> None:
        self.deadline: float = deadline
        self.fired: bool = False
        self._scope: Any = None

    @override
    def start(self, ctx: Context | None = None) -> None:
        # The loop has a clock of its own: only the seconds that remain can be handed over.
        library = _library()
        scope = library.CancelScope(deadline=library.current_time() + max(0.0, self.deadline - clock.now()))
        scope.__enter__()
        self._scope = scope

    @override
    def stop(self, error: BaseException | None) -> bool:
        if self._scope is None:
            return False
        ending = (None, None, None) if error is None else (type(error), error, error.__traceback__)
        swallowed = bool(self._scope.__exit__(*ending))
        self.fired = swallowed and bool(self._scope.cancelled_caught)
        return swallowed


@final
class TaskWaiter(Waiter):
    """A task in a queue. Its event lives in its own loop; to set it from elsewhere is to ask that loop."""

    __slots__ = ("_event", "_is_alive", "_post")

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._post: Callable[[Callable[[], object]], object]
        self._is_alive: Callable[[], bool]
        task = asyncio_task()
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
        if asyncio_task() is None:
            await _library().sleep(clock.shorten(seconds))
            return
        import asyncio  # as whoever runs this loop has; anyio would take 700 ns to find out that it is this one

        await asyncio.sleep(clock.shorten(seconds))

    @override
    def timer(self, owner: TimerOwner | None, deadline: float, limit: float | None = None) -> Timer:
        try:
            task = current_task()
        except RuntimeError:  # pragma: no cover (as Python 3.12 has it; measured on 3.11)
            task = None
        if task is None:
            return ScopeTimer(deadline)
        # In one step, with all its slots set from here: each frame more would cost 50 of some 700 ns.
        loop = task.get_loop()
        known = latest.alarms
        alarm = known.by_limit.get(limit) if known.loop is loop else None
        if alarm is None or deadline < alarm.latest:
            alarm = find_alarm(loop, limit, deadline)
        alarm.latest = deadline
        timer = AsyncioTimer()
        timer.deadline = deadline
        timer.fired = False
        timer.task = task
        timer.alarm = alarm
        timer.token = None
        return timer

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
            leave_ambient(token)
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


def timer_until(deadline: float, limit: float | None = None) -> Timer:
    """Make a timer for a block of the current task. For `limit`, see `Runtime.timer`."""
    return TASKS.timer(None, deadline, limit)


def find_runtime() -> Runtime:
    """Return the runtime of the world that this code runs in."""
    return TASKS if asyncio_task() is not None or _in_trio() else BLOCKING


@final
class WorldOfCaller(Runtime):
    """The runtime of a context outside an execution: whatever world the code runs in that asks."""

    @override
    async def sleep(self, seconds: float, ctx: Context) -> None:
        await find_runtime().sleep(seconds, ctx)

    @override
    def timer(self, owner: TimerOwner, deadline: float, limit: float | None = None) -> Timer:
        return find_runtime().timer(owner, deadline, limit)

    @override
    def waiter(self) -> Waiter:
        return find_runtime().waiter()

    @override
    async def run(self, function: Callable[..., Any], ctx: Context, /, *args: object) -> Any:
        try:
            return await find_runtime().run(function, ctx, *args)
        finally:
            del args  # they hold the failure: no cycle where the handler raises it again

    @override
    async def close(self, resource: object) -> None:
        await find_runtime().close(resource)


context.world_of_caller = WorldOfCaller()


#: As in blocking.py.
UNLIMITED: Context = unlimited(TASKS)
_GATE = lowering.Gate(get_ambient, watched, UNLIMITED)


def enter(
    ctx: Context, function: Callable[..., Any], arguments: Any, keywords: dict[str, Any] | None
) -> Awaitable[Any]:
    """Make the call: the innermost stage. Which context the function finds, see blocking.py.

    What the function returns is awaited by whoever awaits this: a coroutine of ours around it would cost 100 ns. It
    can also do without where `ctx` is ambient already (a timer has seen to that) and is not wanted for anything else.
    """
    if ctx is not UNLIMITED and (ctx is not get_ambient() or ctx._facts is not NO_FACTS):
        return _enter_with(ctx, function, arguments, keywords)
    if arguments is None:
        arguments = (ctx,)
    awaitable = function(*arguments, **keywords) if keywords else function(*arguments)
    return awaitable if type(awaitable) is CoroutineType else _awaited(function, awaitable)


async def _awaited(function: Callable[..., Any], awaitable: Any) -> Any:
    if not is_awaitable(awaitable):
        raise refuse_plain(function, awaitable)
    return await awaitable


async def _enter_with(
    ctx: Context, function: Callable[..., Any], arguments: tuple[Any, ...] | None, keywords: dict[str, Any] | None
) -> Any:
    """Do the same with `ctx` as the ambient context."""
    if arguments is None:
        arguments = (ctx,)
    record = ctx._facts.record
    if record is not None:
        record.begin_attempt()
    token = set_ambient(ctx)
    try:
        awaitable = function(*arguments, **keywords) if keywords else function(*arguments)
        return await (awaitable if type(awaitable) is CoroutineType else _awaited(function, awaitable))
    except Exception as error:
        if record is not None:
            record.note(Failure(error))
        raise
    finally:
        try:
            reset_ambient(token)  # `leave_ambient`, without its frame
        except ValueError:
            pass


#: As in blocking.py.
_SHORTCUT = lowering.Shortcut(
    """(
        enter_with(ctx, function, arguments, keywords) if (ctx := ...) is not unlimited
            and (ctx is not ambient() or ctx._facts is not no_facts)
        else call(ctx, function, arguments, keywords) if keywords or arguments is None
        else result if type(result := function(*arguments)) is coroutine else awaited(function, result)
    )""",
    {"enter_with": _enter_with, "unlimited": UNLIMITED, "ambient": get_ambient, "no_facts": NO_FACTS}
    | {"type": type, "coroutine": CoroutineType, "awaited": _awaited},
)


def stage(policy: Policy[Any], inner: Stage) -> Stage:
    """Return the coroutine function that runs `policy` around `inner`."""
    if inner is not enter:
        policy._resilience_chain.is_last = False
    closed = lowering.close(policy.around, _SHORTCUT if inner is enter else None)
    return partial(_as_written, policy, inner) if closed is None else closed(policy, inner)


def entrance(
    policy: Policy[Any], inner: Stage, function: Callable[..., Any], run: Callable[..., Awaitable[Any]]
) -> Callable[..., Any] | None:
    """As in blocking.py: a coroutine function."""
    if inner is not enter:
        policy._resilience_chain.is_last = False
    factory = lowering.entrance(policy.around, None, _GATE, _SHORTCUT if inner is enter else None)
    return factory and factory(policy, inner, function, run)


def _as_written(policy: Policy[Any], inner: Stage, ctx: Context, *made: Any) -> Awaitable[Any]:
    async def call(ctx: Context) -> Any:
        return await inner(ctx, *made)

    return policy.around(call, ctx)
