"""Runs the same script under another library and under ours, and records the calls, their instants and the outcome."""

from __future__ import annotations

import asyncio
import datetime
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import backoff
import pybreaker
import stamina

from resilience.testing import script, virtual_time

Function = Callable[..., Any]

#: The positions of random numbers within their bounds: results are compared at both ends, and between them.
SHARES = (0.0, 0.5, 1.0)


@dataclass
class Run:
    """The run of one library.

    :param at: the instants of the calls, in seconds from the first.
    :param end: the outcome: the value, or the exception.
    """

    at: list[float]
    end: object

    @property
    def waits(self) -> list[float]:
        return [after - before for before, after in zip(self.at, self.at[1:], strict=False)]

    @property
    def comparable(self) -> tuple[object, ...]:
        end = type(self.end).__name__ if isinstance(self.end, BaseException) else self.end
        return [round(instant, 6) for instant in self.at], end


class Clock:
    """A clock that only sleeps advance."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    async def asleep(self, seconds: float) -> None:
        self.sleep(seconds)


@contextmanager
def their_time() -> Iterator[Clock]:
    """Let the other libraries run on their own clock."""
    clock = Clock()

    class Dates(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime.fromtimestamp(clock.time, tz)

    with (
        mock.patch.object(time, "sleep", clock.sleep),
        mock.patch.object(time, "monotonic", clock.now),
        mock.patch.object(backoff._sync, "datetime", SimpleNamespace(datetime=Dates)),
        mock.patch.object(pybreaker, "datetime", Dates),
        mock.patch.object(stamina._core, "_smart_sleep", clock.asleep),
    ):
        yield clock


@contextmanager
def chance(share: float) -> Iterator[None]:
    """Let every random number lie at this position within its bounds."""
    with (
        mock.patch.object(random, "uniform", lambda low, high: low + share * (high - low)),
        mock.patch.object(random, "random", return_value=share),
    ):
        yield


def theirs(wrapped: Callable[[Function], Function], *steps: Any) -> Run:
    """Run a script under another library's decorator."""
    function, at = script(*steps), []
    with their_time() as clock:

        def noted(*args: Any, **kwargs: Any) -> Any:
            at.append(clock.now() - 1000)
            return function(*args, **kwargs)

        return Run(at, _end(wrapped(noted)))


def ours(wrapped: Callable[[Function], Function], *steps: Any) -> Run:
    """Run a script under one of our policies."""
    function = script(*steps)
    with virtual_time():

        def noted(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        end = _end(wrapped(noted))
    return Run([call.at for call in function.calls], end)


def same(their: Callable[[Function], Function], our: Callable[[Function], Function], *steps: Any) -> tuple[Run, Run]:
    """Assert that both call at the same instants and have the same outcome, for all random numbers."""
    runs = None
    for share in SHARES:
        with chance(share):
            runs = theirs(their, *steps), ours(our, *steps)
        assert runs[0].comparable == runs[1].comparable, f"with random numbers at {share}"
    assert runs is not None
    return runs


def in_blocks(attempts: Callable[[], Any], note: Callable[[Any], object] = id) -> Callable[[Function], Function]:
    """Return a decorator that runs a function in the block of each attempt, which `note` gets."""

    def wrapped(function: Function) -> Function:
        def run() -> Any:
            for attempt in attempts():
                with attempt:
                    note(attempt)
                    return function()
            return None

        return run

    return wrapped


def in_async_blocks(attempts: Callable[[], Any]) -> Callable[[Function], Function]:
    """Return a decorator that does so in a coroutine function."""

    def wrapped(function: Function) -> Function:
        async def run() -> Any:
            async for attempt in attempts():
                with attempt:
                    return function()
            return None

        return run

    return wrapped


def _end(function: Function) -> object:
    try:
        result = function()
        return asyncio.run(result) if asyncio.iscoroutine(result) else result
    except Exception as error:
        return error


def rows_of(page: str, section: str) -> dict[str, str]:
    """Return the rows of a section's table: left cell -> right cell."""
    table = page.split(f"\n## From {section}\n")[1].split("\n## ")[0]
    rows = [line[2:-2].replace(r"\|", "\0").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {left.replace("\0", "|"): right.replace("\0", "|") for left, right in rows[1:] if left != section}


def code_in(cell: str) -> str:
    """Return the first piece of code in a cell."""
    return cell.split("`")[1]
