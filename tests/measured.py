"""`pytest -p tests.measured`: what the tests cover of the package, also in the workers of xdist.

Each process measures from before its first import of the package, and leaves a file for `coverage combine`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import coverage
import pytest

#: They run the package in other processes, or measure memory or contention: they add time, and no coverage. The last
#: two interrupt Python anywhere, also in coverage's own lock, which every new thread then waits for.
UNMEASURED = (
    "tests/docs/",
    "tests/contention/",
    "tests/composition/test_memory.py",
    "tests/composition/test_signals.py",
    "tests/composition/test_faults.py::test_a_signal_handler_may_use_the_policies_that_it_interrupts",
)

measured = coverage.Coverage(data_suffix=True)
measured.start()

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("PYTEST_ADDOPTS", None)  # where CI asks for this plugin; not for the pytest that a test runs


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure nothing during the tests that add none."""
    if not item.nodeid.startswith(UNMEASURED):
        return (yield)
    measured.stop()
    try:
        return (yield)
    finally:
        measured.start()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Leave what was found."""
    measured.stop()
    measured.save()
