"""Fixtures of the integrations' tests: programs, a server, sessions."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio
import pytest
import requests

from resilience import Policy
from resilience.integrations.requests import ResilienceAdapter
from tests.conftest import World
from tests.integrations.requests_sessions import QUICK, Make
from tests.integrations.servers import FlakyServer, flaky_server


def program(name: str) -> str:
    """Return the path of a program. If it is not installed, skip the test; in CI, let it fail."""
    path = shutil.which(name)
    if path is None:
        skip_or_fail = pytest.fail if os.environ.get("CI") else pytest.skip
        skip_or_fail(f"{name} is not installed")
    return path


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine function that takes no world in asyncio, or with an argument that has a method `run`."""
    test = pyfuncitem.obj
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    if not inspect.iscoroutinefunction(test) or any(isinstance(it, World) for it in arguments.values()):
        return None
    run = next((it.run for it in arguments.values() if hasattr(it, "run")), anyio.run)
    run(partial(test, **arguments))
    return True


@pytest.fixture
def server() -> Iterator[FlakyServer]:
    """A scripted HTTP server: see `tests/integrations/servers.py`."""
    with flaky_server() as server:
        yield server


@pytest.fixture
def session() -> Iterator[Make]:
    """A function: `session(policy, **options)` makes a session of requests that sends everything through the policy."""
    made: list[requests.Session] = []

    def make(policy: Policy[Any] = QUICK, **options: Any) -> requests.Session:
        made.append(requests.Session())
        made[-1].mount("http://", ResilienceAdapter(policy, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
