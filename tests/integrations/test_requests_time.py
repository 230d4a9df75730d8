"""What requests is given of the time that is left."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import urllib3
from requests.adapters import HTTPAdapter
from typing_extensions import override

from resilience import DeadlineExceeded, Timeout, TimeoutExceeded, deadline
from resilience.clock import clock as process_clock
from resilience.integrations.http import Rules
from tests.integrations.http_clients import process_clock_ahead
from tests.integrations.requests_sessions import QUICK, Make, Recorder
from tests.integrations.servers import PATIENCE, Answer, FlakyServer


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
def test_timeouts_are_shortened(session: Make, given: Any, capped: tuple[float, float]) -> None:
    """Whatever form a timeout has, an attempt gets no more than what is left."""
    recorder = Recorder()
    one = session(Timeout(100, cooperative=True), adapter=recorder)
    one.get("http://nowhere", timeout=given)
    for seconds, most in zip(recorder.timeouts[0], capped, strict=True):
        assert max(0.5, most - PATIENCE) <= seconds <= most


@pytest.mark.parametrize("given", [None, 3, (1, 2), urllib3.Timeout(5)])
def test_without_a_deadline_a_timeout_is_handed_on(session: Make, given: Any) -> None:
    """What the user has written is what the adapter gets."""
    recorder = Recorder()
    session(adapter=recorder).get("http://nowhere", timeout=given)
    assert recorder.timeouts == [given]


def test_a_timeout_of_no_form_is_refused(session: Make) -> None:
    """As requests does."""
    with deadline(PATIENCE), pytest.raises(ValueError, match="a pair"):
        session().get("http://nowhere", timeout=(1, 2, 3))


def test_connecting_and_waiting_share_the_time(server: FlakyServer, session: Make, monkeypatch) -> None:
    """The time that connecting took is taken off what is left for the answer."""
    seen: list[urllib3.Timeout] = []
    send = HTTPAdapter.send
    monkeypatch.setattr(HTTPAdapter, "send", lambda *args, **it: seen.append(it["timeout"]) or send(*args, **it))
    with deadline(10.0):
        session().get(server.url, timeout=20)
    assert 9.0 < seen[0].total <= 10.0  # type: ignore[operator]


def test_a_deadline_ends_a_request_that_nobody_takes(session: Make) -> None:
    """A wait to send has a timeout as well, and urllib3 another error for it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:  # which accepts nobody, and reads nothing
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(DeadlineExceeded), deadline(0.1):
            session().put(url, data=bytes(20_000_000))


def test_a_stream_keeps_to_the_time(server: FlakyServer, session: Make) -> None:
    """A body that is read after the policy has ended has the time of the attempt."""
    url = server.script("/", Answer(body=[b"a", b"b", b"c"], chunked=True))
    response = session(Timeout(PATIENCE, cooperative=True)).get(url, stream=True)
    with response, process_clock_ahead(2 * PATIENCE), pytest.raises(TimeoutExceeded, match="limit_body"):
        response.content  # noqa: B018


@pytest.mark.parametrize(("limited", "given", "most"), [(True, None, PATIENCE), (False, None, None), (False, 70, 70)])
def test_a_stream_has_a_read_timeout_of_its_own(
    server: FlakyServer, session: Make, limited: bool, given: float | None, most: float | None
) -> None:
    """The user's, or the time that the body has; what was left of the attempt is no limit where it may take longer."""
    url = server.script("/", Answer(body=[b"first", b"rest"], drip=threading.Event()))
    one = session(Timeout(PATIENCE, cooperative=True), rules=Rules(limit_body=limited))
    with one.get(url, stream=True, timeout=given) as response:
        seconds = response.raw.connection.sock.gettimeout()
    if limited:
        assert 0 < seconds <= PATIENCE
    else:
        assert seconds == most


def test_a_stream_that_is_too_slow_for_the_user_is_the_users_matter(server: FlakyServer, session: Make) -> None:
    """The read timeout was shorter than the time that was left."""
    url = server.script("/", Answer(body=[b"a", b"b"], drip=threading.Event()))
    with (
        session(Timeout(PATIENCE)).get(url, stream=True, timeout=0.1) as response,
        pytest.raises(requests.ConnectionError, match="Read timed out"),
    ):
        response.content  # noqa: B018


@pytest.mark.parametrize("stream", [True, False])
def test_each_wait_for_a_piece_has_what_is_left(server: FlakyServer, session: Make, monkeypatch, stream: bool) -> None:
    """The pieces before it have taken some of the time."""
    limits: list[float] = []
    ahead: list[float] = []
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
    one = session(Timeout(PATIENCE, cooperative=True))
    assert one.get(server.script("/", answer), stream=stream).content == b"abc"
    assert [round(4 * it / PATIENCE) for it in limits] == [4, 3, 2]


@pytest.mark.parametrize("stream", [True, False])
def test_a_body_that_was_read_is_not_late(session: Make, stream: bool) -> None:
    """Not even where it is a file that stays open: of an adapter that is no urllib3's."""
    one = session(Timeout(PATIENCE, cooperative=True), adapter=Recorder())
    response = one.get("http://nowhere", stream=stream)
    assert response.content == b"recorded"
    with process_clock_ahead(2 * PATIENCE):
        assert b"".join(response.iter_content(1)) == b"recorded"


class BrokenRecord:
    """The raw body of a response whose encryption breaks in the middle."""

    def stream(self, *args: Any, **options: Any) -> Iterator[bytes]:
        yield b"first"
        raise urllib3.exceptions.SSLError("a record is broken")

    def release_conn(self) -> None:
        """There is none."""

    close = release_conn


def test_a_body_that_breaks_in_time_is_not_late(session: Make) -> None:
    """What the network does to it comes out as it is, also where the time is looked at."""

    class Breaking(Recorder):
        @override
        def send(self, *args: Any, **options: Any) -> Any:
            response = super().send(*args, **options)
            response.raw = BrokenRecord()
            return response

    policy = Timeout(PATIENCE)
    response = session(policy, adapter=Breaking()).get("http://example.org/", stream=True)
    pieces = response.iter_content(None)
    assert next(pieces) == b"first"
    with pytest.raises(requests.exceptions.SSLError, match="a record is broken"):
        next(pieces)


def test_a_response_without_a_body_is_not_late(server: FlakyServer, session: Make) -> None:
    """There is nothing to wait for."""
    response = session(Timeout(PATIENCE, cooperative=True)).get(server.script("/", 204), stream=True)
    with process_clock_ahead(2 * PATIENCE):
        assert response.content == b""


def test_a_body_that_comes_in_drips_keeps_to_the_deadline(server: FlakyServer, session: Make) -> None:
    """Between one piece and the next the time is looked at, although no single wait is too long."""
    answer = Answer(body=[b"x" * 20_000] * 2000, chunked=True, pause=0.02)
    began = time.monotonic()
    one = session(QUICK, pool_maxsize=1, pool_block=True)
    with pytest.raises(DeadlineExceeded), deadline(0.1):
        one.get(server.script("/", answer))
    assert time.monotonic() - began < PATIENCE / 2
    assert one.get(server.script("/", 200)).status_code == 200  # its connection is free
