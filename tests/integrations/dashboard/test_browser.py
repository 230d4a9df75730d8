"""The page in headless Chromium."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from resilience import (
    AdaptiveLimit,
    AdaptiveThrottle,
    Bulkhead,
    Cache,
    CircuitBreaker,
    Fallback,
    Policy,
    RateLimiter,
    Retry,
)
from resilience.integrations.dashboard import serve
from tests.integrations.conftest import program
from tests.integrations.dashboard.browser import Page, browser
from tests.integrations.dashboard.requests import fail, served

#: A name, and a message, that would run a script in a page that did not escape them.
MARKUP = "<img src=x onerror=\"document.title='owned'\">"


def in_browser(folder: Path, main: Callable[[Callable[..., Any]], Any]) -> None:
    """Run `async def main(open)` with a browser. A complaint of the page fails the test."""

    async def with_browser() -> None:
        pages: list[Page] = []
        async with browser(program("chromium"), folder) as chromium:

            async def open(url: str) -> Page:
                pages.append(await chromium.open(url))
                return pages[-1]

            await main(open)
            assert [page.complaints for page in pages] == [[]] * len(pages)

    asyncio.run(with_browser())


def test_the_page_shows_an_opening_circuit_without_a_reload(tmp_path: Path) -> None:
    """State, log, rates and the other cards follow; markup in names is shown as text; the console has no error."""
    breaker, bulkhead = CircuitBreaker(2, open_for=60, name=MARKUP), Bulkhead(4, name="pool")
    namesake = AdaptiveLimit(slower_than=60.0, name="pool")
    pipeline = Policy.wrap(Fallback("x"), breaker, bulkhead, namesake, name=f"shop {MARKUP}")

    async def main(open: Callable[..., Any]) -> None:
        page = await open(server.url)
        await page.until("document.querySelector('.card[data-state=closed]') !== null")
        await page.until("document.getElementById('link-text').textContent === 'live'")
        assert await page.value("document.getElementById('summary').textContent") == "The circuit is closed"
        await page.value("window.stays = true")
        facts = "document.querySelector('#circuits .facts').dataset.facts"
        pipeline.execute(fail(MARKUP))
        await page.until(f"{facts} === 'failures 1 of 2;opened 0\\u00d7;refused 0'")
        for _ in range(4):
            pipeline.execute(fail(MARKUP))
        await page.until("document.querySelector('.card[data-state=open]') !== null")
        assert await page.value(facts) == "opened 1\u00d7;refused 3"
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
        assert await page.value("document.querySelectorAll('#bulkheads .card').length") == 2
        cards = "['throttles', 'limiters', 'caches'].map((it) => document.querySelector(`#${it} .facts`).dataset.facts)"
        assert await page.value(cards) == [
            "held back 0 %;accepted 0 of 0;refused 0",
            "waiting 0;next turn 0.0 s;refused 0",
            "answered 0 %;hits 0;stale 0;shared 0;misses 0;size 0",
        ]
        assert await page.value("window.stays") is True

    with served(pipeline, AdaptiveThrottle(), RateLimiter(1), Cache(60.0), title="shop & co") as server:
        in_browser(tmp_path, main)


def test_the_page_can_be_paused_and_reconnects(tmp_path: Path) -> None:
    """It is paused with the keyboard. Without a server it says so, and continues with the next one."""
    breaker = CircuitBreaker(1, name="db")

    async def main(open: Callable[..., Any]) -> None:
        server = await asyncio.to_thread(serve, breaker, port=0, interval=0.1)
        port = urlsplit(server.url).port
        page = await open(server.url)
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
        await asyncio.to_thread(server.close)
        await page.until("document.getElementById('link-text').textContent === 'no connection'")
        breaker.close()
        server = await asyncio.to_thread(serve, breaker, port=port, interval=0.1)
        await page.until("document.querySelector('.card[data-state=closed]') !== null")
        await page.until("document.getElementById('link-text').textContent === 'live'")
        assert await page.value("document.querySelectorAll('.row').length") == 0, "another process, another log"
        await asyncio.to_thread(server.close)
        page.complaints.clear()  # the browser reports each connection that was refused

    in_browser(tmp_path, main)


def test_the_page_fits_any_screen(tmp_path: Path) -> None:
    """It needs no horizontal scrolling with long names, and is dark if the user prefers that."""
    long = "payments" * 30
    pipeline = Policy.wrap(Retry(2, backoff=[0]), CircuitBreaker(1, name=long), Bulkhead(2, name=long), name=long)

    async def main(open: Callable[..., Any]) -> None:
        page = await open(server.url)
        pipeline.capture(fail())
        CircuitBreaker(1, name="breaker").capture(lambda ctx: 1 / 0)
        await page.until("document.querySelectorAll('.row').length > 0")
        for width in (320, 360, 800, 1600):
            for dark in (False, True):
                await page.emulate(width, 800, dark=dark)
                assert await page.value("document.documentElement.scrollWidth") <= width
                colour = await page.value("getComputedStyle(document.documentElement).backgroundColor")
                assert (int(colour.removeprefix("rgb(").split(",")[0]) < 128) == dark

    with served(pipeline, title=long) as server:
        in_browser(tmp_path, main)
