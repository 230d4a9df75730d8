"""requests: an adapter that sends every request of a session through a policy.

A `Session` passes each request, and each hop of a redirect, to the adapter that is mounted for its URL. So a policy
in the adapter sees each request on the wire; cookies, redirects, hooks and authentication are handled outside it.

Unless the user asks for a stream, requests reads the body after the adapter has returned. This adapter reads it inside
the policy, as a part of the attempt. So a body that breaks off is a failure like any other, and a time limit covers it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from resilience.integrations._extras import needed_by

with needed_by("requests"):
    import urllib3
    from requests import ConnectTimeout, PreparedRequest, Response
    from requests import Timeout as RequestsTimeout
    from requests.adapters import DEFAULT_POOLBLOCK, DEFAULT_POOLSIZE, BaseAdapter, HTTPAdapter
    from requests.exceptions import ContentDecodingError

from typing_extensions import override

from resilience import checks
from resilience.context import Context
from resilience.integrations.http import DEFAULT_RULES, PerHost, Rules
from resilience.integrations.http.bodies import OneShot, body_of
from resilience.integrations.http.settings import Settings
from resilience.integrations.urllib3 import TimeoutLike, Urllib3Exchange, bounded
from resilience.integrations.wire import Propagation
from resilience.policy import Policy

__all__ = ["ResilienceAdapter"]


class ResilienceAdapter(HTTPAdapter):
    """Send every request of a session through a policy: `session.mount("https://", ResilienceAdapter(policy))`.

    :param policy: a policy, or one for each host (`resilience.integrations.http.standard()`, `PerHost`). All sessions
        and adapters that use it share its state.
    :param adapter: another adapter that sends the requests, such as a subclass with its own certificates; by default
        this one does. Its own retries must be off, because they would multiply with those of the policy.
    :param rules: which statuses are failures, and which requests may be sent again.
    :param propagate_to: hosts that receive the time left; none by default.
    :param pool_connections: for how many hosts connections are kept, as in `HTTPAdapter`.
    :param pool_maxsize: how many connections are kept for a host.
    :param pool_block: whether no further connections are made. requests waits for a free connection without a limit, so
        a `Bulkhead` in the policy is the better bound.

    A status that means "not now" is a failure for the policy; if the last attempt ends with it, the session gets the
    response as usual. For each attempt, the timeout of the request is shortened to the time left; when that is used
    up, `DeadlineExceeded` is raised, and not requests' `Timeout`. The body is read in the attempt; a stream is read
    afterwards, within the same time (see `Rules`), and not retried.

    Not promised: an exact end for a body that arrives in small pieces, because requests' timeouts restart with each
    piece. An enforced `Timeout` in the policy ends it, unless it is a stream.

    >>> import requests
    >>> from resilience import Retry
    >>> from resilience.integrations.requests import ResilienceAdapter
    >>> with requests.Session() as session:
    ...     session.mount("https://", ResilienceAdapter(Retry(3)))
    """

    # The attributes in a pickle, in the manner of requests.
    __attrs__: list[str] = [*HTTPAdapter.__attrs__, "_settings", "_adapter"]  # noqa: RUF012

    def __init__(
        self,
        policy: Policy[Any] | PerHost,
        *,
        adapter: BaseAdapter | None = None,
        rules: Rules = DEFAULT_RULES,
        propagate_to: Propagation | Iterable[str] = (),
        pool_connections: int = DEFAULT_POOLSIZE,
        pool_maxsize: int = DEFAULT_POOLSIZE,
        pool_block: bool = DEFAULT_POOLBLOCK,
    ) -> None:
        pool = (pool_connections, pool_maxsize, pool_block)
        if adapter is not None:
            _check_adapter(adapter, pool)
        self._settings = Settings(policy, rules, propagate_to)
        self._adapter = adapter
        super().__init__(pool_connections=pool_connections, pool_maxsize=pool_maxsize, pool_block=pool_block)

    @override
    def send(
        self,
        request: PreparedRequest,
        stream: bool = False,
        timeout: TimeoutLike = None,
        verify: bool | str = True,
        cert: str | tuple[str, str] | None = None,
        proxies: dict[str, str] | None = None,
    ) -> Response:
        """Send a prepared request through the policy; called by the session.

        :raises NotRepeatable: for a generator that has been sent before, for example on a redirect or with digest
            authentication. Without this adapter, requests would send an empty body.
        """
        options = {"stream": stream, "verify": verify, "cert": cert, "proxies": proxies}
        response: Response = _Sending(self, request, timeout, options).run()
        return response

    def _shortened(self, timeout: TimeoutLike, left: float) -> Any:
        """Return a timeout of at most `left` seconds, in a form that the sending adapter accepts."""
        shorter = bounded(timeout, left)
        if self._adapter is None or isinstance(self._adapter, HTTPAdapter):
            return shorter
        shorter.start_connect()
        return shorter.connect_timeout, shorter.read_timeout

    def _transmit(self, request: PreparedRequest, **options: Any) -> Response:
        """Send a request once, without the policy."""
        if self._adapter is None:
            return super().send(request, **options)
        response = self._adapter.send(request, **options)
        response.connection = self  # digest authentication sends its second request to this adapter
        return response

    @override
    def close(self) -> None:
        """Close all connections, also those of a wrapped adapter."""
        self._settings = self._settings.close()
        super().close()
        if self._adapter is not None:
            self._adapter.close()


def _check_adapter(adapter: object, pool: tuple[int, int, bool]) -> None:
    checks.instance("adapter", adapter, BaseAdapter, "an adapter of requests")
    if pool != (DEFAULT_POOLSIZE, DEFAULT_POOLSIZE, DEFAULT_POOLBLOCK):
        raise ValueError("pool_connections, pool_maxsize and pool_block belong to the adapter that is wrapped")
    retries = getattr(adapter, "max_retries", None)
    if isinstance(retries, urllib3.Retry) and retries.total not in (0, False):
        raise ValueError(f"adapter must not retry by itself (max_retries=0), as this one does: {retries!r}")


class _Sending(Urllib3Exchange):
    response_type = Response
    status_name = "status_code"
    never_sent = (ConnectTimeout, *Urllib3Exchange.never_sent)
    timed_out = (RequestsTimeout, *Urllib3Exchange.timed_out)

    def __init__(
        self, adapter: ResilienceAdapter, request: PreparedRequest, timeout: TimeoutLike, options: Mapping[str, Any]
    ) -> None:
        # A file is rewound to its position when the request was prepared, as requests itself does on a redirect.
        body = body_of(request.body, request._body_position)
        headers: Any = request.headers
        super().__init__(adapter._settings, str(request.method), str(request.url), headers, body)
        self.timeout: TimeoutLike = timeout
        self.reads: bool = not options["stream"]
        if not body.can_be_sent_again:
            request.body = OneShot.of(request.body)
        self._adapter = adapter
        self._request = request
        self._options = options

    @override
    async def send(self, ctx: Context, left: float | None, headers: Mapping[str, str]) -> Response:
        request, timeout = self._request, self.timeout
        if left is not None:
            timeout = self._adapter._shortened(timeout, left)
        if headers:
            request = request.copy()  # the request belongs to the user, and a redirect sends it to another host
            request.headers.update(headers)
        response = self._adapter._transmit(request, timeout=timeout, **self._options)
        self.limit(response.raw, ctx)
        if self.reads:
            try:
                response.content  # noqa: B018  # reads the body, and returns the connection to the pool
            except ContentDecodingError:
                if not response.is_redirect:
                    raise
                response.close()  # as requests does, which follows a redirect with such a body
        return response

    @override
    def reason(self, error: Any) -> Any:
        return super().reason(error.args[0] if error.args else None)  # requests wraps an error of urllib3
