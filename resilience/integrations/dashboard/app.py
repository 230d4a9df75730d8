"""The ASGI application: the page, its data, and the stream that keeps it up to date.

    GET .../           the page
    GET .../events     server-sent events: first all the data, then the changes, about once a second
    GET .../state      the same data once, as JSON

Pure ASGI, under asyncio and trio. A stream ends after a while, and the browser reconnects: so a server that waits for
its connections at shutdown does not wait for a page that was left open.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any, Final, final
from urllib.parse import quote
from weakref import finalize

import anyio

from resilience import checks
from resilience.checks import Duration
from resilience.clock import clock
from resilience.integrations._serving import Receive, Scope, Send
from resilience.integrations.dashboard.page import HEADERS, page
from resilience.integrations.dashboard.state import state
from resilience.integrations.dashboard.watch import Watch
from resilience.integrations.telemetry import Observed

#: Seconds after which a stream ends, and the milliseconds that a browser then waits before it reconnects.
STREAM_LASTS: Final = 20.0
_RECONNECT: Final = 1000

#: Seconds after that until a viewer that has not read all of it is disconnected: it may be asleep, and is counted.
STALLS: Final = 10.0

#: Seconds of silence after which a comment is sent, so that no proxy takes the connection for dead.
_HEARTBEAT: Final = 5.0

#: The longest time in seconds until a stream notices that the dashboard was closed.
_STEP: Final = 0.2

_TEXT = b"text/plain; charset=utf-8"


@final
class Dashboard:
    """An ASGI application that shows what the policies of this process do, live.

    :param policies: policies, pipelines, and objects with one for each host (`standard()`, `PerHost`). The state of
        their circuit breakers, bulkheads and the like is shown. They are held by weak references. Rates and events are
        those of the whole process.
    :param title: the title of the page, such as the name of your service.
    :param interval: seconds between two updates, 1 by default; at least 0.1.
    :param history: whether to record failures, refusals and changes of circuits from now on, the default, so that the
        page shows earlier events when it is opened. With False, nothing is recorded without a viewer. Executions are
        counted only while there is a viewer, and for 30 s after: counting them costs every call.
    :param keep: how many rows of events are kept, 200 by default. Equal events in succession share a row.
    :param messages: whether the messages of errors are shown, or only their types, the default. Messages can contain
        anything. Arguments and results are never shown.
    :param allowed_hosts: the names (without port) that requests may use for the host; `"*"` or None, the default, for
        any. `serve` allows only the names of its own address: other sites cannot read the page by DNS rebinding.
    :param max_viewers: how many viewers there may be at a time, 20 by default; others get a 503.
    :raises TypeError: for an object that is no policy.

    It is read-only: it answers GET and HEAD, and no request changes anything. It has no login: if others can reach the
    application that it is mounted in, restrict the access there.

    In Starlette and FastAPI: `app.mount("/resilience", Dashboard(pipeline))`, and open `/resilience/`.
    """

    def __init__(
        self,
        *policies: Any,
        title: str = "resilience",
        interval: Duration = 1.0,
        history: bool = True,
        keep: int = 200,
        messages: bool = False,
        allowed_hosts: Iterable[str] | None = None,
        max_viewers: int = 20,
    ) -> None:
        self._page = page(checks.instance("title", title, str, "a string"))
        self._interval = checks.seconds("interval", interval)
        if self._interval < 0.1:
            raise ValueError(f"interval must be at least 0.1 s, not {interval!r}")
        self._messages = checks.flag("messages", messages)
        self._hosts = _hosts(allowed_hosts)
        self._max_viewers = checks.whole("max_viewers", max_viewers)
        self._is_closed = False
        self._keep = checks.whole("keep", keep)
        self._watch = Watch(
            Observed(*policies),
            keep=self._keep,
            history=checks.flag("history", history),
            messages=self._messages,
        )
        finalize(self, self._watch.close).atexit = False

    def close(self) -> None:
        """End the streams, and listen to no more events. Not needed if it lives as long as the process."""
        self._is_closed = True
        self._watch.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            await self._answer(scope, receive, _Response(send, with_body=scope["method"] != "HEAD"))
        elif scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
        else:
            raise ValueError(f"the dashboard answers http, not {scope['type']!r}")

    async def _answer(self, scope: Scope, receive: Receive, response: _Response) -> None:
        if not self._is_allowed(dict(scope["headers"]).get(b"host", b"").decode("latin-1")):
            return await response.whole(421, b"this host name is not one of allowed_hosts\n")
        if scope["method"] not in {"GET", "HEAD"}:
            return await response.whole(405, b"the dashboard is read-only\n", (b"allow", b"GET, HEAD"))
        match _path(scope):
            case "/":
                return await response.whole(200, self._page, kind=b"text/html; charset=utf-8")
            case "":  # the page requests its data by relative URLs, so its own has to end in a slash
                folder = quote(scope["path"].rpartition("/")[2])
                return await response.whole(307, b"", (b"location", f"{folder}/".encode()))
            case "/state":
                update, _ = self._update(0)
                return await response.whole(200, _json(update), kind=b"application/json")
            case "/events":
                return await self._stream(receive, response)
            case _:
                return await response.whole(404, b"there is no such page\n")

    def _is_allowed(self, host: str) -> bool:
        if self._hosts is None:
            return True
        name = host.lower() if host.endswith("]") else host.lower().rpartition(":")[0] or host.lower()
        return name in self._hosts

    def _update(self, change: int) -> tuple[dict[str, Any], int]:
        """Return the data that is new since a change of the log, and the number of the latest change."""
        rows, latest = self._watch.log.since(change)
        now = {
            "pid": os.getpid(),
            "keep": self._keep,
            **self._watch.rates(),
            **state(self._watch.observed, messages=self._messages),
        }
        return {"now": now, "rows": rows}, latest

    async def _stream(self, receive: Receive, response: _Response) -> None:
        if not response.with_body:
            await response.start(200, kind=b"text/event-stream")
            return await response.send(b"", more=False)
        if self._watch.viewers >= self._max_viewers:
            return await response.whole(503, b"there are too many viewers\n", (b"retry-after", b"5"))
        with self._watch.viewing():
            try:
                await response.start(200, (b"x-accel-buffering", b"no"), kind=b"text/event-stream")
                async with anyio.create_task_group() as tasks:
                    tasks.cancel_scope.deadline = anyio.current_time() + STREAM_LASTS + STALLS
                    tasks.start_soon(_cancel_on_disconnect, receive, tasks.cancel_scope)
                    await self._send_updates(response)
                    tasks.cancel_scope.cancel()
            except* OSError:
                pass  # some servers raise it when the viewer has disconnected
        return None

    async def _send_updates(self, response: _Response) -> None:
        """Send each update when the one before has been sent: a slow viewer has no backlog."""
        await response.send(b"retry: %d\n\n" % _RECONNECT, more=True)
        change = 0
        ends_at = clock.now() + STREAM_LASTS
        shown: object = None
        shown_at = 0.0
        while (now := clock.now()) < ends_at and not self._is_closed:
            update, change = self._update(change)
            if update["rows"] or update["now"] != shown:
                shown, shown_at = update["now"], now
                await response.send(b"event: update\ndata: %s\n\n" % _json(update), more=True)
            elif now - shown_at >= _HEARTBEAT:
                shown_at = now
                await response.send(b": nothing new\n\n", more=True)
            await self._pause(ends_at)
        await response.send(b"", more=False)

    async def _pause(self, ends_at: float) -> None:
        """Wait until the next update, or until the stream ends or the dashboard is closed."""
        left = self._interval
        while left > 0 and clock.now() < ends_at and not self._is_closed:
            step = min(left, _STEP)
            await anyio.sleep(step)
            left -= step


@final
class _Response:
    """The response to one request, with the headers that all responses have."""

    def __init__(self, send: Send, *, with_body: bool) -> None:
        self._send = send
        self.with_body: bool = with_body

    async def whole(self, status: int, body: bytes, *headers: tuple[bytes, bytes], kind: bytes = _TEXT) -> None:
        await self.start(status, *headers, (b"content-length", b"%d" % len(body)), kind=kind)
        await self.send(body if self.with_body else b"", more=False)

    async def start(self, status: int, *headers: tuple[bytes, bytes], kind: bytes) -> None:
        all_headers = [*headers, (b"content-type", kind), *HEADERS]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})

    async def send(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _path(scope: Scope) -> str:
    """Return the path below the mount point, which older frameworks remove from the path, and newer ones do not."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    below = path.removeprefix(root)
    return below if root and path.startswith(root) and below[:1] in {"", "/"} else path


def _hosts(names: Iterable[str] | None) -> frozenset[str] | None:
    if names is None:
        return None
    given = checks.several("allowed_hosts", names, "a sequence of names")
    if not all(isinstance(name, str) for name in given):
        raise TypeError(f"allowed_hosts must be a sequence of names, not {names!r}")
    lowered = frozenset(name.lower() for name in given)
    return None if "*" in lowered else lowered


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


async def _cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _lifespan(receive: Receive, send: Send) -> None:
    """Confirm the startup and the shutdown of the server: there is nothing to do."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
