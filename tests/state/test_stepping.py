"""The stepping tool finds races and code that is not reentrant, which the tests with it rely on."""

from __future__ import annotations

import sys
import threading

import pytest

from tests.functions import raising
from tests.state.stepping import TO_THE_END, TRACING_CRASHES, Interruption, Stage

pytestmark = pytest.mark.skipif(TRACING_CRASHES, reason="CPython 3.12 crashes where several threads trace opcodes")

HERE = sys.modules[__name__]


class Counter:
    """Counts in two steps, without a lock or with a given one."""

    def __init__(self, lock: object = None) -> None:
        self.value = 0
        self.lock = lock

    def count(self) -> None:
        self.value += 1

    def count_locked(self) -> None:
        with self.lock:  # type: ignore[attr-defined]
            self.count_later()

    def count_later(self) -> None:
        seen = self.value
        str(seen)
        self.value = seen + 1


def possible_totals(locked: bool) -> set[int]:
    """Return all totals that two threads can reach if each counts once."""
    totals = set()
    for first in range(20):
        counter = Counter(threading.Lock())
        stage = Stage(HERE)
        stage.give_locks(counter)
        function = counter.count_locked if locked else counter.count
        stage.interleave([function, function], (first, TO_THE_END))
        totals.add(counter.value)
    return totals


def test_an_unlocked_counter_loses_a_count_in_some_order() -> None:
    """One of two counts is lost in the order read, read, write, write."""
    assert possible_totals(locked=False) == {1, 2}


def test_a_locked_counter_loses_no_count() -> None:
    """A thread that finds the lock held waits, and the other one continues."""
    assert possible_totals(locked=True) == {2}


def test_an_interruption_finds_code_that_is_not_reentrant() -> None:
    """If a finalizer runs between a read and a write, the write overwrites its effect."""
    totals = []
    for place in range(9):
        counter = Counter()
        interruption = Interruption([HERE], place, counter.count)
        interruption.around(counter.count_later)
        if interruption.happened:
            totals.append(counter.value)
    assert set(totals) == {1, 2}


def test_an_error_of_an_actor_is_raised_in_the_test() -> None:
    fail = raising(ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        Stage(HERE).interleave([fail], (0,))
    with pytest.raises(ZeroDivisionError):
        Interruption([HERE], 99, fail).around(fail)
