"""Virtual time that is held up: the threads that it ignores, and the error for a thread that never waits.

The clock waits for every thread that works. A thread that polls (an idle `http.server` does, twice per second) never
stops, so without a limit, code that waits in virtual time would wait for ever.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable
from fnmatch import fnmatchcase
from types import FrameType
from typing import TypeAlias

from resilience import checks
from resilience.errors import Misuse

#: Threads that virtual time does not wait for: the thread itself, or its name, in which `*` stands for anything.
Ignored: TypeAlias = Iterable[threading.Thread | str]

#: How many frames of each thread the error shows, and how many threads.
_CALLS_SHOWN = 4
_THREADS_SHOWN = 5


class VirtualTimeStuck(Misuse, RuntimeError):
    """A thread that neither waits nor ends holds up virtual time, for which other code waits."""


def checked(ignore: Ignored) -> tuple[threading.Thread | str, ...]:
    """Return `ignore` as a tuple; raise an error if it contains anything but threads and names."""
    named = checks.several("ignore", ignore, f"a list of threads or of their names, as [{ignore!r}]")
    for each in named:
        if not isinstance(each, (str, threading.Thread)):
            raise TypeError(f"ignore must have threads or their names in it, not {each!r}")
    return named


def is_ignored(thread: threading.Thread, ignored: Iterable[threading.Thread | str]) -> bool:
    """Whether a thread, or its name, is in `ignored`."""
    return any(it in (thread, thread.name) or (isinstance(it, str) and fnmatchcase(thread.name, it)) for it in ignored)


def stuck(threads: list[threading.Thread], seconds: float, limit: float) -> VirtualTimeStuck:
    """Return the error that names the threads which hold up the clock.

    :param seconds: for how many real seconds.
    :param limit: the current `stuck_after`.
    """
    frames = sys._current_frames()
    shown = [f"  thread {it.name!r} is {_where(frames.get(it.ident or 0))}" for it in threads[:_THREADS_SHOWN]]
    if len(threads) > _THREADS_SHOWN:
        shown.append(f"  and {len(threads) - _THREADS_SHOWN} more")
    names = [it.name for it in threads[:_THREADS_SHOWN]]
    return VirtualTimeStuck(
        f"virtual time has stood still for {seconds:.3g} real seconds, waiting for a thread that works or polls:\n"
        + "\n".join(shown)
        + f"\nIf it has no part in the test, leave it out: virtual_time(ignore={names!r}). "
        f"If it needs longer, allow that: virtual_time(stuck_after={2 * limit:g})."
    )


def _where(frame: FrameType | None) -> str:
    if frame is None:
        return "about to begin or to end"
    calls = list(reversed(traceback.extract_stack(frame)))[:_CALLS_SHOWN]
    return "at " + ", called from ".join(f"{call.filename}:{call.lineno} in {call.name}" for call in calls)
