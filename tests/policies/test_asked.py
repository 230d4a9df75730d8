"""What a Cache, a SingleFlight and a Keyed do for the other side and the clients, in numbers: those of their pages."""

from __future__ import annotations

import pytest

from resilience import Cache, CircuitBreaker, FailureRatio, Keyed, Policy, Retry, SingleFlight
from tests.policies.asked import Load, asked, thing


def is_up(now: float, thing: int) -> bool:
    """But for a minute."""
    return not 60 <= now < 120


def breaker(key: object = None) -> CircuitBreaker:
    """Opens where one call in ten fails."""
    return CircuitBreaker(FailureRatio(0.1), open_for=10)


def test_old_values_outlast_an_outage() -> None:
    """Without them an outage is seen as soon as the values are as old as `ttl`."""
    plain = asked(Retry(1), 180, is_up=is_up)
    fresh = asked(Cache(10, key=thing), 180, is_up=is_up)
    stale = asked(Cache(10, key=thing, stale=120), 180, is_up=is_up)
    assert sum(plain.failed) > 2500
    assert sum(fresh.failed) > 2000
    assert sum(stale.failed) == 0
    assert sum(stale.calls) < sum(plain.calls) / 5


@pytest.mark.parametrize(("policy", "most"), [(Retry(1), 90), (SingleFlight(key=thing), 5)], ids=["alone", "shared"])
def test_calls_for_one_thing_do_not_pile_up(policy: Policy[str], most: int) -> None:
    """Where a call takes ten times as long, ten times as many would run; shared, one for each thing."""
    load = asked(policy, 60, things=5, takes=lambda now: 2.0 if 20 <= now < 40 else 0.2)
    assert peak(load) >= most if isinstance(policy, Retry) else peak(load) <= most


def peak(load: Load) -> int:
    return max(load.at_once)


def test_a_breaker_for_each_host_spares_the_others() -> None:
    """One of five hosts is down for a minute: a breaker for all refuses calls of the other four, too."""
    plain, common, keyed = (
        asked(policy, 180, things=5, is_up=lambda now, host: host > 0 or is_up(now, host), whose=bool)
        for policy in (Retry(1), breaker(), Keyed(breaker, key=thing))
    )
    assert sum(common.failed) > 1500
    assert sum(plain.failed) == sum(keyed.failed) == 0
    assert sum(keyed.calls) < 0.95 * sum(plain.calls)
