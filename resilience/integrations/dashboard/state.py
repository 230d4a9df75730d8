"""The current state of the policies as plain values for JSON: numbers, and names from the program's code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from math import inf
from operator import itemgetter
from typing import Any, Final, TypeAlias

from resilience.integrations.telemetry import Observed
from resilience.integrations.telemetry.instruments import Watched
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

#: The lists of the page, and whether an entry has trouble.
_TROUBLED: dict[str, Callable[[_Json], object]] = {
    "circuits": lambda it: it["state"] != "closed",
    "bulkheads": itemgetter("in_flight"),
    "throttles": itemgetter("rejection_rate"),
    "limiters": itemgetter("queued"),
    "caches": itemgetter("stale"),
}
_LISTS: dict[type, str] = {
    CircuitBreaker: "circuits",
    Bulkhead: "bulkheads",
    AdaptiveLimit: "bulkheads",
    AdaptiveThrottle: "throttles",
    RateLimiter: "limiters",
    Cache: "caches",
}


def state(observed: Observed, *, messages: bool) -> _Json:
    """Return the state of all observed policies.

    :param messages: whether the message of a circuit's last failure is shown, or its type only.
    """
    lists: dict[str, list[_Json]] = {name: [] for name in _TROUBLED}
    for where, policy in _each_once(observed):
        if not isinstance(policy, Keyed):  # the policies inside it are shown instead
            lists[_LISTS[type(policy)]].append({**where, **_entry(policy, messages)})
    return {
        **{name: _first(entries, _TROUBLED[name]) for name, entries in lists.items()},
        "left_out": {name: max(0, len(entries) - MOST) for name, entries in lists.items()},
        "abandoned": Timeout.abandoned(),
    }


def _each_once(observed: Observed) -> Iterable[tuple[_Json, Watched]]:
    """Return each observed policy once, with the names of all pipelines that contain it."""
    found: dict[int, tuple[_Json, Watched]] = {}
    for pipeline, name, policy in observed:
        new: _Json = {"key": f"{name}/{id(policy)}", "name": name, "pipelines": []}
        where, _ = found.setdefault(id(policy), (new, policy))
        where["pipelines"].append(pipeline)
    return found.values()


def _entry(policy: Watched, messages: bool) -> _Json:
    """Return the statistics of a policy, and what the page needs besides."""
    entry = {"about": policy.describe().removeprefix(f"{policy.name}: "), **asdict(policy.stats())}
    if isinstance(policy, CircuitBreaker):
        open_for, failure = policy.settings()["open_for"], entry["last_failure"]
        entry["state"] = entry["state"].value
        entry["open_for"] = open_for if isinstance(open_for, float) else None
        entry["last_failure"] = failure if failure is None or messages else failure.partition(": ")[0]
    elif isinstance(policy, (AdaptiveLimit, Bulkhead)):
        entry["queue"] = policy.settings()["queue"]
    elif isinstance(policy, RateLimiter) and entry["next_turn"] == inf:
        entry["next_turn"] = None
    return entry


def _first(entries: list[_Json], is_troubled: Callable[[_Json], object]) -> list[_Json]:
    if len(entries) <= MOST:
        return entries
    return sorted(entries, key=lambda it: not is_troubled(it))[:MOST]
