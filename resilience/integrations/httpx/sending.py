"""The exchange of one request of httpx or httpx2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from math import inf
from types import ModuleType
from typing import Any, ClassVar, Final, final

from typing_extensions import override

from resilience.clock import MAX_CLIENT_TIMEOUT, clock
from resilience.context import Context, waits_until
from resilience.errors import DeadlineExceeded
from resilience.integrations.http.exchange import Exchange, attempt_is_late
from resilience.integrations.http.rules import NotRepeatable
from resilience.integrations.http.settings import Settings
from resilience.integrations.httpx.bodies import BYTES, AsyncLimitedStream, LimitedStream, OneShotStream, body_in
from resilience.integrations.httpx.libraries import classes
from resilience.integrations.httpx.pools import reclaim_slots

_PHASES = ("connect", "read", "write", "pool")

_LOCAL_PROTOCOL_ERROR = classes("LocalProtocolError")
#: The message for a request on an HTTP/2 connection that the server had closed before, for example in a reload.
_CLOSED_BEFORE = "ConnectionInputs.SEND_HEADERS in state ConnectionState.CLOSED"

#: The beginning of the message for a request on one that allows no more requests, as before hypercorn closes it.
_NO_STREAM = "Max outbound streams is"

_REFUSED_STREAM: Final = 7  # an error code of HTTP/2


@final
class _Timeouts(dict[str, Any]):
    """The timeouts of one attempt: those of the client, each shortened to the time left when it is read.

    Each limits one wait, and httpcore reads it when that wait begins. The wait before it, for a free connection, may
    have taken most of the time.

    :param given: the timeouts of the client.
    :param left: seconds from now until `deadline`.
    :param deadline: the instant at which all waits have to end; infinity for no limit.
    """

    __slots__ = ("_given", "deadline", "late")

    def __init__(self, given: Mapping[str, Any], left: float, deadline: float) -> None:
        self._given = given
        self.deadline: float = deadline
        #: Creates the error for a wait that begins after the deadline.
        self.late: Callable[[], Exception] = attempt_is_late
        for name in _PHASES:  # for a transport that does not read them with `get`
            limit = given.get(name)
            self[name] = left if limit is None or limit > left else limit

    @override
    def get(self, name: str, default: Any = None) -> Any:
        limit = self._given.get(name, default)
        if self.deadline == inf:
            return limit
        left = min(self.deadline - clock.now(), MAX_CLIENT_TIMEOUT)
        if left <= 0:
            raise self.late()
        return left if limit is None or limit > left else limit


@final
class _Progress:
    """The progress of an attempt that must not be sent twice, according to the client's own trace.

    It shows whether the request had been sent when a timer fired. It also stops an attempt in a thread that was
    abandoned while connecting from sending, so that the request is not sent twice.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self.is_known = False  # stays False if the transport does not call the trace
        self.may_be_sent = False
        self.is_over = False  # whether the attempt has ended

    def is_never_sent(self) -> bool:
        """Whether the attempt has not begun to send, and cannot any more."""
        is_over = self.is_over or clock.now() >= self._deadline  # asked first, as it may begin to send meanwhile
        return is_over and self.is_known and not self.may_be_sent

    def trace(self, given: Any, event: str, info: Any) -> Any:
        """Note an event: `connection.connect_tcp.started`, `http11.send_request_headers.started`.

        :param given: the caller's own trace, if any.
        """
        self.is_known = True
        if event.endswith(".send_request_headers.started"):
            self.may_be_sent = True  # before the time is checked: if it is not set after the deadline, nothing was sent
            if clock.now() >= self._deadline:
                raise DeadlineExceeded("the time was over before the request was sent")
        return None if given is None else given(event, info)

    async def atrace(self, given: Any, event: str, info: Any) -> None:
        if (noted := self.trace(given, event, info)) is not None:
            await noted


@final
class Sending(Exchange):
    """The exchange of one request of a `Client`, or of an `AsyncClient` if it is `in_tasks`."""

    status_name = "status_code"
    never_sent: ClassVar[tuple[type[Exception], ...]] = (
        ConnectionRefusedError,
        *classes("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol"),
    )
    timed_out: ClassVar[tuple[type[Exception], ...]] = classes("TimeoutException")

    _progress: _Progress | None = None  # of the last attempt

    def __init__(self, settings: Settings, request: Any, library: ModuleType, transport: Any, in_tasks: bool) -> None:
        try:
            body = body_in(request.stream)
        except NotRepeatable as error:
            raise library.StreamConsumed from error
        super().__init__(settings, request.method, str(request.url), request.headers, body)
        if not body.can_be_sent_again:  # the client passes the same stream to the next hop of a redirect
            request.stream = OneShotStream.of(request.stream)
        self.response_type: Any = library.Response
        self.in_tasks: bool = in_tasks
        self._library = library
        self._request = request
        self._transport = transport

    @override
    async def send(self, ctx: Context, left: float | None, headers: Mapping[str, str]) -> Any:
        prepared, timeouts = self._prepared(ctx, left, headers)
        try:
            if self.in_tasks:
                response = await self._transport.handle_async_request(prepared)
            else:
                response = self._transport.handle_request(prepared)
            if response.is_closed or isinstance(response.stream, BYTES):  # it is in memory
                return response
            # The response to a change of protocols has no body to wait for.
            reads = self.settings.read_body and response.status_code != HTTPStatus.SWITCHING_PROTOCOLS
            deadline, late = self.limit_of_body(ctx, in_attempt=reads)
            if timeouts is not None:  # which have had the deadline of the attempt
                timeouts.deadline, timeouts.late = inf if self.in_tasks else deadline, late
            response.stream = (AsyncLimitedStream if self.in_tasks else LimitedStream)(response.stream, deadline, late)
            return await self._with_body(response) if reads else response
        except BaseException:
            if self.in_tasks:
                if self._progress is not None:
                    self._progress.is_over = True
                await reclaim_slots(self._transport)
            raise

    def _prepared(self, ctx: Context, left: float | None, headers: Mapping[str, str]) -> tuple[Any, _Timeouts | None]:
        """Return the request for one attempt, and the timeouts that replace those of the client, if any do.

        The client's own request is not changed.
        """
        request, timeouts = self._request, None
        self._progress = None
        changes: dict[str, Any] = {}
        # A thread needs them even if a timer abandons it, so that it ends. A task must not have them beside a timer: a
        # timeout while httpcore cleans up after the cancellation would lose the connection.
        if left is not None and (not self.in_tasks or waits_until(ctx) < inf):
            given = request.extensions.get("timeout") or {}
            timeouts = changes["timeout"] = _Timeouts(given, left, ctx.deadline)
        if left is not None and self.why_not_once_sent is not None:
            self._progress = progress = _Progress(ctx.deadline)
            trace = progress.atrace if self.in_tasks else progress.trace
            changes["trace"] = partial(trace, request.extensions.get("trace"))
        if not changes and not headers:
            return request, timeouts
        prepared = object.__new__(type(request))  # `copy.copy` would drop the stream
        prepared.__dict__ = {**vars(request), "extensions": {**request.extensions, **changes}}
        if headers:
            prepared.headers = type(request.headers)(request.headers)
            prepared.headers.update(headers)
        return prepared, timeouts

    async def _with_body(self, response: Any) -> Any:
        """Return a copy of a response whose body, as it came over the wire, is in memory.

        The client still has to read the response; it would treat the original as one that its user has consumed.
        """
        try:
            pieces = [it async for it in response.stream] if self.in_tasks else list(response.stream)
        finally:
            await response.aclose() if self.in_tasks else response.close()
        fields = {"headers": response.headers, "extensions": response.extensions}
        stream = self._library.ByteStream(b"".join(pieces))
        return type(response)(response.status_code, stream=stream, **fields)

    @override
    def was_never_sent(self) -> bool:
        return self._progress is not None and self._progress.is_never_sent()

    @override
    def may_have_been_sent(self, error: Exception) -> bool:
        return super().may_have_been_sent(error) and not (_found_closed_connection(error) or _was_not_processed(error))


def _found_closed_connection(error: Exception) -> bool:
    """Whether an HTTP/2 connection was closed, or full, before the headers of the request were sent."""
    if isinstance(error, _LOCAL_PROTOCOL_ERROR):
        return any(it in str(error) for it in (_CLOSED_BEFORE, _NO_STREAM))
    reason = getattr(error.__cause__, "__context__", None)  # if another request has seen the end, httpcore tells that
    return type(reason).__module__.startswith("h2.") and _CLOSED_BEFORE in str(reason)


def _was_not_processed(error: Exception) -> bool:
    """Whether a server says so (RFC 9113, 8.7): it has refused the stream, or left and processed no stream.

    If it has processed streams, but not this one, httpcore sends the request again.
    """
    event: Any = next(iter(getattr(error.__cause__, "args", ())), None)  # of h2
    if type(event).__name__ == "StreamReset":
        return bool(event.error_code == _REFUSED_STREAM)
    return getattr(event, "last_stream_id", None) == 0
