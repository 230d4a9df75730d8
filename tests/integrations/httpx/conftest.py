"""Shared by the tests of httpx and httpx2: each library in every world."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any

import httpx
import httpx2
import pytest

from resilience import Context, Policy, Retry
from resilience.integrations.http import TransientStatus
from resilience.integrations.httpx import AsyncResilienceTransport, ResilienceTransport
from tests.conftest import World
from tests.integrations.servers import Answer, FlakyServer

QUICK = Retry(3, backoff=[0])
NO_TLS = ssl.create_default_context()  # loading certificates takes 30 ms, and no test needs them
PATIENT = 10.0  # seconds; longer than any test waits


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

    def network_with_hook(self, hook: Any, *, after: bool = False, **options: Any) -> Any:
        """Return a network transport that calls `hook()` before the first request, or after its response."""
        requests: list[Any] = []

        class Blocking(self.library.HTTPTransport):  # type: ignore[name-defined, misc]
            def handle_request(self, request: Any) -> Any:
                first = not requests
                requests.append(request)
                if first and not after:
                    hook()
                response = super().handle_request(request)
                if first and after:
                    hook()
                return response

        class Tasks(self.library.AsyncHTTPTransport):  # type: ignore[name-defined, misc]
            async def handle_async_request(self, request: Any) -> Any:
                if not requests:
                    requests.append(request)
                    hook()
                return await super().handle_async_request(request)

        return (Blocking if self.blocking else Tasks)(verify=NO_TLS, **options)

    def mock(self, *steps: Any) -> Any:
        """Return a transport that takes one step for each request: a status, a response, an error."""
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

    def body(self, *steps: Any, noted: list[str] | None = None) -> Any:
        """Return a stream of a class of its own, which takes these steps, pieces and errors, and notes its use."""

        class Stream(self.library.SyncByteStream, self.library.AsyncByteStream):  # type: ignore[name-defined, misc]
            def note(self, what: str) -> None:
                if noted is not None:
                    noted.append(what)

            def __iter__(self) -> Iterator[bytes]:
                self.note("read")
                for step in steps:
                    if isinstance(step, Exception):
                        raise step
                    yield step

            async def __aiter__(self) -> AsyncIterator[bytes]:
                for piece in self:
                    yield piece

            def close(self) -> None:
                self.note("closed")

            async def aclose(self) -> None:
                self.close()

        return Stream()

    def chunks(self, *chunks: bytes) -> Any:
        """Return a generator for a body."""
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
        """Return the exception of a request."""
        try:
            response = await self.request(method, url, **options)
        except Exception as error:
            return error
        raise AssertionError(f"the request returned {response}")

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
    library: ModuleType = request.param
    return library


@pytest.fixture
def kit(library: ModuleType, world: World) -> Kit:
    """Both libraries in every world."""
    return Kit(library, world)


@pytest.fixture
def some_kit(world: World) -> Kit:
    """Every world, with one of the libraries: for slow tests of code that both share."""
    return Kit(httpx if world.name == "asyncio" else httpx2, world)


@pytest.fixture
def sync_kit(library: ModuleType, threads: World) -> Kit:
    return Kit(library, threads)


@pytest.fixture
def tasks_kit(library: ModuleType, tasks_world: World) -> Kit:
    return Kit(library, tasks_world)


class AlwaysTwice(Policy):
    """A policy that always calls twice."""

    async def around(self, call: Any, ctx: Context) -> Any:
        with contextlib.suppress(TransientStatus):
            return await call(ctx)
        return await call(ctx)


@contextlib.contextmanager
def full_port() -> Iterator[str]:
    """Yield the URL of a port that accepts no more connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        for _ in range(4):  # fill the queue
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield f"http://127.0.0.1:{full.getsockname()[1]}/"


def dripping(server: FlakyServer) -> str:
    """Script a body that is sent byte by byte, for longer than any test waits, with short pauses; return its URL."""
    return server.script("/drip", Answer(200, body=[b"."] * 1000, drip=Tick()))  # type: ignore[arg-type]


class Tick(threading.Event):
    """An event for which each wait ends after 20 ms."""

    def wait(self, timeout: float | None = None) -> bool:
        time.sleep(0.02)
        return True
