"""The pipeline that most HTTP clients need, with every number set.

The order, and most of the numbers, are those of .NET's standard resilience handler
(Microsoft.Extensions.Http.Resilience), which many services have run for years:

    concurrency limit > total timeout > retry > circuit breaker (> hedge > rate limit) > attempt timeout

A call over the limit is refused at once. The total time covers attempts and waits. The breaker counts attempts, so
it hears of each failure, and while it is open a retry ends at once. The limit of an attempt is what makes a retry
worth it: without one, the first attempt that hangs takes all the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Never, TypeVar, final

from typing_extensions import override

from resilience import checks
from resilience.backoff import BackoffLike, Exponential
from resilience.checks import format_number
from resilience.integrations.http.exchange import exchange_of
from resilience.integrations.http.perhost import PerHost
from resilience.integrations.wire import OfHost
from resilience.network_errors import transient
from resilience.policies.bulkhead import Bulkhead
from resilience.policies.circuit_breaker import CircuitBreaker
from resilience.policies.hedge import Hedge, Quantile
from resilience.policies.rate_limiter import RateLimiter
from resilience.policies.retry import Retry
from resilience.policies.timeout import Timeout
from resilience.policy import Call, Policy
from resilience.repeats import Budget, RetryBudget, as_budget
from resilience.state.trips import FailureRatio

if TYPE_CHECKING:
    from resilience.checks import Duration
    from resilience.context import Context
    from resilience.events import Listener
    from resilience.policies.rate import Rate

T = TypeVar("T")

_BACKOFF = Exponential(2.0, cap=30.0)


def standard(
    *,
    concurrency: int = 1000,
    queue: int = 0,
    total_timeout: Duration = 30.0,
    attempts: int = 4,
    backoff: BackoffLike = _BACKOFF,
    failure_ratio: float = 0.1,
    min_calls: int = 100,
    window: Duration = 30.0,
    open_for: Duration | BackoffLike = 5.0,
    hedge: Duration | Quantile | None = None,
    budget: Budget | float | None = None,
    rate: Rate | float | None = None,
    attempt_timeout: Duration = 10.0,
    cooperative: bool = False,
    max_hosts: int = 1000,
    listeners: Iterable[Listener] = (),
) -> PerHost:
    """Return the standard pipeline for HTTP clients, with a separate breaker and bulkhead for each host.

    It is what the transports of httpx, the adapter of requests and the middleware of aiohttp take as their policy.

    :param concurrency: how many calls to a host may run at once.
    :param queue: how many more may wait for that, not longer than the total time.
    :param total_timeout: seconds for the whole call, once it is under way: all attempts, the waits between them,
        and the body of the response.
    :param attempts: the maximum number of calls, the first one included: three retries, as in .NET.
    :param backoff: the waits between them. Doubling from 2 s, each a random part of that (full jitter), so that the
        clients of a server that fails do not come back together.
    :param failure_ratio: the share of failed attempts at which the circuit of a host opens ...
    :param min_calls: ... if there were at least so many ...
    :param window: ... in so many seconds.
    :param open_for: seconds for which it stays open.
    :param hedge: seconds after which another request is made beside one that has not answered, or a `Quantile` of what
        requests to the host take; none by default. Only what may be sent twice is hedged.
    :param budget: what pays for retries and hedges to a host: a ratio of the attempts that succeed (0.1, say), for each
        host its own `RetryBudget`; or a budget for all hosts together. No limit by default; hedges without one are
        paid for with 0.1.
    :param rate: at most so many attempts to a host, each of them counted: a `Rate`, or a number in any second; no limit
        by default. Attempts wait for their turn within the total time. What the host says of its own limits, in the
        headers of a response, is obeyed too.
    :param attempt_timeout: seconds for one attempt, until the headers of the response have arrived.
    :param cooperative: in blocking code, whether the limits are only handed to the client (its timeouts are cut to
        what is left) and not enforced. By default an attempt runs on a worker thread, which the caller leaves
        when its time is over: a client's own timeouts start anew with each byte that a server sends.
    :param max_hosts: for how many hosts a pipeline is kept; see `PerHost`.
    :param listeners: listeners for the events of these pipelines.
    :raises ValueError: if an attempt may take longer than the whole call, or if `window` is shorter than two
        attempts: attempts that time out would be forgotten before there are enough of them.

    >>> from resilience.integrations.http import standard
    >>> policies = standard(total_timeout=8.0, attempt_timeout=2.0)
    >>> for policy in policies.for_host("https://example.org/").policies:
    ...     print(policy.name)
    bulkhead of https://example.org:443
    total timeout
    body
    Retry
    breaker of https://example.org:443
    attempt timeout
    """
    _check(total_timeout, attempt_timeout, window)
    checks.whole("concurrency", concurrency)
    checks.ratio("failure_ratio", failure_ratio)
    if not isinstance(listeners, Iterable):
        raise TypeError(f"listeners must be a sequence of functions, not {listeners!r}")
    heard = tuple(listeners)
    # What holds no state is made once for all hosts.
    total = Timeout(total_timeout, cooperative=cooperative, name="total timeout")
    shared = as_budget("budget", budget)
    body, retry = _Body(), Retry(attempts, backoff=backoff, budget=shared)
    trip = FailureRatio(failure_ratio, min_calls=min_calls, window=window)
    attempt = Timeout(attempt_timeout, cooperative=cooperative, name="attempt timeout")
    max_wait = total_timeout if queue else None

    def make(origin: str) -> Policy[Any]:
        def of(name: str) -> str:
            return OfHost(f"{name} of {origin}", common=name)

        own, again = shared, retry
        if isinstance(budget, (int, float)):
            own = RetryBudget(budget)
            again = Retry(attempts, backoff=backoff, budget=own)
        hedging = [] if hedge is None else [Hedge(hedge, budget=0.1 if own is None else own, name=of("hedge"))]
        limiter = [] if rate is None else [RateLimiter(rate, name=of("rate limiter"))]
        return Policy.wrap(
            Bulkhead(concurrency, queue=queue, max_wait=max_wait, name=of("bulkhead")),
            total,
            body,
            again,
            CircuitBreaker(trip, open_for=open_for, on=transient, name=of("breaker")),
            *hedging,
            *limiter,
            attempt,
            name=of("standard pipeline"),
            listeners=heard,
        )

    make("https://example.org")  # what is wrong is refused here, and not with the first call
    return PerHost(make, max_hosts=max_hosts)


def _check(total_timeout: object, attempt_timeout: object, window: object) -> None:
    total = checks.seconds("total_timeout", total_timeout)
    attempt = checks.seconds("attempt_timeout", attempt_timeout)
    period = checks.seconds("window", window)
    if attempt > total:
        raise ValueError(
            f"attempt_timeout must be at most total_timeout: {format_number(attempt)} s is more than "
            f"{format_number(total)} s"
        )
    if period < 2 * attempt:
        raise ValueError(
            f"window must be at least twice attempt_timeout: {format_number(period)} s is less than "
            f"2 * {format_number(attempt)} s"
        )


@final
class _Body(Policy[Never]):
    """Gives the body of the response the time of the whole call, and not that of the attempt."""

    name = "body"

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        exchange = exchange_of(ctx)
        if exchange is not None:
            exchange.body_may_last_until = ctx.deadline
        return await call(ctx)

    @override
    def describe(self) -> str:
        return "body: has the time that is left of the total"
