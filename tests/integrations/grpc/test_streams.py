"""Calls of gRPC whose replies are a stream, under `policy.streaming`, without an interceptor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, closing
from typing import Any

import grpc
import grpc.aio

from resilience import Bulkhead, CircuitBreaker
from tests.integrations.grpc.services import PATIENCE, Client, Dependency


def test_a_stream_whose_consumer_leaves_is_cancelled(client: Client, dependency: Dependency) -> None:
    """Although the call is still held, and its channel is open. That is no failure."""
    dependency.steps = [[b"a", dependency.hang]]
    bulkhead, breaker = Bulkhead(1), CircuitBreaker(1)
    streaming = breaker.wrap(bulkhead).streaming()
    calls: list[Any] = []

    def opening(channel: Any) -> Callable[[bytes], Any]:
        def open_stream(request: bytes) -> Any:
            calls.append(channel.unary_stream("/test.Test/Many")(request))
            return calls[-1]

        return open_stream

    async def main() -> None:
        async with grpc.aio.insecure_channel(client.target) as channel:
            async with aclosing(streaming.acall(opening(channel), b"?")) as replies:
                assert await anext(replies) == b"a"
            assert await asyncio.to_thread(dependency.gone.wait, PATIENCE)

    if client.is_blocking:
        with grpc.insecure_channel(client.target) as channel:
            with closing(streaming.call(opening(channel), b"?")) as replies:
                assert next(replies) == b"a"
            assert dependency.gone.wait(PATIENCE)
    else:
        asyncio.run(main())
    assert len(calls) == 1
    assert (bulkhead.stats().in_flight, breaker.stats().opened) == (0, 0)
