"""A PostgreSQL server for the tests, if PostgreSQL is installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg
import pytest


def folder_of_programs() -> Path:
    """Return the folder of `initdb` and `postgres`: on the PATH, or Debian's. Skip the test if there is none."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not folders:
        pytest.skip("PostgreSQL is not installed")
    return folders[-1]


class Traced:
    """A connection as tracers wrap it: `isinstance` takes the wrapper for the connection, and `type` does not."""

    def __init__(self, connection: Any) -> None:
        self._wrapped = connection

    @property
    def __class__(self) -> Any:
        return type(self._wrapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class Frozen:
    """Processes of the server that are stopped until they are continued."""

    def __init__(self) -> None:
        self._processes: list[int] = []

    def freeze(self, process: int) -> None:
        os.kill(process, signal.SIGSTOP)
        self._processes.append(process)

    def thaw(self) -> None:
        while self._processes:
            os.kill(self._processes.pop(), signal.SIGCONT)


class PostgresServer:
    """A server with an empty database on a port of loopback, and without durability."""

    def __init__(self) -> None:
        programs = folder_of_programs()
        # Not in pytest's folder, which only its owner may enter: PostgreSQL refuses to run as root.
        self._folder = tempfile.TemporaryDirectory()
        user = "nobody" if os.getuid() == 0 else None
        if user:
            shutil.chown(self._folder.name, user)
        data = Path(self._folder.name, "data")
        subprocess.run(
            [programs / "initdb", "--no-sync", "--auth=trust", "--username=tester", "-D", data],
            check=True, stdout=subprocess.DEVNULL, user=user,
        )  # fmt: skip
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
        options = [text for name, value in settings.items() for text in ("-c", f"{name}={value}")]
        self._process = subprocess.Popen(
            [programs / "postgres", "-D", data, "-p", str(self.port), *options],
            stderr=subprocess.DEVNULL, user=user,
        )  # fmt: skip

    @property
    def url(self) -> str:
        return f"postgresql://tester@127.0.0.1:{self.port}/postgres"

    def accepts_connections(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.url).close()
            return True
        return False

    def stop(self) -> None:
        """End it at once."""
        self._process.send_signal(signal.SIGQUIT)  # without waiting for clients
        self._process.wait()
        self._folder.cleanup()
