"""One command is one execution under the policy, and each try is one attempt."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import redis
import redis.asyncio

from resilience import CircuitBreaker, CircuitOpen, Context, Hedge, Keyed, Policy, Retry, Timeout, deadline, events
from resilience.integrations.redis import protect
from resilience.testing import recording
from tests.conftest import Boom, Watched, no_collector
from tests.integrations.redis.clients import PATIENCE, Count, Side, done, failure
from tests.integrations.redis.server import RedisServer


async def test_a_command_is_one_execution_including_its_connection(side: Side) -> None:
    """A command, a pipeline or a transaction."""
    count = Count()
    client = side.client(count, health_check_interval=3600)
    await done(client.set("a", 1))
    assert await done(client.get("a")) == b"1"
    await done(client.pipeline(transaction=False).set("b", 2).get("b").execute())
    assert await done(client.pipeline().incr("b").get("a").execute()) == [3, b"1"]
    assert count.calls == 4


async def test_a_health_check_that_is_due_precedes_the_command(side: Side) -> None:
    """It is part of the attempt: no execution of its own, and none before a command whose check is not due."""
    count = Count()
    watcher = side.client()

    async def pings() -> int:
        statistics = await done(watcher.info("commandstats"))
        return int(statistics.get("cmdstat_ping", {"calls": 0})["calls"])

    client = side.client(count, health_check_interval=3600)
    await done(client.get("a"))  # connects
    before = await pings()
    await done(client.get("a"))
    assert await pings() == before
    for connection in client.connection_pool._available_connections:
        connection.next_health_check = 0  # an hour has passed
    await done(client.get("a"))
    assert (await pings(), count.calls) == (before + 1, 3)


async def test_an_open_connection_does_not_keep_the_command_that_opened_it(side: Side) -> None:
    class Key(str):
        """A string that can be weakly referenced."""

    key = Key("a")
    kept = weakref.ref(key)
    await done(side.client(Retry().wrap(Timeout(PATIENCE, cooperative=True))).set(key, 1))
    del key
    gc.collect()  # of an error reply in the handshake, redis-py makes a reference cycle
    assert kept() is None


@pytest.mark.parametrize("side", ["threads"], indirect=True)
async def test_an_error_does_not_wait_for_the_collector(side: Side) -> None:
    """(In asyncio, redis-py itself makes a reference cycle.)"""
    client = side.client(Retry())
    client.set("a", "no number")
    with no_collector():
        try:
            client.incr("a")
        except redis.ResponseError as error:
            kept = weakref.ref(error)
        assert kept() is None


async def test_an_error_of_connecting_does_not_wait_for_the_collector(side: Side) -> None:
    """Nor one after which redis-py keeps the connection, such as that for the number of an unknown database."""
    retry, watched = side.client(Retry()).connection_pool.make_connection().retry, Watched()

    def connect() -> Any:
        return watched.fail(redis.ResponseError)

    async def aconnect() -> Any:
        return connect()

    do: Any = connect if side.blocking else aconnect
    with no_collector():
        with contextlib.suppress(redis.ResponseError):
            await done(retry.call_with_retry(lambda: retry.call_with_retry(do, pytest.fail), pytest.fail))
        assert watched.seen
        assert watched.alive == []


async def test_a_command_without_an_operation_is_named_redis_command(side: Side) -> None:
    """The name that the caller gives comes first."""
    client = side.client(Retry())
    with recording(events.ExecutionFinished) as recorder:
        await done(client.get("a"))

        execute = Retry().execute if side.blocking else Retry().aexecute
        await done(execute(lambda ctx: client.get("a"), Context(operation="read")))
    assert [event.operation for event in recorder.events] == ["redis_command", "read", "read"]


async def test_a_client_over_a_unix_socket_is_protected(side: Side, server: RedisServer) -> None:
    """Its connections keep their own timeouts."""
    count = Count()
    client = side.client(count, unix_socket_path=str(server.socket))
    assert await done(client.incr("n")) == 1
    assert count.calls == 1
    connection = client.connection_pool.make_connection()
    assert isinstance(connection, (redis.UnixDomainSocketConnection, redis.asyncio.UnixDomainSocketConnection))
    assert connection.socket_timeout == PATIENCE
    connection.socket_timeout = connection.socket_connect_timeout = 3.0
    assert (connection.socket_timeout, connection.socket_connect_timeout) == (3.0, 3.0)


@pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning")
@pytest.mark.parametrize("connected", [False, True])
async def test_an_unused_connection_has_nothing_to_read(side: Side, server: RedisServer, connected: bool) -> None:
    """A pool checks each connection before use, with a method named by version; that does not connect it."""
    client = side.client(Count())
    connection = client.connection_pool.make_connection()
    if connected:
        await done(connection.send_command("PING"))
        await done(connection.read_response())
    original = redis.Connection if side.blocking else redis.asyncio.Connection
    for name in ("can_read", "can_read_destructive"):
        if hasattr(original, name):
            assert await done(getattr(connection, name)()) is False
    assert connection.is_connected is connected
    await done(connection.disconnect())


async def test_a_connection_class_may_be_a_stand_in(side: Side, server: RedisServer) -> None:
    """Such as those of fakeredis: a socket without timeouts, and a `can_read` with one."""

    class Socket:
        def __init__(self, real: Any) -> None:
            for name in ("recv", "recv_into", "sendall", "settimeout", "shutdown", "close"):
                setattr(self, name, getattr(real, name))

    class Connection(redis.Connection):
        def _connect(self) -> Any:
            return Socket(super()._connect())

    class AsyncConnection(redis.asyncio.Connection):
        async def can_read(self, timeout: float = 0) -> bool:
            return timeout > 0

        async def read_response(self, *args: Any, **kwargs: Any) -> Any:
            assert await self.can_read(1.0)
            return await super().read_response(*args, **kwargs)

    client = side.client(Retry(), connection_class=Connection if side.blocking else AsyncConnection)
    with deadline(PATIENCE):
        assert await done(client.set("a", 1))


async def test_a_connection_whose_handshake_was_cut_off_is_closed(side: Side, server: RedisServer) -> None:
    """redis-py itself would send the next command on it, without login and in another database."""
    failures = [Boom("no password today")]

    class Passwords(redis.CredentialProvider):
        def get_credentials(self) -> Any:
            if failures:
                raise failures.pop()
            return "default", ""

    client = side.client(Count(), db=3, credential_provider=Passwords())
    await failure(Boom, lambda: client.set("a", 1))
    await done(client.set("a", 1))
    assert await done(side.client().get("a")) is None
    assert await done(side.client(db=3).get("a")) == b"1"


@pytest.mark.parametrize("side", ["asyncio"], indirect=True)
async def test_a_connection_lost_before_its_reply_is_not_replaced(side: Side, server: RedisServer) -> None:
    """A new one would wait for a reply that never comes."""
    client = side.client(Retry(1), socket_timeout=1)
    await client.ping()
    parse = client.parse_response

    async def lose(connection: Any, *args: Any, **options: Any) -> Any:
        await connection.disconnect(nowait=True)
        return await parse(connection, *args, **options)

    client.parse_response = lose
    server.freeze()
    await failure(redis.ConnectionError, lambda: client.get("a"))


async def test_connecting_adds_no_attempts(side: Side, server: RedisServer) -> None:
    """It is a part of the attempt: three attempts of a server that is away are three."""
    count = Count()
    client = side.client(Policy.wrap(Retry(3, backoff=[0]), count))
    await done(client.ping())
    server.kill()
    error = await failure(redis.ConnectionError, lambda: client.get("a"))
    assert count.failures == ["ConnectionError"] * 3
    assert error.__notes__[0].startswith("resilience: 3 attempts")


async def test_an_open_circuit_sends_nothing(side: Side, server: RedisServer) -> None:
    """It does not connect either."""
    breaker = CircuitBreaker(1)
    client = side.client(breaker)
    breaker.isolate()
    await failure(CircuitOpen, lambda: client.get("a"))
    observer = side.client()
    assert len(await done(observer.client_list())) == 1


async def test_a_client_that_cannot_be_protected_is_refused(side: Side, server: RedisServer) -> None:
    """It is connected already, or has connections of another kind."""
    client = side.client()
    await done(client.ping())
    with pytest.raises(ValueError, match="connected"):
        protect(client, Retry())
    with pytest.raises(TypeError, match="client must be a Redis client or a connection pool, not None"):
        protect(None, Retry())  # type: ignore[type-var]
    if side.blocking:
        caching = redis.Redis(port=server.port, protocol=3, cache_config=redis.cache.CacheConfig())
        with pytest.raises(ValueError, match="cache"):
            protect(caching, Retry())


def test_wrong_arguments_are_refused() -> None:
    """The message has the value, and the client is unchanged."""
    client = redis.Redis()
    with pytest.raises(TypeError, match="policy must be a policy, not 3"):
        protect(client, 3)  # type: ignore[arg-type]
    for kind in (redis.Redis, redis.asyncio.Redis):
        with pytest.raises(ValueError, match="must not make two attempts at once, as Hedge"):
            protect(kind(), Retry().wrap(Hedge()))
        protect(kind(), Keyed(lambda operation: CircuitBreaker(), key=lambda ctx: ctx.operation))
    for wrong in ("INCR", 1, None):
        with pytest.raises(TypeError, match="repeat_writes must be True, False or names of commands"):
            protect(client, Retry(), repeat_writes=wrong)  # type: ignore[arg-type]
    assert client.connection_pool.connection_class is redis.Connection
