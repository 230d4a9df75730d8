"""Every HTTP client that has an integration, behind one interface: the rules that they share are tested once.

A test is `async def test_x(client)`, which runs in the client's world, and opens the client with a policy:

    async with client.open(policy, rules=...) as send:
        reply = await send("PUT", url, data=b"...", headers={...})   # a `Reply`, or what the client raises
        reply = await send("GET", url, stream=True)                   # an open one: `await reply.read()`

Each has a pool of one connection, unless `connections=` says more: one that is not returned makes the test fail.
"""

from __future__ import annotations

import contextlib
import io
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import aiohttp
import httpx
import httpx2
import pytest
import requests
import urllib3

from resilience import Policy, Retry
from resilience.callables import maybe_await
from resilience.clock import clock as process_clock
from resilience.integrations.aiohttp import resilience_middleware
from resilience.integrations.http import NotRepeatable
from resilience.integrations.httpx import AsyncResilienceTransport, ResilienceTransport
from resilience.integrations.requests import ResilienceAdapter
from resilience.integrations.urllib3 import ResiliencePoolManager, ResilienceProxyManager
from resilience.testing import script
from tests.conftest import World
from tests.integrations.upload_bodies import ONCE, OnlyRead, OnlySeek, Reader, Unsized, pieces, pipe

QUICK = Retry(3, backoff=[0])
NO_TLS = ssl.create_default_context()  # loading certificates takes 30 ms, and few tests need them


#: Options of requests with a body that contains `b"once"`, by the name of the body.
Bodies = Mapping[str, Callable[[], dict[str, Any]]]


@dataclass
class Reply:
    """A response, read or still to be read."""

    status: int
    headers: Any
    raw: Any
    read: Callable[[], Awaitable[bytes]]
    close: Callable[[], Awaitable[None]]
    body: bytes | None = None


class Client(ABC):
    """One of the clients, in one of the worlds."""

    #: The base of the client's own errors.
    error: type[Exception]
    #: Whether a body is read in the attempt, unless a stream is asked for.
    reads_in_attempt = False
    #: What is raised if a redirect would need a body that cannot be sent a second time.
    used_up: Any = NotRepeatable
    #: Options of a request with a body that can be sent again, and with one that cannot, besides those of all clients.
    repeatable: ClassVar[Bodies] = {"json": lambda: {"json": ["once"]}}
    one_shots: ClassVar[Bodies] = {}

    @property
    def takes_no_file(self) -> bool:
        """Whether the body of a request cannot be a file: an `AsyncClient` would block."""
        return False

    def __init__(self, world: str = "threads") -> None:
        self.world = World(world)

    def __repr__(self) -> str:
        return f"{type(self).__name__.lower()}-{self.world}"

    def run(self, main: Callable[[], Awaitable[Any]]) -> Any:
        return self.world.run(main)

    def generator(self, *pieces: bytes) -> Any:
        """A body that can be sent only once."""
        if self.world.blocking:
            return (it for it in pieces)

        async def generate() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        return generate()

    @abstractmethod
    def make(self, policy: Policy[Any], **options: Any) -> Any:
        """The constructor of the integration, for wrong arguments."""

    @abstractmethod
    def open(self, policy: Policy[Any] = QUICK, **options: Any) -> contextlib.AbstractAsyncContextManager[Any]:
        """Return a function that sends. It has a method `end`, which closes the client early."""


class Reiterable:
    """Can be iterated again and again."""

    def __iter__(self) -> Iterator[bytes]:
        yield from (b"on", b"ce")


class Requests(Client):
    error = requests.RequestException
    reads_in_attempt = True
    repeatable: ClassVar[Bodies] = {
        **Client.repeatable,
        "form": lambda: {"data": {"a": "once"}},
        "multipart": lambda: {"files": {"f": ("name", io.BytesIO(ONCE))}},
        "array": lambda: {"data": bytearray(ONCE)},
        "iterable": lambda: {"data": Reiterable()},
    }
    one_shots: ClassVar[Bodies] = {"reader": lambda: {"data": OnlyRead()}, "no position": lambda: {"data": OnlySeek()}}
    make = ResilienceAdapter  # type: ignore[assignment]

    @contextlib.asynccontextmanager
    async def open(
        self, policy: Any = QUICK, *, proxy: str | None = None, connections: int = 1, **options: Any
    ) -> AsyncIterator[Any]:
        session = requests.Session()
        session.proxies = {} if proxy is None else {"https": proxy}
        for scheme in ("http://", "https://"):
            session.mount(scheme, ResilienceAdapter(policy, pool_maxsize=connections, pool_block=True, **options))

        async def send(method: str, url: str, *, data: Any = None, stream: bool = False, **how: Any) -> Reply:
            response = session.request(method, url, data=data, stream=stream, **how)
            read, close = _awaited(lambda: response.content), _awaited(response.close)
            body = None if stream else response.content
            return Reply(response.status_code, response.headers, response, read, close, body)

        send.end = session.close  # type: ignore[attr-defined]
        with session:
            yield send


class Urllib3(Client):
    error = urllib3.exceptions.HTTPError
    reads_in_attempt = True
    repeatable: ClassVar[Bodies] = {**Client.repeatable, "multipart": lambda: {"fields": {"a": ("name", ONCE)}}}
    make = ResiliencePoolManager  # type: ignore[assignment]

    @contextlib.asynccontextmanager
    async def open(
        self, policy: Any = QUICK, *, proxy: str | None = None, connections: int = 1, **options: Any
    ) -> AsyncIterator[Any]:
        options |= {"maxsize": connections, "block": True}
        manager = ResiliencePoolManager(policy, **options)
        if proxy is not None:
            manager = ResilienceProxyManager(policy, proxy, **options)

        async def send(method: str, url: str, *, data: Any = None, stream: bool = False, **how: Any) -> Reply:
            how |= {"preload_content": False} if stream else {}
            response = manager.request(method, url, body=data, **how)
            read, close = _awaited(lambda: response.data), _awaited(response.close)
            return Reply(response.status, response.headers, response, read, close, None if stream else response.data)

        send.end = manager.clear  # type: ignore[attr-defined]
        with manager:
            yield send


class Httpx(Client):
    library: ModuleType = httpx
    repeatable: ClassVar[Bodies] = {
        **Client.repeatable,
        "form": lambda: {"data": {"a": "once"}},
        "multipart": lambda: {"files": {"p": ("p.txt", ONCE)}, "data": {"a": "b"}},
        "multipart-file": lambda: {"files": {"p": ("p.txt", io.BytesIO(ONCE))}},
        "multipart-memory": lambda: {"files": {"p": ("p.txt", "once")}},
    }
    one_shots: ClassVar[Bodies] = {
        "pipe": lambda: {"data": Unsized()},
        "reader": lambda: {"data": Reader()},
        "iterator": lambda: {"data": iter([b"on", b"ce"])},
        "multipart-pipe": lambda: {"files": {"p": ("p.txt", Unsized())}},
    }

    @property
    def error(self) -> type[Exception]:  # type: ignore[override]
        kind: type[Exception] = self.library.HTTPError
        return kind

    @property
    def used_up(self) -> Any:  # type: ignore[override]
        return self.library.StreamConsumed

    @property
    def takes_no_file(self) -> bool:
        return not self.world.blocking

    def make(self, policy: Any, inner: Any = None, **options: Any) -> Any:
        return (ResilienceTransport if self.world.blocking else AsyncResilienceTransport)(policy, inner, **options)

    def network(self, **options: Any) -> Any:
        """Make the transport of the library."""
        kind = self.library.HTTPTransport if self.world.blocking else self.library.AsyncHTTPTransport
        return kind(verify=NO_TLS, **options)

    def over(self, transport: Any, **options: Any) -> contextlib.AbstractAsyncContextManager[Any]:
        """Open the client of the library over a transport."""
        kind = self.library.Client if self.world.blocking else self.library.AsyncClient
        return opened(kind(transport=transport, **options))

    @contextlib.asynccontextmanager
    async def open(
        self, policy: Any = QUICK, *, proxy: str | None = None, connections: int = 1, **options: Any
    ) -> AsyncIterator[Any]:
        network = self.network(limits=self.library.Limits(max_connections=connections), proxy=proxy)
        async with self.over(self.make(policy, network, **options), follow_redirects=True) as client:
            send = self._send(client)
            send.end = client.close if self.world.blocking else client.aclose
            yield send

    def _send(self, client: Any) -> Any:
        async def send(method: str, url: str, *, data: Any = None, stream: bool = False, **how: Any) -> Reply:
            how["data" if isinstance(data, dict) else "content"] = data
            request = client.build_request(method, url, **how)
            response = await maybe_await(client.send(request, stream=stream))

            async def read() -> bytes:
                return await self.read(response)

            async def close() -> None:
                await maybe_await(response.close() if self.world.blocking else response.aclose())

            body = None if stream else await read()
            return Reply(response.status_code, response.headers, response, read, close, body)

        return send

    async def read(self, response: Any) -> bytes:
        return bytes(await maybe_await(response.read() if self.world.blocking else response.aread()))

    def mock(self, *steps: Any) -> Any:
        """Return a transport that takes one step for each request: a status, a response, an error."""
        made = [self.library.Response(it) if isinstance(it, int) else it for it in steps]
        return self.library.MockTransport(script(*made))

    @contextlib.asynccontextmanager
    async def client(self, policy: Any = QUICK, inner: Any = None, **options: Any) -> AsyncIterator[HttpxClient]:
        """Open a client of the library itself, over a transport inside of ours."""
        own = {name: options.pop(name) for name in ("rules", "propagate_to", "read_body") if name in options}
        async with self.over(self.make(policy, inner or self.network(), **own), **options) as client:
            yield HttpxClient(client)


class Httpx2(Httpx):
    library = httpx2


class HttpxClient:
    """A client of httpx whose methods are awaited in every world."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            return await maybe_await(getattr(self.client, name)(*args, **options))

        return call

    def stream(self, method: str, url: str) -> contextlib.AbstractAsyncContextManager[Any]:
        return opened(self.client.stream(method, url))


def form(**fields: Any) -> aiohttp.FormData:
    data = aiohttp.FormData()
    for name, value in fields.items():
        data.add_field(name, value, filename=name if isinstance(value, io.IOBase) else None)
    return data


class OwnPayload(aiohttp.Payload):
    """A payload of a user's own class, which nobody knows how to send again."""

    _default_content_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__(None)
        self._pieces = iter([ONCE])

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise NotImplementedError

    async def write(self, writer: Any) -> None:
        for piece in self._pieces:
            await writer.write(piece)


class Aiohttp(Client):
    error = aiohttp.ClientError
    repeatable: ClassVar[Bodies] = {
        **Client.repeatable,
        "form": lambda: {"data": {"a": "once"}},
        "multipart": lambda: {"data": form(a="1", b=io.BytesIO(ONCE))},
        "text": lambda: {"data": io.StringIO("once")},
        "expected": lambda: {"data": ONCE, "expect100": True},
        "compressed": lambda: {"data": ONCE, "compress": True},
    }
    one_shots: ClassVar[Bodies] = {
        "pipe": lambda: {"data": pipe()},
        "form with a pipe": lambda: {"data": form(a=pipe())},
        "payload": lambda: {"data": aiohttp.AsyncIterablePayload(pieces())},
        "own payload": lambda: {"data": OwnPayload()},
    }
    used_up = (NotRepeatable, aiohttp.ClientPayloadError)  # newer versions check this themselves
    make = staticmethod(resilience_middleware)  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__("asyncio")

    @contextlib.asynccontextmanager
    async def open(
        self, policy: Any = QUICK, *, proxy: str | None = None, connections: int = 1, **options: Any
    ) -> AsyncIterator[Any]:
        connector = aiohttp.TCPConnector(limit=connections)
        middleware = resilience_middleware(policy, **options)
        async with aiohttp.ClientSession(connector=connector, middlewares=[middleware], proxy=proxy) as session:

            async def send(method: str, url: str, *, stream: bool = False, timeout: Any = None, **how: Any) -> Reply:
                limits = {} if timeout is None else {"timeout": aiohttp.ClientTimeout(None, sock_read=timeout)}
                response = await session.request(method, url, **limits, **how)

                async def close() -> None:
                    response.close()

                body = None if stream else await response.read()
                return Reply(response.status, response.headers, response, response.read, close, body)

            send.end = session.close  # type: ignore[attr-defined]
            yield send


def each_of(params: Sequence[Any], ids: Callable[[Any], str] = repr) -> Any:
    """Return a fixture that is each of these in turn."""
    return pytest.fixture(params=params, ids=ids)(lambda request: request.param)


@contextlib.asynccontextmanager
async def opened(manager: Any) -> AsyncIterator[Any]:
    """Enter a context manager, or an asynchronous one."""
    if hasattr(manager, "__aenter__"):
        async with manager as it:
            yield it
    else:
        with manager as it:
            yield it


async def outcome_of(request: Any) -> Any:
    """Return the reply, or the exception as a value."""
    try:
        return await request
    except Exception as error:
        return error


def _awaited(function: Callable[[], Any]) -> Any:
    async def call() -> Any:
        return function()

    return call


BLOCKING: list[Client] = [Requests(), Urllib3(), Httpx(), Httpx2()]
CLIENTS = [*BLOCKING, *(kind(world) for kind in (Httpx, Httpx2) for world in ("asyncio", "trio")), Aiohttp()]


def client_of(policy: Any, handler: Callable[[httpx.Request], httpx.Response] | None = None) -> httpx.Client:
    """Return a client of httpx for a function that answers, or for the network."""
    inner = httpx.HTTPTransport(verify=NO_TLS) if handler is None else httpx.MockTransport(handler)
    return httpx.Client(transport=ResilienceTransport(policy, inner), timeout=None)


@contextlib.contextmanager
def process_clock_ahead(seconds: float) -> Iterator[None]:
    """Move the process clock ahead."""
    with pytest.MonkeyPatch.context() as patch:
        now = process_clock.now
        patch.setattr(process_clock, "now", lambda: now() + seconds)
        yield
