"""Timeout in asyncio and trio: cancellation, scopes and task groups around it and inside."""

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

from resilience import Context, Fallback, Policy, Timeout, TimeoutExceeded
from resilience.testing import virtual_time
from tests.conftest import Boom, Script, World
from tests.policies.timeouts import LONG, SHORT, Stopwatch, forever, hanging

# --- cancellation, in both worlds of tasks -----------------------------------------------------


@pytest.mark.parametrize("first", ["caller", "timer"])
async def test_a_caller_who_cancels_at_the_very_moment_of_the_timer_is_served(tasks_world: World, first: str) -> None:
    """Both are due when the loop looks again: the caller has asked for more than this call to end.

    Only under asyncio, and only where the timer was first, the call ends with its timeout all the same: anyio
    delivers to a task that is being cancelled already no second time, but at its next wait.
    """
    told: list[object] = []
    limits = (0.01, 0.011) if first == "caller" else (0.011, 0.01)

    async def fn(ctx: Context) -> None:
        await anyio.lowlevel.checkpoint()
        time.sleep(0.03)  # the loop sees neither of the two until both are due
        await tasks_world.hang()

    with Stopwatch() as took:
        with anyio.move_on_after(limits[0]) as scope:
            try:
                await Timeout(limits[1], on_timeout=told.append).aexecute(fn)
            except TimeoutExceeded:
                assert (tasks_world.name, first) == ("asyncio", "timer")
            await anyio.sleep(10)
        assert scope.cancelled_caught
    assert took.seconds < 5
    if (tasks_world.name, first) != ("asyncio", "timer"):
        assert told == []


async def test_a_cancel_scope_knows_its_own_cancellation_beside_that_of_the_timer(in_asyncio: World) -> None:
    """Both come before the task runs again: there anyio goes by the message of the one that is raised."""
    loop = asyncio.get_running_loop()

    async def fn(ctx: Context) -> None:
        loop.call_later(0.001, scope.cancel)
        time.sleep(0.03)  # the loop sees neither of the two until both are due
        while True:
            await asyncio.sleep(0)

    with anyio.CancelScope() as scope:
        await Timeout(0.01).aexecute(fn)
    assert scope.cancelled_caught


async def test_a_function_that_swallows_its_cancellation_has_its_result_returned(tasks_world: World) -> None:
    """It came to an end after all, and that is what the caller gets."""
    told: list[object] = []

    async def fn(ctx: Context) -> str:
        try:
            await anyio.sleep(10)
        except BaseException:  # what no function should do
            pass
        return "all the same"

    assert await tasks_world.attempt(Timeout(SHORT, on_timeout=told.append), fn) == "all the same"
    assert told == []


async def test_a_function_that_turns_its_cancellation_into_an_error_has_it_raised(tasks_world: World) -> None:
    """Clients do that; the error is their word on what happened."""
    error = Boom("cancelled, says the client")

    async def fn(ctx: Context) -> None:
        try:
            await anyio.sleep(10)
        except BaseException:
            raise error from None

    assert await tasks_world.attempt(Timeout(SHORT), fn) is error


async def test_a_users_scope_around_that_ends_first_is_served(tasks_world: World) -> None:
    """`anyio.fail_after` raises its own `TimeoutError`, `move_on_after` moves on."""
    with pytest.raises(TimeoutError) as raised, anyio.fail_after(0.01):
        await Timeout(LONG).aexecute(hanging(tasks_world))
    assert type(raised.value) is TimeoutError


async def test_a_users_scope_around_that_ends_later_sees_our_error(tasks_world: World) -> None:
    """And is not cancelled itself."""
    with anyio.move_on_after(LONG) as scope:
        with pytest.raises(TimeoutExceeded):
            await Timeout(0.01).aexecute(hanging(tasks_world))
        await anyio.sleep(0)
    assert not scope.cancel_called


async def test_a_users_scope_inside_that_ends_first_is_its_own(tasks_world: World) -> None:
    """What it cancels is not ours; what it raises is a user's own `TimeoutError`."""

    async def moves_on(ctx: Context) -> str:
        with anyio.move_on_after(0.01):
            await anyio.sleep(10)
        await anyio.sleep(0)
        return "moved on"

    async def fails(ctx: Context) -> None:
        with anyio.fail_after(0.01):
            await anyio.sleep(10)

    assert await tasks_world.attempt(Timeout(LONG), moves_on) == "moved on"
    assert type(await tasks_world.attempt(Timeout(LONG), fails)) is TimeoutError


async def test_a_users_scope_inside_that_ends_later_is_left_by_our_timeout(tasks_world: World) -> None:
    """It does not swallow what is ours."""

    async def fn(ctx: Context) -> str:
        with anyio.move_on_after(LONG):
            await anyio.sleep(10)
        return "moved on"

    assert type(await tasks_world.attempt(Timeout(SHORT), fn)) is TimeoutExceeded


async def test_a_shielded_part_is_finished_first(tasks_world: World) -> None:
    """anyio's shield holds against our timer under trio; under asyncio it holds against anyio's scopes alone."""
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


async def test_a_task_group_inside_is_wound_up(tasks_world: World) -> None:
    """Its children are cancelled and waited for before the caller hears of the timeout."""
    ended: list[int] = []

    async def child(n: int) -> None:
        try:
            await anyio.sleep(10)
        finally:
            ended.append(n)

    async def fn(ctx: Context) -> None:
        async with anyio.create_task_group() as group:
            for n in range(3):
                group.start_soon(child, n)

    assert type(await tasks_world.attempt(Timeout(SHORT), fn)) is TimeoutExceeded
    assert sorted(ended) == [0, 1, 2]


async def test_a_task_group_around_that_is_cancelled_by_a_sibling_is_served(tasks_world: World) -> None:
    """The group raises the sibling's error and nothing else."""

    async def fail() -> None:
        await anyio.sleep(0.01)
        raise Boom

    with pytest.raises(ExceptionGroup) as raised:
        async with anyio.create_task_group() as group:
            group.start_soon(fail)
            group.start_soon(Timeout(LONG).aexecute, hanging(tasks_world))
    assert [type(error) for error in raised.value.exceptions] == [Boom]


async def test_a_timeout_is_one_error_of_a_group_like_others(tasks_world: World) -> None:
    """It cancels the siblings, and the group raises it."""
    with pytest.raises(ExceptionGroup) as raised:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 10)
            group.start_soon(Timeout(0.01).aexecute, hanging(tasks_world))
    assert [type(error) for error in raised.value.exceptions] == [TimeoutExceeded]


async def test_a_cancelled_scope_around_is_served_at_once(tasks_world: World) -> None:
    """A call that is made where everything is cancelled already ends at its first wait."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        await Timeout(LONG).aexecute(hanging(tasks_world))
    assert scope.cancelled_caught


# --- asyncio: the semantics of asyncio.timeout -------------------------------------------------


async def test_a_clean_up_that_awaits_completes(in_asyncio: World) -> None:
    """One delivery: what is awaited in a `finally` is not cancelled again."""
    done: list[str] = []

    async def fn(ctx: Context) -> None:
        try:
            await asyncio.sleep(10)
        finally:
            for step in ("rollback", "close"):
                await asyncio.sleep(0.005)
                done.append(step)

    with pytest.raises(TimeoutExceeded):
        await Timeout(0.01).aexecute(fn)
    assert done == ["rollback", "close"]


async def test_a_swallowed_cancellation_is_not_delivered_again(in_asyncio: World) -> None:
    """The function may go on for as long as it likes."""

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


async def test_the_count_of_cancellations_is_back_to_what_it_was(in_asyncio: World) -> None:
    """`Task.cancelling()`, after one timer, after nested ones, after many."""
    nested = Policy.wrap(Timeout(0.011), Fallback(on=Boom), Timeout(0.01), Timeout(LONG))
    for policy in (Timeout(0.005), nested, *[Timeout(0.001)] * 20):
        with pytest.raises(TimeoutExceeded):
            await policy.aexecute(forever)
        assert current_task().cancelling() == 0
    await asyncio.sleep(0)  # and no cancellation is left to be delivered


async def test_nested_timers_that_are_due_at_once_leave_nothing_behind(in_asyncio: World) -> None:
    """Both have fired: the outer one has the word, and both have taken their cancellation back."""

    async def fn(ctx: Context) -> None:
        await asyncio.sleep(0)
        time.sleep(0.03)
        await asyncio.sleep(10)

    told: list[str] = []
    tell = lambda event: told.append(event.policy)  # noqa: E731
    pipeline = Policy.wrap(Timeout(0.011, name="outer", on_timeout=tell), Timeout(0.01, name="inner", on_timeout=tell))
    with pytest.raises(TimeoutExceeded) as raised:
        await pipeline.aexecute(fn)
    assert [raised.value.policy] == told
    assert current_task().cancelling() == 0
    await asyncio.sleep(0)


async def test_a_task_that_had_been_cancelled_before_may_still_time_out(in_asyncio: World) -> None:
    """Somebody swallowed an earlier cancellation without `uncancel`: it is still counted, and not ours."""
    current_task().cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(1)
    assert current_task().cancelling() == 1
    with pytest.raises(TimeoutExceeded):
        await Timeout(0.01).aexecute(forever)
    assert current_task().cancelling() == 1


@pytest.mark.parametrize("first", ["caller", "timer"])
def test_a_task_that_is_cancelled_at_the_moment_of_the_timer_is_cancelled(first: str) -> None:
    """In whichever order the loop comes to the two."""
    told: list[object] = []
    counts: list[int] = []

    async def fn(ctx: Context) -> None:
        asyncio.get_running_loop().call_later(0.5 if first == "caller" else 1.5, current_task().cancel)
        await asyncio.sleep(0)
        clock.advance(3)
        await asyncio.sleep(10)

    async def call() -> None:
        try:
            await Timeout(1, on_timeout=told.append).aexecute(fn)
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
    assert told == []
    assert counts == [1]


async def test_a_task_that_is_cancelled_while_it_cleans_up_after_a_timeout_is_cancelled(in_asyncio: World) -> None:
    """The caller's word comes later and weighs more."""

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


async def test_asyncio_timeout_around_that_ends_first_raises_its_own_error(in_asyncio: World) -> None:
    """The builtin `TimeoutError`, as without us."""
    with pytest.raises(TimeoutError) as raised:
        async with asyncio.timeout(0.01):
            await Timeout(LONG).aexecute(forever)
    assert type(raised.value) is TimeoutError
    assert current_task().cancelling() == 0


@pytest.mark.parametrize("limits", [(0.01, 0.011), (0.011, 0.01)], ids=["outer", "inner"])
@pytest.mark.parametrize("ours", ["outside", "inside"])
async def test_two_timeouts_of_different_makes_at_the_same_moment(
    in_asyncio: World, limits: tuple[float, float], ours: str
) -> None:
    """The outer one of two that are due at once has the word, whosever it is."""

    async def fn(ctx: Any = None) -> None:
        await asyncio.sleep(0)
        time.sleep(0.03)
        await asyncio.sleep(10)

    async def theirs(ctx: Context) -> None:
        async with asyncio.timeout(limits[1]):
            await fn()

    with pytest.raises(TimeoutError) as raised:
        if ours == "outside":
            await Timeout(limits[0]).aexecute(theirs)
        else:
            async with asyncio.timeout(limits[0]):
                await Timeout(limits[1]).aexecute(fn)
    assert type(raised.value) is (TimeoutExceeded if ours == "outside" else TimeoutError)
    assert current_task().cancelling() == 0
    await asyncio.sleep(0)


async def test_asyncio_timeout_inside_is_the_functions_own(in_asyncio: World) -> None:
    """Its `TimeoutError` passes; where ours is first, it passes ours on."""

    async def quick(ctx: Context) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(10)

    async def slow(ctx: Context) -> None:
        async with asyncio.timeout(LONG):
            await asyncio.sleep(10)

    with pytest.raises(TimeoutError) as raised:
        await Timeout(LONG).aexecute(quick)
    assert type(raised.value) is TimeoutError
    with pytest.raises(TimeoutExceeded):
        await Timeout(0.01).aexecute(slow)
    assert current_task().cancelling() == 0


async def test_asyncio_wait_for_around_and_inside(in_asyncio: World) -> None:
    """The older way of saying it."""

    async def quick(ctx: Context) -> None:
        await asyncio.wait_for(asyncio.sleep(10), 0.01)

    async def slow(ctx: Context) -> None:
        await asyncio.wait_for(asyncio.sleep(10), LONG)

    with pytest.raises(TimeoutError) as raised:
        await Timeout(LONG).aexecute(quick)
    assert type(raised.value) is TimeoutError
    with pytest.raises(TimeoutExceeded):
        await Timeout(0.01).aexecute(slow)
    with pytest.raises(TimeoutError) as raised:
        await asyncio.wait_for(Timeout(LONG).aexecute(forever), 0.01)
    assert type(raised.value) is TimeoutError


async def test_asyncio_task_groups_inside_and_around(in_asyncio: World) -> None:
    """Children are cancelled, siblings' errors are served, and the group's own accounting is left intact."""
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


def test_a_task_group_around_is_served_when_it_is_cancelled_at_the_moment_of_the_timer() -> None:
    """The sibling's failure and the limit are due at once: the group's cancellation is not taken for ours."""

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
    """It runs before the loop has ever seen it."""
    factory: Any = asyncio.eager_task_factory  # type: ignore[attr-defined]
    asyncio.get_running_loop().set_task_factory(factory)
    with pytest.raises(TimeoutExceeded):
        await asyncio.create_task(Timeout(0.01).aexecute(forever))
    assert await asyncio.create_task(Timeout(LONG).aexecute(Script("at once").function())) == "at once"


async def test_a_timer_that_did_not_fire_never_does(in_asyncio: World) -> None:
    """It is taken back when the call ends: the task may live on for longer than the limit."""
    for script in (Script("fine"), Script(Boom())):
        await World("asyncio").attempt(Timeout(0.01), script.function())
    await asyncio.sleep(0.03)


# --- trio --------------------------------------------------------------------------------------


async def test_trio_scopes_around_are_served(in_trio: World) -> None:
    """`trio.fail_after` and `trio.move_on_after`, with their own error and their own word."""
    world = World("trio")
    with pytest.raises(trio.TooSlowError), trio.fail_after(0.01):
        await Timeout(LONG).aexecute(hanging(world))
    with trio.move_on_after(0.01) as scope:
        await Timeout(LONG).aexecute(hanging(world))
    assert scope.cancelled_caught


def test_trio_has_a_clock_of_its_own() -> None:
    """Where it runs faster than the process, a limit is over when *its* seconds have passed."""
    clock: Any = trio.testing.MockClock(rate=1000)

    async def main() -> None:
        with Stopwatch() as took, pytest.raises(TimeoutExceeded):
            await Timeout(20).aexecute(hanging_in_trio)
        assert took.seconds < 5

    async def hanging_in_trio(ctx: Context) -> None:
        await trio.sleep(10_000)

    trio.run(main, clock=clock)
