"""Timers of asyncio tasks: the semantics of `asyncio.timeout`, at a fifth of its cost.

`asyncio.timeout` creates a handle for every block, queues it, and cancels it when the block ends in time, which it
nearly always does: 2 to 3 us. Here an alarm, which has one handle, serves all timers with the same limit:

    pending    the timers; a dictionary, so that any of them can be removed in constant time
    rings_at   the earliest deadline when the alarm was set; it does not change when that timer is removed

When the alarm rings, it fires each timer that is due, and is set again for the earliest deadline left. The limit of a
`Timeout` is constant, so its timers are due in the order in which they begin. If calls end well before their limit, the
alarm rings about once per limit, however many calls there are, and each call costs two writes to a dictionary. Beyond
`LoopAlarms.MAX` limits (they may be computed for each call), all timers share one alarm, which is set again for a timer
that is due earlier. Races share another one, which rings when the next attempt of one of them is due.

Timers that inherit the deadline of an outer block share a third alarm. They give way to the outer timer: it may belong
to another task, which passes its cancellation on to this one at once (a task group does). A task that is cancelled in
that way is left to clean up, and not cancelled a second time.

The alarms of a loop are kept until another loop in the same thread needs alarms. A loop that is closed while tasks
still run drops its handles, and then its alarms drop their timers, or those tasks would never run their `finally`
blocks. So an alarm refers to its handle weakly.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import weakref
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, final

from typing_extensions import override

from resilience.clock import clock
from resilience.runtimes.base import Expired, Timer
from resilience.runtimes.current import asyncio_task

if TYPE_CHECKING:
    import asyncio


#: The key of the alarm that the races of a loop share, in the place of a limit.
RACES: Final = -1.0

#: The key of the alarm that timers share if their limit has no alarm of its own.
OTHER_LIMITS: Final = 0.0

#: For how many iterations of the event loop a timer gives way, and after how many seconds it checks its block again. A
#: task group passes a cancellation on in the iteration in which it gets it, so nearly as many groups may be nested.
GIVE_WAY_ROUNDS: Final = 10
RECHECK_DELAY: Final = 0.05


class Entry(Protocol):
    """An entry of an alarm: a timer, or a race."""

    deadline: float

    def fire(self) -> None:
        """Do what is due at `deadline`. A no-op for a timer whose block has ended."""
        ...


@final
class AsyncioTimer(Timer):
    """`asyncio.timeout` with a deadline on the process clock, and without an exception of its own.

    The runtime sets its attributes: a constructor would be 4 % of a call under five policies.
    """

    __slots__ = ("_cancelling", "alarm", "deadline", "fired", "task")

    deadline: float
    fired: bool  # while the block runs: whether this timer has cancelled its task
    task: asyncio.Task[Any]  # deleted at the end of the block
    alarm: Alarm

    _cancelling: int  # how many requests to cancel the task do not concern the block, as they came before it

    @override
    def covers_this_code(self) -> bool:
        task = getattr(self, "task", None)
        return task is not None and task is asyncio_task()

    @override
    def start(self) -> None:
        self._cancelling = self.task.cancelling()
        alarm = self.alarm
        if self.deadline < alarm.rings_at:  # always, if the time is up already
            if getattr(self.task, "_must_cancel", False):
                self._cancelling -= 1  # not delivered yet: it reaches the block, with the request of this timer
            alarm.set(self.deadline, clock.now())
        alarm.pending[self] = None  # last: nothing below can fail, so the alarm is set for every timer in `pending`

    def fire(self) -> None:
        """Cut off the block, unless it has ended, perhaps in a finalizer that runs in the middle of this method."""
        task = getattr(self, "task", None)
        if task is None:
            return
        if self.alarm.is_firm:
            self._cut_off(task)
        else:
            self._give_way(task.cancelling(), GIVE_WAY_ROUNDS)

    def _cut_off(self, task: asyncio.Task[Any]) -> None:
        self.fired = True
        cancel(task)

    def _give_way(self, cancelling: int, rounds: int) -> None:
        """Cut off the block, unless an outer timer cancels its task within `rounds` iterations of the event loop.

        :param cancelling: `task.cancelling()` when this timer was due.
        """
        task, loop = getattr(self, "task", None), self.alarm.loop
        if task is None:
            return
        if task.cancelling() > cancelling:  # if the block outlives that, its time is over nevertheless
            loop.call_later(RECHECK_DELAY, self._give_way, cancelling, 0)
        elif rounds:
            loop.call_soon(self._give_way, cancelling, rounds - 1)
        else:
            self._cut_off(task)

    @override
    def stop(self, error: BaseException | None) -> bool:
        task = self.task
        del self.task  # no cycle: task -> its exception -> traceback -> frame -> this timer -> task
        mine = isinstance(error, Expired) and error.timer is self
        if not self.fired:
            self.alarm.pending.pop(self, None)
        # If more are left, another request concerns the block, and its cancellation must not end here.
        elif task.uncancel() <= self._cancelling:
            mine = isinstance(error, (sys.modules["asyncio"].CancelledError, Expired))  # an import would cost 400 ns
        self.fired = mine
        return mine


@final
class Alarm:
    """One handle of an event loop, for all timers with one limit, or with no limit, or for all races."""

    __slots__ = ("_handle", "is_firm", "loop", "pending", "rings_at")

    def __init__(self, loop: asyncio.AbstractEventLoop, is_firm: bool) -> None:
        self.loop: asyncio.AbstractEventLoop = loop
        self.is_firm: bool = is_firm  # whether its timers fire without giving way
        self.pending: dict[Entry, None] = {}
        self.rings_at: float = inf  # an instant on the process clock; infinity if the alarm is not set
        self._handle: weakref.ref[asyncio.Handle] | None = None

    def set(self, rings_at: float, now: float) -> None:
        """Ring at this instant. The context is empty, because an alarm outlives the call that happens to set it."""
        handle: asyncio.Handle
        if rings_at > now:
            handle = self.loop.call_later(rings_at - now, self._ring, rings_at, context=contextvars.Context())
        else:  # at the first `await` of the block: a timer would let it run one step further
            handle = self.loop.call_soon(self._ring, rings_at, context=contextvars.Context())
        previous = None if self._handle is None else self._handle()
        self._handle, self.rings_at = weakref.ref(handle, self._drop_timers), rings_at
        if previous is not None:
            previous.cancel()

    def _drop_timers(self, handle: weakref.ref[asyncio.Handle]) -> None:
        """Drop all timers, because the loop has dropped the handle before the alarm rang: the loop was closed."""
        self.rings_at = inf
        self.pending.clear()

    def clear_if_idle(self) -> bool:
        """Return whether no timer is pending. If so, the alarm counts as unset, and the caller cancels its handle."""
        if self.pending:
            return False
        self.rings_at = inf
        return True

    def _ring(self, rings_at: float) -> None:
        self.rings_at, self._handle = inf, None
        now = rings_at  # a lower bound, in case the clock raises, or the loop is early
        try:
            now = max(now, clock.now())
        finally:
            # All alarms that are due ring together: a handle is late if the thread stood still after reading the clock.
            # Those that give way ring first, to read `cancelling()` before others cancel tasks.
            for alarm in sorted({self, *find_due_alarms(self.loop, now)}, key=_is_firm):
                alarm._fire_due(now)

    def _fire_due(self, now: float) -> None:
        """Fire all entries that are due by now, and set the alarm for the earliest deadline left."""
        rings_at = inf
        for entry in sorted(self.pending, key=_deadline):  # a copy: `pending` may change between any two steps
            if entry.deadline > now:
                rings_at = entry.deadline
                break
            self.pending.pop(entry, None)
            try:
                entry.fire()
            except Exception as error:  # the awaited object refuses cancellation; the others fire nevertheless
                self.loop.call_exception_handler({"message": "cancelling a task raised", "exception": error})
        if rings_at < self.rings_at:  # otherwise an entry that fired has set the alarm
            self.set(rings_at, now)


def cancel(task: Any) -> None:
    """Cancel an asyncio task, and keep the message of a cancellation that has not been delivered yet.

    A cancel scope of anyio recognizes its own cancellation by that message, and would otherwise let it out.
    """
    task.cancel(task._cancel_message if getattr(task, "_must_cancel", False) else None)


_deadline = attrgetter("deadline")
_is_firm = attrgetter("is_firm")


@final
class LoopAlarms:
    """The alarms of one loop, by limit."""

    __slots__ = ("by_limit", "loop")

    MAX: ClassVar[int] = 63  # limits that are computed for each call must not get an alarm each

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self.loop: asyncio.AbstractEventLoop | None = loop
        self.by_limit: dict[float | None, Alarm] = {}

    def make_room(self) -> bool:
        """If there are `MAX` alarms, drop those that are not set; return whether there is room for one more."""
        if len(self.by_limit) >= self.MAX:
            self.by_limit = {limit: it for limit, it in self.by_limit.items() if it.rings_at < inf}
        return len(self.by_limit) < self.MAX


class _OfThread(threading.local):
    """The alarms of the loop that ran last in this thread."""

    alarms: LoopAlarms = LoopAlarms(None)


_of_thread: _OfThread = _OfThread()

#: The alarms of the loop that needed one last. Most programs have one loop; a thread-local costs 100 ns more.
_latest: LoopAlarms = _of_thread.alarms


def find_alarm(loop: asyncio.AbstractEventLoop, limit: float | None, deadline: float) -> Alarm:
    """Return the alarm for a new timer of this loop."""
    known = _latest
    alarm = known.by_limit.get(limit) if known.loop is loop else None
    if alarm is None or deadline < alarm.rings_at < inf:
        alarm = _find_alarm(loop, limit, deadline)
    return alarm


def _find_alarm(loop: asyncio.AbstractEventLoop, limit: float | None, deadline: float) -> Alarm:
    """Find the alarm if `_latest` has none for this loop and limit, or one that rings after `deadline`."""
    global _latest
    known = _of_thread.alarms
    if known.loop is not loop:
        known = _of_thread.alarms = LoopAlarms(loop)
    _latest = known
    alarm = known.by_limit.get(limit)
    if limit is not None and (not known.make_room() if alarm is None else deadline < alarm.rings_at < inf):
        limit = OTHER_LIMITS  # the deadlines may be out of order if the clock was put back
    return known.by_limit.setdefault(limit, Alarm(loop, is_firm=limit is not None))


def find_due_alarms(loop: asyncio.AbstractEventLoop, now: float) -> list[Alarm]:
    """Return the alarms of the loop that runs in this thread that ring by now."""
    known = _of_thread.alarms
    if known.loop is not loop:
        return []
    return [it for it in tuple(known.by_limit.values()) if it.rings_at <= now]  # a copy: a finalizer may add an alarm
