"""SQLAlchemy: which errors are transient, and units of work with a session or a connection, repeated as a whole.

The rules of `resilience.integrations.dbapi` apply: SQLAlchemy wraps the errors of the same drivers, and has the same
transactions. Each attempt gets a new session, because after a failure a session still holds objects of the transaction
that was rolled back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, final

from resilience.integrations._extras import needed_by

with needed_by("sqlalchemy"):
    from sqlalchemy import Connection, Dialect, Engine, Pool, event
    from sqlalchemy.exc import DBAPIError, PendingRollbackError

from typing_extensions import override

from resilience.ambient import current_context
from resilience.callables import maybe_await
from resilience.integrations import dbapi
from resilience.integrations.dbapi import OutcomeUnknown, TransactionAborted, UnitOfWork
from resilience.integrations.dbapi.drivers import is_aborted, is_of
from resilience.integrations.dbapi.errors import AutocommitMisuse, is_undone
from resilience.integrations.dbapi.limits import SHOW_STATEMENT_TIMEOUT, SQLiteLimits, shorter_limit
from resilience.integrations.dbapi.units import ABORTED, AUTOCOMMIT
from resilience.policy import Policy
from resilience.runtimes.driving import drive

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, SessionTransaction
    from sqlalchemy.pool import ConnectionPoolEntry

__all__ = ["OutcomeUnknown", "TransactionAborted", "transient", "unit_of_work"]

D = TypeVar("D")
W = TypeVar("W")
C = TypeVar("C", covariant=True)


def transient(error: Exception) -> bool:
    """Whether a unit of work that failed with this error may succeed if it is repeated. For `Retry(on=transient)`.

    True for connections that SQLAlchemy has found dead (`connection_invalidated`), and if the driver's own error is
    transient to `resilience.integrations.dbapi.transient`: deadlocks, serialization failures, locks. Also for a
    `StaleDataError`: another transaction has changed the row, as its version shows. A pool without a free connection
    (`sqlalchemy.exc.TimeoutError`) is not transient: more attempts make it worse.
    """
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or dbapi.transient(_original(error))
    return is_of("sqlalchemy", "StaleDataError", error) or dbapi.transient(error)  # one of the ORM, not imported here


def _original(error: DBAPIError) -> Exception:
    return error.orig if isinstance(error.orig, Exception) else error


class _Engine(Protocol[C]):
    """An `Engine` or `AsyncEngine`, with the type of its connections."""

    @property
    def dialect(self) -> Dialect: ...
    def connect(self) -> C: ...


def unit_of_work(
    policy: Policy[D],
    source: _Engine[W] | Callable[[], W | Awaitable[W]],
    *,
    repeat_unknown_commits: bool = False,
    limit_statements: bool = True,
) -> UnitOfWork[W, D]:
    """Return a decorator: every call of the function is a transaction under the policy, repeated as a whole.

    :param policy: the policy around the unit. `Retry(on=transient)`, with the `transient` of this module, repeats it
        after deadlocks and lost connections; a plain `Retry()` after lost connections only.
    :param source: a `sessionmaker` or `async_sessionmaker` (the function gets a session), an `Engine` or `AsyncEngine`
        (it gets a connection), or a function that returns either.
    :param repeat_unknown_commits: whether to repeat a unit whose commit may have happened; False by default. Use it
        for units that have the same effect if they are executed twice. A `Hedge` needs it, as both attempts may commit.
    :param limit_statements: whether to set the deadline in PostgreSQL (`SET LOCAL statement_timeout`) or SQLite.

    The function gets the session before its own arguments. When it returns, the session is flushed and committed; when
    it raises, rolled back; in any case closed. Nothing is committed after the deadline. The function may be called
    several times, so it should do nothing outside of the transaction, and it must not commit. An `async def` that is
    cut off waits for its rollback one second at most, as with `resilience.integrations.dbapi.unit_of_work`. An engine
    with the isolation level `AUTOCOMMIT` raises `ValueError`.

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
    # An AsyncEngine is recognized by an attribute, because its module cannot be imported without greenlet.
    connect: Any = source
    if isinstance(source, Engine) or hasattr(source, "sync_engine"):
        connect = connect.connect
    if not callable(connect):
        raise TypeError(f"source must be an engine, a sessionmaker or a function that makes a session, not {source!r}")
    return _UnitOfWork(
        policy, connect, repeat_unknown_commits=repeat_unknown_commits, limit_statements=limit_statements
    )


@final
class _UnitOfWork(UnitOfWork[Any, D]):
    @override
    def connection_of(self, made: Any) -> Any:
        """Return the session behind a scoped one, which would be another one in the task of a clean-up."""
        return made.registry() if hasattr(made, "registry") else made

    @override
    def watch(self, connection: Any, committed: Callable[[], None]) -> None:
        bind = blocking = _blocking(connection)
        if _is_session(blocking):  # a listener for each connection would take as long as a transaction
            _listen_to_sessions()
            blocking.info[_COMMITTED] = committed
            bind = blocking.bind  # None if it has several databases
        if bind is not None:
            level = bind.get_execution_options().get("isolation_level", bind.dialect._on_connect_isolation_level)
            if level == "AUTOCOMMIT":
                raise AutocommitMisuse(AUTOCOMMIT)

    @override
    def limits(self, connection: Any) -> _Limits:
        return _Limits(connection)

    @override
    async def prepare(self, connection: Any) -> None:
        flush = getattr(connection, "flush", None)  # only a session has it
        if flush is not None:
            await maybe_await(flush())
        if _postgresql(_blocking(connection)):
            await _run(connection, _refuse_if_aborted)

    @override
    def is_undone(self, error: Exception) -> bool:
        if isinstance(error, DBAPIError):
            return not error.connection_invalidated and is_undone(_original(error))
        return isinstance(error, PendingRollbackError) or is_undone(error)


#: The key of what is called after a commit, in the `info` of a session.
_COMMITTED: Final = "resilience.committed"


@cache
def _listen_to_sessions() -> None:
    from sqlalchemy.orm import Session  # a unit that has a session has imported it

    event.listen(Session, "after_commit", _after_commit)


def _after_commit(session: Session) -> None:
    committed = session.info.get(_COMMITTED)
    if committed is not None and not session.in_nested_transaction():  # that would be the end of a savepoint
        committed()


def _refuse_if_aborted(blocking: Any) -> None:
    """Raise if PostgreSQL would answer a commit with a rollback; with asyncpg, only the server knows, and is asked."""
    for connection in _postgresql(blocking):
        aborted = is_aborted(connection.connection.driver_connection)
        try:
            if aborted is None:
                connection.exec_driver_sql("SELECT 1")
        except DBAPIError as error:
            if transient(error):  # the connection is lost: that is no mistake of the unit
                raise
            raise TransactionAborted(ABORTED) from error
        if aborted:
            raise TransactionAborted(ABORTED)


def _postgresql(blocking: Any) -> list[Connection]:
    """Return the connections to PostgreSQL in a transaction. A session may have several; it has no public list."""
    connections = {blocking}
    if _is_session(blocking):
        root = blocking.get_transaction()
        connections = {connection for connection, *_ in root._connections.values()} if root else set()
    return [it for it in connections if it.in_transaction() and it.dialect.name == "postgresql"]


# --- deadlines -------------------------------------------------------------------------------


@final
class _Limits:
    """Limits the statements of a session or a connection to the time left.

    From the beginning of each transaction, because until then a unit may choose its isolation level, or begin the
    transaction itself. A connection of SQLite is limited at once: that prevents neither, and needs no listener.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._ctx = current_context()
        self._endings: list[Callable[[], None]] = []

    async def __aenter__(self) -> None:
        self._ctx.check()
        await _run(self._connection, self._begin)

    async def __aexit__(self, *error: object) -> None:
        await _run(self._connection, self._end)

    def _begin(self, blocking: Any) -> None:
        if _is_session(blocking):
            if blocking.in_transaction():
                self._limit(blocking.connection())
            self._listen(blocking, "after_begin", self._begun)
        elif blocking.dialect.name == "sqlite":
            self._limit(blocking)
        else:
            if blocking.in_transaction():
                self._limit(blocking)
            self._listen(blocking, "begin", self._limit)

    def _end(self, blocking: Any) -> None:
        """Remove the listener, and the limits that do not end with the transaction."""
        while self._endings:
            self._endings.pop()()

    def _listen(self, blocking: Any, name: str, listener: Callable[..., None]) -> None:
        event.listen(blocking, name, listener)
        self._endings.append(partial(event.remove, blocking, name, listener))

    def _begun(self, session: Session, transaction: SessionTransaction, connection: Connection) -> None:
        if not transaction.nested:
            self._limit(connection)

    def _limit(self, connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            current: str = connection.exec_driver_sql(SHOW_STATEMENT_TIMEOUT).scalar_one()
            if statement := shorter_limit(current, self._ctx):
                _execute_once(connection, statement)
        elif connection.dialect.name == "sqlite":
            pooled = connection.connection
            limits = pooled.info[_LIMITS] = SQLiteLimits(pooled.driver_connection)
            self._endings.append(partial(_remove, limits, pooled.dbapi_connection))
            _drive(pooled.dbapi_connection, lambda _: limits.begin(self._ctx))


def _execute_once(connection: Connection, statement: str) -> None:
    """Execute a statement whose text will not come again; SQLAlchemy would prepare it with asyncpg, and keep it."""
    if connection.dialect.driver == "asyncpg":
        _drive(connection.connection.dbapi_connection, lambda driver: driver.execute(statement))
    else:
        connection.exec_driver_sql(statement)


#: The key of a connection's limits in its `info`.
_LIMITS: Final = "resilience.limits"


@event.listens_for(Pool, "reset")
def _before_return(adapted: Any, record: ConnectionPoolEntry | None, state: object) -> None:
    """Remove the limits of a connection of SQLite before it returns to its pool, where another thread may take it."""
    limits = None if record is None else record.info.pop(_LIMITS, None)
    if limits is not None:
        _remove(limits, adapted)


def _remove(limits: SQLiteLimits, adapted: Any) -> None:
    with suppress(Exception):  # a broken connection raises, and is not used again
        _drive(adapted, lambda _: limits.end())


def _is_session(blocking: object) -> bool:
    return not hasattr(blocking, "exec_driver_sql")


def _blocking(work: Any) -> Any:
    """Return the blocking session or connection behind an asynchronous one."""
    return getattr(work, "sync_session", getattr(work, "sync_connection", work))


async def _run(work: Any, step: Callable[[Any], None]) -> None:
    """Run a step with the blocking session or connection; with an asynchronous one, in SQLAlchemy's greenlet."""
    run_sync = getattr(work, "run_sync", None)
    if run_sync is None:
        step(work)
    else:
        await run_sync(step)


def _drive(adapted: Any, step: Callable[[Any], Coroutine[Any, Any, object]]) -> None:
    """Run a step with the driver's connection; the adapter of an asynchronous driver awaits it in the greenlet."""
    run_async = getattr(adapted, "run_async", None)
    if run_async is None:
        drive(step(adapted))
    else:
        run_async(step)
