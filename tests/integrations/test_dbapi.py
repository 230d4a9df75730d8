"""Units of work against real databases: SQLite files, and PostgreSQL where it is installed."""

from __future__ import annotations

import inspect
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiosqlite
import anyio
import asyncpg
import psycopg
import psycopg2
import pytest
from psycopg import errors as pg

from resilience import DeadlineExceeded, Fallback, Policy, Retry, Timeout, deadline
from resilience.integrations.dbapi import OutcomeUnknown, StatementLimits, sqlstate, transient, unit_of_work
from tests.conftest import FakeClock
from tests.integrations.postgres_server import PostgresServer

#: Much longer than anything here takes, and much shorter than a hang.
PATIENCE = 20.0

AGAIN = Retry(3, on=transient, backoff=[0])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with one table."""
    file = tmp_path / "test.db"
    with sqlite3.connect(file) as connection:
        connection.execute("create table notes (text)")
    connection.close()
    return file


def connecting(path: Path, timeout: float = 0.0) -> Callable[[], sqlite3.Connection]:
    return lambda: sqlite3.connect(path, timeout=timeout, check_same_thread=False)


def notes(path: Path) -> list[str]:
    connection = sqlite3.connect(path)
    try:
        return [text for (text,) in connection.execute("select text from notes order by rowid")]
    finally:
        connection.close()


def note(connection: sqlite3.Connection, text: str) -> None:
    connection.execute("insert into notes values (?)", (text,))


class Locked:
    """Another connection, which holds the lock of a database until it is let go."""

    def __init__(self, path: Path, statement: str = "begin immediate") -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute(statement).fetchall()

    def release(self, event: object = None) -> None:
        self._connection.close()


# --- which errors are transient ---------------------------------------------------------------


def made(name: str, *, bases: tuple[type, ...] = (Exception,), **attributes: Any) -> Exception:
    """An error of a driver that is not installed here."""
    package, _, kind = name.rpartition(".")
    arguments = attributes.pop("args", ())
    error: Exception = type(kind, bases, {"__module__": package})(*arguments)
    for key, value in attributes.items():
        setattr(error, key, value)
    return error


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("as the database says")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (pg.SerializationFailure(), True),
        (pg.DeadlockDetected(), True),
        (pg.LockNotAvailable(), True),
        (pg.AdminShutdown(), True),
        (pg.CrashShutdown(), True),
        (pg.CannotConnectNow(), True),
        (pg.TooManyConnections(), True),
        (pg.ConnectionFailure(), True),
        (psycopg.OperationalError("the connection is lost"), True),
        (pg.ProtocolViolation(), False),
        (pg.QueryCanceled(), False),
        (pg.UniqueViolation(), False),
        (pg.UndefinedTable(), False),
        (psycopg.InterfaceError("the cursor is closed"), False),
        (asyncpg.DeadlockDetectedError("x"), True),
        (asyncpg.ConnectionDoesNotExistError("x"), True),
        (asyncpg.UniqueViolationError("x"), False),
        (psycopg2.OperationalError("server closed the connection unexpectedly"), True),
        (psycopg2.InterfaceError("connection already closed"), False),
        (made("psycopg2.errors.DeadlockDetected", pgcode="40P01"), True),
        (made("psycopg2.errors.UniqueViolation", pgcode="23505"), False),
        (sqlite_error(sqlite3.SQLITE_BUSY), True),
        (sqlite_error(sqlite3.SQLITE_BUSY_SNAPSHOT), True),
        (sqlite_error(sqlite3.SQLITE_LOCKED), True),
        (sqlite_error(sqlite3.SQLITE_INTERRUPT), False),
        (sqlite_error(sqlite3.SQLITE_CONSTRAINT_UNIQUE), False),
        (sqlite3.OperationalError("no code"), False),
        (made("pymysql.err.OperationalError", args=(1213, "Deadlock found")), True),
        (made("MySQLdb.OperationalError", args=(1205, "Lock wait timeout exceeded")), True),
        (made("mysql.connector.errors.DatabaseError", args=(1205, "Lock wait", "HY000"), sqlstate="HY000"), True),
        (made("mysql.connector.errors.DatabaseError", args=(1064, "syntax", "42000"), sqlstate="42000"), False),
        (made("elsewhere.OperationalError", args=(1213, "not of MySQL")), False),
        (ConnectionResetError("reset"), True),
        (ValueError("wrong"), False),
    ],
)
def test_which_errors_are_transient(error: Exception, expected: bool) -> None:
    """What the database has undone, or could not begin: yes. Mistakes, constraints, cancelled statements: no."""
    assert transient(error) is expected


def test_the_sqlstate_of_an_error() -> None:
    """Whatever the driver calls it; a driver without one has none."""
    assert sqlstate(pg.DeadlockDetected()) == "40P01"
    assert sqlstate(made("psycopg2.errors.DeadlockDetected", pgcode="40P01")) == "40P01"
    assert sqlstate(psycopg.OperationalError()) is None
    assert sqlstate(made("some.Error", sqlstate=12345)) is None


# --- the unit of work -------------------------------------------------------------------------


def test_a_unit_is_committed_when_it_returns(path: Path) -> None:
    """And hands on what it returns; the caller does not give the connection."""
    unit = unit_of_work(AGAIN, connecting(path))

    @unit
    def add(connection: sqlite3.Connection, text: str, *, twice: bool = False) -> int:
        """Add a note."""
        for _ in range(1 + twice):
            note(connection, text)
        return connection.total_changes

    assert add("a") == 1
    assert add("b", twice=True) == 2
    assert notes(path) == ["a", "b", "b"]
    assert (add.__name__, add.__doc__) == ("add", "Add a note.")
    assert list(inspect.signature(add).parameters) == ["text", "twice"]


def test_a_unit_that_raises_is_rolled_back(path: Path) -> None:
    """And not repeated, unless the policy says so."""
    calls = []

    @unit_of_work(AGAIN, connecting(path))
    def add(connection: sqlite3.Connection) -> None:
        calls.append(1)
        note(connection, "a")
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        add()
    assert (len(calls), notes(path)) == (1, [])


def test_the_whole_unit_is_done_again(path: Path) -> None:
    """What the first attempt has done is undone, its connection closed, and the next one has a fresh one."""
    connections = []

    @unit_of_work(AGAIN, connecting(path))
    def add(connection: sqlite3.Connection) -> int:
        connections.append(connection)
        note(connection, f"attempt {len(connections)}")
        if len(connections) < 3:
            raise sqlite_error(sqlite3.SQLITE_BUSY)
        return len(connections)

    assert add() == 3
    assert notes(path) == ["attempt 3"]
    for connection in connections:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("select 1")


@pytest.mark.parametrize("statement", ["begin immediate", "begin exclusive"])
def test_a_locked_database_is_tried_again(path: Path, statement: str) -> None:
    """SQLITE_BUSY, from a real second connection."""
    other = Locked(path, statement)
    unit = unit_of_work(Retry(2, on=transient, backoff=[0], on_retry=other.release), connecting(path))
    unit(note)("a")
    assert notes(path) == ["a"]


def test_a_commit_that_found_the_database_locked_is_tried_again(path: Path) -> None:
    """A reader keeps a commit from happening: then it has certainly not happened."""
    other = Locked(path, "begin")
    other._connection.execute("select * from notes").fetchall()
    failures: list[str] = []

    def release(event: Any) -> None:
        failures.append(event.outcome.error.sqlite_errorname)
        other.release()

    unit_of_work(Retry(2, on=transient, backoff=[0], on_retry=release), connecting(path))(note)("a")
    assert (failures, notes(path)) == (["SQLITE_BUSY"], ["a"])


class LosesConnection:
    """A connection that commits, and breaks before it can say so."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def commit(self) -> None:
        self._connection.commit()
        raise psycopg.OperationalError("server closed the connection unexpectedly")


def test_a_commit_of_unknown_outcome_is_not_repeated(path: Path) -> None:
    """The work may have been done: it has been. Unless it may be done twice."""
    connect = connecting(path)
    with pytest.raises(psycopg.OperationalError) as caught:
        unit_of_work(AGAIN, lambda: LosesConnection(connect()))(note)("a")
    assert caught.value.repeatable is False  # type: ignore[attr-defined]
    assert notes(path) == ["a"]
    with pytest.raises(psycopg.OperationalError):
        unit_of_work(AGAIN, lambda: LosesConnection(connect()), repeat_unknown_commits=True)(note)("b")
    assert notes(path) == ["a", "b", "b", "b"]


def test_nothing_is_committed_after_the_deadline(path: Path, clock: FakeClock) -> None:
    """Whoever waited for it has been told that it failed."""

    @unit_of_work(AGAIN, connecting(path))
    def add(connection: sqlite3.Connection) -> None:
        note(connection, "late")
        clock.advance(2.0)

    with deadline(1.0), pytest.raises(DeadlineExceeded, match="nothing is committed"):
        add()
    assert notes(path) == []


def test_an_attempt_that_was_walked_away_from_commits_nothing(path: Path) -> None:
    """In threads it goes on, and finds its time over before the commit. The next attempt has done the work."""
    second_is_done, first_is_done = threading.Event(), threading.Event()
    attempts = []

    class Closing(sqlite3.Connection):
        def close(self) -> None:
            super().close()
            if attempts[0] == self:
                first_is_done.set()

    @unit_of_work(
        Policy.wrap(AGAIN, Timeout(0.2)),
        lambda: sqlite3.connect(path, factory=Closing, timeout=PATIENCE, check_same_thread=False),
    )
    def add(connection: sqlite3.Connection) -> str:
        attempts.append(connection)
        text = f"attempt {len(attempts)}"
        if len(attempts) == 1:
            second_is_done.wait(PATIENCE)
        note(connection, text)
        return text

    assert add() == "attempt 2"
    second_is_done.set()
    assert first_is_done.wait(PATIENCE)
    assert notes(path) == ["attempt 2"]


def test_a_commit_in_the_middle_of_which_the_caller_left_is_not_repeated(path: Path) -> None:
    """It may still happen. The next attempt is told so, and does nothing."""
    may_commit, committed = threading.Event(), threading.Event()

    class Slow(sqlite3.Connection):
        def commit(self) -> None:
            may_commit.wait(PATIENCE)
            super().commit()
            committed.set()

    unit = unit_of_work(
        Policy.wrap(AGAIN, Timeout(0.2)), lambda: sqlite3.connect(path, factory=Slow, check_same_thread=False)
    )
    with pytest.raises(OutcomeUnknown, match="may have been committed"):
        unit(note)("a")
    may_commit.set()
    assert committed.wait(PATIENCE)
    assert notes(path) == ["a"]


def test_a_connection_that_cannot_be_made_is_tried_again(path: Path) -> None:
    """Connecting is a part of the attempt."""
    steps: list[Any] = [ConnectionRefusedError("refused"), None]

    def connect() -> sqlite3.Connection:
        if error := steps.pop(0):
            raise error
        return sqlite3.connect(path)

    unit_of_work(AGAIN, connect)(note)("a")
    assert notes(path) == ["a"]


def test_a_fallback_answers_for_the_unit(path: Path) -> None:
    """As for any other call."""

    @unit_of_work(Fallback("none"), connecting(path))
    def read(connection: sqlite3.Connection) -> str:
        raise sqlite_error(sqlite3.SQLITE_BUSY)

    assert read() == "none"


def test_closing_that_fails_changes_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What counts has been committed by then."""

    class Unclosable(sqlite3.Connection):
        def close(self) -> None:
            super().close()
            raise OSError("already gone")

    unit_of_work(AGAIN, lambda: sqlite3.connect(path, factory=Unclosable))(note)("a")
    assert notes(path) == ["a"]
    assert "closing a Unclosable raised" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((None, sqlite3.connect), {}, TypeError, "policy must be a policy, not None"),
        ((AGAIN, "test.db"), {}, TypeError, "connect must be callable, not 'test.db'"),
        ((AGAIN, sqlite3.connect), {"repeat_unknown_commits": 1}, TypeError, "repeat_unknown_commits must be True or"),
        ((AGAIN, sqlite3.connect), {"limit_statements": None}, TypeError, "limit_statements must be True or False"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, options: Any, error: type[Exception], message: str) -> None:
    """Where they are written, with the value."""
    with pytest.raises(error, match=message):
        unit_of_work(*arguments, **options)


# --- deadlines in SQLite ----------------------------------------------------------------------

FOREVER = "with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) from n"


def test_a_deadline_interrupts_a_statement(path: Path) -> None:
    """Of a unit of work, and of a block."""
    began = time.monotonic()
    with deadline(0.1), pytest.raises(sqlite3.OperationalError, match="interrupted"):
        unit_of_work(AGAIN, connecting(path))(lambda connection: connection.execute(FOREVER).fetchall())()
    connection = connecting(path)()
    with deadline(0.1), StatementLimits(connection), pytest.raises(sqlite3.OperationalError, match="interrupted"):
        connection.execute(FOREVER).fetchall()
    connection.close()
    assert time.monotonic() - began < PATIENCE / 2


def test_a_deadline_ends_the_wait_for_a_lock_and_is_taken_back(path: Path) -> None:
    """The connection's own `timeout` is longer, and holds again after the block."""
    other = Locked(path)
    connection = connecting(path, timeout=PATIENCE)()
    began = time.monotonic()
    with deadline(0.1), StatementLimits(connection):
        assert 0 < connection.execute("pragma busy_timeout").fetchone()[0] <= 100
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            note(connection, "a")
    assert time.monotonic() - began < PATIENCE / 2
    assert connection.execute("pragma busy_timeout").fetchone()[0] == PATIENCE * 1000
    connection.execute("select count(*) from notes").fetchall()
    connection.close()
    other.release()


def test_without_a_deadline_nothing_is_limited(path: Path) -> None:
    """A connection that would not wait for a lock at all does not wait for the deadline either."""
    connection = connecting(path, timeout=1.5)()
    with StatementLimits(connection):
        assert connection.execute("pragma busy_timeout").fetchone()[0] == 1500
    connection.close()
    connection = connecting(path, timeout=0)()
    with deadline(5.0), StatementLimits(connection):
        assert connection.execute("pragma busy_timeout").fetchone()[0] == 0
    connection.close()


def test_a_block_does_not_begin_when_the_time_is_over(path: Path) -> None:
    """0 would mean no limit to the database."""
    connection = connecting(path)()
    with deadline(0), pytest.raises(DeadlineExceeded), StatementLimits(connection):
        pytest.fail("it began")
    connection.close()


# --- asyncio ----------------------------------------------------------------------------------


async def anote(connection: aiosqlite.Connection, text: str) -> str:
    await connection.execute("insert into notes values (?)", (text,))
    return text


def test_an_asynchronous_unit_is_done_again_as_a_whole(path: Path) -> None:
    """The same rules for `async def`, with a driver whose connections are awaited."""

    async def main() -> None:
        other = Locked(path)
        policy = Retry(2, on=transient, backoff=[0], on_retry=other.release)
        add = unit_of_work(policy, lambda: aiosqlite.connect(path, timeout=0))(anote)
        assert inspect.iscoroutinefunction(add)
        assert await add("a") == "a"
        with pytest.raises(ValueError, match="wrong"):
            await unit_of_work(AGAIN, lambda: aiosqlite.connect(path))(fails)()
        assert notes(path) == ["a"]

    async def fails(connection: aiosqlite.Connection) -> None:
        await anote(connection, "b")
        raise ValueError("wrong")

    anyio.run(main)


def test_an_asynchronous_unit_keeps_to_its_deadline(path: Path) -> None:
    """An aiosqlite statement runs in a thread, where a cancellation alone would leave it running."""

    async def main() -> None:
        add = unit_of_work(AGAIN, lambda: aiosqlite.connect(path))(forever)
        with deadline(0.1), pytest.raises(sqlite3.OperationalError, match="interrupted"):
            await add()

    async def forever(connection: aiosqlite.Connection) -> None:
        await connection.execute(FOREVER)

    anyio.run(main)


def test_a_cancelled_unit_is_rolled_back_and_closed(path: Path) -> None:
    """A Timeout cancels it; the next attempt does the work."""
    attempts = []

    async def add(connection: aiosqlite.Connection) -> None:
        attempts.append(connection)
        await anote(connection, f"attempt {len(attempts)}")
        if len(attempts) == 1:
            await anyio.sleep(PATIENCE)

    async def main() -> None:
        await unit_of_work(Policy.wrap(AGAIN, Timeout(0.5)), lambda: aiosqlite.connect(path))(add)()

    anyio.run(main)
    assert notes(path) == ["attempt 2"]
    assert not any(connection._running for connection in attempts)


# --- PostgreSQL -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    server.wait(psycopg.connect)
    yield server
    server.stop()


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    """A database with an empty table, in which a row 'lost' breaks the connection in the middle of its commit."""
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("drop table if exists notes")
        connection.execute("create table notes (text text)")
        connection.execute(
            "create or replace function leave() returns trigger language plpgsql as "
            "$$ begin perform pg_terminate_backend(pg_backend_pid()); return null; end $$"
        )
        connection.execute(
            "create constraint trigger leaving after insert on notes deferrable initially deferred "
            "for each row when (new.text = 'lost') execute function leave()"
        )
    return postgres.url


def rows(url: str) -> list[str]:
    with psycopg.connect(url) as connection:
        return [text for (text,) in connection.execute("select text from notes order by text")]


@pytest.fixture(params=[psycopg, psycopg2], ids=["psycopg", "psycopg2"])
def driver(request: pytest.FixtureRequest) -> Any:
    return request.param


def execute(connection: Any, statement: str, *parameters: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)


def test_a_serialization_failure_is_done_again(url: str, driver: Any) -> None:
    """Two transactions that each read what the other writes: one of them is told to do it again."""
    attempts = []

    def connect() -> Any:
        connection = driver.connect(url)
        execute(connection, "set session characteristics as transaction isolation level serializable")
        connection.commit()
        return connection

    @unit_of_work(AGAIN, connect)
    def count_and_add(connection: Any, other: Callable[[], None] | None = None) -> None:
        attempts.append(connection)
        execute(connection, "select count(*) from notes")
        if other is not None and len(attempts) == 1:
            other()
        execute(connection, "insert into notes values ('x')")

    count_and_add(other=count_and_add)
    assert len(attempts) == 3
    assert rows(url) == ["x", "x"]


def test_a_lost_connection_is_done_again(url: str, driver: Any) -> None:
    """A server that ends the connection in the middle has undone the transaction."""
    attempts = []

    @unit_of_work(AGAIN, lambda: driver.connect(url))
    def add(connection: Any) -> None:
        attempts.append(connection)
        execute(connection, "insert into notes values (%s)", f"attempt {len(attempts)}")
        if len(attempts) == 1:
            execute(connection, "select pg_terminate_backend(pg_backend_pid())")

    add()
    assert rows(url) == ["attempt 2"]
    assert all(connection.closed for connection in attempts)


def test_a_connection_that_is_lost_in_the_commit_is_final(url: str, driver: Any) -> None:
    """Even though the error is the same as before it."""
    attempts = []

    @unit_of_work(AGAIN, lambda: driver.connect(url))
    def add(connection: Any) -> None:
        attempts.append(connection)
        execute(connection, "insert into notes values ('lost')")

    with pytest.raises(driver.OperationalError) as caught:
        add()
    assert transient(caught.value)
    assert len(attempts) == 1


def test_a_deadline_cancels_the_statement_in_the_server(url: str, driver: Any) -> None:
    """The statement ends there, too; and the connection's next transaction is not limited."""
    began = time.monotonic()
    with deadline(0.2), pytest.raises(driver.Error) as caught:
        unit_of_work(AGAIN, lambda: driver.connect(url))(lambda it: execute(it, "select pg_sleep(20)"))()
    assert sqlstate(caught.value) == "57014"
    assert time.monotonic() - began < PATIENCE / 2

    connection = driver.connect(url)
    with deadline(PATIENCE), StatementLimits(connection), connection.cursor() as cursor:
        cursor.execute("show statement_timeout")
        assert cursor.fetchone()[0].endswith("ms")
    connection.rollback()
    with connection.cursor() as cursor:
        cursor.execute("show statement_timeout")
        assert cursor.fetchone()[0] == "0"
    connection.close()


def test_asynchronous_psycopg(url: str) -> None:
    """A lost connection, and a deadline."""
    attempts = []

    async def add(connection: psycopg.AsyncConnection[Any]) -> None:
        attempts.append(connection)
        await connection.execute("insert into notes values (%s)", (f"attempt {len(attempts)}",))
        if len(attempts) == 1:
            await connection.execute("select pg_terminate_backend(pg_backend_pid())")

    async def sleep(connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute("select pg_sleep(20)")

    async def main() -> None:
        unit = unit_of_work(AGAIN, lambda: psycopg.AsyncConnection.connect(url))
        await unit(add)()
        with deadline(0.2), pytest.raises(pg.QueryCanceled):
            await unit(sleep)()

    anyio.run(main)
    assert rows(url) == ["attempt 2"]
