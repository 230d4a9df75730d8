"""The pipeline that most HTTP clients need, with a default for every number.

The order, and most of the numbers, are those of .NET's standard resilience handler
(Microsoft.Extensions.Http.Resilience), which many services have used for years:

    concurrency limit > total timeout > retry > circuit breaker (> hedge > rate limit) > attempt timeout

A call over the limit is refused at once. The total time covers attempts and waits. The breaker counts attempts, so
it counts each failure, and while it is open, the retry gives up at once. The limit of an attempt makes retries
useful: without it, a first attempt that hangs takes all the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Never, TypeVar, final

from typing_extensions import override

from resilience import checks
from resilience.backoff import BackoffLike, Exponential
from resilience.checks import Duration
from resilience.context import Context
from resilience.events import Listener
from resilience.formats import format_number
from resilience.integrations.http.exchange import Exchange
from resilience.integrations.http.perhost import PerHost
from resilience.integrations.wire import OfHost
from resilience.network_errors import transient
from resilience.policies.bulkhead import Bulkhead
from resilience.policies.circuit_breaker import CircuitBreaker
from resilience.policies.hedge import Hedge
from resilience.policies.latencies import Quantile
from resilience.policies.rate import Rate
from resilience.policies.rate_limiter import RateLimiter
from resilience.policies.retry import Retry
from resilience.policies.timeout import Timeout
from resilience.policy import Call, Pipeline, Policy
from resilience.repeats import Budget, RetryBudget, as_budget
from resilience.state.trips import FailureRatio

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
) -> PerHost[Pipeline]:
    """Return the standard pipeline for HTTP clients, with a separate breaker and bulkhead for each host.

    The integrations of httpx, requests, aiohttp, urllib3, openai and anthropic take it as their policy.

    :param concurrency: how many calls to a host may run at once.
    :param queue: how many more calls may wait, for at most `total_timeout`.
    :param total_timeout: seconds for the whole call, without the time in the queue: all attempts, the waits between
        them, and the body of the response.
    :param attempts: the maximum number of calls, the first one included: three retries, as in .NET.
    :param backoff: the waits between attempts. By default a random part of 2 s, then of 4 s, and so on up to 30 s (full
        jitter), so that the clients of a failing server do not retry together.
    :param failure_ratio: the share of failed attempts at which the circuit of a host opens ...
    :param min_calls: ... if there were at least so many ...
    :param window: ... in so many seconds.
    :param open_for: seconds for which the circuit stays open.
    :param hedge: seconds without a response after which another request is made beside the first, or a `Quantile` of
        what requests to the host take; no hedges by default. Only requests that may be sent twice are hedged.
    :param budget: what pays for retries and hedges to a host: a ratio of the attempts that succeed (such as 0.1), which
        creates a `RetryBudget` for each host; or a budget that all hosts share. By default retries have no limit, and
        hedges have 0.1.
    :param rate: the maximum rate of attempts to a host: a `Rate`, or a number of attempts in any second; no limit
        by default. Attempts wait for their turn within the total time. Rate limits that the host reports in the
        headers of its responses are obeyed, too.
    :param attempt_timeout: seconds for one attempt, until the headers of the response have arrived.
    :param cooperative: in blocking code, whether the limits are only passed to the client, whose timeouts are shortened
        to the time left, and not enforced. By default an attempt runs on a worker thread, and is abandoned when its
        time is up, because a client's own timeouts restart with each byte that a server sends.
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
    if not isinstance(hedge, Quantile):
        checks.optional_seconds("hedge", hedge, zero=True)
    listeners = checks.several("listeners", listeners, "a sequence of functions")
    # All hosts share the policies that hold no state.
    total = Timeout(total_timeout, cooperative=cooperative, name="total timeout")
    shared = as_budget("budget", budget)
    body, retry = _Body(), Retry(attempts, backoff=backoff, budget=shared)
    trip = FailureRatio(failure_ratio, min_calls=min_calls, window=window)
    attempt = Timeout(attempt_timeout, cooperative=cooperative, name="attempt timeout")
    max_wait = total_timeout if queue else None

    def make(origin: str) -> Pipeline:
        def of(name: str) -> str:
            return OfHost(f"{name} of {origin}", common=name)

        own, again = shared, retry
        if isinstance(budget, (int, float)):
            own = RetryBudget(budget if hedge is None else budget / 2)  # the Retry and the Hedge both pay in
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
            listeners=listeners,
        )

    make("https://example.org")  # so that wrong arguments raise here, and not on the first call
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
    """Gives the body of the response the deadline of the whole call, instead of the deadline of the attempt."""

    name = "body"

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        if isinstance(ctx._function, Exchange):
            ctx._function.body_may_last_until = ctx.deadline
        return await call(ctx)

    @override
    def describe(self) -> str:
        return "body: has the time that is left of the total"
