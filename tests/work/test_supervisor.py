"""Supervisor: failed tasks are restarted after a delay, and given up if they keep failing."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import nullcontext
from functools import partial
from typing import Any

import anyio
import pytest

from resilience import events
from resilience.backoff import Constant, Exponential
from resilience.testing import seeded
from resilience.work import Supervisor
from resilience.work import supervisor as supervisors
from tests.callers import calls_around
from tests.conftest import Boom, Virtual, Watched, World, no_collector, nothing_is_left_unawaited
from tests.functions import fail_on_the_way_out


class Task:
    """A task that fails after each of these runs, in seconds, and then returns."""

    def __init__(self, *runs: float) -> None:
        self._runs = iter(runs)
        self.began: list[float] = []

    async def __call__(self) -> None:
        self.began.append(asyncio.get_running_loop().time())
        for seconds in self._runs:
            await asyncio.sleep(seconds)
            raise Boom(f"after {seconds}")

    @property
    def pauses(self) -> list[float]:
        return [round(after - before, 3) for before, after in zip(self.began, self.began[1:], strict=False)]


@pytest.mark.parametrize(("runs", "pauses"), [([0, 0, 0, 0], [1, 2, 4, 60]), ([0, 0, 300, 0], [1, 2, 301, 2])])
async def test_a_failed_task_is_restarted_after_increasing_delays(
    in_virtual_asyncio: Virtual, caplog: pytest.LogCaptureFixture, runs: list[float], pauses: list[float]
) -> None:
    """A long run resets them."""
    task = Task(*runs)
    async with Supervisor(restart=[1, 2, 4, 60]) as supervisor:
        supervisor.start_soon(task, name="feed")
    assert task.pauses == pauses
    assert supervisor.parked == ()
    assert caplog.records[0].message == "Supervisor: feed failed with Boom and is restarted in 1 s"


async def test_delays_are_exponential_by_default(in_virtual_asyncio: Virtual) -> None:
    """From one second to a minute, with full jitter."""
    task = Task(*[0] * 8)
    with seeded(7):
        async with Supervisor() as supervisor:
            supervisor.start_soon(task)
    expected = Exponential(1.0, cap=60.0).delays(random.Random(7))
    assert task.pauses == [round(next(expected), 3) for _ in range(8)]


async def test_no_failure_is_kept_during_a_delay(tasks_world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Nor the frames of its traceback, for up to a minute."""
    caplog.set_level(logging.CRITICAL, "resilience")  # a record would keep it
    watched = Watched()
    with no_collector():
        async with Supervisor(restart=[60]) as supervisor:
            supervisor.start_soon(watched.fn)
            while not watched.seen:
                await anyio.sleep(0.001)
            await anyio.sleep(0.01)
            assert watched.alive == []
            await supervisor.adrain(0)


async def test_only_a_task_that_keeps_failing_is_parked(
    in_virtual_asyncio: Virtual, heard: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    parked: list[Any] = []

    def reports(event: Any) -> None:
        parked.append(event)
        raise RuntimeError("changes nothing")

    bad, good = Task(*[0] * 100), Task(0, 500)
    async with Supervisor(
        restart=Constant(1), max_restarts=3, within=60, on_parked=reports, name="feeds"
    ) as supervisor:
        supervisor.start_soon(bad, name="bad")
        supervisor.start_soon(good, name="good")
    assert len(bad.began) == 4
    assert good.pauses == [1, 501]
    assert supervisor.parked == ("bad",)
    [event] = parked
    assert isinstance(event, events.Parked)
    assert (event.policy, event.name, event.restarts, str(event.last.error)) == ("feeds", "bad", 3, "after 0")
    assert event in heard
    given_up = "feeds: bad failed with Boom and is given up after 3 restarts within 60 s"
    assert ("resilience", logging.ERROR, given_up) in caplog.record_tuples


async def test_logging_that_raises_ends_no_task(in_virtual_asyncio: Virtual, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisors.logger, "filters", [lambda record: record.request_id])
    task = Task(0, 0)
    async with Supervisor(restart=[1]) as supervisor:
        supervisor.start_soon(task)
    assert task.pauses == [1, 1]


@pytest.mark.parametrize(("runs", "began"), [([50] * 20, 21), ([1000, 0, 0, 0], 3)], ids=["slow", "quick at last"])
async def test_only_restarts_within_the_window_count(
    in_virtual_asyncio: Virtual, runs: list[float], began: int
) -> None:
    task = Task(*runs)
    async with Supervisor(restart=Constant(1), max_restarts=2, within=100) as supervisor:
        supervisor.start_soon(task)
    assert len(task.began) == began


async def test_max_restarts_of_zero_restarts_no_task(in_virtual_asyncio: Virtual) -> None:
    async with Supervisor(max_restarts=0) as supervisor:
        supervisor.start_soon(Task(0))
    assert supervisor.parked == ("Task",)


async def test_a_drain_waits_for_the_tasks_and_then_cancels_them(in_virtual_asyncio: Virtual) -> None:
    loop, cleaned = asyncio.get_running_loop(), []

    async def rounds(supervisor: Supervisor) -> None:
        while not supervisor.is_stopping:
            await asyncio.sleep(1)

    async def forever() -> None:
        try:
            await asyncio.sleep(10**6)
        finally:
            with anyio.CancelScope(shield=True):
                await asyncio.sleep(0)
            cleaned.append(1)

    async with Supervisor() as supervisor:
        supervisor.start_soon(rounds, supervisor)
        await asyncio.sleep(3.5)
        assert await supervisor.adrain(10) is True
        assert loop.time() == pytest.approx(4, abs=0.1)
        with pytest.raises(RuntimeError, match="until it stops"):
            supervisor.start_soon(forever)
    async with Supervisor(restart=[60]) as supervisor:
        supervisor.start_soon(forever)
        supervisor.start_soon(supervisor.wait_stopping)
        failing = Task(0)
        supervisor.start_soon(failing)
        await asyncio.sleep(0.1)
        began = loop.time()
        assert await supervisor.adrain(10) is False
        assert loop.time() - began == pytest.approx(10)
        assert cleaned == [1]
        assert len(failing.began) == 1  # it waited to be restarted
    async with Supervisor() as supervisor:
        supervisor.start_soon(asyncio.sleep, 0)  # ends long before the drain
        late = Task(5)
        await asyncio.sleep(1)
        supervisor.start_soon(late)
        assert await supervisor.adrain(60) is True
        assert len(late.began) == 1
        assert supervisor.parked == ()


async def test_a_drain_that_is_cancelled_while_tasks_clean_up_waits_for_them(virtual_tasks: Virtual) -> None:
    async def cleans_up() -> None:
        try:
            await anyio.sleep(60)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(5)

    async with Supervisor() as supervisor:
        supervisor.start_soon(cleans_up)
        await anyio.sleep(0)
        with anyio.move_on_after(1):
            assert await supervisor.adrain(0) is False
        assert virtual_tasks.now() == pytest.approx(5)


async def test_an_error_of_the_block_cancels_the_tasks_and_is_in_no_group(tasks_world: World) -> None:
    ended: list[int] = []

    async def forever() -> None:
        try:
            await anyio.sleep(60)
        finally:
            ended.append(1)

    with pytest.raises(Boom, match="of the block"):
        async with Supervisor() as supervisor:
            supervisor.start_soon(forever)
            await anyio.wait_all_tasks_blocked()
            raise Boom("of the block")
    assert ended == [1]


async def test_a_cancellation_ends_the_block(tasks_world: World) -> None:
    with anyio.move_on_after(0.02) as scope:
        async with Supervisor() as supervisor:
            supervisor.start_soon(anyio.sleep, 60)
    assert scope.cancelled_caught


async def test_a_supervisor_is_used_once_and_inside_its_block(tasks_world: World) -> None:
    """After that, it starts nothing, and is drained."""
    supervisor = Supervisor()
    assert supervisor.is_stopping is False
    for use in (
        partial(supervisor.start_soon, anyio.sleep, 1),
        supervisor.wait_stopping,
        partial(supervisor.adrain, 1),
    ):
        with pytest.raises(RuntimeError, match="inside its block"):
            await use()  # type: ignore[misc]
    async with supervisor:
        supervisor.start_soon(anyio.sleep, 0)
    assert supervisor.is_stopping
    with pytest.raises(RuntimeError, match="inside its block"):
        supervisor.start_soon(anyio.sleep, 0)
    with anyio.fail_after(5):
        assert await supervisor.adrain(0) is True
    with pytest.raises(RuntimeError, match="make another one"):
        await supervisor.__aenter__()


async def test_a_task_cannot_drain_its_own_supervisor(tasks_world: World) -> None:
    """It would wait for its own end."""
    errors: list[str] = []

    async def task(supervisor: Supervisor) -> None:
        with pytest.raises(RuntimeError, match="its own end") as error:
            await supervisor.adrain(0)
        errors.append(str(error.value))

    async with Supervisor() as supervisor:
        supervisor.start_soon(task, supervisor)
    assert len(errors) == 1


async def test_a_cancelled_future_fails_a_task(in_virtual_asyncio: Virtual, caplog: pytest.LogCaptureFixture) -> None:
    """The other tasks continue: the task itself was not cancelled."""

    futures: list[asyncio.Future[None]] = []

    async def waits() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        futures.append(future)
        if len(futures) < 3:
            future.cancel()
            await future

    other = Task(5, 5)
    async with Supervisor(restart=[1]) as supervisor:
        supervisor.start_soon(waits, name="waits")
        supervisor.start_soon(other)
    assert len(futures) == len(other.began) == 3
    assert caplog.records[0].message == "Supervisor: waits failed with RuntimeError and is restarted in 1 s"
    assert caplog.records[0].exc_info
    assert isinstance(caplog.records[0].exc_info[1].__cause__, asyncio.CancelledError)


async def test_a_cancelled_block_restarts_none(in_virtual_asyncio: Virtual, caplog: pytest.LogCaptureFixture) -> None:
    """A cancellation of asyncio reaches each task."""

    async def serve() -> None:
        async with Supervisor(restart=[60]) as supervisor:
            supervisor.start_soon(asyncio.sleep, 10**6)
            supervisor.start_soon(Task(0))
            await asyncio.sleep(10**6)

    server = asyncio.create_task(serve())
    await asyncio.sleep(1)
    server.cancel()
    began = asyncio.get_running_loop().time()
    with pytest.raises(asyncio.CancelledError):
        await server
    assert asyncio.get_running_loop().time() - began < 1
    assert [it.message.partition(" failed")[0] for it in caplog.records] == ["Supervisor: Task"]


async def test_concurrent_drains_end_together(tasks_world: World) -> None:
    """Also if the task takes time to be cancelled."""
    drained: list[bool] = []

    async def slow() -> None:
        try:
            await anyio.sleep(60)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.02)

    async def drain(supervisor: Supervisor) -> None:
        drained.append(await supervisor.adrain(0.01))

    with anyio.fail_after(5):
        async with Supervisor() as supervisor:
            supervisor.start_soon(slow)
            await anyio.wait_all_tasks_blocked()
            async with anyio.create_task_group() as group:
                group.start_soon(drain, supervisor)
                group.start_soon(drain, supervisor)
    assert drained == [False, False]


async def test_a_function_that_cannot_run_as_a_task_is_refused(tasks_world: World) -> None:
    """Before a failure could restart it."""
    async with Supervisor() as supervisor:
        with pytest.raises(TypeError, match=r"sleep.*missing a required argument"):
            supervisor.start_soon(anyio.sleep)
        with nothing_is_left_unawaited(), pytest.raises(TypeError, match=r"a supervisor runs callables.*start_soon\("):
            supervisor.start_soon(anyio.sleep(1))  # type: ignore[arg-type]
    with pytest.raises(ExceptionGroup) as raised:
        async with Supervisor() as supervisor:
            supervisor.start_soon(len, "text")  # type: ignore[arg-type]
    assert str(raised.value.exceptions) == "(TypeError('len returned int: a supervisor runs coroutine functions'),)"


async def test_a_chain_of_started_tasks_keeps_no_reference_to_earlier_ones(tasks_world: World) -> None:
    known: list[int] = []

    async def starts_the_next(supervisor: Supervisor, left: int) -> None:
        known.append(calls_around())
        if left:
            supervisor.start_soon(starts_the_next, supervisor, left - 1)

    async with Supervisor() as supervisor:
        supervisor.start_soon(starts_the_next, supervisor, 20)
    assert known == [calls_around() + 1] * 21


@pytest.mark.parametrize("ends", ["by an error", "by a drain", "by a cancellation"])
async def test_a_task_that_fails_on_the_way_out_changes_nothing(
    tasks_world: World, ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The error of the block is in no group, and the failure is logged."""

    async def run() -> None:
        async with Supervisor(restart=[60]) as supervisor:
            supervisor.start_soon(fail_on_the_way_out)
            await anyio.sleep(0.01)
            if ends == "by an error":
                raise KeyError("block")
            if ends == "by a drain":
                assert await supervisor.adrain(0.01) is False

    with anyio.move_on_after(0.1) as scope, pytest.raises(KeyError) if ends == "by an error" else nullcontext():
        await run()
    assert scope.cancelled_caught == (ends == "by a cancellation")
    assert "fail_on_the_way_out failed with" in caplog.text


async def test_a_group_with_an_interrupt_is_raised(tasks_world: World) -> None:
    async def run() -> None:
        raise BaseExceptionGroup("of a child", [KeyboardInterrupt()])

    with pytest.raises(BaseExceptionGroup) as raised:
        async with Supervisor() as supervisor:
            supervisor.start_soon(run)
    assert raised.group_contains(KeyboardInterrupt)
