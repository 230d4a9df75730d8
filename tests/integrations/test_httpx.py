"""`resilience.integrations.httpx` against httpx and httpx2 themselves, in threads, asyncio and trio."""

from __future__ import annotations

import contextlib
import gc
import gzip
import importlib
import io
import re
import socket
import ssl
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType
from typing import Any

import anyio
import httpx
import httpx2
import pytest
import requests

from resilience import (
    CircuitBreaker,
    CircuitOpen,
    Context,
    DeadlineExceeded,
    Fallback,
    Policy,
    RetriesExhausted,
    Retry,
    Timeout,
    TimeoutExceeded,
    current_context,
    deadline,
    integrations,
)
from resilience.integrations.http import TransientStatus
from resilience.integrations.http.exchange import Exchange
from resilience.integrations.httpx import AsyncResilienceTransport, ResilienceTransport
from tests.conftest import FakeClock, World, no_collector
from tests.integrations.servers import Answer, FlakyServer
from tests.integrations.upload_bodies import ONCE, Asynchronous

QUICK = Retry(3, backoff=[0])
NO_TLS = ssl.create_default_context()  # loading certificates takes 30 ms, and no test needs them
PATIENT = 10.0  # seconds: longer than any test waits


class Kit:
    """One of the two libraries, in one world: sync calls in threads, async ones elsewhere."""

    def __init__(self, library: ModuleType, world: World) -> None:
        self.library = library
        self.world = world
        self.blocking = world.blocking

    def __repr__(self) -> str:
        return f"{self.library.__name__}-{self.world}"

    def run(self, main: Any) -> Any:
        return self.world.run(main)

    def network(self, **options: Any) -> Any:
        kind = self.library.HTTPTransport if self.blocking else self.library.AsyncHTTPTransport
        return kind(verify=NO_TLS, **options)

    def network_that_first(self, does: Any, *, after: bool = False, **options: Any) -> Any:
        """The network, but `does()` comes before the first request, or after its response has come."""
        begun: list[Any] = []

        class Blocking(self.library.HTTPTransport):  # type: ignore[name-defined, misc]
            def handle_request(self, request: Any) -> Any:
                first = not begun
                begun.append(request)
                if first and not after:
                    does()
                response = super().handle_request(request)
                if first and after:
                    does()
                return response

        class Tasks(self.library.AsyncHTTPTransport):  # type: ignore[name-defined, misc]
            async def handle_async_request(self, request: Any) -> Any:
                if not begun:
                    begun.append(request)
                    does()
                return await super().handle_async_request(request)

        return (Blocking if self.blocking else Tasks)(verify=NO_TLS, **options)

    def mock(self, *steps: Any) -> Any:
        """A transport that takes one step for each request: a status, a response, an error."""
        script = iter(steps)

        def handler(request: Any) -> Any:
            step = next(script)
            if isinstance(step, BaseException):
                raise step
            return self.library.Response(step) if isinstance(step, int) else step

        return self.library.MockTransport(handler)

    def transport(self, policy: Any, inner: Any = None, **options: Any) -> Any:
        return (ResilienceTransport if self.blocking else AsyncResilienceTransport)(policy, inner, **options)

    @contextlib.asynccontextmanager
    async def client(self, policy: Any = QUICK, inner: Any = None, **options: Any) -> AsyncIterator[Sender]:
        own = {name: options.pop(name) for name in ("rules", "propagate_to", "read_body") if name in options}
        transport = self.transport(policy, inner or self.network(), **own)
        if self.blocking:
            with self.library.Client(transport=transport, **options) as client:
                yield Sender(self, client)
        else:
            async with self.library.AsyncClient(transport=transport, **options) as client:
                yield Sender(self, client)

    def chunks(self, *chunks: bytes) -> Any:
        """A generator for a body."""
        if self.blocking:
            return (chunk for chunk in chunks)

        async def generate() -> AsyncIterator[bytes]:
            for chunk in chunks:
                yield chunk

        return generate()


class Sender:
    """A client whose methods are awaited in every world."""

    def __init__(self, kit: Kit, client: Any) -> None:
        self.kit = kit
        self.client = client

    async def request(self, method: str, url: str, **options: Any) -> Any:
        response = self.client.request(method, url, **options)
        return response if self.kit.blocking else await response

    async def get(self, url: str, **options: Any) -> Any:
        return await self.request("GET", url, **options)

    async def post(self, url: str, **options: Any) -> Any:
        return await self.request("POST", url, **options)

    async def send(self, request: Any, **options: Any) -> Any:
        response = self.client.send(request, **options)
        return response if self.kit.blocking else await response

    async def failure(self, method: str, url: str, **options: Any) -> Any:
        """Return what a request raised."""
        try:
            response = await self.request(method, url, **options)
        except Exception as error:
            return error
        raise AssertionError(f"{response} came back")

    @contextlib.asynccontextmanager
    async def stream(self, method: str, url: str, **options: Any) -> AsyncIterator[Any]:
        if self.kit.blocking:
            with self.client.stream(method, url, **options) as response:
                yield response
        else:
            async with self.client.stream(method, url, **options) as response:
                yield response

    async def read(self, response: Any) -> bytes:
        return bytes(response.read() if self.kit.blocking else await response.aread())

    async def close(self, response: Any) -> None:
        if self.kit.blocking:
            response.close()
        else:
            await response.aclose()


@pytest.fixture(params=[httpx, httpx2], ids=["httpx", "httpx2"])
def library(request: pytest.FixtureRequest) -> ModuleType:
    it: ModuleType = request.param
    return it


@pytest.fixture
def kit(library: ModuleType, world: World) -> Kit:
    """Both libraries in every world."""
    return Kit(library, world)


@pytest.fixture
def some_kit(world: World) -> Kit:
    """Every world, and one of the libraries: for what takes time, and is the same code in both."""
    return Kit(httpx if world.name == "asyncio" else httpx2, world)


@pytest.fixture
def sync_kit(library: ModuleType, threads: World) -> Kit:
    return Kit(library, threads)


@pytest.fixture
def tasks_kit(library: ModuleType, tasks_world: World) -> Kit:
    return Kit(library, tasks_world)


def note(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


# --- statuses --------------------------------------------------------------------------------


def test_on_result_sees_the_other_responses(kit: Kit) -> None:
    """A status that is not transient is a result, for a policy to judge; what is judged is closed."""
    responses: list[Any] = []

    def is_bad(response: Any) -> bool:
        responses.append(response)
        return bool(response.status_code == 500)

    async def main() -> None:
        async with kit.client(Retry(backoff=[0], on_result=is_bad), kit.mock(500, 200)) as client:
            assert (await client.get("http://example.org/")).status_code == 200

    kit.run(main)
    assert [it.is_closed for it in responses] == [True, True]


# --- what may be sent again ------------------------------------------------------------------


def test_a_post_that_a_policy_inside_has_refused_was_never_sent(kit: Kit, clock: FakeClock) -> None:
    """Transports nest, and a refusal of the inner one is no doubt."""
    breaker = CircuitBreaker(1, open_for=5)

    async def main() -> None:
        inner = kit.transport(breaker, kit.mock(503, 200))
        async with kit.client(Retry(2, on=CircuitOpen, backoff=[0]), inner) as client:
            assert (await client.post("http://example.org/")).status_code == 503
            assert (await client.post("http://example.org/")).status_code == 200

    kit.run(main)
    assert clock.sleeps == [5.0]


@pytest.mark.parametrize(
    ("name", "again"),
    [("ConnectError", True), ("ConnectTimeout", True), ("PoolTimeout", True)]
    + [(name, False) for name in ("ReadTimeout", "WriteTimeout", "ReadError", "WriteError", "RemoteProtocolError")],
)
def test_which_errors_say_that_nothing_was_sent(sync_kit: Kit, name: str, again: bool) -> None:
    """Those of connecting. After any other one the request may have arrived."""
    inner = sync_kit.mock(getattr(sync_kit.library, name)("no"), 200)
    with sync_kit.library.Client(transport=sync_kit.transport(QUICK, inner)) as client:
        try:
            assert client.post("http://example.org/").status_code == 200
            assert again
        except sync_kit.library.TransportError:
            assert not again


class Stubborn(Policy):
    """Calls twice, whatever anybody says."""

    async def around(self, call: Any, ctx: Context) -> Any:
        with contextlib.suppress(TransientStatus):
            return await call(ctx)
        return await call(ctx)


# --- bodies ----------------------------------------------------------------------------------


def test_a_stream_of_the_users_own_make_is_sent_once(kit: Kit, server: FlakyServer) -> None:
    """Nobody but its author knows whether it can be produced a second time."""

    class Own(kit.library.SyncByteStream, kit.library.AsyncByteStream):  # type: ignore[name-defined, misc]
        def __iter__(self) -> Iterator[bytes]:
            yield b"payload"

        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"payload"

    url = server.script("/", 503, 200)

    async def main() -> None:
        async with kit.client() as client:
            headers = {"Host": "localhost", "Content-Length": "7"}
            request = kit.library.Request("PUT", url, stream=Own(), headers=headers)
            assert (await client.send(request)).status_code == 503

    kit.run(main)
    assert [it.body for it in server.requests] == [b"payload"]


class Unsized(io.RawIOBase):
    """A file of which nobody knows the length, as a pipe is one."""

    def __init__(self, content: bytes) -> None:
        self.left = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self.left.readinto(buffer)


class Reader:
    """Something to read from that is neither a file nor an iterator, as the bodies of some clients are."""

    def __init__(self, content: bytes) -> None:
        self.left = io.BytesIO(content)

    def read(self, size: int = -1) -> bytes:
        return self.left.read(size)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.left)


BODIES = {
    "bytes": lambda: {"content": b"payload"},
    "text": lambda: {"content": "payload"},
    "json": lambda: {"json": {"p": "payload"}},
    "form": lambda: {"data": {"p": "payload"}},
    "multipart": lambda: {"files": {"p": ("p.txt", b"payload")}, "data": {"a": "b"}},
    "multipart-file": lambda: {"files": {"p": ("p.txt", io.BytesIO(b"payload"))}},
    "multipart-memory": lambda: {"files": {"p": ("p.txt", "payload")}},
}


@pytest.mark.parametrize("body", BODIES)
def test_a_body_in_memory_is_sent_again(some_kit: Kit, server: FlakyServer, body: str) -> None:
    """The same bytes, each time."""
    url = server.script("/", 503, Answer(fault="reset"), 200)

    async def main() -> None:
        async with some_kit.client() as client:
            assert (await client.request("PUT", url, **BODIES[body]())).status_code == 200

    some_kit.run(main)
    sent = [it.body for it in server.requests]
    assert len(sent) == 3
    assert len(set(sent)) == 1
    assert b"payload" in sent[0]


def test_a_list_of_pieces_is_sent_again(sync_kit: Kit, server: FlakyServer) -> None:
    """It can be iterated as often as one likes; an iterator over it cannot."""
    url = server.script("/", 503, 200)
    with sync_kit.library.Client(transport=sync_kit.transport(QUICK, sync_kit.network())) as client:
        assert client.put(url, content=[b"pay", b"load"]).status_code == 200
    assert [it.body for it in server.requests] == [b"payload", b"payload"]


ONE_SHOTS = {
    "pipe": lambda: {"content": Unsized(b"payload")},
    "reader": lambda: {"content": Reader(b"payload")},
    "iterator": lambda: {"content": iter([b"pay", b"load"])},
    "multipart-pipe": lambda: {"files": {"p": ("p.txt", Unsized(b"payload"))}},
}


@pytest.mark.parametrize("failure", [503, Answer(fault="reset")], ids=["503", "reset"])
@pytest.mark.parametrize("body", ONE_SHOTS)
def test_a_body_that_is_used_up_is_not_sent_again(sync_kit: Kit, server: FlakyServer, body: str, failure: Any) -> None:
    """An empty one would arrive, and be answered with 200; an Idempotency-Key changes nothing in that."""
    url = server.script("/", failure, 200)
    with sync_kit.library.Client(transport=sync_kit.transport(QUICK, sync_kit.network())) as client:
        options = {**ONE_SHOTS[body](), "headers": {"Idempotency-Key": "4711"}}
        if failure == 503:
            assert client.put(url, **options).status_code == 503
        else:
            with pytest.raises(sync_kit.library.TransportError) as caught:
                client.put(url, **options)
            assert "its body can be sent only once" in note(caught.value)
    (request,) = server.requests
    assert b"payload" in request.body


def test_a_generator_that_nobody_has_begun_is_still_there(kit: Kit, server: FlakyServer) -> None:
    """Where no connection could be made, the whole body goes out with the next attempt."""
    url = server.script("/", 200)

    def fail() -> None:
        raise kit.library.ConnectError("not yet")

    async def main() -> None:
        async with kit.client(QUICK, kit.network_that_first(fail)) as client:
            assert (await client.post(url, content=kit.chunks(b"pay", b"load"))).status_code == 200

    kit.run(main)
    assert [it.body for it in server.requests] == [b"payload"]


def test_a_generator_that_was_never_sent_can_be_sent_by_its_user(kit: Kit, server: FlakyServer) -> None:
    """The same request, once there is a server."""

    def fail() -> None:
        raise kit.library.ConnectError("not yet")

    async def main() -> None:
        async with kit.client(Retry(1), kit.network_that_first(fail)) as client:
            request = client.client.build_request("POST", server.url, content=kit.chunks(b"pay", b"load"))
            with pytest.raises(kit.library.ConnectError):
                await client.send(request)
            assert (await client.send(request)).status_code == 200
            with pytest.raises(kit.library.StreamConsumed):
                await client.send(request)

    kit.run(main)
    assert [it.body for it in server.requests] == [b"payload"]


def test_a_file_that_its_user_winds_back_is_sent_again(sync_kit: Kit, server: FlakyServer) -> None:
    """In another call: it has a length, so the client would not send it empty either."""
    with sync_kit.library.Client(transport=sync_kit.transport(QUICK, sync_kit.network())) as client:
        file = io.BytesIO(b"payload")
        request = client.build_request("PUT", server.url, content=file)
        for _ in range(2):
            assert client.send(request).status_code == 200
            file.seek(0)
    assert [it.body for it in server.requests] == [b"payload", b"payload"]


def test_an_iterator_that_a_timeout_kept_from_being_sent_can_be_sent(tasks_kit: Kit, server: FlakyServer) -> None:
    """Once there is a server that takes connections."""
    body = Asynchronous()

    async def main() -> None:
        async with tasks_kit.client(Timeout(0.2)) as client:
            with full_port() as url, pytest.raises(TimeoutExceeded):
                await client.post(url, content=body, timeout=None)
            assert (await client.post(server.url, content=body)).status_code == 200

    tasks_kit.run(main)
    assert [it.body for it in server.requests] == [ONCE]


def test_a_redirect_does_not_send_what_is_used_up(sync_kit: Kit, server: FlakyServer) -> None:
    """The client hands the next hop the same stream; by itself it would send it empty."""
    url = server.script("/from", Answer(307, {"Location": "/to"}))
    with sync_kit.library.Client(
        transport=sync_kit.transport(QUICK, sync_kit.network()), follow_redirects=True
    ) as client:
        for body in (Unsized(b"payload"), iter([b"payload"])):
            with pytest.raises(sync_kit.library.StreamConsumed):
                client.put(url, content=body)
        assert client.put(url, content=b"payload").status_code == 200
    assert [(it.path, it.body) for it in server.requests] == [
        ("/from", b"payload"),
        ("/from", b"payload"),
        ("/from", b"payload"),
        ("/to", b"payload"),
    ]


# --- connections -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [Fallback(on=TransientStatus, handler=lambda failure, ctx: None), Retry(2, backoff=[0], wrap=True)],
    ids=["fallback", "wrapped"],
)
def test_a_response_that_nobody_gets_is_closed(kit: Kit, server: FlakyServer, policy: Policy[Any]) -> None:
    """One that a fallback answered for, or that is inside of another error."""
    url = server.script("/", Answer(503, body=b"x" * 1_000_000))

    async def main() -> None:
        inner = kit.network(limits=kit.library.Limits(max_connections=1))
        async with kit.client(policy, inner) as client:
            for _ in range(3):
                error = await client.failure("GET", url, timeout=PATIENT)
                assert isinstance(error, (TypeError, RetriesExhausted))

    kit.run(main)


def test_a_fallback_answers_with_a_response(kit: Kit, server: FlakyServer) -> None:
    """Which the client takes for the server's."""
    url = server.script("/", 503)
    policy = Fallback(handler=lambda failure, ctx: kit.library.Response(203, json={"from": "cache"}))

    async def main() -> None:
        async with kit.client(policy) as client:
            response = await client.get(url)
            assert (response.status_code, response.json()) == (203, {"from": "cache"})

    kit.run(main)


def test_a_body_that_is_read_in_its_attempt_is_tried_again(kit: Kit, server: FlakyServer) -> None:
    """With `read_body` a body that breaks off is a failure; the response is what it would have been."""
    packed = gzip.compress(b"fine")
    url = server.script(
        "/",
        Answer(200, body=[b"a", b"b"], fault="cut"),
        Answer(503, body=b"x" * 100_000),
        Answer(200, {"Content-Encoding": "gzip"}, packed),
    )

    async def main() -> None:
        inner = kit.network(limits=kit.library.Limits(max_connections=1))
        async with kit.client(QUICK, inner, read_body=True) as client:
            response = await client.get(url)
            assert (response.content, response.request.method) == (b"fine", "GET")
            assert response.elapsed.total_seconds() > 0
            async with client.stream("GET", url) as response:
                raw = response.iter_raw() if kit.blocking else [it async for it in response.aiter_raw()]
                assert b"".join(raw) == packed

    kit.run(main)
    assert server.connections == 2  # the body of the 503 was read, so its connection could be used again


def test_a_body_that_cannot_be_read_is_closed(kit: Kit) -> None:
    """Whatever the transport inside does when its stream fails."""
    closed: list[str] = []

    class Failing(kit.library.SyncByteStream, kit.library.AsyncByteStream):  # type: ignore[name-defined, misc]
        def __iter__(self) -> Iterator[bytes]:
            yield b"a"
            raise kit.library.ReadError("broken")

        async def __aiter__(self) -> AsyncIterator[bytes]:
            for chunk in self:
                yield chunk

        def close(self) -> None:
            closed.append("closed")

        async def aclose(self) -> None:
            closed.append("closed")

    async def main() -> None:
        inner = kit.mock(kit.library.Response(200, stream=Failing()), 204)
        async with kit.client(QUICK, inner, read_body=True) as client:
            assert (await client.get("http://example.org/")).status_code == 204

    kit.run(main)
    assert closed == ["closed"]


def test_a_connection_that_changes_its_protocol_has_no_body_to_read(kit: Kit) -> None:
    """What comes after 101 belongs to whoever asked for it."""
    read: list[str] = []

    class Frames(kit.library.SyncByteStream, kit.library.AsyncByteStream):  # type: ignore[name-defined, misc]
        def __iter__(self) -> Iterator[bytes]:
            read.append("read")
            yield b""

        async def __aiter__(self) -> AsyncIterator[bytes]:
            for chunk in self:
                yield chunk

    async def main() -> None:
        inner = kit.mock(kit.library.Response(101, stream=Frames()))
        async with (
            kit.client(QUICK, inner, read_body=True) as client,
            client.stream("GET", "http://example.org/") as response,
        ):
            assert response.status_code == 101

    kit.run(main)
    assert read == []


def test_a_body_that_drips_is_cut_off_in_its_attempt(some_kit: Kit, server: FlakyServer) -> None:
    """And tried again, with `read_body`."""
    server.script("/drip", Answer(200, body=[b"."] * 1000, drip=_Tick()), Answer(200, body=b"fine"))

    async def main() -> None:
        async with some_kit.client(Policy.wrap(Retry(18, backoff=[0]), Timeout(0.1)), read_body=True) as client:
            assert (await client.get(f"{server.url}/drip")).content == b"fine"

    some_kit.run(main)


@pytest.mark.parametrize("cooperative", [False, True])
def test_a_body_without_an_end_is_not_read_for_ever(some_kit: Kit, server: FlakyServer, cooperative: bool) -> None:
    """Neither by the caller, where nothing cuts an attempt off, nor by a thread that was left behind."""

    async def main() -> None:
        policy = Timeout(0.1, cooperative=cooperative)
        async with some_kit.client(policy, read_body=True) as client:
            assert type(await client.failure("GET", dripping(server))) is TimeoutExceeded
            server.wait_until(lambda: server.open_connections == 0)
            assert Timeout.abandoned() == 0

    some_kit.run(main)


def test_the_wait_for_a_body_has_what_the_headers_have_left(server: FlakyServer) -> None:
    """In blocking code, where nothing else ends it."""
    seen: list[dict[str, Any]] = []

    class Slow(httpx.HTTPTransport):
        def handle_request(self, request: Any) -> Any:
            response = super().handle_request(request)
            seen.append(request.extensions["timeout"])
            time.sleep(0.3)
            return response

    url = server.script("/", Answer(200, body=[b"a", b"b"], drip=threading.Event()))
    transport = ResilienceTransport(Timeout(0.5, cooperative=True), Slow(verify=NO_TLS), read_body=True)
    with httpx.Client(transport=transport) as client, pytest.raises(TimeoutExceeded):
        client.get(url)
    assert 0 < seen[0]["read"] <= 0.2


# --- time ------------------------------------------------------------------------------------


def timeouts_of(*seen: Any) -> list[dict[str, Any]]:
    return [request.extensions["timeout"] for request in seen]


def test_the_clients_timeouts_are_cut_to_what_is_left(kit: Kit, clock: FakeClock) -> None:
    """Anew for each attempt; one that the client does not limit becomes what is left; a shorter one stays."""
    seen: list[Any] = []

    def handler(request: Any) -> Any:
        seen.append(request)
        clock.advance(2)
        return kit.library.Response(503 if len(seen) == 1 else 200)

    async def main() -> None:
        async with kit.client(QUICK, kit.library.MockTransport(handler)) as client:
            limits = kit.library.Timeout(connect=1.0, read=60.0, write=None, pool=6.0)
            request = client.client.build_request("GET", "http://example.org/", timeout=limits)
            with deadline(8):
                response = await client.send(request)
            assert request.extensions["timeout"] == {"connect": 1.0, "read": 60.0, "write": None, "pool": 6.0}
            assert response.request is request

    kit.run(main)
    assert timeouts_of(*seen) == [
        {"connect": 1.0, "read": 8.0, "write": 8.0, "pool": 6.0},
        {"connect": 1.0, "read": 6.0, "write": 6.0, "pool": 6.0},
    ]


def test_without_a_deadline_the_timeouts_are_the_clients(kit: Kit) -> None:
    """And so is the request: what the client built is what is sent."""
    seen: list[Any] = []

    def handler(request: Any) -> Any:
        seen.append(request)
        return kit.library.Response(200)

    async def main() -> None:
        async with kit.client(QUICK, kit.library.MockTransport(handler), timeout=3.5) as client:
            assert (await client.get("http://example.org/")).request is seen[0]

    kit.run(main)
    assert set(timeouts_of(*seen)[0].values()) == {3.5}


def test_the_other_extensions_of_a_request_stay(kit: Kit) -> None:
    """Only its timeouts are ours to change."""
    seen: list[Any] = []

    def handler(request: Any) -> Any:
        seen.append(request)
        return kit.library.Response(200)

    async def main() -> None:
        async with kit.client(Timeout(PATIENT), kit.library.MockTransport(handler)) as client:
            await client.get("http://example.org/", headers={"X-A": "1"}, extensions={"sni_hostname": "a.example"})

    kit.run(main)
    assert seen[0].extensions["sni_hostname"] == "a.example"
    assert seen[0].headers["x-a"] == "1"


@pytest.mark.parametrize(
    "answer",
    [Answer(200, hold=threading.Event()), Answer(200, body=[b"a", b"b"], drip=threading.Event())],
    ids=["headers", "body"],
)
def test_a_timeout_that_is_not_ours_stays_the_clients(some_kit: Kit, server: FlakyServer, answer: Answer) -> None:
    """The client's own limit was shorter than what was left, for its headers or its body."""
    url = server.script("/", answer)

    async def main() -> None:
        async with some_kit.client(Timeout(PATIENT)) as client:
            assert isinstance(await client.failure("GET", url, timeout=0.1), some_kit.library.ReadTimeout)

    some_kit.run(main)


def test_a_late_response_makes_room_for_the_next_attempt(sync_kit: Kit, server: FlakyServer) -> None:
    """With one connection, the second attempt waits for that of the first one, which nobody reads."""
    limits = sync_kit.library.Limits(max_connections=1)
    inner = sync_kit.network_that_first(lambda: time.sleep(0.25), after=True, limits=limits)
    policy = Policy.wrap(Retry(18, backoff=[0]), Timeout(0.15))
    with sync_kit.library.Client(transport=sync_kit.transport(policy, inner)) as client:
        assert client.get(server.url, timeout=None).content == b"ok"
        server.wait_until(lambda: Timeout.abandoned() == 0)
        assert not [it for it in inner._pool.connections if not it.is_idle() and not it.is_closed()]


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


def test_a_post_that_was_cut_off_while_connecting_is_tried_again(some_kit: Kit) -> None:
    """The client's trace tells that nothing was sent; the attempt that was left behind never sends."""
    network = Connecting(some_kit)
    traced: list[str] = []

    def trace(event: str, info: Any) -> Any:
        traced.append(event)
        return None if some_kit.blocking else anyio.sleep(0)

    async def main() -> None:
        async with some_kit.client(Policy.wrap(Retry(18, backoff=[0]), Timeout(0.1)), network.transport) as client:
            response = await client.post(
                "http://example.org/", content=some_kit.chunks(b"a"), extensions={"trace": trace}
            )
            assert response.status_code == 200

    some_kit.run(main)
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


@contextlib.contextmanager
def full_port() -> Iterator[str]:
    """The URL of a port that takes no more connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        for _ in range(4):  # fills the queue
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield f"http://127.0.0.1:{full.getsockname()[1]}/"


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
def test_no_place_in_the_pool_is_lost_to_a_timeout(
    tasks_kit: Kit, server: FlakyServer, policy: Policy[Any], read_body: bool
) -> None:
    """Neither to one that cancels nor to the client's own: they do not come at the same instant."""
    stuck = [Answer(200, hold=threading.Event()), Answer(200, body=[b"a", b"b"], drip=threading.Event())]
    url = server.script("/", *stuck * 100)

    async def main() -> None:
        inner = tasks_kit.network(limits=tasks_kit.library.Limits(max_connections=20))
        async with tasks_kit.client(policy, inner, read_body=read_body) as client:

            async def request() -> None:
                with deadline(0.05):
                    assert isinstance(await client.failure("GET", url), TimeoutExceeded)

            for _ in range(5):
                async with anyio.create_task_group() as group:
                    for _ in range(40):
                        group.start_soon(request)
            assert inner._pool.connections == []

    tasks_kit.run(main)


def test_a_pool_that_looks_different_inside_is_left_alone(tasks_kit: Kit) -> None:
    """What went wrong comes out, and not what was missing."""

    class Network(tasks_kit.library.AsyncBaseTransport):  # type: ignore[name-defined, misc]
        _pool = object()

        async def handle_async_request(self, request: Any) -> Any:
            raise tasks_kit.library.ReadError("reset")

    async def main() -> None:
        async with tasks_kit.client(QUICK, Network()) as client:
            assert isinstance(await client.failure("GET", "http://example.org/"), tasks_kit.library.ReadError)

    tasks_kit.run(main)


@pytest.mark.parametrize("enforced", [False, True])
def test_each_wait_of_an_attempt_has_what_is_left(kit: Kit, clock: FakeClock, enforced: bool) -> None:
    """Also where the wait for a connection has taken most of the time: the client's timeouts are for one wait each.

    A task that is cancelled in time needs none of this.
    """
    seen: list[float] = []

    def wait(request: Any) -> None:
        clock.advance(3.0)
        seen.append(request.extensions["timeout"]["read"])

    class Blocking(kit.library.BaseTransport):  # type: ignore[name-defined, misc]
        def handle_request(self, request: Any) -> Any:
            for event in ("send_request_headers", "receive_response_headers"):
                wait(request)
                request.extensions["trace"](f"http11.{event}.started", {})
            wait(request)
            return kit.library.Response(200)

    class Tasks(kit.library.AsyncBaseTransport):  # type: ignore[name-defined, misc]
        async def handle_async_request(self, request: Any) -> Any:
            for event in ("send_request_headers", "receive_response_headers"):
                wait(request)
                if trace := request.extensions.get("trace"):
                    await trace(f"http11.{event}.started", {})
            wait(request)
            return kit.library.Response(200)

    async def main() -> None:
        policy = Timeout(10.0, cooperative=not enforced)
        async with kit.client(policy, Blocking() if kit.blocking else Tasks()) as client:
            await client.get("http://example.org/", timeout=60)

    kit.run(main)
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


def dripping(server: FlakyServer) -> str:
    """A body that comes a byte at a time, for longer than anybody waits; never for long without a byte."""
    return server.script("/drip", Answer(200, body=[b"."] * 1000, drip=_Tick()))  # type: ignore[arg-type]


class _Tick(threading.Event):
    """An event that comes about after a while, each time that it is waited for."""

    def wait(self, timeout: float | None = None) -> bool:
        time.sleep(0.02)
        return True


@pytest.mark.parametrize(
    ("policy", "kind"),
    [(Timeout(0.1), TimeoutExceeded), (QUICK, DeadlineExceeded)],
    ids=["timeout", "deadline"],
)
def test_a_body_that_drips_does_not_outlast_its_time(
    some_kit: Kit, server: FlakyServer, policy: Policy[Any], kind: type[Exception]
) -> None:
    """Each byte is in time for the client's read timeout; the limit is that of the attempt that brought it."""
    url = dripping(server)

    async def main() -> None:
        async with some_kit.client(policy) as client:
            with contextlib.ExitStack() as stack:
                if kind is DeadlineExceeded:
                    stack.enter_context(deadline(0.1))
                assert type(await client.failure("GET", url)) is kind

    began = time.monotonic()
    some_kit.run(main)
    assert time.monotonic() - began < PATIENT


def test_a_body_that_was_read_in_time_is_there_for_ever(some_kit: Kit, server: FlakyServer) -> None:
    """With `read_body`, whoever opens a stream has no hurry."""

    async def main() -> None:
        async with (
            some_kit.client(Timeout(0.3), read_body=True) as client,
            client.stream("GET", server.url) as response,
        ):
            await some_kit.world.sleep(0.35)
            assert await client.read(response) == b"ok"

    some_kit.run(main)


def test_a_body_that_is_in_time_is_what_it_was(kit: Kit, server: FlakyServer) -> None:
    """Under a limit, compressed or not, read at once or in pieces."""
    url = server.script("/", Answer(200, {"Content-Type": "text/plain"}, [b"grey ", b"goose"], chunked=True))

    async def main() -> None:
        async with kit.client(Timeout(PATIENT)) as client:
            assert (await client.get(url)).text == "grey goose"
            async with client.stream("GET", url) as response:
                assert await client.read(response) == b"grey goose"
            async with client.stream("GET", url) as response:
                lines = response.iter_lines() if kit.blocking else [it async for it in response.aiter_lines()]
                assert list(lines) == ["grey goose"]

    kit.run(main)


def test_a_body_that_is_not_read_to_its_end_ends_what_is_inside_of_it(tasks_kit: Kit) -> None:
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

    async def main() -> None:
        library = tasks_kit.library
        inner = tasks_kit.mock(library.Response(200, stream=Chunks()))
        transport = tasks_kit.transport(Timeout(PATIENT), inner)
        response = await transport.handle_async_request(library.Request("GET", "http://example.org/"))
        async with contextlib.aclosing(response.stream.__aiter__()) as chunks:
            assert await anext(chunks) == b"a"
        assert ended == ["ended"]

    tasks_kit.run(main)


# --- the client around it --------------------------------------------------------------------


def test_redirects_cookies_and_auth_are_the_clients(kit: Kit, server: FlakyServer) -> None:
    """Each hop is a request of its own to us: each has attempts of its own."""
    server.script("/a", 503, Answer(302, {"Location": "/b", "Set-Cookie": "k=v"}))
    server.script("/b", 503, Answer(200, body=b"there"))

    async def main() -> None:
        async with kit.client(follow_redirects=True, auth=("user", "password")) as client:
            response = await client.get(f"{server.url}/a")
            assert response.content == b"there"
            assert [it.status_code for it in response.history] == [302]

    kit.run(main)
    assert [it.path for it in server.requests] == ["/a", "/a", "/b", "/b"]
    assert server.requests[-1].headers["Cookie"] == "k=v"
    assert server.requests[-1].headers["Authorization"].startswith("Basic ")


def test_without_a_transport_it_uses_the_clients_own(kit: Kit, server: FlakyServer) -> None:
    """That of the library that the first request belongs to; one transport of ours can serve both libraries."""
    url = server.script("/", 503, 200)

    async def main() -> None:
        transport = kit.transport(QUICK)
        kind = kit.library.Client if kit.blocking else kit.library.AsyncClient
        async with contextlib.AsyncExitStack() as stack:
            if kit.blocking:
                client = Sender(kit, stack.enter_context(kind(transport=transport)))
            else:
                client = Sender(kit, await stack.enter_async_context(kind(transport=transport)))
            assert (await client.get(url)).status_code == 200

    kit.run(main)


def test_one_transport_serves_clients_of_both_libraries(server: FlakyServer) -> None:
    """Its policy is then shared by both."""
    breaker = CircuitBreaker(2)
    transport = ResilienceTransport(breaker)
    url = server.script("/", 503)
    with httpx.Client(transport=transport) as one, httpx2.Client(transport=transport) as two:
        assert [type(it.get(url)) for it in (one, two)] == [httpx.Response, httpx2.Response]
        with pytest.raises(CircuitOpen):
            one.get(url)


def test_it_is_closed_with_its_client(kit: Kit) -> None:
    """And entered with it."""
    calls: list[str] = []

    class Noting(kit.library.BaseTransport, kit.library.AsyncBaseTransport):  # type: ignore[name-defined, misc]
        def handle_request(self, request: Any) -> Any:
            return kit.library.Response(200)

        async def handle_async_request(self, request: Any) -> Any:
            return kit.library.Response(200)

        def __enter__(self) -> Any:
            calls.append("enter")
            return self

        def __exit__(self, *error: object) -> None:
            calls.append("exit")

        async def __aenter__(self) -> Any:
            return self.__enter__()

        async def __aexit__(self, *error: object) -> None:
            self.__exit__()

        def close(self) -> None:
            calls.append("close")

        async def aclose(self) -> None:
            self.close()

    async def main() -> None:
        async with kit.client(QUICK, Noting()) as client:
            await client.get("http://example.org/")
        transport = kit.transport(QUICK, Noting())
        if kit.blocking:
            transport.close()
        else:
            await transport.aclose()

    kit.run(main)
    assert calls == ["enter", "exit", "close"]


def test_it_can_be_mounted_for_some_urls(kit: Kit) -> None:
    """Others of the client go as they went."""

    async def main() -> None:
        mounts = {"http://flaky.example": kit.transport(QUICK, kit.mock(503, 200))}
        async with kit.client(Stubborn(), kit.mock(404, 404), mounts=mounts) as client:
            assert (await client.get("http://flaky.example/")).status_code == 200
            assert (await client.get("http://example.org/")).status_code == 404

    kit.run(main)


def test_many_threads_share_a_client(sync_kit: Kit, server: FlakyServer) -> None:
    """As they may without us."""
    url = server.script("/", 503, 503, 200)
    results: list[int] = []
    with sync_kit.library.Client(transport=sync_kit.transport(QUICK, sync_kit.network())) as client:
        threads = [threading.Thread(target=lambda: results.append(client.get(url).status_code)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [200] * 8


def test_a_failed_attempt_leaves_no_cycle(kit: Kit) -> None:
    """Its response and error are gone when the last reference is, and not when the collector comes."""
    left: list[weakref.ref[Any]] = []

    def handler(request: Any) -> Any:
        response = kit.library.Response(503, headers={"Retry-After": "0"})
        left.append(weakref.ref(response))
        return response

    async def main() -> None:
        async with kit.client(Policy.wrap(Timeout(PATIENT), QUICK), kit.library.MockTransport(handler)) as client:
            await client.get("http://example.org/")

    with no_collector():
        kit.run(main)
        if kit.library is httpx:
            left.pop()  # httpx binds a response that it returns to its own stream
        assert all(it() is None for it in left)


def test_nor_does_a_response_whose_body_is_limited(kit: Kit, server: FlakyServer) -> None:
    """It looks at its exchange, which does not look back."""
    left: list[weakref.ref[Any]] = []

    async def main() -> None:
        request = kit.library.Request("GET", server.url)
        transport = kit.transport(Timeout(PATIENT), kit.network())
        if kit.blocking:
            response = transport.handle_request(request)
            assert response.read() == b"ok"
            transport.close()
        else:
            response = await transport.handle_async_request(request)
            assert await response.aread() == b"ok"
            await transport.aclose()
        left.append(weakref.ref(response))

    with no_collector():
        kit.run(main)
        assert left[0]() is None


def test_a_connection_in_a_pool_keeps_no_request(tasks_kit: Kit, server: FlakyServer) -> None:
    """It keeps the exchange that it was made in; the request, its body and the response are let go."""
    contexts: list[Context] = []
    sent: list[weakref.ref[Any]] = []

    class Keeping(tasks_kit.library.AsyncHTTPTransport):  # type: ignore[name-defined, misc]
        async def handle_async_request(self, request: Any) -> Any:
            contexts.append(current_context())
            return await super().handle_async_request(request)

    async def main() -> None:
        transport = tasks_kit.transport(Timeout(PATIENT), Keeping(verify=NO_TLS))
        request = tasks_kit.library.Request("PUT", server.script("/", 200), content=b"much")
        response = await transport.handle_async_request(request)
        assert await response.aread() == b"ok"
        sent.extend(weakref.ref(it) for it in (request.stream, request, response))
        del request, response
        gc.collect()
        assert [it() for it in sent] == [None] * 3
        await transport.aclose()

    tasks_kit.run(main)
    [ctx] = contexts
    assert ctx.called is not None
    assert isinstance(ctx.called.function, Exchange)


def test_many_attempts_keep_few_responses(kit: Kit) -> None:
    """An execution that goes on for hours holds no more than one of a minute."""
    answered: list[weakref.ref[Any]] = []
    most_alive = 0

    def handler(request: Any) -> Any:
        nonlocal most_alive
        most_alive = max(most_alive, sum(it() is not None for it in answered))
        response = kit.library.Response(503)
        answered.append(weakref.ref(response))
        return response

    async def main() -> None:
        async with kit.client(Retry(50, backoff=[0]), kit.library.MockTransport(handler)) as client:
            assert (await client.get("http://example.org/")).status_code == 503

    kit.run(main)
    assert len(answered) == 50
    assert most_alive <= 2


# --- wrong arguments -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"transport": "http://"}, "transport must have a method handle"),
        ({"read_body": 1}, "read_body must be True or False, not 1"),
    ],
)
@pytest.mark.parametrize("kind", [ResilienceTransport, AsyncResilienceTransport])
def test_wrong_arguments_are_refused(kind: Any, arguments: dict[str, Any], message: str) -> None:
    """By the constructor, with the value."""
    with pytest.raises(TypeError, match=message):
        kind(**{"policy": QUICK, **arguments})


@pytest.fixture
def imported_without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Import our module anew where one cannot import some others."""
    name = "resilience.integrations.httpx"

    def import_it(*missing: str) -> ModuleType:
        monkeypatch.setattr(integrations, "httpx", sys.modules[name])  # is put back after the test
        for module in [it for it in sys.modules if it == name or it.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, module)
        for module in missing:
            monkeypatch.setitem(sys.modules, module, None)
        return importlib.import_module(name)

    return import_it


@pytest.mark.parametrize(("there", "missing"), [(httpx, "httpx2"), (httpx2, "httpx")])
def test_one_of_the_libraries_is_enough(there: Any, missing: str, imported_without: Callable[..., Any]) -> None:
    """The transports are those of the library that is there."""
    ours = imported_without(missing)
    assert issubclass(ours.ResilienceTransport, there.BaseTransport)
    assert issubclass(ours.AsyncResilienceTransport, there.AsyncBaseTransport)
    calls: list[Any] = []

    def handler(request: Any) -> Any:
        calls.append(request)
        return there.Response(200) if len(calls) == 2 else there.Response(503)

    with there.Client(transport=ours.ResilienceTransport(Retry(2, backoff=[0]), there.MockTransport(handler))) as one:
        assert one.get("http://example.org/").status_code == 200


def test_without_either_library_the_error_says_what_to_install(imported_without: Callable[..., Any]) -> None:
    """In the words of pip."""
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'resilience-pipeline[httpx]'")):
        imported_without("httpx", "httpx2")


@pytest.mark.parametrize("request_", ["GET http://example.org/", None, requests.Request("GET", "http://example.org/")])
def test_what_is_no_request_of_either_library_is_refused(tasks_world: World, request_: Any) -> None:
    """By both transports, before any policy has heard of it."""
    called: list[object] = []
    policy = Fallback(handler=lambda failure, ctx: called.append(failure))
    with pytest.raises(TypeError, match="a request of httpx or httpx2 is needed, not"):
        ResilienceTransport(policy).handle_request(request_)
    with pytest.raises(TypeError, match="a request of httpx or httpx2 is needed, not"):
        tasks_world.run(lambda: AsyncResilienceTransport(policy).handle_async_request(request_))
    assert called == []


def test_a_transport_of_the_other_world_is_refused(library: ModuleType) -> None:
    """It would fail at the first request."""
    with pytest.raises(TypeError, match="transport must have a method handle_request"):
        ResilienceTransport(QUICK, library.AsyncHTTPTransport(verify=NO_TLS))
    with pytest.raises(TypeError, match="transport must have a method handle_async_request"):
        AsyncResilienceTransport(QUICK, library.HTTPTransport(verify=NO_TLS))
