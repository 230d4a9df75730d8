"""Timeouts and deadlines of requests."""

from __future__ import annotations

import socket
import threading
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
from tests.integrations.requests_sessions import Make, Recorder
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
def test_timeouts_are_shortened_to_the_time_left(session: Make, given: Any, capped: tuple[float, float]) -> None:
    """Of any form."""
    recorder = Recorder()
    client = session(Timeout(100, cooperative=True), adapter=recorder)
    client.get("http://nowhere", timeout=given)
    for seconds, most in zip(recorder.timeouts[0], capped, strict=True):
        assert max(0.5, most - PATIENCE) <= seconds <= most


@pytest.mark.parametrize("given", [None, 3, (1, 2), urllib3.Timeout(5)])
def test_without_a_deadline_a_timeout_is_unchanged(session: Make, given: Any) -> None:
    recorder = Recorder()
    session(adapter=recorder).get("http://nowhere", timeout=given)
    assert recorder.timeouts == [given]


def test_an_invalid_timeout_is_refused(session: Make) -> None:
    """As requests does."""
    with deadline(PATIENCE), pytest.raises(ValueError, match="a pair"):
        session().get("http://nowhere", timeout=(1, 2, 3))


def test_the_total_timeout_includes_connecting(server: FlakyServer, session: Make, monkeypatch) -> None:
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


def test_a_stream_has_the_deadline_of_its_attempt(server: FlakyServer, session: Make) -> None:
    """Also if it is read after the policy has ended."""
    url = server.script("/", Answer(body=[b"a", b"b", b"c"], chunked=True))
    response = session(Timeout(PATIENCE, cooperative=True)).get(url, stream=True)
    with response, process_clock_ahead(2 * PATIENCE), pytest.raises(TimeoutExceeded, match="limit_body"):
        response.content  # noqa: B018


@pytest.mark.parametrize(("limited", "given", "most"), [(True, None, PATIENCE), (False, None, None), (False, 70, 70)])
def test_the_read_timeout_of_a_stream_is_the_users_or_the_time_left(
    server: FlakyServer, session: Make, limited: bool, given: float | None, most: float | None
) -> None:
    """The time left does not apply with `limit_body=False`."""
    url = server.script("/", Answer(body=[b"first", b"rest"], drip=threading.Event()))
    client = session(Timeout(PATIENCE, cooperative=True), rules=Rules(limit_body=limited))
    with client.get(url, stream=True, timeout=given) as response:
        seconds = response.raw.connection.sock.gettimeout()
    if limited:
        assert 0 < seconds <= PATIENCE
    else:
        assert seconds == most


@pytest.mark.parametrize("stream", [True, False])
def test_each_wait_for_a_piece_is_limited_to_the_time_left(
    server: FlakyServer, session: Make, monkeypatch, stream: bool
) -> None:
    """The earlier pieces have taken some of the time."""
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
    client = session(Timeout(PATIENCE, cooperative=True))
    assert client.get(server.script("/", answer), stream=stream).content == b"abc"
    assert [round(4 * it / PATIENCE) for it in limits] == [4, 3, 2]


@pytest.mark.parametrize("stream", [True, False])
def test_a_body_that_was_read_stays_available_after_the_deadline(session: Make, stream: bool) -> None:
    """Also if it is an open file, as of an adapter without urllib3."""
    client = session(Timeout(PATIENCE, cooperative=True), adapter=Recorder())
    response = client.get("http://nowhere", stream=stream)
    assert response.content == b"recorded"
    with process_clock_ahead(2 * PATIENCE):
        assert b"".join(response.iter_content(1)) == b"recorded"


class BrokenRecord:
    """The raw body of a response whose TLS record is invalid in the middle."""

    def stream(self, *args: Any, **options: Any) -> Iterator[bytes]:
        yield b"first"
        raise urllib3.exceptions.SSLError("a record is broken")

    def release_conn(self) -> None:
        """Do nothing: there is no connection."""

    close = release_conn


def test_an_error_of_the_network_in_a_body_with_a_deadline_is_raised(session: Make) -> None:

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


def test_an_empty_body_can_be_read_after_the_deadline(server: FlakyServer, session: Make) -> None:
    """There is no wait."""
    response = session(Timeout(PATIENCE, cooperative=True)).get(server.script("/", 204), stream=True)
    with process_clock_ahead(2 * PATIENCE):
        assert response.content == b""
