"""Bulkhead: waiters that leave the queue, and permits that must not be lost with them."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import trio

from resilience import Bulkhead, BulkheadFull, Context, Timeout, TimeoutExceeded
from resilience.clock import clock as process_clock
from resilience.runtimes.blocking import BlockingWaiter
from resilience.runtimes.tasks import AsyncioWaiter, TrioWaiter
from tests.callers import fail_first_wake, in_threads, wait_until
from tests.conftest import Script, World
from tests.contention.beside import PATIENCE, beside
from tests.functions import raising
from tests.policies.bulkheads import LONG, SHORT, calling, counts


def test_a_permit_granted_at_the_end_of_the_wait_is_used(threads: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was granted after the wait ended, but before the refusal."""
    bulkhead = Bulkhead(1, queue=1, max_wait=LONG)
    slot = bulkhead.slot()
    slot.__enter__()

    def too_late(lock: object, seconds: float | None) -> bool:
        slot.__exit__(None, None, None)
        return False

    monkeypatch.setattr(process_clock, "wait", too_late)
    assert bulkhead.execute(lambda ctx: "fine") == "fine"
    assert counts(bulkhead) == (1, 0, 0, 0)


@pytest.mark.parametrize("limit", [{"max_wait": 0.2}, {"timeout": 0.2}, {"budget": 0.2}])
async def test_a_grant_at_the_end_of_the_wait_is_not_lost(tasks_world: World, limit: dict[str, float]) -> None:
    """The event loop was busy, so that the grant and the timer come together. Either may win."""
    bulkhead = Bulkhead(1, queue=1, max_wait=limit.get("max_wait"))
    pipeline = Timeout(limit["timeout"]).wrap(bulkhead) if "timeout" in limit else bulkhead
    async with beside(tasks_world) as group:
        slot = bulkhead.slot()
        await slot.__aenter__()
        waiting = await group.queued(bulkhead, pipeline, Context(timeout=limit.get("budget")))
        waiting.let_go()
        time.sleep(0.2)
        await slot.__aexit__(None, None, None)
        outcome = await waiting.result()
        assert outcome == "fine" or isinstance(outcome, TimeoutExceeded)
    assert counts(bulkhead) == (1, 0, 0, 0)


@pytest.mark.parametrize("cancelled_first", [True, False])
@pytest.mark.parametrize("limit", ["max_wait", "timeout"])
async def test_a_cancellation_at_the_end_is_not_lost(in_asyncio: World, cancelled_first: bool, limit: str) -> None:
    bulkhead = Bulkhead(1, queue=1, max_wait=SHORT if limit == "max_wait" else None)
    pipeline = bulkhead if limit == "max_wait" else Timeout(SHORT).wrap(bulkhead)
    async with bulkhead.slot():
        task = asyncio.ensure_future(pipeline.aexecute(Script("fine").function()))
        await asyncio.sleep(SHORT / 4)
        if cancelled_first:
            task.cancel()
            time.sleep(SHORT)
        else:
            time.sleep(SHORT)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert counts(bulkhead) == (1, 1, 0, 0)


async def test_a_call_that_is_cancelled_just_after_it_got_its_permit_does_not_begin(in_trio: World) -> None:
    """Its task is woken by the permit, and runs after the cancellation."""
    bulkhead, scope, script = Bulkhead(1, queue=1), anyio.CancelScope(), Script("fine")

    async def call() -> None:
        with scope:
            await in_trio.execute(bulkhead, script.function())

    slot = bulkhead.slot()
    await slot.__aenter__()
    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        await slot.__aexit__(None, None, None)
        scope.cancel()
    assert scope.cancelled_caught
    assert script.calls == 0
    assert counts(bulkhead) == (1, 0, 0, 0)


def test_a_waiter_of_a_closed_loop_takes_no_permit() -> None:
    """The permit goes to the next call in the queue."""
    bulkhead = Bulkhead(1, queue=2)
    served: list[str] = []
    with bulkhead.slot():
        coroutine = _left_waiting(bulkhead)
        thread = calling(bulkhead, served, "next")
        wait_until(lambda: bulkhead.stats().queued == 2)
    thread.join(PATIENCE)
    assert served == ["next"]
    assert counts(bulkhead) == (1, 0, 0, 0)
    coroutine.close()
    assert counts(bulkhead) == (1, 0, 0, 0)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_waiter_of_an_ended_loop_makes_room_for_a_new_call_at_the_end(backend: str) -> None:
    """The new call joins the end of the full queue, and is served after those that wait already."""
    bulkhead = Bulkhead(1, queue=2)
    served: list[str] = []
    with bulkhead.slot():
        coroutine = _left_waiting(bulkhead, backend)
        second = calling(bulkhead, served, "second")
        wait_until(lambda: bulkhead.stats().queued == 2)
        third = calling(bulkhead, served, "third")
        time.sleep(SHORT)  # until it has joined: the length of the queue stays the same
        assert counts(bulkhead) == (1, 1, 2, 0)
    second.join(PATIENCE)
    third.join(PATIENCE)
    assert served == ["second", "third"]
    coroutine.close()
    assert counts(bulkhead) == (1, 0, 0, 0)


def _held(bulkhead: Bulkhead, served: list[str]) -> tuple[Any, threading.Thread]:
    """Return an entered slot that holds the only permit, and the thread of a call, `second`, that waits for it."""
    slot = bulkhead.slot()
    slot.__enter__()
    thread = calling(bulkhead, served, "second")
    wait_until(lambda: bulkhead.stats().queued == 1)
    return slot, thread


def test_a_waiter_is_not_given_up_although_no_stack_is_left_to_wake_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `RecursionError` is a `RuntimeError`, but not the one of a closed loop: the release tries again."""
    bulkhead, served = Bulkhead(1, queue=1), list[str]()
    slot, thread = _held(bulkhead, served)
    fail_first_wake(monkeypatch)
    with pytest.raises(RecursionError):
        slot.__exit__(None, None, None)
    thread.join(PATIENCE)
    assert served == ["second"]
    assert counts(bulkhead) == (1, 0, 0, 0)


def test_a_later_caller_wakes_the_waiter_that_a_release_could_not_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the only permit, so no other caller would ever release one."""
    bulkhead, served = Bulkhead(1, queue=2), list[str]()
    slot, second = _held(bulkhead, served)
    with monkeypatch.context() as patched, pytest.raises(RecursionError):
        patched.setattr(BlockingWaiter, "wake", raising(RecursionError))
        slot.__exit__(None, None, None)
    assert served == []
    third = calling(bulkhead, served, "third")
    second.join(PATIENCE)
    third.join(PATIENCE)
    assert served == ["second", "third"]
    assert counts(bulkhead) == (1, 0, 0, 0)


def test_a_waiter_of_trio_is_not_given_up_although_no_stack_is_left_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new call fails with its `RecursionError`; the waiter keeps its place in the full queue, and is served."""
    bulkhead = Bulkhead(1, queue=1)

    async def main() -> None:
        with anyio.fail_after(PATIENCE):
            await serve()

    async def serve() -> None:
        async with anyio.create_task_group() as group:
            with bulkhead.slot():
                group.start_soon(bulkhead.acall, anyio.sleep, 0)
                while not bulkhead.stats().queued:
                    await anyio.sleep(0)
                with monkeypatch.context() as patched, pytest.raises(RecursionError):
                    patched.setattr(trio.lowlevel.TrioToken, "run_sync_soon", raising(RecursionError))
                    await bulkhead.acall(anyio.sleep, 0)
                assert counts(bulkhead)[:3] == (1, 1, 1)

    anyio.run(main, backend="trio")
    assert counts(bulkhead)[:3] == (1, 0, 0)


def test_a_waiter_that_was_served_is_not_removed_as_one_of_a_closed_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is served, and its loop is closed, while a new call looks for such waiters: no second permit is released."""
    bulkhead = Bulkhead(1, queue=1)
    slot = bulkhead.slot()
    slot.__enter__()
    thread = threading.Thread(
        target=lambda: asyncio.run(bulkhead.aexecute(Script("fine").function())),  # type: ignore[arg-type]
        daemon=True,
    )
    thread.start()
    wait_until(lambda: bulkhead.stats().queued == 1)
    is_alive = AsyncioWaiter.is_alive

    def after_it_was_served(waiter: AsyncioWaiter) -> bool:
        slot.__exit__(None, None, None)
        thread.join(PATIENCE)  # it has been served, and its loop is closed
        return is_alive(waiter)

    monkeypatch.setattr(AsyncioWaiter, "is_alive", after_it_was_served)
    bulkhead.capture(lambda ctx: None)
    assert counts(bulkhead)[1:3] == (0, 0)
    monkeypatch.undo()
    with bulkhead.slot():
        assert counts(bulkhead)[1:3] == (1, 0)


def _left_waiting(bulkhead: Bulkhead, backend: str = "asyncio") -> Any:
    """Return a coroutine that waits in the queue, of an event loop that has been closed."""

    async def begin() -> Any:
        coroutine: Any = bulkhead.aexecute(Script("never").function())
        coroutine.send(None)
        return coroutine

    coroutine = anyio.run(begin, backend=backend)
    assert bulkhead.stats().queued == 1
    return coroutine


@pytest.mark.parametrize("max_wait", [None, LONG])
@pytest.mark.parametrize("granted", [False, True])
def test_a_collected_waiter_leaves_the_queue_or_releases_its_permit(max_wait: float | None, granted: bool) -> None:
    """The collector may close an unfinished coroutine in any thread."""
    bulkhead = Bulkhead(1, queue=1, max_wait=max_wait)
    slot = bulkhead.slot()
    slot.__enter__()
    loop = asyncio.new_event_loop()
    box: list[Any] = []
    box.append(box)  # a cycle: only the collector can free it

    async def begin(box: list[Any]) -> None:
        box.append(bulkhead.aexecute(Script("never").function()))
        box[1].send(None)

    loop.run_until_complete(begin(box))
    assert bulkhead.stats().queued == 1
    if granted:
        slot.__exit__(None, None, None)
    del box
    in_threads(gc.collect)
    loop.close()
    assert counts(bulkhead) == (1, 0 if granted else 1, 0, 0)


# --- a granted permit is released exactly once, by its holder ----------------------------------


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_waiter_whose_loop_ends_before_its_wake_releases_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the grant `max_wait` ends, the call takes the permit and runs, and its event loop ends. Then `wake` fails.

    If the permit were passed on now, two calls could run at a limit of 1.
    """
    bulkhead = Bulkhead(1, queue=1, max_wait=0.3)
    results: list[Any] = []

    def waiter() -> None:
        results.append(anyio.run(bulkhead.aexecute, Script("fine").function(), backend=backend))

    kind: Any = {"asyncio": AsyncioWaiter, "trio": TrioWaiter}[backend]
    slot, wake = bulkhead.slot(), kind.wake
    slot.__enter__()
    thread = threading.Thread(target=waiter, daemon=True)
    thread.start()
    wait_until(lambda: bulkhead.stats().queued == 1)
    woken: list[bool] = []

    def late(target: Any) -> bool:
        thread.join(PATIENCE)
        woken.append(wake(target))
        return woken[-1]

    monkeypatch.setattr(kind, "wake", late)
    slot.__exit__(None, None, None)
    assert results == ["fine"]
    assert woken == [False]
    assert counts(bulkhead) == (1, 0, 0, 0)
    monkeypatch.undo()
    with bulkhead.slot():
        assert counts(bulkhead)[1] == 1
        with pytest.raises(BulkheadFull):
            bulkhead.call(str, "two at a limit of 1")
