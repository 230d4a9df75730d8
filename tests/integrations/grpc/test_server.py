"""The caller's deadline in a gRPC server, blocking and asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from math import inf
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import grpc.aio
import pytest
from anyio.from_thread import start_blocking_portal

from resilience import DeadlineExceeded, current_context
from resilience.integrations.grpc import AioDeadlineInterceptor, DeadlineInterceptor
from tests.functions import raising
from tests.integrations.grpc.services import EXCEEDED, KINDS, PATIENCE, Dependency, serving, status


class Handlers:
    """Handlers of each kind that record the time left at each step, and then call `act`."""

    def __init__(self, act: Callable[[], Any] = lambda: None) -> None:
        self.seen: list[float] = []
        self.act = act

    def step(self) -> bytes:
        self.seen.append(current_context().remaining())
        self.act()
        return b"fine"

    def blocking(self) -> dict[str, Any]:
        def one(request: Any, context: Any) -> bytes:
            return self.step()

        def many(request: Any, context: Any) -> Iterator[bytes]:
            yield self.step()
            yield self.step()

        return handlers_of(one, many)

    def asyncio(self) -> dict[str, Any]:
        async def one(request: Any, context: Any) -> bytes:
            await asyncio.sleep(0)
            return self.step()

        async def many(request: Any, context: Any) -> Any:
            yield self.step()
            await asyncio.sleep(0)
            yield self.step()

        return handlers_of(one, many)

    def writing(self) -> dict[str, Any]:
        """Coroutine functions that write their replies."""

        async def one(request: Any, context: Any) -> bytes:
            return self.step()

        async def many(request: Any, context: Any) -> None:
            await context.write(self.step())
            await context.write(self.step())

        return handlers_of(one, many)


def handlers_of(one: Any, many: Any) -> dict[str, Any]:
    return {
        "One": grpc.unary_unary_rpc_method_handler(one),
        "Many": grpc.unary_stream_rpc_method_handler(many),
        "Join": grpc.stream_unary_rpc_method_handler(one),
        "Chat": grpc.stream_stream_rpc_method_handler(many),
    }


@contextlib.contextmanager
def aserving(handlers: dict[str, Any], interceptor: Any) -> Iterator[str]:
    """Serve handlers on a server of grpc.aio, in an event loop in another thread; yield its address."""

    async def start() -> tuple[Any, int]:
        server = grpc.aio.server(pool, interceptors=[interceptor])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    # The pool is for handlers that are not coroutines.
    with futures.ThreadPoolExecutor(4) as pool, start_blocking_portal() as portal:
        server, port = portal.call(start)
        yield f"127.0.0.1:{port}"
        portal.call(server.stop, None)


@pytest.fixture(params=["blocking", "asyncio", "writing", "mixed"])
def serve(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Serve blocking handlers, asynchronous ones, or blocking ones in an asynchronous server.

    `serve(handlers, **settings)` returns the function that calls them.
    """
    with contextlib.ExitStack() as stack:

        def serve(handlers: Handlers, **settings: Any) -> Any:
            if request.param == "blocking":
                served = serving(handlers.blocking(), DeadlineInterceptor(**settings))
            else:
                made = {"asyncio": handlers.asyncio, "writing": handlers.writing, "mixed": handlers.blocking}
                served = aserving(made[request.param](), AioDeadlineInterceptor(**settings))
            channel = stack.enter_context(grpc.insecure_channel(stack.enter_context(served)))

            def call(method: str, **kwargs: Any) -> Any:
                requests = iter([b"a"]) if method in ("Join", "Chat") else b"a"
                outcome = getattr(channel, KINDS[method])(f"/test.Test/{method}")(requests, **kwargs)
                return outcome if isinstance(outcome, bytes) else list(outcome)

            return call

        yield serve


class TestServer:
    def test_a_handler_has_the_callers_deadline_at_every_step(self, serve: Any) -> None:
        """Also in a stream of replies, and not in the next call."""
        handlers = Handlers()
        call = serve(handlers, default=inf)
        for method in Dependency.methods:
            replies = 2 if method in ("Many", "Chat") else 1
            call(method, timeout=60.0)
            assert all(30 < seconds <= 61 for seconds in handlers.seen), handlers.seen
            assert len(handlers.seen) == replies
            handlers.seen.clear()
            call(method)
            assert handlers.seen == [inf] * replies
            handlers.seen.clear()

    def test_settings_bound_the_time_of_a_call(self, serve: Any) -> None:
        """`cap` if the caller asks for more, `default` if the caller sets none."""
        handlers = Handlers()
        call = serve(handlers, cap=100.0, default=40.0)
        call("One", timeout=1e8)
        call("One")
        first, second = handlers.seen
        assert 50 < first <= 100
        assert 20 < second <= 40

    @pytest.mark.parametrize(
        ("error", "status", "details"),
        [
            (DeadlineExceeded(), EXCEEDED, "the deadline of the call has passed"),
            (KeyError("bug"), grpc.StatusCode.UNKNOWN, ""),
        ],
    )
    def test_a_handler_without_time_answers_deadline_exceeded(
        self, serve: Any, error: Exception, status: grpc.StatusCode, details: str
    ) -> None:
        """Otherwise the error would be UNKNOWN, as any other is."""
        call = serve(Handlers(raising(error)))
        for method in Dependency.methods:
            with pytest.raises(grpc.RpcError) as caught:
                call(method, timeout=60.0)
            assert caught.value.code() is status
            assert details in caught.value.details()

    def test_a_call_that_is_too_late_does_not_enter_its_handler(self, serve: Any) -> None:
        """No work begins for a caller who has given up; here the deadline has passed immediately."""
        handlers = Handlers()
        call = serve(handlers, default=1e-9)
        for method in Dependency.methods:
            assert status(lambda method=method: call(method)) is EXCEEDED
        assert handlers.seen == []

    def test_a_missing_method_stays_unimplemented(self, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        call = serve(Handlers())
        monkeypatch.setitem(KINDS, "Missing", "unary_unary")
        assert status(lambda: call("Missing")) is grpc.StatusCode.UNIMPLEMENTED


@contextlib.contextmanager
def served_stream(many: Any, **settings: Any) -> Iterator[Any]:
    """Serve a function for the replies of a stream; yield the function that calls it."""
    with (
        serving(handlers_of(many, many), DeadlineInterceptor(**settings)) as address,
        grpc.insecure_channel(address) as channel,
    ):
        yield channel.unary_stream("/test.Test/Many")


def test_a_blocking_stream_is_closed_with_its_deadline() -> None:
    """A caller who leaves closes the handler's generator; its `finally` has the deadline too."""
    seen: list[float] = []
    closed = threading.Event()

    def many(request: Any, context: Any) -> Iterator[bytes]:
        try:
            while True:
                yield b"x"
        finally:
            seen.append(current_context().remaining())
            closed.set()

    with served_stream(many) as call:
        replies = call(b"", timeout=60.0)
        next(replies)
        replies.cancel()
        assert closed.wait(PATIENCE)
    assert 30 < seen[0] <= 61


def test_a_blocking_handler_may_return_its_replies() -> None:
    """A function that returns an iterable works before it returns."""
    seen: list[float] = []

    def many(request: Any, context: Any) -> list[bytes]:
        seen.append(current_context().remaining())
        return [b"a", b"b"]

    with served_stream(many) as call:
        assert list(call(b"", timeout=60.0)) == [b"a", b"b"]
    assert 30 < seen[0] <= 61


def test_a_handler_that_replies_through_a_callback_is_not_wrapped() -> None:
    """This experimental kind of handler in grpc has another signature."""

    def many(request: bytes, context: Any, reply: Callable[[bytes | None], None]) -> None:
        reply(b"fine")
        reply(None)

    many.experimental_non_blocking = True  # type: ignore[attr-defined]
    with served_stream(many, default=1e-9) as call:
        assert list(call(b"")) == [b"fine"]


async def test_a_handler_is_not_entered_if_abort_returns() -> None:
    """As that of a mock in a unit test, which would pass although a real server answers an error."""
    handlers = Handlers()
    blocking, tasks = _with_deadline(handlers.blocking()), _with_deadline(handlers.asyncio())
    context = Mock(time_remaining=Mock(return_value=0.0))
    with pytest.raises(DeadlineExceeded):
        blocking["One"].unary_unary(b"", context)
    with pytest.raises(DeadlineExceeded):
        next(blocking["Many"].unary_stream(b"", context))
    context.abort = AsyncMock()
    with pytest.raises(DeadlineExceeded):
        await tasks["One"].unary_unary(b"", context)
    with pytest.raises(DeadlineExceeded):
        await anext(tasks["Many"].unary_stream(b"", context))
    assert handlers.seen == []


def _with_deadline(handlers: dict[str, Any]) -> dict[str, Any]:
    intercept = DeadlineInterceptor().intercept_service
    return {name: intercept(lambda details, it=it: it, None) for name, it in handlers.items()}
