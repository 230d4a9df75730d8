"""SQLAlchemy on PostgreSQL."""

from __future__ import annotations

import threading

import psycopg
import pytest
from sqlalchemy import Connection, create_engine, func, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.orm import Session

from resilience import Retry
from resilience.integrations.sqlalchemy import transient, unit_of_work
from tests.integrations.databases.models import AGAIN, Note, notes
from tests.integrations.databases.postgres import PostgresServer
from tests.integrations.databases.sqlite import PATIENCE


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    """The address without its scheme; the database has an empty table."""
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("drop table if exists notes")
        connection.execute("create table notes (id serial primary key, text varchar(40) unique)")
    return postgres.url.removeprefix("postgresql")


def test_a_session_without_a_single_bind_is_committed(url: str) -> None:
    """It has no connection whose state could be read."""
    engine = create_engine(f"postgresql+psycopg{url}")
    unit_of_work(AGAIN, lambda: Session(binds={Note: engine}))(lambda session: session.add(Note(text="a")))()
    assert notes(engine) == ["a"]
    engine.dispose()


def test_a_unit_is_repeated_if_its_connection_is_lost_as_it_is_asked_for_its_state(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with asyncpg, which does not know whether PostgreSQL has aborted the transaction."""
    monkeypatch.setattr("resilience.integrations.sqlalchemy.is_aborted", lambda _connection: None)
    engine = create_engine(f"postgresql+psycopg{url}")
    attempts: list[Connection] = []

    @unit_of_work(AGAIN, engine)
    def add(connection: Connection) -> None:
        attempts.append(connection)
        connection.execute(insert(Note), {"text": f"attempt {len(attempts)}"})
        if len(attempts) == 1:
            driver: psycopg.Connection = connection.connection.driver_connection  # type: ignore[assignment]
            with psycopg.connect(f"postgresql{url}", autocommit=True) as other:
                other.execute("select pg_terminate_backend(%s)", [driver.info.backend_pid])

    add()
    assert notes(engine) == ["attempt 2"]
    engine.dispose()


def test_a_unit_that_ends_in_a_deadlock_is_repeated(url: str) -> None:
    """PostgreSQL aborts one of two transactions that wait for each other."""
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


async def test_a_connection_that_is_lost_after_the_last_statement_is_tried_again(url: str) -> None:
    """With asyncpg the server is asked before the commit, so nothing was committed, and no statement has failed."""
    engine = create_async_engine(f"postgresql+asyncpg{url}")
    attempts: list[str] = []

    @unit_of_work(AGAIN, engine)
    async def add(connection: AsyncConnection) -> None:
        attempts.append(f"attempt {len(attempts) + 1}")
        process = await connection.scalar(insert(Note).values(text=attempts[-1]).returning(func.pg_backend_pid()))
        if len(attempts) == 1:
            with psycopg.connect(f"postgresql{url}") as other:
                other.execute("select pg_terminate_backend(%s, 5000)", [process])

    await add()
    async with engine.connect() as connection:
        assert list(await connection.scalars(select(Note.text))) == ["attempt 2"]
    await engine.dispose()
