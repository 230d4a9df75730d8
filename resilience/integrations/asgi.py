"""The caller's deadline in an ASGI application: read from the request, ambient in the app, 504 when it is over.

Pure ASGI: it knows no framework, and no event loop. The budget holds for as long as the app runs for the
request: streamed bodies, background tasks. The server's own code, behind `receive` and `send`, runs outside
of it: servers begin the next request of a connection from there (uvicorn: a pipelined request, or the reader
of a socket that a large body had stopped), and what is begun inherits the context that it is begun in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias, final

import anyio.lowlevel

from resilience import checks
from resilience.context import Context, get_ambient
from resilience.errors import DeadlineExceeded
from resilience.integrations.wire import HEADERS, Acceptance, ambient, budget, ran_out
from resilience.runtimes.tasks import timer_until

if TYPE_CHECKING:
    from resilience.checks import Duration

__all__ = ["DeadlineMiddleware"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_BODY = b"the deadline of the request has passed\n"


@final
class DeadlineMiddleware:
    """Open the deadline that the caller has sent, for everything that `app` does for the request.

    :param app: any ASGI 3 application.
    :param headers: names of the headers that are believed. `grpc-timeout` is read in its own grammar, all others
        as whole milliseconds. What is repeated or cannot be read is ignored; of several the shortest time holds.
    :param cap: the most seconds that a caller may ask for; None for no bound.
    :param default: the seconds for a request that does not say; None for no limit.
    :param cut_off: cancel the app at the deadline. By default a budget cuts nothing off: what the app calls
        obeys it, and code that looks at nothing goes on.

    A request whose time is over when it comes is answered 504, and the app is not entered. So is one that is cut
    off, or from which `DeadlineExceeded` comes out, or once the time is over a network error, before its response
    has begun. After that the exception is raised, and the server breaks the connection off: half of a response
    must not look like a whole one.
    Only `http` is looked at; `websocket` and `lifespan` go through as they are.

    In Starlette and FastAPI: `app.add_middleware(DeadlineMiddleware, cap=30.0)`.
    """

    def __init__(
        self,
        app: App,
        *,
        headers: Iterable[str] = HEADERS,
        cap: Duration | None = None,
        default: Duration | None = None,
        cut_off: bool = False,
    ) -> None:
        if not callable(app):
            raise TypeError(f"app must be an ASGI application, not {app!r}")
        self._app = app
        self._acceptance = Acceptance(headers, cap=cap, default=default)
        self._cut_off = checks.flag("cut_off", cut_off)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        ctx = budget(self._acceptance.seconds(_fields(scope)))
        if ctx.expired:
            return await _refuse(send)
        server = _Server(receive, send, is_cut_off=self._cut_off)
        try:
            with ambient(ctx):
                await self._run(ctx, scope, server)
        except Exception as error:
            if server.has_begun or not ran_out(error, ctx):
                raise
        else:
            return None
        return await _refuse(send)

    async def _run(self, ctx: Context, scope: Scope, server: _Server) -> None:
        if not self._cut_off or ctx.deadline == inf:
            return await self._app(scope, server.receive, server.send)
        timeout = ctx.remaining()
        with timer_until(ctx.deadline) as timer:
            await self._app(scope, server.receive, server.send)
        if timer.fired:
            raise DeadlineExceeded("the request was cut off at its deadline", timeout=timeout)
        return None


@final
class _Server:
    """The server's two functions, called outside of the budget."""

    __slots__ = ("_is_cut_off", "_outside", "_receive", "_send", "has_begun")

    def __init__(self, receive: Receive, send: Send, *, is_cut_off: bool) -> None:
        self._receive = receive
        self._send = send
        self._is_cut_off = is_cut_off
        self._outside = get_ambient()
        self.has_begun: bool = False  # whether the server has been handed the start of a response

    async def receive(self) -> Message:
        with ambient(self._outside):
            return await self._receive()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self._is_cut_off:  # while it was shielded, as a handler in a thread is: not inside of the server now
                await anyio.lowlevel.checkpoint_if_cancelled()
            self.has_begun = True
        with ambient(self._outside):
            await self._send(message)


def _fields(scope: Scope) -> Iterable[tuple[str, str]]:
    for name, value in scope["headers"]:
        yield name.decode("latin-1"), value.decode("latin-1")


async def _refuse(send: Send) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(_BODY))]
    await send({"type": "http.response.start", "status": 504, "headers": headers})
    await send({"type": "http.response.body", "body": _BODY})
