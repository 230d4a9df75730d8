"""Rows of a server-side cursor of PostgreSQL under `policy.streaming`, with blocking and asynchronous drivers."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from resilience import Bulkhead, CircuitBreaker, Policy, Retry, TimeoutExceeded
from resilience.callables import maybe_await
from resilience.integrations.sqlalchemy import transient
from tests.conftest import World
from tests.integrations.http_clients import opened
from tests.streams.sources import Consumed, taken

PATIENCE = 30.0

#: How many rows the cursor fetches at once.
BATCH = 10

NUMBERS = "select n from generate_series(:after + 1, 1000) as n"
#: The row after this one takes for ever.
LAST_QUICK = 25
STUCK = f"select n from generate_series(1, 1000) as n, pg_sleep(case when n > {LAST_QUICK} then {PATIENCE} else 0 end)"


class Reader:
    """An engine of one connection, and functions over the rows of its server-side cursors."""

    def __init__(self, url: str, driver: str) -> None:
        self.is_async = driver in {"psycopg_async", "asyncpg"}
        self.world = World("asyncio" if self.is_async else "threads")
        self.run = self.world.run
        make: Any = create_async_engine if self.is_async else create_engine
        self.engine: Any = make(url.replace("://", f"+{driver}://"), pool_size=1, max_overflow=0, pool_timeout=5)
        self.url = url
        self.calls = 0
        self.fails_at: dict[int, int] = {}  # by call, from 1: the number of rows before its backend is terminated

    def _execute(self, statement: str) -> tuple[Any, dict[str, Any]]:
        self.calls += 1
        return text(statement), {"stream_results": True, "max_row_buffer": BATCH}

    def _break(self, backend: int, row: int) -> None:
        if self.fails_at.get(self.calls) == row:
            with psycopg.connect(self.url, autocommit=True) as connection:
                connection.execute("select pg_terminate_backend(%s, 5000)", (backend,))

    def read(self, statement: str = NUMBERS, *, after: int = 0) -> Iterator[int]:
        query, options = self._execute(statement)
        parameters = {"after": after} if statement is NUMBERS else {}
        with self.engine.connect().execution_options(**options) as connection:
            backend = connection.scalar(text("select pg_backend_pid()"))
            self._break(backend, 0)
            with closing(connection.scalars(query, parameters)) as rows:
                for row in rows:
                    yield row
                    self._break(backend, row)

    async def aread(self, statement: str = NUMBERS, *, after: int = 0) -> AsyncIterator[int]:
        query, options = self._execute(statement)
        parameters = {"after": after} if statement is NUMBERS else {}
        async with self.engine.connect() as connection:
            backend = await connection.scalar(text("select pg_backend_pid()"))
            self._break(backend, 0)
            rows = await connection.stream_scalars(query, parameters, execution_options=options)
            try:
                async for row in rows:
                    yield row
                    self._break(backend, row)
            finally:
                await rows.close()

    def open(self, statement: str = NUMBERS, *, after: int = 0) -> Any:
        self.source: Any = (self.aread if self.is_async else self.read)(statement, after=after)  # not collected
        return self.source

    async def consume(self, policy: Policy[Any], *args: Any, stop: int = 0, **limits: Any) -> list[int]:
        """Return the rows of a stream, up to the row `stop`; then check that the connection can be used again."""
        streaming = policy.streaming(**limits)
        stream = (streaming.acall if self.is_async else streaming.call)(self.open, *args)
        try:
            return await taken(Consumed(self.world, stream), lambda row: row == stop)
        finally:
            assert self.engine.pool.checkedout() == 0
            async with opened(self.engine.connect()) as connection:
                assert await maybe_await(connection.scalar(text("select 1"))) == 1
                if not self.is_async:  # asyncpg has one for this very query
                    assert connection.scalar(text("select count(*) from pg_cursors")) == 0
            await maybe_await(self.engine.dispose())


@pytest.fixture(params=["psycopg", "psycopg2", "psycopg_async", "asyncpg"])
def reader(request: pytest.FixtureRequest, url: str) -> Reader:
    return Reader(url, request.param)


@pytest.fixture
def policy() -> Policy[Any]:
    return Policy.wrap(Retry(3, on=transient, backoff=[0]), Bulkhead(1), CircuitBreaker(5))


@pytest.mark.filterwarnings("ignore:.*ServerCursor:pytest.PytestUnraisableExceptionWarning")
async def test_a_connection_lost_before_the_first_row_is_replaced(reader: Reader, policy: Policy[Any]) -> None:
    reader.fails_at = {1: 0, 2: 0}
    assert await reader.consume(policy) == list(range(1, 1001))
    assert reader.calls == 3
    gc.collect()  # SQLAlchemy closes no cursor that psycopg could not open, and psycopg warns of that


async def test_a_connection_lost_after_a_row_ends_the_stream(reader: Reader, policy: Policy[Any]) -> None:
    reader.fails_at = {1: 15}
    with pytest.raises(DBAPIError):
        await reader.consume(policy)
    assert reader.calls == 1


async def test_a_stream_is_resumed_over_a_new_connection(reader: Reader, policy: Policy[Any]) -> None:
    reader.fails_at = {1: 15, 2: 400}
    assert await reader.consume(policy, resume={"after": lambda row: row}) == list(range(1, 1001))
    assert reader.calls == 3


async def test_a_consumer_that_leaves_closes_the_cursor(reader: Reader, policy: Policy[Any]) -> None:
    assert await reader.consume(policy, stop=3) == [1, 2, 3]
    assert policy.find(Bulkhead).stats().in_flight == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("reader", ["psycopg_async", "asyncpg"], indirect=True)
async def test_a_row_that_takes_too_long_is_cut_off(reader: Reader, policy: Policy[Any]) -> None:
    """Its connection can be used again at once. (In threads, it stays in use until the row has come.)"""
    began = time.monotonic()
    with pytest.raises(TimeoutExceeded, match="no item within"):
        await reader.consume(
            policy, STUCK, first=0.5, idle=0.2
        )  # asyncpg fetches so many rows that the first one is late
    assert time.monotonic() - began < PATIENCE / 2
