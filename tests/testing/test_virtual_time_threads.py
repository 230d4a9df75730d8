"""Virtual time in threads: it does not pass while one of them works."""

from __future__ import annotations

import _thread
import asyncio
import os
import queue
import socket
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
from resilience.testing import VirtualClock, clocks, hang, script, standstills, virtual_time
from tests.callers import in_threads, wait_until
from tests.conftest import Boom, Virtual, World, no_collector
from tests.versions import needs


def test_waiting_threads_wake_in_the_order_of_their_instants() -> None:
    """The clock jumps when all of them wait, also if the main thread joins them."""
    log: list[tuple[float, str]] = []

    def retrying(name: str, *delays: float) -> Callable[[], None]:
        def run() -> None:
            Retry(len(delays) + 1, on=Boom, backoff=delays).call(script(*[Boom() for _ in delays], name))
            log.append((clock.now(), name))

        return run

    with virtual_time() as clock:
        in_threads(retrying("slow", 100, 300), retrying("quick", 50), retrying("middle", 10, 20, 100))
    assert log == [(50, "quick"), (130, "middle"), (400, "slow")]


def test_the_objects_of_a_waiting_thread_are_freed_when_it_ends() -> None:
    """The clock reads the frames of threads, and keeps none of them."""
    references: list[weakref.ref[Boom]] = []

    def waits() -> None:
        held = Boom()
        references.append(weakref.ref(held))
        process_clock.sleep(1.0)

    with no_collector(), virtual_time():
        in_threads(waits, waits)
        assert [reference() for reference in references] == [None, None]


def test_the_objects_of_an_earlier_frame_are_freed_at_the_next_check() -> None:
    """Here the frame waited for a real lock."""

    def wait_in_real_time() -> weakref.ref[Boom]:
        held = Boom()
        in_threads(lambda: process_clock.sleep(1.0))
        return weakref.ref(held)

    with no_collector(), virtual_time():
        reference = wait_in_real_time()
        process_clock.sleep(1.0)
        assert reference() is None


def test_the_clock_stands_still_while_a_thread_works() -> None:
    """A wait of a second does not overtake a thread that computes for much longer than the patience."""
    at: list[float] = []

    def works() -> None:
        for _ in range(10_000_000):  # always at the same instruction, as far as the clock can see
            pass
        at.append(clock.now())

    with virtual_time(patience=0.05, stuck_after=60) as clock:
        in_threads(works, lambda: process_clock.sleep(1.0))
        assert clock.now() == 1
    assert at == [0]


def test_a_woken_thread_runs_before_the_next_instant() -> None:
    """A permit is taken at the time at which it was released, not after the next jump: 60 times."""
    slots = Bulkhead(1, queue=1)
    seen: list[tuple[float, float]] = []

    def ping() -> None:
        for _ in range(60):
            with slots.slot():
                process_clock.sleep(1.0)
            process_clock.sleep(0.5)

    def pong() -> None:
        for _ in range(60):
            before = clock.now()
            with slots.slot():
                seen.append((before, clock.now()))
                process_clock.sleep(1.0)
            process_clock.sleep(0.5)

    with virtual_time() as clock:
        in_threads(ping, pong)
    # Each holds the slot for 1 s and comes back 0.5 s later, so each waits 0.5 s for the other, exactly.
    assert {after - before for before, after in seen[1:]} == {0.5}


def test_work_from_a_queue_is_done_before_time_passes() -> None:
    """A thread in `queue.get` counts as waiting, unless it has just been given an item."""
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


def test_an_abandoned_function_ends_in_virtual_time() -> None:
    """It is no longer counted then."""
    wait_until(lambda: not Timeout.abandoned())  # by other tests
    with virtual_time() as clock:
        with pytest.raises(TimeoutExceeded):
            Timeout(2.0).call(script(hang(5)))
        assert Timeout.abandoned() == 1
        process_clock.sleep(10)
        wait_until(lambda: not Timeout.abandoned())
        assert clock.now() == 12


def test_a_function_that_hangs_for_real_is_timed_out_after_the_patience() -> None:
    """The timeout does not wait for a socket that never answers, and is not stuck, however long both limits are."""
    released = threading.Event()
    began = time.monotonic()
    with virtual_time(patience=0.4, stuck_after=0.1) as clock:
        with pytest.raises(TimeoutExceeded):
            Timeout(3600).call(released.wait, 10)
        assert clock.now() == 3600
    released.set()
    assert 0.4 <= time.monotonic() - began < 5


async def test_a_finished_call_leaves_no_instant_to_jump_to(in_virtual_asyncio: Virtual) -> None:
    """Its unused limit is no event: time does not pass while the loop waits for something real."""

    async def quick() -> None: ...

    timeout = Timeout(3600)
    await timeout.acall(quick)
    await asyncio.sleep(1)
    await asyncio.to_thread(time.sleep, 0.2)
    with pytest.raises(TimeoutExceeded):  # and the limit holds for the calls that follow
        await timeout.acall(asyncio.sleep, 5000)
    assert in_virtual_asyncio.now() == 3601


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_and_a_thread_share_the_clock(backend: str) -> None:
    """A permit passes from a thread to a task and back, each time at its instant."""
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
        thread()  # here, so that there is no third thread
        loop.join(20)
    assert log == [(0, "thread"), (10, "task"), (20, "thread"), (30, "task"), (40, "thread"), (50, "task")]


@needs("anyio>=4.7")  # `wait_readable`
@pytest.mark.parametrize(
    ("backend", "connected"), [("asyncio", socket.socketpair), ("trio", socket.socketpair), ("asyncio", os.pipe)]
)
def test_a_loop_waits_for_other_processes_before_time_jumps(backend: str, connected: Callable[[], Any]) -> None:
    """For as long as the patience each time: what it has sent may still be answered."""
    ours, theirs = (it if isinstance(it, int) else it.detach() for it in connected())

    def answers() -> None:
        for _ in range(3):
            time.sleep(0.05)
            os.write(theirs, b"x")

    async def asks(number: int) -> None:
        for _ in range(number):
            await anyio.wait_readable(ours)
            os.read(ours, 1)

    server = threading.Thread(target=answers)
    with virtual_time(patience=20, ignore=[server]) as clock:
        server.start()
        anyio.run(Timeout(60).acall, asks, 3, backend=backend)
        assert clock.now() == 0
    server.join()
    with virtual_time(patience=0.1) as clock:
        with pytest.raises(TimeoutExceeded):
            anyio.run(Timeout(60).acall, asks, 1, backend=backend)
        assert clock.now() == 60
    os.close(ours)
    os.close(theirs)


def test_time_jumps_although_the_real_clock_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is by freezegun. A thread that waits for something real counts as waiting all the same."""
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait, args=(10,))
    thread.start()
    with virtual_time(patience=0.01) as clock:
        monkeypatch.setattr(time, "monotonic", lambda: 0.0)
        process_clock.sleep(60)
        assert not may_end.is_set()
        may_end.set()
        assert clock.now() == 60
    thread.join()


@needs("anyio>=4.7")  # `wait_readable`
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_does_not_wait_for_a_server_of_its_own(backend: str) -> None:
    """What that has sent is there at once."""
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs = listener.accept()[0]

    async def serves() -> None:
        while True:
            await anyio.wait_readable(theirs)
            theirs.send(theirs.recv(1))
            await anyio.sleep(5)

    async def asks() -> None:
        ours.send(b"x")
        await anyio.wait_readable(ours)
        ours.recv(1)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.wait_readable, listener)
            group.start_soon(serves)
            for _ in range(10):
                await Timeout(60).acall(asks)
                await Timeout(60).acall(asks)  # while the server sleeps
                await anyio.sleep(10)  # until after the server has begun to wait
            group.cancel_scope.cancel()

    with listener, ours, theirs, virtual_time(patience=1.0) as clock:
        began = time.monotonic()
        anyio.run(main, backend=backend)
        assert clock.now() == 150
        assert time.monotonic() - began < 10  # not 1 s for each of the twenty calls


def test_a_wait_goes_on_after_another_wait_of_its_thread() -> None:
    """As a signal handler makes one."""
    calls: list[float] = []

    def interrupted() -> bool:
        calls.append(clock.now())
        if len(calls) == 2:
            clock.sleep(5)
        return False

    with virtual_time() as clock:
        assert not clock.wait_until(10, interrupted, time.sleep)
        assert (clock.now(), calls[:3]) == (10, [0, 0, 5])


def test_a_wait_of_trio_goes_on_after_another_wait_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler may also run while trio waits for its next deadline."""
    slept: list[float] = []
    with virtual_time() as clock:
        jump = clock.jump

        def interrupted(wait: clocks.Wait) -> bool:
            if not slept:
                slept.append(5)
                clock.sleep(5)
            return jump(wait)

        monkeypatch.setattr(clock, "jump", interrupted)
        trio.run(trio.sleep, 10)
        assert (clock.now(), slept) == (10, [5])


def test_time_does_not_jump_over_a_wait_that_has_ended() -> None:
    """trio asks for a jump when no task can run, and its queue may have been filled a moment ago."""
    clock = VirtualClock(patience=0.01, stuck_after=60)
    has_happened = True
    wait = clocks.Wait(10.0, lambda: has_happened)
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
def test_time_does_not_pass_while_a_task_woken_by_a_thread_works(backend: str) -> None:
    """Its loop no longer waits, although it has a later timer."""
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
    """A thread whose instant has long passed is woken at the present time."""
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


def test_a_guest_run_of_trio_waits_in_no_thread() -> None:
    """A thread that is busy with short waits would never count as waiting, and time would not pass."""
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
    """`anyio.to_thread` is real work: no timer overtakes it while it computes. (`Virtual` ignores a reused worker.)"""

    def works() -> float:
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            sum(range(100))
        return process_clock.now()

    async def main() -> tuple[float, float]:
        with anyio.fail_after(3600):
            return await anyio.to_thread.run_sync(works), process_clock.now()

    with virtual_time():
        assert anyio.run(main, backend=backend) == (0, 0)


def test_a_wait_for_a_free_lock_takes_no_time() -> None:
    """With a limit and without one; a wait for a held one ends at the limit."""
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


def test_a_foreign_thread_that_has_ended_does_not_stop_time() -> None:
    """`threading` still lists some of the threads that Python did not start."""
    ended = threading.Event()

    def run() -> None:
        threading.current_thread()  # from here on it is listed
        ended.set()

    with virtual_time() as clock:
        _thread.start_new_thread(run, ())
        ended.wait(5)
        process_clock.sleep(10)
        assert clock.now() == 10


def test_without_data_from_the_kernel_a_thread_is_not_counted_as_busy() -> None:
    """Then only its instruction shows whether a thread waits."""
    thread = threading.Thread()
    thread._native_id = 0  # type: ignore[attr-defined]
    assert standstills._seconds_run(thread) == 0
    assert not standstills._is_runnable(thread)


def test_wait_all_tasks_blocked_returns_before_the_next_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time does not jump while trio has something to do."""
    monkeypatch.setattr(VirtualClock, "_busy", lambda clock, mine: [])  # threads of other tests may be busy
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


def test_a_loop_with_a_timer_before_its_first_run_keeps_its_time() -> None:
    """The timer was set on the loop's own clock, and has as much time left as before."""
    loop = asyncio.new_event_loop()
    loop.call_later(10, loop.stop)
    with virtual_time() as clock:
        loop.run_forever()
        assert clock.now() == pytest.approx(10, abs=0.5)
    loop.close()


def test_a_timer_before_the_first_run_of_a_new_loop_is_exact() -> None:
    with virtual_time() as clock:
        loop = asyncio.new_event_loop()
        loop.call_later(0.3, loop.stop)
        loop.run_forever()
        assert clock.now() == 0.3
    loop.close()


async def test_no_instrument_stays_in_a_run_of_trio_after_the_block(in_trio: World) -> None:
    """It would slow each step of a task."""
    with virtual_time():
        await trio.sleep(10)
    assert not trio._core._run.GLOBAL_RUN_CONTEXT.runner.instruments["_all"]
