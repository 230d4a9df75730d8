"""The types, checked by mypy --strict and by pyright in strict mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

import resilience

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: Writing a cache for the types of every client takes longer than it saves.
NO_CACHE = f"--cache-dir={os.devnull}"
CASES = sorted(path for path in HERE.glob("*.py") if not path.name.startswith(("__", "test_")))


def checked(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a type checker on the cases, with the project's settings."""
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file with errors, to detect a checker that checks nothing."""
    path = tmp_path_factory.mktemp("typing") / "wrong.py"
    path.write_text(
        "from resilience import Context, Fallback, Retry\n\n\n"
        "def fetch(ctx: Context) -> str:\n    return ''\n\n\n"
        "text: str = Fallback(None).wrap(Retry()).execute(fetch)\n"
        "fine: str = Retry().execute(fetch)  # type: ignore[assignment]\n",
        encoding="utf-8",
    )
    return path


class Verdicts(NamedTuple):
    """The results of both checkers for the cases."""

    mypy: Future[subprocess.CompletedProcess[str]]
    pyright: Future[tuple[int, list[tuple[str, int, str]]]]


@pytest.fixture(scope="module")
def verdicts() -> Iterator[Verdicts]:
    """Run both checkers at the same time: mypy takes 13 s, pyright 4."""
    with ThreadPoolExecutor(2) as pool:
        mypy = pool.submit(checked, "mypy", "--strict", NO_CACHE, *map(str, CASES))
        yield Verdicts(mypy, pool.submit(pyright))


def test_mypy_strict_accepts_the_cases(verdicts: Verdicts) -> None:
    """Every `assert_type` holds, and every line that must be refused is."""
    done = verdicts.mypy.result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no issues found" in done.stdout


def test_mypy_strict_finds_errors(wrong: Path) -> None:
    """An answer of None assigned to a str, and an unnecessary ignore."""
    done = checked("mypy", "--strict", NO_CACHE, str(wrong))
    lines = [line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line]
    assert lines == ["8", "9"], done.stdout + done.stderr


def pyright(*arguments: str) -> tuple[int, list[tuple[str, int, str]]]:
    """Return the number of files that pyright has analyzed, and its diagnostics."""
    done = checked("pyright", "--outputjson", "--pythonpath", sys.executable, *arguments)
    report = json.loads(done.stdout)
    diagnostics = [
        (Path(found["file"]).name, found["range"]["start"]["line"] + 1, found["message"])
        for found in report["generalDiagnostics"]
    ]
    return report["summary"]["filesAnalyzed"], diagnostics


def test_pyright_strict_accepts_the_cases(verdicts: Verdicts) -> None:
    files, diagnostics = verdicts.pyright.result()
    assert not diagnostics, "\n".join(f"{file}:{line}: {message}" for file, line, message in diagnostics)
    assert files > len(CASES)


def test_pyright_strict_finds_errors(wrong: Path) -> None:
    settings = {
        "include": [wrong.name],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "strict",
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    config = wrong.with_name("pyrightconfig.json")
    config.write_text(json.dumps(settings), encoding="utf-8")
    _, diagnostics = pyright("-p", str(config))
    assert [line for _, line, _ in diagnostics] == [8, 9], diagnostics


def test_the_cases_contain_every_policy_and_way_to_execute() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in CASES)
    words = "execute aexecute call acall capture acapture proxy aproxy wrap attempts guard slot deadline"
    assert [word for word in words.split() if f"{word}(" not in text] == []


def test_the_package_has_a_py_typed_marker() -> None:
    """PEP 561."""
    assert (Path(resilience.__file__).parent / "py.typed").exists()
