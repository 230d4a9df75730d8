"""A real server for an ASGI application of a test: uvicorn, on a loopback port.

    with asgi_service(app) as url: ...

`exchange(url, data)` sends raw bytes, and returns all bytes that the server sends before it closes the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import uvicorn

#: Seconds after which a wait for a server fails.
PATIENCE: Final = 20.0


class _Uvicorn(uvicorn.Server):
    """uvicorn that checks every 5 ms whether to exit, not every 100 ms, because tests run hundreds of servers."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(0.005)


@contextlib.contextmanager
def asgi_service(app: Any) -> Iterator[str]:
    """Serve an ASGI application with uvicorn, in its own thread."""
    config = uvicorn.Config(app, port=0, lifespan="off", log_config=None, http="h11", ws="none")
    server = _Uvicorn(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + PATIENCE
        while not server.started:
            assert thread.is_alive(), "uvicorn did not start"
            assert time.monotonic() < deadline, "uvicorn did not start in time"
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)


def exchange(url: str, data: bytes) -> bytes:
    """Send bytes, and return all bytes that the server sends before it closes the connection."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE) as connection:
        connection.sendall(data)
        received = b""
        while piece := connection.recv(65536):
            received += piece
    return received
