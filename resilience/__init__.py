"""Resilience policies for any callable, in threads, asyncio and trio.

>>> from resilience import Fallback, Retry, Timeout
>>> pipeline = Fallback("unknown").wrap(Timeout(8.0), Retry(attempts=3))
>>> pipeline.call(str.upper, "hello")
'HELLO'
"""

from importlib import import_module

TYPE_CHECKING = False  # type checkers assume that it is true; this saves the import of `typing`
if TYPE_CHECKING:
    # isort would split these imports into one statement for each name.
    # isort: off
    from resilience import backoff as backoff, errors as errors, events as events
    from resilience.ambient import current_context as current_context
    from resilience.circuit_state import CircuitState as CircuitState, CircuitStats as CircuitStats
    from resilience.context import Context as Context
    from resilience.deadlines import deadline as deadline, detached as detached
    from resilience.errors import (
        BulkheadFull as BulkheadFull,
        CircuitIsolated as CircuitIsolated,
        CircuitOpen as CircuitOpen,
        DeadlineExceeded as DeadlineExceeded,
        LimitExceeded as LimitExceeded,
        RateLimited as RateLimited,
        Rejected as Rejected,
        ResilienceError as ResilienceError,
        RetriesExhausted as RetriesExhausted,
        Throttled as Throttled,
        TimeoutExceeded as TimeoutExceeded,
        WorkersExhausted as WorkersExhausted,
    )
    from resilience.network_errors import transient as transient
    from resilience.outcome import Failure as Failure, Outcome as Outcome, Success as Success
    from resilience.policies.adaptive_limit import AdaptiveLimit as AdaptiveLimit, LimitStats as LimitStats
    from resilience.policies.adaptive_throttle import (
        AdaptiveThrottle as AdaptiveThrottle,
        ThrottleStats as ThrottleStats,
    )
    from resilience.policies.bulkhead import Bulkhead as Bulkhead, BulkheadStats as BulkheadStats
    from resilience.policies.cache import Cache as Cache, CacheStats as CacheStats
    from resilience.policies.chaos import Chaos as Chaos
    from resilience.policies.circuit_breaker import CircuitBreaker as CircuitBreaker
    from resilience.policies.fallback import Fallback as Fallback
    from resilience.policies.hedge import Hedge as Hedge
    from resilience.policies.keyed import Keyed as Keyed, KeyedStats as KeyedStats
    from resilience.policies.latencies import Quantile as Quantile
    from resilience.policies.rate import Rate as Rate
    from resilience.policies.rate_limiter import RateLimiter as RateLimiter, RateLimiterStats as RateLimiterStats
    from resilience.policies.repeat_cap import RepeatCap as RepeatCap
    from resilience.policies.retry import Retry as Retry
    from resilience.policies.single_flight import SingleFlight as SingleFlight, SingleFlightStats as SingleFlightStats
    from resilience.policies.timeout import Timeout as Timeout
    from resilience.policy import Call as Call, Pipeline as Pipeline, Policy as Policy
    from resilience.record import FailedAttempt as FailedAttempt
    from resilience.repeats import RetryBudget as RetryBudget
    from resilience.state.concurrency import Sample as Sample, Seeking as Seeking
    from resilience.state.trips import (
        ConsecutiveFailures as ConsecutiveFailures,
        FailureCount as FailureCount,
        FailureRatio as FailureRatio,
        SlowRatio as SlowRatio,
        Trip as Trip,
    )

#: The module of each public name: module -> names, with spaces between. A module is imported on the first access to one
#: of its names, so a program imports only the policies that it uses. Add a new name here and to the imports above. Type
#: checkers and editors, which do not run `__getattr__`, read those imports, and treat a name imported `as` itself as
#: public.
_HOMES = {
    "ambient": "current_context",
    "circuit_state": "CircuitState CircuitStats",
    "context": "Context",
    "deadlines": "deadline detached",
    "errors": (
        "BulkheadFull CircuitIsolated CircuitOpen DeadlineExceeded LimitExceeded RateLimited Rejected "
        "ResilienceError RetriesExhausted Throttled TimeoutExceeded WorkersExhausted"
    ),
    "network_errors": "transient",
    "outcome": "Failure Outcome Success",
    "policies.adaptive_limit": "AdaptiveLimit LimitStats",
    "policies.adaptive_throttle": "AdaptiveThrottle ThrottleStats",
    "policies.bulkhead": "Bulkhead BulkheadStats",
    "policies.cache": "Cache CacheStats",
    "policies.chaos": "Chaos",
    "policies.circuit_breaker": "CircuitBreaker",
    "policies.fallback": "Fallback",
    "policies.hedge": "Hedge",
    "policies.keyed": "Keyed KeyedStats",
    "policies.latencies": "Quantile",
    "policies.rate": "Rate",
    "policies.rate_limiter": "RateLimiter RateLimiterStats",
    "policies.repeat_cap": "RepeatCap",
    "policies.retry": "Retry",
    "policies.single_flight": "SingleFlight SingleFlightStats",
    "policies.timeout": "Timeout",
    "policy": "Call Pipeline Policy",
    "record": "FailedAttempt",
    "repeats": "RetryBudget",
    "state.concurrency": "Sample Seeking",
    "state.trips": "ConsecutiveFailures FailureCount FailureRatio SlowRatio Trip",
}
_MODULES = ("backoff", "errors", "events")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()} | {name: name for name in _MODULES}

if not TYPE_CHECKING:  # pragma: no branch (only type checkers skip it)
    __all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_HOME_OF[name]}")
    value = globals()[name] = module if name in _MODULES else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
