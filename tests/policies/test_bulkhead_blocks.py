"""Bulkhead around a block: `slot()`."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from resilience import Bulkhead, BulkheadFull, Context, DeadlineExceeded, Fallback, Timeout, TimeoutExceeded, deadline
from tests.conftest import Boom, Script, World, drive
from tests.contention.beside import beside, until
from tests.policies.blocks import entered
from tests.policies.bulkheads import LONG, SHORT, counts, works

# --- slot --------------------------------------------------------------------------------------


async def test_a_slot_holds_a_permit_until_its_block_ends(world: World) -> None:
    """The block may return or raise. Meanwhile further calls and slots are refused; afterwards it may be used again."""
    bulkhead = Bulkhead(1)
    slot: Any = bulkhead.slot()
    async with entered(world, slot):
        assert counts(bulkhead) == (1, 1, 0, 0)
        assert isinstance(await works(world, bulkhead), BulkheadFull)
        with pytest.raises(BulkheadFull):
            async with entered(world, bulkhead.slot()):
                pytest.fail("entered")
    with pytest.raises(Boom):
        async with entered(world, slot):
            raise Boom("no")
    assert counts(bulkhead) == (1, 0, 0, 2)


async def test_a_waiting_slot_cannot_be_entered_a_second_time(world: World) -> None:
    """The second one is a `RuntimeError`, and no permit is lost."""
    bulkhead = Bulkhead(1, queue=2, max_wait=2.0)
    slot: Any = bulkhead.slot()
    refused: list[str] = []

    async def enter_it() -> None:
        try:
            async with entered(world, slot):
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
    assert counts(bulkhead) == (1, 0, 0, 0)


async def test_slots_and_calls_share_one_queue(world: World) -> None:
    """They are served in order of arrival."""
    bulkhead = Bulkhead(1, queue=5)
    order: list[int] = []

    async def in_a_slot() -> None:
        async with entered(world, bulkhead.slot()):
            order.append(1)

    async def in_a_call() -> None:
        await world.execute(bulkhead, Script(None, doing=lambda ctx: order.append(2)).function())

    async with beside(world) as group:
        holder = await group.inside(bulkhead)
        for number, main in enumerate([in_a_slot, in_a_call, in_a_slot, in_a_call], 1):
            group.run(main)
            await until(world, lambda number=number: bulkhead.stats().queued == number)  # type: ignore[misc]
        holder.let_go()
    assert order == [1, 2, 1, 2]


async def test_a_slot_waits_at_most_until_the_ambient_deadline(world: World) -> None:
    """That of an outer `with deadline(...)`, or of the execution that contains the block."""
    bulkhead = Bulkhead(1, queue=1)

    async def another(ctx: Context | None = None) -> Any:
        try:
            async with entered(world, bulkhead.slot()):
                pytest.fail("entered")
        except DeadlineExceeded:
            return "no time left"

    async with entered(world, bulkhead.slot()):
        with deadline(SHORT):
            assert await another() == "no time left"
        assert await world.execute(Fallback(on=Boom), another, Context(timeout=SHORT)) == "no time left"
    assert counts(bulkhead)[:3] == (1, 0, 0)


async def waits(world: World, bulkhead: Bulkhead, errors: list[type[Exception]]) -> None:
    """Wait for a slot of a full bulkhead, and keep the error."""
    try:
        async with entered(world, bulkhead.slot()):
            pytest.fail("entered")
    except Exception as error:
        errors.append(type(error))


async def test_a_slot_in_a_child_task_ends_at_the_deadline_of_its_context(tasks_world: World) -> None:
    """A new task inherits the context, but the timer of the Timeout does not cancel it."""
    bulkhead, errors = Bulkhead(1, queue=1, max_wait=LONG), list[type[Exception]]()
    async with anyio.create_task_group() as tasks, bulkhead.slot():

        async def starts_it(ctx: Context) -> None:
            tasks.start_soon(waits, tasks_world, bulkhead, errors)
            await anyio.sleep(LONG)

        with pytest.raises(TimeoutExceeded):
            await Timeout(SHORT).aexecute(starts_it)
        await until(tasks_world, lambda: errors)
    assert errors == [DeadlineExceeded]


async def test_a_slot_in_a_thread_of_a_task_ends_at_the_deadline_of_its_context(tasks_world: World) -> None:
    """`anyio.to_thread` copies the context; the error is that of the deadline, not of `max_wait`."""
    bulkhead, errors = Bulkhead(1, queue=1, max_wait=LONG), list[type[Exception]]()

    async def fn(ctx: Context) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(drive, waits(World("threads"), bulkhead, errors))

    async with bulkhead.slot():
        await tasks_world.attempt(Timeout(10 * SHORT), fn)  # long enough for a busy machine to start the thread
        await until(tasks_world, lambda: errors)
    assert errors == [DeadlineExceeded]


def test_leaving_a_slot_that_was_not_entered_releases_no_permit(threads: World) -> None:
    """Callers of `__exit__` may leave a slot that they could not enter, or leave it twice."""
    bulkhead = Bulkhead(1)
    refused = bulkhead.slot()
    with bulkhead.slot():
        with pytest.raises(BulkheadFull):
            refused.__enter__()
        refused.__exit__(None, None, None)
        assert counts(bulkhead)[:2] == (1, 1)
        assert isinstance(bulkhead.capture(lambda ctx: None).error, BulkheadFull)  # type: ignore[union-attr]
    refused.__exit__(None, None, None)
    assert counts(bulkhead)[:2] == (1, 0)
    with bulkhead.slot():
        assert isinstance(bulkhead.capture(lambda ctx: None).error, BulkheadFull)  # type: ignore[union-attr]
