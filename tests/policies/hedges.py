"""Shared by the tests of hedges: a service whose attempts have given durations and outcomes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from resilience import Context, Policy
from tests.conftest import Virtual


class Service:
    """A function `async def fn(ctx)` whose attempts have given durations and outcomes.

    :param steps: for each attempt its seconds, and its result or exception. The last step is used for all others.
    """

    def __init__(self, world: Virtual, *steps: tuple[float, Any]) -> None:
        self.world = world
        self.steps = steps
        self.begun: list[tuple[int, float]] = []  # the number of each attempt, and when it began
        self.cut_off: list[int] = []

    def function(self) -> Callable[[Context], Awaitable[Any]]:
        async def fn(ctx: Context) -> Any:
            self.begun.append((ctx.hedge, round(self.world.now() - self.began, 6)))
            seconds, step = self.steps[min(ctx.hedge, len(self.steps) - 1)]
            try:
                await self.world.sleep(seconds)
            except BaseException:
                self.cut_off.append(ctx.hedge)
                raise
            if isinstance(step, BaseException):
                raise step
            return step

        return fn

    async def under(self, policy: Policy[Any], ctx: Context | None = None) -> tuple[Any, float]:
        """Execute the function; return its result or exception, and the seconds that passed."""
        self.began = self.world.now()
        outcome = await self.world.attempt(policy, self.function(), ctx)
        return outcome, round(self.world.now() - self.began, 6)
