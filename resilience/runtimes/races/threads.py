"""Races in threads: an engine on the process clock, which runs all policies of all attempts in the calling thread.

Only the functions run on workers, as under a `Timeout`. So an attempt that is cut off is unwound at once, its permits
and probes are released, and only its function is abandoned.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from heapq import heappop
from math import inf
from typing import Any, final

from typing_extensions import override

from resilience.clock import clock
from resilience.outcome import StoppedIteration
from resilience.runtimes import workers
from resilience.runtimes.base import Expired, Plan, Runtime, Timer
from resilience.runtimes.driving import drive
from resilience.runtimes.engine import Client, Engine, EngineRace, EngineRuntime, EngineWaiter


def run_race(host: Runtime, call: Callable[[Any], Awaitable[Any]], ctx: Any, plan: Plan[Any]) -> None:
    """Run a race of blocking code to its end."""
    engine = ThreadEngine(host)
    try:
        engine.run_to_end(EngineRace(engine, call, plan).run(), ctx._timer)
    finally:
        engine.forget()


@final
class ThreadEngine(Engine):
    """An engine on the process clock, for one race in one thread. Other threads may wake its clients.

    If too many abandoned calls still run, no attempt is started beside the first.
    """

    def __init__(self, host: Runtime) -> None:
        super().__init__(host)
        self.runtime: EngineRuntime = RacingRuntime(self, host)
        self._woken: deque[EngineWaiter] = deque()
        self._waits = False  # whether the thread waits: only then, an interrupt comes between two steps
        self._wakeup = threading.Lock()
        self._wakeup.acquire()

    @override
    def wake(self, waiter: EngineWaiter) -> None:
        self._woken.append(waiter)
        try:
            self._wakeup.release()
        except RuntimeError:  # it was released already
            return

    @override
    def _may_start(self) -> bool:
        return not workers.pool.is_exhausted()

    def run_to_end(self, coroutine: Coroutine[Any, None, object], timer: Timer | None) -> None:
        """Run until `coroutine` has ended. An interrupt of this thread and `timer` are thrown into it.

        :param timer: the tightest timer around the race.
        """
        main = Client(coroutine, _directly)
        self._clients[main] = None
        deadline = inf if timer is None else timer.deadline
        interrupt: BaseException | None = None
        try:
            self._resume(main)
            while not main.is_done:
                try:
                    if self._step(deadline) and timer is not None:
                        interrupt, deadline = Expired(timer), inf
                except BaseException as error:
                    if not self._waits:  # an interrupt within a step: `forget` closes all that is unfinished
                        raise  # pragma: no cover (it runs; CPython 3.11 traces nothing after a throw)
                    interrupt, self._waits = error, False
                if interrupt is not None:
                    self._resume(main, interrupt)
                    interrupt = None
        finally:
            del interrupt

    def _step(self, deadline: float) -> bool:
        """Resume a client, make a scheduled call, or wait until one is due; true if the deadline has passed first."""
        ends_at = self._queue[0][0] if self._queue else inf
        if self._woken and ends_at != -inf:  # otherwise, a client is to be cut off first
            waiter = self._woken.popleft()
            if waiter.waits:
                self._resume(waiter.client)
            return False
        now = clock.now()
        if ends_at <= now:
            self._run_entry(heappop(self._queue))
        elif now >= deadline:
            return True
        else:
            seconds = min(ends_at, deadline) - now
            self._waits = True
            clock.wait(self._wakeup, None if seconds == inf else seconds)
            self._waits = False
        return False

    def forget(self) -> None:
        """Drop all entries and clients, at the end."""
        self._queue.clear()
        self._woken = deque(maxlen=0)  # no cycle: a loser's function may have ended, or end later, and wake a waiter
        for client in self._clients:  # the race was closed
            client.coroutine.close()  # pragma: no cover (it runs; CPython 3.11 traces nothing after a throw)
        del self.runtime._engine
        vars(self).pop("current", None)  # there is none if an interrupt came before the first client was resumed


def _directly(function: Callable[..., Any], /, *arguments: object) -> Any:
    try:
        return function(*arguments)
    finally:
        del arguments  # no cycle: an error to throw -> traceback -> this frame -> error


@final
class RacingRuntime(EngineRuntime):
    """The runtime of policies inside a race in threads, which also calls the function."""

    @override
    async def _run_until(self, timer: Timer, function: Callable[[], Any], policy: str) -> Any:
        workers.pool.refuse_if_exhausted(policy)
        job = self.job(lambda: drive(self._host.run(function)), (), {})
        job.begin(policy)
        return await job.outcome(timer)

    def job(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> RacingJob:
        """Make the job that calls the function, in a copy of the current `contextvars`."""
        job = RacingJob(function, arguments, keywords)
        job.host, job.waiter = self._host, self.waiter()
        return job


@final
class RacingJob(workers.Job):
    """The call of a function on a worker, for one attempt of a race."""

    __slots__ = ("host", "waiter")

    host: Runtime  # closes a result that arrives too late
    waiter: EngineWaiter

    def begin(self, policy: str) -> None:
        """Begin the function on a worker, or run it here if the interpreter is shutting down.

        :raises WorkersExhausted: if no thread can be started.
        """
        try:
            if not workers.pool.begin(self, policy):
                self.run()
                self.returned_at: float = -inf  # it ran without a limit
                self.deliver()
        except BaseException:  # interrupted: it may have begun, so a worker may still have to close its result
            if not self.claim():
                self.drop()
            raise

    async def outcome(self, timer: Timer | None) -> Any:
        """Return the result of the function, or raise its error. If this is cut off, abandon the job.

        :param timer: the tightest timer around the call. A result that comes when it is due is dropped.
        """
        try:
            await self.waiter.wait(inf, None)
        except BaseException:
            if not self.abandon():
                self.drop()
            raise
        if timer is not None and self.returned_at >= timer.deadline:
            self.drop()
            raise Expired(timer)
        try:
            return self.result()
        except StopIteration as stop:
            raise StoppedIteration(stop) from None

    @override
    def deliver(self) -> None:
        self.waiter.wake()

    @override
    def drop(self) -> None:
        """Close the result, which arrived too late."""
        try:
            drive(self.host.close(self._value))
        finally:
            super().drop()
