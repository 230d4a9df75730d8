"""The transports themselves, and the transports inside them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self, final

from typing_extensions import override

from resilience import checks
from resilience.integrations.http import DEFAULT_RULES, PerHost, Rules, as_policies, as_rules, policy_for
from resilience.integrations.httpx.bodies import AsyncBody, Body
from resilience.integrations.httpx.libraries import AsyncTransport, Transport, library_of
from resilience.integrations.httpx.sending import AsyncSending, BlockingSending, Options
from resilience.integrations.wire import Propagation
from resilience.policy import Policy

if TYPE_CHECKING:
    import httpx
    import httpx2


@final
class ResilienceTransport(Transport):
    """A transport that runs every request of a `Client` through a policy.

    :param policy: a policy, or what has one for each host (`resilience.integrations.http.standard()`).
    :param transport: the transport that sends. By default the `HTTPTransport` of the client's library. A client that is
        given a transport leaves its own network options unused: `verify`, `cert`, `http2`, `limits`, `proxy` and
        the proxies of the environment are to be given to this one.
    :param rules: which responses are failures, and which requests may be sent again.
    :param propagate_to: hosts that are told how much time is left, or a `wire.Propagation`. Nobody by default.
    :param read_body: whether an attempt ends with the whole body, which is in memory then, and not with the headers.
        So a body that breaks off is a failure like any other, and tried again. Not for streams.

    For each attempt, the client's own timeouts (connect, read, write, pool) are cut to what is left of the deadline.
    Without `read_body`, a body is read after the policy has ended, and not tried again; it is limited by the deadline
    of the attempt that brought it, unless `rules` says otherwise.

    What comes out is what the transport raised last, or an error of the policies (`CircuitOpen`, `TimeoutExceeded`),
    which is no `httpx.HTTPError`. A response whose status is a failure to the policies comes out as a response.

    >>> import httpx
    >>> from resilience import Retry
    >>> from resilience.integrations.httpx import ResilienceTransport
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
        rules: Rules = DEFAULT_RULES,
        propagate_to: Propagation | Iterable[str] = (),
        read_body: bool = False,
    ) -> None:
        self._policies = as_policies(policy)
        self._options = Options(as_rules(rules), Propagation.to(propagate_to), checks.flag("read_body", read_body))
        self._inner = _Inner("HTTPTransport", transport)

    @override
    def handle_request(self, request: Any) -> Any:
        """Send a request, as often as the policy sees fit. The client calls this."""
        library = library_of(request)
        exchange = BlockingSending(request, self._inner.of(library).handle_request, self._options)
        response = exchange.run(policy_for(self._policies, str(request.url)))
        return exchange.with_limit(_checked_response(response, library), Body)

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
class AsyncResilienceTransport(AsyncTransport):
    """The same for an `AsyncClient`, under asyncio and trio. See `ResilienceTransport`."""

    def __init__(
        self,
        policy: Policy[Any] | PerHost,
        transport: httpx.AsyncBaseTransport | httpx2.AsyncBaseTransport | None = None,
        *,
        rules: Rules = DEFAULT_RULES,
        propagate_to: Propagation | Iterable[str] = (),
        read_body: bool = False,
    ) -> None:
        self._policies = as_policies(policy)
        self._options = Options(as_rules(rules), Propagation.to(propagate_to), checks.flag("read_body", read_body))
        self._inner = _Inner("AsyncHTTPTransport", transport)

    @override
    async def handle_async_request(self, request: Any) -> Any:
        """Send a request, as often as the policy sees fit. The client calls this."""
        library = library_of(request)
        exchange = AsyncSending(request, self._inner.of(library), self._options)
        response = await exchange.arun(policy_for(self._policies, str(request.url)))
        return exchange.with_limit(_checked_response(response, library), AsyncBody)

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


def _checked_response(response: Any, library: ModuleType) -> Any:
    """Return what came out of the policy; refuse what a client could not return."""
    if not isinstance(response, library.Response):
        raise TypeError(f"a policy answered with {response!r}; a Fallback of a client answers with a Response")
    return response
