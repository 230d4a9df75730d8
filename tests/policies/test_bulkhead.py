"""Bulkhead: the limit, the queue, how long a call waits, and what is told of it."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from resilience import (
    Bulkhead,
    BulkheadFull,
    Context,
    DeadlineExceeded,
    Policy,
    Rejected,
    Retry,
    Timeout,
    TimeoutExceeded,
    events,
)
from resilience.testing import virtual_time
from tests.conftest import Script, World
from tests.contention.beside import PATIENCE, beside, until
from tests.policies.bulkheads import LONG, SHORT, facts, wait_until, works

# --- the limit ---------------------------------------------------------------------------------


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


# --- the queue ---------------------------------------------------------------------------------


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
    came = threading.Event()

    async with beside(threads) as group:

        async def greedy() -> None:
            for _ in range(5):
                bulkhead.execute(lambda ctx: (order.append("greedy"), wait_until(came.is_set)))

        async def patient() -> None:
            bulkhead.execute(lambda ctx: order.append("patient"))

        group.run(greedy)
        await until(threads, lambda: order)
        group.run(patient)
        await until(threads, lambda: bulkhead.stats().queued == 1)
        came.set()
    assert order == ["greedy", "patient", *["greedy"] * 4]


# --- how long to wait --------------------------------------------------------------------------


def test_max_wait_may_be_a_timedelta(threads: World) -> None:
    """Durations are seconds or `timedelta`."""
    bulkhead = Bulkhead(1, queue=1, max_wait=timedelta(milliseconds=5))
    with bulkhead.slot(), pytest.raises(BulkheadFull, match=r"0\.005"):
        bulkhead.execute(lambda ctx: None)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_wait": SHORT, "budget": LONG, "timeout": LONG}, BulkheadFull),
        ({"max_wait": LONG, "budget": SHORT, "timeout": LONG}, DeadlineExceeded),
        ({"max_wait": LONG, "budget": LONG, "timeout": SHORT}, TimeoutExceeded),
    ],
)
async def test_the_earliest_limit_ends_the_wait(
    world: World, limits: dict[str, float], expected: type[Exception]
) -> None:
    """Of `max_wait`, the budget and a Timeout around, the one that is over first is the one that is told."""
    bulkhead = Bulkhead(1, queue=1, max_wait=limits["max_wait"])
    pipeline = Timeout(limits["timeout"]).wrap(bulkhead)

    async with beside(world) as group:
        await group.inside(bulkhead)
        assert type(await works(world, pipeline, Context(timeout=limits["budget"]))) is expected
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
    assert str(full.value) == f"{says} and there is no queue"
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


def test_who_joins_the_queue_wakes_whom_that_serves() -> None:
    """A permit lies there already, given back by somebody who has not come to look at the queue: no wake-up is lost."""
    bulkhead = Bulkhead(1, queue=2)
    served: list[str] = []

    def call(name: str) -> threading.Thread:
        thread = threading.Thread(target=lambda: bulkhead.execute(lambda ctx: served.append(name)), daemon=True)
        thread.start()
        return thread

    assert bulkhead._permits.machine.take()
    first = call("first")
    wait_until(lambda: bulkhead.stats().queued == 1)
    bulkhead._permits.machine.free.append(None)  # the first half of giving back
    second = call("second")
    first.join(PATIENCE)
    second.join(PATIENCE)
    assert served == ["first", "second"]
    assert bulkhead._permits.machine.settle() == []  # the second half
    assert facts(bulkhead) == (1, 0, 0, 0)


# --- what is told ------------------------------------------------------------------------------


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


# --- with others -------------------------------------------------------------------------------


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


# --- building ----------------------------------------------------------------------------------


def test_repr_and_description_tell_every_number() -> None:
    """`repr` shows how it was built, `describe()` what it does."""
    assert repr(Bulkhead(3)) == "Bulkhead(limit=3)"
    bulkhead = Bulkhead(17, queue=23, max_wait=4.5, name="inventory")
    assert repr(eval(repr(bulkhead))) == repr(bulkhead)
    for number in ("17", "23", "4.5", "inventory"):
        assert number in bulkhead.describe()
    assert Bulkhead(2).describe() == "Bulkhead: at most 2 at once, no queue"
    assert Bulkhead(2, queue=3).describe() == "Bulkhead: at most 2 at once, 3 may wait"
    assert Bulkhead(2, queue=3, max_wait=1).describe() == "Bulkhead: at most 2 at once, 3 may wait, at most 1 s"
