"""An ASGI application that answers at once, under our middlewares, without a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.clients import ALONE, Functions, entry
from benchmarks.clients.servers import Servers
from benchmarks.libraries import OURS
from benchmarks.timing import ASYNCIO
from resilience.integrations.asgi import DeadlineMiddleware, ResilienceMiddleware

BOTH = f"{OURS}, both middlewares"

_HEADERS = [(b"host", b"example.org"), (b"accept", b"*/*"), (b"accept-encoding", b"gzip"), (b"user-agent", b"x")]


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"42"})


def _asked(app: Any) -> Callable[[], Any]:
    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def ask() -> int:
        messages: list[Any] = []

        async def send(message: Any) -> None:
            messages.append(message)

        await app({"type": "http", "method": "GET", "path": "/", "headers": _HEADERS}, receive, send)
        return int(messages[-1]["body"])

    return ask


@entry("ASGI application", ASYNCIO)
@asynccontextmanager
async def tasks(servers: Servers) -> AsyncIterator[Functions]:
    limited = DeadlineMiddleware(_app, cap=30.0)
    yield {
        ALONE: _asked(_app),
        OURS: _asked(limited),
        BOTH: _asked(ResilienceMiddleware(limited)),
    }
