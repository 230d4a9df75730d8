"""The recipes for task queues, with real workers: a task whose worker is killed runs again, with the same key."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.docs.run_page import blocks
from tests.integrations.redis.server import RedisServer

ROOT = Path(__file__).parents[2]
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
    """From its beginning, in another worker."""
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
