"""Event loops of asyncio and trio in virtual time, including one that is already running.

A loop has a clock and a place where it waits. Virtual time replaces both:

- asyncio's `BaseEventLoop` calls `self.time()`, and waits in `self._selector.select(timeout)`. Each loop is adopted
  when it is first used: its selector is then wrapped in one that waits in virtual time.
- trio calls its `SystemClock` for the time, and for how long to wait while no task can run. A public `Clock` can only
  be passed to `trio.run`, which users call without one.

A loop that is already running continues from its current time. When virtual time ends, it continues from there, and
stays ahead of real time from then on. No timers are changed, and each has as much time left as before.

The methods are replaced on the classes, because `asyncio.run`, `trio.run` and test plugins create loops themselves,
where no clock can be passed in (asyncio's policies could do that, but are deprecated).
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import socket
import threading
import time
from asyncio import base_events
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import inf
from typing import Any, Final, NoReturn, final

from typing_extensions import override

from resilience.runtimes.alarms import Alarm
from resilience.testing.clocks import VirtualClock, Wait
from resilience.testing.replacing import replaced
from resilience.testing.stuck import VirtualTimeStuck


@contextmanager
def loops_in(clock: VirtualClock) -> Iterator[None]:
    """Run every event loop of this process on `clock`."""
    with _asyncio_in(clock), _trio_in(clock) if importlib.util.find_spec("trio") else nullcontext():
        yield


# --- the time of a loop ----------------------------------------------------------------------


@final
class _Instant(float):
    """An instant on a loop's clock that also stores the exact instant on the virtual clock.

    The loop wakes a task at `loop.time() + 0.3`. Without the stored instant, subtracting the base of the loop again
    would give 0.29999999999995 because of rounding, and an open period of 0.3 s would not be over at that time.
    """

    __slots__ = ("clock", "virtual")

    clock: VirtualClock
    virtual: float

    def __new__(cls, time: float, clock: VirtualClock, virtual: float) -> _Instant:
        instant = super().__new__(cls, time)
        instant.clock, instant.virtual = clock, virtual
        return instant

    @override
    def __add__(self, seconds: float, /) -> float:
        return _Instant(float(self) + seconds, self.clock, self.virtual + seconds)

    __radd__ = __add__


@final
class _LoopTime:
    """A loop's own time, which may have begun before virtual time.

    :param base: the loop's time when the virtual clock was at zero.
    """

    def __init__(self, clock: VirtualClock, base: float) -> None:
        self._clock = clock
        self._base = base
        self._reached = base

    def now(self) -> float:
        virtual = self._clock.now()
        return _Instant(max(self._base + virtual, self._reached), self._clock, virtual)

    def to_virtual(self, instant: float) -> float:
        """Convert an instant on the loop's clock to one on the virtual clock."""
        if isinstance(instant, _Instant) and instant.clock is self._clock:
            return instant.virtual
        return instant - self._base

    def reach(self, instant: float) -> None:
        """Never return an earlier time than `instant` again: the loop compares its own, rounded sums."""
        self._reached = max(self._reached, float(instant))


# --- asyncio ---------------------------------------------------------------------------------


@contextmanager
def _asyncio_in(clock: VirtualClock) -> Iterator[None]:
    loop_class: Any = base_events.BaseEventLoop
    run_once, real_time = loop_class._run_once, loop_class.time
    adopted: dict[int, _Selector] = {}  # by the id of the loop

    def adopt(loop: Any, *, is_fresh: bool = True) -> None:
        """Let a loop run on the clock, if it is called in its own thread or does not run yet."""
        if id(loop) in adopted or loop._thread_id not in (None, threading.get_ident()) or loop.is_closed():
            return
        ahead = vars(loop).pop("time", None)  # set by `release` at the end of an earlier block
        now = real_time(loop) if ahead is None else ahead()
        base = 0.0 if is_fresh and not loop._scheduled else float(now) - clock.now()
        adopted[id(loop)] = loop._selector = _Selector(loop, clock, _LoopTime(clock, base))
        loop.time = loop._selector.time.now  # for a class that has its own method, as freezegun leaves one behind

    def run_once_adopted(loop: Any) -> None:
        adopt(loop)
        run_once(loop)

    def time_adopted(loop: Any) -> float:
        adopt(loop)
        selector = adopted.get(id(loop))
        return real_time(loop) if selector is None else selector.time.now()

    try:
        with replaced(loop_class, _run_once=run_once_adopted, time=time_adopted):
            if (running := asyncio._get_running_loop()) is not None:
                if not isinstance(running, loop_class):
                    raise RuntimeError(
                        f"virtual time needs a loop of asyncio's, not {running!r}, which brings its own timers"
                    )
                adopt(running, is_fresh=False)
            yield
    finally:
        for selector in adopted.values():
            selector.release(real_time)


@final
class _Selector:
    """A wrapper around a loop's selector that waits in virtual time."""

    def __init__(self, loop: Any, clock: VirtualClock, own_time: _LoopTime) -> None:
        self.real = loop._selector
        self.loop = loop
        self.time: _LoopTime = own_time
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def select(self, timeout: float | None = None) -> Any:
        """Wait for the next timer, or for a real event: a socket, or a call from another thread."""
        if timeout is None or (timeout > 0 and not self._is_next_abandoned()):
            when = inf if timeout is None else self.loop._scheduled[0]._when  # the exact instant: `timeout` is rounded
            deadline = self.time.to_virtual(when)
            select = self.real.select
            self._clock.wait_until(deadline, lambda: bool(select(0)), select, is_real=self._waits_for_others())
            if self._clock.now() >= deadline:
                self.time.reach(when)
        return self.real.select(0)

    def release(self, real_time: Callable[[Any], float]) -> None:
        """Let the loop wait in real time again; its clock continues from its current time."""
        loop = self.loop
        if not loop.is_closed():
            loop._selector = self.real
            ahead = float(self.time.now()) - real_time(loop)
            loop.time = lambda: real_time(loop) + ahead

    def _is_next_abandoned(self) -> bool:
        """Whether the next timer was an alarm whose calls are all over. If so, it is cancelled: time must not jump."""
        next_timer: Any = self.loop._scheduled[0] if self.loop._scheduled else None
        alarm = getattr(getattr(next_timer, "_callback", None), "__self__", None)
        if not isinstance(alarm, Alarm) or not alarm.clear_if_idle():
            return False
        next_timer.cancel()
        return True

    def _waits_for_others(self) -> bool:
        own = getattr(self.loop, "_ssock", None)  # by which threads wake the loop; under Windows, no files are known
        files: list[int] = list(getattr(self.real, "get_map", dict)())
        return _are_others([it for it in files if own is None or it != own.fileno()])


def _are_others(files: Sequence[int]) -> bool:
    """Whether another process, or a thread, may write to one of these files, for which a loop waits.

    Not to a socket that listens, nor to a connection with that socket, or with another of these: what code in this loop
    has sent is there at once.
    """
    ends = [_ends_of(it) for it in files]
    own = {name for name, _ in ends if name is not None}
    listening = {name for name, peer in ends if peer == _LISTENS}
    return any(peer not in own and name not in listening for name, peer in ends if peer != _LISTENS)


_LISTENS: Final = "listens"


def _ends_of(file: int) -> tuple[object, object]:
    """Return the ports, or paths, of a socket and of its peer; None for what is unknown."""
    try:
        end = socket.socket(fileno=file)
        try:
            name = _place(end.getsockname())
            listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return name, _LISTENS if listens else _place(end.getpeername())
        finally:
            end.detach()
    except OSError:  # a pipe, or a socket that is being connected
        return None, None


def _place(address: Any) -> object:
    return (address[1] if isinstance(address, tuple) else address) or None


# --- trio ------------------------------------------------------------------------------------


@contextmanager
def _trio_in(clock: VirtualClock) -> Iterator[None]:
    internals: Any = importlib.import_module("trio._core._run")
    runs: dict[int, _TrioRun] = {}
    own = internals.SystemClock
    real_time = own.current_time

    def start_clock(its_clock: Any, base: float = 0.0) -> None:
        runs[id(its_clock)] = _TrioRun(clock, its_clock, _LoopTime(clock, base), internals.GLOBAL_RUN_CONTEXT)

    def run_of(its_clock: Any) -> _TrioRun:
        if id(its_clock) not in runs:  # this run began before virtual time
            start_clock(its_clock, real_time(its_clock) - clock.now())
        return runs[id(its_clock)]

    def current_time(its_clock: Any) -> float:
        return run_of(its_clock).time.now()

    def pause_until(its_clock: Any, deadline: float) -> float:
        return run_of(its_clock).pause_until(deadline)

    try:
        with replaced(own, start_clock=start_clock, current_time=current_time, deadline_to_sleep_time=pause_until):
            yield
    finally:
        for run in runs.values():
            run.release(real_time)


@final
class _TrioRun:
    """One run of trio's loop, which calls `pause_until` whenever no task can run; then time may jump."""

    def __init__(self, clock: VirtualClock, its_clock: Any, own_time: _LoopTime, context: Any) -> None:
        self._clock = clock
        self._its_clock = its_clock  # kept, so that its `id` is not reused
        self.time: _LoopTime = own_time
        self._context = context
        self._runner: Any = None
        self._wait: Wait | None = None

    def pause_until(self, deadline: float) -> float:
        """Return the real seconds for which to wait for I/O before the next call of this method."""
        if self._runner is None:
            self._runner = self._context.runner
            self._context.runner.instruments.add_instrument(self)
        at = self.time.to_virtual(deadline)
        if at <= self._clock.now():
            self.time.reach(deadline)
            return 0.0
        if self._runner.waiting_for_idle:
            return inf  # tasks in `wait_all_tasks_blocked` are woken before the clock jumps
        if self._wait is None or self._wait.deadline != at:
            self._wait = Wait(at, self._has_work, self._waits_for_others())
            return 0.0  # check for I/O first
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
        # In guest mode (anyio's plugin for pytest uses it), trio pauses in another thread, which would count as busy.
        time.sleep(self._wait.pause)
        return 0.0

    def release(self, real_time: Callable[[Any], float]) -> None:
        """Return to trio's own clock, set to the current time of the run, so that all deadlines stay as far away."""
        object.__setattr__(self._its_clock, "offset", 0.0)
        object.__setattr__(self._its_clock, "offset", float(self.time.now()) - real_time(self._its_clock))
        runner = getattr(self._context, "runner", None)
        if runner is not None and runner is self._runner:
            runner.instruments.remove_instrument(self)

    def _raise_in_main(self, error: VirtualTimeStuck) -> None:
        """Raise in the main task, as trio does with `KeyboardInterrupt`; if that is impossible, let the run crash."""

        def raise_it() -> NoReturn:
            raise error

        main = self._runner.main_task
        if main is None or main._abort_func is None:
            raise error
        main._attempt_abort(raise_it)

    def _waits_for_others(self) -> bool:
        own = self._runner.entry_queue.wakeup.wakeup_sock.fileno()  # by which threads wake the run
        files = getattr(self._runner.io_manager, "_registered", ())  # under Windows, they are not known
        return _are_others([it for it in (it[0] if isinstance(it, tuple) else it for it in files) if it != own])

    def _has_work(self) -> bool:
        queue = self._runner.entry_queue
        return bool(queue.queue or queue.idempotent_queue)

    def before_task_step(self, task: object = None) -> None:
        """Note that tasks can run. Like `after_run`, this is called by trio: the run is its own instrument."""
        if self._wait is not None:
            self._wait = None
            self._clock.leave()

    after_run = before_task_step
