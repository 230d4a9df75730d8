"""The process clock: the current time, and how a thread waits.

Deadlines and all shared state read `clock.now()`, which is `time.monotonic` unless `resilience.testing` has replaced
it. Wall-clock time is never used, because it jumps. Event loops have clocks of their own (trio's is not
`time.monotonic`), so an instant on this clock is never passed to a loop: a loop gets the number of remaining seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from math import inf
from typing import TYPE_CHECKING, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Callable

#: The longest delay, in seconds (285 years): locks and `time.sleep` count nanoseconds in 63 bits. Longer ones, such as
#: those of an exponential backoff without a cap at its thousandth attempt, are cut to this.
FOREVER = 9_000_000_000.0

#: The longest timeout that every client accepts, in seconds (24.8 days): many count milliseconds in 31 bits.
MAX_CLIENT_TIMEOUT = 2_147_483.0

#: Under Windows, the longest time in seconds until a waiting thread notices Ctrl-C.
_SLICE = 0.1


class Waitable(Protocol):
    """A lock that another thread releases, such as a `threading.Lock`."""

    def acquire(self, blocking: bool = ..., timeout: float = ..., /) -> bool:
        """Wait at most `timeout` seconds; return whether the lock was released."""
        ...


def sleep_for_real(seconds: float) -> None:
    """Block this thread for `seconds`. `time.sleep` is looked up on each call, because gevent may patch it later."""
    time.sleep(seconds)


def wait_for_real(waitable: Waitable, seconds: float | None) -> bool:
    """Block this thread until `waitable` is released (true) or `seconds` have passed (false)."""
    if sys.platform == "win32":
        return _wait_in_slices(waitable, seconds)
    if seconds is None:
        return waitable.acquire()
    return waitable.acquire(True, min(seconds, threading.TIMEOUT_MAX))


def _wait_in_slices(waitable: Waitable, seconds: float | None) -> bool:
    """Wait under Windows, where Ctrl-C is noticed between two slices: before 3.14 it does not interrupt `acquire`."""
    end = inf if seconds is None else time.monotonic() + seconds
    while not waitable.acquire(True, min(_SLICE, max(0.0, end - time.monotonic()))):
        if time.monotonic() >= end:
            return False
    return True


@final
class Clock:
    """Four replaceable functions. They are attributes, not methods, which saves a look-up for each reading."""

    __slots__ = ("now", "shorten", "sleep", "wait")

    now: Callable[[], float]
    sleep: Callable[[float], None]
    shorten: Callable[[float], float]  # seconds that a task should sleep -> seconds that it sleeps
    wait: Callable[[Waitable, float | None], bool]

    def __init__(self) -> None:
        self.restore()

    def restore(self) -> None:
        """Return to real time."""
        self.now = time.monotonic
        self.sleep = sleep_for_real
        self.shorten = float
        self.wait = wait_for_real


clock: Clock = Clock()
