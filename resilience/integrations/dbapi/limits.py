"""What a database is told of a deadline, so that it stops by itself: PostgreSQL by a statement, SQLite by a handler.

PostgreSQL forgets its limit at the end of the transaction. What SQLite is told belongs to the connection, which may
go back to a pool, and has to be taken back.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from math import inf
from types import TracebackType
from typing import Any, final

from resilience.callables import finished
from resilience.context import Context, current_context
from resilience.integrations.dbapi.drivers import is_of, is_sqlite
from resilience.runtimes.blocking import drive


@final
class StatementLimits:
    """Let the statements of a block keep to the deadline of the context: `with StatementLimits(connection):`.

    `async with` for asynchronous connections. Without a deadline it does nothing.

    PostgreSQL (psycopg, psycopg2): `SET LOCAL statement_timeout`, which holds for each statement by itself, until the
    end of the transaction. SQLite (sqlite3, aiosqlite): a statement is interrupted, and a wait for a lock ends, when
    the deadline has passed; both are put back at the end of the block. Other drivers are left alone.

    :param connection: the connection of the driver.
    :raises DeadlineExceeded: on entering, if the time is over.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._sqlite = SQLiteLimits(connection)

    def __enter__(self) -> None:
        drive(self.__aenter__(), "StatementLimits")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        drive(self.__aexit__(kind, error, traceback), "StatementLimits")

    async def __aenter__(self) -> None:
        ctx = current_context()
        if ctx.deadline == inf:
            return
        ctx.check()
        if is_sqlite(self._connection):
            await self._sqlite.begin(ctx)
        elif is_of("psycopg", "BaseConnection", self._connection) or is_of("psycopg2", "connection", self._connection):
            await _execute(self._connection, limit_of_postgresql(milliseconds_left(ctx)))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with nullcontext() if error is None else suppress(Exception):  # the error that counts is on its way
            await self._sqlite.end()


@final
class SQLiteLimits:
    """What a deadline changes in a connection of SQLite: how long it waits for a lock, and what interrupts it.

    :param connection: of sqlite3 or aiosqlite.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._busy_timeout: int | None = None

    async def begin(self, ctx: Context) -> None:
        """Keep to the deadline of a context from now on."""
        milliseconds = milliseconds_left(ctx)
        (self._busy_timeout,) = await _execute(self._connection, "PRAGMA busy_timeout")
        await _execute(self._connection, f"PRAGMA busy_timeout = {min(self._busy_timeout or 0, milliseconds)}")
        await finished(self._connection.set_progress_handler(lambda: ctx.expired, _INSTRUCTIONS))

    async def end(self) -> None:
        """Put back what was there before; nothing where nothing was begun."""
        if self._busy_timeout is not None:
            await finished(self._connection.set_progress_handler(None, 0))
            await _execute(self._connection, f"PRAGMA busy_timeout = {self._busy_timeout}")


#: How many instructions of its virtual machine SQLite does between two looks at the clock: some 10 us.
_INSTRUCTIONS = 1000


def milliseconds_left(ctx: Context) -> int:
    """Return what a database is told; never 0, which means no limit."""
    return max(1, int((ctx.timeout() or 0) * 1000))


def limit_of_postgresql(milliseconds: int) -> str:
    """Return the statement that limits those after it, until the end of the transaction."""
    return f"SET LOCAL statement_timeout = {milliseconds}"


async def _execute(connection: Any, statement: str) -> Any:
    """Execute a statement on a connection of any kind; return its first row as a tuple, if it has rows."""
    cursor = await finished(connection.cursor())
    if is_sqlite(connection):
        cursor.row_factory = None  # the connection's may make anything of a row
    try:
        await finished(cursor.execute(statement))
        return await finished(cursor.fetchone()) if cursor.description else None
    finally:
        await finished(cursor.close())
