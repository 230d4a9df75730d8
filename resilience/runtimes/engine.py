"""A scheduler of coroutines without an event loop: of the clients of a simulation, and of races in threads.

Such a coroutine suspends in one of two ways: until an instant, or until it is woken. An engine pops the earliest entry
of a heap, and resumes the client to which the entry belongs. Entries of the same instant are popped in the order in
which they were pushed.

A waiting client has one valid entry: for the end of its wait, or for the first of its timers that is due before that.
So a timer whose block ends in time adds nothing to the heap. An entry is never removed from the middle of the heap. If
the client is woken or cut off earlier, the entry becomes invalid, and is skipped when it is popped.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from heapq import heappush
from math import inf
from typing import Any, TypeAlias, final

from typing_extensions import override

from resilience.clock import clock
from resilience.errors import SuspensionMisuse
from resilience.runtimes.base import Expired, Plan, Runtime, Timer, Waiter, refuse_undeclared_race
from resilience.runtimes.driving import suspension_of
from resilience.runtimes.races import Race, ScheduledCall


@types.coroutine
def until(instant: float) -> Generator[float, None, None]:
    """Suspend the client until an instant, or, if that is infinity, until it is woken."""
    yield float(instant)


@final
class Client:
    """One coroutine of an engine.

    :param run: calls a function in the client's own `contextvars`.
    """

    __slots__ = ("coroutine", "is_done", "run", "timers", "valid_entry")

    def __init__(self, coroutine: Coroutine[float, None, object], run: Callable[..., Any]) -> None:
        self.coroutine: Coroutine[float, None, object] = coroutine
        self.run: Callable[..., Any] = run
        self.valid_entry: int = -1  # its number; -1 while the client does not wait
        self.timers: list[EngineTimer] = []  # of the blocks that it is in, the outermost first
        #: Whether the coroutine has ended.
        self.is_done: bool = False


@final
class EngineTimer(Timer):
    """A timer that cuts the client off if it still waits at the deadline."""

    __slots__ = ("_client", "_engine", "deadline", "fired")

    def __init__(self, engine: Engine, deadline: float) -> None:
        self.deadline: float = deadline
        self.fired: bool = False
        self._engine = engine
        self._client: Client = engine.current

    @override
    def start(self) -> None:
        self._client.timers.append(self)

    def fire(self) -> None:
        """Cut the client off before the engine resumes any other client."""
        self.deadline = -inf  # its entry is now the earliest of all
        self._engine.suspend(self._client, inf)

    def expire(self) -> Expired:
        """Return the exception to throw into the client, which may wait again from then on, to clean up.

        Timers inside of this one that are due, too, do not interrupt the clean-up.
        """
        timers = self._client.timers
        timers[:] = [timer for timer in timers if timer.deadline > self.deadline]
        return Expired(self)

    @override
    def stop(self, error: BaseException | None) -> bool:
        if self in self._client.timers:
            self._client.timers.remove(self)
        self.fired = isinstance(error, Expired) and error.timer is self
        return self.fired


Entry: TypeAlias = tuple[float, int, Client, EngineTimer | ScheduledCall | None]


def is_valid(entry: Entry) -> bool:
    """Whether an entry is still valid."""
    _, number, client, due = entry
    return due.function is not None if type(due) is ScheduledCall else client.valid_entry == number


@final
class EngineWaiter(Waiter):
    """The waiter of a client."""

    __slots__ = ("_engine", "_woken", "client", "waits")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._woken = False
        self.client: Client = engine.current
        #: Whether the client waits for this waiter now. If not, it must not be resumed from any other wait.
        self.waits: bool = False

    @override
    def wake(self) -> bool:
        self._woken = True
        self._engine.wake(self)
        return True

    @override
    def is_alive(self) -> bool:
        return not self.client.is_done

    @override
    async def wait(self, deadline: float, timer: Timer | None) -> bool:
        if not self._woken:
            self.waits = True
            try:
                await until(deadline)
            finally:
                self.waits = False
        return self._woken


class EngineRuntime(Runtime):
    """The runtime of policies in an engine.

    :param host: the runtime that calls functions of users, and closes discarded resources.
    """

    def __init__(self, engine: Engine, host: Runtime) -> None:
        self._engine = engine
        self._host = host

    @override
    async def sleep(self, seconds: float, timer: Timer | None) -> None:
        await until(clock.now() + clock.shorten(seconds))

    @override
    def timer(self, deadline: float, limit: float | None = None, policy: str = "") -> EngineTimer:
        return EngineTimer(self._engine, deadline)

    @override
    def waiter(self) -> EngineWaiter:
        return EngineWaiter(self._engine)

    @override
    async def race(self, call: Callable[..., Any], ctx: Any, plan: Plan[Any]) -> None:
        refuse_undeclared_race(ctx)
        await EngineRace(self._engine, call, plan).run()

    @override
    async def run(self, function: Callable[..., Any], /, *args: object) -> Any:
        try:
            return await self._host.run(function, *args)
        finally:
            del args  # no cycle if the handler raises the failure that is among them

    @override
    async def close(self, resource: object) -> None:
        await self._host.close(resource)


class Engine:
    """A scheduler: the heap of entries, and the clients.

    :param host: the runtime that calls functions of users.
    """

    def __init__(self, host: Runtime) -> None:
        self.runtime: EngineRuntime = EngineRuntime(self, host)
        self.current: Client
        self._queue: list[Entry] = []
        self._entries = 0
        self._clients: dict[Client, None] = {}  # those that are not done, in the order in which they were added

    def now(self) -> float:
        """Return the current time, in seconds."""
        return clock.now()

    def add(self, coroutine: Coroutine[Any, None, object], run: Callable[..., Any], instant: float) -> Client:
        """Add a client that begins at an instant."""
        client = Client(coroutine, run)
        self._clients[client] = None
        self.suspend(client, instant)
        return client

    def suspend(self, client: Client, instant: float) -> None:
        """Push the entry of a client that waits until an instant, or until one of its timers is due."""
        due = None
        for timer in reversed(client.timers):
            if timer.deadline <= instant:  # at the same instant, the outermost timer fires
                instant, due = timer.deadline, timer
        self._entries = client.valid_entry = number = self._entries + 1
        if instant != inf:
            heappush(self._queue, (instant, number, client, due))

    def schedule(self, call: ScheduledCall) -> None:
        """Push the entry of a call."""
        self._entries += 1
        heappush(self._queue, (call.due, self._entries, self.current, call))

    def _run_entry(self, entry: Entry) -> None:
        """Make a scheduled call, or resume a client, unless the entry is no longer valid."""
        _, number, client, due = entry
        if type(due) is ScheduledCall:
            if due.function is not None:
                due.function()
        elif client.valid_entry == number:
            self._resume(client, None if due is None else due.expire())

    def _resume(self, client: Client, error: BaseException | None = None) -> None:
        """Resume a client, or throw `error` into it."""
        if client.is_done:  # an interrupt has ended it, and that end cut it off
            return
        self.current = client
        client.valid_entry = -1
        try:
            if error is None:
                instant = client.run(client.coroutine.send, None)
            else:
                instant = client.run(client.coroutine.throw, error)
        except StopIteration:
            client.is_done = True
            return
        except BaseException:
            # If it still has a frame, it has suspended, and an interrupt came after that.
            client.is_done = getattr(client.coroutine, "cr_frame", None) is None
            raise
        finally:
            error = None  # no cycle: error -> traceback -> this frame -> error
            if client.is_done:
                del self._clients[client]
        if type(instant) is not float:
            self._resume(client, self._misuse(client))
        else:
            self.suspend(client, instant)

    def _misuse(self, client: Client) -> SuspensionMisuse:
        """Return the error for a client that waits for something outside of the engine."""
        return suspension_of(client.coroutine, "what a policy awaits")

    def _may_start(self) -> bool:
        """Whether a race may start another attempt now."""
        return True

    def wake(self, waiter: EngineWaiter) -> None:
        """Resume the client of a waiter, if it waits."""
        if waiter.waits:
            self.suspend(waiter.client, self.now())


@final
class EngineRace(Race):
    """A race between clients of an engine. In threads, each race has its own engine; in a simulation, all share one."""

    def __init__(self, engine: Engine, call: Callable[[Any], Awaitable[Any]], plan: Plan[Any]) -> None:
        super().__init__(engine.runtime, call, plan)
        self._engine = engine
        self._scheduled: ScheduledCall | None = None

    @override
    def _begin(self) -> Any:
        ctx = super()._begin()
        if ctx is not None and ctx.runtime is not self._runtime:
            ctx = ctx.child()
            ctx.runtime = self._runtime
        return ctx

    @override
    async def _run_cuttable(self, number: int, ctx: Any) -> None:
        timer = EngineTimer(self._engine, inf)
        self._running[number] = timer.fire
        with timer:
            await self._attempt(number, ctx)

    @override
    def _start(self, number: int, ctx: Any) -> None:
        self._engine.add(self._run_beside(number, ctx), self._variables.copy().run, self._engine.now())

    @override
    def _start_due(self) -> None:
        if not self._engine._may_start():
            self._plan.due = inf
        super()._start_due()

    @override
    def _schedule(self, due: float) -> None:
        if self._scheduled is not None:
            self._scheduled.function = None
        if due != inf:
            self._scheduled = ScheduledCall(due, self._start_due)
            self._engine.schedule(self._scheduled)
