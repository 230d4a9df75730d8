"""`with detached(timeout)`: a block that inherits no deadline, for clean-ups and background work."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import anyio
import pytest

from resilience import Context, Pipeline, Retry, Timeout, current_context, deadline, detached
from resilience.errors import DeadlineExceeded, TimeoutExceeded
from tests.conftest import Boom, FakeClock, Virtual, World
from tests.custom import INF
from tests.policies.timeouts import LONG, SHORT


async def left(ctx: Context) -> float:
    return ctx.remaining()


# --- inheritance ---


async def test_a_detached_block_does_not_inherit_the_deadline(world: World, clock: FakeClock) -> None:
    """After an exceeded deadline, executions begin only in the block."""
    with deadline(0):
        with pytest.raises(DeadlineExceeded):
            await world.execute(Retry(), left)
        with detached(timeout=5.0) as ctx:
            assert ctx is current_context()
            assert await world.execute(Retry(), left) == 5.0
        with pytest.raises(DeadlineExceeded):
            await world.execute(Retry(), left)


@pytest.mark.parametrize(("timeout", "seconds"), [(None, INF), (INF, INF), (5, 5), (timedelta(seconds=2), 2), (0, 0)])
def test_the_timeout_of_a_detached_block_and_limits_in_it_hold(clock: FakeClock, timeout: Any, seconds: float) -> None:
    with deadline(1), detached(timeout) as ctx:
        assert ctx.remaining() == seconds
        with deadline(3) as inner:
            assert inner.remaining() == min(seconds, 3)


async def test_a_detached_block_inherits_operation_and_properties(world: World) -> None:
    async def fn(ctx: Context) -> tuple[Any, ...]:
        with detached():
            inner = current_context()
        return inner.operation, dict(inner.properties), inner.remaining()

    ctx = Context(timeout=5, operation="get-user", properties={"tenant": "a"})
    assert await world.execute(Retry(), fn, ctx) == ("get-user", {"tenant": "a"}, INF)


async def test_after_a_detached_block_the_outer_context_is_ambient_again(world: World, clock: FakeClock) -> None:
    with deadline(7) as outer:
        with pytest.raises(Boom), detached():
            raise Boom
        assert current_context() is outer


# --- clean-ups -----------------------------------------------------------------------------------


def test_a_clean_up_in_an_abandoned_thread_can_be_detached() -> None:
    """After its timeout the function goes on in its thread, and reaches its `finally`."""
    begun, ended = threading.Event(), threading.Event()
    cleaned: list[Any] = []
    clean_up = Retry(2, on=Boom)

    def fn() -> None:
        try:
            begun.wait(10)
        finally:
            cleaned.append(clean_up.capture(lambda ctx: "too late"))
            with detached(timeout=LONG):
                cleaned.append(clean_up.capture(lambda ctx: "cleaned"))
                cleaned.append(Timeout(LONG).capture(lambda ctx: "on a worker"))
            ended.set()

    with pytest.raises(TimeoutExceeded):
        Timeout(SHORT).call(fn)
    begun.set()
    assert ended.wait(10)
    assert isinstance(cleaned[0].error, DeadlineExceeded)
    assert [outcome.unwrap() for outcome in cleaned[1:]] == ["cleaned", "on a worker"]


@pytest.mark.parametrize("limits", [(SHORT,), (SHORT, LONG)], ids=len)
async def test_a_clean_up_in_a_task_cut_off_can_be_detached(tasks_world: World, limits: tuple[float, ...]) -> None:
    """Without the shield, trio would cancel every `await` of the clean-up."""
    cleaned: list[str] = []

    async def cleans(ctx: Context) -> None:
        await anyio.sleep(SHORT)
        cleaned.append("cleaned")

    async def fn(ctx: Context) -> None:
        try:
            await anyio.sleep(10)
        finally:
            async with detached(timeout=LONG):
                await Retry(2, on=Boom).aexecute(cleans)
                await Timeout(LONG).aexecute(cleans)

    with pytest.raises(TimeoutExceeded):
        await Pipeline(*map(Timeout, limits)).aexecute(fn)
    assert cleaned == ["cleaned"] * 2


async def test_a_detached_clean_up_that_hangs_is_cut_off_by_its_own_timeout(tasks_world: World) -> None:
    errors: list[BaseException] = []

    async def fn(ctx: Context) -> None:
        try:
            await anyio.sleep(10)
        finally:
            try:
                async with detached(timeout=SHORT):
                    await anyio.sleep(10)
            except DeadlineExceeded as error:
                errors.append(error)

    began = time.monotonic()
    with pytest.raises(TimeoutExceeded):
        await Timeout(SHORT).aexecute(fn)
    assert time.monotonic() - began < 5
    assert [str(error) for error in errors] == [f"the block did not end within {SHORT:g} s"]


async def test_a_detached_block_that_is_cut_off_is_cancelled_once(in_asyncio: World) -> None:
    """So a clean-up inside it runs to its end, as under any limit in asyncio."""
    ended = False
    with pytest.raises(DeadlineExceeded):
        async with detached(timeout=SHORT):
            try:
                await anyio.sleep(10)
            finally:
                await anyio.sleep(0.001)
                await anyio.sleep(0.001)
                ended = True
    assert ended


async def test_a_detached_clean_up_without_a_timeout_is_not_cut_off(tasks_world: World) -> None:
    """It may end after the outer deadline, which then raises its error."""
    ended: list[str] = []
    with pytest.raises(DeadlineExceeded):
        async with deadline(SHORT):
            try:
                await anyio.sleep(10)
            finally:
                async with detached():
                    await anyio.sleep(SHORT)
                    ended.append("ended")
    assert ended == ["ended"]


async def test_a_detached_block_is_shielded_from_a_cancelled_scope(tasks_world: World) -> None:
    """A scope of anyio, such as the group of a web framework, cancels every wait under asyncio, too."""
    ended: list[str] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.sleep(LONG)
        finally:
            async with detached(timeout=LONG):
                await anyio.sleep(SHORT)
                await Timeout(LONG).aexecute(lambda ctx: anyio.sleep(SHORT))
                ended.append("ended")
    assert scope.cancelled_caught
    assert ended == ["ended"]


async def test_the_timeout_of_a_detached_block_holds_in_a_cancelled_scope(tasks_world: World) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        with pytest.raises(DeadlineExceeded):
            async with detached(timeout=SHORT):
                await anyio.sleep(LONG)


# --- background work ---


async def test_a_detached_background_task_outlives_the_deadline_it_was_started_under(virtual_tasks: Virtual) -> None:
    seen: list[float] = []

    async def background() -> None:
        async with detached():
            await anyio.sleep(SHORT * 2)
            seen.append(await Retry().aexecute(left))

    async with anyio.create_task_group() as group:

        async def begins(ctx: Context) -> None:
            group.start_soon(background)

        await Retry().aexecute(begins, Context(timeout=SHORT))
    assert seen == [INF]


async def test_a_timeout_in_a_detached_background_task_sets_its_own_timer(tasks_world: World) -> None:
    async def hangs(ctx: Context) -> None:
        await anyio.sleep(10)

    async def background() -> None:
        async with detached(timeout=LONG):
            outcomes.append(await Timeout(SHORT).acapture(hangs))

    outcomes: list[Any] = []
    async with anyio.create_task_group() as group:

        async def begins(ctx: Context) -> None:
            group.start_soon(background)
            await anyio.sleep(0)

        await Timeout(LONG).aexecute(begins)
    assert type(outcomes[0].error) is TimeoutExceeded


async def test_under_trio_a_cancellation_inside_a_detached_block_does_not_reach_it(in_trio: World) -> None:
    went_on = False
    with anyio.CancelScope() as scope:
        async with detached(timeout=5.0):
            scope.cancel()
            await anyio.sleep(0)
            went_on = True
    assert went_on
