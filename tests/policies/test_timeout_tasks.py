"""Timeout in asyncio and trio: cancellation, and outer and inner scopes and task groups."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio
import trio.testing

from resilience import Context, Policy, Timeout, TimeoutExceeded, deadline
from resilience.testing import virtual_time
from tests.conftest import Boom, Script, World
from tests.policies.timeouts import LONG, SHORT, Stopwatch, forever, hanging

# --- cancellation in asyncio and trio ----------------------------------------------------------


@pytest.mark.parametrize("first", ["caller", "timer"])
async def test_a_cancellation_at_the_instant_of_the_timer_is_not_lost(tasks_world: World, first: str) -> None:
    """Both are due in the same iteration of the event loop, and the cancellation of the caller has priority.

    If the timer is first in asyncio, the call ends with its timeout: anyio cancels a task a second time only at its
    next wait.
    """
    timeouts: list[object] = []
    limits = (0.01, 0.011) if first == "caller" else (0.011, 0.01)

    async def fn(ctx: Context) -> None:
        await anyio.lowlevel.checkpoint()
        time.sleep(0.03)  # the loop sees neither of the two until both are due
        await tasks_world.hang()

    with Stopwatch() as took:
        with anyio.move_on_after(limits[0]) as scope:
            try:
                await Timeout(limits[1], on_timeout=timeouts.append).aexecute(fn)
            except TimeoutExceeded:
                assert (tasks_world.name, first) == ("asyncio", "timer")
            await anyio.sleep(10)
        assert scope.cancelled_caught
    assert took.seconds < 5
    if (tasks_world.name, first) != ("asyncio", "timer"):
        assert timeouts == []


async def test_a_cancel_scope_recognizes_its_cancellation_beside_that_of_the_timer(in_asyncio: World) -> None:
    """Both come before the task runs again, and anyio decides by the message of the one that is raised."""
    loop = asyncio.get_running_loop()

    async def fn(ctx: Context) -> None:
        loop.call_later(0.001, scope.cancel)
        time.sleep(0.03)  # the loop sees neither of the two until both are due
        while True:
            await asyncio.sleep(0)

    with anyio.CancelScope() as scope:
        await Timeout(0.01).aexecute(fn)
    assert scope.cancelled_caught


async def test_the_result_of_a_function_that_swallows_its_cancellation_is_returned(tasks_world: World) -> None:
    """No timeout is reported."""
    timeouts: list[object] = []

    async def fn(ctx: Context) -> str:
        try:
            await anyio.sleep(10)
        except BaseException:  # functions should not do this
            pass
        return "all the same"

    assert await tasks_world.attempt(Timeout(SHORT, on_timeout=timeouts.append), fn) == "all the same"
    assert timeouts == []


async def test_an_error_raised_in_place_of_the_cancellation_is_raised_to_the_caller(tasks_world: World) -> None:
    """Some clients do that."""
    error = Boom("cancelled by the client")

    async def fn(ctx: Context) -> None:
        try:
            await anyio.sleep(10)
        except BaseException:
            raise error from None

    assert await tasks_world.attempt(Timeout(SHORT), fn) is error


async def test_an_inner_cancel_scope_has_its_effect_if_it_expires_first(tasks_world: World) -> None:
    """`move_on_after` continues, and `fail_after` raises its own `TimeoutError`."""

    async def moves_on(ctx: Context, seconds: float = 0.01) -> str:
        with anyio.move_on_after(seconds):
            await anyio.sleep(10)
        await anyio.sleep(0)
        return "moved on"

    async def fails(ctx: Context) -> None:
        with anyio.fail_after(0.01):
            await anyio.sleep(10)

    assert await tasks_world.attempt(Timeout(LONG), moves_on) == "moved on"
    assert type(await tasks_world.attempt(Timeout(LONG), fails)) is TimeoutError
    assert type(await tasks_world.attempt(Timeout(SHORT), lambda ctx: moves_on(ctx, LONG))) is TimeoutExceeded


async def test_a_shielded_clean_up_ends_before_the_timeout_is_raised(tasks_world: World) -> None:
    """In trio anyio's shield holds against the timer; in asyncio only against cancel scopes of anyio."""
    done: list[str] = []

    async def fn(ctx: Context) -> None:
        try:
            await anyio.sleep(10)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)
                done.append("cleaned up")

    assert type(await tasks_world.attempt(Timeout(SHORT), fn)) is TimeoutExceeded
    assert done == ["cleaned up"]


async def test_a_call_in_a_cancelled_scope_ends_at_its_first_wait(tasks_world: World) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await Timeout(LONG).aexecute(hanging(tasks_world))
    assert scope.cancelled_caught


# --- asyncio: the semantics of asyncio.timeout -------------------------------------------------


async def test_a_swallowed_cancellation_is_not_delivered_again(in_asyncio: World) -> None:
    """The function goes on, and no cancellation is pending at the end."""

    async def fn(ctx: Context) -> str:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            for _ in range(5):
                await asyncio.sleep(0.005)
        return "went on"

    assert await Timeout(0.01).aexecute(fn) == "went on"
    assert current_task().cancelling() == 0
    await asyncio.sleep(0)


def current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def test_nested_timers_that_fire_together_leave_no_cancellation(in_asyncio: World) -> None:
    """Only the outer one raises, and both withdraw their cancellation."""

    async def fn(ctx: Context) -> None:
        await asyncio.sleep(0)
        time.sleep(0.03)
        await asyncio.sleep(10)

    timeouts: list[str] = []
    record = lambda event: timeouts.append(event.policy)  # noqa: E731
    pipeline = Policy.wrap(
        Timeout(0.011, name="outer", on_timeout=record), Timeout(0.01, name="inner", on_timeout=record)
    )
    with pytest.raises(TimeoutExceeded) as raised:
        await pipeline.aexecute(fn)
    assert [raised.value.policy] == timeouts
    assert current_task().cancelling() == 0
    await asyncio.sleep(0)


async def test_a_task_with_an_earlier_cancellation_can_time_out(in_asyncio: World) -> None:
    """A cancellation that was swallowed without `uncancel` still counts, and is not withdrawn."""
    current_task().cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(1)
    assert current_task().cancelling() == 1
    with pytest.raises(TimeoutExceeded):
        await Timeout(0.01).aexecute(forever)
    assert current_task().cancelling() == 1


async def test_a_cancellation_that_is_still_to_be_delivered_is_not_turned_into_a_timeout(in_asyncio: World) -> None:
    """The time is up before the task waits for the first time, so the timer fires before the cancellation arrives."""
    current_task().cancel()
    with pytest.raises(asyncio.CancelledError):
        async with deadline(0):
            await asyncio.sleep(10)
    assert current_task().uncancel() == 0


async def test_code_that_finds_no_time_left_times_out_despite_a_cancellation(in_asyncio: World) -> None:
    """Before Python 3.13, a task group whose child fails late leaves its request to cancel the parent task."""

    async def fn(ctx: Context) -> None:
        try:
            await forever(ctx)
        finally:
            current_task().cancel()
            ctx.check()

    with pytest.raises(TimeoutExceeded) as raised:
        await Timeout(0.01).aexecute(fn)
    assert type(raised.value) is TimeoutExceeded
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(0)
    assert current_task().uncancel() == 0


@pytest.mark.parametrize("first", ["caller", "timer"])
def test_a_task_that_is_cancelled_at_the_instant_of_the_timer_is_cancelled(first: str) -> None:
    """The two may come in either order."""
    timeouts: list[object] = []
    counts: list[int] = []

    async def fn(ctx: Context) -> None:
        asyncio.get_running_loop().call_later(0.5 if first == "caller" else 1.5, current_task().cancel)
        await asyncio.sleep(0)
        clock.advance(3)
        await asyncio.sleep(10)

    async def call() -> None:
        try:
            await Timeout(1, on_timeout=timeouts.append).aexecute(fn)
        finally:
            counts.append(current_task().cancelling())

    async def main() -> None:
        task = asyncio.create_task(call())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    with virtual_time() as clock:
        asyncio.run(main())
        assert clock.now() == 3
    assert timeouts == []
    assert counts == [1]


async def test_a_task_that_is_cancelled_while_it_cleans_up_after_a_timeout_is_cancelled(in_asyncio: World) -> None:
    """The later cancellation has priority."""

    async def fn(ctx: Context) -> None:
        try:
            await asyncio.sleep(10)
        finally:
            current_task().cancel()
            await asyncio.sleep(10)

    task = asyncio.create_task(Timeout(0.01).aexecute(fn))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


@pytest.mark.parametrize("limits", [(0.01, 0.011), (0.011, 0.01)], ids=["outer", "inner"])
@pytest.mark.parametrize("ours", ["outside", "inside"])
async def test_of_two_equal_timeouts_the_outer_raises(
    in_asyncio: World, limits: tuple[float, float], ours: str
) -> None:
    """This holds whichever of the two is outside."""

    async def fn(ctx: Any = None) -> None:
        await asyncio.sleep(0)
        time.sleep(0.03)
        await asyncio.sleep(10)

    async def inner_asyncio_timeout(ctx: Context) -> None:
        async with asyncio.timeout(limits[1]):
            await fn()

    with pytest.raises(TimeoutError) as raised:
        if ours == "outside":
            await Timeout(limits[0]).aexecute(inner_asyncio_timeout)
        else:
            async with asyncio.timeout(limits[0]):
                await Timeout(limits[1]).aexecute(fn)
    assert type(raised.value) is (TimeoutExceeded if ours == "outside" else TimeoutError)
    assert current_task().cancelling() == 0
    await asyncio.sleep(0)


async def within(seconds: float) -> None:
    async with asyncio.timeout(seconds):
        await asyncio.sleep(10)


@pytest.mark.parametrize("inner", [within, lambda seconds: asyncio.wait_for(asyncio.sleep(10), seconds)])
async def test_an_inner_limit_of_asyncio_raises_its_own_error_or_passes_ours_on(in_asyncio: World, inner: Any) -> None:
    """If it expires first, its `TimeoutError` is unchanged; if not, it does not change the cancellation."""
    with pytest.raises(TimeoutError) as raised:
        await Timeout(LONG).acall(inner, 0.01)
    assert type(raised.value) is TimeoutError
    with pytest.raises(TimeoutExceeded):
        await Timeout(0.01).acall(inner, LONG)
    assert current_task().cancelling() == 0


async def test_an_outer_wait_for_of_asyncio_raises_its_own_error(in_asyncio: World) -> None:
    with pytest.raises(TimeoutError) as raised:
        await asyncio.wait_for(Timeout(LONG).aexecute(forever), 0.01)
    assert type(raised.value) is TimeoutError


async def test_asyncio_task_groups_work_inside_and_outside_a_timeout(in_asyncio: World) -> None:
    """Children are cancelled, errors of siblings are raised, and no cancellation is left in the task."""
    ended: list[str] = []

    async def child() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0)
            ended.append("child")

    async def with_group(ctx: Context) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(child())
            group.create_task(child())

    async def fail() -> None:
        await asyncio.sleep(0.005)
        raise Boom

    with pytest.raises(TimeoutExceeded):
        await Timeout(0.01).aexecute(with_group)
    assert ended == ["child", "child"]
    assert current_task().cancelling() == 0
    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await Timeout(LONG).aexecute(forever)
    assert [type(error) for error in raised.value.exceptions] == [Boom]
    assert current_task().cancelling() == 0


def test_a_task_group_that_is_cancelled_at_the_instant_of_the_timer_raises_its_error() -> None:
    """The cancellation by the group is not taken for that of the timer."""

    async def fail() -> None:
        await asyncio.sleep(0.5)
        raise Boom

    async def fn(ctx: Context) -> None:
        await asyncio.sleep(0)
        clock.advance(3)
        await asyncio.sleep(10)

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                await Timeout(2).aexecute(fn)
        assert Boom in [type(error) for error in raised.value.exceptions]
        assert current_task().cancelling() == 0

    with virtual_time() as clock:
        asyncio.run(main())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
async def test_an_eager_task_can_time_out(in_asyncio: World) -> None:
    """Such a task runs before the event loop knows it."""
    factory: Any = asyncio.eager_task_factory  # type: ignore[attr-defined]
    asyncio.get_running_loop().set_task_factory(factory)
    with pytest.raises(TimeoutExceeded):
        await asyncio.create_task(Timeout(0.01).aexecute(forever))
    assert await asyncio.create_task(Timeout(LONG).aexecute(Script("at once").function())) == "at once"


async def test_a_timer_is_cancelled_when_its_call_ends(in_asyncio: World) -> None:
    """The task may run for longer than the limit."""
    for script in (Script("fine"), Script(Boom())):
        await in_asyncio.attempt(Timeout(0.01), script.function())
    await asyncio.sleep(0.03)


# --- trio --------------------------------------------------------------------------------------


def test_a_timeout_in_trio_uses_the_clock_of_the_run() -> None:
    """A limit is over when the seconds of that clock have passed, here a thousand times faster."""
    clock: Any = trio.testing.MockClock(rate=1000)

    async def main() -> None:
        with Stopwatch() as took, pytest.raises(TimeoutExceeded):
            await Timeout(20).aexecute(hanging_in_trio)
        assert took.seconds < 5

    async def hanging_in_trio(ctx: Context) -> None:
        await trio.sleep(10_000)

    trio.run(main, clock=clock)
