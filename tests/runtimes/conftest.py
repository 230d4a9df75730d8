"""Abandoned calls, for the tests of runtimes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from unittest import mock

import pytest

from resilience import Timeout, TimeoutExceeded
from resilience.clock import clock

LONG = 60.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event for which hanging functions wait; set after the test."""
    event = threading.Event()
    yield event
    event.set()


def waits_end_at_once() -> AbstractContextManager[object]:
    """Let each timed wait of a thread end at once, as if its time were over.

    A short limit would not do: on a busy machine it may pass before the function begins, which then is not entered.
    """
    return mock.patch.object(clock, "wait", return_value=False)


def abandon(gate: threading.Event, count: int = 1) -> None:
    """Abandon this number of calls."""
    for _ in range(count):
        with waits_end_at_once(), pytest.raises(TimeoutExceeded):
            Timeout(LONG).call(gate.wait, 10)
