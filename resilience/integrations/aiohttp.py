"""aiohttp: a client middleware that sends every request of a session through a policy.

A middleware stands between `ClientSession.request` and the connection: it gets each request, and each hop of a
redirect, and returns a response of which the headers are there and the body is still to be read. So an attempt ends
with the headers; cookies, redirects, `raise_for_status` and the session's total timeout stay outside.

Two habits of aiohttp matter here. It sends an idempotent request once more by itself when the connection broke,
through all middlewares again, which would double every attempt: that second coming is recognised, and ended with
the failure of the first. And it sends a generator that was used up as an empty body: such a request is not repeated.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextvars import ContextVar
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias

import aiohttp
from aiohttp import ClientRequest, ClientResponse, hdrs, payload
from typing_extensions import override

from resilience import checks
from resilience.clock import clock
from resilience.context import Context
from resilience.errors import DeadlineExceeded
from resilience.integrations.http import (
    DEFAULT_RULES,
    IDEMPOTENT_METHODS,
    Exchange,
    NotRepeatable,
    PerHost,
    Rules,
    as_policies,
    as_rules,
    policy_for,
)
from resilience.integrations.http.bodies import forget_sent, is_used_up, note_sent
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

    :param policy: a policy, or what has one for each host (`resilience.integrations.http.standard()`). Shared by all
        sessions, and all middlewares, that it is given to.
    :param rules: which statuses are failures, and which requests may be sent again.
    :param propagate_to: hosts that are told how much time is left; nobody by default.
    :param read_body: whether an attempt ends with the whole body, which is in memory then, and not with the headers.
        So a body that breaks off, or takes too long, is a failure like any other. Not for streams.

    A status that says "not now" is a failure to the policy; where it is still the answer in the end, the session
    gets the response as usual. An attempt is cut off where the time of its context ends, with `DeadlineExceeded`.
    A body that is read after that has the same time (see `Rules`), and is not retried.

    >>> import aiohttp
    >>> from resilience import Retry
    >>> from resilience.integrations.aiohttp import resilience_middleware
    >>> async def main():
    ...     async with aiohttp.ClientSession(middlewares=[resilience_middleware(Retry(3))]) as session:
    ...         ...
    """
    policies, rules, propagation = as_policies(policy), as_rules(rules), Propagation.to(propagate_to)
    checks.flag("read_body", read_body)

    async def middleware(request: ClientRequest, handler: Handler) -> ClientResponse:
        _end_second_coming(request)
        if any(map(_is_used_up, _payloads(request.body))):
            raise NotRepeatable("the request was not sent: its body was used up before")
        exchange = _Exchange(request, _reading(handler) if read_body else handler, rules, propagation)
        try:
            response = await exchange.arun(policy_for(policies, str(request.url)))
        except Exception as error:
            _expect_second_coming(request, error)
            raise
        finally:
            exchange.let_go()
        return exchange.with_limit(_checked(response))

    return middleware


def _checked(response: object) -> ClientResponse:
    """Return what came out of the policy; refuse what aiohttp could not go on with."""
    if not isinstance(response, ClientResponse):
        raise TypeError(f"a policy answered with {response!r}; a Fallback of a session answers with a ClientResponse")
    return response


def _reading(handler: Handler) -> Handler:
    async def read(request: ClientRequest) -> ClientResponse:
        response = await handler(request)
        await response.read()  # closes the response where that fails; a websocket has nothing to read here
        return response

    return read


class _Exchange(Exchange[ClientResponse]):
    """One request, or one hop of a redirect."""

    def __init__(self, request: ClientRequest, handler: Handler, rules: Rules, propagation: Propagation) -> None:
        super().__init__(
            rules,
            request.method,
            request.headers,
            replayable=_is_replayable(request.body),
            host=request.url.host or "",
        )
        self._request = request
        self._handler = handler
        self._propagation = propagation
        self._was_sent = False

    @property
    @override
    def why_not_again(self) -> str | None:
        """Why the request must not be sent again: also where its session was closed, or its own time is over."""
        if (reason := super().why_not_again) is not None:
            return reason
        if self._request.session.closed:
            return "its session was closed"
        return "the total timeout of its session is over" if _has_run_out(self._request) else None

    @override
    async def __call__(self, ctx: Context) -> ClientResponse:
        left = ctx.timeout()
        request = self._request
        if request.session.closed:  # in the wait before this attempt
            raise RuntimeError("Session is closed")
        request.headers.update(self._propagation.headers_for(str(request.url), ctx))
        self.begin()
        if self._was_sent and hdrs.EXPECT in request.headers:
            request.update_expect_continue()  # what waited for the server's consent has had it, or was cut off
        self._was_sent = True
        for body in _payloads(request.body):
            note_sent(getattr(body, "_value", None))
        limit = asyncio.timeout(left)
        try:
            async with limit:
                response = await self._handler(request)
        except Exception as error:
            if limit.expired():
                raise DeadlineExceeded("the time that was left ran out while the server was asked") from error
            sent = not isinstance(error, _NEVER_SENT)
            if not sent:
                for body in _payloads(request.body):
                    forget_sent(getattr(body, "_value", None))
            self.failed(error, sent=sent)
            raise
        return self.received(response, response.status, response.headers, ctx)

    def let_go(self) -> None:
        """Forget the request, and its body: a connection that is kept remembers us, by the context it was made in."""
        del self._request, self._handler

    def with_limit(self, response: ClientResponse) -> ClientResponse:
        """Return a response of which the body fails where it has not been read in time."""
        if self.body_deadline == inf or response.content.at_eof():
            return response

        known = weakref.ref(response)  # who has closed it, and let it go, does not wait for the end of its time

        def end() -> None:
            response = known()
            if response is not None and not response.closed and response.content.exception() is None:
                response.content.set_exception(self.body_is_late())
                response.close()

        timer = asyncio.get_running_loop().call_later(max(0.0, self.body_deadline - clock.now()), end)
        response.content.on_eof(timer.cancel)
        if response.connection is not None:
            response.connection.add_callback(timer.cancel)  # it is given back, also of a body that nobody reads on
        return response


#: Raised before anything has been sent: no connection could be made, or got from the pool.
_NEVER_SENT: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)

#: Bodies that are in memory.
_IN_MEMORY: Final = (payload.BytesPayload, payload.BytesIOPayload)


def _is_replayable(body: object) -> bool:
    """Whether a body can be sent a second time: where it is in memory.

    A file is read in another thread, where a read that was cut off may still move the position under the next
    attempt; and an asynchronous generator is used up.
    """
    return all(not it or isinstance(it, _IN_MEMORY) for it in _payloads(body))


def _payloads(body: Any) -> Iterator[Any]:
    """Return the parts of a body, however deep they are."""
    if not isinstance(body, aiohttp.MultipartWriter):
        yield body
        return
    for part, _, _ in body:
        yield from _payloads(part)


def _is_used_up(body: Any) -> bool:
    """Whether a body was read to its end before aiohttp got it; what aiohttp itself has read, it winds back.

    A `StringIO` it reads at once, and keeps the text. Where that is empty, nobody can tell any more why.
    """
    if getattr(body, "consumed", False) or (isinstance(body, payload.StringIOPayload) and not body._value):
        return True
    return is_used_up(getattr(body, "_value", None), getattr(body, "_start_position", None))


def _has_run_out(request: ClientRequest) -> bool:
    """Whether aiohttp's total timeout is over, which is for all attempts and the body together."""
    try:
        request._timer.assert_timeout()
    except TimeoutError:
        return True
    return False


# --- aiohttp's own second try ----------------------------------------------------------------


class _Ended(NamedTuple):
    """A call of `ClientSession.request`, known by its timer, and what its request failed with."""

    timer: object
    request: ClientRequest
    error: Exception


#: What the last request of this task ended with, where aiohttp is about to send it again.
_ended: ContextVar[_Ended | None] = ContextVar("resilience.integrations.aiohttp.ended", default=None)


def _expect_second_coming(request: ClientRequest, error: Exception) -> None:
    """Remember a failure after which aiohttp sends the request again by itself, at once and in this task.

    Up to 3.12 also one whose body is used up, and newer versions do not: there it is remembered in vain.
    """
    if (
        isinstance(error, (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError))
        and not isinstance(error, _NEVER_SENT)
        and request.method in IDEMPOTENT_METHODS
        and getattr(request.session, "_retry_connection", True)
    ):
        _ended.set(_Ended(request._timer, request, error))


def _end_second_coming(request: ClientRequest) -> None:
    """Raise the failure again that this very call of `ClientSession.request` has already had.

    aiohttp makes its second try with a request that it makes anew. The same one comes from another middleware that
    tries again, which is its right.
    """
    ended = _ended.get()
    if ended is None:
        return
    _ended.set(None)
    try:
        if ended.timer is request._timer and ended.request is not request:
            raise ended.error
    finally:
        del ended
