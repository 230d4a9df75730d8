"""The virtual clock: it stands still while any code runs, and jumps when all code waits.

A wait in virtual time is an entry: until when, and how to see that what it waits for has happened.
Threads, asyncio loops and trio runs enter what they wait for; the one that finds that all others wait as
well sets the clock to the earliest of all deadlines, and those whose deadline that is go on. An
entry that is due, or whose event has happened, counts as work until its owner has left it, so the
clock never runs ahead of code that has been woken but has not yet run.

That is exact for everything that waits on this clock. Other threads may compute, or wait for
something real: a socket, a `Thread.join`, a queue. A thread that was at the same instruction for
`patience` real seconds, and has not run at the last few looks, is taken to wait; how long it has
been there is remembered for as long as it stays. Whether a thread runs is known under Linux only.
Elsewhere only the instruction is known, and a loop that calls nothing written in Python looks like a
wait.

A thread that does neither, because it polls, would hold up the clock for ever. Where nothing has gone on for some real
seconds, no jump and no wait that came to its end, the code that waits gets an error which names that thread.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias, final

from resilience import checks
from resilience.clock import wait_for_real
from resilience.runtimes.workers import Worker
from resilience.testing.stuck import Progress, is_ignored, stuck

if TYPE_CHECKING:
    from resilience.checks import Duration
    from resilience.clock import Waitable

#: How long a waiting thread pauses, in real seconds, before it looks again: from, to.
_SHORTEST_PAUSE = 0.00002
_LONGEST_PAUSE = 0.001

#: How often it looks before it believes that a thread which stood still before has not been woken.
_LOOKS = 4

#: Where a thread stands: its topmost frame, itself, as a later one may have its `id`; and the instruction in it.
_Place: TypeAlias = tuple[FrameType, int]

#: Where workers wait for work: the same for all of them, by the `id` of the code.
_worker_places: set[tuple[int, int]] = set()


@final
@dataclass(eq=False, slots=True)
class _Stand:
    """What is known of a thread that does not wait on this clock.

    :param since: instant on the real clock at which it was first seen there.
    :param ran: for how many seconds it had run at the last look.
    :param calm: at how many looks in a row it has neither run nor been about to.
    """

    place: _Place
    since: float
    ran: float
    calm: int = 0


@final
@dataclass(eq=False, slots=True)
class Wait:
    """One wait.

    :param deadline: an instant on the virtual clock.
    :param has_happened: whether what is waited for has happened; takes nothing away, and may be asked by any thread.
    :param looks: how often its owner has looked around and paused since the wait began.
    """

    deadline: float
    has_happened: Callable[[], bool]
    looks: int = 0

    @property
    def pause(self) -> float:
        """Real seconds until the next look."""
        return min(_LONGEST_PAUSE, _SHORTEST_PAUSE * float(1 << min(self.looks, 10)))


@final
class VirtualClock:
    """A clock that does not pass by itself. Made by `virtual_time()`.

    :param patience: real seconds after which a thread that does not move is taken to wait for something real.
    :param stuck_after: real seconds, beyond the patience, without progress: then code that waits gets an error.
    """

    def __init__(self, patience: float, stuck_after: float) -> None:
        self._time = 0.0
        self._progress = Progress(stuck_after)
        #: Threads, and patterns of names, that are not waited for.
        self.ignored: list[threading.Thread | str] = []
        self._patience = patience
        self._closed = False
        self._lock = threading.RLock()
        self._waits: dict[int, Wait] = {}  # by thread
        self._stands: dict[int, _Stand] = {}  # by thread
        #: What policies have slept, in seconds, in the order in which they began.
        self.sleeps: list[float] = []

    def now(self) -> float:
        """Return the time: seconds since virtual time began."""
        return self._time

    def advance(self, seconds: Duration) -> None:
        """Let `seconds` (zero or more) pass. A wait that ends in it goes on when this thread, or task, next waits."""
        step = checks.seconds("seconds", seconds, zero=True)
        with self._lock:
            self._time += step

    def __repr__(self) -> str:
        return f"<VirtualClock now={self._time:g} sleeps={len(self.sleeps)}>"

    # --- what takes the place of the process clock's functions ---

    def sleep(self, seconds: float) -> None:
        """Let a thread sleep."""
        self.note_sleep(seconds)
        self.wait_until(self._time + seconds, _never, time.sleep)

    def note_sleep(self, seconds: float) -> float:
        """Note how long a task will sleep."""
        self.sleeps.append(seconds)
        return seconds

    def wait(self, waitable: Waitable, seconds: float | None) -> bool:
        """Let a thread wait for a lock that another one releases."""
        deadline = inf if seconds is None else self._time + seconds
        released = _Released(waitable)
        if self.wait_until(deadline, released, time.sleep):
            return True
        if not self._closed:
            return False
        return wait_for_real(waitable, None if seconds is None else max(0.0, deadline - self._time))

    # --- for the code that waits ---

    def wait_until(self, deadline: float, has_happened: Callable[[], bool], pause: Callable[[float], object]) -> bool:
        """Wait until something has happened (true), or until `deadline` or the end of virtual time (false).

        :param pause: waits for so many real seconds, less where it sees that something happened.
        """
        if has_happened():
            return True
        wait = Wait(deadline, has_happened)
        self.enter(wait)
        try:
            while True:
                with self._lock:  # so that this thread is not seen waiting when it has been woken
                    if has_happened():
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
        """Note what this thread waits for."""
        with self._lock:
            self._waits[threading.get_ident()] = wait

    def leave(self) -> None:
        """Forget it again: this thread works."""
        with self._lock:
            self._waits.pop(threading.get_ident(), None)

    def jump(self, mine: Wait) -> bool:
        """Go to the earliest deadline, if all others wait; say whether this was done.

        :raises VirtualTimeStuck: others have neither waited nor gone on for too long.
        """
        with self._lock:
            target = min((wait.deadline for wait in self._waits.values()), default=inf)
            if target == inf or self._closed:
                self._progress.made()  # what is waited for is real, and may take any time
                return False
            # To look takes a while: what one of the others did meanwhile, before it stood still, counts.
            if busy := self._due() or self._busy(mine) or self._due():
                self._check_progress(busy)
                return False
            self._time = target
            self._progress.made()
            return True

    def _check_progress(self, busy: list[int]) -> None:
        seconds = self._progress.missed(time.monotonic())
        if seconds > self._patience + self._progress.limit:
            threads = [it for it in threading.enumerate() if it.ident in busy]
            raise stuck(threads, seconds, self._progress.limit)

    def _due(self) -> list[int]:
        """Return the threads that have been woken, by an event or by time, and have not gone on yet."""
        return [it for it, wait in self._waits.items() if wait.deadline <= self._time or wait.has_happened()]

    def close(self) -> None:
        """End virtual time: what still waits in it goes on, or goes on waiting for real."""
        self._closed = True
        self._stands.clear()

    # --- threads that do not wait on this clock ---

    def _busy(self, mine: Wait) -> list[int]:
        """Return the other threads that do not stand still."""
        others = [it for it in threading.enumerate() if self._counts(it)]
        # Where a thread stood keeps all that its frame knows: no longer than it is asked for.
        for ident in self._stands.keys() - {it.ident for it in others}:
            del self._stands[ident]
        frames = sys._current_frames() if others else {}
        # First where all of them are, then what the kernel knows of them: while that is asked, they run.
        looks = [_Look(it, frames.get(it.ident or 0)) for it in others]
        del frames  # no cycle: one of them is this frame
        return [look.thread.ident or 0 for look in looks if not self._stands_still(look, mine)]

    def _counts(self, thread: threading.Thread) -> bool:
        return thread.ident not in self._waits and not is_ignored(thread, self.ignored)

    def _stands_still(self, look: _Look, mine: Wait) -> bool:
        thread, ident, place = look.thread, look.thread.ident, look.place
        if ident is None or look.is_at_work:
            return False  # it is being started: its starter waits for it to begin, without the clock
        if place is None:
            return isinstance(thread, threading._DummyThread) or not thread.is_alive()  # another one just ends
        if look.worker_place in _worker_places:
            self._stands.pop(ident, None)
            return True
        now, ran, is_runnable = time.monotonic(), _seconds_run(thread), _is_runnable(thread)
        stand = self._stands.get(ident)
        if stand is None or stand.place != place:
            self._stands[ident] = _Stand(place, now, ran)
            return False
        # It may have been woken a moment ago and not have come to run yet: a few pauses let it.
        stand.calm = 0 if is_runnable or ran != stand.ran else stand.calm + 1
        stand.ran = ran
        if now - stand.since < self._patience or min(stand.calm, mine.looks) < _LOOKS:
            return False
        if look.worker_place is not None:
            _worker_places.add(look.worker_place)
        return True


@final
class _Look:
    """Where a thread is at one instant.

    :param frame: its topmost frame, None where it has none.
    """

    __slots__ = ("is_at_work", "place", "thread", "worker_place")

    def __init__(self, thread: threading.Thread, frame: FrameType | None) -> None:
        self.thread: threading.Thread = thread
        self.place: _Place | None = None if frame is None else (frame, frame.f_lasti)
        #: Whether it has been handed a job, and has not begun it.
        self.is_at_work: bool = isinstance(thread, Worker) and thread.has_new_job
        #: Where it waits for work, perhaps.
        self.worker_place: tuple[int, int] | None = None
        if isinstance(thread, Worker) and frame is not None and frame.f_code is Worker.run.__code__:
            self.worker_place = (id(frame.f_code), frame.f_lasti)


@final
class _Released:
    """Whether a lock was released. To ask is to take it, so it is true only once: the answer is kept."""

    __slots__ = ("_is", "_waitable")

    def __init__(self, waitable: Waitable) -> None:
        self._waitable = waitable
        self._is = False

    def __call__(self) -> bool:
        if not self._is:
            self._is = self._waitable.acquire(False)
        return self._is


def _seconds_run(thread: threading.Thread) -> float:
    """Return for how long a thread has run, or waited for a processor to run on."""
    running, _, rest = _from_kernel(thread, "schedstat").partition(" ")
    return (int(running) + int(rest.partition(" ")[0])) / 1e9 if rest else 0.0


def _is_runnable(thread: threading.Thread) -> bool:
    """Whether a thread runs, or has been woken and will."""
    return _from_kernel(thread, "stat").rpartition(")")[2].split(maxsplit=1)[:1] == ["R"]


def _from_kernel(thread: threading.Thread, file: str) -> str:
    try:
        with open(f"/proc/self/task/{thread.native_id}/{file}", encoding="utf-8", errors="replace") as content:
            return content.read()
    except OSError:  # no Linux, or the thread has just ended
        return ""


def _never() -> bool:
    return False
