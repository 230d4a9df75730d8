"""Races: the implementations of `Runtime.race`, which runs the rest of a chain several times at once.

The first attempt runs where it would run without a race. So a race without a second attempt costs one timer, and the
function changes its caller's own task (context variables, cancel scopes). Each runtime defines how another attempt is
started, how an attempt is cut off, and how the next attempt is scheduled:

    asyncio      the first attempt runs in the caller's task, which is cancelled once if another attempt decides the
                 race, with the accounting of `asyncio.timeout`; the others run in tasks
    trio         each attempt runs in a cancel scope; the others run in system tasks. One task of the trio run starts
                 the attempts of all its races: a nursery and a task for each race would cost five times as much
    engines      each attempt runs under a timer that fires on demand; the others run in clients of their own. A
                 simulation uses its engine. In threads each race has an engine on the process clock: all policies
                 stay in the calling thread, and each function runs on a worker

A race leaves nothing behind: it ends when all its attempts have ended, even if its caller is cancelled meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from math import inf
from typing import Any, final

from resilience.clock import clock
from resilience.errors import closable
from resilience.outcome import Failure, Outcome, Success, unwrap_stop_iteration
from resilience.runtimes.base import Plan, Runtime, Waiter


class Race(ABC):
    """The part of a race that is the same in all runtimes."""

    def __init__(self, runtime: Runtime, call: Callable[[Any], Awaitable[Any]], plan: Plan[Any]) -> None:
        self._runtime = runtime
        self._call = call
        self._plan = plan
        self._begun = 0  # the number of attempts, the first included
        self._beside = 0  # the number of attempts beside the first that have not ended, begun or not
        self._running: dict[int, Callable[[], object]] = {}  # what cuts off each attempt, by its number
        self._scheduled_at = inf
        self._is_decided = False
        self._error: BaseException | None = None  # the error that `run` raises
        self._waiter: Waiter | None = None
        #: Those of the caller: attempts are started in them, and each one beside the first runs in a copy.
        self._variables = copy_context()

    async def run(self) -> None:
        """Run the race to its end."""
        is_closed = False
        try:
            first = self._begin()
            if first is not None:
                self._schedule_next()
                await self._run_cuttable(0, first)
            while not self._is_decided and (self._beside or self._plan.due != inf):
                await self._wait_for_change()
        except GeneratorExit:  # a coroutine that is being closed cannot await
            is_closed = True
            raise
        except (KeyboardInterrupt, SystemExit) as interrupt:
            self._error = interrupt
            raise
        finally:
            self._end()
            try:
                if self._beside and not is_closed:
                    await self._wait_for_others()
            finally:
                error = self._error
                self._break_cycles()
                if isinstance(error, (KeyboardInterrupt, SystemExit)):  # not lost if the race is cut off meanwhile
                    raise error
        if error is not None:
            try:
                raise error
            finally:
                del error  # no cycle: error -> traceback -> this frame -> error

    # --- an attempt ---

    async def _attempt(self, number: int, ctx: Any) -> None:
        """Make an attempt, and report its outcome to the plan. Cancellation and interrupts propagate."""
        outcome: Outcome[Any]
        try:
            outcome = Success(await self._call(ctx))
        except Exception as error:
            outcome = Failure(unwrap_stop_iteration(error))
        finally:
            self._running.pop(number, None)
        try:
            if self._is_decided:
                late = closable(outcome)
                if late is not None:
                    with self._runtime._shield():
                        await self._runtime.close(late)
            elif self._plan.ended(number, outcome):
                self._end()
            else:
                self._schedule_next()
        finally:
            del outcome  # no cycle: a failure's traceback holds this frame

    async def _attempt_beside(self, number: int, ctx: Any) -> None:
        """Make an attempt beside the first. An exception that comes out ends the race, which raises it."""
        try:
            if not self._is_decided:
                await self._run_cuttable(number, ctx)
        except GeneratorExit:
            raise
        except BaseException as error:
            self._fail(error)

    async def _run_beside(self, number: int, ctx: Any) -> None:
        """Make an attempt beside the first, and record its end."""
        try:
            await self._attempt_beside(number, ctx)
        finally:
            self._attempt_ended()

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._end()

    def _end(self) -> None:
        """Start no further attempt, and cut off the running ones."""
        self._is_decided = True
        while self._running:
            self._running.popitem()[1]()

    # --- the next attempt ---

    def _schedule_next(self) -> None:
        """Schedule the next attempt."""
        due = inf if self._is_decided else self._plan.due
        if due != self._scheduled_at:
            self._scheduled_at = due
            self._schedule(due)

    def _start_due(self) -> None:
        """Start the attempts that are due, in the variables of the caller, which a listener may read."""
        self._variables.run(self._start_each_due)

    def _start_each_due(self) -> None:
        now = max(clock.now(), self._scheduled_at)  # the timer of an event loop may fire a little early
        try:
            while not self._is_decided and self._plan.due <= now:
                ctx = self._begin()
                if ctx is None:
                    break
                self._start(self._begun - 1, ctx)
                self._beside += 1  # last: an attempt that an interrupt has kept from starting will not end
            self._schedule_next()
        except BaseException as error:
            self._fail(error)
        if not self._beside:
            self._wake()

    def _begin(self) -> Any:
        ctx = self._plan.begin()
        if ctx is not None:
            self._begun += 1
        return ctx

    # --- waiting ---

    async def _wait_for_change(self) -> None:
        """Wait until an attempt beside the first ends, or no further attempt will begin."""
        self._waiter = self._runtime.waiter()
        await self._waiter.wait(inf, None)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.wake()

    def _attempt_ended(self) -> None:
        """Record that an attempt beside the first has ended."""
        self._beside -= 1
        self._wake()

    async def _wait_for_others(self) -> None:
        """Wait until all attempts have ended. A cancellation that arrives meanwhile is raised after that."""
        interrupt: BaseException | None = None
        while self._beside:
            try:
                with self._runtime._shield():
                    await self._wait_for_change()
            except (GeneratorExit, Exception):  # closed, or unable to wait
                raise  # pragma: no cover (it runs; CPython 3.11 traces nothing after a throw)
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                del interrupt

    def _break_cycles(self) -> None:
        """Break the reference cycles through the scheduled call, and through the traceback of an error."""
        self._schedule(inf)
        self._error = self._waiter = None
        del self._call, self._plan

    # --- what runtimes do differently ---

    @abstractmethod
    async def _run_cuttable(self, number: int, ctx: Any) -> None:
        """Run `self._attempt(number, ctx)`. Put what cuts it off in `self._running`, and swallow that cancellation."""

    @abstractmethod
    def _start(self, number: int, ctx: Any) -> None:
        """Start `self._run_beside(number, ctx)`, or do the same with a task that may be cancelled before it begins."""

    @abstractmethod
    def _schedule(self, due: float) -> None:
        """Call `self._start_due` at this instant, not at the one scheduled before; never, if it is infinity."""


@final
class ScheduledCall:
    """A call at an instant, which can be cancelled: then `function` is None."""

    __slots__ = ("due", "function")

    def __init__(self, due: float, function: Callable[[], object]) -> None:
        self.due: float = due
        self.function: Callable[[], object] | None = function

    def __lt__(self, other: ScheduledCall) -> bool:
        return self.due < other.due
