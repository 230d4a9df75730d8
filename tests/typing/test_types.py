"""The types, as mypy --strict and pyright in strict mode see them."""

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
#: To write one, of the types of every client, takes longer than it saves.
NO_CACHE = f"--cache-dir={os.devnull}"
CASES = sorted(path for path in HERE.glob("*.py") if not path.name.startswith(("__", "test_")))


def checked(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a type checker on the cases, with the project's own settings."""
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in which nothing is right: what a checker that checks nothing would pass."""
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
    """What the two checkers say of the cases, once they are done."""

    mypy: Future[subprocess.CompletedProcess[str]]
    pyright: Future[tuple[int, list[tuple[str, int, str]]]]


@pytest.fixture(scope="module")
def verdicts() -> Iterator[Verdicts]:
    """Both look at the cases at once: mypy takes 13 s, pyright 4."""
    with ThreadPoolExecutor(2) as pool:
        mypy = pool.submit(checked, "mypy", "--strict", NO_CACHE, *map(str, CASES))
        yield Verdicts(mypy, pool.submit(pyright))


def test_mypy_strict_agrees(verdicts: Verdicts) -> None:
    """Every `assert_type` holds, every line that is to be refused is."""
    done = verdicts.mypy.result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no issues found" in done.stdout


def test_mypy_strict_sees_what_is_wrong(wrong: Path) -> None:
    """An answer of None that is taken for a text, and an ignore that nobody needs."""
    done = checked("mypy", "--strict", NO_CACHE, str(wrong))
    lines = [line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line]
    assert lines == ["8", "9"], done.stdout + done.stderr


def pyright(*arguments: str) -> tuple[int, list[tuple[str, int, str]]]:
    """The number of files that pyright has read, and what it says about them."""
    done = checked("pyright", "--outputjson", "--pythonpath", sys.executable, *arguments)
    found = json.loads(done.stdout)
    said = [
        (Path(it["file"]).name, it["range"]["start"]["line"] + 1, it["message"]) for it in found["generalDiagnostics"]
    ]
    return found["summary"]["filesAnalyzed"], said


def test_pyright_strict_agrees(verdicts: Verdicts) -> None:
    """So does pyright, about the same files and this one."""
    files, said = verdicts.pyright.result()
    assert not said, "\n".join(f"{file}:{line}: {message}" for file, line, message in said)
    assert files > len(CASES)


def test_pyright_strict_sees_what_is_wrong(wrong: Path) -> None:
    """The same two lines."""
    settings = {
        "include": [wrong.name],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "strict",
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    config = wrong.with_name("pyrightconfig.json")
    config.write_text(json.dumps(settings), encoding="utf-8")
    _, said = pyright("-p", str(config))
    assert [line for _, line, _ in said] == [8, 9], said


def test_the_cases_name_every_policy_and_way_to_execute() -> None:
    """A way to execute that is added needs a case."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in CASES)
    words = "execute aexecute call acall capture acapture proxy aproxy wrap attempts guard slot deadline"
    assert [word for word in words.split() if f"{word}(" not in text] == []


def test_the_package_says_that_it_is_typed() -> None:
    """PEP 561."""
    assert (Path(resilience.__file__).parent / "py.typed").exists()
