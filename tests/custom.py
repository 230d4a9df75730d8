"""Custom policies that several tests use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilience import Context, Policy
from resilience.events import Called

INF = float("inf")


class Passing(Policy):
    """A policy that does nothing."""

    async def around(self, call: Any, ctx: Context) -> Any:
        return await call(ctx)


PASSING = Passing()


class Driven(Policy):
    """A policy that is not lowered in blocking code: it passes its call to another coroutine."""

    async def around(self, call: Any, ctx: Context) -> Any:
        return await self.pass_on(call, ctx)

    async def pass_on(self, call: Any, ctx: Context) -> Any:
        return await call(ctx)


class Recording(Policy):
    """Records the contexts of its calls."""

    def __init__(self) -> None:
        self.seen: list[Context] = []

    async def around(self, call: Any, ctx: Context) -> Any:
        self.seen.append(ctx)
        return await call(ctx)

    @property
    def called(self) -> list[Called | None]:
        return [ctx.called for ctx in self.seen]

    @property
    def operations(self) -> list[str | None]:
        return [ctx.operation for ctx in self.seen]


class HandingOn(Policy):
    """Passes its call on to another policy."""

    def __init__(self, other: Policy[Any]) -> None:
        self._other = other

    async def around(self, call: Any, ctx: Context) -> Any:
        return await self._other.around(call, ctx)


class Twice(Policy[Any]):
    """Calls again, whatever has happened."""

    async def around(self, call: Any, ctx: Context) -> Any:
        await call(ctx)
        return await call(ctx)


def nothing(ctx: Context) -> None: ...


class Doing(Policy[Any]):
    """Does something with the context before its call, and after it."""

    def __init__(self, before: Callable[[Any], object] = nothing, after: Callable[[Any], object] = nothing) -> None:
        self._before, self._after = before, after

    async def around(self, call: Any, ctx: Context) -> Any:
        self._before(ctx)
        result = await call(ctx)
        self._after(ctx)
        return result


class Sleeping(Policy[Any]):
    """Sleeps before its call, and after it."""

    def __init__(self, before: float = 0.0, after: float = 0.0) -> None:
        self._before, self._after = before, after

    async def around(self, call: Any, ctx: Context) -> Any:
        if self._before:
            await ctx.sleep(self._before)
        result = await call(ctx)
        if self._after:
            await ctx.sleep(self._after)
        return result


class Tag(Policy):
    """Records when a call enters and leaves it."""

    def __init__(self, tag: str, log: list[str]) -> None:
        self.tag = tag
        self.log = log

    async def around(self, call: Any, ctx: Context) -> Any:
        self.log.append(self.tag)
        try:
            return await call(ctx)
        finally:
            self.log.append(self.tag.upper())

    def __repr__(self) -> str:
        return f"Tag({self.tag})"
