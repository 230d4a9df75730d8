"""Waiters of tasks: woken directly by a task of the same loop, and otherwise through the loop's socket."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest
import trio

from resilience import Bulkhead
from resilience.clock import clock
from resilience.runtimes.base import Waiter
from resilience.runtimes.tasks import TASKS
from tests.conftest import Script, World
from tests.contention.beside import PATIENCE
from tests.functions import raising


@pytest.fixture
def posted(tasks_world: World, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Collect the callbacks that are posted to a loop from outside."""
    posts: list[object] = []
    kind, name = {
        "asyncio": (asyncio.BaseEventLoop, "call_soon_threadsafe"),
        "trio": (trio.lowlevel.TrioToken, "run_sync_soon"),
    }[tasks_world.name]
    post: Any = getattr(kind, name)

    def recording(self: Any, function: Any, *args: Any, **options: Any) -> Any:
        posts.append(function)
        return post(self, function, *args, **options)

    monkeypatch.setattr(kind, name, recording)
    return posts


async def waiting(group: anyio.abc.TaskGroup, results: list[Any], seconds: float = PATIENCE) -> Waiter:
    """Return the waiter of a waiting task."""
    waiters: list[Waiter] = []

    async def wait() -> None:
        waiters.append(TASKS.waiter())
        results.append(await waiters[0].wait(clock.now() + seconds, None))

    group.start_soon(wait)
    while not waiters:
        await anyio.lowlevel.checkpoint()
    return waiters[0]


async def test_a_task_of_the_same_loop_wakes_a_waiter_by_no_socket(tasks_world: World, posted: list[object]) -> None:
    """A write to the socket takes longer than the rest of a wait."""
    results: list[Any] = []
    async with anyio.create_task_group() as group:
        (await waiting(group, results)).wake()
        assert posted == []
    assert results == [True]


async def test_another_thread_wakes_a_waiter_through_the_socket(tasks_world: World, posted: list[object]) -> None:
    """Even from a task of another loop."""
    results: list[Any] = []
    async with anyio.create_task_group() as group:
        waiter = await waiting(group, results)

        async def wake() -> None:
            waiter.wake()

        thread = threading.Thread(target=anyio.run, args=[wake], kwargs={"backend": tasks_world.name})
        thread.start()
    thread.join(PATIENCE)
    assert results == [True]
    assert posted


async def test_waking_after_the_wait_after_a_cancellation_or_before_the_wait_does_no_harm(tasks_world: World) -> None:
    results: list[Any] = []
    async with anyio.create_task_group() as group:
        late = await waiting(group, results, 0.001)
        while not results:
            await anyio.sleep(0.001)
        late.wake()
    assert results == [False]
    async with anyio.create_task_group() as group:
        cancelled = await waiting(group, results)
        group.cancel_scope.cancel()
        cancelled.wake()
    early = TASKS.waiter()
    assert early.wake()
    assert await early.wait(clock.now() + PATIENCE, None)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_waiter_of_an_ended_event_loop_cannot_be_woken(backend: str) -> None:
    async def make() -> Waiter:
        return TASKS.waiter()

    waiter = anyio.run(make, backend=backend)
    assert [waiter.wake(), waiter.is_alive()] == [False, False]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_waiter_is_not_given_up_because_no_stack_is_left_to_wake_it(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `RecursionError` is a `RuntimeError`, but not the one of an event loop that has ended."""

    async def wake() -> None:
        waiter = TASKS.waiter()
        with monkeypatch.context() as patched, ThreadPoolExecutor() as threads:
            patched.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", raising(RecursionError))
            patched.setattr(trio.lowlevel.TrioToken, "run_sync_soon", raising(RecursionError))
            assert isinstance(threads.submit(waiter.wake).exception(), RecursionError)

    anyio.run(wake, backend=backend)


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal there")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_signal_handler_wakes_a_loop_that_is_polling_its_sockets(backend: str) -> None:
    """It runs in the thread of the loop, but only the socket ends the poll.

    The same holds for a finalizer that runs just before the poll.
    """
    bulkhead = Bulkhead(1, queue=1)
    slot = bulkhead.slot()
    slot.__enter__()

    def release(*_: object) -> None:
        slot.__exit__(None, None, None)

    async def main() -> Any:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with anyio.move_on_after(5):
            return await bulkhead.aexecute(Script("fine").function())

    before = signal.signal(signal.SIGALRM, release)
    try:
        began = clock.now()
        assert anyio.run(main, backend=backend) == "fine"
        assert clock.now() - began < 4
    finally:
        signal.signal(signal.SIGALRM, before)
