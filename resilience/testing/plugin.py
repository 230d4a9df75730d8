"""The fixtures for pytest, found by its entry point `pytest11`.

Every project of an environment gets them, so their names begin with that of the library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from resilience.testing.recording import recording
from resilience.testing.virtual import virtual_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilience.testing.clocks import VirtualClock
    from resilience.testing.recording import Recorder


@pytest.fixture(name="resilience_time")
def _resilience_time() -> Iterator[VirtualClock]:
    """Virtual time while the test runs: the clock, with `now()`, `advance(seconds)` and `sleeps`."""
    with virtual_time() as clock:
        yield clock


@pytest.fixture(name="resilience_recorder")
def _resilience_recorder() -> Iterator[Recorder]:
    """Every event of this process while the test runs."""
    with recording() as recorder:
        yield recorder
