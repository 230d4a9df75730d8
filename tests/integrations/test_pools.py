"""Places of httpcore's pool that a cancelled task has left, at the exact instant at which the pool forgets them."""

from __future__ import annotations

import anyio
import httpcore
import pytest

from resilience.integrations.httpx.pools import reclaim_places


class Cut(Exception):
    """Stands for a cancellation at the first step of the first request, when the connection has been made."""


class Transport:
    """As an `httpx.AsyncHTTPTransport` has it."""

    def __init__(self, pool: httpcore.AsyncConnectionPool) -> None:
        self._pool = pool


async def left_by_a_cut(
    pool: httpcore.AsyncConnectionPool, monkeypatch: pytest.MonkeyPatch, part: type = httpcore.AsyncHTTP11Connection
) -> None:
    """Have a request end where this part of its connection begins: by default, between connecting and sending."""

    async def cut(self: object, request: object) -> None:
        raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(part, "handle_async_request", cut)
        with pytest.raises(Cut):
            await pool.request("GET", "http://example.org/")


async def test_the_place_of_a_connection_that_was_made_and_not_used_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]
    network = httpcore.AsyncMockBackend(answer)
    async with httpcore.AsyncConnectionPool(max_connections=1, network_backend=network) as pool:
        await left_by_a_cut(pool, monkeypatch)
        assert len(pool.connections) == 1
        await reclaim_places(Transport(pool))
        assert pool.connections == []
        assert (await pool.request("GET", "http://example.org/")).status == 200


async def test_the_place_of_a_connection_that_was_not_made_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with httpcore.AsyncConnectionPool(max_connections=1) as pool:
        await left_by_a_cut(pool, monkeypatch, type(pool.create_connection(httpcore.Origin(b"http", b"a", 80))))
        await reclaim_places(Transport(pool))
        assert pool.connections == []


async def reclaims_nothing() -> None:
    await reclaim_places(object())  # such a transport has no pool
    async with httpcore.AsyncConnectionPool() as pool:
        await reclaim_places(Transport(pool))


def test_a_transport_without_places_is_left_as_it_is() -> None:
    anyio.run(reclaims_nothing)
