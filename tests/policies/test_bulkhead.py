"""Bulkhead: at most so many calls at once, over all threads, tasks and event loops together.

Waits are real and last some milliseconds; a limit that must not be reached is 60 s. The permits by themselves
are tested in `tests/state`, the bulkhead under contention in `tests/contention`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from resilience import (
    Bulkhead,
    BulkheadFull,
    CircuitBreaker,
    Context,
    DeadlineExceeded,
    Fallback,
    Policy,
    Rejected,
    Retry,
    Timeout,
    TimeoutExceeded,
    deadline,
    events,
)
from resilience.clock import clock as process_clock
from resilience.runtimes.tasks import TaskWaiter
from resilience.testing import virtual_time
from tests.conftest import Boom, Script, World
from tests.contention.beside import PATIENCE, Call, Group, beside, until

SHORT = 0.02
LONG = 60.0


def facts(bulkhead: Bulkhead) -> tuple[int, int, int, int]:
    it = bulkhead.stats()
    return it.limit, it.in_flight, it.queued, it.rejected


async def works(world: World, bulkhead: Any, ctx: Context | None = None) -> Any:
    return await world.attempt(bulkhead, Script("fine").function(), ctx)


# --- the limit -------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3])
async def test_at_most_so_many_at_once(world: World, limit: int) -> None:
    """One more is turned away at once, its function not entered; a permit that comes back is given again."""
    bulkhead = Bulkhead(limit, name="inventory")
    script = Script("fine")

    async with beside(world) as group:
        calls = [await group.inside(bulkhead) for _ in range(limit)]
        error = await world.attempt(bulkhead, script.function())
        assert script.calls == 0
        calls[0].let_go()
        assert await calls[0].result() == "fine"
        assert await world.attempt(bulkhead, script.function()) == "fine"
    assert type(error) is BulkheadFull
    assert isinstance(error, Rejected)
    assert (error.policy, error.retry_after) == ("inventory", None)
    assert str(limit) in str(error)


async def test_a_permit_comes_back_however_the_call_ends(world: World) -> None:
    """After an answer and after an error, a hundred times over one permit."""
    bulkhead = Bulkhead(1)

    error = Boom("no")
    for _ in range(50):
        assert await works(world, bulkhead) == "fine"
        assert await world.attempt(bulkhead, Script(error).function()) is error
    assert facts(bulkhead) == (1, 0, 0, 0)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError])
def test_a_permit_comes_back_from_an_interrupted_call(threads: World, raised: type[BaseException]) -> None:
    """What is held is given back in `finally`, whatever it was."""
    bulkhead = Bulkhead(1)

    def interrupt(ctx: Context) -> None:
        raise raised

    for _ in range(3):
        with pytest.raises(raised):
            bulkhead.execute(interrupt)
    assert facts(bulkhead) == (1, 0, 0, 0)


async def test_a_permit_comes_back_from_a_cancelled_call(tasks_world: World) -> None:
    """The caller lost patience with a call that was running."""
    bulkhead = Bulkhead(1)

    async with beside(tasks_world) as group:
        for _ in range(3):
            call = await group.inside(bulkhead)
            call.cancel()
            await call.result()
            assert facts(bulkhead) == (1, 0, 0, 0)


async def test_a_permit_comes_back_from_a_call_that_was_walked_away_from(world: World) -> None:
    """Under a Timeout around, or inside, the permit is free when the caller is, though a thread may still run."""

    async def hang(ctx: Context) -> None:
        await world.hang()

    for wrap in (lambda it: Timeout(SHORT).wrap(it), lambda it: it.wrap(Timeout(SHORT))):
        bulkhead = Bulkhead(1)
        error = await world.attempt(wrap(bulkhead), hang)
        assert type(error) is TimeoutExceeded
        assert facts(bulkhead) == (1, 0, 0, 0)
        assert await works(world, bulkhead) == "fine"
    world.release()


def test_all_worlds_share_one_limit() -> None:
    """A thread, an asyncio task and a trio task hold the three permits that there are; a fourth is turned away."""
    bulkhead = Bulkhead(3)
    with everywhere() as places:
        for place in places:
            place.begin(bulkhead)
        for place in places:
            wait_until(place.calls[0].entered.is_set)
        assert facts(bulkhead) == (3, 3, 0, 0)
        with pytest.raises(BulkheadFull):
            bulkhead.execute(lambda ctx: None)
    assert facts(bulkhead) == (3, 0, 0, 1)


# --- the queue -------------------------------------------------------------------------------


async def test_a_few_may_wait_and_the_next_is_turned_away(world: World) -> None:
    """Two in the queue; the third is told at once that it is full."""
    bulkhead = Bulkhead(1, queue=2, name="inventory")

    async with beside(world) as group:
        holder = await group.inside(bulkhead)
        waiting = [await group.queued(bulkhead) for _ in range(2)]
        assert facts(bulkhead) == (1, 1, 2, 0)
        error = await works(world, bulkhead)
        assert facts(bulkhead) == (1, 1, 2, 1)
        assert not any(call.entered.is_set() for call in waiting)
        holder.let_go()
        for call in waiting:
            call.let_go()
            assert await call.result() == "fine"
    assert type(error) is BulkheadFull
    assert error.policy == "inventory"
    assert facts(bulkhead) == (1, 0, 0, 1)


async def test_permits_are_granted_in_the_order_of_arrival(world: World) -> None:
    """First come, first served; and who comes while others wait goes to the end of the queue."""
    bulkhead = Bulkhead(1, queue=10)

    async with beside(world) as group:
        holder = await group.inside(bulkhead)
        queue = [await group.queued(bulkhead) for _ in range(4)]
        for number in range(4):
            holder.let_go()
            await holder.result()
            await queue[number].is_inside()
            queue.append(await group.queued(bulkhead))
            assert [call.entered.is_set() for call in queue] == [it <= number for it in range(len(queue))]
            holder = queue[number]


async def test_an_immediate_second_call_does_not_overtake_who_waits(threads: World) -> None:
    """Direct hand-off: who gives a permit back and asks again stands behind those who were there before."""
    bulkhead = Bulkhead(1, queue=5)
    order: list[str] = []

    async with beside(threads) as group:

        async def greedy() -> None:
            for _ in range(5):
                bulkhead.execute(lambda ctx: (order.append("greedy"), time.sleep(SHORT / 4)))

        async def patient() -> None:
            bulkhead.execute(lambda ctx: order.append("patient"))

        group.run(greedy)
        await until(threads, lambda: order)
        group.run(patient)
    assert order.index("patient") <= 2


def test_permits_are_granted_in_the_order_of_arrival_across_worlds() -> None:
    """Twelve callers from a thread, asyncio and trio in turn come in exactly in the order in which they came."""
    bulkhead = Bulkhead(1, queue=12)
    order: list[int] = []
    with everywhere() as places, bulkhead.slot():
        for number in range(12):
            places[number % 3].begin(bulkhead, lambda number=number: order.append(number), hold=False)  # type: ignore[misc]
            wait_until(lambda number=number: bulkhead.stats().queued == number + 1)  # type: ignore[misc]
    assert order == list(range(12))
    assert facts(bulkhead) == (1, 0, 0, 0)


# --- how long to wait ------------------------------------------------------------------------


async def test_a_wait_ends_after_max_wait(world: World) -> None:
    """`BulkheadFull`, after that time and not before; and the queue has room again."""
    bulkhead = Bulkhead(1, queue=1, max_wait=SHORT, name="inventory")

    async with beside(world) as group:
        await group.inside(bulkhead)
        began = time.monotonic()
        error = await works(world, bulkhead)
        assert time.monotonic() - began >= SHORT
        assert facts(bulkhead) == (1, 1, 0, 1)
    assert type(error) is BulkheadFull
    assert error.policy == "inventory"


def test_max_wait_may_be_a_timedelta(threads: World) -> None:
    """Durations are seconds or `timedelta`."""
    bulkhead = Bulkhead(1, queue=1, max_wait=timedelta(milliseconds=5))
    with bulkhead.slot(), pytest.raises(BulkheadFull, match=r"0\.005"):
        bulkhead.execute(lambda ctx: None)


async def test_a_wait_that_is_short_enough_ends_well(world: World) -> None:
    """Neither `max_wait` nor a budget nor a Timeout hurts who is served in time."""
    bulkhead = Bulkhead(1, queue=1, max_wait=LONG)

    async with beside(world) as group:
        holder = await group.inside(bulkhead)
        waiting = await group.queued(bulkhead, Timeout(LONG).wrap(bulkhead), Context(timeout=LONG))
        holder.let_go()
        waiting.let_go()
        assert await waiting.result() == "fine"


async def test_a_wait_ends_with_the_budget(world: World) -> None:
    """`DeadlineExceeded`: it was the caller who had no time left. The function is not entered."""
    bulkhead = Bulkhead(1, queue=1, max_wait=LONG)
    script = Script("fine")

    async with beside(world) as group:
        await group.inside(bulkhead)
        error = await world.attempt(bulkhead, script.function(), Context(timeout=SHORT))
        assert facts(bulkhead)[:3] == (1, 1, 0)
        assert type(error) is DeadlineExceeded
    assert script.calls == 0


async def test_a_wait_ends_with_a_timeout_around(world: World) -> None:
    """With that Timeout's error; the queue is left, and nobody is called rejected."""
    bulkhead = Bulkhead(1, queue=1, max_wait=LONG)
    pipeline = Timeout(SHORT, name="patience").wrap(Fallback("never"), bulkhead)

    async with beside(world) as group:
        await group.inside(bulkhead)
        error = await works(world, pipeline)
        assert facts(bulkhead) == (1, 1, 0, 0)
    assert type(error) is TimeoutExceeded
    assert error.policy == "patience"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_wait": SHORT, "budget": LONG, "timeout": LONG}, BulkheadFull),
        ({"max_wait": LONG, "budget": SHORT, "timeout": LONG}, DeadlineExceeded),
        ({"max_wait": LONG, "budget": LONG, "timeout": SHORT}, TimeoutExceeded),
        ({"max_wait": SHORT, "timeout": LONG}, BulkheadFull),
        ({"max_wait": SHORT, "budget": LONG}, BulkheadFull),
        ({"budget": SHORT, "timeout": LONG}, DeadlineExceeded),
        ({"budget": LONG, "timeout": SHORT}, TimeoutExceeded),
    ],
)
async def test_the_earliest_limit_ends_the_wait(
    world: World, limits: dict[str, float], expected: type[Exception]
) -> None:
    """Of `max_wait`, the budget and a Timeout around, the one that is over first is the one that is told."""
    bulkhead = Bulkhead(1, queue=1, max_wait=limits.get("max_wait"))
    pipeline = Timeout(limits["timeout"]).wrap(bulkhead) if "timeout" in limits else bulkhead

    async with beside(world) as group:
        await group.inside(bulkhead)
        assert type(await works(world, pipeline, Context(timeout=limits.get("budget")))) is expected
    assert facts(bulkhead)[1:3] == (0, 0)


async def test_of_two_limits_at_one_instant_the_timeout_around_ends_the_wait(world: World) -> None:
    """The outer one: nothing inside of it outlives it, not even to tell that it has waited long enough."""
    bulkhead = Bulkhead(1, queue=1, max_wait=5.0)

    with virtual_time(), bulkhead.slot():
        error = await works(world, Timeout(5.0, name="patience").wrap(bulkhead))
    assert type(error) is TimeoutExceeded
    assert error.policy == "patience"


def test_what_ended_a_wait_is_told_to_the_second() -> None:
    """How long it was, by whom, and of two limits at the same instant the budget of the whole execution."""
    told: list[Any] = []
    unsubscribe = events.subscribe(told.append, events.CallRejected)
    bulkhead = Bulkhead(1, queue=2, max_wait=5.0, name="inventory")
    with virtual_time() as clock, bulkhead.slot():
        clock.advance(100.0)
        with pytest.raises(BulkheadFull, match=r"1 call is running after 5 s in the queue") as full:
            bulkhead.call(len, "")
        for budget in (2.0, 5.0):
            with pytest.raises(DeadlineExceeded, match="while the call waited in the queue") as late:
                bulkhead.execute(lambda ctx: None, Context(timeout=budget))
            assert late.value.policy == "inventory"
    unsubscribe()
    assert (full.value.policy, full.value.limit, full.value.queue) == ("inventory", 1, 2)
    assert [(event.reason, event.waited) for event in told] == [
        ("BulkheadFull", 5.0),
        ("DeadlineExceeded", 2.0),
        ("DeadlineExceeded", 5.0),
    ]


@pytest.mark.parametrize(("limit", "says"), [(1, "1 call is running"), (2, "2 calls are running")])
def test_a_refusal_says_how_many_are_running(limit: int, says: str) -> None:
    """In words, and as numbers."""
    bulkhead = Bulkhead(limit)
    with ExitStack() as inside:
        for _ in range(limit):
            inside.enter_context(bulkhead.slot())
        with pytest.raises(BulkheadFull) as full:
            bulkhead.call(len, "")
    assert str(full.value) == f"{says} and nobody may wait"
    assert (full.value.limit, full.value.queue) == (limit, 0)


def test_the_listener_of_a_pipeline_hears_of_a_refusal_though_nobody_else_listens() -> None:
    """It subscribed to nothing: it belongs to the pipeline."""
    heard: list[Any] = []
    bulkhead = Bulkhead(1, name="inventory")
    pipeline = Policy.wrap(Retry(1), bulkhead, listeners=[heard.append])
    with bulkhead.slot(), pytest.raises(BulkheadFull):
        pipeline.call(len, "")
    assert [event.policy for event in heard if isinstance(event, events.CallRejected)] == ["inventory"]


async def test_a_cooperative_timeout_inside_an_enforced_one_ends_the_wait_at_its_own_limit(world: World) -> None:
    """The earlier of the two, though it is not the one that has a timer."""
    bulkhead = Bulkhead(1, queue=1)
    pipeline = Policy.wrap(Timeout(LONG, name="outer"), Timeout(SHORT, cooperative=True, name="inner"), bulkhead)

    async with beside(world) as group:
        await group.inside(bulkhead)
        error = await works(world, pipeline)
    assert type(error) is TimeoutExceeded
    assert error.policy == "inner"
    assert facts(bulkhead)[1:3] == (0, 0)


async def test_a_cooperative_timeout_around_ends_the_wait_too(world: World) -> None:
    """It cuts nothing off, but what waits inside obeys the deadline that it carries."""
    bulkhead = Bulkhead(1, queue=1)

    async with beside(world) as group:
        await group.inside(bulkhead)
        assert type(await works(world, Timeout(SHORT, cooperative=True).wrap(bulkhead))) is TimeoutExceeded
    assert facts(bulkhead)[1:3] == (0, 0)


async def test_a_retry_around_may_queue_again(world: World) -> None:
    """`Retry(on=BulkheadFull)`: the second attempt finds room."""
    bulkhead = Bulkhead(1, queue=1, max_wait=SHORT)
    pipeline = Retry(on=BulkheadFull, backoff=[0], on_retry=lambda event: holder[0].let_go()).wrap(bulkhead)
    holder: list[Call] = []

    async with beside(world) as group:
        holder.append(await group.inside(bulkhead))
        assert await works(world, pipeline) == "fine"
    assert facts(bulkhead) == (1, 0, 0, 1)


# --- leaving ---------------------------------------------------------------------------------


async def test_a_cancelled_waiter_leaves_the_queue(tasks_world: World) -> None:
    """Its place is free, those behind it move up, and it is not called rejected."""
    bulkhead = Bulkhead(1, queue=2)

    async with beside(tasks_world) as group:
        holder = await group.inside(bulkhead)
        first, second = await group.queued(bulkhead), await group.queued(bulkhead)
        first.cancel()
        await first.result()
        assert first.cancelled
        assert facts(bulkhead) == (1, 1, 1, 0)
        third = await group.queued(bulkhead)
        holder.let_go()
        await second.is_inside()
        second.let_go()
        await third.is_inside()
    assert not first.entered.is_set()
    assert facts(bulkhead) == (1, 0, 0, 0)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_waiter_leaves_the_queue(
    threads: World, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the main thread, while it waits."""
    bulkhead = Bulkhead(1, queue=1)

    def interrupted(lock: object, seconds: float | None) -> bool:
        assert facts(bulkhead) == (1, 1, 1, 0)
        raise raised

    with bulkhead.slot():
        monkeypatch.setattr(process_clock, "wait", interrupted)
        with pytest.raises(raised):
            bulkhead.execute(lambda ctx: None)
        assert facts(bulkhead) == (1, 1, 0, 0)
    assert facts(bulkhead) == (1, 0, 0, 0)


def test_an_interrupted_waiter_that_was_granted_passes_the_permit_on(
    threads: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the very moment in which the permit comes."""
    bulkhead = Bulkhead(1, queue=1)
    slot = bulkhead.slot()
    slot.__enter__()

    def interrupted(lock: object, seconds: float | None) -> bool:
        slot.__exit__(None, None, None)
        assert facts(bulkhead) == (1, 1, 0, 0)  # granted to us
        raise KeyboardInterrupt

    monkeypatch.setattr(process_clock, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bulkhead.execute(lambda ctx: None)
    assert facts(bulkhead) == (1, 0, 0, 0)


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


@pytest.mark.parametrize("others", [0, 2])
async def test_a_waiter_that_is_cancelled_after_its_grant_passes_it_on(tasks_world: World, others: int) -> None:
    """Granted and cancelled in one breath, before it could run: the permit goes to the next, or lies free."""
    bulkhead = Bulkhead(1, queue=3)

    async with beside(tasks_world) as group:
        slot = bulkhead.slot()
        await slot.__aenter__()
        first = await group.queued(bulkhead)
        behind = [await group.queued(bulkhead) for _ in range(others)]
        await slot.__aexit__(None, None, None)  # grants; the task has not run yet
        assert facts(bulkhead) == (1, 1, others, 0)
        first.cancel()
        await first.result()
        assert not first.entered.is_set()
        for call in behind:
            await call.is_inside()
            call.let_go()
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
def test_a_cancellation_is_never_taken_for_the_end_of_the_wait(cancelled_first: bool, limit: str) -> None:
    """Cancelled by the caller in the same turn of the loop in which the wait is over: cancelled is what comes out."""
    bulkhead = Bulkhead(1, queue=1, max_wait=SHORT if limit == "max_wait" else None)
    pipeline = bulkhead if limit == "max_wait" else Timeout(SHORT).wrap(bulkhead)

    async def main() -> None:
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

    asyncio.run(main())


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


def test_a_closed_loops_waiter_with_nobody_behind_it_costs_nobody_a_permit() -> None:
    """The permit that was meant for it lies free again."""
    bulkhead = Bulkhead(1, queue=1)
    with bulkhead.slot():
        coroutine = _left_waiting(bulkhead)
    assert facts(bulkhead) == (1, 0, 0, 0)
    coroutine.close()
    assert facts(bulkhead) == (1, 0, 0, 0)
    assert bulkhead.call(len, "four") == 4


def test_a_closed_loops_waiter_costs_nobody_a_place_in_the_queue() -> None:
    """The queue is full of the dead: a living caller may wait all the same."""
    bulkhead = Bulkhead(1, queue=1, max_wait=SHORT)
    with bulkhead.slot():
        coroutine = _left_waiting(bulkhead)
        with pytest.raises(BulkheadFull, match="in the queue"):  # it has waited
            bulkhead.execute(lambda ctx: None)
        coroutine.close()
    assert facts(bulkhead)[:3] == (1, 0, 0)


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
    is_alive = TaskWaiter.is_alive

    def meanwhile(waiter: TaskWaiter) -> bool:
        slot.__exit__(None, None, None)
        thread.join(PATIENCE)  # served, and its loop closed
        return is_alive(waiter)

    monkeypatch.setattr(TaskWaiter, "is_alive", meanwhile)
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


def test_a_call_that_is_thrown_away_gives_its_permit_back() -> None:
    """The same for one that was inside."""
    bulkhead = Bulkhead(1)

    class Forever:
        def __await__(self) -> Iterator[None]:
            yield

    coroutine: Any = bulkhead.aexecute(lambda ctx: Forever())
    coroutine.send(None)
    assert facts(bulkhead) == (1, 1, 0, 0)
    del coroutine
    gc.collect()
    assert facts(bulkhead) == (1, 0, 0, 0)


# --- resize ----------------------------------------------------------------------------------


async def test_a_larger_limit_lets_waiters_in_at_once(world: World) -> None:
    """In order, as many as there is room for."""
    bulkhead = Bulkhead(1, queue=5)

    async with beside(world) as group:
        await group.inside(bulkhead)
        waiting = [await group.queued(bulkhead) for _ in range(4)]
        bulkhead.resize(3)
        for call in waiting[:2]:
            await call.is_inside()
        assert facts(bulkhead) == (3, 3, 2, 0)
        assert not any(call.entered.is_set() for call in waiting[2:])
        for call in waiting:
            call.let_go()
    assert facts(bulkhead) == (3, 0, 0, 0)


async def test_a_smaller_limit_takes_hold_as_calls_end(world: World) -> None:
    """Nobody is thrown out; nobody comes in before fewer than the new limit are inside."""
    bulkhead = Bulkhead(3, queue=5)

    async with beside(world) as group:
        inside = [await group.inside(bulkhead) for _ in range(3)]
        waiting = await group.queued(bulkhead)
        bulkhead.resize(1)
        assert facts(bulkhead) == (1, 3, 1, 0)
        for number, call in enumerate(inside):
            assert not waiting.entered.is_set()
            call.let_go()
            await call.result()
            await until(world, lambda number=number: bulkhead.stats().in_flight == max(1, 2 - number))  # type: ignore[misc]
        await waiting.is_inside()
        assert isinstance(await works(world, Bulkhead(1).wrap(bulkhead), Context(timeout=SHORT)), DeadlineExceeded)
    assert facts(bulkhead)[:3] == (1, 0, 0)


def test_a_smaller_limit_without_a_queue_turns_newcomers_away(threads: World) -> None:
    """Three inside, and the limit is now two: the next one is refused until two have left."""
    bulkhead = Bulkhead(3)
    slots = [bulkhead.slot() for _ in range(3)]
    for slot in slots:
        slot.__enter__()
    bulkhead.resize(2)
    for left, fits in [(1, False), (2, True)]:
        slots.pop().__exit__(None, None, None)
        assert facts(bulkhead)[:2] == (2, 3 - left)
        outcome = bulkhead.capture(lambda ctx: "fine")
        assert (getattr(outcome, "value", None) == "fine") is fits


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "3", None])
def test_a_limit_that_means_nothing_is_refused_and_changes_nothing(limit: Any) -> None:
    """As in the constructor."""
    bulkhead = Bulkhead(2)
    with pytest.raises((TypeError, ValueError), match="limit"):
        bulkhead.resize(limit)
    assert bulkhead.stats().limit == 2


@pytest.mark.parametrize("limit", [10**9, 10**15])
def test_a_huge_limit_costs_nothing(limit: int) -> None:
    """A bulkhead that is to be no limit is built at once, and small."""
    tracemalloc.start()
    try:
        bulkhead = Bulkhead(limit)
        with ExitStack() as stack:
            for _ in range(3000):
                stack.enter_context(bulkhead.slot())
            assert facts(bulkhead) == (limit, 3000, 0, 0)
        bulkhead.resize(2 * limit)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert facts(bulkhead) == (2 * limit, 0, 0, 0)
    assert peak < 2_000_000


# --- slot: a block ---------------------------------------------------------------------------


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


async def test_a_slot_waits_no_longer_than_max_wait(world: World) -> None:
    """As a call does."""
    bulkhead = Bulkhead(1, queue=1, max_wait=SHORT)

    async with slot_of(world, bulkhead):
        with pytest.raises(BulkheadFull):
            async with slot_of(world, bulkhead):
                pytest.fail("entered")


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
        await tasks_world.attempt(Timeout(SHORT), fn)
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


# --- what is told ----------------------------------------------------------------------------


async def test_a_refusal_is_told(world: World) -> None:
    """`CallRejected`, to subscribers and to the listeners of the pipeline, with the facts of the context."""
    heard: list[Any] = []
    bulkhead = Bulkhead(1, name="inventory")
    pipeline = bulkhead.wrap(Timeout(LONG), listeners=[heard.append])
    unsubscribe = events.subscribe(heard.append, events.CallRejected)

    try:
        async with beside(world) as group:
            await group.inside(bulkhead)
            await works(world, pipeline, Context(operation="get-stock"))
    finally:
        unsubscribe()
    told = [it for it in heard if isinstance(it, events.CallRejected)]
    assert [(it.policy, it.reason, it.retry_after, it.operation) for it in told] == [
        ("inventory", "BulkheadFull", None, "get-stock")
    ] * 2


def test_a_listener_may_call_back_and_runs_outside_the_lock() -> None:
    """It looks at the bulkhead, resizes it, and waits for another thread that does."""
    done: list[bool] = []

    def listener(event: events.CallRejected) -> None:
        thread = threading.Thread(target=lambda: (bulkhead.stats(), bulkhead.resize(2)), daemon=True)
        thread.start()
        thread.join(5.0)
        done.append(not thread.is_alive())

    bulkhead = Bulkhead(1)
    unsubscribe = events.subscribe(listener, events.CallRejected)
    try:
        with bulkhead.slot():
            assert isinstance(bulkhead.capture(lambda ctx: None).error, BulkheadFull)  # type: ignore[union-attr]
            assert bulkhead.execute(lambda ctx: "fine") == "fine"
    finally:
        unsubscribe()
    assert done == [True]


def test_each_refusal_is_an_exception_of_its_own_and_pickles(threads: World) -> None:
    """With its numbers."""
    bulkhead = Bulkhead(1, name="inventory")
    with bulkhead.slot():
        one, other = (bulkhead.capture(lambda ctx: None).error for _ in range(2))  # type: ignore[union-attr]
    assert one is not other
    again = pickle.loads(pickle.dumps(one))
    assert type(again) is BulkheadFull
    assert vars(again) == vars(one)
    assert str(again) == str(one)


# --- with others -----------------------------------------------------------------------------


async def test_outcomes_are_none_of_its_business(world: World) -> None:
    """A bulkhead counts who is inside, not how it goes there; and a breaker around takes a refusal as neutral."""
    bulkhead = Bulkhead(1)
    pipeline = CircuitBreaker(1).wrap(bulkhead)

    for _ in range(3):
        await world.attempt(bulkhead, Script(Boom("no")).function())
    async with beside(world) as group:
        await group.inside(bulkhead)
        assert isinstance(await works(world, pipeline), BulkheadFull)
    assert await works(world, pipeline) == "fine"


def test_it_is_built_without_a_loop_and_used_in_several() -> None:
    """One loop after another, with waiting in each."""
    bulkhead = Bulkhead(1, queue=3)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(bulkhead.aexecute, lambda ctx: anyio.sleep(0.001))

    for backend in ("asyncio", "trio", "asyncio"):
        anyio.run(main, backend=backend)
        assert facts(bulkhead) == (1, 0, 0, 0)


async def test_the_happy_path_does_not_suspend(tasks_world: World) -> None:
    """A free permit is taken without giving other tasks a turn, and a failed call costs no cycle."""
    bulkhead = Bulkhead(1)
    turns: list[int] = []

    async with anyio.create_task_group() as tasks:

        async def other() -> None:
            turns.append(1)

        tasks.start_soon(other)
        for _ in range(5):
            assert await bulkhead.aexecute(Script("fine").function()) == "fine"
        assert turns == []


# --- building --------------------------------------------------------------------------------


def test_repr_and_description_tell_every_number() -> None:
    """`repr` shows how it was built, `describe()` what it does."""
    assert repr(Bulkhead(3)) == "Bulkhead(limit=3)"
    bulkhead = Bulkhead(17, queue=23, max_wait=4.5, name="inventory")
    assert repr(eval(repr(bulkhead))) == repr(bulkhead)
    for number in ("17", "23", "4.5", "inventory"):
        assert number in bulkhead.describe()
    assert Bulkhead(2).describe() == "Bulkhead: at most 2 at once, nobody waits"
    assert Bulkhead(2, queue=3).describe() == "Bulkhead: at most 2 at once, 3 may wait"
    assert Bulkhead(2, queue=3, max_wait=1).describe() == "Bulkhead: at most 2 at once, 3 may wait, at most 1 s"
    assert Bulkhead(2, max_wait=1).describe() == "Bulkhead: at most 2 at once, nobody waits"


# --- a thread, an asyncio loop and a trio loop -----------------------------------------------


class Place:
    """One world in a thread of its own, that begins calls when it is told to."""

    def __init__(self, name: str) -> None:
        self._world = World(name)
        self._orders: list[Callable[[Group], None]] = []
        self._closing = False
        self.calls: list[Call] = []
        self._thread = threading.Thread(target=lambda: self._world.run(self._main), daemon=True)
        self._thread.start()

    async def _main(self) -> None:
        async with beside(self._world) as group:
            while not self._closing or self._orders:
                await until(self._world, lambda: self._orders or self._closing)
                while self._orders:
                    self._orders[0](group)
                    self._orders.pop(0)

    def begin(self, bulkhead: Bulkhead, on_entry: Callable[[], object] | None = None, *, hold: bool = True) -> None:
        """Begin a call that stays inside until the place is closed, or calls `on_entry` and leaves."""

        def start(group: Group) -> None:
            if hold:
                self.calls.append(group.start(bulkhead))
                return

            async def fn(ctx: Context) -> None:
                if on_entry is not None:
                    on_entry()

            async def main() -> None:
                await self._world.execute(bulkhead, fn)

            group.run(main)

        self._orders.append(start)
        wait_until(lambda: not self._orders)

    def close(self) -> None:
        self._closing = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "a world did not come to its end"


class everywhere:  # read as a word: "with everywhere() as places"
    """A thread, an asyncio loop and a trio loop, side by side."""

    def __enter__(self) -> list[Place]:
        self._places = [Place(name) for name in ("threads", "asyncio", "trio")]
        return self._places

    def __exit__(self, *exc: object) -> None:
        for place in self._places:
            place.close()


def wait_until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.0005)
