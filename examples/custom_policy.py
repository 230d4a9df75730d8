"""A policy of your own: one coroutine, which runs in threads, asyncio and trio, with one state for all three.

Look at `Spaced`, which is the whole policy. Then look at the output: threads, asyncio and trio make three calls each
through the same object, and all nine take turns, a tenth of a second apart.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import trio

from resilience import Call, Context, Policy

T = TypeVar("T")


class Spaced(Policy):
    """Let one call begin every `gap` seconds, in threads, asyncio and trio together."""

    def __init__(self, gap: float) -> None:
        self._gap = gap
        self._next = 0.0
        self._lock = threading.Lock()

    async def around(self, call: Call[T], ctx: Context) -> T:
        with self._lock:  # decide under the lock ...
            begins = max(time.monotonic(), self._next)
            self._next = begins + self._gap
        await ctx.sleep(max(0.0, begins - time.monotonic()))  # ... and wait outside it
        return await call(ctx)


spaced = Spaced(0.1)
started = time.monotonic()
begun: list[float] = []


def note(runtime: str) -> None:
    begun.append(time.monotonic() - started)
    sys.stdout.write(f"{begun[-1]:.1f} s  {runtime}\n")  # in one piece, because three threads write


async def anote(runtime: str) -> None:
    note(runtime)


def in_threads() -> None:
    for _ in range(3):
        spaced.call(note, "threads")


async def main(runtime: str) -> None:
    for _ in range(3):
        await spaced.call(anote, runtime)


if __name__ == "__main__":
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(in_threads),
            pool.submit(asyncio.run, main("asyncio")),
            pool.submit(trio.run, main, "trio"),
        ]
    for run in runs:
        run.result()
    print(f"{len(begun)} calls, one every {(begun[-1] - begun[0]) / (len(begun) - 1):.2f} s")
