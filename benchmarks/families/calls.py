"""Policies with a key for each call, around a function that succeeds; and streams of a thousand items."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

from benchmarks.cells import Cell, fine
from benchmarks.functions import ANSWER
from benchmarks.libraries import Protect
from benchmarks.timing import ASYNCIO, SYNC

ITEMS: Final = 1000


def thousand() -> Iterator[int]:
    yield from range(ITEMS)


async def thousand_later() -> AsyncIterator[int]:
    for number in range(ITEMS):
        yield number


@asynccontextmanager
async def streamed(protect: Protect, world: str) -> AsyncIterator[Callable[[], Any]]:
    """Consume a stream to its end."""
    stream = protect(thousand if world == SYNC else thousand_later)

    def consume() -> int:
        for _ in stream():
            pass
        return ANSWER

    async def consume_later() -> int:
        async for _ in stream():
            pass
        return ANSWER

    yield consume if world == SYNC else consume_later


CELLS = [
    *(
        Cell(f"{world}, by key", entry, world, entry=entry, setting=fine)
        for world in (SYNC, ASYNCIO)
        for entry in ("cache hit", "flight", "keyed")
    ),
    *(
        Cell(f"{world}, a stream of {ITEMS} items", entry, world, entry=entry, setting=streamed)
        for world, entry in ((SYNC, "stream"), (ASYNCIO, "stream"), (ASYNCIO, "stream, idle"))
    ),
]
