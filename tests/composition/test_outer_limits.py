"""A call that ends at the instant of an outer limit ends with the outer limit: one cancellation, and its error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Never

import anyio
import pytest

from resilience import (
    Bulkhead,
    Cache,
    CircuitBreaker,
    CircuitState,
    Context,
    Failure,
    Fallback,
    Hedge,
    Pipeline,
    Policy,
    Retry,
    Timeout,
    deadline,
)
from resilience.clock import clock as process_clock
from resilience.errors import DeadlineExceeded, TimeoutExceeded
from resilience.policy import Call
from resilience.testing import hang, script, virtual_time
from tests.conftest import Boom, FakeClock, Script, Virtual, World
from tests.custom import Doing
from tests.policies.timeouts import LONG, SHORT, Stopwatch


class CleanUp:
    """Waits a few times when it is cut off, and counts how often it began and ended."""

    def __init__(self, world: World) -> None:
        self.world, self.began, self.ended = world, 0, 0

    async def fn(self, ctx: Any = None) -> None:
        self.began += 1
        try:
            await anyio.sleep(10)
        finally:
            with anyio.CancelScope(shield=self.world.name == "trio"):  # in trio a cancellation lasts
                for _ in range(5):
                    await anyio.sleep(0.002)
                self.ended += 1


# --- one cancellation ---

Around = Callable[[CleanUp], Any]


async def deadline_around_timeout(clean_up: CleanUp) -> None:
    async with deadline(SHORT):
        await Timeout(SHORT).aexecute(clean_up.fn)


async def deadline_around_long_timeout(clean_up: CleanUp) -> None:
    """The inner timeout inherits the instant."""
    async with deadline(SHORT):
        await Timeout(LONG).aexecute(clean_up.fn)


async def deadline_around_deadline(clean_up: CleanUp) -> None:
    async with deadline(SHORT), deadline(LONG):
        await clean_up.fn()


async def deadline_around_everything(clean_up: CleanUp) -> None:
    async with deadline(SHORT):
        pipeline: Any = Pipeline(Timeout(LONG), Retry(3), Timeout(LONG))
        await pipeline.aexecute(clean_up.fn)


async def timeout_around_timeout(clean_up: CleanUp) -> None:
    await Timeout(SHORT).acall(Timeout(LONG).acall, clean_up.fn)


async def timeout_around_deadline(clean_up: CleanUp) -> None:
    async def fn() -> None:
        async with deadline(LONG):
            await clean_up.fn()

    await Timeout(SHORT).acall(fn)


async def timeouts_in_one_pipeline(clean_up: CleanUp) -> None:
    await Pipeline(Timeout(SHORT), Timeout(SHORT), Timeout(SHORT)).aexecute(clean_up.fn)


@pytest.mark.parametrize(
    "around",
    [
        *(deadline_around_timeout, deadline_around_long_timeout, deadline_around_deadline),
        *(deadline_around_everything, timeout_around_timeout, timeout_around_deadline, timeouts_in_one_pipeline),
    ],
)
async def test_a_clean_up_that_awaits_is_not_interrupted(tasks_world: World, around: Around) -> None:
    """Two timers at one instant must not cancel the task twice, the second time during its `finally`."""
    clean_up, errors = CleanUp(tasks_world), []

    async def call() -> None:
        try:
            await around(clean_up)
        except Exception as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(call)
    assert clean_up.ended == clean_up.began > 0  # on a busy machine some time out before they begin
    assert {type(error) for error in errors} <= {DeadlineExceeded, TimeoutExceeded}
    assert len(errors) == 20


# What waits for a child task of asyncio cancels it when it is cancelled itself, so the child's own timer gives way.

Children = Callable[[CleanUp], Any]

#: Long enough for all children to begin. One that begins later fails at once, and its group cancels the others.
OUTER = 0.1


def in_a_timeout(clean_up: CleanUp) -> Any:
    return Timeout(LONG).acall(clean_up.fn)


def in_the_same_timeout(clean_up: CleanUp) -> Any:
    """It begins later, so its own limit would end later."""
    return Timeout(OUTER).acall(clean_up.fn)


async def in_a_block(clean_up: CleanUp) -> None:
    async with deadline(LONG):
        await clean_up.fn()


def in_a_pipeline(clean_up: CleanUp) -> Any:
    return Pipeline(Timeout(LONG), Retry(3, on=Boom), Timeout(LONG)).acall(clean_up.fn)


async def a_group(child: Children, clean_up: CleanUp) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(child(clean_up))


async def groups_in_a_group(child: Children, clean_up: CleanUp) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(groups_three_deep(child, clean_up))


async def groups_three_deep(child: Children, clean_up: CleanUp) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(a_group(child, clean_up))
        group.create_task(Retry(3, on=Boom).acall(a_group, child, clean_up))


async def waits_for_a_group(child: Children, clean_up: CleanUp) -> None:
    await asyncio.wait_for(a_group(child, clean_up), 10)


async def awaits_after_a_group(child: Children, clean_up: CleanUp) -> None:
    """Not inside it, in its body: then the children's own limits would come before the group's cancellation."""
    try:
        await a_group(child, clean_up)
    finally:
        await asyncio.sleep(0.005)


async def gathers(child: Children, clean_up: CleanUp) -> None:
    await asyncio.gather(child(clean_up), child(clean_up), return_exceptions=True)  # else it waits for the first only


@pytest.mark.parametrize("child", [in_a_timeout, in_the_same_timeout, in_a_block, in_a_pipeline])
@pytest.mark.parametrize("waits", [a_group, groups_in_a_group, waits_for_a_group, awaits_after_a_group, gathers])
async def test_a_childs_clean_up_is_not_interrupted(in_virtual_asyncio: Virtual, waits: Any, child: Children) -> None:
    """Its timer must not cancel it besides the group that waits for it, and finds its block ended without an error."""
    clean_up, reported = CleanUp(in_virtual_asyncio), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    with pytest.raises(TimeoutExceeded):
        async with deadline(OUTER):
            await waits(child, clean_up)
    with pytest.raises(TimeoutExceeded):
        await Timeout(OUTER).acall(waits, child, clean_up)
    assert clean_up.ended == clean_up.began > 0
    await asyncio.sleep(1)
    assert reported == []


@pytest.mark.parametrize("waits", [a_group, gathers])
async def test_no_alarm_interrupts_a_childs_clean_up(in_asyncio: World, clock: FakeClock, waits: Any) -> None:
    """All timers of an instant are handled together, even if the loop is early: this clock stands still."""
    clean_up = CleanUp(in_asyncio)

    async def child(clean_up: CleanUp) -> None:
        time.sleep(0.002)
        await in_a_timeout(clean_up)

    with pytest.raises(TimeoutExceeded):
        await Timeout(OUTER).acall(waits, child, clean_up)
    assert clean_up.ended == clean_up.began > 0


async def test_a_childs_clean_up_is_not_interrupted_by_many_distinct_limits(in_virtual_asyncio: Virtual) -> None:
    """So many that they share an alarm."""
    clean_up = CleanUp(in_virtual_asyncio)

    async def call(seconds: float) -> None:
        with pytest.raises(DeadlineExceeded):
            async with deadline(seconds):
                await groups_three_deep(in_a_timeout, clean_up)

    await asyncio.gather(*(call(0.5 + number / 1e5) for number in range(70)))
    assert clean_up.ended == clean_up.began > 0


async def test_a_child_task_that_nothing_awaits_is_cut_off(in_virtual_asyncio: Virtual) -> None:
    """It inherits the instant, and no cancellation of an outer block reaches it."""
    clean_up = CleanUp(in_virtual_asyncio)
    with pytest.raises(DeadlineExceeded):
        async with deadline(SHORT):
            task = asyncio.create_task(in_a_timeout(clean_up))
            await asyncio.sleep(10)
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(task, 5)
    assert clean_up.ended == 1


async def test_a_child_task_that_suppresses_its_cancellation_is_cut_off_at_its_next_wait(in_asyncio: World) -> None:
    """By its own limit, after its group cancelled it."""
    went_on = []

    async def goes_on() -> None:
        task: Any = asyncio.current_task()
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            task.uncancel()
        went_on.append(True)
        await asyncio.sleep(10)

    async def fn() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(Timeout(LONG).acall(goes_on))

    with pytest.raises(TimeoutExceeded):
        await asyncio.wait_for(Timeout(SHORT).acall(fn), 5)
    assert went_on == [True]


async def test_an_inherited_limit_cuts_off_a_clean_up_that_an_inner_limit_caused(in_virtual_asyncio: Virtual) -> None:
    """The first cancellation came before the instant, and not from an outer block."""

    async def fn() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(10)

    with deadline(2 * SHORT), pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(Pipeline(Timeout(LONG), Timeout(SHORT)).acall(fn), 5)


# --- task groups ---------------------------------------------------------------------------------


async def hangs_in_a_block(function: Any, seconds: float) -> None:
    async with deadline(LONG):
        await function(seconds)


def children(count: int = 3, run: Any = Pipeline(Retry(2, on=Boom), Timeout(LONG)).acall) -> Any:  # noqa: B008
    """Return an `async def` whose child tasks hang in their own pipelines or blocks."""

    async def child() -> None:
        await run(anyio.sleep, 10)

    async def fn(ctx: Any = None) -> None:
        async with anyio.create_task_group() as group:
            for _ in range(count):
                group.start_soon(child)

    return fn


async def test_a_timeout_around_a_task_group_raises_its_own_error(virtual_tasks: Virtual) -> None:
    """Instead of an `ExceptionGroup([DeadlineExceeded, ...])`; and `on_timeout` is called."""
    seen: list[Any] = []
    timeout = Timeout(SHORT, on_timeout=seen.append, name="outer")
    for run, fn in (
        (timeout.aexecute, children()),
        (timeout.acall, children()),
        (timeout.acall, children(2, hangs_in_a_block)),
    ):
        with pytest.raises(TimeoutExceeded) as caught:
            await run(fn)
        assert type(caught.value) is TimeoutExceeded
        assert caught.value.policy == "outer"
    assert [event.policy for event in seen] == ["outer"] * 3


async def test_a_block_around_a_task_group_raises_its_own_error(virtual_tasks: Virtual) -> None:
    with pytest.raises(DeadlineExceeded, match="the block did not end within"):
        async with deadline(SHORT):
            await children()()


async def test_a_timeout_of_a_child_is_raised_in_its_group(tasks_world: World) -> None:
    """It is another instant than that of the outer limit."""
    with pytest.raises(ExceptionGroup) as caught:
        await Timeout(LONG).aexecute(children(1, Timeout(SHORT).acall))
    assert [type(error) for error in caught.value.exceptions] == [TimeoutExceeded]


# --- an inner fallback ---


@pytest.mark.parametrize("nested", [False, True])
async def test_an_inner_fallback_never_answers_a_cut_off(world: World, nested: bool) -> None:
    """Nested pipelines inherit the instant, and in threads two timers race. The fallback may be nested, too."""
    fallback = Fallback("instead")
    # A task that is stalled for so long before the nested call finds no time left, which that fallback may answer.
    limit = SHORT if world.blocking else 4 * SHORT
    inner: Any = Pipeline(fallback if nested else Retry(2, on=Boom), Timeout(LONG))
    pipeline: Any = Pipeline(Timeout(limit, name="outer"), Retry(2, on=Boom) if nested else fallback)

    async def calls(ctx: Any = None) -> Any:
        return await world.execute(inner, world.hang)

    for _ in range(20):
        error = await world.attempt(pipeline, calls)
        assert type(error) is TimeoutExceeded
        assert error.policy == "outer"


def test_an_inner_limit_that_a_nested_call_sets_to_the_same_instant_is_the_outer_one() -> None:
    """In threads, where it has a timer of its own, in virtual time, where the two instants are exactly equal."""
    pipeline = Pipeline(Timeout(60.0, name="outer"), Fallback("instead"))
    breaker = CircuitBreaker(1)
    nested = Pipeline(breaker, Timeout(60.0, name="inner"))
    for _ in range(10):
        with virtual_time():
            outcome = pipeline.capture(lambda ctx: nested.call(script(hang(100))))
        assert isinstance(outcome, Failure)
        assert type(outcome.error) is TimeoutExceeded
        assert outcome.error.policy == "outer"
        assert breaker.stats().opened == 0


async def test_an_inner_fallback_does_not_answer_an_exceeded_outer_deadline(world: World) -> None:
    """The code inside finds at the instant that no time is left."""

    async def checks(ctx: Context) -> None:
        while not ctx.expired:
            await world.sleep(0.001)
        ctx.check()

    for _ in range(5):
        assert type(await world.attempt(Pipeline(Timeout(SHORT), Fallback("instead")), checks)) is TimeoutExceeded


#: A user's policy that checks the time.
CHECKS = Doing(lambda ctx: ctx.check())


@pytest.mark.parametrize("inside", [Retry(2, max_elapsed=90), CHECKS], ids=["Retry", "own"])
async def test_an_inner_fallback_does_not_answer_a_policy_that_finds_no_time_left(
    world: World, clock: FakeClock, inside: Policy
) -> None:
    pipeline: Any = Pipeline(Timeout(30), Fallback("instead"), Doing(lambda ctx: clock.advance(60)), inside)
    script = Script("fine")
    assert type(await world.attempt(pipeline, script.function())) is TimeoutExceeded
    assert script.calls == 0


async def test_an_inner_cache_does_not_answer_a_policy_that_finds_no_time_left(world: World, clock: FakeClock) -> None:
    """With a stale value, which answers any other failure."""
    cache, script, seconds = Cache(10, key=lambda *_: 1, stale=600), Script("old", "new"), iter([0, 60])
    pipeline: Any = Pipeline(Timeout(30), cache, Doing(lambda ctx: clock.advance(next(seconds))), CHECKS)
    assert await world.execute(pipeline, script.function()) == "old"
    clock.advance(11)
    assert type(await world.attempt(pipeline, script.function())) is TimeoutExceeded
    assert script.calls == 1


@pytest.mark.parametrize("inside", [[], [Hedge(5.0)]], ids=["plain", "hedged"])
async def test_a_call_that_finds_no_time_left_at_the_instant_of_a_limit_fails_in_no_policy_inside(
    world: World, clock: FakeClock, inside: list[Policy]
) -> None:
    """Not even in one that names that error."""
    breaker = CircuitBreaker(1, on=DeadlineExceeded)

    async def checks(ctx: Context) -> None:
        clock.advance(60)
        ctx.check()

    assert type(await world.attempt(Pipeline(Timeout(30), breaker, *inside), checks)) is TimeoutExceeded
    assert breaker.state is CircuitState.CLOSED


async def test_a_function_may_handle_that_a_nested_call_finds_no_time_left(
    tasks_world: World, clock: FakeClock
) -> None:
    """It sees the error, or the answer of a nested fallback, as of any call."""
    seen: list[Any] = []
    checks = Script(None, doing=lambda ctx: ctx.check()).function()

    async def calls(ctx: Context) -> None:
        clock.advance(60)
        seen.append(await tasks_world.attempt(Bulkhead(1), checks))
        seen.append(await tasks_world.attempt(Fallback("instead"), checks))

    await tasks_world.attempt(Timeout(30), calls)
    assert [type(it) for it in seen] == [DeadlineExceeded, str]


async def test_a_function_may_handle_that_although_a_block_has_ended_in_another_task(
    in_asyncio: World, clock: FakeClock
) -> None:
    """As when the event loop closes a generator. In the task of the function, the ended block is still ambient."""

    async def stream() -> AsyncIterator[int]:
        async with deadline(5):
            yield 1

    async def calls(ctx: Context) -> Any:
        await anext(items := stream())
        await asyncio.create_task(items.aclose())
        clock.advance(60)
        return await in_asyncio.attempt(Fallback("instead"), Script(None, doing=lambda ctx: ctx.check()).function())

    assert await in_asyncio.execute(Timeout(30), calls) == "instead"


async def test_a_group_with_another_error_is_no_cut_off(tasks_world: World, clock: FakeClock) -> None:
    """Although a part of it ended at the instant of the limit."""
    mixed = ExceptionGroup("children", [DeadlineExceeded("no time left"), Boom("no")])
    fails = Script(mixed, doing=lambda ctx: clock.advance(60)).function()
    assert type(await tasks_world.attempt(Timeout(30), fails)) is ExceptionGroup


async def test_an_inner_fallback_answers_an_earlier_limit(world: World) -> None:
    pipeline: Any = Pipeline(Timeout(LONG), Fallback("instead"), Timeout(SHORT))
    assert await world.attempt(pipeline, world.hang) == "instead"


class Limits(Policy[Never]):
    """A user's policy with a timer."""

    async def around(self, call: Call[Any], ctx: Context) -> Any:
        with ctx.runtime.timer(process_clock.now() + LONG) as timer:
            return await call(ctx.child(timer=timer))


async def test_a_later_timer_of_a_policy_inside_puts_off_no_limit(world: World) -> None:
    with Stopwatch() as watch:
        assert type(await world.attempt(Pipeline(Timeout(SHORT), Limits()), world.hang)) is TimeoutExceeded
    assert watch.seconds < 5  # a call that hangs does so for ten
