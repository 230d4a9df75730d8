"""The virtual clock: it stands still while any code runs, and jumps when all code waits.

Each wait in virtual time is an entry, with a deadline and a predicate for the event that it waits for. Threads, asyncio
loops and trio runs enter their waits. When one of them finds that all others wait, too, it sets the clock to the
earliest deadline, and the owners of the waits with that deadline continue. An entry counts as work as soon as its
deadline has passed or its event has happened, until its owner leaves it. So the clock never runs ahead of code that has
been woken but has not yet run.

This is exact for everything that waits on this clock. Other threads count as waiting once they stand still (see
`standstills`), and so does an event loop with open sockets once it has waited for `patience` real seconds: what it has
sent may still be answered.

A thread that polls does neither, and would hold up the clock for ever. If there was no progress for some real seconds
(no jump, and no wait has ended, except for a socket), code that waits on the clock gets an error that names the thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import final

from resilience import checks
from resilience.checks import Duration
from resilience.clock import Waitable, wait_for_real
from resilience.testing.standstills import Standstills, real_now
from resilience.testing.stuck import is_ignored, stuck

#: How long a waiting thread pauses, in real seconds, before it looks at the other threads again.
_SHORTEST_PAUSE = 0.00002
_LONGEST_PAUSE = 0.001


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
        self._stuck_after = stuck_after
        self._stuck_since: float | None = None  # on the real clock; None if there was progress
        #: The threads, or patterns of their names, for which the clock does not wait.
        self.ignored: list[threading.Thread | str] = []
        self._patience = patience
        self._closed = False
        self._lock = threading.RLock()
        self._waits: dict[int, Wait] = {}  # by thread
        self._standstills = Standstills(patience)
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
        is_released = False

        def released() -> bool:  # it acquires the lock, so a true answer is kept
            nonlocal is_released
            is_released = is_released or waitable.acquire(False)
            return is_released

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
        try:
            while True:
                with self._lock:  # so that no other thread sees this one waiting after it was woken
                    happened = has_happened()
                    if happened and not is_real:
                        self._stuck_since = None
                    if happened or self._time >= deadline or self._closed:
                        self.leave()
                        return happened
                    jumped = self.jump(wait)
                if not jumped:
                    pause(wait.pause)
                    wait.looks += 1
        finally:
            self.leave()

    def leave(self) -> None:
        """Remove the wait of this thread, which works now."""
        with self._lock:
            self._waits.pop(threading.get_ident(), None)

    def jump(self, mine: Wait) -> bool:
        """Register this thread's wait. If all others wait, set the clock to the earliest deadline, and return true.

        :raises VirtualTimeStuck: there was no progress for too long.
        """
        with self._lock:
            self._waits[threading.get_ident()] = mine  # each time, as a signal handler may have waited in this thread
            target = min((wait.deadline for wait in self._waits.values()), default=inf)
            if target == inf or self._closed:
                self._stuck_since = None  # all waits are for real events, which may take any time
                return False
            # The check of the other threads takes a while, in which one of them may have woken another one.
            if busy := self._due() or self._busy(mine.looks) or self._due():
                self._check_progress(busy)
                return False
            self._time = target
            self._stuck_since = None
            return True

    def _check_progress(self, busy: list[int]) -> None:
        if busy == [threading.get_ident()]:
            return  # this event loop waits for a socket, for no longer than the patience
        now = real_now()
        if self._stuck_since is None:
            self._stuck_since = now
        seconds = now - self._stuck_since
        if seconds > self._patience + self._stuck_after:
            threads = [it for it in threading.enumerate() if it.ident in busy]
            self._stuck_since = None  # the code that gets the error may end the standstill, before others get it, too
            raise stuck(threads, seconds, self._stuck_after)

    def _due(self) -> list[int]:
        """Return the threads that have been woken, by an event or by time, or may be by something real."""
        return [it for it, wait in self._waits.items() if wait.deadline <= self._time or self._may_happen(wait)]

    def _may_happen(self, wait: Wait) -> bool:
        """Whether the event of a wait has happened, or may do so although this process does nothing for it."""
        is_patient = wait.is_real and real_now() - wait.began < self._patience
        return (is_patient and not is_ignored(wait.thread, self.ignored)) or wait.has_happened()

    def _busy(self, looks: int) -> list[int]:
        """Return the threads that neither wait on this clock nor stand still."""
        threads = [it for it in threading.enumerate() if it.ident not in self._waits]
        return self._standstills.moving([it for it in threads if not is_ignored(it, self.ignored)], looks)

    def close(self) -> None:
        """End virtual time: sleeps that are not over end at once, and waits for a lock continue in real time."""
        self._closed = True
        self._standstills.clear()
