"""What aiohttp sends again under a policy, on its own or for the policy."""

from __future__ import annotations

import gc
import io
import threading
import weakref
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from resilience import CircuitBreaker, Policy, Retry, Timeout
from resilience.integrations.aiohttp import resilience_middleware
from resilience.integrations.http import NotRepeatable
from tests.integrations.aiohttp_sessions import QUICK, outcome_of, pieces, session
from tests.integrations.http_clients import form
from tests.integrations.servers import PATIENCE, Answer, FlakyServer, notes_of, unused_url


async def test_an_outer_middleware_cannot_send_a_one_shot_body_again(server: FlakyServer) -> None:
    """The second request would have an empty body."""

    async def call_twice(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        (await handler(request)).close()
        return await handler(request)

    async with aiohttp.ClientSession() as client:
        chain = (call_twice, resilience_middleware(QUICK))
        assert isinstance(await outcome_of(client.put(server.url, data=pieces(), middlewares=chain)), NotRepeatable)
    assert [it.body for it in server.requests] == [b"once"]


async def test_a_wait_for_a_free_connection_sends_nothing(server: FlakyServer) -> None:
    """A request of any method that got no connection in time is repeated."""
    async with session() as client, client.get(server.script("/", Answer(body=[b"a", b"b"], drip=threading.Event()))):
        outcome = await outcome_of(client.post(server.url, timeout=aiohttp.ClientTimeout(connect=0.1)))
        assert isinstance(outcome, aiohttp.ConnectionTimeoutError)
        assert "3 attempts" in notes_of(outcome)


@pytest.mark.parametrize("policy", [QUICK, Retry(1), CircuitBreaker(5)])
@pytest.mark.parametrize("fault", ["reset", "close"])
async def test_aiohttps_own_retry_adds_no_attempts(server: FlakyServer, policy: Policy[Any], fault: Any) -> None:
    """The policy alone decides how often a request is sent."""
    async with session(policy) as client:
        for _ in range(2):
            server.requests.clear()
            outcome = await outcome_of(client.get(server.script("/", Answer(fault=fault))))
            assert isinstance(outcome, aiohttp.ClientConnectionError)
            assert len(server.requests) == (3 if policy is QUICK else 1)


async def test_a_users_second_request_to_the_same_url_is_sent(server: FlakyServer) -> None:
    """Only the retry of aiohttp itself is prevented, not a later request in the same task."""
    async with session(Retry(1)) as client:
        url = server.script("/", Answer(fault="close"), 200)
        assert isinstance(await outcome_of(client.get(url)), aiohttp.ServerDisconnectedError)
        assert (await outcome_of(client.get(url))).status == 200


async def test_a_retry_of_an_outer_middleware_is_another_request(server: FlakyServer) -> None:
    """An outer middleware may try the same request again, or replace the error."""
    entered: list[str] = []

    async def call_twice(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        entered.append("call_twice")
        try:
            return await handler(request)
        except aiohttp.ServerDisconnectedError:
            return await handler(request)

    async def replace_error(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        try:
            return await handler(request)
        except aiohttp.ServerDisconnectedError:
            raise LookupError from None

    ours = resilience_middleware(Retry(1))
    async with aiohttp.ClientSession() as client:
        url = server.script("/", Answer(fault="close"), 200)
        assert (await outcome_of(client.get(url, middlewares=(call_twice, ours)))).status == 200
        url = server.script("/", Answer(fault="close"), 200)
        assert isinstance(await outcome_of(client.get(url, middlewares=(replace_error, ours))), LookupError)
        assert (await outcome_of(client.post(url, middlewares=(ours,)))).status == 200
    assert entered == ["call_twice"]  # once, as aiohttp has seen no failure


async def test_a_pooled_connection_does_not_keep_the_request(server: FlakyServer) -> None:
    """An upload is not held in memory for as long as its connection lives."""

    class Upload(io.BytesIO):
        """A body to which a test can hold a weak reference."""

    async with session(Timeout(PATIENCE)) as client:
        body = Upload(b"large")
        assert (await outcome_of(client.put(server.url, data=body))).status == 200
        reference = weakref.ref(body)
        del body
        gc.collect()
        assert reference() is None
        assert server.open_connections == 1


@pytest.mark.parametrize("kind", ["GET", "POST", "PUT", "never sent", "switched off"])
async def test_a_failed_request_is_freed(server: FlakyServer, kind: str) -> None:
    """What is remembered for the retry of aiohttp is dropped, also if there is no such retry."""
    async with session(Retry(1)) as client:
        client._retry_connection = kind != "switched off"  # as aiohttp's own test client does
        method = kind if kind.isupper() else "PUT"
        url = unused_url() if kind == "never sent" else server.script("/", Answer(fault="close"))
        error = await outcome_of(client.request(method, url, data=b"x"))
        reference = weakref.ref(error)
        assert isinstance(error, aiohttp.ClientConnectionError)
        del error
    gc.collect()
    assert reference() is None


async def test_each_attempt_waits_for_100_continue(server: FlakyServer) -> None:
    """An attempt that was not allowed to send its body has not used it up."""
    async with session() as client:
        url = server.script("/", Answer(fault="refuse"), 503, 200)
        assert (await outcome_of(client.put(url, data=b"body", expect100=True))).status == 200
    assert [it.body for it in server.requests] == [b"", b"body", b"body"]


@pytest.mark.parametrize("mode", ["r", "rb"])
@pytest.mark.parametrize("in_form", [False, True])
async def test_a_file_is_rewound_for_each_attempt_and_redirect(
    server: FlakyServer, tmp_path: Path, mode: str, in_form: bool
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"once")
    server.script("/from", 503, Answer(fault="reset"), Answer(307, {"Location": "/to"}))
    with path.open(mode) as file:
        async with session() as client:
            data = form(a=file) if in_form else file
            assert (await outcome_of(client.put(f"{server.url}/from", data=data))).status == 200
    assert [b"once" in it.body for it in server.requests] == [True] * 4


@pytest.mark.parametrize("never_sent", [True, False])
async def test_a_file_that_a_thread_may_still_read_is_not_rewound(
    server: FlakyServer, tmp_path: Path, never_sent: bool
) -> None:
    """aiohttp reads files in threads, and a read continues if its attempt is cut off in the middle of the file."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000_000)
    with path.open("rb") as file:
        async with session() as client:
            url = unused_url() if never_sent else server.script("/", Answer(fault="refuse"))
            error = await outcome_of(client.put(url, data=file))
            assert isinstance(error, aiohttp.ClientConnectionError)
            assert ("3 attempts" in notes_of(error)) is never_sent
            assert ("its body is still being read by an earlier attempt" in notes_of(error)) is not never_sent
    assert len(server.requests) == (0 if never_sent else 1)
