"""Two real services: the first calls the second, and the deadline of the first one's caller reaches it.

The first is ASGI (uvicorn) and the second WSGI (wsgiref), with httpx between them. They share one process, but only the
header carries the deadline from one to the other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from resilience import Retry, current_context
from resilience.integrations import asgi, wsgi
from resilience.integrations.httpx import AsyncResilienceTransport
from tests.integrations.services import PATIENCE, asgi_service, wsgi_service

HEADER = "x-envoy-expected-rq-timeout-ms"

#: Seconds for which the services would work without a deadline.
MUCH = 20.0

#: Seconds that a request may take on a busy machine, for tests that need a bound.
SLACK = 10.0


#: Seconds for a request. On a busy machine the first may have passed before the second service gets a request.
BUDGETS = (0.3, 1.0, 5.0)


def within(budget: float) -> dict[str, str]:
    """The header of a request with this budget, in seconds."""
    return {HEADER: f"{budget * 1000:.0f}"}


@dataclass
class Log:
    """The calls of the second service."""

    began: list[float] = field(default_factory=list)  # the instants at which work began
    given: list[float] = field(default_factory=list)  # the seconds left at that instant


@contextlib.contextmanager
def services(work: Callable[[], Iterator[float]], log: Log, rounds: int = 1) -> Iterator[str]:
    """Start both; the first calls the second `rounds` times for each request, one call after the other."""

    def second(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        log.began.append(time.monotonic())
        log.given.append(current_context().remaining())
        for pause in work():
            time.sleep(pause)
        yield b"done"

    async def first(scope: Any, receive: Any, send: Any) -> None:
        transport = AsyncResilienceTransport(Retry(3, backoff=[0.01]), propagate_to=[urlsplit(second_url).netloc])
        async with httpx.AsyncClient(transport=transport, timeout=PATIENCE) as client:
            statuses = [(await client.get(second_url)).status_code for _ in range(rounds)]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": repr(statuses).encode()})

    with (
        wsgi_service(wsgi.DeadlineMiddleware(second, default=inf)) as second_url,
        asgi_service(asgi.DeadlineMiddleware(first, default=inf)) as url,
    ):
        yield url


@pytest.fixture
def log() -> Log:
    return Log()


def work_briefly() -> Iterator[float]:
    yield 0.05


def work_until_the_deadline() -> Iterator[float]:
    until = time.monotonic() + MUCH
    while time.monotonic() < until:
        current_context().check()
        yield 0.005


def test_a_caller_gets_a_504_at_the_deadline_and_no_work_begins_after_it(log: Log) -> None:
    """The first service would call the second for a long time."""
    with services(work_briefly, log, rounds=int(MUCH / 0.05)) as url, httpx.Client(timeout=PATIENCE) as client:
        for budget in BUDGETS:
            began = time.monotonic()
            assert client.get(url, headers=within(budget)).status_code == 504
            if log.began:
                break
        assert client.get(url, headers=within(0)).status_code == 504
    assert max(time.monotonic(), *log.began) < began + budget + SLACK
    assert all(later < earlier for earlier, later in zip(log.given, log.given[1:], strict=False))
    assert max(log.given) <= budget


def test_work_that_has_begun_obeys_the_deadline(log: Log) -> None:
    """The second service stops, although it is not cut off."""
    stopped = threading.Event()

    def work() -> Iterator[float]:
        try:
            yield from work_until_the_deadline()
        finally:
            stopped.set()

    with services(work, log) as url, httpx.Client(timeout=PATIENCE) as client:
        for budget in BUDGETS:
            began = time.monotonic()
            client.get(url, headers=within(budget))
            if log.began:
                break
        assert stopped.wait(PATIENCE)
        assert time.monotonic() - began < budget + SLACK
    assert len(log.began) == 1
    assert 0 < log.given[0] <= budget


def test_a_request_without_a_deadline_is_not_limited(log: Log) -> None:
    with services(work_briefly, log, rounds=2) as url:
        assert httpx.get(url, timeout=PATIENCE).text == "[200, 200]"
    assert log.given == [inf, inf]
