"""The stores of `Once`: claims on keys, and results.

    claim      take the key for some seconds, if it is free; else return what is known about it
    finish     keep the result, if the claim still holds
    give_up    free the key, if the claim still holds

Each step is atomic, also between processes. A claim is identified by its token, so a holder whose key was claimed again
after its lease changes nothing. Redis uses its own clock, the other stores use that of this machine.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar, final

from resilience.clock import clock
from resilience.errors import Misuse
from resilience.shared import MemoryStore

R = TypeVar("R")


class Claim(NamedTuple):
    """A store's answer to `claim`.

    :param is_mine: whether this claim has taken the key.
    :param fingerprint: the fingerprint of the payload of the earlier claim.
    :param result: the result of the earlier call; None while it is in progress.
    :param remaining: the seconds until the earlier claim ends, or its result is dropped.
    """

    is_mine: bool
    fingerprint: str = ""
    result: str | None = None
    remaining: float = 0.0


class ClaimStore(Protocol):
    """The interface of a store for `Once`. In tasks, its methods may return awaitables."""

    def claim(self, key: str, token: str, fingerprint: str, lease: float) -> Claim | Awaitable[Claim]:
        """Take the key for `lease` seconds, if it is free."""
        ...

    def finish(self, key: str, token: str, result: str, keep: float) -> object:
        """Keep the result for `keep` seconds, if the claim still holds."""
        ...

    def give_up(self, key: str, token: str) -> object:
        """Free the key, if the claim still holds."""
        ...


#: The objects that `Once` accepts as its store.
Store: TypeAlias = "ClaimStore | MemoryStore | MutableMapping[str, Any] | Callable[[], Any] | Any"


def as_claim_store(store: Store) -> ClaimStore:
    """Return the `ClaimStore` for a store of any kind."""
    if hasattr(store, "claim") and hasattr(store, "finish") and hasattr(store, "give_up"):
        return store
    if isinstance(store, MutableMapping):
        store = MemoryStore(store)
    if isinstance(store, MemoryStore):
        return _MemoryClaims(store)
    if hasattr(store, "eval") and hasattr(store, "pttl"):
        return _RedisClaims(store)
    if callable(store) or (hasattr(store, "cursor") and hasattr(store, "commit")):
        return _DbApiClaims(store)
    raise TypeError(
        f"store must be a mapping, a MemoryStore, a redis client, or a function that opens a DB-API connection, "
        f"not {store!r}"
    )


# --- in memory ---


class _Row(NamedTuple):
    token: str
    fingerprint: str
    result: str | None
    until: float


#: The smallest number of entries at which expired ones are dropped.
_DROP_FROM: Final = 1000


@final
class _MemoryClaims:
    """Claims in a mapping, on the process clock."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._drop_at = _DROP_FROM  # the number of entries at which expired ones are dropped next

    def claim(self, key: str, token: str, fingerprint: str, lease: float) -> Claim:
        with self._store.lock:
            now = clock.now()
            if len(self._store.entries) >= self._drop_at:
                self._drop_expired_locked(now)
            row: _Row | None = self._store.entries.get(key)
            if row is not None and row.until > now:
                return Claim(False, row.fingerprint, row.result, row.until - now)
            self._store.entries[key] = _Row(token, fingerprint, None, now + lease)
            return Claim(True)

    def finish(self, key: str, token: str, result: str, keep: float) -> None:
        with self._store.lock:
            row = self._store.entries.get(key)
            if row is not None and row.token == token:
                self._store.entries[key] = _Row(token, row.fingerprint, result, clock.now() + keep)

    def give_up(self, key: str, token: str) -> None:
        with self._store.lock:
            row = self._store.entries.get(key)
            if row is not None and row.token == token:
                del self._store.entries[key]

    def _drop_expired_locked(self, now: float) -> None:
        """Drop expired entries; next when the number of entries has doubled, so that many claims share the cost."""
        entries = self._store.entries
        for key in [key for key, row in entries.items() if isinstance(row, _Row) and row.until <= now]:
            del entries[key]
        self._drop_at = max(_DROP_FROM, 2 * len(entries))


# --- in a database ---

_TABLE = "resilience_once"
_CREATE = (
    f"CREATE TABLE IF NOT EXISTS {_TABLE} (name VARCHAR(64) PRIMARY KEY, token VARCHAR(64) NOT NULL, "
    "fingerprint VARCHAR(64) NOT NULL, result TEXT, ends_at DOUBLE PRECISION NOT NULL)"
)
_INSERT = f"INSERT INTO {_TABLE} (name, token, fingerprint, result, ends_at) VALUES (?, ?, ?, NULL, ?)"
_SELECT = f"SELECT token, fingerprint, result, ends_at FROM {_TABLE} WHERE name = ?"
_TAKE_OVER = (
    f"UPDATE {_TABLE} SET token = ?, fingerprint = ?, result = NULL, ends_at = ? "
    "WHERE name = ? AND token = ? AND ends_at = ?"
)
_FINISH = f"UPDATE {_TABLE} SET result = ?, ends_at = ? WHERE name = ? AND token = ?"
_GIVE_UP = f"DELETE FROM {_TABLE} WHERE name = ? AND token = ?"


#: `paramstyle` of the DB-API -> the placeholder for a parameter, by its number.
_PARAMETERS = {"qmark": "?", "numeric": ":{}", "named": ":p{}", "format": "%s", "pyformat": "%s"}

#: Executes a statement with its values, and returns the cursor.
_Run: TypeAlias = Callable[..., Any]


class StoreMisuse(Misuse, TypeError):
    """The function that was passed as a store does not open a connection of a DB-API driver."""


@final
class _DbApiClaims:
    """Claims in a table of a database, through any DB-API driver.

    Keys are stored as digests: they may have any length, and databases differ in which texts they treat as equal.

    :param connect: a function that opens a connection for one step; or a connection, for use in one thread.
    """

    def __init__(self, connect: Any) -> None:
        self._connect = connect
        self._has_table = False

    def claim(self, key: str, token: str, fingerprint: str, lease: float) -> Claim:
        return self._step(lambda run: self._claim(run, _digest(key), token, fingerprint, lease))

    def finish(self, key: str, token: str, result: str, keep: float) -> None:
        self._step(lambda run: run(_FINISH, result, time.time() + keep, _digest(key), token))

    def give_up(self, key: str, token: str) -> None:
        self._step(lambda run: run(_GIVE_UP, _digest(key), token))

    def _claim(self, run: _Run, key: str, token: str, fingerprint: str, lease: float) -> Claim:
        now = time.time()
        [*found] = run(_SELECT, key).fetchall()
        if not found:
            run(_INSERT, key, token, fingerprint, now + lease)
            return Claim(True)
        [(holder, theirs, result, ends_at)] = found
        if ends_at > now:
            return Claim(False, theirs or "", result, ends_at - now)  # Oracle stores an empty text as NULL
        taken = run(_TAKE_OVER, token, fingerprint, now + lease, key, holder, ends_at).rowcount == 1
        return Claim(taken, fingerprint)

    def _step(self, step: Callable[[_Run], R]) -> R:
        """Run a step in its own transaction; repeat it once if another process inserted the key at the same time."""
        if hasattr(self._connect, "cursor"):  # a connection, which may also be callable
            return self._in_transaction(self._connect, step)
        connection = self._connect()
        try:  # not `closing`, where an interrupt between two of its methods would leave the connection open
            return self._in_transaction(connection, step)
        finally:
            connection.close()

    def _in_transaction(self, connection: Any, step: Callable[[_Run], R]) -> R:
        driver = _driver_of(connection)

        def run(statement: str, *values: object) -> Any:
            cursor = connection.cursor()
            cursor.execute(*_bound(driver.paramstyle, statement, values))
            return cursor

        if not self._has_table:
            self._make_table(connection, run, driver.Error)
        try:
            return _commit(connection, step, run)
        except driver.IntegrityError:  # another process has inserted the key, so this time the step finds it
            return _commit(connection, step, run)

    def _make_table(self, connection: Any, run: _Run, error: type[Exception]) -> None:
        try:
            # If the table exists, it is not created: the database user of a service often lacks the right to do so.
            # All rows are fetched, because MySQL's own driver cannot commit before that.
            run(_SELECT, "").fetchall()
        except error:
            connection.rollback()
            try:
                run(_CREATE)
            except error:
                connection.rollback()
                run(_SELECT, "").fetchall()  # another process may have created it at the same time
        connection.commit()
        self._has_table = True


def _commit(connection: Any, step: Callable[[_Run], R], run: _Run) -> R:
    """Run and commit a step, and return its result; roll back if it fails."""
    try:
        result = step(run)
        connection.commit()
    except BaseException:
        connection.rollback()
        raise
    return result


def _driver_of(connection: Any) -> Any:
    """Return the driver's module; a pool of SQLAlchemy may wrap the connection, a user may have subclassed it."""
    for kind in type(getattr(connection, "driver_connection", connection)).__mro__:
        names = kind.__module__.split(".")
        for length in range(len(names), 0, -1):
            module = sys.modules.get(".".join(names[:length]))
            if hasattr(module, "paramstyle") and hasattr(module, "IntegrityError"):
                return module
    raise StoreMisuse(
        f"the store of Once must be a function that opens a connection of a DB-API driver (such as "
        f"`lambda: sqlite3.connect(path)`), not one that returns {connection!r}"
    )


def _bound(style: str, statement: str, values: tuple[object, ...]) -> tuple[str, Any]:
    """Return the statement and its values in the driver's `paramstyle`."""
    head, *rest = statement.split("?")
    text = head + "".join(f"{_PARAMETERS[style].format(number)}{part}" for number, part in enumerate(rest, 1))
    return text, {f"p{number}": value for number, value in enumerate(values, 1)} if style == "named" else values


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


# --- in redis ---

_CLAIM_SCRIPT = """
local it = redis.call('HMGET', KEYS[1], 'token', 'fingerprint', 'result')
if not it[1] then
  redis.call('HSET', KEYS[1], 'token', ARGV[1], 'fingerprint', ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return {1}
end
return {0, it[2], redis.call('PTTL', KEYS[1]), it[3]}
"""
_FINISH_SCRIPT = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'result', ARGV[2])
return redis.call('PEXPIRE', KEYS[1], ARGV[3])
"""
_GIVE_UP_SCRIPT = """
if redis.call('HGET', KEYS[1], 'token') == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


@final
class _RedisClaims:
    """Claims in Redis or Valkey, through a client of `redis` or `redis.asyncio`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def claim(self, key: str, token: str, fingerprint: str, lease: float) -> Any:
        answer = self._client.eval(_CLAIM_SCRIPT, 1, key, token, fingerprint, _milliseconds(lease))
        return _await_claim(answer) if isinstance(answer, Awaitable) else _claim_of(answer)

    def finish(self, key: str, token: str, result: str, keep: float) -> Any:
        return self._client.eval(_FINISH_SCRIPT, 1, key, token, result, _milliseconds(keep))

    def give_up(self, key: str, token: str) -> Any:
        return self._client.eval(_GIVE_UP_SCRIPT, 1, key, token)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


async def _await_claim(answer: Awaitable[Any]) -> Claim:
    return _claim_of(await answer)


def _claim_of(answer: list[Any]) -> Claim:
    if answer[0] == 1:
        return Claim(True)
    result = _text(answer[3]) if len(answer) > 3 and answer[3] is not None else None
    return Claim(False, _text(answer[1]), result, max(0, answer[2]) / 1000)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
