"""The fixtures for pytest, which finds this module by the entry point `pytest11`.

All projects in an environment get them, so their names begin with that of the library.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from resilience.testing.clocks import VirtualClock
from resilience.testing.recorder import Recorder, recording
from resilience.testing.virtual import virtual_time


@pytest.fixture(name="resilience_time")
def _resilience_time() -> Iterator[VirtualClock]:
    """Run the test in virtual time. The value is the clock, with `now()`, `advance(seconds)` and `sleeps`."""
    with virtual_time() as clock:
        yield clock


@pytest.fixture(name="resilience_recorder")
def _resilience_recorder() -> Iterator[Recorder]:
    """Record every event of this process while the test runs."""
    with recording() as recorder:
        yield recorder
