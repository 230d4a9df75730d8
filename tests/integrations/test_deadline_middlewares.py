"""The deadline of a request in a web service: what is specific to ASGI and WSGI. See also `test_answers.py`."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from math import inf
from typing import Any
from wsgiref.util import FileWrapper, setup_testing_defaults
from wsgiref.validate import validator

import anyio
import httpx
import pytest
from flask.signals import got_request_exception
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from resilience import DeadlineExceeded, current_context, deadline
from resilience.integrations import asgi, wsgi
from tests.callers import in_threads
from tests.conftest import World
from tests.functions import raising
from tests.integrations.servers import asgi_service, exchange

EXPECTED = "x-envoy-expected-rq-timeout-ms"
FIELD = "HTTP_X_ENVOY_EXPECTED_RQ_TIMEOUT_MS"  # the same for WSGI
OVER = DeadlineExceeded("the deadline of the execution has passed")
TOO_LATE = b"the deadline of the request has passed\n"


async def request(app: Any, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Send one request without an ASGI server; return the messages of the response."""
    sent: list[dict[str, Any]] = []

    async def receive() -> Any: ...

    async def send(message: Any) -> None:
        await anyio.sleep(0)
        sent.append(message)

    fields = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await app({"type": "http", "headers": fields}, receive, send)
    return sent


def app_of(*steps: Callable[[Any], Any]) -> Any:
    """Return an ASGI application that takes these steps."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for step in steps:
            await step(send)

    return app


async def start(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def body(send: Any) -> None:
    await send({"type": "http.response.body", "body": b"fine"})


async def hang(send: Any) -> None:
    await anyio.sleep(20)


async def overrun(send: Any) -> None:
    raise OVER


class Server:
    """The steps of a WSGI server for one request."""

    def __init__(self, app: Any, **environ: Any) -> None:
        self.statuses: list[str] = []
        self.headers: dict[str, str] = {}
        self.headers_sent = False
        self.written: list[bytes] = []
        environ.setdefault("QUERY_STRING", "")
        setup_testing_defaults(environ)
        self.result = app(environ, self.start_response)

    def start_response(self, status: str, headers: Any, exc_info: Any = None) -> Callable[[bytes], None]:
        assert not self.statuses or exc_info, "a second status without an error"
        if exc_info and self.headers_sent:
            raise exc_info[1]
        self.statuses.append(status)
        self.headers = dict(headers)
        return self.written.append

    def body(self) -> bytes:
        """Return the whole body, and close it."""
        try:
            return b"".join(self.items())
        finally:
            self.close()

    def items(self) -> Iterator[bytes]:
        for item in self.result:
            self.headers_sent = True
            yield item

    def close(self) -> None:
        if hasattr(self.result, "close"):
            self.result.close()


class Body:
    """A body that records the time left at each of its steps."""

    def __init__(self, *steps: bytes | Exception) -> None:
        self._steps = iter(steps)
        self.seen: list[float] = []
        self.closed: list[float] = []

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        self.seen.append(current_context().remaining())
        step = next(self._steps)
        if isinstance(step, Exception):
            raise step
        return step

    def close(self) -> None:
        self.closed.append(current_context().remaining())


def answering(body: Any) -> Any:
    """Return a WSGI application with this body."""

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return body

    return app


# --- ASGI ------------------------------------------------------------------------------------


class TestCutOffOfAsgi:
    async def test_answers_504(self, tasks_world: World) -> None:
        """The app ends at the deadline, whatever it awaits; if it was shielded, as soon as it begins to answer.

        Cancelling the server in the middle of its first message would break off the connection.
        """

        async def shielded(send: Any) -> None:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.1)

        for app in (app_of(hang), app_of(shielded, start, body)):
            assert (await request(asgi.DeadlineMiddleware(app, cut_off=True), {EXPECTED: "20"}))[0]["status"] == 504

    async def test_raises_after_the_response_has_begun(self, tasks_world: World) -> None:
        """An incomplete response must not look complete. So does an app that is not cut off, and runs out of time."""
        with pytest.raises(DeadlineExceeded, match="cut off") as caught:
            await request(asgi.DeadlineMiddleware(app_of(start, hang), cut_off=True), {EXPECTED: "300"})
        assert 0 < caught.value.timeout <= 0.3
        with pytest.raises(DeadlineExceeded, match="of the execution"):
            await request(asgi.DeadlineMiddleware(app_of(start, overrun)), {EXPECTED: "5000"})

    async def test_changes_nothing_for_a_request_in_time(self, tasks_world: World) -> None:
        """With a deadline or without."""
        app = asgi.DeadlineMiddleware(app_of(start, body), cut_off=True)
        assert (await request(app, {EXPECTED: "20000"}))[0]["status"] == 200
        assert (await request(app))[0]["status"] == 200

    async def test_a_cancellation_by_the_server_is_no_504(self, tasks_world: World) -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await request(asgi.DeadlineMiddleware(app_of(hang), cut_off=True), {EXPECTED: "20000"})
        assert scope.cancelled_caught


async def test_the_functions_of_an_asgi_server_run_without_the_deadline_of_the_request(tasks_world: World) -> None:
    """What a server begins inside of `receive` and `send` inherits nothing from the request."""
    seen: list[float] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        with deadline(1.0) as mine:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            assert current_context() is mine

    async def note(message: Any = None) -> Any:
        seen.append(current_context().deadline)

    scope = {"type": "http", "headers": [(EXPECTED.encode(), b"5000")]}
    await asgi.DeadlineMiddleware(app)(scope, note, note)
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

        app = Starlette(routes=[Route("/", endpoint)], middleware=[Middleware(asgi.DeadlineMiddleware)])
        with asgi_service(app) as url:
            assert httpx.get(url, headers={EXPECTED: "60000"}).text == "xxx"
            assert done.wait(20)
        assert list(seen) == ["endpoint", "piece 0", "piece 1", "piece 2", "background"]
        assert all(30 < seconds <= 60 for seconds in seen.values())

    def test_pipelined_requests_do_not_inherit_from_one_another(self) -> None:
        """uvicorn begins the second request inside of the first one's last `send`."""
        seen: list[float] = []

        async def endpoint(request: Request) -> PlainTextResponse:
            seen.append(current_context().remaining())
            return PlainTextResponse("ok")

        app = Starlette(routes=[Route("/", endpoint)], middleware=[Middleware(asgi.DeadlineMiddleware, default=inf)])
        first = f"GET / HTTP/1.1\r\nHost: a\r\n{EXPECTED}: 60000\r\n\r\n"
        second = "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        with asgi_service(app) as url:
            assert exchange(url, (first + second).encode()).count(b"200 OK") == 2
        assert seen[0] <= 60
        assert seen[1] == inf


# --- WSGI ------------------------------------------------------------------------------------


class TestContextOfAWsgiApp:
    def test_is_ambient_in_every_step_of_the_body_and_not_between_them(self) -> None:
        """A WSGI body runs after the app has returned, in the server's loop, perhaps in another thread."""
        body = Body(b"a", b"b")
        environ = {FIELD: "60000", "wsgi.file_wrapper": FileWrapper}
        server = Server(wsgi.DeadlineMiddleware(answering(body)), **environ)
        items = server.items()
        assert next(items) == b"a"
        assert current_context().deadline == inf
        rest: list[bytes] = []
        in_threads(lambda: rest.extend(items))
        server.close()
        assert rest == [b"b"]
        assert len(body.seen) == 3
        assert all(30 < seconds <= 60 for seconds in body.seen + body.closed)
        assert current_context().deadline == inf

    def test_is_ambient_in_a_generator_that_holds_a_block_open(self) -> None:
        """A block that is open across a `yield` is active again in the next step."""

        def app(environ: Any, start_response: Any) -> Iterator[bytes]:
            start_response("200 OK", [])
            with deadline(1.0) as inner:
                yield b"a"
                assert current_context() is inner
                yield b"b"
            assert current_context().remaining() > 30
            yield b"c"

        server = Server(wsgi.DeadlineMiddleware(app), **{FIELD: "60000"})
        for _ in server.items():
            assert current_context().deadline == inf


class TestWsgiAfterTheDeadline:
    @pytest.mark.parametrize("milliseconds", ["0", "5000"])
    def test_the_answer_to_head_has_no_body(self, milliseconds: str) -> None:
        """A server would send that body as the beginning of the next response."""
        app = wsgi.DeadlineMiddleware(answering(Body(OVER)))
        server = Server(app, REQUEST_METHOD="HEAD", **{FIELD: milliseconds})
        assert server.body() == b""
        assert server.statuses[-1] == "504 Gateway Timeout"

    def test_a_status_that_was_not_sent_is_replaced_by_a_504(self) -> None:
        """Also by an error in the first step of the body, in which a generator works; its `close` is called too."""

        def app(environ: Any, start_response: Any) -> Any:
            start_response("200 OK", [])
            raise OVER

        assert Server(wsgi.DeadlineMiddleware(app), **{FIELD: "5000"}).statuses == ["200 OK", "504 Gateway Timeout"]
        body = Body(OVER, b"not reached")
        server = Server(wsgi.DeadlineMiddleware(answering(body)), **{FIELD: "5000"})
        assert (server.body(), server.statuses) == (TOO_LATE, ["200 OK", "504 Gateway Timeout"])
        assert len(body.closed) == 1

    def test_the_answer_of_a_framework_to_the_error_is_replaced_and_closed(self) -> None:
        """The server gets one status only. Frameworks end the request in `close`."""
        body = Body(b"a bug")

        def app(environ: Any, start_response: Any) -> Any:
            got_request_exception.send(exception=OVER)  # as Flask does
            start_response("500 INTERNAL SERVER ERROR", [])
            return body

        server = Server(wsgi.DeadlineMiddleware(app), **{FIELD: "5000"})
        assert server.statuses == ["504 Gateway Timeout"]
        assert len(body.closed) == 1

    @pytest.mark.parametrize("steps", [(b"a", OVER), (TimeoutError("a database"),)], ids=["later", "other"])
    def test_a_later_step_of_the_body_or_another_error_raises(self, steps: tuple[Any, ...]) -> None:
        """The status is sent, so that the server has to break the connection off."""
        body = Body(*steps)
        server = Server(wsgi.DeadlineMiddleware(answering(body)), **{FIELD: "5000"})
        with pytest.raises(type(steps[-1])):
            server.body()
        assert len(body.closed) == 1

    def test_another_error_of_the_app_is_raised_unchanged(self) -> None:
        """The server handles it."""
        with pytest.raises(KeyError, match="bug"):
            Server(wsgi.DeadlineMiddleware(raising(KeyError("bug"))), **{FIELD: "5000"})


class TestTheProtocolOfWsgi:
    def test_is_kept_according_to_the_validator_of_wsgiref(self) -> None:
        """With the validator on both sides: the middleware is a correct server and a correct application."""
        for headers in ({}, {FIELD: "5000"}, {FIELD: "0"}):
            app = answering(Body(b"a", b"b"))
            outer = validator(wsgi.DeadlineMiddleware(validator(app)))
            assert Server(outer, **headers).body() in (b"ab", b"the deadline of the request has passed\n")

    def test_close_is_called_once(self) -> None:
        """However often the server calls it, and also if nothing was read."""
        body = Body(b"a")
        server = Server(wsgi.DeadlineMiddleware(answering(body)))
        server.close()
        server.close()
        assert len(body.closed) == 1
        assert list(server.result) == []

    def test_the_function_write_is_the_servers(self) -> None:
        """The older way of sending a body."""

        def app(environ: Any, start_response: Any) -> Any:
            start_response("200 OK", [])(b"written")
            return [b"returned"]

        server = Server(wsgi.DeadlineMiddleware(app))
        assert server.body() == b"returned"
        assert server.written == [b"written"]

    @pytest.mark.parametrize("body", [[b"a"], (b"a", b"b"), FileWrapper(io.BytesIO(b"file"))])
    def test_a_body_that_runs_no_code_is_returned_unchanged(self, body: Any) -> None:
        """The server reads the length of a list, and sends a file in its own way."""
        server = Server(wsgi.DeadlineMiddleware(answering(body)), **{FIELD: "5000", "wsgi.file_wrapper": FileWrapper})
        assert server.result is body

    def test_a_file_wrapper_may_be_a_function(self) -> None:
        """uwsgi's is one; its result is iterated like any body."""
        environ = {FIELD: "5000", "wsgi.file_wrapper": lambda file: file}
        assert Server(wsgi.DeadlineMiddleware(answering(io.BytesIO(b"file"))), **environ).body() == b"file"
