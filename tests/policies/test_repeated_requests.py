"""The effect of Cache, SingleFlight and Keyed on a service and its clients: the numbers of their pages."""

from __future__ import annotations

import pytest

from resilience import Cache, CircuitBreaker, FailureRatio, Keyed, Policy, Retry, SingleFlight
from tests.policies.repeated_requests import Load, item, simulate


def is_up(now: float, item: int) -> bool:
    """Whether the service is up, as it is except for one minute."""
    return not 60 <= now < 120


def breaker(key: object = None) -> CircuitBreaker:
    """Return a breaker that opens if one call in ten fails."""
    return CircuitBreaker(FailureRatio(0.1), open_for=10)


def test_stale_values_bridge_an_outage() -> None:
    """Without them clients see the outage as soon as the values are as old as `ttl`."""
    plain = simulate(Retry(1), 130, is_up=is_up)
    fresh = simulate(Cache(10, key=item), 130, is_up=is_up)
    stale = simulate(Cache(10, key=item, stale=120), 130, is_up=is_up)
    assert sum(plain.failed) > 2500
    assert sum(fresh.failed) > 2000
    assert sum(stale.failed) == 0
    assert sum(stale.calls) < sum(plain.calls) / 5


@pytest.mark.parametrize(("policy", "most"), [(Retry(1), 90), (SingleFlight(key=item), 5)], ids=["alone", "shared"])
def test_single_flight_bounds_the_concurrent_calls_of_a_slow_service(policy: Policy[str], most: int) -> None:
    """If calls take ten times as long, ten times as many run; with SingleFlight, one for each key."""
    load = simulate(policy, 60, items=5, takes=lambda now: 2.0 if 20 <= now < 40 else 0.2)
    assert peak(load) >= most if isinstance(policy, Retry) else peak(load) <= most


def peak(load: Load) -> int:
    return max(load.at_once)


def test_a_breaker_for_each_host_does_not_refuse_calls_of_the_others() -> None:
    """One of five hosts is down for a minute: one breaker for all of them refuses calls of the other four, too."""
    plain, common, keyed = (
        simulate(policy, 130, items=5, is_up=lambda now, host: host > 0 or is_up(now, host), counted=bool)
        for policy in (Retry(1), breaker(), Keyed(breaker, key=item))
    )
    assert sum(common.failed) > 1500
    assert sum(plain.failed) == sum(keyed.failed) == 0
    assert sum(keyed.calls) < 0.95 * sum(plain.calls)
