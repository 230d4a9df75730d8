"""Pool managers that send every request through a policy.

A `PoolManager` calls a connection pool for each request, and for each hop of a redirect. The policy runs inside the
pool, so it sees each request on the wire, and redirects are followed outside it, as with requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from typing_extensions import override
from urllib3 import BaseHTTPResponse, HTTPConnectionPool, HTTPHeaderDict, PoolManager, ProxyManager, Retry

from resilience.context import Context
from resilience.integrations.http import DEFAULT_RULES, PerHost, Rules
from resilience.integrations.http.bodies import OneShot, body_of
from resilience.integrations.http.exchange import attempt_is_late
from resilience.integrations.http.settings import Settings
from resilience.integrations.urllib3.exchange import Urllib3Exchange
from resilience.integrations.urllib3.timeouts import bounded, limit_body, was_cut_short
from resilience.integrations.wire import Propagation
from resilience.policy import Policy


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
        self.pool_classes_by_scheme: dict[str, Any] = _protected(self._unprotected, self._settings)

    @override
    def clear(self) -> None:
        """Drop all pools. A request that waits for its next attempt is not sent again."""
        self._settings = self._settings.close()
        self.pool_classes_by_scheme = _protected(self._unprotected, self._settings)
        super().clear()

    @override
    def urlopen(self, method: str, url: str, redirect: bool = True, **kw: Any) -> BaseHTTPResponse:  # type: ignore[override]
        """Send a request, and follow its redirects; `request` calls this."""
        body = body_of(kw.get("body"), kw.get("body_pos"))
        if not body.can_be_sent_again:
            kw["body"] = OneShot.of(kw["body"])  # otherwise a redirect would send an empty body
        elif body.start is not None:
            kw["body_pos"] = body.start  # for a redirect: urllib3 does not keep the position at which a file began
        return super().urlopen(method, url, redirect, **kw)


class ResilienceProxyManager(ResiliencePoolManager, ProxyManager):
    """A `ProxyManager` that runs every request through a policy: `ResilienceProxyManager(policy, proxy_url)`."""


def _protected(classes: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return subclasses of these pools, by scheme, that send every request through the policy."""
    return {scheme: _protected_class(kind, settings) for scheme, kind in classes.items()}


def _protected_class(kind: Any, settings: Settings) -> Any:
    def urlopen(pool: Any, method: str, url: str, body: Any = None, headers: Any = None, **options: Any) -> Any:
        given = pool.headers if headers is None else headers
        return _Sending(settings, pool, kind.urlopen, method, url, body, given, options).run()

    return type(kind.__name__, (kind,), {"urlopen": urlopen})


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
        self._send = (urlopen, pool, method, target, body)
        self._retries = Retry.from_int(options.pop("retries", None), default=pool.retries)
        self._timeout = options.pop("timeout", pool.timeout)
        self._reads = options.pop("preload_content", True)
        if self._reads:
            options.pop("release_conn", None)  # reading the body releases the connection
        self._options = {**options, "retries": False, "redirect": False, "preload_content": False}

    @override
    async def send(self, ctx: Context, left: float | None, headers: Mapping[str, str]) -> BaseHTTPResponse:
        urlopen, *where = self._send
        timeout = self._timeout if left is None else bounded(self._timeout, left)
        all_headers = self._headers
        if headers:
            all_headers = HTTPHeaderDict(all_headers)
            all_headers.update(headers)
        response: BaseHTTPResponse = urlopen(*where, all_headers, timeout=timeout, **self._options)
        response.retries = self._retries  # the manager counts redirects with it
        if left is not None or not self._reads:
            limit_body(response, self._timeout, ctx.deadline, attempt_is_late)
        if self._reads:
            response.data  # noqa: B018  # reads the body, and returns the connection to the pool
        return response

    @override
    def was_discarded(self, response: BaseHTTPResponse) -> bool:
        return not self._reads and was_cut_short(response)

    @override
    def limit(self, response: BaseHTTPResponse) -> BaseHTTPResponse:
        if not self._reads:
            limit_body(response, self._timeout, self.body_deadline, self.body_is_late)
        return response
