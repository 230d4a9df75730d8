"""A redis-server that tests may kill, freeze and start again."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

from tests.callers import wait_until
from tests.integrations.conftest import program


class RedisServer:
    """A server on a port of loopback, which stays the same after a restart. It saves nothing."""

    def __init__(self, folder: Path) -> None:
        self._program = program("redis-server")
        self._folder = folder
        self.socket: Path = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        options += ["--unixsocket", str(self.socket)]
        self._process = subprocess.Popen([self._program, *options], stdout=subprocess.DEVNULL)
        wait_until(self._answers)

    def refresh(self) -> None:
        """Make sure that it runs, and delete all data."""
        if self._process is not None:
            self.thaw()
            if self._answers("FLUSHALL", "OK"):
                return
            self.kill()
        self.start()

    def _answers(self, command: str = "PING", answer: str = "PONG") -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(f"{command}\r\n".encode())
                return connection.recv(100) == f"+{answer}\r\n".encode()
        except OSError:
            return False

    def kill(self) -> None:
        """End it at once: all connections are closed, and new ones are refused."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Suspend its process: the kernel still accepts connections and commands, but no answer comes."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue its process, which then executes the commands that have arrived in the meantime."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
