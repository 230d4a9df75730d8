"""SQLAlchemy: which errors are transient, and units of work with a session or a connection, done again as a whole.

What is said in `resilience.integrations.dbapi` holds here: SQLAlchemy wraps the errors of the same drivers, and has
the same transactions. An attempt has a fresh session, as a session that has seen a failure holds objects of a
transaction that never was.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar, final, overload

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from typing_extensions import override

from resilience.context import current_context
from resilience.integrations import dbapi
from resilience.integrations.dbapi import OutcomeUnknown, StatementLimits, UnitOfWork, finished

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    from resilience.policy import Policy

__all__ = ["OutcomeUnknown", "transient", "unit_of_work"]

D = TypeVar("D")
W = TypeVar("W")


def transient(error: Exception) -> bool:
    """Whether an error may be gone when the whole transaction is done again. For `Retry(on=transient)`.

    True for connections that SQLAlchemy has found dead (`connection_invalidated`), and for what
    `resilience.integrations.dbapi.transient` says of the driver's own error: deadlocks, serialization failures, locks.
    A pool without a free connection (`sqlalchemy.exc.TimeoutError`) is not transient: more tries make it worse.
    """
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or dbapi.transient(_original(error))
    return dbapi.transient(error)


def _original(error: DBAPIError) -> Exception:
    return error.orig if isinstance(error.orig, Exception) else error


@overload
def unit_of_work(
    policy: Policy[D], source: Engine, *, repeat_unknown_commits: bool = ..., limit_statements: bool = ...
) -> UnitOfWork[Connection, D]: ...
@overload
def unit_of_work(
    policy: Policy[D], source: AsyncEngine, *, repeat_unknown_commits: bool = ..., limit_statements: bool = ...
) -> UnitOfWork[AsyncConnection, D]: ...
@overload
def unit_of_work(
    policy: Policy[D],
    source: Callable[[], W | Awaitable[W]],
    *,
    repeat_unknown_commits: bool = ...,
    limit_statements: bool = ...,
) -> UnitOfWork[W, D]: ...
def unit_of_work(
    policy: Policy[D], source: Any, *, repeat_unknown_commits: bool = False, limit_statements: bool = True
) -> UnitOfWork[Any, D]:
    """Return a decorator: every call of the function is a transaction under the policy, done again as a whole.

    :param policy: what the unit runs under. `Retry(on=transient)`, with the `transient` of this module, repeats it
        after deadlocks and lost connections; a plain `Retry()` after lost connections only.
    :param source: a `sessionmaker` or `async_sessionmaker` (the function gets a session), an `Engine` or `AsyncEngine`
        (it gets a connection), or a function that makes either.
    :param repeat_unknown_commits: do it again also where the commit may have happened. Right for units that have the
        same effect when they are done twice.
    :param limit_statements: where there is a deadline, tell PostgreSQL (`SET LOCAL statement_timeout`) or SQLite.

    The function gets the session before its own arguments. When it returns, the session is flushed and committed; when
    it raises, rolled back; in any case closed. Nothing is committed after the deadline. As the function may be called
    several times, it should do nothing outside of the transaction, and it must not commit by itself. An `async def`
    that is cut off waits for its rollback one second at most, as with `resilience.integrations.dbapi.unit_of_work`.

    >>> from resilience import Retry
    >>> from resilience.integrations.sqlalchemy import transient, unit_of_work
    >>> from sqlalchemy import create_engine, select
    >>> engine = create_engine("sqlite://")
    >>> @unit_of_work(Retry(on=transient), engine)
    ... def add(connection, a, b):
    ...     return connection.scalar(select(a + b))
    >>> from sqlalchemy import literal
    >>> add(literal(2), literal(3))
    5
    >>> engine.dispose()
    """
    # An AsyncEngine by what it has: its module cannot be imported without greenlet.
    connect = source.connect if isinstance(source, Engine) or hasattr(source, "sync_engine") else source
    if not callable(connect):
        raise TypeError(f"source must be an engine, a sessionmaker or a function that makes a session, not {source!r}")
    return _UnitOfWork(
        policy, connect, repeat_unknown_commits=repeat_unknown_commits, limit_statements=limit_statements
    )


@final
class _UnitOfWork(UnitOfWork[Any, D]):
    @override
    def limits(self, connection: Any) -> AbstractAsyncContextManager[object]:
        return _limits(connection)

    @override
    async def prepare(self, connection: Any) -> None:
        flush = getattr(connection, "flush", None)  # a session has; a connection has nothing to flush
        if flush is not None:
            await finished(flush())

    @override
    def is_undone(self, error: Exception) -> bool:
        if isinstance(error, DBAPIError):
            return not error.connection_invalidated and dbapi.is_undone(_original(error))
        return dbapi.is_undone(error)


@asynccontextmanager
async def _limits(work: Any) -> AsyncIterator[None]:
    """Let the statements of a session or a connection keep to the deadline."""
    ctx = current_context()
    if ctx.deadline == inf:
        yield
        return
    connection = work if hasattr(work, "exec_driver_sql") else await finished(work.connection())
    if connection.dialect.name == "postgresql":
        await finished(connection.exec_driver_sql(dbapi.limit_of_postgresql(dbapi.milliseconds_left(ctx))))
        yield
    elif connection.dialect.name == "sqlite":
        async with StatementLimits(await _driver_connection(connection)):
            yield
    else:
        yield


async def _driver_connection(connection: Any) -> Any:
    """Return the driver's own connection."""
    if isinstance(connection, Connection):
        return connection.connection.driver_connection
    return (await connection.get_raw_connection()).driver_connection
