"""Whatever ends at the instant of an outer limit belongs to the outer limit: one delivery, and its own error."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from resilience import (
    CircuitBreaker,
    Context,
    DeadlineExceeded,
    Fallback,
    Pipeline,
    Retry,
    Timeout,
    TimeoutExceeded,
    deadline,
)
from tests.conftest import Boom, FakeClock, World
from tests.policies.breakers import CLOSED
from tests.policies.timeouts import LONG, SHORT


class CleanUp:
    """Waits a few times when it is cut off, and notes whether it came to its end."""

    def __init__(self, world: World) -> None:
        self.world, self.began, self.ended = world, 0, 0

    async def fn(self, ctx: Any = None) -> None:
        self.began += 1
        try:
            await anyio.sleep(10)
        finally:
            with anyio.CancelScope(shield=self.world.name == "trio"):  # there a cancellation lasts
                for _ in range(5):
                    await anyio.sleep(0.002)
                self.ended += 1


# --- one delivery --------------------------------------------------------------------------------

Around = Callable[[CleanUp], Any]


async def deadline_around_timeout(it: CleanUp) -> None:
    async with deadline(SHORT):
        await Timeout(SHORT).aexecute(it.fn)


async def deadline_around_long_timeout(it: CleanUp) -> None:
    """It inherits the instant."""
    async with deadline(SHORT):
        await Timeout(LONG).aexecute(it.fn)


async def deadline_around_deadline(it: CleanUp) -> None:
    async with deadline(SHORT), deadline(LONG):
        await it.fn()


async def deadline_around_everything(it: CleanUp) -> None:
    async with deadline(SHORT):
        pipeline: Any = Pipeline(Timeout(LONG), Retry(3), Timeout(LONG))
        await pipeline.aexecute(it.fn)


async def timeout_around_timeout(it: CleanUp) -> None:
    await Timeout(SHORT).acall(Timeout(LONG).acall, it.fn)


async def timeout_around_deadline(it: CleanUp) -> None:
    async def fn() -> None:
        async with deadline(LONG):
            await it.fn()

    await Timeout(SHORT).acall(fn)


async def timeouts_in_one_pipeline(it: CleanUp) -> None:
    await Pipeline(Timeout(SHORT), Timeout(SHORT), Timeout(SHORT)).aexecute(it.fn)


@pytest.mark.parametrize(
    "around",
    [
        deadline_around_timeout,
        deadline_around_long_timeout,
        deadline_around_deadline,
        deadline_around_everything,
        timeout_around_timeout,
        timeout_around_deadline,
        timeouts_in_one_pipeline,
    ],
)
async def test_a_clean_up_that_awaits_is_not_cut_in_half(tasks_world: World, around: Around) -> None:
    """Two timers at one instant cancelled the task twice: the second time in the middle of its `finally`."""
    it, errors = CleanUp(tasks_world), []

    async def one() -> None:
        try:
            await around(it)
        except Exception as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(one)
    assert it.ended == it.began > 0  # on a busy machine the time of some is over before they begin
    assert {type(error) for error in errors} <= {DeadlineExceeded, TimeoutExceeded}
    assert len(errors) == 20


# A child task of asyncio is cancelled by what waits for it, as soon as that is: its own timer gives way to that.

Children = Callable[[CleanUp], Any]

#: Long enough for all of them to begin. One that begins later fails at once, and its group cancels the others.
BEGUN = 0.1


def in_a_timeout(it: CleanUp) -> Any:
    return Timeout(LONG).acall(it.fn)


def in_the_same_timeout(it: CleanUp) -> Any:
    """It begins later, so it would end later."""
    return Timeout(BEGUN).acall(it.fn)


async def in_a_block(it: CleanUp) -> None:
    async with deadline(LONG):
        await it.fn()


def in_a_pipeline(it: CleanUp) -> Any:
    return Pipeline(Timeout(LONG), Retry(3, on=Boom), Timeout(LONG)).acall(it.fn)


async def a_group(child: Children, it: CleanUp) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(child(it))


async def groups_in_a_group(child: Children, it: CleanUp) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(groups_three_deep(child, it))


async def groups_three_deep(child: Children, it: CleanUp) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(a_group(child, it))
        group.create_task(Retry(3, on=Boom).acall(a_group, child, it))


async def waits_for_a_group(child: Children, it: CleanUp) -> None:
    await asyncio.wait_for(a_group(child, it), 10)


async def gathers(child: Children, it: CleanUp) -> None:
    await asyncio.gather(child(it), child(it))


@pytest.mark.parametrize("child", [in_a_timeout, in_the_same_timeout, in_a_block, in_a_pipeline])
@pytest.mark.parametrize("waits", [a_group, groups_in_a_group, waits_for_a_group, gathers])
async def test_the_clean_up_of_a_child_task_is_not_cut_in_half(in_asyncio: World, waits: Any, child: Children) -> None:
    """Its own timer cancelled it, and then its group, which had got the cancellation of the outer one."""
    it = CleanUp(in_asyncio)
    with pytest.raises(TimeoutExceeded):
        async with deadline(BEGUN):
            await waits(child, it)
    with pytest.raises(TimeoutExceeded):
        await Timeout(BEGUN).acall(waits, child, it)
    assert it.ended == it.began > 0


@pytest.mark.parametrize("waits", [a_group, gathers])
async def test_nor_where_the_loop_would_ring_for_it_later(in_asyncio: World, clock: FakeClock, waits: Any) -> None:
    """All that end at an instant are looked at together, also where the loop is early: this clock stands still."""
    it = CleanUp(in_asyncio)

    async def child(it: CleanUp) -> None:
        time.sleep(0.002)
        await in_a_timeout(it)

    with pytest.raises(TimeoutExceeded):
        await Timeout(BEGUN).acall(waits, child, it)
    assert it.ended == it.began > 0


async def test_nor_where_each_outer_limit_is_computed_anew(in_asyncio: World) -> None:
    """So many different ones have an alarm together."""
    it = CleanUp(in_asyncio)

    async def one(seconds: float) -> None:
        with pytest.raises(DeadlineExceeded):
            async with deadline(seconds):
                await groups_three_deep(in_a_timeout, it)

    await asyncio.gather(*(one(0.5 + number / 1e5) for number in range(70)))
    assert it.ended == it.began > 0


async def test_a_child_task_that_nothing_waits_for_is_cut_off_all_the_same(in_asyncio: World) -> None:
    """It has inherited the instant, and no cancellation of an outer block comes to it."""
    it = CleanUp(in_asyncio)
    with pytest.raises(DeadlineExceeded):
        async with deadline(SHORT):
            task = asyncio.create_task(in_a_timeout(it))
            await asyncio.sleep(10)
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(task, 5)
    assert it.ended == 1


async def test_a_child_task_that_goes_on_after_its_cancellation_is_cut_off_then(in_asyncio: World) -> None:
    """Its group has cancelled it, and it was not impressed: its time is over still."""
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


async def test_an_inherited_limit_cuts_off_a_clean_up_that_an_inner_one_has_begun(in_asyncio: World) -> None:
    """That cancellation came before the instant, and not from an outer block."""

    async def fn() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(10)

    with deadline(2 * SHORT), pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(Pipeline(Timeout(LONG), Timeout(SHORT)).acall(fn), 5)


async def test_an_earlier_limit_inside_is_its_own(tasks_world: World) -> None:
    """The other way round: the inner one ends first, and the outer one has nothing to say."""
    async with deadline(LONG):
        with pytest.raises(TimeoutExceeded) as caught:
            await Timeout(SHORT).aexecute(CleanUp(tasks_world).fn)
    assert type(caught.value) is TimeoutExceeded


# --- task groups ---------------------------------------------------------------------------------


def children(count: int = 3, policy: Any = None) -> Any:
    """Return an `async def` whose child tasks hang in pipelines of their own."""
    inner = policy or Pipeline(Retry(2, on=Boom), Timeout(LONG))

    async def child() -> None:
        await inner.acall(anyio.sleep, 10)

    async def fn(ctx: Any = None) -> None:
        async with anyio.create_task_group() as group:
            for _ in range(count):
                group.start_soon(child)

    return fn


def asyncio_children(ctx: Any = None) -> Any:
    """The same in a task group of asyncio's own."""

    async def fn() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(Timeout(LONG).acall(asyncio.sleep, 10))

    return fn()


async def test_a_timeout_around_a_task_group_ends_with_its_own_error(tasks_world: World) -> None:
    """It was `ExceptionGroup([DeadlineExceeded, ...])`, and `on_timeout` was not called."""
    seen: list[Any] = []
    timeout = Timeout(SHORT, on_timeout=seen.append, name="outer")
    for run in (timeout.aexecute, timeout.acall):
        with pytest.raises(TimeoutExceeded) as caught:
            await run(children())
        assert type(caught.value) is TimeoutExceeded
        assert caught.value.policy == "outer"
    assert [event.policy for event in seen] == ["outer", "outer"]


async def test_so_does_one_around_a_task_group_of_asyncio(in_asyncio: World) -> None:
    with pytest.raises(TimeoutExceeded) as caught:
        await Timeout(SHORT).aexecute(asyncio_children)
    assert type(caught.value) is TimeoutExceeded


async def test_a_block_around_a_task_group_ends_with_its_own_error(tasks_world: World) -> None:
    with pytest.raises(DeadlineExceeded, match="the block did not end within"):
        async with deadline(SHORT):
            await children()()


async def test_a_block_inside_each_child(tasks_world: World) -> None:
    """Blocks of children find the inherited instant as well."""

    async def child() -> None:
        async with deadline(LONG):
            await anyio.sleep(10)

    async def fn() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(child)
            group.start_soon(child)

    with pytest.raises(TimeoutExceeded) as caught:
        await Timeout(SHORT).acall(fn)
    assert type(caught.value) is TimeoutExceeded


async def test_each_attempt_around_a_task_group_is_tried_again(tasks_world: World) -> None:
    """Three attempts, and not one that ends with a group."""
    entered: list[int] = []

    async def fn(ctx: Context) -> None:
        entered.append(ctx.attempt)
        await children()()

    with pytest.raises(TimeoutExceeded):
        await Pipeline(Retry(3, backoff=[0]), Timeout(SHORT)).aexecute(fn)
    assert entered == [1, 2, 3]


async def test_a_breaker_inside_does_not_count_it(tasks_world: World) -> None:
    """Nor does a fallback answer it: it is the limit around them that has cut the call off."""
    breaker = CircuitBreaker(1)
    with pytest.raises(TimeoutExceeded):
        await Pipeline(Timeout(SHORT), Fallback("instead"), breaker).aexecute(children())
    assert breaker.state is CLOSED


async def test_a_childs_own_failure_comes_out_in_its_group(tasks_world: World) -> None:
    """A group with anything else in it is the function's."""

    async def fails() -> None:
        raise Boom

    async def fn(ctx: Any) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(fails)

    with pytest.raises(ExceptionGroup):
        await Timeout(LONG).aexecute(fn)


async def test_a_childs_own_limit_comes_out_in_its_group(tasks_world: World) -> None:
    """It is not the instant of the outer one."""
    with pytest.raises(ExceptionGroup) as caught:
        await Timeout(LONG).aexecute(children(1, Timeout(SHORT)))
    assert [type(error) for error in caught.value.exceptions] == [TimeoutExceeded]


# --- a fallback inside ---------------------------------------------------------------------------


async def test_a_fallback_inside_never_answers_a_cut_off(world: World) -> None:
    """Nested pipelines inherit the instant: in threads, two timers raced, and the fallback answered one in two."""
    inner: Any = Pipeline(Retry(2, on=Boom), Timeout(LONG))
    pipeline: Any = Pipeline(Timeout(SHORT), Fallback("instead"))

    async def calls(ctx: Any = None) -> Any:
        return await world.execute(inner, hangs)

    async def hangs(ctx: Any = None) -> None:
        await world.hang()

    for _ in range(20):
        error = await world.attempt(pipeline, calls)
        assert type(error) is TimeoutExceeded


@pytest.mark.serial
def test_a_fallback_inside_never_answers_in_many_threads() -> None:
    """Where threads compete, the inner timer is seen first about as often as the outer one."""
    inner, pipeline = Timeout(LONG), Pipeline(Timeout(SHORT), Fallback("instead"))
    results: list[Any] = []
    released = threading.Event()

    def fn() -> Any:
        return inner.call(released.wait, 10)

    def client() -> None:
        for _ in range(3):
            try:
                results.append(pipeline.call(fn))
            except TimeoutExceeded as error:
                results.append(type(error))

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    released.set()
    assert set(results) == {TimeoutExceeded}


async def test_a_fallback_inside_does_not_answer_a_deadline_found_over(world: World) -> None:
    """The function is at the instant itself, and something inside finds that no time is left."""

    async def checks(ctx: Context) -> None:
        while not ctx.expired:
            await world.sleep(0.001)
        ctx.check()

    for _ in range(5):
        assert type(await world.attempt(Pipeline(Timeout(SHORT), Fallback("instead")), checks)) is TimeoutExceeded


async def test_a_fallback_inside_answers_an_earlier_limit(world: World) -> None:
    pipeline: Any = Pipeline(Timeout(LONG), Fallback("instead"), Timeout(SHORT))

    async def hangs(ctx: Any) -> None:
        await world.hang()

    assert await world.attempt(pipeline, hangs) == "instead"
