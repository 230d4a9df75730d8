"""Limits of a stream: `first`, `idle`, a Timeout around it, a deadline."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from resilience import (
    Bulkhead,
    BulkheadFull,
    Context,
    Fallback,
    Pipeline,
    Policy,
    Retry,
    Timeout,
    TimeoutExceeded,
    current_context,
    deadline,
)
from tests.conftest import Boom, FakeClock, Virtual, World
from tests.custom import Doing, Sleeping
from tests.functions import quick
from tests.streams.sources import Consumed, Source, outcome, paced, streamed


class Sleeps(Policy[Any]):
    """Waits for a minute, and answers."""

    async def around(self, call: Any, ctx: Context) -> Any:
        await ctx.sleep(60)
        return [0]


async def test_first_and_idle_each_limit_one_pull(in_virtual_asyncio: Virtual) -> None:
    streaming = Pipeline(Timeout(500), quick(2, on=TimeoutExceeded)).streaming(first=5.0, idle=1.0)
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


async def test_first_includes_the_opening_of_the_source(in_virtual_asyncio: Virtual) -> None:
    async def opens() -> AsyncIterator[float]:
        await asyncio.sleep(3)
        return paced(3)

    with pytest.raises(TimeoutExceeded, match="no item within 5 s"):
        await anext(quick().streaming(first=5.0).call(opens))
    began = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutExceeded, match="no item within 2 s"):
        await anext(quick().streaming(first=2.0).call(opens))
    assert asyncio.get_running_loop().time() - began == pytest.approx(2)


async def test_a_cooperative_timeout_does_not_warn_of_the_consumers_time(world: World, clock: FakeClock) -> None:
    stream = streamed(world, Timeout(2, cooperative=True), Source(world, [1, 2]))
    assert await stream.next() == 1
    clock.advance(9)
    assert await stream.all() == [2]


async def test_a_timeout_cuts_off_a_pull_or_a_wait_but_not_the_consumer(in_virtual_asyncio: Virtual) -> None:
    async def boom() -> AsyncIterator[int]:
        raise Boom
        yield 1

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


async def test_what_ends_at_the_instant_of_a_timeout_belongs_to_the_timeout(in_virtual_asyncio: Virtual) -> None:
    """A limit of the stream, a place in a queue, or the wait of a policy."""
    bulkhead, total = Bulkhead(1, queue=1, max_wait=60), Timeout(60, name="total")
    for streaming in (total.streaming(first=60.0), total.wrap(Sleeps()).streaming(), total.wrap(bulkhead).streaming()):
        with bulkhead.slot(), pytest.raises(TimeoutExceeded) as caught:
            await anext(streaming.call(paced, 100))
        assert caught.value.policy == "total"


@pytest.mark.parametrize("limit", [5, None])
async def test_a_stream_in_a_queue_keeps_its_place_and_gets_the_next_permit(
    in_virtual_asyncio: Virtual, limit: float | None
) -> None:
    bulkhead = Bulkhead(1, queue=1)
    streaming = (bulkhead if limit is None else Timeout(limit).wrap(bulkhead)).streaming()
    with bulkhead.slot():
        first = asyncio.ensure_future(anext(streaming.call(paced, 1)))
        await asyncio.sleep(0.5)
        with pytest.raises(BulkheadFull, match="queue"):
            await bulkhead.acall(asyncio.sleep, 0)
    assert await asyncio.wait_for(first, 60) == 1


def test_a_thread_abandons_a_pull_at_its_limit(threads: World, clock: FakeClock) -> None:
    may_continue = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        clock.advance(5)
        may_continue.wait(20)
        yield 2

    limited = {"no result within 5 s": Timeout(5).streaming(), "no item within 5 s": quick(1).streaming(idle=5)}
    for message, streaming in limited.items():
        stream = streaming.call(source)
        assert next(stream) == 1
        with pytest.raises(TimeoutExceeded, match=message):
            next(stream)
        assert list(stream) == []
    may_continue.set()


def test_a_thread_waits_in_a_queue_until_the_outer_limit(threads: World) -> None:
    bulkhead = Bulkhead(1, queue=1)
    with bulkhead.slot(), pytest.raises(TimeoutExceeded):
        next(Pipeline(Timeout(0.02), Fallback([0]), bulkhead).streaming().call(lambda: [1]))
    assert next(Pipeline(Timeout(5), bulkhead).streaming().call(lambda: [1])) == 1
    patient = Bulkhead(1, queue=1, max_wait=0.01)
    for policy in (Pipeline(Timeout(5), patient), patient):
        with patient.slot(), pytest.raises(BulkheadFull, match="in the queue"):
            next(policy.streaming().call(lambda: [1]))


async def test_a_blocking_stream_in_a_task_ends_by_itself_at_the_limit_of_the_task(in_asyncio: World) -> None:
    """The timer of the task cannot cut it off, and is not taken for one that can."""

    def items() -> Iterator[int]:
        yield 1
        time.sleep(0.03)
        yield 2

    async def fn() -> list[int]:
        return list(Timeout(60).streaming().call(items))

    with pytest.warns(RuntimeWarning, match="stops the event loop"), pytest.raises(TimeoutExceeded):
        await Timeout(0.02).acall(fn)


def test_the_source_of_an_abandoned_pull_is_closed(threads: World, caplog: pytest.LogCaptureFixture) -> None:
    """So that a connection releases the thread that reads from it, also in a generator."""

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

    class Response(Connection):
        def __iter__(self) -> Iterator[int]:
            assert self.closed.wait(10)
            yield 1

    opened: list[Connection] = []
    for connection in (Connection(), Response()):
        with pytest.raises(TimeoutExceeded):
            next(quick(1).streaming(first=0.05).call(lambda it=connection: opened.append(it) or it))
        # By the worker, if it was late to open it; if it has begun after the limit, it opens nothing.
        assert connection.closed.wait(5) or connection not in opened
    assert caplog.records == []


async def test_a_cooperative_timeout_only_sets_the_deadline(world: World) -> None:
    source = Source(world, [lambda: current_context().remaining()])
    [left] = await streamed(world, Timeout(100, cooperative=True), source).all()
    assert 90 < left <= 100


@pytest.mark.parametrize("waits", [True, False])
async def test_no_source_is_opened_at_or_after_the_limit(world: World, clock: FakeClock, waits: bool) -> None:
    """Nor is there a wait."""
    opened: list[int] = []
    slow = Doing(lambda ctx: clock.advance(20)).wrap(Sleeping(60 if waits else 0))
    streaming = Timeout(20).wrap(slow).streaming()
    stream = (streaming.call if world.blocking else streaming.acall)(lambda: opened.append(1))  # type: ignore[arg-type]
    _, error = await outcome(Consumed(world, stream))
    assert isinstance(error, TimeoutExceeded)
    assert opened == []
    assert sum(clock.sleeps) == 0


async def test_a_stream_after_the_deadline_is_a_timeout(world: World) -> None:
    with deadline(0):
        got, error = await outcome(streamed(world, quick(), Source(world, [1])))
    assert got == []
    assert isinstance(error, TimeoutExceeded)


async def test_an_error_at_the_instant_of_a_limit_is_that_of_the_limit(tasks_world: World, clock: FakeClock) -> None:
    """A call in the source may find no time left before the limit fires."""
    source = Source(tasks_world, [lambda: (clock.advance(30), current_context().check())])
    got, error = await outcome(streamed(tasks_world, Timeout(20, name="total").wrap(Fallback([0])), source))
    assert got == []
    assert isinstance(error, TimeoutExceeded)
    assert error.policy == "total"
