"""The dashboard served by uvicorn in its own thread, or mounted in Starlette."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from resilience import CircuitBreaker, events
from resilience.integrations.dashboard import Dashboard, aserve, serve
from tests.conftest import World
from tests.integrations.dashboard.requests import is_subscribed, served
from tests.integrations.servers import PATIENCE, asgi_service


def get(url: str, method: str = "GET", **headers: str) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=PATIENCE) as client:
        return client.request(method, url, headers=headers)


@contextlib.contextmanager
def updates(url: str) -> Iterator[Iterator[Any]]:
    """The updates of an open stream."""
    with httpx.Client(trust_env=False, timeout=PATIENCE) as client, client.stream("GET", f"{url}events") as response:
        data = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        yield (it for it in map(json.loads, data) if "now" in it)


# --- served ----------------------------------------------------------------------------------


def test_the_dashboard_is_served_on_the_loopback_address() -> None:
    """Under its names, in a daemon thread that ends with `close`."""
    breaker = CircuitBreaker(name="db")
    with served(breaker) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert repr(server) == f"<dashboard at {server.url}>"
        port = urlsplit(server.url).port
        assert get(server.url).status_code == 200
        assert get(f"http://localhost:{port}/state").json()["now"]["circuits"][0]["name"] == "db"
        refused = get(server.url, Host="rebound.example")
        assert (refused.status_code, refused.text) == (421, "this host name is not one of allowed_hosts\n")
        refused = get(server.url, "DELETE")
        assert (refused.status_code, refused.text) == (405, "the dashboard is read-only\n")
        (thread,) = [it for it in threading.enumerate() if it.name == "resilience-dashboard"]
        assert thread.daemon
    assert not thread.is_alive()
    server.close()  # again
    with pytest.raises(httpx.ConnectError):
        get(server.url)
    assert not is_subscribed(events.CircuitChanged)


def test_open_streams_do_not_delay_closing() -> None:
    """A page that is left open does not keep the server's thread."""
    server = serve(port=0, interval=30)
    with updates(server.url) as stream:
        next(stream)
        server.close()
        with pytest.raises(httpx.ConnectError):
            get(server.url)
        assert not list(stream)  # ended, not broken off


def test_a_viewer_beyond_the_bound_is_asked_to_come_later() -> None:
    """One that leaves makes room: the server detects the closed connection."""
    app = Dashboard(interval=0.1, max_viewers=1)
    with asgi_service(app) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
        connection.request("GET", "/events")
        response = connection.getresponse()
        response.readline()
        with httpx.stream("GET", f"{url}/events") as refused:
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        response.close()
        connection.close()
        patience, status = time.monotonic() + PATIENCE, 0
        while status != 200:
            assert time.monotonic() < patience
            with httpx.stream("GET", f"{url}/events") as answer:
                status = answer.status_code
    app.close()


def test_an_address_in_use_is_an_error_in_the_caller() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use") as caught:
        serve(port=taken.getsockname()[1])
    assert not is_subscribed(events.CircuitChanged), caught  # `caught` holds the traceback, and all that it refers to


def test_the_address_and_the_host_names_can_be_set() -> None:
    with served(host="127.0.0.2") as server:
        assert get(server.url).status_code == 200
    with served(allowed_hosts=["dashboard.internal"]) as server:
        assert get(server.url).status_code == 421
        assert get(server.url, Host="dashboard.internal").status_code == 200


async def test_aserve_runs_until_it_is_cancelled(tasks_world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: aserve(port=port))
        status = 0
        while status != 200:
            with contextlib.suppress(httpx.ConnectError):
                status = (await anyio.to_thread.run_sync(get, f"http://127.0.0.1:{port}/")).status_code
            await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    assert not [it for it in threading.enumerate() if it.name == "resilience-dashboard"]


def test_without_uvicorn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `serve` needs it."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ImportError, match=r"resilience-pipeline\[dashboard\]"):
        serve()


def test_the_dashboard_can_be_mounted_in_a_framework() -> None:
    """Under a prefix, to which the path without its slash is redirected."""
    breaker = CircuitBreaker(name="db")
    app = Dashboard(breaker)
    with asgi_service(Starlette(routes=[Mount("/resilience", app)])) as url:
        assert "<title>resilience</title>" in get(f"{url}/resilience/").text
        assert get(f"{url}/resilience/state").json()["now"]["circuits"][0]["name"] == "db"
        assert get(f"{url}/resilience").headers["location"].endswith("resilience/")
        assert get(f"{url}/state").status_code == 404
    app.close()
