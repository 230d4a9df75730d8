"""Units of work that are cut off in asyncio and trio: rolled back and closed, without keeping the caller."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiosqlite
import anyio
import pytest

from resilience import Policy, Timeout, TimeoutExceeded
from resilience.integrations.dbapi import OutcomeUnknown, unit_of_work
from tests.conftest import Virtual
from tests.integrations.databases.sqlite import AGAIN, FOREVER, PATIENCE


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


@pytest.mark.parametrize(
    ("stuck", "seconds", "done"),
    [("", PATIENCE, ["rollback", "close"]), ("close", 0.0, ["commit", "rollback", "close"])],
)
async def test_a_cancelled_unit_is_undone_and_closed(
    virtual_tasks: Virtual, caplog: pytest.LogCaptureFixture, stuck: str, seconds: float, done: list[str]
) -> None:
    """The scope that cancels every wait inside of it does not cancel those of the rollback.

    Nor does the connection of a committed unit stay open, if it is cut off while it closes.
    """
    connection = Connection(stuck)
    with anyio.move_on_after(0.1) as scope:
        await unit_of_work(AGAIN, lambda: connection)(wait)(seconds=seconds)
    assert scope.cancelled_caught
    assert connection.done == done
    assert caplog.records == []


async def test_the_outcome_of_a_cut_off_commit_is_unknown(virtual_tasks: Virtual) -> None:
    """It is not repeated."""
    connection = Connection("commit")
    with pytest.raises(OutcomeUnknown):
        await unit_of_work(Policy.wrap(AGAIN, Timeout(0.1)), lambda: connection)(wait)(seconds=0.0)
    assert connection.done == ["rollback", "close"]


@pytest.mark.parametrize("stuck", ["rollback", "close"])
async def test_a_stuck_rollback_is_left(virtual_tasks: Virtual, caplog: pytest.LogCaptureFixture, stuck: str) -> None:
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
