"""How a deadline ends a request of aiohttp."""

from __future__ import annotations

import asyncio
import gc
import io
import threading
import time
import weakref
from typing import Any

import aiohttp
import pytest

from resilience import Context, DeadlineExceeded, Timeout, current_context, deadline
from resilience.integrations.http import NotRepeatable
from resilience.integrations.http.exchange import Exchange
from tests.integrations.aiohttp_sessions import QUICK, outcome_of, session
from tests.integrations.servers import PATIENCE, Answer, FlakyServer, notes_of


@pytest.mark.parametrize("timeout", [None, aiohttp.ClientTimeout(total=0), aiohttp.ClientTimeout(60)])
async def test_a_deadline_ends_the_request(server: FlakyServer, timeout: Any) -> None:
    """Also under policies that do not enforce a deadline, and with any timeout of aiohttp."""
    async with session(timeout=timeout or aiohttp.ClientTimeout()) as client:
        began = time.monotonic()
        with deadline(0.1):
            outcome = await outcome_of(client.get(server.script("/", Answer(hold=threading.Event()), 200)))
        assert type(outcome) is DeadlineExceeded
        assert 0.1 <= time.monotonic() - began < PATIENCE / 2
        assert (await outcome_of(client.get(server.script("/", 200)))).status == 200


LIMIT = PATIENCE / 2


async def let_it_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `LIMIT` seconds pass at once for the timers of the event loop."""
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + LIMIT)
    await asyncio.sleep(0.001)


async def test_a_body_that_is_read_after_its_deadline_raises(
    server: FlakyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is that of the policy's deadline; the connection is free before that."""
    url = server.script("/", Answer(body=[b"first", b"rest"], drip=threading.Event()))
    async with session() as client:
        with deadline(LIMIT):
            response = await client.get(url)
        await let_it_pass(monkeypatch)
        assert (await outcome_of(client.get(server.script("/", 200)))).status == 200  # its connection is free
        with pytest.raises(DeadlineExceeded):
            await response.read()


async def test_a_body_that_was_read_stays_available_after_the_deadline(
    server: FlakyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is reused."""
    rest = threading.Event()
    async with session(Timeout(LIMIT)) as client:
        response = await client.get(server.script("/", Answer(body=[b"a", b"b"], drip=rest, chunked=True)))
        rest.set()
        assert await response.read() == b"ab"
        await let_it_pass(monkeypatch)
        assert await response.read() == b"ab"
        assert await (await client.get(server.script("/", 200))).read() == b"ok"
    assert server.connections == 1


async def test_a_closed_response_is_freed(server: FlakyServer) -> None:
    """It is kept neither until the deadline of its body, nor by the connection, which keeps the exchange."""
    contexts: list[Context] = []
    sent: list[weakref.ref[Any]] = []

    async def record_context(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        contexts.append(current_context())
        sent.append(weakref.ref(request))
        response = await handler(request)
        sent.append(weakref.ref(response))
        return response

    url = server.script("/", Answer(body=[b"first", b"rest"], drip=threading.Event()))
    async with session(Timeout(PATIENCE), record_context) as client:
        upload = io.BufferedReader(io.BytesIO(b"content"))  # type: ignore[arg-type]
        sent.append(weakref.ref(upload))
        async with client.put(url, data=upload) as response:
            assert sent[-1]() is response
        del response, upload
        while any(it() is not None for it in sent):  # aiohttp closes a file in a thread
            await asyncio.sleep(0.01)
            gc.collect()
    [ctx] = contexts
    assert ctx.called is not None
    assert isinstance(ctx.called.function, Exchange)


async def test_an_exchange_that_has_ended_sends_nothing_more(server: FlakyServer) -> None:
    """It still exists, in each context of its execution."""
    contexts: list[Context] = []

    async def record_context(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        contexts.append(current_context())
        return await handler(request)

    async with session(QUICK, record_context) as client:
        async with client.get(server.script("/", 200)):
            called = contexts[0].called
        assert called is not None
        with pytest.raises(NotRepeatable, match="its caller has left"):
            await called.function(Context())
    assert len(server.requests) == 1


async def test_a_body_that_broke_off_raises_that_error_after_its_deadline(
    server: FlakyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.script("/", Answer(body=[b"first", b"rest"], fault="cut"))
    async with session(Timeout(LIMIT)) as client:
        response = await client.get(url)
        while response.content.exception() is None:
            await asyncio.sleep(0.001)
        await let_it_pass(monkeypatch)
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_aiohttps_timeouts_of_one_wait_are_retried_and_the_total_is_not(server: FlakyServer) -> None:
    async with session() as client:
        url = server.script("/", Answer(hold=threading.Event()))
        outcome = await outcome_of(client.get(url, timeout=aiohttp.ClientTimeout(sock_read=0.1)))
        assert isinstance(outcome, aiohttp.SocketTimeoutError)
        assert "3 attempts" in notes_of(outcome)
        outcome = await outcome_of(client.get(url, timeout=aiohttp.ClientTimeout(0.5)))
        assert type(outcome) is TimeoutError
        assert "1 attempt in" in notes_of(outcome)
        assert "the request is not sent again: the total timeout of its session is over" in notes_of(outcome)
