"""`resilience.integrations.aiohttp` against aiohttp itself, and a server that fails as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from resilience import (
    CircuitBreaker,
    CircuitOpen,
    DeadlineExceeded,
    Fallback,
    Policy,
    Retry,
    Timeout,
    TimeoutExceeded,
    deadline,
)
from resilience.integrations.aiohttp import resilience_middleware
from resilience.integrations.http import TRANSIENT_STATUSES, NotRepeatable, Rules
from resilience.integrations.wire import ENVOY_EXPECTED_TIMEOUT
from tests.conftest import FakeClock
from tests.integrations.servers import PATIENCE, Answer, FlakyServer, unused_url

QUICK = Retry(3, backoff=[0])


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a test; nothing may hang for ever."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await main()

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def session(
    policy: Policy[Any] = QUICK, *, rules: Rules | None = None, read_body: bool = False, **options: Any
) -> AsyncIterator[Any]:
    """A session with one connection at most, so that who does not give it back is found out."""
    middleware = resilience_middleware(policy, rules=rules or Rules(), read_body=read_body)
    options.setdefault("connector", aiohttp.TCPConnector(limit=1))
    async with aiohttp.ClientSession(middlewares=(middleware,), **options) as it:
        yield it


def note(error: BaseException) -> str:
    return "\n".join(error.__notes__)


async def attempt(request: Any) -> Any:
    """What came out: the response, read, or the exception as a value."""
    try:
        async with request as response:
            await response.read()
            return response
    except Exception as error:
        return error


# --- statuses --------------------------------------------------------------------------------


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


# --- what may be sent again ------------------------------------------------------------------


@pytest.mark.parametrize("answer", [503, Answer(fault="reset"), Answer(fault="close")])
@pytest.mark.parametrize(
    ("method", "headers", "sent"),
    [
        ("GET", {}, 2),
        ("PUT", {}, 2),
        ("DELETE", {}, 2),
        ("POST", {}, 1),
        ("PATCH", {}, 1),
        ("POST", {"idempotency-key": "4711"}, 2),
        ("POST", {"Idempotency-Key": ""}, 1),
    ],
)
def test_methods(server: FlakyServer, answer: Any, method: str, headers: Any, sent: int) -> None:
    """What may have been carried out is sent again only where that does no harm."""

    async def main() -> None:
        async with session() as one:
            outcome = await attempt(
                one.request(method, server.script("/", answer, 200), headers=headers, data=b"order")
            )
            if isinstance(outcome, Exception):
                assert f"{method} may have been carried out" in note(outcome)
            else:
                assert outcome.status == (200 if sent == 2 else 503)

    run(main)
    assert [it.body for it in server.requests] == [b"order"] * sent


def test_a_body_that_another_middleware_has_used_up(server: FlakyServer) -> None:
    """A middleware around ours that sends a generator once more does not send an empty body."""

    async def again(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        (await handler(request)).close()
        return await handler(request)

    async def main() -> None:
        async with aiohttp.ClientSession() as one:
            chain = (again, resilience_middleware(QUICK))
            assert isinstance(await attempt(one.put(server.url, data=pieces(), middlewares=chain)), NotRepeatable)

    run(main)
    assert [it.body for it in server.requests] == [b"once"]


def test_a_post_that_was_never_sent_is_tried_again() -> None:
    """Where no connection could be made, any method is repeated, whatever its body."""

    async def main() -> None:
        async with session() as one:
            error = await attempt(one.post(unused_url(), data=pieces()))
            assert isinstance(error, aiohttp.ClientConnectorError)
            assert "3 attempts" in note(error)

    run(main)


@pytest.mark.parametrize("policy", [QUICK, Retry(1), CircuitBreaker(5)])
@pytest.mark.parametrize("fault", ["reset", "close"])
def test_aiohttps_own_second_try_does_not_multiply(server: FlakyServer, policy: Policy[Any], fault: Any) -> None:
    """The policy alone says how often a request is sent."""

    async def main() -> None:
        async with session(policy) as one:
            for _ in range(2):
                server.requests.clear()
                outcome = await attempt(one.get(server.script("/", Answer(fault=fault))))
                assert isinstance(outcome, aiohttp.ClientConnectionError)
                assert len(server.requests) == (3 if policy is QUICK else 1)

    run(main)


def test_a_users_own_second_try_is_another_request(server: FlakyServer) -> None:
    """Only aiohttp's own is ended; who asks again in the same task, and of the same URL, is served."""

    async def main() -> None:
        async with session(Retry(1)) as one:
            url = server.script("/", Answer(fault="close"), 200)
            assert isinstance(await attempt(one.get(url)), aiohttp.ServerDisconnectedError)
            assert (await attempt(one.get(url))).status == 200

    run(main)


def test_a_failed_request_is_let_go(server: FlakyServer) -> None:
    """Nothing of it is kept for a second coming that has been, or will never be."""

    async def main() -> None:
        for method in ("GET", "POST"):
            async with session(Retry(1)) as one:
                error = await attempt(one.request(method, server.script("/", Answer(fault="close")), data=b"x"))
                gone = weakref.ref(error)
                del error
            gc.collect()
            assert gone() is None

    run(main)


async def pieces() -> AsyncIterator[bytes]:
    yield b"on"
    yield b"ce"


def form(**fields: Any) -> aiohttp.FormData:
    it = aiohttp.FormData()
    for name, value in fields.items():
        it.add_field(name, value, filename=name if isinstance(value, io.IOBase) else None)
    return it


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"data": b"bytes"}, b"bytes"),
        ({"data": "text"}, b"text"),
        ({"data": {"a": "1"}}, b"a=1"),
        ({"json": [1]}, b"[1]"),
        ({"data": io.BytesIO(b"file")}, b"file"),
        ({"data": io.StringIO("text")}, b"text"),
        ({"data": b"packed", "compress": True}, None),
        ({"data": form(a="1", b=io.BytesIO(b"file"))}, None),
        ({"data": b"expected", "expect100": True}, b"expected"),
    ],
    ids=lambda it: "" if isinstance(it, bytes) else str(it),
)
def test_bodies_that_are_sent_again_whole(server: FlakyServer, options: Any, expected: bytes | None) -> None:
    """What is in memory arrives whole at each attempt."""

    async def main() -> None:
        async with session() as one:
            response = await attempt(one.put(server.script("/", 503, Answer(fault="reset"), 200), **options))
            assert response.status == 200

    run(main)
    bodies = [it.body for it in server.requests]
    assert bodies == [bodies[0] if expected is None else expected] * 3
    assert bodies[0]


@pytest.mark.parametrize("answer", [503, Answer(fault="reset")])
@pytest.mark.parametrize("kind", ["generator", "file", "form with a file", "payload"])
def test_bodies_that_are_sent_once(server: FlakyServer, answer: Any, kind: str, tmp_path: Path) -> None:
    """A body that is used up is never sent again, which would be as an empty one, whatever the method."""
    path = tmp_path / "file"
    path.write_bytes(b"once")

    async def main() -> None:
        with path.open("rb") as file:
            data = {"generator": pieces(), "file": file, "form with a file": form(a=file)}.get(kind)
            if kind == "payload":
                data = aiohttp.AsyncIterablePayload(pieces())
            async with session() as one:
                outcome = await attempt(one.put(server.script("/", answer, 200), data=data))
        if isinstance(outcome, Exception):
            assert "its body can be sent only once" in note(outcome)
        else:
            assert outcome.status == 503

    run(main)
    assert [b"once" in it.body for it in server.requests] == [True]


def test_a_timeout_does_not_have_a_post_sent_again(server: FlakyServer) -> None:
    """A call that was cut off leaves no failure of its own, and yet a Retry around it knows."""

    async def main() -> None:
        async with session(QUICK.wrap(Timeout(0.2))) as one:
            url = server.script("/", Answer(hold=threading.Event()))
            assert isinstance(await attempt(one.post(url, data=b"order")), TimeoutExceeded)

    run(main)
    assert len(server.requests) == 1


# --- responses -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 1_000_000])
def test_connections_go_back_to_the_pool(server: FlakyServer, size: int) -> None:
    """With one connection for all, discarded responses keep nobody waiting."""

    async def main() -> None:
        discarded = Answer(503, body=b"x" * size)
        async with session() as one:
            for _ in range(3):
                assert (await attempt(one.get(server.script("/", discarded, discarded, 200)))).status == 200
        if size == 2:
            assert server.connections == 1

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
        async with session(QUICK.wrap(Timeout(0.2)), read_body=True) as one:
            response = await one.get(server.script("/", cut, slow, Answer(body=b'{"a": 1}')))
            assert await response.json(content_type=None) == {"a": 1}
            assert (await attempt(one.post(server.script("/", slow)))).__class__ is TimeoutExceeded
            assert (await attempt(one.get(server.script("/", 503)))).status == 503

    run(main)


# --- time ------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, aiohttp.ClientTimeout(total=0), aiohttp.ClientTimeout(60)])
def test_a_deadline_ends_the_request(server: FlakyServer, timeout: Any) -> None:
    """A deadline that by itself cuts nothing off does so here, whatever timeout aiohttp has."""

    async def main() -> None:
        async with session(timeout=timeout or aiohttp.ClientTimeout()) as one:
            began = time.monotonic()
            with deadline(0.2):
                outcome = await attempt(one.get(server.script("/", Answer(hold=threading.Event()), 200)))
            assert type(outcome) is DeadlineExceeded
            assert 0.2 <= time.monotonic() - began < PATIENCE / 2
            assert (await attempt(one.get(server.script("/", 200)))).status == 200

    run(main)


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_keeps_to_the_time(server: FlakyServer, chunked: bool) -> None:
    """A body that is read after the policy has ended has the time of the attempt, unless it may take longer."""

    async def main() -> None:
        rest = threading.Event()
        answer = Answer(body=[b"first", b"rest"], drip=rest, chunked=chunked)
        policy = Timeout(0.3)
        async with session(policy) as one:
            assert type(await attempt(one.get(server.script("/", answer)))) is TimeoutExceeded
            assert await (await one.get(server.script("/", 200))).read() == b"ok"
            with deadline(0.3):
                response = await one.get(server.script("/", answer))
            with pytest.raises(TimeoutExceeded):
                await response.read()
        async with session(policy, rules=Rules(limit_body=False)) as one, one.get(server.url + "/") as response:
            await asyncio.sleep(0.4)
            rest.set()
            assert await response.read() == b"firstrest"

    run(main)


def test_a_body_that_was_read_is_not_late(server: FlakyServer) -> None:
    """The end of its time means nothing to it, nor to the connection that it came over."""

    async def main() -> None:
        async with session(Timeout(0.2)) as one:
            response = await one.get(server.script("/", Answer(body=[b"a"] * 9, chunked=True)))
            assert await response.read() == b"a" * 9
            await asyncio.sleep(0.3)
            assert await response.read() == b"a" * 9
            assert (await attempt(one.get(server.url))).status == 200

    run(main)
    assert server.connections == 1


def test_after_the_deadline_nothing_is_sent(server: FlakyServer) -> None:
    """Where no time is left, the server is not bothered."""

    async def main() -> None:
        async with session(CircuitBreaker(5)) as one:
            with deadline(0):
                assert type(await attempt(one.get(server.url))) is DeadlineExceeded

    run(main)
    assert server.requests == []


@pytest.mark.parametrize("cooperative", [True, False])
def test_an_attempts_timeout_is_named_in_the_error(server: FlakyServer, cooperative: bool) -> None:
    """The one whose limit it was takes the blame, and the attempt is repeated."""

    async def main() -> None:
        hang = Answer(hold=threading.Event())
        async with session(Retry(2, backoff=[0]).wrap(Timeout(0.2, cooperative=cooperative))) as one:
            assert (await attempt(one.get(server.script("/", hang, 200)))).status == 200
            outcome = await attempt(one.get(server.script("/", hang)))
            assert type(outcome) is TimeoutExceeded
            assert "no result within 0.2 s" in str(outcome)

    run(main)


def test_aiohttps_own_timeouts_are_failures_like_others(server: FlakyServer) -> None:
    """A read timeout ends an attempt; the total one ends everything, and is not retried."""

    async def main() -> None:
        hang = Answer(hold=threading.Event())
        async with session() as one:
            timeout = aiohttp.ClientTimeout(sock_read=0.2)
            assert (await attempt(one.get(server.script("/", hang, 200), timeout=timeout))).status == 200
            outcome = await attempt(one.get(server.script("/", hang), timeout=aiohttp.ClientTimeout(0.2)))
            assert isinstance(outcome, TimeoutError)
            assert not isinstance(outcome, TimeoutExceeded)
            assert "1 attempt in" in note(outcome)

    run(main)


def test_a_cancellation_is_a_cancellation(server: FlakyServer) -> None:
    """A request that is cancelled is not retried, and its connection is free again."""

    async def main() -> None:
        async with session() as one:
            task = asyncio.create_task(attempt(one.get(server.script("/", Answer(hold=threading.Event()), 200))))
            while not server.requests:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(server.requests) == 1
            assert (await attempt(one.get(server.script("/", 200)))).status == 200

    run(main)


def test_a_session_that_is_closed_in_a_wait(server: FlakyServer) -> None:
    """It sends nothing more, however many attempts there are."""

    async def main() -> None:
        waits = asyncio.Event()
        policy = Retry(None, on=Exception, backoff=[0.1], on_retry=lambda event: waits.set())
        async with session(policy) as one:
            task = asyncio.create_task(attempt(one.get(server.script("/", Answer(fault="close")))))
            await waits.wait()
            await one.close()
            with pytest.raises(RuntimeError, match="Session is closed"):
                raise await task

    run(main)
    assert len(server.requests) == 1


def test_the_deadline_is_told_to_hosts_that_are_named(server: FlakyServer) -> None:
    """The header is for named hosts alone, also where another one redirects to them, and is written anew."""

    async def main() -> None:
        server.script("/from", 503, Answer(302, {"Location": server.url.replace("127.0.0.1", "localhost") + "/to"}))
        middleware = resilience_middleware(QUICK, propagate_to=["127.0.0.1"])
        async with aiohttp.ClientSession(middlewares=(middleware,)) as one:
            with deadline(PATIENCE):
                await attempt(one.get(f"{server.url}/from"))

    run(main)
    told = [it.headers[ENVOY_EXPECTED_TIMEOUT] for it in server.requests]
    assert [int(it) <= PATIENCE * 1000 for it in told[:2]] == [True, True]
    assert told[2] is None


# --- a session as usual ----------------------------------------------------------------------


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
        (QUICK, {"propagate_to": "localhost"}, "hosts must be a sequence"),
    ],
)
def test_wrong_arguments(policy: Any, options: Any, message: str) -> None:
    """They are refused where they are written."""
    with pytest.raises(TypeError, match=message):
        resilience_middleware(policy, **options)
