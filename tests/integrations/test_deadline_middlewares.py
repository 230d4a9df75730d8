"""The deadline of a request in a web service: the common behaviour of ASGI and WSGI, and that of each."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, NamedTuple
from wsgiref.util import FileWrapper, setup_testing_defaults
from wsgiref.validate import validator

import anyio
import httpx
import psycopg
import pytest
from django.db import DatabaseError
from flask.signals import got_request_exception
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from resilience import Context, DeadlineExceeded, current_context, deadline
from resilience.integrations import asgi, wsgi
from tests.callers import in_threads
from tests.conftest import FakeClock, World
from tests.integrations.servers import asgi_service, exchange

EXPECTED = "x-envoy-expected-rq-timeout-ms"
FIELD = "HTTP_X_ENVOY_EXPECTED_RQ_TIMEOUT_MS"  # the same for WSGI
OVER = DeadlineExceeded("the deadline of the execution has passed")
TOO_LATE = b"the deadline of the request has passed\n"

#: What Django makes of the error of a statement that was ended at its deadline.
WRAPPED = DatabaseError("as the database says")
WRAPPED.__cause__ = psycopg.errors.QueryCanceled("canceling statement due to statement timeout")


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


# --- both ------------------------------------------------------------------------------------


class Answer(NamedTuple):
    status: int
    body: bytes
    length: int


class Service:
    """An application in one of the two, without a server: it calls `work`, and answers "fine"."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.contexts: list[Context] = []

    def get(self, fields: dict[str, str], work: Callable[[], Any] = lambda: None, **settings: Any) -> Answer:
        def entered() -> None:
            self.contexts.append(current_context())
            work()

        if self.name == "wsgi":
            return self._wsgi(entered, fields, settings)
        return World(self.name).run(lambda: self._asgi(entered, fields, settings))  # type: ignore[no-any-return]

    async def _asgi(self, entered: Callable[[], None], fields: dict[str, str], settings: Any) -> Answer:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            entered()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
            await send({"type": "http.response.body", "body": b"fine"})

        start, body = await request(asgi.DeadlineMiddleware(app, **settings), fields)
        return Answer(start["status"], body["body"], int(dict(start["headers"])[b"content-length"]))

    def _wsgi(self, entered: Callable[[], None], fields: dict[str, str], settings: Any) -> Answer:
        def app(environ: Any, start_response: Any) -> list[bytes]:
            entered()
            start_response("200 OK", [("content-length", "4")])
            return [b"fine"]

        environ = {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in fields.items()}
        server = Server(wsgi.DeadlineMiddleware(app, **settings), **environ)
        return Answer(int(server.statuses[-1][:3]), server.body(), int(server.headers["content-length"]))


@pytest.fixture(params=["asyncio", "trio", "wsgi"])
def service(request: pytest.FixtureRequest) -> Service:
    return Service(request.param)


def raising(error: Exception, *, late: bool = False) -> Callable[[], None]:
    def work() -> None:
        while late and not current_context().expired:
            time.sleep(0.005)
        raise error

    return work


@pytest.mark.parametrize(
    ("headers", "settings", "seconds"),
    [
        ({}, {}, 60.0),
        ({}, {"default": inf}, inf),
        ({EXPECTED: "9000"}, {"cap": 2.0}, 2.0),
        ({"connect-timeout-ms": "300", "grpc-timeout": "1S"}, {}, 0.3),
        ({"X-Ms": "300"}, {"headers": ["x-ms"]}, 0.3),
    ],
)
def test_the_deadline_of_the_app_follows_the_request_and_the_settings(
    service: Service, clock: FakeClock, headers: dict[str, str], settings: dict[str, Any], seconds: float
) -> None:
    """The headers that are read, the cap and the default, as `wire.Acceptance`; it is ambient in the app only."""
    answer = service.get(headers, **settings)
    assert (answer.status, answer.body) == (200, b"fine")
    with deadline(1.0):  # an earlier one around the server
        service.get(headers, **settings)
    assert [it.remaining() for it in service.contexts] == pytest.approx([seconds, min(seconds, 1.0)])
    assert current_context().deadline == inf


def test_a_request_that_is_too_late_is_answered_without_the_app(service: Service) -> None:
    """504: no work begins for a caller who has left."""
    assert service.get({EXPECTED: "0"}) == (504, TOO_LATE, len(TOO_LATE))
    assert service.contexts == []


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(raising(OVER), id="deadline"),
        pytest.param(raising(httpx.ReadTimeout("no answer"), late=True), id="network-error-once-it-is-over"),
        pytest.param(raising(WRAPPED, late=True), id="statement-of-an-orm-that-has-ended-then"),
    ],
)
def test_an_app_that_runs_out_of_time_is_a_504(service: Service, work: Callable[[], None]) -> None:
    """Also if a client in it, whose timeout was the time left, raises its own error: see `TestRanOut` of the wire."""
    assert service.get({EXPECTED: "30"}, work) == (504, TOO_LATE, len(TOO_LATE))


@pytest.mark.parametrize(
    ("error", "late"),
    [(KeyError("bug"), True), (TimeoutError("a database"), False)],
    ids=["bug-that-is-found-late", "timeout-in-time"],
)
def test_other_errors_of_the_app_are_raised(service: Service, error: Exception, late: bool) -> None:
    """Also after the deadline, which explains only an error of the network or of a statement."""
    with pytest.raises(type(error)):
        service.get({EXPECTED: "30" if late else "5000"}, raising(error, late=late))


def test_an_app_that_does_not_check_the_deadline_is_not_cut_off(service: Service) -> None:
    assert service.get({EXPECTED: "100"}, lambda: time.sleep(0.11)).status == 200


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
