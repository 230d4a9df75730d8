"""Fallback: values, handlers, bad results, events, and several fallbacks."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from resilience import Context, Failure, Fallback, Outcome, Policy, RetriesExhausted, Retry, Success, Timeout, events
from tests.conftest import Boom, Frozen, Script, World, shown
from tests.functions import raising
from tests.policies.retries import Response, bad


async def run(world: World, policy: Policy[Any], *steps: Any, ctx: Context | None = None) -> Any:
    """Run one execution; return the value, or the exception as a value."""
    return await world.attempt(policy, Script(*steps).function(), ctx)


# --- the value ---


@pytest.mark.parametrize("value", [object(), 0, "", None, False, [], dict, len, Boom("a value")], ids=shown)
async def test_a_failure_is_replaced_with_the_value_itself(threads: World, value: Any) -> None:
    """A callable is not called, and an exception is not raised."""
    assert await threads.execute(Fallback(value), Script(Boom()).function()) is value


async def test_an_awaitable_value_is_not_awaited(tasks_world: World) -> None:
    """Only the result of a handler is."""

    class Awaitable:
        def __await__(self) -> Any:
            raise AssertionError("the value was awaited")

    value = Awaitable()
    assert await run(tasks_world, Fallback(value), Boom()) is value


async def test_a_replaced_result_and_the_response_of_a_replaced_failure_are_closed(world: World) -> None:
    """The caller does not get them."""
    result, response = Response(), Response()
    failure = Boom()
    failure.response = response  # type: ignore[attr-defined]
    assert await run(world, Fallback("value", on_result=bad), result) == "value"
    assert await run(world, Fallback("value"), failure) == "value"
    assert (result.closed, response.closed) == (1, 1)


async def test_what_an_inner_retry_has_given_up_with_is_closed_if_a_value_replaces_it(world: World) -> None:
    """With `wrap`, its error carries the last outcome: a result, or a failure, which may carry a response."""
    result, response = Response(), Response()
    failure = Boom()
    failure.response = response  # type: ignore[attr-defined]
    retry = Retry(1, on=Boom, on_result=bad, wrap=True)
    for outcome in (result, failure):
        assert await run(world, Fallback("value").wrap(retry), outcome) == "value"
        assert (
            await run(world, Fallback("value").wrap(Retry(1, on=RetriesExhausted, wrap=True), retry), outcome)
            == "value"
        )
    assert (result.closed, response.closed) == (2, 2)
    with pytest.raises(RetriesExhausted):
        raise await run(world, retry, result)
    assert result.closed == 2


async def test_a_result_that_is_returned_or_passed_to_a_handler_is_not_closed(world: World) -> None:
    """The call may return the value of the fallback itself, and a handler may return its result or read it later."""
    value, result = Response(), Response()
    assert await run(world, Fallback(value, on_result=bad), value) is value
    assert await run(world, Fallback(handler=lambda failure, ctx: failure.value, on_result=bad), result) is result
    assert (value.closed, result.closed) == (0, 0)


@pytest.mark.parametrize("answer", [{"value": "value"}, {"handler": lambda failure, ctx: "value"}], ids=list)
async def test_a_result_is_closed_if_a_listener_is_interrupted(world: World, answer: Any) -> None:
    """After Ctrl-C in `on_fallback`, neither a handler nor a caller will see it."""
    result = Response()
    with pytest.raises(KeyboardInterrupt):
        await run(world, Fallback(**answer, on_result=bad, on_fallback=raising(KeyboardInterrupt)), result)
    assert result.closed == 1


@pytest.mark.parametrize("value", ["fine", None, False, 0, []], ids=repr)
async def test_a_success_is_unchanged(threads: World, value: Any) -> None:
    """Neither the handler nor `on_fallback` is called."""
    called: list[object] = []
    fallback = Fallback(handler=lambda failure, ctx: called.append(failure), on_fallback=called.append)
    assert await run(threads, fallback, value) is value
    assert called == []


# --- the handler ---


async def test_the_handler_gets_the_failure_and_the_context(world: World) -> None:
    """Its result replaces the failure."""
    error = Boom("x")
    seen: list[tuple[Outcome[Any], Context]] = []

    def handler(failure: Outcome[Any], ctx: Context) -> str:
        seen.append((failure, ctx))
        return "instead"

    ctx = Context(operation="fetch", properties={"tenant": 7}, timeout=60)
    assert await run(world, Fallback(handler=handler), error, ctx=ctx) == "instead"
    [(failure, handled)] = seen
    assert failure == Failure(error)
    assert isinstance(failure, Failure)
    assert failure.error is error
    assert (handled.operation, handled.properties["tenant"], handled.deadline) == ("fetch", 7, ctx.deadline)


async def test_the_awaitable_result_of_a_plain_handler_is_awaited(tasks_world: World) -> None:
    """The handler may be a lambda around an asynchronous method."""

    async def fetch() -> str:
        await anyio.sleep(0)
        return "from the cache"

    assert await run(tasks_world, Fallback(handler=lambda failure, ctx: fetch()), Boom()) == "from the cache"


async def test_an_error_of_the_handler_is_raised_with_the_original_as_its_context(world: World) -> None:
    """It is not handled again, even if it is in `on`."""
    original, later, calls = Boom("first"), Boom("second"), list[int]()

    def handler(failure: Any, ctx: Context) -> Any:
        calls.append(1)
        raise later

    assert await run(world, Fallback(handler=handler, on=Boom), original) is later
    assert later.__context__ is original
    assert calls == [1]


@pytest.mark.parametrize("error", [Boom(), Frozen(3)], ids=repr)
async def test_the_handler_can_raise_the_original_again(world: World, error: Exception) -> None:
    """It has neither itself nor another error as context or cause."""

    def handler(failure: Any, ctx: Context) -> Any:
        raise failure.error

    assert await run(world, Fallback(handler=handler), error) is error
    assert error.__context__ is None
    assert error.__cause__ is None


# --- results ---


async def test_a_bad_result_is_replaced(world: World) -> None:
    """The handler gets it as `Success(value)`."""
    seen: list[Outcome[Any]] = []
    fallback = Fallback(handler=lambda failure, ctx: seen.append(failure), on_result=lambda it: it >= 500)
    assert await run(world, fallback, 503) is None
    assert await run(world, fallback, 404) == 404
    assert seen == [Success(503)]
    assert await run(world, Fallback("default", on_result=lambda it: it is None), None) == "default"


async def test_on_result_does_not_hold_for_the_replacement(world: World) -> None:
    assert await run(world, Fallback(None, on_result=lambda it: it is None), None) is None


async def test_an_exceeded_deadline_is_replaced(world: World) -> None:
    """A fallback needs no time left."""
    ctx = Context(timeout=0)
    assert await run(world, Policy.wrap(Fallback("instead"), Retry()), "late", ctx=ctx) == "instead"
    assert await run(world, Policy.wrap(Fallback("instead"), Timeout(5)), "late", ctx=ctx) == "instead"


# --- telling ---


async def test_on_fallback_gets_an_event_before_each_replacement(world: World) -> None:
    """The event carries the outcome that is replaced."""
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
