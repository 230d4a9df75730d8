"""The servers that answer: each a process of its own on this machine, started when it is first asked for."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]


class Servers:
    """The servers, by what they speak: where each is reached."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()

    @cached_property
    def http(self) -> str:
        return f"http://127.0.0.1:{self._start_ours('http')}/"

    @cached_property
    def grpc(self) -> str:
        return f"127.0.0.1:{self._start_ours('grpc')}"

    @cached_property
    def redis(self) -> int | None:
        """The port; None where Redis is not installed."""
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        return self._start(program, "--save", "", "--appendonly", "no", "--port") if program else None

    def _start_ours(self, what: str) -> int:
        return self._start(sys.executable, "-m", "benchmarks.clients.serving", what)

    def _start(self, *command: str) -> int:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        process = subprocess.Popen([*command, str(port)], cwd=ROOT, stdout=subprocess.DEVNULL)
        self._processes.append(process)
        for _ in range(500):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except ConnectionRefusedError:
                time.sleep(0.02)
            else:
                return port
        raise RuntimeError(f"no server at port {port} after ten seconds: {command}")
