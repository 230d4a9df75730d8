"""Units of work: the common behaviour of every way to reach a database."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import psycopg
import psycopg2
import pytest
from sqlalchemy.exc import DBAPIError

from resilience import Context, DeadlineExceeded, Policy, Retry, Timeout, TimeoutExceeded, current_context, deadline
from resilience.integrations.dbapi import TransactionAborted
from tests.conftest import FakeClock
from tests.integrations.databases.kinds import KINDS, Kind, Notes, Work
from tests.integrations.databases.postgres import Frozen
from tests.integrations.databases.sqlite import PATIENCE, Locked
from tests.integrations.http_clients import each_of

#: The errors of statements, of drivers and of SQLAlchemy.
ERRORS = (sqlite3.Error, psycopg.Error, psycopg2.Error, DBAPIError)


kind = each_of(KINDS, ids=str)


def only(**properties: bool) -> Any:
    """Run a test with some of the kinds."""
    some = [it for it in KINDS if all(getattr(it, name) is value for name, value in properties.items())]
    return pytest.mark.parametrize("kind", some, ids=str)


@pytest.fixture
def place(kind: Kind, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A database with an empty table."""
    if kind.is_postgres:
        return str(request.getfixturevalue("url"))
    file = tmp_path / "test.db"
    with sqlite3.connect(file) as connection:
        connection.execute("create table notes (text varchar(40) unique)")
    connection.close()
    return str(file)


@pytest.fixture
def notes(kind: Kind, place: str) -> Iterator[Notes]:
    notes = Notes(kind, place)
    yield notes
    assert notes.in_use == 0


def inserting(text: str) -> str:
    return f"insert into notes values ('{text}')"


def executing(*statements: str) -> Work:
    """Return the work of executing these statements, whose result is their rows."""

    async def work(execute: Any) -> list[Any]:
        return [row for statement in statements for row in await execute(statement)]

    return work


async def test_a_unit_is_committed_when_it_returns(notes: Notes) -> None:
    with deadline(PATIENCE):
        assert await notes.do(Retry(1), executing(inserting("a"), "select text from notes")) == [("a",)]
    assert notes.rows() == ["a"]


@pytest.mark.parametrize("mistake", [None, inserting("a")], ids=["raises", "constraint"])
async def test_a_unit_that_fails_is_rolled_back_and_not_repeated(notes: Notes, mistake: str | None) -> None:
    """After an error that is not transient."""
    attempts: list[int] = []

    async def work(execute: Any) -> None:
        attempts.append(1)
        await execute(inserting("a"))
        if mistake is None:
            raise ValueError("wrong")
        await execute(mistake)

    with pytest.raises((ValueError, *ERRORS)):
        await notes.do(Retry(3, on=notes.transient, backoff=[0]), work)
    assert (len(attempts), notes.rows()) == (1, [])


async def test_the_whole_unit_is_repeated(notes: Notes) -> None:
    """The work of failed attempts is rolled back, also if PostgreSQL has ended the connection."""
    attempts: list[str] = []

    async def work(execute: Any) -> None:
        attempts.append(f"attempt {len(attempts) + 1}")
        await execute(inserting(attempts[-1]))
        if len(attempts) == 1 and notes.kind.is_postgres:
            await execute("select pg_terminate_backend(pg_backend_pid())")
        if len(attempts) < 3:
            raise ConnectionResetError("reset")

    await notes.do(Retry(3, on=notes.transient, backoff=[0]), work)
    assert notes.rows() == ["attempt 3"]


async def test_a_deadline_ends_a_statement_and_does_not_limit_the_next_unit(notes: Notes) -> None:
    """Which may have the same connection."""
    for budget in (0.1, 0.5, 2.5):  # on a busy machine the first may pass before there is a connection
        began = time.monotonic()
        with deadline(budget), pytest.raises((DeadlineExceeded, *ERRORS)) as caught:
            await notes.do(Retry(3, on=notes.transient, backoff=[0]), executing(notes.forever))
        if not isinstance(caught.value, DeadlineExceeded):
            break
    assert re.search("interrupted|statement timeout", str(caught.value))
    await notes.do(Retry(1), executing(notes.long))
    assert time.monotonic() - began < PATIENCE / 2


async def test_nothing_is_committed_after_the_deadline(notes: Notes, clock: FakeClock) -> None:
    async def work(execute: Any) -> None:
        await execute(inserting("late"))
        clock.advance(20.0)

    with deadline(10.0), pytest.raises(DeadlineExceeded, match="nothing is committed"):
        await notes.do(Retry(3, on=notes.transient, backoff=[0]), work)
    assert notes.rows() == []


@only(is_async=True)
async def test_a_unit_that_is_cut_off_is_rolled_back(notes: Notes) -> None:
    """A Timeout cancels the first attempt; the second one does the work."""

    class ShortFirstAttempt(Policy[Any]):
        async def around(self, call: Any, ctx: Context) -> Any:
            return await Timeout(0.3 if ctx.attempt == 1 else PATIENCE).around(call, ctx)

    async def work(execute: Any) -> None:
        attempt = current_context().attempt
        await execute(inserting(f"attempt {attempt}"))
        if attempt == 1:
            await anyio.sleep(PATIENCE)

    await notes.do(Policy.wrap(Retry(2, backoff=[0]), ShortFirstAttempt()), work)
    assert notes.rows() == ["attempt 2"]


# --- SQLite ----------------------------------------------------------------------------------


@only(is_postgres=False)
@pytest.mark.parametrize("statement", ["begin immediate", "begin exclusive", "begin"])
async def test_a_locked_database_is_tried_again(notes: Notes, place: str, statement: str) -> None:
    """A writer blocks the statement, or a reader the commit: then neither has happened."""
    other = Locked(Path(place), statement)
    if statement == "begin":
        other.read()
    attempts: list[str] = []

    async def work(execute: Any) -> None:
        attempts.append(f"attempt {len(attempts) + 1}")
        await execute(inserting(attempts[-1]))

    await notes.do(Retry(2, on=notes.transient, backoff=[0], on_retry=other.release), work)
    assert notes.rows() == ["attempt 2"]


# --- PostgreSQL ------------------------------------------------------------------------------


@only(is_postgres=True)
@pytest.mark.parametrize("savepoint", [False, True])
async def test_a_unit_whose_transaction_is_aborted_is_a_failure(notes: Notes, savepoint: bool) -> None:
    """PostgreSQL answers its commit with a rollback, which no driver reports. With a savepoint it is not aborted."""

    async def work(execute: Any) -> None:
        await execute(inserting("a"))
        await execute("savepoint mine")
        with pytest.raises(ERRORS):
            await execute("select 1 / 0")
        if savepoint:
            await execute("rollback to savepoint mine")

    if savepoint:
        await notes.do(Retry(1), work)
    else:
        with pytest.raises(TransactionAborted, match="nothing can be committed"):
            await notes.do(Retry(3, on=notes.transient, backoff=[0]), work)
    assert notes.rows() == ["a"] * savepoint


@pytest.mark.parametrize(
    ("kind", "own", "shown"),
    [(kind, *case) for kind in KINDS if kind.is_postgres for case in (("250ms", "250ms"), ("3h", None))]
    + [
        (KINDS[6], *case)
        for case in (("5s", "5s"), ("2min", "2min"), ("1001s", None), ("61min", None), ("4d", None), ("0", None))
    ],
    ids=str,
)
async def test_the_shorter_of_deadline_and_timeout_holds(kind: Kind, place: str, own: str, shown: str | None) -> None:
    """The timeout may be set by the connection, its user or the server."""
    notes = Notes(kind, place, own)
    with deadline(1000.0):
        [(limit,)] = await notes.do(Retry(1), executing("show statement_timeout"))
    assert limit == shown or (shown is None and 900 < int(limit.removesuffix("s")) <= 1000)
    await notes.close()


@only(is_postgres=True)
async def test_a_unit_with_a_very_long_deadline_can_set_its_isolation_level(notes: Notes) -> None:
    """In its first statement, as without a deadline: our statements before it take no snapshot.

    PostgreSQL counts milliseconds in 31 bits; a client of a service may ask for 40,000 years.
    """
    isolation = "set transaction isolation level serializable"
    work = executing(isolation, "show transaction_isolation", "show statement_timeout")
    with deadline(99_999_999 * 3600.0):
        assert await notes.do(Retry(1), work) == [("serializable",), ("2147483s",)]


@only(is_postgres=True, is_async=True)
async def test_a_frozen_server_keeps_no_caller(notes: Notes, frozen: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers no rollback. The caller continues, and the connection is closed in the background."""
    monkeypatch.setattr("resilience.integrations.dbapi.cleanup.ROLLBACK_GRACE", 0.2)

    async def work(execute: Any) -> None:
        await execute(inserting("a"))
        [(process,)] = await execute("select pg_backend_pid()")
        frozen.freeze(process)
        await anyio.sleep(PATIENCE)

    began = time.monotonic()
    with pytest.raises(TimeoutExceeded):
        await notes.do(Timeout(0.3), work)
    assert time.monotonic() - began < PATIENCE / 4
    frozen.thaw()
    with anyio.fail_after(PATIENCE):
        while notes.in_use:
            await anyio.sleep(0.01)
    assert notes.rows() == []
