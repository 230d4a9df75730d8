"""`resilience.integrations.aiohttp` against aiohttp itself, and a server that fails as it is told."""

from __future__ import annotations

import threading
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from resilience import (
    Timeout,
    TimeoutExceeded,
)
from resilience.integrations.aiohttp import resilience_middleware
from tests.integrations.aiohttp_sessions import QUICK, attempt, session
from tests.integrations.servers import PATIENCE, Answer, FlakyServer

# --- statuses ---------------------------------------------------------------------------------


async def test_raise_for_status_of_the_session(server: FlakyServer) -> None:
    """aiohttp raises after the policy has done what it can, and for the last response only."""
    async with session(raise_for_status=True) as one:
        assert (await attempt(one.get(server.script("/", 503, 200)))).status == 200
        error = await attempt(one.get(server.script("/down", 503)))
        assert isinstance(error, aiohttp.ClientResponseError)
        assert error.status == 503
        assert (await attempt(one.get(server.script("/", 404)))).status == 404
    assert len(server.requests_to("/down")) == 3


# --- responses --------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_that_is_read_in_the_attempt(server: FlakyServer, chunked: bool) -> None:
    """Where the policy covers the body, one that breaks off is a failure like any other."""
    cut = Answer(body=[b"first", b"rest"], fault="cut", chunked=chunked)
    slow = Answer(body=[b"first", b"rest"], drip=threading.Event(), chunked=chunked)
    async with session(QUICK, read_body=True) as one:
        response = await one.get(server.script("/", cut, 503, Answer(body=b'{"a": 1}')))
        assert await response.json(content_type=None) == {"a": 1}
    async with session(QUICK.wrap(Timeout(0.1)), read_body=True) as one:
        assert type(await attempt(one.get(server.script("/", slow)))) is TimeoutExceeded


async def test_connections_are_kept_where_bodies_are_read(server: FlakyServer) -> None:
    """A response that was read whole gives its connection back, discarded or not."""
    async with session(QUICK, read_body=True) as one:
        assert (await attempt(one.get(server.script("/", 503, 503, 200)))).status == 200
    assert server.connections == 1


# --- a session as usual -----------------------------------------------------------------------


async def test_a_middleware_for_one_request(server: FlakyServer) -> None:
    """It can be given with a request, and stands beside others in either order."""
    seen: list[int] = []

    async def watching(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        response = await handler(request)
        seen.append(response.status)
        return response

    ours = resilience_middleware(QUICK)
    async with aiohttp.ClientSession() as one:
        for middlewares in ((ours, watching), (watching, ours)):
            await attempt(one.get(server.script("/", 503, 200), middlewares=middlewares))
    assert seen == [503, 200, 200]


@pytest.mark.parametrize("read_body", [True, False])
async def test_websockets(read_body: bool) -> None:
    """The handshake of a websocket is a request like others; what follows it is left alone."""

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
            session(policy, read_body=read_body) as one,
            one.ws_connect(f"http://127.0.0.1:{port}/") as socket,
        ):
            await socket.send_str("hello")
            assert await socket.receive_str() == "hello"
    finally:
        await runner.cleanup()
    assert answers == [503, 101]
