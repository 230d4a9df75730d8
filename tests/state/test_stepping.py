"""The stepping tool finds what it is there to find: otherwise the tests that use it prove nothing."""

from __future__ import annotations

import sys
import threading

import pytest

from tests.state.stepping import TO_THE_END, TRACING_CRASHES, Deadlock, Interruption, Stage

pytestmark = pytest.mark.skipif(TRACING_CRASHES, reason="CPython 3.12 crashes where several threads trace opcodes")

HERE = sys.modules[__name__]


class Counter:
    """Counts in two steps, without a lock, or with one that is (not) reentrant."""

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


def outcomes(locked: bool) -> set[int]:
    """Every total that two threads can come to, each counting once."""
    totals = set()
    for first in range(20):
        counter = Counter(threading.Lock())
        stage = Stage(HERE)
        stage.give_locks(counter)
        function = counter.count_locked if locked else counter.count
        stage.interleave([function, function], (first, TO_THE_END))
        totals.add(counter.value)
    return totals


def test_an_unlocked_sum_loses_a_count_in_some_order() -> None:
    """Read, read, write, write: one of two is lost, and only in some orders."""
    assert outcomes(locked=False) == {1, 2}


def test_a_locked_sum_loses_none() -> None:
    """Whoever comes while the lock is held waits, and the other one goes on."""
    assert outcomes(locked=True) == {2}


def test_two_locks_in_opposite_order_are_a_deadlock_in_some_order() -> None:
    """And it is reported, not waited for."""

    class Two:
        def __init__(self) -> None:
            self.a = threading.Lock()
            self.b = threading.Lock()

        def ab(self) -> None:
            with self.a, self.b:
                pass

        def ba(self) -> None:
            with self.b, self.a:
                pass

    met = 0
    for first in range(1, 12):
        two, stage = Two(), Stage(HERE)
        stage.give_locks(two)
        try:
            stage.interleave([two.ab, two.ba], (first, TO_THE_END))
        except Deadlock:
            met += 1
    assert 0 < met < 11


def test_an_interruption_finds_what_is_not_reentrant() -> None:
    """A finalizer between a look and a store makes the store overwrite what the finalizer did."""
    totals = []
    for place in range(9):
        counter = Counter()
        interruption = Interruption([HERE], place, counter.count)
        interruption.around(counter.count_later)
        if interruption.happened:
            totals.append(counter.value)
    assert set(totals) == {1, 2}


def test_an_interruption_by_itself_of_a_plain_lock_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread would wait for itself; with a reentrant lock it does not."""
    monkeypatch.setattr("tests.state.stepping.PATIENCE", 0.2)
    met = []
    for lock in (threading.Lock(), threading.RLock()):
        counter = Counter(lock)
        for place in range(4):
            try:
                Interruption([HERE], place, counter.count_locked).around(counter.count_locked)
            except Deadlock:
                met.append(type(lock))
                lock.release()  # let the daemon thread go
                break
    assert met == [type(threading.Lock())]


def test_an_error_on_the_stage_comes_out() -> None:
    """What an actor raises is the test's to see."""

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Stage(HERE).interleave([fail], (0,))
    with pytest.raises(ZeroDivisionError):
        Interruption([HERE], 99, fail).around(fail)
