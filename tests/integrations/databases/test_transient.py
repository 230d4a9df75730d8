"""The transient errors of database drivers."""

from __future__ import annotations

import sqlite3
from typing import Any

import asyncpg
import psycopg
import psycopg2
import pytest
from psycopg import errors as pg

from resilience.integrations.dbapi import sqlstate, transient
from resilience.integrations.dbapi.errors import is_undone
from tests.integrations.databases.sqlite import sqlite_error


def made(name: str, *, bases: tuple[type, ...] = (Exception,), **attributes: Any) -> Exception:
    """An error of a driver that is not installed here."""
    package, _, kind = name.rpartition(".")
    arguments = attributes.pop("args", ())
    error: Exception = type(kind, bases, {"__module__": package})(*arguments)
    for key, value in attributes.items():
        setattr(error, key, value)
    return error


def of_postgres(names: str) -> list[Exception]:
    return [getattr(pg, it)() for it in names.split()]


def of_sqlite(names: str) -> list[Exception]:
    return [sqlite_error(getattr(sqlite3, f"SQLITE_{it}")) for it in names.split()]


TRANSIENT = [
    *of_postgres("SerializationFailure DeadlockDetected LockNotAvailable AdminShutdown CrashShutdown CannotConnectNow"),
    *of_postgres("TooManyConnections IdleInTransactionSessionTimeout ConnectionFailure"),
    made("psycopg.errors.IdleSessionTimeout", sqlstate="57P05"),
    psycopg.OperationalError("the connection is lost"),
    asyncpg.DeadlockDetectedError("x"),
    asyncpg.ConnectionDoesNotExistError("x"),
    asyncpg.InterfaceError("cannot call Transaction.__aexit__(): the underlying connection is closed"),
    psycopg2.OperationalError("server closed the connection unexpectedly"),
    made("psycopg2.errors.DeadlockDetected", pgcode="40P01"),
    *of_sqlite("BUSY BUSY_SNAPSHOT LOCKED"),
    made("pymysql.err.OperationalError", args=(1213, "Deadlock found")),
    made("MySQLdb.OperationalError", args=(1205, "Lock wait timeout exceeded")),
    made("mysql.connector.errors.DatabaseError", args=(1205, "Lock wait", "HY000"), sqlstate="HY000"),
    made("pymysql.err.OperationalError", args=(2003, "Can't connect to MySQL server on 'db'")),
    made("MySQLdb.OperationalError", args=(2002, "Can't connect through socket")),
    made("mysql.connector.errors.OperationalError", args=(2055, "Lost connection"), errno=2055),
    made("mysql.connector.errors.OperationalError", args=(-1, "not available", None), errno=-1),
    made("pymysql.err.OperationalError", args=(4031, "disconnected because of inactivity")),
    made("pymysql.err.OperationalError", args=(1927, "Connection was killed")),
    *[made("pymysql.err.OperationalError", args=(it, "gone")) for it in (1040, 1053, 2006, 2013)],
    made("asyncmy.errors.OperationalError", args=(2013, "Lost connection")),
    made("mariadb.OperationalError", args=("Can't connect to server on 'db'",), errno=2002),
    made("mariadb.OperationalError", args=("Deadlock found",), errno=1213),
    ConnectionResetError("reset"),
]

OTHERS = [
    *of_postgres("ProtocolViolation QueryCanceled UniqueViolation UndefinedTable"),
    psycopg.InterfaceError("the cursor is closed"),
    made("psycopg_pool.errors.PoolTimeout", bases=(psycopg.OperationalError,)),
    asyncpg.UniqueViolationError("x"),
    asyncpg.InterfaceError("cannot perform operation: another operation is in progress"),
    psycopg2.OperationalError("connection failed: FATAL:  password authentication failed for user"),
    psycopg2.InterfaceError("connection already closed"),
    made("psycopg2.errors.UniqueViolation", pgcode="23505"),
    *of_sqlite("INTERRUPT CONSTRAINT_UNIQUE"),
    sqlite3.OperationalError("no code"),
    made("mysql.connector.errors.OperationalError", args=(2027, "Malformed packet"), errno=2027),
    made("mysql.connector.errors.ProgrammingError", args=(-1, "Not all parameters", None), errno=-1),
    made("mysql.connector.errors.DatabaseError", args=(1064, "syntax", "42000"), sqlstate="42000"),
    made("mariadb.ProgrammingError", args=("syntax",), errno=1064),
    made("mariadb.InterfaceError", args=("not of the server",)),
    made("elsewhere.OperationalError", args=(1213, "not of MySQL")),
    ValueError("wrong"),
]


def test_errors_of_work_that_was_rolled_back_or_not_begun_are_transient() -> None:
    """No violated constraint is, and no cancelled query."""
    assert [it for it in TRANSIENT if not transient(it)] == [it for it in OTHERS if transient(it)] == []


def test_the_sqlstate_of_an_error_is_read_from_any_driver() -> None:
    assert sqlstate(pg.DeadlockDetected()) == "40P01"
    assert sqlstate(made("psycopg2.errors.DeadlockDetected", pgcode="40P01")) == "40P01"
    assert sqlstate(psycopg.OperationalError()) is None
    assert sqlstate(made("some.Error", sqlstate=12345)) is sqlstate(made("some.Error", sqlstate="")) is None


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ((pg.SerializationFailure(), pg.DeadlockDetected(), pg.UniqueViolation()), True),
        ((pg.StatementCompletionUnknown(), pg.AdminShutdown(), psycopg.OperationalError("lost")), False),
        (of_sqlite("BUSY_SNAPSHOT LOCKED INTERRUPT CONSTRAINT_FOREIGNKEY"), True),
        ([sqlite_error(sqlite3.SQLITE_IOERR)], False),
        ([made("pymysql.err.OperationalError", args=(it, "rolled back")) for it in (1205, 1213)], True),
        ([made("pymysql.err.OperationalError", args=(2013, "Lost connection"))], False),
        ([made("mariadb.OperationalError", args=("Deadlock found",), errno=1213)], True),
        ([ValueError("whatever")], False),
    ],
)
def test_an_error_of_the_database_proves_that_a_commit_has_not_happened(errors: Any, expected: bool) -> None:
    assert [is_undone(it) for it in errors] == [expected] * len(errors)
