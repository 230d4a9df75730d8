"""The types of the results of executions, as type checkers see them. Read by test_types.py; not run."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, assert_type

from resilience import Bulkhead, CircuitBreaker, Context, Failure, Fallback, Outcome, Policy, Retry, Success, Timeout


def fetch(ctx: Context) -> str:
    return ctx.operation or ""


async def afetch(ctx: Context) -> str:
    return ctx.operation or ""


def get(url: str, *, times: int = 1) -> int:
    return len(url) * times


async def aget(url: str, *, times: int = 1) -> int:
    return len(url) * times


class Client:
    def get(self, url: str) -> bytes:
        return url.encode()

    async def aget(self, url: str) -> bytes:
        return url.encode()

    def later(self, url: str) -> Awaitable[bytes]:
        return self.aget(url)


class Called:
    def __call__(self, ctx: Context) -> str:
        return ""


class AsyncCalled:
    async def __call__(self, ctx: Context) -> str:
        return ""


def execute() -> None:
    assert_type(Retry().execute(fetch), str)
    assert_type(Retry().execute(fetch, Context(timeout=1.0)), str)
    assert_type(Retry().execute(fetch, ctx=None), str)
    assert_type(Retry().execute(Called()), str)
    assert_type(Timeout(1.0).execute(lambda ctx: ctx.attempt), int)
    assert_type(CircuitBreaker().execute(lambda ctx: ctx.remaining()), float)
    assert_type(Bulkhead(1).execute(functools.partial(fetch)), str)
    assert_type(Fallback(None).execute(fetch), "str | None")
    assert_type(Fallback(1).execute(fetch), "str | int")
    assert_type(Fallback(1).execute(lambda ctx: json.loads("1")), Any)


async def later() -> None:
    pending = assert_type(Retry().execute(afetch), Coroutine[Any, Any, str])
    assert_type(await pending, str)
    assert_type(await Retry().execute(afetch), str)
    assert_type(await Retry().execute(AsyncCalled()), str)
    assert_type(await Retry().aexecute(afetch), str)
    assert_type(await Retry().aexecute(afetch, Context(timeout=1.0)), str)
    assert_type(await Retry().aexecute(lambda ctx: afetch(ctx)), str)
    assert_type(await Retry().aexecute(lambda ctx: Client().later("u")), bytes)
    assert_type(await Fallback(None).execute(afetch), "str | None")
    assert_type(await Fallback(None).aexecute(afetch), "str | None")


async def call() -> None:
    assert_type(Retry().call(get, "u", times=2), int)
    assert_type(Retry().call(Client().get, "u"), bytes)
    assert_type(Retry().call(str.upper, "u"), str)
    assert_type(Fallback(None).call(get, "u"), "int | None")
    assert_type(Retry().call(json.loads, "1"), Any)
    assert_type(await Retry().call(aget, "u", times=2), int)
    assert_type(await Retry().acall(aget, "u", times=2), int)
    assert_type(await Retry().acall(Client().later, "u"), bytes)
    assert_type(await Fallback(None).acall(Client().aget, "u"), "bytes | None")


async def capture() -> None:
    assert_type(Retry().capture(fetch), Outcome[str])
    assert_type(Fallback(None).capture(fetch), "Outcome[str | None]")
    assert_type(await Retry().acapture(afetch), Outcome[str])
    outcome = Retry().capture(fetch)
    assert_type(outcome.unwrap(), str)
    if isinstance(outcome, Success):
        assert_type(outcome, Success[str])
        assert_type(outcome.value, str)
    else:
        assert_type(outcome, Failure)
        assert_type(outcome.error, Exception)


def matched(outcome: Outcome[int]) -> str:
    match outcome:
        case Success(value):
            assert_type(value, int)
            return str(value)
        case Failure(error):
            assert_type(error, Exception)
            return str(error)


def by_its_error(outcome: Outcome[int]) -> int:
    if outcome.error is not None:
        assert_type(outcome.error, Exception)
        raise outcome.error
    assert_type(outcome, Success[int])
    return outcome.value


def through_a_parameter(policy: Policy[int], fn: Callable[[Context], str]) -> None:
    assert_type(policy.execute(fn), "str | int")
