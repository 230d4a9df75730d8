"""Shared by the tests of httpx and httpx2: each library in every world."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

from tests.integrations.http_clients import CLIENTS, Httpx, each_of

HTTPX = [it for it in CLIENTS if isinstance(it, Httpx)]


kit = each_of(HTTPX)
sync_kit = each_of([it for it in HTTPX if it.world.blocking])
tasks_kit = each_of([it for it in HTTPX if not it.world.blocking])

asyncio_kit = each_of([it for it in HTTPX if it.world.name == "asyncio"])

#: Every world, with one of the libraries: for slow tests of code that both share.
some_kit = each_of([it for it in HTTPX if repr(it) in ("httpx2-threads", "httpx-asyncio", "httpx2-trio")])
some_tasks_kit = each_of([it for it in HTTPX if repr(it) in ("httpx-asyncio", "httpx2-trio")])


@contextlib.contextmanager
def full_port() -> Iterator[str]:
    """Yield the URL of a port that accepts no more connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        for _ in range(4):  # fill the queue
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield f"http://127.0.0.1:{full.getsockname()[1]}/"


def body_of(kit: Httpx, *steps: Any, noted: list[str] | None = None, leaving: Any = None) -> Any:
    """Return a stream of a class of its own, which takes these steps, pieces and errors, and notes its use.

    :param leaving: called and awaited as a task ceases to read.
    """

    class Stream(kit.library.SyncByteStream, kit.library.AsyncByteStream):  # type: ignore[name-defined, misc]
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
            try:
                for piece in self:
                    yield piece
            finally:
                await leaving() if leaving else None

        def close(self) -> None:
            self.note("closed")

        async def aclose(self) -> None:
            self.close()

    return Stream()
