"""The recipes that cannot run like the other pages: in a notebook, in a separate environment, with real workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.docs import kernel, run_page
from tests.docs.run_page import Broken, blocks
from tests.integrations.redis.server import RedisServer

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


# --- task queues, with real workers ----------------------------------------------------------


PATIENCE: Final = 40.0  # seconds

#: Replaces the stub at the end of the page's module: the first run hangs.
PAY = """
def pay(ctx, order):
    import os, time
    with open("paid", "a") as paid:
        print(ctx.properties["idempotency_key"], file=paid)
    if not os.path.exists("killed"):
        time.sleep(60)
    return "paid"
"""

#: The command of a worker, the statement that sends a task, and replacements that make the page's code faster.
ENGINES: dict[str, tuple[list[str], str, dict[str, str]]] = {
    "celery": (
        ["-m", "celery", "-A", "tasks", "worker", "--pool", "threads", "--concurrency", "2"],
        "tasks.charge.delay(7)",
        {
            'broker="redis://localhost", backend="redis://localhost"': 'broker=__import__("os").environ["REDIS_URL"]',
            "start_http_server(8000)": "",
            "worker_prefetch_multiplier=1": "broker_transport_options={'visibility_timeout': 1}",
        },
    ),
    "dramatiq": (
        ["-m", "dramatiq", "tasks", "--processes", "1", "--threads", "2"],
        "tasks.charge.send(7)",
        {
            'RedisBroker(url=os.environ["REDIS_URL"])': 'RedisBroker(url=os.environ["REDIS_URL"], '
            "heartbeat_timeout=1000, maintenance_chance=1_000_000)"
        },
    ),
}


def module_of(page: str, changes: dict[str, str]) -> str:
    """Return the Python blocks of a page, before its tests, as one module."""
    text = (ROOT / "docs" / "recipes" / page).read_text(encoding="utf-8").split("\n## Tests\n")[0]
    code = "\n\n".join(block.text for block in blocks(text) if block.language == "python")
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    return code + PAY


@contextmanager
def worker(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a worker in its own process group, which is killed at the end."""
    process = subprocess.Popen([sys.executable, *command], start_new_session=True, **options)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def started(redis: RedisServer) -> Iterator[None]:
    redis.start()
    try:
        yield
    finally:
        redis.kill()


def wait_for_keys(paid: Path, number: int) -> list[str]:
    ends_at = time.monotonic() + PATIENCE
    while True:
        keys = paid.read_text().split() if paid.exists() else []
        if len(keys) >= number:
            return keys
        assert time.monotonic() < ends_at, f"the task was run {len(keys)} times"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.skipif(sys.platform == "win32", reason="no redis-server")
def test_the_task_of_a_killed_worker_runs_again_with_its_idempotency_key(engine: str, tmp_path: Path) -> None:
    """From its beginning, in another worker, with the same key."""
    command, send, changes = ENGINES[engine]
    (tmp_path / "tasks.py").write_text(module_of(f"{engine}.md", changes), encoding="utf-8")
    redis = RedisServer(tmp_path)
    with started(redis), (tmp_path / "log").open("wb") as log:
        where = {**os.environ, "REDIS_URL": f"redis://127.0.0.1:{redis.port}/0", "PYTHONPATH": str(ROOT)}
        options = {"cwd": tmp_path, "env": where, "stdout": log, "stderr": log}
        subprocess.run([sys.executable, "-c", f"import tasks; {send}"], cwd=tmp_path, env=where, check=True)
        with worker(command, **options):
            wait_for_keys(tmp_path / "paid", 1)
        (tmp_path / "killed").touch()
        time.sleep(1.1)  # so that the worker counts as dead
        with worker(command, **options):
            keys = wait_for_keys(tmp_path / "paid", 2)
    assert len(set(keys)) == 1
