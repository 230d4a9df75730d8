"""Virtual time that cannot pass: the error, where it is raised, and how to ignore a thread."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import anyio
import pytest
import trio

from resilience import CircuitBreaker, Fallback, Policy, Retry, Timeout
from resilience.clock import clock as process_clock
from resilience.errors import Misuse
from resilience.testing import hang, script, virtual_time
from resilience.testing.stuck import stuck
from tests.callers import in_threads, wait_until
from tests.versions import needs

#: Long enough that a polling thread does not count as waiting on a busy machine.
PATIENCE = 0.2


@contextmanager
def polling(name: str = "poller") -> Iterator[threading.Thread]:
    """A thread that polls every five milliseconds, at two instructions in turn, during the block."""
    ended = threading.Event()

    def poll() -> None:
        while not ended.is_set():
            time.sleep(0.005)
            time.sleep(0.005)

    thread = threading.Thread(target=poll, name=name)
    thread.start()
    try:
        yield thread
    finally:
        ended.set()
        thread.join(5)


@contextmanager
def idle_server() -> Iterator[threading.Thread]:
    """A server of the standard library without clients: `serve_forever` polls every half second."""
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, name="http-server")
    thread.start()
    try:
        yield thread
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


async def sleeps_in(backend: str) -> None:
    await (asyncio.sleep(60) if backend == "asyncio" else trio.sleep(60))


def sleeps_in_trio_within_nurseries() -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, 60)
            nursery.start_soon(trio.sleep_forever)

    try:
        trio.run(main)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


WAITS: dict[str, Callable[[], object]] = {
    "thread": lambda: process_clock.sleep(60),
    "timeout": lambda: Timeout(0.5).call(script(hang(1))),
    "asyncio": lambda: asyncio.run(sleeps_in("asyncio")),
    "trio": lambda: trio.run(sleeps_in, "trio"),
    "trio's nurseries": sleeps_in_trio_within_nurseries,
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_polling_thread_makes_the_waiting_code_fail(wait: str) -> None:
    """After some real seconds. The error has the name of the thread, its position, and what to write."""
    began = time.monotonic()
    with polling(), pytest.raises(RuntimeError) as caught, virtual_time(patience=PATIENCE, stuck_after=0.2):
        WAITS[wait]()
    assert PATIENCE + 0.2 <= time.monotonic() - began < 10
    message = str(caught.value)
    assert "'poller'" in message
    assert "test_virtual_time_stuck.py" in message
    assert "in poll" in message
    assert "virtual_time(ignore=['poller'])" in message


def test_an_idle_http_server_makes_a_test_fail_with_a_long_patience() -> None:
    """The patience is longer than the interval of its polls, and the limit is added to it: 1.1 seconds here."""
    with (
        idle_server(),
        pytest.raises(RuntimeError, match=r"'http-server'.*socketserver\.py"),
        virtual_time(patience=0.6, stuck_after=0.5),
    ):
        process_clock.sleep(60)


@needs("anyio>=4.7")  # `wait_readable`
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_event_loop_with_constant_traffic_can_be_ignored(backend: str) -> None:
    """Like a thread that polls. The end of its waits is no progress."""
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def feeds() -> None:
        while not ended.wait(0.005):
            theirs.send(b"x")
        theirs.send(b"x")  # ends the reader's wait

    async def reads() -> None:
        with anyio.move_on_after(10**6):
            while not ended.is_set():
                await anyio.wait_readable(ours)
                ours.recv(1)

    feeder = threading.Thread(target=feeds)
    reader = threading.Thread(target=anyio.run, args=(reads,), kwargs={"backend": backend}, name="reader")
    with ours, theirs:
        try:
            with virtual_time(patience=1.0, stuck_after=0.2, ignore=[feeder]) as clock:
                feeder.start()
                reader.start()
                wait_until(lambda: len(clock._waits) == 1)
                with pytest.raises(RuntimeError, match="'reader'"):
                    process_clock.sleep(60)
                with virtual_time(ignore=["reader"]):
                    process_clock.sleep(60)
                assert clock.now() == 60
        finally:
            ended.set()
            feeder.join(5)
            reader.join(5)


@pytest.mark.parametrize("pattern", ["poller-7", "poller-*", "*-7"])
def test_a_thread_is_ignored_by_its_name(pattern: str) -> None:
    """`*` matches anything, as the numbers in names are not known beforehand."""
    with polling("poller-7"), virtual_time(ignore=[pattern], stuck_after=5) as clock:
        process_clock.sleep(60)
        assert clock.now() == 60


def test_a_pattern_matches_the_whole_name() -> None:
    with (
        polling("poller-7"),
        pytest.raises(RuntimeError, match="poller-7"),
        virtual_time(patience=PATIENCE, ignore=["poller"], stuck_after=0.2),
    ):
        process_clock.sleep(60)


def test_a_nested_block_ignores_threads_while_it_runs() -> None:
    """So a test can use the fixture for pytest, and ignore its own threads."""
    with polling() as thread, virtual_time(patience=PATIENCE, stuck_after=0.2) as clock:
        with virtual_time(ignore=[thread]):
            process_clock.sleep(60)
        assert clock.now() == 60
        with pytest.raises(RuntimeError, match="poller"):
            process_clock.sleep(60)


def test_no_policy_treats_the_error_as_an_outcome() -> None:
    """It is an error of the test: not retried, not counted, not replaced."""
    breaker = CircuitBreaker(1, on=Exception)
    inner = Retry(on=OSError, backoff=[60])
    with (
        polling(),
        pytest.raises(RuntimeError, match="poller") as caught,
        virtual_time(patience=PATIENCE, stuck_after=0.2),
    ):
        Policy.wrap(Fallback("no", on=Exception), Retry(on=Exception), breaker, inner).call(script(OSError(), ...))
    assert isinstance(caught.value, Misuse)
    assert breaker.state.value == "closed"


def test_passing_time_is_progress() -> None:
    """Several threads hold up the clock one after another, together for longer than the limit."""

    def works() -> None:
        for _ in range(15):
            time.sleep(0.005)  # within the patience, so the thread works
            time.sleep(0.005)

    with virtual_time(patience=0.2, stuck_after=1.0) as clock:
        for _ in range(9):
            threading.Thread(target=works).start()
            process_clock.sleep(60)
    assert clock.now() == 540


def test_a_busy_thread_is_waited_for_if_other_threads_make_progress() -> None:
    """The end of a wait is progress, too."""
    lock = threading.Lock()
    lock.acquire()
    at: list[float] = []

    def works() -> None:
        while not at:
            time.sleep(0.005)  # within the patience, so the thread works
            time.sleep(0.005)
            if lock.locked():
                lock.release()

    def is_woken_repeatedly() -> None:
        try:
            for _ in range(130):
                assert process_clock.wait(lock, 3600)
        finally:
            at.append(clock.now())  # otherwise the other thread would hold up the clock in all later tests, too

    with virtual_time(patience=0.2, stuck_after=1.0) as clock:
        in_threads(works, is_woken_repeatedly)
    assert at == [0]


def test_a_wait_without_a_deadline_is_not_stuck() -> None:
    """There is no instant to jump to."""
    lock = threading.Lock()
    lock.acquire()
    releases = threading.Timer(1.0, lock.release)
    with polling(), virtual_time(patience=0.05, stuck_after=0.2):
        releases.start()
        assert process_clock.wait(lock, None)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"ignore": "poller"}, "ignore.*list"),
        ({"ignore": [7]}, "ignore.*7"),
        ({"ignore": threading.Thread()}, "ignore.*list"),
        *(({"stuck_after": seconds}, "stuck_after") for seconds in (0, -1, float("nan"), "5")),
        ({"patience": 0}, "patience must be more than zero"),
    ],
)
def test_wrong_arguments_of_virtual_time_are_refused(settings: dict[str, Any], error: str) -> None:
    """A single name would be a list of letters, and a limit of zero would fail at the first check."""
    with pytest.raises((ValueError, TypeError), match=error), virtual_time(**settings):
        pass


def test_of_many_threads_a_few_are_named_and_the_others_counted() -> None:
    """A thread that has not begun has no position in the code."""
    threads = [threading.Thread(name=f"worker {number}") for number in range(50)]
    message = str(stuck(threads, 3.0, 1.5))
    assert "thread 'worker 0' is about to begin or to end" in message
    named = message.count("is about to begin")
    assert 0 < named < 50
    assert f"and {50 - named} more" in message
    assert "stuck_after=3" in message


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of objects that the run leaves behind
def test_a_trio_run_with_an_uninterruptible_main_task_breaks_down() -> None:
    """For example if it waits for a thread of trio's own."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, 60)
            await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)

    with polling(), pytest.raises(trio.TrioInternalError) as caught, virtual_time(patience=PATIENCE, stuck_after=0.2):
        trio.run(main)
    assert "poller" in str(caught.value.__cause__)
    del caught
    gc.collect()
