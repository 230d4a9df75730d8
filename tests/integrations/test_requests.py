"""`resilience.integrations.requests`: what is specific to it. The common rules are in `test_http_clients.py`."""

from __future__ import annotations

import io
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import urllib3
from requests.adapters import BaseAdapter, HTTPAdapter
from requests.auth import HTTPDigestAuth
from typing_extensions import override

from resilience import CircuitBreaker, Context, DeadlineExceeded, Fallback, Policy, Retry, Timeout, deadline
from resilience.clock import clock as process_clock
from resilience.integrations.http import NotRepeatable, Rules
from resilience.integrations.requests import ResilienceAdapter
from tests.functions import raising
from tests.integrations.http_clients import QUICK, process_clock_ahead
from tests.integrations.servers import PATIENCE, Answer, Server, notes_of, unused_url

Make = Callable[..., requests.Session]


class Recorder(BaseAdapter):
    """An adapter that sends nothing, and records its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[Any] = []
        self.is_closed = False

    @override
    def send(self, request: Any, stream: Any = False, timeout: Any = None, *args: Any, **options: Any) -> Any:
        self.timeouts.append(timeout)
        response = requests.Response()
        response.status_code, response.request, response.url = 200, request, request.url
        response.raw = io.BytesIO(b"recorded")
        return response

    @override
    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def session() -> Iterator[Make]:
    """A function: `session(policy, **options)` makes a session of requests that sends everything through the policy."""
    made: list[requests.Session] = []

    def make(policy: Policy[Any] = QUICK, **options: Any) -> requests.Session:
        made.append(requests.Session())
        made[-1].mount("http://", ResilienceAdapter(policy, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


# --- sessions and adapters --------------------------------------------------------------------


def test_the_response_of_a_fallback_needs_no_connection(server: Server, session: Make) -> None:
    """Also if the session streams."""

    def cached(failure: Any, ctx: Context) -> requests.Response:
        answer = requests.Response()
        answer.status_code, answer._content, answer.request = 203, b"cached", failure.error.response.request
        return answer

    response = session(Fallback(handler=cached)).get(server.script("/", 503), stream=True)
    assert (response.status_code, response.text) == (203, "cached")


def test_a_generator_is_not_sent_again_after_a_challenge(server: Server, session: Make) -> None:
    """requests itself would send an empty body."""
    url = server.script("/", Answer(401, {"WWW-Authenticate": 'Digest realm="r", nonce="n"'}), 200)
    with pytest.raises(NotRepeatable, match="used up"):
        session().put(url, data=(it for it in [b"once"]), auth=HTTPDigestAuth("me", "secret"))
    assert [it.body for it in server.requests] == [b"once"]


@pytest.mark.parametrize("wrapped", [True, False])
def test_the_second_request_of_digest_authentication_is_retried(server: Server, session: Make, wrapped: bool) -> None:
    """A hook sends it, through the policy."""
    challenge = Answer(401, {"WWW-Authenticate": 'Digest realm="r", nonce="n", qop="auth"'})
    url = server.script("/", 503, challenge, 503, 200)
    options = {"adapter": HTTPAdapter()} if wrapped else {}
    response = session(QUICK, **options).get(url, auth=HTTPDigestAuth("me", "secret"))
    assert response.status_code == 200
    assert ["Authorization" in it.headers for it in server.requests] == [False, False, True, True]


def test_a_redirect_is_followed_even_if_its_body_cannot_be_decoded(server: Server, session: Make) -> None:
    """As requests itself does. The body of any other response must be decoded."""
    wrong = {"Content-Encoding": "gzip", "Location": "/elsewhere"}
    http = session(QUICK)
    assert http.get(server.script("/", Answer(302, wrong))).text == "ok"
    with pytest.raises(requests.exceptions.ContentDecodingError):
        http.get(server.script("/", Answer(200, wrong)))
    assert len(server.requests) == 3


def test_hooks_get_only_the_response_that_is_returned(server: Server, session: Make) -> None:
    seen: list[int] = []
    session().get(server.script("/", 503, 200), hooks={"response": lambda it, **_: seen.append(it.status_code)})
    assert seen == [200]


# --- the adapter ------------------------------------------------------------------------------


def test_a_wrapped_adapter_sends_and_is_closed(server: Server, session: Make) -> None:
    """Its own changes of requests still apply."""

    class Signing(HTTPAdapter):
        @override
        def add_headers(self, request: Any, **options: Any) -> None:
            request.headers["X-Signature"] = "signed"

    session(QUICK, adapter=Signing()).get(server.script("/", 503, 200))
    assert [it.headers["X-Signature"] for it in server.requests] == ["signed"] * 2
    recorder = Recorder()
    ResilienceAdapter(QUICK, adapter=recorder).close()
    assert recorder.is_closed


def test_an_adapter_keeps_as_many_connections_as_it_is_given() -> None:
    adapter = ResilienceAdapter(QUICK, pool_connections=1, pool_maxsize=2, pool_block=True)
    pools = adapter.poolmanager
    for host in ("a", "b"):
        pool = pools.connection_from_url(f"http://{host}/")
        assert (len(pools.pools), pool.pool.maxsize, pool.block) == (1, 2, True)


def test_a_session_can_be_pickled_if_its_policies_can(server: Server, session: Make) -> None:
    """A circuit breaker, which is shared, cannot."""
    client = pickle.loads(pickle.dumps(session(QUICK, pool_maxsize=3)))
    with client:
        assert client.get(server.script("/", 503, 200)).status_code == 200
        assert client.get_adapter("http://x")._pool_maxsize == 3
    with pytest.raises(TypeError, match="all its users share"):
        pickle.dumps(session(CircuitBreaker(5)))


# --- what may be sent again -------------------------------------------------------------------


def test_a_post_is_tried_again_if_there_was_no_connection_to_the_proxy(session: Make) -> None:
    """Its generator is unread."""
    body = (it for it in [b"order"])
    with pytest.raises(requests.ConnectionError) as caught:
        session().post(unused_url(), data=body, proxies={"http": unused_url()})
    assert "3 attempts" in notes_of(caught.value)
    assert list(body) == [b"order"]


@pytest.mark.parametrize("fault", ["reset", "close"])
def test_a_post_that_a_proxy_has_received_is_sent_once(server: Server, session: Make, fault: Any) -> None:
    """urllib3 reports that it could not connect to the proxy, also if that closed the connection after the request."""
    url = "http://nowhere.invalid/"
    server.script(url, Answer(fault=fault))
    with pytest.raises(requests.exceptions.ProxyError) as caught:
        session().post(url, data=(it for it in [b"order"]), proxies={"http": server.url})
    assert "its body can be sent only once" in notes_of(caught.value)
    assert [it.body for it in server.requests] == [b"order"]


def test_a_connect_timeout_of_the_users_adapter_says_that_nothing_was_sent(session: Make) -> None:
    adapter = Recorder()
    adapter.send = raising(requests.ConnectTimeout("no route"))  # type: ignore[method-assign]
    with pytest.raises(requests.ConnectTimeout) as caught:
        session(QUICK, adapter=adapter).post("http://nowhere")
    assert "3 attempts" in notes_of(caught.value)


def test_the_body_of_a_response_is_sent_once(server: Server, session: Make) -> None:
    """A streamed response can be read once, although it has a position."""
    source = session().get(server.script("/source", Answer(body=b"once")), stream=True)
    assert session().put(server.script("/", 503, 200), data=source.raw).status_code == 503
    assert [it.body for it in server.requests_to("/")] == [b"once"]


def test_an_error_of_the_users_body_is_raised_and_not_retried(server: Server, session: Make) -> None:
    body = (bytes([1 // it]) for it in (1, 0))
    with pytest.raises(ZeroDivisionError):
        session(Retry(3, on=Exception, backoff=[0])).put(server.url, data=body)


# --- timeouts and deadlines -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "capped"),
    [
        (None, (100, 100)),
        (500, (100, 100)),
        (0.5, (0.5, 0.5)),
        ((0.5, None), (0.5, 100)),
        ((305, 270), (100, 100)),
        (urllib3.Timeout(connect=0.5, read=500), (0.5, 100)),
        (urllib3.Timeout(total=50), (50, 50)),
    ],
)
def test_timeouts_have_the_time_left(session: Make, given: Any, capped: tuple[float, float]) -> None:
    """Without a deadline, a timeout is unchanged."""
    recorder = Recorder()
    client = session(adapter=recorder)
    client.get("http://nowhere", timeout=given)
    with deadline(100):
        client.get("http://nowhere", timeout=given)
        with pytest.raises(ValueError, match="a pair"):
            client.get("http://nowhere", timeout=(1, 2, 3))
    unchanged, shortened = recorder.timeouts
    assert unchanged is given
    for seconds, most in zip(shortened, capped, strict=True):
        assert max(0.5, most - PATIENCE) <= seconds <= most


def test_the_total_timeout_includes_connecting(server: Server, session: Make, monkeypatch) -> None:
    seen: list[urllib3.Timeout] = []
    send = HTTPAdapter.send
    monkeypatch.setattr(HTTPAdapter, "send", lambda *args, **it: seen.append(it["timeout"]) or send(*args, **it))
    with deadline(10.0):
        session().get(server.url, timeout=20)
    assert 9.0 < seen[0].total <= 10.0  # type: ignore[operator]


def test_a_deadline_ends_the_sending_of_a_request(session: Make) -> None:
    """A wait to send has a timeout too, for which urllib3 has another error."""
    with socket.create_server(("127.0.0.1", 0)) as listener:  # which accepts no connection, and reads nothing
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(DeadlineExceeded), deadline(0.1):
            session().put(url, data=bytes(20_000_000))


@pytest.mark.parametrize(
    ("limited", "given", "most"),
    [
        (True, None, PATIENCE),
        (False, None, None),
        (False, 70, 70),
        (False, (80, 70), 70),
        (False, urllib3.Timeout(total=70), 70),
    ],
)
def test_the_read_timeout_of_a_stream_is_the_users_or_the_time_left(
    server: Server, session: Make, limited: bool, given: Any, most: float | None
) -> None:
    """The time left does not apply with `limit_body=False`."""
    url = server.script("/", Answer(body=[b"first", b"rest"], drip=threading.Event()))
    client = session(Timeout(PATIENCE, cooperative=True), rules=Rules(limit_body=limited))
    with client.get(url, stream=True, timeout=given) as response:
        response.raw.read(1)
        seconds = response.raw.connection.sock.gettimeout()
    assert seconds == (most if most is None else pytest.approx(most - PATIENCE / 2, abs=PATIENCE / 2))


@pytest.mark.parametrize("stream", [True, False])
def test_each_wait_for_a_piece_has_the_time_left(server: Server, session: Make, monkeypatch, stream: bool) -> None:
    """The earlier pieces have taken some of the time."""
    limits, ahead = list[float](), list[float]()
    now = process_clock.now
    monkeypatch.setattr(process_clock, "now", lambda: now() + sum(ahead))
    stream_of = urllib3.HTTPResponse.stream

    def slow(raw: Any, *args: Any, **options: Any) -> Iterator[bytes]:
        for piece in stream_of(raw, *args, **options):
            limits.append(raw.connection.sock.gettimeout())
            ahead.append(PATIENCE / 4)
            yield piece

    monkeypatch.setattr(urllib3.HTTPResponse, "stream", slow)
    answer = Answer(body=[b"a", b"b", b"c"], chunked=True)
    client = session(Timeout(PATIENCE, cooperative=True))
    assert client.get(server.script("/", answer), stream=stream).content == b"abc"
    assert [round(4 * it / PATIENCE) for it in limits] == [4, 3, 2]


@pytest.mark.parametrize("stream", [True, False])
def test_an_empty_or_read_body_is_available_after_the_deadline(server: Server, session: Make, stream: bool) -> None:
    """Also if it is an open file, as of an adapter without urllib3."""
    policy = Timeout(PATIENCE, cooperative=True)
    recorded = session(policy, adapter=Recorder()).get("http://nowhere", stream=stream)
    assert recorded.content == b"recorded"
    empty = session(policy).get(server.script("/", 204), stream=stream)
    with process_clock_ahead(2 * PATIENCE):
        assert b"".join(recorded.iter_content(1)) == b"recorded"
        assert empty.content == b""
