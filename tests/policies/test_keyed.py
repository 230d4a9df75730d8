"""Keyed: one policy for each key, made on the first use of the key, and dropped when it is unused."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import Any

import pytest

from resilience import Bulkhead, CircuitBreaker, Context, Fallback, Keyed, KeyedStats, Pipeline, Policy, Retry, Timeout
from resilience.errors import CircuitOpen, Misuse
from resilience.policies import keyed as module
from resilience.testing import virtual_time
from tests.callers import in_threads
from tests.conftest import Boom, FakeClock, Script, World
from tests.functions import raising
from tests.state.stepping import TRACING_CRASHES, Interruption


def breaker_for(host: str) -> CircuitBreaker:
    return CircuitBreaker(1, on=Boom, name=host)


def first(host: Any, *rest: Any) -> Any:
    return host


async def call_host(world: World, policy: Policy[Any], host: str, *, fails: bool = False) -> Any:
    async def fetch(host: str) -> str:
        if fails:
            raise Boom(host)
        return host

    try:
        return await world.call(policy, fetch, host)
    except Exception as error:
        return error


@pytest.mark.parametrize("around", [False, True], ids=["alone", "in a pipeline"])
async def test_each_key_has_a_policy_of_its_own(world: World, around: bool) -> None:
    keyed = Keyed(breaker_for, first)
    policy = Pipeline(Retry(1), keyed, Timeout(5.0, cooperative=True)) if around else keyed
    assert isinstance(await call_host(world, policy, "a", fails=True), Boom)
    refused = await call_host(world, policy, "a")
    assert isinstance(refused, CircuitOpen)
    assert refused.policy == "a"
    assert await call_host(world, policy, "b") == "b"
    assert [(key, it.name) for key, it in keyed.policies.items()] == [("a", "a"), ("b", "b")]
    assert keyed.stats() == KeyedStats(keys=2, made=2, dropped=0)


async def test_a_key_can_be_computed_from_the_context(world: World) -> None:
    keyed = Keyed(lambda tenant: Fallback(tenant), lambda ctx: ctx.properties["tenant"])

    async def fail(ctx: Context) -> None:
        raise Boom

    assert await world.execute(keyed, fail, Context(properties={"tenant": "blue"})) == "blue"


async def test_running_calls_continue_in_a_policy_that_was_dropped(world: World) -> None:
    keyed = Keyed(lambda host: Bulkhead(1), first)
    held = keyed.policy_for("a")

    async def drop_own_policy(host: str) -> str:
        keyed.forget(host)
        assert keyed.policy_for(host) is not held
        assert held.stats().in_flight == 1  # type: ignore[attr-defined]
        return "fine"

    assert await world.call(keyed, drop_own_policy, "a") == "fine"
    assert held.stats().in_flight == 0  # type: ignore[attr-defined]
    assert keyed.stats() == KeyedStats(keys=1, made=2, dropped=1)


# --- dropped policies ----------------------------------------------------------------------------


@pytest.mark.parametrize(("max_keys", "left"), [(1, 1), (5, 5), (50, 46)])
def test_the_longest_unused_policies_are_dropped(max_keys: int, left: int) -> None:
    """Beyond `max_keys` a tenth of them, so that not each new key has to sort all others."""
    with virtual_time() as clock:
        keyed = Keyed(lambda key: Bulkhead(1), first, max_keys=max_keys)
        for number in range(max_keys):
            clock.advance(1)
            keyed.call(str, number)
        clock.advance(1)
        if max_keys > 1:
            keyed.call(str, 0)
        clock.advance(1)
        keyed.call(str, "new")
    assert len(keyed.policies) == left
    assert {"new", 0} <= {*keyed.policies} if max_keys > 1 else {*keyed.policies} == {"new"}
    assert keyed.stats() == KeyedStats(keys=left, made=max_keys + 1, dropped=max_keys + 1 - left)


def test_idle_policies_are_dropped_with_a_new_key_or_on_their_next_use(clock: FakeClock) -> None:
    keyed = Keyed(lambda key: Bulkhead(1), first, idle=100)
    a, b = keyed.policy_for("a"), keyed.policy_for("b")
    clock.advance(99)
    assert keyed.policy_for("a") is a
    clock.advance(1)
    assert keyed.policy_for("b") is not b
    assert [*keyed.policies] == ["a", "b"]
    clock.advance(100)
    keyed.policy_for("c")
    assert [*keyed.policies] == ["c"]
    assert keyed.stats().dropped == 3


def test_an_idle_policy_that_is_dropped_while_another_one_is_made_is_replaced(clock: FakeClock) -> None:
    """`make` may forget keys, as may other threads."""

    def make(key: str) -> Bulkhead:
        keyed.forget(key)
        return Bulkhead(1)

    keyed: Keyed[Bulkhead] = Keyed(make, first, idle=100)
    a, b = keyed.policy_for("a"), keyed.policy_for("b")
    clock.advance(100)
    assert keyed.policy_for("a") not in (a, b)
    assert [*keyed.policies] == ["a"]


def test_new_keys_search_for_idle_policies_32_times_in_the_idle_time(clock: FakeClock) -> None:
    """Policies that become idle in between are dropped at the next search, or on their next use."""
    keyed = Keyed(lambda key: Bulkhead(1), first, idle=32)
    a = keyed.policy_for("a")
    clock.advance(0.5)
    keyed.policy_for("b")
    clock.advance(31.5)
    keyed.policy_for("c")
    assert [*keyed.policies] == ["b", "c"]
    clock.advance(0.75)
    keyed.policy_for("d")
    assert [*keyed.policies] == ["b", "c", "d"]
    clock.advance(0.25)
    assert keyed.policy_for("a") is not a
    assert [*keyed.policies] == ["c", "d", "a"]


@pytest.mark.skipif(TRACING_CRASHES, reason="CPython 3.12 crashes where several threads trace opcodes")
@pytest.mark.parametrize("idle", [None, 100])
def test_a_signal_handler_may_use_other_keys_while_policies_are_dropped(clock: FakeClock, idle: float | None) -> None:
    keyed: Keyed[Bulkhead]

    def use() -> None:
        for key in "abca":
            clock.advance(10)
            keyed.policy_for(key)

    def handle() -> None:
        keyed.policy_for("x")
        keyed.forget("a")

    for place in itertools.count():
        keyed = Keyed(lambda key: Bulkhead(1), first, max_keys=2, idle=idle)
        handler = Interruption([module], place, handle)
        handler.around(use)
        keyed.policy_for("d")
        assert keyed.stats().keys <= 2
        if not handler.happened:
            break
    assert place > 30


def test_two_concurrent_callers_of_a_new_key_get_one_policy() -> None:
    """`make` runs outside the lock for each of them, and one of the two results is kept."""
    both = threading.Barrier(2)

    def make(key: str) -> Bulkhead:
        both.wait(5)
        return Bulkhead(1)

    keyed, got = Keyed(make, first), []
    in_threads(*[lambda: got.append(keyed.policy_for("a"))] * 2)
    assert got[0] is got[1] is keyed.policy_for("a")
    assert keyed.stats() == KeyedStats(keys=1, made=1, dropped=0)


def test_statistics_are_exact_with_many_threads_and_few_keys() -> None:
    keyed = Keyed(lambda key: Bulkhead(100), first, max_keys=5)

    def thread(start: int) -> None:
        for number in range(200):
            assert keyed.call(str, (start + number) % 11) == str((start + number) % 11)

    in_threads(*(partial(thread, start) for start in range(10)))
    stats = keyed.stats()
    assert stats.keys <= 5
    assert stats.made - stats.dropped == stats.keys


# --- misuse, errors and descriptions -------------------------------------------------------------


def test_a_make_that_returns_no_policy_is_misuse() -> None:
    keyed = Keyed(lambda key: str, first)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="make must return a policy"):
        Pipeline(Fallback("no"), Retry(on=Exception, backoff=[0]), keyed).call(str, "a")


async def test_make_and_key_in_the_wrong_order_are_misuse(world: World) -> None:
    """Each call would get a new policy: a circuit would never open."""
    swapped: Any = Keyed(lambda ctx: ctx, lambda ctx: CircuitBreaker())  # type: ignore[arg-type,return-value]
    with pytest.raises(Misuse, match=r"key returned a policy, CircuitBreaker\(\): did you mean Keyed\(make, key\)\?"):
        await world.execute(Pipeline(Fallback("instead"), swapped), Script("entered").function())
    assert swapped.stats().made == 0


def test_errors_of_make_and_key_are_raised_and_make_no_policy() -> None:
    raises = raising(Boom)
    for keyed in (Keyed(raises, first), Keyed(breaker_for, raises)):
        assert Fallback("answer", on=Boom).wrap(keyed).call(str, "a") == "answer"
        assert keyed.stats().keys == 0


def test_the_description_of_a_keyed_policy_names_the_last_one() -> None:
    keyed = Keyed(breaker_for, first, idle=60, name="hosts")
    assert keyed.describe() == "hosts: a policy for each first, 0 now, at most 1000, dropped after 60 s unused"
    for host in ("a.example", "b.example", "c.example"):
        keyed.policy_for(host)
    assert keyed.describe().endswith(f"; the last: {breaker_for('c.example').describe()}")
    assert repr(keyed).startswith("Keyed(make=")
    assert Keyed(breaker_for, first).name == "Keyed"
