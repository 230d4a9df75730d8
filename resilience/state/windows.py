"""Sliding windows over results: the last n results, or the results of the last n seconds.

A window holds counts, never the results themselves, and takes the time as an argument. A signal handler may raise as a
call returns, so there is no call between the changes of counts that belong together.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias, final


@final
class CountWindow:
    """The last `size` results: a ring buffer of booleans and a running count."""

    __slots__ = ("_results", "bad")

    def __init__(self, size: int) -> None:
        self._results: deque[bool] = deque(maxlen=size)
        self.bad: int = 0

    @property
    def total(self) -> int:
        """How many results are in the window."""
        return len(self._results)

    def add(self, bad: bool, now: float) -> None:
        """Count one more result; if the window is full, discard the oldest."""
        results = self._results
        self.bad += bad - (results[0] if len(results) == results.maxlen else False)
        results.append(bad)

    def at(self, now: float) -> tuple[int, int]:
        """Return how many results are bad, and how many there are."""
        return self.bad, self.total


@final
class TimeWindow:
    """The results of the last `seconds`, discarded in steps of a 32nd of the window.

    A step begins with its first result, so a result is kept for at least 31/32 of the window and never
    for longer than the window. The number of steps bounds the memory.
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
        """Count one more result, and discard the steps that began `seconds` ago or earlier."""
        steps = self._steps
        while steps and now >= steps[0][0] + self._seconds:  # a difference could be rounded to less
            old_total, old_bad = int(steps[0][1]), int(steps[0][2])
            self.total -= old_total
            self.bad -= old_bad
            del steps[0]
        if not steps or now - steps[-1][0] >= self._step:
            steps.append([now, 0, 0])
        step = steps[-1]
        step[1] += 1
        step[2] += bad
        self.total += 1
        self.bad += bad

    def at(self, now: float) -> tuple[int, int]:
        """Return how many results are bad, and how many there are, without those that are too old by now."""
        steps = [step for step in self._steps if now < step[0] + self._seconds]
        return sum(int(step[2]) for step in steps), sum(int(step[1]) for step in steps)

    def add_good(self, number: int, now: float) -> None:
        """Count `number` more good results; 0 only discards the steps that are too old."""
        self.add(False, now)
        self._steps[-1][1] += number - 1
        self.total += number - 1


Window: TypeAlias = CountWindow | TimeWindow
