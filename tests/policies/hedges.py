"""What the tests of hedges share: a service whose attempts take so long, and end so, by their number."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from resilience import Context, Policy
from tests.conftest import Virtual


class Service:
    """An `async def fn(ctx)` whose attempts take so long, and end so, by their number.

    :param steps: seconds, and then a result or an exception; the last one is that of all further attempts.
    """

    def __init__(self, world: Virtual, *steps: tuple[float, Any]) -> None:
        self.world = world
        self.steps = steps
        self.begun: list[tuple[int, float]] = []  # numbers, and when
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
        """Return what came out, and after how many seconds."""
        self.began = self.world.now()
        ended = await self.world.attempt(policy, self.function(), ctx)
        return ended, round(self.world.now() - self.began, 6)
