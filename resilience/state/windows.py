"""Windows over the latest results: the last so many, or those of the last so many seconds.

A window holds counts, never the results themselves, and takes the time as an argument.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol, final


class Window(Protocol):
    """Counts of the latest results: all of them, and those that were bad."""

    @property
    def total(self) -> int:
        """How many results are in the window."""
        ...

    @property
    def bad(self) -> int:
        """How many of them were bad."""
        ...

    def add(self, bad: bool, now: float) -> None:
        """Count one more result, and forget what has become too old."""
        ...


@final
class CountWindow:
    """The last `size` results: a ring of booleans and a running count."""

    __slots__ = ("_results", "bad")

    def __init__(self, size: int) -> None:
        self._results: deque[bool] = deque(maxlen=size)
        self.bad: int = 0

    @property
    def total(self) -> int:
        """How many results are in the window."""
        return len(self._results)

    def add(self, bad: bool, now: float) -> None:
        """Count one more result; the oldest goes when the window is full."""
        results = self._results
        if len(results) == results.maxlen:
            self.bad -= results[0]
        results.append(bad)
        self.bad += bad


@final
class TimeWindow:
    """The results of the last `seconds`, forgotten in steps of a 32nd of that.

    A step begins with the first result in it, so a result is kept for at least 31/32 of the window and
    never longer than the window; the memory is bounded by the number of steps.
    """

    __slots__ = ("_seconds", "_step", "_steps", "bad", "total")

    STEPS = 32

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._step = seconds / self.STEPS
        self._steps: list[list[float]] = []  # [began at, total, bad]
        self.total: int = 0
        self.bad: int = 0

    def add(self, bad: bool, now: float) -> None:
        """Count one more result, and forget the steps that began `seconds` ago or earlier."""
        steps = self._steps
        while steps and now - steps[0][0] >= self._seconds:
            _, old_total, old_bad = steps.pop(0)
            self.total -= int(old_total)
            self.bad -= int(old_bad)
        if not steps or now - steps[-1][0] >= self._step:
            steps.append([now, 0, 0])
        step = steps[-1]
        step[1] += 1
        step[2] += bad
        self.total += 1
        self.bad += bad

    def add_good(self, number: int, now: float) -> None:
        """Count so many more good results at once; 0 only forgets what has become too old."""
        self.add(False, now)
        self._steps[-1][1] += number - 1
        self.total += number - 1
