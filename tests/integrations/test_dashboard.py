"""The dashboard as an ASGI application, called by hand: what it tells, when it listens, what it refuses."""

from __future__ import annotations

import gc
import json
import re
import threading
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator
from hashlib import sha256
from typing import Any

import anyio
import pytest

from resilience import Bulkhead, CircuitBreaker, Context, Fallback, Policy, Retry, events
from resilience.integrations.dashboard import Dashboard
from resilience.integrations.dashboard.app import _STREAM_LASTS
from resilience.integrations.dashboard.rates import MOST_PIPELINES, RATES
from resilience.integrations.dashboard.state import MOST
from resilience.integrations.dashboard.watch import LINGER
from resilience.integrations.http import PerHost
from tests.conftest import Boom, FakeClock, World

SECRET = "hunter2"


class Answer:
    """What the application sent in answer to one request."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_whole = False

    async def take(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            assert len(self.headers) == len(message["headers"]), "no header twice"
        else:
            self.body += message["body"]
            self.is_whole = not message.get("more_body", False)

    def sent(self) -> list[dict[str, str]]:
        """The server-sent events so far, as the fields of each."""
        blocks = [block for block in self.body.decode().split("\n\n")[:-1] if not block.startswith(":")]
        return [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]

    def updates(self) -> list[Any]:
        return [json.loads(it["data"]) for it in self.sent() if it.get("event") == "update"]

    def rows(self) -> list[Any]:
        return [row for update in self.updates() for row in update["rows"]]


def scope(path: str = "/", method: str = "GET", root: str = "", **headers: str) -> dict[str, Any]:
    fields = {"host": "localhost:8000", **{name.replace("_", "-"): value for name, value in headers.items()}}
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    return {"type": "http", "method": method, "path": path, "root_path": root, "headers": raw}


async def ask(app: Dashboard, path: str = "/", method: str = "GET", root: str = "", **headers: str) -> Answer:
    """Make one request that is answered at once."""
    answer = Answer()
    await app(scope(path, method, root, **headers), anyio.sleep_forever, answer.take)  # type: ignore[arg-type]
    assert answer.is_whole
    return answer


class Viewer:
    """Somebody who has the stream open, for the time of a block."""

    def __init__(self, app: Dashboard, **headers: str) -> None:
        self._app = app
        self._headers = headers
        self.answer = Answer()
        self.has_ended = anyio.Event()

    async def __aenter__(self) -> Viewer:
        self._leaves = anyio.Event()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._look)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self._leaves.set()
        with anyio.fail_after(10):
            await self.has_ended.wait()
        await self._tasks.__aexit__(*exc)

    async def _look(self) -> None:
        await self._app(scope("/events", **self._headers), self._receive, self.take)
        self.has_ended.set()

    async def _receive(self) -> Any:
        await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def take(self, message: Any) -> None:
        await self.answer.take(message)

    async def until(self, seen: Callable[[Answer], bool]) -> None:
        with anyio.fail_after(10):
            while not seen(self.answer):
                await anyio.sleep(0.01)


@pytest.fixture
def make() -> Iterator[Callable[..., Dashboard]]:
    """`make(*policies)` is a dashboard with quick updates that is closed after the test."""
    made: list[Dashboard] = []

    def dashboard(*policies: Any, **options: Any) -> Dashboard:
        made.append(Dashboard(*policies, **{"interval": 0.1, **options}))
        return made[-1]

    yield dashboard
    for it in made:
        it.close()


async def told(app: Dashboard) -> Any:
    return json.loads((await ask(app, "/state")).body)


def fail(message: str = SECRET) -> Callable[[Context], None]:
    def fn(ctx: Context) -> None:
        raise Boom(message)

    return fn


def heard(kind: type[events.Event]) -> bool:
    return events.is_heard(kind, None)


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    return anyio.run(main)


# --- what is told ----------------------------------------------------------------------------


def test_the_state_of_circuits_and_bulkheads_is_told(make: Callable[..., Dashboard], clock: FakeClock) -> None:
    """State, time until the next probe, last failure; what runs, what waits, what was refused."""
    breaker = CircuitBreaker(2, open_for=30, name="db")
    bulkhead = Bulkhead(3, queue=2, name="pool")
    pipeline = Policy.wrap(breaker, bulkhead, name="stock")
    app = make(pipeline)

    async def main() -> None:
        for _ in range(3):
            pipeline.capture(fail())
        clock.advance(10)
        with bulkhead.slot():
            now = (await told(app))["now"]
        (circuit,) = now["circuits"]
        assert (circuit["name"], circuit["pipelines"], circuit["state"]) == ("db", ["stock"], "open")
        assert (circuit["retry_after"], circuit["open_for"]) == (20, 30)
        assert (circuit["last_failure"], circuit["opened"], circuit["rejected"]) == ("Boom", 1, 1)
        assert circuit["about"].startswith("opens on ConsecutiveFailures(2) for 30 s")
        (held,) = now["bulkheads"]
        assert [held[it] for it in ("limit", "in_flight", "queue", "queued", "rejected")] == [3, 1, 2, 0, 0]

    run(main)


def test_a_policy_in_two_pipelines_is_shown_once(make: Callable[..., Dashboard]) -> None:
    """With the names of both."""
    breaker = CircuitBreaker(name="db")
    first, second = Policy.wrap(Retry(), breaker, name="read"), Policy.wrap(breaker, name="write")
    (circuit,) = run(lambda: told(make(first, second, first)))["now"]["circuits"]
    assert circuit["pipelines"] == ["read", "write"]


def test_policies_that_are_made_for_each_host_are_shown_as_they_come(make: Callable[..., Dashboard]) -> None:
    """What has a policy for each host is looked into each time."""
    hosts = PerHost(lambda origin: CircuitBreaker(name=origin))
    app = make(hosts)
    assert run(lambda: told(app))["now"]["circuits"] == []
    hosts.for_host("http://a.example")
    (circuit,) = run(lambda: told(app))["now"]["circuits"]
    assert circuit["name"] == "http://a.example:80"


def test_of_very_many_circuits_those_with_trouble_are_shown(make: Callable[..., Dashboard]) -> None:
    """A page can be read, and says how many it leaves out."""
    breakers = [CircuitBreaker(name=f"b{number}") for number in range(MOST + 5)]
    app = make(*breakers)
    breakers[-1].isolate()
    now = run(lambda: told(app))["now"]
    assert len(now["circuits"]) == MOST
    assert now["circuits"][0]["name"] == f"b{MOST + 4}"
    assert now["left_out"] == {"circuits": 5, "bulkheads": 0}


def test_what_went_wrong_before_somebody_looks_is_told(make: Callable[..., Dashboard], clock: FakeClock) -> None:
    """By default: the rows and the counts of everything but executions, which are counted while somebody looks."""
    pipeline = Policy.wrap(
        Fallback("x"), Retry(2, on=Boom, backoff=[0.5]), CircuitBreaker(2, name="db"), name="weather"
    )
    app = make(pipeline)
    pipeline.call(fail(), Context())
    it = run(lambda: told(app))
    kinds = ["retry_scheduled", "circuit_changed", "retry_gave_up", "fallback_used"]
    assert [row["kind"] for row in it["rows"]] == kinds
    assert [row["number"] for row in it["rows"]] == [1, 2, 3, 4]
    assert it["rows"][1]["state"] == "open"
    assert "circuit db: closed -> open" in it["rows"][1]["text"]
    rates = it["now"]["rates"]
    assert {name: rate["total"] for name, rate in rates.items()} == {
        "executions": 0,
        "failures": 0,
        "retries": 1,
        "timeouts": 0,
        "rejections": 0,
        "fallbacks": 1,
    }
    assert set(rates["executions"]["seconds"]) == {None}


def test_equal_events_in_a_row_are_one_row(make: Callable[..., Dashboard], clock: FakeClock) -> None:
    """With a count; later they are another row, so that one sees when it was."""
    breaker = CircuitBreaker(name="db")
    app = make(breaker)
    breaker.isolate()
    for _ in range(50):
        breaker.capture(fail())
    clock.advance(5)
    breaker.capture(fail())
    rows = run(lambda: told(app))["rows"]
    assert [(row["kind"], row["count"]) for row in rows] == [
        ("circuit_changed", 1),
        ("call_rejected", 50),
        ("call_rejected", 1),
    ]


def test_the_log_keeps_so_many_rows(make: Callable[..., Dashboard], clock: FakeClock) -> None:
    """The latest ones, and no memory of the others."""
    breaker = CircuitBreaker(name="db")
    app = make(breaker, keep=3)
    for _ in range(10):
        breaker.isolate()
        breaker.close()
    it = run(lambda: told(app))
    assert [row["number"] for row in it["rows"]] == [18, 19, 20]
    assert len(app._watch._log._latest) <= 3


@pytest.mark.parametrize("messages", [False, True])
def test_no_secret_is_told(make: Callable[..., Dashboard], messages: bool) -> None:
    """Never arguments, results or properties; the messages of errors only where somebody asks for them."""
    pipeline = Policy.wrap(
        Fallback(f"fallback {SECRET}"),
        Retry(2, on=Boom, on_result=lambda value: True, backoff=[0]),
        CircuitBreaker(2, on_result=lambda value: True, name="db"),
        name="p",
    )
    app = make(pipeline, messages=messages)

    async def main() -> bytes:
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            pipeline.execute(lambda ctx: f"result {SECRET}", Context(properties={"token": f"property {SECRET}"}))
            pipeline.call(lambda token: SECRET, f"argument {SECRET}")
            CircuitBreaker(1).capture(fail(f"message {SECRET}"))
            await viewer.until(lambda it: any(row["kind"] == "execution_finished" for row in it.rows()))
            return viewer.answer.body + (await ask(app, "/state")).body

    sent = run(main).decode()
    assert set(re.findall(rf"(\w+) {SECRET}", sent)) == ({"message"} if messages else set())
    assert "Boom" in sent


# --- rates -----------------------------------------------------------------------------------


def test_executions_are_counted_second_by_second_while_somebody_looks(
    make: Callable[..., Dashboard], clock: FakeClock
) -> None:
    """Complete seconds only, and nothing is claimed for the time before."""
    pipeline = Policy.wrap(Retry(1), name="p")
    app = make(pipeline)

    async def main() -> Any:
        pipeline.call(int)  # nobody looks
        clock.advance(10.5)
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            for number in (3, 0, 2):
                for _ in range(number):
                    pipeline.call(int)
                clock.advance(1)
            pipeline.capture(fail())
            return (await told(app))["now"]["rates"]

    rates = run(main)
    assert rates["executions"]["seconds"][-4:] == [None, 3, 0, 2]
    assert len(rates["executions"]["seconds"]) == 59
    assert (rates["executions"]["total"], rates["failures"]["total"]) == (6, 1)


def test_what_happens_is_told_for_each_pipeline(make: Callable[..., Dashboard], clock: FakeClock) -> None:
    """So that executions inside of others can be told from them; as the mean of the last complete seconds."""
    inside = Policy.wrap(Retry(2, on=Boom, backoff=[0]), name="inside")
    outside = Policy.wrap(Fallback("x"), name="outside")
    app = make()

    async def main() -> Any:
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            for _ in range(4):
                for _ in range(3):
                    outside.execute(lambda ctx: inside.execute(fail()))
                clock.advance(1)
            return (await told(app))["now"]

    now = run(main)
    rates = {it["name"]: {name: rate["present"] for name, rate in it["rates"].items()} for it in now["pipelines"]}
    none = dict.fromkeys(RATES, 0.0)
    assert rates == {
        "inside": {**none, "executions": 3.0, "failures": 3.0, "retries": 3.0},
        "outside": {**none, "executions": 3.0, "fallbacks": 3.0},
    }
    assert now["rates"]["executions"]["present"] == 6.0
    assert now["rates"]["executions"]["total"] == 24


def test_of_very_many_pipelines_some_are_told_apart(make: Callable[..., Dashboard]) -> None:
    """Memory is bounded, and the counts of the process are whole."""
    app = make()

    async def main() -> Any:
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            for number in range(MOST_PIPELINES + 10):
                Policy.wrap(Retry(), name=f"p{number}").call(int)
            return (await told(app))["now"]

    now = run(main)
    assert len(now["pipelines"]) == MOST_PIPELINES
    assert now["rates"]["executions"]["total"] == MOST_PIPELINES + 10


def test_no_count_is_lost_between_threads(make: Callable[..., Dashboard]) -> None:
    """Eight threads at once: as many executions and rejections as there were."""
    breaker = CircuitBreaker(name="db")
    app = make(breaker)
    breaker.isolate()

    async def main() -> Any:
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            threads = [threading.Thread(target=lambda: [breaker.capture(fail()) for _ in range(250)]) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                await anyio.to_thread.run_sync(thread.join)
            return await told(app)

    it = run(main)
    totals = {name: rate["total"] for name, rate in it["now"]["rates"].items()}
    assert (totals["executions"], totals["failures"], totals["rejections"]) == (2000, 2000, 2000)
    assert sum(row["count"] for row in it["rows"] if row["kind"] == "call_rejected") == 2000


# --- who listens -----------------------------------------------------------------------------


def test_calls_that_succeed_pay_nothing_while_nobody_looks(make: Callable[..., Dashboard], clock: FakeClock) -> None:
    """The end of executions is heard from the first viewer until a while after the last one."""
    app = make()
    assert not heard(events.ExecutionFinished)
    assert heard(events.CircuitChanged)

    async def main() -> None:
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            assert heard(events.ExecutionFinished)
        for seconds in (0, LINGER - 1, 2):
            assert heard(events.ExecutionFinished)
            clock.advance(seconds)
            Retry().call(int)  # the first execution after the time notices
        assert not heard(events.ExecutionFinished)
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            assert heard(events.ExecutionFinished)

    run(main)


def test_without_a_history_nothing_is_heard_while_nobody_looks(
    make: Callable[..., Dashboard], clock: FakeClock
) -> None:
    """And what was before the first viewer is not known."""
    breaker = CircuitBreaker(name="db")
    app = make(breaker, history=False)
    kinds = (events.CircuitChanged, events.RetryScheduled, events.ExecutionFinished)
    assert not any(map(heard, kinds))
    breaker.isolate()

    async def main() -> None:
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            assert all(map(heard, kinds))
            breaker.close()
            await viewer.until(lambda it: bool(it.rows()))
            assert [row["state"] for row in viewer.answer.rows()] == ["closed"]
        clock.advance(LINGER)
        Retry().call(int)
        assert not any(map(heard, kinds))

    run(main)


def test_a_dashboard_that_is_dropped_or_closed_hears_nothing() -> None:
    """No subscription keeps it alive, or outlives it."""
    app = Dashboard()
    assert heard(events.CircuitChanged)
    del app
    gc.collect()
    assert not heard(events.CircuitChanged)
    Dashboard().close()
    assert not heard(events.CircuitChanged)


def test_policies_are_not_kept_alive(make: Callable[..., Dashboard]) -> None:
    """What the program has dropped is not shown."""
    app = make(Policy.wrap(CircuitBreaker(), name="p"))
    gc.collect()
    assert run(lambda: told(app))["now"]["circuits"] == []


# --- the stream ------------------------------------------------------------------------------


def test_a_stream_tells_all_and_then_what_is_new(tasks_world: World, make: Callable[..., Dashboard]) -> None:
    """Under asyncio and trio: first everything, then each row once, at its time."""
    breaker = CircuitBreaker(name="db")
    app = make(breaker)
    breaker.isolate()

    async def main() -> None:
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            breaker.close()
            await viewer.until(lambda it: len(it.rows()) > 1)
            answer = viewer.answer
            assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["x-accel-buffering"] == "no"
            assert answer.sent()[0] == {"retry": "1000"}
            assert answer.sent()[1]["event"] == "reset"
            assert [row["number"] for row in answer.rows()] == [1, 2]
            assert answer.updates()[0]["now"]["circuits"][0]["state"] == "isolated"
            assert answer.updates()[-1]["now"]["circuits"][0]["state"] == "closed"
        assert app._watch.viewers == 0

    tasks_world.run(main)


def test_who_comes_back_goes_on_where_he_was(make: Callable[..., Dashboard]) -> None:
    """By `Last-Event-ID`. What it says of another process, or rubbish, is a new beginning."""
    breaker = CircuitBreaker(name="db")
    app = make(breaker)
    breaker.isolate()

    async def rows(last: str) -> tuple[bool, list[int], str]:
        async with Viewer(app, last_event_id=last) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            sent = viewer.answer.sent()
            was_reset = any(it.get("event") == "reset" for it in sent)
            return was_reset, [row["number"] for row in viewer.answer.rows()], sent[-1]["id"]

    async def main() -> None:
        was_reset, numbers, last = await rows("")
        assert (was_reset, numbers) == (True, [1])
        assert (await rows(last))[:2] == (False, [])
        breaker.close()
        assert (await rows(last))[:2] == (False, [2])
        for rubbish in ("elsewhere-1", f"{last}x", f"{last}\u00b2", "-", f"{last.split('-')[0]}-"):
            assert (await rows(rubbish))[:2] == (True, [1, 2]), rubbish

    run(main)


def test_a_stream_ends_after_a_while(make: Callable[..., Dashboard], clock: FakeClock) -> None:
    """So a server that shuts down need not wait for it; browsers come back."""
    app = make()

    async def main() -> None:
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            clock.advance(_STREAM_LASTS)
            await viewer.until(lambda it: it.is_whole)
            assert not viewer._leaves.is_set()

    run(main)


def test_a_closed_dashboard_ends_its_streams(make: Callable[..., Dashboard]) -> None:
    """Soon, also where updates are rare."""
    app = make(interval=3600)

    async def main() -> None:
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            app.close()
            await viewer.until(lambda it: it.is_whole)

    run(main)


def test_where_nothing_happens_a_comment_keeps_the_stream_alive(
    make: Callable[..., Dashboard], clock: FakeClock
) -> None:
    """After some seconds; and what was told is not told again."""
    app = make()

    async def main() -> None:
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
        clock.advance(100)  # every second that is shown was watched, and had no event
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            await anyio.sleep(0.3)
            assert viewer.answer.body.endswith(b"}\n\n")
            clock.advance(6)
            await viewer.until(lambda it: it.body.endswith(b"\n\n: nothing new\n\n"))
            assert len(viewer.answer.updates()) == 1

    run(main)


def test_a_slow_reader_costs_nobody_anything(make: Callable[..., Dashboard]) -> None:
    """While one does not read, calls go on, the other is told, and nothing is kept for him but one piece."""
    breaker = CircuitBreaker(name="db")
    app = make(breaker, keep=10)

    class Slow(Viewer):
        reads = anyio.Event()

        async def take(self, message: Any) -> None:
            if b"update" in message.get("body", b""):
                await self.reads.wait()
            await super().take(message)

    async def main() -> None:
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

    run(main)


def test_so_many_may_look_at_a_time(make: Callable[..., Dashboard]) -> None:
    """The next one is told to come again; who leaves makes room."""
    app = make(max_viewers=1)

    async def main() -> None:
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            answer = await ask(app, "/events")
            assert (answer.status, answer.headers["retry-after"]) == (503, "5")
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: it.status == 200)

    run(main)


# --- requests --------------------------------------------------------------------------------


def test_the_page_may_run_nothing_but_its_own_script(make: Callable[..., Dashboard]) -> None:
    """One document without a reference to anything else; the policy names its style and script by their hashes."""
    answer = run(lambda: ask(make(title="<b>Ada & Bob</b>")))
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
def test_every_answer_has_the_headers_that_protect_it(make: Callable[..., Dashboard], path: str) -> None:
    """No sniffing, no framing, no cache; HEAD has the status and headers of GET, and no body."""
    app = make()

    async def main() -> tuple[Answer, Answer]:
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: it.status > 0)
            get = viewer.answer if path == "/events" else await ask(app, path)
            return get, await ask(app, path, "HEAD")

    get, head = run(main)
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
def test_it_is_read_only(make: Callable[..., Dashboard], path: str, method: str) -> None:
    """Any other method is refused, everywhere."""
    answer = run(lambda: ask(make(), path, method))
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("path", "root", "status"),
    [
        ("/", "", 200),
        ("/monitor/", "/monitor", 200),  # newer frameworks: the path is whole
        ("/", "/monitor", 200),  # older ones: it is cut off
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
def test_it_can_be_mounted_anywhere(make: Callable[..., Dashboard], path: str, root: str, status: int) -> None:
    """Paths are those below the mount, in whichever way the framework tells it."""
    answer = run(lambda: ask(make(), path, root=root))
    assert answer.status == status
    if status == 307:
        assert answer.headers["location"] == "monitor/"


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        (None, "anything.example", 200),
        (None, "", 200),
        (["*"], "anything.example", 200),
        (["localhost", "127.0.0.1", "[::1]"], "localhost:8765", 200),
        (["localhost", "127.0.0.1", "[::1]"], "LOCALHOST", 200),
        (["localhost", "127.0.0.1", "[::1]"], "127.0.0.1:1", 200),
        (["localhost", "127.0.0.1", "[::1]"], "[::1]:8765", 200),
        (["localhost", "127.0.0.1", "[::1]"], "[::1]", 200),
        (["localhost"], "rebound.example:8765", 421),
        (["localhost"], "localhost.evil.example", 421),
        (["localhost"], "", 421),
        ([], "localhost", 421),
    ],
)
@pytest.mark.parametrize("path", ["/", "/state", "/events"])
def test_it_answers_under_the_names_that_are_allowed(
    make: Callable[..., Dashboard], path: str, allowed: Any, host: str, status: int
) -> None:
    """A page elsewhere that lets its name point here cannot read along."""
    assert run(lambda: ask(make(allowed_hosts=allowed), path, "HEAD", host=host)).status == status


def test_what_is_no_request_is_answered_as_asgi_says(make: Callable[..., Dashboard]) -> None:
    """A lifespan is completed, a websocket is refused, anything else is a mistake."""
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

    async def main() -> None:
        ends = ("lifespan.startup", "lifespan.shutdown")
        assert await talk("lifespan", *ends) == [f"{it}.complete" for it in ends]
        assert await talk("websocket", "websocket.connect") == ["websocket.close"]
        with pytest.raises(ValueError, match="answers http, not 'mail'"):
            await talk("mail")

    run(main)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"title": 3}, TypeError, "title must be a string, not 3"),
        ({"interval": 0}, ValueError, "interval must be more than zero seconds, not 0"),
        ({"interval": 0.01}, ValueError, "interval must be at least 0.1 s, not 0.01"),
        ({"history": 1}, TypeError, "history must be True or False, not 1"),
        ({"keep": 0}, ValueError, "keep must be at least 1, not 0"),
        ({"messages": "no"}, TypeError, "messages must be True or False, not 'no'"),
        ({"allowed_hosts": "localhost"}, TypeError, "allowed_hosts must be a sequence of names, not 'localhost'"),
        ({"allowed_hosts": [1]}, TypeError, "allowed_hosts must be a sequence of names, not"),
        ({"max_viewers": 0}, ValueError, "max_viewers must be at least 1, not 0"),
    ],
)
def test_wrong_arguments_are_refused(options: Any, kind: type[Exception], message: str) -> None:
    """Where they are written, with the value; and nothing stays subscribed."""
    with pytest.raises(kind, match=message):
        Dashboard(**options)
    with pytest.raises(TypeError, match="policies"):
        Dashboard(print)
    assert not heard(events.CircuitChanged)
