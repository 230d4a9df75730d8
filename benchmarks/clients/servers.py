"""The servers: each runs in its own process on this machine, and is started on first use."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]


class Servers:
    """The servers, with the address of each by its protocol."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[Any]] = {}

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait()

    def nanoseconds(self, port: int) -> int:
        """Return the processor time of the server at this port. Only Linux reports it with this precision."""
        return int(Path(f"/proc/{self._processes[port].pid}/schedstat").read_text().split()[0])

    @cached_property
    def http(self) -> str:
        return f"http://127.0.0.1:{self._start_ours('http')}/"

    @cached_property
    def grpc(self) -> str:
        return f"127.0.0.1:{self._start_ours('grpc')}"

    @cached_property
    def redis(self) -> int | None:
        """The port; None if Redis is not installed."""
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        return self.start(program, "--save", "", "--appendonly", "no", "--port") if program else None

    def _start_ours(self, what: str) -> int:
        return self.start(sys.executable, "-m", "benchmarks.clients.serving", what)

    def start(self, *command: str, after: Sequence[str] = ()) -> int:
        """Start a program whose next argument is its port; return the port when the program accepts connections."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        process = subprocess.Popen([*command, str(port), *after], cwd=ROOT, stdout=subprocess.DEVNULL)
        self._processes[port] = process
        for _ in range(500):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except ConnectionRefusedError:
                time.sleep(0.02)
            else:
                return port
        raise RuntimeError(f"no server at port {port} after ten seconds: {command}")
