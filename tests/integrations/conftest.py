"""What the integrations are tested against, where it is not a Python package."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from resilience import Policy
from resilience.integrations.requests import ResilienceAdapter
from tests.integrations.requests_sessions import QUICK, Make
from tests.integrations.servers import FlakyServer, flaky_server


def program(name: str) -> str:
    """The path of a program that a test needs. Where there is none, the test is skipped; in CI it fails."""
    path = shutil.which(name)
    if path is None:
        complain = pytest.fail if os.environ.get("CI") else pytest.skip
        complain(f"{name} is not installed")
    return path


@pytest.fixture
def server() -> Iterator[FlakyServer]:
    """A scripted HTTP server: see `tests/integrations/servers.py`."""
    with flaky_server() as it:
        yield it


@pytest.fixture
def session() -> Iterator[Make]:
    """`session(policy, **options)` makes a session of requests that sends everything through the policy."""
    made: list[requests.Session] = []

    def make(policy: Policy[Any] = QUICK, **options: Any) -> requests.Session:
        made.append(requests.Session())
        made[-1].mount("http://", ResilienceAdapter(policy, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
