"""redis-py, with its own retries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import redis
import redis.asyncio
from redis.backoff import NoBackoff

from benchmarks.clients import ALONE, Functions, entry
from benchmarks.clients.servers import Servers
from benchmarks.functions import ANSWER, ATTEMPTS, FAILURES, SECONDS
from benchmarks.libraries import OURS
from benchmarks.timing import ASYNCIO, SYNC
from resilience import CircuitBreaker, Policy, Retry, Timeout
from resilience.integrations.redis import protect


def policy() -> Policy[Any]:
    return Policy.wrap(Timeout(SECONDS, cooperative=True), Retry(ATTEMPTS), CircuitBreaker(FAILURES))


def atask_policy() -> Policy[Any]:
    return Policy.wrap(Timeout(SECONDS), Retry(ATTEMPTS), CircuitBreaker(FAILURES))


def _get(client: redis.Redis) -> Callable[[], int]:
    return lambda: int(client.get("answer"))  # type: ignore[arg-type]


def _aget(client: Any) -> Callable[[], Any]:
    async def get() -> int:
        return int(await client.get("answer"))

    return get


@entry("redis, blocking", SYNC, policy)
@asynccontextmanager
async def blocking(servers: Servers) -> AsyncIterator[Functions]:
    if servers.redis is None:
        yield {}
        return
    with (
        redis.Redis(port=servers.redis, retry=redis.retry.Retry(NoBackoff(), 0)) as alone,
        redis.Redis(port=servers.redis) as retrying,
        protect(redis.Redis(port=servers.redis), policy()) as protected,
    ):
        alone.set("answer", ANSWER)
        yield {ALONE: _get(alone), OURS: _get(protected), "redis-py's Retry": _get(retrying)}


@entry("redis, asyncio", ASYNCIO, atask_policy)
@asynccontextmanager
async def tasks(servers: Servers) -> AsyncIterator[Functions]:
    if servers.redis is None:
        yield {}
        return
    async with (
        redis.asyncio.Redis(port=servers.redis, retry=redis.asyncio.retry.Retry(NoBackoff(), 0)) as alone,
        redis.asyncio.Redis(port=servers.redis) as retrying,
        protect(redis.asyncio.Redis(port=servers.redis), atask_policy()) as protected,
    ):
        await alone.set("answer", ANSWER)
        yield {ALONE: _aget(alone), OURS: _aget(protected), "redis-py's Retry": _aget(retrying)}
