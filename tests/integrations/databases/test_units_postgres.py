"""Units of work on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import psycopg2
import psycopg2.extras
import pytest

from resilience import deadline
from resilience.integrations.dbapi import StatementLimits, unit_of_work
from tests.integrations.databases.postgres import PostgresServer
from tests.integrations.databases.sqlite import AGAIN


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    """A database with an empty table."""
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("drop table if exists notes")
        connection.execute("create table notes (text text)")
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


def test_a_unit_with_a_serialization_failure_is_repeated(url: str, driver: Any) -> None:
    """Two transactions each read what the other one writes: the database refuses one of them."""
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


@pytest.mark.parametrize("rows", ["dictionaries", "objects"])
def test_a_row_factory_does_not_break_the_limits(url: str, driver: Any, rows: str) -> None:
    """A connection may return any object as a row: the deadline still reaches the server."""
    if driver is psycopg:
        connection = psycopg.connect(url, row_factory=psycopg.rows.dict_row if rows == "dictionaries" else made)
    else:
        kinds = {"dictionaries": psycopg2.extras.RealDictCursor, "objects": psycopg2.extras.NamedTupleCursor}
        connection = psycopg2.connect(url, cursor_factory=kinds[rows])
    with deadline(0.2), StatementLimits(connection), pytest.raises(driver.Error):
        execute(connection, "select pg_sleep(20)")
    connection.close()


def made(cursor: Any) -> Any:
    raise AssertionError("the limits must not read rows of the user")
