"""The fixtures of the plugin for pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from resilience import Retry
from resilience.events import RetryScheduled
from resilience.testing import Recorder, VirtualClock, script
from resilience.testing.plugin import _resilience_recorder, _resilience_time  # noqa: F401 -- fixtures of this module

ROOT = Path(__file__).parents[2]

TESTS = """
import asyncio

import pytest


def test_time_is_virtual(resilience_time):
    asyncio.run(asyncio.sleep(3600))
    assert resilience_time.now() == 3600


@pytest.fixture
def retry():
    from resilience import Retry

    return Retry(on=KeyError, backoff=[60])


def test_events_are_recorded(retry, resilience_recorder, resilience_time):
    from resilience.events import RetryScheduled
    from resilience.testing import script

    assert retry.call(script(KeyError(), "fine")) == "fine"
    resilience_recorder.assert_happened(RetryScheduled, delay=60, time=0)
    assert resilience_time.sleeps == [60]


def test_each_test_has_its_own_clock(resilience_time, resilience_recorder):
    assert resilience_time.now() == 0
    assert resilience_recorder.events == []
"""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a separate project without other plugins."""
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "resilience.testing.plugin", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_names_of_the_fixtures_begin_with_that_of_the_library(tmp_path: Path) -> None:
    """pytest loads them into every project, which may have another `recorder`."""
    shown = run_pytest(tmp_path, "--fixtures").stdout
    ours = re.findall(r"^(\w+) -- .*resilience/testing/plugin\.py", shown, re.MULTILINE)
    assert sorted(ours) == ["resilience_recorder", "resilience_time"]


def test_the_fixtures_work_in_a_separate_project(tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(TESTS, encoding="utf-8")
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_the_fixtures_work_together(resilience_time: VirtualClock, resilience_recorder: Recorder) -> None:
    assert Retry(on=KeyError, backoff=[60]).call(script(KeyError(), "fine")) == "fine"
    assert resilience_time.now() == 60
    resilience_recorder.assert_happened(RetryScheduled, times=1, delay=60)


def test_pytest_finds_the_plugin_by_its_entry_point() -> None:
    """A project does not have to name it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"resilience": "resilience.testing.plugin"}
