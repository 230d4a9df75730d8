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
from resilience.pytest_plugin import _resilience_recorder, _resilience_time  # noqa: F401 -- fixtures of this module
from resilience.testing import Recorder, VirtualClock, script

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


#: Runs pytest in a separate project without other plugins, once for the list of its fixtures.
RUN = """
import pytest, sys
options = ["-q", "-W", "error", "-p", "resilience.pytest_plugin"]
pytest.main([*options, "--fixtures"])
sys.exit(pytest.main(options))
"""


def test_the_fixtures_work_in_a_separate_project(tmp_path: Path) -> None:
    """Their names begin with that of the library, because pytest loads them into every project."""
    (tmp_path / "test_them.py").write_text(TESTS, encoding="utf-8")
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    ours = re.findall(r"^(\w+) -- .*resilience/pytest_plugin\.py", done.stdout, re.MULTILINE)
    assert sorted(ours) == ["resilience_recorder", "resilience_time"]


def test_the_fixtures_work_together(resilience_time: VirtualClock, resilience_recorder: Recorder) -> None:
    assert Retry(on=KeyError, backoff=[60]).call(script(KeyError(), "fine")) == "fine"
    assert resilience_time.now() == 60
    resilience_recorder.assert_happened(RetryScheduled, times=1, delay=60)


def test_the_plugin_imports_nothing_of_the_library_before_a_test_uses_a_fixture() -> None:
    """pytest loads it in every project of an environment, also in those that do not use the library."""
    show = "import sys, resilience.pytest_plugin; print(sorted(it for it in sys.modules if 'resilience' in it))"
    done = subprocess.run([sys.executable, "-c", show], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "['resilience', 'resilience.pytest_plugin']\n"


def test_pytest_finds_the_plugin_by_its_entry_point() -> None:
    """A project does not have to name it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"resilience": "resilience.pytest_plugin"}
