"""each: many concurrent calls, up to a limit, and no faster than their outcomes are consumed."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Never, TypeAlias, TypeVar, final, overload

import anyio
from anyio.abc import TaskGroup
from typing_extensions import override

from resilience import checks
from resilience.callables import is_coroutine_function, require_callable
from resilience.clock import clock
from resilience.errors import BlockMisuse, Misuse, closable
from resilience.executable import acaptured, captured
from resilience.execution import run
from resilience.log import logger
from resilience.outcome import Outcome
from resilience.policy import Policy
from resilience.runtimes.base import close_each
from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.driving import drive
from resilience.runtimes.tasks import TASKS

Item = TypeVar("Item")
R = TypeVar("R")
D = TypeVar("D")

#: Called with the number of items whose outcome has been delivered since the last time: `tqdm`'s `update`.
Progress: TypeAlias = Callable[[int], object]


@overload
def each(
    policy: Policy[D],
    function: Callable[[Item], Awaitable[R]],
    items: Iterable[Item] | AsyncIterable[Item],
    *,
    limit: int,
    ordered: bool = False,
    progress: Progress | None = None,
) -> Each[Item, R | D]: ...
@overload
def each(
    policy: Policy[D],
    function: Callable[[Item], R],
    items: Iterable[Item],
    *,
    limit: int,
    ordered: bool = False,
    progress: Progress | None = None,
) -> Each[Item, R | D]: ...
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

    It returns a context manager, whose value iterates over pairs of item and outcome, `Success(...)` or `Failure(...)`:

        async with each(policy, fetch, urls, limit=10) as outcomes:
            async for url, outcome in outcomes:
                ...

    With blocking functions use `with` and `for`; `limit` threads make the calls. Items are read on demand: at most
    `2 * limit` items are read and not yet delivered. At the end of the block, no more items are read, tasks are
    cancelled, running threads are awaited, results that were not delivered are closed, and an error of the block is
    raised as it is.

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
    checks.instance("policy", policy, Policy, "a policy")
    require_callable(function, "each", "each(policy, fetch, urls, limit=10)")
    checks.instance("items", items, (Iterable, AsyncIterable), "iterable")
    limit, ordered = checks.whole("limit", limit), checks.flag("ordered", ordered)
    checks.optional_function("progress", progress, ("count",))
    return Each(_Job(policy, function, items, limit, ordered, progress))


class _Job(NamedTuple):
    """The arguments of `each`."""

    policy: Policy[Any]
    function: Callable[[Any], Any]
    items: Any
    limit: int
    ordered: bool
    progress: Progress | None

    def resource(self, call: _Call) -> Any:
        """Return what has to be closed if a call is not delivered; None if there is nothing, or others may have it."""
        is_shared = any(it._resilience_shares_results for it in self.policy._resilience_chain())
        return None if is_shared or not hasattr(call, "outcome") else closable(call.outcome)

    def pair(self, call: _Call) -> tuple[Any, Outcome[Any]] | None:
        """Return the item of a call and its outcome, and report the progress; None for an error that is no outcome."""
        if isinstance(call.outcome, BaseException):
            return None
        if self.progress is not None:
            try:
                self.progress(1)
            except Exception:  # otherwise the outcome would be lost
                logger.exception("progress raised; it changes nothing")
        return call.item, call.outcome


@final
class Each(Generic[Item, R]):
    """The context manager that `each` returns."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._threads: _Threads
        self._tasks: _Tasks
        self._group: TaskGroup
        self._is_open = False

    if not TYPE_CHECKING:  # pragma: no branch (type checkers know that it is not iterable)

        def __iter__(self) -> Never:
            raise TypeError("`each` is entered first: `with each(...) as outcomes:`, and in it `for ... in outcomes:`")

        __aiter__ = __iter__

    def __enter__(self) -> Iterator[tuple[Item, Outcome[R]]]:
        if not isinstance(self._job.items, Iterable) or is_coroutine_function(self._job.function):
            raise TypeError("these items or calls are asynchronous: use `async with each(...)`")
        self._open()
        self._threads = _Threads(self._job, iter(self._job.items))
        return self._threads

    def __exit__(self, *error: object) -> None:
        self._is_open = False
        self._threads.close()

    async def __aenter__(self) -> AsyncIterator[tuple[Item, Outcome[R]]]:
        self._open()
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._tasks = _Tasks(self._job)
        self._group.start_soon(self._tasks.read)
        return self._tasks

    async def __aexit__(self, *error: object) -> None:
        self._is_open = False
        self._tasks.close()
        self._group.cancel_scope.cancel()
        try:
            await self._group.__aexit__(None, None, None)  # without the error of the block, which it would wrap
        except ExceptionGroup as group:  # an error in closing the items, unwrapped as well
            raise group.exceptions[0] from None
        finally:
            await self._tasks.discard()

    def _open(self) -> None:
        if self._is_open:
            raise BlockMisuse("this block of `each` is in use: open another one")
        self._is_open = True


class _Call:
    """A call, with its outcome, or an error that is not an outcome, once it has ended."""

    __slots__ = ("item", "outcome")

    outcome: Outcome[Any] | BaseException

    def __init__(self, item: Any) -> None:
        self.item: Any = item

    def raise_error(self) -> Never:
        """Raise the error that is not an outcome."""
        error: Any = self.outcome
        del self.outcome
        try:
            raise error
        finally:
            del error  # no cycle: error -> traceback -> this frame -> error


@final
class _InThread(_Call):
    """A call in a thread, with a number in the order of the items."""

    __slots__ = ("number", "variables")

    def __init__(self, item: Any, number: int) -> None:
        super().__init__(item)
        self.number = number
        self.variables = contextvars.copy_context()


@final
class _InTask(_Call):
    """A call in a task, which sets `ended` at the end."""

    __slots__ = ("ended",)

    def __init__(self, item: Any) -> None:
        super().__init__(item)
        self.ended = anyio.Event()


@final
class _Threads(Iterator[Any]):
    """An iterator over the pairs, with the calls in threads. The consumer's thread reads the items.

    In that thread, a signal handler may raise (Ctrl-C) as any function begins or returns. So each step is complete, or
    can be made again, and the consumer holds no lock: one of a `ThreadPoolExecutor`, or of a `Future`, would stay held.
    """

    def __init__(self, job: _Job, items: Iterator[Any]) -> None:
        self._job = job
        self._items = items
        self._error: Exception | None = None  # raised by the items, and to the consumer after the last pair
        self._has_more = True
        self._threads = 0
        self._waiting: queue.SimpleQueue[_InThread | None] = queue.SimpleQueue()  # None ends all threads
        self._running: set[_InThread] = set()
        self._is_over = False
        self._read = 0  # the number of items that were read, ...
        self._delivered = 0  # ... and of those whose outcome was delivered
        self._ended: dict[int, _InThread] = {}  # by the number of the item, if ordered, else in order as they end
        self._ends = 0
        self._lock = threading.Lock()  # for the threads
        self._has_news = threading.Lock()  # released as a call ends

    @override
    def __next__(self) -> Any:
        self._read_items()
        self._start_thread()  # if an interrupt has prevented it
        if self._delivered == self._read:
            error, self._error = self._error or StopIteration(), None
            try:
                raise error
            finally:
                del error  # no cycle: error -> traceback -> this frame -> error
        while not self._has_outcome():
            clock.wait(self._has_news, None)
        call = self._ended[self._delivered]
        pair = self._job.pair(call)
        # No function is called from here on: an interrupt as it returns would lose the outcome.
        del self._ended[self._delivered]
        self._delivered += 1
        if pair is None:
            call.raise_error()
        del call.outcome  # its thread may keep the call for a moment
        return pair

    def _read_items(self) -> None:
        """Begin calls for as many items as there is room for; beyond `limit`, only while no outcome is ready."""
        while self._has_more and (undelivered := self._read - self._delivered) < 2 * self._job.limit:
            if undelivered >= self._job.limit and self._has_outcome():
                return
            try:
                call = _InThread(next(self._items), self._read)
            except StopIteration:
                self._has_more = False
            except Exception as error:
                self._has_more, self._error = False, error
            else:
                self._read += 1
                self._waiting.put(call)
                self._start_thread()

    def _has_outcome(self) -> bool:
        return self._delivered in self._ended

    def _start_thread(self) -> None:
        """Start a thread if a call waits for one, and there may be more."""
        if self._waiting.empty() or self._threads == self._job.limit:
            return
        ticket = threading.Lock()
        self._threads += 1
        try:
            name = f"resilience-each-{self._threads}"
            threading.Thread(target=self._work, args=(ticket,), name=name, daemon=True).start()
        except BaseException as error:  # no thread can start, or an interrupt, perhaps after it has started
            if ticket.acquire(blocking=False):
                self._threads -= 1
            if not isinstance(error, Exception):
                raise
            if not self._threads:  # otherwise, the others make the call
                self._has_more, self._error, self._read = False, error, self._delivered

    def _work(self, ticket: threading.Lock) -> None:
        """Make calls, unless the consumer, who holds the ticket, has given up this thread."""
        if ticket.acquire(blocking=False):
            while self._make_next_call():
                pass

    def _make_next_call(self) -> bool:
        call = self._waiting.get()
        if call is None:
            self._waiting.put(None)  # for the next thread
            return False
        self._running.add(call)  # before the check: `close` sets `_is_over`, and then waits for all that run
        if not self._is_over:
            try:
                # Not `policy.call`, whose result may be a coroutine.
                call.outcome = call.variables.run(captured, run, self._job.policy, self._job.function, (call.item,))
            except BaseException as error:
                call.outcome = error
            with self._lock:
                self._ended[call.number if self._job.ordered else self._ends] = call
                self._ends += 1
        self._running.discard(call)
        with suppress(RuntimeError):  # another thread has released it
            self._has_news.release()
        return True

    def close(self) -> None:
        """Begin no more calls, wait for the running ones, and close the results that are not delivered."""
        self._is_over, self._has_more = True, False
        try:
            self._waiting.put(None)
            while self._running:
                clock.wait(self._has_news, None)
        finally:  # also if an interrupt ends this wait
            self._read = self._delivered
            left = [*self._ended.values()]
            self._ended.clear()
            drive(close_each(lambda call: BLOCKING.close(self._job.resource(call)), left))


@final
class _Tasks(AsyncIterator[Any]):
    """An iterator over the pairs, with the calls in tasks. A separate task reads the items."""

    def __init__(self, job: _Job) -> None:
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
