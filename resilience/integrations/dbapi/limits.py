"""Deadlines that the database enforces: PostgreSQL by `statement_timeout`, SQLite by a thread that interrupts it.

PostgreSQL drops its limit at the end of the transaction, which may be later than that of the block. In SQLite a limit
belongs to the connection, which may return to a pool. So both are removed. A progress handler would need no thread, but
a connection has only one, which the user may have set, and which cannot be read and restored.
"""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext, suppress
from math import inf
from typing import Any, Final, TypeAlias, final
from weakref import WeakKeyDictionary

from resilience import forks
from resilience.ambient import current_context
from resilience.callables import maybe_await
from resilience.clock import MAX_CLIENT_TIMEOUT, clock
from resilience.context import Context
from resilience.errors import BlockMisuse
from resilience.integrations.dbapi.drivers import is_autocommit, is_in_transaction, is_of, is_psycopg, is_sqlite
from resilience.integrations.dbapi.errors import AutocommitMisuse
from resilience.runtimes.driving import drive
from resilience.runtimes.workers import Job, pool

#: Seconds between two interruptions once the deadline has passed, so that later statements are interrupted as well.
_INTERRUPT_INTERVAL: Final = 0.01

#: For how many seconds, at most, the thread that interrupts sleeps. If no connection has a deadline then, it ends.
_LONGEST_SLEEP: Final = 0.5

#: The units in which PostgreSQL shows a setting, in milliseconds.
_UNITS: Final = {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


@final
class StatementLimits:
    """Limit the statements of a block to the deadline of the context: `with StatementLimits(connection):`.

    `async with` for asynchronous connections. Without a deadline it does nothing.

    PostgreSQL (psycopg, psycopg2): `SET LOCAL statement_timeout`, which limits each statement separately; a smaller
    value that is already set is kept, and a larger one is set again at the end of the block. SQLite (sqlite3,
    aiosqlite): when the deadline has passed, a statement is interrupted, and a wait for a lock ends; both limits are
    removed at the end of the block. The connections of other drivers are not changed.

    :param connection: the connection of the driver.
    :raises DeadlineExceeded: on entering, if the deadline has passed.
    :raises ValueError: on entering, for a connection of PostgreSQL in autocommit mode outside a transaction, where
        nothing would be limited.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        #: The limits of the innermost block that has not ended, and those of the blocks around it. Set without a call,
        #: so that an interrupt cannot leave those of a block that did not begin.
        self._entered: tuple[_Limits, Any] | None = None

    def __enter__(self) -> None:
        drive(self.__aenter__())

    def __exit__(self, *error: object) -> None:
        drive(self.__aexit__(*error))

    async def __aenter__(self) -> None:
        ctx, connection = current_context(), self._connection
        limits: _Limits = PostgreSQLLimits(connection) if is_psycopg(connection) else SQLiteLimits(connection)
        if ctx.deadline < inf:
            ctx.check()
            if is_psycopg(connection) or is_sqlite(connection):
                await limits.begin(ctx)
        self._entered = limits, self._entered

    async def __aexit__(self, *error: object) -> None:
        if self._entered is None:
            raise BlockMisuse("no block of these limits is open: write `with StatementLimits(connection):` around it")
        limits, self._entered = self._entered
        with nullcontext() if error[0] is None else suppress(Exception):  # keep the error of the block
            await limits.end()


@final
class PostgreSQLLimits:
    """The limit of a connection of psycopg or psycopg2, for the rest of its transaction."""

    def __init__(self, connection: Any) -> None:
        if is_autocommit(connection) and not is_in_transaction(connection):
            raise AutocommitMisuse("in autocommit mode nothing is limited: begin a transaction around the block")
        self._connection = connection
        #: The connection's own `statement_timeout`, if it was longer than the time left.
        self._own: str | None = None

    async def begin(self, ctx: Context) -> None:
        """Limit the connection to the deadline of a context."""
        cursor = _plain_cursor(self._connection)
        (own,) = await _first_row(cursor, SHOW_STATEMENT_TIMEOUT)
        if statement := shorter_limit(own, ctx):
            await _first_row(cursor, statement)
            self._own = own
        await maybe_await(cursor.close())

    async def end(self) -> None:
        """Set the connection's own limit again, unless the transaction has ended, or can only be rolled back."""
        if self._own is not None and is_in_transaction(self._connection):
            cursor = _plain_cursor(self._connection)
            await _first_row(cursor, f"SET LOCAL statement_timeout = '{self._own}'")
            await maybe_await(cursor.close())


@final
class SQLiteLimits:
    """The limits of a connection of sqlite3 or aiosqlite: how long it waits for a lock, and what interrupts it."""

    def __init__(self, connection: Any) -> None:
        self.connection: Any = connection
        #: The connection's own `busy_timeout`, if it was longer than the time left, and the cursor that sets it again.
        #: One cursor for all statements, because each call of one of aiosqlite is executed by its thread.
        self._own: tuple[int, Any] | None = None

    async def begin(self, ctx: Context) -> None:
        """Limit the connection to the deadline of a context."""
        milliseconds = milliseconds_left(ctx)
        cursor = await maybe_await(self.connection.cursor())
        cursor.row_factory = None
        (own,) = await _first_row(cursor, "PRAGMA busy_timeout")
        try:
            if own > milliseconds:
                self._own = own, cursor
                await _first_row(cursor, f"PRAGMA busy_timeout = {milliseconds}")
            else:
                await maybe_await(cursor.close())
            _interrupter.add(self, ctx.deadline)
        except BaseException:
            with suppress(Exception):
                await self.end()
            raise

    async def end(self) -> None:
        """Remove the limits; a no-op if none were set, or if they have been removed."""
        try:
            _interrupter.remove(self)
        finally:
            if self._own is not None:
                own, cursor = self._own
                await _first_row(cursor, f"PRAGMA busy_timeout = {own}")
                self._own = None
                await maybe_await(cursor.close())


_Limits: TypeAlias = PostgreSQLLimits | SQLiteLimits


@final
class _Interrupter:
    """Interrupts all limited connections from their deadlines on, in one thread for the process.

    To give each its own worker, and to wake that worker again at the end, would take longer than most units of work.
    The thread is a pooled worker too, which wakes at the earliest deadline.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, as in the child of a fork, which has none of its parent's threads."""
        self._lock = threading.RLock()  # held during an interruption: once `remove` is done, there is none
        self._changed = threading.Condition(self._lock)
        #: Weak, so that limits whose end was interrupted interrupt their connection no more.
        self._deadlines: WeakKeyDictionary[SQLiteLimits, float] = WeakKeyDictionary()
        self._wakes_at = -inf
        self._is_running = False

    def add(self, limits: SQLiteLimits, deadline: float) -> None:
        with self._changed:
            if not self._is_running:
                self._is_running = pool.begin(Job(self._run, (), {}))
            elif deadline < self._wakes_at:
                self._changed.notify()
            self._deadlines[limits] = deadline  # only now: if no thread can begin, there are no limits to remove

    def remove(self, limits: SQLiteLimits) -> None:
        with self._changed:
            self._deadlines.pop(limits, None)

    def _run(self) -> None:
        with self._changed:
            try:
                while (earliest := min(self._deadlines.values(), default=inf)) < inf:
                    now = clock.now()
                    self._interrupt(now)
                    sleep = min(max(earliest - now, _INTERRUPT_INTERVAL), _LONGEST_SLEEP)
                    self._wakes_at = now + sleep
                    self._changed.wait(sleep)
            finally:
                self._is_running = False

    def _interrupt(self, now: float) -> None:
        for limits, deadline in self._deadlines.copy().items():
            if deadline <= now:
                try:
                    drive(maybe_await(limits.connection.interrupt()))
                except Exception:  # its connection was closed
                    self._deadlines.pop(limits, None)


_interrupter: Final = _Interrupter()
forks.reset_after_fork(_interrupter, _Interrupter.reset)


def milliseconds_left(ctx: Context) -> int:
    """Return the time left in whole milliseconds, at least 1: to a database, 0 means no limit."""
    return max(1, int((ctx.timeout() or 0) * 1000))


#: Shows the current limit. It takes no snapshot, so the isolation level may still be set after it.
SHOW_STATEMENT_TIMEOUT: Final = "SHOW statement_timeout"


def shorter_limit(current: str, ctx: Context) -> str | None:
    """Return a statement that limits later ones, until the end of the transaction; None if `current` is shorter.

    :param current: the current limit, as PostgreSQL shows it.
    """
    number = current.rstrip("abcdefghijklmnopqrstuvwxyz")
    milliseconds = int(number) * _UNITS.get(current.removeprefix(number), 1)
    limit = _rounded_up(milliseconds_left(ctx))
    return None if 0 < milliseconds <= limit else f"SET LOCAL statement_timeout = {limit}"


def _rounded_up(milliseconds: int) -> int:
    """Keep three digits: PostgreSQL has statistics of each text, for at most 5000 by default.

    Not rounded down, as a server answers 504 only if the database has ended a statement after the deadline.
    """
    step = int(10 ** max(0, len(str(milliseconds)) - 3))
    return min(-(-milliseconds // step) * step, int(MAX_CLIENT_TIMEOUT * 1000))


def _plain_cursor(connection: Any) -> Any:
    """Make a cursor of PostgreSQL whose rows are tuples, regardless of the connection's own row factory."""
    if is_of("psycopg2", "connection", connection):
        return connection.cursor(cursor_factory=sys.modules["psycopg2"].extensions.cursor)
    return connection.cursor(row_factory=lambda cursor: tuple)


async def _first_row(cursor: Any, statement: str) -> Any:
    """Execute a statement with a cursor of any supported driver; return its first row, None if it returns no rows."""
    await maybe_await(cursor.execute(statement))
    return await maybe_await(cursor.fetchone()) if cursor.description else None
