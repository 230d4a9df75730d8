"""Virtual time for a whole process: `with virtual_time() as clock:`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from resilience import checks, forks
from resilience.checks import Duration
from resilience.clock import clock as process_clock
from resilience.testing.clocks import VirtualClock
from resilience.testing.loops import loops_in
from resilience.testing.replacing import replaced
from resilience.testing.stuck import Ignored, checked

_lock = forks.lock_of(sys.modules[__name__])  # held while a block begins or ends
_running: list[VirtualClock] = []  # the active clock, once for each open block
_replaced = ExitStack()  # closed with the last open block, which need not be the first one


@contextmanager
def virtual_time(
    *, patience: Duration = 0.05, ignore: Ignored = (), stuck_after: Duration = 5.0
) -> Iterator[VirtualClock]:
    """Run all waits in this block in virtual time: an hour of backoff takes no real time.

    The process clock begins at 0. It stands still while any code runs, and jumps to the next event when all code waits.
    This covers all waits of this library in threads, and all waits in an asyncio or trio event loop, including
    your own `asyncio.sleep` and `trio.sleep`. A nested or concurrent block shares the clock of the first one, with its
    patience and limit; the threads that it ignores are ignored in addition. Virtual time ends with the last block.

    `time.sleep`, sockets and other real waits stay real. A thread that is in one for longer than `patience` counts as
    hanging, so that the timeouts around it fire. So does an event loop that waits for a socket.

    A polling thread holds up the clock. After `stuck_after` real seconds without progress, code that waits in virtual
    time fails with an error that names the thread.

    :param patience: real seconds, 0.05 by default. Use more if your code waits for real servers.
    :param ignore: threads, or their names, that are irrelevant to the test; in a name, `*` stands for anything.
    :param stuck_after: real seconds, 5 by default, on top of the patience. Use more if a thread computes for longer.

    Policies that were used before the block hold instants of the real clock, or of an earlier block. `breaker.close()`
    resets those of a circuit, and `limiter.reset()` those of a limiter. Not for production, and not for event loops
    with their own timers (uvloop).

    :raises RuntimeError: in a running loop with its own timers; also in code that waits while the clock is held up.

    >>> from resilience import Retry
    >>> from resilience.testing import script, virtual_time
    >>> fetch = script(ConnectionError(), ConnectionError(), "fine")
    >>> with virtual_time() as clock:
    ...     Retry(backoff=[60, 3600]).call(fetch)
    'fine'
    >>> clock.sleeps, clock.now()
    ([60.0, 3600.0], 3660.0)
    """
    clock = VirtualClock(checks.seconds("patience", patience), checks.seconds("stuck_after", stuck_after))
    ignored = checked(ignore)
    with _lock:
        if _running:
            clock = _running[0]
        else:
            _begin(clock)
        _running.append(clock)
        clock.ignored += ignored
    try:
        yield clock
    finally:
        with _lock:
            _running.remove(clock)
            for each in ignored:
                clock.ignored.remove(each)
            if not _running:
                _replaced.close()


def _begin(clock: VirtualClock) -> None:
    with ExitStack() as stack:
        stack.callback(clock.close)
        functions = {"now": clock.now, "sleep": clock.sleep, "wait": clock.wait, "shorten": clock.note_sleep}
        stack.enter_context(replaced(process_clock, **functions))
        stack.enter_context(loops_in(clock))
        _replaced.push(stack.pop_all())
