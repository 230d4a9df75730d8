"""The responses of a web service to a refused call or a passed deadline, in each framework."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial, reduce
from itertools import permutations
from math import inf, nan
from typing import Any

import django
import fastapi
import flask
import httpx
import psycopg
import pytest
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.db import DatabaseError
from django.http import HttpResponse
from django.urls import path
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from resilience import (
    BulkheadFull,
    CircuitOpen,
    DeadlineExceeded,
    LimitExceeded,
    RateLimited,
    Throttled,
    TimeoutExceeded,
    current_context,
    deadline,
)
from resilience.integrations import asgi, wsgi
from resilience.integrations.answers import FrameworkErrors, answer_to
from tests.conftest import FakeClock, Watched, no_collector

Endpoint = Callable[[], str]
OVER = DeadlineExceeded("the deadline of the execution has passed")
TOO_LATE = "the deadline of the request has passed\n"

#: What Django makes of the error of a statement that was ended at its deadline.
WRAPPED = DatabaseError("as the database says")
WRAPPED.__cause__ = psycopg.errors.QueryCanceled("canceling statement due to statement timeout")


class Secret(CircuitOpen):
    """A refusal whose message has data of another caller's request."""

    def __str__(self) -> str:
        return "https://example.org/?token=secret"


class Blank(CircuitOpen):
    """A refusal of a user's own, without the attributes of the others."""

    def __init__(self) -> None: ...


# --- one service, in each framework ----------------------------------------------------------


class Urls:
    """The URL configuration of Django."""

    endpoint: Endpoint
    urlpatterns = [path("", lambda request: HttpResponse(Urls.endpoint()))]  # noqa: RUF012


def _starlette(endpoint: Endpoint, middleware: Any) -> Any:
    def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse(endpoint())

    return Starlette(routes=[Route("/", answer)], middleware=[Middleware(middleware)])


def _fastapi(endpoint: Endpoint, middleware: Any) -> Any:
    app = fastapi.FastAPI()
    app.get("/", response_class=PlainTextResponse)(endpoint)
    app.add_middleware(middleware)
    return app


def _flask(endpoint: Endpoint, middleware: Any) -> Any:
    app = flask.Flask("test")
    app.get("/")(endpoint)
    app.wsgi_app = middleware(app.wsgi_app)
    return app


def _django(application: Callable[[], Any], endpoint: Endpoint, middleware: Any) -> Any:
    if not settings.configured:
        settings.configure(ROOT_URLCONF=Urls, SECRET_KEY="test", ALLOWED_HOSTS=["*"], LOGGING_CONFIG=None)
        django.setup()
    Urls.endpoint = staticmethod(endpoint)
    return middleware(application())


def _generator(endpoint: Endpoint, middleware: Any) -> Any:
    """WSGI without a framework: the work is done in the first step of the body."""

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        body = endpoint().encode()
        start_response("200 OK", [])
        yield body

    return middleware(app)


SERVICES: dict[str, Any] = {
    "starlette": (_starlette, asgi),
    "fastapi": (_fastapi, asgi),
    "django-asgi": (partial(_django, get_asgi_application), asgi),
    "flask": (_flask, wsgi),
    "django-wsgi": (partial(_django, get_wsgi_application), wsgi),
    "generator": (_generator, wsgi),
}


class Service:
    """A service in one of the frameworks, with one endpoint."""

    def __init__(self, framework: str) -> None:
        self._make, self._module = SERVICES[framework]

    def get(self, endpoint: Endpoint, *names: str, settings: Any = None, **headers: str) -> httpx.Response:
        """Answer a request, with these middlewares, the outermost last.

        :param settings: those of a `DeadlineMiddleware`, which is then the only one.
        """
        middlewares = [getattr(self._module, name) for name in names or ["ResilienceMiddleware"]]
        if settings is not None:
            middlewares = [partial(self._module.DeadlineMiddleware, **settings)]
        app = self._make(endpoint, lambda app: reduce(lambda inner, middleware: middleware(inner), middlewares, app))
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        if self._module is asgi:
            return asyncio.run(self._aget(app, fields))
        transport = httpx.WSGITransport(app, raise_app_exceptions=False)
        with httpx.Client(transport=transport, base_url="http://test") as client:
            try:
                return client.get("/", headers=fields)
            except Exception:  # in the body, which the WSGI transport of httpx does not handle
                return httpx.Response(500)

    async def _aget(self, app: Any, headers: dict[str, str]) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            try:
                return await client.get("/", headers=headers)
            except (KeyError, TimeoutError):  # of the endpoint; the transport raises others, for a wrong response
                return httpx.Response(500)


@pytest.fixture(params=list(SERVICES))
def service(request: pytest.FixtureRequest) -> Service:
    return Service(request.param)


def raising(error: Exception, *, late: bool = False) -> Endpoint:
    def endpoint() -> str:
        if late:
            time.sleep(current_context().remaining())
        raise error

    return endpoint


# --- answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        pytest.param(CircuitOpen("open", retry_after=0.2), 503, 1, id="soon"),
        pytest.param(CircuitOpen("open", retry_after=0.0), 503, 1, id="now"),
        pytest.param(BulkheadFull("own", retry_after=nan), 503, None, id="not-a-number"),
        pytest.param(CircuitOpen("isolated"), 503, None, id="no-telling-when"),
        pytest.param(BulkheadFull("full"), 503, None, id="bulkhead"),
        pytest.param(LimitExceeded("full"), 503, None, id="adaptive-limit"),
        pytest.param(Throttled("held back"), 503, None, id="throttle"),
        pytest.param(OVER, 504, None, id="deadline"),
        pytest.param(ExceptionGroup("all", [OVER, OVER]), 504, None, id="group-of-deadlines"),
        pytest.param(ExceptionGroup("all", [OVER, CircuitOpen("o", retry_after=7.0)]), 503, 7, id="mixed-group"),
        *(
            pytest.param(
                ExceptionGroup("all", [CircuitOpen("o", retry_after=it) for it in waits]), 503, wait, id=f"{waits}"
            )
            for waits, wait in (((3.0, 7.0), 7), ((7.0, 3.0), 7), ((None, 1.0), 1), ((1.0, None), 1))
        ),
        pytest.param(ExceptionGroup("all", [OVER, KeyError("bug")]), None, None, id="group-with-a-bug"),
        pytest.param(ExceptionGroup("all", [KeyError("bug")]), None, None, id="group-of-bugs"),
        pytest.param(TimeoutExceeded("too slow"), 504, None, id="timeout"),
        pytest.param(TimeoutError("own"), None, None, id="own-timeout"),
        pytest.param(ExceptionGroup("all", [OVER, TimeoutExceeded("too slow")]), 504, None, id="group-of-timeouts"),
        pytest.param(ExceptionGroup("all", [TimeoutExceeded("s"), BulkheadFull("f")]), 503, None, id="slow-and-full"),
        pytest.param(RateLimited("no", retry_after=2.5), 429, 3, id="rate"),
        pytest.param(RateLimited("no"), 429, None, id="rate-that-is-never-free"),
        pytest.param(Blank(), 503, None, id="refusal-without-its-attributes"),
        pytest.param(KeyError("bug"), None, None, id="bug"),
        pytest.param(BaseExceptionGroup("all", [OVER, KeyboardInterrupt()]), None, None, id="group-with-an-interrupt"),
    ],
)
def test_the_answer_depends_on_the_kind_of_error(
    error: BaseException, status: int | None, retry_after: int | None
) -> None:
    """An error that no policy has raised has none."""
    answer = answer_to(error)
    assert (answer and answer.status, answer and answer.retry_after) == (status, retry_after)


def test_the_response_has_a_status_and_a_wait_and_no_details(service: Service) -> None:
    """The wait is in whole seconds, rounded up; the body names neither the policy nor what failed."""
    endpoints: list[tuple[Endpoint, int, str | None]] = [
        (raising(Secret("open", retry_after=29.5)), 503, "30"),
        (raising(RateLimited("no")), 429, None),
        (raising(OVER), 504, None),
        (raising(TimeoutExceeded("too slow")), 504, None),
        (raising(KeyError("bug")), 500, None),
        (lambda: "fine", 200, None),
    ]
    for endpoint, status, retry_after in endpoints:
        answer = service.get(endpoint)
        assert (answer.status_code, answer.headers.get("retry-after")) == (status, retry_after)
        assert "secret" not in answer.text
        assert (answer.text == "the service is not available now\n") is (status == 503)
        assert (answer.text == "fine") is (status == 200)
    assert service.get(raising(OVER)).text == TOO_LATE


@pytest.mark.parametrize("names", [*permutations(["ResilienceMiddleware", "DeadlineMiddleware"])])
def test_of_two_middlewares_each_answers_its_own_errors(service: Service, names: tuple[str, str]) -> None:
    """In any order."""
    late = raising(ConnectionError("no answer in the time that was left"), late=True)
    assert service.get(late, *names, x_envoy_expected_rq_timeout_ms="10").status_code == 504
    assert service.get(raising(CircuitOpen("open")), *names).status_code == 503


# --- the deadline of a request ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "settings", "seconds"),
    [
        ({}, {}, 60.0),
        ({}, {"default": inf}, inf),
        ({"x_envoy_expected_rq_timeout_ms": "9000"}, {"cap": 2.0}, 2.0),
        ({"connect_timeout_ms": "300", "grpc_timeout": "1S"}, {}, 0.3),
        ({"X_Ms": "300"}, {"headers": ["x-ms"]}, 0.3),
    ],
)
def test_the_deadline_of_the_app_follows_the_request_and_the_settings(
    service: Service, clock: FakeClock, headers: dict[str, str], settings: dict[str, Any], seconds: float
) -> None:
    """The headers that are read, the cap and the default, as `wire.Acceptance`; it is ambient in the app only."""
    left: list[float] = []

    def endpoint() -> str:
        left.append(current_context().remaining())
        return "fine"

    assert service.get(endpoint, settings=settings, **headers).text == "fine"
    with deadline(1.0):  # an earlier one around the server
        service.get(endpoint, settings=settings, **headers)
    assert left == pytest.approx([seconds, min(seconds, 1.0)])
    assert current_context().deadline == inf


def test_a_request_that_is_too_late_is_answered_without_the_app(service: Service) -> None:
    """No work begins for a caller who has left."""
    answer = service.get(raising(KeyError("it began")), settings={}, x_envoy_expected_rq_timeout_ms="0")
    assert (answer.status_code, answer.text, answer.headers["content-length"]) == (504, TOO_LATE, str(len(TOO_LATE)))


@pytest.mark.parametrize(
    ("error", "late", "status"),
    [
        pytest.param(OVER, False, 504, id="deadline"),
        pytest.param(httpx.ReadTimeout("no answer"), True, 504, id="network-error-once-it-is-over"),
        pytest.param(WRAPPED, True, 504, id="statement-of-an-orm-that-has-ended-then"),
        pytest.param(KeyError("bug"), True, 500, id="bug-that-is-found-late"),
        pytest.param(TimeoutError("a database"), False, 500, id="timeout-in-time"),
    ],
)
def test_an_app_that_runs_out_of_time_is_a_504(service: Service, error: Exception, late: bool, status: int) -> None:
    """Also if a client in it, whose timeout was the time left, raises its own error: see `TestRanOut` of the wire.

    The deadline explains only an error of the network or of a statement; others stay errors of the app.
    """
    milliseconds = "30" if late else "5000"
    answer = service.get(raising(error, late=late), settings={}, x_envoy_expected_rq_timeout_ms=milliseconds)
    assert (answer.status_code, answer.text == TOO_LATE) == (status, status == 504)


def test_an_app_that_does_not_check_the_deadline_is_not_cut_off(service: Service) -> None:
    def slow() -> str:
        time.sleep(0.11)
        return "fine"

    assert service.get(slow, settings={}, x_envoy_expected_rq_timeout_ms="100").text == "fine"


# --- what is left as it is --------------------------------------------------------------------


def test_an_answer_that_the_application_has_chosen_is_kept() -> None:
    """By an error handler, or by an endpoint, even if it is a 500."""
    app = flask.Flask("test")
    app.get("/open")(raising(CircuitOpen("open")))
    app.register_error_handler(CircuitOpen, lambda error: ("cached", 200))
    app.get("/chosen")(lambda: ("as I say", 500))
    app.wsgi_app = wsgi.ResilienceMiddleware(app.wsgi_app)  # type: ignore[method-assign]
    assert app.test_client().get("/open").text == "cached"
    assert app.test_client().get("/chosen").text == "as I say"


def test_a_service_without_the_middleware_is_unchanged() -> None:
    """Although its framework has a hook, for another service in the process."""
    app = flask.Flask("test")
    app.get("/")(raising(CircuitOpen("open")))
    assert app.test_client().get("/").status_code == 500


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
@pytest.mark.parametrize("middleware", [asgi.ResilienceMiddleware, asgi.DeadlineMiddleware])
async def test_other_asgi_scopes_are_passed_on(middleware: Any, kind: str) -> None:
    """They have no status to answer with, and no deadline."""

    async def app(*given: Any) -> None:
        assert (given, current_context().deadline) == (({"type": kind}, receive, send), inf)
        raise CircuitOpen("open")

    async def receive() -> Any: ...
    async def send(message: Any) -> None: ...

    with pytest.raises(CircuitOpen):
        await middleware(app)({"type": kind}, receive, send)


@pytest.mark.parametrize("is_late", [False, True])
def test_an_error_is_freed_without_the_cyclic_collector(is_late: bool) -> None:
    """Whether it is answered, or comes too late for an answer."""

    def start_response(status: str, headers: Any, error: Any) -> None:
        try:
            if is_late:
                raise error[1]  # as a server does if the headers have been sent
        finally:
            del error

    watched = Watched()
    with no_collector():
        app = wsgi.ResilienceMiddleware(lambda environ, start_response: watched.fail(lambda: CircuitOpen("open")))
        with suppress(CircuitOpen) if is_late else nullcontext():
            assert app({}, start_response)
        assert watched.seen
        assert watched.alive == []


def test_nothing_of_a_request_is_kept_after_it() -> None:
    """A thread of the server works for many."""
    watched = Watched()
    with no_collector():
        with watched.watch(FrameworkErrors(answer_to)):
            pass
        assert watched.alive == []
