"""Events of a stream."""

from __future__ import annotations

from typing import Any

from resilience import Bulkhead, Context, Failure, Fallback, Pipeline, Success, events
from resilience.testing import recording, switched_off
from tests.conftest import Boom, FakeClock, World
from tests.functions import quick
from tests.streams.sources import Consumed, Source, outcome, streamed


async def test_events_and_context_report_the_attempts_and_items(
    world: World, clock: FakeClock, heard: list[Any]
) -> None:
    ctx = Context()
    source = Source(world, [Boom()], [lambda: clock.advance(3) or 1, 2])
    pipeline = Pipeline(quick(), name="shop")
    streaming = pipeline.streaming()
    stream = Consumed(world, (streaming.execute if world.blocking else streaming.aexecute)(source.function, ctx))
    assert await stream.all() == [1, 2]
    assert (ctx.attempts, [it.type for it in ctx.failures]) == (2, ["Boom"])
    opened = next(it for it in heard if isinstance(it, events.StreamOpened))
    finished = next(it for it in heard if isinstance(it, events.ExecutionFinished))
    assert (opened.policy, opened.attempt, finished.items, finished.attempts) == ("shop", 2, 2, 2)
    assert opened.elapsed == 3
    assert opened.operation == finished.operation == source.function.__qualname__
    assert finished.called is not None
    assert finished.called.function == source.function
    assert [it.attempt for it in heard if isinstance(it, events.CallFinished)] == []


async def test_an_execution_ends_as_its_consumer_sees_it(world: World, heard: list[Any]) -> None:
    """A consumer that leaves after an item sees a success."""
    failed = Boom()
    await outcome(streamed(world, quick(), Source(world, [1, failed])))
    assert await streamed(world, quick(), Source(world, [])).all() == []
    for pipeline, script in ((quick(), [1, 2]), (Fallback([1, 2]), [Boom()])):
        stream = streamed(world, pipeline, Source(world, script))
        assert await stream.next() == 1
        await stream.close()
    ends = [(it.outcome, it.items) for it in heard if isinstance(it, events.ExecutionFinished)]
    assert ends == [(Failure(failed), 1), (Success(None), 0), (Success(None), 1), (Success(None), 1)]


async def test_listeners_of_a_pipeline_get_each_event_once(world: World) -> None:
    """Those of a nested pipeline get its events only."""
    outer, inner = list[Any](), list[Any]()
    pipeline = Pipeline(Bulkhead(9), Pipeline(quick(), listeners=[inner.append]), listeners=[outer.append])
    assert await streamed(world, pipeline, Source(world, [Boom()], [1])).all() == [1]
    kinds = [events.AttemptFailed, events.RetryScheduled, events.StreamOpened]
    assert [type(it) for it in outer] == [*kinds, events.ExecutionFinished]
    assert [type(it) for it in inner] == kinds


async def test_each_attempt_is_reported_to_listeners_of_call_finished(world: World) -> None:
    with recording(events.CallFinished) as recorder:
        await streamed(world, quick(), Source(world, [Boom()], [1])).all()
    calls = [(it.attempt, type(it.outcome)) for it in recorder.of(events.CallFinished)]
    assert calls == [(1, Failure), (2, Success)]


async def test_switched_off_policies_have_no_effect(world: World) -> None:
    with switched_off():
        error = (await outcome(streamed(world, quick(), Source(world, [Boom()], [1]))))[1]
    assert isinstance(error, Boom)
