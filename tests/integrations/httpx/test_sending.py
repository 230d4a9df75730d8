"""What a transport of httpx sends again, with which body, and which responses and connections it returns."""

from __future__ import annotations

import gzip
import io
from typing import Any

import pytest

from resilience import CircuitBreaker, CircuitOpen, Retry, Timeout, TimeoutExceeded
from tests.conftest import FakeClock
from tests.integrations.http_clients import QUICK, Httpx, outcome_of
from tests.integrations.httpx.conftest import body_of, full_port
from tests.integrations.servers import Answer, Server

# --- statuses --------------------------------------------------------------------------------


async def test_on_result_judges_responses_that_are_not_transient(kit: Httpx) -> None:
    """A response that it rejects is closed."""
    responses: list[Any] = []

    def is_bad(response: Any) -> bool:
        responses.append(response)
        return bool(response.status_code == 500)

    async with kit.client(Retry(backoff=[0], on_result=is_bad), kit.mock(500, 200)) as client:
        assert (await client.get("http://example.org/")).status_code == 200
    assert [it.is_closed for it in responses] == [True, True]


# --- what may be sent again ------------------------------------------------------------------


async def test_a_post_that_an_inner_transport_has_refused_was_not_sent(kit: Httpx, clock: FakeClock) -> None:
    """Transports can be nested."""
    breaker = CircuitBreaker(1, open_for=5)
    inner = kit.make(breaker, kit.mock(503, 200))
    async with kit.client(Retry(2, on=CircuitOpen, backoff=[0]), inner) as client:
        assert (await client.post("http://example.org/")).status_code == 503
        assert (await client.post("http://example.org/")).status_code == 200
    assert clock.sleeps == [5.0]


CLOSED = "Invalid input ConnectionInputs.{} in state ConnectionState.CLOSED"


def failed(name: str, message: str = "no") -> Any:
    return lambda library: getattr(library, name)(message)


def ended(module: str, input_: str) -> Any:
    """Make the end of a connection that another request has seen; httpcore raises it as it handles the error of h2."""

    def make(library: Any) -> Exception:
        error: Exception = library.RemoteProtocolError("<ConnectionTerminated error_code:0, last_stream_id:9>")
        error.__cause__ = Exception("the same, of httpcore")
        reason: type[Exception] = type("ProtocolError", (Exception,), {"__module__": module})
        error.__cause__.__context__ = reason(CLOSED.format(input_))
        return error

    return make


@pytest.mark.parametrize(
    ("make", "again"),
    [
        *((failed(it), {"POST", "GET"}) for it in ("ConnectError", "ConnectTimeout", "PoolTimeout")),
        *((failed(it), {"GET"}) for it in ("ReadTimeout", "WriteTimeout", "ReadError", "WriteError")),
        (failed("RemoteProtocolError"), {"GET"}),
        (failed("LocalProtocolError", CLOSED.format("SEND_HEADERS")), {"POST", "GET"}),
        (failed("LocalProtocolError", CLOSED.format("RECV_WINDOW_UPDATE")), {"GET"}),
        (failed("LocalProtocolError", "Max outbound streams is 0, 0 open"), {"POST", "GET"}),
        (failed("LocalProtocolError", "a header is malformed"), set()),
        (ended("h2.exceptions", "SEND_HEADERS"), {"POST", "GET"}),
        (ended("h2.exceptions", "SEND_DATA"), {"GET"}),
        (ended("users", "SEND_HEADERS"), {"GET"}),
    ],
)
async def test_an_error_says_whether_the_request_was_sent(kit: Httpx, make: Any, again: set[str]) -> None:
    """Only one of connecting, or of HTTP/2 before its headers, says that it was not; after others it may have arrived.

    A mistake of the caller, which is the same error of httpx, is not repeated.
    """
    for method in ("POST", "GET"):
        error = make(kit.library)
        async with kit.client(QUICK, kit.mock(error, 200)) as client:
            outcome = await outcome_of(client.request(method, "http://example.org/"))
            assert outcome.status_code == 200 if method in again else outcome is error


# --- bodies ----------------------------------------------------------------------------------


async def test_a_stream_of_an_unknown_class_is_sent_once(kit: Httpx, server: Server) -> None:
    """It is unknown whether it can be produced a second time. A redirect sends the same stream, as this does."""
    url = server.script("/", 503, 200)
    async with kit.client() as client:
        headers = {"Host": "localhost", "Content-Length": "7"}
        stream = body_of(kit, b"payload")
        stream._stream = b"payload"  # as the client's own streams have, but this one need not send what is in it
        request = kit.library.Request("PUT", url, stream=stream, headers=headers)
        assert (await client.send(request)).status_code == 503
        with pytest.raises(kit.library.StreamConsumed):
            await client.send(request)
    assert [it.body for it in server.requests] == [b"payload"]


def test_a_file_that_the_caller_rewinds_can_be_sent_in_another_call(sync_kit: Httpx, server: Server) -> None:
    """It has a length, so that the client would not send it empty."""
    with sync_kit.library.Client(transport=sync_kit.make(QUICK, sync_kit.network())) as client:
        file = io.BytesIO(b"payload")
        request = client.build_request("PUT", server.url, content=file)
        for _ in range(2):
            assert client.send(request).status_code == 200
            file.seek(0)
    assert [it.body for it in server.requests] == [b"payload", b"payload"]


async def test_an_iterator_that_was_not_sent_before_a_timeout_can_be_sent(tasks_kit: Httpx, server: Server) -> None:
    """To a server that accepts connections."""
    body = tasks_kit.generator(b"once")
    async with tasks_kit.client(Timeout(0.2)) as client:
        with full_port() as url, pytest.raises(TimeoutExceeded):
            await client.post(url, content=body, timeout=None)
    async with tasks_kit.client() as client:
        assert (await client.post(server.url, content=body)).status_code == 200
    assert [it.body for it in server.requests] == [b"once"]


# --- responses -------------------------------------------------------------------------------


async def test_a_response_whose_body_is_read_in_its_attempt_is_otherwise_unchanged(kit: Httpx, server: Server) -> None:
    """Its body is decoded by the client, once, or is there as it came."""
    packed = gzip.compress(b"fine")
    url = server.script("/", Answer(200, {"Content-Encoding": "gzip"}, packed))
    async with kit.client(QUICK, read_body=True) as client:
        response = await client.get(url)
        assert (response.content, response.request.method) == (b"fine", "GET")
        assert response.elapsed.total_seconds() > 0
        async with client.stream("GET", url) as response:
            raw = response.iter_raw() if kit.world.blocking else [it async for it in response.aiter_raw()]
            assert b"".join(raw) == packed


async def test_a_body_that_cannot_be_read_is_closed(kit: Httpx) -> None:
    """Also if the inner transport does not close it after an error."""
    noted: list[str] = []
    stream = body_of(kit, b"a", kit.library.ReadError("broken"), noted=noted)
    inner = kit.mock(kit.library.Response(200, stream=stream), 204)
    async with kit.client(QUICK, inner, read_body=True) as client:
        assert (await client.get("http://example.org/")).status_code == 204
    assert noted == ["read", "closed"]


async def test_a_connection_that_changes_its_protocol_has_no_body_to_read(kit: Httpx) -> None:
    """The data after a 101 belongs to the caller."""
    noted: list[str] = []
    inner = kit.mock(kit.library.Response(101, stream=body_of(kit, b"", noted=noted)))
    async with (
        kit.client(QUICK, inner, read_body=True) as client,
        client.stream("GET", "http://example.org/") as response,
    ):
        assert response.status_code == 101
    assert "read" not in noted


@pytest.mark.parametrize("cooperative", [False, True])
async def test_an_endless_body_ends_at_the_deadline(some_kit: Httpx, server: Server, cooperative: bool) -> None:
    """Neither by the caller, if nothing cuts an attempt off, nor by an abandoned thread."""
    policy = Timeout(0.1, cooperative=cooperative)
    async with some_kit.client(policy, read_body=True) as client:
        url = server.script("/", Answer(body=[b"."] * 1000, pause=0.02))
        assert type(await outcome_of(client.get(url))) is TimeoutExceeded
        server.wait_until(lambda: server.open_connections == Timeout.abandoned() == 0)
