"""The fixtures for pytest, found by its entry point `pytest11`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from resilience.testing.recording import recording
from resilience.testing.virtual import virtual_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilience.testing.clocks import VirtualClock
    from resilience.testing.recording import Recorder


@pytest.fixture(name="virtual_time")
def _virtual_time() -> Iterator[VirtualClock]:
    """Virtual time while the test runs: the clock, with `now()`, `advance(seconds)` and `sleeps`."""
    with virtual_time() as clock:
        yield clock


@pytest.fixture(name="recorder")
def _recorder() -> Iterator[Recorder]:
    """Every event of this process while the test runs."""
    with recording() as recorder:
        yield recorder
