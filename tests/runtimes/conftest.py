"""Abandoned calls, for the tests of runtimes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from resilience import Timeout, TimeoutExceeded
from tests.callers import wait_until

SHORT = 0.01
LONG = 60.0


@pytest.fixture(autouse=True)
def no_call_is_left_behind() -> Iterator[None]:
    """Wait before and after each test until no abandoned call is running."""
    wait_until(lambda: Timeout.abandoned() == 0)
    yield
    wait_until(lambda: Timeout.abandoned() == 0)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event for which hanging functions wait; set after the test."""
    event = threading.Event()
    yield event
    event.set()


def abandon(gate: threading.Event, count: int = 1) -> None:
    """Abandon this number of calls."""
    for _ in range(count):
        with pytest.raises(TimeoutExceeded):
            Timeout(SHORT).call(gate.wait, 10)
