"""The caller's deadline in a gRPC server: ambient in the handler while it runs.

gRPC itself sends the deadline, as `grpc-timeout`, and ends the call when it has passed. But it does not apply
the deadline to the calls that the handler makes.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from functools import wraps
from types import TracebackType
from typing import Any, TypeAlias, final

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from resilience.callables import maybe_await
from resilience.checks import Duration
from resilience.integrations.grpc.calls import Kind
from resilience.integrations.wire import Acceptance, Steps, budget, ran_out
from resilience.runtimes.driving import drive

__all__ = ["AioDeadlineInterceptor", "DeadlineInterceptor"]

_Behavior: TypeAlias = Callable[..., Any]

_UNLIMITED = 1e9  # seconds; in a blocking server, about 9e18 remain if the caller has set no deadline
_DETAILS = "the deadline of the call has passed"


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
    """Return the handler with the deadline around its function."""
    if handler is None:  # no such method
        return None
    kind = Kind(bool(handler.request_streaming), bool(handler.response_streaming)).name
    behavior = getattr(handler, kind)
    if getattr(behavior, "experimental_non_blocking", False):  # it answers through a callback, at any later time
        return handler
    if inspect.iscoroutinefunction(behavior):
        wrapper = _coroutine
    elif inspect.isasyncgenfunction(behavior):
        wrapper = _async_stream
    else:
        wrapper = _stream if handler.response_streaming else _plain
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    limited = wraps(behavior)(wrapper(behavior, acceptance))
    return make(limited, handler.request_deserializer, handler.response_serializer)


def _plain(behavior: _Behavior, acceptance: Acceptance) -> _Behavior:
    def wrapper(request: Any, context: Any) -> Any:
        with _Limited(acceptance, context) as steps, steps:
            return behavior(request, context)

    return wrapper


def _stream(behavior: _Behavior, acceptance: Acceptance) -> _Behavior:
    def wrapper(request: Any, context: Any) -> Iterator[Any]:
        with _Limited(acceptance, context) as steps:
            with steps:
                replies = iter(behavior(request, context))
            yield from _stepwise(replies, steps)

    return wrapper


def _coroutine(behavior: _Behavior, acceptance: Acceptance) -> _Behavior:
    async def wrapper(request: Any, context: Any) -> Any:
        async with _Limited(acceptance, context) as steps:
            with steps:
                return await behavior(request, context)

    return wrapper


def _async_stream(behavior: _Behavior, acceptance: Acceptance) -> _Behavior:
    async def wrapper(request: Any, context: Any) -> AsyncIterator[Any]:
        async with _Limited(acceptance, context) as steps:
            with steps:  # around all replies: each call runs in its own task
                async for reply in behavior(request, context):
                    yield reply

    return wrapper


@final
class _Limited:
    """The block around a handler: opens the deadline, and reports an exceeded one as `DEADLINE_EXCEEDED`.

    :param context: grpc's context of the call; in grpc.aio its `abort` has to be awaited.
    """

    def __init__(self, acceptance: Acceptance, context: Any) -> None:
        remaining: float | None = context.time_remaining()
        asked = None if remaining is None or remaining > _UNLIMITED else remaining
        self._ctx = budget(acceptance.granted(asked))
        self._context = context

    def __enter__(self) -> Steps:
        return drive(self.__aenter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        drive(self.__aexit__(kind, error, traceback))

    async def __aenter__(self) -> Steps:
        if self._ctx.expired:
            await self._abort()
        return Steps(self._ctx)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and ran_out(error, self._ctx):
            await self._abort()

    async def _abort(self) -> None:
        await maybe_await(self._context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, _DETAILS))
        raise AssertionError("abort() raises")


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
