"""Virtual time: no real waiting in threads, asyncio and trio, with the order of events of real time."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
import time
from collections import deque
from typing import Any, cast

import anyio
import pytest
import trio

from resilience import (
    AdaptiveLimit,
    AdaptiveThrottle,
    Bulkhead,
    CircuitBreaker,
    Rate,
    RateLimiter,
    Retry,
    Timeout,
    TimeoutExceeded,
)
from resilience.clock import clock as process_clock
from resilience.runtimes import workers
from resilience.testing import ascript, clocks, hang, script, standstills, virtual_time
from tests.callers import in_threads
from tests.conftest import Boom, Virtual, World


def scripted(world: World, *steps: Any) -> Any:
    return script(*steps) if world.blocking else ascript(*steps)


async def call(policy: Any, fn: Any) -> Any:
    """Call `fn`, and await the result if it is a coroutine."""
    result = policy.call(fn)
    return await result if asyncio.iscoroutine(result) else result


async def test_an_hour_of_backoff_takes_no_real_time_and_is_exact(world: World) -> None:
    """The waits are recorded, and the clock shows their sum."""
    fetch = scripted(world, Boom(), Boom(), Boom(), "fine")
    retry = Retry(4, on=Boom, backoff=[60, 600, 3600])
    began = time.monotonic()
    with virtual_time() as clock:
        assert await call(retry, fetch) == "fine"
    assert clock.sleeps == [60, 600, 3600]
    assert clock.now() == 4260
    assert [it.at for it in fetch.calls] == [0, 60, 660, 4260]
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "policy",
    [
        RateLimiter(Rate(2, per=60), max_wait=0),
        RateLimiter(Rate(2, per=60, burst=2), max_wait=0),
        AdaptiveLimit(1.0, initial=2),
        AdaptiveThrottle(),
        CircuitBreaker(1),
    ],
    ids=repr,
)
async def test_a_policy_that_was_reset_before_the_block_is_like_new_in_it(world: World, policy: Any) -> None:
    """As by a fixture that all tests share, and again after the block: the two clocks differ by hours."""
    reset = getattr(policy, "reset", None) or policy.close
    for _ in range(2):
        for _ in range(3):
            policy.capture(script(ConnectionError()))
        reset()
        with virtual_time() as clock:
            assert await call(policy, scripted(world, "fine")) == "fine"
            assert clock.sleeps == []
            clock.advance(1_000_000)
            reset()
        assert await call(policy, scripted(world, "fine")) == "fine"


async def test_a_timeout_fires_at_its_virtual_instant(world: World) -> None:
    """A function that returns before is in time."""
    timeout = Timeout(2.0)
    with virtual_time() as clock:
        with pytest.raises(TimeoutExceeded):
            await call(timeout, scripted(world, hang(5)))
        assert clock.now() == 2
        assert await call(timeout, scripted(world, hang(1.5, then="in time"))) == "in time"
        assert clock.now() == 3.5
        with pytest.raises(Boom):
            await call(timeout, scripted(world, hang(1, then=Boom())))
        assert clock.now() == 4.5


async def test_tasks_interleave_as_in_real_time(virtual_tasks: Virtual) -> None:
    """Retries, timeouts and sleeps of several tasks come in the order of their instants."""
    log: list[tuple[float, str]] = []

    def note(what: str) -> None:
        log.append((virtual_tasks.now(), what))

    async def retries() -> None:
        await Retry(on=Boom, backoff=[10, 20]).call(ascript(Boom(), Boom(), "fine"))
        note("retried")

    async def times_out() -> None:
        with pytest.raises(TimeoutExceeded):
            await Timeout(15).acall(anyio.sleep, 1000)
        note("timed out")

    async def sleeps(seconds: float) -> None:
        await anyio.sleep(seconds)
        note(f"slept {seconds}")

    async with anyio.create_task_group() as group:
        group.start_soon(sleeps, 40)
        group.start_soon(retries)
        group.start_soon(times_out)
        group.start_soon(sleeps, 5)
    note(f"done at {anyio.current_time():g} on the loop's clock")
    assert log == [
        (5, "slept 5"),
        (15, "timed out"),
        (30, "retried"),
        (40, "slept 40"),
        (40, "done at 40 on the loop's clock"),
    ]


def test_the_users_own_sleeps_are_virtual() -> None:
    """`asyncio.sleep`, `asyncio.timeout`, `trio.sleep` and `trio.move_on_after` take no real time."""

    async def in_asyncio() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(50):
                await asyncio.sleep(3600)

    async def in_trio() -> None:
        with trio.move_on_after(50):
            await trio.sleep(3600)

    with virtual_time() as clock:
        asyncio.run(in_asyncio())
        assert clock.now() == 50
        trio.run(in_trio)
        assert clock.now() == 100
    assert clock.sleeps == []


def test_a_class_of_loops_may_have_its_own_method_for_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The `real_asyncio=True` of freezegun leaves one behind."""
    monkeypatch.setattr(asyncio.SelectorEventLoop, "time", asyncio.BaseEventLoop.time, raising=False)
    with virtual_time() as clock, asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(asyncio.sleep(50))
        assert clock.now() == 50


async def test_a_block_in_a_running_loop_makes_its_time_virtual_and_real_again(tasks_world: World) -> None:
    """The loop's own time continues, so that every timer has as much time left as before."""
    began = anyio.current_time()
    with anyio.CancelScope(deadline=began + 600) as old:
        with virtual_time() as clock:
            await anyio.sleep(599.5)
            assert clock.now() == pytest.approx(599.5)
            assert anyio.current_time() == pytest.approx(began + 599.5, abs=0.1)
        before = time.monotonic()
        await anyio.sleep(50)
    assert old.cancelled_caught
    assert 0.3 < time.monotonic() - before < 5
    with virtual_time() as clock:
        with anyio.move_on_after(1000):
            await anyio.sleep(2000)
        assert clock.now() == pytest.approx(1000)
    assert anyio.current_time() == pytest.approx(began + 1600, abs=5)


@pytest.mark.parametrize("open_for", [0.1, 0.3, 1.1, 30.0])
@pytest.mark.parametrize("uptime", [0.0, 7_654_321.123])
async def test_a_running_loop_wakes_at_the_exact_instant(
    monkeypatch: pytest.MonkeyPatch, tasks_world: World, uptime: float, open_for: float
) -> None:
    """Its own time is a large number, beside which fractions are rounded; no circuit stays open for longer."""
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda loop: uptime + time.monotonic())
    with virtual_time() as clock:
        breaker = CircuitBreaker(1, open_for=open_for)
        await anyio.sleep(0.2)
        await breaker.acapture(ascript(Boom()))
        await anyio.sleep(open_for)
        assert clock.now() == 0.2 + open_for
        assert await breaker.call(ascript("fine")) == "fine"
        with anyio.move_on_after(0.7) as scope:
            await anyio.sleep(0.9)
        assert scope.cancelled_caught
        assert clock.now() == 0.2 + open_for + 0.7
        now = anyio.current_time()
        with anyio.CancelScope(deadline=1.5 + now):
            await anyio.sleep_forever()
        assert clock.now() == 0.2 + open_for + 0.7 + 1.5
        assert anyio.current_time() >= now + 1.5


def test_a_loop_with_its_own_timers_is_refused() -> None:
    """Its waits would be real. Everything is restored after the error."""
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        before = process_clock.now
        with pytest.raises(RuntimeError, match=r"not <uvloop.Loop .*>, which brings its own timers"), virtual_time():
            raise AssertionError("entered")
        assert process_clock.now is before
        await asyncio.wait_for(asyncio.sleep(0), 5)

    uvloop.run(main())


# --- beginning and end -------------------------------------------------------------------------


def state_of_the_process() -> list[object]:
    loop: Any = asyncio.BaseEventLoop
    clock = process_clock
    trios: Any = trio._core._run.SystemClock
    own = [trios.start_clock, trios.current_time, trios.deadline_to_sleep_time]
    return [clock.now, clock.sleep, clock.wait, clock.shorten, loop.time, loop._run_once, *own]


def test_everything_is_restored_after_an_error() -> None:
    before = state_of_the_process()
    with pytest.raises(Boom), virtual_time():
        assert state_of_the_process() != before
        raise Boom
    assert state_of_the_process() == before
    assert abs(process_clock.now() - time.monotonic()) < 1


def test_trio_need_not_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    trios = trio._core._run.SystemClock.current_time
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with virtual_time() as clock:
        assert trio._core._run.SystemClock.current_time is trios
        asyncio.run(asyncio.sleep(10))
        assert clock.now() == 10


def test_a_nested_block_shares_the_clock() -> None:
    """Its time ends with the outer block."""
    with virtual_time() as outer:
        process_clock.sleep(10)
        with virtual_time() as inner:
            process_clock.sleep(5)
        assert inner is outer
        with virtual_time() as again:
            process_clock.sleep(1)
        assert again is outer
    assert outer.now() == 16
    with virtual_time() as fresh:
        assert fresh.now() == 0


def test_virtual_time_ends_with_the_last_of_concurrent_blocks() -> None:
    """Here the one that began it ends first."""

    async def block(seconds: float) -> float:
        with virtual_time() as clock:
            await asyncio.sleep(seconds)
            return clock.now()

    async def main() -> list[float]:
        return await asyncio.gather(block(0.1), block(0.2), block(0.3))

    now = process_clock.now
    assert asyncio.run(main()) == pytest.approx([0.1, 0.2, 0.3])
    assert process_clock.now is now


def test_a_thread_that_sleeps_at_the_end_of_virtual_time_wakes() -> None:
    woken = threading.Event()

    def sleeps() -> None:
        asleep.set()
        process_clock.sleep(10**6)
        woken.set()

    with virtual_time():
        asleep = threading.Event()
        thread = threading.Thread(target=sleeps)
        thread.start()
        asleep.wait(5)
    assert woken.wait(5)
    thread.join(5)


def test_a_thread_that_queues_at_the_end_of_virtual_time_stays_queued() -> None:
    """A wait for a permit becomes a real one."""
    bulkhead = Bulkhead(1, queue=1)
    got: list[str] = []
    thread = threading.Thread(target=lambda: got.append(bulkhead.call(script("mine"))))
    with bulkhead.slot():
        with virtual_time():
            thread.start()
            while bulkhead.stats().queued == 0:
                time.sleep(0.001)
        time.sleep(0.02)
        assert got == []
    thread.join(5)
    assert got == ["mine"]


def test_advance_moves_the_clock_forward() -> None:
    """For all code that reads the clock; never backwards."""
    with virtual_time() as clock:
        clock.advance(1.5)
        assert clock.now() == process_clock.now() == 1.5
        with pytest.raises(ValueError, match="seconds must be zero or more"):
            clock.advance(-1)
        assert repr(clock) == "<VirtualClock now=1.5 sleeps=0>"


async def test_advance_wakes_the_tasks_whose_time_has_come(virtual_tasks: Virtual) -> None:
    """They run when the task that advanced the clock next waits."""
    woken: list[float] = []
    asleep = anyio.Event()

    async def sleeps() -> None:
        asleep.set()
        await anyio.sleep(60)
        woken.append(virtual_tasks.now())

    async with anyio.create_task_group() as group:
        group.start_soon(sleeps)
        await asleep.wait()
        with virtual_time() as clock:
            clock.advance(61)
        await anyio.sleep(0.001)
        assert woken == [61]


def test_a_worker_with_a_job_that_has_not_begun_counts_as_busy() -> None:
    """It still stands where idle workers stand, and time does not jump over its job."""
    with virtual_time() as clock:
        Timeout(1).call(len, "")  # an idle worker is there
        worker = workers.pool.idle[-1]
        wait = clocks.Wait(5.0, lambda: False)
        try:
            worker._job = cast(Any, "a job")  # assigned, while the worker is not yet awake
            for _ in range(20):
                assert not clock.jump(wait)
                time.sleep(wait.pause)
                wait.looks += 1
            worker._job = None
            end = time.monotonic() + 10
            while not clock.jump(wait) and time.monotonic() < end:
                time.sleep(wait.pause)
        finally:
            clock.leave()
        assert clock.now() == 5.0


def test_a_thread_that_starts_slowly_counts_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine starting may take longer than the patience; time does not jump meanwhile."""
    begin = threading.Thread._bootstrap  # type: ignore[attr-defined]

    def begin_late(thread: threading.Thread) -> None:
        if isinstance(thread, workers.Worker):
            time.sleep(0.2)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "_bootstrap", begin_late)
    monkeypatch.setattr(workers.pool, "idle", deque())
    at: list[float] = []
    with virtual_time(patience=0.01) as clock:
        in_threads(lambda: process_clock.sleep(1.0), lambda: at.append(Timeout(10).call(clock.now)))
    assert at == [0]


@pytest.mark.parametrize("meanwhile", ["a job is done", "what is waited for happens"])
def test_progress_during_the_check_of_the_threads_is_detected(monkeypatch: pytest.MonkeyPatch, meanwhile: str) -> None:
    """Reading the state of one thread lets another run, which may be idle again when its turn comes."""
    ask = standstills._from_kernel
    looks: list[int] = []
    happened: list[int] = []

    def ask_meanwhile(thread: threading.Thread, file: str) -> str:
        if len(looks) == 15:
            worker._job = None
            if meanwhile == "what is waited for happens":
                happened.append(1)
        return ask(thread, file)

    monkeypatch.setattr(standstills, "_from_kernel", ask_meanwhile)
    released = threading.Event()
    bystander = threading.Thread(target=released.wait)
    bystander.start()
    try:
        with virtual_time(patience=0.001) as clock:
            Timeout(1).call(len, "")  # an idle worker is there
            worker = workers.pool.idle[-1]
            wait = clocks.Wait(5.0, lambda: bool(happened))
            worker._job = cast(Any, "a job")
            for look in range(15):
                assert not clock.jump(wait)
                time.sleep(wait.pause)
                wait.looks += 1
                looks.append(look)
            if meanwhile == "what is waited for happens":
                worker._job = None
            assert not clock.jump(wait)
            clock.leave()
    finally:
        released.set()
        bystander.join()


def test_a_worker_that_takes_its_job_while_the_places_are_read_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place says that it waits for a job, and it has none any more."""
    Timeout(1).call(len, "")  # an idle worker is there
    worker = workers.pool.idle[-1]
    read = sys._current_frames

    def begin_meanwhile() -> object:
        places = read()
        worker._job = None
        return places

    monkeypatch.setattr(sys, "_current_frames", begin_meanwhile)
    worker._job = cast(Any, "a job")
    assert standstills.Standstills(0.001).moving([worker], looks=9) == [worker.ident]
