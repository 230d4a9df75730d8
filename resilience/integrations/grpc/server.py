"""The caller's deadline in a gRPC server: ambient in the handler, for as long as it answers.

gRPC carries the deadline itself, as `grpc-timeout`, and tells its caller when it is over. What it does not do
is let the handler's own calls know.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any, Never, TypeAlias, final

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from resilience.context import Context
from resilience.integrations.wire import Acceptance, Steps, ambient, budget, ran_out

if TYPE_CHECKING:
    from resilience.checks import Duration

__all__ = ["AioDeadlineInterceptor", "DeadlineInterceptor"]

_Behavior: TypeAlias = Callable[..., Any]

#: By whether requests and replies are streams: the attribute that holds a handler's function, and the function
#: that makes such a handler.
_KINDS: dict[tuple[bool, bool], tuple[str, Callable[..., Any]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}

_NEVER = 1e9  # seconds; a blocking server says about 9e18 where the caller has set no deadline
_OVER = "the deadline of the call has passed"


@final
class DeadlineInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Open the deadline that the caller has set, for everything that a handler of a blocking server does.

    :param cap: the most seconds that a caller may ask for; None for no bound.
    :param default: the seconds for a call without a deadline; None for no limit.

    A call whose time is over when it comes to its handler (it has waited for a thread, say) is refused with
    `DEADLINE_EXCEEDED`, and the handler is not entered. `DeadlineExceeded` that comes out of a handler, or once
    the time is over a network error, becomes that status, too. Nothing is cut off: a thread cannot be.
    """

    def __init__(self, *, cap: Duration | None = None, default: Duration | None = None) -> None:
        self._acceptance = Acceptance((), cap=cap, default=default)

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Return the handler of a call, with the deadline around it."""
        return _with(continuation(handler_call_details), self._acceptance)


@final
class AioDeadlineInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Open the deadline that the caller has set, for everything that a handler of a `grpc.aio` server does.

    :param cap: the most seconds that a caller may ask for; None for no bound.
    :param default: the seconds for a call without a deadline; None for no limit.

    A call whose time is over is refused with `DEADLINE_EXCEEDED`, and the handler is not entered. `DeadlineExceeded`
    that comes out of a handler, or once the time is over a network error, becomes that status, too. The handler
    itself is cancelled by gRPC when the caller's own deadline passes, not at `cap` or `default`.
    """

    def __init__(self, *, cap: Duration | None = None, default: Duration | None = None) -> None:
        self._acceptance = Acceptance((), cap=cap, default=default)

    async def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Return the handler of a call, with the deadline around it."""
        return _with(await continuation(handler_call_details), self._acceptance)


def _with(handler: Any, acceptance: Acceptance) -> Any:
    """Return the same handler with the deadline around its function."""
    if handler is None:  # no such method
        return None
    attribute, make = _KINDS[bool(handler.request_streaming), bool(handler.response_streaming)]
    behavior = getattr(handler, attribute)
    if getattr(behavior, "experimental_non_blocking", False):  # answers through a callback, whenever it likes
        return handler
    if inspect.iscoroutinefunction(behavior):
        wrapper = _coroutine
    elif inspect.isasyncgenfunction(behavior):
        wrapper = _async_stream
    else:
        wrapper = _stream if handler.response_streaming else _plain
    return make(wrapper(behavior, acceptance), handler.request_deserializer, handler.response_serializer)


def _budget(acceptance: Acceptance, context: Any) -> Context:
    remaining: float | None = context.time_remaining()
    return budget(acceptance.granted(None if remaining is None or remaining > _NEVER else remaining))


def _plain(behavior: _Behavior, acceptance: Acceptance) -> _Behavior:
    @wraps(behavior)
    def wrapper(request: Any, context: Any) -> Any:
        ctx = _budget(acceptance, context)
        if ctx.expired:
            _abort(context)
        try:
            with ambient(ctx):
                return behavior(request, context)
        except Exception as error:
            if not ran_out(error, ctx):
                raise
            _abort(context)

    return wrapper


def _stream(behavior: _Behavior, acceptance: Acceptance) -> _Behavior:
    @wraps(behavior)
    def wrapper(request: Any, context: Any) -> Iterator[Any]:
        ctx = _budget(acceptance, context)
        if ctx.expired:
            _abort(context)
        steps = Steps(ctx)
        try:
            with steps:
                replies = iter(behavior(request, context))
            yield from _stepwise(replies, steps)
        except Exception as error:
            if not ran_out(error, ctx):
                raise
            _abort(context)

    return wrapper


def _stepwise(replies: Iterator[Any], steps: Steps) -> Iterator[Any]:
    """Iterate in steps: between them the thread is the server's."""
    try:
        while True:
            with steps:
                try:
                    reply = next(replies)
                except StopIteration:
                    return
            yield reply
    finally:
        close = getattr(replies, "close", None)
        if close is not None:
            with steps:
                close()


def _coroutine(behavior: _Behavior, acceptance: Acceptance) -> _Behavior:
    @wraps(behavior)
    async def wrapper(request: Any, context: Any) -> Any:
        ctx = _budget(acceptance, context)
        if ctx.expired:
            await _aabort(context)
        try:
            with ambient(ctx):
                return await behavior(request, context)
        except Exception as error:
            if not ran_out(error, ctx):
                raise
            await _aabort(context)

    return wrapper


def _async_stream(behavior: _Behavior, acceptance: Acceptance) -> _Behavior:
    @wraps(behavior)
    async def wrapper(request: Any, context: Any) -> AsyncIterator[Any]:
        ctx = _budget(acceptance, context)
        if ctx.expired:
            await _aabort(context)
        try:
            with ambient(ctx):  # each call has a task of its own
                async for reply in behavior(request, context):
                    yield reply
        except Exception as error:
            if not ran_out(error, ctx):
                raise
            await _aabort(context)

    return wrapper


def _abort(context: Any) -> Never:
    context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, _OVER)
    raise AssertionError("abort() raises")


async def _aabort(context: Any) -> Never:
    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, _OVER)
    raise AssertionError("abort() raises")
