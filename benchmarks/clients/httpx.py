"""httpx, and httpx-retries if it is installed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from importlib.util import find_spec
from typing import Any

import httpx

from benchmarks.clients import ALONE, Functions, entry
from benchmarks.clients.servers import Servers
from benchmarks.functions import ATTEMPTS
from benchmarks.libraries import OURS
from benchmarks.timing import ASYNCIO, SYNC
from resilience import Policy
from resilience.integrations.http import standard
from resilience.integrations.httpx import AsyncResilienceTransport, ResilienceTransport

HAS_RETRIES = find_spec("httpx_retries") is not None


def standard_policy() -> Policy[Any]:
    """Return the policies that `standard()` makes for a host."""
    return standard().for_host("http://localhost/")


def _retries() -> Any:
    from httpx_retries import Retry, RetryTransport

    return RetryTransport(retry=Retry(ATTEMPTS - 1))


def _get(client: httpx.Client, url: str) -> Callable[[], int]:
    return lambda: int(client.get(url).content)


def _aget(client: httpx.AsyncClient, url: str) -> Callable[[], Any]:
    async def get() -> int:
        return int((await client.get(url)).content)

    return get


@entry("httpx, blocking", SYNC, standard_policy)
@asynccontextmanager
async def blocking(servers: Servers) -> AsyncIterator[Functions]:
    transports: dict[str, Any] = {ALONE: httpx.HTTPTransport(), OURS: ResilienceTransport(standard())}
    if HAS_RETRIES:
        transports["httpx-retries"] = _retries()
    with ExitStack() as clients:
        yield {
            name: _get(clients.enter_context(httpx.Client(transport=transport)), servers.http)
            for name, transport in transports.items()
        }


@entry("httpx, asyncio", ASYNCIO, standard_policy)
@asynccontextmanager
async def tasks(servers: Servers) -> AsyncIterator[Functions]:
    transports: dict[str, Any] = {ALONE: httpx.AsyncHTTPTransport(), OURS: AsyncResilienceTransport(standard())}
    if HAS_RETRIES:
        transports["httpx-retries"] = _retries()
    async with AsyncExitStack() as clients:
        yield {
            name: _aget(await clients.enter_async_context(httpx.AsyncClient(transport=transport)), servers.http)
            for name, transport in transports.items()
        }
