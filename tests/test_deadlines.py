"""Deadlines for blocks: `with deadline(...)` for everything inside, `async with deadline(...)` also cuts off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import anyio
import pytest

from resilience import Context, DeadlineExceeded, Retry, current_context, deadline
from resilience.runtimes.alarms import AsyncioTimer
from resilience.runtimes.tasks import ScopeTimer
from tests.conftest import Boom, FakeClock, Script, Virtual, World
from tests.custom import INF, PASSING
from tests.functions import raising

# --- deadline blocks -------------------------------------------------------------------------


@asynccontextmanager
async def block(world: World, how: str, seconds: Any) -> AsyncIterator[Context]:
    """Enter `with deadline(...)` or `async with deadline(...)`."""
    if how == "with":
        with deadline(seconds) as ctx:
            yield ctx
    else:
        async with deadline(seconds) as ctx:
            yield ctx


def each_block(test: Callable[..., object]) -> Callable[..., object]:
    """Run a test with both forms in each world; `async with` exists only in tasks."""
    return pytest.mark.parametrize(
        ("world", "how"),
        [("threads", "with"), ("asyncio", "with"), ("asyncio", "async with"), ("trio", "with"), ("trio", "async with")],
        indirect=["world"],
    )(test)


@each_block
async def test_a_block_limits_every_execution_inside(world: World, how: str, clock: FakeClock) -> None:
    """Each inherits the remaining time; before and after the block there is no limit."""
    left: list[float] = []
    fn = Script(None, doing=lambda ctx: left.append(ctx.remaining())).function()
    async with block(world, how, 8.0) as ctx:
        assert current_context() is ctx
        assert ctx.remaining() == 8.0
        await world.execute(PASSING, fn)
        clock.advance(3.0)
        await world.execute(PASSING, fn)
    await world.execute(PASSING, fn)
    assert current_context().deadline == INF
    assert left == [8.0, 5.0, INF]


@each_block
@pytest.mark.parametrize(
    ("outer", "inner", "left"), [(8.0, 3.0, 3.0), (3.0, 8.0, 3.0), (3.0, INF, 3.0), (INF, INF, INF)]
)
async def test_nested_blocks_can_only_shorten_the_deadline(
    world: World, how: str, outer: float, inner: float, left: float, clock: FakeClock
) -> None:
    """The earlier deadline holds inside, and the outer one again afterwards."""
    async with block(world, how, outer):
        async with block(world, how, inner) as ctx:
            assert ctx.remaining() == left
        assert current_context().remaining() == outer


@each_block
async def test_a_block_inside_an_execution_keeps_its_properties(world: World, how: str, clock: FakeClock) -> None:
    seen: list[Any] = []
    nested = Script(None, doing=lambda it: seen.append((it.remaining(), it.operation, it.properties["a"]))).function()

    async def fn(ctx: Context) -> None:
        async with block(world, how, 3.0):
            await world.execute(PASSING, nested)
        await world.execute(PASSING, nested)

    await world.execute(PASSING, fn, Context(timeout=5.0, operation="op", properties={"a": 1}))
    assert seen == [(3.0, "op", 1), (5.0, "op", 1)]


@each_block
async def test_a_block_inside_an_attempt_keeps_its_number(world: World, how: str) -> None:
    seen: list[int] = []

    async def fn(ctx: Context) -> None:
        async with block(world, how, 3.0):
            seen.append(current_context().attempt)
        raise Boom

    assert type(await world.attempt(Retry(2, on=Boom, backoff=[0]), fn)) is Boom
    assert seen == [1, 2]


async def test_a_plain_block_does_not_cut_off(world: World) -> None:
    """It runs to its end; `check` raises inside."""
    with deadline(0.005) as ctx:
        await world.sleep(0.02)
        assert ctx.expired
        with pytest.raises(DeadlineExceeded):
            ctx.check()


def test_a_block_can_be_used_again_but_not_inside_itself(clock: FakeClock) -> None:
    """The seconds count from each entry. It can be created earlier, without an event loop."""
    budget = deadline(timedelta(seconds=5))
    for _ in range(2):
        clock.advance(100.0)
        with budget as ctx:
            assert ctx.remaining() == 5.0
            with pytest.raises(RuntimeError, match="deadline"):
                budget.__enter__()
        assert current_context().deadline == INF


# --- `async with deadline`: also cuts off ---


async def test_an_async_block_is_cut_off(tasks_world: World) -> None:
    """Of nested blocks, only the one that exceeds its deadline. `DeadlineExceeded` contains the timeout."""
    reached: list[str] = []
    async with deadline(5.0):
        with pytest.raises(DeadlineExceeded, match=r"0\.01") as caught:
            async with deadline(0.01):
                try:
                    await anyio.sleep(5)
                finally:
                    reached.append("finally")
                reached.append("never")
        assert caught.value.timeout == 0.01
        reached.append("after")
        await anyio.sleep(0)  # the task is no longer cancelled
        reached.append("alive")
    assert reached == ["finally", "after", "alive"]


async def test_an_async_block_that_ends_in_time_is_not_cut_off(virtual_tasks: Virtual) -> None:
    async with deadline(0.1):
        await anyio.sleep(0)
    await anyio.sleep(0.12)


@pytest.mark.parametrize("how", ["with", "async with"])
async def test_an_inner_block_that_ends_with_the_outer_one_reports_its_time(virtual_tasks: Virtual, how: str) -> None:
    """ "Not within 5 s" after 10 ms would be wrong. A plain block does not cut off, so the inner one does."""
    await anyio.sleep(1)
    with pytest.raises(DeadlineExceeded) as caught:
        async with block(virtual_tasks, how, 0.01), deadline(5.0):
            await anyio.sleep(4)
    assert caught.value.timeout == pytest.approx(0.01)
    assert virtual_tasks.now() == pytest.approx(1.01)


async def test_catching_the_inner_error_does_not_extend_the_outer_block(virtual_tasks: Virtual) -> None:
    with pytest.raises(DeadlineExceeded):
        async with deadline(0.01):
            try:
                async with deadline(5.0):
                    await anyio.sleep(4)
            except DeadlineExceeded as error:
                assert error.timeout is None or error.timeout <= 0.011  # noqa: PT017
            await anyio.sleep(4)
    assert virtual_tasks.now() == pytest.approx(0.01)


async def test_an_asyncio_task_that_is_cancelled_at_its_deadline_stays_cancelled(in_asyncio: World) -> None:
    async def both() -> None:
        async with deadline(0.01):
            try:
                await asyncio.sleep(5)
            except asyncio.CancelledError:
                asyncio.current_task().cancel()  # type: ignore[union-attr]
                raise

    task = asyncio.create_task(both())
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_async_block_that_suppresses_its_cancellation_raises_nothing(in_asyncio: World) -> None:
    """As with `asyncio.timeout`."""
    ended = False
    async with deadline(0.01):
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            ended = True
    assert ended


async def test_an_error_raised_after_the_cancellation_comes_out(tasks_world: World) -> None:
    with pytest.raises(Boom):
        async with deadline(0.01):
            try:
                await anyio.sleep(5)
            finally:
                raise Boom


@pytest.mark.parametrize(("passed", "message"), [(1.0, "the block did not end within 1 s"), (0.5, "raised inside")])
async def test_a_deadline_error_raised_inside_at_the_deadline_becomes_that_of_the_block(
    tasks_world: World, clock: FakeClock, passed: float, message: str
) -> None:
    """Code inside may read the clock before the loop does; before the deadline, the error is its own."""
    with pytest.raises(DeadlineExceeded, match=message):
        async with deadline(1.0):
            clock.advance(passed)
            raise DeadlineExceeded("raised inside")


@pytest.mark.parametrize("seconds", [0, 5])
async def test_an_async_block_of_zero_seconds_ends_at_its_first_wait(virtual_tasks: Virtual, seconds: float) -> None:
    with pytest.raises(DeadlineExceeded):
        async with deadline(0):
            await anyio.sleep(seconds)
    assert virtual_tasks.now() == 0


@pytest.mark.parametrize("how", ["with", "async with"])
async def test_leaving_a_block_that_was_never_entered_has_no_effect(in_asyncio: World, how: str) -> None:
    """As an exit stack may do; the block can be entered later."""
    budget = deadline(5.0)

    async def leave() -> Any:
        if how == "with":
            return budget.__exit__(None, None, None)
        return await budget.__aexit__(None, None, None)

    with deadline(8.0) as around:
        assert not await leave()
        assert current_context() is around
        with budget:
            assert current_context() is not around
        assert current_context() is around


async def test_an_interrupted_block_leaves_the_context_as_it_was(
    in_asyncio: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = deadline(5.0)
    with deadline(8.0) as around:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(AsyncioTimer, "start", raising(KeyboardInterrupt))
            async with budget:
                raise AssertionError
        assert current_context() is around
        async with budget as ctx:
            assert current_context() is ctx
            assert ctx.remaining() <= 5.0


async def test_an_interrupted_block_cuts_off_nothing(tasks_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer is stopped, so that it does not cancel what the task does next."""

    def interrupted(start: Any) -> Any:
        def begin(timer: Any) -> None:
            start(timer)
            raise KeyboardInterrupt

        return begin

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        for kind in (AsyncioTimer, ScopeTimer):
            patch.setattr(kind, "start", interrupted(kind.start))
        async with deadline(0.02):
            raise AssertionError
    await anyio.sleep(0.1)


def test_generators_that_end_in_any_order_leave_no_deadline_behind(clock: FakeClock) -> None:
    """Blocks in generators that are consumed in turn do not end in the reverse order."""

    def within(seconds: float, count: int) -> Iterator[int]:
        with deadline(seconds):
            yield from range(count)

    for numbers in (list(zip(within(5.0, 2), within(60.0, 3), strict=False)), [*within(5.0, 0)]):
        assert len(numbers) in (0, 2)
    clock.advance(100.0)
    assert current_context().deadline == INF
    assert Retry().execute(lambda ctx: ctx.remaining()) == INF
    with deadline(10.0) as outer:
        first, second = within(5.0, 1), within(4.0, 1)
        next(first)
        next(second)
        assert list(first) == list(second) == []
        assert current_context().deadline == outer.deadline
        assert Retry().execute(lambda ctx: ctx.deadline) == outer.deadline


async def test_an_async_generator_closed_in_another_task_leaves_no_deadline_behind(tasks_world: World) -> None:
    """The event loop closes a generator that a loop broke off in a task of its own."""
    closed: list[bool] = []

    async def numbers() -> AsyncIterator[int]:
        with deadline(0.02):
            try:
                yield 1
                yield 2
            finally:
                closed.append(True)

    iterator = numbers()
    assert await anext(iterator) == 1

    async def close() -> None:
        await iterator.aclose()  # type: ignore[attr-defined]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
    assert closed
    await anyio.sleep(0.03)
    assert current_context().deadline == INF
    assert await Retry().acall(anyio.sleep, 0) is None
