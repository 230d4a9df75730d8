"""The calls of `each` in threads."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, final

from typing_extensions import override

from resilience.clock import clock
from resilience.executable import captured
from resilience.execution import run
from resilience.runtimes.base import close_each
from resilience.runtimes.blocking import BLOCKING
from resilience.runtimes.driving import drive
from resilience.work.each_calls import Call, Job


@final
class _InThread(Call):
    """A call in a thread, with a number in the order of the items."""

    __slots__ = ("number", "variables")

    def __init__(self, item: Any, number: int) -> None:
        super().__init__(item)
        self.number = number
        self.variables = contextvars.copy_context()


@final
class Threads(Iterator[Any]):
    """An iterator over the pairs, with the calls in threads. The consumer's thread reads the items.

    In that thread, a signal handler may raise (Ctrl-C) as any function begins or returns. So each step is complete, or
    can be made again, and the consumer holds no lock: one of a `ThreadPoolExecutor`, or of a `Future`, would stay held.
    """

    def __init__(self, job: Job, items: Iterator[Any]) -> None:
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
