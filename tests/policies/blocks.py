"""Shared by the tests of policies around blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.conftest import World


@asynccontextmanager
async def entered(world: World, block: Any) -> AsyncIterator[None]:
    """Enter a block of a policy: `with block` in threads, `async with block` in tasks."""
    if world.blocking:
        with block:
            yield
    else:
        async with block:
            yield
