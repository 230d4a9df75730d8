"""Races in trio. This module is imported only in a trio task."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, final

from typing_extensions import override

from resilience.clock import clock
from resilience.runtimes.base import Plan, Runtime
from resilience.runtimes.races import Race


@final
class TrioRace(Race):
    """A race in a trio task."""

    def __init__(self, runtime: Runtime, call: Callable[[Any], Awaitable[Any]], plan: Plan[Any]) -> None:
        super().__init__(runtime, call, plan)
        self._trio: Any = sys.modules["trio"]
        self._variables = copy_context()
        self._bell: Bell | None = None

    @override
    async def _run_cuttable(self, number: int, ctx: Any) -> None:
        with self._trio.CancelScope() as scope:
            self._running[number] = scope.cancel
            await self._attempt(number, ctx)

    @override
    def _start(self, number: int, ctx: Any) -> None:
        self._trio.lowlevel.spawn_system_task(self._in_task, number, ctx, context=self._variables.copy())

    async def _in_task(self, number: int, ctx: Any) -> None:
        try:
            await self._attempt_beside(number, ctx)
        finally:
            self._one_ended()

    @override
    async def _others_ended(self) -> None:
        with self._trio.CancelScope(shield=True):
            await super()._others_ended()
        await self._trio.lowlevel.checkpoint_if_cancelled()

    @override
    async def _close(self, late: object) -> None:
        with self._trio.CancelScope(shield=True):
            await super()._close(late)

    @override
    def _ring_at(self, due: float) -> None:
        if self._bell is not None:
            self._bell.ring = None
            self._bell = None
        if due != inf:
            self._bell = Bell(due, self._ring)
            ringer_of(self._trio).add(self._bell)


@final
class Bell:
    """A call at an instant, which can be cancelled: then `ring` is None."""

    __slots__ = ("due", "ring")

    def __init__(self, due: float, ring: Callable[[], object]) -> None:
        self.due: float = due
        self.ring: Callable[[], object] | None = ring

    def __lt__(self, other: Bell) -> bool:
        return self.due < other.due


@final
class Ringer:
    """The task of a trio run that makes the scheduled calls of all its races."""

    def __init__(self, trio: Any) -> None:
        self._trio = trio
        self._bells: list[Bell] = []  # a heap
        self._most = 64  # at this size, cancelled calls are removed from the heap
        self._wakes_at = -inf
        self._woken: Any = trio.Event()

    def add(self, bell: Bell) -> None:
        """Add a call."""
        if len(self._bells) >= self._most:
            self._bells = [it for it in self._bells if it.ring is not None]
            self._most = max(64, 2 * len(self._bells))
            heapify(self._bells)
        heappush(self._bells, bell)
        if bell.due < self._wakes_at:
            self._woken.set()

    async def run(self) -> None:
        """Make each call when it is due, as long as the trio run lasts."""
        while True:
            while self._bells and (self._bells[0].ring is None or self._bells[0].due <= clock.now()):
                bell = heappop(self._bells)  # no variable for its function, which refers to the race
                if bell.ring is not None:
                    bell.ring()
            self._woken = self._trio.Event()
            self._wakes_at = self._bells[0].due if self._bells else inf
            with self._trio.move_on_after(max(0.0, self._wakes_at - clock.now())):
                await self._woken.wait()
            self._wakes_at = -inf


_ringers: Any = None  # a `RunVar`: one value for each trio run


def ringer_of(trio: Any) -> Ringer:
    """Return the one of the current trio run, or start it."""
    global _ringers
    if _ringers is None:
        _ringers = trio.lowlevel.RunVar("resilience.ringer")
    try:
        found: Ringer = _ringers.get()
    except LookupError:
        found = Ringer(trio)
        _ringers.set(found)
        trio.lowlevel.spawn_system_task(found.run)
    return found
