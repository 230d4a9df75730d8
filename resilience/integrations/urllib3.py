"""urllib3: pool managers whose every request runs through a policy.

A `PoolManager` asks a connection pool for each request, and for each hop of a redirect. A policy in the pool sees what
really goes over the network, and redirects stay above it, as with requests.

requests stands on urllib3, and shares what its errors say and how the time of a request is limited. urllib3's timeouts
are for one wait each. For connecting and for the answer together it has a total; for a body nothing has, so the time is
looked at before each wait for a piece of it, and the socket told how long that may take.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from math import inf
from typing import Any, Final, TypeAlias, TypeVar, final

from typing_extensions import override

from resilience.integrations.extras import needed_by

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

from resilience.clock import clock
from resilience.errors import DeadlineExceeded
from resilience.integrations.http.bodies import Once, body_of
from resilience.integrations.http.exchange import Attempt, BlockingExchange
from resilience.integrations.http.perhost import PerHost
from resilience.integrations.http.rules import DEFAULT_RULES, Rules
from resilience.integrations.http.settings import Settings
from resilience.integrations.wire import Propagation
from resilience.policy import Policy

__all__ = ["ResiliencePoolManager", "ResilienceProxyManager"]

T = TypeVar("T")

#: A timeout: for connecting and for each wait for bytes, or one of each.
TimeoutLike: TypeAlias = float | tuple[float | None, float | None] | Timeout | None

#: Raised before anything has been sent.
_NEVER_SENT: Final = (
    errors.NewConnectionError,
    errors.ConnectTimeoutError,
    errors.ClosedPoolError,
    errors.EmptyPoolError,
)

_TIMED_OUT: Final = (errors.ConnectTimeoutError, errors.ReadTimeoutError, TimeoutError)

#: What http.client says where a proxy does not connect; there is no class for it.
_NO_TUNNEL: Final = re.compile(r"Tunnel connection failed: ([0-9]{3})")

#: The shortest wait, in seconds: 0 is "do not wait" to a socket.
_LEAST: Final = 0.001

#: The time is looked at each time that so many bytes of a body have been read.
_BLOCK: Final = 10_240


class ResiliencePoolManager(PoolManager):
    """A `PoolManager` that runs every request through a policy.

    :param policy: a policy, or what has one for each host (`resilience.integrations.http.standard()`).
    :param rules: which statuses are failures, and which requests may be sent again.
    :param propagate_to: hosts that receive the time left; none by default.
    :param arguments: what a `PoolManager` takes, and `options`: the number of pools, `maxsize`, `timeout` and others.

    urllib3's own retries are off, regardless of `retries`: only its number of redirects is used. A status that means
    "not now" is a failure for the policy; if the last attempt ends with it, the caller gets the response. The timeout
    of a request is shortened, at each attempt, to the time that is left; when that is used up, `DeadlineExceeded` is
    raised. The body is read in the attempt, unless `preload_content=False`: then it is read after it, in the same time
    (see `Rules`), and is not retried.

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
        super().__init__(*arguments, **options)
        self._settings = Settings(policy, rules, propagate_to)
        self._unprotected = self.pool_classes_by_scheme
        self.pool_classes_by_scheme: dict[str, Any] = _protected(self._unprotected, self._settings)

    @override
    def clear(self) -> None:
        """Forget all pools. A request that waits for its next attempt is not sent again."""
        self._settings = self._settings.close()
        self.pool_classes_by_scheme = _protected(self._unprotected, self._settings)
        super().clear()

    @override
    def urlopen(self, method: str, url: str, redirect: bool = True, **kw: Any) -> BaseHTTPResponse:  # type: ignore[override]
        """Send a request, and follow its redirects; `request` calls this."""
        body = body_of(kw.get("body"), kw.get("body_pos"))
        if not body.can_be_sent_again:
            kw["body"] = Once.of(kw["body"])  # a redirect must not send the empty rest of it
        elif body.start is not None:
            kw["body_pos"] = body.start  # nor that of a file: urllib3 forgets where it stood
        return super().urlopen(method, url, redirect, **kw)


class ResilienceProxyManager(ResiliencePoolManager, ProxyManager):
    """A `ProxyManager` that runs every request through a policy: `ResilienceProxyManager(policy, proxy_url)`."""


def _protected(classes: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return classes of pools, by scheme, that send through the policy."""
    return {scheme: _protected_class(kind, settings) for scheme, kind in classes.items()}


def _protected_class(kind: Any, settings: Settings) -> Any:
    def urlopen(pool: Any, method: str, url: str, body: Any = None, headers: Any = None, **options: Any) -> Any:
        given = pool.headers if headers is None else headers
        return _Sending(settings, pool, kind.urlopen, method, url, body, given, options).run()

    return type(kind.__name__, (kind,), {"urlopen": urlopen})


class Urllib3Exchange(BlockingExchange):
    """What the descriptions of the clients that stand on urllib3 share: what its errors say."""

    @override
    def may_have_been_sent(self, error: Exception) -> bool:
        reason = self.reason(error)
        return not isinstance(error, self.never_sent) and not isinstance(reason, _NEVER_SENT)

    @override
    def has_timed_out(self, error: Exception) -> bool:
        reason: Any = self.reason(error)
        if isinstance(reason, errors.ProtocolError):  # "connection aborted", also by the timeout of a wait to send
            reason = reason.args[-1]
        return isinstance(error, self.timed_out) or isinstance(reason, _TIMED_OUT)

    @override
    def proxy_refusal(self, error: Exception) -> int | None:
        reason = self.reason(error)
        match = _NO_TUNNEL.match(str(reason)) if type(reason) is OSError else None
        return int(match[1]) if match else None

    def reason(self, error: Any) -> object:
        """Return what happened: a proxy "to which it could not connect" may as well have hung up on the request."""
        if isinstance(error, errors.MaxRetryError):
            error = error.reason
        return error.original_error if isinstance(error, errors.ProxyError) else error


class _Sending(Urllib3Exchange):
    """One request, or one hop of a redirect."""

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
        url = target if "://" in target else f"{pool.scheme}://{pool.host}:{pool.port}{target}"
        super().__init__(settings, method, url, headers, body_of(body, options.get("body_pos")))
        self._send = (urlopen, pool, method, target, body)
        self._retries = options.pop("retries", None)
        self._timeout = options.pop("timeout", pool.timeout)
        self._reads = options.pop("preload_content", True)
        if self._reads:
            options.pop("release_conn", None)  # reading does it
        self._options = {**options, "retries": False, "redirect": False, "preload_content": False}

    @override
    def send(self, attempt: Attempt) -> BaseHTTPResponse:
        urlopen, *where = self._send
        timeout = self._timeout if attempt.left is None else bounded(self._timeout, attempt.left)
        headers = self._headers
        if attempt.headers:
            headers = HTTPHeaderDict(headers)
            headers.update(attempt.headers)
        response: BaseHTTPResponse = urlopen(*where, headers, timeout=timeout, **self._options)
        response.retries = Retry.from_int(self._retries)  # what its manager counts redirects with
        if attempt.left is not None or not self._reads:
            limit_body(response, self._timeout, attempt.ctx.deadline, attempt_is_late)
        if self._reads:
            response.data  # noqa: B018  # reads it, and gives the connection back
        return response

    @override
    def limit(self, response: BaseHTTPResponse) -> BaseHTTPResponse:
        if not self._reads:
            limit_body(response, self._timeout, self.body_deadline, self.body_is_late)
        return response


# --- its time --------------------------------------------------------------------------------


def bounded(timeout: TimeoutLike, left: float) -> Timeout:
    """Return a timeout of at most `left` seconds.

    `total` is what bounds connecting and waiting for the answer together; without it each could take all the time.
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


def limit_body(response: Any, timeout: TimeoutLike, deadline: float, late: Callable[[], Exception]) -> None:
    """Have the body of a response read by `deadline`, in whatever way it is read.

    :param timeout: the user's own, which stays where it is shorter.
    :param late: makes the error for a body that is not there by then.
    """
    if type(response) is HTTPResponse:
        response.__class__ = LimitedResponse  # urllib3 makes its responses itself, and asks for no class
    if isinstance(response, LimitedResponse):
        response.longest_wait = _longest_wait(timeout)
        response.deadline, response.late = deadline, late
        response.limit_wait()


def _longest_wait(timeout: TimeoutLike) -> float:
    """Return for how many seconds a timeout lets each wait for bytes last; infinity for no limit."""
    wait: Any = timeout[1] if isinstance(timeout, tuple) else timeout
    if isinstance(timeout, Timeout):
        own = timeout.clone()
        own.start_connect()  # before that, it does not say
        wait = own.read_timeout
    return inf if wait is None or wait is Timeout.DEFAULT_TIMEOUT else float(wait)


def attempt_is_late() -> DeadlineExceeded:
    """Return the error for a body that its attempt has no time left to read."""
    return DeadlineExceeded("the time that was left ran out while the body was read")


@final
class LimitedResponse(HTTPResponse):
    """A response of urllib3 whose body has its time."""

    longest_wait: float = inf
    deadline: float = inf
    late: Callable[[], Exception]

    @override
    def read(self, amt: int | None = None, decode_content: bool | None = None, cache_content: bool = False) -> bytes:
        if amt is not None and amt >= 0:
            return self._wait_for(partial(super().read, amt, decode_content))
        data = b"".join(self.stream(_BLOCK, decode_content))
        if cache_content:
            self._body = data
        return data

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
        self.release_conn()  # or its place in the pool would be lost

    def _wait_for(self, read: Callable[[], T]) -> T:
        if self._is_late() and self.length_remaining != 0 and not self.closed:
            self.close()  # nothing more is read
            raise self.late()
        self.limit_wait()
        try:
            return read()
        except errors.ReadTimeoutError as error:
            if self._is_late():
                raise self.late() from error
            raise

    def _is_late(self) -> bool:
        return clock.now() >= self.deadline

    def limit_wait(self) -> None:
        """Let the next wait for bytes take no longer than the user's timeout, and what is left, allow."""
        source = _socket_of(self)
        if source is not None:
            wait = max(_LEAST, min(self.longest_wait, self.deadline - clock.now()))
            source.settimeout(None if wait == inf else wait)


def _socket_of(response: Any) -> Any:
    """Return the socket from which a body is read; None for none."""
    source = getattr(response.connection, "sock", None)
    if source is None:  # a connection that ends with this response: http.client has handed its socket to the reader
        reader = getattr(getattr(response, "_fp", None), "fp", None)
        source = getattr(getattr(reader, "raw", None), "_sock", None)
    return source
