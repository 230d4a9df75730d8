"""The shop: the first service. It calls the depot through a pipeline.

Look at the first lines of the constructor: your service needs nothing more. The client runs every request through the
pipeline, and sends the time left to the depot. The middleware opens the deadline that the shop's own caller has sent;
everything that the shop does for that request inherits it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx2
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from resilience import Bulkhead, CircuitBreaker, Fallback, Policy, Retry, Timeout
from resilience.backoff import Exponential
from resilience.integrations.asgi import DeadlineMiddleware
from resilience.integrations.dashboard import Dashboard
from resilience.integrations.httpx import AsyncResilienceTransport
from resilience.integrations.prometheus import instrument

YESTERDAY = {"left": "a few, as of yesterday"}


class Shop:
    """An ASGI application that answers `/offer/{item}`, and shows its state at `/metrics` and `/resilience/`."""

    ATTEMPT = 0.4  # seconds for one attempt
    AT_ONCE = 6  # concurrent calls of the depot

    def __init__(
        self, depot: str, *, propagate: bool = True, at_once: int = AT_ONCE, opens_after: int = 5, open_for: float = 1.0
    ) -> None:
        self.breaker = CircuitBreaker(opens_after, open_for=open_for, name="depot")
        self.pipeline = Policy.wrap(
            Timeout(2.0, name="in all"),
            Retry(3, backoff=Exponential(0.05)),
            Bulkhead(at_once, queue=50, name="depot"),
            self.breaker,
            Timeout(self.ATTEMPT, name="attempt"),
            name="stock",
        )
        hosts = [urlsplit(depot).netloc] if propagate else []
        transport = AsyncResilienceTransport(self.pipeline, propagate_to=hosts)
        self._client = httpx2.AsyncClient(base_url=depot, transport=transport)
        self._or_yesterday = Fallback(YESTERDAY, name="yesterday")

        self._registry = CollectorRegistry()
        instrument(self.pipeline, registry=self._registry)
        self.dashboard = Dashboard(self.pipeline, title="shop", interval=0.5)
        self.app = DeadlineMiddleware(
            Starlette(
                routes=[
                    Route("/offer/{item}", self._offer),
                    Route("/metrics", self._metrics),
                    Mount("/resilience", self.dashboard),
                ],
                lifespan=self._lifespan,
            )
        )

    async def _offer(self, request: Request) -> Response:
        item = request.path_params["item"]
        stock = await self._or_yesterday.acall(self._ask_depot, item)
        return JSONResponse({"item": item, "left": stock["left"], "fresh": stock is not YESTERDAY})

    async def _ask_depot(self, item: str) -> dict[str, Any]:
        response = await self._client.get(f"/stock/{item}")
        response.raise_for_status()
        stock: dict[str, Any] = response.json()
        return stock

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with self._client:
            yield
