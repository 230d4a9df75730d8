"""requests, with urllib3's own retries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager

import requests
from requests.adapters import HTTPAdapter
from urllib3 import Retry

from benchmarks.clients import ALONE, Functions, entry
from benchmarks.clients.httpx import standard_policy
from benchmarks.clients.servers import Servers
from benchmarks.functions import ATTEMPTS
from benchmarks.libraries import OURS
from benchmarks.timing import SYNC
from resilience.integrations.http import standard
from resilience.integrations.requests import ResilienceAdapter


def _get(session: requests.Session, adapter: HTTPAdapter, url: str) -> Callable[[], int]:
    session.mount("http://", adapter)
    session.trust_env = False  # looking for proxies takes as long as the rest of a call
    return lambda: int(session.get(url).content)


@entry("requests", SYNC, standard_policy)
@asynccontextmanager
async def blocking(servers: Servers) -> AsyncIterator[Functions]:
    adapters = {
        ALONE: HTTPAdapter(),
        OURS: ResilienceAdapter(standard()),
        "urllib3's Retry": HTTPAdapter(max_retries=Retry(ATTEMPTS - 1, backoff_factor=0.1)),
    }
    with ExitStack() as sessions:
        yield {
            name: _get(sessions.enter_context(requests.Session()), adapter, servers.http)
            for name, adapter in adapters.items()
        }
