"""The dashboard served by uvicorn, in a thread of its own or mounted in Starlette."""

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
from tests.integrations.dashboard.requests import fail, heard, served
from tests.integrations.services import PATIENCE, asgi_service


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


@pytest.mark.parametrize("method", ["POST", "DELETE", "OPTIONS"])
def test_a_refusal_says_why(method: str) -> None:
    """All of it: a server ends the connection where a body is shorter than its header says."""
    with served() as it:
        response = get(it.url, method)
        assert (response.status_code, response.text) == (405, "the dashboard is read-only\n")
        response = get(it.url, method, host="evil.example")
        assert (response.status_code, response.text) == (421, "this host name is not one of allowed_hosts\n")


def test_it_is_served_on_this_machine_only() -> None:
    """On the loopback address, under its names, in a daemon thread that ends with `close`."""
    breaker = CircuitBreaker(name="db")
    with served(breaker) as it:
        assert it.url.startswith("http://127.0.0.1:")
        assert repr(it) == f"<dashboard at {it.url}>"
        port = urlsplit(it.url).port
        assert get(it.url).status_code == 200
        assert get(f"http://localhost:{port}/state").json()["now"]["circuits"][0]["name"] == "db"
        assert get(it.url, Host="rebound.example").status_code == 421
        (thread,) = [it for it in threading.enumerate() if it.name == "resilience-dashboard"]
        assert thread.daemon
    assert not thread.is_alive()
    it.close()  # again
    with pytest.raises(httpx.ConnectError):
        get(it.url)
    assert not heard(events.CircuitChanged)


def test_a_stream_goes_on_over_a_real_connection() -> None:
    """A circuit opens, and the viewer is told."""
    breaker = CircuitBreaker(1, name="db")
    with served(breaker) as it, updates(it.url) as stream:
        assert next(stream)["now"]["circuits"][0]["state"] == "closed"
        breaker.capture(fail())
        states = [next(update for update in stream if update["rows"])["rows"][0]["kind"]]
        assert states == ["circuit_changed"]


def test_open_streams_do_not_hold_up_the_end() -> None:
    """A page that is left open does not keep the server's thread."""
    it = serve(port=0, interval=30)
    with updates(it.url) as stream:
        next(stream)
        it.close()
        with pytest.raises(httpx.ConnectError):
            get(it.url)
        assert not list(stream)  # it was ended, not broken off


def test_a_viewer_that_has_gone_makes_room() -> None:
    """The server notices that he has closed the connection."""
    app = Dashboard(interval=0.1, max_viewers=1)
    with asgi_service(app) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
        connection.request("GET", "/events")
        response = connection.getresponse()
        response.readline()
        with httpx.stream("GET", f"{url}/events") as refused:
            assert refused.status_code == 503
        response.close()
        connection.close()
        patience, status = time.monotonic() + PATIENCE, 0
        while status != 200:
            assert time.monotonic() < patience
            with httpx.stream("GET", f"{url}/events") as answer:
                status = answer.status_code
    app.close()


def test_an_address_that_is_taken_is_an_error_for_the_caller() -> None:
    """As the error that it is, and nothing is left behind."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use") as caught:
        serve(port=taken.getsockname()[1])
    assert not heard(events.CircuitChanged), caught  # held, and what its traceback holds


def test_another_address_is_allowed_under_its_own_name() -> None:
    """Whoever binds to another one, or names hosts, means it."""
    with served(host="127.0.0.2") as it:
        assert get(it.url).status_code == 200
    with served(allowed_hosts=["dashboard.internal"]) as it:
        assert get(it.url).status_code == 421
        assert get(it.url, Host="dashboard.internal").status_code == 200


async def test_it_runs_beside_other_tasks(tasks_world: World) -> None:
    """Under asyncio and trio, until it is cancelled."""
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


def test_without_uvicorn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `serve` needs it."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ImportError, match=r"resilience-pipeline\[dashboard\]"):
        serve()


def test_it_is_mounted_in_a_framework() -> None:
    """Under a prefix; without the slash at its end it leads there."""
    breaker = CircuitBreaker(name="db")
    app = Dashboard(breaker)
    with asgi_service(Starlette(routes=[Mount("/resilience", app)])) as url:
        assert "<title>resilience</title>" in get(f"{url}/resilience/").text
        assert get(f"{url}/resilience/state").json()["now"]["circuits"][0]["name"] == "db"
        assert get(f"{url}/resilience").headers["location"].endswith("resilience/")
        assert get(f"{url}/state").status_code == 404
    app.close()
