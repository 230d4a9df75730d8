"""What is called: functions that cost next to nothing, and the numbers that every contestant is set to."""

from __future__ import annotations

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
SECONDS: Final = 5.0  # that a call may take

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


def failing_twice(world: str) -> Callable[..., Any]:
    """Return a function that fails twice, then answers, and begins anew."""
    fails = cycle((True, True, False))

    def work(ctx: object = None) -> int:
        if next(fails):
            raise FAILURE("reset")
        return ANSWER

    async def work_later(ctx: object = None) -> int:
        return work()

    return work if world == SYNC else work_later
