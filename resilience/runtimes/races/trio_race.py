"""Races in trio. This module is imported only in a trio task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, final

from typing_extensions import override

from resilience.clock import clock
from resilience.runtimes.base import Plan, Runtime
from resilience.runtimes.races import Race, ScheduledCall


@final
class TrioRace(Race):
    """A race in a trio task."""

    def __init__(self, runtime: Runtime, call: Callable[[Any], Awaitable[Any]], plan: Plan[Any], trio: Any) -> None:
        super().__init__(runtime, call, plan)
        self._trio = trio
        self._scheduled: ScheduledCall | None = None

    @override
    async def _run_cuttable(self, number: int, ctx: Any) -> None:
        try:
            with self._trio.CancelScope() as scope:
                self._running[number] = scope.cancel
                await self._attempt(number, ctx)
        except ExceptionGroup:  # a nursery adds to a cancellation what was raised on the way out
            if not scope.cancelled_caught:
                raise

    @override
    def _start(self, number: int, ctx: Any) -> None:
        self._trio.lowlevel.spawn_system_task(self._run_beside, number, ctx, context=self._variables.copy())

    @override
    async def _wait_for_others(self) -> None:
        await super()._wait_for_others()
        await self._trio.lowlevel.checkpoint_if_cancelled()

    @override
    def _schedule(self, due: float) -> None:
        if self._scheduled is not None:
            self._scheduled.function = None
        if due != inf:
            self._scheduled = ScheduledCall(due, self._start_due)
            scheduler_of(self._trio).add(self._scheduled)


@final
class Scheduler:
    """The task of a trio run that makes the scheduled calls of all its races."""

    def __init__(self, trio: Any) -> None:
        self._trio = trio
        self._calls: list[ScheduledCall] = []  # a heap
        self._purge_size = 64  # at this size, cancelled calls are removed from the heap
        self._wakes_at = -inf
        self._woken: Any  # set before `run` waits

    def add(self, scheduled: ScheduledCall) -> None:
        """Add a call."""
        if len(self._calls) >= self._purge_size:
            self._calls = [it for it in self._calls if it.function is not None]
            self._purge_size = max(64, 2 * len(self._calls))
            heapify(self._calls)
        heappush(self._calls, scheduled)
        if scheduled.due < self._wakes_at:
            self._woken.set()

    async def run(self) -> None:
        """Make each call when it is due, as long as the trio run lasts."""
        while True:
            while self._calls and (self._calls[0].function is None or self._calls[0].due <= clock.now()):
                scheduled = heappop(self._calls)  # no variable for its function, which refers to the race
                if scheduled.function is not None:
                    scheduled.function()
            self._woken = self._trio.Event()
            self._wakes_at = self._calls[0].due if self._calls else inf
            with self._trio.move_on_after(max(0.0, self._wakes_at - clock.now())):
                await self._woken.wait()
            self._wakes_at = -inf


_schedulers: Any = None  # a `RunVar`: one value for each trio run


def scheduler_of(trio: Any) -> Scheduler:
    """Return the one of the current trio run, or start it."""
    global _schedulers
    if _schedulers is None:
        _schedulers = trio.lowlevel.RunVar("resilience.scheduler")
    try:
        found: Scheduler = _schedulers.get()
    except LookupError:
        found = Scheduler(trio)
        _schedulers.set(found)
        trio.lowlevel.spawn_system_task(found.run)
    return found
