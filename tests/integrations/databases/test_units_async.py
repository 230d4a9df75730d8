"""Deadlines in SQLite, and units of work with aiosqlite."""

from __future__ import annotations

import inspect
import sqlite3
import time
from pathlib import Path

import aiosqlite
import anyio
import pytest

from resilience import DeadlineExceeded, Fallback, Policy, Retry, Timeout, deadline
from resilience.integrations.dbapi import StatementLimits, transient, unit_of_work
from tests.integrations.databases.sqlite import AGAIN, FOREVER, LONG, PATIENCE, Locked, connecting, note, notes


def test_a_deadline_interrupts_a_statement(path: Path) -> None:
    """Of a unit of work, and of a block."""
    began = time.monotonic()
    with deadline(0.1), pytest.raises(sqlite3.OperationalError, match="interrupted"):
        unit_of_work(AGAIN, connecting(path))(lambda connection: connection.execute(FOREVER).fetchall())()
    connection = connecting(path)()
    with deadline(0.1), StatementLimits(connection), pytest.raises(sqlite3.OperationalError, match="interrupted"):
        connection.execute(FOREVER).fetchall()
    connection.close()
    assert time.monotonic() - began < PATIENCE / 2


def test_a_deadline_ends_the_wait_for_a_lock_and_is_taken_back(path: Path) -> None:
    """The connection's own `timeout` is longer, and holds again after the block."""
    other = Locked(path)
    connection = connecting(path, timeout=PATIENCE)()
    began = time.monotonic()
    with deadline(0.1), StatementLimits(connection):
        assert 0 < connection.execute("pragma busy_timeout").fetchone()[0] <= 100
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            note(connection, "a")
    assert time.monotonic() - began < PATIENCE / 2
    assert connection.execute("pragma busy_timeout").fetchone()[0] == PATIENCE * 1000
    assert connection.execute(LONG).fetchone() == (100_000,)
    connection.close()
    other.release()


def test_without_a_deadline_nothing_is_limited(path: Path) -> None:
    """A connection that would not wait for a lock at all does not wait for the deadline either."""
    connection = connecting(path, timeout=1.5)()
    with StatementLimits(connection):
        assert connection.execute("pragma busy_timeout").fetchone()[0] == 1500
    connection.close()
    connection = connecting(path, timeout=0)()
    with deadline(5.0), StatementLimits(connection):
        assert connection.execute("pragma busy_timeout").fetchone()[0] == 0
    connection.close()


def test_a_connection_of_another_driver_is_left_alone() -> None:
    """There is nothing that every database would understand."""
    with deadline(5.0), StatementLimits(object()):
        pass


def test_a_block_does_not_begin_when_the_time_is_over(path: Path) -> None:
    """0 would mean no limit to the database."""
    connection = connecting(path)()
    with deadline(0), pytest.raises(DeadlineExceeded), StatementLimits(connection):
        pytest.fail("it began")
    connection.close()


async def anote(connection: aiosqlite.Connection, text: str) -> str:
    await connection.execute("insert into notes values (?)", (text,))
    return text


def test_an_asynchronous_unit_is_done_again_as_a_whole(path: Path) -> None:
    """The same rules for `async def`, with a driver whose connections are awaited."""

    async def main() -> None:
        other = Locked(path)
        policy = Retry(2, on=transient, backoff=[0], on_retry=other.release)
        add = unit_of_work(policy, lambda: aiosqlite.connect(path, timeout=0))(anote)
        assert inspect.iscoroutinefunction(add)
        assert await add("a") == "a"
        with pytest.raises(ValueError, match="wrong"):
            await unit_of_work(AGAIN, lambda: aiosqlite.connect(path))(fails)()
        assert notes(path) == ["a"]

    async def fails(connection: aiosqlite.Connection) -> None:
        await anote(connection, "b")
        raise ValueError("wrong")

    anyio.run(main)


def test_an_asynchronous_unit_keeps_to_its_deadline(path: Path) -> None:
    """An aiosqlite statement runs in a thread, where a cancellation alone would leave it running."""

    async def main() -> None:
        add = unit_of_work(AGAIN, lambda: aiosqlite.connect(path))(forever)
        with deadline(0.1), pytest.raises(sqlite3.OperationalError, match="interrupted"):
            await add()

    async def forever(connection: aiosqlite.Connection) -> None:
        await connection.execute(FOREVER)

    anyio.run(main)


def test_a_cancelled_unit_is_rolled_back_and_closed(path: Path) -> None:
    """A Timeout cancels it; the next attempt does the work."""
    attempts = []

    async def add(connection: aiosqlite.Connection) -> None:
        attempts.append(connection)
        await anote(connection, f"attempt {len(attempts)}")
        if len(attempts) == 1:
            await anyio.sleep(PATIENCE)

    async def main() -> None:
        await unit_of_work(Policy.wrap(AGAIN, Timeout(0.5)), lambda: aiosqlite.connect(path))(add)()

    anyio.run(main)
    assert notes(path) == ["attempt 2"]
    assert not any(connection._running for connection in attempts)


@pytest.mark.parametrize("connected", [False, True])
def test_a_plain_function_is_not_given_an_asynchronous_connection(path: Path, connected: bool) -> None:
    """It could not await it. The error says what to write, and no policy answers it."""

    async def main() -> None:
        connection = await aiosqlite.connect(path) if connected else None
        unit = unit_of_work(Fallback("answered"), lambda: connection or aiosqlite.connect(path))
        with pytest.raises(TypeError, match=r"note is a plain function, .* \(Connection\): write `async def`"):
            unit(note)("a")
        if connection is not None:
            await connection.close()

    anyio.run(main)


def test_a_coroutine_that_would_have_made_the_connection_is_closed(path: Path) -> None:
    """Nobody awaits it, and nobody is warned of that."""

    async def connect() -> aiosqlite.Connection:
        return await aiosqlite.connect(path)

    with pytest.raises(TypeError, match="`async def`"):
        unit_of_work(AGAIN, connect)(note)("a")
