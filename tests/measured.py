"""`pytest -p tests.measured`: what the workers of xdist cover, each from before its first import of the package."""

from __future__ import annotations

import os

import coverage
import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    measured = coverage.Coverage(data_suffix=True)
    measured.start()

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure() -> None:
        """Leave what was found for `coverage combine`."""
        measured.stop()
        measured.save()
