"""A source of items that loses its connection twice, in virtual time: once silently, once with an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from resilience import Retry
from resilience.testing import virtual_time

EVERY, LAST = 0.1, 100
SILENT, LOST = 30, 60


async def read(*, after: int = 0) -> AsyncIterator[int]:
    """Yield the numbers up to 100, ten per second. Hang after 30, and raise an error after 60."""
    for number in range(after + 1, LAST + 1):
        await asyncio.sleep(EVERY)
        yield number
        if number == SILENT:
            await asyncio.sleep(3600)
        if number == LOST:
            raise ConnectionError("reset")


def handed_out(seconds: float, **settings: Any) -> tuple[list[float], str]:
    """Return the instants at which a consumer gets its items, and the end: `"all"`, `"waits"`, or an error."""
    instants: list[float] = []
    ended = "waits"

    async def consume() -> None:
        nonlocal ended
        async with aclosing(Retry(3, backoff=[0.5]).streaming(**settings).call(read)) as numbers:
            try:
                async for number in numbers:
                    assert number == len(instants) + 1  # none twice, none lost
                    instants.append(clock.now())
                ended = "all"
            except Exception as error:
                ended = type(error).__name__

    async def main() -> None:
        task = asyncio.ensure_future(consume())
        await asyncio.wait([task], timeout=seconds)
        task.cancel()
        await asyncio.wait([task])

    with virtual_time() as clock:
        asyncio.run(main())
    return instants, ended
