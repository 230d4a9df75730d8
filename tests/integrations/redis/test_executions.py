"""One command is one execution under the policy, and one try of it one attempt."""

from __future__ import annotations

import pytest
import redis
import redis.asyncio
import redis.cluster

from resilience import CircuitBreaker, CircuitOpen, CircuitState, Context, Fallback, Policy, Retry, events
from resilience.integrations.redis import protect
from resilience.testing import recording
from tests.conftest import FakeClock
from tests.integrations.redis.clients import NO_HANDSHAKE, PATIENCE, QUICK, Count, Side, done, failure, warm
from tests.integrations.redis.server import RedisServer


async def test_a_command_is_one_execution_from_connecting_to_its_answer(side: Side) -> None:
    """A command, a pipeline, a transaction: each passes the policy once, the first with its connection included."""
    count = Count()
    client = side.client(count, health_check_interval=3600)
    await done(client.set("a", 1))
    assert await done(client.get("a")) == b"1"
    await done(client.pipeline(transaction=False).set("b", 2).get("b").execute())
    assert await done(client.pipeline().incr("b").get("a").execute()) == [3, b"1"]
    assert count.calls == 4


async def test_a_command_without_an_operation_is_named_as_one(side: Side) -> None:
    """Not after a function of ours; the name that the caller gives goes before."""
    client = side.client(Retry())
    with recording(events.ExecutionFinished) as recorder:
        await done(client.get("a"))

        execute = Retry().execute if side.blocking else Retry().aexecute
        await done(execute(lambda ctx: client.get("a"), Context(operation="read")))
    assert [event.operation for event in recorder.events] == ["redis_command", "read", "read"]


async def test_a_client_over_a_unix_socket_is_no_different(side: Side, server: RedisServer) -> None:
    """Every class of connections is protected, and keeps its own timeouts."""
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
async def test_a_connection_that_is_not_made_yet_has_nothing_to_read(side: Side, server: RedisServer) -> None:
    """A pool asks that of each connection it hands out, under a name by version; it is no reason to connect."""
    client = side.client(Count())
    connection = client.connection_pool.make_connection()
    for name in ("can_read", "can_read_destructive"):
        if hasattr(connection, name):
            assert await done(getattr(connection, name)()) is False
    assert not connection.is_connected


async def test_a_server_that_is_away_is_tried_as_often_as_the_policy_says(side: Side, server: RedisServer) -> None:
    """Connecting is a part of the attempt, with no attempts of its own: three are three."""
    count = Count()
    client = side.client(Policy.wrap(Retry(3, backoff=[0]), count))
    await done(client.ping())
    server.kill()
    error = await failure(redis.ConnectionError, lambda: client.get("a"))
    assert count.failures == ["ConnectionError"] * 3
    assert error.__notes__[0].startswith("resilience: 3 attempts")


async def test_a_failure_is_counted_once_and_a_handshake_is_no_recovery(
    side: Side, server: RedisServer, clock: FakeClock
) -> None:
    """A frozen server takes connections, and that closes or resets no circuit: three failures in a row open it."""
    breaker = CircuitBreaker(3, open_for=30)
    client = side.client(breaker, **NO_HANDSHAKE, **QUICK)
    await warm(client)
    breaker.close()
    server.freeze()
    for _ in range(3):
        assert breaker.state is CircuitState.CLOSED
        await failure(redis.TimeoutError, lambda: client.get("a"))
    await failure(CircuitOpen, lambda: client.get("a"))
    clock.advance(30)
    await failure(redis.TimeoutError, lambda: client.get("a"))  # the probe
    assert breaker.state is CircuitState.OPEN
    server.thaw()
    await warm(side.client())
    clock.advance(30)
    assert await done(client.get("a")) is None
    assert breaker.state is CircuitState.CLOSED


async def test_an_open_circuit_leaves_the_server_alone(side: Side, server: RedisServer) -> None:
    """Nothing is sent, not even to connect."""
    breaker = CircuitBreaker(1)
    client = side.client(breaker)
    breaker.isolate()
    await failure(CircuitOpen, lambda: client.get("a"))
    observer = side.client()
    assert len(await done(observer.client_list())) == 1


async def test_a_fallback_answers_for_a_server_that_is_away(side: Side, server: RedisServer) -> None:
    """Also where there is no connection yet."""
    client = side.client(Fallback(b"default"))
    server.kill()
    assert await done(client.get("a")) == b"default"


async def test_a_client_that_cannot_be_protected_is_refused(side: Side, server: RedisServer) -> None:
    """It has connections of another kind, or needs them to be made at once."""
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


def test_wrong_arguments_are_refused_with_their_value() -> None:
    """Before anything is changed."""
    client = redis.Redis()
    with pytest.raises(TypeError, match="policy must be a policy, not 3"):
        protect(client, 3)  # type: ignore[arg-type]
    for wrong in ("INCR", 1, None):
        with pytest.raises(TypeError, match="repeat_writes must be True, False or names of commands"):
            protect(client, Retry(), repeat_writes=wrong)  # type: ignore[arg-type]
    assert client.connection_pool.connection_class is redis.Connection
