"""Deadlines and the timeouts of httpx."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from resilience import (
    DeadlineExceeded,
    Policy,
    Retry,
    Timeout,
    TimeoutExceeded,
    deadline,
)
from tests.conftest import FakeClock
from tests.integrations.httpx.conftest import (
    PATIENT,
    QUICK,
    Kit,
    dripping,
    full_port,
)
from tests.integrations.servers import Answer, FlakyServer


def timeouts_of(*seen: Any) -> list[dict[str, Any]]:
    return [request.extensions["timeout"] for request in seen]


async def test_the_clients_timeouts_are_cut_to_what_is_left(kit: Kit, clock: FakeClock) -> None:
    """Anew for each attempt; one that the client does not limit becomes what is left; a shorter one stays."""
    seen: list[Any] = []

    def handler(request: Any) -> Any:
        seen.append(request)
        clock.advance(2)
        return kit.library.Response(503 if len(seen) == 1 else 200)

    async with kit.client(QUICK, kit.library.MockTransport(handler)) as client:
        limits = kit.library.Timeout(connect=1.0, read=60.0, write=None, pool=6.0)
        request = client.client.build_request("GET", "http://example.org/", timeout=limits)
        with deadline(8):
            response = await client.send(request)
        assert request.extensions["timeout"] == {"connect": 1.0, "read": 60.0, "write": None, "pool": 6.0}
        assert response.request is request
    assert timeouts_of(*seen) == [
        {"connect": 1.0, "read": 8.0, "write": 8.0, "pool": 6.0},
        {"connect": 1.0, "read": 6.0, "write": 6.0, "pool": 6.0},
    ]


async def test_without_a_deadline_the_timeouts_are_the_clients(kit: Kit) -> None:
    """And so is the request: what the client built is what is sent."""
    seen: list[Any] = []

    def handler(request: Any) -> Any:
        seen.append(request)
        return kit.library.Response(200)

    async with kit.client(QUICK, kit.library.MockTransport(handler), timeout=3.5) as client:
        assert (await client.get("http://example.org/")).request is seen[0]
    assert set(timeouts_of(*seen)[0].values()) == {3.5}


async def test_the_other_extensions_of_a_request_stay(kit: Kit) -> None:
    """Only its timeouts are ours to change."""
    seen: list[Any] = []

    def handler(request: Any) -> Any:
        seen.append(request)
        return kit.library.Response(200)

    async with kit.client(Timeout(PATIENT), kit.library.MockTransport(handler)) as client:
        await client.get("http://example.org/", headers={"X-A": "1"}, extensions={"sni_hostname": "a.example"})
    assert seen[0].extensions["sni_hostname"] == "a.example"
    assert seen[0].headers["x-a"] == "1"


@pytest.mark.parametrize(
    "answer",
    [Answer(200, hold=threading.Event()), Answer(200, body=[b"a", b"b"], drip=threading.Event())],
    ids=["headers", "body"],
)
async def test_a_timeout_that_is_not_ours_stays_the_clients(some_kit: Kit, server: FlakyServer, answer: Answer) -> None:
    """The client's own limit was shorter than what was left, for its headers or its body."""
    url = server.script("/", answer)
    async with some_kit.client(Timeout(PATIENT)) as client:
        assert isinstance(await client.failure("GET", url, timeout=0.1), some_kit.library.ReadTimeout)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_attempt_that_was_left_behind_before_it_sent_sends_nothing(
    sync_kit: Kit, server: FlakyServer, method: str
) -> None:
    """So the next one may send, whatever the method: the two cannot meet at the server."""
    left_behind = threading.Event()
    inner = sync_kit.network_that_first(lambda: left_behind.wait(PATIENT))
    policy = Policy.wrap(Retry(18, backoff=[0], on_retry=lambda event: left_behind.set()), Timeout(0.1))
    with sync_kit.library.Client(transport=sync_kit.transport(policy, inner)) as client:
        if method == "GET":
            assert client.get(server.url).content == b"ok"
        else:  # it had not told that it was connecting, so it may have been sending for all that we know
            with pytest.raises(TimeoutExceeded):
                client.post(server.url)
            left_behind.set()
        server.wait_until(lambda: Timeout.abandoned() == 0)
    assert len(server.requests) == (1 if method == "GET" else 0)


class Connecting:
    """A transport that tells by its trace that it is connecting, and for the first time takes for ever to do so."""

    def __init__(self, kit: Kit) -> None:
        self.requests: list[Any] = []
        self.let = threading.Event()
        outer = self

        class Blocking(kit.library.BaseTransport):  # type: ignore[name-defined, misc]
            def handle_request(self, request: Any) -> Any:
                outer.requests.append(request)
                request.extensions["trace"]("connection.connect_tcp.started", {})
                if len(outer.requests) == 1:
                    outer.let.wait(PATIENT)
                request.extensions["trace"]("http11.send_request_headers.started", {})
                outer.sent.append(request)
                return kit.library.Response(200)

        class Tasks(kit.library.AsyncBaseTransport):  # type: ignore[name-defined, misc]
            async def handle_async_request(self, request: Any) -> Any:
                outer.requests.append(request)
                await request.extensions["trace"]("connection.connect_tcp.started", {})
                if len(outer.requests) == 1:
                    await anyio.sleep(PATIENT)
                await request.extensions["trace"]("http11.send_request_headers.started", {})
                outer.sent.append(request)
                return kit.library.Response(200)

        self.sent: list[Any] = []
        self.transport = Blocking() if kit.blocking else Tasks()


async def test_a_post_that_was_cut_off_while_connecting_is_tried_again(some_kit: Kit) -> None:
    """The client's trace tells that nothing was sent; the attempt that was left behind never sends."""
    network = Connecting(some_kit)
    traced: list[str] = []

    def trace(event: str, info: Any) -> Any:
        traced.append(event)
        return None if some_kit.blocking else anyio.sleep(0)

    async with some_kit.client(Policy.wrap(Retry(18, backoff=[0]), Timeout(0.1)), network.transport) as client:
        response = await client.post("http://example.org/", content=some_kit.chunks(b"a"), extensions={"trace": trace})
        assert response.status_code == 200
    network.let.set()
    end = time.monotonic() + PATIENT
    while Timeout.abandoned() and time.monotonic() < end:
        time.sleep(0.005)
    assert len(network.sent) == 1
    assert traced.count("connection.connect_tcp.started") == len(network.requests)


def test_the_last_word_of_an_attempt_left_behind_says_nothing_of_the_next(sync_kit: Kit) -> None:
    """That the first could not connect in the end does not mean that the second has not sent."""
    second_sends, over = threading.Event(), threading.Event()
    attempts: list[Any] = []

    class Network(sync_kit.library.BaseTransport):  # type: ignore[name-defined, misc]
        def handle_request(self, request: Any) -> Any:
            attempts.append(request)
            trace = request.extensions["trace"]
            trace("connection.connect_tcp.started", {})
            if len(attempts) == 1:
                second_sends.wait(PATIENT)
                raise sync_kit.library.ConnectError("refused, at last")
            trace("http11.send_request_headers.started", {})
            second_sends.set()
            over.wait(PATIENT)
            return sync_kit.library.Response(200)

    transport = sync_kit.transport(Policy.wrap(Retry(3, backoff=[0]), Timeout(0.2)), Network())
    try:
        with sync_kit.library.Client(transport=transport) as client, pytest.raises(TimeoutExceeded):
            client.post("http://example.org/")
    finally:
        over.set()
    assert len(attempts) == 2


def test_a_connection_that_is_never_made_costs_a_post_nothing_but_time(kit: Kit, server: FlakyServer) -> None:
    """An attempt's limit is no doubt about what was sent."""
    with full_port() as url:
        attempts: list[Any] = []
        policy = Policy.wrap(Retry(2, backoff=[0], on_retry=attempts.append), Timeout(0.05))

        async def main() -> None:
            async with kit.client(policy, timeout=None) as client:
                error = await client.failure("POST", url, json={})
                assert isinstance(error, (TimeoutExceeded, kit.library.ConnectTimeout))

        kit.run(main)
    assert len(attempts) == 1


@pytest.mark.parametrize("proxied", [False, True])
def test_many_calls_that_are_cut_off_do_not_use_up_the_pool(tasks_kit: Kit, server: FlakyServer, proxied: bool) -> None:
    """httpcore loses the place of a call that is cancelled when it has just been given it."""
    held = threading.Event()
    path = "http://nowhere.invalid/" if proxied else "/"
    server.script(path, Answer(200, hold=held))
    url = path if proxied else server.url + path

    async def main() -> None:
        options = {"proxy": server.url} if proxied else {}
        inner = tasks_kit.network(limits=tasks_kit.library.Limits(max_connections=2), **options)
        async with tasks_kit.client(Timeout(0.05), inner) as client:
            for _ in range(3):
                async with anyio.create_task_group() as group:
                    for _ in range(10):
                        group.start_soon(client.failure, "GET", url)
            held.set()
            for _ in range(80):  # a busy machine takes longer than the limit; a place that is lost never comes back
                with contextlib.suppress(TimeoutExceeded):
                    assert (await client.get(url, timeout=PATIENT / 2)).status_code == 200
                    return
            raise AssertionError("the pool is used up")

    try:
        tasks_kit.run(main)
    finally:
        held.set()


@pytest.mark.parametrize("policy", [Timeout(0.05), QUICK], ids=["timeout", "deadline"])
@pytest.mark.parametrize("read_body", [False, True])
async def test_no_place_in_the_pool_is_lost_to_a_timeout(
    tasks_kit: Kit, server: FlakyServer, policy: Policy[Any], read_body: bool
) -> None:
    """Neither to one that cancels nor to the client's own: they do not come at the same instant."""
    stuck = [Answer(200, hold=threading.Event()), Answer(200, body=[b"a", b"b"], drip=threading.Event())]
    url = server.script("/", *stuck * 100)
    inner = tasks_kit.network(limits=tasks_kit.library.Limits(max_connections=20))
    async with tasks_kit.client(policy, inner, read_body=read_body) as client:

        async def request() -> None:
            with deadline(0.05):
                assert isinstance(await client.failure("GET", url), TimeoutExceeded)

        for _ in range(3):
            async with anyio.create_task_group() as group:
                for _ in range(30):
                    group.start_soon(request)
        assert inner._pool.connections == []


async def test_a_pool_that_looks_different_inside_is_left_alone(tasks_kit: Kit) -> None:
    """What went wrong comes out, and not what was missing."""

    class Network(tasks_kit.library.AsyncBaseTransport):  # type: ignore[name-defined, misc]
        _pool = object()

        async def handle_async_request(self, request: Any) -> Any:
            raise tasks_kit.library.ReadError("reset")

    async with tasks_kit.client(QUICK, Network()) as client:
        assert isinstance(await client.failure("GET", "http://example.org/"), tasks_kit.library.ReadError)


@pytest.mark.parametrize("enforced", [False, True])
async def test_each_wait_of_an_attempt_has_what_is_left(kit: Kit, clock: FakeClock, enforced: bool) -> None:
    """Also where the wait for a connection has taken most of the time: the client's timeouts are for one wait each.

    A task that is cancelled in time needs none of this.
    """
    seen: list[float] = []

    def wait(request: Any) -> None:
        seen.append(request.extensions["timeout"].get("read"))  # as httpcore does, when it begins to wait
        clock.advance(3.0)

    class Blocking(kit.library.BaseTransport):  # type: ignore[name-defined, misc]
        def handle_request(self, request: Any) -> Any:
            for _ in range(3):
                wait(request)
            return kit.library.Response(200)

    class Tasks(kit.library.AsyncBaseTransport):  # type: ignore[name-defined, misc]
        async def handle_async_request(self, request: Any) -> Any:
            for _ in range(3):
                wait(request)
            return kit.library.Response(200)

    policy = Timeout(10.0, cooperative=not enforced)
    async with kit.client(policy, Blocking() if kit.blocking else Tasks()) as client:
        await client.get("http://example.org/", timeout=60)
    assert seen == ([60, 60, 60] if enforced and not kit.blocking else [10, 7, 4])


def test_a_cancelled_call_gives_its_connection_back(tasks_kit: Kit, server: FlakyServer) -> None:
    """It is no failure: nothing is retried, and the next call has the pool to itself."""
    held = threading.Event()
    url = server.script("/", Answer(200, hold=held), 200)

    async def main() -> None:
        inner = tasks_kit.network(limits=tasks_kit.library.Limits(max_connections=1))
        async with tasks_kit.client(Policy.wrap(Timeout(PATIENT), QUICK), inner) as client:
            with anyio.move_on_after(PATIENT) as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(client.get, url)
                    await anyio.to_thread.run_sync(server.wait_until, lambda: server.requests)
                    group.cancel_scope.cancel()
            assert not scope.cancelled_caught
            assert len(server.requests) == 1
            held.set()
            assert (await client.get(url)).status_code == 200

    try:
        tasks_kit.run(main)
    finally:
        held.set()


# --- the time of a body ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "kind"),
    [(Timeout(0.1), TimeoutExceeded), (QUICK, DeadlineExceeded)],
    ids=["timeout", "deadline"],
)
async def test_a_body_that_drips_does_not_outlast_its_time(
    some_kit: Kit, server: FlakyServer, policy: Policy[Any], kind: type[Exception]
) -> None:
    """Each byte is in time for the client's read timeout; the limit is that of the attempt that brought it."""
    url = dripping(server)
    began = time.monotonic()
    async with some_kit.client(policy) as client:
        with contextlib.ExitStack() as stack:
            if kind is DeadlineExceeded:
                stack.enter_context(deadline(0.1))
            assert type(await client.failure("GET", url)) is kind
    assert time.monotonic() - began < PATIENT


async def test_a_body_that_was_read_in_time_is_there_for_ever(some_kit: Kit, server: FlakyServer) -> None:
    """With `read_body`, whoever opens a stream has no hurry."""
    async with (
        some_kit.client(Timeout(0.3), read_body=True) as client,
        client.stream("GET", server.url) as response,
    ):
        await some_kit.world.sleep(0.35)
        assert await client.read(response) == b"ok"


async def test_a_body_that_is_in_time_is_what_it_was(kit: Kit, server: FlakyServer) -> None:
    """Under a limit, compressed or not, read at once or in pieces."""
    url = server.script("/", Answer(200, {"Content-Type": "text/plain"}, [b"grey ", b"goose"], chunked=True))
    async with kit.client(Timeout(PATIENT)) as client:
        assert (await client.get(url)).text == "grey goose"
        async with client.stream("GET", url) as response:
            assert await client.read(response) == b"grey goose"
        async with client.stream("GET", url) as response:
            lines = response.iter_lines() if kit.blocking else [it async for it in response.aiter_lines()]
            assert list(lines) == ["grey goose"]


async def test_a_body_that_is_not_read_to_its_end_ends_what_is_inside_of_it(tasks_kit: Kit) -> None:
    """When it is told to; a generator that is left to the collector could not await anything any more."""
    ended: list[str] = []

    class Chunks(tasks_kit.library.AsyncByteStream):  # type: ignore[name-defined, misc]
        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                yield b"a"
                yield b"b"
            finally:
                await anyio.sleep(0)
                ended.append("ended")

    library = tasks_kit.library
    inner = tasks_kit.mock(library.Response(200, stream=Chunks()))
    transport = tasks_kit.transport(Timeout(PATIENT), inner)
    response = await transport.handle_async_request(library.Request("GET", "http://example.org/"))
    async with contextlib.aclosing(response.stream.__aiter__()) as chunks:
        assert await anext(chunks) == b"a"
    assert ended == ["ended"]
