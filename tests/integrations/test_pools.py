"""Slots of httpcore's pool that a cancelled task has left, at each instant at which the pool loses them."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import httpcore
import httpx
import pytest

from resilience.integrations.httpx.pools import close_completely, reclaim_slots
from resilience.testing import ascript
from tests.conftest import World

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody"


class Cut(Exception):
    """A cancellation at some step of the first request."""


@pytest.mark.parametrize(
    ("part", "method", "answer"),
    [
        (httpcore.AsyncHTTP11Connection, "handle_async_request", OK),
        (httpcore.AsyncHTTPConnection, "handle_async_request", OK),
        (httpcore.AsyncHTTP11Connection, "_response_closed", b"no HTTP"),
    ],
    ids=["unused", "not established", "not closed"],
)
async def test_a_lost_slot_is_freed(monkeypatch: pytest.MonkeyPatch, part: type, method: str, answer: bytes) -> None:
    """Of one that was cut off before its request, before it was made, or a second time while httpcore cleans up."""
    network = httpcore.AsyncMockBackend([answer])
    async with httpcore.AsyncConnectionPool(max_connections=1, network_backend=network) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(part, method, ascript(Cut(), ...))
            with pytest.raises(Cut):
                await pool.request("GET", "http://example.org/")
        assert len(pool.connections) == 1
        await reclaim_slots(SimpleNamespace(_pool=pool))
        assert pool.connections == []
        if answer is OK:
            assert (await pool.request("GET", "http://example.org/")).status == 200


async def test_a_transport_without_a_pool_or_without_lost_slots_is_unchanged() -> None:
    """Also one whose pool has other attributes."""
    await reclaim_slots(object())
    await reclaim_slots(SimpleNamespace(_pool=object()))
    async with httpcore.AsyncConnectionPool() as pool:
        await reclaim_slots(SimpleNamespace(_pool=pool))


async def answered() -> tuple[Any, Any]:
    """Return a pool whose only connection waits for the close of a response, and the stream of that response."""
    transport: Any = httpx.AsyncHTTPTransport()
    transport._pool = httpcore.AsyncConnectionPool(network_backend=httpcore.AsyncMockBackend([OK]))
    response = await transport.handle_async_request(httpx.Request("GET", "http://example.org/"))
    return transport._pool, response.stream


def slots_in_use(pool: Any) -> int:
    return sum(not it.is_idle() and not it.is_closed() for it in pool.connections) + len(pool._requests)


@pytest.mark.parametrize("steps", range(5))
async def test_a_response_whose_close_is_cancelled_is_closed(in_asyncio: World, steps: int) -> None:
    """At any step: httpcore's own shield does not stop a cancellation of asyncio."""
    pool, stream = await answered()
    assert slots_in_use(pool) == 2
    task = asyncio.create_task(awaits(close_completely(stream.aclose(), stream)))
    for _ in range(steps):
        await asyncio.sleep(0)
    was_cancelled = steps and task.cancel()
    await asyncio.wait([task])
    assert slots_in_use(pool) == 0
    assert task.cancelled() == bool(was_cancelled)


async def test_a_close_that_waits_for_a_lock_is_cancelled_afterwards(in_asyncio: World) -> None:
    """A cancellation of asyncio reaches the future that it awaits, and not the coroutine."""
    pool, stream = await answered()
    [connection] = pool.connections
    lock = connection._connection._state_lock
    async with lock:
        task = asyncio.create_task(awaits(close_completely(stream.aclose(), stream)))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        assert not task.done()
    await asyncio.wait([task])
    assert (task.cancelled(), slots_in_use(pool)) == (True, 0)


async def test_the_error_of_a_close_is_raised(in_asyncio: World) -> None:
    with pytest.raises(Cut):
        await close_completely(ascript(Cut())(), SimpleNamespace(_httpcore_stream=None))


async def test_a_close_that_is_not_finished_closes_its_coroutine(in_asyncio: World) -> None:
    _, stream = await answered()
    closing: Any = stream.aclose()
    outer = awaits(close_completely(closing, stream))
    outer.send(None)
    outer.close()
    assert inspect.getcoroutinestate(closing) == inspect.CORO_CLOSED


async def awaits(awaitable: Any) -> None:
    await awaitable
