"""Timers of asyncio tasks: the semantics of `asyncio.timeout`, at a fifth of its cost.

`asyncio.timeout` makes a handle for every block, queues it, and cancels it when the block ends in
time, which it nearly always does: 2 to 3 us. But the limit of a `Timeout` is constant, so on one loop
its timers end in the order in which they begin. Then one handle serves them all:

    pending    the timers of one limit, in order; a dictionary, so that any of them can leave at once
    handle     set for the first of them, and left set when that one is done

When the handle rings, whoever is due is cancelled, and it is set again for the first one that is
left. So it rings once per limit at the most, however many calls there were, and a call that ends in
time costs two writes to a dictionary.

What keeps an alarm alive is its handle, which the loop drops when it is closed, and the timers that it
serves. Nothing here outlives its loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from math import inf
from types import TracebackType
from typing import Any, Self, final

from resilience.clock import clock


@final
class AsyncioTimer:
    """`asyncio.timeout`, with an instant on the process clock, and without an exception of its own.

    Whoever makes one sets `alarm`, `deadline`, `fired` and `task`: an `__init__` that did it would take 70 ns more.
    """

    __slots__ = ("_cancelling", "alarm", "deadline", "fired", "task")

    deadline: float
    fired: bool
    task: asyncio.Task[Any]
    alarm: Alarm
    _cancelling: int

    def __enter__(self) -> Self:
        self._cancelling = self.task.cancelling()
        alarm = self.alarm
        if alarm.handle is None:
            alarm.set(self, clock.now())
        alarm.pending[self] = True  # last: nothing fails from here on, and whoever is in there is cancelled one day
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> bool:
        task = self.task
        del self.task  # no cycle: task -> its exception -> traceback -> frame -> this timer -> task
        alarm = self.alarm
        if alarm.pending.pop(self, False):
            if alarm.limit is None:
                alarm.cancel()
            return False
        # `<=`: whoever else has cancelled this task meanwhile is still to be served.
        mine = task.uncancel() <= self._cancelling
        self.fired = mine and kind is not None and issubclass(kind, asyncio.CancelledError)
        return self.fired


@final
class Alarm:
    """Serves the timers of one limit in one loop.

    :param limit: the limit that all of its timers have; None for the alarm of a single timer.
    """

    __slots__ = ("__weakref__", "handle", "latest", "limit", "loop", "pending")

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: float | None) -> None:
        self.loop: asyncio.AbstractEventLoop = loop
        self.limit: float | None = limit
        self.latest: float = -inf  # the deadline of the last timer
        self.pending: dict[AsyncioTimer, bool] = {}  # in order
        self.handle: asyncio.TimerHandle | None = None

    def set(self, timer: AsyncioTimer, now: float) -> None:
        """Ring when this timer is due. In an empty context: an alarm outlives the call that happened to set it."""
        seconds = max(0.0, timer.deadline - now)
        self.handle = self.loop.call_later(seconds, self._ring, timer, context=contextvars.Context())

    def cancel(self) -> None:
        """Do not ring."""
        if self.handle is not None:  # pragma: no branch (whoever cancels has set it, and it has not rung)
            self.handle.cancel()

    def rest(self) -> bool:
        """Do not ring where nobody is left to ring for; say whether that is so."""
        if self.pending:
            return False
        self.cancel()
        self.handle = None
        return True

    def _ring(self, due: AsyncioTimer) -> None:
        self.handle = None
        now = due.deadline  # it is at least that late, should the clock itself fail
        try:
            now = clock.now()
        finally:
            self._cut_off(due, now)

    def _cut_off(self, due: AsyncioTimer, now: float) -> None:
        """Cancel whoever is due by now, this one in any case, and set the alarm for the first of the others."""
        while (timer := next(iter(self.pending), None)) is not None:
            if timer is not due and timer.deadline > now:
                self.set(timer, now)
                return
            task = getattr(timer, "task", None)  # None: a finalizer has closed its block, between these lines
            self.pending.pop(timer, False)
            if task is not None:
                task.cancel()


class _Shared(threading.local):
    """The alarms of the loop that runs in this thread, by limit."""

    MOST = 64  # a limit that is computed anew for each call gets an alarm of its own

    def __init__(self) -> None:
        self.by_limit: dict[float | None, weakref.ref[Alarm]] = {}

    def new_alarm(self, loop: asyncio.AbstractEventLoop, limit: float | None) -> Alarm:
        """Make an alarm where there is none that a timer of this limit could share."""
        known = self.by_limit.get(limit)
        other = None if known is None else known()
        if limit is None or (other is not None and other.loop is loop):  # then a clock was put back
            return Alarm(loop, None)
        if len(self.by_limit) >= self.MOST:
            self.by_limit = {key: ref for key, ref in self.by_limit.items() if ref() is not None}
        if len(self.by_limit) >= self.MOST:
            return Alarm(loop, None)
        alarm = Alarm(loop, limit)
        self.by_limit[limit] = weakref.ref(alarm)
        return alarm


shared: _Shared = _Shared()
