"""`resilience.integrations.aiohttp` with aiohttp itself, against a server that fails as scripted."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from aiohttp import web

from resilience import Timeout
from resilience.integrations.aiohttp import resilience_middleware
from tests.integrations.aiohttp_sessions import QUICK, outcome_of, session
from tests.integrations.servers import PATIENCE, FlakyServer

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
