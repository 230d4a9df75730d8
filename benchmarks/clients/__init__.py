"""Clients of servers: what a user really installs, one module per client.

A module names its clients: how a call is made without us, with our integration, and with what else there is for that
client. The families put other libraries around the first of these by themselves.

    @entry("httpx, asyncio", ASYNCIO)
    @asynccontextmanager
    async def tasks(servers):
        ...
        yield {ALONE: get, OURS: get_protected, "httpx-retries": get_retried}

Each of the functions makes one call, and returns the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeAlias

from benchmarks.clients.servers import Servers
from resilience import Policy

#: The contestants that every client has, besides ours.
ALONE = "the client alone"
AROUND = "the same policies around the call"

Functions: TypeAlias = Mapping[str, Callable[[], Any]]

#: Sets a client up, and gives its contestants.
Setting: TypeAlias = Callable[[Servers], AbstractAsyncContextManager[Functions]]

_PACKAGES = ("httpx", "httpx_retries", "requests", "aiohttp", "aiohttp_retry", "redis", "grpc", "sqlalchemy")
_MODULES = ("httpx", "requests", "aiohttp", "redis", "grpc", "sqlalchemy", "asgi")


@dataclass(frozen=True)
class Client:
    """A client in a world.

    :param policy: makes what ours runs under, for the contestant that has it around the call instead.
    """

    name: str
    world: str
    policy: Callable[[], Policy[Any]] | None
    setting: Setting


_clients: list[Client] = []


def entry(name: str, world: str, policy: Callable[[], Policy[Any]] | None = None) -> Callable[[Setting], Setting]:
    """Enter a client."""

    def register(setting: Setting) -> Setting:
        _clients.append(Client(name, world, policy, setting))
        return setting

    return register


def load() -> list[Client]:
    """Return the clients that are installed."""
    for module in _MODULES:
        with suppress(ModuleNotFoundError):
            import_module(f"benchmarks.clients.{module}")
    return list(_clients)


def missing() -> list[str]:
    """Return the names of the packages that are not, and without which a client, or a contestant, is left out."""
    return [it for it in _PACKAGES if find_spec(it) is None]
