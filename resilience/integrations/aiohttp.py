"""aiohttp: a client middleware that sends every request of a session through a policy.

A middleware runs between `ClientSession.request` and the connection: it receives each request, and each hop of a
redirect, and returns a response whose headers have arrived and whose body has not been read yet. So an attempt ends
with the headers; cookies, redirects, `raise_for_status` and the session's total timeout are handled outside it.

Two habits of aiohttp matter here. When a connection breaks, it sends an idempotent request a second time, through
all middlewares, which would double every attempt: the middleware recognises the second try, and ends it with the
failure of the first. And it sends a consumed generator as an empty body: such a request is not repeated.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from math import inf
from typing import Any, TypeAlias

from resilience.integrations._extras import needed_by

with needed_by("aiohttp"):
    import aiohttp
    from aiohttp import ClientRequest, ClientResponse, payload

from typing_extensions import override

from resilience.clock import clock
from resilience.context import Context, waits_until
from resilience.integrations.http import DEFAULT_RULES, IDEMPOTENT_METHODS, NotRepeatable, PerHost, Rules
from resilience.integrations.http.bodies import IN_MEMORY, Body
from resilience.integrations.http.exchange import Exchange
from resilience.integrations.http.settings import Settings
from resilience.integrations.wire import Propagation
from resilience.policy import Policy

__all__ = ["resilience_middleware"]

Handler: TypeAlias = Callable[[ClientRequest], Awaitable[ClientResponse]]
Middleware: TypeAlias = Callable[[ClientRequest, Handler], Awaitable[ClientResponse]]


def resilience_middleware(
    policy: Policy[Any] | PerHost,
    *,
    rules: Rules = DEFAULT_RULES,
    propagate_to: Propagation | Iterable[str] = (),
    read_body: bool = False,
) -> Middleware:
    """Return a middleware that sends requests through a policy, for a session or for a single request.

    :param policy: a policy, or one for each host (`resilience.integrations.http.standard()`, `PerHost`). All sessions
        and middlewares that use it share its state.
    :param rules: which statuses are failures, and which requests may be sent again.
    :param propagate_to: hosts that receive the time left; none by default.
    :param read_body: whether an attempt includes the whole body, read into memory, instead of ending with the headers.
        Then a body that breaks off, or takes too long, is a failure like any other. Not for streams.

    A status that means "not now" is a failure for the policy; if the last attempt ends with it, the session gets the
    response as usual. An attempt is cut off at its deadline, with `DeadlineExceeded`. A body that is read after the
    attempt has the same deadline (see `Rules`), and is not retried.

    >>> import aiohttp
    >>> from resilience import Retry
    >>> from resilience.integrations.aiohttp import resilience_middleware
    >>> async def main():
    ...     async with aiohttp.ClientSession(middlewares=[resilience_middleware(Retry(3))]) as session:
    ...         ...
    """
    settings = Settings(policy, rules, propagate_to, read_body)

    async def middleware(request: ClientRequest, handler: Handler) -> ClientResponse:
        _end_second_try(request)
        sending = _Sending(settings, request, handler)
        try:
            response: ClientResponse = await sending.run()
        except Exception as error:
            _expect_second_try(request, error)
            raise
        return response

    return middleware


class _Sending(Exchange):
    response_type = ClientResponse
    never_sent = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
    in_tasks = True
    reads_in_threads = True

    def __init__(self, settings: Settings, request: ClientRequest, handler: Handler) -> None:
        super().__init__(settings, request.method, str(request.url), request.headers, _body_in(request.body))
        self._request = request, handler

    @property
    @override
    def why_not_again(self) -> str | None:
        if (reason := super().why_not_again) is not None:
            return reason
        request, _ = self._request
        if request.session.closed:
            return "its session was closed"
        try:
            request._timer.assert_timeout()
        except TimeoutError:
            return "the total timeout of its session is over"  # which covers all attempts and the body
        return None

    @override
    def count_as_sent(self, ctx: Context, headers: Mapping[str, str]) -> Mapping[str, str]:
        if not self._is_over and self._request[0].session.closed:  # closed during the wait before this attempt
            raise RuntimeError("Session is closed")
        return super().count_as_sent(ctx, headers)

    @override
    async def send(self, ctx: Context, left: float | None, headers: Mapping[str, str]) -> ClientResponse:
        request, _ = self._request
        if headers:
            request.headers.update(headers)
        request.update_expect_continue()  # each attempt needs a new future that waits for `100 Continue`
        if waits_until(ctx) == inf:  # a timer cuts it off, if there is a deadline
            return await self._response(ctx)
        async with asyncio.timeout(left):
            return await self._response(ctx)

    async def _response(self, ctx: Context) -> ClientResponse:
        request, handler = self._request
        response: ClientResponse = await handler(request)
        if self.settings.read_body:
            await response.read()  # closes the response if reading fails; a websocket has no body to read
        _limit_body(response, *self.limit_of_body(ctx, in_attempt=False))
        return response

    @override
    def was_discarded(self, response: ClientResponse) -> bool:
        return type(response.content.exception()) is aiohttp.ClientConnectionError


def _limit_body(response: ClientResponse, deadline: float, late: Callable[[], Exception]) -> None:
    """End the body of a response with the error of `late` if it has not arrived by a deadline."""
    connection = response.connection
    if deadline == inf or response.content.is_eof() or connection is None:
        return  # the whole body has arrived

    def end() -> None:
        if response.content.exception() is None:
            response.content.set_exception(late())
            response.close()

    # The context is empty, because a loop keeps a cancelled handle until its time has come.
    timer = asyncio.get_running_loop().call_later(max(0.0, deadline - clock.now()), end, context=contextvars.Context())
    response.content.on_eof(timer.cancel)
    connection.add_callback(timer.cancel)  # called when it is released, even if the body is not read


#: Bodies in memory, which aiohttp sends again from their position at the start.
_IN_MEMORY = (payload.BytesPayload, payload.BytesIOPayload)


def _body_in(body: Any) -> Body:
    """Return the body that aiohttp reads while it sends this.

    :raises NotRepeatable: for a body that another request has consumed, and that cannot be sent again.
    """
    if not body or type(body) is payload.BytesPayload:
        return IN_MEMORY
    parts = [it for it in _payloads(body) if it and not isinstance(it, _IN_MEMORY)]
    if any(it.consumed for it in parts):
        raise NotRepeatable("the request was not sent: its body was used up before, and can be sent only once")
    is_known = all(isinstance(it, payload.IOBasePayload) for it in parts)
    return Body(*[it._value for it in parts], once=not is_known)


def _payloads(body: Any) -> Iterator[Any]:
    """Return the parts of a body, at any depth."""
    if not isinstance(body, aiohttp.MultipartWriter):
        yield body
        return
    for part, _, _ in body:
        yield from _payloads(part)


# --- aiohttp's own second try ----------------------------------------------------------------

#: The failure of this task's last request, if aiohttp is about to send it again: the timer, which identifies the call
#: of `ClientSession.request`, the request and the error.
_ended: ContextVar[tuple[object, ClientRequest, Exception] | None] = ContextVar(f"{__name__}.ended", default=None)


def _expect_second_try(request: ClientRequest, error: Exception) -> None:
    """Remember a failure after which aiohttp itself sends the request again, immediately and in this task.

    Up to 3.12, aiohttp does so even if the body is consumed. Newer versions do not, so the failure is never read.
    """
    if (
        isinstance(error, (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError))
        and not isinstance(error, _Sending.never_sent)
        and request.method in IDEMPOTENT_METHODS
        and request.session._retry_connection
    ):
        _ended.set((request._timer, request, error))


def _end_second_try(request: ClientRequest) -> None:
    """Raise the failure of the first try, if this is the second try of a call of `ClientSession.request`.

    aiohttp creates a new request for its second try. The same request comes from another middleware that retries,
    which is allowed.
    """
    if (ended := _ended.get()) is None:
        return
    _ended.set(None)
    timer, first, error = ended
    try:
        if timer is request._timer and first is not request:
            raise error
    finally:
        del ended, first, error
