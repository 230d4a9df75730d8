"""Subscriptions, and many threads and tasks, while the server crashes, hangs and recovers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import pytest
import redis
import redis.asyncio

from resilience import CircuitBreaker, CircuitOpen, Policy, Retry, Timeout, deadline, transient
from resilience.integrations.redis import protect
from resilience.runtimes.driving import drive
from tests.callers import run_all, wait_until
from tests.integrations.redis.clients import PATIENCE, Count, Side, done, in_use, warm
from tests.integrations.redis.server import RedisServer


async def test_a_subscription_survives_the_restart_of_the_server(side: Side, server: RedisServer) -> None:
    """The next read connects and subscribes again."""
    client = side.client(Retry(5, backoff=[0.01]))
    pubsub = client.pubsub(ignore_subscribe_messages=True)
    await done(pubsub.subscribe("news"))
    server.kill()
    server.start()
    patience = time.monotonic() + PATIENCE
    message = None
    while message is None and time.monotonic() < patience:
        await done(client.publish("news", "again"))
        message = await done(pubsub.get_message(timeout=0.2))
    assert message is not None
    assert message["data"] == b"again"
    await done(pubsub.close() if side.blocking else pubsub.aclose())


async def test_a_subscriber_whose_connection_is_closed_connects_in_the_attempt_that_reads(side: Side) -> None:
    count = Count()
    pubsub = side.client(count).pubsub()
    await done(pubsub.subscribe("news"))
    for _ in range(2):
        message = await done(pubsub.get_message(timeout=PATIENCE))
        assert message["type"] == "subscribe"
        await done(pubsub.connection.disconnect())
    assert count.failures == []
    await done(pubsub.close() if side.blocking else pubsub.aclose())


async def test_a_subscriber_keeps_to_the_deadline(side: Side) -> None:
    """With a timeout of its own and without."""
    pubsub = side.client(Retry(3)).pubsub(ignore_subscribe_messages=True)
    await done(pubsub.subscribe("news"))
    await done(pubsub.get_message(timeout=PATIENCE))
    began = time.monotonic()
    for waiting in ({"block": False, "timeout": PATIENCE}, {"block": True}, {"block": True}):
        with deadline(0.1), contextlib.suppress(redis.TimeoutError):
            await done(pubsub.parse_response(**waiting))
    assert time.monotonic() - began < PATIENCE / 2
    await done(pubsub.close() if side.blocking else pubsub.aclose())


@pytest.mark.parametrize("blocking", [True, False], ids=["threads", "tasks"])
def test_callers_under_load_survive_a_crash_a_freeze_and_a_restart(server: RedisServer, blocking: bool) -> None:
    """Nothing hangs, the circuit opens and closes, all connections return, and every reply belongs to its command."""
    opened, stop, wrong = threading.Event(), threading.Event(), list[int]()
    breaker = CircuitBreaker(5, open_for=0.05, on=transient, on_transition=lambda event: opened.set())
    policy: Policy[Any] = Policy.wrap(Retry(2, backoff=[0.01]), breaker, Timeout(0.2, cooperative=blocking))
    client: Any = protect((redis if blocking else redis.asyncio).Redis(port=server.port), policy)

    async def work(number: int) -> None:
        while not stop.is_set():
            try:
                if await done(client.echo(f"{number}")) != str(number).encode():
                    wrong.append(number)
            except (redis.RedisError, CircuitOpen, TimeoutError):
                if blocking:
                    time.sleep(0.005)
                else:
                    await asyncio.sleep(0.005)

    async def all_tasks() -> None:
        await asyncio.wait_for(asyncio.gather(*map(work, range(8))), 2 * PATIENCE)
        await warm(client)
        await client.aclose()

    all_work = [lambda it=number: drive(work(it)) for number in range(8)]
    run_all(
        all_work if blocking else [lambda: asyncio.run(all_tasks())],
        lambda: _disturb(server, opened),
        lambda: wait_until(lambda: breaker.state.name == "CLOSED"),
        stop.set,
    )
    assert (wrong, in_use(client)) == ([], 0)
    if blocking:
        assert client.ping()
        client.close()


def _disturb(server: RedisServer, opened: threading.Event) -> None:
    time.sleep(0.1)
    server.kill()
    assert opened.wait(PATIENCE)
    server.start()
    time.sleep(0.2)
    opened.clear()
    server.freeze()
    assert opened.wait(PATIENCE)
    server.thaw()
