"""`resilience.integrations.aiohttp` against aiohttp itself, and a server that fails as it is told."""

from __future__ import annotations

import io
import threading
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from resilience import (
    CircuitBreaker,
    CircuitOpen,
    Fallback,
    Timeout,
    TimeoutExceeded,
    deadline,
)
from resilience.integrations.aiohttp import resilience_middleware
from resilience.integrations.http import TRANSIENT_STATUSES, Rules, standard
from tests.conftest import FakeClock
from tests.integrations.aiohttp_sessions import QUICK, attempt, run, session
from tests.integrations.servers import PATIENCE, Answer, FlakyServer

# --- statuses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("status", sorted(TRANSIENT_STATUSES))
def test_a_status_that_says_not_now_is_retried(server: FlakyServer, status: int) -> None:
    """A plain Retry sends a GET again that was answered with such a status."""

    async def main() -> None:
        async with session() as one, one.get(server.script("/", status, status, Answer(body=b"fine"))) as response:
            assert (response.status, await response.read()) == (200, b"fine")

    run(main)
    assert len(server.requests) == 3


@pytest.mark.parametrize(("statuses", "sent"), [(TRANSIENT_STATUSES, 1), (TRANSIENT_STATUSES | {500}, 2)])
def test_500_on_request(server: FlakyServer, statuses: Any, sent: int) -> None:
    """500 is an answer, unless the rules name it."""

    async def main() -> None:
        async with session(rules=Rules(statuses=statuses)) as one:
            await attempt(one.get(server.script("/", 500, 200)))

    run(main)
    assert len(server.requests) == sent


def test_the_last_response_is_returned_as_it_is(server: FlakyServer) -> None:
    """Out of attempts, the session gets the response, open."""

    async def main() -> None:
        async with session() as one, one.get(server.script("/", 503, 503, Answer(503, body=b"third"))) as response:
            assert (response.status, await response.read()) == (503, b"third")

    run(main)
    assert len(server.requests) == 3


def test_raise_for_status_of_the_session(server: FlakyServer) -> None:
    """aiohttp raises after the policy has done what it can, and for the last response only."""

    async def main() -> None:
        async with session(raise_for_status=True) as one:
            assert (await attempt(one.get(server.script("/", 503, 200)))).status == 200
            error = await attempt(one.get(server.script("/down", 503)))
            assert isinstance(error, aiohttp.ClientResponseError)
            assert error.status == 503
            assert (await attempt(one.get(server.script("/", 404)))).status == 404

    run(main)
    assert len(server.requests_to("/down")) == 3


@pytest.mark.parametrize(("header", "delay"), [("2", 2.0), ("-5", 0.0), ("soon", 0.0)])
def test_retry_after(server: FlakyServer, clock: FakeClock, header: str, delay: float) -> None:
    """The wait is at least as long as the server asks for."""

    async def main() -> None:
        async with session() as one:
            response = await attempt(one.get(server.script("/", Answer(429, {"Retry-After": header}), 200)))
            assert response.status == 200

    run(main)
    assert sum(clock.sleeps) == delay


def test_retry_after_obeys_the_deadline(server: FlakyServer) -> None:
    """A wait that does not fit is not begun: the response comes at once."""

    async def main() -> None:
        async with session() as one, deadline(PATIENCE - 1):
            response = await attempt(one.get(server.script("/", Answer(429, {"Retry-After": "60"}), 200)))
            assert response.status == 429

    run(main)


def test_a_breaker_counts_them(server: FlakyServer) -> None:
    """Two such statuses in a row open a circuit, which then sends nothing."""

    async def main() -> None:
        url = server.script("/", 503)
        async with session(CircuitBreaker(2)) as one:
            outcomes = [await attempt(one.get(url)) for _ in range(3)]
        assert [outcomes[0].status, outcomes[1].status, type(outcomes[2])] == [503, 503, CircuitOpen]

    run(main)
    assert len(server.requests) == 2


def test_the_standard_pipeline_has_a_breaker_for_each_host(server: FlakyServer) -> None:
    """One host that is down does not keep requests from another."""

    async def main() -> None:
        url = server.script("/down", 503)
        policy = standard(attempts=1, min_calls=2, failure_ratio=1.0)
        async with session(policy) as one:
            outcomes = [await attempt(one.get(url)) for _ in range(3)]
            assert [outcomes[0].status, outcomes[1].status, type(outcomes[2])] == [503, 503, CircuitOpen]
            assert (await attempt(one.get(url.replace("127.0.0.1", "localhost")))).status == 503

    run(main)


def test_a_fallback_asks_somebody_else(server: FlakyServer) -> None:
    """What it answers is the session's response, open; the one that lost is closed."""

    async def main() -> None:
        mirror = aiohttp.ClientSession()
        policy = Fallback(handler=lambda failure, ctx: mirror.get(server.script("/mirror", Answer(body=b"fine"))))
        async with mirror, session(policy) as one:
            url = server.script("/", Answer(503, body=b"x" * 1_000_000))
            for _ in range(2):  # with one connection
                async with one.get(url) as response:
                    assert await response.read() == b"fine"

    run(main)


def test_a_fallback_answers_with_a_response(server: FlakyServer) -> None:
    """aiohttp could not go on with anything else."""

    async def main() -> None:
        async with session(Fallback("cached")) as one:
            error = await attempt(one.get(server.script("/", 503)))
            assert isinstance(error, TypeError)
            assert "'cached'" in str(error)

    run(main)


# --- responses --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 1_000_000])
def test_connections_go_back_to_the_pool(server: FlakyServer, size: int) -> None:
    """With one connection for all, discarded responses keep nobody waiting."""

    async def main() -> None:
        discarded = Answer(503, body=b"x" * size)
        async with session() as one:
            for _ in range(3):
                assert (await attempt(one.get(server.script("/", discarded, discarded, 200)))).status == 200

    run(main)


def test_a_stream_is_open_when_it_is_returned(server: FlakyServer) -> None:
    """The body is read by whoever asked for it, piece by piece."""
    rest = threading.Event()

    async def main() -> None:
        url = server.script("/", 503, Answer(body=[b"first", b"rest"], drip=rest, chunked=True))
        async with session() as one, one.get(url) as response:
            assert await response.content.readany() == b"first"
            rest.set()
            assert await response.read() == b"rest"

    run(main)


def test_a_body_that_breaks_off_is_for_who_reads_it(server: FlakyServer) -> None:
    """The policy has ended by then."""

    async def main() -> None:
        url = server.script("/", Answer(body=[b"first", b"rest"], fault="cut"), 200)
        async with session() as one:
            assert isinstance(await attempt(one.get(url)), aiohttp.ClientPayloadError)

    run(main)
    assert len(server.requests) == 1


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_that_is_read_in_the_attempt(server: FlakyServer, chunked: bool) -> None:
    """Where the policy covers the body, one that breaks off is a failure like any other."""

    async def main() -> None:
        cut = Answer(body=[b"first", b"rest"], fault="cut", chunked=chunked)
        slow = Answer(body=[b"first", b"rest"], drip=threading.Event(), chunked=chunked)
        async with session(QUICK, read_body=True) as one:
            response = await one.get(server.script("/", cut, 503, Answer(body=b'{"a": 1}')))
            assert await response.json(content_type=None) == {"a": 1}
        async with session(QUICK.wrap(Timeout(0.1)), read_body=True) as one:
            assert type(await attempt(one.get(server.script("/", slow)))) is TimeoutExceeded

    run(main)


def test_connections_are_kept_where_bodies_are_read(server: FlakyServer) -> None:
    """A response that was read whole gives its connection back, discarded or not."""

    async def main() -> None:
        async with session(QUICK, read_body=True) as one:
            assert (await attempt(one.get(server.script("/", 503, 503, 200)))).status == 200

    run(main)
    assert server.connections == 1


# --- a session as usual -----------------------------------------------------------------------


def test_redirects_and_cookies(server: FlakyServer) -> None:
    """Each hop is a request of its own to the policy, and the session follows and remembers as ever."""
    server.script("/from", 503, Answer(307, [("Location", "/to"), ("Set-Cookie", "a=1")]))
    server.script("/to", 503, 200)

    async def main() -> None:
        async with session(cookie_jar=aiohttp.CookieJar(unsafe=True)) as one:
            response = await attempt(one.put(f"{server.url}/from", data=io.BytesIO(b"body")))
            assert (response.status, len(response.history)) == (200, 1)

    run(main)
    assert [(it.path, it.body) for it in server.requests] == [(it, b"body") for it in ("/from", "/from", "/to", "/to")]
    assert server.requests[-1].headers["Cookie"] == "a=1"


def test_a_middleware_for_one_request(server: FlakyServer) -> None:
    """It can be given with a request, and stands beside others in either order."""

    async def main() -> None:
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

    run(main)


@pytest.mark.parametrize("read_body", [True, False])
def test_websockets(read_body: bool) -> None:
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

    async def main() -> None:
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

    run(main)
    assert answers == [503, 101]


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (None, {}, "policy must be a policy, or have one for each host"),
        (QUICK, {"rules": 503}, "rules must be Rules, not 503"),
        (QUICK, {"propagate_to": "localhost"}, "propagate_to must be a sequence"),
    ],
)
def test_wrong_arguments(policy: Any, options: Any, message: str) -> None:
    """They are refused where they are written."""
    with pytest.raises(TypeError, match=message):
        resilience_middleware(policy, **options)
