"""Threads that do not wait on the virtual clock: whether they stand still, so that time may jump.

They may compute, or wait for something real: a socket, a `Thread.join`, a queue. A thread stands still if it has been
at the same instruction for `patience` real seconds, and was not running at the last few looks. Whether a thread is
running is known only on Linux. Elsewhere, only the instruction is known, and a loop that calls no Python function looks
like a wait.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TypeAlias, final

from resilience.runtimes.workers import Worker

#: How many looks must find that a thread is not running before it stands still: it may just have been woken.
_MIN_LOOKS = 4

#: The topmost frame of a thread, and the instruction in it. The frame itself, because its `id` may be reused.
_Place: TypeAlias = tuple[FrameType, int]


def real_now(read: Callable[[], float] = time.monotonic) -> float:
    """Return the real time, even while freezegun replaces `time.monotonic` in all modules."""
    return read()


@final
@dataclass(eq=False, slots=True)
class _Standstill:
    """The observations of a thread, since it has been at one place.

    :param since: instant on the real clock at which it was first seen there.
    :param ran: for how many seconds it had run at the last look.
    :param idle_looks: at how many looks in a row it was neither running nor runnable.
    """

    place: _Place
    since: float
    ran: float
    idle_looks: int = 0


@final
class Standstills:
    """The threads that have been seen, and for how long they have been at one place."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._of: dict[int, _Standstill] = {}  # by thread

    def clear(self) -> None:
        """Forget all threads."""
        self._of.clear()

    def moving(self, threads: list[threading.Thread], looks: int) -> list[int]:
        """Return those of the threads that do not stand still.

        :param looks: how often the caller has looked since it began to wait.
        """
        # A stored place keeps a frame alive, with all of its variables, so it is dropped as soon as possible.
        for ident in self._of.keys() - {it.ident for it in threads}:
            del self._of[ident]
        # First who has a new job: a worker that takes it before the places are read no longer waits for one there.
        jobs = [(it, isinstance(it, Worker) and it.has_new_job) for it in threads]
        frames = sys._current_frames() if threads else {}
        # Then the places of all threads: they run while the kernel is asked about them below.
        seen = [(it, _place_of(frames.get(it.ident or 0)), is_new) for it, is_new in jobs]
        del frames  # no cycle: one of them is this frame
        return [it.ident or 0 for it, place, is_new in seen if is_new or not self._stands_still(it, place, looks)]

    def _stands_still(self, thread: threading.Thread, place: _Place | None, looks: int) -> bool:
        ident = thread.ident
        if ident is None or place is None:  # it starts or ends, or Python does not know whether it still runs
            return ident is not None and (isinstance(thread, threading._DummyThread) or not thread.is_alive())
        if place[0].f_code is Worker.wait.__code__:  # a worker without a job
            self._of.pop(ident, None)
            return True
        now, ran, is_runnable = real_now(), _seconds_run(thread), _is_runnable(thread)
        standstill = self._of.get(ident)
        if standstill is None or standstill.place != place:
            self._of[ident] = _Standstill(place, now, ran)
            return False
        # It may just have been woken, but not have run yet. The pauses between several looks let it run.
        standstill.idle_looks = 0 if is_runnable or ran != standstill.ran else standstill.idle_looks + 1
        standstill.ran = ran
        return now - standstill.since >= self._patience and min(standstill.idle_looks, looks) >= _MIN_LOOKS


def _place_of(frame: FrameType | None) -> _Place | None:
    return None if frame is None else (frame, frame.f_lasti)


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
