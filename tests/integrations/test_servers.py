"""The scripted server that the tests of the HTTP clients talk to does what it is told."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator

import pytest

from tests.integrations.servers import Answer, FlakyServer, flaky_server, unused_url


@pytest.fixture
def connection(server: FlakyServer) -> Iterator[http.client.HTTPConnection]:
    it = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    yield it
    it.close()


def get(connection: http.client.HTTPConnection, path: str) -> tuple[int, bytes]:
    connection.request("GET", path)
    with connection.getresponse() as response:
        return response.status, response.read()


def test_answers_in_order_and_the_last_for_ever(server: FlakyServer, connection: http.client.HTTPConnection) -> None:
    """A path gives its answers in order, its last for ever, and 200 where it has no script."""
    server.script("/a", 503, Answer(201, body=b"made"))
    assert [get(connection, path) for path in ("/a?x=1", "/a", "/a", "/b")] == [
        (503, b"ok"),
        (201, b"made"),
        (201, b"made"),
        (200, b"ok"),
    ]
    assert [it.path for it in server.requests_to("/a")] == ["/a?x=1", "/a", "/a"]
    assert {it.connection for it in server.requests} == {1}
    assert (server.connections, server.open_connections) == (1, 1)
    connection.close()
    server.wait_until(lambda: server.open_connections == 0)


def test_bodies_are_received_whole(server: FlakyServer, connection: http.client.HTTPConnection) -> None:
    """A body is recorded as it was sent, its chunks joined."""
    for body in (b"plain", iter([b"in ", b"chunks"])):
        connection.request("POST", "/", body=body, headers={"X-Kind": "test"}, encode_chunked=True)
        connection.getresponse().read()
    assert [it.body for it in server.requests] == [b"plain", b"in chunks"]
    assert server.requests[0].headers["x-kind"] == "test"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("reset", ConnectionResetError),
        ("refuse", ConnectionResetError),
        ("close", http.client.RemoteDisconnected),
        ("cut", http.client.IncompleteRead),
    ],
)
def test_faults(server: FlakyServer, connection: http.client.HTTPConnection, fault, error) -> None:
    """A connection is reset, closed, or closed in the middle of the body."""
    server.script("/", Answer(body=[b"first", b"second"], fault=fault))
    with pytest.raises(error):
        get(connection, "/")
    assert len(server.requests) == 1


@pytest.mark.parametrize("chunked", [True, False])
def test_answers_that_wait(server: FlakyServer, connection: http.client.HTTPConnection, chunked: bool) -> None:
    """An answer is held back until an event, and so is the rest of a body."""
    hold, drip = threading.Event(), threading.Event()
    server.script("/", Answer(body=[b"first", b"second"], hold=hold, drip=drip, chunked=chunked))
    connection.request("GET", "/")
    server.wait_until(lambda: server.requests)
    hold.set()
    with connection.getresponse() as response:
        assert response.read(5) == b"first"
        drip.set()
        assert response.read() == b"second"


def test_the_end_of_the_server_waits_for_nobody() -> None:
    """A request that is held back does not hold back the end, and no thread is left."""
    before = threading.active_count()
    with flaky_server() as server:
        server.script("/", Answer(hold=threading.Event(), delay=60))
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        client.request("GET", "/")
        server.wait_until(lambda: server.requests)
    client.close()
    assert threading.active_count() == before


def test_nobody_listens_at_an_unused_url() -> None:
    """A connection to an unused address is refused."""
    client = http.client.HTTPConnection(unused_url().removeprefix("http://"), timeout=20)
    with pytest.raises(ConnectionRefusedError):
        client.request("GET", "/")
    client.close()
