"""Once: one call for each key among all users of the store, and its result for every later call with that key."""

from __future__ import annotations

import asyncio
import pickle
import re
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import create_engine

from resilience import Fallback, Keyed, Pipeline, Policy, Rejected, Retry, Timeout, TimeoutExceeded, events
from resilience.shared import MemoryStore
from resilience.testing import ascript, hang, script
from resilience.work import KeyInUse, KeyMismatch, Once, claims
from resilience.work.claims import Claim
from tests.callers import in_threads
from tests.conftest import Boom, FakeClock, Script, Virtual, World


def by_order(order: str, *rest: Any, **keywords: Any) -> str:
    return order


@pytest.fixture
def connect(tmp_path: Path) -> Callable[[], sqlite3.Connection]:
    return partial(sqlite3.connect, tmp_path / "once.db", timeout=10, check_same_thread=False)


@pytest.fixture
def connection(connect: Callable[[], sqlite3.Connection]) -> Iterator[sqlite3.Connection]:
    with closing(connect()) as connection:
        yield connection


@pytest.fixture(params=["mapping", "memory", "connect", "connection"])
def store(request: pytest.FixtureRequest) -> Any:
    """A store of each kind that needs no server."""
    makers = {"mapping": dict, "memory": MemoryStore}
    return makers[request.param]() if request.param in makers else request.getfixturevalue(request.param)


@pytest.fixture
def clocks(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The process clock, and the machine's clock, whose time databases store."""
    monkeypatch.setattr(claims.time, "time", clock.now)
    return clock


async def outcome_of(world: World, policy: Any, fn: Callable[..., Any], *args: Any) -> Any:
    try:
        return await world.call(policy, fn, *args)
    except Exception as error:
        return error


async def test_a_call_is_made_once_for_each_key(world: World, store: Any) -> None:
    once, calls = Once(store, key=by_order, payload=lambda order, amount: amount), []

    async def pay(order: str, amount: int) -> dict[str, int]:
        calls.append(order)
        return {"paid": amount}

    ends = [await outcome_of(world, once, pay, *it) for it in (("a", 5), ("a", 5), ("a", 5), ("b", 6))]
    assert (ends, calls) == ([{"paid": 5}] * 3 + [{"paid": 6}], ["a", "b"])
    other = await outcome_of(world, once, pay, "a", 7)
    assert isinstance(other, KeyMismatch)
    assert "another payload" in str(other)


def test_the_payload_function_gets_keyword_arguments_too() -> None:
    pay = Once({}, key=by_order, payload=lambda order, amount: amount)(lambda order, amount: amount)
    assert [pay("a", amount=5), pay("a", amount=5)] == [5, 5]
    with pytest.raises(KeyMismatch):
        pay("a", amount=6)


async def test_a_failed_call_gives_up_its_claim(world: World, store: Any) -> None:
    once = Once(store, key=by_order)
    ends = [Boom(), TimeoutExceeded(), "fine"]  # the timeout is that of a call in it
    pay = Script(*ends).function()
    assert [await outcome_of(world, once, pay, "a") for _ in ends] == ends


async def test_a_running_call_refuses_others_with_the_same_key(world: World, store: Any, heard: list[Any]) -> None:
    once, seen = Once(store, key=by_order, lease=30, name="pay"), list[Any]()

    async def pay(order: str) -> None:
        seen.append(await outcome_of(world, once, pay, order))

    await outcome_of(world, once, pay, "a")
    [refused] = seen
    assert (type(refused), refused.policy) == (KeyInUse, "pay")
    assert 25 < refused.retry_after <= 30
    [rejected] = [it for it in heard if isinstance(it, events.CallRejected)]
    assert (rejected.policy, rejected.reason, rejected.retry_after) == ("pay", "KeyInUse", refused.retry_after)


def test_a_claim_ends_with_its_lease_and_a_result_after_keep(clocks: FakeClock, store: Any) -> None:
    """A later call takes the claim over, with a lease of its own."""
    once = Once(store, key=by_order, lease=30, keep=100)
    pay = script(KeyboardInterrupt(), KeyboardInterrupt(), "first", "second")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            once.call(pay, "a")
        clocks.advance(29)
        with pytest.raises(KeyInUse):
            once.call(pay, "a")  # a cancelled holder may have done its work
        clocks.advance(1)
    for seconds, result in ((0, "first"), (99, "first"), (1, "second")):
        clocks.advance(seconds)
        assert once.call(pay, "a") == result


def test_a_holder_whose_lease_has_ended_changes_nothing(clocks: FakeClock, store: Any) -> None:
    once = Once(store, key=by_order, lease=30)

    def overtaken(order: str, fails: bool) -> str:
        clocks.advance(31)
        assert once.call(lambda order: "second", order) == "second"
        if fails:
            raise Boom
        return "first"

    assert once.call(overtaken, "a", False) == "first"
    with pytest.raises(Boom):
        once.call(overtaken, "b", True)
    for order in "ab":
        assert once.call(lambda order: "third", order) == "second"


def test_threads_and_event_loops_make_one_call_for_each_key(store: Any) -> None:
    once, calls, got = Once(store, key=by_order), [], []
    patient = Retry(200, on=KeyInUse, backoff=[0.002], retry_after=False).wrap(once)

    def pay(order: str) -> str:
        calls.append(order)
        return f"paid {order}"

    async def apay(order: str) -> str:
        await asyncio.sleep(0.001)
        return pay(order)

    async def main() -> None:
        got.extend(await asyncio.gather(*(patient.acall(apay, f"order-{n % 4}") for n in range(8))))

    def thread() -> None:
        got.extend(patient.call(pay, f"order-{n}") for n in range(4))

    threads = [] if isinstance(store, sqlite3.Connection) else [thread] * 6
    in_threads(*threads, lambda: asyncio.run(main()))
    assert sorted(calls) == [f"order-{n}" for n in range(4)]
    assert len(got) == 4 * len(threads) + 8


def test_an_unavailable_store_refuses_calls_and_loses_no_result(
    caplog: pytest.LogCaptureFixture, heard: list[Any]
) -> None:
    gone = script(ConnectionError("gone"), ...)
    with pytest.raises(Rejected, match="is not available") as caught:
        Once(SimpleNamespace(claim=gone, finish=gone, give_up=gone), key=by_order, name="pay").call(str.upper, "a")
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert caught.value.policy == "pay"
    assert [(it.policy, it.reason) for it in heard if isinstance(it, events.CallRejected)] == [("pay", "Rejected")]
    once = Once(SimpleNamespace(claim=lambda *_: Claim(True), finish=gone, give_up=gone), key=by_order)
    assert once.call(str.upper, "a") == "A"
    with pytest.raises(Boom):
        once.call(script(Boom()), "a")
    assert [it.message for it in caplog.records] == ["Once could not record in its store how a call has ended"] * 2


def test_an_async_store_works_in_tasks_only() -> None:
    async def kept(*args: Any) -> Claim:
        await asyncio.sleep(0)
        return Claim(False, "", '"kept"', 1.0)

    once = Once(SimpleNamespace(claim=kept, finish=kept, give_up=kept), key=by_order)
    assert asyncio.run(once.acall(ascript("not called"), "a")) == "kept"
    with pytest.raises(TypeError, match="awaitable"):
        once.call(str.upper, "a")


@pytest.mark.parametrize(
    "limited",
    [
        lambda once: Timeout(1).wrap(once),
        lambda once: once.wrap(Timeout(1)),
        lambda once: Keyed(lambda key: once.wrap(Timeout(1)), key=by_order),
    ],
    ids=["around", "inside", "inside, in a Keyed"],
)
async def test_a_holder_that_was_cut_off_keeps_its_claim(
    in_virtual_asyncio: Virtual, limited: Callable[[Once], Policy[Any]]
) -> None:
    once = Once({}, key=by_order, lease=30)
    policy, slow = limited(once), ascript(hang(10), "fine")
    with pytest.raises(TimeoutExceeded):
        await policy.acall(slow, "a")
    with pytest.raises(KeyInUse):
        await policy.acall(slow, "a")
    await asyncio.sleep(29)
    assert await once.acall(slow, "a") == "fine"


async def test_a_result_is_closed_if_the_call_is_cut_off_while_it_is_stored(in_virtual_asyncio: Virtual) -> None:
    """No caller gets it."""
    closed: list[str] = []
    store = SimpleNamespace(claim=ascript(Claim(True)), finish=ascript(hang(10)), give_up=None)
    once = Once(store, key=by_order, serializer=SimpleNamespace(dumps=str, loads=str))
    with pytest.raises(TimeoutExceeded):
        await Timeout(1).wrap(once).acall(ascript(SimpleNamespace(close=lambda: closed.append("result"))), "a")
    assert closed == ["result"]


def test_a_key_is_in_use_while_its_abandoned_call_runs_in_a_thread(clock: FakeClock) -> None:
    once, end = Once({}, key=by_order).wrap(Timeout(1)), threading.Event()

    def slow(order: str) -> None:
        clock.advance(1)
        end.wait(10)

    with pytest.raises(TimeoutExceeded):
        once.call(slow, "a")
    with pytest.raises(KeyInUse):
        once.call(by_order, "a")
    end.set()


def test_results_are_stored_with_the_serializer(store: Any) -> None:
    once = Once(store, key=by_order, serializer=pickle, payload=lambda order: {"order": order})
    assert [once.call(lambda order: {1, 2}, "a") for _ in range(2)] == [{1, 2}] * 2
    once = Once(store, key=by_order, serializer=SimpleNamespace(dumps=str, loads=str), name="plain")
    for text in ("base64:YQ==", "text:a"):
        assert [once.call(lambda order: order, text) for _ in range(2)] == [text] * 2
    with pytest.raises(TypeError, match="not JSON serializable"):
        Once({}, key=by_order).call(lambda order: {1, 2}, "a")


def test_a_key_is_that_of_one_name(store: Any) -> None:
    """A caller who chooses the key cannot get a result that is kept under another name."""
    named = {"pay": "refund:7", "pay:refund": "7", "pay%3Arefund": "7"}
    for name, key in named.items():
        assert Once(store, key=by_order, name=name).call(lambda order, name: name, key, name) == name


@pytest.mark.parametrize("key", [None, True, 1.5, ("a", "b"), ""])
def test_a_key_that_is_no_text_or_number_is_refused(key: Any) -> None:
    with pytest.raises(TypeError, match="a text or a whole number"):
        Pipeline(Fallback("no"), Once({}, key=lambda: key)).call(int)


def test_describe_and_repr_show_the_settings() -> None:
    once = Once(MemoryStore({}), key=by_order, name="pay")
    assert once.describe() == "pay: one call for each key, claimed for 60 s; its result is kept for 86400 s"
    assert repr(once).startswith("Once(store=<MemoryStore entries=0>, key=")
    assert repr(Once({"key": "a result"}, key=by_order)).startswith("Once(store=<dict>, key="), "no results"
    with pytest.raises(TypeError, match="mutable mapping"):
        MemoryStore(5)  # type: ignore[arg-type]


# --- drivers of databases ---


PARAMETERS = {"qmark": r"\?", "numeric": r":\d+", "format": "%s", "pyformat": "%s"}


def connect_of_driver(style: str, path: Path, monkeypatch: pytest.MonkeyPatch, inside: str = "") -> Callable[[], Any]:
    """Return the `connect` of a driver with this `paramstyle`, for a database in which "a" equals "A".

    :param inside: the module of the connection class inside of the driver's package.
    """
    driver: Any = ModuleType("some_driver")
    driver.paramstyle, driver.Error, driver.IntegrityError = style, sqlite3.Error, sqlite3.IntegrityError
    monkeypatch.setitem(sys.modules, "some_driver", driver)

    class Cursor(sqlite3.Cursor):
        def execute(self, statement: str, parameters: Any = ()) -> Any:
            assert isinstance(parameters, dict) is (style == "named")
            if style == "numeric":
                found = re.findall(r":(\d+)", statement)
                assert found == [str(number) for number in range(1, len(parameters) + 1)]
            if style != "named":
                statement = re.sub(PARAMETERS[style], "?", statement)
            return super().execute(statement.replace("PRIMARY KEY", "PRIMARY KEY COLLATE NOCASE"), parameters)

    class Connection(sqlite3.Connection):
        def cursor(self, factory: Any = None) -> Any:
            return super().cursor(Cursor)

    Connection.__module__ = f"some_driver{inside}"
    return lambda: sqlite3.connect(path / "once.db", factory=Connection)


@pytest.mark.parametrize("style", ["qmark", "numeric", "named", "format", "pyformat"])
def test_drivers_of_any_paramstyle_are_supported(style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = Once(connect_of_driver(style, tmp_path, monkeypatch), key=by_order, payload=lambda order, amount: amount)
    assert [once.call(lambda order, amount: amount, "a", 5) for _ in range(2)] == [5, 5]
    with pytest.raises(KeyMismatch):
        once.call(max, "a", 6)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            once.call(lambda order, amount: amount // 0, "b", 1)


@pytest.mark.parametrize("inside", ["", ".connector.connection"])
def test_keys_equal_to_the_database_are_distinct(inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = Once(connect_of_driver("format", tmp_path, monkeypatch, inside), key=by_order)
    keys = ["order", "ORDER", "order ", "o" * 300, "o" * 301, "nul \0", "half \udc80"]
    assert [once.call(str.title, key) for key in keys] == [key.title() for key in keys]


def test_a_pool_may_return_wrapped_connections(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'once.db'}")
    once = Once(engine.raw_connection, key=by_order)
    assert [once.call(str.upper, "a") for _ in range(2)] == ["A", "A"]
    assert once.call(lambda order: "other", "a") == "A"
    engine.dispose()


def test_a_store_that_is_no_connection_of_a_driver_is_a_type_error(tmp_path: Path) -> None:
    """And no unavailable store, which a fallback would replace."""

    class Foreign:
        def cursor(self) -> None: ...
        def commit(self) -> None: ...
        def close(self) -> None: ...

    for store in (Foreign(), Foreign):
        with pytest.raises(TypeError, match="opens a connection of a DB-API driver"):
            Fallback("no").wrap(Once(store, key=by_order)).call(str, "a")


def test_two_processes_can_create_the_table_at_the_same_time(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In PostgreSQL, `CREATE TABLE IF NOT EXISTS` fails for the second one."""
    other, late, bound = Once(connect, key=by_order), claims.as_claim_store(connect), claims._bound

    def overtaken(style: str, statement: str, values: Any) -> Any:
        if statement == claims._CREATE and not overtaken_by:
            overtaken_by.append(1)
            other.call(str.upper, "a")
            return "CREATE TABLE resilience_once (name)", ()  # which fails, as the table exists
        return bound(style, statement, values)

    overtaken_by: list[int] = []
    monkeypatch.setattr(claims, "_bound", overtaken)
    assert Once(late, key=by_order).call(str.lower, "a") == "A"
    assert overtaken_by == [1]


def test_expired_entries_are_removed_from_memory(clocks: FakeClock) -> None:
    """When their number has doubled, and not with each claim, which would take long."""
    entries: dict[str, Any] = {"of another part": 1}
    once = Once(entries, key=by_order, keep=10)
    for number in range(1500):
        once.call(str, str(number))
    assert len(entries) == 1501
    clocks.advance(10)
    for number in range(1500, 2000):
        once.call(str, str(number))
    assert len(entries) == 501
    assert entries["of another part"] == 1
    assert once.call(lambda order: "kept", "1600") == "1600"


def test_two_processes_that_insert_a_key_at_the_same_time_make_one_claim(connect: Any) -> None:
    """The second one finds the claim of the first, with its fingerprint."""
    other: Any = claims.as_claim_store(connect)
    late: Any = claims.as_claim_store(connect)
    claim, steps = late._claim, []

    def overtaken(run: Any, *arguments: Any) -> Claim:
        if not steps:
            steps.append(other.claim("key", "theirs", "print", 30))
            return run(claims._INSERT, arguments[0], "ours", "print", 0.0)  # as if it had read before that
        return claim(run, *arguments)

    late._claim = overtaken
    answer = late.claim("key", "ours", "print", 30)
    assert steps == [Claim(True)]
    assert (answer.is_mine, answer.fingerprint, answer.result) == (False, "print", None)


def test_a_failed_statement_leaves_no_transaction_open(connection: sqlite3.Connection) -> None:
    kept: Any = claims.as_claim_store(connection)
    failures = [sqlite3.IntegrityError(), sqlite3.OperationalError("locked")]

    def overtaken(run: Any, *arguments: Any) -> Claim:
        run(claims._INSERT, arguments[0], "ours", "print", 0.0)
        raise failures.pop(0)

    kept._claim = overtaken
    with pytest.raises(sqlite3.OperationalError):
        kept.claim("key", "ours", "print", 30)
    assert not connection.in_transaction


def test_all_rows_are_read_before_the_commit(connect: Any) -> None:
    """MySQL's own driver raises "Unread result found" otherwise."""

    class Cursor(sqlite3.Cursor):
        def execute(self, *arguments: Any) -> Any:
            result = super().execute(*arguments)
            unread.append(self) if self.description else unread.clear()
            return result

        def fetchall(self) -> list[Any]:
            unread.clear()
            return super().fetchall()

    class Connection(sqlite3.Connection):
        def cursor(self, factory: Any = None) -> Any:
            return super().cursor(Cursor)

        def commit(self) -> None:
            if unread:
                raise sqlite3.InternalError("Unread result found")
            super().commit()

    unread: list[Any] = []
    for _ in range(2):  # the second finds the table
        once = Once(partial(connect, factory=Connection), key=by_order)
        assert once.call(str.upper, "a") == "A"
