"""Counting without a lock, exactly: `next` of an `itertools.count` is one step of the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import final


@final
class Counter:
    """How often something has happened, in any number of threads. To read it takes longer than to count."""

    __slots__ = ("_numbers", "add")

    def __init__(self) -> None:
        self._numbers = count()
        #: Count one more.
        self.add: Callable[[], object] = self._numbers.__next__

    def value(self) -> int:
        """Return how often."""
        return int(repr(self._numbers)[6:-1])  # count(3): only its text tells it without a step
