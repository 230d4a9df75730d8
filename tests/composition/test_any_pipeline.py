"""Policies in any combination: a call that is cancelled at any suspension leaves nothing behind.

The scenes of `test_cancellation.py` are usual pipelines; here hypothesis combines policies in any order and number,
and the same sweep goes over each combination.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilience import (
    AdaptiveLimit,
    AdaptiveThrottle,
    Bulkhead,
    Chaos,
    Fallback,
    Hedge,
    Policy,
    RepeatCap,
    Retry,
    Timeout,
)
from tests.composition.test_cancellation import (
    LONG,
    WAYS,
    Scene,
    about_to_probe,
    all_permits_are_free,
    executing,
    fail_at_first,
    one_failure_short,
    still_about_to_probe,
    still_one_failure_short,
    sweep,
    work,
)
from tests.conftest import Boom

#: A policy, and a function that asserts that its state is unchanged.
Piece = tuple[Policy[Any], Callable[[], None]]


def untouched() -> None:
    """Check nothing: the policy has no state."""


def closed_breaker() -> Piece:
    breaker = one_failure_short(on=BaseException)
    return breaker, partial(still_one_failure_short, breaker)


def open_breaker() -> Piece:
    breaker = about_to_probe()
    return breaker, partial(still_about_to_probe, breaker)


def bulkhead(limit: int, queue: int) -> Piece:
    policy = Bulkhead(limit, queue=queue)
    return policy, partial(all_permits_are_free, policy)


def adaptive_limit(queue: int) -> Piece:
    limit = AdaptiveLimit(LONG, initial=1, queue=queue, on=BaseException)

    def is_free() -> None:
        stats = limit.stats()
        assert (stats.in_flight, stats.queued, stats.rejected) == (0, 0, 0)

    return limit, is_free


def throttle() -> Piece:
    policy = AdaptiveThrottle(on=BaseException)

    def has_counted_nothing() -> None:
        assert policy.stats().requests == policy.stats().rejected == 0

    return policy, has_counted_nothing


def injecting(chaos: Chaos[Any]) -> Policy[Any]:
    chaos.on(rate=1.0)
    return chaos


PIECES: dict[str, Callable[[], Piece]] = {
    "retry": lambda: (Retry(on=BaseException, backoff=[0.0001]), untouched),
    "timeout": lambda: (Timeout(LONG), untouched),
    "cooperative": lambda: (Timeout(LONG / 2, cooperative=True), untouched),
    "fallback": lambda: (Fallback("instead", on=BaseException), untouched),
    "handler": lambda: (Fallback(handler=lambda failure, ctx: "handled"), untouched),
    "closed breaker": closed_breaker,
    "open breaker": open_breaker,
    "bulkhead": lambda: bulkhead(1, 0),
    "bulkhead with a queue": lambda: bulkhead(2, 3),
    "adaptive limit": lambda: adaptive_limit(0),
    "adaptive limit with a queue": lambda: adaptive_limit(3),
    "throttle": throttle,
    "hedge": lambda: (Hedge(LONG, on=BaseException), untouched),
    "cap": lambda: (RepeatCap(5), untouched),
    "chaos": lambda: (injecting(Chaos(action=lambda ctx: None)), untouched),
    "pipeline": lambda: (Policy.wrap(Retry(on=Boom), Timeout(LONG), listeners=[lambda event: None]), untouched),
}


def scene(names: list[str], fails_at_first: bool) -> Scene:
    """Compose the policies. An innermost Retry handles the failure, if there is one."""
    pieces = [PIECES[name]() for name in names]

    def as_before() -> None:
        for _, check in pieces:
            check()

    policies = [policy for policy, _ in pieces]
    if fails_at_first:
        policies.append(Retry(on=Boom, backoff=[0.0001]))
    return executing(Policy.wrap(*policies), fail_at_first if fails_at_first else work, as_before)


@pytest.mark.parametrize("way", WAYS)
@given(names=st.lists(st.sampled_from(list(PIECES)), min_size=1, max_size=6), fails_at_first=st.booleans())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_pipeline_cancelled_at_any_await_is_as_it_was(way: str, names: list[str], fails_at_first: bool) -> None:
    """No permit, probe, count, answer or ambient context is left."""
    sweep(partial(scene, names, fails_at_first), way)
