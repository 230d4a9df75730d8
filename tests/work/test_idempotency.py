"""IdempotencyKey: one key for each execution, the same in all of its attempts."""

from __future__ import annotations

import pickle
from itertools import count
from typing import Any

import pytest

from resilience import Context, Hedge, Keyed, Pipeline, Policy, Retry, current_context
from resilience.work import IdempotencyKey
from resilience.work.idempotency import key_for
from tests.conftest import Boom, Virtual, World
from tests.functions import quick


def numbered(prefix: str = "key") -> IdempotencyKey:
    numbers = count(1)
    return IdempotencyKey(lambda: f"{prefix}-{next(numbers)}")


@pytest.mark.parametrize("order", ["outside", "inside", "between"])
async def test_each_execution_has_one_key_for_all_attempts(world: World, order: str) -> None:
    key = numbered()
    pipeline = {
        "outside": Pipeline(key, quick(2)),
        "inside": Pipeline(quick(2), key),
        "between": Pipeline(Retry(1), Pipeline(quick(2), name="inner"), key),
    }[order]
    seen: list[Any] = []

    async def fn(ctx: Context) -> None:
        seen.append(key_for(ctx))
        raise Boom

    for _ in range(2):
        await world.attempt(pipeline, fn)
    assert seen == ["key-1", "key-1", "key-2", "key-2"]


@pytest.mark.parametrize("inside", [False, True])
async def test_a_key_of_the_caller_is_kept(world: World, inside: bool) -> None:
    pipeline = Pipeline(quick(2), numbered()) if inside else Pipeline(numbered(), quick(2))
    ctx = Context(properties={"idempotency_key": "order-7", "tenant": "blue"})

    async def fn(ctx: Context) -> Any:
        return dict(ctx.properties)

    assert await world.execute(pipeline, fn, ctx) == {"idempotency_key": "order-7", "tenant": "blue"}


@pytest.mark.parametrize(
    ("given", "keys"),
    [({}, ["outer-1", "inner-1", None]), ({"idempotency_key": "order-7"}, ["order-7", "order-7", "order-7"])],
    ids=["no key", "a key of the caller"],
)
async def test_a_nested_execution_has_its_own_key_or_none_or_that_of_the_caller(
    world: World, given: dict[str, str], keys: list[str | None]
) -> None:
    """Without an `IdempotencyKey` in its policy, it does not send that of the outer call.

    A key of the caller applies to nested executions, too, unless they are given another one. Otherwise a client in the
    call, with its own policy, would send another one.
    """
    outer, inner, seen = numbered("outer"), numbered("inner"), []

    async def innermost(ctx: Context) -> None:
        seen.append(key_for(ctx))

    async def fn(ctx: Context) -> None:
        seen.append(key_for(ctx))
        await world.execute(Pipeline(quick(2), inner), innermost)
        await world.execute(quick(2), innermost)
        await world.execute(inner, innermost, Context(properties={"idempotency_key": "second"}))

    await world.execute(Pipeline(outer, quick(2)), fn, Context(properties=given))
    assert seen == [*keys, "second"]


def test_keys_are_random_uuids_by_default() -> None:
    keys = {IdempotencyKey().execute(lambda ctx: ctx.properties["idempotency_key"]) for _ in range(10)}
    assert len(keys) == 10
    assert {len(it) for it in keys} == {36}
    assert {type(pickle.loads(pickle.dumps(it))) for it in keys} == {str}


def test_a_keyed_policy_may_choose_a_pipeline_with_an_idempotency_key() -> None:
    seen: list[Any] = []

    def fn() -> None:
        seen.append(current_context().properties["idempotency_key"])
        raise Boom

    policy = numbered().wrap(quick(2))
    keyed = Keyed(lambda _: policy, key=lambda: "all")
    for _ in range(2):
        with pytest.raises(Boom):
            keyed.call(fn)
    assert seen == ["key-1", "key-1", "key-2", "key-2"]


@pytest.mark.parametrize("repeats", [quick(2), Hedge(5, on=Boom, eager=True)], ids=["retry", "hedge"])
def test_an_attempt_without_access_to_the_earlier_key_is_an_error(repeats: Policy[Any]) -> None:
    """With two keys the work would be done twice."""
    seen: list[Any] = []

    def fn() -> None:
        seen.append(current_context().properties["idempotency_key"])
        raise Boom

    pipeline = repeats.wrap(Keyed(lambda _: numbered(), key=lambda: "all"))
    with pytest.raises(TypeError, match="put IdempotencyKey around the policies that repeat"):
        pipeline.call(fn)
    assert seen == ["key-1"]


class RefusesTheFirst(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        if ctx.attempt == 1:
            raise Boom
        return await call(ctx)


async def test_the_key_is_made_for_the_first_attempt_that_gets_to_it(world: World) -> None:
    async def fn(ctx: Context) -> Any:
        return key_for(ctx)

    assert await world.execute(Pipeline(quick(2), RefusesTheFirst(), numbered()), fn) == "key-1"


@pytest.mark.parametrize("make", [lambda: "", lambda: 5])
def test_a_key_that_is_no_text_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match="make must return"):
        IdempotencyKey(make).call(int)


def test_describe_and_repr_show_the_settings() -> None:
    key = IdempotencyKey(name="key")
    assert key.describe() == "key: one idempotency key for each execution, the same in all its attempts"
    assert repr(key).endswith("name='key')")


async def test_concurrent_attempts_have_one_key(anywhere: Virtual) -> None:
    """Also if they read it at the same time; each attempt keeps its number."""
    seen: list[Any] = []

    async def fn(ctx: Context) -> None:
        seen.append((key_for(ctx), ctx.hedge))
        await anywhere.sleep(20)

    await anywhere.execute(Pipeline(Hedge(1, hedges=2, budget=None), numbered()), fn)
    assert len({key for key, _ in seen}) == 1
    assert {number for _, number in seen} == {0, 1, 2}
