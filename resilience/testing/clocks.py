"""The virtual clock: it stands still while any code runs, and jumps when all code waits.

Each wait in virtual time is an entry, with a deadline and a predicate for the event that it waits for. Threads, asyncio
loops and trio runs enter their waits. When one of them finds that all others wait, too, it sets the clock to the
earliest deadline, and the owners of the waits with that deadline continue. An entry counts as work as soon as its
deadline has passed or its event has happened, until its owner leaves it. So the clock never runs ahead of code that has
been woken but has not yet run.

This is exact for everything that waits on this clock. Other threads may compute, or wait for something real: a socket,
a `Thread.join`, a queue. A thread counts as waiting if it has been at the same instruction for `patience` real seconds,
and was not running at the last few looks. Whether a thread is running is known only on Linux. Elsewhere, only the
instruction is known, and a loop that calls no Python function looks like a wait. An event loop with open sockets counts
as waiting once it has waited for `patience` real seconds: what it has sent may still be answered.

A thread that polls does neither, and would hold up the clock for ever. If there was no progress for some real seconds
(no jump, and no wait has ended, except for a socket), code that waits on the clock gets an error that names the thread.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from types import FrameType
from typing import TypeAlias, final

from resilience import checks
from resilience.checks import Duration
from resilience.clock import Waitable, wait_for_real
from resilience.runtimes.workers import Worker
from resilience.testing.stuck import Progress, is_ignored, stuck

#: How long a waiting thread pauses, in real seconds, before it looks at the other threads again.
_SHORTEST_PAUSE = 0.00002
_LONGEST_PAUSE = 0.001

#: How many looks must find that a thread is not running before it counts as waiting: it may just have been woken.
_MIN_LOOKS = 4

#: The topmost frame of a thread, and the instruction in it. The frame itself, because its `id` may be reused.
_Place: TypeAlias = tuple[FrameType, int]

#: The places where idle workers wait, the same for all of them: `id` of the code, and instruction.
_worker_places: set[tuple[int, int]] = set()


def real_now(read: Callable[[], float] = time.monotonic) -> float:
    """Return the real time, even while freezegun replaces `time.monotonic` in all modules."""
    return read()


@final
@dataclass(eq=False, slots=True)
class _Standstill:
    """The observations of a thread that does not wait on this clock, since it has been at one place.

    :param since: instant on the real clock at which it was first seen there.
    :param ran: for how many seconds it had run at the last look.
    :param idle_looks: at how many looks in a row it was neither running nor runnable.
    """

    place: _Place
    since: float
    ran: float
    idle_looks: int = 0


@final
@dataclass(eq=False, slots=True)
class Wait:
    """One wait.

    :param deadline: an instant on the virtual clock.
    :param has_happened: whether the event of the wait has happened; called repeatedly, from any thread.
    :param is_real: whether the event may come from outside of this process.
    :param looks: how often its owner has looked at the other threads since the wait began.
    :param began: instant on the real clock.
    :param thread: its owner, or the one whose event loop it is.
    """

    deadline: float
    has_happened: Callable[[], bool]
    is_real: bool = False
    looks: int = 0
    began: float = field(default_factory=real_now)
    thread: threading.Thread = field(default_factory=threading.current_thread)

    @property
    def pause(self) -> float:
        """Real seconds until the next look."""
        return min(_LONGEST_PAUSE, _SHORTEST_PAUSE * float(1 << min(self.looks, 10)))


@final
class VirtualClock:
    """A clock that does not advance by itself. Made by `virtual_time()`.

    :param patience: real seconds after which a thread that stands still counts as waiting for something real.
    :param stuck_after: real seconds without progress, on top of the patience, after which waiting code gets an error.
    """

    def __init__(self, patience: float, stuck_after: float) -> None:
        self._time = 0.0
        self._progress = Progress(stuck_after)
        #: The threads, or patterns of their names, for which the clock does not wait.
        self.ignored: list[threading.Thread | str] = []
        self._patience = patience
        self._closed = False
        self._lock = threading.RLock()
        self._waits: dict[int, Wait] = {}  # by thread
        self._standstills: dict[int, _Standstill] = {}  # by thread
        #: The sleeps of policies, in seconds, in the order in which they began.
        self.sleeps: list[float] = []

    def now(self) -> float:
        """Return the time: seconds since virtual time began."""
        return self._time

    def advance(self, seconds: Duration) -> None:
        """Advance by `seconds` (zero or more). Waits that are over then end when this thread, or task, next waits."""
        step = checks.seconds("seconds", seconds, zero=True)
        with self._lock:
            self._time += step

    def __repr__(self) -> str:
        return f"<VirtualClock now={self._time:g} sleeps={len(self.sleeps)}>"

    # --- replacements for the functions of the process clock ---

    def sleep(self, seconds: float) -> None:
        """Let this thread sleep."""
        self.note_sleep(seconds)
        self.wait_until(self._time + seconds, lambda: False, time.sleep)

    def note_sleep(self, seconds: float) -> float:
        """Record how long a task will sleep."""
        self.sleeps.append(seconds)
        return seconds

    def wait(self, waitable: Waitable, seconds: float | None) -> bool:
        """Wait for a lock that another thread releases."""
        deadline = inf if seconds is None else self._time + seconds
        released = _Released(waitable)
        if self.wait_until(deadline, released, time.sleep):
            return True
        if not self._closed:
            return False
        return wait_for_real(waitable, None if seconds is None else max(0.0, deadline - self._time))

    # --- for the code that waits ---

    def wait_until(
        self,
        deadline: float,
        has_happened: Callable[[], bool],
        pause: Callable[[float], object],
        *,
        is_real: bool = False,
    ) -> bool:
        """Wait until the event has happened (true), or until `deadline` or the end of virtual time (false).

        :param pause: waits for a number of real seconds; it may return earlier if the event happens.
        :param is_real: whether the event may come from outside of this process.
        """
        if has_happened():
            return True
        wait = Wait(deadline, has_happened, is_real)
        self.enter(wait)
        try:
            while True:
                with self._lock:  # so that no other thread sees this one waiting after it was woken
                    if has_happened():
                        if not is_real:
                            self._progress.made()
                        self.leave()
                        return True
                    if self._time >= deadline or self._closed:
                        self.leave()
                        return False
                    jumped = self.jump(wait)
                if not jumped:
                    pause(wait.pause)
                    wait.looks += 1
        finally:
            self.leave()

    def enter(self, wait: Wait) -> None:
        """Register the wait of this thread."""
        with self._lock:
            self._waits[threading.get_ident()] = wait

    def leave(self) -> None:
        """Remove the wait of this thread, which works now."""
        with self._lock:
            self._waits.pop(threading.get_ident(), None)

    def jump(self, mine: Wait) -> bool:
        """Set the clock to the earliest deadline if all other threads wait; return whether this was done.

        :raises VirtualTimeStuck: there was no progress for too long.
        """
        with self._lock:
            target = min((wait.deadline for wait in self._waits.values()), default=inf)
            if target == inf or self._closed:
                self._progress.made()  # all waits are for real events, which may take any time
                return False
            # The check of the other threads takes a while, in which one of them may have woken another one.
            if busy := self._due() or self._busy(mine) or self._due():
                self._check_progress(busy)
                return False
            self._time = target
            self._progress.made()
            return True

    def _check_progress(self, busy: list[int]) -> None:
        if busy == [threading.get_ident()]:
            return  # this event loop waits for a socket, for no longer than the patience
        seconds = self._progress.missed(real_now())
        if seconds > self._patience + self._progress.limit:
            threads = [it for it in threading.enumerate() if it.ident in busy]
            self._progress.made()  # the code that gets the error may end the standstill, before others get it, too
            raise stuck(threads, seconds, self._progress.limit)

    def _due(self) -> list[int]:
        """Return the threads that have been woken, by an event or by time, or may be by something real."""
        return [it for it, wait in self._waits.items() if wait.deadline <= self._time or self._may_happen(wait)]

    def _may_happen(self, wait: Wait) -> bool:
        """Whether the event of a wait has happened, or may do so although this process does nothing for it."""
        is_patient = wait.is_real and real_now() - wait.began < self._patience
        return (is_patient and not is_ignored(wait.thread, self.ignored)) or wait.has_happened()

    def close(self) -> None:
        """End virtual time: sleeps that are not over end at once, and waits for a lock continue in real time."""
        self._closed = True
        self._standstills.clear()

    # --- threads that do not wait on this clock ---

    def _busy(self, mine: Wait) -> list[int]:
        """Return the other threads that do not stand still."""
        others = [it for it in threading.enumerate() if self._counts(it)]
        # A stored place keeps a frame alive, with all of its variables, so it is dropped as soon as possible.
        for ident in self._standstills.keys() - {it.ident for it in others}:
            del self._standstills[ident]
        frames = sys._current_frames() if others else {}
        # Read the places of all threads first: they run while the kernel is asked about them below.
        looks = [_Look(it, frames.get(it.ident or 0)) for it in others]
        del frames  # no cycle: one of them is this frame
        return [look.thread.ident or 0 for look in looks if not self._stands_still(look, mine)]

    def _counts(self, thread: threading.Thread) -> bool:
        return thread.ident not in self._waits and not is_ignored(thread, self.ignored)

    def _stands_still(self, look: _Look, mine: Wait) -> bool:
        thread, ident, place = look.thread, look.thread.ident, look.place
        if ident is None or look.is_at_work:
            return False  # the thread starts, or has a new job
        if place is None:
            return isinstance(thread, threading._DummyThread) or not thread.is_alive()  # other threads are ending
        if look.worker_place in _worker_places:
            self._standstills.pop(ident, None)
            return True
        now, ran, is_runnable = real_now(), _seconds_run(thread), _is_runnable(thread)
        standstill = self._standstills.get(ident)
        if standstill is None or standstill.place != place:
            self._standstills[ident] = _Standstill(place, now, ran)
            return False
        # It may just have been woken, but not have run yet. The pauses between several looks let it run.
        standstill.idle_looks = 0 if is_runnable or ran != standstill.ran else standstill.idle_looks + 1
        standstill.ran = ran
        if now - standstill.since < self._patience or min(standstill.idle_looks, mine.looks) < _MIN_LOOKS:
            return False
        if look.worker_place is not None:
            _worker_places.add(look.worker_place)
        return True


@final
class _Look:
    """The place of a thread at one instant.

    :param frame: its topmost frame; None if it has none.
    """

    __slots__ = ("is_at_work", "place", "thread", "worker_place")

    def __init__(self, thread: threading.Thread, frame: FrameType | None) -> None:
        self.thread: threading.Thread = thread
        self.place: _Place | None = None if frame is None else (frame, frame.f_lasti)
        #: Whether it has been given a job that it has not begun.
        self.is_at_work: bool = isinstance(thread, Worker) and thread.has_new_job
        #: The place where it may be waiting for a job; None for other threads.
        self.worker_place: tuple[int, int] | None = None
        if isinstance(thread, Worker) and frame is not None and frame.f_code is Worker.run.__code__:
            self.worker_place = (id(frame.f_code), frame.f_lasti)


@final
class _Released:
    """A predicate for whether a lock was released. It acquires the lock, so it stores a true answer."""

    __slots__ = ("_is", "_waitable")

    def __init__(self, waitable: Waitable) -> None:
        self._waitable = waitable
        self._is = False

    def __call__(self) -> bool:
        if not self._is:
            self._is = self._waitable.acquire(False)
        return self._is


def _seconds_run(thread: threading.Thread) -> float:
    """Return for how many seconds a thread has run, or waited for a processor."""
    running, _, rest = _from_kernel(thread, "schedstat").partition(" ")
    return (int(running) + int(rest.partition(" ")[0])) / 1e9 if rest else 0.0


def _is_runnable(thread: threading.Thread) -> bool:
    """Whether a thread is running, or has been woken and is about to run."""
    return _from_kernel(thread, "stat").rpartition(")")[2].split(maxsplit=1)[:1] == ["R"]


def _from_kernel(thread: threading.Thread, file: str) -> str:
    try:
        with open(f"/proc/self/task/{thread.native_id}/{file}", encoding="utf-8", errors="replace") as content:
            return content.read()
    except OSError:  # not on Linux, or the thread has just ended
        return ""
