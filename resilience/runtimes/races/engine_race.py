"""Races in an engine: in a simulation, and, each in an engine of its own, in threads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import copy_context
from math import inf
from typing import Any

from typing_extensions import override

from resilience.runtimes.base import Plan
from resilience.runtimes.engine import Alarm, Engine, EngineTimer
from resilience.runtimes.races import Race


class EngineRace(Race):
    """A race of clients of an engine."""

    def __init__(self, engine: Engine, call: Callable[[Any], Awaitable[Any]], plan: Plan[Any]) -> None:
        super().__init__(engine.runtime, call, plan)
        self._engine = engine
        self._variables = copy_context()
        self._alarm: Alarm | None = None

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
        timer.start()
        try:
            await self._attempt(number, ctx)
        except BaseException as error:
            if not timer.stop(error):
                raise
        else:
            timer.stop(None)

    @override
    def _start(self, number: int, ctx: Any) -> None:
        self._engine.add(self._as_client(number, ctx), self._variables.copy().run, self._engine.now())

    async def _as_client(self, number: int, ctx: Any) -> None:
        try:
            await self._attempt_beside(number, ctx)
        finally:
            self._one_ended()

    @override
    def _ring_at(self, due: float) -> None:
        if self._alarm is not None:
            self._alarm.is_armed = False
            self._alarm = None
        if due != inf:
            self._alarm = Alarm(self._ring)
            self._engine.ring_at(due, self._alarm)
