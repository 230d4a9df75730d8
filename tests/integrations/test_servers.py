"""The faults of the scripted server; its other features are seen in the tests of HTTP clients."""

from __future__ import annotations

import http.client
from contextlib import closing
from typing import Any

import pytest

from tests.integrations.servers import Answer, FlakyServer


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("reset", ConnectionResetError),
        ("refuse", ConnectionResetError),
        ("close", http.client.RemoteDisconnected),
        ("cut", http.client.IncompleteRead),
    ],
)
def test_a_fault_breaks_the_connection(server: FlakyServer, fault: Any, error: type[Exception]) -> None:
    """It is reset, closed, or closed in the middle of the body."""
    server.script("/", Answer(body=[b"first", b"second"], fault=fault))
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as connection:
        connection.request("GET", "/")
        with pytest.raises(error):
            connection.getresponse().read()
    assert len(server.requests) == 1
