"""The functions that contestants call, which cost almost nothing, and the settings of all contestants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import cycle
from typing import Any, Final

from benchmarks.timing import SYNC

ANSWER: Final = 42

#: The settings of every library.
ATTEMPTS: Final = 3
FAILURES: Final = 5  # failures in a row that open a circuit
OPEN_FOR: Final = 600.0  # seconds; longer than any cell takes
LIMIT: Final = 64  # concurrent calls
RATE: Final = 10**9  # calls per second, so that none waits
SECONDS: Final = 5.0  # the time limit of a call
KEEP_FOR: Final = 600.0  # seconds for which a value is cached; longer than any cell takes
TOO_SHORT: Final = 1e-6  # the time limit of a call that is to be cut off, in seconds

#: The exception of policies that must not handle the failure of the function.
OTHER_FAILURE: Final = LookupError

#: The exception that is retried. Delays double from `BASE` to `CAP` seconds, with full jitter if the library has it.
FAILURE: Final = ConnectionError
BASE: Final = 0.1
CAP: Final = 10.0


def answer(ctx: object = None) -> int:
    return ANSWER


async def answer_later(ctx: object = None) -> int:
    return ANSWER


def answering(world: str) -> Callable[..., Any]:
    """Return a function that succeeds."""
    return answer if world == SYNC else answer_later


def failing(world: str) -> Callable[..., Any]:
    """Return a function that always fails."""

    def fail(ctx: object = None) -> int:
        raise FAILURE("reset")

    async def fail_later(ctx: object = None) -> int:
        raise FAILURE("reset")

    return fail if world == SYNC else fail_later


def failing_once(world: str) -> Callable[..., Any]:
    """Return a function that alternately fails and succeeds."""
    return _failing((True, False), world)


def failing_twice(world: str) -> Callable[..., Any]:
    """Return a function that fails twice, then succeeds, and so on."""
    return _failing((True, True, False), world)


def _failing(turns: tuple[bool, ...], world: str) -> Callable[..., Any]:
    fails = cycle(turns)

    def work(ctx: object = None) -> int:
        if next(fails):
            raise FAILURE("reset")
        return ANSWER

    async def work_later(ctx: object = None) -> int:
        return work()

    return work if world == SYNC else work_later


def never_answering(world: str) -> Callable[..., Any]:
    """Return a function for asyncio that sleeps for longer than the timeout that cuts it off."""

    async def sleep(ctx: object = None) -> int:
        await asyncio.sleep(SECONDS)
        return ANSWER

    return sleep
