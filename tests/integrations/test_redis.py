"""redis-py under policies, against a server that is killed, frozen and started again."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import pytest
import redis
import redis.asyncio
import redis.cluster
from redis.exceptions import ReadOnlyError, ResponseError, WatchError

from resilience import (
    CircuitBreaker,
    CircuitOpen,
    CircuitState,
    DeadlineExceeded,
    Fallback,
    Policy,
    Retry,
    Timeout,
    deadline,
    transient,
)
from resilience.integrations.redis import (
    REPEATABLE_COMMANDS,
    AsyncPolicyRetry,
    OutcomeUnknown,
    PolicyRetry,
    protect,
)
from resilience.integrations.redis.commands import Repeatable
from resilience.runtimes.blocking import drive
from tests.conftest import FakeClock
from tests.integrations.redis_server import RedisServer

#: Much longer than anything here takes, and much shorter than a hang.
PATIENCE = 20.0

#: Options that end the wait for an answer soon, but never that for a connection.
QUICK: dict[str, Any] = {"socket_timeout": 0.1, "socket_connect_timeout": PATIENCE}

#: Options with which connecting is nothing but connecting.
NO_HANDSHAKE: dict[str, Any] = {"protocol": 2, "driver_info": None}
if redis.VERSION < (8,):
    NO_HANDSHAKE = {"protocol": 2, "lib_name": None, "lib_version": None}


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    it = RedisServer(tmp_path_factory.mktemp("redis"))
    yield it
    it.kill()


@pytest.fixture
def server(one_server: RedisServer) -> RedisServer:
    """A server that runs, and knows nothing, whatever the test before has done to it."""
    one_server.refresh()
    return one_server


class Side:
    """The blocking client or that of asyncio. A test is written once, and awaits `done(...)` of what either returns."""

    def __init__(self, name: str, server: RedisServer) -> None:
        self.name = name
        self.blocking = name == "threads"
        self._port = server.port
        self._clients: list[Any] = []

    def client(self, policy: Policy[Any] | None = None, *, repeat_writes: Any = False, **options: Any) -> Any:
        """Make a client, protected if there is a policy."""
        kind: Any = redis.Redis if self.blocking else redis.asyncio.Redis
        client = kind(port=self._port, **{"socket_timeout": PATIENCE, **options})
        self._clients.append(client)
        return client if policy is None else protect(client, policy, repeat_writes=repeat_writes)

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            try:
                await main()
            finally:
                for client in self._clients:
                    await done(client.close() if self.blocking else client.aclose())

        if self.blocking:
            drive(whole(), "the test")
        else:
            anyio.run(whole)


async def done(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def warm(client: Any) -> None:
    """Let the client connect, however short its timeouts are and however busy this machine is."""
    patience = time.monotonic() + PATIENCE
    while True:
        try:
            await done(client.ping())
            return
        except (redis.RedisError, TimeoutError, CircuitOpen):
            assert time.monotonic() < patience
            time.sleep(0.01)


async def failure(kind: type[Exception], call: Callable[[], Any]) -> Any:
    with pytest.raises(kind) as caught:
        await done(call())
    return caught.value


@pytest.fixture(params=["threads", "asyncio"])
def side(request: pytest.FixtureRequest, server: RedisServer) -> Side:
    return Side(request.param, server)


class Count(Policy):
    """Counts the calls that reach it, and those that failed."""

    def __init__(self) -> None:
        self.calls = 0
        self.failures: list[str] = []

    async def around(self, call, ctx):
        self.calls += 1
        try:
            return await call(ctx)
        except Exception as error:
            self.failures.append(type(error).__name__)
            raise


# --- one command is one execution, one try of it one attempt ----------------------------------


def test_a_command_is_one_execution_from_connecting_to_its_answer(side: Side) -> None:
    """A command, a pipeline, a transaction: each passes the policy once, the first with its connection included."""

    async def main() -> None:
        count = Count()
        client = side.client(count, health_check_interval=3600)
        await done(client.set("a", 1))
        assert await done(client.get("a")) == b"1"
        await done(client.pipeline(transaction=False).set("b", 2).get("b").execute())
        assert await done(client.pipeline().incr("b").get("a").execute()) == [3, b"1"]
        assert count.calls == 4

    side.run(main)


def test_a_server_that_is_away_is_tried_as_often_as_the_policy_says(side: Side, server: RedisServer) -> None:
    """Connecting is a part of the attempt, with no attempts of its own: three are three."""

    async def main() -> None:
        count = Count()
        client = side.client(Policy.wrap(Retry(3, backoff=[0]), count))
        await done(client.ping())
        server.kill()
        error = await failure(redis.ConnectionError, lambda: client.get("a"))
        assert count.failures == ["ConnectionError"] * 3
        assert error.__notes__[0].startswith("resilience: 3 attempts")

    side.run(main)


def test_a_read_survives_the_restart_of_the_server(side: Side, server: RedisServer) -> None:
    """The attempt after the failed one connects anew."""

    async def main() -> None:
        client = side.client(Retry(3, backoff=[0], on_retry=lambda event: server.start()))
        await done(client.ping())
        server.kill()
        assert await done(client.get("a")) is None

    side.run(main)


def test_a_failure_is_counted_once_and_a_handshake_is_no_recovery(
    side: Side, server: RedisServer, clock: FakeClock
) -> None:
    """A frozen server takes connections, and that closes or resets no circuit: three failures in a row open it."""

    async def main() -> None:
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

    side.run(main)


def test_an_open_circuit_leaves_the_server_alone(side: Side, server: RedisServer) -> None:
    """Nothing is sent, not even to connect."""

    async def main() -> None:
        breaker = CircuitBreaker(1)
        client = side.client(breaker)
        breaker.isolate()
        await failure(CircuitOpen, lambda: client.get("a"))
        observer = side.client()
        assert len(await done(observer.client_list())) == 1

    side.run(main)


def test_a_fallback_answers_for_a_server_that_is_away(side: Side, server: RedisServer) -> None:
    """Also where there is no connection yet."""

    async def main() -> None:
        client = side.client(Fallback(b"default"))
        server.kill()
        assert await done(client.get("a")) == b"default"

    side.run(main)


# --- what may be sent twice -------------------------------------------------------------------


@pytest.mark.parametrize(("repeat_writes", "result"), [(False, b"1"), (True, b"2"), ({"incrby"}, b"2")])
def test_a_write_that_may_have_been_carried_out_is_not_repeated(
    side: Side, server: RedisServer, repeat_writes: Any, result: bytes
) -> None:
    """A frozen server carries out later all that it was sent: INCR once, or as often as it was allowed."""

    async def main() -> None:
        client = side.client(Retry(2, backoff=[0]), repeat_writes=repeat_writes, **NO_HANDSHAKE, **QUICK)
        await warm(client)
        server.freeze()
        error = await failure(redis.TimeoutError, lambda: client.incr("n"))
        assert getattr(error, "repeatable", True) is (repeat_writes is not False)
        server.thaw()
        assert await done(side.client().get("n")) == result

    side.run(main)


@pytest.mark.parametrize("transaction", [True, False])
def test_a_pipeline_is_repeated_only_if_all_of_it_may_be(side: Side, server: RedisServer, transaction: bool) -> None:
    """Of reads, and writes that overwrite, yes; with one other write, no."""

    async def main() -> None:
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

    side.run(main)


def test_a_write_that_was_not_sent_is_repeated(side: Side, server: RedisServer) -> None:
    """A connection that could not be made, or was found dead before, says that nothing has been done."""

    async def main() -> None:
        client = side.client(Retry(3, backoff=[0], on_retry=lambda event: server.start()))
        server.kill()
        assert await done(client.incr("n")) == 1

    side.run(main)


def test_a_write_that_was_refused_is_repeated(side: Side) -> None:
    """A replica says that it has not done it; the next attempt connects anew, maybe to the new master."""

    async def main() -> None:
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

    side.run(main)


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
    assert Repeatable(False).allows(command) is may
    assert Repeatable(True).allows(command)
    assert Repeatable(["incr"]).allows(command) is (may or command[0] == "INCR")


def test_no_command_in_the_table_writes_for_the_server_but_those_that_overwrite(server: RedisServer) -> None:
    """The server's own flags agree with the table."""
    with redis.Redis(port=server.port) as client:
        flags = {name.upper(): about["flags"] for name, about in client.command().items()}
    writes = {name for name in REPEATABLE_COMMANDS if "write" in flags.get(name, ())}
    assert writes == set("EXPIRE EXPIREAT HMSET LSET MSET PEXPIRE PEXPIREAT PSETEX SET SETEX".split())
    reads = {name for name, its in flags.items() if "readonly" in its} - {"XINFO", "MEMORY"}
    assert reads - REPEATABLE_COMMANDS <= {"LOLWUT"}


# --- time -------------------------------------------------------------------------------------


def test_a_deadline_ends_the_wait_for_a_frozen_server(side: Side, server: RedisServer) -> None:
    """The client's own timeout is longer; what is left of the budget holds, and the next command has its own again."""

    async def main() -> None:
        client = side.client(Retry(3, backoff=[0]))
        await done(client.set("a", "mine"))
        await done(client.set("b", "other"))
        server.freeze()
        began = time.monotonic()
        with deadline(0.2):
            await failure(redis.TimeoutError, lambda: client.get("a"))
        assert 0.1 < time.monotonic() - began < PATIENCE / 2
        thawing = threading.Timer(0.3, server.thaw)
        thawing.start()
        assert await done(client.get("b")) == b"other"  # and not the late answer to the first question
        thawing.join()

    side.run(main)


def test_a_deadline_ends_connecting_to_a_frozen_server(side: Side, server: RedisServer) -> None:
    """The handshake belongs to the attempt."""

    async def main() -> None:
        client = side.client(Retry(3, backoff=[0]))
        server.freeze()
        began = time.monotonic()
        with deadline(0.2):
            await failure(redis.TimeoutError, lambda: client.get("a"))
        assert time.monotonic() - began < PATIENCE / 2
        server.thaw()

    side.run(main)


def test_nothing_is_sent_when_the_time_is_over(side: Side) -> None:
    """And the connection is as good as before."""

    async def main() -> None:
        client = side.client(Count())
        before = await done(client.client_id())
        with deadline(0):
            await failure(DeadlineExceeded, lambda: client.incr("n"))
        assert await done(client.get("n")) is None
        assert await done(client.client_id()) == before

    side.run(main)


def test_a_cooperative_timeout_is_handed_to_the_client(side: Side, server: RedisServer) -> None:
    """The limit for one attempt is the limit of its socket operations."""

    async def main() -> None:
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

    side.run(main)


def test_a_blocking_client_refuses_a_timeout_that_leaves_its_connection_to_a_thread() -> None:
    """Two threads would read from one socket."""
    for policy in (Timeout(1), Retry().wrap(Timeout(1, name="attempt"))):
        with pytest.raises(ValueError, match=r"Timeout\(.*cooperative=True"):
            protect(redis.Redis(), policy)
        protect(redis.asyncio.Redis(), policy)


def test_a_timeout_around_the_client_is_another_matter(side: Side, server: RedisServer) -> None:
    """It walks away with the whole call, or cancels it; later calls are not harmed."""

    async def main() -> None:
        client = side.client(Retry(2, backoff=[0]))
        await done(client.set("a", 1))
        server.freeze()
        timeout = Timeout(0.1)
        await failure(
            TimeoutError, lambda: timeout.call(client.get, "a") if side.blocking else timeout.acall(client.get, "a")
        )
        server.thaw()
        assert await done(client.get("a")) == b"1"

    side.run(main)


# --- cut off in the middle --------------------------------------------------------------------


def test_a_write_that_a_timeout_cut_off_is_not_repeated(server: RedisServer) -> None:
    """In asyncio a Timeout inside of the Retry cancels the attempt after INCR was sent: its outcome is unknown."""
    side = Side("asyncio", server)

    async def main() -> None:
        client = side.client(Policy.wrap(Retry(3, backoff=[0]), Timeout(0.1)))
        await warm(client)
        server.freeze()
        error = await failure(OutcomeUnknown, lambda: client.incr("n"))
        assert str(error) == "INCRBY may have been carried out before it was cut off; not sent again"
        server.thaw()
        assert await done(side.client().get("n")) == b"1"

    side.run(main)


def test_a_read_that_a_timeout_cut_off_is_repeated(server: RedisServer) -> None:
    """On another connection: the late answer is nobody's."""
    side = Side("asyncio", server)

    async def main() -> None:
        policy = Policy.wrap(Retry(9, backoff=[0], on_retry=lambda event: server.thaw()), Timeout(0.2))
        client = side.client(policy)
        await done(side.client().set("a", 1))
        await warm(client)
        server.freeze()
        assert await done(client.get("a")) == b"1"

    side.run(main)


def test_a_transaction_that_watches_does_not_go_on_with_another_connection(side: Side, server: RedisServer) -> None:
    """Its watch is gone with the connection, so it is a `WatchError`, and no Retry repeats that."""

    async def main() -> None:
        client = side.client(Retry(3, on=Exception, backoff=[0]))
        admin = redis.Redis(port=side._port)
        pipeline = client.pipeline()
        await done(pipeline.watch("a"))
        pipeline.multi()
        pipeline.set("a", "lost update")
        for each in admin.client_list():
            if each["id"] != str(admin.client_id()):
                admin.client_kill_filter(_id=each["id"])
        await failure(WatchError, pipeline.execute)
        assert admin.get("a") is None
        await done(pipeline.reset())
        admin.close()

    side.run(main)


def test_a_timeout_in_a_transaction_that_watches_is_a_watch_error(server: RedisServer) -> None:
    """Also where the attempt was cancelled, and redis-py was not asked what to do with its failure."""
    side = Side("asyncio", server)

    async def main() -> None:
        retry = Retry(3, backoff=[0], on_retry=lambda event: server.thaw())
        client = side.client(Policy.wrap(retry, Timeout(0.3)))
        await warm(client)
        async with client.pipeline() as pipeline:
            await pipeline.watch("a")
            pipeline.multi()
            pipeline.get("a")
            server.freeze()
            await failure(WatchError, pipeline.execute)

    side.run(main)


def test_cancelling_a_task_harms_nobody_else(server: RedisServer) -> None:
    """The connection that still waits for an answer is given up."""
    side = Side("asyncio", server)

    async def main() -> None:
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

    side.run(main)


# --- publish and subscribe --------------------------------------------------------------------


def test_a_subscription_survives_the_restart_of_the_server(side: Side, server: RedisServer) -> None:
    """The next read connects and subscribes again."""

    async def main() -> None:
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

    side.run(main)


def test_a_subscriber_keeps_to_the_deadline(side: Side) -> None:
    """Whether it would wait for some time, or for ever."""

    async def main() -> None:
        pubsub = side.client(Retry(3)).pubsub(ignore_subscribe_messages=True)
        await done(pubsub.subscribe("news"))
        await done(pubsub.get_message(timeout=PATIENCE))
        began = time.monotonic()
        for waiting in ({"block": False, "timeout": PATIENCE}, {"block": True}, {"block": True}):
            with deadline(0.1), contextlib.suppress(redis.TimeoutError):
                await done(pubsub.parse_response(**waiting))
        assert time.monotonic() - began < PATIENCE / 2
        await done(pubsub.close() if side.blocking else pubsub.aclose())

    side.run(main)


# --- under load -------------------------------------------------------------------------------


def in_use(client: Any) -> int:
    return len(client.connection_pool._in_use_connections)


def test_threads_under_load_survive_a_crash_a_freeze_and_a_restart(server: RedisServer) -> None:
    """Nothing hangs, the circuit opens and closes, every connection comes back, nobody gets another's answer."""
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


def test_tasks_under_load_survive_a_crash_a_freeze_and_a_restart(server: RedisServer) -> None:
    """The same in asyncio."""
    opened = threading.Event()
    breaker = CircuitBreaker(5, open_for=0.05, on=transient, on_transition=lambda event: opened.set())
    policy = Policy.wrap(Retry(2, backoff=[0.01]), breaker, Timeout(0.2))
    wrong: list[int] = []

    async def main() -> None:
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

    anyio.run(main)
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


# --- the Retry object -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PolicyRetry, AsyncPolicyRetry])
def test_copies_share_the_policy(kind: type[PolicyRetry]) -> None:
    """redis-py copies its Retry for every connection, deeply, and a breaker cannot be copied."""
    retry = kind(CircuitBreaker(5))
    for copied in (copy.deepcopy(retry), copy.copy(retry)):
        assert copied.policy is retry.policy
        assert copied == retry
        assert hash(copied) == hash(retry)
        copied.update_supported_errors([ResponseError])
        assert copied != retry
    assert retry != kind(CircuitBreaker(5))
    assert retry != kind(retry.policy, repeat_writes=True)
    assert retry._retries == 0  # none that redis-py would make by itself
    assert repr(retry) == f"{kind.__name__}(CircuitBreaker())"


def test_what_redis_py_calls_not_retryable_is_not() -> None:
    """`is_retryable` is redis-py's own word, for errors that look like others: no disconnecting, no repetition."""
    failed: list[Exception] = []
    count = Count()

    def do() -> None:
        raise redis.ConnectionError("reset")

    with pytest.raises(redis.ConnectionError):
        PolicyRetry(Retry(3, backoff=[0]).wrap(count)).call_with_retry(do, failed.append, lambda error: False)
    assert (count.calls, failed) == (1, [])


def test_fail_is_called_after_every_failed_attempt_with_their_number() -> None:
    """Also after the last one; an error that redis-py does not support is no reason, until it is repeated."""
    failed: list[tuple[str, int]] = []
    errors = iter([redis.ConnectionError("1"), ResponseError("2"), redis.TimeoutError("3"), ResponseError("4")])

    def do() -> None:
        raise next(errors)

    def fail(error: Exception, failures: int) -> None:
        failed.append((str(error), failures))

    with pytest.raises(ResponseError, match="4"):
        PolicyRetry(Retry(4, on=Exception, backoff=[0])).call_with_retry(do, fail, with_failure_count=True)
    assert failed == [("1", 1), ("2", 2), ("3", 3)]


def test_what_fail_raises_is_final_unless_it_could_not_connect() -> None:
    """A `WatchError` ends it; a connection that cannot be made again is a failure like others."""
    raised = iter([redis.ConnectionError("still away"), WatchError("gone")])

    def do() -> None:
        raise redis.ConnectionError("reset")

    def fail(error: Exception) -> None:
        raise next(raised)

    with pytest.raises(WatchError):
        PolicyRetry(Retry(5, on=Exception, backoff=[0])).call_with_retry(do, fail)
    assert next(raised, None) is None


def test_on_connections_of_other_classes_it_repeats_whatever_the_policy_says(side: Side, server: RedisServer) -> None:
    """Given to redis-py as its `retry=`: attempts are not squared, and a restart is survived."""

    async def main() -> None:
        count = Count()
        policy = Policy.wrap(Retry(3, backoff=[0]), count)
        client = side.client(retry=PolicyRetry(policy) if side.blocking else AsyncPolicyRetry(policy))
        assert await done(client.incr("n")) == 1
        count.calls = 0
        server.kill()
        await failure(redis.ConnectionError, lambda: client.incr("n"))
        assert count.calls <= 6  # the pool's connecting, and the command, three times each
        server.start()
        assert await done(client.incr("n")) == 1

    side.run(main)


def test_protecting_again_replaces_the_policy() -> None:
    """And mixes nothing in twice."""
    client = protect(protect(redis.Redis(), Retry(3)), Retry(5))
    assert repr(client.get_retry()) == "PolicyRetry(Retry(attempts=5))"
    assert client.connection_pool.connection_class.__mro__.count(redis.Connection) == 1


# --- wrong arguments --------------------------------------------------------------------------


def test_a_client_that_cannot_be_protected_is_refused(side: Side, server: RedisServer) -> None:
    """It has connections of another kind, or needs them to be made at once."""

    async def main() -> None:
        client = side.client()
        await done(client.ping())
        with pytest.raises(ValueError, match="connected"):
            protect(client, Retry())

    side.run(main)
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
