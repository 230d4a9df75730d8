"""Shared by the tests of policies around blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.conftest import World


@asynccontextmanager
async def entered(world: World, block: Any) -> AsyncIterator[Any]:
    """Enter a block: `with block` in threads, `async with block` in tasks; yield what it returns."""
    if world.blocking:
        with block as value:
            yield value
    else:
        async with block as value:
            yield value
