"""Pickling and copying policies, contexts and events works, or is refused with a reason."""

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
    Cache,
    Chaos,
    CircuitBreaker,
    ConsecutiveFailures,
    Context,
    Fallback,
    Hedge,
    Keyed,
    Policy,
    RateLimiter,
    RepeatCap,
    Retry,
    RetryBudget,
    Seeking,
    SingleFlight,
    Timeout,
    events,
)
from resilience.backoff import Exponential
from resilience.policy import Call
from resilience.work import Gate, IdempotencyKey, Once
from tests.conftest import Boom

WAYS_TO_COPY: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}

WITHOUT_STATE: list[Policy[Any]] = [
    Retry(5, on=(OSError, KeyError), backoff=Exponential(1.0, cap=4.0), name="again"),
    Timeout(3.0, cooperative=True),
    Fallback("instead", on=KeyError),
    RepeatCap(2),
    IdempotencyKey(),
]


@pytest.mark.parametrize("way", WAYS_TO_COPY)
@pytest.mark.parametrize("policy", WITHOUT_STATE, ids=lambda policy: policy.name)
def test_a_policy_without_shared_state_can_be_copied(policy: Policy[Any], way: str) -> None:
    copied = WAYS_TO_COPY[way](policy)
    assert copied is not policy
    assert repr(copied) == repr(policy)
    assert copied.call(len, "four") == 4


class Slotted(Policy):
    """A custom policy with one setting in a slot, as `@dataclass(slots=True)` makes it, and one in its dictionary."""

    __slots__ = ("suffix",)

    def __init__(self, suffix: str, prefix: str) -> None:
        self.suffix = suffix
        self.prefix = prefix

    async def around(self, call: Call[Any], ctx: Context) -> Any:
        return self.prefix + await call(ctx) + self.suffix


@pytest.mark.parametrize("way", WAYS_TO_COPY)
def test_a_copy_of_a_used_custom_policy_is_independent_of_the_original(way: str) -> None:
    policy = Slotted("!", "> ")
    assert policy.call(str.upper, "hello") == "> HELLO!"
    copied = WAYS_TO_COPY[way](policy)
    copied.prefix, copied.suffix = "< ", copied.suffix * 2
    assert copied.call(str.upper, "hello") == "< HELLO!!"
    assert policy.call(str.upper, "hello") == "> HELLO!"


def listen(event: events.Event) -> None:
    SEEN.append(event)


SEEN: list[events.Event] = []


@pytest.mark.parametrize("way", WAYS_TO_COPY)
def test_a_copy_of_a_pipeline_has_the_same_policies_name_and_listeners(way: str) -> None:
    pipeline = Policy.wrap(Fallback("none"), Retry(2, backoff=[0]), Timeout(3.0), name="users", listeners=[listen])
    copied = WAYS_TO_COPY[way](pipeline)
    assert repr(copied) == repr(pipeline)
    settings = dict(copied.settings())
    assert repr(settings.pop("policies")) == repr(pipeline.policies)
    assert settings == {"name": "users", "listeners": (listen,)}
    SEEN.clear()
    assert copied.call(lambda: 1 // 0) == "none"
    assert [event.policy for event in SEEN] == ["Fallback", "users"]


@pytest.mark.parametrize("way", WAYS_TO_COPY)
@pytest.mark.parametrize(
    ("policy", "shared"),
    [
        (Bulkhead(1), "permits"),
        (RateLimiter(1), "turns"),
        (CircuitBreaker(ConsecutiveFailures(2)), "circuit"),
        (Chaos(result=1), "switch"),
        (AdaptiveLimit(1), "permits"),
        (AdaptiveThrottle(), "counts"),
        (Hedge(), "budget and observations"),
        (SingleFlight(name="users"), "running calls"),
        (Cache(60, name="users"), "values"),
        (Gate(), "count of calls"),
        (Once({}, key=len), "store"),
        (Keyed(len, len, name="hosts"), "policies"),  # type: ignore[arg-type,return-value]
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Policy) else "",
)
def test_a_policy_with_shared_state_cannot_be_copied(policy: Policy[Any], shared: str, way: str) -> None:
    """Two copies would admit twice as much."""
    message = f"{policy.name} cannot be copied or pickled, because all its users share its {shared}"
    with pytest.raises(TypeError, match=message):
        WAYS_TO_COPY[way](policy)


@pytest.mark.parametrize("way", WAYS_TO_COPY)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Context(timeout=5.0), r"pass on ctx\.remaining\(\)"),
        (RetryBudget(), "shared by all that hold it; it cannot be copied or pickled"),
        (Seeking(), "cannot be copied or pickled, because it learns from all calls"),
        (Retry().proxy([], "count"), "proxy"),
        (Retry().streaming().call(iter, "ab"), "a stream cannot be copied or pickled"),
        (Retry().streaming().acall(iter, "ab"), "a stream cannot be copied or pickled"),  # type: ignore[arg-type]
    ],
    ids=["context", "budget", "algorithm", "proxy", "stream", "asynchronous stream"],
)
def test_what_belongs_to_its_process_cannot_be_copied(value: object, message: str, way: str) -> None:
    """The deadline of a context has no meaning in another process, and a copy would not share what others share."""
    with pytest.raises(TypeError, match=message):
        WAYS_TO_COPY[way](value)


def test_a_policy_with_a_budget_cannot_be_copied() -> None:
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(Retry(budget=RetryBudget()))


def test_a_listener_cannot_change_an_execution_through_its_event() -> None:
    """The event has a copy of the properties."""

    def change(event: Any) -> None:
        event.properties["tenant"] = "mine"

    seen: list[Any] = []
    retry = Retry(2, on=Boom, backoff=[0], on_retry=change)

    def fn(ctx: Context) -> None:
        seen.append(ctx.properties["tenant"])
        raise Boom

    retry.capture(fn, Context(properties={"tenant": 7}))
    assert seen == [7, 7]
