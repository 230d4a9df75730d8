"""gRPC, with the retries of its own core."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from benchmarks.clients import ALONE, Functions, entry
from benchmarks.clients.redis import atask_policy, policy
from benchmarks.clients.servers import Servers
from benchmarks.clients.serving import METHOD
from benchmarks.functions import ATTEMPTS
from benchmarks.libraries import OURS
from benchmarks.timing import ASYNCIO, SYNC
from resilience.integrations.grpc import PolicyInterceptor, aio_interceptors

_RETRIES = {
    "maxAttempts": ATTEMPTS,
    "initialBackoff": "0.1s",
    "maxBackoff": "10s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
_SERVICE = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": _RETRIES}]})

#: Each contestant has its own connection.
_ALONE = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
_RETRYING = [("grpc.use_local_subchannel_pool", 1), ("grpc.service_config", _SERVICE)]


#: Shows the cost of grpc's own code for interceptors.
IDLE = "an interceptor that does nothing"


class _Idle(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(details, request)


class _AioIdle(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(details, request)


def _call(channel: Any) -> Callable[[], int]:
    method = channel.unary_unary(METHOD)
    return lambda: int(method(b""))


def _acall(channel: Any) -> Callable[[], Any]:
    method = channel.unary_unary(METHOD)

    async def call() -> int:
        return int(await method(b""))

    return call


@entry("gRPC, blocking", SYNC, policy)
@asynccontextmanager
async def blocking(servers: Servers) -> AsyncIterator[Functions]:
    with (
        grpc.insecure_channel(servers.grpc, _ALONE) as alone,
        grpc.insecure_channel(servers.grpc, _ALONE) as channel,
        grpc.insecure_channel(servers.grpc, _RETRYING) as retrying,
    ):
        yield {
            ALONE: _call(alone),
            OURS: _call(grpc.intercept_channel(channel, PolicyInterceptor(policy()))),
            IDLE: _call(grpc.intercept_channel(channel, _Idle())),
            "gRPC's retries": _call(retrying),
        }


@entry("gRPC, asyncio", ASYNCIO, atask_policy)
@asynccontextmanager
async def tasks(servers: Servers) -> AsyncIterator[Functions]:
    interceptors = aio_interceptors(atask_policy())
    async with (
        grpc.aio.insecure_channel(servers.grpc, _ALONE) as alone,
        grpc.aio.insecure_channel(servers.grpc, _ALONE, interceptors=interceptors) as protected,
        grpc.aio.insecure_channel(servers.grpc, _ALONE, interceptors=[_AioIdle()]) as idle,
        grpc.aio.insecure_channel(servers.grpc, _RETRYING) as retrying,
    ):
        yield {
            ALONE: _acall(alone),
            OURS: _acall(protected),
            IDLE: _acall(idle),
            "gRPC's retries": _acall(retrying),
        }
