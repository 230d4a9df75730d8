"""Subscriptions, and many threads and tasks, while the server crashes, hangs and recovers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import redis
import redis.asyncio
import redis.cluster

from resilience import CircuitBreaker, CircuitOpen, CircuitState, Policy, Retry, Timeout, deadline, transient
from resilience.integrations.redis import protect
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


def test_threads_under_load_survive_a_crash_a_freeze_and_a_restart(server: RedisServer) -> None:
    """Nothing hangs, the circuit opens and closes, all connections return, and every reply belongs to its command."""
    opened = threading.Event()
    breaker = CircuitBreaker(5, open_for=0.05, on=transient, on_transition=lambda event: opened.set())
    client = protect(redis.Redis(port=server.port, socket_timeout=0.2), Retry(2, backoff=[0.01]).wrap(breaker))
    stop, wrong = threading.Event(), []

    def work(number: int) -> None:
        while not stop.is_set():
            try:
                if client.echo(f"{number}") != str(number).encode():
                    wrong.append(number)
            except (redis.RedisError, CircuitOpen):
                time.sleep(0.005)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    _disturb(server, opened)
    healthy = _eventually(lambda: breaker.state is CircuitState.CLOSED and client.ping())
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert healthy
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert in_use(client) == 0
    client.close()


async def test_tasks_under_load_survive_a_crash_a_freeze_and_a_restart(server: RedisServer) -> None:
    opened = threading.Event()
    breaker = CircuitBreaker(5, open_for=0.05, on=transient, on_transition=lambda event: opened.set())
    policy = Policy.wrap(Retry(2, backoff=[0.01]), breaker, Timeout(0.2))
    wrong: list[int] = []
    client = protect(redis.asyncio.Redis(port=server.port), policy)

    async def work(number: int) -> None:
        while not stop.is_set():
            try:
                if await client.echo(f"{number}") != str(number).encode():
                    wrong.append(number)
            except (redis.RedisError, CircuitOpen, TimeoutError):
                await asyncio.sleep(0.005)

    stop = asyncio.Event()
    tasks = [asyncio.create_task(work(number)) for number in range(8)]
    await asyncio.to_thread(_disturb, server, opened)
    await asyncio.to_thread(_eventually, lambda: breaker.state is CircuitState.CLOSED)
    stop.set()
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
    await warm(client)
    assert in_use(client) == 0
    await client.aclose()
    assert wrong == []


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


def _eventually(condition: Callable[[], Any]) -> bool:
    patience = time.monotonic() + PATIENCE
    while time.monotonic() < patience:
        try:
            if condition():
                return True
        except (redis.RedisError, CircuitOpen):
            pass
        time.sleep(0.02)
    return False
