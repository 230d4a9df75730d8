"""Counting what many threads do, without a lock."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from operator import length_hint
from typing import final


@final
class Counter:
    """A number that any thread may add one to.

    A step of an iterator that is written in C cannot be interrupted, and how many steps are left can be asked: so
    one takes 30 ns where a lock takes 130. Where there is no GIL to rely on, there is a lock around it.

    :param start: the number to begin with.
    """

    __slots__ = ("_left", "add")

    def __init__(self, start: int = 0) -> None:
        self._left = iter(range(start, sys.maxsize))
        #: Add one. What it returns means nothing.
        self.add: Callable[[], object] = self._left.__next__
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            self.add = _locked(self.add)

    @property
    def value(self) -> int:
        """The number that it began with, and how often one was added."""
        return sys.maxsize - length_hint(self._left)


def _locked(function: Callable[[], object]) -> Callable[[], object]:
    lock = threading.RLock()

    def call() -> None:
        with lock:
            function()

    return call
