"""aiohttp, and aiohttp-retry if it is installed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from typing import Any

import aiohttp

from benchmarks.clients import ALONE, Functions, entry
from benchmarks.clients.httpx import standard_policy
from benchmarks.clients.servers import Servers
from benchmarks.functions import ATTEMPTS
from benchmarks.libraries import OURS
from benchmarks.timing import ASYNCIO
from resilience.integrations.aiohttp import resilience_middleware
from resilience.integrations.http import standard


def _get(session: Any, url: str) -> Callable[[], Any]:
    async def get() -> int:
        async with session.get(url) as response:
            return int(await response.read())

    return get


@entry("aiohttp", ASYNCIO, standard_policy)
@asynccontextmanager
async def tasks(servers: Servers) -> AsyncIterator[Functions]:
    protected = aiohttp.ClientSession(middlewares=[resilience_middleware(standard())])
    clients: dict[str, Any] = {ALONE: aiohttp.ClientSession(), OURS: protected}
    if find_spec("aiohttp_retry"):
        from aiohttp_retry import ExponentialRetry, RetryClient

        clients["aiohttp-retry"] = RetryClient(retry_options=ExponentialRetry(ATTEMPTS))
    async with AsyncExitStack() as sessions:
        yield {name: _get(await sessions.enter_async_context(client), servers.http) for name, client in clients.items()}
