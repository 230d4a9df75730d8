"""Races: the rest of a chain, several times at once, until that is decided. What `Runtime.race` does.

The first attempt runs where it would run without a race. So a race in which nothing happens costs a timer, and what the
function does to its task (context variables, cancel scopes) is done to the caller's own. Each runtime has to say how an
attempt is begun beside it, how one is cut off, and what rings when the next one is due:

    asyncio      the first attempt runs in the caller's task, which is cancelled once if another one decides, with the
                 accounting of `asyncio.timeout`; the others in tasks
    trio         each attempt runs in a cancel scope, the others in system tasks. One task of the run rings for all its
                 races: a nursery and a task for each race would cost five times as much
    engines      each attempt runs under a timer that fires when it is told to, the others in clients of their own.
                 In a simulation that is its engine. In threads each race has one, on the process clock: all policies
                 stay in the calling thread, and each function runs on a worker

A race leaves nothing behind: it ends when all of its attempts have ended, also where its caller is cancelled meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any

from resilience.clock import clock
from resilience.outcome import Failure, Outcome, Success, closable, unwrap_stop_iteration
from resilience.runtimes.base import Plan, Runtime, Waiter


class Race(ABC):
    """A race; what it has in common in all runtimes."""

    def __init__(self, runtime: Runtime, call: Callable[[Any], Awaitable[Any]], plan: Plan[Any]) -> None:
        self._runtime = runtime
        self._call = call
        self._plan = plan
        self._begun = 0  # attempts, the first included
        self._beside = 0  # attempts beside the first that have not come to their ends, begun or not
        self._running: dict[int, Callable[[], object]] = {}  # by number, what cuts an attempt off
        self._rings_at = inf
        self._is_decided = False
        self._error: BaseException | None = None  # what is raised in the end
        self._waiter: Waiter | None = None

    async def run(self) -> None:
        """Run the race to its end."""
        is_closed = False
        try:
            first = self._begin()
            if first is not None:
                self._set_next()
                await self._run_cuttable(0, first)
            while not self._is_decided and (self._beside or self._plan.due != inf):
                await self._change()
        except GeneratorExit:  # nothing can be awaited any more
            is_closed = True
            raise
        finally:
            self._end()
            try:
                if self._beside and not is_closed:
                    await self._others_ended()
            finally:
                error = self._error
                self._forget()
        if error is not None:
            try:
                raise error
            finally:
                del error  # no cycle: error -> traceback -> this frame -> error

    # --- an attempt ---

    async def _attempt(self, number: int, ctx: Any) -> None:
        """Make an attempt, and tell the plan how it ended. What is no outcome comes out."""
        outcome: Outcome[Any]
        try:
            outcome = Success(await self._call(ctx))
        except Exception as error:
            outcome = Failure(unwrap_stop_iteration(error))
        finally:
            self._running.pop(number, None)
        try:
            if self._is_decided:
                late = closable(outcome if isinstance(outcome, Success) else outcome.error)
                if late is not None:
                    await self._close(late)
            elif self._plan.ended(number, outcome):
                self._end()
            else:
                self._set_next()
        finally:
            del outcome  # no cycle: a failure's traceback holds this frame

    async def _attempt_beside(self, number: int, ctx: Any) -> None:
        """Make an attempt beside the first. What comes out ends the race, and comes out of that."""
        try:
            if not self._is_decided:
                await self._run_cuttable(number, ctx)
        except GeneratorExit:
            raise
        except BaseException as error:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._end()
        self._wake()

    def _end(self) -> None:
        """Begin no further attempt, and cut off those that run."""
        self._is_decided = True
        self._set_next()
        while self._running:
            self._running.popitem()[1]()

    # --- the next attempt ---

    def _set_next(self) -> None:
        """Ring when the next attempt is due."""
        due = inf if self._is_decided else self._plan.due
        if due != self._rings_at:
            self._rings_at = due
            self._ring_at(due)

    def _ring(self) -> None:
        """Begin the attempts that are due."""
        now = max(clock.now(), self._rings_at)  # the timer of an event loop may ring a little early
        self._rings_at = inf
        try:
            while not self._is_decided and self._plan.due <= now:
                ctx = self._begin()
                if ctx is None:
                    break
                self._beside += 1
                self._start(self._begun - 1, ctx)
            self._set_next()
        except BaseException as error:
            self._break(error)
        if not self._beside:
            self._wake()

    def _begin(self) -> Any:
        ctx = self._plan.begin()
        if ctx is not None:
            self._begun += 1
        return ctx

    # --- waiting ---

    async def _change(self) -> None:
        """Wait until an attempt has ended, or no other one will begin."""
        self._waiter = self._runtime.waiter()
        await self._waiter.wait(inf, None)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.wake()

    def _one_ended(self) -> None:
        """Note that an attempt beside the first has come to its end."""
        self._beside -= 1
        self._wake()

    async def _others_ended(self) -> None:
        """Wait for the ends of all attempts. A cancellation that comes meanwhile takes hold after them."""
        interrupt: BaseException | None = None
        while self._beside:
            try:
                await self._change()
            except (GeneratorExit, Exception):  # closed, or it cannot wait
                raise  # pragma: no cover (it runs; CPython 3.11 traces nothing after a throw)
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                del interrupt

    async def _close(self, late: object) -> None:
        """Close a result that came too late."""
        await self._runtime.close(late)

    def _forget(self) -> None:
        """Let go of what may refer to this race: what has rung, and an error whose traceback has frames of it."""
        self._ring_at(inf)
        self._error = self._waiter = None
        del self._call, self._plan

    # --- what runtimes do differently ---

    @abstractmethod
    async def _run_cuttable(self, number: int, ctx: Any) -> None:
        """Run `self._attempt(number, ctx)`, with what cuts it off in `self._running`. That does not come out."""

    @abstractmethod
    def _start(self, number: int, ctx: Any) -> None:
        """Start `self._attempt_beside(number, ctx)`, after whose end comes `self._one_ended()`."""

    @abstractmethod
    def _ring_at(self, due: float) -> None:
        """Call `self._ring` at this instant instead of the one before; infinity: not at all."""
