"""Calls of gRPC whose replies are a stream, under `policy.streaming`, without an interceptor."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from resilience import Bulkhead, CircuitBreaker, Policy, Retry, TimeoutExceeded
from tests.contention.beside import until
from tests.integrations.grpc.services import NOW, PATIENCE, UNAVAILABLE, Client, Dependency
from tests.integrations.http_clients import opened
from tests.streams.sources import Consumed, taken


class Opener:
    """Opens the streams, and keeps them: no call ends because it is garbage-collected."""

    def __init__(self, channel: Any) -> None:
        self.calls: list[Any] = []
        self._method = channel.unary_stream("/test.Test/Many")

    def open(self, request: bytes, *, after: bytes = b"") -> Any:
        self.calls.append(self._method(request + after))
        return self.calls[-1]


async def consume(client: Client, dependency: Dependency, policy: Policy[Any], stop: bytes = b"", **limits: Any) -> Any:
    """Return the replies up to the one that is `stop`; then the stream is closed, before its channel is."""
    streaming = policy.streaming(**limits)
    call, library = (streaming.call, grpc) if client.is_blocking else (streaming.acall, grpc.aio)
    async with opened(library.insecure_channel(client.target)) as channel:
        opener = Opener(channel)
        got = await taken(Consumed(client.world, call(opener.open, b"?")), lambda reply: reply == stop)
        if stop:
            await until(client.world, dependency.gone.is_set)
    return got


async def test_a_stream_whose_consumer_leaves_is_cancelled(client: Client, dependency: Dependency) -> None:
    """Although the call is still held, and its channel is open. That is no failure."""
    dependency.steps = [[b"a", dependency.hang]]
    bulkhead, breaker = Bulkhead(1), CircuitBreaker(1)
    assert await consume(client, dependency, breaker.wrap(bulkhead), stop=b"a") == [b"a"]
    assert len(dependency.seen) == 1
    assert (bulkhead.stats().in_flight, breaker.stats().opened) == (0, 0)


async def test_a_stream_is_resumed_after_its_last_reply(client: Client, dependency: Dependency) -> None:
    dependency.steps = [[b"a", UNAVAILABLE], UNAVAILABLE, [b"b", b"c"]]
    assert await consume(client, dependency, NOW, resume={"after": lambda reply: reply}) == [b"a", b"b", b"c"]
    assert [request for _, request, _ in dependency.seen] == [b"?", b"?a", b"?a"]


async def test_a_call_without_replies_is_cut_off_and_cancelled(client: Client, dependency: Dependency) -> None:
    dependency.steps = [[dependency.hang], [b"a", dependency.hang]]
    with pytest.raises(TimeoutExceeded):
        await consume(client, dependency, Retry(2, on=TimeoutExceeded, backoff=[0]), first=1.0, idle=0.2)
    assert len(dependency.seen) == 2
    assert dependency.gone.wait(PATIENCE)
