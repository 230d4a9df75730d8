"""The example of two services: it keeps its promises, prints its telemetry, and has a dashboard."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.test_examples import ROOT, Run, run

pytestmark = pytest.mark.slow

COMMAND = ["-m", "examples.service"]

#: Arguments of `--break`, and the promises that each of them breaks.
BROKEN = {
    "wire": ["every request says how long the depot may take", "the depot stops when the caller has left"],
    "bulkhead": ["at most 6 calls at once"],
    "breaker": ["an open circuit spares the depot", "the circuit opened, probed and closed"],
}


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """Return the output as it is, under the empty name, and with each `--break`."""
    with ThreadPoolExecutor(2) as pool:
        futures = {what: pool.submit(run, *COMMAND, *(["--break", what] if what else [])) for what in ("", *BROKEN)}
    return {what: future.result() for what, future in futures.items()}


def test_the_services_keep_their_promises(runs: dict[str, Run]) -> None:
    """Exit status 0, every promise kept, no output to stderr."""
    done = runs[""]
    assert (done.status, done.err) == (0, ""), done.out
    assert len(re.findall("^kept   ", done.out, re.MULTILINE)) == 16
    seconds = re.search(r"^34 orders in (\d+\.\d) s\.$", done.out, re.MULTILINE)
    assert seconds is not None
    assert float(seconds[1]) < 15  # 3 s on an idle machine


def test_the_services_print_their_telemetry(runs: dict[str, Run]) -> None:
    """Log records beside the responses, then sums of the metrics."""
    runs[""].shows(
        r"-- Small failures --",
        r"INFO stock \(GET 127\.0\.0\.1\): attempt 1 failed with TransientStatus 503, the next one is in ",
        r"200  figs: 12",
        r"WARNING stock .* an attempt took longer than the 0\.4 s of attempt",
        r"ERROR circuit depot: closed -> open for 1 s",
        r"INFO yesterday \(Shop\._ask_depot\): answered instead of CircuitOpen",
        r"200  soap: a few, as of yesterday",
        r"INFO circuit depot: half_open -> closed",
        # Both know the deadline, and either may end first: the response of the depot, or the wait of the shop for it.
        r"WARNING stock .* (the deadline of the caller passed|as the deadline leaves no time for another; .* 504)",
        r"504  bread: no answer",
        r"resilience_circuit_transitions_total +3",
    )


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_promise_is_noticed(runs: dict[str, Run], what: str) -> None:
    """Exit status 1, and the promise is named."""
    done = runs[what]
    assert done.status == 1, done.out + done.err
    for promise in BROKEN[what]:
        assert f"service: broken promise: {promise}" in done.err
        assert f"BROKEN {promise}" in done.out


@pytest.fixture
def served() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start the services with `--serve`, and return the address of the shop and the process."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, *COMMAND, "--serve"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert address is not None, line
        try:
            yield address[0], process
        finally:
            process.kill()


def test_the_dashboard_of_the_services_works_until_an_interrupt(served: tuple[str, subprocess.Popen[str]]) -> None:
    """It shows the shop's executions; Ctrl-C ends the services without an error, even during a stream."""
    url, process = served
    with httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
        assert "<title>shop</title>" in client.get("/resilience/").text
        now = client.get("/resilience/state").json()["now"]
        assert [circuit["name"] for circuit in now["circuits"]] == ["depot"]
        with client.stream("GET", "/resilience/events") as response:
            deadline = time.monotonic() + 20
            for line in response.iter_lines():
                executions = re.search(r'"executions":{"total":(\d+)', line)
                if executions and int(executions[1]) > 5:
                    process.send_signal(signal.SIGINT)  # here, because leaving the loop would end the stream
                    _, errors = process.communicate(timeout=20)
                    break
                assert time.monotonic() < deadline, line
    assert process.returncode == 0
    assert "Traceback" not in errors
