"""Calls that run beside a test: each in its own thread in the threads world, as tasks in the others."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import anyio
import anyio.abc

from resilience import AdaptiveLimit, Bulkhead, Context, Policy
from tests.conftest import World, drive

#: Seconds after which a wait for a condition fails.
PATIENCE = 20.0


async def until(world: World, holds: Callable[[], object], what: str = "what the test waits for") -> None:
    """Wait until `holds()` is true."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"waited in vain for {what}"
        await world.sleep(0.001)


class Call:
    """One call through a policy. Its function waits until it is released, and then returns or raises `answer`."""

    def __init__(self, world: World, answer: Any) -> None:
        self._world = world
        self._answer = answer
        self._let_go = threading.Event()
        self._scope: anyio.CancelScope | None = None
        self.entered = threading.Event()
        self.left = threading.Event()
        self.cancelled = False
        #: The value, or the exception as a value.
        self.outcome: Any = None

    def let_go(self, answer: Any = None) -> None:
        """Release the function, which returns or raises `answer` if one is given."""
        if answer is not None:
            self._answer = answer
        self._let_go.set()

    def cancel(self) -> None:
        """Cancel the task."""
        assert self._scope is not None, "only a task can be cancelled"
        self._scope.cancel()

    async def is_inside(self) -> None:
        """Wait until the function has been entered."""
        await until(self._world, self.entered.is_set, "a call to enter its function")

    async def result(self) -> Any:
        """Wait until the call is over, and return its outcome."""
        await until(self._world, self.left.is_set, "a call to end")
        return self.outcome

    async def function(self, ctx: Context | None = None) -> Any:
        self.entered.set()
        await until(self._world, self._let_go.is_set, "the test to release this call")
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    async def run(self, start: Callable[[], Awaitable[Any]]) -> None:
        try:
            self.outcome = await start()
        except Exception as error:
            self.outcome = error
        finally:
            self.left.set()

    async def run_in_scope(self, start: Callable[[], Awaitable[Any]]) -> None:
        with anyio.CancelScope() as self._scope:
            await self.run(start)
        self.cancelled = self._scope.cancelled_caught

    def run_in_thread(self, start: Callable[[], Awaitable[Any]]) -> None:
        drive(self.run(start))


class Group:
    """The calls that run beside one test."""

    def __init__(self, world: World, tasks: anyio.abc.TaskGroup | None) -> None:
        self._world = world
        self._tasks = tasks
        self.threads: list[threading.Thread] = []
        self.calls: list[Call] = []

    def start(self, policy: Policy[Any], answer: Any = "fine", ctx: Context | None = None) -> Call:
        """Begin a call through the policy."""
        call = Call(self._world, answer)

        async def execute() -> Any:
            return await self._world.execute(policy, call.function, ctx)

        return self._begin(call, execute)

    def run(self, main: Callable[[], Awaitable[Any]]) -> Call:
        """Begin any `async def main()`."""
        return self._begin(Call(self._world, None), main)

    def _begin(self, call: Call, start: Callable[[], Awaitable[Any]]) -> Call:
        self.calls.append(call)
        if self._tasks is None:
            thread = threading.Thread(target=call.run_in_thread, args=(start,), daemon=True)
            self.threads.append(thread)
            thread.start()
        else:
            self._tasks.start_soon(call.run_in_scope, start)
        return call

    async def inside(self, policy: Policy[Any], answer: Any = "fine", ctx: Context | None = None) -> Call:
        """Begin a call through the policy, and wait until its function has been entered."""
        call = self.start(policy, answer, ctx)
        await call.is_inside()
        return call

    async def queued(
        self, bulkhead: AdaptiveLimit | Bulkhead, policy: Policy[Any] | None = None, ctx: Context | None = None
    ) -> Call:
        """Begin a call, and wait until it is in the queue of the bulkhead."""
        before = bulkhead.stats().queued
        call = self.start(policy or bulkhead, ctx=ctx)
        await until(self._world, lambda: bulkhead.stats().queued > before, "a call to queue")
        return call


@asynccontextmanager
async def beside(world: World) -> AsyncIterator[Group]:
    """Open a group of calls. At its end, all of them are released and awaited."""
    async with nullcontext() if world.blocking else anyio.create_task_group() as tasks:
        group = Group(world, tasks)
        try:
            yield group
        finally:
            for call in group.calls:
                call.let_go()
            for thread in group.threads:
                thread.join(PATIENCE)
                assert not thread.is_alive(), "a call did not end"
