"""The recipes that cannot run like the other pages: in a notebook, and in a separate environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import venv
from pathlib import Path

import pytest

from tests.docs import kernel, run_page
from tests.docs.run_page import Broken

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs/recipes/notebooks.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Proactor event loop does not implement:RuntimeWarning")  # zmq, under Windows
def test_the_page_on_notebooks_runs_in_a_kernel(tmp_path: Path) -> None:
    """Each block is a cell of the same kernel, where a warning is an error."""
    kernel.run(NOTEBOOK, "notebooks.md", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "report"),
    [
        ("await prices.call(afetch, 'clock')  # -> 'other'\n", "expected\n'other'\ngot\n'clock: 42 francs'"),
        ("1 / 0\n", ": ZeroDivisionError"),
        ("1 / 0  # raises KeyError\n", ": ZeroDivisionError"),
        ("1  # raises KeyError\n", "expected\nKeyError\ngot"),
        ("print('a')\n```\n\n```python\n1\n", "shown nowhere:\na"),
    ],
)
def test_a_wrong_result_of_a_cell_is_reported(cell: str, report: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    cells = NOTEBOOK.read_text(encoding="utf-8").split("Many calls, at most three at once")[0]
    page.write_text(f"{cells}\n```python\n{cell}```\n", encoding="utf-8")
    with pytest.raises(Broken, match=r"page\.md:") as caught:
        kernel.run(page, "page.md", tmp_path)
    assert report in str(caught.value)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="kernels are interrupted by a signal")
def test_an_interrupt_of_the_kernel_ends_the_delay_of_a_retry(tmp_path: Path) -> None:
    """It is not retried, counted or answered, and the permit is released."""
    with kernel.started(tmp_path) as client:
        kernel.cell(
            client,
            "from resilience import *\n"
            "calls, breaker = [], CircuitBreaker(2)\n"
            "policy = Policy.wrap(Fallback('answered'), Retry(3, backoff=[60]), Bulkhead(1), breaker)\n"
            "def fail(): calls.append(1); raise ConnectionError",
        )
        pid = int(kernel.cell(client, "import os; os.getpid()")["value"])
        threading.Timer(0.5, os.kill, (pid, signal.SIGINT)).start()
        assert kernel.cell(client, "policy.call(fail)") == {"raised": "KeyboardInterrupt"}
        state = kernel.cell(client, "len(calls), breaker.stats().opened, policy.find(Bulkhead).stats().in_flight")
        assert state == {"value": "(1, 0, 0)"}


@pytest.mark.slow
def test_the_page_on_arq_has_the_results_it_shows(tmp_path: Path) -> None:
    """In an environment with arq, which cannot be installed with the extra `redis`."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    install = [str(python), "-m", "pip", "install", "-q", str(ROOT), "arq>=0.28", "pytest"]
    subprocess.run(install, check=True, timeout=120)
    command = [str(python), "-W", "error", run_page.__file__, str(ROOT / "docs/recipes/arq.md"), "docs/recipes/arq.md"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
