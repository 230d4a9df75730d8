"""What may be sent twice, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
import redis
import redis.asyncio
import redis.cluster
from redis.exceptions import ReadOnlyError

from resilience import Policy, Retry
from resilience.integrations.redis import REPEATABLE_COMMANDS
from resilience.integrations.redis.commands import also_repeatable, may_repeat
from tests.integrations.redis.clients import NO_HANDSHAKE, QUICK, Count, Side, done, failure, warm
from tests.integrations.redis.server import RedisServer


@pytest.mark.parametrize(("repeat_writes", "result"), [(False, b"1"), (True, b"2"), ({"incrby"}, b"2")])
async def test_a_write_that_may_have_been_carried_out_is_not_repeated(
    side: Side, server: RedisServer, repeat_writes: Any, result: bytes
) -> None:
    """A frozen server carries out later all that it was sent: INCR once, or as often as it was allowed."""
    client = side.client(Retry(2, backoff=[0]), repeat_writes=repeat_writes, **NO_HANDSHAKE, **QUICK)
    await warm(client)
    server.freeze()
    error = await failure(redis.TimeoutError, lambda: client.incr("n"))
    assert getattr(error, "repeatable", True) is (repeat_writes is not False)
    server.thaw()
    assert await done(side.client().get("n")) == result


@pytest.mark.parametrize("transaction", [True, False])
async def test_a_pipeline_is_repeated_only_if_all_of_it_may_be(
    side: Side, server: RedisServer, transaction: bool
) -> None:
    """Of reads, and writes that overwrite, yes; with one other write, no."""
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


async def test_a_write_that_was_not_sent_is_repeated(side: Side, server: RedisServer) -> None:
    """A connection that could not be made, or was found dead before, says that nothing has been done."""
    client = side.client(Retry(3, backoff=[0], on_retry=lambda event: server.start()))
    server.kill()
    assert await done(client.incr("n")) == 1


async def test_a_write_that_was_refused_is_repeated(side: Side) -> None:
    """A replica says that it has not done it; the next attempt connects anew, maybe to the new master."""
    admin = redis.Redis(port=side._port)
    admin.replicaof("127.0.0.1", 1)
    count = Count()
    retry = Retry(2, on=ReadOnlyError, backoff=[0], on_retry=lambda event: admin.replicaof("NO", "ONE"))
    client = side.client(retry.wrap(count))
    before = await done(client.client_id())
    assert await done(client.incr("n")) == 1
    assert count.failures == ["ReadOnlyError"]
    assert await done(client.client_id()) != before
    admin.close()


async def test_a_write_that_was_answered_is_repeated_if_the_answer_does_not_do(side: Side) -> None:
    """Then nothing is in doubt: it is what the policy asks for."""
    client = side.client(Retry(5, on_result=lambda value: value < 3, backoff=[0]))
    assert await done(client.incr("n")) == 3


@pytest.mark.parametrize(
    ("command", "may"),
    [
        (("GET", "a"), True),
        (("get", "a"), True),
        (("SET", "a", "NX"), True),
        (("SET", "a", 1, "EX", 10), True),
        (("SET", "a", 1, "PX", 10, "KEEPTTL"), True),
        (("SET", "a", 1, "NX"), False),
        (("SET", "a", 1, "EX", 10, "nx"), False),
        (("SET", "a", 1, "GET"), False),
        (("EXPIRE", "a", 10), True),
        (("EXPIRE", "a", 10, "GT"), False),
        (("MULTI",), True),
        (("INCR", "a"), False),
        (("DEL", "a"), False),
        (("SADD", "a", 1), False),
        (("LPOP", "a"), False),
        (("EVAL", "return 1", 0), False),
        (("SCRIPT LOAD", "return 1"), True),
        ((b"GET", "a"), False),
    ],
)
def test_the_rule_of_what_may_be_repeated(command: tuple[Any, ...], may: bool) -> None:
    """What has the same effect and the same answer; conditions, counts and what nobody knows are out."""
    assert may_repeat(command, also_repeatable(False)) is may
    assert may_repeat(command, also_repeatable(True))
    assert may_repeat(command, also_repeatable(["incr"])) is (may or command[0] == "INCR")


def test_no_command_in_the_table_writes_for_the_server_but_those_that_overwrite(server: RedisServer) -> None:
    """The server's own flags agree with the table."""
    with redis.Redis(port=server.port) as client:
        flags = {name.upper(): about["flags"] for name, about in client.command().items()}
    writes = {name for name in REPEATABLE_COMMANDS if "write" in flags.get(name, ())}
    assert writes == set("EXPIRE EXPIREAT HMSET LSET MSET PEXPIRE PEXPIREAT PSETEX SET SETEX".split())
    reads = {name for name, its in flags.items() if "readonly" in its} - {"XINFO", "MEMORY"}
    assert reads - REPEATABLE_COMMANDS <= {"LOLWUT"}
