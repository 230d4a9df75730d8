"""each: many concurrent calls, up to a limit, and no faster than their outcomes are consumed."""

from __future__ import annotations

import contextvars
import functools
import logging
import queue
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import aclosing, suppress
from math import inf
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, final, overload

import anyio
from anyio.abc import TaskGroup
from typing_extensions import override

from resilience import checks
from resilience.callables import require_callable
from resilience.errors import Misuse
from resilience.executable import acaptured, captured
from resilience.outcome import Outcome
from resilience.policy import Policy

logger: logging.Logger = logging.getLogger("resilience")

Item = TypeVar("Item")
R = TypeVar("R")

#: Called with the number of items whose outcome has been delivered since the last time: `tqdm`'s `update`.
Progress: TypeAlias = Callable[[int], object]


@overload
def each(
    policy: Policy[Any],
    function: Callable[[Item], Awaitable[R]],
    items: Iterable[Item] | AsyncIterable[Item],
    *,
    limit: int,
    ordered: bool = False,
    progress: Progress | None = None,
) -> Each[Item, R]: ...
@overload
def each(
    policy: Policy[Any],
    function: Callable[[Item], R],
    items: Iterable[Item],
    *,
    limit: int,
    ordered: bool = False,
    progress: Progress | None = None,
) -> Each[Item, R]: ...
def each(
    policy: Policy[Any],
    function: Callable[[Any], Any],
    items: Iterable[Any] | AsyncIterable[Any],
    *,
    limit: int,
    ordered: bool = False,
    progress: Progress | None = None,
) -> Each[Any, Any]:
    """Call `function(item)` under the policy for each item, at most `limit` at once.

    A block, whose value iterates over pairs of an item and its outcome, `Success(value)` or `Failure(error)`:

        async with each(policy, fetch, urls, limit=10) as outcomes:
            async for url, outcome in outcomes:
                ...

    With blocking functions use `with` and `for`; `limit` threads make the calls. Items are read when there is room: at
    most `2 * limit` are read whose outcome was not delivered. When the block is left, no more are read, tasks are
    cancelled, running threads are awaited, and an error of the block is raised as it is.

    :param limit: how many calls may run at once, at least 1.
    :param ordered: whether outcomes come in the order of the items; by default, as they end.
    :param progress: called with 1 for each delivered outcome, such as `tqdm`'s `update`, or `lambda n:
        bar.advance(task, n)` for `rich`. What it raises is logged.
    :raises TypeError: for a wrong policy, function or items, and for asynchronous items of a blocking function.

    >>> from resilience import Retry
    >>> from resilience.work import each
    >>> with each(Retry(), str.upper, "abc", limit=2, ordered=True) as outcomes:
    ...     [outcome.unwrap() for item, outcome in outcomes]
    ['A', 'B', 'C']
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"policy must be a policy, not {policy!r}")
    require_callable(function)
    if not isinstance(items, (Iterable, AsyncIterable)):
        raise TypeError(f"items must be iterable, not {items!r}")
    limit, ordered = checks.whole("limit", limit), checks.flag("ordered", ordered)
    if progress is not None:
        checks.plain_function("progress", progress, ("count",))
    return Each(_Job(policy, function, items, limit, ordered, progress))


class _Job(NamedTuple):
    """What is to be done."""

    policy: Policy[Any]
    function: Callable[[Any], Any]
    items: Any
    limit: int
    ordered: bool
    progress: Progress | None

    def call(self, item: Any) -> Outcome[Any]:
        """Call for this item, under the policy."""
        return captured(self.policy.call, self.function, item)

    async def acall(self, item: Any) -> Outcome[Any]:
        """As `call`, in a task."""
        return await acaptured(self.policy.acall(self.function, item))

    def report(self) -> None:
        """Call `progress` for one more outcome that is handed out, which no error in that may lose."""
        if self.progress is not None:
            try:
                self.progress(1)
            except Exception:
                logger.exception("progress raised; it changes nothing")


@final
class Each(Generic[Item, R]):
    """The block that `each` returns."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._threads: _Threads
        self._tasks: _Tasks
        self._group: TaskGroup

    def __enter__(self) -> Iterator[tuple[Item, Outcome[R]]]:
        if not isinstance(self._job.items, Iterable):
            raise TypeError("these items are asynchronous: use `async with each(...)`")
        self._threads = _Threads(self._job, iter(self._job.items))
        return self._threads

    def __exit__(self, *error: object) -> None:
        self._threads.close()

    async def __aenter__(self) -> AsyncIterator[tuple[Item, Outcome[R]]]:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._tasks = _Tasks(self._job)
        self._group.start_soon(self._tasks.read)
        return self._tasks

    async def __aexit__(self, *error: object) -> None:
        self._tasks.close()
        self._group.cancel_scope.cancel()
        try:
            await self._group.__aexit__(None, None, None)  # the block's own error is not its affair, so it stays bare
        except ExceptionGroup as group:  # and so does what the items raise as they are closed
            raise group.exceptions[0] from None


@final
class _Call:
    """A call in a thread.

    Its outcome is here, until it is handed out, and not in the future: an error in there would be in a cycle, as its
    traceback holds the frames of the pool's thread, and these the future.
    """

    __slots__ = ("future", "item", "outcome")

    future: Future[None]
    outcome: Outcome[Any]

    def __init__(self, item: Any) -> None:
        self.item = item

    def result(self) -> tuple[Any, Outcome[Any]]:
        """Hand out the item and its outcome. What is no outcome is raised."""
        self.future.result()
        outcome = self.outcome
        del self.outcome
        return self.item, outcome


@final
class _Threads(Iterator[Any]):
    """The pairs, as threads bring them. The consumer reads the items."""

    def __init__(self, job: _Job, items: Iterator[Any]) -> None:
        self._job = job
        self._items = items
        self._error: Exception | None = None  # what the items raised, for when all that was read is handed out
        self._pool = ThreadPoolExecutor(job.limit, thread_name_prefix="resilience-each")
        self._begun: deque[_Call] | None = deque() if job.ordered else None
        self._ended: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._under_way = 0  # read, and not handed out
        self._has_more = True

    @override
    def __next__(self) -> Any:
        self._read()
        if not self._under_way:
            error, self._error = self._error or StopIteration(), None
            try:
                raise error
            finally:
                del error  # it refers to this frame
        if self._begun is None:
            call = self._ended.get()
        else:
            call = self._begun[0]
            wait([call.future])  # Ctrl-C in this wait loses nothing
            self._begun.popleft()
        self._under_way -= 1
        try:
            pair = call.result()
        finally:
            del call  # its error refers to this frame
        self._job.report()
        return pair

    def _read(self) -> None:
        """Begin calls for as many items as there is room for, as long as no outcome waits to be handed out."""
        while self._has_more and self._under_way < 2 * self._job.limit:
            if self._under_way >= self._job.limit and self._has_outcome():
                return
            try:
                item = next(self._items)
            except StopIteration:
                self._has_more = False
                return
            except Exception as error:
                self._has_more, self._error = False, error
                return
            self._under_way += 1
            call = _Call(item)
            call.future = self._pool.submit(contextvars.copy_context().run, self._run, call)
            if self._begun is not None:
                self._begun.append(call)
            else:
                call.future.add_done_callback(functools.partial(self._end, call))

    def _has_outcome(self) -> bool:
        """Whether the next outcome is there."""
        return not self._ended.empty() if self._begun is None else self._begun[0].future.done()

    def _run(self, call: _Call) -> None:
        call.outcome = self._job.call(call.item)

    def _end(self, call: _Call, future: Future[None]) -> None:
        self._ended.put(call)

    def close(self) -> None:
        """Begin no further call, and wait for those that run."""
        self._has_more, self._under_way = False, 0
        self._pool.shutdown(cancel_futures=True)


@final
class _Place:
    """What comes of one item, in the order in which items were read."""

    def __init__(self, item: Any) -> None:
        self.item = item
        self.outcome: Outcome[Any] | BaseException
        self.is_there = anyio.Event()

    def put(self, outcome: Outcome[Any] | BaseException) -> None:
        """Let the consumer have it."""
        self.outcome = outcome
        self.is_there.set()


@final
class _Tasks(AsyncIterator[Any]):
    """The pairs, as tasks bring them. A task of its own reads the items."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._is_closed = False
        self._room = anyio.Semaphore(2 * job.limit)
        self._running = anyio.Semaphore(job.limit)
        self._waited_for: deque[_Place] = deque()
        self._send, self._receive = anyio.create_memory_object_stream[_Place](inf)

    @override
    async def __anext__(self) -> Any:
        try:
            place = self._waited_for.popleft() if self._waited_for else await self._receive.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            raise StopAsyncIteration from None
        try:
            await place.is_there.wait()
        except BaseException:  # cancelled, as by a limit to this wait: the next one gets it
            self._waited_for.appendleft(place)
            raise
        self._room.release()
        if isinstance(place.outcome, BaseException):
            try:
                raise place.outcome
            finally:
                del place  # the error refers to this frame
        self._job.report()
        return place.item, place.outcome

    def close(self) -> None:
        """Begin no other call, and hand out nothing more."""
        self._is_closed = True
        self._waited_for.clear()
        self._receive.close()

    async def read(self) -> None:
        """Begin a call for each item, as there is room. What the items raise, the consumer gets last."""
        failed = _Place(None)
        with self._send:
            async with aclosing(_in_turn(self._job.items)) as items, anyio.create_task_group() as group:
                try:
                    await self._room.acquire()
                    async for item in items:
                        await self._running.acquire()
                        if self._is_closed:  # a call that was cancelled has made room
                            return
                        place = _Place(item)
                        if self._job.ordered:
                            self._hand_out(place)
                        group.start_soon(self._run, place)
                        await self._room.acquire()
                except Exception as error:
                    failed.put(error)
            if failed.is_there.is_set():
                self._hand_out(failed)
                del failed  # its error refers to this frame

    def _hand_out(self, place: _Place) -> None:
        with suppress(anyio.BrokenResourceError):  # the block has been left
            self._send.send_nowait(place)

    async def _run(self, place: _Place) -> None:
        try:
            place.put(await self._job.acall(place.item))
        except Misuse as error:
            place.put(error)
        except BaseException as error:  # cancelled, perhaps by what the function awaited: the consumer must not miss it
            place.put(error)
            raise
        finally:
            self._running.release()
            if not self._job.ordered:
                self._hand_out(place)
            del place  # its error refers to this frame


async def _in_turn(items: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    if isinstance(items, AsyncGenerator):
        async with aclosing(items):  # not left to a finalizer, which comes late and in no task
            async for item in items:
                yield item
    elif isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
