"""Middlewares for an ASGI application: the caller's deadline, ambient in the app; responses to the errors of policies.

They are pure ASGI, for any event loop. The budget applies as long as the app runs for the request, and so includes
streamed bodies and background tasks. The server's own code, behind `receive` and `send`, runs outside it: from there,
servers begin the next request of a connection (uvicorn: a pipelined request, or the reader of a socket that a large
body had stopped), and a new task inherits the context in which it is created.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from math import inf
from typing import TypeAlias, final

import anyio.lowlevel

from resilience import checks
from resilience.ambient import get_ambient
from resilience.checks import Duration
from resilience.context import Context
from resilience.errors import DeadlineExceeded
from resilience.integrations._serving import Message, Receive, Scope, Send, Steps, budget, ran_out
from resilience.integrations.answers import TOO_LATE, Answer, Answering, FrameworkErrors, answer_to
from resilience.integrations.wire import HEADERS, Acceptance
from resilience.runtimes.tasks import TASKS

__all__ = ["DeadlineMiddleware", "ResilienceMiddleware"]

App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


@final
class ResilienceMiddleware:
    """Answer 503 if a policy refuses a call that `app` makes, and 504 if its time is up.

    :param app: any ASGI 3 application.

    `RateLimited` becomes 429, any other `Rejected` (an open circuit, a full bulkhead) 503, both with `Retry-After` if
    the error has a `retry_after`; `TimeoutExceeded` and `DeadlineExceeded` become 504; a group is answered if each
    error in it is. Once the response has begun, the exception is raised, and the server closes the connection. Any
    other error is not changed.

    In Starlette and FastAPI: `app.add_middleware(ResilienceMiddleware)`; in Django, around `get_asgi_application()`.
    """

    def __init__(self, app: App) -> None:
        self._app = checks.function("app", app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        server = _Server(receive, send, answer_to)
        return await server.answer(lambda: self._app(scope, server.receive, server.send))


@final
class DeadlineMiddleware:
    """Open the deadline that the caller has sent, for everything that `app` does for the request.

    :param app: any ASGI 3 application.
    :param headers: names of the headers that are read. `grpc-timeout` has its own grammar, all others are whole
        milliseconds. Repeated or unparsable headers are ignored; of several, the shortest time applies.
    :param cap: the most seconds that a caller may ask for; as many as `default` by default, infinity for no bound.
    :param default: the seconds for a request without a header; as many as `cap` by default, infinity for no limit. If
        neither is given, both are 60 seconds.
    :param cut_off: cancel the app at the deadline. By default a budget cuts nothing off: the policies of the app
        respect it, and code that does not check it continues.

    A request whose time is already up is answered 504, and the app is not entered. 504 is also the answer if the app is
    cut off, or raises `DeadlineExceeded` or, after the deadline, a network error or that of a statement that a database
    has ended, before its response has begun. After that the exception is raised, and the server closes the connection,
    so that half of a response does not look complete. Only `http` is affected; `websocket` and `lifespan` pass through
    unchanged.

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
        self._app = checks.function("app", app)
        self._acceptance = Acceptance(headers, cap=cap, default=default)
        self._cut_off = checks.flag("cut_off", cut_off)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        fields = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        ctx = budget(self._acceptance.seconds(fields))
        if ctx.expired:
            return await _respond(send, TOO_LATE)
        server = _Server(
            receive, send, lambda error: TOO_LATE if ran_out(error, ctx) else None, is_cut_off=self._cut_off
        )
        return await server.answer(lambda: self._run(ctx, scope, server))

    async def _run(self, ctx: Context, scope: Scope, server: _Server) -> None:
        with Steps(ctx):
            if not self._cut_off or ctx.deadline == inf:
                return await self._app(scope, server.receive, server.send)
            timeout = ctx.remaining()
            with TASKS.timer(ctx.deadline, timeout) as timer:
                await self._app(scope, server.receive, server.send)
            if timer.fired:
                raise DeadlineExceeded("the request was cut off at its deadline", timeout=timeout)
            return None


@final
class _Server:
    """The `receive` and `send` of one request, which call those of the server outside the budget."""

    _has_begun = False  # whether the start of a response has been sent
    _is_replaced = False  # whether an answer has replaced the response of a framework

    def __init__(self, receive: Receive, send: Send, answering: Answering, *, is_cut_off: bool = False) -> None:
        self._receive = receive
        self._send = send
        self._answering = answering
        self._is_cut_off = is_cut_off
        self._outside = get_ambient()
        self._framework_errors = FrameworkErrors(answering)

    async def answer(self, run: Callable[[], Awaitable[None]]) -> None:
        """Run the app, and answer the error that it raises."""
        try:
            with self._framework_errors:
                return await run()
        except Exception as error:
            answer = None if self._has_begun else self._answering(error)
            if answer is None:
                raise
        return await _respond(self._send, answer)

    async def receive(self) -> Message:
        with Steps(self._outside):
            return await self._receive()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self._is_cut_off:  # a cancellation that was shielded (a handler in a thread) must not hit the server
                await anyio.lowlevel.checkpoint_if_cancelled()
            self._has_begun = True
            answer = self._framework_errors.answer_in_place_of(message["status"])
            if answer is not None:
                self._is_replaced = True
                with Steps(self._outside):
                    return await _respond(self._send, answer)
        if not self._is_replaced:
            with Steps(self._outside):
                await self._send(message)
        return None


async def _respond(send: Send, answer: Answer) -> None:
    headers = [(name.encode(), value.encode()) for name, value in answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
