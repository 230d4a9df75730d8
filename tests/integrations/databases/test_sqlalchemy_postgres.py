"""SQLAlchemy on PostgreSQL."""

from __future__ import annotations

import threading
import time

import anyio
import psycopg
import pytest
from sqlalchemy import Connection, create_engine, select, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from resilience import Retry, Timeout, TimeoutExceeded, deadline
from resilience.integrations.sqlalchemy import TransactionAborted, transient, unit_of_work
from tests.integrations.databases.models import AGAIN, Note, notes
from tests.integrations.databases.postgres import Frozen, PostgresServer
from tests.integrations.databases.sqlite import PATIENCE

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
async def test_postgresql_asynchronous(url: str, driver: str) -> None:
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

    engine = create_async_engine(f"postgresql+{driver}{url}")
    await unit_of_work(AGAIN, async_sessionmaker(engine))(add)()
    with deadline(0.3), pytest.raises(DBAPIError, match="statement timeout"):
        await unit_of_work(AGAIN, engine)(sleep)()
    async with engine.connect() as connection:
        assert list(await connection.scalars(select(Note.text))) == ["attempt 2"]
    await engine.dispose()


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_a_blocking_unit_whose_transaction_is_aborted_is_a_failure(url: str, driver: str) -> None:
    """With a session and with a connection; PostgreSQL would answer the commit with a rollback."""
    engine = create_engine(f"postgresql+{driver}{url}")

    def swallow(work: Session | Connection) -> None:
        work.execute(text("insert into notes (text) values ('a')"))
        with pytest.raises(DBAPIError):
            work.execute(text("select 1 / 0"))

    for source in (engine, sessionmaker(engine)):
        with pytest.raises(TransactionAborted):
            unit_of_work(AGAIN, source)(swallow)()
        unit_of_work(AGAIN, source)(lambda work: None)()
    assert notes(engine) == []
    engine.dispose()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_an_asynchronous_unit_whose_transaction_is_aborted_is_a_failure(url: str, driver: str) -> None:
    """asyncpg does not know the state of its transaction: the server is asked."""

    async def swallow(work: AsyncSession | AsyncConnection) -> None:
        with pytest.raises(DBAPIError):
            await work.execute(text("select 1 / 0"))

    async def succeed(work: AsyncSession | AsyncConnection) -> None:
        await work.execute(text("insert into notes (text) values (now()::text)"))

    engine = create_async_engine(f"postgresql+{driver}{url}")
    for source in (engine, async_sessionmaker(engine)):
        with pytest.raises(TransactionAborted):
            await unit_of_work(AGAIN, source)(swallow)()
        await unit_of_work(AGAIN, source)(succeed)()
    async with engine.connect() as connection:
        assert len(list(await connection.scalars(select(Note.text)))) == 2
    await engine.dispose()


def test_a_session_of_many_databases_is_committed(url: str) -> None:
    """It has no connection that could be asked for its state."""
    engine = create_engine(f"postgresql+psycopg{url}")
    unit_of_work(AGAIN, lambda: Session(binds={Note: engine}))(lambda session: session.add(Note(text="a")))()
    assert notes(engine) == ["a"]
    engine.dispose()


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_the_smaller_of_a_deadline_and_an_own_limit_holds(url: str, driver: str) -> None:
    """A deadline never lengthens what the connection has set."""
    engine = create_engine(f"postgresql+{driver}{url}", connect_args={"options": "-c statement_timeout=200ms"})
    shown = unit_of_work(AGAIN, engine)(lambda it: it.execute(text("show statement_timeout")).scalar())
    with deadline(PATIENCE):
        assert shown() == "200ms"
    with deadline(0.15):
        assert 0 < int(shown().removesuffix("ms")) <= 150
    engine.dispose()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_server_that_is_frozen_does_not_keep_the_caller(
    url: str, driver: str, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection leaves the pool behind the caller's back, and its place is free again."""
    monkeypatch.setattr("resilience.integrations.dbapi.units.ROLLBACK_GRACE", 0.2)

    async def add(session: AsyncSession) -> None:
        session.add(Note(text="a"))
        await session.flush()
        frozen.freeze((await session.scalars(text("select pg_backend_pid()"))).one())
        await anyio.sleep(PATIENCE)

    engine = create_async_engine(f"postgresql+{driver}{url}")
    began = time.monotonic()
    with pytest.raises(TimeoutExceeded):
        await unit_of_work(Timeout(0.3), async_sessionmaker(engine))(add)()
    assert time.monotonic() - began < PATIENCE / 4
    frozen.thaw()
    with anyio.fail_after(PATIENCE):
        while engine.pool.checkedout():  # type: ignore[attr-defined]
            await anyio.sleep(0.01)
    async with engine.connect() as connection:
        assert list(await connection.scalars(select(Note.text))) == []
    await engine.dispose()


def test_a_deadlock_is_done_again(url: str) -> None:
    """Two transactions that wait for each other: PostgreSQL ends one of them, and it is done again."""
    engine = create_engine(f"postgresql+psycopg{url}", connect_args={"options": "-c deadlock_timeout=50ms"})
    with engine.begin() as connection:
        connection.execute(text("insert into notes (text) values ('a'), ('b')"))
    meeting = threading.Barrier(2, timeout=PATIENCE)  # once, when each has its first lock
    attempts: list[str] = []

    @unit_of_work(Retry(9, on=transient, backoff=[0.05]), engine)
    def touch(connection: Connection, first: str, second: str) -> None:
        attempts.append(first)
        update = text("update notes set text = text where text = :text")
        connection.execute(update, {"text": first})
        if len(attempts) <= 2:
            meeting.wait()
        connection.execute(update, {"text": second})

    done: list[str] = []

    def work(first: str, second: str) -> None:
        touch(first, second)
        done.append(first)

    threads = [threading.Thread(target=work, args=names) for names in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(attempts) >= 3
    assert sorted(done) == ["a", "b"]
    engine.dispose()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_unit_with_a_deadline_chooses_its_isolation_level(url: str, driver: str) -> None:
    """As it does without one; and is limited all the same."""
    limits = []

    async def unit(session: AsyncSession) -> str | None:
        await session.connection(execution_options={"isolation_level": "SERIALIZABLE"})
        limits.append(await session.scalar(text("show statement_timeout")))
        level: str | None = await session.scalar(text("show transaction_isolation"))
        return level

    engine = create_async_engine(f"postgresql+{driver}{url}")
    transaction = unit_of_work(AGAIN, async_sessionmaker(engine))(unit)
    assert await transaction() == "serializable"
    with deadline(PATIENCE):
        assert await transaction() == "serializable"
    await engine.dispose()
    assert limits[0] == "0"
    assert limits[1] not in ("0", None)
