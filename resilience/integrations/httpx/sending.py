"""A request of httpx or httpx2 on its way through a policy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from http import HTTPStatus
from math import inf
from types import ModuleType
from typing import Any, ClassVar, final

from typing_extensions import override

from resilience.clock import clock
from resilience.errors import DeadlineExceeded
from resilience.integrations.http.exchange import Attempt, BlockingExchange, Exchange, TaskExchange
from resilience.integrations.http.rules import NotRepeatable
from resilience.integrations.http.settings import Settings
from resilience.integrations.httpx.bodies import (
    AsyncLimitedStream,
    LimitedStream,
    OneShotStream,
    body_in,
    is_in_memory,
    with_body,
)
from resilience.integrations.httpx.libraries import classes
from resilience.integrations.httpx.pools import completed, reclaim_places

_NAMES = ("connect", "read", "write", "pool")

_PROXY_ERROR = classes("ProxyError")
_LOCAL_PROTOCOL_ERROR = classes("LocalProtocolError")
#: What it says of a connection of HTTP/2 that a server has ended before our request: in its reload, say.
_ENDED_BEFORE = "ConnectionInputs.SEND_HEADERS in state ConnectionState.CLOSED"


def _attempt_is_late() -> DeadlineExceeded:
    return DeadlineExceeded("the time that was left ran out while the server was asked")


@final
class _Timeouts(dict[str, Any]):
    """The timeouts of one attempt: the client's own, but none longer than what is left when it is read.

    They are for one wait each, and httpcore reads each as it begins that wait: the one before it, for a free
    connection, may have taken most of the time.

    :param given: the client's own.
    :param left: seconds from now until `deadline`.
    :param deadline: until when they are for; infinity for no limit.
    """

    __slots__ = ("_given", "deadline", "late")

    def __init__(self, given: Mapping[str, Any], left: float, deadline: float) -> None:
        self._given = given
        self.deadline: float = deadline
        #: Makes the error for a wait that begins after that.
        self.late: Callable[[], Exception] = _attempt_is_late
        for name in _NAMES:  # for a transport that takes them in another way
            limit = given.get(name)
            self[name] = left if limit is None or limit > left else limit

    @override
    def get(self, name: str, default: Any = None) -> Any:
        limit = self._given.get(name, default)
        if self.deadline == inf:
            return limit
        left = self.deadline - clock.now()
        if left <= 0:
            raise self.late()
        return left if limit is None or limit > left else limit


@final
class _Progress:
    """How far an attempt has come that must not be sent twice, as the client's own trace tells it.

    It answers what a timer cannot: whether the request was sent when it fired. And an attempt in a thread that was
    left behind while it was connecting does not begin to send, so that nothing is sent twice behind the caller's back.

    :param given: the caller's own trace, if any.
    """

    def __init__(self, deadline: float, given: Any) -> None:
        self._deadline = deadline
        self._given = given
        self.is_known = False  # a transport of another kind tells nothing
        self.may_be_sent = False

    def trace(self, event: str, info: Any) -> Any:
        """Note an event: `connection.connect_tcp.started`, `http11.send_request_headers.started`."""
        self.is_known = True
        if event.endswith(".send_request_headers.started"):
            self.may_be_sent = True  # first, and then the time: who sees it unset later knows that nothing was sent
            if clock.now() >= self._deadline:
                raise DeadlineExceeded("the time was over before the request was sent")
        return None if self._given is None else self._given(event, info)

    async def atrace(self, event: str, info: Any) -> None:
        """Do the same for an asynchronous client."""
        if (given := self.trace(event, info)) is not None:
            await given


class _Sending(Exchange):
    """A request of either library."""

    never_sent: ClassVar[tuple[type[Exception], ...]] = (
        ConnectionRefusedError,
        *(kind for name in ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError") for kind in classes(name)),
        *classes("UnsupportedProtocol"),
    )
    timed_out: ClassVar[tuple[type[Exception], ...]] = classes("TimeoutException")

    _timeouts: _Timeouts | None = None  # of the last attempt, where they are not the client's own
    _progress: _Progress | None = None

    def __init__(self, settings: Settings, request: Any, library: ModuleType, transport: Any) -> None:
        try:
            body = body_in(request.stream)
        except NotRepeatable as error:
            raise library.StreamConsumed from error
        super().__init__(settings, request.method, request.url, request.headers, body)
        if not body.can_be_sent_again:  # the client hands it to the next hop of a redirect
            request.stream = OneShotStream.of(request.stream)
        self.response_type: Any = library.Response
        self._request = request
        self._transport = transport

    def _prepared(self, attempt: Attempt) -> Any:
        """Return the request for one attempt. The client's own is left as it is."""
        request, ends_at = self._request, attempt.ctx.deadline
        self._timeouts = self._progress = None
        changes: dict[str, Any] = {}
        if attempt.left is not None and self._has_to_end_it(attempt):
            given = request.extensions.get("timeout") or {}
            self._timeouts = changes["timeout"] = _Timeouts(given, attempt.left, ends_at)
        if attempt.left is not None and self.why_not_once_sent is not None:
            self._progress = _Progress(ends_at, request.extensions.get("trace"))
            changes["trace"] = self._progress.atrace if self._in_tasks else self._progress.trace
        if not changes and not attempt.headers:
            return request
        prepared = object.__new__(type(request))
        prepared.__dict__ = {**vars(request), "extensions": {**request.extensions, **changes}}
        if attempt.headers:
            prepared.headers = type(request.headers)(request.headers)
            prepared.headers.update(attempt.headers)
        return prepared

    @abstractmethod
    def _has_to_end_it(self, attempt: Attempt) -> bool:
        """Whether it is for the client's timeouts to end an attempt in time."""

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
        return (
            self.settings.read_body
            and response.status_code != HTTPStatus.SWITCHING_PROTOCOLS
            and not is_in_memory(response)
        )

    @override
    def limit(self, response: Any) -> Any:
        deadline = self.body_deadline
        if deadline == inf:
            self._limit_waits(inf)  # what was left of the attempt is no limit to it
        elif not is_in_memory(response):
            response.stream = self._limited(response.stream, deadline, self.body_is_late)
        return response

    def _limit_waits(self, deadline: float, late: Callable[[], Exception] = _attempt_is_late) -> None:
        """Let the client wait for a body no longer than its own timeouts, and this deadline, say."""
        if self._timeouts is not None:
            self._timeouts.deadline, self._timeouts.late = deadline, late

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
        self._limit_waits(deadline, late)
        return LimitedStream(stream, deadline, late)


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
            await completed(response.aclose(), response.stream)

    @override
    def _release_request(self) -> None:
        super()._release_request()
        self._progress = None  # it has the caller's trace
        del self._request

    @override
    def _has_to_end_it(self, attempt: Attempt) -> bool:
        # Not at the instant at which a timer cancels: httpcore is cleaning up then, and would lose its connection.
        return not attempt.is_cut_off

    @override
    def _limited(self, stream: Any, deadline: float, late: Callable[[], Exception]) -> Any:
        self._limit_waits(inf)  # it is a timer that ends the body
        return AsyncLimitedStream(stream, deadline, late)
