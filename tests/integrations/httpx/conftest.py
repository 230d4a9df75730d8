"""Shared by the tests of httpx and httpx2: each library in every world."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any

import httpx
import httpx2
import pytest

from resilience.callables import maybe_await
from tests.conftest import World
from tests.integrations.http_clients import QUICK, Httpx, opened


class Kit(Httpx):
    """One of the two libraries, in one world, with its own clients and transports."""

    def __init__(self, library: ModuleType, world: World) -> None:
        super().__init__(world.name)
        self.library = library
        self.blocking = world.blocking

    def mock(self, *steps: Any) -> Any:
        """Return a transport that takes one step for each request: a status, a response, an error."""
        script = iter(steps)

        def handler(request: Any) -> Any:
            step = next(script)
            if isinstance(step, BaseException):
                raise step
            return self.library.Response(step) if isinstance(step, int) else step

        return self.library.MockTransport(handler)

    @contextlib.asynccontextmanager
    async def client(self, policy: Any = QUICK, inner: Any = None, **options: Any) -> AsyncIterator[Client]:
        own = {name: options.pop(name) for name in ("rules", "propagate_to", "read_body") if name in options}
        transport = self.make(policy, inner or self.network(), **own)
        async with self.over(transport, **options) as client:
            yield Client(client)

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


class Client:
    """A client whose methods are awaited in every world."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            return await maybe_await(getattr(self.client, name)(*args, **options))

        return call

    def stream(self, method: str, url: str) -> contextlib.AbstractAsyncContextManager[Any]:
        return opened(self.client.stream(method, url))


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


@pytest.fixture
def some_tasks_kit(tasks_world: World) -> Kit:
    """Both worlds of tasks, with one of the libraries."""
    return Kit(httpx if tasks_world.name == "asyncio" else httpx2, tasks_world)


@contextlib.contextmanager
def full_port() -> Iterator[str]:
    """Yield the URL of a port that accepts no more connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        for _ in range(4):  # fill the queue
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield f"http://127.0.0.1:{full.getsockname()[1]}/"
