"""Calls of gRPC whose replies are a stream, under `policy.streaming`, without an interceptor."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, closing
from typing import Any

import grpc
import grpc.aio
import pytest

from resilience import Bulkhead, CircuitBreaker, Policy, Retry, TimeoutExceeded
from tests.integrations.grpc.services import NOW, PATIENCE, UNAVAILABLE, Client, Dependency


class Opener:
    """Opens the streams, and keeps them: no call ends because it is garbage-collected."""

    def __init__(self, channel: Any) -> None:
        self.calls: list[Any] = []
        self._method = channel.unary_stream("/test.Test/Many")

    def open(self, request: bytes, *, after: bytes = b"") -> Any:
        self.calls.append(self._method(request + after))
        return self.calls[-1]


def consume(
    client: Client, dependency: Dependency, policy: Policy[Any], stop: bytes | None = None, **limits: Any
) -> list[bytes]:
    """Return the replies up to the one that is `stop`; then the stream is closed, before its channel is."""
    streaming, got = policy.streaming(**limits), list[bytes]()

    def take(reply: bytes) -> bool:
        got.append(reply)
        return reply == stop

    if client.is_blocking:
        with (
            grpc.insecure_channel(client.target) as channel,
            closing(streaming.call(Opener(channel).open, b"?")) as replies,
        ):
            any(map(take, replies))
            replies.close()
            assert stop is None or dependency.gone.wait(PATIENCE)
        return got

    async def main() -> None:
        async with grpc.aio.insecure_channel(client.target) as channel:
            async with aclosing(streaming.acall(Opener(channel).open, b"?")) as replies:
                async for reply in replies:
                    if take(reply):
                        break
            assert stop is None or await asyncio.to_thread(dependency.gone.wait, PATIENCE)

    asyncio.run(main())
    return got


def test_a_stream_whose_consumer_leaves_is_cancelled(client: Client, dependency: Dependency) -> None:
    """Although the call is still held, and its channel is open. That is no failure."""
    dependency.steps = [[b"a", dependency.hang]]
    bulkhead, breaker = Bulkhead(1), CircuitBreaker(1)
    assert consume(client, dependency, breaker.wrap(bulkhead), stop=b"a") == [b"a"]
    assert len(dependency.seen) == 1
    assert (bulkhead.stats().in_flight, breaker.stats().opened) == (0, 0)


def test_a_stream_is_resumed_after_its_last_reply(client: Client, dependency: Dependency) -> None:
    dependency.steps = [[b"a", UNAVAILABLE], UNAVAILABLE, [b"b", b"c"]]
    assert consume(client, dependency, NOW, resume={"after": lambda reply: reply}) == [b"a", b"b", b"c"]
    assert [request for _, request, _ in dependency.seen] == [b"?", b"?a", b"?a"]


def test_a_call_without_replies_is_cut_off_and_cancelled(client: Client, dependency: Dependency) -> None:
    dependency.steps = [[dependency.hang], [b"a", dependency.hang]]
    with pytest.raises(TimeoutExceeded):
        consume(client, dependency, Retry(2, on=TimeoutExceeded, backoff=[0]), first=1.0, idle=0.2)
    assert len(dependency.seen) == 2
    assert dependency.gone.wait(PATIENCE)
