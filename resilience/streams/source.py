"""The innermost stage of a stream, which opens the source, and suspends the chain while the driver pulls the items."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import nullcontext
from math import inf
from typing import Any, cast, final

from resilience.ambient import reset_ambient, set_ambient
from resilience.callables import close_coroutine, is_awaitable, name_of
from resilience.clock import clock
from resilience.context import Context
from resilience.endings import end_attempt
from resilience.errors import ArgumentMisuse, AwaitableMisuse, TimeoutExceeded
from resilience.events.dispatch import subscribers
from resilience.innermost import raise_if_cut_off, refuse_if_exhausted, refuse_mismatch
from resilience.runtimes.base import Expired, Runtime
from resilience.runtimes.blocking import BLOCKING, PassiveTimer
from resilience.runtimes.driving import drive
from resilience.runtimes.tasks import TASKS
from resilience.streams.pulls import END, Limits, answer_pulls, apulls, pulls
from resilience.streams.runtime import StreamClosed, StreamRuntime


@final
class Opened:
    """An open source: what the chain yields to the driver.

    :param pulls: yields the items; in tasks each as an `Item`, besides what is for the event loop.
    """

    __slots__ = ("pulls",)

    def __init__(self, pulls: Generator[Any, Any, None]) -> None:
        self.pulls: Generator[Any, Any, None] = pulls

    def __await__(self) -> Generator[Opened, None, None]:
        yield self


async def enter_stream(first: float, idle: float, ctx: Context) -> None:
    """Open the source, and keep it open while the driver pulls its items. The error of a pull is raised here."""
    runtime = cast("StreamRuntime", ctx.runtime)
    runtime.check_before_call()
    limits = Limits(ctx._timer if isinstance(ctx._timer, PassiveTimer) else None, first, idle)
    on_worker = runtime.host is BLOCKING and limits != (None, inf, inf)
    if on_worker:
        refuse_if_exhausted(limits.policy(), ctx)
    runtime.failure, runtime.is_exhausted = None, False
    record, now, run = ctx._info.record, clock.now(), None
    began = now if subscribers.calls else None
    if record is not None:
        record.begin_attempt()
    until, token = now + first, set_ambient(ctx)
    try:
        if runtime.host is not BLOCKING:
            opened = await _aopen(ctx, limits, until)
            pulled: Any = apulls(ctx, opened[1], limits, until)
        elif on_worker:  # in variables of the source's own, because the chain's are in use
            run = contextvars.copy_context().run
            opened = limits.run(functools.partial(run, _open, ctx), until, first)
            pulled = pulls(ctx, limits.items(functools.partial(run, next, opened[1], END), until))
        else:
            opened = _open(ctx)
            pulled = pulls(ctx, opened[1])
        await hold_open(runtime, opened, pulled, run)
        runtime.is_exhausted = True
    except StreamClosed:
        pass
    except BaseException as error:
        runtime.failure = _failure_in(error)
        if record is not None:
            end_attempt(record, ctx, began, None, error)
        raise_if_cut_off(limits.timer, None, error)
        raise
    finally:
        try:
            reset_ambient(token)
        except ValueError:  # as in `innermost`
            pass
    if record is not None:
        end_attempt(record, ctx, began, None, None)


def _failure_in(error: BaseException) -> Exception | None:
    """Return the failure with which a source has ended; None if it was cancelled."""
    if isinstance(error, Expired):
        return TimeoutExceeded("the stream was cut off", policy=cast("PassiveTimer", error.timer).policy)
    return error if isinstance(error, Exception) else None


async def hold_open(
    runtime: StreamRuntime,
    opened: tuple[Any, Any],
    pulls: Generator[Any, Any, None],
    run: Callable[..., Any] | None = None,
) -> None:
    """Suspend the chain until the driver resumes it, or throws in the error of a pull; then close the source.

    :param opened: the source, and the iterator of its items.
    :param run: runs a function in the variables of the source, if it has its own.
    """
    is_collected = False
    try:
        await Opened(pulls)
    except GeneratorExit:
        is_collected = not runtime.is_closed
        raise
    finally:
        if is_collected:  # the collector closes this coroutine, which cannot await then: `Driver.close` does
            runtime.left_open = opened
        elif run is None:
            await close_all(runtime, *opened)
        else:
            _close_in(run, runtime, *opened)


def _close_in(run: Callable[..., Any], runtime: Runtime, source: Any, items: Any) -> None:
    def close() -> None:
        drive(close_all(runtime, source, items))

    try:
        run(close)
    except RuntimeError:  # a worker uses these variables, in an abandoned pull
        close()


async def close_all(runtime: Runtime, source: Any, items: Any) -> None:
    """Close the iterator, and the source, which in many clients holds the connection."""
    try:
        if not getattr(items, "gi_running", False):  # otherwise a worker runs it, in an abandoned pull
            await runtime.close(items)
    finally:
        if source is not items:
            await runtime.close(source)
        if not hasattr(source, "close") and hasattr(source, "cancel"):  # a gRPC call
            source.cancel()


async def deliver_answer(answer: Any, runtime: StreamRuntime) -> None:
    """Deliver the items of a value that a policy returned in their place, and close it."""
    if runtime.host is not BLOCKING and hasattr(type(answer), "__aiter__"):
        items = answer.__aiter__()
    elif isinstance(answer, Iterable):
        items = iter(answer)
    else:
        raise ArgumentMisuse(f"what replaces a stream must have items, and {answer!r} has none")
    await hold_open(runtime, (answer, items), answer_pulls(items, runtime))


# --- opening ---


def _call(ctx: Context) -> Any:
    runtime: Any = ctx.runtime
    called: Any = ctx.called
    keywords = {**called.keywords, **runtime.keywords}  # the caller may give the keyword of `resume`, to begin with
    try:
        return called.function(*called.arguments, **keywords)
    except TypeError as error:
        refuse_mismatch(ctx, error)
        raise


def _open(ctx: Context) -> tuple[Any, Any]:
    """Call the function; return its result and the iterator of its items."""
    source = _call(ctx)
    if not isinstance(source, Iterable) and hasattr(type(source), "__enter__"):
        source = _entered(ctx, source)
    return source, iter(_with_items(ctx, source))


def _entered(ctx: Context, manager: Any) -> Iterator[Any]:
    """Yield the items of a stream that a client returns as a context manager."""
    with manager as source:
        yield from _with_items(ctx, source)


def _with_items(ctx: Context, source: Any) -> Iterable[Any]:
    if isinstance(source, Iterable):
        return source
    what = f"{name_of(ctx._function)} returned {type(source).__name__}"
    if is_awaitable(source) or any(hasattr(type(source), it) for it in ("__aiter__", "__aenter__")):
        close_coroutine(source)
        raise AwaitableMisuse(f"{what}, which is asynchronous: use `.acall` or `.aexecute`")
    raise ArgumentMisuse(f"{what}, which has no items")


async def _aopen(ctx: Context, limits: Limits, until: float) -> tuple[Any, Any]:
    """Call the function, and await its result if it can be awaited; return that and the iterator of its items."""
    deadline = limits.deadline(until)
    with nullcontext() if deadline == inf else TASKS.timer(deadline):
        if clock.now() < deadline:
            source = _call(ctx)
            if is_awaitable(source):
                source = await source
            if not hasattr(type(source), "__aiter__") and hasattr(type(source), "__aenter__"):
                source = _aentered(ctx, source)
            return source, _iterator_of(ctx, source)
    raise limits.exceeded(until, limits.first)


async def _aentered(ctx: Context, manager: Any) -> AsyncIterator[Any]:
    async with manager as source:
        items = _iterator_of(ctx, source)
        try:
            async for item in items:
                yield item
        finally:
            await ctx.runtime.close(items)


def _iterator_of(ctx: Context, source: Any) -> Any:
    if not hasattr(type(source), "__aiter__"):
        what = f"{name_of(ctx._function)} returned {type(source).__name__}, which is no asynchronous iterator"
        raise AwaitableMisuse(f"{what}: use `.call` or `.execute`")
    return source.__aiter__()
