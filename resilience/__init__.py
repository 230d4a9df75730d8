"""Resilience policies for any callable, in threads, asyncio and trio.

>>> from resilience import Fallback, Retry, Timeout
>>> pipeline = Fallback("unknown").wrap(Timeout(8.0), Retry(attempts=3))
>>> pipeline.call(str.upper, "hello")
'HELLO'
"""

from importlib import import_module

TYPE_CHECKING = False  # checkers take it for true, and `typing` need not be imported for it
if TYPE_CHECKING:
    from resilience import backoff, errors, events
    from resilience.ambient import current_context
    from resilience.budget import deadline, detached
    from resilience.circuit_state import CircuitState
    from resilience.context import Context
    from resilience.errors import (
        BulkheadFull,
        CircuitIsolated,
        CircuitOpen,
        DeadlineExceeded,
        LimitExceeded,
        RateLimited,
        Rejected,
        ResilienceError,
        RetriesExhausted,
        Throttled,
        TimeoutExceeded,
        WorkersExhausted,
    )
    from resilience.network_errors import transient
    from resilience.outcome import Failure, Outcome, Success
    from resilience.policies.adaptive_limit import AdaptiveLimit, LimitStats
    from resilience.policies.adaptive_throttle import AdaptiveThrottle, ThrottleStats
    from resilience.policies.bulkhead import Bulkhead, BulkheadStats
    from resilience.policies.cache import Cache, CacheStats
    from resilience.policies.chaos import Chaos
    from resilience.policies.circuit_breaker import CircuitBreaker
    from resilience.policies.fallback import Fallback
    from resilience.policies.hedge import Hedge, Quantile
    from resilience.policies.keyed import Keyed, KeyedStats
    from resilience.policies.live_circuit import CircuitStats
    from resilience.policies.rate import Rate
    from resilience.policies.rate_limiter import RateLimiter, RateLimiterStats
    from resilience.policies.repeat_cap import RepeatCap
    from resilience.policies.retry import Retry
    from resilience.policies.single_flight import SingleFlight, SingleFlightStats
    from resilience.policies.timeout import Timeout
    from resilience.policy import Call, Pipeline, Policy
    from resilience.record import FailedAttempt
    from resilience.repeats import RetryBudget
    from resilience.state.concurrency import Sample, Seeking
    from resilience.state.trips import ConsecutiveFailures, FailureRatio, SlowRatio, Trip

__all__ = [
    "AdaptiveLimit",
    "AdaptiveThrottle",
    "Bulkhead",
    "BulkheadFull",
    "BulkheadStats",
    "Cache",
    "CacheStats",
    "Call",
    "Chaos",
    "CircuitBreaker",
    "CircuitIsolated",
    "CircuitOpen",
    "CircuitState",
    "CircuitStats",
    "ConsecutiveFailures",
    "Context",
    "DeadlineExceeded",
    "FailedAttempt",
    "Failure",
    "FailureRatio",
    "Fallback",
    "Hedge",
    "Keyed",
    "KeyedStats",
    "LimitExceeded",
    "LimitStats",
    "Outcome",
    "Pipeline",
    "Policy",
    "Quantile",
    "Rate",
    "RateLimited",
    "RateLimiter",
    "RateLimiterStats",
    "Rejected",
    "RepeatCap",
    "ResilienceError",
    "RetriesExhausted",
    "Retry",
    "RetryBudget",
    "Sample",
    "Seeking",
    "SingleFlight",
    "SingleFlightStats",
    "SlowRatio",
    "Success",
    "ThrottleStats",
    "Throttled",
    "Timeout",
    "TimeoutExceeded",
    "Trip",
    "WorkersExhausted",
    "backoff",
    "current_context",
    "deadline",
    "detached",
    "errors",
    "events",
    "transient",
]

#: Where each name lives: module -> names, and modules of that name. A module is imported when one of its names is first
#: asked for, so a program pays for those policies only that it uses.
_HOMES = {
    "ambient": ("current_context",),
    "budget": ("deadline", "detached"),
    "circuit_state": ("CircuitState",),
    "context": ("Context",),
    "errors": (
        "BulkheadFull",
        "CircuitIsolated",
        "CircuitOpen",
        "DeadlineExceeded",
        "LimitExceeded",
        "RateLimited",
        "Rejected",
        "ResilienceError",
        "RetriesExhausted",
        "Throttled",
        "TimeoutExceeded",
        "WorkersExhausted",
    ),
    "network_errors": ("transient",),
    "outcome": ("Failure", "Outcome", "Success"),
    "policies.adaptive_limit": ("AdaptiveLimit", "LimitStats"),
    "policies.adaptive_throttle": ("AdaptiveThrottle", "ThrottleStats"),
    "policies.bulkhead": ("Bulkhead", "BulkheadStats"),
    "policies.cache": ("Cache", "CacheStats"),
    "policies.chaos": ("Chaos",),
    "policies.circuit_breaker": ("CircuitBreaker",),
    "policies.fallback": ("Fallback",),
    "policies.hedge": ("Hedge", "Quantile"),
    "policies.keyed": ("Keyed", "KeyedStats"),
    "policies.live_circuit": ("CircuitStats",),
    "policies.rate": ("Rate",),
    "policies.rate_limiter": ("RateLimiter", "RateLimiterStats"),
    "policies.repeat_cap": ("RepeatCap",),
    "policies.retry": ("Retry",),
    "policies.single_flight": ("SingleFlight", "SingleFlightStats"),
    "policies.timeout": ("Timeout",),
    "policy": ("Call", "Pipeline", "Policy"),
    "record": ("FailedAttempt",),
    "repeats": ("RetryBudget",),
    "state.concurrency": ("Sample", "Seeking"),
    "state.trips": ("ConsecutiveFailures", "FailureRatio", "SlowRatio", "Trip"),
    "backoff": (),
    "events": (),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name, name)
    if home not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{home}")
    value = globals()[name] = module if home == name else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
