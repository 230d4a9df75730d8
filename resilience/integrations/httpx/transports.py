"""The transports, and the transports inside them."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Never, Self, final

from typing_extensions import override

from resilience import checks
from resilience.integrations.http import DEFAULT_RULES, PerHost, Rules
from resilience.integrations.http.settings import Settings
from resilience.integrations.httpx.libraries import LIBRARIES, AsyncTransport, Transport, library_of
from resilience.integrations.httpx.sending import Sending
from resilience.integrations.wire import Propagation
from resilience.policy import Policy

if TYPE_CHECKING:
    import httpx
    import httpx2


class _InnerTransports:
    """The transports inside one of ours, which send: the given one, or one for each library, created when needed."""

    _kind: ClassVar[str]
    _method: ClassVar[str]
    _other: ClassVar[str]  # what a client of the other kind needs

    def __init__(self, transport: object, settings: Settings) -> None:
        checks.no_class("transport", transport)
        if transport is not None and not callable(getattr(transport, self._method, None)):
            raise TypeError(
                f"transport must have a method {self._method}, as httpx.{self._kind} has; {transport!r} has not"
            )
        self._settings = settings
        self._inner: dict[ModuleType, Any] = {} if transport is None else dict.fromkeys(LIBRARIES, transport)

    if not TYPE_CHECKING:  # pragma: no branch (type checkers would allow any attribute)

        def __getattr__(self, name: str) -> Never:
            is_of_other_kind = name in ("handle_request", "handle_async_request", "__enter__", "__aenter__")
            hint = f": {self._other}" if is_of_other_kind else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def _sending(self, request: Any, *, in_tasks: bool) -> Sending:
        library = library_of(request)
        if library not in self._inner:  # if two threads make one, one is left, and the other has no connections
            self._inner.setdefault(library, getattr(library, self._kind)())
        return Sending(self._settings, request, library, self._inner[library], in_tasks)

    def _all(self) -> list[Any]:
        return list({id(it): it for it in self._inner.copy().values()}.values())

    def _closed(self) -> list[Any]:
        """Mark the client as closed, and return all transports to close with it."""
        self._settings = self._settings.close()
        return self._all()


@final
class ResilienceTransport(_InnerTransports, Transport):
    """A transport that runs every request of a `Client` through a policy.

    :param policy: a policy, or one for each host (`resilience.integrations.http.standard()`, `PerHost`).
    :param transport: the transport that sends; by default the `HTTPTransport` of the client's library. A client with a
        transport of its own ignores its network options: pass `verify`, `cert`, `http2`, `limits` and the proxies of
        the environment to this transport. Pass it `proxy`, too: with a client's own `proxy`, no request comes here.
    :param rules: which responses are failures, and which requests may be sent again.
    :param propagate_to: hosts that receive the time left, or a `wire.Propagation`; none by default.
    :param read_body: whether an attempt includes the whole body, read into memory, instead of ending with the headers.
        Then a body that breaks off is a failure like any other, and is retried. Not for streams.

    For each attempt, the client's own timeouts (connect, read, write, pool) are shortened to the time left. Without
    `read_body`, the body is read after the policy has ended, and not retried. It must be read by the deadline of its
    attempt, unless `rules` says otherwise.

    It raises the last error of the transport, or an error of the policies (`CircuitOpen`, `TimeoutExceeded`), which is
    not an `httpx.HTTPError`. A response whose status is a failure for the policies is returned as a response.

    >>> import httpx
    >>> from resilience import Retry
    >>> from resilience.integrations.httpx import ResilienceTransport
    >>> answers = iter([503, 200])
    >>> server = httpx.MockTransport(lambda request: httpx.Response(next(answers)))
    >>> with httpx.Client(transport=ResilienceTransport(Retry(backoff=[0]), server)) as client:
    ...     client.get("https://example.org/")
    <Response [200 OK]>
    """

    _kind = "HTTPTransport"
    _method = "handle_request"
    _other = "an AsyncClient needs AsyncResilienceTransport"

    def __init__(
        self,
        policy: Policy[Any] | PerHost,
        transport: httpx.BaseTransport | httpx2.BaseTransport | None = None,
        *,
        rules: Rules = DEFAULT_RULES,
        propagate_to: Propagation | Iterable[str] = (),
        read_body: bool = False,
    ) -> None:
        super().__init__(transport, Settings(policy, rules, propagate_to, read_body))

    @override
    def handle_request(self, request: Any) -> Any:
        """Send a request through the policy. The client calls this."""
        return self._sending(request, in_tasks=False).run()

    @override
    def close(self) -> None:
        """Close the inner transports."""
        for transport in self._closed():
            transport.close()

    @override
    def __enter__(self) -> Self:
        for transport in self._all():
            transport.__enter__()
        return self

    @override
    def __exit__(self, *error: object) -> None:
        for transport in self._closed():
            transport.__exit__(*error)


@final
class AsyncResilienceTransport(_InnerTransports, AsyncTransport):
    """A `ResilienceTransport` for an `AsyncClient`, under asyncio and trio, with the same parameters and errors.

    :param policy: a policy, or one for each host (`resilience.integrations.http.standard()`, `PerHost`).
    :param transport: the transport that sends; by default the `AsyncHTTPTransport` of the client's library. It has the
        network options (`verify`, `http2`, `limits`, `proxy`): those of the client have no effect.
    :param rules: which responses are failures, and which requests may be sent again.
    :param propagate_to: hosts that receive the time left, or a `wire.Propagation`; none by default.
    :param read_body: whether an attempt includes the whole body, read into memory. Not for streams.

    If a `Timeout` in the policy cancels an attempt at its deadline, the client's own timeouts are not changed.
    """

    _kind = "AsyncHTTPTransport"
    _method = "handle_async_request"
    _other = "a Client needs ResilienceTransport"

    def __init__(
        self,
        policy: Policy[Any] | PerHost,
        transport: httpx.AsyncBaseTransport | httpx2.AsyncBaseTransport | None = None,
        *,
        rules: Rules = DEFAULT_RULES,
        propagate_to: Propagation | Iterable[str] = (),
        read_body: bool = False,
    ) -> None:
        super().__init__(transport, Settings(policy, rules, propagate_to, read_body))

    @override
    async def handle_async_request(self, request: Any) -> Any:
        """Send a request through the policy. The client calls this."""
        return await self._sending(request, in_tasks=True).run()

    @override
    async def aclose(self) -> None:
        """Close the inner transports."""
        for transport in self._closed():
            await transport.aclose()

    @override
    async def __aenter__(self) -> Self:
        for transport in self._all():
            await transport.__aenter__()
        return self

    @override
    async def __aexit__(self, *error: object) -> None:
        for transport in self._closed():
            await transport.__aexit__(*error)
