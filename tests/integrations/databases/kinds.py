"""The ways in which a unit of work reaches a database: each driver, and SQLAlchemy's sessions and connections.

A test is written once, as `async def`. A blocking unit runs in a thread, where everything that it awaits has already
finished.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiosqlite
import anyio
import anyio.to_thread
import psycopg
import psycopg2
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import AsyncAdaptedQueuePool, QueuePool

from resilience import Policy
from resilience.callables import maybe_await
from resilience.integrations import dbapi, sqlalchemy
from tests.conftest import drive
from tests.integrations.databases.sqlite import FOREVER, LONG

#: The work of a unit: it gets a function that executes a statement.
Work = Callable[[Callable[[str], Awaitable[list[Any]]]], Awaitable[Any]]


@dataclass(frozen=True)
class Kind:
    """A driver, used directly, through SQLAlchemy's engine, or through its session."""

    driver: str
    through: str = "driver"
    is_async: bool = False

    @property
    def is_postgres(self) -> bool:
        return "sqlite" not in self.driver

    def __str__(self) -> str:
        return "-".join(["async"] * (self.is_async and self.driver == "psycopg") + [self.driver, self.through])


KINDS = [
    *(Kind("sqlite3", through) for through in ("driver", "engine", "session")),
    *(Kind("aiosqlite", through, is_async=True) for through in ("driver", "engine", "session")),
    *(Kind(driver, through) for driver in ("psycopg", "psycopg2") for through in ("driver", "session")),
    *(Kind("psycopg", through, is_async=True) for through in ("driver", "session")),
    *(Kind("asyncpg", through, is_async=True) for through in ("engine", "session")),
]


class Notes:
    """A table of notes, and units of work of one kind.

    :param place: the file of SQLite, or the URL of PostgreSQL.
    :param own_limit: the `statement_timeout` of its own connections.
    """

    def __init__(self, kind: Kind, place: str, own_limit: str | None = None) -> None:
        self.kind = kind
        self._place = place
        self._module: Any = dbapi if kind.through == "driver" else sqlalchemy
        self._engine: Any = None
        self._own_limit = own_limit
        self.transient: Any = self._module.transient
        self.source: Any = self._driver() if kind.through == "driver" else self._sqlalchemy()

    def _driver(self) -> Any:
        if not self.kind.is_postgres:
            module: Any = aiosqlite if self.kind.is_async else sqlite3
            return partial(module.connect, self._place, timeout=0)
        psycopg3: Any = psycopg.AsyncConnection if self.kind.is_async else psycopg
        connect = psycopg2.connect if self.kind.driver == "psycopg2" else psycopg3.connect
        return partial(connect, self._place, **self._options())

    def _sqlalchemy(self) -> Any:
        make: Any = create_async_engine if self.kind.is_async else create_engine
        if self.kind.is_postgres:
            url, options = self._place.replace("postgresql", f"postgresql+{self.kind.driver}"), self._options()
        else:
            scheme = "sqlite+aiosqlite" if self.kind.is_async else "sqlite"
            url, options = f"{scheme}:///{self._place}", {"timeout": 0}
        pool = (
            AsyncAdaptedQueuePool if self.kind.is_async else QueuePool
        )  # with aiosqlite, there was none before 2.0.38
        self._engine = make(url, connect_args=options, poolclass=pool)
        if self.kind.through == "engine":
            return self._engine
        return (async_sessionmaker if self.kind.is_async else sessionmaker)(self._engine)

    def _options(self) -> dict[str, Any]:
        if self._own_limit is None:
            return {}
        if self.kind.driver == "asyncpg":
            return {"server_settings": {"statement_timeout": self._own_limit}}
        return {"options": f"-c statement_timeout={self._own_limit}"}

    @property
    def in_use(self) -> int:
        """How many connections of the pool are in use."""
        return 0 if self._engine is None else self._engine.pool.checkedout()

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Run a test, and dispose of the engine."""

        async def whole() -> None:
            await main()
            await self.close()

        anyio.run(whole)

    async def do(self, policy: Policy[Any], work: Work, **options: Any) -> Any:
        """Call a unit of work."""
        if self.kind.is_async:
            unit = self._module.unit_of_work(policy, self.source, **options)
            return await unit(self._asynchronous(work))()
        plain = self._module.unit_of_work(policy, self.source, **options)(
            lambda connection: drive(work(partial(self.execute, connection)))  # type: ignore[arg-type]
        )
        return await anyio.to_thread.run_sync(plain)

    def _asynchronous(self, work: Work) -> Any:
        async def unit(connection: Any) -> Any:
            return await work(partial(self.execute, connection))

        return unit

    async def execute(self, connection: Any, statement: str) -> list[Any]:
        """Execute a statement; return its rows."""
        if self.kind.through != "driver":
            result = await maybe_await(connection.execute(text(statement)))
            return [tuple(row) for row in result] if result.returns_rows else []
        cursor = await maybe_await(connection.cursor())
        await maybe_await(cursor.execute(statement))
        rows = await maybe_await(cursor.fetchall()) if cursor.description else []
        await maybe_await(cursor.close())
        return [tuple(row) for row in rows]

    def rows(self) -> list[str]:
        """Return the committed notes, as another connection sees them."""
        connect: Any = psycopg.connect if self.kind.is_postgres else sqlite3.connect
        connection = connect(self._place)
        try:
            return [text for (text,) in connection.execute("select text from notes order by text").fetchall()]
        finally:
            connection.close()

    @property
    def forever(self) -> str:
        """A statement that does not end."""
        return "select pg_sleep(20)" if self.kind.is_postgres else FOREVER

    @property
    def long(self) -> str:
        """A statement that takes longer than a short limit."""
        return "select pg_sleep(0.2)" if self.kind.is_postgres else LONG

    async def close(self) -> None:
        if self._engine is not None:
            await maybe_await(self._engine.dispose())
