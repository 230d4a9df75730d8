"""Deadlines in SQLite, and units of work with aiosqlite."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import deque
from contextlib import closing
from pathlib import Path

import aiosqlite
import anyio
import pytest

from resilience import DeadlineExceeded, Fallback, Timeout, TimeoutExceeded, deadline
from resilience.integrations.dbapi import StatementLimits, unit_of_work
from resilience.runtimes import workers
from tests.callers import wait_until
from tests.conftest import FakeClock, Virtual
from tests.integrations.databases.sqlite import AGAIN, FOREVER, LONG, PATIENCE, Locked, connecting, note


def test_a_deadline_limits_the_wait_for_a_lock_in_its_block(path: Path) -> None:
    """The connection's own `timeout` is longer, and holds again after the block."""
    other = Locked(path)
    began = time.monotonic()
    with closing(connecting(path, timeout=PATIENCE)()) as connection:
        with deadline(0.1), StatementLimits(connection):
            assert 0 < connection.execute("pragma busy_timeout").fetchone()[0] <= 100
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                note(connection, "a")
        assert time.monotonic() - began < PATIENCE / 2
        assert connection.execute("pragma busy_timeout").fetchone()[0] == PATIENCE * 1000
        assert connection.execute(LONG).fetchone() == (100_000,)
    other.release()


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


def test_a_statement_that_begins_after_the_deadline_is_interrupted(path: Path) -> None:
    """In every block, whose limits may have been made for an earlier one."""
    with closing(connecting(path)()) as connection:
        limits = StatementLimits(connection)
        for _ in range(2):
            with deadline(0.02), limits:
                time.sleep(0.03)
                for _ in range(2):
                    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
                        connection.execute(FOREVER).fetchall()


def test_the_wait_for_a_lock_is_never_lengthened(path: Path) -> None:
    """Without a deadline it is unchanged; a connection that does not wait for locks does not wait for the deadline."""
    with closing(connecting(path, timeout=1.5)()) as connection, StatementLimits(connection):
        assert connection.execute("pragma busy_timeout").fetchone()[0] == 1500
    with closing(connecting(path)()) as connection, deadline(5.0), StatementLimits(connection):
        assert connection.execute("pragma busy_timeout").fetchone()[0] == 0


def test_a_statement_is_not_interrupted_before_the_deadline(path: Path, clock: FakeClock) -> None:
    """However little time is left: the wait for a lock is at least a millisecond, as 0 may mean no limit."""
    with closing(connecting(path, PATIENCE)()) as connection, deadline(0.0005), StatementLimits(connection):
        assert connection.execute("pragma busy_timeout").fetchone() == (1,)
        assert connection.execute(LONG).fetchone() == (100_000,)
        clock.advance(0.0005)
        with pytest.raises(sqlite3.OperationalError, match="interrupted"):
            connection.execute(FOREVER).fetchall()


def test_a_block_occupies_no_thread_after_its_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far the deadline is: the thread that would interrupt the connection is idle in its pool."""
    monkeypatch.setattr(workers.pool, "idle", deque())  # without the workers of other tests
    with closing(connecting(path)()) as connection, deadline(3600.0), StatementLimits(connection):
        pass
    wait_until(lambda: bool(workers.pool.idle))


def test_a_connection_of_another_driver_is_not_limited() -> None:
    """There is no statement that every database would understand."""
    with deadline(5.0), StatementLimits(object()):
        pass


def test_a_block_does_not_begin_after_the_deadline() -> None:
    """With any driver."""
    with deadline(0), pytest.raises(DeadlineExceeded), StatementLimits(object()):
        pytest.fail("it began")


class Connection:
    """A connection that records the calls of its methods, each with a wait; the first call of `stuck` hangs."""

    def __init__(self, stuck: str = "") -> None:
        self.stuck = stuck
        self.done: list[str] = []

    async def _do(self, what: str) -> None:
        if what == self.stuck:
            self.stuck = ""
            await anyio.sleep(PATIENCE)
        await anyio.sleep(0.01)
        self.done.append(what)

    async def commit(self) -> None:
        await self._do("commit")

    async def rollback(self) -> None:
        await self._do("rollback")

    async def close(self) -> None:
        await self._do("close")


async def wait(connection: Connection, seconds: float = PATIENCE) -> None:
    await anyio.sleep(seconds)


async def test_a_unit_whose_caller_is_cancelled_is_rolled_back_and_closed(
    virtual_tasks: Virtual, caplog: pytest.LogCaptureFixture
) -> None:
    """The scope that cancels every wait inside of it does not cancel those of the rollback."""
    connection = Connection()
    with anyio.move_on_after(0.05) as scope:
        await unit_of_work(AGAIN, lambda: connection)(wait)()
    assert scope.cancelled_caught
    assert connection.done == ["rollback", "close"]
    assert caplog.records == []


async def test_a_unit_that_is_cut_off_while_it_closes_is_closed(virtual_tasks: Virtual) -> None:
    """The connection of a committed unit does not stay open."""
    connection = Connection("close")
    with anyio.move_on_after(0.1):
        await unit_of_work(AGAIN, lambda: connection)(wait)(seconds=0.0)
    assert connection.done == ["commit", "rollback", "close"]


@pytest.mark.parametrize("stuck", ["rollback", "close"])
async def test_a_rollback_that_hangs_does_not_keep_the_caller(
    virtual_tasks: Virtual, caplog: pytest.LogCaptureFixture, stuck: str
) -> None:
    """After its grace period it is cancelled, and the connection is closed."""
    connection = Connection(stuck)
    with pytest.raises(TimeoutExceeded):
        await unit_of_work(Timeout(0.05), lambda: connection)(wait)()
    await anyio.sleep(0.1)  # in asyncio it ends in the background
    assert virtual_tasks.now() < PATIENCE / 2
    assert connection.done == [it for it in ("close", "rollback") if it != stuck]
    assert "the rollback of a Connection has not ended within 1 s" in caplog.text


async def test_a_task_that_is_cancelled_again_finishes_its_rollback(in_virtual_asyncio: Virtual) -> None:
    connection = Connection()

    async def fail(connection: Connection) -> None:
        raise ValueError("mine")

    task = asyncio.ensure_future(unit_of_work(AGAIN, lambda: connection)(fail)())
    await asyncio.sleep(0.005)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.002)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert connection.done == ["rollback", "close"]


async def test_a_cancelled_statement_does_not_delay_its_rollback(path: Path) -> None:
    """aiosqlite's thread would continue it, and execute nothing else before its end."""

    async def forever(connection: aiosqlite.Connection) -> None:
        connections.append(connection)
        await connection.execute(FOREVER)

    connections: list[aiosqlite.Connection] = []
    began = time.monotonic()
    with anyio.move_on_after(0.2):
        await unit_of_work(AGAIN, lambda: aiosqlite.connect(path), limit_statements=False)(forever)()
    assert time.monotonic() - began < PATIENCE / 2
    assert not any(it._running for it in connections)


@pytest.mark.parametrize("connected", [False, True])
async def test_a_plain_function_with_an_async_connection_is_refused(path: Path, connected: bool) -> None:
    """The error says what to write, and no policy replaces it."""
    connection = await aiosqlite.connect(path) if connected else None
    unit = unit_of_work(Fallback("answered"), lambda: connection or aiosqlite.connect(path))
    with pytest.raises(TypeError, match=r"note is a plain function, .* \(Connection\): write `async def`"):
        unit(note)("a")
    if connection is not None:
        await connection.close()


def test_the_coroutine_of_an_async_connect_is_closed_without_a_warning(path: Path) -> None:
    """If the unit is a plain function."""

    async def connect() -> aiosqlite.Connection:
        return await aiosqlite.connect(path)

    with pytest.raises(TypeError, match="`async def`"):
        unit_of_work(AGAIN, connect)(note)("a")
