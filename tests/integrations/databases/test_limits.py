"""Deadlines: the limits of statements, in a unit of work or in a block of `StatementLimits`."""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import psycopg2
import psycopg2.extras
import pytest

from resilience import Context, DeadlineExceeded, Retry, WorkersExhausted, deadline
from resilience.errors import Misuse
from resilience.integrations.dbapi import StatementLimits, limits, unit_of_work
from resilience.runtimes import workers
from tests.callers import wait_until
from tests.conftest import FakeClock
from tests.functions import raising
from tests.integrations.databases.postgres import Traced
from tests.integrations.databases.sqlite import AGAIN, FOREVER, LONG, PATIENCE, Locked, connecting, note


def test_a_connection_of_another_driver_is_not_limited() -> None:
    """There is no statement that every database would understand."""
    with deadline(5.0), StatementLimits(object()):
        pass


def test_a_block_does_not_begin_after_the_deadline() -> None:
    """With any driver."""
    with deadline(0), pytest.raises(DeadlineExceeded), StatementLimits(object()):
        pytest.fail("it began")


@pytest.mark.parametrize("limited", [True, False])
def test_the_limits_of_a_unit_end_with_it(path: Path, limited: bool) -> None:
    """A connection that returns to its pool waits for a lock as long as before. Limits can be switched off."""

    def wait_of(connection: sqlite3.Connection) -> int:
        return int(connection.execute("pragma busy_timeout").fetchone()[0])

    class Pooled(sqlite3.Connection):
        def close(self) -> None:
            waits.append(wait_of(self))
            super().close()

    waits: list[int] = []
    unit = unit_of_work(AGAIN, connecting(path, timeout=PATIENCE, kind=Pooled), limit_statements=limited)
    with deadline(PATIENCE / 2):
        assert (unit(wait_of)() < PATIENCE * 1000) is limited
    assert waits == [PATIENCE * 1000]


def test_limits_that_were_not_entered_cannot_be_left() -> None:
    """Neither before a block nor a second time after it."""
    with closing(sqlite3.connect(":memory:")) as connection:
        limits = StatementLimits(connection)
        for _ in range(2):
            with pytest.raises(Misuse, match=r"write `with StatementLimits\(connection\):`"):
                limits.__exit__(None, None, None)
            with limits:
                pass


def test_the_error_of_a_unit_or_block_that_closed_its_connection_is_raised() -> None:
    """And not the error of restoring the connection's limits."""

    def work(connection: sqlite3.Connection) -> None:
        connection.close()
        raise ValueError("mine")

    unit = unit_of_work(Retry(1), lambda: sqlite3.connect(":memory:"))(work)
    with deadline(PATIENCE), pytest.raises(ValueError, match="mine"):
        unit()
    connection = sqlite3.connect(":memory:")
    with deadline(PATIENCE), pytest.raises(ValueError, match="mine"), StatementLimits(connection):
        work(connection)


# --- SQLite ----------------------------------------------------------------------------------


def test_a_connection_without_anything_to_restore_may_be_closed_in_its_block() -> None:
    """Its own wait for a lock is shorter than the time left."""
    with deadline(PATIENCE * 2), StatementLimits(connection := sqlite3.connect(":memory:")):
        connection.close()


def test_a_deadline_limits_the_wait_for_a_lock_in_its_block(path: Path) -> None:
    """The connection's own `timeout` is longer, and holds again after the block."""
    other = Locked(path)
    began = time.monotonic()
    with closing(connecting(path, timeout=PATIENCE)()) as connection:
        with deadline(0.1), StatementLimits(connection):
            assert 0 < connection.execute("pragma busy_timeout").fetchone()[0] <= 100
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                note(connection, "a")
            connection.set_trace_callback(lambda _: time.sleep(0.05))  # it takes time to end, and is not interrupted
        assert time.monotonic() - began < PATIENCE / 2
        assert connection.execute("pragma busy_timeout").fetchone()[0] == PATIENCE * 1000
        assert connection.execute(LONG).fetchone() == (100_000,)
    other.release()


def test_the_wait_for_a_lock_is_never_lengthened(path: Path) -> None:
    """Without a deadline it is unchanged; a connection that does not wait for locks does not wait for the deadline.

    A wait that is shorter than the time left is not even set.
    """
    statements: list[str] = []
    with closing(connecting(path, timeout=1.5)()) as connection, StatementLimits(connection):
        assert connection.execute("pragma busy_timeout").fetchone()[0] == 1500
    with closing(connecting(path)()) as connection, deadline(5.0):
        connection.set_trace_callback(statements.append)
        with StatementLimits(connection):
            assert connection.execute("pragma busy_timeout").fetchone()[0] == 0
    assert statements == ["PRAGMA busy_timeout", "pragma busy_timeout"]


def test_a_statement_is_not_interrupted_before_the_deadline(path: Path, clock: FakeClock) -> None:
    """However little time is left: the wait for a lock is at least a millisecond, as 0 may mean no limit."""
    with closing(connecting(path, PATIENCE)()) as connection, deadline(0.0005), StatementLimits(connection):
        assert connection.execute("pragma busy_timeout").fetchone() == (1,)
        assert connection.execute(LONG).fetchone() == (100_000,)
        clock.advance(0.0005)
        with pytest.raises(sqlite3.OperationalError, match="interrupted"):
            connection.execute(FOREVER).fetchall()


def test_a_statement_that_begins_after_the_deadline_is_interrupted(path: Path) -> None:
    """In every block, whose limits may have been made for an earlier one. Again and again, but not without a pause."""

    class Counting(sqlite3.Connection):
        interrupts = 0

        def interrupt(self) -> None:
            self.interrupts += 1
            super().interrupt()

    with closing(Counting(path, check_same_thread=False)) as connection:
        limits = StatementLimits(connection)
        for _ in range(2):
            with deadline(0.02), limits:
                time.sleep(0.05)
                assert connection.interrupts < 50
                for _ in range(2):
                    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
                        connection.execute(FOREVER).fetchall()


def test_a_progress_handler_of_the_user_is_kept(path: Path) -> None:
    """A connection has only one, which cannot be read: it is still called, in a block with a deadline and after it."""
    called: list[int] = []
    with closing(connecting(path)()) as connection:
        connection.set_progress_handler(lambda: called.append(1), 1000)
        with deadline(0.2), StatementLimits(connection), pytest.raises(sqlite3.OperationalError, match="interrupted"):
            connection.execute(FOREVER).fetchall()
        assert called
        called.clear()
        assert connection.execute(LONG).fetchone() == (100_000,)
    assert called


def test_a_block_occupies_no_thread_after_its_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far the deadline is: the thread that would interrupt the connection is idle in its pool."""
    monkeypatch.setattr(workers.pool, "idle", deque())  # without the workers of other tests
    with closing(connecting(path)()) as connection, deadline(3600.0), StatementLimits(connection):
        pass
    wait_until(lambda: bool(workers.pool.idle))


def test_one_thread_interrupts_all_connections(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each from its own deadline on, also if that of an earlier block is later. One that was closed is left out."""
    monkeypatch.setattr(workers.pool, "idle", deque())
    monkeypatch.setattr(limits, "_LONGEST_SLEEP", PATIENCE)  # so that the thread does not wake by itself
    first, second, closed = connecting(path)(), connecting(path)(), connecting(path, PATIENCE)()
    with closing(first), closing(second), deadline(PATIENCE) as longest, StatementLimits(first):
        assert second.execute("select 1").fetchone() == (1,)
        with pytest.raises(sqlite3.ProgrammingError), deadline(0.01), StatementLimits(closed):
            closed.close()
            time.sleep(0.1)
            assert list(limits._interrupter._deadlines.values()) == [longest.deadline]
        for _ in range(2):
            began = time.monotonic()
            with deadline(0.05), StatementLimits(second), pytest.raises(sqlite3.OperationalError, match="interrupted"):
                second.execute(FOREVER).fetchall()
            assert time.monotonic() - began < PATIENCE / 2
        assert first.execute(LONG).fetchone() == (100_000,)
        assert not workers.pool.idle
    with limits._interrupter._changed:
        limits._interrupter._changed.notify()
    wait_until(lambda: len(workers.pool.idle) == 1)


def test_a_connection_without_its_limits_is_not_interrupted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by a thread that is started later, for another connection."""
    wait_until(lambda: not limits._interrupter._is_running)
    with closing(connecting(path, PATIENCE)()) as connection, closing(connecting(path)()) as other:
        (its_own,) = connection.execute("PRAGMA busy_timeout").fetchone()
        with monkeypatch.context() as patch, deadline(0.2) as budget, pytest.raises(WorkersExhausted):
            patch.setattr(workers.pool, "begin", raising(WorkersExhausted("no thread")))
            with StatementLimits(connection):
                pass
        with deadline(PATIENCE), StatementLimits(other):
            time.sleep(budget.remaining() + 0.05)
            assert connection.execute(LONG).fetchone() == (100_000,)
        assert connection.execute("PRAGMA busy_timeout").fetchone() == (its_own,)


@pytest.mark.parametrize("method", ["add", "remove"])
def test_limits_left_by_an_interrupt_have_no_effect(path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """It comes as the block has begun, or as it ends. The block around it ends as usual."""

    def interrupted(*args: Any) -> None:
        if method == "add":
            add(*args)
        raise KeyboardInterrupt

    add = limits._interrupter.add
    with closing(connecting(path, PATIENCE)()) as connection:
        (its_own,) = connection.execute("PRAGMA busy_timeout").fetchone()
        block = StatementLimits(connection)
        with deadline(PATIENCE), block:
            with monkeypatch.context() as patch, deadline(0.05), pytest.raises(KeyboardInterrupt):
                patch.setattr(limits._Interrupter, method, lambda self, *args: interrupted(*args))
                with block:
                    pass
            time.sleep(0.1)
            assert connection.execute(LONG).fetchone() == (100_000,)
        assert connection.execute("PRAGMA busy_timeout").fetchone() == (its_own,)


def test_a_row_factory_does_not_break_the_limits() -> None:
    """A connection may return dictionaries as rows: the deadline still reaches the database."""

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(":memory:")
        connection.row_factory = lambda cursor, row: {cursor.description[0][0]: row[0]}
        return connection

    unit = unit_of_work(Retry(1), connect)(lambda connection: connection.execute("select 1 as a").fetchone())
    with deadline(PATIENCE):
        assert unit() == {"a": 1}


# --- PostgreSQL ------------------------------------------------------------------------------


NO_ROWS = raising(AssertionError("the limits must not read rows of the user"))


@pytest.mark.parametrize(
    ("driver", "options"),
    [
        (psycopg, {"row_factory": psycopg.rows.dict_row}),
        (psycopg, {"row_factory": NO_ROWS}),
        (psycopg2, {"cursor_factory": psycopg2.extras.RealDictCursor}),
        (psycopg2, {"cursor_factory": psycopg2.extras.NamedTupleCursor}),
    ],
    ids=["psycopg-dictionaries", "psycopg-objects", "psycopg2-dictionaries", "psycopg2-objects"],
)
def test_a_row_factory_does_not_break_the_limits_of_postgresql(url: str, driver: Any, options: Any) -> None:
    """A connection may return any object as a row: the deadline still reaches the server."""
    connection = driver.connect(url, **options)
    with deadline(0.2), StatementLimits(connection), pytest.raises(driver.Error):
        connection.cursor().execute("select pg_sleep(20)")
    connection.close()


@pytest.mark.parametrize("driver", [psycopg, psycopg2])
def test_a_connection_that_a_tracer_has_wrapped_is_limited(url: str, driver: Any) -> None:
    """Its `type` is that of the tracer."""
    connection = Traced(driver.connect(url))
    with deadline(0.2), StatementLimits(connection), pytest.raises(driver.Error, match="statement timeout"):
        connection.cursor().execute("select pg_sleep(20)")
    connection.close()


def limit_of(connection: Any) -> str:
    with connection.cursor() as cursor:
        cursor.execute("show statement_timeout")
        return str(cursor.fetchone()[0])


@pytest.mark.parametrize("driver", [psycopg, psycopg2])
def test_the_limit_of_postgresql_ends_with_its_block(url: str, driver: Any) -> None:
    """Although its transaction continues. A later block may have a longer limit."""
    connection = driver.connect(url, options="-c statement_timeout=3h")
    limits = StatementLimits(connection)
    with deadline(50.0), limits:
        outer = limit_of(connection)
        with deadline(10.0), limits:
            assert limit_of(connection) != outer
        assert limit_of(connection) == outer != "3h"
    assert limit_of(connection) == "3h"
    for end in (connection.rollback, connection.close):
        with deadline(20.0), StatementLimits(connection):
            end()
    connection.close()


def test_the_limits_of_postgresql_have_few_texts(clock: FakeClock) -> None:
    """Its statistics keep each text. A limit is at most a hundredth longer than the time left, and never shorter:
    a statement that is ended before the deadline would be no proof that the time was over.
    """
    texts = set()
    for milliseconds in (*range(1, 2000), *range(10_000, 100_000, 7)):
        statement = limits.shorter_limit("0", Context(timeout=milliseconds / 1000 + 0.0001))
        assert statement is not None
        texts.add(statement)
        assert milliseconds <= int(statement.rpartition(" ")[2]) <= milliseconds * 1.01
    assert len(texts) <= 999 + 101 + 901
    assert limits.shorter_limit("1004ms", Context(timeout=1.002)) is None


@pytest.mark.parametrize("driver", [psycopg, psycopg2])
def test_a_block_in_autocommit_mode_is_refused(url: str, driver: Any) -> None:
    """It would limit nothing. Also without a deadline, so that tests notice it."""
    connection = driver.connect(url)
    connection.autocommit = True
    with pytest.raises(ValueError, match="begin a transaction"), StatementLimits(connection):
        pytest.fail("it began")
    connection.cursor().execute("begin")
    with deadline(20.0), StatementLimits(connection):
        assert limit_of(connection) != "0"
    assert limit_of(connection) == "0"
    connection.close()


async def test_a_block_limits_an_asynchronous_connection(url: str) -> None:
    """And ends its limit."""
    connection = await psycopg.AsyncConnection.connect(url)
    shown: list[Any] = []
    async with deadline(20.0), StatementLimits(connection):
        shown += await (await connection.execute("show statement_timeout")).fetchall()
    shown += await (await connection.execute("show statement_timeout")).fetchall()
    assert [shown[0] != ("0",), shown[1]] == [True, ("0",)]
    await connection.close()
