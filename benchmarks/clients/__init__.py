"""Clients of servers, as users install them, one module per client.

A module registers its clients. For each, it yields functions that make a call without us, with our integration, and
with other packages for that client. The family `clients` adds other libraries around the first of these functions.

    @entry("httpx, asyncio", ASYNCIO)
    @asynccontextmanager
    async def tasks(servers):
        ...
        yield {ALONE: get, OURS: get_protected, "httpx-retries": get_retried}

Each function makes one call, and returns the answer.
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

#: Sets up a client, and yields its contestants.
Setting: TypeAlias = Callable[[Servers], AbstractAsyncContextManager[Functions]]

_PACKAGES = ("httpx", "httpx_retries", "requests", "aiohttp", "aiohttp_retry", "redis", "grpc", "sqlalchemy")
_MODULES = ("httpx", "requests", "aiohttp", "redis", "grpc", "sqlalchemy", "asgi")


@dataclass(frozen=True)
class Client:
    """A client in a world.

    :param policy: makes the policies of our integration, for the contestant that has them around the call instead.
    """

    name: str
    world: str
    policy: Callable[[], Policy[Any]] | None
    setting: Setting


_clients: list[Client] = []


def entry(name: str, world: str, policy: Callable[[], Policy[Any]] | None = None) -> Callable[[Setting], Setting]:
    """Register a client."""

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
    """Return the names of the packages that are not installed, whose clients or contestants are left out."""
    return [it for it in _PACKAGES if find_spec(it) is None]
