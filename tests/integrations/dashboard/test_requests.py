"""Responses and refusals of the dashboard."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from typing import Any

import pytest

from tests.integrations.dashboard.requests import Make, Viewer, ask


async def test_the_page_may_run_nothing_but_its_own_script(make: Make) -> None:
    """One document without external references; the policy names its style and script by their hashes."""
    answer = await ask(make(title="<b>Ada & Bob</b>"))
    page = answer.body.decode()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>&lt;b&gt;Ada &amp; Bob&lt;/b&gt;</title>" in page
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page)
    assert "innerHTML" not in page
    policy = dict(it.strip().split(" ", 1) for it in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert policy[f"{tag}-src"] == f"'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'"


@pytest.mark.parametrize("path", ["/", "/events", "/state", "/nowhere"])
async def test_every_response_has_protective_headers(make: Make, path: str) -> None:
    """No sniffing, no framing, no cache; HEAD has the status and headers of GET, and no body."""
    app = make()

    async with Viewer(app) as viewer:
        await viewer.until(lambda it: it.status > 0)
        get = viewer.answer if path == "/events" else await ask(app, path)
        head = await ask(app, path, "HEAD")
    assert head.body == b""
    assert head.status == get.status
    assert head.headers["content-type"] == get.headers["content-type"]
    for answer in (get, head):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cache-control"] == "no-store"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/", "/events", "/state"])
async def test_other_methods_are_refused(make: Make, path: str, method: str) -> None:
    answer = await ask(make(), path, method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("path", "root", "status"),
    [
        ("/", "", 200),
        ("/monitor/", "/monitor", 200),  # newer frameworks: the path includes the prefix
        ("/", "/monitor", 200),  # older ones: the prefix is cut off
        ("/monitor/state", "/monitor", 200),
        ("/monitor/state", "/monitor/", 200),
        ("/state", "/monitor", 200),
        ("/monitor", "/monitor", 307),
        ("/monitoring", "/monitor", 404),
        ("/state/", "", 404),
        ("/page.js", "", 404),
        ("/../state", "", 404),
    ],
)
async def test_the_dashboard_can_be_mounted_under_a_prefix(make: Make, path: str, root: str, status: int) -> None:
    """A framework may leave the prefix in the path or cut it off."""
    answer = await ask(make(), path, root=root)
    assert answer.status == status
    if status == 307:
        assert answer.headers["location"] == "monitor/"


LOCAL = ["localhost", "127.0.0.1", "[::1]"]


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        (None, "anything.example", 200),
        (None, "", 200),
        (["*"], "anything.example", 200),
        *((LOCAL, it, 200) for it in ("localhost:8765", "LOCALHOST", "127.0.0.1:1", "[::1]:8765", "[::1]")),
        *((["localhost"], it, 421) for it in ("rebound.example:8765", "localhost.evil.example", "")),
        ([], "localhost", 421),
    ],
)
@pytest.mark.parametrize("path", ["/", "/state", "/events"])
async def test_only_allowed_hosts_are_answered(make: Make, path: str, allowed: Any, host: str, status: int) -> None:
    """A page elsewhere whose name resolves to this address cannot read it."""
    assert (await ask(make(allowed_hosts=allowed), path, "HEAD", host=host)).status == status


async def test_other_asgi_scopes_are_answered(make: Make) -> None:
    """A lifespan is completed, a websocket is refused, and another one is an error."""
    app = make()

    async def talk(kind: str, *messages: str) -> list[str]:
        waiting = [{"type": it} for it in messages]
        sent: list[str] = []

        async def receive() -> Any:
            return waiting.pop(0)

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await app({"type": kind}, receive, send)
        return sent

    ends = ("lifespan.startup", "lifespan.shutdown")
    assert await talk("lifespan", *ends) == [f"{it}.complete" for it in ends]
    assert await talk("websocket", "websocket.connect") == ["websocket.close"]
    with pytest.raises(ValueError, match="answers http, not 'mail'"):
        await talk("mail")
