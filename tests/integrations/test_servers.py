"""The scripted server for the tests of HTTP clients follows its script."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator

import pytest

from tests.integrations.servers import Answer, FlakyServer, flaky_server, unused_url


@pytest.fixture
def connection(server: FlakyServer) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    yield connection
    connection.close()


def get(connection: http.client.HTTPConnection, path: str) -> tuple[int, bytes]:
    connection.request("GET", path)
    with connection.getresponse() as response:
        return response.status, response.read()


def test_a_path_gives_its_answers_in_order_and_repeats_the_last(
    server: FlakyServer, connection: http.client.HTTPConnection
) -> None:
    """A path without a script answers 200."""
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
    """A body is recorded as it was sent, with its chunks joined."""
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
def test_a_fault_breaks_the_connection(
    server: FlakyServer, connection: http.client.HTTPConnection, fault, error
) -> None:
    """It is reset, closed, or closed in the middle of the body."""
    server.script("/", Answer(body=[b"first", b"second"], fault=fault))
    with pytest.raises(error):
        get(connection, "/")
    assert len(server.requests) == 1


@pytest.mark.parametrize("chunked", [True, False])
def test_an_answer_waits_for_its_events(
    server: FlakyServer, connection: http.client.HTTPConnection, chunked: bool
) -> None:
    """And so does the rest of a body."""
    hold, drip = threading.Event(), threading.Event()
    server.script("/", Answer(body=[b"first", b"second"], hold=hold, drip=drip, chunked=chunked))
    connection.request("GET", "/")
    server.wait_until(lambda: server.requests)
    hold.set()
    with connection.getresponse() as response:
        assert response.read(5) == b"first"
        drip.set()
        assert response.read() == b"second"


def test_the_end_of_the_server_does_not_wait_for_held_answers() -> None:
    """No thread is left."""
    before = threading.active_count()
    with flaky_server() as server:
        server.script("/", Answer(hold=threading.Event(), delay=60))
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        client.request("GET", "/")
        server.wait_until(lambda: server.requests)
    client.close()
    assert threading.active_count() == before


def test_a_connection_to_an_unused_url_is_refused() -> None:
    client = http.client.HTTPConnection(unused_url().removeprefix("http://"), timeout=20)
    with pytest.raises(ConnectionRefusedError):
        client.request("GET", "/")
    client.close()
