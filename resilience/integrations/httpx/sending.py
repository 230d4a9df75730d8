"""A request of httpx or httpx2 on its way through a policy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from math import inf
from typing import Any, ClassVar, final

from typing_extensions import override

from resilience.clock import clock
from resilience.errors import DeadlineExceeded
from resilience.integrations.http.exchange import Attempt, BlockingExchange, Exchange, Settings, TaskExchange
from resilience.integrations.http.rules import NotRepeatable
from resilience.integrations.httpx.bodies import (
    AsyncLimitedStream,
    LimitedStream,
    OnceStream,
    body_in,
    is_in_memory,
    with_body,
)
from resilience.integrations.httpx.libraries import classes, library_of
from resilience.integrations.httpx.pools import reclaim_places

_TIMEOUTS = ("connect", "read", "write", "pool")
_PROXY_ERROR = classes("ProxyError")
_LOCAL_PROTOCOL_ERROR = classes("LocalProtocolError")
#: What it says of a connection of HTTP/2 that a server has ended before our request: in its reload, say.
_ENDED_BEFORE = "ConnectionInputs.SEND_HEADERS in state ConnectionState.CLOSED"


@final
class _Progress:
    """How far an attempt that has a deadline has come, as the client's own trace tells it.

    It answers what a timer cannot: whether the request was sent when it fired. And an attempt in a thread that was
    left behind while it was connecting does not begin to send, so that nothing is sent twice behind the caller's back.
    Before each of the long waits it has the client's timeouts cut to what is left then: they are for one wait each, and
    the one for a free connection may have taken most of the time.

    :param given: the caller's own trace, if any.
    :param cut: cuts the timeouts to so many seconds.
    """

    def __init__(self, deadline: float, given: Any, cut: Callable[[float], None]) -> None:
        self._deadline = deadline
        self._given = given
        self._cut = cut
        self.is_known = False  # a transport of another kind tells nothing
        self.may_be_sent = False

    def trace(self, event: str, info: Any) -> Any:
        """Note an event: `connection.connect_tcp.started`, `http11.send_request_headers.started`."""
        self.is_known = True
        if event.endswith(".send_request_headers.started"):
            self.may_be_sent = True  # first, and then the time: who sees it unset later knows that nothing was sent
            self._look("the time was over before the request was sent")
        elif event.endswith(".receive_response_headers.started"):
            self._look("the time that was left ran out while the request was sent")
        return None if self._given is None else self._given(event, info)

    async def atrace(self, event: str, info: Any) -> None:
        """Do the same for an asynchronous client."""
        if (given := self.trace(event, info)) is not None:
            await given

    def _look(self, too_late: str) -> None:
        left = self._deadline - clock.now()
        if left <= 0:
            raise DeadlineExceeded(too_late)
        self._cut(left)


class _Sending(Exchange):
    """A request of either library."""

    never_sent: ClassVar[tuple[type[Exception], ...]] = (
        ConnectionRefusedError,
        *(kind for name in ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError") for kind in classes(name)),
        *classes("UnsupportedProtocol"),
    )
    timed_out: ClassVar[tuple[type[Exception], ...]] = classes("TimeoutException")

    def __init__(self, settings: Settings, request: Any, transport: Any) -> None:
        library = library_of(request)
        try:
            body = body_in(request.stream)
        except NotRepeatable as error:
            raise library.StreamConsumed from error
        super().__init__(settings, request.method, str(request.url), request.headers, body)
        if not body.can_be_sent_again:  # the client hands it to the next hop of a redirect
            request.stream = OnceStream.of(request.stream)
        self.response_type: Any = library.Response
        self._request = request
        self._transport = transport
        self._given: Mapping[str, Any] = request.extensions.get("timeout") or {}
        self._timeouts: dict[str, Any] | None = None  # of the last attempt, where they are not the client's own
        self._progress: _Progress | None = None

    def _prepared(self, attempt: Attempt) -> Any:
        """Return the request for one attempt. The client's own is left as it is."""
        request = self._request
        self._progress = self._timeouts = None
        changes: dict[str, Any] = {}
        if attempt.left is not None:
            if is_ours := self._has_to_end_it(attempt):
                self._timeouts = changes["timeout"] = {}
                self._cut(attempt.left)
            if is_ours or self.why_not_once_sent() is not None:
                self._progress = _Progress(attempt.ctx.deadline, request.extensions.get("trace"), self._cut)
                changes["trace"] = self._progress.atrace if self._in_tasks else self._progress.trace
        if not changes and not attempt.headers:
            return request
        prepared = object.__new__(type(request))
        vars(prepared).update(vars(request), extensions={**request.extensions, **changes})
        if attempt.headers:
            prepared.headers = type(request.headers)(request.headers)
            prepared.headers.update(attempt.headers)
        return prepared

    @abstractmethod
    def _has_to_end_it(self, attempt: Attempt) -> bool:
        """Whether it is for the client's timeouts to end an attempt in time."""

    def _cut(self, left: float) -> None:
        """Cut the client's timeouts, which it looks at when it begins a wait; no limit becomes what is left."""
        if self._timeouts is not None:
            for name in _TIMEOUTS:
                limit = self._given.get(name)
                self._timeouts[name] = left if left < inf and (limit is None or limit > left) else limit

    @override
    def was_never_sent(self) -> bool:
        progress = self._progress
        return progress is not None and progress.is_known and not progress.may_be_sent

    @override
    def may_have_been_sent(self, error: Exception) -> bool:
        if isinstance(error, _LOCAL_PROTOCOL_ERROR) and _ENDED_BEFORE in str(error):
            return False
        return super().may_have_been_sent(error)

    @override
    def proxy_refusal(self, error: Exception) -> int | None:
        status = str(error)[:3] if isinstance(error, _PROXY_ERROR) else ""
        return int(status) if status.isdigit() else None

    @override
    def status_of(self, response: Any) -> tuple[int, Mapping[str, str]]:
        return response.status_code, response.headers

    def _is_to_be_read(self, response: Any) -> bool:
        """Whether the attempt ends with the body. What follows a change of protocols is none."""
        is_body = response.status_code != HTTPStatus.SWITCHING_PROTOCOLS and not is_in_memory(response)
        return self.settings.read_body and is_body

    @override
    def limit(self, response: Any) -> Any:
        deadline = self.body_deadline
        if deadline == inf:
            self._cut(inf)  # what was left of the attempt is no limit to it
        elif not is_in_memory(response):
            response.stream = self._limited(response.stream, deadline, self.body_is_late)
        return response

    @abstractmethod
    def _limited(self, stream: Any, deadline: float, late: Callable[[], Exception]) -> Any:
        """Return the body of a response, to be read by `deadline`."""


@final
class BlockingSending(_Sending, BlockingExchange):
    """For a `Client`."""

    @override
    def send(self, attempt: Attempt) -> Any:
        response = self._transport.handle_request(self._prepared(attempt))
        if not self._is_to_be_read(response):
            return response
        try:
            return with_body(response, b"".join(self._limited(response.stream, attempt.ctx.deadline, _attempt_is_late)))
        finally:
            response.close()

    @override
    def _has_to_end_it(self, attempt: Attempt) -> bool:
        return True  # also where a timer walks away: so the thread that is left behind comes to its end

    @override
    def _limited(self, stream: Any, deadline: float, late: Callable[[], Exception]) -> Any:
        return LimitedStream(stream, partial(self._begin_wait, deadline, late))

    def _begin_wait(self, deadline: float, late: Callable[[], Exception]) -> None:
        left = deadline - clock.now()
        if left <= 0:
            raise late()
        self._cut(left)


@final
class AsyncSending(_Sending, TaskExchange):
    """For an `AsyncClient`."""

    @override
    async def send(self, attempt: Attempt) -> Any:
        try:
            response = await self._transport.handle_async_request(self._prepared(attempt))
            return await self._read(response, attempt) if self._is_to_be_read(response) else response
        except BaseException:
            await reclaim_places(self._transport)
            raise

    async def _read(self, response: Any, attempt: Attempt) -> Any:
        stream = response.stream
        if attempt.left is not None and not attempt.is_cut_off:
            stream = self._limited(stream, attempt.ctx.deadline, _attempt_is_late)
        try:
            return with_body(response, b"".join([piece async for piece in stream]))
        finally:
            await response.aclose()

    @override
    def _let_go(self) -> None:
        super()._let_go()
        self._progress = None  # it has the caller's trace
        del self._request

    @override
    def _has_to_end_it(self, attempt: Attempt) -> bool:
        # Not at the instant at which a timer cancels: httpcore is cleaning up then, and would lose its connection.
        return not attempt.is_cut_off

    @override
    def _limited(self, stream: Any, deadline: float, late: Callable[[], Exception]) -> Any:
        self._cut(inf)  # it is a timer that ends the body
        return AsyncLimitedStream(stream, deadline, late)


def _attempt_is_late() -> DeadlineExceeded:
    return DeadlineExceeded("the time that was left ran out while the body was read")
