"""Units of work on PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import psycopg
import psycopg2
import psycopg2.extras
import pytest
from psycopg import errors as pg

from resilience import Timeout, TimeoutExceeded, deadline
from resilience.integrations.dbapi import StatementLimits, TransactionAborted, sqlstate, transient, unit_of_work
from tests.integrations.databases.postgres import Frozen, PostgresServer
from tests.integrations.databases.sqlite import AGAIN, PATIENCE


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


@pytest.mark.parametrize(
    ("own", "shown"),
    [("50ms", "50ms"), ("5s", "5s"), ("2min", "2min"), ("3h", "~"), ("4d", "~"), ("0", "~")],
)
def test_the_smaller_of_a_deadline_and_an_own_limit_holds(url: str, driver: Any, own: str, shown: str) -> None:
    """A deadline never lengthens what the connection, its user or the server has set."""
    connection = driver.connect(url)
    execute(connection, f"set statement_timeout = '{own}'")
    connection.commit()
    with deadline(1000.0), StatementLimits(connection), connection.cursor() as cursor:
        cursor.execute("show statement_timeout")
        (limit,) = cursor.fetchone()
        assert limit == shown or (shown == "~" and 900_000 < int(limit.removesuffix("ms")) <= 1_000_000)
    connection.close()


@pytest.mark.parametrize("rows", ["dictionaries", "objects"])
def test_rows_of_any_kind_leave_the_limit_alone(url: str, driver: Any, rows: str) -> None:
    """A connection may make anything of a row: the deadline reaches the server all the same."""
    if driver is psycopg:
        connection = psycopg.connect(url, row_factory=psycopg.rows.dict_row if rows == "dictionaries" else made)
    else:
        kinds = {"dictionaries": psycopg2.extras.RealDictCursor, "objects": psycopg2.extras.NamedTupleCursor}
        connection = psycopg2.connect(url, cursor_factory=kinds[rows])
    with deadline(0.1), StatementLimits(connection), pytest.raises(driver.Error):
        execute(connection, "select pg_sleep(20)")
    connection.close()


def made(cursor: Any) -> Any:
    raise AssertionError("no row of ours is one of the user's")


def test_a_deadline_that_the_server_cannot_take_is_bounded(url: str, driver: Any) -> None:
    """PostgreSQL counts milliseconds in 31 bits; what a stranger asks for may be 40,000 years."""
    with deadline(99_999_999 * 3600.0):
        unit_of_work(AGAIN, lambda: driver.connect(url))(lambda it: execute(it, "select 1"))()


def swallowing(connection: Any) -> None:
    """Do work of which a statement fails, and hide that."""
    execute(connection, "insert into notes values ('a')")
    try:
        execute(connection, "select 1 / 0")
    except (psycopg.Error, psycopg2.Error):
        return


def test_a_unit_whose_transaction_is_aborted_is_a_failure(url: str, driver: Any) -> None:
    """PostgreSQL answers such a commit with a rollback, of which no driver tells."""
    with pytest.raises(TransactionAborted, match="nothing can be committed"):
        unit_of_work(AGAIN, lambda: driver.connect(url))(swallowing)()
    assert rows(url) == []


def test_a_unit_that_undoes_a_failed_statement_is_committed(url: str, driver: Any) -> None:
    """With a savepoint the rest of the transaction is as good as before."""

    @unit_of_work(AGAIN, lambda: driver.connect(url))
    def add(connection: Any) -> None:
        execute(connection, "insert into notes values ('a')")
        execute(connection, "savepoint mine")
        with pytest.raises(driver.Error):
            execute(connection, "select 1 / 0")
        execute(connection, "rollback to savepoint mine")

    add()
    assert rows(url) == ["a"]


async def test_a_server_that_is_frozen_does_not_keep_the_caller(
    url: str, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers to no rollback. Whoever waited for the unit is let go; the connection is closed behind their back."""
    monkeypatch.setattr("resilience.integrations.dbapi.units.ROLLBACK_GRACE", 0.2)
    connections: list[psycopg.AsyncConnection[Any]] = []

    async def add(connection: psycopg.AsyncConnection[Any]) -> None:
        connections.append(connection)
        await connection.execute("insert into notes values ('a')")
        frozen.freeze(connection.info.backend_pid)
        await anyio.sleep(PATIENCE)

    began = time.monotonic()
    with pytest.raises(TimeoutExceeded):
        await unit_of_work(Timeout(0.3), lambda: psycopg.AsyncConnection.connect(url))(add)()
    assert time.monotonic() - began < PATIENCE / 4
    frozen.thaw()
    with anyio.fail_after(PATIENCE):
        while not connections[0].closed:
            await anyio.sleep(0.01)
    assert rows(url) == []


async def test_asynchronous_psycopg(url: str) -> None:
    """A lost connection, a deadline, and a transaction that was aborted."""
    attempts = []

    async def swallow(connection: psycopg.AsyncConnection[Any]) -> None:
        with suppress(psycopg.Error):
            await connection.execute("select 1 / 0")

    async def add(connection: psycopg.AsyncConnection[Any]) -> None:
        attempts.append(connection)
        await connection.execute("insert into notes values (%s)", (f"attempt {len(attempts)}",))
        if len(attempts) == 1:
            await connection.execute("select pg_terminate_backend(pg_backend_pid())")

    async def sleep(connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute("select pg_sleep(20)")

    unit = unit_of_work(AGAIN, lambda: psycopg.AsyncConnection.connect(url))
    await unit(add)()
    with deadline(0.2), pytest.raises(pg.QueryCanceled):
        await unit(sleep)()
    with pytest.raises(TransactionAborted):
        await unit(swallow)()
    assert rows(url) == ["attempt 2"]
