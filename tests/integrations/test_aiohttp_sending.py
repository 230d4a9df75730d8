"""What aiohttp sends again under a policy, by itself or for it."""

from __future__ import annotations

import gc
import io
import threading
import weakref
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from resilience import (
    CircuitBreaker,
    Policy,
    Retry,
    Timeout,
)
from resilience.integrations.aiohttp import resilience_middleware
from resilience.integrations.http import NotRepeatable
from tests.integrations.aiohttp_sessions import QUICK, attempt, note, pieces, session
from tests.integrations.servers import PATIENCE, Answer, FlakyServer, unused_url
from tests.integrations.upload_bodies import pipe


async def test_a_body_that_another_middleware_has_used_up(server: FlakyServer) -> None:
    """A middleware around ours that sends a generator once more does not send an empty body."""

    async def again(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        (await handler(request)).close()
        return await handler(request)

    async with aiohttp.ClientSession() as one:
        chain = (again, resilience_middleware(QUICK))
        assert isinstance(await attempt(one.put(server.url, data=pieces(), middlewares=chain)), NotRepeatable)
    assert [it.body for it in server.requests] == [b"once"]


async def test_a_wait_for_a_free_connection_sends_nothing(server: FlakyServer) -> None:
    """Who has got none in time may try again, whatever the method."""
    async with session() as one, one.get(server.script("/", Answer(body=[b"a", b"b"], drip=threading.Event()))):
        outcome = await attempt(one.post(server.url, timeout=aiohttp.ClientTimeout(connect=0.1)))
        assert isinstance(outcome, aiohttp.ConnectionTimeoutError)
        assert "3 attempts" in note(outcome)


@pytest.mark.parametrize("policy", [QUICK, Retry(1), CircuitBreaker(5)])
@pytest.mark.parametrize("fault", ["reset", "close"])
async def test_aiohttps_own_second_try_does_not_multiply(server: FlakyServer, policy: Policy[Any], fault: Any) -> None:
    """The policy alone says how often a request is sent."""
    async with session(policy) as one:
        for _ in range(2):
            server.requests.clear()
            outcome = await attempt(one.get(server.script("/", Answer(fault=fault))))
            assert isinstance(outcome, aiohttp.ClientConnectionError)
            assert len(server.requests) == (3 if policy is QUICK else 1)


async def test_a_users_own_second_try_is_another_request(server: FlakyServer) -> None:
    """Only aiohttp's own is ended; who asks again in the same task, and of the same URL, is served."""
    async with session(Retry(1)) as one:
        url = server.script("/", Answer(fault="close"), 200)
        assert isinstance(await attempt(one.get(url)), aiohttp.ServerDisconnectedError)
        assert (await attempt(one.get(url))).status == 200


async def test_another_middlewares_second_try_is_another_request(server: FlakyServer) -> None:
    """One around ours may try again, with the same request, or do without."""
    entered: list[str] = []

    async def again(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        entered.append("again")
        try:
            return await handler(request)
        except aiohttp.ServerDisconnectedError:
            return await handler(request)

    async def never_mind(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
        try:
            return await handler(request)
        except aiohttp.ServerDisconnectedError:
            raise LookupError from None

    ours = resilience_middleware(Retry(1))
    async with aiohttp.ClientSession() as one:
        url = server.script("/", Answer(fault="close"), 200)
        assert (await attempt(one.get(url, middlewares=(again, ours)))).status == 200
        url = server.script("/", Answer(fault="close"), 200)
        assert isinstance(await attempt(one.get(url, middlewares=(never_mind, ours))), LookupError)
        assert (await attempt(one.post(url, middlewares=(ours,)))).status == 200
    assert entered == ["again"]  # aiohttp has seen no failure


async def test_a_connection_that_is_kept_does_not_keep_the_request(server: FlakyServer) -> None:
    """An upload is not held in memory for as long as its connection lives."""

    class Upload(io.BytesIO):
        """A body that can be watched."""

    async with session(Timeout(PATIENCE)) as one:
        body = Upload(b"large")
        assert (await attempt(one.put(server.url, data=body))).status == 200
        gone = weakref.ref(body)
        del body
        gc.collect()
        assert gone() is None
        assert server.open_connections == 1


@pytest.mark.parametrize("kind", ["GET", "POST", "PUT", "never sent", "switched off"])
async def test_a_failed_request_is_let_go(server: FlakyServer, kind: str) -> None:
    """Nothing of it is kept for a second coming that has been, or will never be."""
    async with session(Retry(1)) as one:
        one._retry_connection = kind != "switched off"  # as aiohttp's own test client does
        method = kind if kind.isupper() else "PUT"
        url = unused_url() if kind == "never sent" else server.script("/", Answer(fault="close"))
        error = await attempt(one.request(method, url, data=b"x"))
        gone = weakref.ref(error)
        assert isinstance(error, aiohttp.ClientConnectionError)
        del error
    gc.collect()
    assert gone() is None


def form(**fields: Any) -> aiohttp.FormData:
    it = aiohttp.FormData()
    for name, value in fields.items():
        it.add_field(name, value, filename=name if isinstance(value, io.IOBase) else None)
    return it


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"data": b"bytes"}, b"bytes"),
        ({"data": "text"}, b"text"),
        ({"data": {"a": "1"}}, b"a=1"),
        ({"json": [1]}, b"[1]"),
        ({"data": io.BytesIO(b"file")}, b"file"),
        ({"data": io.StringIO("text")}, b"text"),
        ({"data": b"packed", "compress": True}, None),
        ({"data": form(a="1", b=io.BytesIO(b"file"))}, None),
        ({"data": b"expected", "expect100": True}, b"expected"),
    ],
    ids=lambda it: "" if isinstance(it, bytes) else " ".join(it or ()),
)
async def test_bodies_that_are_sent_again_whole(server: FlakyServer, options: Any, expected: bytes | None) -> None:
    """What is in memory arrives whole at each attempt."""
    async with session() as one:
        response = await attempt(one.put(server.script("/", 503, Answer(fault="reset"), 200), **options))
        assert response.status == 200
    bodies = [it.body for it in server.requests]
    assert bodies == [bodies[0] if expected is None else expected] * 3
    assert bodies[0]


async def test_each_attempt_waits_for_the_servers_consent(server: FlakyServer) -> None:
    """An attempt that was not allowed to send its body takes nothing from the next one."""
    async with session() as one:
        url = server.script("/", Answer(fault="refuse"), 503, 200)
        assert (await attempt(one.put(url, data=b"body", expect100=True))).status == 200
    assert [it.body for it in server.requests] == [b"", b"body", b"body"]


@pytest.mark.parametrize("answer", [503, Answer(fault="reset")])
@pytest.mark.parametrize("kind", ["generator", "pipe", "form with a pipe", "payload"])
async def test_bodies_that_are_sent_once(server: FlakyServer, answer: Any, kind: str) -> None:
    """A body that is used up is never sent again, which would be as an empty one, whatever the method."""
    with pipe() as file:
        data = {"generator": pieces(), "pipe": file, "form with a pipe": form(a=file)}.get(kind)
        if kind == "payload":
            data = aiohttp.AsyncIterablePayload(pieces())
        async with session() as one:
            outcome = await attempt(one.put(server.script("/", answer, 200), data=data))
    if isinstance(outcome, Exception):
        assert "its body can be sent only once" in note(outcome)
    else:
        assert outcome.status == 503
    assert [b"once" in it.body for it in server.requests] == [True]


@pytest.mark.parametrize("mode", ["r", "rb"])
@pytest.mark.parametrize("in_form", [False, True])
async def test_a_file_is_rewound(server: FlakyServer, tmp_path: Path, mode: str, in_form: bool) -> None:
    """For each attempt, and when it is redirected."""
    path = tmp_path / "file"
    path.write_bytes(b"once")
    server.script("/from", 503, Answer(fault="reset"), Answer(307, {"Location": "/to"}))
    with path.open(mode) as file:
        async with session() as one:
            data = form(a=file) if in_form else file
            assert (await attempt(one.put(f"{server.url}/from", data=data))).status == 200
    assert [b"once" in it.body for it in server.requests] == [True] * 4


@pytest.mark.parametrize("never_sent", [True, False])
async def test_a_file_that_a_thread_may_still_read_is_not_rewound(
    server: FlakyServer, tmp_path: Path, never_sent: bool
) -> None:
    """aiohttp reads files in threads, and a read goes on when its attempt is cut off in the middle of the file."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000_000)
    with path.open("rb") as file:
        async with session() as one:
            url = unused_url() if never_sent else server.script("/", Answer(fault="refuse"))
            error = await attempt(one.put(url, data=file))
            assert isinstance(error, aiohttp.ClientConnectionError)
            assert ("3 attempts" in note(error)) is never_sent
            assert ("its body is still being read by an earlier attempt" in note(error)) is not never_sent
    assert len(server.requests) == (0 if never_sent else 1)
