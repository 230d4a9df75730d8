"""Policies that pass their call on to other policies: chosen by key or condition, or a whole pipeline.

`return await other.around(call, ctx)` is all that takes, in every world, lowered and driven. Composing changes no
policy, so one policy may be in any number of pipelines, be immutable, and is freed with the last of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, final

import pytest

from resilience import Bulkhead, CircuitBreaker, Context, Fallback, Pipeline, Policy, Retry, Timeout, events
from resilience.runtimes import lowering
from tests.conftest import Boom, FakeClock, Script, World, no_collector
from tests.custom import HandingOn
from tests.functions import quick


@pytest.fixture(params=["lowered", "driven", "asyncio", "trio"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    """Threads with lowering and without it, and the worlds of tasks, which are never lowered."""
    monkeypatch.setattr(lowering, "enabled", request.param == "lowered")
    return World(request.param if request.param in ("asyncio", "trio") else "threads")


class Conditional(Policy):
    """Passes the calls of one operation on to another policy."""

    def __init__(self, operation: str, other: Policy[Any]) -> None:
        self._operation = operation
        self._other = other

    async def around(self, call: Any, ctx: Context) -> Any:
        if ctx.operation == self._operation:
            return await self._other.around(call, ctx)
        return await call(ctx)


# --- keyed and conditional policies ---


async def test_a_policy_can_pass_a_call_on_conditionally(world: World, clock: FakeClock) -> None:
    """Here by the operation, which defaults to the name of the function."""

    async def read(ctx: Context) -> int:
        calls.append("read")
        raise Boom

    async def write(ctx: Context) -> int:
        calls.append("write")
        raise Boom

    calls: list[str] = []
    pipeline = Pipeline(Fallback("x"), Conditional(read.__qualname__, quick(3)), CircuitBreaker(99))
    for fn in (read, write):
        assert await world.execute(pipeline, fn) == "x"
    assert calls == ["read"] * 3 + ["write"]


async def test_a_policy_can_choose_another_policy_for_each_attempt(world: World, clock: FakeClock) -> None:
    class Growing(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            return await Timeout(float(ctx.attempt)).around(call, ctx)

    left: list[float] = []
    fn = Script(Boom(), doing=lambda ctx: left.append(ctx.remaining())).function()
    await world.attempt(Pipeline(quick(3), Growing()), fn)
    assert left == [1.0, 2.0, 3.0]


# --- each kind of policy, called by another one ---

OURS: dict[str, Callable[[], Policy[Any]]] = {
    "Retry": lambda: Retry(3, on=Boom, backoff=[1.5, 2.5], name="it"),
    "Retry of results": lambda: Retry(2, on_result=lambda result: result == "bad", backoff=[1.0], name="it"),
    "Timeout": lambda: Timeout(60.0, name="it"),
    "cooperative Timeout": lambda: Timeout(60.0, cooperative=True, name="it"),
    "CircuitBreaker": lambda: CircuitBreaker(2, name="it"),
    "Bulkhead": lambda: Bulkhead(1, name="it"),
    "Fallback": lambda: Fallback("instead", name="it"),
    "handler": lambda: Fallback(handler=lambda failure, ctx: ctx.operation, name="it"),
    "Pipeline": lambda: Pipeline(Fallback("x", on=KeyError), quick(2, name="it"), Timeout(60.0), CircuitBreaker(9)),
}


def steps() -> list[tuple[Any, ...]]:
    """Return the steps of the function for each execution."""
    return [("fine",), (Boom("one"), "fine"), ("bad",), (Boom("always"),), (StopIteration("stop"),)]


async def course(world: World, policy: Policy[Any], clock: FakeClock) -> list[Any]:
    """Return all that can be observed of some executions: results, attempts, delays and events."""
    seen: list[Any] = []
    unsubscribe = events.subscribe(seen.append)
    observed: list[Any] = []
    clock.sleeps.clear()
    for taken in steps():
        if not world.blocking and isinstance(taken[0], StopIteration):
            continue
        script, ctx = Script(*taken), Context()
        result = await world.attempt(policy, stopping(world, script), ctx)
        observed.append((type(result), str(result), getattr(result, "__notes__", None), script.calls, ctx.attempts))
        observed.append((ctx.failures, ctx.elapsed))
        observed.append([(type(event), event.operation) for event in seen])
        seen.clear()
    unsubscribe()
    return [*observed, *clock.sleeps]


def stopping(world: World, script: Script) -> Callable[..., Any]:
    """Return the function of the script, which may also raise `StopIteration` in threads."""
    function = script.function()
    if not world.blocking:
        return function

    def fn(ctx: Context) -> Any:
        try:
            function(ctx).send(None)  # type: ignore[attr-defined]
        except StopIteration as stop:
            return stop.value
        except RuntimeError as error:
            raise error.__cause__ or error from None

    return fn


@pytest.mark.parametrize("place", ["alone", "between"])
@pytest.mark.parametrize("name", OURS)
async def test_a_policy_called_by_another_is_the_same(world: World, clock: FakeClock, name: str, place: str) -> None:
    """Results, attempts, delays, failures and events are equal and in the same order."""

    def pipeline(policy: Policy[Any]) -> Policy[Any]:
        if place == "alone":
            return Pipeline(policy)
        return Pipeline(Fallback("answered", on=KeyError), policy, CircuitBreaker(99))

    expected = await course(world, pipeline(OURS[name]()), clock)
    for other in (HandingOn(OURS[name]()), HandingOn(HandingOn(OURS[name]()))):
        assert await course(world, pipeline(other), clock) == expected


async def test_a_policy_can_pass_on_its_own_coroutine_function_as_the_call(world: World) -> None:
    class Recording(Policy):
        def __init__(self) -> None:
            self.outcomes: list[Any] = []

        async def around(self, call: Any, ctx: Context) -> Any:
            async def recorded(ctx: Context) -> Any:
                try:
                    result = await call(ctx)
                except Exception as error:
                    self.outcomes.append(error)
                    raise
                self.outcomes.append(result)
                return result

            return await quick(3).around(recorded, ctx)

    boom = Boom()
    recording = Recording()
    assert await world.execute(Pipeline(recording, Timeout(60.0)), Script(boom, "fine").function()) == "fine"
    assert recording.outcomes == [boom, "fine"]


# --- composing changes no policy ---


@final
@dataclass(frozen=True)
class Frozen(Policy):
    """An immutable policy."""

    limit: int

    async def around(self, call: Any, ctx: Context) -> Any:
        return self.limit, await call(ctx)


class Slotted(Policy):
    """A policy that has only slots, and refuses attributes."""

    __slots__ = ("limit",)

    def __init__(self, limit: int) -> None:
        object.__setattr__(self, "limit", limit)

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(name)

    async def around(self, call: Any, ctx: Context) -> Any:
        return self.limit, await call(ctx)  # type: ignore[attr-defined]


async def test_an_immutable_policy_can_be_composed_and_executed(world: World) -> None:
    """A frozen dataclass and one with slots; alone, in two pipelines and twice in one."""
    frozen, slotted = Frozen(1), Slotted(2)
    for policy in (frozen, slotted):
        assert await world.execute(policy, Script("x").function()) == (policy.limit, "x")  # type: ignore[attr-defined]
    both = Pipeline(frozen, slotted)
    assert await world.execute(both, Script("x").function()) == (1, (2, "x"))
    assert await world.execute(Pipeline(slotted, both, frozen), Script("x").function()) == (2, (1, (2, (1, "x"))))
    with pytest.raises(FrozenInstanceError):
        frozen.limit = 2  # type: ignore[misc]
    assert vars(slotted) == {}
    assert (frozen, hash(frozen)) == (Frozen(1), hash(Frozen(1)))


async def test_composing_and_executing_changes_no_attribute_of_a_policy(world: World, clock: FakeClock) -> None:
    policies = [make() for make in OURS.values() if not isinstance(make(), Pipeline)]
    before = [dict(vars(policy)) for policy in policies]
    inner = Pipeline(*policies[:4])
    outer = Pipeline(inner, *policies[4:])
    given = dict(vars(inner))
    for policy in (*policies, outer):
        await world.attempt(policy, Script("fine").function())
        decorated: Any = policy(world.native(Script(Boom()).function()))
        await world.attempt(Fallback(None), lambda ctx, decorated=decorated: decorated(ctx))
    assert [vars(policy) for policy in policies] == before
    assert vars(inner) == given


# --- composing keeps no policy alive ---


@pytest.fixture
def uncollected() -> Iterator[None]:
    with no_collector():
        yield


async def used(world: World, policy: Policy[Any]) -> None:
    """Execute, decorate and wrap a client: everything that makes objects of a policy."""
    await world.attempt(policy, answering)
    await world.attempt(policy, failing)
    repr(policy), policy.describe()
    decorated: Any = policy(world.native(answering))
    await world.result(decorated())
    await world.result(policy.proxy(Client()).get() if world.blocking else policy.aproxy(Client()).later())


async def answering(ctx: Any = None) -> str:
    return "fine"


async def failing(ctx: Any = None) -> None:
    raise Boom


class Client:
    def get(self) -> str:
        return "got"

    async def later(self) -> str:
        return "got"


POLICIES: dict[str, Callable[[], Policy[Any]]] = {
    **OURS,
    "Frozen": lambda: Frozen(1),
    "handing": lambda: HandingOn(quick(2)),
    "keyed": lambda: Conditional("op", CircuitBreaker()),
}


@pytest.mark.parametrize("name", POLICIES)
async def test_a_policy_is_in_no_reference_cycle(world: World, clock: FakeClock, uncollected: None, name: str) -> None:
    """It and its pipeline are freed with the last reference."""
    policy = POLICIES[name]()
    pipeline = Pipeline(Retry(1), policy, name="p")
    await used(world, policy)
    await used(world, pipeline)
    refs = [weakref.ref(policy), weakref.ref(pipeline)]
    assert all(ref() is not None for ref in refs)
    del policy, pipeline
    assert [ref() for ref in refs] == [None, None]


async def test_a_policy_made_for_one_call_is_freed_after_the_call(world: World, clock: FakeClock) -> None:
    refs: list[weakref.ref[Any]] = []

    class Choosing(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            made = quick(2).wrap(Timeout(60.0))
            refs.append(weakref.ref(made))
            return await made.around(call, ctx)

    with no_collector():
        assert await world.execute(Choosing(), answering) == "fine"
        assert [ref() for ref in refs] == [None]
        assert isinstance(await world.attempt(Choosing(), failing), Boom)
        assert [ref() for ref in refs] == [None, None]
