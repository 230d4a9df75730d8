"""The benchmarks run, time what they claim to time, and give every contestant the same work."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import clients, libraries, report, timing
from benchmarks.bars import BARS, judge
from benchmarks.cells import Cell, Result, fine
from benchmarks.families import CELLS, layers
from benchmarks.functions import ANSWER, ATTEMPTS, FAILURE, FAILURES
from benchmarks.handler.apps import HANDLERS
from benchmarks.libraries import HAND_WRITTEN, OURS, Library
from benchmarks.plot import PANELS
from benchmarks.timing import ASYNCIO, SYNC, WORLDS, Effort, outcome

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

LIBRARIES, MISSING = libraries.load()


def entries(entry: str) -> list[Any]:
    """Return the libraries and worlds that have this entry."""
    return [
        pytest.param(library, world, id=f"{library.name} in {world}")
        for library in LIBRARIES
        for world in WORLDS
        if (entry, world) in library.entries
    ]


# --- the command ---


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Return what `python -m benchmarks --smoke` prints, and the run that it writes."""
    path = tmp_path_factory.mktemp("smoke") / "run.json"
    command = [sys.executable, "-m", "benchmarks", "--smoke", "--json", str(path)]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=180).stdout
    (run,) = json.loads(path.read_text(encoding="utf-8"))
    return printed, run


def test_the_smoke_run_names_missing_libraries_and_does_not_judge(smoke: tuple[str, dict[str, Any]]) -> None:
    """Its numbers are declared meaningless."""
    printed, run = smoke
    assert run["about"]["missing"] == [*MISSING, *clients.missing()]
    for name in run["about"]["missing"]:
        assert name in printed.partition("not installed")[2].splitlines()[0]
    assert "the numbers above are meaningless" in printed
    assert "FAIL" not in printed


def test_the_smoke_run_measures_every_cell_and_those_of_bars_and_picture(smoke: tuple[str, dict[str, Any]]) -> None:
    """A renamed cell must not be skipped."""
    results = {f"{cell['group']}: {cell['cell']}": cell["samples"] for cell in smoke[1]["cells"]}
    assert all(values for samples in results.values() for values in samples.values())
    for name in (*(f"{cell.group}: {cell.name}" for cell in CELLS), *(cell for cell, _ in PANELS)):
        assert OURS in results[name]
    for bar in BARS:
        assert bar.contestant in results[bar.cell]


def test_every_web_handler_answers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.handler", "--rounds", "1", "--seconds", "0.05"]
    files = ["--json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "picture.svg")]
    subprocess.run([*command, *files], cwd=ROOT, check=True, capture_output=True, timeout=120)
    cells = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["cells"]
    assert all(samples.keys() == HANDLERS.keys() for samples in cells.values())
    assert "standard() as transport" in (tmp_path / "picture.svg").read_text(encoding="utf-8")


# --- the timing core ---


class Ticking:
    """A clock in nanoseconds that a function advances."""

    def __init__(self, *steps: int) -> None:
        self._now = 0
        self._steps = itertools.cycle(steps)

    def read(self) -> int:
        return self._now

    def work(self) -> None:
        self._now += next(self._steps)


def timed(functions: dict[str, Callable[[], Any]], **effort: Any) -> dict[str, list[float]]:
    """Return the samples of blocking functions."""

    async def main() -> dict[str, list[float]]:
        return await timing.interleaved(SYNC, functions, Effort(**effort))

    return timing.run(SYNC, main)


@pytest.mark.parametrize(("ticks", "batch"), [((50,), 10_000), ((90, 50, 70), 0)])
def test_a_sample_is_the_nanoseconds_per_call_of_the_fastest_batch(ticks: tuple[int, ...], batch: int) -> None:
    """Whatever the number of calls in a batch. So delays by the machine do not count."""
    clock = Ticking(*ticks)
    samples = timed({"work": clock.work}, rounds=4, batches=3, batch=batch, clock=clock.read)
    assert samples == {"work": [50.0] * 4}


def test_a_slow_first_call_does_not_make_the_batches_short() -> None:
    """The size of a batch is calculated from later calls."""
    clock = Ticking(50)
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1
        for _ in range(100_000 if calls == 1 else 1):
            clock.work()

    timed({"work": work}, rounds=1, batches=1, batch=5_000, clock=clock.read)
    assert calls > 100


def test_each_round_times_every_contestant_once_in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a slow second of the machine affects all of them."""
    monkeypatch.setattr(timing.random, "shuffle", random.Random(4).shuffle)
    calls: list[str] = []
    functions = {name: lambda name=name: calls.append(name) for name in "abcd"}
    samples = timed(functions, rounds=20, batches=1, batch=0)
    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys("abcd", 20)
    rounds = ["".join(calls[start : start + 4]) for start in range(12, len(calls), 4)]  # after the calibration
    assert len(rounds) == 20
    assert all(sorted(order) == list("abcd") for order in rounds)
    assert len(set(rounds)) > 5


def test_a_contestant_with_a_wrong_result_is_not_timed() -> None:
    library = Library("a fraud")
    library.enters("retry", SYNC, ASYNCIO)(lambda fn: lambda: ANSWER + 1)
    cell = Cell("sync, one policy", "retry", SYNC, entry="retry", setting=fine)
    with pytest.raises(AssertionError, match="a fraud returned 43"):
        cell.measure([library], timing.SMOKE)


# --- evaluation of the samples ---


def test_ratios_are_taken_within_a_round() -> None:
    """The median of the ratios, so a slow round counts for both."""
    result = Result("", "", "ns", {"ours": [1.0, 30.0, 3.0], "theirs": [2.0, 40.0, 1.0]})
    assert result.ratio("ours", "theirs") == 0.75
    assert result.best(["theirs", "ours", "missing"]) == "theirs"
    assert result.best(["missing"]) is None


def test_bars_are_judged_against_the_opponent_they_name() -> None:
    """The best peer is a library; hand-written code is another opponent."""
    refusal = Result(
        "sync, failure",
        "open circuit",
        "ns",
        {OURS: [120.0], HAND_WRITTEN: [10.0], "nopanic": [100.0], "pybreaker": [999.0]},
    )
    five = Result("sync, stack", "five, deadline", "ns", {OURS: [70.0], HAND_WRITTEN: [100.0], "nopanic": [10.0]})
    threads = Result(
        "threads on one pipeline of four", "throughput of 16 / of 1", "", {OURS: [0.9], HAND_WRITTEN: [0.1]}
    )
    verdicts = {verdict.bar.cell: verdict for verdict in judge([refusal, five, threads], "CPython 3.11.7")}
    assert [(verdict.opponent, verdict.value, verdict.met) for verdict in verdicts.values()] == [
        (HAND_WRITTEN, 0.7, True),
        ("nopanic", 1.2, False),
        ("itself", 0.9, True),
    ]


def test_a_bar_may_have_another_limit_for_later_versions_of_python() -> None:
    """It depends on the Python of the run, not on that of its reader."""
    five = Result("asyncio, stack", "five, timeout", "ns", {OURS: [70.0], HAND_WRITTEN: [100.0]})
    judged = [next(judge([five], python)) for python in ("CPython 3.11.7", "CPython 3.12.1", "CPython 3.13.0")]
    assert [(verdict.bar.limit, verdict.met) for verdict in judged] == [(0.65, False), (0.8, True), (0.8, True)]


def test_the_cost_of_a_layer_is_the_slope_of_the_line() -> None:
    """Costs on a line do not deviate from it; a layer that costs more than the others does."""
    straight = [300.0 + 50.0 * n for n in layers.LENGTHS]
    assert layers.line(straight).slope == pytest.approx(50.0)
    assert layers.bend(straight) == pytest.approx(0.0, abs=1e-9)
    assert layers.bend([*straight[:-1], 2 * straight[-1]]) > 20


# --- the contestants ---


def test_a_library_that_is_not_installed_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resilix", None)
    monkeypatch.delitem(sys.modules, "benchmarks.libraries.resilix", raising=False)
    found, missing = libraries.load()
    assert "resilix" in missing
    assert "resilix" not in {library.name for library in found}
    assert {OURS, HAND_WRITTEN} <= {library.name for library in found}


def failing_calls(library: Library, world: str, entry: str, calls: int) -> int:
    """Make calls that fail, and return how often the function was called."""
    entered: list[int] = []

    def fail() -> None:
        entered.append(1)
        raise FAILURE("reset")

    async def fail_later() -> None:
        fail()

    protected = library.entries[entry, world](fail if world == SYNC else fail_later)

    async def main() -> None:
        for _ in range(calls):
            with pytest.raises(Exception):  # noqa: B017, PT011 - of the function, or of the library
                await outcome(world, protected)

    timing.run(world, main)
    return len(entered)


@pytest.mark.filterwarnings("ignore:'asyncio.iscoroutinefunction' is deprecated")  # in backoff, from Python 3.14 on
@pytest.mark.parametrize(("library", "world"), entries("retry at once"))
def test_every_retry_makes_the_same_number_of_attempts(library: Library, world: str) -> None:
    """Three, then the caller gets an error."""
    assert failing_calls(library, world, "retry at once", calls=1) == ATTEMPTS


@pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow")  # in peers, where they are installed
@pytest.mark.parametrize(("library", "world"), entries("breaker"))
def test_every_breaker_opens_after_the_same_number_of_failures(library: Library, world: str) -> None:
    assert failing_calls(library, world, "breaker", calls=FAILURES + 3) == FAILURES


# --- the page that shows a run ---


def test_the_performance_page_shows_the_recorded_runs() -> None:
    """Every table is made from the JSON file, and none is missing."""
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    written = (ROOT / "docs" / "performance.json").read_text(encoding="utf-8")
    runs = [report.Run.from_json(data) for data in json.loads(written)]
    assert report.refreshed(page, runs) == page
    for group in report.grouped(runs[-1].results):
        assert report.table(group) in page
    for run in runs:
        assert report.bars(run.verdicts) in page


#: The rows of the README's table, in order.
IN_THE_README = [(group, cell) for group in ("sync, stack", "asyncio, stack") for cell in ("four", "five, timeout")]


def test_the_readme_shows_the_recorded_run() -> None:
    """The time of this library in microseconds, and its ratio to each of the others."""
    written = json.loads((ROOT / "docs" / "performance.json").read_text(encoding="utf-8"))
    results = {(it.group, it.cell): it for it in report.Run.from_json(written[-1]).results}
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Speed\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)
    (_, _, *others), _, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert others
    for (_, ours, *ratios), key in zip(rows, IN_THE_README, strict=True):
        result = results[key]
        assert ours == f"{result.median(OURS) / 1000:.3g} us"
        assert ratios == [f"{result.ratio(OURS, name):.2f}" for name in others]


def test_refreshing_a_page_changes_only_its_own_tables() -> None:
    """They are recognized by their first heading."""
    old = Result("sync, stack", "four", "ns", {OURS: [412.0], HAND_WRITTEN: [980.0]})
    new = Result("sync, stack", "four", "ns", {OURS: [305.0], HAND_WRITTEN: [980.0]})
    about = {"python": "CPython 3", "machine": "a machine", "rounds": 1, "versions": {}, "missing": []}
    text = "# Title\n\nSome text.\n\n{}\n\n| theirs |\n|---|\n| 1 |\n"
    page = report.refreshed(text.format(report.table([old])), [report.Run(about, [new])])
    assert page == text.format(report.table([new]))
    assert "305 ns" in page
