"""Bulkhead: waiters that leave the queue, and permits that would be lost with them."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from resilience import Bulkhead, Context, DeadlineExceeded, Timeout, TimeoutExceeded
from resilience.clock import clock as process_clock
from resilience.runtimes.tasks import AsyncioWaiter
from tests.conftest import Script, World
from tests.contention.beside import PATIENCE, beside
from tests.policies.bulkheads import LONG, SHORT, facts, wait_until


def test_a_permit_that_comes_as_the_wait_ends_is_taken(threads: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Granted after the wait was over, but before anybody was told: the call is made."""
    bulkhead = Bulkhead(1, queue=1, max_wait=LONG)
    slot = bulkhead.slot()
    slot.__enter__()

    def too_late(lock: object, seconds: float | None) -> bool:
        slot.__exit__(None, None, None)
        return False

    monkeypatch.setattr(process_clock, "wait", too_late)
    assert bulkhead.execute(lambda ctx: "fine") == "fine"
    assert facts(bulkhead) == (1, 0, 0, 0)


@pytest.mark.parametrize("limit", [{"max_wait": 0.2}, {"timeout": 0.2}, {"budget": 0.2}])
async def test_a_grant_that_meets_the_end_of_the_wait_is_not_lost(tasks_world: World, limit: dict[str, float]) -> None:
    """The loop was busy: when it comes round, permit and alarm are both there. Either may win; the permit is kept."""
    bulkhead = Bulkhead(1, queue=1, max_wait=limit.get("max_wait"))
    pipeline = Timeout(limit["timeout"]).wrap(bulkhead) if "timeout" in limit else bulkhead

    async with beside(tasks_world) as group:
        slot = bulkhead.slot()
        await slot.__aenter__()
        waiting = await group.queued(bulkhead, pipeline, Context(timeout=limit.get("budget")))
        waiting.let_go()
        time.sleep(0.2)
        await slot.__aexit__(None, None, None)
        outcome = await waiting.result()
        assert outcome == "fine" or isinstance(outcome, TimeoutExceeded)
    assert facts(bulkhead) == (1, 0, 0, 0)


@pytest.mark.parametrize("cancelled_first", [True, False])
@pytest.mark.parametrize("limit", ["max_wait", "timeout"])
async def test_a_cancellation_is_never_taken_for_the_end_of_the_wait(
    in_asyncio: World, cancelled_first: bool, limit: str
) -> None:
    """Cancelled by the caller in the same turn of the loop in which the wait is over: cancelled is what comes out."""
    bulkhead = Bulkhead(1, queue=1, max_wait=SHORT if limit == "max_wait" else None)
    pipeline = bulkhead if limit == "max_wait" else Timeout(SHORT).wrap(bulkhead)

    async with bulkhead.slot():
        task = asyncio.ensure_future(pipeline.aexecute(Script("fine").function()))
        await asyncio.sleep(SHORT / 4)
        if cancelled_first:
            task.cancel()
            time.sleep(SHORT)
        else:
            time.sleep(SHORT)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert facts(bulkhead) == (1, 1, 0, 0)


def test_a_closed_loops_waiter_costs_nobody_a_permit() -> None:
    """Its loop was closed while it waited: the permit goes past it, to the next in the queue."""
    bulkhead = Bulkhead(1, queue=2)
    ended: list[Any] = []
    with bulkhead.slot():
        coroutine = _left_waiting(bulkhead)
        thread = threading.Thread(target=lambda: ended.append(bulkhead.execute(lambda ctx: "fine")), daemon=True)
        thread.start()
        wait_until(lambda: bulkhead.stats().queued == 2)
    thread.join(PATIENCE)
    assert ended == ["fine"]
    assert facts(bulkhead) == (1, 0, 0, 0)
    coroutine.close()
    assert facts(bulkhead) == (1, 0, 0, 0)


def test_a_closed_loops_waiter_makes_room_though_living_ones_wait_behind_it() -> None:
    """The next caller takes its place at the end of the queue, and is served after them."""
    bulkhead = Bulkhead(1, queue=2)
    served: list[str] = []

    def call(name: str) -> threading.Thread:
        thread = threading.Thread(target=lambda: bulkhead.execute(lambda ctx: served.append(name)), daemon=True)
        thread.start()
        return thread

    with bulkhead.slot():
        coroutine = _left_waiting(bulkhead)
        second = call("second")
        wait_until(lambda: bulkhead.stats().queued == 2)
        third = call("third")
        time.sleep(SHORT)  # until it has taken that place: the number of those who wait is the same
        assert facts(bulkhead) == (1, 1, 2, 0)
    second.join(PATIENCE)
    third.join(PATIENCE)
    assert served == ["second", "third"]
    coroutine.close()
    assert facts(bulkhead) == (1, 0, 0, 0)


def test_a_waiter_whose_trio_run_has_ended_costs_nobody_a_place_in_the_queue() -> None:
    """As one of a closed loop: the next caller gets its place, and waits as long as its budget allows."""
    bulkhead = Bulkhead(1, queue=1)

    async def begin() -> Any:
        coroutine: Any = bulkhead.aexecute(Script("never").function())
        coroutine.send(None)
        return coroutine

    with bulkhead.slot():
        coroutine = anyio.run(begin, backend="trio")
        assert bulkhead.stats().queued == 1
        with pytest.raises(DeadlineExceeded):
            bulkhead.execute(lambda ctx: None, Context(timeout=SHORT))
        coroutine.close()
    assert facts(bulkhead)[:3] == (1, 0, 0)


def test_who_has_been_served_is_not_taken_for_a_dead_waiter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited, was served, and its loop is closed by the time that somebody looks for the dead: no permit is made."""
    bulkhead = Bulkhead(1, queue=1)
    slot = bulkhead.slot()
    slot.__enter__()
    thread = threading.Thread(
        target=lambda: asyncio.run(bulkhead.aexecute(Script("fine").function())),  # type: ignore[arg-type]
        daemon=True,
    )
    thread.start()
    wait_until(lambda: bulkhead.stats().queued == 1)
    is_alive = AsyncioWaiter.is_alive

    def meanwhile(waiter: AsyncioWaiter) -> bool:
        slot.__exit__(None, None, None)
        thread.join(PATIENCE)  # served, and its loop closed
        return is_alive(waiter)

    monkeypatch.setattr(AsyncioWaiter, "is_alive", meanwhile)
    bulkhead.capture(lambda ctx: None)
    assert facts(bulkhead)[1:3] == (0, 0)
    monkeypatch.undo()
    with bulkhead.slot():
        assert facts(bulkhead)[1:3] == (1, 0)


def _left_waiting(bulkhead: Bulkhead) -> Any:
    """A coroutine that waits in the queue, in a loop that has been closed over it."""
    loop = asyncio.new_event_loop()

    async def begin() -> Any:
        coroutine: Any = bulkhead.aexecute(Script("never").function())
        coroutine.send(None)
        return coroutine

    coroutine = loop.run_until_complete(begin())
    assert bulkhead.stats().queued == 1
    loop.close()
    return coroutine


@pytest.mark.parametrize("max_wait", [None, LONG])
@pytest.mark.parametrize("granted", [False, True])
def test_a_waiter_that_is_thrown_away_leaves_quietly(max_wait: float | None, granted: bool) -> None:
    """A coroutine that nobody finishes is closed by the collector, in whatever thread: without a word."""
    bulkhead = Bulkhead(1, queue=1, max_wait=max_wait)
    slot = bulkhead.slot()
    slot.__enter__()
    loop = asyncio.new_event_loop()

    box: list[Any] = []
    box.append(box)  # only the collector finds it

    async def begin(box: list[Any]) -> None:
        box.append(bulkhead.aexecute(Script("never").function()))
        box[1].send(None)

    loop.run_until_complete(begin(box))
    assert bulkhead.stats().queued == 1
    if granted:
        slot.__exit__(None, None, None)
    del box
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    loop.close()
    assert facts(bulkhead) == (1, 0 if granted else 1, 0, 0)
