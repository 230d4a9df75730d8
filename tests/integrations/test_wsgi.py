"""The deadline of a request in a WSGI application."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from math import inf
from typing import Any
from wsgiref.util import FileWrapper, setup_testing_defaults
from wsgiref.validate import validator

import httpx
import pytest

from resilience import Context, DeadlineExceeded, Retry, current_context, deadline
from resilience.integrations.wsgi import DeadlineMiddleware
from tests.integrations.services import wsgi_service

EXPECTED = "HTTP_X_ENVOY_EXPECTED_RQ_TIMEOUT_MS"
HEADER = "x-envoy-expected-rq-timeout-ms"


class Server:
    """The steps of a WSGI server for one request."""

    def __init__(self, app: Any, **environ: Any) -> None:
        self.statuses: list[str] = []
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


def answering(body: Any) -> tuple[Any, list[Context]]:
    """Return an app with this body, and the list of contexts that it is called with."""
    contexts: list[Context] = []

    def app(environ: Any, start_response: Any) -> Any:
        contexts.append(current_context())
        start_response("200 OK", [("Content-Type", "text/plain")])
        return body

    return app, contexts


OVER = DeadlineExceeded("the deadline of the execution has passed")


class TestContextOfTheApp:
    def test_is_ambient_in_every_step_of_the_body_and_not_between_them(self) -> None:
        """A WSGI body runs after the app has returned, in the server's loop, perhaps in another thread."""
        body = Body(b"a", b"b")
        server = Server(DeadlineMiddleware(answering(body)[0]), **{EXPECTED: "60000"})
        items = server.items()
        assert next(items) == b"a"
        assert current_context().deadline == inf
        rest: list[bytes] = []
        thread = threading.Thread(target=lambda: rest.extend(items))
        thread.start()
        thread.join()
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

        server = Server(DeadlineMiddleware(app), **{EXPECTED: "60000"})
        for _ in server.items():
            assert current_context().deadline == inf


class TestAfterTheDeadline:
    @pytest.mark.parametrize("milliseconds", ["0", "5000"])
    def test_the_answer_to_head_has_no_body(self, milliseconds: str) -> None:
        """A server would send that body as the beginning of the next response."""
        app = DeadlineMiddleware(answering(Body(OVER))[0])
        server = Server(app, REQUEST_METHOD="HEAD", **{EXPECTED: milliseconds})
        assert server.body() == b""
        assert server.statuses[-1] == "504 Gateway Timeout"

    def test_a_status_that_was_not_sent_is_replaced_by_a_504(self) -> None:

        def app(environ: Any, start_response: Any) -> Any:
            start_response("200 OK", [])
            raise OVER

        assert Server(DeadlineMiddleware(app), **{EXPECTED: "5000"}).statuses == ["200 OK", "504 Gateway Timeout"]

    def test_an_error_in_the_first_step_of_the_body_is_a_504(self) -> None:
        """A generator does its work in the first step; its `close` is called too."""
        body = Body(OVER, b"not reached")
        server = Server(DeadlineMiddleware(answering(body)[0]), **{EXPECTED: "5000"})
        assert server.body() == b"the deadline of the request has passed\n"
        assert server.statuses == ["200 OK", "504 Gateway Timeout"]
        assert len(body.closed) == 1

    def test_a_later_step_of_the_body_raises(self) -> None:
        """The status is sent, so that the server has to break the connection off."""
        body = Body(b"a", OVER)
        server = Server(DeadlineMiddleware(answering(body)[0]), **{EXPECTED: "5000"})
        with pytest.raises(DeadlineExceeded):
            server.body()
        assert len(body.closed) == 1

    def test_other_errors_of_the_body_are_raised(self) -> None:
        body = Body(TimeoutError("a database"))
        server = Server(DeadlineMiddleware(answering(body)[0]), **{EXPECTED: "5000"})
        with pytest.raises(TimeoutError, match="a database"):
            server.body()


class TestTheProtocol:
    def test_is_kept_according_to_the_validator_of_wsgiref(self) -> None:
        """With the validator on both sides: the middleware is a correct server and a correct application."""
        for headers in ({}, {EXPECTED: "5000"}, {EXPECTED: "0"}):
            app, _ = answering(Body(b"a", b"b"))
            outer = validator(DeadlineMiddleware(validator(app)))
            assert Server(outer, **headers).body() in (b"ab", b"the deadline of the request has passed\n")

    def test_close_is_called_once(self) -> None:
        """However often the server calls it, and also if nothing was read."""
        body = Body(b"a")
        server = Server(DeadlineMiddleware(answering(body)[0]))
        server.close()
        server.close()
        assert len(body.closed) == 1
        assert list(server.result) == []

    def test_the_function_write_is_the_servers(self) -> None:
        """The older way of sending a body."""

        def app(environ: Any, start_response: Any) -> Any:
            start_response("200 OK", [])(b"written")
            return [b"returned"]

        server = Server(DeadlineMiddleware(app))
        assert server.body() == b"returned"
        assert server.written == [b"written"]

    @pytest.mark.parametrize("body", [[b"a"], (b"a", b"b"), FileWrapper(io.BytesIO(b"file"))])
    def test_a_body_that_runs_no_code_is_returned_unchanged(self, body: Any) -> None:
        """The server reads the length of a list, and sends a file in its own way."""
        server = Server(DeadlineMiddleware(answering(body)[0]), **{EXPECTED: "5000", "wsgi.file_wrapper": FileWrapper})
        assert server.result is body

    def test_a_file_wrapper_may_be_a_function(self) -> None:
        """uwsgi's is one; its result is iterated like any body."""
        environ = {EXPECTED: "5000", "wsgi.file_wrapper": lambda file: file}
        assert Server(DeadlineMiddleware(answering(io.BytesIO(b"file"))[0]), **environ).body() == b"file"


def test_a_real_server_gets_the_response_or_a_504() -> None:
    """wsgiref: in time, too late, and out of time inside of the app."""

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        if environ["PATH_INFO"] == "/slow":
            while not current_context().expired:
                threading.Event().wait(0.005)
        Retry().call(int)
        start_response("200 OK", [])
        yield b"x"
        yield b"%d" % (current_context().remaining() <= 60)

    with wsgi_service(DeadlineMiddleware(app, default=inf)) as url, httpx.Client() as client:
        assert client.get(url, headers={HEADER: "60000"}).text == "x1"
        assert client.get(url).text == "x0"
        assert client.get(url, headers={HEADER: "0"}).status_code == 504
        assert client.get(f"{url}/slow", headers={HEADER: "20"}).status_code == 504
