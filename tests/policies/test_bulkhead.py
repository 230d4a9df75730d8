"""Bulkhead: the limit, the queue, the length of waits, events and descriptions."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from resilience import Bulkhead, Context, Policy, Timeout, events
from resilience.errors import BulkheadFull, DeadlineExceeded, Rejected, TimeoutExceeded
from resilience.testing import virtual_time
from tests.callers import Stopped, is_free, wait_until
from tests.conftest import Script, World
from tests.contention.beside import PATIENCE, beside
from tests.policies.bulkheads import LONG, SHORT, calling, counts, works


@pytest.mark.parametrize(("limit", "running"), [(1, "1 call is running"), (3, "3 calls are running")])
async def test_a_call_beyond_the_limit_is_refused_until_one_ends(world: World, limit: int, running: str) -> None:
    """The function of a refused call is not entered."""
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
    assert (error.policy, error.retry_after, error.limit, error.queue) == ("inventory", None, limit, 0)
    assert str(error) == f"inventory: {running} and there is no queue"


async def test_calls_wait_in_the_queue_and_the_next_one_is_refused(world: World) -> None:
    bulkhead = Bulkhead(1, queue=2, name="inventory")
    async with beside(world) as group:
        holder = await group.inside(bulkhead)
        waiting = [await group.queued(bulkhead) for _ in range(2)]
        assert counts(bulkhead) == (1, 1, 2, 0)
        error = await works(world, bulkhead)
        assert counts(bulkhead) == (1, 1, 2, 1)
        assert not any(call.entered.is_set() for call in waiting)
        holder.let_go()
        for call in waiting:
            call.let_go()
            assert await call.result() == "fine"
    assert type(error) is BulkheadFull
    assert error.policy == "inventory"
    assert counts(bulkhead) == (1, 0, 0, 1)


async def test_a_raised_limit_lets_waiting_calls_begin(world: World) -> None:
    bulkhead = Bulkhead(1, queue=2)
    async with beside(world) as group:
        await group.inside(bulkhead)
        waiting = [await group.queued(bulkhead) for _ in range(2)]
        bulkhead.resize(3)
        for call in waiting:
            call.let_go()
            assert await call.result() == "fine"
        assert counts(bulkhead) == (3, 1, 0, 0)


@pytest.mark.parametrize(
    ("shortest", "expected", "policy"),
    [
        ("max_wait", BulkheadFull, "Bulkhead"),
        ("budget", DeadlineExceeded, "outer"),
        ("outer", TimeoutExceeded, "outer"),
        ("cooperative", TimeoutExceeded, "cooperative"),  # which has no timer
    ],
)
async def test_the_first_limit_ends_a_wait(world: World, shortest: str, expected: type[Exception], policy: str) -> None:
    """Of `max_wait`, the deadline and outer Timeouts, the first one determines the error."""
    limits = {**dict.fromkeys(("max_wait", "budget", "outer", "cooperative"), LONG), shortest: SHORT}
    bulkhead = Bulkhead(1, queue=1, max_wait=limits["max_wait"])
    cooperative = Timeout(limits["cooperative"], cooperative=True, name="cooperative")
    pipeline = Policy.wrap(Timeout(limits["outer"], name="outer"), cooperative, bulkhead)
    async with beside(world) as group:
        await group.inside(bulkhead)
        error = await works(world, pipeline, Context(timeout=limits["budget"]))
    assert (type(error), error.policy) == (expected, policy)
    assert counts(bulkhead)[1:3] == (0, 0)


async def test_of_max_wait_and_an_outer_timeout_at_the_same_instant_the_timeout_raises(world: World) -> None:
    """Nothing inside an outer limit outlives it."""
    bulkhead = Bulkhead(1, queue=1, max_wait=5.0)
    with virtual_time(), bulkhead.slot():
        error = await works(world, Timeout(5.0, name="patience").wrap(bulkhead))
    assert type(error) is TimeoutExceeded
    assert error.policy == "patience"


def test_errors_and_events_of_a_wait_contain_its_length_and_its_cause(heard: list[Any]) -> None:
    """Of `max_wait` and the deadline at the same instant the deadline is the cause."""
    bulkhead = Bulkhead(1, queue=2, max_wait=5.0, name="inventory")
    with virtual_time() as clock, bulkhead.slot():
        clock.advance(100.0)
        with pytest.raises(BulkheadFull, match=r"1 call is running after 5 s in the queue") as full:
            bulkhead.call(len, "")
        for budget in (2.0, 5.0):
            with pytest.raises(DeadlineExceeded, match="while the call waited in the queue") as late:
                bulkhead.execute(lambda ctx: None, Context(timeout=budget))
            assert late.value.policy == "inventory"
    rejected = [event for event in heard if isinstance(event, events.CallRejected)]
    assert (full.value.policy, full.value.limit, full.value.queue) == ("inventory", 1, 2)
    assert [(event.reason, event.waited) for event in rejected] == [
        ("BulkheadFull", 5.0),
        ("DeadlineExceeded", 2.0),
        ("DeadlineExceeded", 5.0),
    ]


def test_a_call_that_joins_the_queue_wakes_a_call_that_a_free_permit_serves() -> None:
    """Another thread released that permit, but has woken no call yet: no wake-up is lost."""
    bulkhead, served, calls = Bulkhead(1, queue=2), list[str](), list[threading.Thread]()

    def release() -> None:
        with bulkhead.slot():
            calls.append(calling(bulkhead, served, "first"))
            wait_until(lambda: bulkhead.stats().queued == 1)

    releasing = Stopped(release, at="hand_on")
    calls.append(calling(bulkhead, served, "second"))
    for thread in calls:
        thread.join(PATIENCE)
    assert served == ["first", "second"]
    releasing.go_on()
    assert counts(bulkhead) == (1, 0, 0, 0)


def test_a_listener_runs_outside_the_lock_and_may_use_the_bulkhead() -> None:
    """It waits for another thread that reads the statistics and resizes the bulkhead."""
    done: list[tuple[bool, float]] = []

    def listener(event: events.Event) -> None:
        if isinstance(event, events.CallRejected):
            done.append((is_free(lambda: (bulkhead.stats(), bulkhead.resize(2))), event.waited))

    bulkhead = Bulkhead(1)
    observed = bulkhead.wrap(listeners=[listener])
    with bulkhead.slot():
        assert isinstance(observed.capture(lambda ctx: None).error, BulkheadFull)  # type: ignore[union-attr]
        assert bulkhead.execute(lambda ctx: "fine") == "fine"
    assert done == [(True, 0.0)]


def test_a_bulkhead_is_used_in_one_event_loop_after_another() -> None:
    """Calls wait in each of them."""
    bulkhead = Bulkhead(1, queue=3)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(bulkhead.aexecute, lambda ctx: anyio.sleep(0.001))

    for backend in ("asyncio", "trio", "asyncio"):
        anyio.run(main, backend=backend)
        assert counts(bulkhead) == (1, 0, 0, 0)
