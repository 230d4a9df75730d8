"""The current state of the policies as plain values for JSON: numbers, and names from the program's code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Any, Final, TypeAlias

from resilience.integrations.telemetry import Observed
from resilience.integrations.telemetry.observed import Watched
from resilience.policies.adaptive_limit import AdaptiveLimit
from resilience.policies.adaptive_throttle import AdaptiveThrottle
from resilience.policies.bulkhead import Bulkhead
from resilience.policies.cache import Cache
from resilience.policies.circuit_breaker import CircuitBreaker
from resilience.policies.keyed import Keyed
from resilience.policies.rate_limiter import RateLimiter
from resilience.policies.timeout import Timeout

#: How many policies of each kind are shown: a longer page would not be read. There may be one for each of a thousand
#: hosts; then those with trouble come first.
MOST: Final = 200

_Json: TypeAlias = dict[str, Any]


def state(observed: Observed, *, messages: bool) -> _Json:
    """Return the state of all observed policies.

    :param messages: whether the message of a circuit's last failure is shown, or its type only.
    """
    circuits, bulkheads, throttles, limiters, caches = [], [], [], [], []
    for where, policy in _each_once(observed):
        if isinstance(policy, CircuitBreaker):
            circuits.append({**where, **_circuit(policy, messages)})
        elif isinstance(policy, AdaptiveThrottle):
            throttles.append({**where, **_throttle(policy)})
        elif isinstance(policy, RateLimiter):
            limiters.append({**where, **_limiter(policy)})
        elif isinstance(policy, Cache):
            caches.append({**where, **_cache(policy)})
        elif not isinstance(policy, Keyed):  # the policies inside it are shown instead
            bulkheads.append({**where, **_bulkhead(policy)})
    return {
        "circuits": _first(circuits, lambda it: bool(it["state"] != "closed")),
        "bulkheads": _first(bulkheads, lambda it: bool(it["in_flight"])),
        "throttles": _first(throttles, lambda it: bool(it["rejection_rate"])),
        "limiters": _first(limiters, lambda it: bool(it["queued"])),
        "caches": _first(caches, lambda it: bool(it["stale"])),
        "left_out": {
            "circuits": max(0, len(circuits) - MOST),
            "bulkheads": max(0, len(bulkheads) - MOST),
            "throttles": max(0, len(throttles) - MOST),
            "limiters": max(0, len(limiters) - MOST),
            "caches": max(0, len(caches) - MOST),
        },
        "abandoned": Timeout.abandoned(),
    }


def _each_once(observed: Observed) -> Iterable[tuple[_Json, Watched]]:
    """Return each observed policy once, with the names of all pipelines that contain it."""
    found: dict[int, tuple[_Json, Watched]] = {}
    for pipeline, name, policy in observed:
        new: _Json = {"key": f"{pipeline}/{name}", "name": name, "pipelines": []}
        where, _ = found.setdefault(id(policy), (new, policy))
        where["pipelines"].append(pipeline)
    return found.values()


def _circuit(policy: CircuitBreaker, messages: bool) -> _Json:
    stats = policy.stats()
    failure = stats.last_failure
    open_for = policy.settings()["open_for"]
    return {
        "about": policy.describe().removeprefix(f"{policy.name}: "),
        "state": stats.state.value,
        "retry_after": stats.retry_after,
        "open_for": open_for if isinstance(open_for, float) else None,
        "last_failure": failure if failure is None or messages else failure.partition(": ")[0],
        "probes": stats.probes,
        "opened": stats.opened,
        "rejected": stats.rejected,
    }


def _bulkhead(policy: AdaptiveLimit | Bulkhead) -> _Json:
    stats = policy.stats()
    return {
        "about": policy.describe().removeprefix(f"{policy.name}: "),
        "limit": stats.limit,
        "in_flight": stats.in_flight,
        "queue": policy.settings()["queue"],
        "queued": stats.queued,
        "rejected": stats.rejected,
    }


def _throttle(policy: AdaptiveThrottle) -> _Json:
    stats = policy.stats()
    return {
        "about": policy.describe().removeprefix(f"{policy.name}: "),
        "rejection_rate": stats.rejection_rate,
        "requests": stats.requests,
        "accepts": stats.accepts,
        "rejected": stats.rejected,
    }


def _limiter(policy: RateLimiter) -> _Json:
    stats = policy.stats()
    return {
        "about": policy.describe().removeprefix(f"{policy.name}: "),
        "queued": stats.queued,
        "next_turn": stats.next_turn if stats.next_turn < inf else None,
        "rejected": stats.rejected,
    }


def _cache(policy: Cache) -> _Json:
    stats = policy.stats()
    return {
        "about": policy.describe().removeprefix(f"{policy.name}: "),
        "hits": stats.hits,
        "stale": stats.stale,
        "shared": stats.shared,
        "misses": stats.misses,
        "size": stats.size,
    }


def _first(entries: list[_Json], troubled: Callable[[_Json], bool]) -> list[_Json]:
    if len(entries) <= MOST:
        return entries
    return sorted(entries, key=lambda it: not troubled(it))[:MOST]
