"""Policies: every way to execute a function under one."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock, Mock

import anyio
import pytest

from resilience import Bulkhead, CircuitBreaker, Context, Failure, Fallback, Policy, Success, Timeout
from tests.conftest import Boom, FakeClock, Script, World, nothing_is_left_unawaited
from tests.functions import Later, quick

# --- execute -----------------------------------------------------------------------------------


def test_execute_runs_a_plain_function_in_the_calling_thread_and_returns_its_result() -> None:
    expected = threading.get_ident(), True, 1
    assert quick().execute(lambda ctx: (threading.get_ident(), isinstance(ctx, Context), ctx.attempt)) == expected


async def test_an_execution_of_a_coroutine_function_begins_when_it_is_awaited(tasks_world: World) -> None:
    """Like the function itself, it can be passed to `create_task` or `gather`."""
    calls: list[int] = []

    async def fn(ctx: Context) -> int:
        calls.append(1)
        return len(calls)

    awaitable = quick().execute(fn)
    await anyio.sleep(0)
    assert calls == []
    assert await awaitable == 1
    if tasks_world.name == "asyncio":
        assert await asyncio.gather(*(quick().execute(fn) for _ in range(3))) == [2, 3, 4]


async def test_aexecute_accepts_any_function_that_returns_an_awaitable(tasks_world: World) -> None:
    """Many clients have such plain methods; each attempt calls them again."""
    calls: list[int] = []

    async def fetch(ctx: Context) -> str:
        calls.append(ctx.attempt)
        if len(calls) < 3:
            raise Boom
        return "fetched"

    assert [
        await quick().aexecute(fetch),
        await quick().aexecute(lambda ctx: fetch(ctx)),
        await quick().aexecute(lambda ctx: Later()),
        await quick().aexecute(functools.partial(lambda ctx: Later())),
        await quick().aexecute(AsyncMock(return_value="mock")),
        await quick().aexecute(Mock(return_value=Later())),
    ] == ["fetched", "fetched", "later", "later", "mock", "later"]
    assert calls[:3] == [1, 2, 3]


def returning(value: Any) -> Any:
    async def fn(ctx: Context) -> Any:
        return value

    return fn


async def test_results_of_every_kind_are_returned_unchanged(world: World) -> None:
    """Falsy values, exceptions and outcomes are values like others."""
    pipeline = Fallback("x").wrap(quick(), CircuitBreaker(), Bulkhead(1), Timeout(5.0))
    for value in (None, 0, "", (), NotImplemented, Boom("a value"), StopIteration(1), Failure(Boom()), Success(1)):
        assert await world.execute(pipeline, returning(value)) is value


async def test_an_error_of_the_function_is_raised_unchanged(world: World, clock: FakeClock) -> None:
    """Neither wrapped nor chained."""
    cause = ValueError("why")
    boom = Boom("no")
    boom.__cause__ = cause
    pipeline = quick().wrap(CircuitBreaker(), Bulkhead(1), Timeout(5.0))
    error = await world.attempt(pipeline, Script(boom).function())
    assert error is boom
    assert error.__cause__ is cause
    assert error.__context__ is None


# --- call --------------------------------------------------------------------------------------


async def test_call_passes_every_argument_whatever_its_name(world: World) -> None:
    """Its own parameters are positional-only."""

    async def fn(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    policy, function = quick(), world.native(fn)
    for call in (policy.call,) if world.blocking else (policy.call, policy.acall):
        passed = await world.result(call(function, 1, 2, fn=3, self=4, ctx=5, policy=6))
        assert passed == ((1, 2), {"fn": 3, "self": 4, "ctx": 5, "policy": 6})


async def test_every_attempt_gets_the_same_argument_objects(world: World, clock: FakeClock) -> None:
    """Although keyword arguments make a new dictionary for each call."""
    payload = {"a": 1}
    seen: list[Any] = []

    async def fn(*args: Any, **kwargs: Any) -> None:
        seen.append((args[0] is payload, kwargs.pop("b") is payload))
        raise Boom

    with pytest.raises(Boom):
        await world.call(quick(), fn, payload, b=payload)
    assert seen == [(True, True)] * 3


# --- capture -----------------------------------------------------------------------------------


async def captured(world: World, policy: Policy[Any], fn: Callable[..., Any], ctx: Context | None = None) -> Any:
    return await world.result((policy.capture if world.blocking else policy.acapture)(world.native(fn), ctx))


async def test_capture_returns_the_outcome_as_a_value(world: World, clock: FakeClock) -> None:
    """`Success` or `Failure`, after retries and fallbacks."""
    boom = Boom("no")
    ctx = Context()
    assert [
        await captured(world, quick(), Script(Boom(), "fine").function()),
        await captured(world, quick(), Script(None).function()),
        await captured(world, quick(), Script(boom).function(), ctx),
        await captured(world, Fallback("x"), Script(boom).function()),
    ] == [Success("fine"), Success(None), Failure(boom), Success("x")]
    assert ctx.attempts == 3


def test_capture_of_a_coroutine_function_is_a_misuse() -> None:
    """It has no outcome before it is awaited."""

    async def coroutine(ctx: Context) -> None: ...

    with nothing_is_left_unawaited(), pytest.raises(TypeError, match="await"):
        quick().capture(coroutine)
