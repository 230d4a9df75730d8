"""The dashboard as a browser meets it: served by uvicorn, mounted in Starlette, looked at in headless Chromium."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from resilience import Bulkhead, CircuitBreaker, Fallback, Policy, Retry, events
from resilience.integrations.dashboard import Dashboard, Served, aserve, serve
from tests.conftest import Boom, World
from tests.integrations.browser import Page, browser
from tests.integrations.conftest import program
from tests.integrations.services import PATIENCE, asgi_service

#: A name, and a message, that would do something in a page that took them for markup.
MARKUP = "<img src=x onerror=\"document.title='owned'\">"


def fail(message: str = "reset") -> Callable[[Any], None]:
    def fn(ctx: Any) -> None:
        raise Boom(message)

    return fn


@contextlib.contextmanager
def served(*policies: Any, **options: Any) -> Iterator[Served]:
    with serve(*policies, **{"port": 0, "interval": 0.1, **options}) as it:
        yield it


def get(url: str, **headers: str) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=PATIENCE) as client:
        return client.get(url, headers=headers)


@contextlib.contextmanager
def updates(url: str) -> Iterator[Iterator[Any]]:
    """The updates of an open stream."""
    with httpx.Client(trust_env=False, timeout=PATIENCE) as client, client.stream("GET", f"{url}events") as response:
        data = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        yield (it for it in map(json.loads, data) if "now" in it)


# --- served ----------------------------------------------------------------------------------


def test_it_is_served_on_this_machine_only() -> None:
    """On the loopback address, under its names, in a daemon thread that ends with `close`."""
    with served(CircuitBreaker(name="db")) as it:
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
    assert not events.is_heard(events.CircuitChanged, None)


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


def test_a_viewer_who_is_gone_is_not_kept() -> None:
    """The server notices that he has closed the connection."""
    app = Dashboard(interval=0.1)
    with asgi_service(app) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
        connection.request("GET", "/events")
        response = connection.getresponse()
        response.readline()
        assert app._watch.viewers == 1
        response.close()
        connection.close()
        anyio.run(_until, lambda: app._watch.viewers == 0)
    app.close()


async def _until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(PATIENCE):
        while not holds():
            await anyio.sleep(0.01)


def test_an_address_that_is_taken_is_told_to_the_caller() -> None:
    """As the error that it is, and nothing is left behind."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        serve(port=taken.getsockname()[1])
    assert not events.is_heard(events.CircuitChanged, None)


def test_another_address_is_allowed_under_its_own_name() -> None:
    """Whoever binds to another one, or names hosts, means it."""
    with served(host="127.0.0.2") as it:
        assert get(it.url).status_code == 200
    with served(allowed_hosts=["dashboard.internal"]) as it:
        assert get(it.url).status_code == 421
        assert get(it.url, Host="dashboard.internal").status_code == 200


def test_it_runs_beside_other_tasks(tasks_world: World) -> None:
    """Under asyncio and trio, until it is cancelled."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: aserve(port=port))
            status = 0
            while status != 200:
                with contextlib.suppress(httpx.ConnectError):
                    status = (await anyio.to_thread.run_sync(get, f"http://127.0.0.1:{port}/")).status_code
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        assert not [it for it in threading.enumerate() if it.name == "resilience-dashboard"]

    tasks_world.run(main)


def test_without_uvicorn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `serve` needs it."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ImportError, match=r"resilience-pipeline\[dashboard\]"):
        serve()


def test_it_is_mounted_in_a_framework() -> None:
    """Under a prefix; without the slash at its end it leads there."""
    app = Dashboard(CircuitBreaker(name="db"))
    with asgi_service(Starlette(routes=[Mount("/resilience", app)])) as url:
        assert "<title>resilience</title>" in get(f"{url}/resilience/").text
        assert get(f"{url}/resilience/state").json()["now"]["circuits"][0]["name"] == "db"
        assert get(f"{url}/resilience").headers["location"].endswith("resilience/")
        assert get(f"{url}/state").status_code == 404
    app.close()


# --- in a browser ----------------------------------------------------------------------------


def in_browser(folder: Path, main: Callable[[Callable[..., Any]], Any]) -> None:
    """Run `async def main(open)` with a browser. What the page complained about fails the test."""

    async def with_browser() -> None:
        pages: list[Page] = []
        async with browser(program("chromium"), folder) as chromium:

            async def open(url: str) -> Page:
                pages.append(await chromium.open(url))
                return pages[-1]

            await main(open)
            assert [page.complaints for page in pages] == [[]] * len(pages)

    asyncio.run(with_browser())


def test_a_circuit_opens_before_ones_eyes(tmp_path: Path) -> None:
    """State, log, rates and bulkheads follow without a reload; text is text; nothing complains."""
    breaker, bulkhead = CircuitBreaker(2, open_for=60, name=MARKUP), Bulkhead(4, name="pool")
    pipeline = Policy.wrap(Fallback("x"), breaker, bulkhead, name=f"shop {MARKUP}")

    async def main(open: Callable[..., Any]) -> None:
        page = await open(it.url)
        await page.until("document.querySelector('.card[data-state=closed]') !== null")
        await page.until("document.getElementById('link-text').textContent === 'live'")
        assert await page.value("document.getElementById('summary').textContent") == "The circuit is closed"
        await page.value("window.stays = true")
        for _ in range(5):
            pipeline.call(fail(MARKUP))
        await page.until("document.querySelector('.card[data-state=open]') !== null")
        with bulkhead.slot():
            await page.until("document.querySelector('.meter[role=meter]').getAttribute('aria-valuenow') === '1'")
        assert await page.value("document.querySelector('#circuits .name').textContent") == MARKUP
        assert "A probe may go in" in await page.value("document.querySelector('#circuits .why').textContent")
        await page.until("document.querySelector('#log').textContent.includes('closed -> open')")
        await page.until("document.querySelector('#log').textContent.includes('CircuitOpen')")
        assert MARKUP in await page.value("document.querySelector('#log').textContent")
        assert await page.value("document.title") == "1 circuit open · shop & co"
        await page.until("document.querySelector('.rate[data-key=rejections] .total').textContent === '3 in all'")
        assert await page.value("document.querySelector('#pipelines .name').textContent") == f"shop {MARKUP}"
        breaker.close()
        await page.until("document.querySelector('.card[data-state=closed]') !== null")
        assert await page.value("document.images.length") == 0
        assert await page.value("window.stays") is True

    with served(pipeline, title="shop & co") as it:
        in_browser(tmp_path, main)


def test_the_page_can_be_paused_and_comes_back_by_itself(tmp_path: Path) -> None:
    """By the keyboard; and when the server has gone it says so, and goes on when there is another one."""
    breaker = CircuitBreaker(1, name="db")
    seen: list[Page] = []

    async def main(open: Callable[..., Any]) -> None:
        it = await asyncio.to_thread(serve, breaker, port=0, interval=0.1)
        port = urlsplit(it.url).port
        page = await open(it.url)
        seen.append(page)
        await page.until("document.querySelector('.card[data-state=closed]') !== null")
        await page.value("document.getElementById('pause').focus()")
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        await page.ask("Input.dispatchKeyEvent", type="keyDown", **key)
        await page.ask("Input.dispatchKeyEvent", type="keyUp", **key)
        await page.until("document.getElementById('pause').getAttribute('aria-pressed') === 'true'")
        breaker.isolate()
        await page.until("latest.circuits[0].state === 'isolated'")
        assert await page.value("document.querySelector('.card').dataset.state") == "closed"
        await page.value("document.getElementById('pause').click()")
        await page.until("document.querySelector('.card[data-state=isolated]') !== null")
        await asyncio.to_thread(it.close)
        await page.until("document.getElementById('link-text').textContent === 'no connection'")
        breaker.close()
        it = await asyncio.to_thread(serve, breaker, port=port, interval=0.1)
        await page.until("document.querySelector('.card[data-state=closed]') !== null")
        await page.until("document.getElementById('link-text').textContent === 'live'")
        assert await page.value("document.querySelectorAll('.row').length") == 0, "another process, another log"
        await asyncio.to_thread(it.close)
        page.complaints.clear()  # the browser notes each connection that was refused

    in_browser(tmp_path, main)


@pytest.mark.parametrize("width", [320, 360, 800, 1600])
def test_the_page_fits_any_screen(look: Callable[..., Any], width: int) -> None:
    """Nothing has to be scrolled sideways, whatever names are like; and it is dark where dark is wanted."""
    for dark in (False, True):
        wide, background = look(width, dark)
        assert wide <= width
        assert (background < 128) == dark


@pytest.fixture(scope="module")
def look(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`look(width, dark)` is how wide the page gets there, and how bright its background is."""
    long = "payments-" * 30
    pipeline = Policy.wrap(Retry(2, backoff=[0]), CircuitBreaker(1, name=long), Bulkhead(2, name=long), name=long)
    found: dict[tuple[int, bool], tuple[int, int]] = {}

    async def main(open: Callable[..., Any]) -> None:
        page = await open(it.url)
        pipeline.capture(fail())
        CircuitBreaker(1, name="breaker").capture(lambda ctx: 1 / 0)
        await page.until("document.querySelectorAll('.row').length > 0")
        for width in (320, 360, 800, 1600):
            for dark in (False, True):
                await page.look(width, 800, dark=dark)
                wide = await page.value("document.documentElement.scrollWidth")
                colour = await page.value("getComputedStyle(document.documentElement).backgroundColor")
                found[width, dark] = wide, int(colour.removeprefix("rgb(").split(",")[0])

    with served(pipeline, title=long) as it:
        in_browser(tmp_path_factory.mktemp("profile"), main)
    return lambda width, dark: found[width, dark]
