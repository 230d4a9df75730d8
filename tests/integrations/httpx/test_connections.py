"""Connections of httpx return to the pool, and responses are closed."""

from __future__ import annotations

import gzip
import threading
from typing import Any

import httpx
import pytest

from resilience import Fallback, Timeout, TimeoutExceeded
from resilience.clock import clock as process_clock
from resilience.integrations.httpx import ResilienceTransport
from tests.integrations.http_clients import NO_TLS, QUICK, outcome_of
from tests.integrations.httpx.conftest import Kit
from tests.integrations.servers import PATIENCE, Answer, FlakyServer


async def test_the_response_of_a_fallback_is_returned(kit: Kit, server: FlakyServer) -> None:
    """The client treats it as one of the server."""
    url = server.script("/", 503)
    policy = Fallback(handler=lambda failure, ctx: kit.library.Response(203, json={"from": "cache"}))
    async with kit.client(policy) as client:
        response = await client.get(url)
        assert (response.status_code, response.json()) == (203, {"from": "cache"})


async def test_a_body_that_is_read_in_its_attempt_is_tried_again(kit: Kit, server: FlakyServer) -> None:
    """With `read_body` a body that breaks off is a failure; the response is otherwise unchanged."""
    packed = gzip.compress(b"fine")
    url = server.script(
        "/",
        Answer(200, body=[b"a", b"b"], fault="cut"),
        Answer(503, body=b"x" * 100_000),
        Answer(200, {"Content-Encoding": "gzip"}, packed),
    )
    inner = kit.network(limits=kit.library.Limits(max_connections=1))
    async with kit.client(QUICK, inner, read_body=True) as client:
        response = await client.get(url)
        assert (response.content, response.request.method) == (b"fine", "GET")
        assert response.elapsed.total_seconds() > 0
        async with client.stream("GET", url) as response:
            raw = response.iter_raw() if kit.blocking else [it async for it in response.aiter_raw()]
            assert b"".join(raw) == packed
    assert server.connections == 2  # the body of the 503 was read, so its connection could be used again


async def test_a_body_that_cannot_be_read_is_closed(kit: Kit) -> None:
    """Also if the inner transport does not close it after an error."""
    noted: list[str] = []
    stream = kit.body(b"a", kit.library.ReadError("broken"), noted=noted)
    inner = kit.mock(kit.library.Response(200, stream=stream), 204)
    async with kit.client(QUICK, inner, read_body=True) as client:
        assert (await client.get("http://example.org/")).status_code == 204
    assert noted == ["read", "closed"]


async def test_a_connection_that_changes_its_protocol_has_no_body_to_read(kit: Kit) -> None:
    """The data after a 101 belongs to the caller."""
    noted: list[str] = []
    inner = kit.mock(kit.library.Response(101, stream=kit.body(b"", noted=noted)))
    async with (
        kit.client(QUICK, inner, read_body=True) as client,
        client.stream("GET", "http://example.org/") as response,
    ):
        assert response.status_code == 101
    assert "read" not in noted


@pytest.mark.parametrize("cooperative", [False, True])
async def test_an_endless_body_is_not_read_after_the_deadline(
    some_kit: Kit, server: FlakyServer, cooperative: bool
) -> None:
    """Neither by the caller, if nothing cuts an attempt off, nor by an abandoned thread."""
    policy = Timeout(0.1, cooperative=cooperative)
    async with some_kit.client(policy, read_body=True) as client:
        url = server.script("/", Answer(body=[b"."] * 1000, pause=0.02))
        assert type(await outcome_of(client.get(url))) is TimeoutExceeded
        server.wait_until(lambda: server.open_connections == Timeout.abandoned() == 0)


def test_the_wait_for_a_body_is_limited_to_the_time_left(server: FlakyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocking code has no other limit."""
    seen: list[float] = []

    class Slow(httpx.HTTPTransport):
        def handle_request(self, request: Any) -> Any:
            response = super().handle_request(request)
            now = process_clock.now
            monkeypatch.setattr(process_clock, "now", lambda: now() + PATIENCE - 0.5)
            seen.append(request.extensions["timeout"].get("read"))  # as httpcore does, when it begins to read the body
            return response

    url = server.script("/", Answer(200, body=[b"a", b"b"], drip=threading.Event()))
    transport = ResilienceTransport(Timeout(PATIENCE, cooperative=True), Slow(verify=NO_TLS), read_body=True)
    with httpx.Client(transport=transport) as client, pytest.raises(TimeoutExceeded):
        client.get(url)
    assert 0 < seen[0] <= 0.5
