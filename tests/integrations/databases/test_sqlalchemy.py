"""SQLAlchemy in units of work: sessions and connections, in threads and in asyncio, on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, create_engine, event, func, insert, select, text
from sqlalchemy.exc import DBAPIError, OperationalError, PendingRollbackError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.orm.exc import StaleDataError

from resilience import DeadlineExceeded, Fallback, Retry, deadline
from resilience.integrations.sqlalchemy import TransactionAborted, transient, unit_of_work
from resilience.testing import script
from tests.conftest import FakeClock
from tests.integrations.databases.models import AGAIN, FOREVER, LONG, Account, Base, Note, lost, notes
from tests.integrations.databases.sqlite import PATIENCE, sqlite_error
from tests.versions import needs

BUSY = sqlite_error(sqlite3.SQLITE_BUSY)


def wrapped(original: BaseException, *, invalidated: bool = False) -> DBAPIError:
    return DBAPIError("select 1", None, original, connection_invalidated=invalidated)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (wrapped(psycopg.errors.DeadlockDetected()), True),
        (wrapped(psycopg.errors.SerializationFailure()), True),
        (wrapped(BUSY), True),
        (wrapped(Exception("whatever"), invalidated=True), True),
        (wrapped(psycopg.errors.UniqueViolation()), False),
        (wrapped(Exception("whatever")), False),
        (psycopg.errors.DeadlockDetected(), True),
        (ConnectionResetError("reset"), True),
        (StaleDataError("UPDATE statement on table 'accounts' expected to update 1 row(s); 0 were matched."), True),
        (PoolTimeout("QueuePool limit of size 5 overflow 10 reached"), False),
        (ValueError("wrong"), False),
    ],
)
def test_transient_covers_errors_of_the_driver_and_dead_connections(error: Exception, expected: bool) -> None:
    assert transient(error) is expected


@needs("sqlalchemy>=2.0.22")  # `get_one`; and 2.0.0 checks no version in SQLite
def test_a_unit_that_has_read_a_stale_version_is_repeated(engine: Engine) -> None:
    """So that no update is lost: the second attempt begins with what the other transaction has committed."""
    sessions, read = sessionmaker(engine), []

    @unit_of_work(AGAIN, sessions)
    def add(session: Session, amount: int) -> None:
        account = session.get_one(Account, 1)
        read.append(account.amount)
        if len(read) == 1:
            with sessions.begin() as other:
                other.get_one(Account, 1).amount += 100
        account.amount += amount

    with sessions.begin() as session:
        session.add(Account(id=1, amount=0))
    add(5)
    with sessions() as session:
        assert (read, session.get_one(Account, 1).amount) == ([0, 100], 105)


def test_a_commit_of_unknown_outcome_is_not_repeated(engine: Engine) -> None:
    """If the connection is lost after the flush, the commit may have happened; if it is lost before, it has not."""

    class Losing(Session):
        at: str

        def flush(self, objects: Any = None) -> None:
            super().flush(objects)
            if self.at == "flush":
                raise lost()

        def commit(self) -> None:
            super().commit()
            raise lost()

    for at, rows in (("commit", 1), ("flush", 0)):
        attempts = []

        @unit_of_work(AGAIN, sessionmaker(engine, class_=type(at, (Losing,), {"at": at})))
        def add(session: Session, at: str = at, attempts: list[int] = attempts) -> None:
            attempts.append(1)
            session.add(Note(text=at))

        with pytest.raises(OperationalError):
            add()
        assert len(attempts) == (1 if at == "commit" else 3)
        assert notes(engine).count(at) == rows


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (wrapped(psycopg.errors.SerializationFailure()), 3),
        (wrapped(psycopg.errors.SerializationFailure(), invalidated=True), 1),
        (wrapped(psycopg.errors.AdminShutdown()), 1),
        (wrapped(BUSY), 3),
        (psycopg.errors.SerializationFailure(), 3),
        (PendingRollbackError("This Session's transaction has been rolled back due to a previous exception"), 3),
    ],
)
def test_a_commit_that_the_database_has_refused_is_repeated(engine: Engine, error: Exception, attempts: int) -> None:
    """If the error says that it has not happened, and the connection still works."""

    class Refused(Session):
        commit = script(error, ...)  # type: ignore[assignment]

    retry = Retry(3, on=type(error), backoff=[0])
    with pytest.raises(type(error)):
        unit_of_work(retry, sessionmaker(engine, class_=Refused))(lambda session: None)()
    assert len(Refused.commit.calls) == attempts  # type: ignore[attr-defined]


@pytest.mark.parametrize("source", [sessionmaker, lambda engine: engine], ids=["session", "connection"])
def test_the_isolation_level_autocommit_is_refused(engine: Engine, source: Any) -> None:
    """Each statement would be committed, and done again by the next attempt. No policy answers instead."""
    other = create_engine("sqlite://", isolation_level="AUTOCOMMIT")
    for each in (other, engine.execution_options(isolation_level="AUTOCOMMIT")):
        with pytest.raises(ValueError, match="connect without autocommit"):
            unit_of_work(Fallback("instead"), source(each))(lambda work: pytest.fail("it began"))()
    other.dispose()


@pytest.mark.parametrize("source", ["session", "connection"])
def test_a_deadline_begins_no_transaction(engine: Engine, source: str) -> None:
    """A unit may choose the isolation level, or begin, as without a deadline."""
    levels = []

    def unit(work: Any) -> None:
        if source == "session":
            work.connection(execution_options={"isolation_level": "READ UNCOMMITTED"})
        else:
            work.execution_options(isolation_level="READ UNCOMMITTED")
        levels.append(work.execute(text("pragma read_uncommitted")).scalar())

    def begins(work: Any) -> None:
        with work.begin():
            work.execute(text("insert into notes (text) values ('a')"))
        work.execute(FOREVER)

    transaction = unit_of_work(AGAIN, sessionmaker(engine) if source == "session" else engine)
    transaction(unit)()
    with deadline(PATIENCE):
        transaction(unit)()
    with deadline(0.3), pytest.raises(OperationalError, match="interrupted"):
        transaction(begins)()
    assert levels == [1, 1]
    assert notes(engine) == ["a"]


@pytest.mark.parametrize("end", ["commit", "error", "close"])
def test_a_connection_is_restored_before_it_returns_to_its_pool(file: Path, end: str) -> None:
    """Another thread may check it out immediately, and set its own limits. Also if the unit closes its session."""
    engine = create_engine(f"sqlite:///{file}", connect_args={"timeout": PATIENCE})
    Base.metadata.create_all(engine)
    waits: list[int] = []
    event.listen(engine, "checkin", lambda it, record: waits.append(*it.execute("pragma busy_timeout").fetchone()))

    @unit_of_work(AGAIN, sessionmaker(engine))
    def add(session: Session) -> None:
        with session.begin_nested():
            session.add(Note(text="a"))
        waits.append(session.execute(text("pragma busy_timeout")).scalar_one())
        if end == "close":
            session.close()
        if end == "error":
            raise ValueError("wrong")

    with deadline(1.0), pytest.raises(ValueError, match="wrong") if end == "error" else nullcontext():
        add()
    assert [waits[0] <= 1000, *waits[1:]] == [True, int(PATIENCE * 1000)]
    engine.dispose()


def test_a_session_that_has_already_begun_is_limited(engine: Engine) -> None:
    """A source may return such a session. When it is used again, without a deadline, nothing limits it.

    The function gets what the source returns, also if that is a scoped session.
    """

    def begun() -> Session:
        session = Session(engine)
        session.connection()
        return session

    scoped = scoped_session(begun)
    for source in (begun, scoped_session(begun), lambda: scoped):
        unit = unit_of_work(AGAIN, source)(lambda session, statement: session.scalar(statement))
        with deadline(0.1), pytest.raises(OperationalError, match="interrupted"):
            unit(FOREVER)
        assert unit(LONG) == 100_000
    assert unit_of_work(AGAIN, lambda: scoped)(lambda session: session)() is scoped


def test_a_session_is_not_limited_after_an_interrupted_unit(
    engine: Engine, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if the interrupt came just after the unit had limited it."""
    scoped = scoped_session(sessionmaker(engine))
    unit = unit_of_work(AGAIN, scoped)
    begin = type(unit.limits(scoped())).__aenter__

    async def interrupted(limits: Any) -> None:
        await begin(limits)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(unit.limits(scoped())), "__aenter__", interrupted)
    with deadline(1), pytest.raises(KeyboardInterrupt):
        unit(lambda session: None)()
    clock.advance(2)
    assert scoped.scalar(text("select 1")) == 1
    scoped.remove()


def test_a_connection_that_outlives_the_session_is_restored(engine: Engine) -> None:
    """It is the source's own, and does not return to its pool."""

    @unit_of_work(AGAIN, lambda: Session(connection))
    def twice(session: Session) -> None:
        for _ in range(2):
            session.add(Note(text="a"))
            session.flush()
            session.rollback()

    with engine.connect() as connection:
        connection.execute(text("pragma busy_timeout = 20000"))
        with deadline(0.3):
            twice()
        time.sleep(0.4)
        assert connection.scalar(LONG) == 100_000
        assert connection.scalar(text("pragma busy_timeout")) == 20000


def test_a_unit_does_not_begin_after_its_deadline(engine: Engine, clock: FakeClock) -> None:
    """It may have passed while the session was made."""

    def late() -> Session:
        clock.advance(20.0)
        return Session(engine)

    with deadline(10.0), pytest.raises(DeadlineExceeded):
        unit_of_work(AGAIN, late)(lambda session: pytest.fail("it began"))()


def test_no_limit_is_sent_to_another_database(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no statement that every database would understand."""
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    monkeypatch.setattr(engine.dialect, "name", "another")
    with deadline(PATIENCE):
        unit_of_work(AGAIN, engine)(lambda connection: connection.execute(text("select 1")))()
    assert statements == ["select 1"]


# --- PostgreSQL ------------------------------------------------------------------------------


def test_a_unit_that_uses_no_database_needs_none() -> None:
    """Its session has not connected, and does not for the commit."""
    engine = create_engine("postgresql+psycopg://127.0.0.1:1/nothing-listens-here")
    assert unit_of_work(AGAIN, sessionmaker(engine))(lambda session: "done")() == "done"


@pytest.mark.parametrize(("block", "attempts"), [(Session.begin, 1), (Session.begin_nested, 3)])
def test_a_unit_that_has_committed_by_itself_is_not_repeated(url: str, block: Any, attempts: int) -> None:
    """Other than one with a savepoint."""
    engine = create_engine(url.replace("://", "+psycopg://"))
    made: list[Session] = []

    @unit_of_work(AGAIN, sessionmaker(engine))
    def add(session: Session) -> None:
        made.append(session)
        with block(session):
            session.add(Note(text="a"))
        raise ConnectionResetError("reset")

    with pytest.raises(ConnectionResetError) as caught:
        add()
    assert getattr(caught.value, "repeatable", True) is (attempts > 1)
    assert (len(made), notes(engine)) == (attempts, ["a"] * (attempts == 1))
    engine.dispose()


def test_a_connection_that_has_already_begun_is_limited(url: str) -> None:
    """Its limit cannot wait for the next transaction."""
    engine = create_engine(url.replace("://", "+psycopg://"))

    def begun() -> Connection:
        connection = engine.connect()
        connection.begin()
        return connection

    with deadline(0.2), pytest.raises(OperationalError, match="statement timeout"):
        unit_of_work(AGAIN, begun)(lambda connection: connection.execute(text("select pg_sleep(20)")))()
    engine.dispose()


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("has_default", [False, True])
def test_a_session_with_several_databases_is_committed(
    url: str, engine: Engine, has_default: bool, swallows: bool
) -> None:
    """If PostgreSQL has not aborted the transaction in one of them."""
    postgres = create_engine(url.replace("://", "+psycopg://"))

    @unit_of_work(AGAIN, sessionmaker(engine if has_default else None, binds={Note: postgres}))
    def add(session: Session) -> None:
        if has_default:
            session.add(Account(id=1, amount=0))
        session.add(Note(text="a"))
        session.flush()
        if swallows:
            with pytest.raises(DBAPIError):
                session.scalar(select(Note.id / 0))

    with pytest.raises(TransactionAborted) if swallows else nullcontext():
        add()
    assert notes(postgres) == ["a"] * (not swallows)
    with Session(engine) as session:
        assert (session.get(Account, 1) is not None) is (has_default and not swallows)
    postgres.dispose()


def test_a_unit_whose_connection_is_lost_as_it_is_asked_is_repeated(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with asyncpg, which does not know whether PostgreSQL has aborted the transaction."""
    monkeypatch.setattr("resilience.integrations.sqlalchemy.is_aborted", lambda _connection: None)
    engine = create_engine(url.replace("://", "+psycopg://"))
    attempts: list[Connection] = []

    @unit_of_work(AGAIN, engine)
    def add(connection: Connection) -> None:
        attempts.append(connection)
        connection.execute(insert(Note), {"text": f"attempt {len(attempts)}"})
        if len(attempts) == 1:
            driver: psycopg.Connection = connection.connection.driver_connection  # type: ignore[assignment]
            with psycopg.connect(url, autocommit=True) as other:
                other.execute("select pg_terminate_backend(%s)", [driver.info.backend_pid])

    add()
    assert notes(engine) == ["attempt 2"]
    engine.dispose()


@pytest.mark.parametrize("is_scoped", [False, True])
async def test_a_connection_that_is_lost_after_the_last_statement_is_tried_again(url: str, is_scoped: bool) -> None:
    """With asyncpg the server is asked before the commit, so nothing was committed, and no statement has failed."""
    engine = create_async_engine(url.replace("://", "+asyncpg://"))
    scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    source: Any = (lambda: scoped) if is_scoped else engine
    attempts: list[str] = []

    @unit_of_work(AGAIN, source)
    async def add(connection: AsyncConnection) -> None:
        attempts.append(f"attempt {len(attempts) + 1}")
        process = await connection.scalar(select(func.pg_backend_pid()))
        await connection.execute(insert(Note), {"text": attempts[-1]})
        if len(attempts) == 1:
            with psycopg.connect(url) as other:
                other.execute("select pg_terminate_backend(%s, 5000)", [process])

    await add()
    async with engine.connect() as connection:
        assert list(await connection.scalars(select(Note.text))) == ["attempt 2"]
    await engine.dispose()


async def test_limits_fill_no_cache_of_prepared_statements(url: str) -> None:
    """asyncpg keeps each text, and each unit has another time left: those of the user would have to leave."""
    engine = create_async_engine(url.replace("://", "+asyncpg://"))

    @unit_of_work(AGAIN, engine)
    async def prepared(connection: AsyncConnection) -> list[str]:
        return list(await connection.scalars(text("select statement from pg_prepared_statements")))

    async with deadline(20.0):
        assert [it for it in await prepared() if it.startswith("SET")] == []
    await engine.dispose()
