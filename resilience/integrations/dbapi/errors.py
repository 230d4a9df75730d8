"""Errors of drivers: which are transient, and which prove that a commit has not happened."""

from __future__ import annotations

import sqlite3

from resilience.errors import Misuse, ResilienceError
from resilience.integrations.dbapi.drivers import is_of
from resilience.network_errors import transient as lost_connection

#: https://www.postgresql.org/docs/current/errcodes-appendix.html. Class 08 (connections) is transient as well.
_TRANSIENT_STATES = frozenset(
    {
        "40001",  # serialization_failure
        "40P01",  # deadlock_detected
        "25P03",  # idle_in_transaction_session_timeout
        "55P03",  # lock_not_available
        "57P01",  # admin_shutdown
        "57P02",  # crash_shutdown
        "57P03",  # cannot_connect_now
        "57P05",  # idle_session_timeout
        "53300",  # too_many_connections
    }
)
_PROTOCOL_VIOLATION = "08P01"
_COMMIT_UNKNOWN = "40003"  # statement_completion_unknown

_MYSQL_PACKAGES = frozenset({"MySQLdb", "asyncmy", "mariadb", "mysql", "pymysql"})
#: Too many connections, shutting down, lock wait timeout, deadlock; refused (by a socket, by TCP); gone away, lost
#: (the client's numbers, then those of a server that ends a connection: killed, idle for too long).
_MYSQL_TRANSIENT = frozenset({1040, 1053, 1205, 1213, 2002, 2003, 2006, 2013, 2055, 1927, 4031})
_MYSQL_UNDONE = frozenset({1205, 1213})

_SQLITE_TRANSIENT = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_SQLITE_UNDONE = _SQLITE_TRANSIENT | {sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_CONSTRAINT}


class OutcomeUnknown(ResilienceError):
    """The commit of a unit of work was cut off: it may have happened, so the unit is not repeated."""

    #: A Retry does not repeat the call.
    repeatable: bool = False


class TransactionAborted(ResilienceError):
    """PostgreSQL has aborted the transaction of a unit of work that returned normally.

    A statement failed, and the function swallowed its error. PostgreSQL answers the commit of such a transaction with
    a rollback, and no driver reports it.
    """


class AutocommitMisuse(Misuse, ValueError):
    """A connection is in autocommit mode: a second attempt would do its work twice, and no limit would hold."""


def transient(error: Exception) -> bool:
    """Whether a unit of work that failed with this error may succeed if it is repeated. For `Retry(on=transient)`.

    True for serialization failures, deadlocks, locks that were not granted, servers that shut down or start, too many
    connections, and lost connections: of psycopg, psycopg2 and asyncpg by SQLSTATE, of sqlite3 and aiosqlite by
    `SQLITE_BUSY` and `SQLITE_LOCKED`, of the drivers of MySQL by number. Also true for the errors that
    `resilience.transient` matches. A statement that was cancelled (`statement_timeout`) is not transient, and a pool of
    psycopg_pool without a free connection is not either: more attempts make it worse.
    """
    mysql, sqlite, state = _mysql_number(error), _sqlite_code(error), sqlstate(error)
    if mysql in _MYSQL_TRANSIENT or sqlite in _SQLITE_TRANSIENT:
        return True
    if state is not None:
        return state in _TRANSIENT_STATES or (state.startswith("08") and state != _PROTOCOL_VIOLATION)
    # mysql-connector gives its own errors the number -1: an OperationalError among them is a lost connection.
    return (mysql == -1 and is_of("mysql", "OperationalError", error)) or lost_connection(error)


def sqlstate(error: Exception) -> str | None:
    """Return the SQLSTATE of a driver's error, five characters; None if the error has none."""
    for name in ("sqlstate", "pgcode"):
        state = getattr(error, name, None)
        if isinstance(state, str) and len(state) == 5:
            return state
    return None


def is_undone(error: Exception) -> bool:
    """Whether a commit that failed with this error has certainly not happened."""
    if _mysql_number(error) in _MYSQL_UNDONE or _sqlite_code(error) in _SQLITE_UNDONE:
        return True
    state = sqlstate(error) or ""
    return state != _COMMIT_UNKNOWN and state.startswith(("23", "40"))  # constraint violated, rolled back


def _sqlite_code(error: Exception) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None  # higher bits hold details: SQLITE_BUSY_SNAPSHOT is a BUSY


def _mysql_number(error: Exception) -> object:
    if type(error).__module__.partition(".")[0] not in _MYSQL_PACKAGES:
        return None
    numbers = (getattr(error, "errno", None), *error.args[:1])  # errors of mariadb have only the attribute
    return next((it for it in numbers if isinstance(it, int)), None)
