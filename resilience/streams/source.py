"""The innermost stage of a stream, which opens the source and suspends the chain; and the pulls of its items."""

from __future__ import annotations

import contextvars
import functools
import types
from collections.abc import Callable, Generator, Iterable
from math import inf
from typing import Any, Final, cast, final

from resilience.ambient import restore_ambient, set_ambient
from resilience.callables import close_coroutine, is_awaitable, name_of
from resilience.clock import clock
from resilience.context import Context
from resilience.endings import end_attempt
from resilience.errors import ArgumentMisuse, AwaitableMisuse, TimeoutExceeded
from resilience.events.dispatch import subscribers
from resilience.formats import format_number
from resilience.innermost import raise_if_expired, refuse_mismatch
from resilience.runtimes.base import DEFAULT_MAX_ABANDONED, Expired, PassiveTimer, Runtime
from resilience.runtimes.blocking import BLOCKING, BlockingTimer
from resilience.runtimes.driving import drive
from resilience.runtimes.tasks import TASKS
from resilience.streams.runtime import StreamRuntime

#: The result of a pull if there are no more items.
END: Final[Any] = object()

#: The name of a stream's own limits in errors.
_NAME: Final = "streaming"


class Closed(BaseException):
    """Thrown into a chain whose consumer has stopped. Only the innermost stage catches it, and raises it if called."""


@final
class Opened:
    """An open source. The chain yields it to the driver, and in tasks its `pulls` yield it with each item.

    :param items: the iterator of the items of `source`.
    :param first_until: the instant by which the first item must arrive.
    :param run: runs a function in the source's own variables; needed in blocking code, where the chain's are in use.
    """

    __slots__ = ("ctx", "first_until", "is_first", "item", "items", "run", "source")

    def __init__(self, source: Any, items: Any, ctx: Context, first_until: float, run: Callable[..., Any]) -> None:
        self.source: Any = source
        self.items: Any = items
        self.ctx: Context = ctx
        self.first_until: float = first_until
        self.run: Callable[..., Any] = run
        #: Whether the next pull is the first one.
        self.is_first: bool = True
        #: The result of the last pull.
        self.item: Any = None


@types.coroutine
def _suspend_with(opened: Opened) -> Generator[Opened, None, None]:
    yield opened


async def keep_open(first: float, ctx: Context) -> None:
    """Open the source, and keep it open until the driver resumes this, or throws in the error of a pull."""
    runtime = cast("StreamRuntime", ctx.runtime)
    if runtime.is_closed:
        raise Closed
    record, opened, now = ctx._info.record, None, clock.now()
    began = now if subscribers.calls else None
    if record is not None:
        record.begin_attempt()
    token = set_ambient(ctx)
    run = contextvars.copy_context().run  # for the source, on a worker: the chain's are in use
    try:
        opened = source, items = await within(ctx, now + first, first, functools.partial(_open, run), ctx)
        await _suspend_with(Opened(source, items, ctx, now + first, run))
    except Closed:
        pass
    except BaseException as error:
        if isinstance(error, GeneratorExit) and not (runtime.is_closed or runtime.host is BLOCKING):
            opened = None  # the collector closes this coroutine, which cannot await then: `Driver.close` does
        if record is not None:
            end_attempt(record, ctx, began, None, error)
        raise_if_expired(ctx._timer if isinstance(ctx._timer, PassiveTimer) else None, error)
        raise
    finally:
        restore_ambient(token)
        if opened is not None:  # pragma: no branch (out of `finally`)
            if runtime.host is BLOCKING:
                _close_in(run, runtime, *opened)
            else:
                await close_all(runtime, *opened)
    if record is not None:
        end_attempt(record, ctx, began, None, None)


def _close_in(run: Callable[..., Any], runtime: Runtime, source: Any, items: Any) -> None:
    def close() -> None:
        drive(close_all(runtime, source, items))

    try:
        run(close)
    except RuntimeError:  # a worker uses these variables, in an abandoned pull
        close()


async def close_all(runtime: Runtime, source: Any, items: Any) -> None:
    """Close the iterator, and the source, which in many clients holds the connection."""
    if getattr(items, "gi_running", False):  # a worker runs it, in an abandoned pull: it is closed when dropped
        return
    try:
        await runtime.close(items)
    finally:
        if source is not items:
            await runtime.close(source)
        if not hasattr(source, "close") and hasattr(source, "cancel"):  # a gRPC call
            source.cancel()


def _open(run: Callable[..., Any], ctx: Context) -> Any:
    """Call the function; return its result and the iterator of its items, in tasks an awaitable of both."""
    runtime: Any = ctx.runtime
    function, arguments = ctx._function, (ctx,) if ctx._arguments is None else ctx._arguments
    keywords = {**ctx._keywords, **runtime.keywords}  # the caller may have given the keyword of `resume`, to begin with
    is_blocking = runtime.host is BLOCKING
    try:
        source = run(function, *arguments, **keywords) if is_blocking else function(*arguments, **keywords)
    except TypeError as error:
        refuse_mismatch(ctx, error)
        raise
    return _iterated(function, source) if is_blocking else _awaited(function, source)


def _iterated(function: object, source: Any) -> tuple[Any, Any]:
    if isinstance(source, Iterable):
        return source, iter(source)
    if is_awaitable(source) or hasattr(type(source), "__aiter__"):
        close_coroutine(source)
        raise AwaitableMisuse(
            f"{name_of(function)} returned {type(source).__name__}, which is asynchronous: use `.acall` or `.aexecute`"
        )
    raise ArgumentMisuse(f"{name_of(function)} returned {type(source).__name__}, which has no items")


async def _awaited(function: object, source: Any) -> tuple[Any, Any]:
    if is_awaitable(source):
        source = await source
    if not hasattr(type(source), "__aiter__"):
        raise AwaitableMisuse(
            f"{name_of(function)} returned {type(source).__name__}, which is no asynchronous iterator: "
            "use `.call` or `.execute`"
        )
    return source, source.__aiter__()


async def within(ctx: Context, until: float, limit: float, step: Callable[[Any], Any], argument: Any) -> Any:
    """Return `step(argument)`, awaited in tasks, or cut it off.

    :param until: the instant at which the stream's own limit ends, which is `limit` in seconds.
    """
    timer = ctx._timer if isinstance(ctx._timer, PassiveTimer) else None
    runtime: Any = ctx.runtime
    deadline = until if timer is None else min(until, timer.deadline)
    if deadline == inf:
        return step(argument) if runtime.host is BLOCKING else await step(argument)
    if runtime.host is BLOCKING:
        policy, most = (_NAME, DEFAULT_MAX_ABANDONED) if timer is None else (timer.policy, timer.max_abandoned)
        real = BlockingTimer(deadline, policy, most)
        try:
            real.check_before_start()
            job = real.begin(step, (argument,), {})
            return step(argument) if job is None else real.wait_for(job)
        except Expired:
            pass
    else:
        with TASKS.timer(deadline):
            if clock.now() < deadline:
                return await step(argument)
    raise _too_late(timer, until, limit)


@types.coroutine
def pulls(opened: Opened, runtime: StreamRuntime, first: float, idle: float) -> Generator[Any, Any, None]:
    """Pull the items in tasks: yield `opened` for each item, and whatever the source yields to the event loop.

    A pull is a `yield from` in one generator. With a generator for each pull, catching the `StopIteration` with
    which it ends would cost as much as all the rest.
    """
    begin, is_native = opened.items.__anext__, type(opened.items) is types.AsyncGeneratorType
    timer = opened.ctx._timer if isinstance(opened.ctx._timer, PassiveTimer) else None
    limit, until, has_delivered = first, opened.first_until, False
    while True:
        item = END
        try:
            if limit == inf and timer is None:
                item = yield from (begin() if is_native else begin().__await__())
            else:
                now = clock.now()
                if has_delivered:
                    until = now + idle
                deadline = until if timer is None else min(until, timer.deadline)
                with TASKS.timer(deadline, limit if timer is None else None):
                    if now < deadline:
                        item = yield from (begin() if is_native else begin().__await__())
        except StopAsyncIteration:
            return
        if item is END:
            raise _too_late(timer, until, limit)
        if has_delivered and not runtime.resume:
            runtime.items += 1
        else:
            runtime.hand_out(item)
            has_delivered = True
        opened.item = item
        yield opened
        limit = idle


def _too_late(timer: PassiveTimer | None, until: float, limit: float) -> BaseException:
    if timer is not None and timer.deadline <= until:
        return Expired(timer)
    return TimeoutExceeded(f"no item within {format_number(limit)} s", policy=_NAME, timeout=limit)
