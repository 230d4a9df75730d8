"""The caller's deadline in a gRPC server: ambient in the handler while it runs.

gRPC itself sends the deadline, as `grpc-timeout`, and ends the call when it has passed. But it does not apply
the deadline to the calls that the handler makes.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from functools import wraps
from typing import Any, TypeAlias, final

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from resilience.callables import maybe_await
from resilience.checks import Duration
from resilience.context import Context
from resilience.integrations._serving import Steps, budget, ran_out
from resilience.integrations.grpc.client import Kind
from resilience.integrations.wire import Acceptance
from resilience.runtimes.driving import drive

_Behavior: TypeAlias = Callable[..., Any]

_UNLIMITED = 1e9  # seconds; in a blocking server, about 9e18 remain if the caller has set no deadline
_TOO_LATE = grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of the call has passed"


@final
class DeadlineInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Open the caller's deadline for everything that a handler of a blocking server does.

    :param cap: the most seconds that a caller may ask for; `default` by default, infinity for no bound.
    :param default: the seconds for a call without a deadline; `cap` by default, infinity for no limit. If neither is
        given, both are 60 seconds.

    A call that reaches its handler after the deadline (because it waited for a thread, say) is refused with
    `DEADLINE_EXCEEDED`, and the handler is not entered. If the handler raises `DeadlineExceeded`, or after the deadline
    a network error or that of a statement that a database has ended, the caller gets the same status. Nothing is cut
    off: a thread cannot be.
    """

    def __init__(self, *, cap: Duration | None = None, default: Duration | None = None) -> None:
        self._acceptance = Acceptance((), cap=cap, default=default)

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Return the handler of a call, with the deadline around it."""
        return _with_deadline(continuation(handler_call_details), self._acceptance)


@final
class AioDeadlineInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Open the caller's deadline in a `grpc.aio` server, with the parameters and rules of `DeadlineInterceptor`.

    The handler itself is cancelled by gRPC when the caller's own deadline passes, not at `cap` or `default`.
    """

    def __init__(self, *, cap: Duration | None = None, default: Duration | None = None) -> None:
        self._acceptance = Acceptance((), cap=cap, default=default)

    async def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Return the handler of a call, with the deadline around it."""
        return _with_deadline(await continuation(handler_call_details), self._acceptance)


def _with_deadline(handler: Any, acceptance: Acceptance) -> Any:
    if handler is None:  # no such method
        return None
    kind = Kind(bool(handler.request_streaming), bool(handler.response_streaming)).name
    behavior = getattr(handler, kind)
    if getattr(behavior, "experimental_non_blocking", False):  # it answers through a callback, at any later time
        return handler
    if inspect.isasyncgenfunction(behavior):
        wrapper = _async_stream
    elif handler.response_streaming and not inspect.iscoroutinefunction(behavior):
        wrapper = _stream
    else:
        wrapper = _one_reply  # also for a coroutine function that writes its replies
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    limited = wraps(behavior)(wrapper(behavior, acceptance))
    return make(limited, handler.request_deserializer, handler.response_serializer)


def _one_reply(behavior: _Behavior, acceptance: Acceptance) -> _Behavior:
    async def answer(request: Any, context: Any) -> Any:
        ctx = _budget(acceptance, context)
        try:
            with Steps(ctx):
                ctx.check()
                return await maybe_await(behavior(request, context))
        except Exception as error:
            if ran_out(error, ctx):
                await maybe_await(context.abort(*_TOO_LATE))
            raise

    if inspect.iscoroutinefunction(behavior):
        return answer
    return lambda request, context: drive(answer(request, context))


def _stream(behavior: _Behavior, acceptance: Acceptance) -> _Behavior:
    def wrapper(request: Any, context: Any) -> Iterator[Any]:
        ctx = _budget(acceptance, context)
        steps = Steps(ctx)
        try:
            with steps:
                ctx.check()
                replies = iter(behavior(request, context))
            yield from _stepwise(replies, steps)
        except Exception as error:
            if ran_out(error, ctx):
                context.abort(*_TOO_LATE)
            raise

    return wrapper


def _async_stream(behavior: _Behavior, acceptance: Acceptance) -> _Behavior:
    async def wrapper(request: Any, context: Any) -> AsyncIterator[Any]:
        ctx = _budget(acceptance, context)
        try:
            with Steps(ctx):  # around all replies: each call runs in its own task
                ctx.check()
                async for reply in behavior(request, context):
                    yield reply
        except Exception as error:
            if ran_out(error, ctx):
                await context.abort(*_TOO_LATE)
            raise

    return wrapper


def _budget(acceptance: Acceptance, context: Any) -> Context:
    remaining: float | None = context.time_remaining()
    return budget(acceptance.granted(None if remaining is None or remaining > _UNLIMITED else remaining))


def _stepwise(replies: Iterator[Any], steps: Steps) -> Iterator[Any]:
    """Open the deadline for each step of the iterator only: between steps the server uses the thread."""
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
