"""Commands that are repeated after a failure, and commands that are not."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import redis
from redis.exceptions import ReadOnlyError

from resilience import Fallback, Policy, Retry
from resilience.integrations.redis import REPEATABLE_COMMANDS
from resilience.integrations.redis.commands import also_repeatable, may_repeat
from resilience.runtimes.driving import drive
from tests.conftest import Boom
from tests.functions import raising
from tests.integrations.redis.clients import NO_HANDSHAKE, QUICK, Count, Side, done, failure, warm
from tests.integrations.redis.server import RedisServer


@pytest.mark.parametrize(("repeat_writes", "result"), [(False, b"1"), (True, b"2"), ({"incrby"}, b"2")])
async def test_a_write_that_may_have_been_carried_out_is_not_repeated(
    side: Side, server: RedisServer, repeat_writes: Any, result: bytes
) -> None:
    """A frozen server executes later all that it has received: one INCR, or two with `repeat_writes`."""
    client = side.client(Retry(2, backoff=[0]), repeat_writes=repeat_writes, **NO_HANDSHAKE, **QUICK)
    await warm(client)
    server.freeze()
    error = await failure(redis.TimeoutError, lambda: client.incr("n"))
    assert getattr(error, "repeatable", True) is (repeat_writes is not False)
    server.thaw()
    assert await done(side.client().get("n")) == result


async def test_the_error_that_replaces_that_of_a_write_forbids_its_repetition(side: Side, server: RedisServer) -> None:
    """A Retry around the call of the client sees only the error that the policy raises."""
    client = side.client(Fallback(handler=raising(Boom)), **NO_HANDSHAKE, **QUICK)
    await warm(client)
    server.freeze()
    error = await failure(Boom, lambda: client.incr("n"))
    assert getattr(error, "repeatable", True) is False


@pytest.mark.parametrize("transaction", [True, False])
async def test_a_pipeline_is_repeated_if_every_part_may_be(side: Side, server: RedisServer, transaction: bool) -> None:
    """Reads and writes that overwrite may be."""
    count = Count()
    client = side.client(Policy.wrap(Retry(2, backoff=[0]), count), **QUICK)
    reads = client.pipeline(transaction=transaction).set("a", 1).get("a")
    writes = client.pipeline(transaction=transaction).get("a").incr("a")
    for pipeline, attempts in ((reads, 2), (writes, 1)):
        await warm(client)
        server.freeze()
        count.calls = 0
        await failure(redis.TimeoutError, pipeline.execute)
        assert count.calls == attempts
        server.thaw()


async def test_bytes_that_may_be_any_command_are_not_sent_again(side: Side) -> None:
    """The user may pack commands, and send them over a connection of the pool."""
    count = Count()
    client = side.client(Policy.wrap(Retry(3, backoff=[0]), count))
    connection = await done(client.connection_pool.get_connection())
    count.calls = 0

    async def send() -> None:
        await done(connection.send_packed_command(connection.pack_command("INCR", "n")))
        raise redis.ConnectionError("lost")

    async def disconnect(error: Exception) -> None:
        await done(connection.disconnect())

    functions = [(lambda *args, it=it: drive(it(*args))) if side.blocking else it for it in (send, disconnect)]
    error = await failure(redis.ConnectionError, lambda: connection.retry.call_with_retry(*functions))
    assert (str(error), count.calls) == ("lost", 1)
    await done(client.connection_pool.release(connection))


async def test_a_write_that_was_not_sent_is_repeated(side: Side, server: RedisServer) -> None:
    """An error of connecting, or a connection found dead before sending, proves that nothing was sent."""
    client = side.client(Retry(3, backoff=[0], on_retry=lambda event: server.start()))
    server.kill()
    assert await done(client.incr("n")) == 1


async def test_no_write_is_sent_on_a_connection_that_the_server_has_closed(side: Side) -> None:
    """Such as an idle one: the pool lets it connect again, within the first attempt."""
    count = Count()
    client = side.client(count)
    connections = [await done(client.connection_pool.get_connection()) for _ in range(3)]
    for connection in connections:
        await done(connection.send_command("PING"))
        await done(connection.read_response())
        await done(client.connection_pool.release(connection))
    with redis.Redis(port=side._port) as admin:
        admin.client_kill_filter(_type="normal", skipme=True)
    if not side.blocking:
        await anyio.sleep(0.05)  # lets the event loop see the end
    for expected in (1, 2, 3):
        assert await done(client.incr("n")) == expected
    assert count.failures == []


@pytest.mark.parametrize("side", ["asyncio"], indirect=True)
async def test_no_write_is_sent_on_a_connection_that_was_reset(side: Side) -> None:
    """Such as by a load balancer."""
    count = Count()
    client = side.client(count)
    connection = await client.connection_pool.get_connection()
    await connection.send_command("PING")
    await connection.read_response()
    await client.connection_pool.release(connection)
    connection._reader.set_exception(ConnectionResetError())  # as its transport does
    assert await client.incr("n") == 1
    assert count.failures == []


async def test_a_write_that_was_refused_is_repeated(side: Side) -> None:
    """A read-only replica has not executed it; the next attempt connects again, maybe to the new master."""
    count = Count()
    with redis.Redis(port=side._port) as admin:
        admin.replicaof("127.0.0.1", 1)
        retry = Retry(2, on=ReadOnlyError, backoff=[0], on_retry=lambda event: admin.replicaof("NO", "ONE"))
        client = side.client(retry.wrap(count))
        before = await done(client.client_id())
        assert await done(client.incr("n")) == 1
        assert count.failures == ["ReadOnlyError"]
        assert await done(client.client_id()) != before


async def test_a_pipeline_of_which_a_part_was_refused_is_not_repeated(side: Side) -> None:
    """The other commands have been executed."""
    client = side.client(Retry(2, on=ReadOnlyError, backoff=[0]))
    pipeline = client.pipeline(transaction=False).incr("n").eval("return redis.error_reply('READONLY replica')", 0)
    await failure(ReadOnlyError, pipeline.execute)
    assert await done(client.get("n")) == b"1"


async def test_a_write_is_repeated_if_on_result_rejects_its_reply(side: Side) -> None:
    """Its outcome is known, and the policy asks for the repeat."""
    client = side.client(Retry(5, on_result=lambda value: value < 3, backoff=[0]))
    assert await done(client.incr("n")) == 3


@pytest.mark.parametrize(
    ("commands", "may"),
    [
        ("GET a|get a|SET a NX|SET a 1 EX 10|SET a 1 PX 10 KEEPTTL|EXPIRE a 10|MULTI", True),
        ("SET a 1 NX|SET a 1 EX 10 nx|SET a 1 GET|EXPIRE a 10 GT|INCR a|DEL a|SADD a 1|LPOP a|EVAL script 0", False),
    ],
)
def test_a_command_may_be_repeated_if_it_has_the_same_effect_and_reply(commands: str, may: bool) -> None:
    """Not one with a condition or a count, and no unknown one."""
    given = [tuple(int(word) if word.isdigit() else word for word in it.split()) for it in commands.split("|")]
    for command in [*given, ("SCRIPT LOAD", "return 1") if may else (b"GET", "a")]:
        assert may_repeat([command], also_repeatable(False)) is may
        assert may_repeat([command], also_repeatable(True))
        assert may_repeat([command], also_repeatable(["incr"])) is (may or command[0] == "INCR")


def test_repeatable_commands_read_or_overwrite_by_the_servers_flags(server: RedisServer) -> None:
    with redis.Redis(port=server.port) as client:
        flags = {name.upper(): details["flags"] for name, details in client.command().items()}
    writes = {name for name in REPEATABLE_COMMANDS if "write" in flags.get(name, ())}
    assert writes == set("EXPIRE EXPIREAT HMSET LSET MSET PEXPIRE PEXPIREAT PSETEX SET SETEX".split())
    reads = {name for name, values in flags.items() if "readonly" in values} - {"XINFO", "MEMORY"}
    assert reads - REPEATABLE_COMMANDS <= {"LOLWUT"}
