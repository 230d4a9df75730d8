"""Streams of real clients, language models and HTTP: retried before an item, limited, and closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import httpx
import pytest

from resilience import Bulkhead, CircuitBreaker, Policy, Retry, TimeoutExceeded
from resilience.callables import maybe_await
from tests.conftest import World
from tests.integrations import sdks as llm
from tests.integrations.sdks import ANTHROPIC, OPENAI, QUESTION, SDK
from tests.integrations.servers import Answer, Server
from tests.streams.sources import Consumed, taken
from tests.versions import needs

SDKS = {"openai": OPENAI, "anthropic": ANTHROPIC}


class Case:
    """A client, the function that opens a stream, and the answers of its server.

    `answers` makes the answer with some texts, and may be asked for a fault.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_async = name.endswith("async")
        self.world = World("asyncio" if self.is_async else "threads")
        self.run = self.world.run
        self.sdk = SDKS.get(name.partition(" ")[0])
        self.path: str = self.sdk.path if self.sdk else "/lines"
        self.answers: Callable[..., Answer] = self.sdk.stream if self.sdk else lines

    def broken_off(self, **how: Any) -> Answer:
        """The answer with two texts, of which the second one is missing or late."""
        pieces = self.answers("a", "b").pieces
        begun = 3 if self.sdk is ANTHROPIC else 1  # the pieces up to the first text
        return replace(self.answers(**how), body=[b"".join(pieces[:begun]), *pieces[begun:]])

    def opener(self, url: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return the function that opens a stream, and the one that closes the client."""
        if self.sdk:
            client = self.sdk.make("Async" if self.is_async else "", url, max_retries=0)
            return partial(self.sdk.ask, client, stream=True), client.close
        if self.is_async:
            tasks = httpx.AsyncClient(base_url=url)
            return partial(aread, tasks), tasks.aclose
        threads = httpx.Client(base_url=url)
        return partial(read, threads), threads.close


def lines(*texts: str, **how: Any) -> Answer:
    return Answer(200, body=[f"{text}\n".encode() for text in texts], chunked=True, **how)


def read(client: httpx.Client) -> Iterator[str]:
    with client.stream("GET", "/lines") as response:
        response.raise_for_status()
        yield from response.iter_lines()


async def aread(client: httpx.AsyncClient) -> AsyncIterator[str]:
    async with client.stream("GET", "/lines") as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            yield line


def text_of(item: Any) -> str | None:
    if isinstance(item, str):
        return item
    if hasattr(item, "chunk"):  # of a helper, which also yields the text of each chunk
        return text_of(item.chunk)
    if hasattr(item, "choices"):
        return str(item.choices[0].delta.content)
    return item.delta.text if item.type == "content_block_delta" else None


async def consume(
    case: Case,
    url: str,
    policy: Policy[Any],
    stop: Callable[[str], object] = lambda text: False,
    after: Callable[[], object] = lambda: None,
    **limits: Any,
) -> list[str]:
    """Return the texts of a stream, up to the first one for which `stop` is true.

    :param after: called after the stream is closed, and before its client is.
    """
    open_stream, end = case.opener(url)
    streaming = policy.streaming(**limits)
    stream = Consumed(case.world, (streaming.acall if case.is_async else streaming.call)(open_stream))
    try:
        items = await taken(stream, lambda item: (text := text_of(item)) is not None and stop(text))
        after()
    finally:
        await maybe_await(end())
    return [text for text in map(text_of, items) if text is not None]


@pytest.fixture(params=["openai", "openai async", "anthropic", "anthropic async", "httpx", "httpx async"])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


async def test_a_stream_is_opened_again_until_its_first_item(case: Case, server: Server) -> None:
    """After transient statuses and lost connections; the permit is that of the whole stream."""
    server.script(case.path, llm.openai_error(503), Answer(fault="reset"), case.answers("a", "b"))
    bulkhead, held = Bulkhead(1), []
    policy = Retry(3, on=Exception, backoff=[0]).wrap(bulkhead)
    got = await consume(case, server.url, policy, lambda text: held.append(bulkhead.stats().in_flight))
    assert (got, held) == (["a", "b"], [1, 1])
    assert bulkhead.stats().in_flight == 0
    assert len(server.requests) == 3


#: The methods that open a stream: its client's own, and its helper, which returns a context manager.
METHODS = {
    "openai": (OPENAI, "chat.completions.create", {"stream": True}),
    "openai helper": pytest.param(OPENAI, "chat.completions.stream", {}, marks=needs("openai>=1.92")),
    "anthropic": (ANTHROPIC, "messages.create", {"stream": True}),
    "anthropic helper": (ANTHROPIC, "messages.stream", {}),
}


@pytest.mark.parametrize(("sdk", "method", "options"), METHODS.values(), ids=METHODS)
def test_a_stream_of_a_wrapped_client_is_used_like_its_own(
    sdk: SDK, method: str, options: dict[str, Any], server: Server
) -> None:
    """Awaited where that is, and in a `with` block."""
    server.script(sdk.path, llm.openai_error(503), sdk.stream("a", "b"), llm.openai_error(503), sdk.stream("a", "b"))
    streaming = Retry(3, on=Exception, backoff=[0]).streaming(first=20)

    def ask(client: Any) -> Any:
        return attrgetter(method)(client)(**{**QUESTION, "max_tokens": 9, **options})

    with sdk.make("", server.url, max_retries=0) as client, ask(streaming.proxy(client, method)) as stream:
        assert [text for text in map(text_of, stream) if text] == ["a", "b"]

    async def main() -> None:
        async with sdk.make("Async", server.url, max_retries=0) as client:
            opened = ask(streaming.aproxy(client, method))
            async with await opened if options else opened as stream:
                assert [text async for item in stream if (text := text_of(item))] == ["a", "b"]

    asyncio.run(main())


async def test_a_stream_that_breaks_off_is_not_repeated(case: Case, server: Server) -> None:
    """The consumer has the first items; the breaker counts the failure."""
    server.script(case.path, case.broken_off(fault="cut"))
    breaker = CircuitBreaker(1, on=Exception)
    with pytest.raises(Exception, match=r"closed|incomplete|Connection|peer") as caught:
        await consume(case, server.url, Retry(3, on=Exception, backoff=[0]).wrap(breaker))
    assert not isinstance(caught.value, TimeoutExceeded)
    assert breaker.stats().opened == 1
    assert len(server.requests) == 1


async def test_a_stream_without_further_items_ends_after_the_idle_time(case: Case, server: Server) -> None:
    """The client's own limits are minutes; its connection is closed."""
    never = threading.Event()
    server.script(case.path, case.answers("a", "b", drip=never))
    bulkhead = Bulkhead(1)
    with pytest.raises(TimeoutExceeded, match=r"no item within 0.05 s"):
        await consume(case, server.url, Retry(1).wrap(bulkhead), first=20, idle=0.05)
    assert bulkhead.stats().in_flight == 0
    never.set()


async def test_a_stream_that_its_consumer_leaves_is_closed(case: Case, server: Server) -> None:
    """Its connection is closed immediately, and the call is a success."""
    never = threading.Event()
    server.script(case.path, case.broken_off(drip=never))
    bulkhead, breaker = Bulkhead(1), CircuitBreaker(1)

    def closed() -> None:
        never.set()  # a client that kept the connection would read the rest, and reuse it for its next request
        server.wait_until(lambda: server.open_connections == 0)

    assert await consume(case, server.url, breaker.wrap(bulkhead), lambda text: True, closed) == ["a"]
    assert bulkhead.stats().in_flight == 0
    assert breaker.stats().opened == 0
