"""Alarms of asyncio: one serves all calls with the same timeout, and an error in one of them affects no other."""

from __future__ import annotations

import asyncio
import gc
import runpy
import sys
import time
from math import inf
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from resilience import Context, Hedge, Timeout, TimeoutExceeded
from resilience.clock import clock
from resilience.runtimes import alarms, base
from resilience.runtimes.alarms import OTHER_LIMITS, Alarm, find_alarm, find_due_alarms
from resilience.runtimes.races.asyncio_race import AsyncioRace
from tests.conftest import Virtual, World
from tests.policies.timeouts import SHORT


class Stubborn(asyncio.Future[str]):
    """An awaitable whose cancellation raises."""

    def cancel(self, msg: Any = None) -> bool:
        raise RuntimeError("cannot be cancelled")


class Reported:
    """The contexts that the loop's exception handler got."""

    def __init__(self) -> None:
        self.contexts: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: self.contexts.append(context))


async def answer() -> None:
    return


async def hang() -> None:
    await asyncio.sleep(10)


@pytest.mark.parametrize("before", [0, 1, 3])
async def test_an_awaitable_whose_cancellation_raises_stops_no_other_timeout(in_asyncio: World, before: int) -> None:
    """Neither those of the same alarm nor later ones."""
    reported, timeout = Reported(), Timeout(SHORT)
    stubborn = Stubborn()

    async def waits() -> str:
        return await stubborn

    first = [asyncio.create_task(timeout.acall(hang)) for _ in range(before)]
    not_cancelled = asyncio.create_task(timeout.acall(waits))
    await asyncio.sleep(0)
    behind = [asyncio.create_task(timeout.acall(hang)) for _ in range(3)]
    done, pending = await asyncio.wait([*first, *behind], timeout=5)
    assert not pending
    assert {type(task.exception()) for task in done} == {TimeoutExceeded}
    with pytest.raises(TimeoutExceeded):
        await asyncio.wait_for(timeout.acall(hang), 5)
    assert [str(context["exception"]) for context in reported.contexts] == ["cannot be cancelled"]
    stubborn.set_result("came back")
    assert await not_cancelled == "came back"


async def test_an_outer_limit_whose_handle_is_late_interrupts_no_clean_up_twice(
    in_asyncio: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may stand still after it has read the clock. The timers of the children are exact."""
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    late = iter([0.02])  # the first handle is that of the outer limit
    monkeypatch.setattr(
        loop, "call_later", lambda delay, *args, **kwargs: call_later(delay + next(late, 0.0), *args, **kwargs)
    )
    cleaned_up = []

    async def child() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0.04)
            cleaned_up.append("child")

    async def parent() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(Timeout(60).acall(child))

    with pytest.raises(TimeoutExceeded):
        await Timeout(0.01).acall(parent)
    assert cleaned_up == ["child", "child"]


async def test_a_finalizer_may_add_an_alarm_while_those_that_are_due_are_looked_for(in_asyncio: World) -> None:
    """Garbage may be collected between any two of them, and its finalizers may set timers."""
    loop = asyncio.get_running_loop()

    class Finalizing:
        @property
        def rings_at(self) -> float:
            find_alarm(loop, 2.0, clock.now())
            return 0.0

    find_alarm(loop, 1.0, clock.now())
    by_limit: Any = alarms._latest.by_limit
    by_limit[1.0] = due = Finalizing()
    assert find_due_alarms(loop, 1.0) == [due]
    assert set(by_limit) == {1.0, 2.0}


def test_an_alarm_rings_alone_if_another_loop_of_its_thread_needed_alarms_meanwhile() -> None:
    """Those of the first loop are no longer known, except to their timers."""
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    task = first.create_task(Timeout(SHORT).acall(hang))
    first.run_until_complete(asyncio.sleep(0))
    second.run_until_complete(Timeout(5).acall(asyncio.sleep, 0))
    assert find_due_alarms(first, inf) == []
    with pytest.raises(TimeoutExceeded):
        first.run_until_complete(task)
    for loop in (first, second):
        loop.close()


def test_an_interrupt_just_before_an_alarm_rings_does_not_stop_later_timeouts() -> None:
    """The loop drops the handle of the alarm, and goes on when it is run again."""

    def interrupt(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is Alarm._ring.__code__:
            raise KeyboardInterrupt

    timeout, loop = Timeout(SHORT), asyncio.new_event_loop()
    interrupted = loop.create_task(timeout.acall(hang))
    before = sys.getprofile()
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(interrupted)
    finally:
        sys.setprofile(before)
    with pytest.raises(TimeoutExceeded):
        loop.run_until_complete(asyncio.wait_for(timeout.acall(hang), 5))
    interrupted.cancel()
    loop.run_until_complete(asyncio.wait([interrupted]))
    loop.close()


async def test_limits_that_are_no_longer_used_make_room_for_others(in_virtual_asyncio: Virtual) -> None:
    """A loop has a bounded number of alarms; beyond that, all limits share one, which costs more."""
    for number in range(100):
        await Timeout(1 + number).acall(answer)
    loop = asyncio.get_running_loop()
    shared = find_alarm(loop, OTHER_LIMITS, inf)
    assert find_alarm(loop, 1000.0, inf) is shared
    await asyncio.sleep(200)
    assert find_alarm(loop, 1000.0, inf) is not shared


# --- races ------------------------------------------------------------------------------------


async def test_hedged_calls_share_one_timer_of_the_loop(in_asyncio: World) -> None:
    """A timer for each would be a third of the cost of such a call. The timer keeps no finished race alive."""
    loop: Any = asyncio.get_running_loop()
    before = len(loop._scheduled)
    for _ in range(50):
        await Hedge(10).acall(answer)
    assert len(loop._scheduled) <= before + 1
    gc.collect()  # of earlier tests
    assert not [it for it in gc.get_objects() if type(it) is AsyncioRace]


async def test_each_race_of_a_loop_gets_its_alarm_at_its_own_instant(in_virtual_asyncio: Virtual) -> None:
    """Also for hedges with different delays, in any order, and for each attempt."""
    begun: list[str] = []

    async def fetch(ctx: Context) -> None:
        begun.append(f"{ctx.operation} {ctx.hedge}")
        await asyncio.sleep(0.8)

    async def under(delay: float, hedges: int) -> None:
        await Hedge(delay, hedges=hedges, budget=None).aexecute(fetch, Context(operation=f"after {delay}"))

    await asyncio.gather(under(0.5, 1), under(0.1, 2), under(0.3, 2), under(0.4, 1))
    assert begun == [
        *("after 0.5 0", "after 0.1 0", "after 0.3 0", "after 0.4 0"),
        *("after 0.1 1", "after 0.1 2", "after 0.3 1", "after 0.4 1", "after 0.5 1", "after 0.3 2"),
    ]


def test_timers_may_be_early_by_the_resolution_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of asyncio are, under Windows before Python 3.13."""
    monkeypatch.setattr(time, "get_clock_info", lambda name: SimpleNamespace(resolution=1 / 64))
    assert runpy.run_path(base.__file__)["TIMER_TOLERANCE"] == 1 / 64
