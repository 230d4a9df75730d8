"""The counter that threads share."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from resilience.state import counter as module
from resilience.state.counter import Counter


def test_it_counts() -> None:
    """From nothing, one by one."""
    counter = Counter()
    assert counter.value == 0
    for expected in (1, 2, 3):
        counter.add()
        assert counter.value == expected


@pytest.mark.parametrize("has_gil", [True, False])
def test_no_addition_is_lost(has_gil: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the threads are switched; also behind the lock that stands in for a GIL."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: has_gil, raising=False)
    counter, interval = Counter(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [counter.add() for _ in range(5_000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert counter.value == 20_000


@pytest.mark.parametrize("has_gil", [True, False, None])
def test_there_is_a_lock_only_where_there_is_no_gil(has_gil: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would cost more than all the rest. Python 3.12 and older cannot be asked, and have a GIL."""
    locked: list[object] = []
    monkeypatch.setattr(module, "_locked", lambda function: locked.append(function) or function)
    monkeypatch.delattr(sys, "_is_gil_enabled", raising=False)
    if has_gil is not None:
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: has_gil, raising=False)
    Counter()
    assert len(locked) == (has_gil is False)


def test_behind_the_lock_there_is_one_at_a_time() -> None:
    """A step of an iterator would be made twice, or lost."""
    under_way: list[int] = []
    most: list[int] = []

    def step() -> None:
        under_way.append(1)
        time.sleep(0.001)
        most.append(len(under_way))
        under_way.pop()

    call = module._locked(step)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: call(), range(12)))
    assert most == [1] * 12
