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
        (pg.IdleInTransactionSessionTimeout(), True),
        (made("psycopg.errors.IdleSessionTimeout", sqlstate="57P05"), True),
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
        (asyncpg.InterfaceError("cannot call Transaction.__aexit__(): the underlying connection is closed"), True),
        (asyncpg.InterfaceError("cannot perform operation: another operation is in progress"), False),
        (psycopg2.OperationalError("server closed the connection unexpectedly"), True),
        (psycopg2.OperationalError("connection failed: FATAL:  password authentication failed for user"), False),
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
        (made("pymysql.err.OperationalError", args=(2003, "Can't connect to MySQL server on 'db'")), True),
        (made("MySQLdb.OperationalError", args=(2002, "Can't connect through socket")), True),
        (made("mysql.connector.errors.OperationalError", args=(2055, "Lost connection"), errno=2055), True),
        (made("mysql.connector.errors.OperationalError", args=(-1, "not available", None), errno=-1), True),
        (made("mysql.connector.errors.OperationalError", args=(2027, "Malformed packet"), errno=2027), False),
        (made("mysql.connector.errors.ProgrammingError", args=(-1, "Not all parameters", None), errno=-1), False),
        (made("pymysql.err.OperationalError", args=(4031, "disconnected because of inactivity")), True),
        (made("pymysql.err.OperationalError", args=(1927, "Connection was killed")), True),
        (made("mariadb.OperationalError", args=("Can't connect to server on 'db'",), errno=2002), True),
        (made("mariadb.OperationalError", args=("Deadlock found",), errno=1213), True),
        (made("mariadb.ProgrammingError", args=("syntax",), errno=1064), False),
        (made("mariadb.InterfaceError", args=("not of the server",)), False),
        (made("mysql.connector.errors.DatabaseError", args=(1064, "syntax", "42000"), sqlstate="42000"), False),
        (made("elsewhere.OperationalError", args=(1213, "not of MySQL")), False),
        (ConnectionResetError("reset"), True),
        (ValueError("wrong"), False),
    ],
)
def test_errors_of_work_that_was_rolled_back_or_not_begun_are_transient(error: Exception, expected: bool) -> None:
    """No violated constraint is, and no cancelled query."""
    assert transient(error) is expected


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
        ([sqlite_error(it) for it in (sqlite3.SQLITE_BUSY_SNAPSHOT, sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY)], True),
        ([sqlite_error(sqlite3.SQLITE_IOERR)], False),
        ([made("pymysql.err.OperationalError", args=(1213, "Deadlock found"))], True),
        ([made("pymysql.err.OperationalError", args=(2013, "Lost connection"))], False),
        ([made("mariadb.OperationalError", args=("Deadlock found",), errno=1213)], True),
        ([ValueError("whatever")], False),
    ],
)
def test_an_error_of_the_database_proves_that_a_commit_has_not_happened(errors: Any, expected: bool) -> None:
    assert [is_undone(it) for it in errors] == [expected] * len(errors)
