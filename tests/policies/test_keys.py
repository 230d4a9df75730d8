"""Keys: what identifies a call for Keyed, SingleFlight, Cache and Once, and keys that identify none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from resilience import Cache, Context, Fallback, Keyed, Pipeline, Policy, Retry, SingleFlight
from resilience.work import Once
from tests.conftest import Boom, Incomparable, Script, World, nothing_is_left_unawaited
from tests.functions import raising

KINDS: dict[str, Callable[..., Policy[Any]]] = {
    "Keyed": lambda **key: Keyed(lambda it: Retry(1), **key),
    "SingleFlight": SingleFlight,
    "Cache": lambda **key: Cache(60, **key),
    "Cache in a store": lambda **key: Cache(60, store={}, **key),
}


def answering(policy: Policy[Any]) -> Policy[Any]:
    """Return the policy inside others that repeat and answer every failure."""
    return Pipeline(Fallback("answered"), Retry(on=Exception, backoff=[0]), policy)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_function_that_makes_no_key_is_misuse(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TypeError, match="must be hashable: unhashable type: 'list'"):
        answering(KINDS[kind](key=lambda *_: [])).call(str, "a")
    with pytest.raises(TypeError, match="called with what the function is called with"):
        answering(KINDS[kind](key=lambda: "key")).call(str, "a")
    assert caplog.records == []


@pytest.mark.parametrize("kind", [it for it in KINDS if it != "Keyed"])
def test_a_call_that_is_no_key_itself_is_misuse(kind: str) -> None:
    with pytest.raises(TypeError, match="give key="):
        answering(KINDS[kind]()).execute(lambda ctx: 1)
    with pytest.raises(TypeError, match="must be hashable: unhashable type: 'list'"):
        answering(KINDS[kind]()).call(len, [])


@pytest.mark.parametrize("kind", ["SingleFlight", "Cache", "Cache in a store"])
def test_forgetting_a_key_that_no_call_can_have_is_refused(kind: str) -> None:
    """Otherwise `forget("tea")`, without `key=`, would leave the old price in the cache."""
    policy: Any = KINDS[kind]()
    price_of = policy(lambda article, /, shop="here": object())
    before = price_of("tea", shop="there")
    for key in ("tea", ("tea",), (), None):
        with pytest.raises(TypeError, match=r"has the key .* without key=, a key is \(function, arguments\)"):
            policy.forget(key)
    policy.forget((price_of.__wrapped__, ("tea",), ("shop", "there")))
    assert price_of("tea", shop="there") is not before


@pytest.mark.parametrize("make", [*KINDS.values(), lambda key: Once({}, key=key)], ids=[*KINDS, "Once"])
async def test_a_key_function_that_returns_a_coroutine_is_misuse(world: World, make: Any) -> None:
    """Each call would have a different key. The coroutine is closed."""

    async def look_up(ctx: Context) -> str:
        return "key"

    with nothing_is_left_unawaited(), pytest.raises(TypeError, match="key must be a plain function"):
        await world.execute(Fallback("no").wrap(make(key=lambda ctx: look_up(ctx))), Script("fine").function())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [Boom("inside"), TypeError("inside")], ids=repr)
def test_an_error_inside_a_key_function_is_an_outcome(kind: str, error: Exception) -> None:
    assert answering(KINDS[kind](key=raising(error))).call(str.upper, "a") == "answered"


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_comparing_keys_is_raised_and_is_no_misuse(kind: str) -> None:
    """A key is compared with that of an earlier call, or of a running one."""
    policy = KINDS[kind](key=lambda *_: Incomparable())
    policy.call(int)
    with pytest.raises(TypeError, match="cannot be compared"):
        policy.call(policy.call, int)
    assert Fallback("answered").wrap(policy).call(policy.call, int) == "answered"
