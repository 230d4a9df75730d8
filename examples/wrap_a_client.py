"""Protect the clients that you already have: `proxy` and `aproxy` put a pipeline around their methods.

Look at the three calls of `proxy` and `aproxy`; the code around them is unchanged. The server fails twice before it
answers, and the code that uses the client does not notice. Its type, other methods and `with` block are unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import httpx2
import requests

from _flaky_server import FlakyServer
from resilience import Policy, Retry, Timeout
from resilience.events import RetryScheduled


def server_error(response: Any) -> bool:
    return bool(response.status_code >= 500)


def show_retry(event: RetryScheduled) -> None:
    print(f"    attempt {event.attempt} failed, the next one in {event.delay:.2f} s")


pipeline = Policy.wrap(
    Retry(3, on_result=server_error, backoff=[0.02], on_retry=show_retry),
    Timeout(2.0),
)


def blocking(url: str) -> None:
    """Protect the named methods. Everything else is unchanged."""
    session = pipeline.proxy(requests.Session(), "get", "post")
    with session:  # enters the client, and returns the proxy
        print("requests.Session")
        print(f"    {session.get(f'{url}/flaky/threads').text}")
        print(f"    still a Session: {isinstance(session, requests.Session)}")


async def asynchronous(url: str) -> None:
    """Use the same call for an asynchronous client, whose methods are `async def`."""
    async with pipeline.proxy(httpx2.AsyncClient(), "get", "post") as client:
        print("httpx2.AsyncClient")
        print(f"    {(await client.get(f'{url}/flaky/asyncio')).text}")


class Completions:
    """As in many generated clients, a plain method in a nested namespace returns an awaitable."""

    def __init__(self) -> None:
        self.calls = 0

    def create(self, prompt: str) -> Awaitable[str]:
        return self._answer(prompt)

    async def _answer(self, prompt: str) -> str:
        self.calls += 1
        if self.calls < 2:
            raise ConnectionError("reset by peer")
        return prompt.upper()


class Namespace:
    def __init__(self) -> None:
        self.completions = Completions()


class Assistant:
    def __init__(self) -> None:
        self.chat = Namespace()
        self.model = "small"


async def in_namespaces() -> None:
    """Use `aproxy`, which awaits the result of the method, and dotted names, which reach into namespaces."""
    retry = Retry(3, backoff=[0.02], on_retry=show_retry)
    assistant = retry.aproxy(Assistant(), "chat.completions.create")
    print("chat.completions.create")
    print(f"    {await assistant.chat.completions.create('hello')} from the {assistant.model} model")


if __name__ == "__main__":
    with FlakyServer() as server:
        blocking(server.url)
        asyncio.run(asynchronous(server.url))
    asyncio.run(in_namespaces())
    try:
        pipeline.proxy(requests.Session(), "gte")
    except AttributeError as error:
        print(f"a name that does not exist: {error}")
