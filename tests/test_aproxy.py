"""Proxies of asynchronous clients: methods that return awaitables or context managers."""

from __future__ import annotations

import asyncio
import inspect
import types
from collections.abc import AsyncIterator, Awaitable, Coroutine, Generator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from resilience import Bulkhead, CircuitBreaker, Fallback, Retry, Timeout
from resilience.errors import BulkheadFull
from tests.clients import Client
from tests.conftest import Boom, Virtual, World, nothing_is_left_unawaited
from tests.functions import quick

# --- aproxy ------------------------------------------------------------------------------------


async def test_aproxy_protects_plain_methods_that_return_awaitables(tasks_world: World) -> None:
    """Each attempt calls the method again. Coroutine functions are protected by both kinds of proxies."""
    client = Client()
    proxy = quick().aproxy(client, "later", "fetch")
    for method in (proxy.later, proxy.fetch, quick().proxy(client).fetch):
        client.failures = 2
        assert await method("a") == "fetch a"
    assert client.calls == [("fetch", "a")] * 9


async def test_the_result_of_an_aproxy_method_works_as_a_coroutine(in_asyncio: World) -> None:
    """For `create_task`, `gather`, `wait_for` and `ensure_future`."""
    client = Client()
    proxy = quick().aproxy(client, "later")
    pending: Any = proxy.later("a")
    assert inspect.isawaitable(pending)
    assert asyncio.iscoroutine(pending)
    assert [
        await asyncio.create_task(pending),
        *await asyncio.gather(proxy.later("b"), proxy.later("c")),
        await asyncio.wait_for(proxy.later("d"), 5.0),
        await asyncio.ensure_future(proxy.later("e")),
    ] == [f"fetch {x}" for x in "abcde"]


@pytest.mark.parametrize("pause", [30, 0])
async def test_a_task_of_an_aproxy_method_can_be_cancelled(in_asyncio: World, pause: float) -> None:
    """The cancellation reaches the client's method, and no policy answers it.

    Between two steps of a task, when it waits for no future, asyncio only throws the cancellation into it.
    """
    log: list[str] = []

    class Hanging:
        def get(self) -> Awaitable[None]:
            return self._get()

        async def _get(self) -> None:
            try:
                for _ in range(100):
                    await asyncio.sleep(pause)
            finally:
                await asyncio.sleep(0)
                log.append("cleaned up")

    pending: Any = Fallback("instead").aproxy(Hanging(), "get").get()
    assert not isinstance(pending, types.CoroutineType)
    task = asyncio.create_task(pending)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["cleaned up"]


def test_a_missing_await_causes_the_warning_of_python() -> None:
    client = Client()
    pending: Any = quick().aproxy(client, "later").later("a")
    with pytest.warns(RuntimeWarning, match="never awaited"):
        del pending
    assert client.calls == []


def test_the_result_of_an_aproxy_method_can_be_closed_unstarted() -> None:
    pending: Any = quick().aproxy(Client(), "later").later("a")
    with nothing_is_left_unawaited():
        pending.close()
        del pending


# --- awaitables that are async context managers ------------------------------------------------


class Response:
    """A response as of aiohttp: entered, it returns itself; at the end of the block, it is released."""

    def __init__(self, session: Session, status: int) -> None:
        self.session = session
        self.status = status
        session.open.append(self)

    async def text(self) -> str:
        await anyio.sleep(0)
        return f"status {self.status}"

    def release(self) -> None:
        if self in self.session.open:
            self.session.open.remove(self)

    close = release

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        await anyio.sleep(0)
        self.session.left.append(kind)
        self.release()


class AcquireContext:
    """As asyncpg's `pool.acquire()`: no coroutine; awaited, it returns a response; entered, it also releases it."""

    def __init__(self, coroutine: Coroutine[Any, Any, Response]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Response]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> Response:
        self._response = await self._coroutine
        return await self._response.__aenter__()

    async def __aexit__(self, *exc: Any) -> None:
        await self._response.__aexit__(*exc)


class RequestContextManager(AcquireContext, Coroutine[Any, Any, Response]):
    """As in aiohttp: such an object that is a coroutine, too."""

    def send(self, value: Any, /) -> Any:
        return self._coroutine.send(value)

    def throw(self, *args: Any) -> Any:
        return self._coroutine.throw(*args)

    def close(self) -> None:
        self._coroutine.close()


class Session:
    """A session that answers its requests with the given statuses, one after another; the last one repeats."""

    def __init__(self, *statuses: int | Exception) -> None:
        self.statuses = list(statuses)
        self.requests = 0
        self.open: list[Response] = []
        self.left: list[type[BaseException] | None] = []

    def get(self, url: str) -> RequestContextManager:
        return RequestContextManager(self._request(url))

    def acquire(self, url: str) -> AcquireContext:
        return AcquireContext(self._request(url))

    async def _request(self, url: str) -> Response:
        self.requests += 1
        await anyio.sleep(0)
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if isinstance(status, Exception):
            raise status
        return Response(self, status)


@pytest.mark.parametrize("name", ["get", "acquire"])
async def test_a_request_as_of_aiohttp_or_asyncpg_can_be_awaited_and_entered(tasks_world: World, name: str) -> None:
    """`await session.get(url)` and `async with session.get(url) as response` both work, with retries."""
    session = Session(Boom(), Boom(), 200, Boom(), 201)
    method = getattr(quick().aproxy(session, name), name)
    with nothing_is_left_unawaited():
        response = await method(url="a")
        assert response.status == 200
        response.release()
        async with method(url="b") as response:
            assert await response.text() == "status 201"
            assert session.open == [response]
        assert session.open == []
    assert session.requests == 5
    assert session.left == [None]


async def test_an_error_of_the_block_does_not_concern_the_policy(tasks_world: World) -> None:
    """Entering is the call; the block is not repeated, and its error reaches the client's `__aexit__`."""
    session = Session(200, 200)
    proxy = Fallback("answered").wrap(quick()).aproxy(session, "get")
    with pytest.raises(Boom):
        async with proxy.get("a"):
            raise Boom("in the block")
    assert session.requests == 1
    assert session.left == [Boom]
    assert session.open == []


async def test_a_context_manager_may_suppress_the_error_of_its_block(tasks_world: World) -> None:
    class Forgiving:
        @asynccontextmanager
        async def transaction(self) -> AsyncIterator[str]:
            try:
                yield "in it"
            except KeyError:
                pass

    async with quick().aproxy(Forgiving()).transaction() as value:
        assert value == "in it"
        raise KeyError


async def test_an_entry_that_fails_in_every_attempt_raises_its_own_error(tasks_world: World) -> None:
    """Nothing is left open. The block gets the answer of a fallback, and nothing is exited."""
    session = Session(Boom("no connection"))
    proxy = quick(2).aproxy(session)
    with nothing_is_left_unawaited(), pytest.raises(Boom, match="no connection"):
        async with proxy.get("a"):
            raise AssertionError("never entered")
    assert (session.requests, session.open) == (2, [])
    async with Fallback("answered").aproxy(proxy, "get").get("a") as response:
        assert response == "answered"
    assert session.left == []


async def test_a_result_that_is_not_good_enough_is_exited_before_the_next_attempt(tasks_world: World) -> None:
    """`on_result` gets the entered response; that of a 503 is released before another request."""
    session = Session(503, 503, 200)
    retry = Retry(3, on_result=lambda response: response.status >= 500, backoff=[0])
    async with retry.aproxy(session, "get").get("a") as response:
        assert response.status == 200
        assert (session.open, session.left) == ([response], [None] * 2)
    assert (session.requests, session.open) == (3, [])


async def test_a_fallback_that_replaces_a_result_exits_what_was_entered(tasks_world: World) -> None:
    session = Session(503)
    proxy = Fallback("answered", on_result=lambda response: response.status >= 500).aproxy(session)
    async with proxy.get("a") as answer:
        assert (answer, session.open, session.left) == ("answered", [], [None])
    assert (session.requests, session.left) == (1, [None])


async def test_an_error_of_a_policy_after_the_entry_exits_what_was_entered(tasks_world: World) -> None:
    """The block is not run, so it cannot exit it."""
    session = Session(200)
    proxy = Retry(on_result=lambda response: response.status / 0).aproxy(session)
    with pytest.raises(ZeroDivisionError):
        async with proxy.get("a"):
            raise AssertionError("never entered")
    assert session.left == [ZeroDivisionError]


async def test_a_rejected_entry_enters_nothing(tasks_world: World) -> None:
    """The permit of the bulkhead is held while entering, but not for the block, as it is by `slot()`."""
    session, gate = Session(200), Bulkhead(1)
    with nothing_is_left_unawaited():
        async with gate.aproxy(session).get("a"):
            assert gate.stats().in_flight == 0
        async with gate.slot():
            with pytest.raises(BulkheadFull):
                async with gate.aproxy(session).get("b"):
                    pass
    assert session.requests == 1


async def test_an_entry_that_is_cut_off_leaves_nothing_behind(virtual_tasks: Virtual) -> None:
    """The Timeout limits the entry; the block may take longer."""

    class Slow:
        def __init__(self) -> None:
            self.log: list[str] = []
            self.delay = 4.0

        @asynccontextmanager
        async def acquire(self) -> AsyncIterator[str]:
            self.log.append("in")
            try:
                await anyio.sleep(self.delay)
                yield "acquired"
            finally:
                self.log.append("out")

    slow = Slow()
    proxy = Timeout(0.1).aproxy(slow)
    with pytest.raises(TimeoutError):
        async with proxy.acquire():
            raise AssertionError("never entered")
    assert slow.log == ["in", "out"]
    slow.delay = 0.0
    async with proxy.acquire() as value:
        await anyio.sleep(0.12)
        assert value == "acquired"
    assert slow.log == ["in", "out"] * 2


async def test_a_cancelled_entry_leaves_nothing_behind(tasks_world: World) -> None:
    """The cancellation is no outcome."""
    session, answered = Session(200), list[Any]()
    proxy = Fallback("x", on_fallback=answered.append).wrap(quick()).aproxy(session)
    with nothing_is_left_unawaited():
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with proxy.get("a"):
                raise AssertionError("never entered")
        assert scope.cancelled_caught
    assert session.open == answered == []


async def test_entering_a_result_that_is_no_context_manager_is_a_misuse(tasks_world: World) -> None:
    """The error says what to write instead, and no policy handles it."""
    client = Client()
    seen: list[Any] = []
    proxy: Any = (
        Fallback("answered", on_fallback=seen.append)
        .wrap(Retry(3, on=Exception, backoff=[0], on_retry=seen.append), CircuitBreaker(1, on_transition=seen.append))
        .aproxy(client, "later")
    )
    with nothing_is_left_unawaited(), pytest.raises(TypeError, match="await"):
        async with proxy.later("a"):
            raise AssertionError("never entered")
    assert seen == []
    assert client.calls == []
