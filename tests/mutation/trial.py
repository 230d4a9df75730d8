"""Runs the tests for each mutant: pytest collects the tests of a module once, and each mutant runs in a fork.

In the fork, the functions of the module get the code of the mutant, and `linecache` gets its source, so that policies
are lowered from it. A first fork, without a fault, records which tests run which lines, and how long each takes. A
mutant then runs the tests of its line, the fastest first.

Faults outside functions (in constants, classes, decorators) take effect only during an import, so these mutants are
imported, in a copy of the tree.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import linecache
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import hypothesis
import pytest
from coverage import Coverage, CoverageData

from tests.mutation.mutants import Mutant

ROOT = Path(__file__).parents[2]

#: A test counts as looping after this multiple of its usual time, and these seconds of processor time more.
TIMES, PROCESSOR_SECONDS = 3, 5

#: A test counts as hanging after this number of real seconds more. A mutant of a lock or a queue may make every second
#: test hang, so such a module spends most of its time on these seconds.
WAITING_SECONDS = 10

#: The limits in seconds of each test and of each mutant, as a last resort.
LONGEST_TEST, LONGEST = 180, 1200

_COPIED = ["resilience", "tests", "docs", "pyproject.toml"]  # tests compare pages with the code
_OPTIONS = [
    "-x",
    "-q",
    "-m",
    "",
    "-p",
    "no:cacheprovider",
    "--hypothesis-profile=mutation",
    "-o",
    "faulthandler_timeout=0",
]
_OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is already imported

#: Called with each mutant, and whether it was killed.
Report = Callable[[Mutant, bool], None]


@dataclass
class Trials:
    """A plugin of pytest that runs the collected tests once for each mutant, instead of once.

    :param module: the path of the module, as in `state/windows.py`.
    :param apart: files of tests whose lines cannot be recorded; they run for mutants that survive the others.
    """

    module: str
    faults: list[Mutant]
    apart: list[str]
    workers: int
    report: Report
    _running: dict[int, tuple[Mutant, bool, float]] = field(default_factory=dict)  # by process, with its start

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try every mutant."""
        items = session.items
        survey = _survey(session, items, ROOT / "resilience" / self.module)
        self._check_a_new_interpreter(items)
        print(f"\n{self.module}: {len(self.faults)} mutants, {len(session.items)} tests", flush=True)
        todo = [(mutant, False) for mutant in reversed(self.faults)]
        while todo or self._running:
            while todo and len(self._running) < self.workers:
                mutant, again = todo.pop()
                pid = self._start_apart(mutant) if again else self._start(session, survey, mutant)
                self._running[pid] = mutant, again, time.monotonic()
            mutant, again, status = self._wait()
            if not status and self.apart and not again:
                todo.append((mutant, True))
            else:
                self.report(mutant, bool(status))
        return True

    def _check_a_new_interpreter(self, items: list[pytest.Item]) -> None:
        """Check that the tests pass in a new interpreter without a fault: otherwise, every mutant would be killed."""
        files = [*_files_of(items), *self.apart]
        source = (ROOT / "resilience" / self.module).read_text(encoding="utf-8")
        no_fault = Mutant(0, "", "", "", source, inside=False)
        _must_pass(lambda: _import_and_run(self.module, no_fault, files, LONGEST_TEST), self.module)

    def _wait(self) -> tuple[Mutant, bool, int]:
        """Wait until a mutant ends, and kill those that take too long."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                _kill_group(pid)
                mutant, again, _ = self._running.pop(pid)
                return mutant, again, status
            for pid, (_, _, since) in self._running.items():
                if time.monotonic() - since > LONGEST:
                    _kill_group(pid)
            time.sleep(0.01)

    def _start_apart(self, mutant: Mutant) -> int:
        return _fork(lambda: _import_and_run(self.module, mutant, self.apart, LONGEST_TEST))

    def _start(self, session: pytest.Session, survey: Survey, mutant: Mutant) -> int:
        name = "resilience." + self.module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        items = survey.of_line(mutant.line, session.items)

        def work() -> int:
            if mutant.inside and give_code(importlib.import_module(name), mutant.source):
                return _run(session, items, survey.limit)
            return _import_and_run(self.module, mutant, _files_of(items), survey.longest)

        return _fork(work)


def run(trials: Trials, files: list[str]) -> None:
    """Collect the tests, and try the mutants of a module. Must be called in a new process."""
    os.chdir(ROOT)
    register_profile()
    code = pytest.main([*_OPTIONS, "--capture=no", "--no-summary", *files], plugins=[trials])
    assert code == pytest.ExitCode.OK, code


def register_profile() -> None:
    """Let hypothesis use the same examples each time, and not shrink them, because they are not shown."""
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutation", derandomize=True, database=None, phases=phases)


# --- in a fork -------------------------------------------------------------------------------


def _fork(work: Callable[[], int], *, quiet: bool = True) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        if quiet:
            os.dup2(nowhere, 2)
        os._exit(work())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)


def _kill_group(leader: int) -> None:
    """End a mutant and all processes that its tests have started, which would keep the pipe open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _run(session: pytest.Session, items: list[pytest.Item], before: Callable[[str], object]) -> int:
    """Run tests until one fails, and call `before` with the name of each."""
    for item in items:
        before(item.nodeid)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        if session.testsfailed:
            return 1
    return 0


def give_code(module: ModuleType, source: str) -> bool:
    """Give the functions of a module their code in this source; return false if one has other free variables."""
    file = str(module.__file__)
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    codes = {code.co_qualname: code for code in _codes(compile(source, file, "exec", dont_inherit=True))}
    for function in _functions(module):
        code = codes[function.__code__.co_qualname]
        if code.co_freevars != function.__code__.co_freevars:
            return False
        function.__code__ = code
    return True


def _codes(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes(inner)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Yield the functions of a module and the methods of its classes, and the functions that these wrap."""
    spaces = [vars(module), *(vars(it) for it in vars(module).values() if isinstance(it, type))]
    for value in [value for space in spaces for value in space.values()]:
        for it in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
            while it is not None:
                if isinstance(it, FunctionType) and it.__code__.co_filename == module.__file__:
                    yield it
                it = getattr(it, "__wrapped__", None)


# --- which tests -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Survey:
    """The tests that run each line of a module, and the time of each test."""

    seconds: dict[str, float]
    by_line: dict[int, set[str]]

    def limit(self, test: str) -> None:
        """Limit this process to the needs of the next test, because a mutant may loop, hang or fill the memory."""
        seconds = TIMES * self.seconds.get(test, 30.0)
        used = resource.getrusage(resource.RUSAGE_SELF)
        processor = int(used.ru_utime + used.ru_stime + seconds) + PROCESSOR_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (processor, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        faulthandler.dump_traceback_later(seconds + WAITING_SECONDS, exit=True)  # no signal, so tests may use theirs

    @property
    def longest(self) -> float:
        """Seconds after which each of these tests has ended, unless it hangs."""
        return TIMES * max(self.seconds.values()) + WAITING_SECONDS

    def of_line(self, line: int, items: list[pytest.Item]) -> list[pytest.Item]:
        """Return the tests that run a line, the fastest first; all tests if the line runs only during the import."""
        tests = self.by_line.get(line) or self.seconds.keys()
        chosen = [item for item in items if item.nodeid in tests]
        return sorted(chosen, key=lambda item: self.seconds[item.nodeid])


def _survey(session: pytest.Session, items: list[pytest.Item], file: Path) -> Survey:
    """Run the tests without a fault, and record the lines that they run."""
    with tempfile.TemporaryDirectory() as scratch:
        data, times = Path(scratch, "data"), Path(scratch, "times")

        def work() -> int:
            clock = _Clock()
            session.config.pluginmanager.register(clock)
            coverage = Coverage(data_file=str(data), include=[str(file)], config_file=False)
            coverage.start()
            code = _run(session, items, coverage.switch_context)
            coverage.stop()
            coverage.save()
            times.write_text(json.dumps(clock.seconds))
            return code

        _must_pass(work, file.name)
        contexts = CoverageData(str(data))
        contexts.read()
        by_line = {line: set(tests) - {""} for line, tests in contexts.contexts_by_lineno(str(file)).items()}
        return Survey(json.loads(times.read_text()), by_line)


def _must_pass(work: Callable[[], int], module: str) -> None:
    """Do work that has to succeed, in a fork; try three times, because tests may time out on a busy machine."""
    for _ in range(3):
        pid = _fork(work, quiet=False)
        _, status = os.waitpid(pid, 0)
        _kill_group(pid)
        if not status:
            return
    sys.exit(f"the tests of {module} fail without any fault in it")


def _files_of(items: list[pytest.Item]) -> list[str]:
    return sorted({item.nodeid.partition("::")[0] for item in items})


class _Clock:
    """A plugin of pytest that records how long each test takes, and prints why one fails."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            print(report.nodeid, report.longreprtext, sep="\n", file=sys.stderr)


# --- mutants that have to be imported --------------------------------------------------------

_NEW_INTERPRETER = """
import sys, pytest
from tests.mutation.trial import Limit, register_profile
register_profile()
sys.exit(pytest.main(sys.argv[2:], plugins=[Limit(float(sys.argv[1]))]))
"""


class Limit:
    """A plugin of pytest that ends the process if a test takes longer than a number of seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> None:
        faulthandler.dump_traceback_later(self._seconds, exit=True)


def _import_and_run(module: str, mutant: Mutant, files: list[str], limit: float) -> int:
    """Run the tests of these files, each within a limit, in a copy of the tree and a new interpreter."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in _COPIED:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy2)(ROOT / name, Path(scratch, name))
        Path(scratch, "resilience", module).write_text(mutant.source, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": scratch, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", _NEW_INTERPRETER, str(limit), *_OPTIONS, *files]
        done = subprocess.run(
            command, cwd=scratch, env=environment, stdout=subprocess.DEVNULL, timeout=LONGEST - 20, check=False
        )
        return done.returncode
