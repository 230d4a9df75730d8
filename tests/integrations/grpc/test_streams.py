"""Calls of gRPC whose replies are a stream, under `policy.streaming`, without an interceptor."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, closing
from itertools import islice
from typing import Any

import grpc
import grpc.aio
import pytest

from resilience import Bulkhead, CircuitBreaker, Policy, Retry, TimeoutExceeded
from tests.integrations.grpc.services import PATIENCE, UNAVAILABLE, Client, Dependency

METHOD = "/test.Test/Many"


def replies(client: Client, policy: Policy[Any], most: int = 9, into: list[bytes] | None = None, **limits: Any) -> Any:
    """Return at most `most` replies; the channel stays open until the stream is closed."""
    got: list[bytes] = [] if into is None else into
    streaming = policy.streaming(**limits)
    if client.is_blocking:
        with (
            grpc.insecure_channel(client.target) as channel,
            closing(streaming.call(channel.unary_stream(METHOD), b"?")) as stream,
        ):
            got.extend(islice(stream, most))
        return got

    async def main() -> None:
        async with (
            grpc.aio.insecure_channel(client.target) as channel,
            aclosing(streaming.acall(channel.unary_stream(METHOD), b"?")) as stream,
        ):
            async for reply in stream:
                got.append(reply)
                if len(got) == most:
                    break

    asyncio.run(main())
    return got


def test_a_stream_is_opened_again_until_its_first_reply(client: Client, dependency: Dependency) -> None:
    """A call that fails does so at its first reply."""
    dependency.steps = [UNAVAILABLE, UNAVAILABLE, [b"a", b"b"]]
    assert replies(client, Retry(3, on=grpc.RpcError, backoff=[0])) == [b"a", b"b"]
    assert len(dependency.seen) == 3


def test_a_stream_without_further_replies_is_cancelled(client: Client, dependency: Dependency) -> None:
    """The server is notified that its caller has left; the permit is free."""
    dependency.steps = [[b"a", dependency.hang]]
    bulkhead = Bulkhead(1)
    with pytest.raises(TimeoutExceeded):
        replies(client, Retry(1).wrap(bulkhead), first=PATIENCE, idle=0.05)
    assert dependency.gone.wait(PATIENCE)
    assert bulkhead.stats().in_flight == 0


def test_a_stream_whose_consumer_leaves_is_cancelled(client: Client, dependency: Dependency) -> None:
    """That is no failure."""
    dependency.steps = [[b"a", dependency.hang]]
    bulkhead, breaker = Bulkhead(1), CircuitBreaker(1)
    assert replies(client, breaker.wrap(bulkhead), most=1) == [b"a"]
    assert dependency.gone.wait(PATIENCE)
    assert (bulkhead.stats().in_flight, breaker.stats().opened) == (0, 0)
