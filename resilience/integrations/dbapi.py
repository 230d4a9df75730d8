"""DB-API: which errors of a database may be gone at the next try, and units of work that are done again as a whole.

A statement is never repeated by itself. After a deadlock or a serialization failure the database has undone the whole
transaction, after a lost connection too; what was read in it may be different now. So what is repeated is the unit of
work: everything from a fresh connection to its commit.

One thing must not be repeated: a commit of which nobody knows whether it happened. A connection that breaks during
`COMMIT` may break before the database has carried it out, or after. Such a failure is final, and so is a commit in
the middle of which a `Timeout` let the caller go.

What happens in an attempt is written once, as a coroutine. Blocking code runs it as blocking policies are run: what it
awaits has finished when the await is reached.
"""

from __future__ import annotations

import functools
import inspect
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from math import inf
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar, final, overload

from resilience import checks
from resilience.callables import close_coroutine, is_awaitable, is_coroutine_function, is_generator_function, name_of
from resilience.context import Context, current_context
from resilience.errors import AwaitableMisuse, DeadlineExceeded, ResilienceError
from resilience.events import logger
from resilience.matching import transient as lost_connection
from resilience.policy import Policy
from resilience.runtimes.blocking import drive
from resilience.runtimes.tasks import in_peace

__all__ = ["OutcomeUnknown", "StatementLimits", "UnitOfWork", "sqlstate", "transient", "unit_of_work"]

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")
W = TypeVar("W")

# --- errors ----------------------------------------------------------------------------------

#: https://www.postgresql.org/docs/current/errcodes-appendix.html. Besides these, class 08 (connections).
_TRANSIENT_STATES = frozenset(
    {
        "40001",  # serialization_failure
        "40P01",  # deadlock_detected
        "55P03",  # lock_not_available
        "57P01",  # admin_shutdown
        "57P02",  # crash_shutdown
        "57P03",  # cannot_connect_now
        "53300",  # too_many_connections
    }
)
_PROTOCOL_VIOLATION = "08P01"
_COMMIT_UNKNOWN = "40003"  # statement_completion_unknown

_MYSQL_PACKAGES = frozenset({"MySQLdb", "asyncmy", "mariadb", "mysql", "pymysql"})
#: Too many connections, lock wait timeout, deadlock, server gone away, lost connection, shutting down.
_MYSQL_TRANSIENT = frozenset({1040, 1205, 1213, 2006, 2013, 1053})
_MYSQL_UNDONE = frozenset({1205, 1213})

_SQLITE_TRANSIENT = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_SQLITE_UNDONE = _SQLITE_TRANSIENT | {sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_CONSTRAINT}


class OutcomeUnknown(ResilienceError):
    """The commit of a unit of work was begun and cut off, so that it may have been done, and it is not done again."""

    #: Tells Retry not to try again.
    repeatable: bool = False


def transient(error: Exception) -> bool:
    """Whether the error of a driver may be gone when the whole transaction is done again. For `Retry(on=transient)`.

    True for serialization failures, deadlocks, locks that were not granted, servers that shut down or start, too many
    connections, and lost connections: of psycopg, psycopg2 and asyncpg by SQLSTATE, of sqlite3 and aiosqlite by
    `SQLITE_BUSY` and `SQLITE_LOCKED`, of the drivers of MySQL by number; and for what `resilience.transient` knows. A
    statement that was cancelled (`statement_timeout`) is not transient.
    """
    mysql, sqlite, state = _mysql_number(error), _sqlite_code(error), sqlstate(error)
    if mysql in _MYSQL_TRANSIENT or sqlite in _SQLITE_TRANSIENT:
        return True
    if state is not None:
        return state in _TRANSIENT_STATES or (state.startswith("08") and state != _PROTOCOL_VIOLATION)
    return lost_connection(error) or is_of("psycopg2", "OperationalError", error)


def sqlstate(error: Exception) -> str | None:
    """Return the five characters by which SQL names an error, None where the driver has none."""
    for name in ("sqlstate", "pgcode"):
        state = getattr(error, name, None)
        if isinstance(state, str) and len(state) == 5:
            return state
    return None


def is_undone(error: Exception) -> bool:
    """Whether a commit that failed with this error has certainly not happened."""
    if _mysql_number(error) in _MYSQL_UNDONE or _sqlite_code(error) in _SQLITE_UNDONE:
        return True
    state = sqlstate(error) or ""
    return state != _COMMIT_UNKNOWN and state.startswith(("23", "40"))  # a constraint; rolled back


def _sqlite_code(error: Exception) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None  # the higher bits tell more: BUSY_SNAPSHOT is BUSY


def _mysql_number(error: Exception) -> object:
    package = type(error).__module__.partition(".")[0]
    return error.args[0] if package in _MYSQL_PACKAGES and error.args else None


def is_of(package: str, name: str, it: object) -> bool:
    """Whether the class of `it` is one of that name and package, or derives from one."""
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] == package for kind in type(it).__mro__)


# --- the unit of work -------------------------------------------------------------------------

#: Seconds for which the caller of an asynchronous unit that has failed, or was cut off, waits for its connection to be
#: rolled back and closed. A server that answers needs milliseconds; one that does not may never answer.
ROLLBACK_GRACE: Final = 1.0


def unit_of_work(
    policy: Policy[D],
    connect: Callable[[], W | Awaitable[W]],
    *,
    repeat_unknown_commits: bool = False,
    limit_statements: bool = True,
) -> UnitOfWork[W, D]:
    """Return a decorator: every call of the function is a transaction under the policy, done again as a whole.

    :param policy: what the unit runs under. `Retry(on=transient)`, with the `transient` of this module, repeats it
        after deadlocks and lost connections; a plain `Retry()` after lost connections only.
    :param connect: makes the connection for an attempt, with `commit`, `rollback` and `close`, or an awaitable of it.
    :param repeat_unknown_commits: do it again also where the commit may have happened. Right for units that have the
        same effect when they are done twice.
    :param limit_statements: where there is a deadline, tell the database: see `StatementLimits`.

    The function gets the connection before its own arguments. When it returns, the unit is committed; when it raises,
    rolled back; in any case the connection is closed. Nothing is committed after the deadline. As the function may be
    called several times, it should do nothing outside of the transaction, and it must not commit by itself. A call of
    a plain function raises `TypeError` where the connection is an asynchronous one; so does decorating a generator.

    An `async def` that fails or is cut off is rolled back and closed whatever is cancelled around it. Its caller waits
    for that one second at most. What takes longer is cancelled, and ends without the caller; a warning is logged.

    >>> from resilience import Retry
    >>> from resilience.integrations.dbapi import transient, unit_of_work
    >>> @unit_of_work(Retry(on=transient), lambda: sqlite3.connect(":memory:"))
    ... def add(connection, a, b):
    ...     return connection.execute("select ? + ?", (a, b)).fetchone()[0]
    >>> add(2, 3)
    5
    """
    return UnitOfWork(policy, connect, repeat_unknown_commits=repeat_unknown_commits, limit_statements=limit_statements)


class UnitOfWork(Generic[W, D]):
    """The decorator that `unit_of_work` returns."""

    def __init__(
        self,
        policy: Policy[D],
        connect: Callable[[], W | Awaitable[W]],
        *,
        repeat_unknown_commits: bool,
        limit_statements: bool,
    ) -> None:
        if not isinstance(policy, Policy):
            raise TypeError(f"policy must be a policy, not {policy!r}")
        if not callable(connect):
            raise TypeError(f"connect must be callable, not {connect!r}")
        self._policy = policy
        self._connect: Callable[[], Any] = connect
        self._repeat_unknown_commits = checks.flag("repeat_unknown_commits", repeat_unknown_commits)
        self._limit_statements = checks.flag("limit_statements", limit_statements)

    @overload
    def __call__(
        self, fn: Callable[Concatenate[W, P], Coroutine[Any, Any, T]], /
    ) -> Callable[P, Coroutine[Any, Any, T | D]]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[W, P], T], /) -> Callable[P, T | D]: ...
    def __call__(self, fn: Callable[..., Any], /) -> Callable[..., Any]:
        """Decorate a function of a connection and its own arguments.

        :raises TypeError: for a generator function, which would do its work after the commit.
        """
        if is_generator_function(fn):
            raise TypeError(
                f"{name_of(fn)} is a generator function: it would do its work after the commit; return a list instead"
            )

        def blocking(*args: Any, **kwargs: Any) -> Any:
            connect = functools.partial(_connect_for_plain, self._connect, fn)
            execution = _Execution(self, connect, functools.partial(_call, fn, args, kwargs), _undo)
            return self._policy.execute(lambda ctx: drive(execution.attempt(ctx), "a unit of work"))

        async def tasks(*args: Any, **kwargs: Any) -> Any:
            execution = _Execution(self, self._connect, functools.partial(_call, fn, args, kwargs), _undo_in_peace)
            return await self._policy.aexecute(execution.attempt)

        wrapper = functools.wraps(fn)(tasks if is_coroutine_function(fn) else blocking)
        signature = inspect.signature(fn)
        own = list(signature.parameters.values())[1:]  # the connection is not for the caller to give
        wrapper.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return wrapper

    def limits(self, connection: W) -> AbstractAsyncContextManager[object]:
        """Return the block in which the statements of a connection keep to the deadline."""
        return StatementLimits(connection)

    async def prepare(self, connection: W) -> None:
        """Do what may fail before the commit is begun."""

    def is_undone(self, error: Exception) -> bool:
        """Whether a commit that failed with this error has certainly not happened."""
        return is_undone(error)


@final
class _Execution:
    """One execution of a unit of work: what its attempts have to know of one another."""

    def __init__(
        self,
        unit: UnitOfWork[Any, Any],
        connect: Callable[[], Any],
        work: Callable[[Any], Any],
        undo: Callable[[Any, AsyncExitStack], Awaitable[None]],
    ) -> None:
        self._unit = unit
        self._connect = connect
        self._work = work
        self._undo = undo
        self._committing = False

    async def attempt(self, ctx: Context) -> Any:
        if self._committing:
            raise OutcomeUnknown("the unit of work may have been committed when it was cut off; it is not done again")
        connection = await finished(self._connect())
        limits = AsyncExitStack()
        try:
            if self._unit._limit_statements:
                await limits.enter_async_context(self._unit.limits(connection))
            result = await finished(self._work(connection))
            await self._unit.prepare(connection)
            await self._commit(connection, ctx)
            await limits.aclose()
            await _close(connection)
            return result
        except BaseException:
            await self._undo(connection, limits)
            raise

    async def _commit(self, connection: Any, ctx: Context) -> None:
        # A caller who has been let go may already make the next attempt. Either that finds the commit begun, or its
        # time was over before this one looks at the clock. So it is said first, and looked afterwards.
        self._committing = not self._unit._repeat_unknown_commits
        if ctx.expired:
            self._committing = False
            raise DeadlineExceeded("the deadline of the execution has passed, nothing is committed")
        try:
            await finished(connection.commit())
        except Exception as error:
            if self._unit.is_undone(error):
                self._committing = False
            elif self._committing:
                error.repeatable = False  # type: ignore[attr-defined]
            raise


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], connection: object) -> Any:
    return fn(connection, *args, **kwargs)


def _connect_for_plain(connect: Callable[[], Any], fn: Callable[..., Any]) -> Any:
    """Make a connection for a plain function; refuse one that only an `async def` can use."""
    connection = connect()
    commit = getattr(connection, "commit", None)
    if is_awaitable(connection) or (callable(commit) and is_coroutine_function(commit)):
        close_coroutine(connection)
        kind = type(connection).__name__
        raise AwaitableMisuse(
            f"{name_of(fn)} is a plain function, and its connection is asynchronous ({kind}): write `async def`, "
            "or connect with a blocking driver"
        )
    return connection


async def finished(result: Any) -> Any:
    """Return what a function has returned, or what an asynchronous one's awaitable gives."""
    return await result if is_awaitable(result) else result


async def _undo(connection: Any, limits: AsyncExitStack) -> None:
    """Roll back and close what a unit of work has left. The error that counts is on its way."""
    try:
        await _rollback(connection, limits)
    finally:
        await _close(connection)


async def _undo_in_peace(connection: Any, limits: AsyncExitStack) -> None:
    """Do the same in a task that may be cancelled, and whose caller waits."""
    if is_of("aiosqlite", "Connection", connection):
        with suppress(Exception):
            await connection.interrupt()  # or its thread would first finish the statement that was cancelled
    await in_peace(
        f"the rollback of a {type(connection).__name__}",
        ROLLBACK_GRACE,
        functools.partial(_rollback, connection, limits),
        functools.partial(_close, connection),
    )


async def _rollback(connection: Any, limits: AsyncExitStack) -> None:
    with suppress(Exception):
        await limits.aclose()
    with suppress(Exception):  # of a connection that is broken
        await finished(connection.rollback())


async def _close(connection: Any) -> None:
    try:
        await finished(connection.close())
    except Exception:  # it has been committed or rolled back by now
        logger.exception("closing a %s raised", type(connection).__name__)


# --- deadlines -------------------------------------------------------------------------------


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


def is_sqlite(connection: object) -> bool:
    """Whether this is a connection of sqlite3 or aiosqlite."""
    return isinstance(connection, sqlite3.Connection) or is_of("aiosqlite", "Connection", connection)


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
