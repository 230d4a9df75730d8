"""`pytest -p tests.measured`: measures how much of the package the tests cover, also in the workers of xdist.

Each process begins before its first import of the package, and writes a file for `coverage combine`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import coverage
import pytest

#: Tests that run the package in other processes, or measure memory or contention: they add time, but no coverage. The
#: last two interrupt Python anywhere, even while coverage holds its own lock, for which every new thread then waits.
UNMEASURED = (
    "tests/docs/",
    "tests/contention/",
    "tests/composition/test_memory.py",
    "tests/composition/test_signals.py",
    "tests/composition/test_faults.py::test_a_signal_handler_may_use_the_policies_it_interrupts",
)

measured = coverage.Coverage(data_suffix=True)
measured.start()


def end_idle_workers() -> None:
    """End the workers that began while nothing was measured: a later test would use them, unmeasured."""
    from resilience.runtimes import workers

    before = workers.IDLE, workers.IDLE_IN_EXCESS
    workers.IDLE = workers.IDLE_IN_EXCESS = 0.0
    while workers.pool.idle:
        worker = workers.pool.idle.pop()
        worker._job = workers.Job(int, (), {})
        worker._wake.release()  # after the job, its idle time is over at once
        worker.join()
    workers.IDLE, workers.IDLE_IN_EXCESS = before


if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("PYTEST_ADDOPTS", None)  # CI requests this plugin there; a pytest that a test runs must not use it


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Do not measure during the tests that add no coverage."""
    if not item.nodeid.startswith(UNMEASURED):
        return (yield)
    measured.stop()
    try:
        return (yield)
    finally:
        end_idle_workers()
        measured.start()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Write the results."""
    measured.stop()
    measured.save()
