"""The Retry objects for redis-py, which call the policy."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError, WatchError

from resilience import CircuitBreaker, Policy, Retry, deadline
from resilience.integrations.redis import AsyncPolicyRetry, PolicyRetry, protect
from resilience.integrations.redis.retrying import current_call
from resilience.testing import ascript, script
from tests.functions import raising
from tests.integrations.redis.clients import PATIENCE, Count, Side, done, failure
from tests.integrations.redis.server import RedisServer


@pytest.mark.parametrize("kind", [PolicyRetry, AsyncPolicyRetry])
def test_copies_share_the_policy(kind: type[PolicyRetry]) -> None:
    """redis-py copies its Retry deeply for every connection, and a breaker cannot be copied."""
    retry = kind(CircuitBreaker(5))
    for copied in (copy.deepcopy(retry), copy.copy(retry)):
        assert copied.policy is retry.policy
        assert copied == retry
        assert hash(copied) == hash(retry)
        copied.update_supported_errors([ResponseError])
        assert copied != retry
        assert copy.deepcopy(copied) == copied
    assert retry != kind(CircuitBreaker(5))
    assert retry != kind(retry.policy, repeat_writes=True)
    assert retry != object()
    assert retry.get_retries() == 0  # redis-py itself makes none
    assert repr(retry) == f"{kind.__name__}(CircuitBreaker())"


@pytest.mark.parametrize("retryable", [True, False])
def test_an_error_that_is_not_retryable_is_not_retried(retryable: bool) -> None:
    """`is_retryable` is redis-py's own test: such an error does not disconnect, and is not repeated."""
    failed: list[Exception] = []
    count, do = Count(), raising(redis.ConnectionError("reset"))
    with pytest.raises(redis.ConnectionError):
        PolicyRetry(Retry(3, backoff=[0]).wrap(count)).call_with_retry(do, failed.append, lambda error: retryable)
    assert (count.calls, len(failed)) == ((3, 3) if retryable else (1, 0))


@pytest.mark.parametrize(("last", "failures"), [(redis.TimeoutError("3"), 3), (ResponseError("3"), 2)])
def test_fail_is_called_after_every_failed_attempt_with_the_count(last: Exception, failures: int) -> None:
    """Also after the last one. An error that redis-py does not support counts only if the policy repeats it."""
    do, fail = script(redis.ConnectionError("1"), ResponseError("2"), last), script(None, ...)
    with pytest.raises(type(last), match="3"):
        PolicyRetry(Retry(3, on=Exception, backoff=[0])).call_with_retry(do, fail, with_failure_count=True)
    failed = [(str(call.args[0]), call.args[1]) for call in fail.calls]
    assert failed == [("1", 1), ("2", 2), ("3", 3)][:failures]


def test_an_error_of_fail_is_final_unless_it_is_a_connection_error() -> None:
    """A `WatchError` is; a connection that cannot be established is a failure like others."""
    do, fail = raising(redis.ConnectionError("reset")), script(redis.ConnectionError("still away"), WatchError("gone"))
    with pytest.raises(WatchError):
        PolicyRetry(Retry(5, on=Exception, backoff=[0])).call_with_retry(do, fail)
    assert len(fail.calls) == 2


def test_an_error_of_fail_is_final_if_a_write_may_have_been_carried_out() -> None:
    retry, calls = PolicyRetry(Retry(5, on=Exception, backoff=[0])), list[Any]()

    def do() -> None:
        calls.append(current_call(retry))
        calls[-1].sends([("INCR", "n")])
        raise redis.ConnectionError("reset")

    with pytest.raises(redis.ConnectionError, match="still away"):
        retry.call_with_retry(do, raising(redis.ConnectionError("still away")))
    assert len(calls) == 1


async def test_policy_retry_also_works_on_unprotected_connections(side: Side, server: RedisServer) -> None:
    """If it is passed to redis-py as `retry=`: attempts do not multiply, and a restart of the server is survived."""
    count = Count()
    policy = Policy.wrap(Retry(3, backoff=[0]), count)
    client = side.client(retry=PolicyRetry(policy) if side.blocking else AsyncPolicyRetry(policy))
    assert await done(client.incr("n")) == 1
    count.calls = 0
    server.kill()
    await failure(redis.ConnectionError, lambda: client.incr("n"))
    assert count.calls <= 6  # connecting of the pool, and the command, three times each
    server.start()
    assert await done(client.incr("n")) == 1


def test_protecting_again_replaces_the_policy() -> None:
    """The class of the connections is mixed in only once."""
    client = protect(protect(redis.Redis(), Retry(3)), Retry(5))
    assert repr(client.get_retry()) == "PolicyRetry(Retry(attempts=5))"
    assert client.connection_pool.connection_class.__mro__.count(redis.Connection) == 1


def test_another_policy_in_an_attempt_has_its_own_execution() -> None:
    """Only commands of the same client are a part of the attempt: a password may come from another redis."""
    inner, outer, unused = Count(), Count(), raising(AssertionError("nothing has failed"))

    def do() -> str:
        return "".join(PolicyRetry(it).call_with_retry(lambda: ".", unused) for it in (outer, inner, outer))

    assert PolicyRetry(outer).call_with_retry(do, unused) == "..."
    assert (outer.calls, inner.calls) == (1, 1)


async def test_commands_of_a_task_after_its_attempt_are_executions() -> None:
    """A task may outlive the attempt in which it began."""
    count = Count()
    retry = AsyncPolicyRetry(count)

    async def nothing(error: Exception | None = None) -> None: ...

    attempt_is_over = asyncio.Event()

    async def later() -> None:
        await attempt_is_over.wait()
        await retry.call_with_retry(nothing, nothing)

    async def start() -> asyncio.Task[None]:
        return asyncio.create_task(later())

    task = await retry.call_with_retry(start, nothing)
    attempt_is_over.set()
    await task
    assert count.calls == 2


async def test_a_timeout_error_of_another_source_is_raised_unchanged() -> None:
    """Also with a deadline."""
    do, fail = ascript(TimeoutError("its own")), ascript(None)
    with deadline(PATIENCE), pytest.raises(TimeoutError, match="its own") as caught:
        await AsyncPolicyRetry(Count()).call_with_retry(do, fail)
    assert type(caught.value) is TimeoutError
