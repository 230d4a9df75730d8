"""Gate: new calls are refused after it was shut, and a drain waits for the running ones."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from resilience import Context, Pipeline, Retry, events
from resilience.work import Gate, GateStats, ShuttingDown
from resilience.work import gate as module
from tests.callers import Slow, calls_around, fail_first_wake, run_all, wait_until
from tests.conftest import Boom, Script, Virtual, World
from tests.contention.storm import Gauge
from tests.state.stepping import TRACING_CRASHES, Interruption


async def test_a_shut_gate_refuses_new_calls(world: World, heard: list[Any]) -> None:
    gate, script = Gate(name="shop"), Script("fine")
    pipeline = Pipeline(Retry(on=Boom), gate)
    assert await world.execute(pipeline, script.function()) == "fine"
    gate.shut()
    error = await world.attempt(pipeline, script.function())
    assert isinstance(error, ShuttingDown)
    assert (error.policy, error.retry_after, script.calls) == ("shop", None, 1)
    assert gate.stats() == GateStats(inside=0, is_shut=True, rejected=1)
    assert [it.reason for it in heard if isinstance(it, events.CallRejected)] == ["ShuttingDown"]
    gate.open()
    assert await world.execute(pipeline, script.function()) == "fine"


async def test_a_call_inside_an_admitted_one_is_admitted(world: World) -> None:
    gate = Gate()

    async def outer(ctx: Context) -> Any:
        gate.shut()
        return await world.execute(gate, Script("inner").function())

    assert await world.execute(gate, outer) == "inner"
    assert gate.stats() == GateStats(inside=0, is_shut=True, rejected=0)


async def test_a_call_of_a_task_that_outlives_an_admitted_call_is_refused(in_asyncio: World) -> None:
    gate = Gate()

    async def later() -> Any:
        await asyncio.sleep(0)
        return await gate.acapture(Script("late").function())

    async def starts(ctx: Context) -> asyncio.Task[Any]:
        return asyncio.create_task(later())

    task = await gate.aexecute(starts)
    gate.shut()
    assert isinstance((await task).error, ShuttingDown)


def test_a_drain_waits_for_threads_and_tasks() -> None:
    gate, go, done = Gate(), threading.Event(), []

    def slow() -> None:
        go.wait(5)
        done.append("thread")

    async def aslow() -> None:
        while not go.is_set():
            await anyio.sleep(0.001)
        done.append("task")

    def drains() -> None:
        wait_until(lambda: gate.stats().inside == 2)
        assert gate.drain(0) is False
        assert gate.drain(0.01) is False
        assert isinstance(gate.capture(lambda ctx: 1).error, ShuttingDown)  # type: ignore[union-attr]
        threading.Timer(0.01, go.set).start()
        assert gate.drain(5) is True
        assert sorted(done) == ["task", "thread"]
        assert gate.drain(0) is True

    run_all([lambda: gate.call(slow), lambda: asyncio.run(gate.call(aslow))], drains)


async def test_a_drain_in_a_task_waits_in_virtual_time(in_virtual_asyncio: Virtual) -> None:
    gate = Gate()

    loop = asyncio.get_running_loop()
    task = asyncio.create_task(gate.acall(asyncio.sleep, 30))
    await asyncio.sleep(0)
    began = loop.time()
    assert await gate.adrain(0) is False
    assert await gate.adrain(10) is False
    assert loop.time() - began == pytest.approx(10)
    assert await gate.adrain(100) is True
    assert loop.time() - began == pytest.approx(30)
    await task


async def test_cancelled_drains_leave_nothing_behind(in_virtual_asyncio: Virtual) -> None:
    gate = Gate()
    task = asyncio.create_task(gate.acall(asyncio.sleep, 60))
    await asyncio.sleep(0)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(1000):
        with anyio.move_on_after(0.01) as scope:
            await gate.adrain(60)
        assert scope.cancelled_caught
    gc.collect()
    assert len(gc.get_objects()) < before + 1000
    await task


@pytest.mark.parametrize("is_shut_again", [False, True])
async def test_a_drain_of_a_reopened_gate_awaits_all_calls(in_virtual_asyncio: Virtual, is_shut_again: bool) -> None:
    gate = Gate()
    first = asyncio.create_task(gate.acall(asyncio.sleep, 10))
    await asyncio.sleep(0)
    drain = asyncio.create_task(gate.adrain(60))
    await asyncio.sleep(0)
    gate.open()
    second = asyncio.create_task(gate.acall(asyncio.sleep, 20))
    await asyncio.sleep(1)
    if is_shut_again:
        gate.shut()
    await first
    assert not drain.done()
    await second
    async with asyncio.timeout(1):
        assert await drain is True


def test_a_refused_call_does_not_delay_a_drain() -> None:
    """However long a listener of its event takes."""
    gate = Gate()
    gate.shut()
    drained: list[bool] = []
    with pytest.raises(ShuttingDown):
        gate.wrap(listeners=[lambda event: drained.append(gate.drain(0))]).call(int)
    assert all(drained)
    assert len(drained) == 2  # of the refusal, and of the end of the execution


def drained_at(place: int) -> list[str]:
    """Drain at the n-th place of a call where a signal handler may run, or another thread."""
    gate, seen = Gate(), list[str]()
    interruption = Interruption([module], place, lambda: seen.append(f"drained: {gate.drain(0)}"))
    interruption.around(lambda: gate.capture(lambda ctx: seen.append("begins")))
    assert gate.drain(0)
    return seen


def drained_after_the_outer_call_at(place: int) -> list[str]:
    """The same for a nested call in another thread, where the call around it ends before the drain."""
    gate, slow, seen, inherited = Gate(), Slow(int), list[str](), list[contextvars.Context]()

    def outer() -> None:
        inherited.append(contextvars.copy_context())
        slow.blocking()

    thread = threading.Thread(target=gate.call, args=(outer,))
    thread.start()
    assert slow.entered.wait(5)
    gate.shut()

    def drain() -> None:
        slow.may_end.set()
        thread.join(5)
        seen.append(f"drained: {gate.drain(0)}")

    interruption = Interruption([module], place, drain)
    interruption.around(lambda: inherited[0].run(gate.capture, lambda ctx: seen.append("begins")))
    slow.may_end.set()
    thread.join(5)
    assert gate.drain(0)
    return seen


@pytest.mark.skipif(TRACING_CRASHES, reason="CPython 3.12 crashes where several threads trace opcodes")
@pytest.mark.parametrize("drained_at", [drained_at, drained_after_the_outer_call_at])
def test_no_call_begins_after_a_drain_wherever_the_drain_comes(drained_at: Callable[[int], list[str]]) -> None:
    """The drain may look before a call that enters is counted, so the call checks again."""
    seen = [drained_at(0)]
    while seen[-1] != ["begins"]:  # there was no such place
        seen.append(drained_at(len(seen)))
    assert ["drained: True"] in seen
    assert ["begins", "drained: True"] in seen
    assert ["drained: True", "begins"] not in seen


def test_a_gate_that_is_shut_while_a_call_enters_refuses_it() -> None:
    """Another thread may shut it just before the call is counted."""
    gate = Gate()

    def shut(frame: object, kind: str, argument: Any) -> None:
        if kind == "c_call" and argument.__name__ == "add":
            gate.shut()

    sys.setprofile(shut)
    try:
        with pytest.raises(ShuttingDown):
            gate.call(int)
    finally:
        sys.setprofile(None)
    assert gate.stats() == GateStats(inside=0, is_shut=True, rejected=1)


async def test_a_chain_of_admitted_tasks_keeps_no_reference_to_earlier_calls(in_asyncio: World) -> None:
    gate, tasks, known = Gate(), [], []

    async def begins_the_next(left: int) -> None:
        known.append(calls_around())
        if left:
            tasks.append(asyncio.create_task(gate.acall(begins_the_next, left - 1)))

    await gate.acall(begins_the_next, 20)
    while tasks:
        await tasks.pop()
    assert len(known) == 21
    assert max(known) <= calls_around() + 2


def test_a_drain_whose_loop_has_ended_does_not_block_calls() -> None:
    gate, slow, ended = Gate(), Slow(lambda: "fine"), list[Any]()

    def close_the_loop() -> None:
        assert slow.entered.wait(5)
        loop = asyncio.new_event_loop()
        task = loop.create_task(gate.adrain(60))
        loop.run_until_complete(asyncio.sleep(0))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()

    run_all([lambda: ended.append(gate.call(slow.blocking))], close_the_loop, slow.may_end.set)
    assert ended == ["fine"]
    assert gate.drain(0) is True


def test_a_drain_ends_although_no_stack_was_left_to_wake_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `RecursionError` is a `RuntimeError`, but not the one of a closed event loop: the last call tries again."""
    gate, drained, may_end = Gate(), list[bool](), threading.Event()

    def drain() -> None:
        wait_until(lambda: gate.stats().inside == 1)
        drained.append(gate.drain(60))

    def call() -> None:
        with pytest.raises(RecursionError):
            gate.call(may_end.wait, 10)

    run_all(
        [call, drain],
        lambda: wait_until(lambda: len(gate._drains) == 1),
        lambda: fail_first_wake(monkeypatch),
        may_end.set,
    )
    assert drained == [True]


@pytest.mark.skipif(not hasattr(signal, "SIGTERM"), reason="there is no such signal on this platform")
def test_a_signal_handler_may_shut_the_gate() -> None:
    gate = Gate()
    before = signal.signal(signal.SIGTERM, lambda number, frame: gate.shut())
    try:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(ShuttingDown):
            gate.call(int)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_under_contention_no_call_begins_after_a_drain() -> None:
    gate, gauge = Gate(), Gauge()

    def work() -> None:
        gauge.enter()
        time.sleep(0.0001)
        gauge.leave()

    def thread() -> None:
        while gate.capture(lambda ctx: work()).__class__.__name__ == "Success":
            pass

    def drains() -> None:
        time.sleep(0.02)
        assert gate.drain(5)
        assert gauge.inside == 0

    run_all([thread] * 8, drains)
    assert gate.stats() == GateStats(inside=0, is_shut=True, rejected=8)


def test_describe_and_repr_show_the_name_and_the_state() -> None:
    gate = Gate(name="shop")
    assert repr(gate) == "Gate(name='shop')"
    assert gate.describe() == "shop: lets calls through until it is shut; 0 inside"
