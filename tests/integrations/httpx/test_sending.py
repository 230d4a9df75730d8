"""What a transport of httpx sends again, and with which body."""

from __future__ import annotations

import io
from typing import Any

import pytest

from resilience import CircuitBreaker, CircuitOpen, Retry, Timeout, TimeoutExceeded
from tests.conftest import FakeClock
from tests.integrations.http_clients import QUICK
from tests.integrations.httpx.conftest import Kit, full_port
from tests.integrations.servers import FlakyServer

# --- statuses --------------------------------------------------------------------------------


async def test_on_result_judges_responses_that_are_not_transient(kit: Kit) -> None:
    """A response that it rejects is closed."""
    responses: list[Any] = []

    def is_bad(response: Any) -> bool:
        responses.append(response)
        return bool(response.status_code == 500)

    async with kit.client(Retry(backoff=[0], on_result=is_bad), kit.mock(500, 200)) as client:
        assert (await client.get("http://example.org/")).status_code == 200
    assert [it.is_closed for it in responses] == [True, True]


# --- what may be sent again ------------------------------------------------------------------


async def test_a_post_that_an_inner_transport_has_refused_was_not_sent(kit: Kit, clock: FakeClock) -> None:
    """Transports can be nested."""
    breaker = CircuitBreaker(1, open_for=5)
    inner = kit.make(breaker, kit.mock(503, 200))
    async with kit.client(Retry(2, on=CircuitOpen, backoff=[0]), inner) as client:
        assert (await client.post("http://example.org/")).status_code == 503
        assert (await client.post("http://example.org/")).status_code == 200
    assert clock.sleeps == [5.0]


@pytest.mark.parametrize(
    ("name", "again"),
    [("ConnectError", True), ("ConnectTimeout", True), ("PoolTimeout", True)]
    + [(name, False) for name in ("ReadTimeout", "WriteTimeout", "ReadError", "WriteError", "RemoteProtocolError")],
)
def test_only_errors_of_connecting_say_that_nothing_was_sent(sync_kit: Kit, name: str, again: bool) -> None:
    """After another error the request may have arrived."""
    inner = sync_kit.mock(getattr(sync_kit.library, name)("no"), 200)
    with sync_kit.library.Client(transport=sync_kit.make(QUICK, inner)) as client:
        try:
            assert client.post("http://example.org/").status_code == 200
            assert again
        except sync_kit.library.TransportError:
            assert not again


@pytest.mark.parametrize(
    ("message", "attempts"),
    [
        ("Invalid input ConnectionInputs.SEND_HEADERS in state ConnectionState.CLOSED", {"POST": 2, "GET": 2}),
        ("Invalid input ConnectionInputs.RECV_WINDOW_UPDATE in state ConnectionState.CLOSED", {"POST": 1, "GET": 2}),
        ("a header is malformed", {"POST": 1, "GET": 1}),
    ],
)
async def test_an_error_of_h2_says_whether_the_headers_were_sent(
    kit: Kit, message: str, attempts: dict[str, int]
) -> None:
    """A mistake of the caller, which is the same error of httpx, is not repeated."""
    for method, times in attempts.items():
        answers = iter([kit.library.LocalProtocolError(message), 200])
        async with kit.client(QUICK, kit.mock(*answers)) as client:
            try:
                assert (await client.request(method, "http://example.org/")).status_code == 200
                assert times == 2
            except kit.library.LocalProtocolError:
                assert times == 1


# --- bodies ----------------------------------------------------------------------------------


async def test_a_stream_of_an_unknown_class_is_sent_once(kit: Kit, server: FlakyServer) -> None:
    """It is unknown whether it can be produced a second time."""
    url = server.script("/", 503, 200)
    async with kit.client() as client:
        headers = {"Host": "localhost", "Content-Length": "7"}
        request = kit.library.Request("PUT", url, stream=kit.body(b"payload"), headers=headers)
        assert (await client.send(request)).status_code == 503
    assert [it.body for it in server.requests] == [b"payload"]


def test_a_list_of_pieces_is_sent_again(sync_kit: Kit, server: FlakyServer) -> None:
    """A list can be iterated again; an iterator over it cannot."""
    url = server.script("/", 503, 200)
    with sync_kit.library.Client(transport=sync_kit.make(QUICK, sync_kit.network())) as client:
        assert client.put(url, content=[b"pay", b"load"]).status_code == 200
    assert [it.body for it in server.requests] == [b"payload", b"payload"]


def test_a_file_that_the_caller_rewinds_can_be_sent_in_another_call(sync_kit: Kit, server: FlakyServer) -> None:
    """It has a length, so that the client would not send it empty."""
    with sync_kit.library.Client(transport=sync_kit.make(QUICK, sync_kit.network())) as client:
        file = io.BytesIO(b"payload")
        request = client.build_request("PUT", server.url, content=file)
        for _ in range(2):
            assert client.send(request).status_code == 200
            file.seek(0)
    assert [it.body for it in server.requests] == [b"payload", b"payload"]


async def test_an_iterator_that_was_not_sent_before_a_timeout_can_be_sent(tasks_kit: Kit, server: FlakyServer) -> None:
    """To a server that accepts connections."""
    body = tasks_kit.generator(b"once")
    async with tasks_kit.client(Timeout(0.2)) as client:
        with full_port() as url, pytest.raises(TimeoutExceeded):
            await client.post(url, content=body, timeout=None)
    async with tasks_kit.client() as client:
        assert (await client.post(server.url, content=body)).status_code == 200
    assert [it.body for it in server.requests] == [b"once"]
