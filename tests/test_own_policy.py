"""Custom policies: written once, they run in every world."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from resilience import Bulkhead, BulkheadFull, Context, DeadlineExceeded, Policy, Retry, Timeout, TimeoutExceeded
from resilience.clock import clock as process_clock
from tests.conftest import Boom, FakeClock, Script, Virtual, World
from tests.custom import Passing, Sleeping


class Twice(Policy):
    """Makes its call twice."""

    async def around(self, call: Any, ctx: Context) -> Any:
        await call(ctx.child(attempt=1))
        return await call(ctx.child(attempt=2))


class Answering(Policy[str]):
    """Answers failures, and never makes the call of the operation "cached"."""

    def __init__(self, name: str | None = None) -> None:
        if name is not None:
            self.name = name
        self.held = 0

    async def around(self, call: Any, ctx: Context) -> Any:
        if ctx.operation == "cached":
            return "from the cache"
        self.held += 1
        try:
            return await call(ctx)
        except Boom as error:
            return f"answered {error}"
        finally:
            self.held -= 1


class Rated(Policy):
    """Waits before and after the call."""

    async def around(self, call: Any, ctx: Context) -> Any:
        await ctx.sleep(1.0)
        result = await call(ctx)
        await ctx.runtime.sleep(2.0, None)
        return result


class Hurried(Policy):
    """Gives a limited time to the inner call, and enforces it with a timer."""

    def __init__(self, seconds: float = 0.02) -> None:
        self.seconds = seconds

    async def around(self, call: Any, ctx: Context) -> Any:
        limit = process_clock.now() + self.seconds
        with ctx.runtime.timer(limit) as timer:
            return await call(ctx.child(deadline=limit, timer=timer))
        return "cut off" if timer.fired else "impossible"


class Tagged:
    """A class that creates its instances in `__new__`, with arguments, and has arguments for its subclasses."""

    tag: str
    color: str

    def __init_subclass__(cls, *, color: str) -> None:
        cls.color = color

    def __new__(cls, tag: str) -> Tagged:
        self = super().__new__(cls)
        self.tag = tag
        return self


class TaggedPolicy(Policy, Tagged, color="light"):
    """A policy that is also of that class."""

    async def around(self, call: Any, ctx: Context) -> Any:
        return self.color, self.tag, await call(ctx)


def test_a_policy_may_inherit_from_a_class_with_its_own_new() -> None:
    assert TaggedPolicy("blue").call(str.upper, "fine") == ("light", "blue", "FINE")


async def test_a_custom_policy_runs_in_every_world(world: World, clock: FakeClock) -> None:
    """The same code calls twice, answers, skips the call, waits, and releases what it holds."""
    script = Script("once", "twice")
    answering = Answering()
    assert [
        await world.execute(Twice(), script.function()),
        await world.execute(answering, Script(Boom("boom")).function()),
        await world.execute(answering, Script("not called").function(), Context(operation="cached")),
        await world.execute(Rated(), Script("rated").function()),
    ] == ["twice", "answered boom", "from the cache", "rated"]
    assert [ctx.attempt for ctx in script.contexts] == [1, 2]
    assert clock.sleeps == [1.0, 2.0]
    with pytest.raises(KeyboardInterrupt):
        await world.execute(answering, Script(KeyboardInterrupt()).function())
    assert answering.held == 0


async def test_a_custom_policy_can_cut_off(world: World) -> None:
    async def hang(ctx: Context) -> None:
        assert ctx.remaining() <= 0.02
        await world.hang()

    assert await world.execute(Hurried(), hang) == "cut off"


async def test_a_timer_of_a_custom_policy_does_not_outlive_an_outer_timeout(anywhere: Virtual) -> None:
    async def hang(ctx: Context) -> None:
        await anywhere.sleep(1)

    assert type(await anywhere.attempt(Timeout(0.01).wrap(Hurried()), hang)) is TimeoutExceeded
    assert anywhere.now() == pytest.approx(0.01)


async def test_an_error_of_asyncio_in_a_custom_policy_is_raised_in_a_task(in_asyncio: World) -> None:
    """In blocking code, such an error says that the policy needs an event loop."""

    class Reenters(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            limit = asyncio.timeout(5)
            for _ in range(2):
                async with limit:
                    await call(ctx)

    with pytest.raises(RuntimeError, match="already been entered"):
        await Retry().wrap(Reenters()).acall(asyncio.sleep, 0)


async def test_waits_of_less_than_a_second_end_at_their_instants(anywhere: Virtual) -> None:
    """In a queue, and in a policy that an outer timeout cuts off."""
    bulkhead = Bulkhead(1, queue=1, max_wait=0.25)
    with bulkhead.slot():
        error = await anywhere.attempt(bulkhead, Script("never").function())
    assert (type(error), anywhere.now()) == (BulkheadFull, pytest.approx(0.25))
    error = await anywhere.attempt(Timeout(0.5).wrap(Sleeping(5)), Script("never").function())
    assert (type(error), anywhere.now()) == (TimeoutExceeded, pytest.approx(0.75))


class Gate(Policy):
    """Blocks a call until it is woken, from any thread or task."""

    def __init__(self) -> None:
        self.waiters: list[Any] = []

    async def around(self, call: Any, ctx: Context) -> Any:
        waiter = ctx.runtime.waiter()
        self.waiters.append(waiter)
        if not await waiter.wait(ctx.deadline, None):
            raise DeadlineExceeded("the gate stayed closed", policy=self.name)
        return await call(ctx)


async def test_a_timer_of_a_custom_policy_lets_the_end_of_an_outer_timeout_pass(world: World, clock: FakeClock) -> None:
    """The function finds no time left, which is not for the inner timer to answer."""

    async def fn(ctx: Context) -> None:
        clock.advance(2)
        ctx.check()

    error = await world.attempt(Timeout(1, name="outer").wrap(Hurried(60)), fn)
    assert type(error) is TimeoutExceeded
    assert error.policy == "outer"


async def test_a_custom_policy_can_wait_until_it_is_woken(world: World) -> None:
    gate = Gate()

    def opening() -> None:
        while not gate.waiters:
            time.sleep(0.001)
        gate.waiters[0].wake()

    thread = threading.Thread(target=opening)
    thread.start()
    assert await world.execute(gate, Script("through").function()) == "through"
    thread.join()


async def test_a_custom_policy_that_waits_is_limited_by_an_outer_timeout(world: World) -> None:
    """Through its deadline alone. The error is that of the timeout."""
    for policy in (Timeout(0.02), Timeout(0.02, cooperative=True)):
        script = Script("never")
        error = await world.attempt(policy.wrap(Gate()), script.function())
        assert (type(error), script.calls) == (TimeoutExceeded, 0)
    for policy, seconds in ((Retry().wrap(Gate()), 0.02), (Gate(), 0)):
        error = await world.attempt(policy, Script("never").function(), Context(timeout=seconds))
        assert type(error) is DeadlineExceeded


def test_a_policy_without_around_cannot_be_created() -> None:
    with pytest.raises(TypeError, match="around"):
        type("Empty", (Policy,), {})()


def test_an_around_with_other_parameters_is_refused_when_its_class_is_made() -> None:
    """A Fallback around such a policy would answer every call."""
    with pytest.raises(TypeError, match=r"^Few\.around is called as Few\.around\(self, call, ctx\), which "):

        class Few(Policy):
            async def around(self, call: Any) -> Any:  # type: ignore[override]
                return await call(None)

    with pytest.raises(TypeError, match=r"^Swapped\.around is called as around\(call, ctx\), not around\(ctx, call\)"):

        class Swapped(Policy):
            async def around(self, ctx: Any, call: Any) -> Any:
                return result if (result := await call(ctx)) else None


async def test_a_context_of_its_own_is_refused(world: World) -> None:
    """It does not know the function, and would lose the deadline of the caller. No policy handles the error."""

    class Limited(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            return await call(Context(timeout=5.0))

    for policy in (Limited(), Retry(on=Exception, backoff=[0]).wrap(Limited(), Timeout(2.0))):
        with pytest.raises(TypeError, match=r"^a policy has passed a context of its own .*: pass ctx, or ctx\.child"):
            await world.execute(policy, Script("never").function())


async def test_super_around_runs_the_rest_of_the_chain(world: World) -> None:
    """For a class that adds to the policy next to it in the order of its bases, even if that is `Policy` itself."""

    class Adding(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            return await super().around(call, ctx) + " and more"

    assert await world.execute(Adding(), Script("this").function()) == "this and more"


def test_a_policy_without_settings_shares_none_with_others() -> None:
    """The mapping is the same for all of them, so it cannot be changed."""
    settings: Any = Twice().settings()
    with pytest.raises(TypeError):
        settings["limit"] = 1
    assert Answering().settings() == {}


def test_a_custom_policy_has_a_name_and_a_repr() -> None:
    """The name of its class, if it has no other; and the settings that differ from the defaults."""
    assert Twice().name == "Twice"
    assert Answering("cache").name == "cache"
    assert type("Sub", (type("Named", (Twice,), {"name": "cache"}),), {}).name == "cache"
    assert repr(Twice()) == "Twice()"
    assert Twice().describe() == "Twice()"

    class Limited(Passing):
        def __init__(self, limit: int, *, burst: int = 3) -> None:
            self.limit, self.burst = limit, burst

        def settings(self) -> dict[str, object]:
            return {"limit": self.limit, "burst": self.burst, "units": {"call": 1}}

    assert repr(Limited(5)) == "Limited(limit=5, units={'call': 1})"
    assert repr(Limited(5, burst=4)) == "Limited(limit=5, burst=4, units={'call': 1})"
