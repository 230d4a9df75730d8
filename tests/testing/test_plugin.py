"""The fixtures for pytest."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from resilience import Retry
from resilience.events import RetryScheduled
from resilience.testing import Recorder, VirtualClock, script
from resilience.testing.plugin import _recorder, _virtual_time  # noqa: F401 -- fixtures of this module

ROOT = Path(__file__).parents[2]

TESTS = """
import asyncio

import pytest


def test_time_is_virtual(virtual_time):
    asyncio.run(asyncio.sleep(3600))
    assert virtual_time.now() == 3600


@pytest.fixture
def retry():
    from resilience import Retry

    return Retry(on=KeyError, backoff=[60])


def test_events_are_recorded(retry, recorder, virtual_time):
    from resilience.events import RetryScheduled
    from resilience.testing import script

    assert retry.call(script(KeyError(), "fine")) == "fine"
    recorder.assert_happened(RetryScheduled, delay=60, time=0)
    assert virtual_time.sleeps == [60]


def test_each_test_has_a_clock_of_its_own(virtual_time, recorder):
    assert virtual_time.now() == 0
    assert recorder.events == []
"""


def test_the_fixtures_do_what_they_say(tmp_path: Path) -> None:
    """In a project of its own, where nothing else is loaded."""
    (tmp_path / "test_them.py").write_text(TESTS, encoding="utf-8")
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "resilience.testing.plugin"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_a_fixture_is_the_clock_and_another_one_the_record(virtual_time: VirtualClock, recorder: Recorder) -> None:
    """Both hold for this test."""
    assert Retry(on=KeyError, backoff=[60]).call(script(KeyError(), "fine")) == "fine"
    assert virtual_time.now() == 60
    recorder.assert_happened(RetryScheduled, times=1, delay=60)


def test_pytest_finds_the_plugin_by_its_entry_point() -> None:
    """So that nobody has to name it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"resilience": "resilience.testing.plugin"}
