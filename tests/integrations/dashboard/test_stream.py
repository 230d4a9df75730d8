"""The stream of server-sent events."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from resilience import CircuitBreaker
from resilience.integrations.dashboard import app as app_module
from resilience.integrations.dashboard.app import STREAM_LASTS
from tests.conftest import FakeClock, World
from tests.integrations.dashboard.requests import Make, Viewer, has_room, scope, viewing


async def test_a_stream_begins_with_the_whole_state_and_continues_with_changes(tasks_world: World, make: Make) -> None:
    """Each row is sent once, when it occurs."""
    breaker = CircuitBreaker(name="db")
    app = make(breaker, max_viewers=1)
    breaker.isolate()
    async with viewing(app) as viewer:
        breaker.close()
        await viewer.until(lambda it: len(it.rows()) > 1)
        answer = viewer.answer
        assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.sent()[0] == {"retry": "1000"}
        assert [row["number"] for row in answer.rows()] == [1, 2]
        assert answer.updates()[0]["now"]["circuits"][0]["state"] == "isolated"
        assert answer.updates()[-1]["now"]["circuits"][0]["state"] == "closed"
    assert await has_room(app)


async def test_a_viewer_that_reconnects_gets_all_rows_again(make: Make) -> None:
    """So it makes no difference which process, or which fork, it reconnects to."""
    breaker = CircuitBreaker(name="db")
    app = make(breaker)
    breaker.isolate()
    for count in (1, 2):
        async with viewing(app) as viewer:
            assert [row["number"] for row in viewer.answer.rows()] == list(range(1, count + 1))
        breaker.close()


@pytest.mark.parametrize("interval", [0.1, 3600.0])
@pytest.mark.parametrize("is_closed", [False, True])
async def test_a_stream_ends_with_its_dashboard(make: Make, clock: FakeClock, interval: float, is_closed: bool) -> None:
    """Without waiting for the next update. A server that shuts down need not wait for it; browsers reconnect."""
    app = make(interval=interval)
    async with viewing(app) as viewer:
        if is_closed:
            app.close()
        else:
            clock.advance(STREAM_LASTS)
        await viewer.until(lambda it: it.is_whole)
        assert not viewer._leaves.is_set()


async def test_a_comment_keeps_a_stream_without_news_alive(make: Make, clock: FakeClock) -> None:
    """After some seconds; the earlier update is not sent again."""
    app = make()
    async with viewing(app):
        pass
    clock.advance(100)  # every second that is shown had a viewer and no event
    async with viewing(app) as viewer:
        await anyio.sleep(0.3)
        assert viewer.answer.body.endswith(b"}\n\n")
        clock.advance(6)
        await viewer.until(lambda it: it.body.endswith(b"\n\n: nothing new\n\n"))
        assert len(viewer.answer.updates()) == 1


async def test_a_slow_viewer_delays_neither_calls_nor_other_viewers(make: Make) -> None:
    """While it does not read, the dashboard buffers no more than one update for it."""
    breaker = CircuitBreaker(name="db")
    app = make(breaker, keep=10)

    class Slow(Viewer):
        reads = anyio.Event()

        async def take(self, message: Any) -> None:
            if b"update" in message.get("body", b""):
                await self.reads.wait()
            await super().take(message)

    Slow.reads = anyio.Event()
    async with Slow(app) as slow, Viewer(app) as quick:
        await quick.until(lambda it: bool(it.updates()))
        for _ in range(100):
            breaker.isolate()
            breaker.close()
        await quick.until(lambda it: bool(it.rows()) and it.rows()[-1]["number"] == 200)
        assert not slow.answer.updates()
        Slow.reads.set()
        await slow.until(lambda it: bool(it.rows()) and it.rows()[-1]["number"] == 200)
        assert len(slow.answer.rows()) <= 10


@pytest.mark.parametrize("how", ["an error", "no end"])
async def test_a_viewer_to_whom_nothing_can_be_sent_is_disconnected(
    tasks_world: World, make: Make, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Some servers report a viewer who has left with an error; a sleeping laptop keeps its connection for hours.

    Neither keeps its place, or the server's task.
    """
    monkeypatch.setattr(app_module, "STREAM_LASTS", 0.1)
    monkeypatch.setattr(app_module, "STALLS", 0.1)
    app = make(max_viewers=1)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            if how == "an error":
                raise ConnectionResetError("gone")
            await anyio.sleep_forever()

    with anyio.fail_after(10):
        await app(scope("/events"), anyio.sleep_forever, send)
    assert await has_room(app)
