"""Concurrent callers in threads, asyncio and trio, for tests of policies that callers share."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import anyio
import pytest
import trio

from resilience import Policy
from resilience.outcome import Failure, Success
from resilience.runtimes.blocking import BlockingWaiter


class KeywordsOnly(Exception):
    """An exception that `copy` cannot copy."""

    def __init__(self, *, code: int) -> None:
        super().__init__("odd")
        self.code = code


def outcome_of(call: Callable[[], Any]) -> Any:
    try:
        return Success(call())
    except BaseException as error:
        return Failure(error)  # type: ignore[arg-type]


async def aoutcome_of(call: Callable[[], Any]) -> Any:
    try:
        return Success(await call())
    except Exception as error:
        return Failure(error)


class Slow:
    """A function that ends when `may_end` is set. Until then, callers of every runtime arrive."""

    def __init__(self, end: Callable[[], Any]) -> None:
        self.calls = 0
        self.entered = threading.Event()
        self.may_end = threading.Event()
        self._end = end

    def blocking(self, *args: Any) -> Any:
        self.calls += 1
        self.entered.set()
        assert self.may_end.wait(10)
        return self._end()

    async def task(self, *args: Any) -> Any:
        self.calls += 1
        self.entered.set()
        while not self.may_end.is_set():
            await anyio.sleep(0.001)
        return self._end()


def leaders(policy: Any) -> list[Any]:
    """Return the calls that others may share now, under a `SingleFlight` or a `Cache`."""
    return list(policy._flights.leaders.values())


def followers(policy: Any) -> int:
    """Return how many callers wait for a call of another one."""
    return sum(len(it.followers) for it in leaders(policy))


def calls_around() -> int:
    """Return to how many calls this code belongs, by the variables that child tasks and threads inherit."""
    return sum(len(it) for it in contextvars.copy_context().values() if isinstance(it, tuple))


def ask_from_everywhere(policy: Policy[Any], slow: Slow) -> list[Any]:
    """Let two threads and three tasks of each loop follow a leader in a thread; return all outcomes."""
    got: list[Any] = []

    async def tasks(each: Callable[[], Any]) -> None:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(each)

    async def one() -> None:
        got.append(await aoutcome_of(lambda: policy.acall(slow.task)))

    def thread() -> None:
        got.append(outcome_of(lambda: policy.call(slow.blocking)))

    leader = threading.Thread(target=thread)
    leader.start()
    assert slow.entered.wait(5)
    others = [thread, thread, lambda: asyncio.run(tasks(one)), lambda: trio.run(tasks, one)]
    run_all(others, lambda: wait_until(lambda: followers(policy) == 8), slow.may_end.set)
    leader.join(5)
    return got


def in_threads(*functions: Callable[[], object]) -> None:
    """Run each function in a thread of its own, until all have ended."""
    run_all(functions)


def run_all(functions: Iterable[Callable[[], object]], *then: Callable[[], object], patience: float = 20.0) -> None:
    """Run each function in a thread of its own, and meanwhile the steps of `then` in this one."""
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for step in then:
        step()
    for thread in threads:
        thread.join(patience)
    assert not any(thread.is_alive() for thread in threads)


class Stopped:
    """A thread that stops where a function of this name begins, until it may go on."""

    def __init__(self, run: Callable[[], object], *, at: str) -> None:
        self._function, self._at = run, at
        self._is_there, self._may_go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_there.wait(10)

    def go_on(self) -> None:
        """Let it run to its end."""
        self._may_go.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        sys.setprofile(self._look)
        self._function()

    def _look(self, frame: FrameType, kind: str, argument: object) -> None:
        if kind == "call" and frame.f_code.co_name == self._at:
            self._is_there.set()
            assert self._may_go.wait(10)


def fail_first_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next wake-up of a thread find no stack left."""
    wake, fails = BlockingWaiter.wake, iter([True])

    def wake_later(waiter: BlockingWaiter) -> bool:
        if next(fails, False):
            raise RecursionError
        return wake(waiter)

    monkeypatch.setattr(BlockingWaiter, "wake", wake_later)


def is_free(use: Callable[[], object]) -> bool:
    """Return whether another thread can do this now: no lock that it needs is held."""
    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    ends_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends_at, "the condition did not become true in time"
        time.sleep(0.001)
