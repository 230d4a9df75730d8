"""How the time that is left ends a request of aiohttp."""

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
from resilience.clock import clock as process_clock
from resilience.integrations.http import NotRepeatable
from resilience.integrations.http.exchange import Exchange
from tests.integrations.aiohttp_sessions import QUICK, attempt, note, session
from tests.integrations.servers import PATIENCE, Answer, FlakyServer


@pytest.mark.parametrize("timeout", [None, aiohttp.ClientTimeout(total=0), aiohttp.ClientTimeout(60)])
async def test_a_deadline_ends_the_request(server: FlakyServer, timeout: Any) -> None:
    """A deadline that by itself cuts nothing off does so here, whatever timeout aiohttp has."""
    async with session(timeout=timeout or aiohttp.ClientTimeout()) as one:
        began = time.monotonic()
        with deadline(0.1):
            outcome = await attempt(one.get(server.script("/", Answer(hold=threading.Event()), 200)))
        assert type(outcome) is DeadlineExceeded
        assert 0.1 <= time.monotonic() - began < PATIENCE / 2
        assert (await attempt(one.get(server.script("/", 200)))).status == 200


@pytest.fixture
def time_flies(monkeypatch: pytest.MonkeyPatch) -> aiohttp.ClientMiddlewareType:
    """A middleware in which the headers of the response take `PATIENCE` seconds, but for a tenth of one."""

    async def middleware(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        response = await handler(request)
        now = process_clock.now
        monkeypatch.setattr(process_clock, "now", lambda: now() + PATIENCE - 0.1)
        return response

    return middleware


async def test_a_body_that_nobody_reads_is_late_when_somebody_does(server: FlakyServer, time_flies: Any) -> None:
    """The time goes on whether or not somebody waits, and the error says whose it was."""
    url = server.script("/", Answer(body=[b"first", b"rest"], drip=threading.Event()))
    async with session(QUICK, time_flies) as one:
        with deadline(PATIENCE):
            response = await one.get(url)
        await asyncio.sleep(0.2)
        assert (await attempt(one.get(server.script("/", 200)))).status == 200  # its connection is free
        with pytest.raises(DeadlineExceeded):
            await response.read()


async def test_a_body_that_was_read_is_not_late(server: FlakyServer, time_flies: Any) -> None:
    """The end of its time means nothing to it, nor to the connection that it came over."""
    rest = threading.Event()
    async with session(Timeout(PATIENCE), time_flies) as one:
        response = await one.get(server.script("/", Answer(body=[b"a", b"b"], drip=rest, chunked=True)))
        rest.set()
        assert await response.read() == b"ab"
        await asyncio.sleep(0.2)
        assert await response.read() == b"ab"
        assert await (await one.get(server.script("/", 200))).read() == b"ok"
    assert server.connections == 1


async def test_a_response_that_was_closed_is_let_go(server: FlakyServer) -> None:
    """Neither the rest of the time that its body had keeps it, nor the connection, which keeps the exchange."""
    contexts: list[Context] = []
    sent: list[weakref.ref[Any]] = []

    async def keep(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        contexts.append(current_context())
        sent.append(weakref.ref(request))
        response = await handler(request)
        sent.append(weakref.ref(response))
        return response

    url = server.script("/", Answer(body=[b"first", b"rest"], drip=threading.Event()))
    async with session(Timeout(PATIENCE), keep) as one:
        upload = io.BufferedReader(io.BytesIO(b"much"))  # type: ignore[arg-type]
        sent.append(weakref.ref(upload))
        async with one.put(url, data=upload) as response:
            assert sent[-1]() is response
        del response, upload
        while any(it() is not None for it in sent):  # aiohttp closes a file in a thread
            await asyncio.sleep(0.01)
            gc.collect()
    [ctx] = contexts
    assert ctx.called is not None
    assert isinstance(ctx.called.function, Exchange)


async def test_an_exchange_that_is_over_sends_no_more(server: FlakyServer) -> None:
    """It is still there, in each context of its execution, but it has nothing left to send."""
    contexts: list[Context] = []

    async def keep(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        contexts.append(current_context())
        return await handler(request)

    async with session(QUICK, keep) as one:
        async with one.get(server.script("/", 200)):
            called = contexts[0].called
        assert called is not None
        with pytest.raises(NotRepeatable, match="its caller has left"):
            await called.function(Context())
    assert len(server.requests) == 1


async def test_a_body_that_broke_off_is_broken(server: FlakyServer, time_flies: Any) -> None:
    """That its time is over too, by the time somebody reads it, does not hide why."""
    url = server.script("/", Answer(body=[b"first", b"rest"], fault="cut"))
    async with session(Timeout(PATIENCE), time_flies) as one:
        response = await one.get(url)
        await asyncio.sleep(0.2)
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_aiohttps_own_timeouts_are_failures_like_others(server: FlakyServer) -> None:
    """A read timeout ends an attempt; the total one ends everything, and is not retried."""
    async with session() as one:
        url = server.script("/", Answer(hold=threading.Event()))
        outcome = await attempt(one.get(url, timeout=aiohttp.ClientTimeout(sock_read=0.1)))
        assert isinstance(outcome, aiohttp.SocketTimeoutError)
        assert "3 attempts" in note(outcome)
        outcome = await attempt(one.get(url, timeout=aiohttp.ClientTimeout(0.5)))
        assert type(outcome) is TimeoutError
        assert "1 attempt in" in note(outcome)
        assert "the request is not sent again: the total timeout of its session is over" in note(outcome)


async def test_a_cancellation_is_a_cancellation(server: FlakyServer) -> None:
    """A request that is cancelled is not retried, and its connection is free again."""
    async with session() as one:
        task = asyncio.create_task(attempt(one.get(server.script("/", Answer(hold=threading.Event()), 200))))
        while not server.requests:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(server.requests) == 1
        assert (await attempt(one.get(server.script("/", 200)))).status == 200
