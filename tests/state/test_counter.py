"""The counter that threads share."""

from __future__ import annotations

import sys
import threading

import pytest

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
