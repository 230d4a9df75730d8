"""`resilience.integrations.aiohttp`: what is specific to it. The common rules are in `test_http_clients.py`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from resilience import CircuitBreaker, Policy, Retry, Timeout, TimeoutExceeded
from resilience.integrations.aiohttp import resilience_middleware
from resilience.integrations.http import NotRepeatable
from tests.integrations.http_clients import QUICK
from tests.integrations.servers import PATIENCE, Answer, Server, notes_of, unused_url
from tests.integrations.upload_bodies import pieces


@contextlib.asynccontextmanager
async def session(
    policy: Policy[Any] = QUICK, *inside: aiohttp.ClientMiddlewareType, read_body: bool = False, **options: Any
) -> AsyncIterator[Any]:
    """Open a session with at most one connection, so that a leak makes the next request wait; nothing may hang.

    :param inside: middlewares between ours and the connection.
    """
    options |= {"connector": aiohttp.TCPConnector(limit=1)}
    middlewares = (resilience_middleware(policy, read_body=read_body), *inside)
    async with asyncio.timeout(PATIENCE), aiohttp.ClientSession(middlewares=middlewares, **options) as client:
        yield client


async def outcome_of(request: Any) -> Any:
    """Return the response, after reading it, or the exception as a value."""
    try:
        async with request as response:
            await response.read()
            return response
    except Exception as error:
        return error


# --- a session as usual -----------------------------------------------------------------------


@pytest.mark.parametrize("read_body", [True, False])
async def test_the_handshake_of_a_websocket_is_retried(read_body: bool) -> None:
    """The messages after it are not changed."""

    async def echo(request: web.Request) -> web.StreamResponse:
        answers.append(503 if not answers else 101)
        if answers[-1] == 503:
            return web.Response(status=503)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(message.data)
        return socket

    answers: list[int] = []
    app = web.Application()
    app.router.add_get("/", echo)
    opening = session(QUICK.wrap(Timeout(PATIENCE)), read_body=read_body)
    async with TestServer(app) as served, opening as client, client.ws_connect(served.make_url("/")) as socket:
        await socket.send_str("hello")
        assert await socket.receive_str() == "hello"
    assert answers == [503, 101]


# --- what may be sent again -------------------------------------------------------------------


async def test_an_outer_middleware_cannot_send_a_one_shot_body_again(server: Server) -> None:
    """The second request would have an empty body."""

    async def call_twice(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        (await handler(request)).close()
        return await handler(request)

    async with aiohttp.ClientSession() as client:
        chain = (call_twice, resilience_middleware(QUICK))
        assert isinstance(await outcome_of(client.put(server.url, data=pieces(), middlewares=chain)), NotRepeatable)
    assert [it.body for it in server.requests] == [b"once"]


async def test_a_wait_for_a_free_connection_sends_nothing(server: Server) -> None:
    """A request of any method that got no connection in time is repeated."""
    async with session() as client, client.get(server.script("/", Answer(body=[b"a", b"b"], drip=threading.Event()))):
        outcome = await outcome_of(client.post(server.url, timeout=aiohttp.ClientTimeout(connect=0.1)))
        assert isinstance(outcome, aiohttp.ConnectionTimeoutError)
        assert "3 attempts" in notes_of(outcome)


@pytest.mark.parametrize("policy", [QUICK, Retry(1), CircuitBreaker(5)])
@pytest.mark.parametrize("fault", ["reset", "close"])
async def test_aiohttps_own_retry_adds_no_attempts(server: Server, policy: Policy[Any], fault: Any) -> None:
    """The policy alone decides how often a request is sent."""
    async with session(policy) as client:
        for _ in range(2):
            server.requests.clear()
            outcome = await outcome_of(client.get(server.script("/", Answer(fault=fault))))
            assert isinstance(outcome, aiohttp.ClientConnectionError)
            assert len(server.requests) == (3 if policy is QUICK else 1)


async def test_a_retry_of_an_outer_middleware_is_another_request(server: Server) -> None:
    """An outer middleware may try the same request again, or replace the error."""
    entered: list[str] = []

    async def call_twice(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        entered.append("call_twice")
        try:
            return await handler(request)
        except aiohttp.ServerDisconnectedError:
            return await handler(request)

    async def replace_error(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        try:
            return await handler(request)
        except aiohttp.ServerDisconnectedError:
            raise LookupError from None

    ours = resilience_middleware(Retry(1))
    async with aiohttp.ClientSession() as client:
        url = server.script("/", Answer(fault="close"), 200)
        assert (await outcome_of(client.get(url, middlewares=(call_twice, ours)))).status == 200
        url = server.script("/", Answer(fault="close"), 200)
        assert isinstance(await outcome_of(client.get(url, middlewares=(replace_error, ours))), LookupError)
        assert (await outcome_of(client.post(url, middlewares=(ours,)))).status == 200
    assert entered == ["call_twice"]  # once, as aiohttp has seen no failure


@pytest.mark.parametrize("kind", ["GET", "POST", "PUT", "never sent", "switched off"])
async def test_a_failed_request_is_freed(server: Server, kind: str) -> None:
    """What is remembered for the retry of aiohttp is dropped, also if there is no such retry."""
    async with session(Retry(1)) as client:
        client._retry_connection = kind != "switched off"  # as aiohttp's own test client does
        method = kind if kind.isupper() else "PUT"
        url = unused_url() if kind == "never sent" else server.script("/", Answer(fault="close"))
        error = await outcome_of(client.request(method, url, data=b"x"))
        reference = weakref.ref(error)
        assert isinstance(error, aiohttp.ClientConnectionError)
        del error
    gc.collect()
    assert reference() is None


async def test_each_attempt_waits_for_100_continue(server: Server) -> None:
    """An attempt that was not allowed to send its body has not used it up."""
    async with session() as client:
        url = server.script("/", Answer(fault="refuse"), 503, 200)
        assert (await outcome_of(client.put(url, data=b"body", expect100=True))).status == 200
    assert [it.body for it in server.requests] == [b"", b"body", b"body"]


@pytest.mark.parametrize("never_sent", [True, False])
async def test_a_file_a_thread_may_still_read_is_not_rewound(server: Server, tmp_path: Path, never_sent: bool) -> None:
    """aiohttp reads files in threads, and a read continues if its attempt is cut off in the middle of the file."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000_000)
    with path.open("rb") as file:
        async with session() as client:
            url = unused_url() if never_sent else server.script("/", Answer(fault="refuse"))
            error = await outcome_of(client.put(url, data=file))
            assert isinstance(error, aiohttp.ClientConnectionError)
            assert ("3 attempts" in notes_of(error)) is never_sent
            assert ("its body is still being read by an earlier attempt" in notes_of(error)) is not never_sent
    assert len(server.requests) == (0 if never_sent else 1)


# --- time -------------------------------------------------------------------------------------


LIMIT = PATIENCE / 2


async def let_it_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `LIMIT` seconds pass at once for the timers of the event loop."""
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + LIMIT)
    await asyncio.sleep(0.001)


@pytest.mark.parametrize("fault", [None, "cut"])
async def test_a_body_read_after_its_time_raises(server: Server, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    """With the error of the policy's deadline, and a connection that is free before that; or as the body broke off."""
    url = server.script("/", Answer(body=[b"first", b"rest"], drip=threading.Event(), fault=fault))
    async with session(Timeout(LIMIT)) as client:
        response = await client.get(url)
        while fault and response.content.exception() is None:
            await asyncio.sleep(0.001)
        await let_it_pass(monkeypatch)
        if fault is None:
            assert (await outcome_of(client.get(server.script("/", 200)))).status == 200
        with pytest.raises(aiohttp.ClientPayloadError if fault else TimeoutExceeded, match=r"payload|whole body"):
            await response.read()


async def test_aiohttps_timeouts_of_one_wait_are_retried_and_the_total_is_not(server: Server) -> None:
    async with session() as client:
        url = server.script("/", Answer(hold=threading.Event()))
        outcome = await outcome_of(client.get(url, timeout=aiohttp.ClientTimeout(sock_read=0.1)))
        assert isinstance(outcome, aiohttp.SocketTimeoutError)
        assert "3 attempts" in notes_of(outcome)
        outcome = await outcome_of(client.get(url, timeout=aiohttp.ClientTimeout(0.5)))
        assert type(outcome) is TimeoutError
        assert "1 attempt in" in notes_of(outcome)
        assert "the request is not sent again: the total timeout of its session is over" in notes_of(outcome)
