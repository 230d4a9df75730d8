"""The deadline of a request in an ASGI application."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from typing import Any

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from resilience import Context, DeadlineExceeded, current_context, deadline
from resilience.integrations.asgi import DeadlineMiddleware
from tests.conftest import World
from tests.integrations.services import asgi_service, exchange

EXPECTED = "x-envoy-expected-rq-timeout-ms"


async def request(app: Any, headers: dict[str, str] | None = None, kind: str = "http") -> list[dict[str, Any]]:
    """Send one request without a server; return the messages of the response."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        await anyio.sleep(0)
        sent.append(message)

    fields = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await app({"type": kind, "headers": fields}, receive, send)
    return sent


class App:
    """An application that records the context that it is called with, and then takes its steps."""

    def __init__(self, *steps: Callable[..., Any]) -> None:
        self.steps = steps
        self.contexts: list[Context] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.contexts.append(current_context())
        for step in self.steps:
            await step(send)


async def start(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def body(send: Any) -> None:
    await send({"type": "http.response.body", "body": b"fine"})


async def hang(send: Any) -> None:
    await anyio.sleep(20)


async def overrun(send: Any) -> None:
    raise DeadlineExceeded("the deadline of the execution has passed")


class TestAfterTheDeadline:
    async def test_the_app_raises_after_the_response_has_begun(self, tasks_world: World) -> None:
        """The status is sent, so that the server has to break the connection off."""
        with pytest.raises(DeadlineExceeded):
            await request(DeadlineMiddleware(App(start, overrun)), {EXPECTED: "5000"})


class TestCutOff:
    async def test_cancels_the_app_and_answers_504(self, tasks_world: World) -> None:
        """The app ends at the deadline, whatever it awaits."""
        sent = await request(DeadlineMiddleware(App(hang), cut_off=True), {EXPECTED: "20"})
        assert sent[0]["status"] == 504

    async def test_answers_504_if_the_app_was_shielded_and_begins_to_answer_late(self, tasks_world: World) -> None:
        """Cancelling the server in the middle of its first message would break off the connection."""

        async def shielded(send: Any) -> None:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.1)

        app = DeadlineMiddleware(App(shielded, start, body), cut_off=True)
        sent = await request(app, {EXPECTED: "20"})
        assert sent[0]["status"] == 504

    async def test_raises_after_the_response_has_begun(self, tasks_world: World) -> None:
        """An incomplete response must not look complete."""
        with pytest.raises(DeadlineExceeded, match="cut off") as caught:
            await request(DeadlineMiddleware(App(start, hang), cut_off=True), {EXPECTED: "300"})
        assert 0 < caught.value.timeout <= 0.3

    async def test_changes_nothing_for_a_request_in_time(self, tasks_world: World) -> None:
        """With a deadline or without."""
        app = DeadlineMiddleware(App(start, body), cut_off=True)
        assert (await request(app, {EXPECTED: "20000"}))[0]["status"] == 200
        assert (await request(app))[0]["status"] == 200

    async def test_a_cancellation_by_the_server_is_no_504(self, tasks_world: World) -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await request(DeadlineMiddleware(App(hang), cut_off=True), {EXPECTED: "20000"})
        assert scope.cancelled_caught


class TestTheServersFunctions:
    async def test_run_without_the_deadline_of_the_request(self, tasks_world: World) -> None:
        """What a server begins inside of `receive` and `send` inherits nothing from the request."""
        seen: list[float] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            with deadline(1.0) as mine:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                assert current_context() is mine

        async def receive() -> Any:
            seen.append(current_context().deadline)

        async def send(message: Any) -> None:
            seen.append(current_context().deadline)

        scope = {"type": "http", "headers": [(EXPECTED.encode(), b"5000")]}
        await DeadlineMiddleware(app)(scope, receive, send)
        assert seen == [inf, inf]


class TestInStarlette:
    """Under uvicorn."""

    def test_streams_and_background_tasks_have_the_deadline(self) -> None:
        """It holds for as long as the app runs for the request."""
        seen: dict[str, float] = {}
        done = threading.Event()

        async def pieces() -> Any:
            for number in range(3):
                seen[f"piece {number}"] = current_context().remaining()
                yield b"x"

        def afterwards() -> None:  # in a thread
            seen["background"] = current_context().remaining()
            done.set()

        def endpoint(request: Request) -> StreamingResponse:  # in a thread
            seen["endpoint"] = current_context().remaining()
            return StreamingResponse(pieces(), background=BackgroundTask(afterwards))

        app = Starlette(routes=[Route("/", endpoint)], middleware=[Middleware(DeadlineMiddleware)])
        with asgi_service(app) as url:
            assert httpx.get(url, headers={EXPECTED: "60000"}).text == "xxx"
            assert done.wait(20)
        assert list(seen) == ["endpoint", "piece 0", "piece 1", "piece 2", "background"]
        assert all(30 < seconds <= 60 for seconds in seen.values())

    def test_a_response_that_is_cut_off_does_not_look_complete(self) -> None:
        """The connection breaks before the last chunk."""

        async def pieces() -> Any:
            yield b"x"
            await anyio.sleep(20)

        async def endpoint(request: Request) -> StreamingResponse:
            return StreamingResponse(pieces())

        app = Starlette(routes=[Route("/", endpoint)], middleware=[Middleware(DeadlineMiddleware, cut_off=True)])
        with asgi_service(app) as url, pytest.raises(httpx.RemoteProtocolError):
            httpx.get(url, headers={EXPECTED: "300"})

    def test_pipelined_requests_do_not_inherit_from_one_another(self) -> None:
        """uvicorn begins the second request inside of the first one's last `send`."""
        seen: list[float] = []

        async def endpoint(request: Request) -> PlainTextResponse:
            seen.append(current_context().remaining())
            return PlainTextResponse("ok")

        app = Starlette(routes=[Route("/", endpoint)], middleware=[Middleware(DeadlineMiddleware, default=inf)])
        first = f"GET / HTTP/1.1\r\nHost: a\r\n{EXPECTED}: 60000\r\n\r\n"
        second = "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        with asgi_service(app) as url:
            assert exchange(url, (first + second).encode()).count(b"200 OK") == 2
        assert seen[0] <= 60
        assert seen[1] == inf

    def test_requests_of_a_connection_do_not_inherit_from_a_large_body(self) -> None:
        """uvicorn stops reading at a large body; the reader that it starts again outlives the request."""
        seen: list[float] = []

        async def endpoint(request: Request) -> PlainTextResponse:
            seen.append(current_context().remaining())
            await anyio.sleep(0.05)  # until the server has read as much as it wants to keep
            return PlainTextResponse(str(len(await request.body())))

        app = Starlette(
            routes=[Route("/", endpoint, methods=["GET", "POST"])],
            middleware=[Middleware(DeadlineMiddleware, default=inf)],
        )
        with asgi_service(app) as url, httpx.Client() as client:
            for _ in range(3):
                size = 2_000_000
                answer = client.post(url, content=b"x" * size, headers={EXPECTED: "60000"})
                assert answer.text == str(size)
                client.get(url)
        assert [seconds == inf for seconds in seen] == [False, True] * 3
