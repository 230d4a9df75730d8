"""An exact counter without a lock: `next` of an `itertools.count` is one atomic step of the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import final


@final
class Counter:
    """A count that any number of threads can increase. Reading it takes longer than increasing it."""

    __slots__ = ("_numbers", "add")

    def __init__(self) -> None:
        self._numbers = count()
        #: Increase the count by one.
        self.add: Callable[[], object] = self._numbers.__next__

    def value(self) -> int:
        """Return the count."""
        return int(repr(self._numbers)[6:-1])  # "count(3)": any other way to read it would increase it
