"""`resilience.integrations.aiohttp` with aiohttp itself, against a server that fails as scripted."""

from __future__ import annotations

import threading
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from resilience import Timeout, TimeoutExceeded
from resilience.integrations.aiohttp import resilience_middleware
from tests.integrations.aiohttp_sessions import QUICK, outcome_of, session
from tests.integrations.servers import PATIENCE, Answer, FlakyServer

# --- statuses ---------------------------------------------------------------------------------


async def test_raise_for_status_applies_to_the_last_response(server: FlakyServer) -> None:
    """aiohttp raises after the policy has ended."""
    async with session(raise_for_status=True) as client:
        assert (await outcome_of(client.get(server.script("/", 503, 200)))).status == 200
        error = await outcome_of(client.get(server.script("/down", 503)))
        assert isinstance(error, aiohttp.ClientResponseError)
        assert error.status == 503
        assert (await outcome_of(client.get(server.script("/", 404)))).status == 404
    assert len(server.requests_to("/down")) == 3


# --- responses --------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_that_is_read_in_the_attempt_is_retried(server: FlakyServer, chunked: bool) -> None:
    """If the policy covers the body, one that breaks off is a failure like any other."""
    cut = Answer(body=[b"first", b"rest"], fault="cut", chunked=chunked)
    slow = Answer(body=[b"first", b"rest"], drip=threading.Event(), chunked=chunked)
    async with session(QUICK, read_body=True) as client:
        response = await client.get(server.script("/", cut, 503, Answer(body=b'{"a": 1}')))
        assert await response.json(content_type=None) == {"a": 1}
    async with session(QUICK.wrap(Timeout(0.1)), read_body=True) as client:
        assert type(await outcome_of(client.get(server.script("/", slow)))) is TimeoutExceeded


async def test_read_body_keeps_the_connections_of_discarded_responses(server: FlakyServer) -> None:
    """A response that was read completely returns its connection."""
    async with session(QUICK, read_body=True) as client:
        assert (await outcome_of(client.get(server.script("/", 503, 503, 200)))).status == 200
    assert server.connections == 1


# --- a session as usual -----------------------------------------------------------------------


async def test_a_middleware_can_be_given_with_one_request(server: FlakyServer) -> None:
    """Together with others, in either order."""
    seen: list[int] = []

    async def record_status(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        response = await handler(request)
        seen.append(response.status)
        return response

    ours = resilience_middleware(QUICK)
    async with aiohttp.ClientSession() as client:
        for middlewares in ((ours, record_status), (record_status, ours)):
            await outcome_of(client.get(server.script("/", 503, 200), middlewares=middlewares))
    assert seen == [503, 200, 200]


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
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        policy = QUICK.wrap(Timeout(PATIENCE))
        async with (
            session(policy, read_body=read_body) as client,
            client.ws_connect(f"http://127.0.0.1:{port}/") as socket,
        ):
            await socket.send_str("hello")
            assert await socket.receive_str() == "hello"
    finally:
        await runner.cleanup()
    assert answers == [503, 101]
