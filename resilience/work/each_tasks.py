"""The calls of `each` in tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from contextlib import aclosing, nullcontext
from typing import Any, final

import anyio
from anyio.abc import TaskGroup
from typing_extensions import override

from resilience.errors import Misuse
from resilience.executable import acaptured
from resilience.runtimes.base import close_each
from resilience.runtimes.tasks import TASKS, split_cancellation
from resilience.work.each_calls import Call, Job


@final
class _InTask(Call):
    """A call in a task, which sets `ended` at the end."""

    __slots__ = ("ended",)

    def __init__(self, item: Any) -> None:
        super().__init__(item)
        self.ended = anyio.Event()


@final
class Tasks(AsyncIterator[Any]):
    """An iterator over the pairs, with the calls in tasks. A separate task reads the items."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._room = anyio.Semaphore(2 * job.limit)
        self._running = anyio.Semaphore(job.limit)
        self._delivered: deque[_InTask] = deque()
        self._discarded: deque[_InTask] = deque()  # once closed
        self._has_news = anyio.Event()  # set with each delivery, and at the end
        self._is_over = False

    @override
    async def __anext__(self) -> Any:
        while not self._delivered:
            if self._is_over:
                raise StopAsyncIteration
            if self._has_news.is_set():
                self._has_news = anyio.Event()
            await self._has_news.wait()  # a stream of anyio loses what it hands to a wait that is then cancelled
        call = self._delivered.popleft()
        try:
            await call.ended.wait()
        except BaseException:  # cancelled, for example by a timeout: the next call gets it
            self._delivered.appendleft(call)
            raise
        self._room.release()
        return self._job.pair(call) or call.raise_error()

    def close(self) -> None:
        """Begin no more calls, and deliver no more outcomes."""
        self._discarded, self._delivered = self._delivered, deque()
        self._end()

    async def discard(self) -> None:
        """Close the results that are not delivered."""
        await close_each(lambda call: TASKS.close(self._job.resource(call)), self._discarded)

    async def read(self) -> None:
        """Begin a call for each item as soon as there is room. An error of the items is delivered last."""
        failed = _InTask(None)
        try:
            async with aclosing(_iterate(self._job.items)) as items, anyio.create_task_group() as group:
                try:
                    await self._room.acquire()
                    async for item in items:
                        await self._running.acquire()
                        if self._is_over:  # closed: a cancelled call has released the semaphore
                            return
                        self._begin(item, group)
                        await self._room.acquire()
                except Exception as error:
                    failed.outcome = error
                    failed.ended.set()
            if failed.ended.is_set():
                self._deliver(failed)
        finally:
            del failed  # no cycle: its error -> traceback -> this frame -> failed
            self._end()

    def _begin(self, item: Any, group: TaskGroup) -> None:  # no call is a local of `read`, which may be cancelled
        call = _InTask(item)
        if self._job.ordered:
            self._deliver(call)
        group.start_soon(self._run, call)

    def _deliver(self, call: _InTask) -> None:
        if self._is_over:
            self._discarded.append(call)
        else:
            self._delivered.append(call)
            self._has_news.set()

    def _end(self) -> None:
        self._is_over = True
        self._has_news.set()

    async def _run(self, call: _InTask) -> None:
        try:
            call.outcome = await acaptured(self._job.policy.acall(self._job.function, call.item))
        except Misuse as error:
            call.outcome = error
        except BaseExceptionGroup as group:
            call.outcome = group
            if (parts := split_cancellation(group)) is None:
                raise
            try:
                raise parts[0] from None
            finally:
                del parts  # no cycle, as below
        except BaseException as error:  # a cancellation, perhaps of what the function awaited: the consumer must get it
            call.outcome = error
            raise
        finally:
            call.ended.set()
            self._running.release()
            if not self._job.ordered:
                self._deliver(call)
            del call  # no cycle: its error -> traceback -> this frame -> call


async def _iterate(items: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    if not isinstance(items, AsyncIterable):
        for item in items:
            yield item
        return
    # A finalizer would close a generator later, and outside of any task.
    async with aclosing(items) if isinstance(items, AsyncGenerator) else nullcontext():
        async for item in items:
            yield item
