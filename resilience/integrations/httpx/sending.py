"""A request of httpx or httpx2 on its way through a policy."""

from __future__ import annotations

import copy
import weakref
from abc import abstractmethod
from collections.abc import Mapping
from http import HTTPStatus
from math import inf
from typing import Any, NamedTuple, final

from typing_extensions import override

from resilience.clock import clock
from resilience.context import Context, is_over
from resilience.errors import DeadlineExceeded
from resilience.integrations.http import Exchange, Rules
from resilience.integrations.http.bodies import forget_sent, is_used_up, note_sent
from resilience.integrations.httpx.bodies import AsyncBody, Body, InMemory, aread, is_replayable, read, sources
from resilience.integrations.httpx.libraries import classes, library_of
from resilience.integrations.httpx.pools import reclaim_places
from resilience.integrations.wire import Propagation

#: What is raised before anything has reached the server.
_NEVER_SENT: tuple[type[Exception], ...] = (
    ConnectionRefusedError,
    *classes("ConnectError"),
    *classes("ConnectTimeout"),
    *classes("PoolTimeout"),
    *classes("ProxyError"),
    *classes("UnsupportedProtocol"),
)

_TIMED_OUT: tuple[type[Exception], ...] = classes("TimeoutException")

_TIMEOUTS = ("connect", "read", "write", "pool")

#: Bodies of unknown length that have been sent and cannot be produced again. A client that follows a redirect, or
#: answers a challenge, sends the same stream in another request, and of an iterator that is used up nothing arrives.
_used_up: weakref.WeakSet[Any] = weakref.WeakSet()


class Options(NamedTuple):
    """What a transport was told to do with its requests."""

    rules: Rules
    propagation: Propagation
    read_body: bool


@final
class _Progress:
    """How far an attempt that has a deadline has come, as the client's own trace tells it.

    It answers what a timer cannot: whether the request was sent when it fired. And an attempt in a thread that was
    left behind while it was connecting does not begin to send, so that nothing is sent twice behind the caller's back.
    Before each of the long waits it cuts the client's timeouts to what is left then: they are for one wait each, and
    the one for a free connection may have taken most of the time.

    :param given: the timeouts of the client.
    :param timeouts: those of this attempt, which the client looks at when it begins a wait.
    """

    __slots__ = ("_deadline", "_given", "_timeouts", "is_known", "may_be_sent")

    def __init__(self, deadline: float, given: Mapping[str, Any], timeouts: dict[str, Any]) -> None:
        self._deadline = deadline
        self._given = given
        self._timeouts = timeouts
        self.is_known = False  # a transport of another kind tells nothing
        self.may_be_sent = False

    def note(self, event: str) -> None:
        """Look at an event of the trace: `connection.connect_tcp.started`, `http11.send_request_headers.started`."""
        self.is_known = True
        if event.endswith(".send_request_headers.started"):
            self.may_be_sent = True  # first, and then the time: whoever sees it unset later knows that nothing was sent
            self._cut("the time was over before the request was sent")
        elif event.endswith(".receive_response_headers.started"):
            self._cut("the time that was left ran out while the request was sent")

    def _cut(self, too_late: str) -> None:
        left = self._deadline - clock.now()
        if left <= 0:
            raise DeadlineExceeded(too_late)
        self._timeouts.update(_cut(self._given, left))


class Sending(Exchange[Any]):
    """A request of either library."""

    def __init__(self, request: Any, send: Any, options: Options) -> None:
        replayable = is_replayable(request.stream)
        super().__init__(options.rules, request.method, request.headers, replayable=replayable, host=request.url.host)
        self._request = request
        self._send = send
        self._propagation = options.propagation
        self._read_body = options.read_body
        self._vanishes = not replayable and "content-length" not in request.headers
        self._sources = [] if replayable else sources(request.stream)
        self._given_timeouts: Mapping[str, Any] = request.extensions.get("timeout") or {}
        self._timeouts: dict[str, Any] = {}  # those of the last attempt, shared with whoever reads the body
        self._progress: _Progress | None = None
        if (self._vanishes and request.stream in _used_up) or any(map(is_used_up, self._sources)):
            raise library_of(request).StreamConsumed()

    @property
    @override
    def why_not_again(self) -> str | None:
        """Why the request must not be sent again; it may where a timer cut off an attempt before it began to send."""
        progress = self._progress
        if progress is not None and progress.is_known and not progress.may_be_sent:
            return None
        return super().why_not_again

    def _prepared(self, ctx: Context) -> Any:
        """Return the request for one attempt. The client's own is left as it is."""
        request = self._request
        left = ctx.timeout()
        headers = self._propagation.headers_for(str(request.url), ctx)
        self.begin()
        self._note_sent()
        if left is None:
            self._progress = None
            return request
        self._timeouts = _cut(self._given_timeouts, left)
        self._progress = _Progress(ctx.deadline, self._given_timeouts, self._timeouts)
        prepared = copy.copy(request)  # leaves out what a pickle could not carry
        prepared.stream = request.stream
        prepared.extensions = {**request.extensions, "timeout": self._timeouts}
        prepared.extensions["trace"] = self._trace(self._progress, request.extensions.get("trace"))
        if headers:
            prepared.headers = type(request.headers)(request.headers)
            prepared.headers.update(headers)
        return prepared

    def _note_sent(self) -> None:
        if self._vanishes:
            _used_up.add(self._request.stream)
        for source in self._sources:
            note_sent(source)

    def _forget_sent(self) -> None:
        _used_up.discard(self._request.stream)
        for source in self._sources:
            forget_sent(source)

    def _forget_unless_begun(self) -> None:
        """Look, after an attempt that was cut off, whether it had begun to send."""
        progress = self._progress
        if progress is not None and progress.is_known and not progress.may_be_sent:
            self._forget_sent()

    def _cut_again(self, request: Any, ctx: Context) -> None:
        """Cut the timeouts of an attempt to what is left now; the client looks at them when it begins the body."""
        left = ctx.timeout()
        if left is not None:
            request.extensions["timeout"].update(_cut(self._given_timeouts, left))

    def _note(self, error: Exception, ctx: Context) -> None:
        """Note what the client raised; raise what it means, where its timeout was the end of our time."""
        timer = ctx._timer
        if timer is None or clock.now() < timer.deadline:  # later, it may be the last word of an attempt left behind
            sent = not isinstance(error, _NEVER_SENT)
            if not sent:
                self._forget_sent()
            self.failed(error, sent=sent)
        if isinstance(error, _TIMED_OUT) and is_over(ctx):
            raise DeadlineExceeded("the time that was left ran out while the server was asked") from error

    @abstractmethod
    def _trace(self, progress: _Progress, given: Any) -> Any:
        """Return the `trace` extension that tells of the progress, and does what the caller's own does."""

    # --- after it ---

    def with_limit(self, response: Any, body: type[Body] | type[AsyncBody]) -> Any:
        """Return a response whose body is read within its time."""
        if self.body_deadline == inf:
            self.restore_timeouts()
        elif not response.is_closed and not isinstance(response.stream, InMemory):
            response.stream = body(response.stream, self)
        return response

    def restore_timeouts(self) -> None:
        """Let the client have its own timeouts for the body: what was left of the attempt is no limit to it."""
        self._timeouts.update(_cut(self._given_timeouts, None))

    def begin_wait(self) -> None:
        """Look at the time before waiting for a piece of the body; raise if it is over."""
        left = self.body_deadline - clock.now()
        if left <= 0:
            raise self.body_is_late()
        self._timeouts.update(_cut(self._given_timeouts, left))  # the client looks at them when it begins the body


@final
class BlockingSending(Sending):
    """For a `Client`."""

    @override
    def _trace(self, progress: _Progress, given: Any) -> Any:
        def trace(event: str, info: Any) -> None:
            progress.note(event)
            if given is not None:
                given(event, info)

        return trace

    @override
    def __call__(self, ctx: Context) -> Any:
        request = self._prepared(ctx)
        try:
            response = self._send(request)
            if self._read_body and not response.is_closed and response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
                response = read(response, ctx, lambda: self._cut_again(request, ctx))
        except Exception as error:
            self._note(error, ctx)
            raise
        finally:
            self._forget_unless_begun()
        return self.received(response, response.status_code, response.headers, ctx)


@final
class AsyncSending(Sending):
    """For an `AsyncClient`."""

    def __init__(self, request: Any, transport: Any, options: Options) -> None:
        super().__init__(request, transport.handle_async_request, options)
        self._transport = transport

    @override
    def _trace(self, progress: _Progress, given: Any) -> Any:
        async def trace(event: str, info: Any) -> None:
            progress.note(event)
            if given is not None:
                await given(event, info)

        return trace

    @override
    async def __call__(self, ctx: Context) -> Any:
        request = self._prepared(ctx)
        try:
            response = await self._send(request)
            if self._read_body and not response.is_closed and response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
                response = await aread(response, ctx)
        except BaseException as error:
            await reclaim_places(self._transport)
            if isinstance(error, Exception):
                self._note(error, ctx)
            raise
        finally:
            self._forget_unless_begun()
        return self.received(response, response.status_code, response.headers, ctx)


def _cut(given: Mapping[str, Any], left: float | None) -> dict[str, Any]:
    """Return a client's timeouts, none longer than what is left; no limit becomes what is left."""
    limits = {name: given.get(name) for name in _TIMEOUTS}
    if left is None:
        return limits
    return {name: left if limit is None else min(limit, left) for name, limit in limits.items()}
