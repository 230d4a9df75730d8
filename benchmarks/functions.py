"""What is called: functions that cost next to nothing, and the numbers that every contestant is set to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import cycle
from typing import Any, Final

from benchmarks.timing import SYNC

ANSWER: Final = 42

#: Every library is built with these.
ATTEMPTS: Final = 3
FAILURES: Final = 5  # in a row open a circuit
OPEN_FOR: Final = 600.0  # seconds; longer than any cell takes
LIMIT: Final = 64  # calls at once
RATE: Final = 10**9  # calls a second: none waits
SECONDS: Final = 5.0  # that a call may take
KEEP_FOR: Final = 600.0  # seconds that a value is kept; longer than any cell takes
TOO_SHORT: Final = 1e-6  # seconds, where it is to be cut off

#: What policies handle that are to handle nothing here.
OTHER_FAILURE: Final = LookupError

#: What is tried again. The wait grows from `BASE` seconds, doubling, to `CAP`, with full jitter where there is one.
FAILURE: Final = ConnectionError
BASE: Final = 0.1
CAP: Final = 10.0


def answer(ctx: object = None) -> int:
    return ANSWER


async def answer_later(ctx: object = None) -> int:
    return ANSWER


def answering(world: str) -> Callable[..., Any]:
    """Return a function that answers."""
    return answer if world == SYNC else answer_later


def failing(world: str) -> Callable[..., Any]:
    """Return a function that fails each time."""

    def fail(ctx: object = None) -> int:
        raise FAILURE("reset")

    async def fail_later(ctx: object = None) -> int:
        raise FAILURE("reset")

    return fail if world == SYNC else fail_later


def failing_once(world: str) -> Callable[..., Any]:
    """Return a function that fails, then answers, and begins anew."""
    return _failing((True, False), world)


def failing_twice(world: str) -> Callable[..., Any]:
    """Return a function that fails twice, then answers, and begins anew."""
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
    """Return a function that is cut off before it has slept its fill, in asyncio."""

    async def sleep(ctx: object = None) -> int:
        await asyncio.sleep(SECONDS)
        return ANSWER

    return sleep
