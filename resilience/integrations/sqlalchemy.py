"""SQLAlchemy: which errors are transient, and units of work with a session or a connection, done again as a whole.

What is said in `resilience.integrations.dbapi` holds here: SQLAlchemy wraps the errors of the same drivers, and has
the same transactions. An attempt has a fresh session, as a session that has seen a failure holds objects of a
transaction that never was.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, final, overload

from resilience.integrations.extras import needed_by

with needed_by("sqlalchemy"):
    from sqlalchemy import Connection, Engine, event
    from sqlalchemy.exc import DBAPIError, UnboundExecutionError

from typing_extensions import override

from resilience.ambient import current_context
from resilience.callables import maybe_await
from resilience.integrations import dbapi
from resilience.integrations.dbapi import OutcomeUnknown, TransactionAborted, UnitOfWork
from resilience.integrations.dbapi.drivers import is_aborted
from resilience.integrations.dbapi.errors import is_undone
from resilience.integrations.dbapi.limits import LIMIT_OF_POSTGRESQL, SQLiteLimits, shorter_limit
from resilience.integrations.dbapi.units import ABORTED
from resilience.runtimes.driving import drive

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
    from sqlalchemy.orm import Session, SessionTransaction

    from resilience.context import Context
    from resilience.policy import Policy

__all__ = ["OutcomeUnknown", "TransactionAborted", "transient", "unit_of_work"]

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
    :param limit_statements: where there is a deadline, set it in PostgreSQL (`SET LOCAL statement_timeout`) or SQLite.

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
            await maybe_await(flush())
        await _run(connection, _refuse_if_aborted)

    @override
    def is_undone(self, error: Exception) -> bool:
        if isinstance(error, DBAPIError):
            return not error.connection_invalidated and is_undone(_original(error))
        return is_undone(error)


def _refuse_if_aborted(blocking: Any) -> None:
    """Raise where PostgreSQL would answer a commit with a rollback. asyncpg does not know it, and asks the server."""
    if not blocking.in_transaction():
        return
    if _is_session(blocking):
        try:
            if blocking.get_bind().dialect.name != "postgresql":
                return
        except UnboundExecutionError:  # a session of many databases
            return
        blocking = blocking.connection()
    if blocking.dialect.name != "postgresql":
        return
    aborted = is_aborted(blocking.connection.driver_connection)
    try:
        if aborted is None:
            blocking.exec_driver_sql("SELECT 1")
    except DBAPIError as error:
        raise TransactionAborted(ABORTED) from error
    if aborted:
        raise TransactionAborted(ABORTED)


# --- deadlines -------------------------------------------------------------------------------


@asynccontextmanager
async def _limits(work: Any) -> AsyncIterator[None]:
    """Let the statements of a session or a connection keep to the deadline, which there is."""
    ctx = current_context()
    ctx.check()
    limits = _Limits(ctx)
    blocking = _blocking(work)
    try:
        if blocking.in_transaction():
            await _run(work, lambda it: limits.begin(it.connection() if _is_session(it) else it))
        with limits.heard_by(blocking):
            yield
    finally:
        await _run(work, lambda it: limits.end())


@final
class _Limits:
    """Limits statements to what is left, in each transaction that a session or a connection begins.

    Not before: until then a unit may choose its isolation level, and begin by itself. What was set in SQLite is taken
    back before the connection is given to its pool, where another thread may have it at once.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._limited: list[tuple[Any, SQLiteLimits]] = []

    @contextmanager
    def heard_by(self, blocking: Any) -> Iterator[None]:
        """Hear of the transactions of a session or a connection."""
        listeners: dict[str, Callable[..., None]] = {"begin": self.begin}
        if _is_session(blocking):
            listeners = {"after_begin": self._begun, "after_commit": self._ended, "after_rollback": self._ended}
        for name, listener in listeners.items():
            event.listen(blocking, name, listener)
        try:
            yield
        finally:
            for name, listener in listeners.items():
                event.remove(blocking, name, listener)

    def _begun(self, session: Session, transaction: SessionTransaction, connection: Connection) -> None:
        if not transaction.nested:
            self.begin(connection)

    def _ended(self, session: Session) -> None:
        if not session.in_nested_transaction():  # the end of a savepoint is not that of the transaction
            self.end()

    def begin(self, connection: Connection) -> None:
        """Limit what a connection does from now on."""
        if connection.dialect.name == "postgresql":
            current: str = connection.exec_driver_sql(LIMIT_OF_POSTGRESQL).scalar_one()
            if statement := shorter_limit(current, self._ctx):
                connection.exec_driver_sql(statement)
        elif connection.dialect.name == "sqlite":
            limits = SQLiteLimits(connection.connection.driver_connection)
            self._limited.append((connection.connection.dbapi_connection, limits))
            _drive(connection.connection.dbapi_connection, limits.begin(self._ctx))

    def end(self) -> None:
        """Take back what does not end with the transaction."""
        while self._limited:
            adapted, limits = self._limited.pop()
            with suppress(Exception):  # of a connection that is broken, and will not be used again
                _drive(adapted, limits.end())


def _is_session(blocking: object) -> bool:
    return not hasattr(blocking, "exec_driver_sql")


def _blocking(work: Any) -> Any:
    """Return the blocking session or connection that does the work of an asynchronous one, or of a scoped session."""
    work = work.registry() if hasattr(work, "registry") else work
    return getattr(work, "sync_session", getattr(work, "sync_connection", work))


async def _run(work: Any, step: Callable[[Any], None]) -> None:
    """Take a step with what is blocking as SQLAlchemy's events are: in its greenlet, where that is asynchronous."""
    work = work.registry() if hasattr(work, "registry") else work
    run_sync = getattr(work, "run_sync", None)
    if run_sync is None:
        step(work)
    else:
        await run_sync(step)


def _drive(adapted: Any, step: Coroutine[Any, Any, None]) -> None:
    """Take a step with the driver's connection, there. An asynchronous one has an adapter, which waits for it."""
    run_async = getattr(adapted, "run_async", None)
    if run_async is None:
        drive(step)
    else:
        run_async(lambda driver: step)
