"""Bulkhead: resized, and around a block."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from resilience import Bulkhead, BulkheadFull, Context, DeadlineExceeded, Fallback, Timeout, TimeoutExceeded, deadline
from tests.conftest import Boom, World
from tests.contention.beside import beside, until
from tests.policies.bulkheads import LONG, SHORT, facts, wait_until, works

# --- slot: a block -----------------------------------------------------------------------------


@asynccontextmanager
async def slot_of(world: World, bulkhead: Bulkhead) -> Any:
    """`with bulkhead.slot()` in threads, `async with` in tasks."""
    if world.blocking:
        with bulkhead.slot() as it:
            yield it
    else:
        async with bulkhead.slot() as it:
            yield it


async def test_a_slot_is_a_permit_for_a_block(world: World) -> None:
    """It counts, it refuses, it queues, and it is given back however the block ends."""
    bulkhead = Bulkhead(1)

    async with slot_of(world, bulkhead):
        assert facts(bulkhead) == (1, 1, 0, 0)
        assert isinstance(await works(world, bulkhead), BulkheadFull)
        with pytest.raises(BulkheadFull):
            async with slot_of(world, bulkhead):
                pytest.fail("entered")
    with pytest.raises(Boom):
        async with slot_of(world, bulkhead):
            raise Boom("no")
    assert facts(bulkhead) == (1, 0, 0, 2)


async def test_a_slot_that_waits_is_in_use(world: World) -> None:
    """Who enters the same one meanwhile is told, and no permit is lost."""
    bulkhead = Bulkhead(1, queue=2, max_wait=2.0)
    slot: Any = bulkhead.slot()
    refused: list[str] = []

    async def enter_it() -> None:
        try:
            if world.blocking:
                with slot:
                    pass
            else:
                async with slot:
                    pass
        except RuntimeError as error:
            refused.append(str(error))

    async with beside(world) as group:
        holder = await group.inside(bulkhead)
        group.run(enter_it)
        await until(world, lambda: bulkhead.stats().queued == 1)
        await enter_it()
        holder.let_go()
    assert refused == ["this slot is in use: ask for another one"]
    assert facts(bulkhead) == (1, 0, 0, 0)


async def test_slots_and_calls_stand_in_one_queue(world: World) -> None:
    """In order of arrival, whichever they are."""
    bulkhead = Bulkhead(1, queue=5)
    order: list[int] = []

    async def main() -> None:
        async with beside(world) as group:

            async def in_a_slot() -> None:
                async with slot_of(world, bulkhead):
                    order.append(1)

            async def in_a_call() -> None:
                await world.execute(bulkhead, fn)

            async def fn(ctx: Context) -> None:
                order.append(2)

            holder = await group.inside(bulkhead)
            for number, main in enumerate([in_a_slot, in_a_call, in_a_slot, in_a_call], 1):
                group.run(main)
                await until(world, lambda number=number: bulkhead.stats().queued == number)  # type: ignore[misc]
            holder.let_go()

    await main()
    assert order == [1, 2, 1, 2]


async def test_a_slot_waits_no_longer_than_the_ambient_budget(world: World) -> None:
    """Blocks use the ambient context: `with deadline(...)` around them, or the execution that they are in."""
    bulkhead = Bulkhead(1, queue=1)

    async def another(ctx: Context | None = None) -> Any:
        try:
            async with slot_of(world, bulkhead):
                pytest.fail("entered")
        except DeadlineExceeded:
            return "no time left"

    async with slot_of(world, bulkhead):
        with deadline(SHORT):
            assert await another() == "no time left"
        assert await world.execute(Fallback(on=Boom), another, Context(timeout=SHORT)) == "no time left"
    assert facts(bulkhead)[:3] == (1, 0, 0)


async def test_a_slot_in_another_task_is_not_left_to_a_timer_that_does_not_know_it(tasks_world: World) -> None:
    """A context follows new tasks, the timer does not: the budget that it stands for holds all the same."""
    bulkhead = Bulkhead(1, queue=1)
    came_out: list[type[BaseException]] = []

    async with anyio.create_task_group() as tasks, bulkhead.slot():

        async def waits() -> None:
            try:
                async with bulkhead.slot():
                    pytest.fail("entered")
            except BaseException as error:
                came_out.append(type(error))

        async def starts_it(ctx: Context) -> None:
            tasks.start_soon(waits)
            await anyio.sleep(LONG)

        with pytest.raises(TimeoutExceeded):
            await Timeout(SHORT).aexecute(starts_it)
        await until(tasks_world, lambda: came_out)
    assert came_out == [DeadlineExceeded]


async def test_a_slot_in_a_thread_of_a_task_ends_with_the_budget(tasks_world: World) -> None:
    """`anyio.to_thread` takes the context along: what has run out is the budget, not `max_wait`."""
    bulkhead = Bulkhead(1, queue=1, max_wait=LONG)
    came_out: list[Exception] = []

    def waits() -> None:
        try:
            with bulkhead.slot():
                pytest.fail("entered")
        except Exception as error:
            came_out.append(error)

    async def fn(ctx: Context) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(waits)

    async with bulkhead.slot():
        await tasks_world.attempt(Timeout(10 * SHORT), fn)  # long enough for a busy machine to start the thread
        await until(tasks_world, lambda: came_out)
    assert [type(error) for error in came_out] == [DeadlineExceeded]


def test_a_slot_in_a_loop_inside_a_worker_ends_with_the_budget(threads: World) -> None:
    """`asyncio.run` inside a blocking function under a Timeout: the worker comes free."""
    bulkhead = Bulkhead(1, queue=1)
    came_out: list[type[Exception]] = []

    async def waits() -> None:
        try:
            async with bulkhead.slot():
                pytest.fail("entered")
        except Exception as error:
            came_out.append(type(error))

    with bulkhead.slot():
        with contextlib.suppress(TimeoutExceeded):  # both end at the same instant; either may come first
            Timeout(SHORT).execute(lambda ctx: asyncio.run(waits()))
        wait_until(lambda: came_out and not Timeout.abandoned())
    assert came_out == [DeadlineExceeded]


def test_a_slot_in_use_is_refused(threads: World) -> None:
    """One slot, one block at a time; afterwards it can be used again."""
    bulkhead = Bulkhead(5)
    slot = bulkhead.slot()
    with slot:
        with pytest.raises(RuntimeError, match="in use"):
            slot.__enter__()
        assert facts(bulkhead) == (5, 1, 0, 0)
    with slot:
        assert facts(bulkhead) == (5, 1, 0, 0)
    assert facts(bulkhead) == (5, 0, 0, 0)


def test_a_slot_that_was_not_entered_gives_nothing_back(threads: World) -> None:
    """Hand-written code may leave what it could not enter, or leave twice: no permit is made from nothing."""
    bulkhead = Bulkhead(1)
    refused = bulkhead.slot()
    with bulkhead.slot():
        with pytest.raises(BulkheadFull):
            refused.__enter__()
        refused.__exit__(None, None, None)
        assert facts(bulkhead)[:2] == (1, 1)
        assert isinstance(bulkhead.capture(lambda ctx: None).error, BulkheadFull)  # type: ignore[union-attr]
    refused.__exit__(None, None, None)
    assert facts(bulkhead)[:2] == (1, 0)
    with bulkhead.slot():
        assert isinstance(bulkhead.capture(lambda ctx: None).error, BulkheadFull)  # type: ignore[union-attr]


def test_a_slot_that_is_dropped_gives_its_permit_back() -> None:
    """As it is where an interrupt comes at the very beginning of `__exit__`."""
    bulkhead = Bulkhead(1)
    slot = bulkhead.slot()
    slot.__enter__()
    assert bulkhead.stats().in_flight == 1
    del slot
    assert bulkhead.stats().in_flight == 0
