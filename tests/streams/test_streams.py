"""Streams: a call that is not over before its last item, under every policy as it is."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest
import trio

from resilience import (
    Bulkhead,
    BulkheadFull,
    Cache,
    CircuitBreaker,
    CircuitOpen,
    CircuitState,
    Context,
    Fallback,
    Hedge,
    Keyed,
    Pipeline,
    Policy,
    Retry,
    SingleFlight,
    Timeout,
    TimeoutExceeded,
    current_context,
    deadline,
    events,
)
from resilience.errors import ArgumentMisuse, RaceMisuse
from resilience.events.dispatch import subscribers
from resilience.testing import virtual_time
from tests.callers import run_all
from tests.conftest import Boom, FakeClock, Watched, World, no_collector
from tests.streams.sources import Consumed, Source, outcome, streamed


def retry(attempts: int = 3, **settings: Any) -> Retry:
    return Retry(attempts, **{"on": Boom, "backoff": [0], **settings})


# --- what fails ----------------------------------------------------------------------------------


async def test_a_failure_before_the_first_item_is_retried(world: World) -> None:
    source = Source(world, [Boom()], [Boom()], [1, 2, 3])
    assert await streamed(world, retry(), source).all() == [1, 2, 3]
    assert source.closed == 3


async def test_a_failure_after_an_item_is_raised(world: World, heard: list[Any]) -> None:
    """It is not retried, not answered, and counted."""
    failed, breaker = Boom("mid"), CircuitBreaker(1, on=Boom)
    source = Source(world, [1, failed])
    pipeline = Pipeline(Fallback(["no"]), retry(), breaker)
    assert await outcome(streamed(world, pipeline, source)) == ([1], failed)
    assert len(source.calls) == source.closed == 1
    assert breaker.state is CircuitState.OPEN
    assert [it.reason for it in heard if isinstance(it, events.RetryGaveUp)] == ["unrepeatable"]
    assert [it for it in heard if isinstance(it, events.FallbackUsed)] == []


async def test_with_resume_the_next_call_goes_on_after_the_last_item(world: World) -> None:
    source = Source(world, [1, 2, Boom()], [Boom()], [3, Boom()], [4, 5])
    stream = streamed(world, retry(5), source, resume={"after": lambda item: item, "double": lambda item: 2 * item})
    assert await stream.all() == [1, 2, 3, 4, 5]
    assert source.calls == [{}, {"after": 2, "double": 4}, {"after": 2, "double": 4}, {"after": 3, "double": 6}]


async def test_what_resume_raises_is_raised(world: World) -> None:
    source = Source(world, [1, 2])
    got, error = await outcome(streamed(world, retry(1), source, resume={"after": lambda item: item.id}))
    assert got == []
    assert isinstance(error, AttributeError)
    assert source.closed == 1


async def test_what_resume_raises_is_not_retried(world: World) -> None:
    """As what a predicate raises: to call anew would bring the same item."""
    source = Source(world, [1, "two"])
    stream = streamed(world, Pipeline(Fallback([]), retry(on=Exception)), source, resume={"after": lambda item: -item})
    got, error = await outcome(stream)
    assert got == [1]
    assert isinstance(error, TypeError)
    assert len(source.calls) == source.closed == 1


async def test_a_policy_of_the_users_own_cannot_answer_a_stream_that_has_begun(world: World) -> None:
    class Answers(Policy[Any]):
        async def around(self, call: Any, ctx: Context) -> Any:
            try:
                return await call(ctx)
            except Boom:
                return ["instead"]

    failed = Boom()
    assert await outcome(streamed(world, Answers(), Source(world, [1, failed]))) == ([1], failed)
    assert await outcome(streamed(world, Answers(), Source(world, [failed]))) == (["instead"], None)


# --- what stands in ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer", [lambda: ["a", "b"], lambda: "ab", lambda: iter("ab")], ids=["list", "text", "iterator"]
)
async def test_the_items_of_a_fallbacks_answer_are_the_stream(world: World, answer: Any) -> None:
    source = Source(world, [Boom()])
    stream = streamed(world, Pipeline(Fallback(answer()), retry(2)), source)
    assert await stream.all() == ["a", "b"]
    assert len(source.calls) == 2


async def test_an_asynchronous_answer(tasks_world: World) -> None:
    async def answer(failure: Any, ctx: Context) -> AsyncIterator[str]:
        return items()

    async def items() -> AsyncIterator[str]:
        yield "a"
        raise Boom("of the answer")

    got, error = await outcome(streamed(tasks_world, Fallback(handler=answer), Source(tasks_world, [OSError()])))
    assert got == ["a"]
    assert str(error) == "of the answer"


async def test_a_refused_stream_is_answered(world: World) -> None:
    breaker = CircuitBreaker(1)
    breaker.isolate()
    source = Source(world, [1])
    assert await streamed(world, Pipeline(Fallback([]), breaker), source).all() == []
    assert source.calls == []


@pytest.mark.parametrize("answer", [None, 5])
async def test_an_answer_without_items_is_a_misuse(world: World, answer: Any) -> None:
    got, error = await outcome(streamed(world, Fallback(answer), Source(world, [Boom()])))
    assert got == []
    assert isinstance(error, TypeError)
    assert "must have items" in str(error)


async def test_a_predicate_over_results_sees_none(world: World) -> None:
    seen: list[Any] = []
    policy = Pipeline(Fallback(["none"], on_result=lambda it: it is None), retry(on_result=seen.append))
    assert await streamed(world, policy, Source(world, [1])).all() == [1]
    assert await streamed(world, policy, Source(world, [])).all() == ["none"]
    assert seen == [None, None]


# --- what is held --------------------------------------------------------------------------------


async def test_a_permit_is_held_until_the_end(world: World) -> None:
    bulkhead, source = Bulkhead(1), Source(world, [1, 2])
    stream = streamed(world, bulkhead, source)
    assert (bulkhead.stats().in_flight, source.calls) == (0, [])  # nothing runs before the first pull
    assert await stream.next() == 1
    assert bulkhead.stats().in_flight == 1
    assert isinstance((await outcome(streamed(world, bulkhead, source)))[1], BulkheadFull)
    assert await stream.all() == [2]
    assert bulkhead.stats().in_flight == 0
    assert await stream.all() == []


async def test_a_stream_that_its_consumer_closes_has_ended_well(world: World, clock: FakeClock) -> None:
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


async def test_one_that_is_closed_before_its_first_item_has_not_been_a_call(world: World) -> None:
    source = Source(world, [1])
    stream = streamed(world, retry(), source)
    await stream.close()
    assert await stream.all() == []
    assert source.calls == []


async def test_nothing_is_called_again_for_who_has_left(world: World) -> None:
    """Neither by a Retry, which sees None as the result, nor by a policy of the user's own."""

    class Again(Policy[Any]):
        async def around(self, call: Any, ctx: Context) -> Any:
            await call(ctx)
            return await call(ctx)

    for policy in (retry(on_result=lambda result: result is None), Again()):
        bulkhead, source = Bulkhead(1), Source(world, [1, 2])
        stream = streamed(world, Pipeline(policy, bulkhead), source, resume={"after": lambda item: item})
        assert await stream.next() == 1
        await stream.close()
        assert len(source.calls) == source.closed == 1
        assert bulkhead.stats().in_flight == 0
        assert await stream.all() == []


@pytest.mark.parametrize("end", ["left", "failed", "exhausted"])
async def test_what_stands_in_is_closed_as_a_source_is(world: World, end: str) -> None:
    closed: list[str] = []

    def fail() -> None:
        if end == "failed":
            raise Boom

    class Response:
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
    assert await stream.next() == 1
    if end == "failed":
        with pytest.raises(Boom):
            await stream.next()
    elif end == "exhausted":
        assert await stream.all() == []
    await stream.close()
    assert closed == ["items", "response"]
    assert await stream.all() == []


async def test_an_answer_may_be_left(world: World) -> None:
    stream = streamed(world, Fallback([1, 2]), Source(world, [Boom()]))
    assert await stream.next() == 1
    await stream.close()
    assert await stream.all() == []


def test_a_stream_that_is_dropped_gives_back_what_it_holds(threads: World) -> None:
    bulkhead, source = Bulkhead(1), Source(threads, [1, 2])
    with no_collector():
        stream = bulkhead.streaming().call(source.function)
        assert next(stream) == 1
        del stream
        assert bulkhead.stats().in_flight == 0
        assert source.closed == 1


@pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")
async def test_a_stream_may_be_dropped_with_a_cycle(tasks_world: World, heard: list[Any]) -> None:
    """The collector then closes the chain of policies before the event loop comes to the stream."""
    bulkhead = Bulkhead(1)
    stream = bulkhead.streaming().call(Source(tasks_world, [1, 2]).function)
    assert await anext(stream) == 1
    cycle = [stream]
    cycle.append(cycle)  # type: ignore[arg-type]
    del stream, cycle
    gc.collect()
    assert bulkhead.stats().in_flight == 0
    with anyio.fail_after(5):
        while not any(isinstance(it, events.ExecutionFinished) for it in heard):
            await tasks_world.sleep(0)


@pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")
async def test_the_event_loop_closes_a_stream_that_is_dropped(tasks_world: World) -> None:
    """Whole, with a source that waits as it is closed, as an asynchronous generator is."""
    bulkhead, closed = Bulkhead(1), []

    async def source() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            with anyio.CancelScope(shield=True):  # trio closes what was left behind in a scope that is cancelled
                await tasks_world.sleep(0)
            closed.append(1)

    stream = bulkhead.streaming().call(source)
    assert await anext(stream) == 1
    with no_collector():
        del stream
        with anyio.fail_after(5):
            while not closed or bulkhead.stats().in_flight:
                await tasks_world.sleep(0)


def test_a_source_that_is_no_generator_is_closed_as_clients_close_theirs(threads: World) -> None:
    class Response:
        closed = False

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            return 1

        def close(self) -> None:
            self.closed = True

    response = Response()
    stream = retry().streaming().call(lambda: response)
    assert [next(stream), next(stream)] == [1, 1]
    stream.close()
    assert response.closed


# --- limits --------------------------------------------------------------------------------------


class Sleeps(Policy[Any]):
    """Waits for a minute before the call."""

    async def around(self, call: Any, ctx: Context) -> Any:
        await ctx.sleep(60)
        return await call(ctx)


def in_virtual_asyncio(main: Any) -> None:
    with virtual_time():
        asyncio.run(main())


async def paced(*pauses: float) -> AsyncIterator[float]:
    for pause in pauses:
        await asyncio.sleep(pause)
        yield pause


def test_first_and_idle_limit_a_pull_each() -> None:
    async def main() -> None:
        streaming = retry(2, on=TimeoutExceeded).streaming(first=5.0, idle=1.0)
        got: list[float] = []
        with pytest.raises(TimeoutExceeded, match="no item within 1 s") as caught:
            async for item in streaming.call(paced, 4, 0.5, 1.5):
                await asyncio.sleep(30)  # the consumer's own time does not count
                got.append(item)
        assert got == [4, 0.5]
        assert caught.value.policy == "streaming"
        assert caught.value.timeout == 1.0
        starts = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutExceeded, match="no item within 5 s"):
            await anext(streaming.call(paced, 6))
        assert asyncio.get_running_loop().time() - starts == pytest.approx(10)  # twice

    in_virtual_asyncio(main)


def test_first_counts_from_the_opening() -> None:
    async def opens() -> AsyncIterator[float]:
        await asyncio.sleep(3)
        return paced(3)

    async def main() -> None:
        with pytest.raises(TimeoutExceeded, match="no item within 5 s"):
            await anext(retry().streaming(first=5.0).call(opens))
        with pytest.raises(TimeoutExceeded, match="no item within 2 s"):
            await anext(retry().streaming(first=2.0).call(opens))

    in_virtual_asyncio(main)


def test_a_timeout_around_cuts_off_a_pull_or_a_wait_but_not_the_consumer() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        bulkhead = Bulkhead(1, queue=1)
        got: list[float] = []
        began = loop.time()
        with pytest.raises(TimeoutExceeded, match="no result within 5 s"):
            await Consumed(World("asyncio"), Pipeline(Timeout(5), bulkhead).streaming().call(paced, 1, 1, 10)).all(got)
        assert (got, loop.time() - began) == ([1, 1], pytest.approx(5))
        began = loop.time()
        with pytest.raises(TimeoutExceeded):
            async for _ in Timeout(5).streaming().call(paced, 1, 0):
                await asyncio.sleep(20)  # is not cut off: the next pull is
        assert loop.time() - began == pytest.approx(21)
        began = loop.time()
        with pytest.raises(Boom):  # in a Retry, which foresees that the second wait does not fit
            await anext(Pipeline(Timeout(5), Retry(on=Boom, backoff=[2, 60])).streaming().call(boom))
        assert loop.time() - began == pytest.approx(2)
        with pytest.raises(TimeoutExceeded):  # in the wait of a policy that does not look ahead
            await anext(Pipeline(Timeout(5), Sleeps()).streaming().call(paced))
        assert loop.time() - began == pytest.approx(7)
        assert await anext(Pipeline(Timeout(500), Sleeps()).streaming().call(paced, 0)) == 0
        with bulkhead.slot():
            began = loop.time()
            with pytest.raises(TimeoutExceeded):
                await anext(Pipeline(Timeout(5), bulkhead).streaming().call(paced, 1))
            assert loop.time() - began == pytest.approx(5)

    async def boom() -> AsyncIterator[int]:
        raise Boom
        yield 1

    in_virtual_asyncio(main)


def test_a_thread_walks_away_from_a_pull(threads: World) -> None:
    go = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        go.wait(5)
        yield 2

    limited = {"no result within": Timeout(0.2).streaming(), "no item": retry(1).streaming(idle=0.2)}
    for message, streaming in limited.items():
        stream = streaming.call(source)
        assert next(stream) == 1
        with pytest.raises(TimeoutExceeded, match=message):
            next(stream)
        assert list(stream) == []
    go.set()


def test_a_thread_waits_in_a_queue_until_the_limit_around_it(threads: World) -> None:
    bulkhead = Bulkhead(1, queue=1)
    with bulkhead.slot(), pytest.raises(TimeoutExceeded):
        next(Pipeline(Timeout(0.02), bulkhead).streaming().call(lambda: [1]))
    assert next(Pipeline(Timeout(5), bulkhead).streaming().call(lambda: [1])) == 1
    patient = Bulkhead(1, queue=1, max_wait=0.01)
    with patient.slot(), pytest.raises(BulkheadFull, match="in the queue"):
        next(Pipeline(Timeout(5), patient).streaming().call(lambda: [1]))


VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


@pytest.mark.parametrize("limits", [{}, {"first": 5}, {"idle": 5}], ids=repr)
async def test_what_a_source_sets_holds_between_two_pulls(world: World, limits: Any) -> None:
    """On workers, too; and its consumer sees none of it."""

    async def sets() -> AsyncIterator[int]:
        token = VARIABLE.set(1)
        try:
            for _ in range(3):
                yield VARIABLE.get()
        finally:
            VARIABLE.reset(token)
            restored.append(VARIABLE.get())

    def blocking() -> Iterator[int]:
        token = VARIABLE.set(1)
        try:
            for _ in range(3):
                yield VARIABLE.get()
        finally:
            VARIABLE.reset(token)
            restored.append(VARIABLE.get())

    restored: list[int] = []
    for leaves in (False, True):
        stream = Consumed(world, retry().streaming(**limits).call(blocking if world.blocking else sets))
        assert [await stream.next(), await stream.next()] == [1, 1]
        assert VARIABLE.get() == 0
        await (stream.close() if leaves else stream.all())
    assert restored == [0, 0]


def test_what_a_pull_was_walked_away_from_is_closed_all_the_same(threads: World) -> None:
    """That is how a connection lets go of the thread that reads from it."""

    class Connection:
        def __init__(self) -> None:
            self.closed = threading.Event()

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            assert self.closed.wait(10)
            raise StopIteration

        def close(self) -> None:
            self.closed.set()

    connection = Connection()
    with pytest.raises(TimeoutExceeded):
        next(retry(1).streaming(first=0.02).call(lambda: connection))
    assert connection.closed.is_set()


async def test_a_cooperative_timeout_only_tells(world: World) -> None:
    async def left() -> AsyncIterator[float]:
        yield current_context().remaining()

    def blocking() -> Iterator[float]:
        yield current_context().remaining()

    streaming = Timeout(100, cooperative=True).streaming()
    stream = Consumed(world, streaming.call(blocking if world.blocking else left))
    assert 90 < (await stream.all())[0] <= 100


async def test_nothing_is_opened_once_the_limit_is_over(world: World) -> None:
    class Slow(Policy[Any]):
        async def around(self, call: Any, ctx: Context) -> Any:
            time.sleep(0.03)
            return await call(ctx)

    source = Source(world, [1])
    _, error = await outcome(streamed(world, Pipeline(Timeout(0.02), Slow()), source))
    assert isinstance(error, TimeoutExceeded)
    assert source.calls == []


async def test_a_deadline_over_before_it_begins(world: World) -> None:
    with deadline(0):
        got, error = await outcome(streamed(world, retry(), Source(world, [1])))
    assert got == []
    assert isinstance(error, TimeoutExceeded)


# --- cancellation --------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [0, 1])
async def test_a_cancelled_pull_is_a_cancellation(tasks_world: World, items: int) -> None:
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
        await Consumed(tasks_world, pipeline.streaming(idle=80).call(source)).all(got)
    assert scope.cancelled_caught
    assert got == [*range(items)]
    assert closed == [1]
    assert bulkhead.stats().in_flight == 0
    assert breaker.state is CircuitState.CLOSED


async def test_an_interrupt_in_a_pull_goes_through(world: World) -> None:
    bulkhead = Bulkhead(1)
    stream = streamed(world, Pipeline(Fallback([]), retry(), bulkhead), Source(world, [1, KeyboardInterrupt()]))
    assert await stream.next() == 1
    with pytest.raises(KeyboardInterrupt):
        await stream.next()
    assert bulkhead.stats().in_flight == 0


# --- contexts ------------------------------------------------------------------------------------


async def test_the_context_is_ambient_in_the_source_alone(world: World) -> None:
    seen: list[Any] = []

    def look() -> tuple[int, str | None]:
        return current_context().attempt, current_context().operation

    async def task() -> AsyncIterator[Any]:
        for _ in range(3):
            yield look()

    def thread() -> Iterator[Any]:
        for _ in range(3):
            yield look()

    streaming, ctx = retry().streaming(), Context(operation="list")
    if world.blocking:
        stream = Consumed(world, streaming.execute(lambda ctx: thread(), ctx))
    else:
        stream = Consumed(world, streaming.aexecute(lambda ctx: task(), ctx))
    for _ in range(3):
        seen.append(await stream.next())
        assert current_context().operation is None
    await stream.close()
    assert seen == [(1, "list")] * 3


async def test_the_calls_of_the_consumer_are_not_inside_the_stream(world: World, clock: FakeClock) -> None:
    """A call inside an admitted call of the same breaker belongs to that: those of the source do."""
    breaker = CircuitBreaker(1, open_for=10)
    await outcome(streamed(world, breaker, Source(world, [Boom()])))
    clock.advance(10)
    stream = streamed(world, breaker, Source(world, [1]))
    await stream.next()
    with pytest.raises(CircuitOpen):
        breaker.call(int)
    await stream.all()
    assert breaker.call(int) == 0


async def test_what_was_called_is_known(world: World, heard: list[Any]) -> None:
    ctx = Context()
    source = Source(world, [Boom()], [1, 2])
    pipeline = Pipeline(retry(), name="shop")
    streaming = pipeline.streaming()
    stream = Consumed(world, (streaming.execute if world.blocking else streaming.aexecute)(source.function, ctx))
    assert await stream.all() == [1, 2]
    assert (ctx.attempts, [it.type for it in ctx.failures]) == (2, ["Boom"])
    opened = next(it for it in heard if isinstance(it, events.StreamOpened))
    finished = next(it for it in heard if isinstance(it, events.ExecutionFinished))
    assert (opened.policy, opened.attempt, finished.items, finished.attempts) == ("shop", 2, 2, 2)
    assert opened.operation == finished.operation == source.function.__qualname__
    assert finished.called is not None
    assert finished.called.function == source.function
    assert [it.attempt for it in heard if isinstance(it, events.CallFinished)] == []


async def test_listeners_of_a_pipeline_hear_each_event_once(world: World) -> None:
    """Also of one inside another, where they hear what happens in that one."""
    outer: list[Any] = []
    inner: list[Any] = []
    pipeline = Pipeline(Bulkhead(9), Pipeline(retry(), listeners=[inner.append]), listeners=[outer.append])
    assert await streamed(world, pipeline, Source(world, [Boom()], [1])).all() == [1]
    kinds = [events.AttemptFailed, events.RetryScheduled, events.StreamOpened]
    assert [type(it) for it in outer] == [*kinds, events.ExecutionFinished]
    assert [type(it) for it in inner] == kinds


async def test_each_attempt_is_reported_to_those_that_ask(world: World) -> None:
    calls: list[Any] = []
    unsubscribe = events.subscribe(calls.append, events.CallFinished)
    try:
        await streamed(world, retry(), Source(world, [Boom()], [1])).all()
    finally:
        unsubscribe()
    assert [(it.attempt, type(it.outcome).__name__) for it in calls] == [(1, "Failure"), (2, "Success")]


async def test_policies_that_are_switched_off_are_no_policies(world: World) -> None:
    was = subscribers.switch_policies_off(True)
    try:
        error = (await outcome(streamed(world, retry(), Source(world, [Boom()], [1]))))[1]
    finally:
        subscribers.switch_policies_off(was)
    assert isinstance(error, Boom)


# --- how it is written ---------------------------------------------------------------------------


async def test_what_may_bring_items(world: World) -> None:
    """A generator function, a function or coroutine function that returns an iterator, a method, a partial."""
    streaming = retry().streaming()

    class Client:
        @streaming
        async def task(self, count: int) -> AsyncIterator[int]:
            for number in range(count):
                yield number

        @streaming
        @staticmethod
        def thread(count: int) -> Iterator[int]:
            yield from range(count)

        async def opens(self, count: int) -> AsyncIterator[int]:
            return self.task(count)

    client = Client()
    assert Client.task.__name__ == "task"
    if world.blocking:
        assert list(client.thread(2)) == list(streaming.call(range, 2)) == [0, 1]
        assert list(streaming.proxy(client, "thread").thread(3)) == [0, 1, 2]
        return
    for stream in (
        client.task(2),
        streaming.call(functools.partial(client.opens, 2)),
        streaming.acall(lambda: client.opens(2)),
    ):
        assert [it async for it in stream] == [0, 1]
    assert [it async for it in streaming.proxy(client, "opens").opens(2)] == [0, 1]  # type: ignore[attr-defined]
    assert [it async for it in streaming.aproxy(client, "task").task(2)] == [0, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda it: list(it.call(lambda: 5)), "has no items"),
        (lambda it: list(it.call(lambda: paced())), "use `.acall` or `.aexecute`"),
        (lambda it: list(it.call(lambda url: [url])), "cannot be called with these arguments"),
        (lambda it: it.call(5), "runs callables"),
        (lambda it: it.proxy(object()), "name the methods"),
        (lambda it: next(it.call(iter, [1])) and it.call(iter, [1]).send(5), "takes no value"),
        (lambda it: it.call(iter, [1]).throw(Boom()), "close it"),
        (lambda it: asyncio.run(anext_of(it.acall(lambda: [1]))), "use `.call` or `.execute`"),
        (lambda it: asyncio.run(it.acall(paced, 1).asend(5)), "takes no value"),
        (lambda it: asyncio.run(it.acall(paced, 1).athrow(Boom())), "close it"),
    ],
)
def test_misuse_is_refused(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(Fallback([]).wrap(retry()).streaming())


async def anext_of(stream: Any) -> Any:
    return await anext(stream)


async def anext_or_none(pull: Any) -> Any:
    try:
        return await pull
    except StopAsyncIteration:
        return None


def test_none_may_be_sent_as_to_a_generator() -> None:
    assert retry().streaming().call(iter, [1]).send(None) == 1
    assert asyncio.run(anext_sent(retry().streaming().call(paced, 0))) == 0


async def anext_sent(stream: Any) -> Any:
    return await stream.asend(None)


async def test_a_policy_cannot_open_a_source_several_times_at_once(world: World) -> None:
    class Races(Policy[Any]):
        races = True

        async def around(self, call: Any, ctx: Context) -> Any:
            plan: Any = None
            await ctx.runtime.race(call, ctx, plan)

    got, error = await outcome(streamed(world, Races(), Source(world, [1])))
    assert got == []
    assert "several times at once" in str(error)


@pytest.mark.parametrize(
    "policy", [Cache(1), SingleFlight(), Hedge(0.1), Pipeline(retry(), Cache(1))], ids=lambda it: it.name
)
def test_what_hands_out_results_again_cannot_stand_around_a_stream(policy: Any) -> None:
    with pytest.raises(TypeError, match="cannot stand around a stream"):
        policy.streaming()


@pytest.mark.parametrize("inner", [Cache(1), SingleFlight(), Hedge(1)], ids=str)
async def test_nor_where_another_policy_hands_a_stream_on_to_it(world: World, inner: Policy[Any]) -> None:
    """Which is seen when it is asked; the source is not opened, and nothing is kept of it."""
    source = Source(world, [1])
    for _ in range(2):
        got, error = await outcome(streamed(world, Keyed(lambda key: inner, lambda: 1), source))
        assert (got, type(error), source.calls) == ([], *_MISUSED[type(inner)], [])


_MISUSED: dict[type, tuple[type]] = {
    Cache: (ArgumentMisuse,),
    SingleFlight: (ArgumentMisuse,),
    Hedge: (RaceMisuse,),
}


def test_how_it_is_shown() -> None:
    assert repr(Timeout(5).streaming(first=2, idle=1)) == "Timeout(seconds=5.0).streaming(first=2, idle=1)"
    assert "resume={'after':" in repr(Timeout(5).streaming(resume={"after": len}))


async def test_two_cannot_pull_at_once(in_asyncio: World) -> None:
    bulkhead = Bulkhead(1)
    for streaming in (bulkhead.streaming(), bulkhead.streaming(idle=5)):
        stream = streaming.call(paced, 0, 0.02)
        assert await anext(stream) == 0
        first = asyncio.create_task(anext_of(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="waited for"):
            await anext(stream)
        with pytest.raises(RuntimeError, match="waited for"):
            await stream.aclose()
        assert await first == 0.02
        await stream.aclose()
    assert bulkhead.stats().in_flight == 0


async def test_a_pull_may_be_made_before_it_is_awaited(tasks_world: World) -> None:
    for ends in (True, False):
        stream = retry().streaming().call(Source(tasks_world, [1, 2, 3]).function)
        assert await anext(stream, None) == 1
        made = [stream.__anext__() for _ in range(4)]
        if not ends:
            await stream.aclose()
        assert [await anext_or_none(it) for it in made] == ([2, 3, None, None] if ends else [None] * 4)


async def test_a_pull_may_have_a_default(tasks_world: World) -> None:
    stream = retry().streaming().call(Source(tasks_world, [1, 2]).function)
    assert [await anext(stream, "no more") for _ in range(4)] == [1, 2, "no more", "no more"]


async def test_who_waits_for_an_item_may_be_closed(in_asyncio: World) -> None:
    """As a task is whose event loop has ended: the source ends where it waits, and permits come back."""
    for limits in ({}, {"idle": 5.0}):
        bulkhead, ended = Bulkhead(1), []

        async def waits(ended: list[str] = ended) -> AsyncIterator[int]:
            try:
                yield 1
                await asyncio.sleep(10)
            except GeneratorExit:
                ended.append("closed")
                raise

        stream = bulkhead.streaming(**limits).call(waits)
        await anext(stream)
        pull = anext_of(stream)
        pull.send(None)
        pull.close()
        assert ended == ["closed"]
        assert bulkhead.stats().in_flight == 0
        assert await anext(stream, None) is None


async def test_nor_where_the_first_item_is_waited_for(in_asyncio: World) -> None:
    stream = retry().streaming().call(paced, 0.02)
    first = asyncio.create_task(anext_of(stream))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="waited for"):
        await anext(stream)
    assert await first == 0.02


def test_two_threads_cannot_pull_at_once(threads: World) -> None:
    """Neither the first item nor a later one: the source is in one thread at a time."""
    entered, may_go_on = threading.Semaphore(0), threading.Semaphore(0)

    def items() -> Iterator[int]:
        for number in range(2):
            entered.release()
            assert may_go_on.acquire(timeout=10)
            yield number

    stream = retry().streaming().call(items)
    got: list[int] = []

    def meddle() -> None:
        assert entered.acquire(timeout=10)
        with pytest.raises(RuntimeError, match="waited for"):
            next(stream)
        may_go_on.release()

    for _ in range(2):
        run_all([threading.Thread(target=lambda: got.append(next(stream)))], meddle)
    assert got == [0, 1]


# --- contention and memory -----------------------------------------------------------------------


def test_one_bulkhead_over_streams_of_all_runtimes() -> None:
    bulkhead, lock = Bulkhead(2, queue=50), threading.Lock()
    inside, most = [0], [0]

    def enter(change: int) -> None:
        with lock:
            inside[0] += change
            most[0] = max(most[0], inside[0])

    def blocking() -> Iterator[int]:
        enter(1)
        try:
            yield from range(3)
        finally:
            enter(-1)

    async def task() -> AsyncIterator[int]:
        enter(1)
        try:
            for number in range(3):
                await anyio.sleep(0)
                yield number
        finally:
            enter(-1)

    async def tasks() -> None:
        async def one() -> None:
            assert [it async for it in bulkhead.streaming().call(task)] == [0, 1, 2]

        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(one)

    def thread() -> None:
        for _ in range(5):
            assert list(bulkhead.streaming().call(blocking)) == [0, 1, 2]

    run_all(
        [threading.Thread(target=thread) for _ in range(5)]
        + [threading.Thread(target=lambda: asyncio.run(tasks())), threading.Thread(target=lambda: trio.run(tasks))]
    )
    assert most[0] <= 2
    assert inside[0] == bulkhead.stats().in_flight == 0


@pytest.mark.parametrize("items", [0, 2])
async def test_a_stream_leaves_no_cycle(world: World, items: int) -> None:
    watched = Watched()

    def blocking() -> Iterator[int]:
        yield from range(items)
        watched.fail()

    async def task() -> AsyncIterator[int]:
        for number in range(items):
            yield number
        watched.fail()

    async def consume() -> None:
        streaming = Pipeline(retry(2), CircuitBreaker(), Timeout(60)).streaming()
        stream = Consumed(world, streaming.call(blocking if world.blocking else task))
        try:
            await stream.all([])
        except Boom:
            pass

    with no_collector():
        await consume()
        assert watched.seen
        assert watched.alive == []


def test_a_waiter_of_a_stream_whose_loop_has_ended_makes_room() -> None:
    bulkhead = Bulkhead(1, queue=1)
    streaming = Pipeline(Timeout(60), bulkhead).streaming()
    with bulkhead.slot():
        loop = asyncio.new_event_loop()
        task = loop.create_task(anext_of(streaming.call(paced, 0)))
        loop.run_until_complete(asyncio.sleep(0))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        waits = threading.Thread(target=lambda: list(streaming.call(lambda: [1])))
        waits.start()
    waits.join(5)
    assert not waits.is_alive()
    assert bulkhead.stats().rejected == 0


async def test_what_ends_at_the_instant_of_a_limit_belongs_to_it(in_asyncio: World) -> None:
    """Calls in the source find no time left, and say so first."""

    async def source() -> AsyncIterator[int]:
        for number in range(2):
            await anyio.sleep(0.03 * number)
            current_context().check()
            yield number

    stream = Timeout(0.02, name="total").streaming().call(source)
    assert await anext(stream) == 0
    with pytest.raises(TimeoutExceeded) as caught:
        await anext(stream)
    assert caught.value.policy == "total"


async def test_a_stream_of_many_items_ends_and_fails_as_one_of_two(world: World) -> None:
    """After the first item, a pull that nothing limits takes a shorter way."""
    source = Source(world, [1, 2, 3, 4])
    assert await streamed(world, retry(), source).all() == [1, 2, 3, 4]
    failed = Boom("late")
    assert await outcome(streamed(world, retry(), Source(world, [1, 2, 3, failed]))) == ([1, 2, 3], failed)


async def test_a_function_may_fail_before_it_returns_an_iterator(world: World) -> None:
    failures = iter([TypeError("its own"), Boom()])

    def opens() -> Any:
        for failure in failures:
            raise failure
        return Source(world, [1]).function()

    streaming = retry(on=Exception).streaming()
    stream = Consumed(world, streaming.call(opens) if world.blocking else streaming.acall(opens))
    assert await stream.all() == [1]


async def test_a_policy_may_call_again_after_the_last_item(world: World) -> None:
    class Twice(Policy[Any]):
        async def around(self, call: Any, ctx: Context) -> Any:
            await call(ctx)
            return await call(ctx)

    assert await streamed(world, Twice(), Source(world, [1, 2, 3], [4, 5])).all() == [1, 2, 3, 4, 5]
