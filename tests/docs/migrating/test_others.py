"""The page on migrating, from others: the rows of urllib3 and cachetools."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import cachetools
import pytest
import requests
import urllib3
from requests.adapters import HTTPAdapter

from resilience import Retry
from resilience.integrations.http import Rules
from resilience.integrations.requests import ResilienceAdapter
from resilience.testing import no_sleeping
from tests.docs.migrating.rows import NAMES, PAGE, written
from tests.docs.side_by_side import code_in, rows_of
from tests.integrations.servers import Server, flaky_server

ROWS = rows_of(PAGE, "others")
OURS = {**NAMES, "ResilienceAdapter": ResilienceAdapter, "Rules": Rules, "timedelta": timedelta}


def row(beginning: str) -> tuple[str, str]:
    """Return the code of both sides of a row."""
    left = next(cell for cell in ROWS if cell.startswith(beginning))
    return code_in(left), code_in(ROWS[left].removeprefix("["))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with flaky_server() as running:
        yield running


def their_retry(arguments: str) -> HTTPAdapter:
    return HTTPAdapter(max_retries=eval(f"Retry({arguments})", {"Retry": urllib3.Retry}))  # the page is trusted


def sent(server: Server, adapter: HTTPAdapter, method: str, *statuses: int) -> tuple[object, list[str]]:
    """Make a request; return how it ended, and the methods that the server got."""
    url = server.script("/others", *statuses)
    before = len(server.requests)
    with requests.Session() as session, mock.patch.object(time, "sleep"), no_sleeping():
        session.mount("http://", adapter)
        try:
            end: object = session.request(method, url, timeout=20).status_code
        except requests.RequestException as error:
            end = type(error).__name__
    return end, [request.method for request in server.requests[before:]]


@pytest.mark.parametrize("statuses", [(500, 503, 200), (503, 200), (404, 200), (502, 200), (503, 503, 503, 200)])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "HEAD"])
def test_the_retries_of_urllib3_in_requests(server: Server, method: str, statuses: tuple[int, ...]) -> None:
    left, right = row("urllib3")
    their = eval(left, {"HTTPAdapter": HTTPAdapter, "Retry": urllib3.Retry})  # the page is trusted
    assert sent(server, their, method, *statuses) == sent(server, written(right, OURS), method, *statuses)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
def test_the_methods_that_urllib3_repeats(server: Server, method: str) -> None:
    left, right = row("`allowed_methods=")
    their = their_retry(f"total=3, status_forcelist=[503], {left}")
    our = ResilienceAdapter(Retry(4), rules=written(right, OURS))
    assert sent(server, their, method, 503, 200) == sent(server, our, method, 503, 200)


def test_a_last_bad_response_is_raised_by_urllib3_and_returned_here(server: Server) -> None:
    left, right = "raise_on_status=False", ROWS["`raise_on_status=False`"]
    our = sent(server, ResilienceAdapter(Retry(3)), "GET", 503)
    assert our == sent(server, their_retry(f"total=2, status_forcelist=[503], {left}"), "GET", 503)
    assert our == (503, ["GET"] * 3)
    assert right.startswith("the default")
    assert sent(server, their_retry("total=2, status_forcelist=[503]"), "GET", 503) == ("RetryError", ["GET"] * 3)


def test_the_waits_of_urllib3(server: Server) -> None:
    left, right = row("`backoff_factor=1`")
    waits = list[float]()
    our = written(f"Retry(5, on_retry=note, {right})", {**OURS, "note": lambda event: waits.append(event.delay)})
    sent(server, ResilienceAdapter(our), "GET", 503)
    with mock.patch.object(time, "sleep") as sleep, requests.Session() as session:
        session.mount("http://", their_retry(f"total=4, status_forcelist=[503], raise_on_status=False, {left}"))
        session.get(server.script("/others", 503), timeout=20)
    assert waits == [0, *(call.args[0] for call in sleep.call_args_list)]


@pytest.mark.parametrize("beginning", ["cachetools", "the same without"])
def test_a_cache_of_cachetools(beginning: str) -> None:
    ours = row(beginning)[1]
    theirs = row(beginning)[0] if beginning == "cachetools" else "@cached({})"
    names: dict[str, Any] = {**vars(cachetools), **OURS}
    calls: list[tuple[str, object]] = []
    for code in (theirs, ours):
        cached = written(code.removeprefix("@"), names)(lambda key, code=code: calls.append((code, key)) or len(calls))
        assert [cached(key) == cached(key) for key in ("a", None)] == [True, True]
    assert calls == [(theirs, "a"), (theirs, None), (ours, "a"), (ours, None)]


def test_what_can_be_done_with_a_cache() -> None:
    left = next(cell for cell in ROWS if cell.startswith("`function.cache_clear()`"))
    clear, stats = ROWS[left].split("`")[1::2][:2]
    names = {**OURS, "cache": written("Cache(300)", OURS)}
    assert names["cache"](len)("abc") == 3
    assert written(stats, names).misses == 1
    written(clear, names)
    assert names["cache"].stats().size == 0
