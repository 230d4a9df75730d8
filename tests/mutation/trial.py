"""Trying a mutant: the tests run in a copy of the tree, in a process that is forked from this one.

The third-party libraries are in memory by then, and the library itself is not: each process imports its mutant. A
first run, without a fault, notes which tests come by which line and how long each takes. A mutant then meets the
tests that come by its line, the quickest first.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio._backends._asyncio
import anyio._backends._trio  # noqa: F401  (imported once, before the forks)
import hypothesis
import pytest
from coverage import Coverage, CoverageData

ROOT = Path(__file__).parents[2]
_COPIED = ["resilience", "tests", "docs", "examples", "benchmarks", "pyproject.toml", "README.md", "CHANGELOG.md"]
_OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=mutation"]
_OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is in memory already


@dataclass(frozen=True)
class Survey:
    """What is known of the tests of a module."""

    seconds: dict[str, float]  # by test
    by_line: dict[int, set[str]]

    @property
    def all_seconds(self) -> float:
        """How long all of them take."""
        return sum(self.seconds.values())

    def coming_by(self, line: int) -> list[str]:
        """The tests that come by a line, the quickest first; none where it runs only as the module is imported."""
        return sorted(self.by_line.get(line, ()), key=lambda test: self.seconds.get(test, 0.0))


class Copy:
    """A copy of the tree."""

    def __init__(self, path: Path) -> None:
        self._path = path
        for name in _COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (ROOT / name).exists():
                shutil.copy(ROOT / name, path / name)

    @property
    def output(self) -> str:
        """What the tests of the last trial printed."""
        return (self._path / "output").read_text(errors="replace")

    def survey(self, module: str, files: list[str]) -> Survey:
        """Run the tests of a module as it is; they have to pass."""
        data, times = self._path / "survey.data", self._path / "survey.json"
        surveyor = _Surveyor(self._path / "resilience" / module, data, times)
        for _ in range(3):  # a busy machine may let a test wait in vain
            _, status = os.waitpid(self._fork(lambda: self._run(files, surveyor), None), 0)
            if not status:
                break
        else:
            sys.exit(f"the tests of {module} fail without any fault in it:\n{self.output[-5000:]}")
        contexts = CoverageData(str(data))
        contexts.read()
        [file] = contexts.measured_files()
        by_line = {line: set(tests) - {""} for line, tests in contexts.contexts_by_lineno(file).items()}
        return Survey(json.loads(times.read_text()), by_line)

    def warm(self, files: list[str]) -> None:
        """Import the tests once, so that what they compile to is there for every trial."""
        os.waitpid(self._fork(lambda: self._run(["--collect-only", *files], self), None), 0)

    def start(self, module: str, source: str, files: list[str], tests: list[str], seconds: float) -> int:
        """Begin to run these tests (none: all of these files) with this source in the module's place."""
        target = self._path / "resilience" / module
        target.write_text(source, encoding="utf-8")
        for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
            compiled.unlink()
        wanted = sorted({test.partition("::")[0] for test in tests}) or files
        return self._fork(lambda: self._run(wanted, _Chooser(tests)), seconds)

    def restore(self, module: str) -> None:
        """Put the module back as it is without a fault."""
        shutil.copy(ROOT / "resilience" / module, self._path / "resilience" / module)

    def _fork(self, work: Callable[[], int], seconds: float | None) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            self._become(seconds)
            os._exit(work())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)

    def _become(self, seconds: float | None) -> None:
        """Work in the copy from here on, and not for ever: a mutant may loop, hang or fill the memory."""
        output = os.open(self._path / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(self._path)
        os.environ["PYTHONPATH"] = str(self._path)
        sys.path.insert(0, str(self._path))
        for name in [it for it in sys.modules if it.partition(".")[0] in ("tests", "resilience")]:
            del sys.modules[name]
        if seconds is not None:
            sys.dont_write_bytecode = True
            cpu = int(3 * seconds) + 5
            resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 5))
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
            signal.alarm(int(6 * seconds) + 20)

    def _run(self, files: list[str], plugin: object) -> int:
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]  # nobody reads the smallest example
        hypothesis.settings.register_profile("mutation", derandomize=True, database=None, phases=phases)
        code = int(pytest.main([*_OPTIONS, *files], plugins=[plugin]))
        sys.stdout.flush()
        return code


class _Surveyor:
    """A plugin of pytest: notes which tests come by which line of a module, and how long each takes."""

    def __init__(self, module: Path, data: Path, times: Path) -> None:
        self._module, self._data, self._times = module, data, times
        self._seconds: dict[str, float] = {}

    def pytest_sessionstart(self) -> None:
        self._coverage = Coverage(data_file=str(self._data), include=[str(self._module)], config_file=False)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        self._times.write_text(json.dumps(self._seconds))


class _Chooser:
    """A plugin of pytest: runs these tests in this order; all of them where none are named."""

    def __init__(self, tests: list[str]) -> None:
        self._place = {test: place for place, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._place:
            chosen = [item for item in items if item.nodeid in self._place]
            items[:] = sorted(chosen, key=lambda item: self._place[item.nodeid])
