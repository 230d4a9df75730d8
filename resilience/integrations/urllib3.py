"""urllib3: pool managers that send every request through a policy; and the exchange of clients that stand on urllib3.

A `PoolManager` calls a connection pool for each request, and for each hop of a redirect. The policy runs inside the
pool, so it sees each request on the wire, and redirects are followed outside it, as with requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from math import inf
from typing import Any, ClassVar, Final, TypeAlias, TypeVar, final

from resilience.integrations._extras import needed_by

with needed_by("urllib3"):
    if int(version("urllib3").partition(".")[0]) < 2:
        raise ImportError(
            f"urllib3 {version('urllib3')} takes a body that breaks off for a whole one; "
            "this needs urllib3 2 or newer: pip install 'urllib3>=2'"
        )
    from urllib3 import (
        BaseHTTPResponse,
        HTTPConnectionPool,
        HTTPHeaderDict,
        HTTPResponse,
        PoolManager,
        ProxyManager,
        Retry,
        Timeout,
    )
    from urllib3 import exceptions as errors

from typing_extensions import override

from resilience.clock import MAX_CLIENT_TIMEOUT, clock
from resilience.context import Context
from resilience.integrations.http import DEFAULT_RULES, PerHost, Rules
from resilience.integrations.http.bodies import OneShot, body_of
from resilience.integrations.http.exchange import Exchange
from resilience.integrations.http.settings import Settings
from resilience.integrations.wire import Propagation
from resilience.policy import Policy

__all__ = ["ResiliencePoolManager", "ResilienceProxyManager"]

T = TypeVar("T")

#: A timeout in seconds for connecting and for each wait for bytes, or a pair of them.
TimeoutLike: TypeAlias = float | tuple[float | None, float | None] | Timeout | None

#: The shortest timeout of a socket, in seconds: with 0 it would not wait at all.
_SHORTEST_WAIT: Final = 0.001

#: If a body is read as a whole, the time is checked after each chunk of so many bytes.
_CHUNK_SIZE: Final = 10_240


class ResiliencePoolManager(PoolManager):
    """A `PoolManager` that runs every request through a policy.

    :param policy: a policy, or one for each host (`resilience.integrations.http.standard()`, `PerHost`).
    :param rules: which statuses are failures, and which requests may be sent again.
    :param propagate_to: hosts that receive the time left; none by default.
    :param arguments: arguments of `PoolManager`, like `options`: the number of pools, `maxsize`, `timeout` and others.

    urllib3's own retries are off, regardless of `retries`: only its number of redirects is used. A status that means
    "not now" is a failure for the policy; if the last attempt ends with it, the caller gets the response. For each
    attempt, the timeout of the request is shortened to the time left; when that is used up, `DeadlineExceeded` is
    raised. The body is read in the attempt. With `preload_content=False` it is read afterwards, within the same time
    (see `Rules`), and not retried.

    >>> from resilience import Retry
    >>> from resilience.integrations.urllib3 import ResiliencePoolManager
    >>> http = ResiliencePoolManager(Retry(3), maxsize=10)
    """

    def __init__(
        self,
        policy: Policy[Any] | PerHost,
        *arguments: Any,
        rules: Rules = DEFAULT_RULES,
        propagate_to: Propagation | Iterable[str] = (),
        **options: Any,
    ) -> None:
        self._settings = Settings(policy, rules, propagate_to)  # first: in the place of a URL, a policy has no message
        super().__init__(*arguments, **options)
        self._unprotected = self.pool_classes_by_scheme
        self._protect_pools()

    @override
    def clear(self) -> None:
        """Drop all pools. A request that waits for its next attempt is not sent again."""
        self._settings = self._settings.close()
        self._protect_pools()
        super().clear()

    def _protect_pools(self) -> None:
        """Replace the classes of pools, by scheme, by subclasses that send every request through the policy."""
        kinds = self._unprotected.items()
        protected = {scheme: _protected_class(kind, self._settings) for scheme, kind in kinds}
        self.pool_classes_by_scheme: dict[str, Any] = protected

    @override
    def urlopen(self, method: str, url: str, redirect: bool = True, **kw: Any) -> BaseHTTPResponse:  # type: ignore[override]
        """Send a request, and follow its redirects; `request` calls this."""
        body = body_of(kw.get("body"), kw.get("body_pos"))
        if not body.can_be_sent_again:
            kw["body"] = OneShot.of(kw["body"])  # otherwise a redirect would send an empty body
        # For a redirect: urllib3 does not keep the position at which a file began. Before 2.8, it keeps a position that
        # it was given even if it drops the body (303), and fails.
        kw["body_pos"] = body.start
        return super().urlopen(method, url, redirect, **kw)


class ResilienceProxyManager(ResiliencePoolManager, ProxyManager):
    """A `ProxyManager` that runs every request through a policy: `ResilienceProxyManager(policy, proxy_url)`."""


def _protected_class(kind: Any, settings: Settings) -> Any:
    def urlopen(pool: Any, method: str, url: str, body: Any = None, headers: Any = None, **options: Any) -> Any:
        given = pool.headers if headers is None else headers
        return _Sending(settings, pool, kind.urlopen, method, url, body, given, options).run()

    return type(kind.__name__, (kind,), {"urlopen": urlopen})


# --- the exchange, of requests, too ----------------------------------------------------------


class Urllib3Exchange(Exchange):
    """The exchange of a client that stands on urllib3."""

    never_sent: ClassVar[tuple[type[Exception], ...]] = (
        errors.NewConnectionError,
        errors.ConnectTimeoutError,
        errors.ClosedPoolError,
        errors.EmptyPoolError,
    )
    timed_out: ClassVar[tuple[type[Exception], ...]] = (
        errors.ConnectTimeoutError,
        errors.ReadTimeoutError,
        TimeoutError,
    )
    #: The timeout of the caller, and whether an attempt includes the whole body.
    timeout: TimeoutLike
    reads: bool

    def limit(self, raw: Any, ctx: Context) -> None:
        """Limit the time for the body of a response, which is read in the attempt, or after it."""
        deadline, late = self.limit_of_body(ctx, in_attempt=self.reads)
        if self.reads and deadline == inf:
            return
        if type(raw) is HTTPResponse:
            raw.__class__ = LimitedResponse  # urllib3 creates its responses itself, and has no option for their class
        if isinstance(raw, LimitedResponse):
            raw.longest_wait = _longest_wait(self.timeout)
            raw.deadline, raw.late = deadline, late

    @override
    def was_discarded(self, response: Any) -> bool:
        # If it was closed before its body was read, urllib3 would show an empty one.
        raw = getattr(response, "raw", response)  # requests has its own response around it
        return not self.reads and getattr(raw, "closed", False) and getattr(raw, "length_remaining", 0) != 0

    @override
    def reason(self, error: Any) -> Any:
        """Return the wrapped error. "Unable to connect to proxy" may mean that the proxy has received the request."""
        if isinstance(error, errors.MaxRetryError):
            error = error.reason
        if isinstance(error, errors.ProtocolError):  # "connection aborted", also if a wait to send has timed out
            return error.args[-1] if error.args else error
        return error.original_error if isinstance(error, errors.ProxyError) else error


class _Sending(Urllib3Exchange):
    response_type = BaseHTTPResponse

    def __init__(
        self,
        settings: Settings,
        pool: HTTPConnectionPool,
        urlopen: Any,
        method: str,
        target: str,
        body: Any,
        headers: Mapping[str, str],
        options: dict[str, Any],
    ) -> None:
        host = f"[{pool.host}]" if ":" in pool.host else pool.host
        url = f"{pool.scheme}://{host}:{pool.port}{target}" if target.startswith("/") else target  # with a proxy: a URL
        super().__init__(settings, method, url, headers, body_of(body, options.get("body_pos")))
        self.timeout: TimeoutLike = options.pop("timeout", pool.timeout)
        self.reads: bool = options.pop("preload_content", True)
        self._send = (urlopen, pool, method, target, body)
        self._retries = Retry.from_int(options.pop("retries", None), default=pool.retries)
        if self.reads:
            options.pop("release_conn", None)  # reading the body releases the connection
        self._options = {**options, "retries": False, "redirect": False, "preload_content": False}

    @override
    async def send(self, ctx: Context, left: float | None, headers: Mapping[str, str]) -> BaseHTTPResponse:
        urlopen, *where = self._send
        timeout = self.timeout if left is None else bounded(self.timeout, left)
        all_headers = self._headers
        if headers:
            all_headers = HTTPHeaderDict(all_headers)
            all_headers.update(headers)
        response: BaseHTTPResponse = urlopen(*where, all_headers, timeout=timeout, **self._options)
        response.retries = self._retries  # the manager counts redirects with it
        self.limit(response, ctx)
        if self.reads:
            response.data  # noqa: B018  # reads the body, and returns the connection to the pool
        return response


# --- time limits of urllib3 ------------------------------------------------------------------


def bounded(timeout: TimeoutLike, left: float) -> Timeout:
    """Return a timeout of at most `left` seconds.

    `total` limits connecting and the wait for the response together; without it, each of them could take all the time.
    """
    if isinstance(timeout, Timeout):
        own: Any = timeout.clone()
        own.total = left if own.total is None else min(left, own.total)
        return own  # type: ignore[no-any-return]
    if not isinstance(timeout, tuple):
        timeout = (timeout, timeout)
    if len(timeout) != 2:
        raise ValueError(f"timeout must be a number of seconds or a pair (connect, read), not {timeout!r}")
    connect, read = timeout
    return Timeout(connect=connect, read=read, total=left)


def _longest_wait(timeout: TimeoutLike) -> float:
    """Return how many seconds each wait for bytes may take under a timeout; infinity if there is no limit."""
    wait: Any = timeout[1] if isinstance(timeout, tuple) else timeout
    if isinstance(timeout, Timeout):
        own = timeout.clone()
        own.start_connect()  # `read_timeout` takes `total` into account only after this
        wait = own.read_timeout
    return inf if wait is None or wait is Timeout.DEFAULT_TIMEOUT else float(wait)


@final
class LimitedResponse(HTTPResponse):
    """A response of urllib3 with a time limit on its body.

    The user's own timeout, `longest_wait`, still applies to each wait. `late` creates the error for a body that is not
    read by the deadline.
    """

    longest_wait: float = inf
    deadline: float = inf
    late: Callable[[], Exception]

    @override
    def read(self, amt: int | None = None, decode_content: bool | None = None, cache_content: bool = False) -> bytes:
        if amt is not None and amt >= 0:
            return self._wait_for(partial(super().read, amt, decode_content))
        decodes = self.decode_content if decode_content is None else decode_content  # `stream` has another default
        pieces: Iterator[bytes] = self.stream(_CHUNK_SIZE, decodes)
        if self.tell() > 0:  # perhaps in the middle of a chunk, which `stream` does not know
            pieces = iter(partial(self.read, _CHUNK_SIZE, decodes), b"")
        data = b"".join(pieces)
        if cache_content:
            self._body = data
        return data

    if hasattr(HTTPResponse, "read1"):  # pragma: no branch (since urllib3 2.2; `io.TextIOWrapper` looks for it)

        @override
        def read1(self, amt: int | None = None, decode_content: bool | None = None) -> bytes:
            return self._wait_for(partial(super().read1, amt, decode_content))

    @override
    def read_chunked(self, amt: int | None = None, decode_content: bool | None = None) -> Iterator[bytes]:  # type: ignore[override]
        pieces = super().read_chunked(amt, decode_content)
        while (piece := self._wait_for(partial(next, pieces, None))) is not None:
            yield piece

    @override
    def close(self) -> None:
        super().close()
        self.release_conn()  # otherwise its slot in the pool would be lost

    def _wait_for(self, read: Callable[[], T]) -> T:
        if self._is_late() and self.length_remaining != 0 and not self.closed:
            self.close()  # discards the rest of the body
            raise self.late()
        if (source := _socket_of(self)) is not None:
            wait = max(_SHORTEST_WAIT, min(self.longest_wait, self.deadline - clock.now()))
            source.settimeout(wait if wait <= MAX_CLIENT_TIMEOUT else None)
        try:
            return read()
        except errors.ReadTimeoutError as error:
            if self._is_late():
                raise self.late() from error
            raise

    def _is_late(self) -> bool:
        return clock.now() >= self.deadline


def _socket_of(response: Any) -> Any:
    """Return the socket from which a body is read; None if there is none."""
    source = getattr(response.connection, "sock", None)
    if source is None:  # if the connection ends with this response, http.client has passed its socket to the reader
        reader = getattr(getattr(response, "_fp", None), "fp", None)
        source = getattr(getattr(reader, "raw", None), "_sock", None)
    return source
