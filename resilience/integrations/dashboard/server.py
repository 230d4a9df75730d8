"""A server for the dashboard, on the loopback address: `serve` returns once it runs, `aserve` when it is cancelled.

In both cases the server has a thread and an event loop of its own. So it works in blocking programs, under asyncio and
under trio, and it answers even while the program's event loop is blocked, which is when it is needed.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, final

import anyio
import anyio.to_thread

from resilience.integrations._extras import needed_by
from resilience.integrations.dashboard.app import Dashboard

if TYPE_CHECKING:
    import uvicorn

#: Names of the loopback address in the URLs of a browser on this machine.
_LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")

#: Seconds that open streams have at shutdown, and seconds to wait for the server to start, and for its thread to end.
_GRACE: Final = 3
_PATIENCE: Final = 10.0


@final
class Served:
    """A dashboard that is being served; a context manager that closes it.

    :param url: the URL of the page.
    """

    def __init__(self, server: uvicorn.Server, thread: threading.Thread, url: str, dashboard: Dashboard) -> None:
        self._server = server
        self._thread = thread
        self._dashboard = dashboard
        self.url: str = url

    def close(self) -> None:
        """Stop the server, and wait until its thread has ended, 10 s at most. Calling it again is a no-op."""
        self._dashboard.close()
        self._server.should_exit = True
        self._thread.join(_PATIENCE)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<dashboard at {self.url}>"


def serve(
    *policies: Any,
    host: str = "127.0.0.1",
    port: int = 8765,
    allowed_hosts: Iterable[str] | None = None,
    **options: Any,
) -> Served:
    """Serve a dashboard in a daemon thread, and return when the page can be opened.

    :param policies: as for `Dashboard`; so are further keyword arguments.
    :param host: the address to bind to. Only programs on this machine can reach the default. If it is another address,
        everyone who can reach it can see the page: it has no login.
    :param port: the port, 8765 by default; 0 for any free port: see `url` of the returned object.
    :param allowed_hosts: the names that requests may use for the host: by default those of the loopback address, and
        `host`. Requests with other names are refused, so that other sites cannot read the page by DNS rebinding.
    :raises OSError: if the address cannot be bound to.
    :raises ImportError: if uvicorn is not installed (`pip install 'resilience-pipeline[dashboard]'`).
    """
    with needed_by("dashboard"):
        import uvicorn
    name = f"[{host}]" if ":" in host else host
    dashboard = Dashboard(*policies, allowed_hosts=allowed_hosts or (*_LOOPBACK, name), **options)
    try:  # in the caller's thread, so that the caller gets the error
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except BaseException:
        dashboard.close()
        raise
    config = uvicorn.Config(
        dashboard,
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), name="resilience-dashboard", daemon=True)
    url = f"http://{name}:{listening.getsockname()[1]}/"
    thread.start()
    deadline = time.monotonic() + _PATIENCE
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.005)
    return Served(server, thread, url, dashboard)


async def aserve(*policies: Any, **options: Any) -> None:
    """Serve a dashboard as `serve` does, until this task is cancelled, under asyncio or trio.

    Start it as one of the tasks of your program: `tasks.start_soon(aserve, pipeline)`.
    """
    served = serve(*policies, **options)
    try:
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(served.close)
