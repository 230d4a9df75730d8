"""The examples run as a newcomer would run them, and print what they demonstrate."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
WORLDS = ("threads", "asyncio", "trio")

#: The environment of the examples, copied here because pytest changes its own while the threads of `runs` use it.
INHERITED = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"}}


@dataclass(frozen=True)
class Run:
    """One run of an example in its own process."""

    status: int
    out: str
    err: str
    seconds: float

    def shows(self, *patterns: str) -> None:
        """Assert that each pattern matches a line of the output below that of the previous pattern."""
        lines = iter(self.out.splitlines())
        for pattern in patterns:
            assert any(re.search(pattern, line) for line in lines), f"{pattern!r} is not in order in\n{self.out}"


def run(*arguments: str, patience: float = 60, **environment: str) -> Run:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**INHERITED, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=patience,
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future[Run]]]:
    """Start every run that the tests need; three at once, as they mostly wait."""
    pool = ThreadPoolExecutor(3)
    right = {name: pool.submit(run, f"examples/{name}.py") for name in ("quickstart", *SHORT)}
    right["quickstart, narrow"] = pool.submit(run, "examples/quickstart.py", COLUMNS="50")
    wrong = {what: pool.submit(run, "examples/quickstart.py", "--break", what, FORCE_COLOR="1") for what in BROKEN}
    yield right | wrong
    pool.shutdown(cancel_futures=True)


# --- the quickstart --------------------------------------------------------------------------


@pytest.fixture
def quickstart(runs: dict[str, Future[Run]]) -> Run:
    return runs["quickstart"].result()


def test_the_quickstart_keeps_its_promises_and_ends(quickstart: Run) -> None:
    """Exit status 0 within 20 seconds, every promise kept, and no output to stderr."""
    assert (quickstart.status, quickstart.err) == (0, ""), quickstart.out
    assert quickstart.seconds < 20
    assert len(re.findall(r"^kept   (.*?): ", quickstart.out, re.MULTILINE)) == 14
    assert "BROKEN" not in quickstart.out


@pytest.mark.parametrize("world", WORLDS)
def test_the_quickstart_shows_what_happened_in_each_call(quickstart: Run, world: str) -> None:
    """Attempts, delays, timeouts, answers of the fallback and the remaining time, in every world."""
    quickstart.shows(
        rf"{world} +/forecast +1  \d\.\d\d s  1\.\d\d s  \"sunny\"",
        rf"{world} +/flaky +3  \d\.\d\d s  [01]\.\d\d s  status 503 > wait 0\.\d\d s > \w+Error > wait 0\.\d\d s",
        rf"{world} +/hangs-once +2  0\.\d\d s  [01]\.\d\d s  cut off at 0\.5 s > wait 0\.\d\d s > \"sunny\"",
        rf"{world} +/forecast +0  0\.0\d s  1\.\d\d s  refused: CircuitOpen > \"yesterday's forecast\"",
        rf"{world} +/forecast +1  ",
        rf"{world} +\.+#+ +waited 0\.\d\d s",
        rf"{world} +/hangs +1  0\.\d\d s  0\.00 s  cut off at its deadline > \"yesterday's forecast\"",
        rf"{world} +11 +8 +3 ",
    )


def test_the_quickstart_shows_how_the_circuit_changes(quickstart: Run) -> None:
    """It opens after failures in two worlds, refuses the third, and closes after a probe."""
    quickstart.shows(
        r"threads +/forecast +3 .*status 503",
        r"asyncio +/forecast +2 .*status 503 > CIRCUIT OPEN",
        r"trio +/forecast +0 .*refused: CircuitOpen",
        r"trio +/forecast +1 .*CIRCUIT HALF-OPEN > CIRCUIT CLOSED > \"sunny\"",
        r"asyncio +/forecast +1 .*\"sunny\"",
        r"threads +/forecast +1 .*\"sunny\"",
    )


def test_the_quickstart_prints_plain_ascii_in_chronological_order_without_a_terminal(quickstart: Run) -> None:
    assert quickstart.out.isascii()
    assert "\x1b" not in quickstart.out
    rows = re.findall(r"^ *(\d+\.\d\d)  (?:threads|asyncio|trio) ", quickstart.out, re.MULTILINE)
    assert len(rows) == 33
    assert rows == sorted(rows, key=float)


def test_the_quickstart_has_120_columns_or_as_many_as_configured(quickstart: Run, runs: dict[str, Future[Run]]) -> None:
    """By `COLUMNS`."""
    narrow = runs["quickstart, narrow"].result()
    assert narrow.status == 0, narrow.out
    assert max(map(len, narrow.out.splitlines())) <= 50
    assert "              > no retry into an open circuit\n" in narrow.out  # no step is broken, or far to the right
    assert not re.search(r"^ +$|…", narrow.out, re.MULTILINE)
    assert 80 < max(map(len, quickstart.out.splitlines())) <= 120


def test_zero_columns_are_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Some systems set `COLUMNS` to 0 if there is no terminal."""
    monkeypatch.setenv("COLUMNS", "0")
    runpy.run_path(str(EXAMPLES / "_timeline.py"))["Timeline"]().say("something")
    assert capsys.readouterr().out == "something\n"


#: Arguments of `--break`, and the promise that each of them breaks.
BROKEN = {
    "timeout": "no call outlived its deadline",  # the first, as it takes longest
    "fallback": "every call got an answer",
    "retry": "no call retried an open circuit",
    "breaker": "one circuit for threads, asyncio and trio",
    "bulkhead": "one bulkhead for threads, asyncio and trio",
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_quickstart_notices_a_broken_promise(runs: dict[str, Future[Run]], what: str) -> None:
    """Exit status 1; the promise is named on stderr and marked in the report, here in colours."""
    result = runs[what].result()
    assert result.status == 1, result.out + result.err
    assert f"quickstart: broken promise: {BROKEN[what]}: " in result.err
    assert re.search(rf"\x1b\[[\d;]*m✘ \x1b\[0m{BROKEN[what]}: ", result.out), result.out


# --- the other examples ---


def wrap_a_client(run: Run) -> None:
    retried = ("attempt 1 failed", "attempt 2 failed", "sunny")
    run.shows("requests.Session", *retried, "still a Session: True", "httpx2.AsyncClient", *retried)
    run.shows("chat.completions.create", "attempt 1 failed", "HELLO from the small model", "no attribute 'gte'")


def custom_policy(run: Run) -> None:
    calls = re.findall(r"^\d\.\d s  (\w+)$", run.out, re.MULTILINE)
    assert sorted(calls) == sorted(WORLDS * 3)
    gap = re.search(r"^9 calls, one every (\d\.\d\d) s$", run.out, re.MULTILINE)
    assert gap is not None
    assert float(gap[1]) >= 0.08  # 0.10, unless the very first call was late


def nested_deadlines(run: Run) -> None:
    run.shows(
        r"-- without a deadline",
        r"checkout +no limit",
        r"depot +[45]\.\d s left",
        r"asks its client to take at most [45]\.\d s",
        r"prices +0\.[012] s left",
        r"-- with one second",
        r"checkout +(1\.0|0\.9) s left",
        r"depot +0\.[0-7] s left",
        r"asks its client to take at most 0\.[0-7] s",
        r"prices +0\.[012] s left",
        r"the earlier one applies +(1\.0|0\.9) s left",
        r"attempt +0\.[78] s left",
        r"gave up after 0\.\d s: resilience: [123] attempts? in 0\.\d+ s, failed with ConnectionError",
        r"DeadlineExceeded: the block did not end within 0\.2 s",
    )


def block_forms(run: Run) -> None:
    run.shows("retry: attempt 3", "breaker: refused, try again in 30 s, last failure ConnectionError: reset by peer")
    run.shows("breaker: refused", r"deadline: the loop ended after [123] rounds")
    in_tasks = ("bulkhead: 2 of 3 tasks", "retry: attempt 2", r"deadline: 0\.\d s for", r"deadline: .* within 0\.1 s")
    run.shows("-- asyncio", *in_tasks, "-- trio", *in_tasks)
    assert "never printed" not in run.out


def listen(run: Run) -> None:
    run.shows(
        "INFO .* finished after 1 attempts, user ada",
        "ada reads: 7 pieces",
        r"WARNING .* attempt 1 failed, next in 0\.01 s",
        r"ERROR .* depot: circuit closed -> open \(ConnectionError: connection refused\)",
        "bob reads: out of stock",
        "WARNING .* depot: CircuitOpen, retry after 30 s",
        "cyd reads: out of stock",
        "counted: 3 AttemptFailed, 2 CallRejected, 1 CircuitChanged, 4 ExecutionFinished, 3 FallbackUsed",
    )
    assert len(re.findall("finished after", run.out)) == 3  # the fourth execution is after the end of the subscription


def stream(run: Run) -> None:
    again = (
        "attempt 1 failed: HTTPStatusError",
        "the first word came in attempt 2",
        "attempt 2 failed: RemoteProtocol",
    )
    run.shows(*again, "over after 11 words in 3 attempts", "Four hundred and two kinds of moss grow on this roof")
    run.shows("Four .* 1 stream is open", r"no item within 0\.1 s; open streams: 0")
    assert run.out.count("attempt 2 failed") == 1


def saga(run: Run) -> None:
    run.shows("gone got: nothing", "fine .*: booked$", "broke .*: Declined$", "slow .*: TimeoutExceeded$")
    run.shows(*(f"{name} +has booked 10 orders, 0 of them wrongly" for name in ("flight", "hotel", "payment")))
    run.shows("every order is booked everywhere or nowhere")


def crawl(run: Run) -> None:
    run.shows("good: 40 pages", "slow: 40 pages", "down: .* refused by the breaker; [5-8] requests")
    assert (run.out.count("kept: "), run.out.count("BROKEN")) == (5, 0)


def llm(run: Run) -> None:
    run.shows("first: 20 answers, 590 tokens, 0 requests over", "second: .* 0 requests over its limit")
    assert (run.out.count("kept: "), run.out.count("BROKEN")) == (5, 0)


SHORT: dict[str, Callable[[Run], None]] = {
    check.__name__: check
    for check in (wrap_a_client, custom_policy, nested_deadlines, block_forms, listen, stream, saga, crawl, llm)
}


@pytest.mark.parametrize("name", SHORT)
def test_a_short_example_shows_its_subject(runs: dict[str, Future[Run]], name: str) -> None:
    """It ends within seconds, without output to stderr, and prints its meaningful lines in order."""
    result = runs[name].result()
    assert (result.status, result.err) == (0, ""), result.out
    assert result.seconds < 15
    SHORT[name](result)


def test_every_example_is_run_and_its_docstring_says_what_to_look_at() -> None:
    files = sorted(EXAMPLES.glob("[!_]*.py"))
    assert {file.stem for file in files} == {"quickstart", "worker", *SHORT}
    for file in files:
        assert "Look at" in (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""), file.name


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")
@pytest.mark.parametrize("what", ["workers", "workers and the store"])
def test_the_worker_loses_nothing_however_it_is_killed(what: str) -> None:
    """At ten random points, or as many as `RESILIENCE_KILLS`. No job is lost or counted twice."""
    kills = int(os.environ.get("RESILIENCE_KILLS", "10"))
    store = ["--store"] if what != "workers" else []
    result = run("examples/worker.py", "--kills", str(kills), *store, patience=120 + 3 * kills)
    assert (result.status, result.err) == (0, ""), result.out
    result.shows(
        rf"{15 * kills} jobs sent, {15 * kills} in the ledger, 0 lost, 0 wrong", rf"{kills} of {kills} poisonous"
    )
    result.shows("graceful stop: yes", "nothing lost, nothing twice")
