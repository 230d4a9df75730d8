"""Shared by the tests of timeouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from resilience import Context
from tests.conftest import World

SHORT = 0.02

LONG = 60.0


def hanging(world: World) -> Callable[..., Awaitable[None]]:
    async def fn(ctx: Context) -> None:
        await world.hang()

    return fn


class Stopwatch:
    """Measures real seconds."""

    def __enter__(self) -> Stopwatch:
        self.began = time.monotonic()
        return self

    def __exit__(self, *exc: object) -> None:
        self.seconds = time.monotonic() - self.began


async def forever(ctx: Context) -> None:
    await asyncio.sleep(10)
