"""`resilience.integrations.requests` against requests itself, and a server that fails as it is told."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import urllib3
from requests.adapters import BaseAdapter, HTTPAdapter
from requests.auth import HTTPDigestAuth
from typing_extensions import override

from resilience import (
    CircuitBreaker,
    CircuitOpen,
    Context,
    DeadlineExceeded,
    Fallback,
    Policy,
    Retry,
    Timeout,
    TimeoutExceeded,
    deadline,
)
from resilience.clock import clock as process_clock
from resilience.integrations.http import TRANSIENT_STATUSES, NotRepeatable, Rules
from resilience.integrations.requests import ResilienceAdapter
from resilience.integrations.wire import ENVOY_EXPECTED_TIMEOUT
from tests.conftest import FakeClock
from tests.integrations.servers import PATIENCE, Answer, FlakyServer, unused_url

QUICK = Retry(3, backoff=[0])

Make = Callable[..., requests.Session]


@pytest.fixture
def session() -> Iterator[Make]:
    """`session(policy, **options)` makes a session that sends everything through the policy."""
    made: list[requests.Session] = []

    def make(policy: Policy[Any] = QUICK, **options: Any) -> requests.Session:
        made.append(requests.Session())
        made[-1].mount("http://", ResilienceAdapter(policy, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def note(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def attempt(fn: Callable[[], requests.Response]) -> Any:
    """What came out: the response, or the exception as a value."""
    try:
        return fn()
    except requests.RequestException as error:
        return error


# --- statuses --------------------------------------------------------------------------------


@pytest.mark.parametrize("status", sorted(TRANSIENT_STATUSES))
def test_a_status_that_says_not_now_is_retried(server: FlakyServer, session: Make, status: int) -> None:
    """A plain Retry sends a GET again that was answered with such a status, over the connection it has."""
    response = session().get(server.script("/", status, status, Answer(body=b"fine")))
    assert (response.status_code, response.content) == (200, b"fine")
    assert (len(server.requests), server.connections) == (3, 1)


@pytest.mark.parametrize("status", [200, 304, 404, 500, 501])
def test_other_statuses_are_answers(server: FlakyServer, session: Make, status: int) -> None:
    """What is not transient is returned at once."""
    assert session().get(server.script("/", status, 200)).status_code == status
    assert len(server.requests) == 1


def test_500_on_request(server: FlakyServer, session: Make) -> None:
    """Rules can name more statuses."""
    one = session(QUICK, rules=Rules(statuses=TRANSIENT_STATUSES | {500}))
    assert one.get(server.script("/", 500, 200)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_the_last_response_is_returned_as_it_is(server: FlakyServer, session: Make, stream: bool) -> None:
    """Out of attempts, the session gets the response, whole; raising is up to its user."""
    url = server.script("/", 503, 503, Answer(503, body=b"the third"), 200)
    response = session().get(url, stream=stream)
    assert (response.status_code, response.content) == (503, b"the third")
    with pytest.raises(requests.HTTPError):
        response.raise_for_status()


@pytest.mark.parametrize(("header", "delay"), [("2", 2.0), ("-5", 0.0), ("soon", 0.0)])
def test_retry_after(server: FlakyServer, session: Make, clock: FakeClock, header: str, delay: float) -> None:
    """The wait is at least as long as the server asks for."""
    url = server.script("/", Answer(429, {"Retry-After": header}), 200)
    assert session().get(url).status_code == 200
    assert sum(clock.sleeps) == delay


def test_retry_after_obeys_the_deadline(server: FlakyServer, session: Make, clock: FakeClock) -> None:
    """A wait that does not fit is not begun: the response comes at once."""
    url = server.script("/", Answer(429, {"Retry-After": "60"}), 200)
    with deadline(5.0):
        assert session().get(url).status_code == 429
    assert clock.sleeps == []


def test_a_breaker_counts_them(server: FlakyServer, session: Make) -> None:
    """Two such statuses in a row open a circuit, which then sends nothing."""
    one = session(CircuitBreaker(2))
    url = server.script("/", 503)
    assert [one.get(url).status_code for _ in range(2)] == [503, 503]
    with pytest.raises(CircuitOpen):
        one.get(url)
    assert len(server.requests) == 2


def test_a_fallback_answers_them(server: FlakyServer, session: Make) -> None:
    """What a fallback answers is the session's response, and the one that lost is closed."""
    lost: list[requests.Response] = []

    def cached(failure: Any, ctx: Context) -> requests.Response:
        lost.append(failure.error.response)
        answer = requests.Response()
        answer.status_code, answer._content, answer.request = 203, b"cached", failure.error.response.request
        return answer

    response = session(Fallback(handler=cached)).get(server.script("/", 503), stream=True)
    assert (response.status_code, response.text) == (203, "cached")
    assert lost[0].raw.closed


# --- what may be sent again ------------------------------------------------------------------


@pytest.mark.parametrize("answer", [503, Answer(fault="reset"), Answer(fault="close")])
@pytest.mark.parametrize(
    ("method", "headers", "sent"),
    [
        ("PUT", {}, 2),
        ("DELETE", {}, 2),
        ("POST", {}, 1),
        ("PATCH", {}, 1),
        ("POST", {"idempotency-key": "4711"}, 2),
        ("POST", {"Idempotency-Key": b"4711"}, 2),
        ("POST", {"Idempotency-Key": ""}, 1),
    ],
)
def test_methods(server: FlakyServer, session: Make, answer: Any, method: str, headers: Any, sent: int) -> None:
    """What may have been carried out is sent again only where that does no harm."""
    url = server.script("/", answer, 200)
    outcome = attempt(lambda: session().request(method, url, headers=headers, data=b"order"))
    if isinstance(outcome, requests.ConnectionError):
        assert f"{method} may have been carried out" in note(outcome)
    else:
        assert outcome.status_code == (200 if sent == 2 else 503)
    assert [it.body for it in server.requests] == [b"order"] * sent


@pytest.mark.parametrize("proxies", [{}, {"http": unused_url()}])
def test_a_post_that_was_never_sent_is_tried_again(session: Make, proxies: dict[str, str]) -> None:
    """Where no connection could be made, any method is repeated, and its generator is untouched."""
    body = (it for it in [b"order"])
    with pytest.raises(requests.ConnectionError) as caught:
        session().post(unused_url(), data=body, proxies=proxies)
    assert "3 attempts" in note(caught.value)
    assert list(body) == [b"order"]


def test_a_certificate_that_is_wrong_stays_wrong(server: FlakyServer, session: Make) -> None:
    """An SSL error is not retried."""
    one = session()
    one.mount("https://", ResilienceAdapter(QUICK))
    with pytest.raises(requests.exceptions.SSLError) as caught:
        one.get(server.url.replace("http", "https"))
    assert not hasattr(caught.value, "__notes__") or "attempts" not in note(caught.value)


def file_in_the_middle(data: bytes, path: Path) -> io.BufferedReader:
    path.write_bytes(b"skipped" + data)
    file = path.open("rb")
    file.seek(len(b"skipped"))
    return file


class Again:
    """Can be iterated as often as one likes."""

    def __iter__(self) -> Iterator[bytes]:
        yield from (b"in ", b"pieces")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"data": b"bytes"}, b"bytes"),
        ({"data": "text"}, b"text"),
        ({"data": {"a": "1"}}, b"a=1"),
        ({"json": [1]}, b"[1]"),
        ({"data": bytearray(b"array")}, b"array"),
        ({"data": io.BytesIO(b"file")}, b"file"),
        ({"data": Again()}, b"in pieces"),
    ],
    ids=lambda it: "" if isinstance(it, bytes) else str(it),
)
def test_bodies_that_are_sent_again_whole(server: FlakyServer, session: Make, options: Any, expected: bytes) -> None:
    """What can be produced a second time arrives whole at each attempt."""
    response = session().put(server.script("/", 503, Answer(fault="reset"), 200), **options)
    assert response.status_code == 200
    assert [it.body for it in server.requests] == [expected] * 3


def test_a_file_is_wound_back_to_where_it_stood(server: FlakyServer, session: Make, tmp_path: Path) -> None:
    """Not to its beginning: only what was behind the position at first is sent, each time."""
    with file_in_the_middle(b"x" * 100_000, tmp_path / "file") as file:
        assert session().put(server.script("/", 503, 200), data=file).status_code == 200
    assert [it.body for it in server.requests] == [b"x" * 100_000] * 2


def test_an_upload_is_sent_again_whole(server: FlakyServer, session: Make) -> None:
    """A multipart form is text in memory by the time it is sent."""
    response = session().put(server.script("/", 503, 200), files={"f": ("name", io.BytesIO(b"content"))})
    assert response.status_code == 200
    first, second = server.requests
    assert b"content" in first.body
    assert first.body == second.body


class OnlyRead:
    """What `requests_toolbelt`'s encoder is: a length, and `read`."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)
        self.len = len(data)

    def read(self, size: int = -1) -> bytes:
        return self._data.read(size)


@pytest.mark.parametrize("answer", [503, Answer(fault="reset")])
@pytest.mark.parametrize("make", [lambda: iter([b"on", b"ce"]), lambda: OnlyRead(b"once")], ids=["generator", "reader"])
def test_bodies_that_are_sent_once(server: FlakyServer, session: Make, answer: Any, make: Any) -> None:
    """A body that is used up is never sent again, which would be as an empty one, whatever the method."""
    url = server.script("/", answer, 200)
    outcome = attempt(lambda: session().put(url, data=make()))
    if isinstance(outcome, requests.ConnectionError):
        assert "its body can be sent only once" in note(outcome)
    else:
        assert outcome.status_code == 503
    assert [it.body for it in server.requests] == [b"once"]


def test_a_pipe_is_sent_once(server: FlakyServer, session: Make) -> None:
    """A file that cannot be wound back is as good as a generator."""
    reader, writer = os.pipe()
    with open(reader, "rb") as file:
        os.write(writer, b"once")
        os.close(writer)
        assert session().put(server.script("/", 503, 200), data=file).status_code == 503
    assert [it.body for it in server.requests] == [b"once"]


def test_a_body_that_fails_is_not_the_networks_fault(server: FlakyServer, session: Make) -> None:
    """An exception of the user's own generator comes through, and nothing is repeated."""

    def body() -> Iterator[bytes]:
        yield b"one"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        session(Retry(3, on=Exception, backoff=[0])).put(server.url, data=body())


def test_a_timeout_does_not_have_a_post_sent_again(server: FlakyServer, session: Make) -> None:
    """A call that was cut off leaves no failure of its own, and yet a Retry around it knows."""
    url = server.script("/", Answer(hold=threading.Event()))
    with pytest.raises(TimeoutExceeded):
        session(QUICK.wrap(Timeout(0.2))).post(url, data=b"order")
    assert len(server.requests) == 1


class SlowFile(io.BytesIO):
    """A file whose reading waits for the test."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.is_read = threading.Event()
        self.let_go = threading.Event()

    @override
    def read(self, size: int | None = -1) -> bytes:
        self.is_read.set()
        assert self.let_go.wait(PATIENCE)
        return super().read(size)


def test_a_file_that_is_still_being_read_is_not_sent_again(server: FlakyServer, session: Make) -> None:
    """An attempt that was walked away from goes on reading; winding its file back would mix up both bodies."""
    file = SlowFile(b"x" * 10)
    with pytest.raises(TimeoutExceeded):
        session(QUICK.wrap(Timeout(0.2))).put(server.url, data=file)
    assert file.is_read.is_set()
    file.let_go.set()
    server.wait_until(lambda: Timeout.abandoned() == 0)
    assert [it.body for it in server.requests] == [b"x" * 10]


# --- responses -------------------------------------------------------------------------------


def test_a_stream_is_open_when_it_is_returned(server: FlakyServer, session: Make) -> None:
    """The body of a stream is read by whoever asked for it, piece by piece; what was discarded is closed."""
    rest = threading.Event()
    url = server.script("/", Answer(503, body=b"x" * 9999), Answer(body=[b"first", b"rest"], drip=rest, chunked=True))
    with session().get(url, stream=True) as response:
        pieces = response.iter_content(None)
        assert next(pieces) == b"first"
        server.wait_until(lambda: server.open_connections == 1)
        rest.set()
        assert next(pieces) == b"rest"


def test_a_body_that_breaks_off_is_a_failure(server: FlakyServer, session: Make) -> None:
    """The body that requests reads by itself is a part of the attempt."""
    cut = Answer(body=[b"first", b"rest"], fault="cut")
    response = session().get(server.script("/", cut, cut, Answer(body=b"whole")))
    assert response.content == b"whole"
    response = session().get(server.script("/", cut, 200), stream=True)
    with pytest.raises(requests.RequestException):
        response.content  # noqa: B018


@pytest.mark.parametrize("stream", [True, False])
def test_connections_go_back_to_the_pool(server: FlakyServer, session: Make, stream: bool) -> None:
    """With one connection and nobody else to give one back, retries do not wait for ever."""
    one = session(QUICK, pool_maxsize=1, pool_block=True)
    for _ in range(3):
        with one.get(server.script("/", 503, 503, 200), stream=stream) as response:
            assert response.content == b"ok"
    assert stream or server.connections == 1


def test_a_response_that_comes_too_late_is_closed(server: FlakyServer, session: Make) -> None:
    """Nobody has it, so nobody else would give its connection back."""
    hold = threading.Event()
    url = server.script("/", Answer(body=b"x" * 9999, hold=hold))
    with pytest.raises(TimeoutExceeded):
        session(Timeout(0.2)).get(url, stream=True)
    hold.set()
    server.wait_until(lambda: server.open_connections == 0)


# --- time ------------------------------------------------------------------------------------


class Recorder(BaseAdapter):
    """An adapter that sends nothing and notes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[Any] = []
        self.is_closed = False

    @override
    def send(self, request: Any, stream: Any = False, timeout: Any = None, *args: Any, **options: Any) -> Any:
        self.timeouts.append(timeout)
        response = requests.Response()
        response.status_code, response.request, response.url, response._content = 200, request, request.url, b""
        response.raw = urllib3.HTTPResponse(b"")
        return response

    @override
    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("given", "capped"),
    [
        (None, (2.0, 2.0)),
        (5, (2.0, 2.0)),
        (0.5, (0.5, 0.5)),
        ((0.5, None), (0.5, 2.0)),
        ((3.05, 27), (2.0, 2.0)),
        (urllib3.Timeout(connect=0.5, read=5), (0.5, 2.0)),
        (urllib3.Timeout(total=1.0), (1.0, 1.0)),
    ],
)
def test_timeouts_are_shortened(session: Make, given: Any, capped: tuple[float, float]) -> None:
    """Whatever form a timeout has, an attempt gets no more than what is left."""
    recorder = Recorder()
    one = session(Timeout(2.0, cooperative=True), adapter=recorder)
    one.get("http://nowhere", timeout=given)
    assert recorder.timeouts == [pytest.approx(capped, abs=0.2)]
    assert all(seconds <= most for seconds, most in zip(recorder.timeouts[0], capped, strict=True))


@pytest.mark.parametrize("given", [None, 3, (1, 2), urllib3.Timeout(5)])
def test_without_a_deadline_a_timeout_is_handed_on(session: Make, given: Any) -> None:
    """What the user has written is what the adapter gets."""
    recorder = Recorder()
    session(adapter=recorder).get("http://nowhere", timeout=given)
    assert recorder.timeouts == [given]


def test_connecting_and_waiting_share_the_time(server: FlakyServer, session: Make, monkeypatch) -> None:
    """The time that connecting took is taken off what is left for the answer."""
    seen: list[urllib3.Timeout] = []
    send = HTTPAdapter.send
    monkeypatch.setattr(HTTPAdapter, "send", lambda *args, **it: seen.append(it["timeout"]) or send(*args, **it))
    with deadline(10.0):
        session().get(server.url, timeout=20)
    assert 9.0 < seen[0].total <= 10.0  # type: ignore[operator]


@contextlib.contextmanager
def process_clock_ahead(seconds: float) -> Iterator[None]:
    """Let the process clock be ahead of what it was."""
    with pytest.MonkeyPatch.context() as patch:
        now = process_clock.now
        patch.setattr(process_clock, "now", lambda: now() + seconds)
        yield


@pytest.mark.parametrize("timeout", [None, 60, (60, 60), urllib3.Timeout(60)])
@pytest.mark.parametrize("answer", [Answer(hold=threading.Event()), Answer(body=[b"a", b"b"], drip=threading.Event())])
def test_a_deadline_ends_the_request(server: FlakyServer, session: Make, timeout: Any, answer: Answer) -> None:
    """A deadline alone, without a thread, ends a request that waits for headers or for the body, as such."""
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded), deadline(0.2):
        session().get(server.script("/", answer), timeout=timeout)
    assert 0.2 <= time.monotonic() - began < PATIENCE / 2


def test_a_stream_keeps_to_the_time(server: FlakyServer, session: Make) -> None:
    """A body that is read after the policy has ended has the time of the attempt, unless it may take longer."""
    url = server.script("/", Answer(body=[b"a", b"b", b"c"], chunked=True))
    policy = Timeout(1.0, cooperative=True)
    response = session(policy).get(url, stream=True)
    with response, process_clock_ahead(2.0), pytest.raises(TimeoutExceeded, match="limit_body"):
        response.content  # noqa: B018
    response = session(policy, rules=Rules(limit_body=False)).get(url, stream=True)
    with response, process_clock_ahead(2.0):
        assert list(response.iter_lines()) == [b"abc"]
    response = session(policy).get(url)
    with process_clock_ahead(2.0):
        assert b"".join(response.iter_content(1)) == b"abc"


@pytest.mark.parametrize("chunked", [True, False])
def test_a_stream_that_may_take_longer_has_its_own_read_timeout_back(
    server: FlakyServer, session: Make, chunked: bool
) -> None:
    """What was left of the attempt is no limit to the body."""
    rest = threading.Event()
    url = server.script("/", Answer(body=[b"first", b"rest"], drip=rest, chunked=chunked))
    one = session(Timeout(0.3, cooperative=True), rules=Rules(limit_body=False))
    with one.get(url, stream=True) as response:
        threading.Timer(0.6, rest.set).start()
        assert response.content == b"firstrest"
    rest.clear()
    with one.get(url, stream=True, timeout=0.2) as response, pytest.raises(requests.ConnectionError):
        response.content  # noqa: B018


def test_a_body_that_comes_in_drips_keeps_to_the_deadline(server: FlakyServer, session: Make) -> None:
    """Between one piece and the next the time is looked at, although no single wait is too long."""
    answer = Answer(body=[b"x" * 20_000] * 2000, chunked=True, pause=0.02)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded), deadline(0.2):
        session().get(server.script("/", answer))
    assert time.monotonic() - began < PATIENCE / 2


def test_a_timeout_of_the_users_own_is_a_failure_like_others(server: FlakyServer, session: Make) -> None:
    """A read timeout that is shorter than what is left stays requests' own, and is retried."""
    url = server.script("/", Answer(hold=threading.Event()), 200)
    with deadline(60):
        assert session().get(url, timeout=0.2).status_code == 200
        with pytest.raises(requests.ReadTimeout):
            session().post(server.script("/", Answer(hold=threading.Event())), timeout=0.2)


def test_after_the_deadline_nothing_is_sent(server: FlakyServer, session: Make) -> None:
    """Where no time is left, the server is not bothered."""
    with pytest.raises(DeadlineExceeded), deadline(0):
        session(Timeout(1, cooperative=True)).get(server.url)
    assert server.requests == []


def test_a_cooperative_timeout_is_named_in_the_error(server: FlakyServer, session: Make) -> None:
    """The one whose limit it was takes the blame: an attempt's timeout is no deadline of the whole."""
    url = server.script("/", Answer(hold=threading.Event()), Answer(body=b"fine"))
    one = session(Retry(2, backoff=[0]).wrap(Timeout(0.2, cooperative=True)))
    assert one.get(url).content == b"fine"
    with pytest.raises(TimeoutExceeded, match=r"no result within 0\.2 s"):
        one.get(server.script("/", Answer(hold=threading.Event())))


def test_the_deadline_is_told_to_hosts_that_are_named(server: FlakyServer, session: Make) -> None:
    """The header is for named hosts alone, is written anew, and leaves the user's request as it was."""
    url = server.script("/", 503, 200)
    prepared = requests.Request("GET", url).prepare()
    with deadline(10.0):
        session(QUICK, propagate_to=["127.0.0.1"]).send(prepared)
        session(QUICK, propagate_to=["elsewhere"]).send(prepared)
    told = [it.headers[ENVOY_EXPECTED_TIMEOUT] for it in server.requests]
    assert [int(it) <= 10_000 for it in told[:2]] == [True, True]
    assert told[2] is None
    assert ENVOY_EXPECTED_TIMEOUT not in prepared.headers


# --- a session as usual ----------------------------------------------------------------------


def test_redirects_and_cookies(server: FlakyServer, session: Make) -> None:
    """Each hop is a request of its own to the policy, and the session follows and remembers as ever."""
    server.script("/from", 503, Answer(302, [("Location", "/to"), ("Set-Cookie", "a=1")]))
    server.script("/to", 503, 200)
    one = session()
    response = one.get(f"{server.url}/from")
    assert (response.status_code, len(response.history), one.cookies.get_dict()) == (200, 1, {"a": "1"})
    assert [it.path for it in server.requests] == ["/from", "/from", "/to", "/to"]
    assert server.requests[-1].headers["Cookie"] == "a=1"


def test_a_file_survives_retries_and_a_redirect(server: FlakyServer, session: Make, tmp_path: Path) -> None:
    """Where requests and the adapter both wind a file back, each attempt of each hop gets it whole."""
    server.script("/from", 503, Answer(307, {"Location": "/to"}))
    server.script("/to", 503, 200)
    with file_in_the_middle(b"content", tmp_path / "file") as file:
        assert session().put(f"{server.url}/from", data=file).status_code == 200
    assert [it.body for it in server.requests] == [b"content"] * 4


@pytest.mark.parametrize(
    "answer",
    [Answer(307, {"Location": "/"}), Answer(401, {"WWW-Authenticate": 'Digest realm="r", nonce="n"'})],
    ids=["redirect", "challenge"],
)
def test_a_generator_does_not_survive_a_second_request(server: FlakyServer, session: Make, answer: Answer) -> None:
    """What requests itself sends again, after a redirect or a challenge, is not sent with an empty body either."""
    body = (it for it in [b"once"])
    with pytest.raises(NotRepeatable, match="used up"):
        session().put(server.script("/", answer, 200), data=body, auth=HTTPDigestAuth("me", "secret"))
    assert [it.body for it in server.requests] == [b"once"]


@pytest.mark.parametrize("wrapped", [True, False])
def test_digest_authentication(server: FlakyServer, session: Make, wrapped: bool) -> None:
    """The second request of digest authentication, which a hook sends, goes through the policy too."""
    challenge = Answer(401, {"WWW-Authenticate": 'Digest realm="r", nonce="n", qop="auth"'})
    url = server.script("/", 503, challenge, 503, 200)
    options = {"adapter": HTTPAdapter()} if wrapped else {}
    response = session(QUICK, **options).get(url, auth=HTTPDigestAuth("me", "secret"))
    assert response.status_code == 200
    assert ["Authorization" in it.headers for it in server.requests] == [False, False, True, True]


def test_hooks_see_the_response_that_is_returned(server: FlakyServer, session: Make) -> None:
    """Not those that were discarded."""
    seen: list[int] = []
    session().get(server.script("/", 503, 200), hooks={"response": lambda it, **_: seen.append(it.status_code)})
    assert seen == [200]


def test_many_threads_and_one_session(server: FlakyServer, session: Make) -> None:
    """An adapter keeps nothing of a request on itself."""
    one = session()
    paths = [f"/{number}" for number in range(40)]
    for path in paths:
        server.script(path, 503, Answer(body=path.encode()))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda path: one.get(server.url + path).content, paths))
    assert answers == [path.encode() for path in paths]


# --- the adapter -----------------------------------------------------------------------------


def test_an_adapter_that_is_wrapped_sends(server: FlakyServer, session: Make) -> None:
    """A user's own adapter does what it did, inside of the policy, and is closed with ours."""

    class Signing(HTTPAdapter):
        @override
        def add_headers(self, request: Any, **options: Any) -> None:
            request.headers["X-Signature"] = "signed"

    session(QUICK, adapter=Signing()).get(server.script("/", 503, 200))
    assert [it.headers["X-Signature"] for it in server.requests] == ["signed"] * 2
    recorder = Recorder()
    ResilienceAdapter(QUICK, adapter=recorder).close()
    assert recorder.is_closed


@pytest.mark.parametrize(
    ("policy", "options", "error", "message"),
    [
        (None, {}, TypeError, "policy must be a policy, or have one for each host"),
        (QUICK, {"rules": 503}, TypeError, "rules must be Rules, not 503"),
        (QUICK, {"adapter": 1}, TypeError, "adapter must be an adapter of requests, not 1"),
        (QUICK, {"adapter": HTTPAdapter(max_retries=3)}, ValueError, "must not retry by itself"),
        (QUICK, {"adapter": HTTPAdapter(), "pool_maxsize": 3}, ValueError, "belong to the adapter that is wrapped"),
        (QUICK, {"propagate_to": "localhost"}, TypeError, "hosts must be a sequence"),
    ],
)
def test_wrong_arguments(policy: Any, options: Any, error: type[Exception], message: str) -> None:
    """They are refused where they are written."""
    with pytest.raises(error, match=message):
        ResilienceAdapter(policy, **options)


def test_urllib3_does_not_retry(session: Make) -> None:
    """Its own retries are off."""
    adapter = session().get_adapter("http://x")
    assert isinstance(adapter, ResilienceAdapter)
    assert adapter.max_retries.total == 0


def test_pickling(server: FlakyServer, session: Make) -> None:
    """A session pickles as it does without us, if its policies do; a circuit, which is shared, does not."""
    one = pickle.loads(pickle.dumps(session(QUICK, pool_maxsize=3)))
    with one:
        assert one.get(server.script("/", 503, 200)).status_code == 200
        assert one.get_adapter("http://x")._pool_maxsize == 3
    with pytest.raises(TypeError, match="all its users share"):
        pickle.dumps(session(CircuitBreaker(5)))
