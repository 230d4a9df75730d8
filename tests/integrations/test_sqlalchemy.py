"""SQLAlchemy's sessions and connections in units of work, on SQLite and, where it is installed, on PostgreSQL."""

from __future__ import annotations

import inspect
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psycopg
import pytest
from sqlalchemy import Connection, Engine, String, create_engine, event, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from resilience import DeadlineExceeded, Policy, Retry, Timeout, deadline
from resilience.integrations.sqlalchemy import OutcomeUnknown, transient, unit_of_work
from tests.conftest import FakeClock
from tests.integrations.postgres_server import PostgresServer

#: Much longer than anything here takes, and much shorter than a hang.
PATIENCE = 20.0

AGAIN = Retry(3, on=transient, backoff=[0])

FOREVER = text("with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) from n")


class Base(DeclarativeBase):
    pass


class Note(Base):
    __tablename__ = "notes"
    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str] = mapped_column(String(40), unique=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "test.db"


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    """An engine that does not wait for locks."""
    it = create_engine(f"sqlite:///{path}", connect_args={"timeout": 0})
    Base.metadata.create_all(it)
    yield it
    it.dispose()


def notes(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(select(Note.text).order_by(Note.id)))


class Locked:
    """Another connection, which holds the lock of a database until it is let go."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("begin immediate")

    def release(self, event: object = None) -> None:
        self._connection.close()


def lost(error: type[DBAPIError] = OperationalError) -> DBAPIError:
    return error("select 1", None, psycopg.OperationalError("gone"), connection_invalidated=True)


# --- which errors are transient ---------------------------------------------------------------


def wrapped(original: BaseException, *, invalidated: bool = False) -> DBAPIError:
    return DBAPIError("select 1", None, original, connection_invalidated=invalidated)


def busy() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (wrapped(psycopg.errors.DeadlockDetected()), True),
        (wrapped(psycopg.errors.SerializationFailure()), True),
        (wrapped(busy()), True),
        (wrapped(Exception("whatever"), invalidated=True), True),
        (wrapped(psycopg.errors.UniqueViolation()), False),
        (wrapped(Exception("whatever")), False),
        (psycopg.errors.DeadlockDetected(), True),
        (ConnectionResetError("reset"), True),
        (PoolTimeout("QueuePool limit of size 5 overflow 10 reached"), False),
        (ValueError("wrong"), False),
    ],
)
def test_which_errors_are_transient(error: Exception, expected: bool) -> None:
    """What the driver's error says, and connections that the pool has found dead."""
    assert transient(error) is expected


# --- units of work ----------------------------------------------------------------------------


def test_a_session_is_committed_and_closed(engine: Engine) -> None:
    """What was added is there afterwards; the caller does not give the session."""

    @unit_of_work(AGAIN, sessionmaker(engine))
    def add(session: Session, text: str) -> int:
        note = Note(text=text)
        session.add(note)
        session.flush()
        return note.id

    assert add("a") == 1
    assert notes(engine) == ["a"]
    assert list(inspect.signature(add).parameters) == ["text"]
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["engine", "sessionmaker", "scoped", "function"])
def test_the_sources_of_a_unit(engine: Engine, kind: str) -> None:
    """An engine gives connections, everything else is called."""
    sources: dict[str, Any] = {
        "engine": engine,
        "sessionmaker": sessionmaker(engine),
        "scoped": scoped_session(sessionmaker(engine)),
        "function": lambda: Session(engine),
    }
    given: list[Any] = []

    @unit_of_work(AGAIN, sources[kind])
    def add(work: Any) -> None:
        given.append(work)
        work.execute(text("insert into notes (text) values ('a')"))

    with deadline(PATIENCE):
        add()
    assert isinstance(given[0], Connection if kind == "engine" else Session)
    assert notes(engine) == ["a"]


def test_a_locked_database_is_tried_again_with_a_fresh_session(engine: Engine, path: Path) -> None:
    """The failed one is rolled back and closed."""
    other = Locked(path)
    sessions = []

    @unit_of_work(Retry(2, on=transient, backoff=[0], on_retry=other.release), sessionmaker(engine))
    def add(session: Session) -> None:
        sessions.append(session)
        session.add(Note(text=f"attempt {len(sessions)}"))

    add()
    assert notes(engine) == ["attempt 2"]
    assert sessions[0] is not sessions[1]
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]


def test_a_mistake_is_not_repeated(engine: Engine) -> None:
    """A constraint says no every time."""
    attempts = []

    @unit_of_work(AGAIN, sessionmaker(engine))
    def add(session: Session) -> None:
        attempts.append(session)
        session.add_all([Note(text="same"), Note(text="same")])

    with pytest.raises(IntegrityError):
        add()
    assert (len(attempts), notes(engine)) == (1, [])


def test_a_plain_retry_repeats_lost_connections_only(engine: Engine) -> None:
    """The default of `on` knows the network; deadlocks and locks are named by our `transient`."""
    for error, expected in ((lost(), 3), (wrapped(busy()), 1)):
        attempts = []

        @unit_of_work(Retry(3, backoff=[0]), engine)
        def fail(connection: Connection, error: DBAPIError = error, attempts: list[int] = attempts) -> None:
            attempts.append(1)
            raise error

        with pytest.raises(DBAPIError):
            fail()
        assert len(attempts) == expected


def test_a_commit_of_unknown_outcome_is_not_repeated(engine: Engine) -> None:
    """A connection that is lost after the flush may have committed; before it, it has not."""

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


def test_a_commit_that_found_the_database_locked_is_tried_again(engine: Engine, path: Path) -> None:
    """A reader keeps it from happening, and so it certainly has not happened."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("begin")
    other.execute("select * from notes").fetchall()

    @unit_of_work(Retry(2, on=transient, backoff=[0], on_retry=lambda event: other.close()), sessionmaker(engine))
    def add(session: Session) -> None:
        session.add(Note(text="a"))

    add()
    assert notes(engine) == ["a"]


def test_nothing_is_committed_after_the_deadline(engine: Engine, clock: FakeClock) -> None:
    """Whoever waited for it has been told that it failed."""

    @unit_of_work(AGAIN, sessionmaker(engine))
    def add(session: Session) -> None:
        session.add(Note(text="late"))
        session.flush()
        clock.advance(2.0)

    with deadline(1.0), pytest.raises(DeadlineExceeded):
        add()
    assert notes(engine) == []


def test_a_deadline_interrupts_a_statement_and_is_taken_back(engine: Engine) -> None:
    """The connection goes back to the pool as it was."""
    began = time.monotonic()
    with deadline(0.1), pytest.raises(OperationalError, match="interrupted"):
        unit_of_work(AGAIN, sessionmaker(engine))(lambda session: session.execute(FOREVER))()
    assert time.monotonic() - began < PATIENCE / 2
    with deadline(PATIENCE):
        unit_of_work(AGAIN, engine)(lambda connection: connection.execute(text("select 1")))()
    with engine.connect() as connection:
        assert connection.execute(text("pragma busy_timeout")).scalar() == 0
        counting = (
            "with recursive n(i) as (select 1 union all select i + 1 from n where i < 100000) select max(i) from n"
        )
        assert connection.execute(text(counting)).scalar() == 100000


def test_limits_can_be_left_out(engine: Engine) -> None:
    """Then no statement of ours is sent."""
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    with deadline(PATIENCE):
        unit_of_work(AGAIN, engine, limit_statements=False)(lambda connection: connection.execute(text("select 1")))()
    assert statements == ["select 1"]


# --- asyncio ----------------------------------------------------------------------------------


@asynccontextmanager
async def async_engine(path: Path) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", connect_args={"timeout": 0})
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    try:
        yield engine
    finally:
        await engine.dispose()


def test_an_asynchronous_session_is_done_again_as_a_whole(path: Path) -> None:
    """A lock, a commit, a mistake: as with blocking sessions."""
    sessions = []

    async def add(session: AsyncSession, text: str) -> str:
        sessions.append(session)
        session.add(Note(text=text))
        return text

    async def main() -> None:
        async with async_engine(path) as engine:
            other = Locked(path)
            retry = Retry(2, on=transient, backoff=[0], on_retry=other.release)
            unit = unit_of_work(retry, async_sessionmaker(engine))
            assert await unit(add)("a") == "a"
            assert len(sessions) == 2
            with pytest.raises(IntegrityError):
                await unit(add)("a")
            assert len(sessions) == 3

            async def read(connection: AsyncConnection) -> list[str]:
                return list(await connection.scalars(select(Note.text)))

            with deadline(PATIENCE):
                assert await unit_of_work(retry, engine)(read)() == ["a"]

    anyio.run(main)


def test_an_asynchronous_statement_keeps_to_the_deadline(path: Path) -> None:
    """For sessions and for connections."""

    async def forever(work: Any) -> None:
        await work.execute(FOREVER)

    async def main() -> None:
        async with async_engine(path) as engine:
            for source in (engine, async_sessionmaker(engine)):
                with deadline(0.1), pytest.raises(OperationalError, match="interrupted"):
                    await unit_of_work(AGAIN, source)(forever)()

    anyio.run(main)


def test_a_cancelled_unit_gives_its_connection_back(path: Path) -> None:
    """A Timeout cancels the first attempt; the second one does the work."""
    attempts = []

    async def add(session: AsyncSession) -> None:
        attempts.append(session)
        session.add(Note(text=f"attempt {len(attempts)}"))
        await session.flush()
        if len(attempts) == 1:
            await anyio.sleep(PATIENCE)

    async def main() -> None:
        async with async_engine(path) as engine:
            unit = unit_of_work(Policy.wrap(AGAIN, Timeout(0.5)), async_sessionmaker(engine))
            await unit(add)()
            assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
            async with engine.connect() as connection:
                assert list(await connection.scalars(select(Note.text))) == ["attempt 2"]

    anyio.run(main)


def test_a_cancelled_commit_is_not_repeated(path: Path) -> None:
    """Nobody knows how far it came."""

    class Slow(AsyncSession):
        async def commit(self) -> None:
            await super().commit()
            await anyio.sleep(PATIENCE)

    async def add(session: AsyncSession) -> None:
        session.add(Note(text="a"))

    async def main() -> None:
        async with async_engine(path) as engine:
            unit = unit_of_work(Policy.wrap(AGAIN, Timeout(0.3)), async_sessionmaker(engine, class_=Slow))
            with pytest.raises(OutcomeUnknown):
                await unit(add)()
            async with engine.connect() as connection:
                assert list(await connection.scalars(select(Note.text))) == ["a"]

    anyio.run(main)


# --- PostgreSQL -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    server.wait(psycopg.connect)
    yield server
    server.stop()


TERMINATE = text("select pg_terminate_backend(pg_backend_pid())")


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    """The address without its scheme; a database with an empty table."""
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("drop table if exists notes")
        connection.execute("create table notes (id serial primary key, text varchar(40) unique)")
    return postgres.url.removeprefix("postgresql")


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_postgresql_blocking(url: str, driver: str) -> None:
    """A lost connection is done again, and a deadline ends a statement in the server."""
    engine = create_engine(f"postgresql+{driver}{url}")
    attempts = []

    @unit_of_work(AGAIN, sessionmaker(engine))
    def add(session: Session) -> None:
        attempts.append(1)
        session.add(Note(text=f"attempt {len(attempts)}"))
        session.flush()
        if len(attempts) == 1:
            session.execute(TERMINATE)

    add()
    assert notes(engine) == ["attempt 2"]
    with deadline(0.3), pytest.raises(OperationalError, match="statement timeout"):
        unit_of_work(AGAIN, engine)(lambda connection: connection.execute(text("select pg_sleep(20)")))()
    with engine.connect() as connection:
        assert connection.execute(text("show statement_timeout")).scalar() == "0"
    engine.dispose()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_postgresql_asynchronous(url: str, driver: str) -> None:
    """The same, also with asyncpg, which is no DB-API driver by itself."""
    attempts = []

    async def add(session: AsyncSession) -> None:
        attempts.append(1)
        session.add(Note(text=f"attempt {len(attempts)}"))
        await session.flush()
        if len(attempts) == 1:
            await session.execute(TERMINATE)

    async def sleep(connection: AsyncConnection) -> None:
        await connection.execute(text("select pg_sleep(20)"))

    async def main() -> None:
        engine = create_async_engine(f"postgresql+{driver}{url}")
        await unit_of_work(AGAIN, async_sessionmaker(engine))(add)()
        with deadline(0.3), pytest.raises(DBAPIError, match="statement timeout"):
            await unit_of_work(AGAIN, engine)(sleep)()
        async with engine.connect() as connection:
            assert list(await connection.scalars(select(Note.text))) == ["attempt 2"]
        await engine.dispose()

    anyio.run(main)


def test_a_deadlock_is_done_again(url: str) -> None:
    """Two transactions that wait for each other: PostgreSQL ends one of them, and it is done again."""
    engine = create_engine(f"postgresql+psycopg{url}", connect_args={"options": "-c deadlock_timeout=50ms"})
    with engine.begin() as connection:
        connection.execute(text("insert into notes (text) values ('a'), ('b')"))
    meeting = threading.Barrier(2, timeout=PATIENCE)  # once, when each has its first lock
    attempts: list[str] = []

    @unit_of_work(AGAIN, engine)
    def touch(connection: Connection, first: str, second: str) -> None:
        attempts.append(first)
        update = text("update notes set text = text where text = :text")
        connection.execute(update, {"text": first})
        if len(attempts) <= 2:
            meeting.wait()
        connection.execute(update, {"text": second})

    threads = [threading.Thread(target=touch, args=names) for names in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(attempts) == 3
    engine.dispose()
