"""Races in asyncio. This module is imported only in an asyncio task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, final

from typing_extensions import override

from resilience.clock import clock
from resilience.runtimes.alarms import RACES, Alarm, cancel, find_alarm
from resilience.runtimes.base import Plan, Runtime
from resilience.runtimes.races import Race


@final
class AsyncioRace(Race):
    """A race in an asyncio task."""

    def __init__(
        self, runtime: Runtime, call: Callable[[Any], Awaitable[Any]], plan: Plan[Any], task: asyncio.Task[Any]
    ) -> None:
        super().__init__(runtime, call, plan)
        self._task = task
        self._loop = task.get_loop()
        self.deadline: float  # when the next attempt is due, for the alarm
        self._alarm: Alarm | None = None
        self._has_cancelled = False  # the caller's task, which runs the first attempt

    @override
    async def _run_cuttable(self, number: int, ctx: Any) -> None:
        if number:
            try:
                await self._attempt(number, ctx)
            except asyncio.CancelledError:
                if not self._is_decided:  # cancelled by other code, not by this race
                    raise
            return
        task, before = self._task, self._task.cancelling()
        self._running[0] = self._cut_off_first
        try:
            await self._attempt(0, ctx)
        except BaseException as error:
            if not self._has_cancelled or task.uncancel() > before or not isinstance(error, asyncio.CancelledError):
                raise
        else:  # the attempt may also have swallowed a cancellation of the caller
            if self._has_cancelled and task.uncancel() > before:
                raise asyncio.CancelledError  # pragma: no cover (it runs; CPython 3.11 traces nothing after a throw)

    @override
    def _end(self) -> None:
        if self._loop.is_closed():  # no attempt runs any more, and to cancel a task would raise
            self._running.clear()
        super()._end()

    def _cut_off_first(self) -> None:
        self._has_cancelled = True
        cancel(self._task)

    @override
    def _start(self, number: int, ctx: Any) -> None:
        task = self._loop.create_task(self._attempt_beside(number, ctx))  # in a copy of the variables; see `_start_due`
        if not task.done():  # pragma: no branch (an eager task may have ended)
            self._running[number] = task.cancel
        task.add_done_callback(lambda task: self._attempt_ended())  # also if it was cancelled before it began

    @override
    def _schedule(self, due: float) -> None:
        if self._alarm is not None:
            self._alarm.pending.pop(self, None)
        if due != inf:
            self.deadline = due
            alarm = self._alarm = find_alarm(self._loop, RACES, due)
            if due < alarm.rings_at:
                alarm.set(due, clock.now())
            alarm.pending[self] = None

    def fire(self) -> None:
        """Start the attempts that are due. Called by the alarm."""
        self._start_due()

    @override
    def _break_cycles(self) -> None:
        super()._break_cycles()
        del self._task
