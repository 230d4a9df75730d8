"""The adapter, and a request on its way through its policy."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from math import inf
from typing import Any, Final
from urllib.parse import urlsplit

import urllib3
from requests import ConnectTimeout, PreparedRequest, Response
from requests.adapters import DEFAULT_POOLBLOCK, DEFAULT_POOLSIZE, BaseAdapter, HTTPAdapter
from typing_extensions import override
from urllib3.exceptions import (
    ClosedPoolError,
    ConnectTimeoutError,
    MaxRetryError,
    NewConnectionError,
    ProxyError,
)

from resilience.clock import clock
from resilience.context import Context, is_over
from resilience.errors import DeadlineExceeded
from resilience.integrations.http import (
    DEFAULT_RULES,
    Exchange,
    NotRepeatable,
    PerHost,
    Rules,
    as_policies,
    as_rules,
    policy_for,
)
from resilience.integrations.http.bodies import forget_sent, is_seekable, is_used_up, note_sent
from resilience.integrations.requests.timing import (
    BodyTime,
    TimeoutLike,
    attempt_is_late,
    bounded,
    has_timed_out,
    limit_wait,
)
from resilience.integrations.wire import Propagation
from resilience.policy import Policy

#: Raised before anything has been sent, wherever requests puts them.
_NEVER_SENT: Final = (NewConnectionError, ConnectTimeoutError, ClosedPoolError)


class ResilienceAdapter(HTTPAdapter):
    """Send every request of a session through a policy: `session.mount("https://", ResilienceAdapter(policy))`.

    :param policy: a policy, or what has one for each host (`resilience.integrations.http.standard()`). Shared by all
        sessions, and all adapters, that it is given to.
    :param adapter: the adapter that sends, where it is not this one: a subclass with certificates of its own, say.
        Its own retries have to be off: they would multiply with the policy's.
    :param rules: which statuses are failures, and which requests may be sent again.
    :param propagate_to: hosts that are told how much time is left; nobody by default.
    :param pool_connections: for how many hosts connections are kept, as in `HTTPAdapter`.
    :param pool_maxsize: how many connections are kept for a host.
    :param pool_block: whether no more than those are made. requests waits for a free one without a limit, so a
        `Bulkhead` in the policy is the better bound.

    A status that says "not now" is a failure to the policy; where it is still the answer in the end, the session
    gets the response as usual. The timeout of a request is shortened, at each attempt, to the time that is left;
    when that is used up, `DeadlineExceeded` is raised, and not requests' `Timeout`. The body is read in the attempt;
    a stream is read after it, in the same time (see `Rules`), and is not retried.

    Not promised: an exact end of a body of which something comes now and then, as requests' timeouts begin anew with
    each piece. An enforced `Timeout` in the policy ends it, unless it is a stream.

    >>> import requests
    >>> from resilience import Retry
    >>> from resilience.integrations.requests import ResilienceAdapter
    >>> with requests.Session() as session:
    ...     session.mount("https://", ResilienceAdapter(Retry(3)))
    """

    # What a pickle carries: requests' own way.
    __attrs__: list[str] = [*HTTPAdapter.__attrs__, "policy", "rules", "_propagation", "_adapter"]  # noqa: RUF012

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
        self.policy: Policy[Any] | PerHost = as_policies(policy)
        self.rules: Rules = as_rules(rules)
        self._propagation = Propagation.to(propagate_to)
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

        :raises NotRepeatable: for a generator that has been sent before, as it is on a redirect or by digest
            authentication, and for a file that was read to its end. requests would send an empty body.
        """
        if is_used_up(request.body):
            raise NotRepeatable("the request was not sent: its body was used up before")
        options = {"stream": stream, "verify": verify, "cert": cert, "proxies": proxies}
        exchange = _Exchange(self, request, timeout, options)
        response = exchange.run(policy_for(self.policy, str(request.url)))
        if not isinstance(response, Response):
            raise TypeError(f"a policy answered with {response!r}; a Fallback of a session answers with a Response")
        return exchange.with_limit(response) if stream else response

    def _shortened(self, timeout: TimeoutLike, ctx: Context) -> TimeoutLike:
        """Return a timeout that ends no later than the context, in a form that the adapter that sends knows."""
        left = ctx.timeout()
        if left is None:
            return timeout
        shorter = bounded(timeout, left)
        if self._adapter is None or isinstance(self._adapter, HTTPAdapter):
            return shorter
        shorter.start_connect()
        return shorter.connect_timeout, shorter.read_timeout  # type: ignore[return-value]

    def _transmit(self, request: PreparedRequest, timeout: TimeoutLike, options: Mapping[str, Any]) -> Response:
        """Send a request once."""
        given: Any = timeout  # requests takes urllib3's, too, and does not say so in its types
        if self._adapter is None:
            return super().send(request, timeout=given, **options)
        response = self._adapter.send(request, timeout=given, **options)
        response.connection = self  # digest authentication sends its second request to whoever made the first
        return response

    @override
    def close(self) -> None:
        """Close the connections that are kept, those of a wrapped adapter too."""
        super().close()
        if self._adapter is not None:
            self._adapter.close()


def _check_adapter(adapter: object, pool: tuple[int, int, bool]) -> None:
    if not isinstance(adapter, BaseAdapter):
        raise TypeError(f"adapter must be an adapter of requests, not {adapter!r}")
    if pool != (DEFAULT_POOLSIZE, DEFAULT_POOLSIZE, DEFAULT_POOLBLOCK):
        raise ValueError("pool_connections, pool_maxsize and pool_block belong to the adapter that is wrapped")
    retries = getattr(adapter, "max_retries", None)
    if isinstance(retries, urllib3.Retry) and retries.total not in (0, False):
        raise ValueError(f"adapter must not retry by itself (max_retries=0), as this one does: {retries!r}")


class _Exchange(Exchange[Response]):
    """One request to one adapter."""

    def __init__(
        self, adapter: ResilienceAdapter, request: PreparedRequest, timeout: TimeoutLike, options: Mapping[str, Any]
    ) -> None:
        url = str(request.url)
        host = urlsplit(url).hostname or ""
        headers: Any = request.headers
        super().__init__(adapter.rules, str(request.method), headers, replayable=_is_replayable(request), host=host)
        self._adapter = adapter
        self._request = request
        self._url = url
        self._timeout = timeout
        self._options = options
        self._reading: threading.Lock | None = None if _is_plain(request.body) else threading.Lock()
        self._was_read = False

    @override
    def __call__(self, ctx: Context) -> Response:
        timeout = self._adapter._shortened(self._timeout, ctx)
        request = self._request
        headers = self._adapter._propagation.headers_for(self._url, ctx)
        if headers:
            request = request.copy()  # it is the user's, and goes to another host when it is redirected
            request.headers.update(headers)
        self.begin()
        note_sent(request.body)
        try:
            response = self._transmit(request, timeout, ctx)
        except Exception as error:
            sent = _may_have_been_sent(error)
            if not sent:
                forget_sent(request.body)
            self.failed(error, sent=sent)
            if is_over(ctx) and has_timed_out(error):
                raise DeadlineExceeded("the time that was left ran out while the server was asked") from error
            raise
        return self.received(response, response.status_code, response.headers, ctx)

    @property
    @override
    def why_not_again(self) -> str | None:
        """Why the request must not be sent again: also while a call that was walked away from still reads the body."""
        if (reason := super().why_not_again) is not None:
            return reason
        is_read = self._reading is not None and self._reading.locked()
        return "its body is still being read by an earlier attempt" if is_read else None

    def _transmit(self, request: PreparedRequest, timeout: TimeoutLike, ctx: Context) -> Response:
        if self._reading is None:
            return self._receive(request, timeout, ctx)
        if not self._reading.acquire(blocking=False):
            raise NotRepeatable("the request was not sent again: its body is still being read by an earlier attempt")
        try:
            if self._was_read:
                _rewind(request)
            self._was_read = True
            return self._receive(request, timeout, ctx)
        finally:
            self._reading.release()

    def _receive(self, request: PreparedRequest, timeout: TimeoutLike, ctx: Context) -> Response:
        response = self._adapter._transmit(request, timeout, self._options)
        if not self._options["stream"]:
            if ctx.deadline < inf:
                BodyTime(ctx.deadline, attempt_is_late, self._timeout).watch(response)
            response.content  # noqa: B018  # reads it, and gives the connection back
        return response

    def with_limit(self, response: Response) -> Response:
        """Return a response of which the body has to be read in time."""
        deadline = self.body_deadline
        if deadline < inf:
            BodyTime(deadline, self.body_is_late, self._timeout).watch(response)
        limit_wait(response, self._timeout, deadline - clock.now())  # it may have more than its attempt had left
        return response


# --- what may be sent again ------------------------------------------------------------------


def _may_have_been_sent(error: Exception) -> bool:
    """Whether the request may have reached the server: not where no connection could be made."""
    cause = error.args[0] if error.args else None
    reason: Any = cause.reason if isinstance(cause, MaxRetryError) else cause
    if isinstance(reason, ProxyError):  # "unable to connect to proxy", also where the proxy hung up on the request
        reason = reason.original_error
        if type(reason) is OSError and str(reason).startswith("Tunnel connection failed"):  # http.client's only word
            return False
    return not isinstance(error, ConnectTimeout) and not isinstance(reason, _NEVER_SENT)


def _is_plain(body: object) -> bool:
    """Whether a body is there as a whole, and sending it changes nothing."""
    return body is None or isinstance(body, (str, bytes, bytearray, memoryview))


def _is_replayable(request: PreparedRequest) -> bool:
    """Whether the body can be sent a second time."""
    body: Any = request.body
    if _is_plain(body):
        return True
    if hasattr(body, "read"):
        return isinstance(_position(request), int) and is_seekable(body) is True
    return iter(body) is not body  # something that can be iterated again, and not an iterator


def _position(request: PreparedRequest) -> object:
    """Return where the file that is the body stood when the request was prepared; no number if it cannot tell."""
    return getattr(request, "_body_position", None)  # what requests itself winds back to on a redirect


def _rewind(request: PreparedRequest) -> None:
    """Wind a file back to where it stood when the request was prepared."""
    body: Any = request.body
    if hasattr(body, "seek"):
        body.seek(_position(request))
