"""The driver of an error or a connection, recognized by the names of its classes: no driver is imported."""

from __future__ import annotations

import functools
import sqlite3
from typing import Any


def is_of(package: str, name: str, it: object) -> bool:
    """Whether the class of `it`, or one of its bases, has this name and is in this package.

    Tracers wrap connections; only `__class__` is then that of the driver.
    """
    kind: Any = it.__class__  # mypy takes no class for hashable
    return _is_kind(kind, package, name)


@functools.lru_cache(maxsize=256)
def _is_kind(kind: type[Any], package: str, name: str) -> bool:
    return any(each.__name__ == name and each.__module__.partition(".")[0] == package for each in kind.__mro__)


def is_sqlite(connection: object) -> bool:
    """Whether this is a connection of sqlite3 or aiosqlite."""
    return isinstance(connection, sqlite3.Connection) or is_of("aiosqlite", "Connection", connection)


def is_psycopg(connection: object) -> bool:
    """Whether this is a connection of psycopg or psycopg2."""
    return is_of("psycopg", "BaseConnection", connection) or is_of("psycopg2", "connection", connection)


def is_autocommit(connection: Any) -> bool:
    """Whether each statement of this connection is committed by itself. Other drivers would ask their server."""
    return (is_psycopg(connection) or is_sqlite(connection)) and getattr(connection, "autocommit", None) is True


#: States of libpq: `PQTRANS_INTRANS`, and `PQTRANS_INERROR`, in which the transaction can only be rolled back.
_IN_TRANSACTION, _IN_ERROR = 2, 3


def is_in_transaction(connection: object) -> bool:
    """Whether a connection of psycopg or psycopg2 is in a transaction that accepts statements."""
    return bool(_status(connection) == _IN_TRANSACTION)


def is_aborted(connection: object) -> bool | None:
    """Whether PostgreSQL has aborted the transaction of a psycopg or psycopg2 connection; None for other drivers."""
    status = _status(connection)
    return None if status is None else bool(status == _IN_ERROR)


def _status(connection: object) -> Any:
    return getattr(getattr(connection, "info", None), "transaction_status", None)
