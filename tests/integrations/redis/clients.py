"""The clients under test, blocking and asynchronous, and functions of the tests that use them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import redis
import redis.asyncio

from resilience import CircuitOpen, Policy
from resilience.callables import maybe_await as done
from resilience.integrations.redis import protect
from resilience.runtimes.driving import drive
from tests.integrations.redis.server import RedisServer
from tests.integrations.servers import PATIENCE

#: Options with a short timeout for an answer, but a long one for a connection.
QUICK: dict[str, Any] = {"socket_timeout": 0.1, "socket_connect_timeout": PATIENCE}

#: Options with which a connection begins without a handshake.
NO_HANDSHAKE: dict[str, Any] = {"protocol": 2, "driver_info": None}
if redis.VERSION < (8,):
    NO_HANDSHAKE = {"protocol": 2, "lib_name": None, "lib_version": None}


class Side:
    """The blocking or the asyncio client. A test is written once, and awaits `done(result)` of either."""

    def __init__(self, name: str, server: RedisServer) -> None:
        self.name = name
        self.blocking = name == "threads"
        self._port = server.port
        self._clients: list[Any] = []

    def client(self, policy: Policy[Any] | None = None, *, repeat_writes: Any = False, **options: Any) -> Any:
        """Make a client, protected if there is a policy."""
        kind: Any = redis if self.blocking else redis.asyncio
        options = {"port": self._port, "socket_timeout": PATIENCE, **options}
        if "connection_class" in options:
            client = kind.Redis.from_pool(kind.ConnectionPool(**options))
        else:
            client = kind.Redis(**options)
        self._clients.append(client)
        return client if policy is None else protect(client, policy, repeat_writes=repeat_writes)

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            try:
                await main()
            finally:
                for client in self._clients:
                    await done(client.close() if self.blocking else client.aclose())

        if self.blocking:
            drive(whole())
        else:
            anyio.run(whole)


async def warm(client: Any) -> None:
    """Let the client connect, even if its timeouts are short and the machine is busy."""
    patience = time.monotonic() + PATIENCE
    while True:
        try:
            await done(client.ping())
            return
        except (redis.RedisError, TimeoutError, CircuitOpen):
            assert time.monotonic() < patience
            time.sleep(0.01)


async def failure(kind: type[Exception], call: Callable[[], Any]) -> Any:
    with pytest.raises(kind) as caught:
        await done(call())
    return caught.value


class Count(Policy):
    """A policy that counts the calls that reach it, and those that fail."""

    def __init__(self) -> None:
        self.calls = 0
        self.failures: list[str] = []

    async def around(self, call, ctx):
        self.calls += 1
        try:
            return await call(ctx)
        except Exception as error:
            self.failures.append(type(error).__name__)
            raise


def in_use(client: Any) -> int:
    return len(client.connection_pool._in_use_connections)
