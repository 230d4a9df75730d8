"""The fixtures for pytest, found by its entry point `pytest11`. Nothing is imported until one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilience.testing import Recorder, VirtualClock


@pytest.fixture(name="virtual_time")
def _virtual_time() -> Iterator[VirtualClock]:
    """Virtual time while the test runs: the clock, with `now()`, `advance(seconds)` and `sleeps`."""
    from resilience.testing import virtual_time

    with virtual_time() as clock:
        yield clock


@pytest.fixture(name="recorder")
def _recorder() -> Iterator[Recorder]:
    """Every event of this process while the test runs."""
    from resilience.testing import recording

    with recording() as recorder:
        yield recorder
