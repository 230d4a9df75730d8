"""Databases: files of SQLite, and one PostgreSQL for all tests."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine, create_engine

from tests.callers import wait_until
from tests.integrations.databases.models import Base
from tests.integrations.databases.postgres import Frozen, PostgresServer


@pytest.fixture(scope="package")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    wait_until(server.accepts_connections)
    yield server
    server.stop()


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    """The URL of PostgreSQL, with an empty table."""
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("drop table if exists notes")
        connection.execute("create table notes (text varchar(40) unique, id serial primary key)")
    return postgres.url


@pytest.fixture
def frozen() -> Iterator[Frozen]:
    frozen = Frozen()
    yield frozen
    frozen.thaw()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with one table."""
    file = tmp_path / "test.db"
    with sqlite3.connect(file) as connection:
        connection.execute("create table notes (text)")
    connection.close()
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path of a database that does not exist yet."""
    return tmp_path / "test.db"


@pytest.fixture
def engine(file: Path) -> Iterator[Engine]:
    """An engine that does not wait for locks."""
    engine = create_engine(f"sqlite:///{file}", connect_args={"timeout": 0})
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()
