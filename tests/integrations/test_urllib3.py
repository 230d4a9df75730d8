"""`resilience.integrations.urllib3`: what is specific to it. The common rules are in `test_http_clients.py`."""

from __future__ import annotations

import gzip
import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec, module_from_spec
from typing import Any

import pytest
import urllib3

from resilience import Fallback, Retry, Timeout, TimeoutExceeded, deadline
from resilience.integrations import urllib3 as ours
from resilience.integrations.http import PerHost
from resilience.integrations.urllib3 import ResiliencePoolManager
from tests.custom import Recording
from tests.integrations.http_clients import QUICK, process_clock_ahead
from tests.integrations.httpx.conftest import full_port
from tests.integrations.servers import PATIENCE, Answer, Server
from tests.versions import is_installed, needs


def test_a_response_of_a_fallback_that_is_closed_is_returned(server: Server) -> None:
    """As is one that was made from bytes: it does not say how many are left to read."""
    policy = Fallback(handler=lambda failure, ctx: urllib3.HTTPResponse(b"cached", status=200))
    with ResiliencePoolManager(policy) as http:
        response = http.request("GET", server.script("/", 503), preload_content=False)
        assert (response.closed, response.data) == (True, b"cached")


def test_a_post_that_could_not_connect_in_time_is_tried_again() -> None:
    recording, error = Recording(), urllib3.exceptions.HTTPError
    with full_port() as url, ResiliencePoolManager(QUICK.wrap(recording)) as http, pytest.raises(error, match="timed"):
        http.request("POST", url, timeout=urllib3.Timeout(connect=0.01))
    assert len(recording.seen) == 3


@pytest.mark.parametrize("retries", [None, False, 0, 5, urllib3.Retry(connect=5, read=5, status=5)], ids=repr)
def test_the_retries_of_urllib3_are_off(server: Server, retries: Any) -> None:
    """They would multiply with the policy's."""
    with ResiliencePoolManager(QUICK) as http, pytest.raises(urllib3.exceptions.ProtocolError):
        http.request("GET", server.script("/", Answer(fault="close")), retries=retries)
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("retries", "followed"), [(None, 3), (urllib3.Retry(redirect=1, raise_on_redirect=False), 1), (False, 0)], ids=repr
)
@pytest.mark.parametrize("of", [pytest.param("manager", marks=needs("urllib3>=2.5")), "request"])
def test_the_number_of_redirects_of_urllib3_holds(server: Server, of: str, retries: Any, followed: int) -> None:
    url = server.script("/", Answer(302, {"Location": "/"}))
    for_manager, for_request = ({"retries": retries}, {}) if of == "manager" else ({}, {"retries": retries})
    with ResiliencePoolManager(QUICK, **for_manager) as http:
        if retries is None:
            with pytest.raises(urllib3.exceptions.MaxRetryError):
                http.request("GET", url, **for_request)
        else:
            assert http.request("GET", url, **for_request).status == 302
    assert len(server.requests) == followed + 1


def test_a_redirect_that_drops_the_body_drops_its_position(server: Server) -> None:
    """urllib3 before 2.8 follows a 303 with the position of the body, and without the body."""
    with ResiliencePoolManager(QUICK) as http:
        assert http.urlopen("GET", server.script("/", 200), body=None, body_pos=0).status == 200


def test_a_pool_of_the_manager_is_protected(server: Server) -> None:
    """By the same policy. It follows no redirects, as only its manager does so."""
    server.script("/", 503, Answer(302, {"Location": "/elsewhere"}))
    with ResiliencePoolManager(QUICK) as http:
        pool = http.connection_from_url(server.url)
        assert pool.request("GET", "/").status == 302
        assert pool.urlopen("GET", "/path", headers={"X-A": "1"}).data == b"ok"
    assert [it.path for it in server.requests] == ["/", "/", "/path"]


def test_a_connection_is_not_shared_before_its_body_was_read(server: Server) -> None:
    """Although `release_conn` asks urllib3 to do so: without a policy, it would have read the body by then."""
    rest = threading.Event()
    url = server.script("/slow", Answer(body=[b"first", b"rest"], drip=rest))
    with ResiliencePoolManager(Retry(1), maxsize=1, block=True) as http, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(http.request, "GET", url, release_conn=True)
        server.wait_until(lambda: server.requests)
        with pytest.raises(urllib3.exceptions.EmptyPoolError):
            http.request("GET", server.url, pool_timeout=0.1)
        rest.set()
        assert slow.result().data == b"firstrest"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_the_policy_is_that_of_the_host(host: str) -> None:
    """Even if the query contains another URL."""
    policies = PerHost(lambda origin: QUICK)
    with ResiliencePoolManager(policies) as http, pytest.raises(urllib3.exceptions.HTTPError):
        http.request("GET", f"http://{host}:1/?next=http://b/")
    assert list(policies.policies) == [f"http://{host}:1"]


def test_each_method_of_reading_a_stream_has_the_deadline(server: Server) -> None:
    """`read`, `read1`, `stream` and `read_chunked` are cut off; `json` and `data` are based on them."""
    stuck = [Answer(body=[b"a", b"b"], drip=threading.Event(), chunked=it) for it in (False, True)]
    methods: list[Any] = [
        lambda it: it.read(10),
        *([lambda it: [it.read1(1), it.read1(1)]] if is_installed("urllib3>=2.2") else []),
        lambda it: list(it.stream(1)),
        lambda it: it.json(),
    ]
    with ResiliencePoolManager(Timeout(PATIENCE, cooperative=True), maxsize=1, block=True) as http:
        for answer in stuck:
            for read in methods:
                response = http.request("GET", server.script("/", answer), preload_content=False)
                with process_clock_ahead(PATIENCE - 0.1), pytest.raises(TimeoutExceeded, match="limit_body"):
                    read(response)
                response.close()
        response = http.request("GET", server.script("/", Answer(body=b'{"a": 1}')), preload_content=False)
        assert (response.json(), response.data, response.read()) == ({"a": 1}, b'{"a": 1}', b"")


def test_a_body_whose_time_is_over_is_not_read(server: Server) -> None:
    """Although more of it has arrived: otherwise an endless one would never end. Its connection is given up."""
    url = server.script("/slow", Answer(body=[b"first", b"rest"], drip=threading.Event()))
    with ResiliencePoolManager(Timeout(PATIENCE, cooperative=True), maxsize=1, block=True) as http:
        response = http.request("GET", url, preload_content=False)
        assert response.read(1) == b"f"
        with process_clock_ahead(2 * PATIENCE), pytest.raises(TimeoutExceeded, match="limit_body"):
            response.read(1)
        assert response.closed
        assert http.request("GET", server.url, pool_timeout=0).status == 200


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(
    "read",
    [
        lambda it: it.read(),
        lambda it: it.data,
        lambda it: it.read(3) + it.read(),
        pytest.param(lambda it: it.read1(3) + it.data, marks=needs("urllib3>=2.2")),
        lambda it: it.read(-1) if it.read(0) == b"" else None,
    ],
)
def test_a_body_is_decoded_as_without_a_policy(server: Server, chunked: bool, read: Any) -> None:
    """Compressed, in chunks or not, and after a part of it has been read."""
    text = b"one chunk, and another"
    packed = gzip.compress(text)
    url = server.script("/", Answer(200, {"Content-Encoding": "gzip"}, [packed[:15], packed[15:]], chunked=chunked))
    with ResiliencePoolManager(Timeout(PATIENCE, cooperative=True)) as http:
        assert http.request("GET", url).data == text
        assert read(http.request("GET", url, preload_content=False)) == text


@pytest.mark.parametrize("given", [{}, {"timeout": 3}, {"timeout": urllib3.Timeout.DEFAULT_TIMEOUT}], ids=str)
def test_timeouts_have_the_time_left(server: Server, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    """Those of the request and the default of the manager."""
    seen: list[Any] = []
    pool, send = urllib3.HTTPConnectionPool, urllib3.HTTPConnectionPool.urlopen
    monkeypatch.setattr(pool, "urlopen", lambda *args, **it: seen.append(it["timeout"]) or send(*args, **it))
    with ResiliencePoolManager(QUICK, timeout=PATIENCE) as http:
        http.request("GET", server.url, **given)
        with deadline(1.5):
            http.request("GET", server.url, **given)
    free, bounded = seen
    assert free is given["timeout"] if given else free.connect_timeout == PATIENCE
    assert 0 < bounded.total <= 1.5
    assert bounded.connect_timeout <= 1.5


def test_an_old_urllib3_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1.26 accepts a body that is shorter than its length."""
    monkeypatch.setattr(metadata, "version", lambda name: "1.26.20")
    with pytest.raises(ImportError, match=r"1\.26\.20 takes a body that breaks off for a whole one; .*urllib3>=2"):
        importlib.reload(sys.modules[ours.__name__])


def test_a_response_has_no_method_that_an_old_urllib3_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 2.1, there is no `read1`: then `io.TextIOWrapper` calls `read`."""
    for owner in (urllib3.HTTPResponse, urllib3.BaseHTTPResponse):
        monkeypatch.delattr(owner, "read1", raising=False)
    spec = find_spec(ours.__name__)
    assert spec is not None
    assert spec.loader is not None
    with_old = module_from_spec(spec)
    spec.loader.exec_module(with_old)
    assert not hasattr(with_old.LimitedResponse, "read1")
