"""Calls under a policy: what only blocking channels have, and what only grpc.aio has."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import grpc
import grpc.aio
import pytest

from resilience import CircuitBreaker, CircuitOpen, Fallback, Retry
from resilience.integrations.grpc import PolicyInterceptor
from resilience.integrations.grpc.answers import DeadlineStatus
from tests.functions import raising
from tests.integrations.grpc.services import (
    INTERNAL,
    KINDS,
    NOW,
    PATIENCE,
    REQUEST,
    UNAVAILABLE,
    Dependency,
    answering,
    aprotected,
    protected,
)


class TestBlocking:
    """Features of the blocking API."""

    @pytest.fixture
    def channel(self, target: str) -> Iterator[Any]:
        with protected(target, NOW) as channel:
            yield channel

    def test_with_call_and_future_return_the_last_attempts_call(self, channel: Any, dependency: Dependency) -> None:
        """A future is done: an interceptor of the blocking API has to return a call, so it waits."""
        dependency.steps = [UNAVAILABLE, b"fine", UNAVAILABLE, b"fine", INTERNAL]
        one = channel.unary_unary("/test.Test/One")
        reply, call = one.with_call(b"")
        assert (reply, call.code()) == (b"fine", grpc.StatusCode.OK)
        future = one.future(b"")
        assert future.done()
        assert future.result() == b"fine"
        assert one.future(b"").exception().code() is INTERNAL

    def test_a_stream_or_a_future_that_fails_keeps_its_status(self, channel: Any, dependency: Dependency) -> None:
        """And its metadata. An error that an interceptor raises has those of gRPC: INTERNAL, and none."""
        dependency.steps = [UNAVAILABLE]
        dependency.pushback = "-1"
        future = channel.unary_unary("/test.Test/One").future(b"")
        stream = channel.unary_stream("/test.Test/Many")(b"")
        for call in (future, stream):
            assert (call.code(), call.details()) == (UNAVAILABLE, "as the script says")
            assert dict(call.trailing_metadata()) == {"grpc-retry-pushback-ms": "-1"}
        assert future.exception() is future
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert caught.value is stream

    def test_a_stream_is_a_call(self, channel: Any, dependency: Dependency) -> None:
        """It can be cancelled, and has a status."""
        dependency.steps = [[b"a", Dependency.hang]]
        call = channel.unary_stream("/test.Test/Many")(b"")
        assert next(call) == b"a"
        call.cancel()
        assert dependency.gone.wait(PATIENCE)
        assert call.code() is grpc.StatusCode.CANCELLED

    def test_a_stream_of_requests_may_depend_on_the_replies(self, channel: Any, dependency: Dependency) -> None:
        """The policy does not wait for the first reply, nor for the first request."""
        dependency.steps = [b"echo"]
        sent: list[bytes] = [b"a", b"b"]
        may_send = threading.Semaphore(0)

        def requests() -> Iterator[bytes]:
            for request in sent:
                assert may_send.acquire(timeout=PATIENCE)
                yield request

        received = []
        replies = channel.stream_stream("/test.Test/Chat")(requests())
        may_send.release()
        for reply in replies:
            received.append(reply)
            may_send.release()
        assert received == sent

    def test_the_result_of_a_fallback_is_a_finished_call(self, target: str) -> None:
        """With all methods of a call."""
        with protected(target, answering(b"cached")) as channel:
            reply, call = channel.unary_unary("/test.Test/One").with_call(b"")
            future = channel.unary_unary("/test.Test/One").future(b"")
        called: list[Any] = []
        future.add_done_callback(called.append)
        assert (reply, call.code(), call.details()) == (b"cached", grpc.StatusCode.OK, "answered by a policy")
        assert (call.initial_metadata(), call.trailing_metadata(), call.time_remaining()) == ((), (), None)
        assert (future.result(), future.exception(), future.traceback(), called) == (b"cached", None, None, [future])
        assert (future.done(), future.running(), future.cancelled(), future.cancel()) == (True, False, False, False)
        assert (call.is_active(), call.add_callback(print)) == (False, False)

    def test_an_outer_interceptor_gets_what_grpc_calls_a_call_and_a_future(self, target: str) -> None:
        """For a stream, a policy's answer, and a call that was not made because its time was up."""
        with grpc.insecure_channel(target) as plain:
            many = grpc.intercept_channel(plain, PolicyInterceptor(NOW)).unary_stream("/test.Test/Many")(b"")
            answered = grpc.intercept_channel(plain, PolicyInterceptor(answering(b"a"))).unary_unary("/test.Test/One")
            calls = [plain.unary_stream("/test.Test/Many")(b""), many, answered.with_call(b"")[1], DeadlineStatus()]
            for call in calls:
                assert isinstance(call, grpc.Call)
                assert isinstance(call, grpc.Future)

    def test_interceptors_can_be_nested(self, target: str, dependency: Dependency) -> None:
        """The outer one sees what the inner one raises."""
        breaker = CircuitBreaker(1)
        breaker.isolate()
        with protected(target, Fallback(b"cached", on=CircuitOpen), breaker) as channel:
            assert channel.unary_unary("/test.Test/One")(b"") == b"cached"


class TestAsyncio:
    """Features of grpc.aio."""

    async def test_a_call_has_the_status_of_the_last_attempt(self, target: str, dependency: Dependency) -> None:
        dependency.steps = [UNAVAILABLE, b"fine"]
        async with aprotected(target, NOW) as channel:
            call = channel.unary_unary("/test.Test/One")(b"")
            assert await call == b"fine"
            assert await call.code() is grpc.StatusCode.OK

    @pytest.mark.parametrize("method", ["Join", "Chat"])
    async def test_requests_can_be_written_one_by_one(self, target: str, dependency: Dependency, method: str) -> None:
        """A write waits for the interceptors, which wait for no reply."""
        dependency.steps = [b"echo"] if method == "Chat" else [b"fine"]
        async with asyncio.timeout(PATIENCE), aprotected(target, NOW) as channel:
            call = getattr(channel, KINDS[method])(f"/test.Test/{method}")()
            await call.write(b"a")
            if method == "Chat":
                assert await call.read() == b"a"
            await call.write(b"b")
            await call.done_writing()
            assert (await call.read() if method == "Chat" else await call) == (b"b" if method == "Chat" else b"fine")

    async def test_cancelling_the_caller_cancels_the_call(self, target: str, dependency: Dependency) -> None:
        """The server is notified, and nothing is repeated."""
        dependency.steps = [Dependency.hang]
        async with aprotected(target, NOW) as channel:
            task = asyncio.ensure_future(channel.unary_unary("/test.Test/One")(b""))
            while not dependency.seen:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await asyncio.to_thread(dependency.gone.wait, PATIENCE)
        assert len(dependency.seen) == 1

    @pytest.mark.parametrize("method", Dependency.methods)
    async def test_the_result_of_a_fallback_is_a_finished_call(self, target: str, method: str) -> None:
        """With all methods of a call of grpc, for the caller and for an interceptor around ours."""
        many = method in ("Many", "Chat")

        async def intercept(self: Any, continuation: Any, details: Any, request: Any) -> Any:
            call = await continuation(details, request)
            done: list[Any] = []
            call.add_done_callback(done.append)
            assert (done, call.time_remaining()) == ([call], None)
            assert (call.done(), call.cancelled(), call.cancel()) == (True, False, False)
            if method in ("Join", "Chat"):
                with pytest.raises(asyncio.InvalidStateError, match="a policy has answered"):
                    await call.write(b"more")
                assert await call.done_writing() is None
            if many:
                assert [await call.read() for _ in range(4)] == [b"a", b"b", grpc.aio.EOF, grpc.aio.EOF]
            return call

        kind = KINDS[method]
        base = getattr(grpc.aio, "".join(word.title() for word in kind.split("_")) + "ClientInterceptor")
        around = type("Around", (base,), {f"intercept_{kind}": intercept})()
        async with aprotected(target, answering([b"a", b"b"] if many else b"a"), around) as channel:
            call = getattr(channel, kind)(f"/test.Test/{method}")(REQUEST[method])
            assert ([reply async for reply in call] == [b"a", b"b"]) if many else (await call == b"a")
            assert (await call.code(), await call.details()) == (grpc.StatusCode.OK, "answered by a policy")
            assert await call.debug_error_string() == ""
            assert not [*await call.initial_metadata(), *await call.trailing_metadata()]
            await call.wait_for_connection()

    async def test_the_replies_of_a_fallback_may_be_an_async_iterable(self, target: str) -> None:

        async def cached() -> Any:
            yield b"a"
            yield b"b"

        async with aprotected(target, answering(cached())) as channel:
            assert [reply async for reply in channel.unary_stream("/test.Test/Many")(b"")] == [b"a", b"b"]


def test_ctrl_c_in_the_wait_for_the_first_reply_cancels_the_call() -> None:
    """The call does not continue after its caller has left."""
    call = MagicMock()
    call.__iter__.return_value = map(raising(KeyboardInterrupt), [b"first"])
    details = grpc.aio.ClientCallDetails("/test.Test/Many", None, None, None, None)
    with pytest.raises(KeyboardInterrupt):
        PolicyInterceptor(NOW).intercept_unary_stream(lambda details, request: call, details, b"")
    call.cancel.assert_called_once_with()


class Yielding(grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
    """An interceptor that replaces the call by a generator, as OpenTelemetry's does."""

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Iterator[Any]:
        yield from continuation(client_call_details, request)


def test_a_discarded_stream_that_is_a_generator_is_closed(target: str, dependency: Dependency) -> None:
    """Which cancels the call, although another reference to the generator exists."""
    dependency.steps = [[b"bad", Dependency.hang], [b"fine"]]
    kept: list[Any] = []
    refuse = Retry(2, backoff=[0], on_result=lambda replies: kept.append(replies) or len(kept) == 1)
    with grpc.insecure_channel(target) as plain:
        channel = grpc.intercept_channel(plain, PolicyInterceptor(refuse), Yielding())
        assert list(channel.unary_stream("/test.Test/Many")(b"")) == [b"fine"]
        assert dependency.gone.wait(PATIENCE)


def test_ctrl_c_is_raised_although_the_call_cannot_be_cancelled() -> None:
    """An interceptor inside may replace it by any iterator."""
    details = grpc.aio.ClientCallDetails("/test.Test/Many", None, None, None, None)
    with pytest.raises(KeyboardInterrupt):
        PolicyInterceptor(NOW).intercept_unary_stream(lambda *_: map(raising(KeyboardInterrupt), [b""]), details, b"")
