"""Lowering is a matter of speed: with it switched off, everything behaves as it does with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilience import Bulkhead, CircuitBreaker, Fallback, Policy, Retry, Timeout
from resilience.runtimes import lowering
from resilience.runtimes.blocking import drive

ROOT = Path(__file__).parents[2]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process where policies are driven."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "RESILIENCE_LOWERING": "off"},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.parametrize(
    "policy",
    [Retry(), Timeout(5), Timeout(5, cooperative=True), CircuitBreaker(), Bulkhead(1), Fallback()],
    ids=lambda it: type(it).__name__,
)
def test_our_own_policies_are_lowered(policy: Policy[object]) -> None:
    """Unless somebody has switched it off, or a tool has rewritten their code."""
    assert lowering.enabled == (os.environ.get("RESILIENCE_LOWERING", "on") != "off")
    assert (lowering.lower(policy.around, drive) is not None) == lowering.enabled


def test_the_environment_switches_lowering_off() -> None:
    """`RESILIENCE_LOWERING=off`, for the process."""
    done = python(
        "-c",
        "from resilience import Retry\n"
        "from resilience.runtimes import lowering\n"
        "assert lowering.enabled is False\n"
        "assert lowering.lower(Retry().around, print) is None\n"
        "print(Retry().call(str.upper, 'driven'))",
    )
    assert (done.stdout, done.stderr) == ("DRIVEN\n", "")


@pytest.mark.slow
def test_the_tests_of_the_policies_pass_with_lowering_off() -> None:
    """Those of the world of threads: in tasks there is nothing to lower."""
    done = python(
        "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not asyncio and not trio", "tests/policies"
    )
    assert done.returncode == 0, done.stdout[-5000:]
