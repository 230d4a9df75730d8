"""Streams under the policies: failures, fallbacks, and consumers that leave."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest

from resilience import (
    Bulkhead,
    CircuitBreaker,
    CircuitState,
    Context,
    Fallback,
    Pipeline,
    Policy,
    Retry,
    Timeout,
    TimeoutExceeded,
    events,
)
from resilience.testing import script
from tests.conftest import Boom, FakeClock, Virtual, World
from tests.custom import Twice
from tests.functions import quick
from tests.streams.sources import Consumed, Source, outcome, streamed

# --- failures --------------------------------------------------------------------------------------


async def test_a_failure_before_the_first_item_is_retried(world: World) -> None:
    source = Source(world, [Boom()], [Boom()], [1, 2, 3])
    assert await streamed(world, quick(), source).all() == [1, 2, 3]
    assert source.closed == 3


async def test_a_failure_after_an_item_is_raised(world: World, heard: list[Any]) -> None:
    """It is counted, and neither retried nor replaced by a fallback."""
    failed, breaker = Boom("mid"), CircuitBreaker(1, on=Boom)
    source = Source(world, [1, failed])
    pipeline = Pipeline(Fallback(["no"]), quick(), breaker)
    assert await outcome(streamed(world, pipeline, source)) == ([1], failed)
    assert len(source.calls) == source.closed == 1
    assert breaker.state is CircuitState.OPEN
    assert [it.reason for it in heard if isinstance(it, events.RetryGaveUp)] == ["unrepeatable"]
    assert [it for it in heard if isinstance(it, events.FallbackUsed)] == []


async def test_a_function_may_fail_before_it_returns_an_iterator(world: World) -> None:
    opens = script(TypeError("its own"), Boom(), Source(world, [1]).function())
    streaming = quick(on=Exception).streaming()
    stream = Consumed(world, streaming.call(opens) if world.blocking else streaming.acall(opens))
    assert await stream.all() == [1]


async def test_with_resume_the_next_call_continues_after_the_last_item(world: World) -> None:
    source = Source(world, [1, 2, Boom()], [Boom()], [3, Boom()], [4, 5])
    stream = streamed(world, quick(5), source, resume={"after": lambda item: item, "double": lambda item: 2 * item})
    assert await stream.all() == [1, 2, 3, 4, 5]
    assert source.calls == [{}, {"after": 2, "double": 4}, {"after": 2, "double": 4}, {"after": 3, "double": 6}]


async def test_resume_replaces_a_keyword_that_the_caller_gave(world: World) -> None:
    source = Source(world, [6, 7, Boom()], [8])
    streaming = quick().streaming(resume={"after": lambda item: item})
    stream = Consumed(world, streaming.call(source.function, after=5, size=9))
    assert await stream.all() == [6, 7, 8]
    assert source.calls == [{"after": 5, "size": 9}, {"after": 7, "size": 9}]


async def test_an_error_of_resume_is_raised_and_not_retried(world: World) -> None:
    """As that of a predicate: the next call would bring the same item, which is not delivered."""
    source = Source(world, [1, "two"])
    stream = streamed(world, Pipeline(Fallback([]), quick(on=Exception)), source, resume={"after": lambda item: -item})
    got, error = await outcome(stream)
    assert got == [1]
    assert isinstance(error, TypeError)
    assert len(source.calls) == source.closed == 1


async def test_a_policy_may_call_again_after_the_last_item(world: World) -> None:
    assert await streamed(world, Twice(), Source(world, [1, 2, 3], [4, 5])).all() == [1, 2, 3, 4, 5]


# --- fallbacks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "repeats"])
async def test_no_policy_hides_the_end_of_a_stream_with_items(world: World, clock: FakeClock, answers: bool) -> None:
    class Hides(Policy[Any]):
        async def around(self, call: Any, ctx: Context) -> Any:
            try:
                return await call(ctx)
            except (Boom, TimeoutExceeded):
                await ctx.sleep(0)
                return ["instead"] if answers else await call(ctx)

    failed = Boom()
    if answers:
        assert await outcome(streamed(world, Hides(), Source(world, [failed]))) == (["instead"], None)
    assert await outcome(streamed(world, Hides(), Source(world, [1, failed]))) == ([1], failed)
    cut_off = Source(world, [1, lambda: clock.advance(9), 3])
    got, error = await outcome(streamed(world, Pipeline(Hides(), Timeout(5, name="total")), cut_off))
    assert got[0] == 1
    assert isinstance(error, TimeoutExceeded)
    assert (error.policy, len(cut_off.calls)) == ("total", 1)


@pytest.mark.parametrize(
    "answer", [lambda: ["a", "b"], lambda: "ab", lambda: iter("ab")], ids=["list", "text", "iterator"]
)
async def test_the_result_of_a_fallback_is_iterated(world: World, answer: Any) -> None:
    source = Source(world, [Boom()])
    stream = streamed(world, Pipeline(Fallback(answer()), quick(2)), source)
    assert await stream.all() == ["a", "b"]
    assert len(source.calls) == 2


async def test_a_refused_stream_is_replaced_by_a_fallback(world: World) -> None:
    breaker = CircuitBreaker(1)
    breaker.isolate()
    source = Source(world, [1])
    assert await streamed(world, Pipeline(Fallback([]), breaker), source).all() == []
    assert source.calls == []


@pytest.mark.parametrize("answer", [None, 5])
async def test_a_fallback_whose_result_has_no_items_is_a_type_error(world: World, answer: Any) -> None:
    isolated = CircuitBreaker(1)
    isolated.isolate()
    for policy in (Fallback(answer), Fallback(answer).wrap(isolated)):
        got, error = await outcome(streamed(world, policy, Source(world, [Boom()])))
        assert got == []
        assert isinstance(error, TypeError)
        assert "must have items" in str(error)


async def test_on_result_gets_none_for_a_stream(world: World) -> None:
    seen: list[Any] = []
    policy = Pipeline(Fallback(["none"], on_result=lambda it: it is None), quick(on_result=seen.append))
    assert await streamed(world, policy, Source(world, [1])).all() == [1]
    assert await streamed(world, policy, Source(world, [])).all() == ["none"]
    assert seen == [None, None]


@pytest.mark.parametrize("end", ["left", "failed", "exhausted"])
@pytest.mark.parametrize("returned_by", ["function", "fallback"])
async def test_an_object_and_its_iterator_are_closed(world: World, end: str, returned_by: str) -> None:
    closed: list[str] = []

    def fail() -> None:
        if end == "failed":
            raise Boom

    class Response:
        cancel = None  # only that of an object without `close` is called

        def __iter__(self) -> Iterator[int]:
            try:
                yield 1
                fail()
            finally:
                closed.append("items")

        def close(self) -> None:
            closed.append("response")

    class AsyncResponse:
        async def __aiter__(self) -> AsyncIterator[int]:
            try:
                yield 1
                fail()
            finally:
                await world.sleep(0)
                closed.append("items")

        async def aclose(self) -> None:
            closed.append("response")

    response = Response() if world.blocking else AsyncResponse()
    stream = streamed(world, Fallback(handler=lambda failure, ctx: response), Source(world, [Boom()]))
    if returned_by == "function":
        streaming = quick().streaming()
        stream = Consumed(world, (streaming.call if world.blocking else streaming.acall)(lambda: response))
    assert await stream.next() == 1
    if end == "failed":
        with pytest.raises(Boom):
            await stream.next()
    elif end == "exhausted":
        assert await stream.all() == []
    await stream.close()
    assert closed == ["items", "response"]
    assert await stream.all() == []


# --- consumers that leave --------------------------------------------------------------------------


async def test_a_stream_that_its_consumer_closes_is_a_success(world: World, clock: FakeClock) -> None:
    breaker, bulkhead = CircuitBreaker(1, open_for=10), Bulkhead(1)
    pipeline = Pipeline(bulkhead, breaker)
    await outcome(streamed(world, pipeline, Source(world, [Boom()])))
    clock.advance(10)
    source = Source(world, [1, 2])
    stream = streamed(world, pipeline, source)
    assert await stream.next() == 1
    assert breaker.state is CircuitState.HALF_OPEN
    await stream.close()
    await stream.close()
    assert breaker.state is CircuitState.CLOSED
    assert bulkhead.stats().in_flight == 0
    assert source.closed == 1
    assert await stream.all() == []


async def test_a_stream_closed_before_its_first_pull_makes_no_call(world: World) -> None:
    source = Source(world, [1])
    stream = streamed(world, quick(), source)
    await stream.close()
    assert await stream.all() == []
    assert source.calls == []


async def test_no_call_is_made_after_the_consumer_has_left(world: World, heard: list[Any]) -> None:
    """Neither by a Retry, which gets None as the result and does not wait, nor by a policy of the user."""
    for policy in (quick(on_result=lambda result: result is None), Twice()):
        bulkhead, source = Bulkhead(1), Source(world, [1, 2])
        stream = streamed(world, Pipeline(policy, bulkhead), source, resume={"after": lambda item: item})
        assert await stream.next() == 1
        await stream.close()
        assert len(source.calls) == source.closed == 1
        assert bulkhead.stats().in_flight == 0
        assert await stream.all() == []
    assert [it for it in heard if isinstance(it, events.RetryScheduled)] == []


@pytest.mark.parametrize("items", [0, 1])
async def test_a_cancelled_pull_cancels_the_source_and_is_no_failure(virtual_tasks: Virtual, items: int) -> None:
    bulkhead, breaker, closed = Bulkhead(1), CircuitBreaker(1), []

    async def source() -> AsyncIterator[int]:
        try:
            for number in range(items):
                yield number
            await anyio.sleep(60)
        finally:
            closed.append(1)

    pipeline = Pipeline(Fallback(["no"], on=BaseException), Retry(on=BaseException), bulkhead, breaker, Timeout(90))
    got: list[int] = []
    with anyio.move_on_after(0.02) as scope:
        await Consumed(virtual_tasks, pipeline.streaming(idle=80).call(source)).all(got)
    assert scope.cancelled_caught
    assert got == [*range(items)]
    assert closed == [1]
    assert bulkhead.stats().in_flight == 0
    assert breaker.state is CircuitState.CLOSED


async def test_an_interrupt_in_a_pull_is_raised(world: World) -> None:
    bulkhead = Bulkhead(1)
    stream = streamed(world, Pipeline(Fallback([]), quick(), bulkhead), Source(world, [1, KeyboardInterrupt()]))
    assert await stream.next() == 1
    with pytest.raises(KeyboardInterrupt):
        await stream.next()
    assert bulkhead.stats().in_flight == 0
