"""A table in SQLite, and functions of the tests that use it outside a unit of work."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

from resilience import Retry
from resilience.integrations.dbapi import transient

#: Seconds: much longer than any step here takes, and much shorter than a hang.
PATIENCE = 20.0

AGAIN = Retry(3, on=transient, backoff=[0])

#: A statement that does not end.
FOREVER = "with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) from n"


#: A statement that takes so long that SQLite calls its progress handler.
LONG = FOREVER.replace("from n)", "from n where i < 100000)", 1)


def connecting(
    path: Path, timeout: float = 0.0, kind: type[sqlite3.Connection] = sqlite3.Connection
) -> Callable[[], sqlite3.Connection]:
    return lambda: sqlite3.connect(path, timeout=timeout, factory=kind, check_same_thread=False)


def notes(path: Path) -> list[str]:
    connection = sqlite3.connect(path)
    try:
        return [text for (text,) in connection.execute("select text from notes order by rowid")]
    finally:
        connection.close()


def note(connection: sqlite3.Connection, text: str) -> None:
    connection.execute("insert into notes values (?)", (text,))


class Locked:
    """Another connection, which holds the lock of a database until it is released."""

    def __init__(self, path: Path, statement: str = "begin immediate") -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute(statement).fetchall()

    def read(self) -> None:
        """Hold the lock of a reader."""
        self._connection.execute("select * from notes").fetchall()

    def release(self, event: object = None) -> None:
        self._connection.close()


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("as the database says")
    error.sqlite_errorcode = code
    return error
