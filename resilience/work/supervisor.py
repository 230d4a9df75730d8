"""Supervisor: keep tasks running, restart those that fail, and give up on those that keep failing."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from typing import Self, final

import anyio
from anyio.abc import TaskGroup

from resilience import checks
from resilience.backoff import Backoff, BackoffLike, Exponential, as_backoff
from resilience.callables import is_awaitable, name_of, require_callable
from resilience.checks import Duration
from resilience.clock import clock
from resilience.events.dispatch import emit, optional_listener
from resilience.events.kinds import Parked
from resilience.formats import format_number
from resilience.info import Listener
from resilience.log import logger
from resilience.outcome import Failure
from resilience.runtimes.tasks import split_cancellation

#: The supervisors that run the current task, or a task that has started it.
_kept_running: ContextVar[tuple[Supervisor, ...]] = ContextVar("resilience.supervisors", default=())


@final
class Supervisor:
    """A group of tasks that are restarted when they fail: `async with Supervisor() as supervisor:`.

    A task that returns is done. A task that raises an `Exception` is restarted after a delay, which grows with each
    failure, and is reset after a run of `within` seconds. A task that fails after `max_restarts` restarts within
    `within` seconds is parked: it is reported and given up, while the others continue. The block ends when all tasks
    are done or parked; an error of the block itself cancels them, and is raised as it is.

    :param restart: the delays before a restart, in seconds, or a backoff; `Exponential(1.0, cap=60.0)` by default.
    :param max_restarts: how often a task is restarted within the period, 10 by default; 0 parks it at once.
    :param within: the period in seconds; 300 by default.
    :param on_parked: called with a `Parked` event when a task is given up.
    :param name: the name of the supervisor in log lines and events; "Supervisor" by default.

    It is modelled on Erlang's supervisors; `max_restarts` and `within` are their intensity and period.
    """

    def __init__(
        self,
        *,
        restart: BackoffLike | None = None,
        max_restarts: int = 10,
        within: Duration = 300.0,
        on_parked: Listener | None = None,
        name: str | None = None,
    ) -> None:
        self._restart: Backoff = Exponential(1.0, cap=60.0) if restart is None else as_backoff("restart", restart)
        self._max_restarts = checks.whole("max_restarts", max_restarts, least=0)
        self._within = checks.seconds("within", within)
        self._on_parked = optional_listener("on_parked", on_parked)
        self.name: str = checks.optional_name(name) or "Supervisor"
        self._group: TaskGroup
        self._running: set[anyio.CancelScope] = set()
        self._all_done: anyio.Event
        self._stopping: anyio.Event | None = None
        self._parked: list[str] = []

    async def __aenter__(self) -> Self:
        if self._stopping is not None:
            raise RuntimeError("this supervisor is, or was, in use: make another one")
        self._stopping = anyio.Event()
        self._all_done = anyio.Event()
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        if error is not None:
            self._group.cancel_scope.cancel()
        try:
            await self._group.__aexit__(None, None, None)  # without the error of the block, which it would wrap
        finally:
            self._stop()

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: object, name: str | None = None) -> None:
        """Run `await function(*args)` until it returns.

        :param name: the name of the task in log lines and `Parked`; the name of the function by default.
        :raises RuntimeError: outside the block, and once the supervisor is stopping.
        :raises TypeError: for a function that does not take `args`; out of the block, for one that cannot be awaited.
        """
        require_callable(function, "a supervisor", "supervisor.start_soon(consume, queue)")
        checks.parameters("function", function, tuple(type(it).__name__ for it in args))
        if self._stopping is None or self._stopping.is_set():
            raise RuntimeError("a supervisor starts tasks inside its block, and until it stops")
        task = checks.optional_name(name) or name_of(function)
        scope = anyio.CancelScope()
        self._running.add(scope)
        self._group.start_soon(self._keep_running, scope, task, lambda: function(*args), name=task)

    @property
    def is_stopping(self) -> bool:
        """Whether the supervisor is stopping: a task that runs a loop should then leave it."""
        return self._stopping is not None and self._stopping.is_set()

    @property
    def parked(self) -> tuple[str, ...]:
        """The names of the tasks that were given up."""
        return tuple(self._parked)

    async def wait_stopping(self) -> None:
        """Wait until the supervisor begins to stop."""
        if self._stopping is None:
            raise RuntimeError("a supervisor stops inside its block")
        await self._stopping.wait()

    async def adrain(self, timeout: Duration) -> bool:
        """Restart no more tasks, and wait until all have ended; after `timeout` seconds (0 or more), cancel the rest.

        :returns: whether this drain has cancelled no task; another one, with a shorter `timeout`, may have.
        """
        seconds = checks.seconds("timeout", timeout, zero=True)
        if self._stopping is None:
            raise RuntimeError("a supervisor stops inside its block")
        if self in _kept_running.get():
            raise RuntimeError("a task of a supervisor cannot wait for its own end: drain it from outside")
        self._stop()
        with anyio.move_on_after(seconds):
            await self._all_done.wait()
        ended = not self._running
        for scope in list(self._running):
            scope.cancel()
        with anyio.CancelScope(shield=True):
            await self._all_done.wait()
        return ended

    def _stop(self) -> None:
        """Start and restart no more tasks."""
        assert self._stopping is not None
        self._stopping.set()
        if not self._running:
            self._all_done.set()

    async def _keep_running(self, scope: anyio.CancelScope, name: str, call: Callable[[], Awaitable[object]]) -> None:
        if self not in (outer := _kept_running.get()):
            _kept_running.set((*outer, self))  # for this task and the tasks that it starts
        try:
            with scope:
                await self._run(name, call)
        finally:
            self._running.discard(scope)
            if self.is_stopping and not self._running:
                self._all_done.set()

    async def _run(self, name: str, call: Callable[[], Awaitable[object]]) -> None:
        delays: Iterator[float] = self._restart.delays()
        restarts: deque[float] = deque()
        while True:
            began = clock.now()
            failure = await self._run_once(name, call)
            if failure is None:
                return
            now = clock.now()
            if now - began >= self._within:
                delays = self._restart.delays()
            while restarts and now - restarts[0] >= self._within:
                restarts.popleft()
            if self.is_stopping:
                self._log(name, failure, "and is not restarted: the supervisor stops")
                return
            if len(restarts) >= self._max_restarts:
                self._park(name, len(restarts), failure)
                return
            restarts.append(now)
            delay = next(delays)
            self._log(name, failure, f"and is restarted in {format_number(round(delay, 3))} s")
            del failure
            with anyio.move_on_after(clock.shorten(delay)):
                await self.wait_stopping()
                return

    async def _run_once(self, name: str, call: Callable[[], Awaitable[object]]) -> Failure | None:
        """Run a task until it ends, and return its failure; None if it has returned."""
        try:
            if is_awaitable(awaitable := call()):
                await awaitable
                return None
        except Exception as error:
            return Failure(error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # not only something that it awaits
                raise
            failure = Failure(RuntimeError("what it awaited was cancelled"))
            failure.error.__cause__ = error
            return failure
        except BaseExceptionGroup as group:
            if (parts := split_cancellation(group)) is None:
                raise
            try:
                self._log(name, Failure(parts[1]), "as it was cancelled")
                raise parts[0] from None
            finally:
                del parts  # no cycle: error -> traceback -> this frame -> error
        raise TypeError(f"{name} returned {type(awaitable).__name__}: a supervisor runs coroutine functions")

    def _park(self, name: str, restarts: int, last: Failure) -> None:
        self._parked.append(name)
        within = format_number(self._within)
        self._log(name, last, f"and is given up after {restarts} restarts within {within} s", logging.ERROR)
        emit(Parked, self.name, None, self._on_parked, name=name, restarts=restarts, last=last)

    def _log(self, name: str, failure: Failure, what: str, level: int = logging.WARNING) -> None:
        kind = type(failure.error).__name__
        with suppress(Exception):  # a handler of the user's logging may raise, which must not end the other tasks
            logger.log(level, "%s: %s failed with %s %s", self.name, name, kind, what, exc_info=failure.error)
