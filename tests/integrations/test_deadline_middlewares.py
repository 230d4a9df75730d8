"""The deadline of a request: the common behaviour of ASGI and WSGI."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple
from wsgiref.util import setup_testing_defaults

import httpx
import psycopg
import pytest
from django.db import DatabaseError

from resilience import Context, DeadlineExceeded, current_context, deadline
from resilience.integrations import asgi, wsgi
from tests.conftest import FakeClock, World

EXPECTED = "x-envoy-expected-rq-timeout-ms"
OVER = DeadlineExceeded("the deadline of the execution has passed")
TOO_LATE = b"the deadline of the request has passed\n"

#: What a unit of work raises at its deadline, and what SQLAlchemy and Django make of it.
ENDED = psycopg.errors.QueryCanceled("canceling statement due to statement timeout")
WRAPPED = DatabaseError("as the database says")
WRAPPED.__cause__ = ENDED


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

        async def receive() -> Any: ...

        async def send(message: Any) -> None:
            sent.append(message)

        sent: list[Any] = []
        headers = [(name.encode(), value.encode()) for name, value in fields.items()]
        await asgi.DeadlineMiddleware(app, **settings)({"type": "http", "headers": headers}, receive, send)
        start, body = sent
        return Answer(start["status"], body["body"], int(dict(start["headers"])[b"content-length"]))

    def _wsgi(self, entered: Callable[[], None], fields: dict[str, str], settings: Any) -> Answer:
        def app(environ: Any, start_response: Any) -> list[bytes]:
            entered()
            start_response("200 OK", [("content-length", "4")])
            return [b"fine"]

        def start_response(status: str, headers: Any, error: Any = None) -> None:
            started.append((int(status[:3]), int(dict(headers)["content-length"])))

        started: list[tuple[int, int]] = []
        environ = {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in fields.items()}
        setup_testing_defaults(environ)
        body = b"".join(wsgi.DeadlineMiddleware(app, **settings)(environ, start_response))
        return Answer(started[0][0], body, started[0][1])


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
    assert service.contexts[0].remaining() == pytest.approx(seconds)
    assert current_context().deadline == inf


def test_an_earlier_deadline_around_the_server_holds(service: Service, clock: FakeClock) -> None:
    with deadline(1.0) as outer:
        service.get({EXPECTED: "5000"})
    assert service.contexts[0].deadline == outer.deadline


def test_a_request_that_is_too_late_is_answered_without_the_app(service: Service) -> None:
    """504: no work begins for a caller who has left."""
    assert service.get({EXPECTED: "0"}) == (504, TOO_LATE, len(TOO_LATE))
    assert service.contexts == []


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(raising(OVER), id="deadline"),
        pytest.param(raising(httpx.ReadTimeout("no answer"), late=True), id="network-error-once-it-is-over"),
        pytest.param(raising(ENDED, late=True), id="statement-that-has-ended-then"),
        pytest.param(raising(WRAPPED, late=True), id="statement-of-an-orm"),
        pytest.param(raising(ExceptionGroup("both", [OVER, OVER])), id="group-of-a-task-group"),
    ],
)
def test_an_app_that_runs_out_of_time_is_a_504(service: Service, work: Callable[[], None]) -> None:
    """Also if a client in it, whose timeout was the time left, raises its own error."""
    assert service.get({EXPECTED: "30"}, work) == (504, TOO_LATE, len(TOO_LATE))


@pytest.mark.parametrize(
    ("error", "late"),
    [(KeyError("bug"), False), (KeyError("bug"), True), (TimeoutError("a database"), False), (ENDED, False)],
    ids=["bug", "bug-that-is-found-late", "timeout-in-time", "statement-in-time"],
)
def test_other_errors_of_the_app_are_raised(service: Service, error: Exception, late: bool) -> None:
    """Also after the deadline, which explains only an error of the network or of a statement."""
    with pytest.raises(type(error)):
        service.get({EXPECTED: "30" if late else "5000"}, raising(error, late=late))


def test_an_app_that_does_not_check_the_deadline_is_not_cut_off(service: Service) -> None:
    assert service.get({EXPECTED: "10"}, lambda: time.sleep(0.03)).status == 200
