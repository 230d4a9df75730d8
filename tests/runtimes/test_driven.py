"""Lowering only changes the speed: without it, everything behaves the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilience import Bulkhead, CircuitBreaker, Fallback, Policy, Retry, Timeout
from resilience.runtimes import lowering

ROOT = Path(__file__).parents[2]


def python(*arguments: str, setting: str = "off") -> subprocess.CompletedProcess[str]:
    """Run Python in a new process with lowering switched off or on.

    The process is no worker of xdist: as one, its tests would wait for the lock that this test holds.
    """
    others = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**others, "RESILIENCE_LOWERING": setting},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.parametrize(
    "policy",
    [Retry(), Timeout(5), Timeout(5, cooperative=True), CircuitBreaker(), Bulkhead(1), Fallback()],
    ids=["Retry", "Timeout", "Timeout cooperative", "CircuitBreaker", "Bulkhead", "Fallback"],
)
def test_policies_are_lowered_unless_lowering_is_off(policy: Policy[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "enabled", True)
    assert lowering.lower(policy) is not None
    monkeypatch.setattr(lowering, "enabled", False)
    assert lowering.lower(policy) is None


@pytest.mark.parametrize(("setting", "enabled"), [("off", False), ("NO", False), ("on", True)])
def test_the_environment_switches_lowering_off(setting: str, enabled: bool) -> None:
    done = python(
        "-c",
        "from resilience import Fallback, Retry\n"
        "from resilience.runtimes import lowering\n"
        "policy = Fallback('x').wrap(Retry(2, on=Exception, backoff=[0]))\n"
        "print(lowering.enabled, lowering.lower(Retry()) is not None)\n"
        "print(policy.execute(lambda ctx: 1 / 0), policy.call(str.upper, 'fine'))",
        setting=setting,
    )
    assert (done.stdout, done.stderr) == (f"{enabled} {enabled}\nx FINE\n", "")


@pytest.mark.slow
def test_the_tests_of_the_policies_pass_with_lowering_off() -> None:
    """Those in threads: tasks are never lowered."""
    done = python(
        "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not asyncio and not trio", "tests/policies"
    )
    assert done.returncode == 0, done.stdout[-5000:]
