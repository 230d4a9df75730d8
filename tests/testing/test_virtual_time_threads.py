"""Virtual time in threads: it stands still while one of them works."""

from __future__ import annotations

import _thread
import asyncio
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import trio
import trio.testing

from resilience import Bulkhead, Retry, Timeout, TimeoutExceeded
from resilience.clock import clock as process_clock
from resilience.testing import VirtualClock, clocks, hang, script, virtual_time
from tests.conftest import Boom, no_collector
from tests.policies.bulkheads import wait_until
from tests.testing.virtual import in_threads


def test_threads_that_wait_go_on_in_the_order_of_their_instants() -> None:
    """The clock jumps when all of them wait, also where the main thread joins them."""
    log: list[tuple[float, str]] = []

    def retrying(name: str, *delays: float) -> Callable[[], None]:
        def run() -> None:
            Retry(len(delays) + 1, on=Boom, backoff=delays).call(script(*[Boom() for _ in delays], name))
            log.append((clock.now(), name))

        return run

    with virtual_time() as clock:
        in_threads(retrying("slow", 100, 300), retrying("quick", 50), retrying("middle", 10, 20, 100))
    assert log == [(50, "quick"), (130, "middle"), (400, "slow")]


def test_what_a_thread_held_while_it_waited_goes_with_it() -> None:
    """To see where threads stand, the clock looks at their frames. It keeps none of them."""
    known: list[weakref.ref[Boom]] = []

    def waits() -> None:
        held = Boom()
        known.append(weakref.ref(held))
        process_clock.sleep(1.0)

    with no_collector(), virtual_time():
        in_threads(waits, waits)
        assert [it() for it in known] == [None, None]


def test_what_a_thread_held_where_it_stood_goes_when_it_has_moved_on() -> None:
    """Here while it waited for a real lock. The next look at the threads forgets the frame, though not at this one."""

    def waits_for_real() -> weakref.ref[Boom]:
        held = Boom()
        in_threads(lambda: process_clock.sleep(1.0))
        return weakref.ref(held)

    with no_collector(), virtual_time():
        known = waits_for_real()
        process_clock.sleep(1.0)
        assert known() is None


def test_the_clock_stands_still_while_a_thread_works() -> None:
    """A wait of a second does not overtake a thread that computes for much longer than the patience."""
    at: list[float] = []

    def works() -> None:
        for _ in range(10_000_000):  # always at the same instruction, as far as the clock can see
            pass
        at.append(clock.now())

    with virtual_time(patience=0.05) as clock:
        in_threads(works, lambda: process_clock.sleep(1.0))
        assert clock.now() == 1
    assert at == [0]


def test_a_thread_that_is_woken_comes_before_the_next_instant() -> None:
    """What one thread hands to another is dealt with at that time, not after the next jump: 200 times."""
    slots = Bulkhead(1, queue=1)
    seen: list[tuple[float, float]] = []

    def ping() -> None:
        for _ in range(200):
            with slots.slot():
                process_clock.sleep(1.0)
            process_clock.sleep(0.5)

    def pong() -> None:
        for _ in range(200):
            before = clock.now()
            with slots.slot():
                seen.append((before, clock.now()))
                process_clock.sleep(1.0)
            process_clock.sleep(0.5)

    with virtual_time() as clock:
        in_threads(ping, pong)
    # Each holds the slot for 1 s and comes back 0.5 s later, so each waits 0.5 s for the other, exactly.
    assert {after - before for before, after in seen[1:]} == {0.5}


def test_work_that_comes_by_a_queue_is_done_before_time_goes_on() -> None:
    """A thread in `queue.get` is taken to wait; one that has just been given something is not."""
    box: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    at: list[float] = []

    def consumes() -> None:
        while box.get() is not None:
            at.append(clock.now())

    def produces() -> None:
        for number in range(20):
            box.put(number)
            process_clock.sleep(1.0)
        box.put(None)

    with virtual_time() as clock:
        in_threads(consumes, produces)
    assert at == list(range(20))


def test_an_abandoned_function_goes_on_when_its_time_comes() -> None:
    """It ends in virtual time as well, and is no longer counted then."""
    wait_until(lambda: not Timeout.abandoned())  # by other tests
    with virtual_time() as clock:
        with pytest.raises(TimeoutExceeded):
            Timeout(2.0).call(script(hang(5)))
        assert Timeout.abandoned() == 1
        process_clock.sleep(10)
        wait_until(lambda: not Timeout.abandoned())
        assert clock.now() == 12


def test_a_function_that_hangs_for_real_is_timed_out_after_the_patience() -> None:
    """The timeout does not wait for a socket that never answers."""
    released = threading.Event()
    began = time.monotonic()
    with virtual_time(patience=0.02) as clock:
        with pytest.raises(TimeoutExceeded):
            Timeout(3600).call(released.wait, 10)
        assert clock.now() == 3600
    released.set()
    assert 0.02 <= time.monotonic() - began < 5


def test_a_call_that_is_over_leaves_no_instant_to_jump_to() -> None:
    """The limit that it did not need is no event: time stands still while the loop waits for something real."""

    async def quick() -> None: ...

    async def main(clock: VirtualClock) -> float:
        timeout = Timeout(3600)
        await timeout.acall(quick)
        await asyncio.sleep(1)
        await asyncio.to_thread(time.sleep, 0.2)
        with pytest.raises(TimeoutExceeded):  # and the limit holds for the calls that follow
            await timeout.acall(asyncio.sleep, 5000)
        return clock.now()

    with virtual_time() as clock:
        assert asyncio.run(main(clock)) == 3601


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_and_a_thread_share_the_clock(backend: str) -> None:
    """A permit goes from a thread to a task and back, each at its instant."""
    bulkhead = Bulkhead(1, queue=5)
    log: list[tuple[float, str]] = []

    def thread() -> None:
        for _ in range(3):
            with bulkhead.slot():
                log.append((clock.now(), "thread"))
                process_clock.sleep(10)
            process_clock.sleep(1)

    async def task() -> None:
        await anyio.sleep(5)
        for _ in range(3):
            async with bulkhead.slot():
                log.append((clock.now(), "task"))
                await anyio.sleep(10)
            await anyio.sleep(1)

    with virtual_time() as clock:
        loop = threading.Thread(target=lambda: anyio.run(task, backend=backend))
        loop.start()
        thread()  # here, so that no third thread stands by
        loop.join(20)
    assert log == [(0, "thread"), (10, "task"), (20, "thread"), (30, "task"), (40, "thread"), (50, "task")]


def test_time_does_not_jump_over_a_wait_that_has_ended_even_where_its_owner_asks() -> None:
    """trio asks whether time may jump wherever no task can run, and its queue may have filled a moment ago."""
    clock = VirtualClock(patience=0.01, stuck_after=60)
    has_happened = True
    wait = clocks.Wait(10.0, lambda: has_happened)
    clock.enter(wait)
    for _ in range(50):  # the other threads of this process are seen to stand still after some looks
        assert not clock.jump(wait)
        time.sleep(wait.pause)
        wait.looks += 1
    has_happened = False
    end = time.monotonic() + 10
    while not clock.jump(wait) and time.monotonic() < end:
        time.sleep(wait.pause)
    assert clock.now() == 10.0


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_task_that_was_woken_by_a_thread_works_while_time_stands_still(backend: str) -> None:
    """Its loop no longer waits, though a later timer is set in it."""
    bulkhead = Bulkhead(1, queue=1)
    at: list[float] = []

    async def task() -> None:
        with anyio.fail_after(1000):
            async with bulkhead.slot():
                until = time.monotonic() + 0.05
                while time.monotonic() < until:
                    sum(range(100))
                at.append(clock.now())

    with virtual_time() as clock:
        with bulkhead.slot():
            loop = threading.Thread(target=lambda: anyio.run(task, backend=backend))
            loop.start()
            while bulkhead.stats().queued == 0:
                time.sleep(0.001)
            process_clock.sleep(10)
        process_clock.sleep(100)
        loop.join(20)
    assert at == [10]


def test_time_never_goes_back() -> None:
    """A thread whose instant has long passed is woken before time goes on from where it is."""
    woken: list[float] = []

    def sleeps() -> None:
        process_clock.sleep(10)
        woken.append(clock.now())

    with virtual_time() as clock:
        thread = threading.Thread(target=sleeps)
        thread.start()
        while not clock.sleeps:
            time.sleep(0.001)
        time.sleep(0.01)
        clock.advance(20)
        process_clock.sleep(5)
        assert clock.now() == 25
        thread.join(5)
    assert woken == [20]


def test_a_guest_run_of_trio_needs_no_thread_to_wait_in() -> None:
    """One that is busy with short waits never stands still, and the other threads would never see all others wait."""
    todo: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    outcomes: list[Any] = []
    waits_in_threads: list[int] = []

    def from_a_thread(function: Callable[[], object]) -> None:
        if virtual:
            waits_in_threads.append(1)
        todo.put(function)

    virtual: list[VirtualClock] = []

    async def main() -> None:
        with virtual_time() as clock:
            virtual.append(clock)
            fetch = script(Boom(), "fine")
            retry = Retry(on=Boom, backoff=[100])
            assert await trio.to_thread.run_sync(retry.call, fetch) == "fine"
            await trio.sleep(100)
            assert clock.now() == 200
            virtual.clear()

    trio.lowlevel.start_guest_run(
        main,
        run_sync_soon_threadsafe=from_a_thread,
        run_sync_soon_not_threadsafe=todo.put,
        done_callback=outcomes.append,
    )
    while not outcomes:
        todo.get(timeout=20)()
    outcomes[0].unwrap()
    assert not waits_in_threads


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_call_in_a_worker_thread_of_the_loop_is_waited_for(backend: str) -> None:
    """`anyio.to_thread` is real work: no timer overtakes it while it computes."""

    def works() -> float:
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            sum(range(100))
        return process_clock.now()

    async def main() -> tuple[float, float]:
        with anyio.fail_after(3600):
            return await anyio.to_thread.run_sync(works), process_clock.now()

    with virtual_time(patience=0.05):
        assert anyio.run(main, backend=backend) == (0, 0)


def test_a_wait_for_what_is_there_already_takes_no_time() -> None:
    """A lock that is free is taken at once, with a limit and without one; a held one only until the limit."""
    with virtual_time() as clock:
        free, held = threading.Lock(), threading.Lock()
        held.acquire()
        assert process_clock.wait(free, 5.0)
        assert free.locked()
        assert clock.now() == 0
        assert not process_clock.wait(held, 5.0)
        held.release()
        assert process_clock.wait(held, None)
        assert clock.now() == 5


def test_a_thread_that_python_did_not_start_and_that_has_ended_holds_up_no_time() -> None:
    """`threading` goes on listing some of these."""
    ended = threading.Event()

    def run() -> None:
        threading.current_thread()  # from here on it is listed
        ended.set()

    with virtual_time() as clock:
        _thread.start_new_thread(run, ())
        ended.wait(5)
        process_clock.sleep(10)
        assert clock.now() == 10


def test_nothing_is_known_of_threads_where_the_kernel_does_not_say() -> None:
    """Then the instruction alone shows whether a thread waits."""
    thread = threading.Thread()
    thread._native_id = 0  # type: ignore[attr-defined]
    assert clocks._seconds_run(thread) == 0
    assert not clocks._is_runnable(thread)


def test_tasks_that_wait_until_all_others_wait_come_before_the_next_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time does not jump while there is something to do for trio."""
    monkeypatch.setattr(VirtualClock, "_busy", lambda clock, mine: [])  # threads of other tests do
    log: list[tuple[float, str]] = []

    async def main() -> None:
        async def sleeps() -> None:
            await trio.sleep(10)
            log.append((clock.now(), "slept"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleeps)
            await trio.testing.wait_all_tasks_blocked()
            log.append((clock.now(), "all wait"))

    with virtual_time() as clock:
        trio.run(main)
    assert log == [(0, "all wait"), (10, "slept")]


def test_a_loop_that_has_a_timer_before_it_first_runs_keeps_its_time() -> None:
    """The timer was set on the loop's own clock, so that clock goes on, and the timer has as long to go as before."""
    loop = asyncio.new_event_loop()
    loop.call_later(10, loop.stop)
    with virtual_time() as clock:
        loop.run_forever()
        assert clock.now() == pytest.approx(10, abs=0.5)
    loop.close()


def test_nothing_of_ours_stays_in_a_run_of_trio() -> None:
    """After the block each step of a task costs what it cost before."""

    async def main() -> None:
        with virtual_time():
            await trio.sleep(10)
        assert not trio._core._run.GLOBAL_RUN_CONTEXT.runner.instruments["_all"]

    trio.run(main)
