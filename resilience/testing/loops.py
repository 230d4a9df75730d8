"""Event loops in virtual time: those of asyncio and of trio, also one that is running already.

A loop has a clock and a place where it waits. While virtual time runs, both are ours:

- asyncio's `BaseEventLoop` asks `self.time()` and waits in `self._selector.select(timeout)`. Each loop is
  adopted when it is first used: its selector then stands behind one that waits in virtual time.
- trio's `SystemClock` is asked for the time, and how long to wait where no task can run. Public `Clock`s are
  handed to `trio.run` only, which users call without one.

A loop that is running already goes on from the time that it has; so it does when virtual time ends, and is
ahead of real time from then on. No timers are touched, and each has as much time left as before.

Both are replaced on the classes, because loops are made anew by `asyncio.run`, `trio.run` and test plugins,
where they can't be handed anything (asyncio's policies could, and are deprecated).
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import threading
import time
from asyncio import base_events
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, NoReturn, final

from typing_extensions import override

from resilience.runtimes.alarms import Alarm
from resilience.testing.clocks import VirtualClock, Wait
from resilience.testing.stuck import VirtualTimeStuck

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def loops_in(clock: VirtualClock) -> Iterator[None]:
    """Run every event loop of this process on `clock`."""
    with ExitStack() as stack:
        stack.enter_context(_asyncio_in(clock))
        if importlib.util.find_spec("trio") is not None:
            stack.enter_context(_trio_in(clock))
        yield


# --- what time it is for a loop --------------------------------------------------------------


@final
class _Instant(float):
    """An instant of a loop's time that knows which virtual one it is.

    `loop.time() + 0.3` is when the loop wakes a task. Subtracted again from what was added, the base of the loop
    leaves 0.29999999999995, and an open period of 0.3 s would not be over then.
    """

    __slots__ = ("clock", "virtual")

    clock: VirtualClock
    virtual: float

    @override
    def __add__(self, seconds: float, /) -> float:
        return _instant(float(self) + seconds, self.clock, self.virtual + seconds)

    __radd__ = __add__


def _instant(time: float, clock: VirtualClock, virtual: float) -> float:
    instant = _Instant(time)
    instant.clock, instant.virtual = clock, virtual
    return instant


@final
class _LoopTime:
    """A loop's own time, which may have begun before virtual time did.

    :param base: what it was when the virtual clock stood at zero.
    """

    def __init__(self, clock: VirtualClock, base: float) -> None:
        self._clock = clock
        self._base = base
        self._reached = base

    def now(self) -> float:
        """Return what time it is for the loop."""
        virtual = self._clock.now()
        return _instant(max(self._base + virtual, self._reached), self._clock, virtual)

    def to_virtual(self, instant: float) -> float:
        """Return when an instant of the loop's comes on the virtual clock."""
        if isinstance(instant, _Instant) and instant.clock is self._clock:
            return instant.virtual
        return instant - self._base

    def reach(self, instant: float) -> None:
        """Take it that an instant has come: the loop compares its own rounded sums."""
        self._reached = max(self._reached, float(instant))


# --- asyncio ---------------------------------------------------------------------------------


@contextmanager
def _asyncio_in(clock: VirtualClock) -> Iterator[None]:
    loops = _AsyncioLoops(clock)
    loop_class: Any = base_events.BaseEventLoop
    run_once, time = loop_class._run_once, loop_class.time

    def run_once_adopted(loop: Any) -> None:
        loops.adopt(loop)
        run_once(loop)

    def time_adopted(loop: Any) -> float:
        return loops.time(loop)

    loop_class._run_once, loop_class.time = run_once_adopted, time_adopted
    try:
        if (running := asyncio._get_running_loop()) is not None:
            if not isinstance(running, loop_class):
                raise RuntimeError(
                    f"virtual time needs a loop of asyncio's, not {running!r}, which brings its own timers"
                )
            loops.adopt(running, is_fresh=False)
        yield
    finally:
        loop_class._run_once, loop_class.time = run_once, time
        loops.release()


@final
class _AsyncioLoops:
    """The loops that run on a clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._real_time: Callable[[Any], float] = base_events.BaseEventLoop.time
        self._adopted: dict[int, _Selector] = {}  # by the id of the loop

    def adopt(self, loop: Any, *, is_fresh: bool = True) -> None:
        """Let a loop run on the clock: in its own thread, or where it does not run yet."""
        if id(loop) in self._adopted or loop._thread_id not in (None, threading.get_ident()) or loop.is_closed():
            return
        ahead = vars(loop).pop("time", None)  # of an earlier block, which it has outlived
        now = self._real_time(loop) if ahead is None else ahead()
        is_fresh = is_fresh and not loop._scheduled
        base = 0.0 if is_fresh else float(now) - self._clock.now()
        loop._selector = _Selector(loop, self._clock, _LoopTime(self._clock, base))
        self._adopted[id(loop)] = loop._selector

    def time(self, loop: Any) -> float:
        """Return what time it is for a loop."""
        self.adopt(loop)
        adopted = self._adopted.get(id(loop))
        return self._real_time(loop) if adopted is None else adopted.time.now()

    def release(self) -> None:
        """Let the loops wait for real again; their time goes on from where it is."""
        for adopted in self._adopted.values():
            loop = adopted.loop
            if not loop.is_closed():
                loop._selector = adopted.real
                ahead = float(adopted.time.now()) - self._real_time(loop)
                loop.time = partial(_later, self._real_time, loop, ahead)


def _later(time: Callable[[Any], float], loop: Any, seconds: float) -> float:
    return time(loop) + seconds


@final
class _Selector:
    """A loop's selector, which waits in virtual time."""

    def __init__(self, loop: Any, clock: VirtualClock, own_time: _LoopTime) -> None:
        self.real = loop._selector
        self.loop = loop
        self.time: _LoopTime = own_time
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def select(self, timeout: float | None = None) -> Any:
        """Wait for the next timer, or for something real: a socket, a call from another thread."""
        if timeout is None:
            self._clock.wait_until(inf, self._is_ready, self.real.select)
        elif timeout > 0 and not self._is_next_abandoned():
            when: float = self.loop._scheduled[0]._when  # exactly: what the timeout says is rounded
            deadline = self.time.to_virtual(when)
            self._clock.wait_until(deadline, self._is_ready, self.real.select)
            if self._clock.now() >= deadline:
                self.time.reach(when)
        return self.real.select(0)

    def _is_next_abandoned(self) -> bool:
        """Whether the next timer is an alarm whose calls are all over: nothing to jump to, so the loop looks again."""
        next_timer: Any = self.loop._scheduled[0] if self.loop._scheduled else None
        alarm = getattr(getattr(next_timer, "_callback", None), "__self__", None)
        if not isinstance(alarm, Alarm) or not alarm.clear_if_idle():
            return False
        next_timer.cancel()
        return True

    def _is_ready(self) -> bool:
        return bool(self.real.select(0))


# --- trio ------------------------------------------------------------------------------------


@contextmanager
def _trio_in(clock: VirtualClock) -> Iterator[None]:
    trio: Any = importlib.import_module("trio")
    internals: Any = importlib.import_module("trio._core._run")
    runs: dict[int, _TrioRun] = {}
    own = internals.SystemClock
    real = {name: getattr(own, name) for name in ("start_clock", "current_time", "deadline_to_sleep_time")}

    def start_clock(its_clock: Any) -> None:
        runs[id(its_clock)] = _TrioRun(clock, its_clock, _LoopTime(clock, 0.0), trio, internals)

    def run_of(its_clock: Any) -> _TrioRun:
        if id(its_clock) not in runs:  # it was running before
            own_time = _LoopTime(clock, real["current_time"](its_clock) - clock.now())
            runs[id(its_clock)] = _TrioRun(clock, its_clock, own_time, trio, internals)
        return runs[id(its_clock)]

    def current_time(its_clock: Any) -> float:
        return run_of(its_clock).current_time()

    def deadline_to_sleep_time(its_clock: Any, deadline: float) -> float:
        return run_of(its_clock).pause_until(deadline)

    for replacement in (start_clock, current_time, deadline_to_sleep_time):
        setattr(own, replacement.__name__, replacement)
    try:
        yield
    finally:
        for name, method in real.items():
            setattr(own, name, method)
        for run in runs.values():
            run.release(real["current_time"])


@final
class _TrioRun:
    """One run of trio's loop. It asks how long to pause wherever no task can run; then time may jump."""

    def __init__(self, clock: VirtualClock, its_clock: Any, own_time: _LoopTime, trio: Any, internals: Any) -> None:
        self._clock = clock
        self._its_clock = its_clock  # kept, so that its id stays its own
        self._time = own_time
        self._context = internals.GLOBAL_RUN_CONTEXT
        self._instrument = type(
            "_Steps", (trio.abc.Instrument,), {"before_task_step": self._work, "after_run": self._work}
        )()
        self._runner: Any = None
        self._wait: Wait | None = None

    def current_time(self) -> float:
        return self._time.now()

    def pause_until(self, deadline: float) -> float:
        """Return the real seconds for which to wait for I/O, before this is asked again."""
        if self._runner is None:
            self._runner = self._context.runner
            self._context.runner.instruments.add_instrument(self._instrument)
        at = self._time.to_virtual(deadline)
        if at <= self._clock.now():
            self._time.reach(deadline)
            return 0.0
        if self._runner.waiting_for_idle:
            return inf  # waits until no task runs come before waits for a time
        if self._wait is None or self._wait.deadline != at:
            self._wait = Wait(at, self._has_work)
            self._clock.enter(self._wait)
            return 0.0  # look for I/O first
        try:
            jumped = self._clock.jump(self._wait)
        except VirtualTimeStuck as error:
            self._raise_in_main(error)
            return 0.0
        if jumped:
            return 0.0
        self._wait.looks += 1
        if not self._runner.is_guest:
            return self._wait.pause
        # A guest pauses in another thread (so it is under anyio's plugin for pytest), which would never stand still.
        time.sleep(self._wait.pause)
        return 0.0

    def release(self, real_time: Callable[[Any], float]) -> None:
        """Go back to trio's own clock, which goes on from here: with as much time left everywhere as there was."""
        object.__setattr__(self._its_clock, "offset", 0.0)
        object.__setattr__(self._its_clock, "offset", float(self.current_time()) - real_time(self._its_clock))
        runner = getattr(self._context, "runner", None)
        if runner is not None and runner is self._runner:
            runner.instruments.remove_instrument(self._instrument)

    def _raise_in_main(self, error: VirtualTimeStuck) -> None:
        """Raise in the main task, as trio does with `KeyboardInterrupt`; where that can't be, the run breaks down."""

        def raise_it() -> NoReturn:
            raise error

        main = self._runner.main_task
        if main is None or main._abort_func is None:
            raise error
        main._attempt_abort(raise_it)

    def _has_work(self) -> bool:
        queue = self._runner.entry_queue
        return bool(queue.queue or queue.idempotent_queue)

    def _work(self, *_: object) -> None:
        if self._wait is not None:
            self._wait = None
            self._clock.leave()
