"""The one process clock: what time it is, and how a thread waits for it to pass.

Deadlines and all shared state read `clock.now()`, which is `time.monotonic` unless
`resilience.testing` has put another clock in its place. Wall-clock time is never used: it jumps.
Event loops have clocks of their own (trio's is not `time.monotonic`), so an instant on this clock
never leaves it; what crosses to a loop is the number of seconds that remain.
"""

from __future__ import annotations

import sys
import threading
import time
from math import inf
from typing import TYPE_CHECKING, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Callable

#: The longest wait that every platform's lock can express, in seconds (about 292 years). What
#: would be longer, an exponential without a cap at its thousandth attempt, is cut to this.
FOREVER = 9_000_000_000.0

#: The longest timeout that every client can take, in seconds (24.8 days): many count milliseconds in 31 bits.
LONGEST_OF_CLIENTS = 2_147_483.0

#: How long a thread waits at most before it notices Ctrl-C under Windows, in seconds.
_SLICE = 0.1


class Waitable(Protocol):
    """What a thread can wait on: a `threading.Lock` that another thread releases."""

    def acquire(self, blocking: bool = ..., timeout: float = ..., /) -> bool:
        """Wait at most `timeout` seconds; say whether it was released."""
        ...


def sleep_for_real(seconds: float) -> None:
    """Block this thread for so long. The function is looked up here: gevent may have patched it after our import."""
    time.sleep(seconds)


def wait_for_real(waitable: Waitable, seconds: float | None) -> bool:
    """Block this thread until `waitable` is released or `seconds` have passed; say which."""
    if sys.platform == "win32":
        return _wait_in_slices(waitable, seconds)
    if seconds is None:
        return waitable.acquire()
    return waitable.acquire(True, min(seconds, threading.TIMEOUT_MAX))


def _wait_in_slices(waitable: Waitable, seconds: float | None) -> bool:
    """Do the same under Windows, where Ctrl-C does not interrupt `Lock.acquire`: it comes between two slices."""
    end = inf if seconds is None else time.monotonic() + seconds
    while not waitable.acquire(True, min(_SLICE, max(0.0, end - time.monotonic()))):
        if time.monotonic() >= end:
            return False
    return True


@final
class Clock:
    """Four replaceable functions. They are attributes, not methods: one look-up less per reading."""

    __slots__ = ("now", "shorten", "sleep", "wait")

    now: Callable[[], float]
    sleep: Callable[[float], None]
    shorten: Callable[[float], float]  # how long a task sleeps that should sleep so long
    wait: Callable[[Waitable, float | None], bool]

    def __init__(self) -> None:
        self.restore()

    def restore(self) -> None:
        """Go back to real time."""
        self.now = time.monotonic
        self.sleep = sleep_for_real
        self.shorten = float
        self.wait = wait_for_real


clock: Clock = Clock()
