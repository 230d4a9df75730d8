"""Deadlines in the database, so that it stops by itself: PostgreSQL by a statement, SQLite by a thread.

PostgreSQL forgets its limit at the end of the transaction. What is set in SQLite belongs to the connection, which may
go back to a pool, and has to be taken back. SQLite could ask us by a progress handler, but a connection has only one,
which may be the user's, and cannot be read back: so a worker thread interrupts the connection instead.
"""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext, suppress
from math import inf
from types import TracebackType
from typing import Any, Final, final

from resilience.ambient import current_context
from resilience.callables import maybe_await
from resilience.clock import clock
from resilience.context import Context
from resilience.integrations.dbapi.drivers import is_of, is_sqlite
from resilience.runtimes.driving import drive
from resilience.runtimes.workers import Job, pool

#: Seconds between two interruptions once the deadline has passed: the next statement is not to run either.
_AGAIN: Final = 0.01

#: The units in which PostgreSQL shows a setting, in milliseconds.
_UNITS: Final = {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


@final
class StatementLimits:
    """Let the statements of a block keep to the deadline of the context: `with StatementLimits(connection):`.

    `async with` for asynchronous connections. Without a deadline it does nothing.

    PostgreSQL (psycopg, psycopg2): `SET LOCAL statement_timeout`, which holds for each statement by itself, until the
    end of the transaction; a smaller one that is set already stays. SQLite (sqlite3, aiosqlite): a statement is
    interrupted, and a wait for a lock ends, when the deadline has passed; both are put back at the end of the block.
    Other drivers are left alone.

    :param connection: the connection of the driver.
    :raises DeadlineExceeded: on entering, if the time is over.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._sqlite = SQLiteLimits(connection)

    def __enter__(self) -> None:
        drive(self.__aenter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        drive(self.__aexit__(kind, error, traceback))

    async def __aenter__(self) -> None:
        ctx = current_context()
        if ctx.deadline == inf:
            return
        ctx.check()
        if is_sqlite(self._connection):
            await self._sqlite.begin(ctx)
        elif is_of("psycopg", "BaseConnection", self._connection) or is_of("psycopg2", "connection", self._connection):
            (current,) = await _execute(self._connection, LIMIT_OF_POSTGRESQL)
            if statement := shorter_limit(current, ctx):
                await _execute(self._connection, statement)

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
        self._has_ended = False
        self._changed = threading.Condition()  # held while the connection is interrupted: afterwards it is another's

    async def begin(self, ctx: Context) -> None:
        """Keep to the deadline of a context from now on."""
        milliseconds = milliseconds_left(ctx)
        (self._busy_timeout,) = await _execute(self._connection, "PRAGMA busy_timeout")
        await _execute(self._connection, f"PRAGMA busy_timeout = {min(self._busy_timeout or 0, milliseconds)}")
        pool.begin(Job(self._interrupt_from, (ctx.deadline,), {}))  # a worker that is idle: to start one takes longer

    async def end(self) -> None:
        """Put back what was there before; nothing where nothing was begun."""
        if self._busy_timeout is not None:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()
            await _execute(self._connection, f"PRAGMA busy_timeout = {self._busy_timeout}")

    def _interrupt_from(self, deadline: float) -> None:
        with suppress(Exception), self._changed:  # an exception: of a connection that is closed
            while not self._has_ended:
                left = deadline - clock.now()
                if left <= 0:
                    drive(maybe_await(self._connection.interrupt()))
                self._changed.wait(min(max(left, _AGAIN), threading.TIMEOUT_MAX))


def milliseconds_left(ctx: Context) -> int:
    """Return the limit for a database; never 0, which means no limit."""
    return max(1, int((ctx.timeout() or 0) * 1000))


#: The statement that shows the limit that there is. It begins no snapshot, so an isolation level may still be chosen.
LIMIT_OF_POSTGRESQL: Final = "SHOW statement_timeout"


def shorter_limit(current: str, ctx: Context) -> str | None:
    """Return the statement that limits those after it, until the end of the transaction.

    :param current: the limit that there is, as PostgreSQL shows it. None is returned where that is the shorter one.
    """
    number = current.rstrip("abcdefghijklmnopqrstuvwxyz")
    there = int(number) * _UNITS.get(current.removeprefix(number), 1)
    left = milliseconds_left(ctx)
    return None if 0 < there <= left else f"SET LOCAL statement_timeout = {left}"


async def _execute(connection: Any, statement: str) -> Any:
    """Execute a statement on a connection of any kind; return its first row as a tuple, if it has rows."""
    cursor = await maybe_await(_plain_cursor(connection))
    try:
        if is_sqlite(connection):
            cursor.row_factory = None
        await maybe_await(cursor.execute(statement))
        return await maybe_await(cursor.fetchone()) if cursor.description else None
    finally:
        await maybe_await(cursor.close())


def _plain_cursor(connection: Any) -> Any:
    """Make a cursor whose rows are tuples, whatever the connection makes of its rows."""
    if is_of("psycopg2", "connection", connection):
        return connection.cursor(cursor_factory=sys.modules["psycopg2"].extensions.cursor)
    if is_of("psycopg", "BaseConnection", connection):
        return connection.cursor(row_factory=lambda cursor: tuple)
    return connection.cursor()
