"""Requests to the dashboard: direct ASGI calls, or over HTTP to one that is served."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio

from resilience import Context, events
from resilience.events.dispatch import subscribers
from resilience.integrations.dashboard import Dashboard, Served, serve
from tests.conftest import Boom
from tests.functions import raising

#: `make(*policies)` returns a dashboard with fast updates that is closed after the test.
Make = Callable[..., Dashboard]


class Answer:
    """The application's response to one request."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_whole = False

    async def take(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            assert len(self.headers) == len(message["headers"]), "a header was sent twice"
        else:
            self.body += message["body"]
            self.is_whole = not message.get("more_body", False)

    def sent(self) -> list[dict[str, str]]:
        """Return the fields of each server-sent event so far."""
        blocks = [block for block in self.body.decode().split("\n\n")[:-1] if not block.startswith(":")]
        return [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]

    def updates(self) -> list[Any]:
        return [json.loads(it["data"]) for it in self.sent() if it.get("event") == "update"]

    def rows(self) -> list[Any]:
        return [row for update in self.updates() for row in update["rows"]]


def scope(path: str = "/", method: str = "GET", root: str = "", host: str = "localhost:8000") -> dict[str, Any]:
    headers = [(b"host", host.encode())]
    return {"type": "http", "method": method, "path": path, "root_path": root, "headers": headers}


async def ask(app: Dashboard, *request: str, **options: str) -> Answer:
    """Make a request that is answered at once."""
    answer = Answer()
    await app(scope(*request, **options), anyio.sleep_forever, answer.take)  # type: ignore[arg-type]
    assert answer.is_whole
    return answer


class Viewer:
    """A viewer who has the event stream open during a block."""

    def __init__(self, app: Dashboard) -> None:
        self._app = app
        self.answer = Answer()
        self.has_ended = anyio.Event()

    async def __aenter__(self) -> Viewer:
        self._leaves = anyio.Event()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._look)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self._leaves.set()
        with anyio.fail_after(10):
            await self.has_ended.wait()
        await self._tasks.__aexit__(*exc)

    async def _look(self) -> None:
        await self._app(scope("/events"), self._receive, self.take)
        self.has_ended.set()

    async def _receive(self) -> Any:
        await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def take(self, message: Any) -> None:
        await self.answer.take(message)

    async def until(self, seen: Callable[[Answer], bool]) -> None:
        with anyio.fail_after(10):
            while not seen(self.answer):
                await anyio.sleep(0.01)


@contextlib.asynccontextmanager
async def viewing(app: Dashboard) -> AsyncIterator[Viewer]:
    """Open the event stream, and wait for its first update."""
    async with Viewer(app) as viewer:
        await viewer.until(lambda it: bool(it.updates()))
        yield viewer


async def state_of(app: Dashboard) -> Any:
    return json.loads((await ask(app, "/state")).body)


def fail(message: str = "reset") -> Callable[[Context], None]:
    return raising(Boom(message))


@contextlib.contextmanager
def served(*policies: Any, **options: Any) -> Iterator[Served]:
    """Serve a dashboard with fast updates on a free port."""
    with serve(*policies, **{"port": 0, "interval": 0.1, **options}) as server:
        yield server


def is_subscribed(kind: type[events.Event]) -> bool:
    """Whether the dashboard listens to events of this kind."""
    return bool(subscribers.by_kind[kind])


async def has_room(app: Dashboard) -> bool:
    """Whether the dashboard admits another viewer."""
    async with Viewer(app) as viewer:
        await viewer.until(lambda it: it.status in (200, 503))
        return viewer.answer.status == 200
