"""Deadlines and timeouts, against a server that does not answer."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import WatchError

from resilience import CircuitBreaker, DeadlineExceeded, Policy, Retry, Timeout, TimeoutExceeded, deadline
from resilience.integrations.redis import OutcomeUnknown, protect
from tests.conftest import FakeClock
from tests.integrations.redis.clients import PATIENCE, Count, Side, done, failure, in_use, warm
from tests.integrations.redis.server import RedisServer


async def test_a_deadline_ends_the_wait_for_a_frozen_server(side: Side, server: RedisServer) -> None:
    """It is shorter than the client's own timeout, which holds again for the next command."""
    client = side.client(Retry(3, backoff=[0]))
    await done(client.set("a", "mine"))
    await done(client.set("b", "other"))
    server.freeze()
    began = time.monotonic()
    with deadline(0.2):
        await failure(redis.TimeoutError, lambda: client.get("a"))
    assert 0.1 < time.monotonic() - began < PATIENCE / 2
    thawing = threading.Timer(0.1, server.thaw)
    thawing.start()
    assert await done(client.get("b")) == b"other"  # and not the late reply to the first command
    thawing.join()


async def test_a_deadline_that_no_socket_can_take_is_bounded(side: Side) -> None:
    """A client of a service may ask for 40,000 years."""
    client = side.client(Count(), socket_timeout=None)
    with deadline(99_999_999 * 3600.0):
        assert await done(client.set("a", "b"))


@pytest.mark.serial
@pytest.mark.parametrize("side", ["threads"], indirect=True)
async def test_a_deadline_ends_sending_to_a_frozen_server(side: Side, server: RedisServer) -> None:
    """A value that is larger than the kernel's buffers. (asyncio would buffer it, and send it in the background.)"""
    client = side.client(Count())
    value = b"x" * 30_000_000  # made before the budget begins
    await done(client.ping())
    server.freeze()
    began = time.monotonic()
    with deadline(0.5):
        await failure(redis.TimeoutError, lambda: client.set("a", value))
    assert time.monotonic() - began < PATIENCE / 2
    server.thaw()


@pytest.mark.parametrize("side", ["threads"], indirect=True)
async def test_a_late_reply_is_not_read_as_that_of_the_next_command(
    side: Side, server: RedisServer, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline has passed between sending and reading: the connection that holds the reply is closed."""

    def send_and_wait(self: Any, *args: Any, **kwargs: Any) -> None:
        send(self, *args, **kwargs)
        clock.advance(2.0)

    send = redis.Connection.send_packed_command
    client = side.client(Count())
    await done(client.set("a", "mine"))
    await done(client.set("b", "other"))
    with monkeypatch.context() as patched, deadline(1.0):
        patched.setattr(redis.Connection, "send_packed_command", send_and_wait)
        await failure(redis.TimeoutError, lambda: client.get("a"))
    assert await done(client.get("b")) == b"other"


async def test_nothing_is_sent_after_the_deadline(side: Side) -> None:
    """The connection stays usable."""
    client = side.client(Count())
    before = await done(client.client_id())
    with deadline(0):
        await failure(DeadlineExceeded, lambda: client.incr("n"))
    assert await done(client.get("n")) is None
    assert await done(client.client_id()) == before


async def test_a_cooperative_timeout_limits_the_clients_socket_operations(side: Side, server: RedisServer) -> None:
    count = Count()
    policy = Policy.wrap(Retry(2, backoff=[0]), count, Timeout(0.1, cooperative=True))
    client = side.client(policy)
    await warm(client)
    server.freeze()
    count.failures.clear()
    began = time.monotonic()
    await failure(redis.TimeoutError, lambda: client.get("a"))
    assert time.monotonic() - began < PATIENCE / 2
    assert count.failures == ["TimeoutError"] * 2
    server.thaw()


@pytest.mark.parametrize("side", ["threads"], indirect=True)
async def test_a_socket_gets_the_time_left_in_whole_milliseconds(side: Side) -> None:
    """It waits no finer. So its timeout, which takes a system call, rarely has to be set again to read the answer."""
    client = side.client(Count())
    with deadline(PATIENCE / 3):
        client.ping()
    (connection,) = client.connection_pool._available_connections
    timeout = connection._sock.gettimeout()
    assert timeout == round(timeout, 3) < PATIENCE / 2


def test_a_blocking_client_refuses_a_timeout_that_is_not_cooperative() -> None:
    """The abandoned thread and the caller would read from one socket."""
    for policy in (Timeout(1), Retry().wrap(Timeout(1, name="attempt"))):
        with pytest.raises(ValueError, match=r"Timeout\(.*cooperative=True"):
            protect(redis.Redis(), policy)
        protect(redis.asyncio.Redis(), policy)


async def test_a_timeout_around_a_call_of_the_client_is_safe(side: Side, server: RedisServer) -> None:
    """It abandons or cancels the whole call; later calls are not affected."""
    client = side.client(Retry(2, backoff=[0]))
    await done(client.set("a", 1))
    server.freeze()
    timeout = Timeout(0.1)
    with pytest.raises((TimeoutError, redis.TimeoutError)):  # of the clock that is read first
        await done(timeout.call(client.get, "a") if side.blocking else timeout.acall(client.get, "a"))
    server.thaw()
    assert await done(client.get("a")) == b"1"


@pytest.mark.parametrize("side", ["asyncio"], indirect=True)
@pytest.mark.parametrize(
    ("attempts", "expected", "message"),
    [
        (1, TimeoutExceeded, "Timeout: no result within 0.1 s"),
        (3, OutcomeUnknown, "INCRBY may have been carried out before it was cut off; not sent again"),
    ],
)
async def test_a_write_that_a_timeout_cut_off_is_not_repeated(
    side: Side, server: RedisServer, attempts: int, expected: type[Exception], message: str
) -> None:
    """In asyncio a Timeout inside of the Retry cancels the attempt after INCR was sent: its outcome is unknown."""
    client = side.client(Policy.wrap(Retry(attempts, backoff=[0]), Timeout(0.1)))
    await warm(client)
    server.freeze()
    error = await failure(expected, lambda: client.incr("n"))
    assert (str(error), error.repeatable) == (message, False)
    server.thaw()
    assert await done(side.client().get("n")) == b"1"


async def test_a_watching_transaction_does_not_continue_on_another_connection(side: Side, server: RedisServer) -> None:
    """The watch is lost with the connection: a `WatchError`, which no Retry repeats."""
    client = side.client(Retry(3, on=Exception, backoff=[0]))
    admin = redis.Redis(port=side._port)
    pipeline = client.pipeline()
    await done(pipeline.watch("a"))
    pipeline.multi()
    pipeline.set("a", "lost update")
    for connection in admin.client_list():
        if connection["id"] != str(admin.client_id()):
            admin.client_kill_filter(_id=connection["id"])
    await failure(WatchError, pipeline.execute)
    assert admin.get("a") is None
    await done(pipeline.reset())
    admin.close()


async def test_a_watching_transaction_returns_its_connection_even_if_calls_are_refused(side: Side) -> None:
    """A connection that is closed watches nothing, so none is made to end that."""
    breaker = CircuitBreaker()
    client = side.client(breaker)
    pipeline = client.pipeline()
    await done(pipeline.watch("a"))
    await done(pipeline.connection.disconnect())
    breaker.isolate()
    await done(pipeline.reset())
    assert in_use(client) == 0


@pytest.mark.parametrize("side", ["asyncio"], indirect=True)
async def test_a_timeout_in_a_watching_transaction_is_a_watch_error(side: Side, server: RedisServer) -> None:
    """Also if the attempt was cancelled, so that redis-py has not handled its failure."""
    retry = Retry(3, backoff=[0], on_retry=lambda event: server.thaw())
    client = side.client(Policy.wrap(retry, Timeout(0.3)))
    await warm(client)
    async with client.pipeline() as pipeline:
        await pipeline.watch("a")
        pipeline.multi()
        pipeline.get("a")
        server.freeze()
        await failure(WatchError, pipeline.execute)


@pytest.mark.parametrize("side", ["asyncio"], indirect=True)
async def test_cancelling_a_task_does_not_affect_other_tasks(side: Side, server: RedisServer) -> None:
    """The connection that still waits for a reply is closed."""
    client = side.client(Retry(3))
    await client.set("a", 1)
    await client.set("b", 2)
    server.freeze()
    task = asyncio.create_task(client.get("a"))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    server.thaw()
    assert await client.get("b") == b"2"


@pytest.mark.parametrize("side", ["asyncio"], indirect=True)
async def test_a_task_that_was_cancelled_can_clean_up(side: Side) -> None:
    """Its next command is not taken for one that was cut off."""
    client = side.client(Retry(3))

    async def work() -> Any:
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            return await client.incr("n")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == 1


@pytest.mark.parametrize("socket_timeout", [None, PATIENCE])
@pytest.mark.parametrize("side", ["asyncio"], indirect=True)
async def test_a_cancellation_while_a_command_is_sent_is_not_lost(
    side: Side, server: RedisServer, monkeypatch: pytest.MonkeyPatch, socket_timeout: float | None
) -> None:
    """`asyncio.wait_for` of Python 3.11, in which redis-py sends, swallows one that comes as the sending ends."""
    client = side.client(Retry(3, backoff=[0]), socket_timeout=socket_timeout)
    await client.set("a", 1)
    await client.set("b", 2)

    async def reads(key: str) -> bytes:
        value: bytes = await client.get(key)
        return value

    task = asyncio.create_task(reads("a"))

    async def drain(writer: asyncio.StreamWriter) -> None:
        if not task.cancelling():
            task.cancel()

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.StreamWriter, "drain", drain)
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await client.get("b") == b"2"
