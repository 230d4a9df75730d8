"""Fallback: what is answered, with what, and what comes through."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from resilience import (
    Context,
    Failure,
    Fallback,
    Outcome,
    Policy,
    Retry,
    Success,
    Timeout,
    current_context,
    events,
)
from tests.conftest import Boom, Script, World, shown


class Other(Exception):
    """A failure that the policy under test is not told to answer."""


async def run(world: World, policy: Policy[Any], *steps: Any, ctx: Context | None = None) -> Any:
    """Return what comes out of one execution: the value, or the exception as a value."""
    return await world.attempt(policy, Script(*steps).function(), ctx)


# --- the value ---


@pytest.mark.parametrize("value", [object(), 0, "", None, False, [], dict, len, Boom, Boom("a value")], ids=shown)
async def test_a_failure_is_answered_with_the_value_as_it_is(threads: World, value: Any) -> None:
    """Falsy, callable, a class, an exception: the very object, neither called nor raised."""
    assert await threads.execute(Fallback(value), Script(Boom()).function()) is value


async def test_the_value_is_none_unless_given(world: World) -> None:
    """`Fallback()` answers None."""
    assert await world.execute(Fallback(), Script(Boom()).function()) is None


async def test_a_value_that_can_be_awaited_is_not(tasks_world: World) -> None:
    """As it is: only a handler is a way of making the answer."""

    class Later:
        def __await__(self) -> Any:
            raise AssertionError("the value was awaited")

    value = Later()
    assert await run(tasks_world, Fallback(value), Boom()) is value


@pytest.mark.parametrize("value", ["fine", None, False, 0, []], ids=repr)
async def test_a_success_passes_by(world: World, value: Any) -> None:
    """Untouched, and nobody is told or asked."""
    told: list[object] = []
    fallback = Fallback(handler=lambda failure, ctx: told.append(failure), on_fallback=told.append)
    assert await run(world, fallback, value) is value
    assert told == []


# --- the handler ---


async def test_the_handler_makes_the_answer_from_the_failure_and_the_context(world: World) -> None:
    """`handler(failure, ctx)`, with `Failure(error)`."""
    error = Boom("x")
    seen: list[tuple[Outcome[Any], Context]] = []

    def handler(failure: Outcome[Any], ctx: Context) -> str:
        seen.append((failure, ctx))
        return "instead"

    ctx = Context(operation="fetch", properties={"tenant": 7}, timeout=60)
    assert await run(world, Fallback(handler=handler), error, ctx=ctx) == "instead"
    [(failure, its)] = seen
    assert failure == Failure(error)
    assert isinstance(failure, Failure)
    assert failure.error is error
    assert (its.operation, its.properties["tenant"], its.deadline) == ("fetch", 7, ctx.deadline)


async def test_the_context_is_ambient_inside_the_handler(world: World) -> None:
    """What the handler calls through another pipeline inherits deadline and operation."""
    seen: list[tuple[str | None, float]] = []

    def handler(failure: Outcome[Any], ctx: Context) -> Any:
        inside = current_context()
        seen.append((inside.operation, inside.deadline))
        return Retry().execute(lambda inner: seen.append((inner.operation, inner.deadline)))

    ctx = Context(operation="fetch", timeout=60)
    await run(world, Fallback(handler=handler), Boom(), ctx=ctx)
    assert seen == [("fetch", ctx.deadline)] * 2


async def test_the_handler_may_be_async_in_async(tasks_world: World) -> None:
    """It is awaited, with its context as the ambient one throughout."""

    async def handler(failure: Any, ctx: Context) -> str:
        await anyio.sleep(0)
        return f"{type(failure.error).__name__} in {current_context().operation}"

    assert await run(tasks_world, Fallback(handler=handler), Boom(), ctx=Context(operation="fetch")) == "Boom in fetch"


async def test_a_handler_that_returns_an_awaitable_is_awaited_too(tasks_world: World) -> None:
    """A lambda around a client's method is no coroutine function."""

    async def fetch() -> str:
        await anyio.sleep(0)
        return "from the cache"

    assert await run(tasks_world, Fallback(handler=lambda failure, ctx: fetch()), Boom()) == "from the cache"


async def test_what_the_handler_raises_comes_out_with_the_original_as_its_context(world: World) -> None:
    """The original error is not masked."""
    original, later = Boom("first"), Other("second")

    def handler(failure: Any, ctx: Context) -> Any:
        raise later

    assert await run(world, Fallback(handler=handler), original) is later
    assert later.__context__ is original


async def test_the_handler_may_raise_the_original_again(world: World) -> None:
    """Then it comes out as it was, with no chain that leads back to itself."""

    def handler(failure: Any, ctx: Context) -> Any:
        raise failure.error

    error = Boom()
    assert await run(world, Fallback(handler=handler), error) is error
    assert error.__context__ is None
    assert error.__cause__ is None


async def test_what_the_handler_raises_is_not_answered_again(world: World) -> None:
    """Not even where `on` names it."""
    calls: list[int] = []

    def handler(failure: Any, ctx: Context) -> Any:
        calls.append(1)
        raise Boom("from the handler")

    result = await run(world, Fallback(handler=handler, on=Boom), Boom())
    assert str(result) == "from the handler"
    assert calls == [1]


# --- results ---


async def test_a_result_that_is_not_good_enough_is_answered(world: World) -> None:
    """The handler sees it as `Success(value)`."""
    seen: list[Outcome[Any]] = []
    fallback = Fallback(handler=lambda failure, ctx: seen.append(failure), on_result=lambda it: it >= 500)
    assert await run(world, fallback, 503) is None
    assert await run(world, fallback, 404) == 404
    assert seen == [Success(503)]
    assert await run(world, Fallback("default", on_result=lambda it: it is None), None) == "default"


async def test_the_answer_is_not_looked_at_again(world: World) -> None:
    """A value that `on_result` would not like is an answer all the same."""
    assert await run(world, Fallback(None, on_result=lambda it: it is None), None) is None


def broken(*args: object) -> Any:
    raise LookupError("the predicate is broken")


async def test_a_deadline_that_is_over_is_answered(world: World) -> None:
    """An answer needs no time left."""
    ctx = Context(timeout=0)
    assert await run(world, Policy.wrap(Fallback("instead"), Retry()), "late", ctx=ctx) == "instead"
    assert await run(world, Policy.wrap(Fallback("instead"), Timeout(5)), "late", ctx=ctx) == "instead"


# --- telling ---


async def test_on_fallback_is_told_before_each_answer(world: World) -> None:
    """Once, with the outcome that is answered instead of."""
    order: list[Any] = []
    error = Boom()
    fallback = Fallback(
        handler=lambda failure, ctx: order.append("handler"),
        on_result=lambda it: it == "bad",
        on_fallback=order.append,
        name="cache",
    )
    ctx = Context(operation="fetch", properties={"tenant": 7})
    await run(world, fallback, error, ctx=ctx)
    await run(world, fallback, "bad")
    await run(world, fallback, "good")
    event, first, other, second = order
    assert [first, second] == ["handler", "handler"]
    assert isinstance(event, events.FallbackUsed)
    assert (event.outcome, event.policy, event.operation, event.properties["tenant"]) == (
        Failure(error),
        "cache",
        "fetch",
        7,
    )
    assert other.outcome == Success("bad")


# --- more than one ---


async def test_fallbacks_nest(world: World) -> None:
    """The inner one answers first; what it cannot answer is the outer one's."""
    pipeline = Policy.wrap(Fallback("outer"), Fallback("inner", on=Boom))
    assert await run(world, pipeline, Boom()) == "inner"
    assert await run(world, pipeline, Other()) == "outer"
    failing = Policy.wrap(Fallback("outer"), Fallback(handler=broken))
    assert await run(world, failing, Boom()) == "outer"
