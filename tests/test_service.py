"""The example of two services: it tells its story, keeps its promises, and can be looked at."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "examples.service"]

#: What is made wrong -> promises that are then broken.
BROKEN = {
    "wire": ["every request says how long the depot may take", "the depot stops when the caller has left"],
    "bulkhead": ["at most 6 calls at once"],
    "breaker": ["an open circuit spares the depot", "the circuit opened, probed and closed"],
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=30, check=False
    )


@pytest.fixture(scope="module")
def runs() -> dict[str, subprocess.CompletedProcess[str]]:
    """The story as it is, under the empty name, and with each thing made wrong."""
    with ThreadPoolExecutor(2) as pool:
        futures = {what: pool.submit(run, *(["--break", what] if what else [])) for what in ("", *BROKEN)}
    return {what: future.result() for what, future in futures.items()}


def test_the_services_keep_their_promises(runs: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """Exit status 0, every promise kept, nothing to complain about."""
    it = runs[""]
    assert (it.returncode, it.stderr) == (0, ""), it.stdout
    assert len(re.findall("^kept   ", it.stdout, re.MULTILINE)) == 16
    seconds = re.search(r"^34 orders in (\d+\.\d) s\.$", it.stdout, re.MULTILINE)
    assert seconds is not None
    assert float(seconds[1]) < 15  # 3 s on a machine that has nothing else to do


def test_the_services_print_their_telemetry(runs: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """What a log would tell, beside what the customers got; then sums of the metrics."""
    lines = iter(runs[""].stdout.splitlines())
    for pattern in (
        r"-- Small failures --",
        r"INFO stock \(GET 127\.0\.0\.1\): attempt 1 failed with TransientStatus 503, the next one is in ",
        r"200  figs: 12",
        r"WARNING stock .* an attempt took longer than the 0\.4 s of attempt",
        r"ERROR circuit depot: closed -> open for 1 s",
        r"INFO yesterday \(Shop\._ask_depot\): answered instead of CircuitOpen",
        r"200  soap: a few, as of yesterday",
        r"INFO circuit depot: half_open -> closed",
        # Whichever is the first to end what both know to be over: the depot's answer, or the shop's wait for it.
        r"WARNING stock .* (the deadline of the caller passed|as the deadline leaves no time for another; .* 504)",
        r"504  bread: no answer",
        r"resilience_circuit_transitions_total +3",
    ):
        assert any(re.search(pattern, line) for line in lines), f"{pattern!r} is not in order in\n{runs[''].stdout}"


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_promise_is_noticed(runs: dict[str, subprocess.CompletedProcess[str]], what: str) -> None:
    """Exit status 1, and the promise is named."""
    it = runs[what]
    assert it.returncode == 1, it.stdout + it.stderr
    for promise in BROKEN[what]:
        assert f"service: broken promise: {promise}" in it.stderr
        assert f"BROKEN {promise}" in it.stdout


@pytest.fixture
def served() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The services as they keep running, and the address of the shop."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*COMMAND, "--serve"], cwd=ROOT, env=environment, text=True, **pipes) as it:
        assert it.stdout is not None
        said = it.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+", said)
        assert address is not None, said
        try:
            yield address[0], it
        finally:
            it.kill()


def test_the_services_can_be_looked_at(served: tuple[str, subprocess.Popen[str]]) -> None:
    """The dashboard of the shop shows its customers; Ctrl-C ends it in peace, also while somebody looks."""
    url, process = served
    with httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
        assert "<title>shop</title>" in client.get("/resilience/").text
        now = client.get("/resilience/state").json()["now"]
        assert [it["name"] for it in now["circuits"]] == ["depot"]
        with client.stream("GET", "/resilience/events") as response:
            deadline = time.monotonic() + 20
            for line in response.iter_lines():
                executions = re.search(r'"executions":{"total":(\d+)', line)
                if executions and int(executions[1]) > 5:
                    process.send_signal(signal.SIGINT)  # here, as leaving the loop would end the stream
                    _, complaints = process.communicate(timeout=20)
                    break
                assert time.monotonic() < deadline, line
    assert process.returncode == 0
    assert "Traceback" not in complaints
