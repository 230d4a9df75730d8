"""Streams of real clients, language models and HTTP: limited, and closed with their connection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, closing
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest

from resilience import Bulkhead, CircuitBreaker, Policy, Retry, TimeoutExceeded
from tests.integrations.sdks import ANTHROPIC, OPENAI
from tests.integrations.servers import Answer, FlakyServer

SDKS = {"openai": OPENAI, "anthropic": ANTHROPIC}


class Case:
    """A client, and a server whose stream has one text now, and another one when `rest` is set."""

    def __init__(self, name: str, server: FlakyServer) -> None:
        self.is_async = name.endswith("async")
        self.sdk = SDKS.get(name.partition(" ")[0])
        self.server = server
        self.rest = threading.Event()
        answer: Callable[..., Answer] = self.sdk.stream if self.sdk else lines
        pieces = answer("a", "b").pieces
        begun = 3 if self.sdk is ANTHROPIC else 1  # the pieces up to the first text
        late = replace(answer(drip=self.rest), body=[b"".join(pieces[:begun]), *pieces[begun:]])
        server.script(self.sdk.path if self.sdk else "/lines", late)

    def opener(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return the function that opens a stream, and the one that closes the client."""
        if self.sdk:
            client = self.sdk.make("Async" if self.is_async else "", self.server.url, max_retries=0)
            return partial(self.sdk.ask, client, stream=True), client.close
        if self.is_async:
            tasks = httpx.AsyncClient(base_url=self.server.url)
            return partial(aread, tasks), tasks.aclose
        threads = httpx.Client(base_url=self.server.url)
        return partial(read, threads), threads.close

    def has_closed(self) -> None:
        """Wait until the client has closed its connection."""
        self.rest.set()  # a client that kept the connection would read the rest, and reuse it for its next request
        self.server.wait_until(lambda: self.server.open_connections == 0)


def lines(*texts: str, **how: Any) -> Answer:
    return Answer(200, body=[f"{text}\n".encode() for text in texts], chunked=True, **how)


def read(client: httpx.Client) -> Iterator[str]:
    with client.stream("GET", "/lines") as response:
        yield from response.iter_lines()


async def aread(client: httpx.AsyncClient) -> AsyncIterator[str]:
    async with client.stream("GET", "/lines") as response:
        async for line in response.aiter_lines():
            yield line


def text_of(item: Any) -> str | None:
    if isinstance(item, str):
        return item
    if hasattr(item, "choices"):
        return str(item.choices[0].delta.content)
    return item.delta.text if item.type == "content_block_delta" else None


def consume(case: Case, policy: Policy[Any], *, leaves: bool = False, **limits: Any) -> str | None:
    """Take the texts of a stream, or only the first one, and return that; then its connection has to be closed."""
    streaming = policy.streaming(**limits)
    open_stream, end = case.opener()

    def is_enough(item: Any) -> bool:
        return leaves and text_of(item) is not None

    if not case.is_async:
        try:
            with closing(streaming.call(open_stream)) as items:
                last = next(filter(is_enough, items))
            case.has_closed()
        finally:
            end()
        return text_of(last)

    async def main() -> str | None:
        try:
            async with aclosing(streaming.acall(open_stream)) as items:
                last = await anext(item async for item in items if is_enough(item))
            case.has_closed()
        finally:
            await end()
        return text_of(last)

    return asyncio.run(main())


@pytest.fixture(params=["openai", "openai async", "anthropic", "anthropic async", "httpx", "httpx async"])
def case(request: pytest.FixtureRequest, server: FlakyServer) -> Case:
    return Case(request.param, server)


def test_a_stream_without_further_items_ends_after_the_idle_time(case: Case) -> None:
    """The client's own limits are minutes."""
    bulkhead = Bulkhead(1)
    with pytest.raises(TimeoutExceeded, match=r"no item within 0.05 s"):
        consume(case, Retry(1).wrap(bulkhead), first=20, idle=0.05)
    assert bulkhead.stats().in_flight == 0


def test_a_stream_that_its_consumer_leaves_is_closed(case: Case) -> None:
    """Its connection is closed immediately, and the call is a success."""
    bulkhead, breaker = Bulkhead(1), CircuitBreaker(1)
    assert consume(case, breaker.wrap(bulkhead), leaves=True) == "a"
    assert bulkhead.stats().in_flight == 0
    assert breaker.stats().opened == 0
