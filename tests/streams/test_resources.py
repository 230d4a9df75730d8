"""The resources that a stream holds and frees, and its contexts."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing, nullcontext
from typing import Any, NoReturn

import anyio
import pytest

from resilience import (
    Bulkhead,
    BulkheadFull,
    CircuitBreaker,
    CircuitOpen,
    Context,
    Pipeline,
    Retry,
    Timeout,
    current_context,
    events,
)
from tests.conftest import Boom, FakeClock, Watched, World, no_collector
from tests.contention.storm import Gauge, Storm
from tests.custom import Doing
from tests.functions import quick
from tests.streams.sources import Consumed, Source, anext_of, outcome, paced, streamed

# --- resources -------------------------------------------------------------------------------------


async def test_a_permit_is_held_until_the_end_of_the_stream(world: World) -> None:
    bulkhead, source = Bulkhead(1), Source(world, [1, 2])
    stream = streamed(world, bulkhead, source)
    assert (bulkhead.stats().in_flight, source.calls) == (0, [])  # nothing runs before the first pull
    assert await stream.next() == 1
    assert bulkhead.stats().in_flight == 1
    assert isinstance((await outcome(streamed(world, bulkhead, source)))[1], BulkheadFull)
    assert await stream.all() == [2]
    assert bulkhead.stats().in_flight == 0
    assert await stream.all() == []


def fail() -> NoReturn:
    """Raise an error that nothing else keeps."""
    raise Boom


@pytest.mark.parametrize("scripts", [[[2, 3]], [[fail], [2, 3]], [[1, fail], [2, 3]]])
def test_a_dropped_stream_releases_its_permit(threads: World, scripts: list[Any]) -> None:
    """Also if an attempt has failed before."""
    bulkhead, source = Bulkhead(1), Source(threads, *scripts)
    policy = Retry(2, on=Boom, backoff=[0]).wrap(bulkhead)

    def consume() -> None:
        stream = policy.streaming(resume={"after": abs}).call(source.function)
        while next(stream) != 2:
            pass
        assert bulkhead.stats().in_flight == 1

    with no_collector():
        consume()
        assert bulkhead.stats().in_flight == 0
        assert source.closed == len(scripts)


class Pages:
    """A source that is no generator, and awaits while it is closed."""

    def __init__(self, world: World, closed: list[Any]) -> None:
        self.world, self.closed = world, closed

    def __aiter__(self) -> Pages:
        return self

    async def __anext__(self) -> int:
        return 1

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):  # trio closes what was left behind in a scope that is cancelled
            await self.world.sleep(0)
        self.closed.append(self)


@pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")
@pytest.mark.parametrize("is_generator", [True, False])
async def test_the_event_loop_closes_the_source_of_a_stream_in_a_cycle(
    tasks_world: World, is_generator: bool, heard: list[Any]
) -> None:
    """While the collector closes the chain of policies, nothing can be awaited. The permit is released at once."""
    bulkhead, closed = Bulkhead(1), []

    async def generator() -> AsyncIterator[int]:
        async with aclosing(Pages(tasks_world, closed)) as pages:
            async for page in pages:
                yield page

    stream = bulkhead.streaming().acall(generator if is_generator else lambda: Pages(tasks_world, closed))
    assert await anext(stream) == 1
    cycle = [stream]
    cycle.append(cycle)  # type: ignore[arg-type]
    del stream, cycle
    gc.collect()
    assert bulkhead.stats().in_flight == 0
    with anyio.fail_after(5):
        while not closed or not any(isinstance(it, events.ExecutionFinished) for it in heard):
            await tasks_world.sleep(0)
    for _ in range(3):
        await tasks_world.sleep(0)
    assert len(closed) == 1


@pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")
async def test_the_event_loop_closes_a_dropped_stream_completely(tasks_world: World) -> None:
    """Also if its source awaits while it is closed, as an asynchronous generator may, and if an attempt has failed."""
    bulkhead, closed, failures = Bulkhead(1), [], [Boom()]

    async def source() -> AsyncIterator[int]:
        if failures:
            raise failures.pop()
        try:
            yield 1
        finally:
            with anyio.CancelScope(shield=True):  # trio closes what was left behind in a scope that is cancelled
                await tasks_world.sleep(0)
            closed.append(1)

    stream = Retry(2, on=Boom, backoff=[0]).wrap(bulkhead).streaming().call(source)
    assert await anext(stream) == 1
    with no_collector():
        del stream
        with anyio.fail_after(5):
            while not closed or bulkhead.stats().in_flight:
                await tasks_world.sleep(0)


def test_a_stream_may_be_dropped_after_its_event_loop_has_ended(tasks_world: World) -> None:
    """It releases its permit then, and reports no error."""
    bulkhead = Bulkhead(1)
    with no_collector():
        streams = [bulkhead.streaming().call(Source(tasks_world, [1, 2]).function)]
        assert tasks_world.run(lambda: anext_of(streams[0])) == 1
        streams.clear()
        assert bulkhead.stats().in_flight == 0


def test_a_queued_stream_whose_loop_has_ended_makes_room() -> None:
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


def test_one_bulkhead_limits_streams_of_all_runtimes() -> None:
    bulkhead, gauge = Bulkhead(2, queue=50), Gauge()

    async def operation(world: World, rng: random.Random) -> str:
        source = Source(world, [gauge.enter, 1, gauge.leave])
        assert await streamed(world, bulkhead, source).all() == [None, 1, None]
        return "read"

    assert Storm(operation, 100).run() == {"read": 100}
    assert 1 <= gauge.most <= 2
    assert gauge.inside == bulkhead.stats().in_flight == 0


@pytest.mark.parametrize("items", [0, 2])
async def test_a_stream_leaves_no_reference_cycle(world: World, items: int) -> None:
    watched = Watched()
    source = Source(world, [*range(items), watched.fail])
    with no_collector():
        try:
            await streamed(world, Pipeline(quick(2), CircuitBreaker(), Timeout(60)), source).all([])
        except Boom:
            pass
        assert watched.seen
        assert watched.alive == []


# --- contexts --------------------------------------------------------------------------------------


async def test_the_context_is_ambient_in_the_source_only(world: World) -> None:
    seen: list[Any] = []

    looking = Doing(after=lambda ctx: seen.append(current_context().operation))
    source = Source(world, [lambda: (current_context().attempt, current_context().operation)] * 3)
    stream = Consumed(world, looking.streaming().execute(source.function, Context(operation="list")))
    for _ in range(3):
        seen.append(await stream.next())
        assert current_context().operation is None
    await stream.close()
    assert seen == [(1, "list")] * 3 + [None]


async def test_the_calls_of_the_consumer_are_not_inside_the_stream(world: World, clock: FakeClock) -> None:
    """Only calls of the source belong to the admitted call of the breaker."""
    breaker = CircuitBreaker(1, open_for=10)
    await outcome(streamed(world, breaker, Source(world, [Boom()])))
    clock.advance(10)
    stream = streamed(world, breaker, Source(world, [1]))
    await stream.next()
    with pytest.raises(CircuitOpen):
        breaker.call(int)
    await stream.all()
    assert breaker.call(int) == 0


VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


@pytest.mark.parametrize("limits", [{}, {"first": 5}, {"idle": 5}], ids=repr)
async def test_a_context_variable_of_a_source_is_kept_between_pulls(world: World, limits: Any) -> None:
    """Also on worker threads; the consumer does not see it."""

    def sets() -> Iterator[int]:
        token = VARIABLE.set(1)
        try:
            for _ in range(3):
                yield VARIABLE.get()
        finally:
            VARIABLE.reset(token)
            restored.append(VARIABLE.get())

    async def sets_in_tasks() -> AsyncIterator[int]:
        with closing(sets()) as items:
            for item in items:
                yield item

    restored: list[int] = []
    for leaves in (False, True):
        stream = Consumed(world, quick().streaming(**limits).call(sets if world.blocking else sets_in_tasks))
        assert [await stream.next(), await stream.next()] == [1, 1]
        assert VARIABLE.get() == 0
        await (stream.close() if leaves else stream.all())
    assert restored == [0, 0]


@pytest.mark.parametrize("left", ["dropped", "referenced"])
def test_a_stream_that_is_left_open_at_the_end_of_its_event_loop_is_closed(tasks_world: World, left: str) -> None:
    """Like a generator: the policies release what they hold, and the source ends its `finally`."""
    bulkhead, kept, closed = Bulkhead(1), list[Any](), list[str]()

    async def source() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.append("closed")

    async def leave() -> None:
        stream = Pipeline(Timeout(60), bulkhead).streaming().call(source)
        if left == "referenced":
            kept.append(stream)
        async for _ in stream:
            break

    warns = tasks_world.name == "trio" and left == "dropped"  # as for any generator that is not closed
    with (
        no_collector(),
        pytest.warns(ResourceWarning, match="before it had been exhausted") if warns else nullcontext(),
    ):
        for times in (1, 2):
            anyio.run(leave, backend=tasks_world.name)
            assert (bulkhead.stats().in_flight, closed) == (0, ["closed"] * times)


def test_a_stream_is_read_without_an_event_loop_as_long_as_it_does_not_wait() -> None:
    """No loop has set the hooks of asynchronous generators, so none closes it."""

    async def source() -> AsyncIterator[int]:
        yield 1

    stream = Retry(1).streaming().call(source)
    with pytest.raises(StopIteration) as returned:
        stream.__anext__().send(None)
    assert returned.value.value == 1
