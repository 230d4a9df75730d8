"""The fixtures for pytest, which finds this module by the entry point `pytest11`.

All projects in an environment get them, so their names begin with that of the library, and nothing is imported before a
test uses one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from resilience.testing import Recorder, VirtualClock


@pytest.fixture(name="resilience_time")
def _resilience_time() -> Iterator[VirtualClock]:
    """Run the test in virtual time. The value is the clock, with `now()`, `advance(seconds)` and `sleeps`."""
    from resilience.testing import virtual_time

    with virtual_time() as clock:
        yield clock


@pytest.fixture(name="resilience_recorder")
def _resilience_recorder() -> Iterator[Recorder]:
    """Record every event of this process while the test runs."""
    from resilience.testing import recording

    with recording() as recorder:
        yield recorder
