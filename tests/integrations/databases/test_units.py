"""Units of work: the function, its connection, and a commit whose outcome is unknown."""

from __future__ import annotations

import inspect
import sqlite3
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiosqlite
import psycopg
import psycopg2
import pytest

from resilience import Cache, Context, Fallback, Hedge, Policy, Retry, Timeout, current_context, events
from resilience.errors import ArgumentMisuse
from resilience.integrations.dbapi import OutcomeUnknown, unit_of_work
from resilience.testing import recording
from tests.callers import wait_until
from tests.conftest import FakeClock
from tests.functions import raising
from tests.integrations.databases.postgres import Traced
from tests.integrations.databases.sqlite import AGAIN, PATIENCE, connecting, note, notes


def test_a_unit_is_called_without_its_connection(path: Path) -> None:
    """It keeps its name, which is that of the operation, its documentation, and the rest of its signature.

    Its executions have the name of its policy.
    """
    unit = unit_of_work(AGAIN, connecting(path))

    @unit
    def add(connection: sqlite3.Connection, text: str, *, twice: bool = False) -> int:
        """Add a note."""
        for _ in range(1 + twice):
            note(connection, text)
        return connection.total_changes

    with recording(events.ExecutionFinished) as recorder:
        assert add("a") == 1
        assert add("b", twice=True) == 2
    assert notes(path) == ["a", "b", "b"]
    assert (add.__name__, add.__doc__) == ("add", "Add a note.")
    assert list(inspect.signature(add).parameters) == ["text", "twice"]
    assert [event.operation for event in recorder.events] == [add.__qualname__] * 2
    assert [event.policy for event in recorder.events] == [AGAIN.name] * 2


def test_a_unit_takes_a_policy_of_any_name(path: Path) -> None:
    """Also one that the library's own policies refuse: a name can be set later, and in a class."""
    retry = Retry()
    retry.name = ""
    with recording(events.ExecutionFinished) as recorder:
        assert unit_of_work(retry, connecting(path))(notes_of)() == []
    assert [event.policy for event in recorder.events] == [""]


def notes_of(connection: sqlite3.Connection) -> list[Any]:
    return connection.execute("select text from notes").fetchall()


def test_policies_see_the_arguments_of_the_caller(path: Path) -> None:
    """Without the connection, which is new in each attempt: equal calls of one function have one key."""
    asked: list[tuple[str, Any]] = []
    unit = unit_of_work(Cache(60.0), connecting(path))
    for ask in [unit(lambda _, text: asked.append((text, current_context().called.function))) for _ in range(2)]:
        for text in "aba":
            ask(text)
    texts, functions = zip(*asked, strict=True)
    assert texts == ("a", "b", "a", "b")
    assert [it == functions[0] for it in (*functions, "a")] == [True, True, False, False, False]


class LosesConnection(sqlite3.Connection):
    """A connection that commits, and breaks before it reports so."""

    def commit(self) -> None:
        super().commit()
        raise psycopg.OperationalError("server closed the connection unexpectedly")


def test_a_commit_of_unknown_outcome_is_not_repeated(path: Path) -> None:
    """Here it has happened. `repeat_unknown_commits` repeats it."""
    connect = connecting(path, kind=LosesConnection)
    with pytest.raises(psycopg.OperationalError) as caught:
        unit_of_work(AGAIN, connect)(note)("a")
    assert caught.value.repeatable is False  # type: ignore[attr-defined]
    assert notes(path) == ["a"]
    with pytest.raises(psycopg.OperationalError):
        unit_of_work(AGAIN, connect, repeat_unknown_commits=True)(note)("b")
    assert notes(path) == ["a", "b", "b", "b"]


def abandoned_attempts_end() -> None:
    wait_until(lambda: Timeout.abandoned() == 0)


class Stubborn(Policy[Any]):
    """Makes a failed call again, whatever it has failed with."""

    async def around(self, call: Any, ctx: Context) -> Any:
        try:
            return await call(ctx)
        except Exception:
            return await call(ctx)


@pytest.mark.parametrize("around", [[], [AGAIN], [Stubborn()]])
def test_the_outcome_of_a_cut_off_commit_is_unknown(path: Path, clock: FakeClock, around: list[Policy[Any]]) -> None:
    """It is not repeated, in the policy or by a Retry around the unit."""
    policy = Policy.wrap(*around, Timeout(1))
    may_end = threading.Event()

    class Slow(sqlite3.Connection):
        def commit(self) -> None:
            super().commit()
            clock.advance(1)
            may_end.wait(PATIENCE)

    with pytest.raises(OutcomeUnknown):
        AGAIN.call(unit_of_work(policy, connecting(path, kind=Slow))(note), "a")
    may_end.set()
    abandoned_attempts_end()
    assert notes(path) == ["a"]


def test_a_committed_unit_is_not_repeated_if_its_result_is_rejected(path: Path) -> None:
    """The caller gets that result, or what a policy raises instead."""
    policy = Retry(3, on_result=lambda result: True, backoff=[0])
    assert unit_of_work(policy, connecting(path))(lambda connection: [note(connection, "a")])() == [None]
    rejecting = Fallback(handler=raising(ConnectionError("not this")), on_result=lambda result: True)
    with pytest.raises(ConnectionError):
        AGAIN.call(unit_of_work(rejecting, connecting(path))(note), "b")
    assert notes(path) == ["a", "b"]


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_an_abandoned_attempt_lets_no_later_commit_be_repeated(path: Path, clock: FakeClock, is_cut_off: bool) -> None:
    """It ends while that commit is in progress, whose outcome is then unknown."""
    second_commits, may_end = threading.Event(), threading.Event()
    attempts: list[str] = []

    class LostByCommitting(LosesConnection):
        def commit(self) -> None:
            second_commits.set()
            abandoned_attempts_end()
            if is_cut_off:
                sqlite3.Connection.commit(self)
                clock.advance(1)
                may_end.wait(PATIENCE)
            super().commit()

    @unit_of_work(Policy.wrap(AGAIN, Timeout(1)), connecting(path, kind=LostByCommitting))
    def add(connection: sqlite3.Connection) -> None:
        attempts.append(f"attempt {len(attempts) + 1}")
        if len(attempts) == 1:
            clock.advance(1)
            second_commits.wait(PATIENCE)
        else:
            note(connection, attempts[-1])

    with pytest.raises((psycopg.OperationalError, OutcomeUnknown)):
        add()
    may_end.set()
    abandoned_attempts_end()
    assert notes(path) == ["attempt 2"]


@pytest.mark.parametrize("may_be_committed_twice", [False, True])
def test_only_a_unit_that_may_be_committed_twice_is_hedged(path: Path, may_be_committed_twice: bool) -> None:
    """The first attempt continues in its thread, and would commit after the second one."""
    begun = []

    @unit_of_work(Hedge(0.01), connecting(path, PATIENCE), repeat_unknown_commits=may_be_committed_twice)
    def add(connection: sqlite3.Connection) -> None:
        begun.append(current_context().hedge)
        if may_be_committed_twice:
            wait_until(lambda: len(begun) == 2)
        else:
            time.sleep(0.1)
        note(connection, "a")

    add()
    assert sorted(begun) == [0, 1][: 1 + may_be_committed_twice]


def test_an_attempt_that_is_too_late_to_commit_stops_no_other(path: Path, clock: FakeClock) -> None:
    """It has committed nothing, so the outcome of the unit is not unknown."""
    second_has_begun = threading.Event()
    attempts: list[str] = []

    @unit_of_work(Policy.wrap(AGAIN, Timeout(1)), connecting(path))
    def add(connection: sqlite3.Connection) -> None:
        attempts.append(f"attempt {len(attempts) + 1}")
        if len(attempts) == 1:
            clock.advance(1)
            second_has_begun.wait(PATIENCE)
        elif len(attempts) == 2:
            second_has_begun.set()
            abandoned_attempts_end()
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        else:
            note(connection, attempts[-1])

    add()
    assert notes(path) == ["attempt 3"]


def test_a_connection_that_cannot_be_made_is_tried_again(path: Path) -> None:
    """Connecting is a part of the attempt. The function that connects may be a mock, which looks like a connection."""
    connect = Mock(side_effect=[ConnectionRefusedError("refused"), connecting(path)()])
    unit_of_work(AGAIN, connect)(note)("a")
    assert (notes(path), connect.call_count) == (["a"], 2)


def test_an_error_of_closing_is_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The unit is committed by then."""

    class Unclosable(sqlite3.Connection):
        def close(self) -> None:
            super().close()
            raise OSError("already gone")

    unit_of_work(AGAIN, connecting(path, kind=Unclosable))(note)("a")
    assert notes(path) == ["a"]
    assert "closing a Unclosable raised" in caplog.text


@pytest.mark.parametrize("wrap", [lambda connection: connection, Traced], ids=["plain", "traced"])
def test_a_connection_returns_to_its_pool(url: str, wrap: Any) -> None:
    """psycopg's `close` does that only with `close_returns`, and not if the connection is lost: the pool would wait.

    Also if a tracer has wrapped the connection.
    """
    pool = Mock(close_returns=False)

    def connect() -> Any:
        connection = psycopg.connect(url)
        connection._pool = pool
        return wrap(connection)

    unit = unit_of_work(Retry(1), connect)(lambda connection, statement: connection.execute(statement))
    unit("select 1")
    with pytest.raises(psycopg.OperationalError):
        unit("select pg_terminate_backend(pg_backend_pid())")
    connections = [it.args[0] for it in pool.putconn.call_args_list]
    assert [it.closed for it in connections] == [False, True]
    connections[0].close()


@pytest.mark.parametrize(
    "connect", [psycopg.connect, psycopg2.connect, *[sqlite3.connect] * (sys.version_info >= (3, 12))]
)
def test_a_connection_in_autocommit_mode_is_refused(url: str, connect: Any) -> None:
    """Each statement would be committed, and done again by the next attempt. No policy answers instead."""
    made: list[Any] = []

    def connecting() -> Any:
        made.append(connect(":memory:" if connect is sqlite3.connect else url))
        made[-1].autocommit = True
        return made[-1]

    with pytest.raises(ValueError, match="connect without autocommit"):
        unit_of_work(Fallback("instead"), connecting)(lambda connection: pytest.fail("it began"))()
    with pytest.raises((psycopg.OperationalError, psycopg2.InterfaceError, sqlite3.ProgrammingError), match="closed"):
        made[0].cursor()


def rows_of(connection: sqlite3.Connection) -> Any:
    yield from connection.execute("select text from notes")


async def arows_of(connection: sqlite3.Connection) -> Any:
    for row in connection.execute("select text from notes"):
        yield row


def test_arguments_that_do_not_fit_are_a_misuse(path: Path) -> None:
    """Such as a connection of the caller's. No fallback answers, other than after a `TypeError` of the function."""
    unit = unit_of_work(Fallback("instead"), connecting(path))
    with pytest.raises(ArgumentMisuse, match="note cannot be called with these arguments"):
        unit(note)("own connection", "a")  # type: ignore[call-arg]
    assert unit(lambda connection: note(connection))() == "instead"  # type: ignore[call-arg]


class Connected:
    """An asynchronous connection that need not be awaited, like a session of SQLAlchemy."""

    async def commit(self) -> None: ...


def test_a_plain_function_with_an_async_connection_is_refused(path: Path) -> None:
    """The error says what to write, no policy replaces it, and no coroutine is left unawaited."""

    async def connect() -> aiosqlite.Connection:
        return await aiosqlite.connect(path)

    for source in (connect, lambda: aiosqlite.connect(path), Connected):
        unit = unit_of_work(Fallback("answered"), source)
        with pytest.raises(TypeError, match=r"note is a plain function, .*: write `async def`"):
            unit(note)("a")  # type: ignore[arg-type]


@pytest.mark.parametrize("fn", [rows_of, arows_of])
def test_a_generator_function_is_refused(path: Path, fn: Any) -> None:
    """It would do its work after the commit, and a session would begin a new transaction for that."""
    with pytest.raises(TypeError, match="rows_of is a generator function"):
        unit_of_work(AGAIN, connecting(path))(fn)


def test_a_function_that_does_not_take_the_connection_first_is_refused(path: Path) -> None:
    """In a method, `self` would be the connection, and the connection the next parameter."""
    unit: Any = unit_of_work(AGAIN, connecting(path))
    with pytest.raises(TypeError, match=r"first parameter of .*<lambda> must be the connection or session"):
        unit(lambda: None)
    with pytest.raises(TypeError, match=r"first parameter of .*<lambda> must be the connection or session"):
        unit(lambda self, connection: None)
    with pytest.raises(TypeError, match=r"`self` or `cls` comes second$"):

        class Accounts:
            @classmethod
            @unit
            def open(cls, connection: Any) -> None: ...

    class Names:
        @unit
        def note(connection: Any, self, name: str) -> str:
            assert connection.execute("select ?", [name]).fetchone() == (name,)
            return f"{type(self).__name__} {name}"

    assert Names().note("ada") == "Names ada"
