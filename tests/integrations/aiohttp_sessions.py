"""Shared by the tests of aiohttp: a policy, a session, and functions that make requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from resilience import Policy, Retry
from resilience.integrations.aiohttp import resilience_middleware
from resilience.integrations.http import Rules
from tests.integrations.servers import PATIENCE

QUICK = Retry(3, backoff=[0])


@contextlib.asynccontextmanager
async def session(
    policy: Policy[Any] = QUICK,
    *inside: aiohttp.ClientMiddlewareType,
    rules: Rules | None = None,
    read_body: bool = False,
    **options: Any,
) -> AsyncIterator[Any]:
    """Open a session with at most one connection, so that a leak makes the next request wait; nothing may hang.

    :param inside: middlewares between ours and the connection.
    """
    middleware = resilience_middleware(policy, rules=rules or Rules(), read_body=read_body)
    options.setdefault("connector", aiohttp.TCPConnector(limit=1))
    async with asyncio.timeout(PATIENCE), aiohttp.ClientSession(middlewares=(middleware, *inside), **options) as client:
        yield client


async def outcome_of(request: Any) -> Any:
    """Return the response, after reading it, or the exception as a value."""
    try:
        async with request as response:
            await response.read()
            return response
    except Exception as error:
        return error


async def pieces() -> AsyncIterator[bytes]:
    yield b"on"
    yield b"ce"
