"""Policies, contexts and events that are pickled and copied: they do it right, or refuse and say why."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from resilience import (
    AdaptiveLimit,
    AdaptiveThrottle,
    Bulkhead,
    Chaos,
    CircuitBreaker,
    ConsecutiveFailures,
    Context,
    Fallback,
    Policy,
    RateLimiter,
    Retry,
    Timeout,
)
from resilience.backoff import Exponential
from resilience.policy import Call
from tests.conftest import Boom

WAYS_TO_COPY: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda it: pickle.loads(pickle.dumps(it)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}

WITHOUT_STATE: list[Policy[Any]] = [
    Retry(5, on=(OSError, KeyError), backoff=Exponential(1.0, cap=4.0), name="again"),
    Timeout(3.0, cooperative=True),
    Fallback("instead", on=KeyError),
    Policy.wrap(Fallback(None), Retry(), Timeout(2.0), name="all"),
]


@pytest.mark.parametrize("way", WAYS_TO_COPY)
@pytest.mark.parametrize("policy", WITHOUT_STATE, ids=lambda it: it.name)
def test_a_policy_that_shares_nothing_is_copied_as_it_is(policy: Policy[Any], way: str) -> None:
    """The copy is configured alike, and works by itself."""
    again = WAYS_TO_COPY[way](policy)
    assert again is not policy
    assert repr(again) == repr(policy)
    assert again.call(len, "four") == 4


class Slotted(Policy):
    """A user's policy that keeps one setting in a slot, as `@dataclass(slots=True)` makes it, and one beside it."""

    __slots__ = ("suffix",)

    def __init__(self, suffix: str, prefix: str) -> None:
        self.suffix = suffix
        self.prefix = prefix

    async def around(self, call: Call[Any], ctx: Context) -> Any:
        return self.prefix + await call(ctx) + self.suffix


@pytest.mark.parametrize("way", WAYS_TO_COPY)
def test_a_policy_with_slots_is_copied_with_what_they_hold(way: str) -> None:
    """Its attributes and its slots are its settings alike."""
    again = WAYS_TO_COPY[way](Slotted("!", "> "))
    assert again.call(str.upper, "hello") == "> HELLO!"


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
@pytest.mark.parametrize(
    "policy",
    [
        Bulkhead(1),
        RateLimiter(1),
        CircuitBreaker(ConsecutiveFailures(2)),
        Chaos(result=1),
        AdaptiveLimit(1),
        AdaptiveThrottle(),
        Retry().wrap(Bulkhead(1)),
    ],
    ids=["Bulkhead", "RateLimiter", "CircuitBreaker", "Chaos", "AdaptiveLimit", "AdaptiveThrottle", "Pipeline"],
)
def test_a_policy_that_all_its_users_share_refuses(policy: Policy[Any], way: str) -> None:
    """Two of them would let twice as much through; also as a part of a pipeline."""
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        WAYS_TO_COPY[way](policy)


@pytest.mark.parametrize("way", WAYS_TO_COPY)
def test_a_context_refuses_and_says_what_to_do(way: str) -> None:
    """Its deadline means nothing on the clock of another process, and a copy would tell of another execution."""
    with pytest.raises(TypeError, match=r"hand over ctx\.remaining\(\)"):
        WAYS_TO_COPY[way](Context(timeout=5.0))


def test_an_event_is_no_way_to_change_an_execution() -> None:
    """Its properties are a copy: what a listener does to them is not seen by anybody else."""

    def hear(event: Any) -> None:
        event.properties["tenant"] = "mine"

    seen: list[Any] = []
    retry = Retry(2, on=Boom, backoff=[0], on_retry=hear)

    def fn(ctx: Context) -> None:
        seen.append(ctx.properties["tenant"])
        raise Boom

    retry.capture(fn, Context(properties={"tenant": 7}))
    assert seen == [7, 7]
