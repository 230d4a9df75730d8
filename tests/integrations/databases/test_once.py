"""`Once` in PostgreSQL: callers that begin at the same time, and a user that may create no tables."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import psycopg
import psycopg2
import pytest
from sqlalchemy import create_engine

from resilience.work import Once
from tests.callers import in_threads
from tests.integrations.databases.postgres import PostgresServer


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    yield postgres.url
    with psycopg.connect(postgres.url) as connection:
        connection.execute("DROP TABLE IF EXISTS resilience_once")


def by_order(order: str) -> str:
    return order


def test_many_callers_can_begin_with_an_empty_database(url: str) -> None:
    """Each of them creates the table, and only one succeeds."""
    together, answers = threading.Barrier(8), []

    def connect() -> Any:
        connection = psycopg.connect(url)
        together.wait(10)
        return connection

    def claims(name: str) -> None:
        answers.append(Once(connect, key=by_order)._store.claim(name, "token", "", 60))

    in_threads(*(partial(claims, str(number)) for number in range(8)))
    assert [it.is_mine for it in answers] == [True] * 8  # type: ignore[union-attr]


def test_a_user_without_the_right_to_create_tables_can_use_the_table(url: str) -> None:
    Once(lambda: psycopg2.connect(url), key=by_order).call(str.upper, "a")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("REVOKE CREATE ON SCHEMA public FROM public")
        connection.execute("CREATE ROLE modest LOGIN")
        connection.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON resilience_once TO modest")
    engine = create_engine(url.replace("postgresql", "postgresql+psycopg").replace("tester", "modest"))
    once = Once(engine.raw_connection, key=by_order)
    assert once.call(str.lower, "a") == "A"
    assert [once.call(str.upper, "b"), once.call(str.lower, "b")] == ["B", "B"]
    engine.dispose()
