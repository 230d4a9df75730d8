"""Timers of asyncio tasks: the semantics of `asyncio.timeout`, at a fifth of its cost.

`asyncio.timeout` makes a handle for every block, queues it, and cancels it when the block ends in
time, which it nearly always does: 2 to 3 us. Here one handle serves all timers of a limit:

    pending    the timers; a dictionary, so that any of them can leave at once
    rings_at   when the first of them was due as it was set; it is left set when that one is done

When it rings, it rings each timer that is due, and is set again for the first one that is left. The timers of a
`Timeout`, whose limit is constant, end in the order in which they begin. So it rings once per limit at the most,
however many calls there were, and a call that ends in time costs two writes to a dictionary. Limits that are computed
anew for each call have an alarm together, which is set anew for one that is due earlier. So have races, which are rung
when their next attempt is due.

So have the timers that inherit the instant of an outer block, too. They give way to that one's: it may be the timer of
another task, which passes its cancellation on to this one as soon as it gets it (a task group does). A task that is
cancelled in that way is left to clean up, and not cancelled once more.

The alarms of a loop are remembered until another loop runs in its thread, and needs some. A loop that is closed with
tasks that still run forgets them, and so do its alarms then: see `_LoopCloseGuard`.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import weakref
from collections.abc import Callable
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, final

from typing_extensions import override

from resilience.clock import clock
from resilience.runtimes.base import Expired, Timer

if TYPE_CHECKING:
    import asyncio


#: In the place of a limit, for the alarm that all races of a loop have together.
RACES: Final = -1.0

#: And for that of the timers whose limits have no alarm of their own.
OTHERS: Final = 0.0

#: For how many rounds of its loop a timer gives way, and after how many seconds one that did looks again. A task group
#: passes a cancellation on in the round in which it gets it, so nearly as many may stand inside one another.
ROUNDS: Final = 10
LOOKS_AGAIN: Final = 0.05


class Bell(Protocol):
    """What an alarm serves: a timer, or a race."""

    deadline: float

    def ring(self) -> None:
        """Do what is due at `deadline`; nothing, where that has come to its end."""
        ...


@final
class AsyncioTimer(Timer):
    """`asyncio.timeout`, with an instant on the process clock, and without an exception of its own."""

    __slots__ = ("_alarm", "_cancelling", "deadline", "fired", "task")

    def __init__(self, deadline: float, task: asyncio.Task[Any], alarm: Alarm) -> None:
        self.deadline: float = deadline
        self.task: asyncio.Task[Any] = task
        self.fired: bool = False  # before the block has ended: whether it has been cut off
        self._alarm = alarm
        self._cancelling: int  # how many cancellations the task was asked for when the block began

    @override
    def covers_this_code(self) -> bool:
        try:
            return getattr(self, "task", None) is _asyncio().current_task()
        except RuntimeError:  # a worker thread
            return False

    @override
    def start(self) -> None:
        self._cancelling = self.task.cancelling()
        alarm = self._alarm
        if self.deadline < alarm.rings_at:
            alarm.set(self.deadline, clock.now())
        alarm.pending[self] = None  # last: nothing fails from here on, and what is in there is rung one day

    def ring(self) -> None:
        """Cut off the block, unless it has ended: its task is gone, or a finalizer is just closing that."""
        task = getattr(self, "task", None)
        if task is not None:
            self._give_way(task.cancelling(), 0 if self._alarm.is_firm else ROUNDS)

    def _give_way(self, cancelling: int, rounds: int) -> None:
        """Cut off the block, unless an outer one has cancelled its task within so many rounds of the loop.

        :param cancelling: how many cancellations the task was asked for before.
        """
        task, loop = getattr(self, "task", None), self._alarm.loop
        if task is None:
            return
        if task.cancelling() > cancelling:  # should it go on after that, its time is over still
            loop.call_later(LOOKS_AGAIN, self._give_way, cancelling, 0, context=contextvars.Context())
        elif rounds:
            loop.call_soon(self._give_way, cancelling, rounds - 1, context=contextvars.Context())
        else:
            self.fired = True
            cancel(task)

    @override
    def stop(self, error: BaseException | None) -> bool:
        task = self.task
        del self.task  # no cycle: task -> its exception -> traceback -> frame -> this timer -> task
        if not self.fired:
            self._alarm.pending.pop(self, None)
            self.fired = error is not None and isinstance(error, Expired) and error.timer is self
            return self.fired
        # `<=`: another cancellation that has come meanwhile is still to be served.
        mine = task.uncancel() <= self._cancelling
        self.fired = mine and isinstance(error, (_asyncio().CancelledError, Expired))
        return self.fired


def _asyncio() -> Any:
    """Return asyncio, which is there where a task has a timer (see tasks.py): to import it again would take 400 ns."""
    return sys.modules["asyncio"]


@final
class Alarm:
    """Serves the timers of one limit in one loop, or all that have none, or its races."""

    __slots__ = ("_handle", "is_firm", "loop", "pending", "rings_at")

    def __init__(self, loop: asyncio.AbstractEventLoop, is_firm: bool) -> None:
        self.loop: asyncio.AbstractEventLoop = loop
        self.is_firm: bool = is_firm  # whether its timers do not give way
        self.pending: dict[Bell, None] = {}
        self.rings_at: float = inf  # an instant on the process clock; infinity where it is not set
        self._handle: Callable[[], asyncio.TimerHandle | None] = _no_handle  # weak: see `_LoopCloseGuard`

    def set(self, rings_at: float, now: float) -> None:
        """Ring at this instant. In an empty context: an alarm outlives the call that happened to set it."""
        guard = _LoopCloseGuard(self, rings_at)
        handle = self.loop.call_later(max(0.0, rings_at - now), self._ring, guard, context=contextvars.Context())
        later = self._handle()
        self._handle, self.rings_at = weakref.ref(handle), rings_at
        if later is not None:
            later.cancel()

    def clear_if_idle(self) -> bool:
        """Say whether no timer is left to ring for; then it is to be cancelled."""
        if self.pending:
            return False
        self.rings_at = inf
        return True

    def _ring(self, guard: _LoopCloseGuard) -> None:
        self.rings_at, self._handle = inf, _no_handle
        guard.alarm = None
        now = guard.rings_at  # it is at least that late, should the clock itself fail, or the loop be early
        try:
            now = max(now, clock.now())
        finally:
            others = [it for it in alarms_of(self.loop) if it is not self and it.rings_at <= now]
            for alarm in sorted([self, *others], key=_is_firm):  # first those that note what they give way to
                alarm._ring_until(now)

    def _ring_until(self, now: float) -> None:
        """Ring all that are due by now, and set the alarm for the first of the others."""
        for bell in sorted(self.pending, key=_deadline):  # copied at once: it may change between any two steps
            if bell.deadline > now:
                break
            self.pending.pop(bell, None)
            try:
                bell.ring()
            except Exception as error:  # what a task awaits refuses: that is no reason to spare the others
                self.loop.call_exception_handler({"message": "cancelling a task raised", "exception": error})
        rings_at = min(map(_deadline, [*self.pending]), default=inf)
        if rings_at < self.rings_at:  # else what was rung has set it
            self.set(rings_at, now)


def cancel(task: Any) -> None:
    """Cancel a task of asyncio, beside a cancellation that has not reached it yet: that keeps its message.

    By it, a cancel scope of anyio knows its own; without it, the scope lets the cancellation out.
    """
    task.cancel(task._cancel_message if getattr(task, "_must_cancel", False) else None)


def _no_handle() -> None:
    return None


_deadline = attrgetter("deadline")
_is_firm = attrgetter("is_firm")


@final
class _LoopCloseGuard:
    """Goes with the callback of an alarm, and nowhere else: where a loop drops that, no task will be cut off any more.

    Then the alarm, which is remembered, must not keep the tasks: else their `finally` would never run.

    :param rings_at: when it is to ring. Where the alarm says otherwise, it has been set anew.
    """

    __slots__ = ("alarm", "rings_at")

    def __init__(self, alarm: Alarm, rings_at: float) -> None:
        self.alarm: Alarm | None = alarm  # None once it has rung
        self.rings_at: float = rings_at

    def __del__(self) -> None:
        alarm = self.alarm
        if alarm is not None and alarm.rings_at == self.rings_at:
            alarm.rings_at = inf
            alarm.pending.clear()


@final
class LoopAlarms:
    """The alarms of one loop, by limit."""

    __slots__ = ("by_limit", "loop")

    MOST: ClassVar[int] = 63  # a limit that is computed anew for each call gets no alarm of its own

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self.loop: asyncio.AbstractEventLoop | None = loop
        self.by_limit: dict[float | None, Alarm] = {}

    def is_full(self) -> bool:
        """Whether there is no place for another one, also without those that have rung and serve no timer."""
        if len(self.by_limit) >= self.MOST:
            self.by_limit = {limit: it for limit, it in self.by_limit.items() if it.rings_at < inf}
        return len(self.by_limit) >= self.MOST


class _OfThread(threading.local):
    """The alarms of the loop that ran last in this thread."""

    alarms: LoopAlarms = LoopAlarms(None)


class _Latest:
    """The alarms of the loop that asked last. Nearly always there is one, and to ask the thread takes 100 ns more."""

    __slots__ = ("alarms",)

    def __init__(self) -> None:
        self.alarms: LoopAlarms = LoopAlarms(None)


_of_thread: _OfThread = _OfThread()
_latest: _Latest = _Latest()


def find_alarm(loop: asyncio.AbstractEventLoop, limit: float | None, deadline: float) -> Alarm:
    """Return the alarm for a new timer of this loop."""
    known = _latest.alarms
    alarm = known.by_limit.get(limit) if known.loop is loop else None
    if alarm is None or deadline < alarm.rings_at < inf:
        alarm = _find_alarm(loop, limit, deadline)
    return alarm


def _find_alarm(loop: asyncio.AbstractEventLoop, limit: float | None, deadline: float) -> Alarm:
    """Do so where the latest loop was another one, or has no alarm for this limit."""
    known = _of_thread.alarms
    if known.loop is not loop:
        known = _of_thread.alarms = LoopAlarms(loop)
    _latest.alarms = known
    alarm = known.by_limit.get(limit)
    if limit is not None and (known.is_full() if alarm is None else deadline < alarm.rings_at < inf):
        limit = OTHERS  # the clock may have been put back
    return known.by_limit.setdefault(limit, Alarm(loop, is_firm=limit is not None))


def alarms_of(loop: asyncio.AbstractEventLoop) -> list[Alarm]:
    """Return the alarms of the loop that runs in this thread."""
    known = _of_thread.alarms
    return [*known.by_limit.values()] if known.loop is loop else []
