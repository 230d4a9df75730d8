"""Calls that are walked away from: what the tests of runtimes share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from resilience import (
    Timeout,
    TimeoutExceeded,
)

SHORT = 0.01
LONG = 60.0


def until(true: Callable[[], object]) -> None:
    """Wait for something that another thread is about to bring about."""
    end = time.monotonic() + 5
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def nobody_is_left_behind() -> Iterator[None]:
    """Every test begins and ends without an abandoned call."""
    until(lambda: Timeout.abandoned() == 0)
    yield
    until(lambda: Timeout.abandoned() == 0)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hanging functions wait for; opened after the test."""
    event = threading.Event()
    yield event
    event.set()


def abandon(gate: threading.Event, count: int = 1) -> None:
    """Walk away from so many calls."""
    for _ in range(count):
        with pytest.raises(TimeoutExceeded):
            Timeout(SHORT).call(gate.wait, 10)
