"""Transports for httpx and for httpx2, its continuation: every request of a client runs through a policy.

    client = httpx.Client(transport=ResilienceTransport(Policy.wrap(Timeout(8), Retry(3))))

A client calls its transport once for each request on the wire, a redirect being another one. So `get`, `stream`,
`send`, auth and cookies are what they were; what happens in here happens between the client and the network.

One module for both libraries: they have the same classes under two names, and the request says whose it is.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from math import inf
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self, final

from typing_extensions import override

from resilience.clock import clock
from resilience.context import Context
from resilience.errors import DeadlineExceeded
from resilience.integrations.http import Exchange, PerHost, Rules, as_policies, as_rules, policy_for
from resilience.integrations.wire import Propagation
from resilience.policy import Policy
from resilience.runtimes.tasks import timer_until

__all__ = ["AsyncResilienceTransport", "ResilienceTransport"]


def _installed() -> tuple[ModuleType, ...]:
    found: list[ModuleType] = []
    try:
        import httpx

        found.append(httpx)
    except ModuleNotFoundError:
        pass
    try:
        import httpx2

        found.append(httpx2)
    except ModuleNotFoundError:
        pass
    if not found:
        raise ModuleNotFoundError("this module needs httpx or httpx2: pip install 'resilience-pipeline[httpx]'")
    return tuple(found)


_LIBRARIES = _installed()


def _classes(name: str) -> tuple[Any, ...]:
    return tuple(getattr(library, name) for library in _LIBRARIES)


if TYPE_CHECKING:
    import httpx
    import httpx2

    class _Transport(httpx.BaseTransport, httpx2.BaseTransport):
        def handle_request(self, request: Any) -> Any: ...

    class _AsyncTransport(httpx.AsyncBaseTransport, httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: Any) -> Any: ...

    class _Stream(httpx.SyncByteStream, httpx2.SyncByteStream): ...

    class _AsyncStream(httpx.AsyncByteStream, httpx2.AsyncByteStream): ...
else:
    _Transport = type("_Transport", _classes("BaseTransport"), {})
    _AsyncTransport = type("_AsyncTransport", _classes("AsyncBaseTransport"), {})
    _Stream = type("_Stream", _classes("SyncByteStream"), {})
    _AsyncStream = type("_AsyncStream", _classes("AsyncByteStream"), {})

#: What is raised before anything has reached the server.
_NEVER_SENT: tuple[type[Exception], ...] = (
    ConnectionRefusedError,
    *_classes("ConnectError"),
    *_classes("ConnectTimeout"),
    *_classes("PoolTimeout"),
    *_classes("ProxyError"),
    *_classes("UnsupportedProtocol"),
)

_TIMED_OUT: tuple[type[Exception], ...] = _classes("TimeoutException")

_DEFAULT_RULES = Rules()
_TIMEOUTS = ("connect", "read", "write", "pool")

#: Bodies of unknown length that have been sent and cannot be produced again. A client that follows a redirect, or
#: answers a challenge, sends the same stream in another request, and of an iterator that is used up nothing arrives.
_used_up: weakref.WeakSet[Any] = weakref.WeakSet()


@final
class ResilienceTransport(_Transport):
    """A transport that runs every request of a `Client` through a policy.

    :param policy: a policy, or what has one for each host (`resilience.integrations.http.standard()`).
    :param transport: the transport that sends. By default the `HTTPTransport` of the client's library. A client that is
        given a transport leaves its own network options unused: `verify`, `cert`, `http2`, `limits`, `proxy` and
        the proxies of the environment are to be given to this one.
    :param rules: which responses are failures, and which requests may be sent again.
    :param propagate_to: hosts that are told how much time is left, or a `wire.Propagation`. Nobody by default.

    For each attempt, the client's own timeouts (connect, read, write, pool) are cut to what is left of the deadline.
    Reading the body is outside of the policy: it is not tried again. It is limited by the deadline of the attempt
    that brought it, unless `rules` says otherwise.

    What comes out is what the transport raised last, or an error of the policies (`CircuitOpen`, `TimeoutExceeded`),
    which is no `httpx.HTTPError`. A response whose status is a failure to the policies comes out as a response.

    >>> import httpx
    >>> from resilience import Retry
    >>> answers = iter([503, 200])
    >>> server = httpx.MockTransport(lambda request: httpx.Response(next(answers)))
    >>> with httpx.Client(transport=ResilienceTransport(Retry(backoff=[0]), server)) as client:
    ...     client.get("https://example.org/")
    <Response [200 OK]>
    """

    def __init__(
        self,
        policy: Policy[Any] | PerHost,
        transport: httpx.BaseTransport | httpx2.BaseTransport | None = None,
        *,
        rules: Rules = _DEFAULT_RULES,
        propagate_to: Propagation | Iterable[str] = (),
    ) -> None:
        self._policies = as_policies(policy)
        self._rules = as_rules(rules)
        self._propagation = Propagation.to(propagate_to)
        self._inner = _Inner("HTTPTransport", transport)

    @override
    def handle_request(self, request: Any) -> Any:
        """Send a request, as often as the policy sees fit. The client calls this."""
        library = _library_of(request)
        exchange = _Exchange(request, self._inner.of(library).handle_request, self._rules, self._propagation)
        response = exchange.run(policy_for(self._policies, str(request.url)))
        return _with_limit(_checked_response(response, library), exchange, _Body)

    @override
    def close(self) -> None:
        """Close the transport inside."""
        for transport in self._inner.all():
            transport.close()

    @override
    def __enter__(self) -> Self:
        for transport in self._inner.all():
            transport.__enter__()
        return self

    @override
    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        for transport in self._inner.all():
            transport.__exit__(exc_type, exc_value, traceback)


@final
class AsyncResilienceTransport(_AsyncTransport):
    """The same for an `AsyncClient`, under asyncio and trio. See `ResilienceTransport`."""

    def __init__(
        self,
        policy: Policy[Any] | PerHost,
        transport: httpx.AsyncBaseTransport | httpx2.AsyncBaseTransport | None = None,
        *,
        rules: Rules = _DEFAULT_RULES,
        propagate_to: Propagation | Iterable[str] = (),
    ) -> None:
        self._policies = as_policies(policy)
        self._rules = as_rules(rules)
        self._propagation = Propagation.to(propagate_to)
        self._inner = _Inner("AsyncHTTPTransport", transport)

    @override
    async def handle_async_request(self, request: Any) -> Any:
        """Send a request, as often as the policy sees fit. The client calls this."""
        library = _library_of(request)
        exchange = _AsyncExchange(request, self._inner.of(library).handle_async_request, self._rules, self._propagation)
        response = await exchange.arun(policy_for(self._policies, str(request.url)))
        return _with_limit(_checked_response(response, library), exchange, _AsyncBody)

    @override
    async def aclose(self) -> None:
        """Close the transport inside."""
        for transport in self._inner.all():
            await transport.aclose()

    @override
    async def __aenter__(self) -> Self:
        for transport in self._inner.all():
            await transport.__aenter__()
        return self

    @override
    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        for transport in self._inner.all():
            await transport.__aexit__(exc_type, exc_value, traceback)


@final
class _Inner:
    """The transport that sends: the one that was given, or one for each library, made with its first request."""

    def __init__(self, kind: str, given: Any) -> None:
        method = "handle_request" if kind == "HTTPTransport" else "handle_async_request"
        if given is not None and not callable(getattr(given, method, None)):
            raise TypeError(f"transport must have a method {method}, as httpx.{kind} has; {given!r} has not")
        self._kind = kind
        self._given = given
        self._made: dict[str, Any] = {}
        self._lock = threading.Lock()

    def of(self, library: ModuleType) -> Any:
        """Return the transport for a request of this library."""
        if self._given is not None:
            return self._given
        with self._lock:
            if library.__name__ not in self._made:
                self._made[library.__name__] = getattr(library, self._kind)()
            return self._made[library.__name__]

    def all(self) -> list[Any]:
        """Return every transport there is."""
        with self._lock:
            return [*self._made.values()] if self._given is None else [self._given]


def _library_of(request: Any) -> ModuleType:
    for library in _LIBRARIES:
        if isinstance(request, library.Request):
            return library
    raise TypeError(f"a request of httpx or httpx2 is needed, not {request!r}")


def _checked_response(response: Any, library: ModuleType) -> Any:
    """Return what came out of the policy; refuse what a client could not return."""
    if not isinstance(response, library.Response):
        raise TypeError(f"a policy answered with {response!r}; a Fallback of a client answers with a Response")
    return response


# --- sending ---------------------------------------------------------------------------------


class _Sending(Exchange[Any]):
    """A request of either library."""

    def __init__(self, request: Any, send: Any, rules: Rules, propagation: Propagation) -> None:
        replayable = _replays(request.stream)
        super().__init__(rules, request.method, request.headers, replayable=replayable, host=request.url.host)
        self._request = request
        self._send = send
        self._propagation = propagation
        self._vanishes = not replayable and "content-length" not in request.headers
        self.given_timeouts: Mapping[str, Any] = request.extensions.get("timeout") or {}
        self.timeouts: dict[str, Any] = {}  # those of the last attempt, shared with whoever reads the body

    def _prepared(self, ctx: Context) -> Any:
        """Return the request for one attempt. The client's own is left as it is."""
        request = self._request
        left = ctx.timeout()
        headers = self._propagation.headers_for(str(request.url), ctx)
        if self._vanishes and request.stream in _used_up:
            raise _library_of(request).StreamConsumed()
        self.begin()
        if self._vanishes:
            _used_up.add(request.stream)
        if left is None:
            return request
        self.timeouts = _cut(self.given_timeouts, left)
        prepared = copy.copy(request)  # leaves out what a pickle could not carry
        prepared.stream = request.stream
        prepared.extensions = {**request.extensions, "timeout": self.timeouts}
        if headers:
            prepared.headers = type(request.headers)(request.headers)
            prepared.headers.update(headers)
        return prepared

    def cut_body(self) -> None:
        """Look at the time before a wait for a piece of the body; raise if it is over."""
        left = self.body_deadline - clock.now()
        if left <= 0:
            raise self.body_is_late()
        self.timeouts.update(_cut(self.given_timeouts, left))  # read by the client when it begins the body

    def _note(self, error: Exception, ctx: Context) -> None:
        """Note what the client raised; raise what it means, where its timeout was the end of our time."""
        sent = not isinstance(error, _NEVER_SENT)
        if not sent:
            _used_up.discard(self._request.stream)
        self.failed(error, sent=sent)
        if isinstance(error, _TIMED_OUT) and ctx.expired:
            raise DeadlineExceeded("the time that was left ran out while the server was asked") from error


@final
class _Exchange(_Sending):
    @override
    def __call__(self, ctx: Context) -> Any:
        request = self._prepared(ctx)
        try:
            response = self._send(request)
        except Exception as error:
            self._note(error, ctx)
            raise
        return self.received(response, response.status_code, response.headers, ctx)


@final
class _AsyncExchange(_Sending):
    @override
    async def __call__(self, ctx: Context) -> Any:
        request = self._prepared(ctx)
        try:
            response = await self._send(request)
        except Exception as error:
            self._note(error, ctx)
            raise
        return self.received(response, response.status_code, response.headers, ctx)


def _cut(given: Mapping[str, Any], left: float | None) -> dict[str, Any]:
    """Return a client's timeouts, none longer than what is left; no limit becomes what is left."""
    limits = {name: given.get(name) for name in _TIMEOUTS}
    if left is None:
        return limits
    return {name: left if limit is None else min(limit, left) for name, limit in limits.items()}


def _replays(stream: Any) -> bool:
    """Whether a request's body can be produced a second time. What is unknown cannot."""
    if isinstance(stream, _classes("ByteStream")):
        return True
    kind = type(stream)
    if kind.__module__.partition(".")[0] not in {"httpx", "httpx2"}:
        return False
    files = [getattr(field, "file", b"") for field in getattr(stream, "fields", ())]
    if files or kind.__name__ == "MultipartStream":  # the client winds its files back by itself, if it can
        return all(isinstance(it, (str, bytes)) or (hasattr(it, "seekable") and it.seekable()) for it in files)
    source = getattr(stream, "_stream", None)  # of `content=`: a list can be iterated again, an iterator or file cannot
    one_shot = ("read", "aread", "__next__", "__anext__")
    return source is not None and not any(hasattr(source, name) for name in one_shot)


# --- the body of a response ------------------------------------------------------------------


def _with_limit(response: Any, sending: _Sending, body: type[_Body] | type[_AsyncBody]) -> Any:
    """Return a response whose body is read within its time."""
    if sending.body_deadline == inf:
        sending.timeouts.update(_cut(sending.given_timeouts, None))  # its attempt is over
    elif not response.is_closed:
        response.stream = body(response.stream, sending)
    return response


@final
class _Body(_Stream):
    """The body of a response, in blocking code. The time is looked at before each wait for more of it."""

    def __init__(self, stream: Any, sending: _Sending) -> None:
        self._stream = stream
        self._sending = sending

    @override
    def __iter__(self) -> Iterator[bytes]:
        self._sending.cut_body()
        for chunk in self._stream:
            yield chunk
            self._sending.cut_body()

    @override
    def close(self) -> None:
        self._stream.close()


@final
class _AsyncBody(_AsyncStream):
    """The body of a response, in a task. A wait for more of it is cut off when the time is over."""

    def __init__(self, stream: Any, sending: _Sending) -> None:
        self._stream = stream
        self._sending = sending

    @override
    async def __aiter__(self) -> AsyncIterator[bytes]:
        chunks = self._stream.__aiter__()
        try:
            while True:
                self._sending.cut_body()
                with timer_until(self._sending.body_deadline) as timer:
                    chunk = await anext(chunks, None)
                if timer.fired:
                    raise self._sending.body_is_late()
                if chunk is None:
                    return
                yield chunk
        finally:
            if hasattr(chunks, "aclose"):
                await chunks.aclose()

    @override
    async def aclose(self) -> None:
        await self._stream.aclose()
