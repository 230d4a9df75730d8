"""Fixtures of the integrations' tests: programs, and a server."""

from __future__ import annotations

import inspect
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial

import anyio
import pytest

from tests.conftest import World
from tests.integrations.servers import Server, flaky_server
from tests.versions import is_installed


def program(name: str) -> str:
    """Return the path of a program. If it is not installed, skip the test; in CI, let it fail."""
    path = shutil.which(name)
    if path is None:
        skip_or_fail = pytest.fail if os.environ.get("CI") else pytest.skip
        skip_or_fail(f"{name} is not installed")
    return path


#: What old clients leave to the garbage collector, which warns of it at any time, also in a later test.
LEFT_BEHIND = {
    "anyio<4.16": ["ignore:unclosed.*socket:ResourceWarning", "ignore:unclosed transport:ResourceWarning"],
    # Its destructor raises again what an interceptor has raised, such as `CircuitOpen`.
    "grpcio<1.83": [r"ignore:Exception ignored in.*InterceptedCall\.__del__:pytest.PytestUnraisableExceptionWarning"],
}


def pytest_configure(config: pytest.Config) -> None:
    """Ignore these warnings if such a version is installed."""
    for requirement, warnings in LEFT_BEHIND.items():
        for warning in warnings if is_installed(requirement) else ():
            config.addinivalue_line("filterwarnings", warning)


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
def server() -> Iterator[Server]:
    """A scripted HTTP server: see `tests/integrations/servers.py`."""
    with flaky_server() as server:
        yield server


@pytest.fixture
def in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()
