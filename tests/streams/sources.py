"""Shared by the tests of streams: sources that follow scripts, and consumers of streams for each runtime."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from resilience import Policy
from tests.conftest import World

#: What follows the last item.
END = object()


class Source:
    """A generator function that follows one script in each call.

    It yields the items, or the result of an item that is a function, and raises the exceptions.
    """

    def __init__(self, world: World, *scripts: list[Any]) -> None:
        self.world = world
        self.calls: list[dict[str, Any]] = []
        self.closed = 0
        self._scripts = scripts

    @property
    def function(self) -> Callable[..., Any]:
        return self._blocking if self.world.blocking else self._task

    def _begin(self, keywords: dict[str, Any]) -> list[Any]:
        self.calls.append(keywords)
        return self._scripts[min(len(self.calls), len(self._scripts)) - 1]

    def _blocking(self, *args: Any, **keywords: Any) -> Any:
        try:
            for step in self._begin(keywords):
                if isinstance(step, BaseException):
                    raise step
                yield step() if callable(step) else step
        finally:
            self.closed += 1

    async def _task(self, *args: Any, **keywords: Any) -> Any:
        try:
            for step in self._begin(keywords):
                await self.world.sleep(0)
                if isinstance(step, BaseException):
                    raise step
                yield step() if callable(step) else step
            await self.world.sleep(0)
        finally:
            self.closed += 1


class Consumed:
    """A stream, pulled in its runtime."""

    def __init__(self, world: World, stream: Any) -> None:
        self.world = world
        self.stream = stream

    async def next(self, *default: Any) -> Any:
        return next(self.stream, *default) if self.world.blocking else await anext(self.stream, *default)

    async def close(self) -> None:
        if self.world.blocking:
            self.stream.close()
        else:
            await self.stream.aclose()

    async def all(self, into: list[Any] | None = None) -> list[Any]:
        """Return all items. Add them to `into` one by one, for a stream that fails."""
        got = [] if into is None else into
        if self.world.blocking:
            got.extend(self.stream) if into is None else [got.append(it) for it in self.stream]
        else:
            async for it in self.stream:
                got.append(it)
        return got


def streamed(world: World, policy: Policy[Any], source: Source, **limits: Any) -> Consumed:
    return Consumed(world, policy.streaming(**limits).call(source.function))


async def taken(stream: Consumed, stop: Callable[[Any], object]) -> list[Any]:
    """Return the items up to the first for which `stop` is true, and close the stream."""
    got: list[Any] = []
    try:
        while (item := await stream.next(END)) is not END:
            got.append(item)
            if stop(item):
                break
    finally:
        await stream.close()
    return got


async def outcome(stream: Consumed) -> tuple[list[Any], Any]:
    """Return the items, and the error of the stream, if any."""
    got: list[Any] = []
    try:
        await stream.all(got)
    except Exception as error:
        return got, error
    return got, None


async def paced(*pauses: float) -> AsyncIterator[float]:
    for pause in pauses:
        await asyncio.sleep(pause)
        yield pause


async def anext_of(stream: Any) -> Any:
    return await anext(stream)
