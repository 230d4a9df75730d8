"""Deadlines and the timeouts of httpx."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import pytest

from resilience import Context, DeadlineExceeded, Hedge, Policy, Retry, Timeout, TimeoutExceeded, deadline
from resilience.integrations.http import Rules, standard
from tests.callers import wait_until
from tests.conftest import FakeClock
from tests.integrations.http_clients import NO_TLS, QUICK, Httpx, outcome_of, process_clock_ahead
from tests.integrations.httpx.conftest import body_of, full_port
from tests.integrations.servers import PATIENCE, Answer, Server


async def test_the_clients_timeouts_are_cut_to_the_time_left_at_each_attempt(kit: Httpx, clock: FakeClock) -> None:
    """A timeout that is None becomes the time left; a shorter one stays. All else in the request is unchanged."""
    seen: list[Any] = []

    def handler(request: Any) -> Any:
        seen.append(request)
        clock.advance(2)
        return kit.library.Response(503 if len(seen) == 1 else 200)

    own = {"connect": 1.0, "read": 60.0, "write": None, "pool": 6.0}
    async with kit.client(QUICK, kit.library.MockTransport(handler)) as client:
        options = {"headers": {"X-A": "1"}, "extensions": {"timeout": own, "sni_hostname": "a.example"}}
        request = client.client.build_request("GET", "http://example.org/", **options)
        with deadline(8):
            response = await client.send(request)
        assert response.request is request
        assert request.extensions["timeout"] == own
        assert (await client.send(request)).request is seen[2] is request  # without a deadline
    assert [it.extensions["timeout"] for it in seen[:2]] == [
        {"connect": 1.0, "read": 8.0, "write": 8.0, "pool": 6.0},
        {"connect": 1.0, "read": 6.0, "write": 6.0, "pool": 6.0},
    ]
    assert (seen[0].extensions["sni_hostname"], seen[0].headers["x-a"]) == ("a.example", "1")


async def test_a_response_that_a_timer_has_not_cut_off_is_returned_in_tasks(tasks_kit: Httpx, clock: FakeClock) -> None:
    """Although its time is over: the event loop may notice the response first."""

    def handler(request: Any) -> Any:
        clock.advance(PATIENCE)
        return tasks_kit.library.Response(200)

    async with tasks_kit.client(Timeout(PATIENCE), tasks_kit.library.MockTransport(handler)) as client:
        assert (await client.get("http://example.org/")).status_code == 200


async def test_a_body_in_memory_can_be_read_after_the_deadline(kit: Httpx, clock: FakeClock) -> None:
    """Such as one that a cache inside has returned."""
    body = kit.library.ByteStream(b"ok")
    network = kit.library.MockTransport(lambda request: kit.library.Response(200, stream=body))
    async with kit.client(QUICK, network) as client:
        with deadline(PATIENCE):
            response = await client.send(kit.library.Request("GET", "http://example.org/"), stream=True)
        clock.advance(PATIENCE)
        assert await kit.read(response) == b"ok"


def test_a_body_that_a_transport_inside_has_read_is_not_read_again(sync_kit: Httpx) -> None:
    """Neither by an attempt that includes it."""
    response = sync_kit.library.Response(200, content=iter([b"ok"]))
    response.read()
    with sync_kit.library.Client(transport=sync_kit.make(QUICK, sync_kit.mock(response), read_body=True)) as client:
        assert client.get("http://example.org/").content == b"ok"


def test_a_body_whose_time_is_over_is_not_waited_for(sync_kit: Httpx, clock: FakeClock) -> None:
    """A transport inside that ignores timeouts would wait as long as it wants."""
    noted: list[str] = []
    inner = sync_kit.mock(sync_kit.library.Response(200, stream=body_of(sync_kit, b"late", noted=noted)))
    transport = sync_kit.make(Timeout(1, cooperative=True), inner)
    with sync_kit.library.Client(transport=transport) as client, client.stream("GET", "http://example.org/") as answer:
        clock.advance(1)
        with pytest.raises(TimeoutExceeded, match="limit_body"):
            answer.read()
    assert noted == ["closed"]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_abandoned_attempt_sends_nothing(sync_kit: Httpx, server: Server, clock: FakeClock, method: str) -> None:
    """So the next one may send: the two cannot meet at the server."""
    abandoned = threading.Event()

    class Waiting(sync_kit.library.HTTPTransport):  # type: ignore[name-defined, misc]
        def handle_request(self, request: Any) -> Any:
            if not abandoned.is_set():
                clock.advance(PATIENCE)
            abandoned.wait(PATIENCE)
            return super().handle_request(request)

    policy = Policy.wrap(Retry(2, backoff=[0], on_retry=lambda event: abandoned.set()), Timeout(PATIENCE))
    with sync_kit.library.Client(transport=sync_kit.make(policy, Waiting(verify=NO_TLS))) as client:
        if method == "GET":
            assert client.get(server.url).content == b"ok"
        else:  # it had not reported that it was connecting, so that it may have been sending
            with pytest.raises(TimeoutExceeded):
                client.post(server.url)
            abandoned.set()
        server.wait_until(lambda: Timeout.abandoned() == 0)
    assert len(server.requests) == (1 if method == "GET" else 0)


def test_an_attempt_that_is_abandoned_while_it_connects_never_sends(sync_kit: Httpx, clock: FakeClock) -> None:
    """So the next one may send, also a POST."""
    connected = threading.Event()
    attempts, sent = list[Any](), list[Any]()

    def handler(request: Any) -> Any:
        attempts.append(request)
        request.extensions["trace"]("connection.connect_tcp.started", {})
        if len(attempts) == 1:
            clock.advance(1)
            connected.wait(PATIENCE)
        request.extensions["trace"]("http11.send_request_headers.started", {})
        sent.append(request)
        return sync_kit.library.Response(200)

    transport = sync_kit.make(Policy.wrap(Retry(3, backoff=[0]), Timeout(1)), sync_kit.library.MockTransport(handler))
    with sync_kit.library.Client(transport=transport) as client:
        assert client.post("http://example.org/").status_code == 200
    connected.set()
    wait_until(lambda: Timeout.abandoned() == 0)
    assert len(sent) == 1


def test_no_attempt_begins_beside_one_that_is_connecting_and_may_still_send(sync_kit: Httpx) -> None:
    attempts: list[Any] = []

    def handler(request: Any) -> Any:
        attempts.append(request)
        request.extensions["trace"]("connection.connect_tcp.started", {})
        time.sleep(0.05)
        request.extensions["trace"]("http11.send_request_headers.started", {})
        return sync_kit.library.Response(200)

    transport = sync_kit.make(Hedge(0.005), sync_kit.library.MockTransport(handler))
    with sync_kit.library.Client(transport=transport) as client, deadline(PATIENCE):
        assert client.post("http://example.org/").status_code == 200
    assert len(attempts) == 1


def test_a_wait_that_begins_at_the_deadline_is_late(sync_kit: Httpx, clock: FakeClock) -> None:
    """Its timeout is never 0, which would mean not to wait at all."""

    def handler(request: Any) -> Any:
        clock.advance(PATIENCE)
        pytest.fail(f"got {request.extensions['timeout'].get('read')}")

    transport = sync_kit.make(Retry(1), sync_kit.library.MockTransport(handler))
    with sync_kit.library.Client(transport=transport) as client, deadline(PATIENCE), pytest.raises(DeadlineExceeded):
        client.get("http://example.org/")


class LimitsTheFirst(Policy[Any]):
    async def around(self, call: Any, ctx: Context) -> Any:
        return await (Timeout(1).around(call, ctx) if ctx.attempt == 1 else call(ctx))


def test_that_an_attempt_sent_nothing_says_nothing_about_the_next(sync_kit: Httpx, clock: FakeClock) -> None:
    may_end = threading.Event()
    attempts: list[Any] = []

    def handler(request: Any) -> Any:
        attempts.append(request)
        if len(attempts) > 1:
            raise sync_kit.library.ReadError("sent, and lost")
        request.extensions["trace"]("connection.connect_tcp.started", {})
        clock.advance(1)
        may_end.wait(PATIENCE)

    policy = Policy.wrap(Retry(3, backoff=[0]), LimitsTheFirst())
    transport = sync_kit.make(policy, sync_kit.library.MockTransport(handler))
    with sync_kit.library.Client(transport=transport) as client, pytest.raises(sync_kit.library.ReadError):
        client.post("http://example.org/")
    may_end.set()
    wait_until(lambda: Timeout.abandoned() == 0)
    assert len(attempts) == 2


def test_the_error_of_an_abandoned_attempt_says_nothing_about_the_next(sync_kit: Httpx, clock: FakeClock) -> None:
    """That the first one could not connect does not mean that the second one has not sent."""
    second_sends, over = threading.Event(), threading.Event()
    attempts: list[Any] = []

    def handler(request: Any) -> Any:
        attempts.append(request)
        trace = request.extensions["trace"]
        trace("connection.connect_tcp.started", {})
        if len(attempts) == 1:
            clock.advance(1)
            second_sends.wait(PATIENCE)
            raise sync_kit.library.ConnectError("refused, at last")
        trace("http11.send_request_headers.started", {})
        second_sends.set()
        wait_until(lambda: Timeout.abandoned() == 0)
        clock.advance(1)
        over.wait(PATIENCE)
        return sync_kit.library.Response(200)

    network = sync_kit.library.MockTransport(handler)
    transport = sync_kit.make(Policy.wrap(Retry(3, backoff=[0]), Timeout(1)), network)
    try:
        with sync_kit.library.Client(transport=transport) as client, pytest.raises(TimeoutExceeded):
            client.post("http://example.org/")
    finally:
        over.set()
    assert len(attempts) == 2


def test_a_body_that_belongs_to_an_attempt_ends_with_the_time_of_the_attempt(sync_kit: Httpx, clock: FakeClock) -> None:
    """Not with that of the whole call, which `standard()` gives to a body that is read later."""

    class Slow(sync_kit.library.SyncByteStream):  # type: ignore[name-defined, misc]
        def __iter__(self) -> Iterator[bytes]:
            clock.advance(2)
            yield b"late"

    inner = sync_kit.mock(sync_kit.library.Response(200, stream=Slow()), 204)
    policy = standard(attempt_timeout=1, attempts=2, backoff=[0], cooperative=True)
    with sync_kit.library.Client(transport=sync_kit.make(policy, inner, read_body=True)) as client:
        assert client.get("http://example.org/").status_code == 204


class Cut(Policy[Any]):
    """A `Timeout` that a test lets fire at a line of its own: with the clock in threads, by a cancellation in tasks."""

    def __init__(self, kit: Httpx, clock: FakeClock) -> None:
        self._in_tasks = not kit.world.blocking
        self._timeout = Timeout(1)
        self._clock = clock

    async def around(self, call: Any, ctx: Context) -> Any:
        self._scope: Any = anyio.CancelScope() if self._in_tasks else contextlib.nullcontext()
        with self._scope:
            return await self._timeout.around(call, ctx)
        raise TimeoutExceeded

    def reach(self) -> None:
        self._clock.advance(0.999 if self._in_tasks else 1)  # the timer of an event loop may fire a little early
        if self._in_tasks:
            self._scope.cancel()


async def test_a_post_is_repeated_if_the_connection_was_not_established(kit: Httpx, clock: FakeClock) -> None:
    """The client's trace, which the user may read too, shows that nothing was sent."""
    attempts, traced = list[Any](), list[str]()
    limit = Cut(kit, clock)

    def trace(event: str, info: Any) -> Any:
        traced.append(event)
        if event == "connection.connect_tcp.started":
            limit.reach()
        return None if kit.world.blocking else anyio.lowlevel.cancel_shielded_checkpoint()

    with full_port() as url:
        policy = Policy.wrap(Retry(2, backoff=[0], on_retry=attempts.append), limit)
        async with kit.client(policy, timeout=None) as client:
            error = await outcome_of(client.post(url, content=kit.generator(b"a"), extensions={"trace": trace}))
            assert isinstance(error, (TimeoutExceeded, kit.library.ConnectTimeout))
    assert len(attempts) == 1
    assert traced.count("connection.connect_tcp.started") == 2


@pytest.mark.parametrize("policy", [Timeout(0.05), QUICK], ids=["timeout", "deadline"])
@pytest.mark.parametrize("read_body", [False, True])
@pytest.mark.parametrize("proxied", [False, True])
async def test_no_place_in_the_pool_is_lost_to_a_timeout(
    some_tasks_kit: Httpx, server: Server, policy: Policy[Any], read_body: bool, proxied: bool
) -> None:
    """Neither to a Timeout, which cancels, nor to the client's own: they do not fire at the same instant.

    Nor in the queue: httpcore loses the place of a call that is cancelled just when the place is assigned.
    """
    stuck = [Answer(200, hold=threading.Event()), Answer(200, body=[b"a", b"b"], drip=threading.Event())]
    url = "http://nowhere.invalid/" if proxied else f"{server.url}/"
    server.script(url if proxied else "/", *stuck * 100)
    limits = some_tasks_kit.library.Limits(max_connections=20)
    inner = some_tasks_kit.network(limits=limits, proxy=server.url if proxied else None)
    async with some_tasks_kit.client(policy, inner, read_body=read_body) as client:

        async def request() -> None:
            with deadline(0.05):
                assert isinstance(await outcome_of(client.get(url)), TimeoutExceeded)

        for _ in range(3):
            async with anyio.create_task_group() as group:
                for _ in range(30):
                    group.start_soon(request)
        assert inner._pool.connections == []


@pytest.mark.parametrize("limit_body", [True, False])
async def test_no_place_in_the_pool_is_lost_to_a_cancellation_while_a_response_is_closed(
    asyncio_kit: Httpx, server: Server, limit_body: bool
) -> None:
    """A policy closes those that it discards, and its caller those that it has read. Both may be cut off meanwhile."""
    server.script("/", Answer(503), Answer(200), Answer(200, body=[b"a", b"b"]))

    def cancel(event: object = None) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    async def break_off(client: Any) -> None:
        async with client.client.stream("GET", f"{server.url}/") as response:
            async for _ in response.aiter_raw():
                cancel()
                break

    inner = asyncio_kit.network()
    policy = Retry(2, backoff=[0], on_retry=cancel)
    async with asyncio_kit.client(policy, inner, rules=Rules(limit_body=limit_body)) as client:
        for request in (client.get(f"{server.url}/"), client.get(f"{server.url}/"), break_off(client)):
            with contextlib.suppress(asyncio.CancelledError), deadline(PATIENCE):
                await asyncio.create_task(request)
            assert all(it.is_idle() for it in inner._pool.connections)
            assert inner._pool._requests == []


RESETS = {b"/refuses": h2.errors.ErrorCodes.REFUSED_STREAM, b"/cancels": h2.errors.ErrorCodes.CANCEL}


def serve_http2(listener: socket.socket) -> None:
    """Serve a connection of HTTP/2 with one stream at a time.

    `/hangs` gets no answer, `/drips` no end of its body, and after `/stops` no more streams are allowed. `/refuses` and
    `/cancels` reset the stream, and `/leaves` ends the connection and says that no stream was processed.
    """
    connection, _ = listener.accept()
    state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    state.local_settings = h2.settings.Settings(False, {h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 1})
    state.initiate_connection()
    with connection, contextlib.suppress(OSError, h2.exceptions.ProtocolError):  # at and after its end
        while True:
            connection.sendall(state.data_to_send())
            if not (data := connection.recv(65536)):
                return
            for event in state.receive_data(data):
                path = dict(event.headers)[b":path"] if isinstance(event, h2.events.RequestReceived) else b"/hangs"
                if path in RESETS:
                    state.reset_stream(event.stream_id, RESETS[path])
                elif path == b"/leaves":
                    state.close_connection(last_stream_id=0)
                elif path != b"/hangs":
                    if path == b"/stops":
                        state.update_settings({h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 0})
                    state.send_headers(event.stream_id, [(":status", "200")], end_stream=path != b"/drips")


@contextlib.contextmanager
def http2_server(connections: int) -> Iterator[str]:
    """Yield the URL of a server that serves so many connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = [threading.Thread(target=serve_http2, args=[listener], daemon=True) for _ in range(connections)]
        for thread in threads:
            thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        for thread in threads:
            thread.join(PATIENCE)


@pytest.mark.parametrize(("path", "awaited"), [("hangs", "headers"), ("drips", "body")])
async def test_a_stream_of_http2_that_is_cut_off_is_reset(tasks_kit: Httpx, path: str, awaited: str) -> None:
    """httpcore forgets it, and h2 would allow no other one on that connection."""
    with http2_server(1) as url:
        async with tasks_kit.client(Timeout(PATIENCE), tasks_kit.network(http1=False, http2=True)) as client:
            for _ in range(3):
                assert (await client.get(url)).status_code == 200
                with anyio.CancelScope() as scope:

                    async def trace(event: str, info: Any, scope: anyio.CancelScope = scope) -> None:
                        if event == f"http2.receive_response_{awaited}.started":
                            scope.cancel()

                    await client.get(url + path, extensions={"trace": trace})
                assert scope.cancelled_caught


async def test_a_connection_of_http2_that_allows_no_more_streams_is_replaced(tasks_kit: Httpx) -> None:
    """As in a graceful stop of hypercorn; httpcore would use it again and again."""
    with http2_server(2) as url:
        async with tasks_kit.client(QUICK, tasks_kit.network(http1=False, http2=True)) as client:
            for path in ("stops", "", ""):
                assert (await client.post(url + path)).status_code == 200


@pytest.mark.parametrize(("path", "connections", "times"), [("refuses", 1, 3), ("leaves", 3, 3), ("cancels", 1, 1)])
async def test_a_post_http2_has_not_processed_is_repeated(kit: Httpx, path: str, connections: int, times: int) -> None:
    """It has reset the stream with REFUSED_STREAM, or left with a GOAWAY for all streams."""
    repeats: list[Any] = []
    with http2_server(connections) as url:
        retry = Retry(3, backoff=[0], on_retry=repeats.append)
        async with kit.client(retry, kit.network(http1=False, http2=True)) as client:
            with pytest.raises(kit.library.RemoteProtocolError):
                await client.post(url + path)
    assert len(repeats) == times - 1


@pytest.mark.parametrize("enforced", [False, True])
async def test_each_wait_of_an_attempt_has_the_time_left(kit: Httpx, clock: FakeClock, enforced: bool) -> None:
    """Each of the client's timeouts limits one wait, so that an earlier one shortens the next.

    A task that is cancelled in time needs none of this.
    """
    seen: list[float] = []

    def handler(request: Any) -> Any:
        for _ in range(3):
            seen.append(request.extensions["timeout"].get("read"))  # as httpcore does, when it begins to wait
            clock.advance(3.0)
        return kit.library.Response(200)

    policy = Timeout(10.0, cooperative=not enforced)
    async with kit.client(policy, kit.library.MockTransport(handler)) as client:
        await client.get("http://example.org/", timeout=60)
    assert seen == ([60, 60, 60] if enforced and not kit.world.blocking else [10, 7, 4])


async def test_the_deadline_of_an_attempt_that_wins_a_race_does_not_apply_to_its_body(kit: Httpx) -> None:
    """It is removed from the client's timeouts also if another attempt has begun since."""
    seen: list[Any] = []
    over = threading.Event()

    def handler(request: Any) -> Any:
        seen.append(request.extensions["timeout"])
        is_first = len(seen) == 1
        while len(seen) == 1 or not (is_first or over.is_set()):
            time.sleep(0.01)
        return kit.library.Response(200, stream=body_of(kit, b"whole"))

    async def ahandler(request: Any) -> Any:
        return await anyio.to_thread.run_sync(handler, request, abandon_on_cancel=True)

    policy = Timeout(PATIENCE, cooperative=True).wrap(Hedge(0.01))
    inner = kit.library.MockTransport(handler if kit.world.blocking else ahandler)
    async with kit.client(policy, inner, rules=Rules(limit_body=False)) as client:
        assert (await client.get("http://example.org/", timeout=60)).content == b"whole"
    over.set()
    assert seen[0].get("read") == 60  # as httpcore does, when it begins to read the body


# --- the deadline of a body ------------------------------------------------------------------


async def test_a_body_read_in_its_attempt_has_no_deadline(some_kit: Httpx, server: Server) -> None:
    """With `read_body`, the caller of a stream may take any time."""
    opening = some_kit.client(Timeout(PATIENCE), read_body=True)
    async with opening as client, client.stream("GET", server.url) as response:
        with process_clock_ahead(2 * PATIENCE):
            assert await some_kit.read(response) == b"ok"


async def test_a_body_whose_next_chunk_has_always_arrived_is_cut_off(tasks_kit: Httpx) -> None:
    class Endless(tasks_kit.library.AsyncByteStream):  # type: ignore[name-defined, misc]
        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                await anyio.sleep(0)
                yield b"."

    inner = tasks_kit.mock(tasks_kit.library.Response(200, stream=Endless()))
    async with tasks_kit.client(Timeout(0.05), inner) as client:
        with pytest.raises(TimeoutExceeded), anyio.fail_after(PATIENCE):
            await client.get("http://example.org/")


async def answered(kit: Httpx, stream: Any) -> Any:
    """Return the response of a transport whose inner one answers with this stream."""
    transport = kit.make(Timeout(PATIENCE), kit.mock(kit.library.Response(200, stream=stream)))
    return await transport.handle_async_request(kit.library.Request("GET", "http://example.org/"))


async def test_closing_a_body_closes_the_inner_stream(tasks_kit: Httpx) -> None:
    """A generator that is left to the collector could not await anything."""
    ended: list[str] = []

    async def leaving() -> None:
        await anyio.sleep(0)
        ended.append("ended")

    response = await answered(tasks_kit, body_of(tasks_kit, b"a", b"b", leaving=leaving))
    async with contextlib.aclosing(response.stream.__aiter__()) as chunks:
        assert await anext(chunks) == b"a"
    assert ended == ["ended"]


async def test_a_body_can_be_closed_while_another_task_reads_it(tasks_kit: Httpx, server: Server) -> None:
    """The reader gets an error of the client, as without a policy."""
    url = server.script("/", Answer(body=[b"a", b"b"], drip=threading.Event()))
    async with tasks_kit.client(Timeout(PATIENCE)) as client, client.stream("GET", url) as response:
        began = anyio.Event()

        async def reader() -> None:
            with pytest.raises(tasks_kit.library.ReadError):
                async for _ in response.aiter_raw():
                    began.set()

        with anyio.fail_after(PATIENCE / 4):
            async with anyio.create_task_group() as group:
                group.start_soon(reader)
                await began.wait()
                await anyio.sleep(0)  # until it waits for the next piece
                await response.aclose()


async def test_a_body_whose_close_is_cancelled_is_closed(tasks_kit: Httpx) -> None:
    noted: list[str] = []
    with anyio.CancelScope() as scope:

        async def leaving() -> None:
            scope.cancel()
            await anyio.sleep(0)

        response = await answered(tasks_kit, body_of(tasks_kit, b"a", noted=noted, leaving=leaving))
        await anext(response.stream.__aiter__())
        await response.aclose()
    assert scope.cancelled_caught
    assert noted == ["read", "closed"]
