"""The handlers, each a Starlette application: `python -m benchmarks.handler.apps NAME PORT BACKEND`."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any, TypeAlias

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from benchmarks.functions import ATTEMPTS, SECONDS
from benchmarks.libraries import ours
from resilience import Timeout
from resilience.integrations.asgi import DeadlineMiddleware
from resilience.integrations.http import standard
from resilience.integrations.httpx import AsyncResilienceTransport

PLAIN = "without policies"

#: A client, and the decorator of its `get`.
Parts: TypeAlias = "tuple[httpx.AsyncClient, Callable[[Any], Any]]"


def _nothing(function: Any) -> Any:
    return function


def _plain() -> Parts:
    return httpx.AsyncClient(), _nothing


def _decorator() -> Parts:
    return httpx.AsyncClient(), ours.new_four(Timeout(SECONDS))


def _nopanic() -> Parts:
    from nopanic import timeout

    from benchmarks.libraries import nopanic

    return httpx.AsyncClient(), nopanic.new_four(timeout(SECONDS))


def _httpx_retries() -> Parts:
    from httpx_retries import Retry, RetryTransport

    return httpx.AsyncClient(transport=RetryTransport(retry=Retry(ATTEMPTS - 1))), _nothing


def _transport() -> Parts:
    return httpx.AsyncClient(transport=AsyncResilienceTransport(standard())), _nothing


def _prometheus() -> Parts:
    from prometheus_client import CollectorRegistry

    from resilience.integrations.prometheus import instrument

    instrument(registry=CollectorRegistry())
    return _transport()


def _opentelemetry() -> Parts:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from resilience.integrations.opentelemetry import instrument

    instrument(meter_provider=MeterProvider([InMemoryMetricReader()]))
    return _transport()


#: The handlers by name, and whether they are under the deadline middleware.
HANDLERS: dict[str, tuple[Callable[[], Parts], bool]] = {
    PLAIN: (_plain, False),
    "five policies as a decorator": (_decorator, False),
    **({"the same, of nopanic": (_nopanic, False)} if find_spec("nopanic") else {}),
    **({"httpx-retries": (_httpx_retries, False)} if find_spec("httpx_retries") else {}),
    "standard() as transport": (_transport, False),
    "and the deadline middleware": (_transport, True),
    "and Prometheus": (_prometheus, True),
    "or OpenTelemetry's metrics": (_opentelemetry, True),
}


def application(name: str, backend: str) -> Any:
    """Return the application with the handler of this name."""
    make, has_deadline = HANDLERS[name]
    client, protect = make()
    get = protect(client.get)

    async def handler(request: Request) -> PlainTextResponse:
        response = await get(backend)
        return PlainTextResponse(response.content)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    app = Starlette(routes=[Route("/", handler)], lifespan=lifespan)
    return DeadlineMiddleware(app, cap=30.0) if has_deadline else app


if __name__ == "__main__":
    name, port, backend = sys.argv[1:]
    uvicorn.run(application(name, backend), port=int(port), log_level="error", access_log=False)
