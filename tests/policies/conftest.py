"""A check after each test of a policy."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from resilience import Timeout


@pytest.fixture(autouse=True)
def _no_call_is_left_behind() -> Iterator[None]:
    """Wait until all functions that a test abandoned have ended, before the next test begins."""
    yield
    end = time.monotonic() + 20
    while Timeout.abandoned() and time.monotonic() < end:
        time.sleep(0.001)
    assert Timeout.abandoned() == 0
