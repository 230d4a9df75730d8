"""Headless Chromium, driven over the DevTools protocol: the state of a page, and its errors.

async with browser(program("chromium"), folder) as chromium:
    page = await chromium.open("http://127.0.0.1:8765/")
    await page.until("document.title === 'ready'")
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

#: Seconds after which a wait for the browser fails.
PATIENCE = 60.0

_FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-port=0
""".split()


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.complaints: list[str] = []  # errors and warnings of the console, violations of the CSP, exceptions

    async def read(self) -> None:
        """Receive the messages of the browser until it ends."""
        async for received in self._socket:
            message = json.loads(received.data)
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            else:
                self._record(message["method"], message["params"])

    def _record(self, method: str, params: Any) -> None:
        if method == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning", "assert"}:
            self.complaints.append(f"console: {[it.get('value') for it in params['args']]}")
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {params['exceptionDetails']}")
        elif method == "Log.entryAdded":
            self.complaints.append(f"log: {params['entry']['text']}")
        elif method == "Audits.issueAdded":
            self.complaints.append(f"issue: {params['issue']}")

    async def close(self) -> None:
        """Close the connection, which would otherwise be closed by the garbage collector, with a warning."""
        await self._socket.close()

    async def ask(self, method: str, **params: Any) -> Any:
        """Send a command and return its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        message = await asyncio.wait_for(answer, PATIENCE)
        assert "error" not in message, message
        return message["result"]

    async def value(self, script: str) -> Any:
        """Evaluate an expression in the page."""
        result = await self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait for an expression to be true, and return it."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while not (value := await self.value(script)):
            text = await self.value("document.body?.innerText")
            assert asyncio.get_running_loop().time() < deadline, f"never {script}; {self.complaints}\n{text}"
            await asyncio.sleep(0.05)
        return value

    async def emulate(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size and the colour scheme of the screen."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[scheme])
        await self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )


class Chromium:
    """A running browser."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self._session = session
        self._port = port
        self._pages: list[tuple[Page, asyncio.Task[None]]] = []

    async def open(self, url: str) -> Page:
        """Open a page in a new tab."""
        async with self._session.put(f"http://127.0.0.1:{self._port}/json/new?about:blank") as response:
            target = await response.json()
        page = Page(await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0))
        self._pages.append((page, asyncio.create_task(page.read())))
        for domain in ("Page", "Runtime", "Log", "Audits"):
            await page.ask(f"{domain}.enable")
        await page.ask("Page.navigate", url=url)
        return page

    async def close(self) -> None:
        for page, reading in self._pages:
            reading.cancel()
            await asyncio.wait([reading])
            await page.close()


@contextlib.asynccontextmanager
async def browser(path: str, profile: Path) -> AsyncIterator[Chromium]:
    """Run Chromium with an empty profile. Under asyncio."""
    command = [path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
    try:
        port = await _port_of(profile, process)
        async with aiohttp.ClientSession(trust_env=False) as session:
            chromium = Chromium(session, port)
            try:
                yield chromium
            finally:
                await chromium.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its child processes
        process.wait()


async def _port_of(profile: Path, process: subprocess.Popen[bytes]) -> int:
    """Wait until the browser listens, and return the port."""
    file = profile / "DevToolsActivePort"
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while True:
        with contextlib.suppress(FileNotFoundError):
            if "\n" in (text := file.read_text()):
                return int(text.split("\n")[0])
        assert process.poll() is None, "the browser did not start"
        assert asyncio.get_running_loop().time() < deadline, "the browser did not start in time"
        await asyncio.sleep(0.02)
