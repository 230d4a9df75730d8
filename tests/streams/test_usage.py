"""Sources of streams, how a stream is consumed, and misuse."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from resilience import Bulkhead, Cache, Context, Fallback, Hedge, Keyed, Pipeline, Policy, SingleFlight, Timeout
from resilience.errors import ArgumentMisuse, RaceMisuse, SuspensionMisuse
from resilience.work import Once
from tests.callers import Stopped, run_all
from tests.conftest import Boom, World
from tests.functions import quick
from tests.policies.blocks import entered
from tests.streams.sources import Consumed, Source, anext_of, outcome, paced, streamed


async def test_any_callable_that_returns_an_iterator_may_be_a_source(world: World) -> None:
    """A generator function, a function or coroutine function that returns an iterator, a method, a partial."""
    streaming = quick().streaming()

    class Client:
        @streaming
        async def task(self, count: int) -> AsyncIterator[int]:
            for number in range(count):
                yield number

        @streaming
        @staticmethod
        def thread(count: int) -> Iterator[int]:
            yield from range(count)

        def items(self, count: int) -> Iterator[int]:
            yield from range(count)

        async def opens(self, count: int) -> AsyncIterator[int]:
            return self(count)

        async def __call__(self, count: int) -> AsyncIterator[int]:
            for number in range(count):
                yield number

    client = Client()
    assert Client.task.__name__ == "task"
    if world.blocking:
        assert list(client.thread(2)) == list(streaming.call(range, 2)) == [0, 1]
        assert list(streaming.proxy(client, "items").items(3)) == [0, 1, 2]
        return
    for stream in (
        client.task(2),
        streaming.call(functools.partial(client, 2)),
        streaming.call(functools.partial(client.opens, 2)),
        streaming.acall(lambda: client.opens(2)),
    ):
        assert [it async for it in stream] == [0, 1]
    opener = streaming.proxy(client, "opens")
    assert [it async for it in opener.opens(2)] == [0, 1]  # type: ignore[attr-defined]
    assert [it async for it in await opener.opens(2)] == [0, 1]  # as without the proxy
    assert [it async for it in streaming.aproxy(client, "task").task(2)] == [0, 1]


class Manager:
    """A stream that has to be entered, as those of the helpers of some clients."""

    def __init__(self, source: Any, log: list[str]) -> None:
        self.source = source
        self.log = log

    def __enter__(self) -> Any:
        self.log.append("entered")
        if self.log.count("entered") == 1:
            raise Boom("reset")
        return self.source

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.log.append("left")

    async def __aenter__(self) -> Any:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.__exit__(*error)


@pytest.mark.parametrize("limits", [{}, {"first": 5.0, "idle": 5.0}], ids=["unlimited", "limited"])
@pytest.mark.parametrize("number", [1, 2])
async def test_a_context_manager_is_entered_for_its_items(world: World, number: int, limits: Any) -> None:
    """With the first pull of each attempt; and left at the end of the stream."""
    log: list[str] = []
    streaming = quick().streaming(**limits)
    call: Any = streaming.call if world.blocking else streaming.acall
    stream = Consumed(world, call(lambda: Manager(Source(world, [1, 2]).function(), log)))
    assert log == []
    if number == 1:
        assert await stream.next() == 1
        await stream.close()
    else:
        assert await stream.all() == [1, 2]
    assert log == ["entered", "entered", "left"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda it: list(it.call(lambda: 5)), "has no items"),
        (lambda it: list(it.call(lambda: Manager(5, ["entered"]))), "returned int, which has no items"),
        (lambda it: list(it.call(lambda: aclosing(paced()))), "use `.acall` or `.aexecute`"),
        (lambda it: asyncio.run(anext_of(it.acall(lambda: Manager(5, ["entered"])))), "use `.call` or `.execute`"),
        (lambda it: list(it.call(lambda: paced())), "use `.acall` or `.aexecute`"),
        (lambda it: list(it.call(lambda: anext_of(it))), "use `.acall` or `.aexecute`"),
        (lambda it: list(Fallback(paced(1)).streaming().call(lambda: [1 / 0])), "must have items"),
        (lambda it: list(it.call(lambda url: [url])), "cannot be called with these arguments"),
        (lambda it: it.acall(5), "runs callables"),
        (lambda it: it.proxy(object()), "name the methods"),
        (lambda it: it.call(iter, [1]).throw(Boom()), "close it"),
        (lambda it: asyncio.run(anext_of(it.acall(lambda: [1]))), "use `.call` or `.execute`"),
        (lambda it: asyncio.run(it.acall(paced, 1).athrow(Boom())), "close it"),
    ],
)
def test_misuse_is_refused(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(Fallback([]).wrap(quick()).streaming())


@pytest.mark.parametrize("method", ["__call__", "call", "acall", "execute", "aexecute"])
def test_a_function_that_cannot_be_resumed_is_refused_at_once(method: str) -> None:
    with pytest.raises(TypeError, match=r"paced\(.*'wrong'"):
        getattr(quick().streaming(resume={"wrong": len}), method)(paced)


async def test_a_block_closes_its_stream(world: World) -> None:
    """As for the streams of many clients, in whose place it may stand."""
    source, bulkhead = Source(world, [1, 2]), Bulkhead(1)
    stream = streamed(world, bulkhead, source)
    async with entered(world, stream.stream) as items:
        assert items is stream.stream
        assert await stream.next() == 1
    assert (source.closed, bulkhead.stats().in_flight) == (1, 0)


@pytest.mark.parametrize("value", [None, 5])
async def test_no_value_can_be_sent_and_the_stream_goes_on(world: World, value: Any) -> None:
    """Not even None, which generators take for `next`: there is one way to request an item."""
    stream = streamed(world, quick(), Source(world, [1, 2]))
    assert await stream.next() == 1
    with pytest.raises(TypeError, match="takes no value"):
        await world.result(stream.stream.send(value) if world.blocking else stream.stream.asend(value))
    assert await stream.all() == [2]


def test_a_policy_that_waits_for_an_event_loop_is_named_in_blocking_code() -> None:
    class Waits(Policy[Any]):
        async def around(self, call: Any, ctx: Context) -> Any:
            await asyncio.sleep(0)

    with pytest.raises(SuspensionMisuse, match="Waits suspended in blocking code"):
        next(Fallback([]).wrap(Waits()).streaming().call(lambda: [1]))


async def test_a_policy_cannot_race_the_calls_of_a_stream(world: World) -> None:
    class Races(Policy[Any]):
        races = True

        async def around(self, call: Any, ctx: Context) -> Any:
            plan: Any = None
            await ctx.runtime.race(call, ctx, plan)

    got, error = await outcome(streamed(world, Races(), Source(world, [1])))
    assert got == []
    assert "several times at once" in str(error)


@pytest.mark.parametrize(
    "policy",
    [Cache(1), SingleFlight(), Hedge(0.1), Once({}, key=len), Pipeline(quick(), Cache(1))],
    ids=lambda it: it.name,
)
def test_policies_that_share_results_or_race_calls_refuse_streaming(policy: Any) -> None:
    with pytest.raises(TypeError, match="cannot be used around a stream"):
        policy.streaming()


@pytest.mark.parametrize("inner", [Cache(1), SingleFlight(), Hedge(1)], ids=str)
async def test_a_keyed_policy_that_chooses_a_cache_or_a_race_refuses_a_stream(world: World, inner: Policy[Any]) -> None:
    """The source is not opened, and nothing is kept of the call."""
    source = Source(world, [1])
    for _ in range(2):
        got, error = await outcome(streamed(world, Keyed(lambda key: inner, lambda: 1), source))
        assert (got, type(error), source.calls) == ([], RaceMisuse if isinstance(inner, Hedge) else ArgumentMisuse, [])


def test_repr_shows_the_limits() -> None:
    assert repr(Timeout(5).streaming(first=2, idle=1)) == "Timeout(seconds=5.0).streaming(first=2, idle=1)"
    assert "resume={'after':" in repr(Timeout(5).streaming(resume={"after": len}))


async def test_two_tasks_cannot_pull_at_the_same_time(in_asyncio: World) -> None:
    bulkhead = Bulkhead(1)
    for streaming in (bulkhead.streaming(), bulkhead.streaming(idle=5)):
        stream = streaming.call(paced, 0.01, 0.02)
        for pause in (0.01, 0.02):
            pull = asyncio.create_task(anext_of(stream))
            await asyncio.sleep(0)
            for other in (anext_of(stream), stream.aclose()):
                with pytest.raises(RuntimeError, match="waited for"):
                    await other
            assert await pull == pause
        await stream.aclose()
    assert bulkhead.stats().in_flight == 0


async def test_a_source_cannot_pull_its_own_stream(tasks_world: World) -> None:
    async def items() -> AsyncIterator[int]:
        for number in range(3):
            for other in (anext_of(stream), stream.aclose()):
                with pytest.raises(RuntimeError, match="waited for"):
                    await other
            yield number

    stream = quick().streaming().call(items)
    assert [it async for it in stream] == [0, 1, 2]


def test_two_threads_cannot_pull_at_the_same_time(threads: World) -> None:
    """Neither the first item nor a later one: the source is in one thread at a time. Nor can they close it."""
    entered, may_continue = threading.Semaphore(0), threading.Semaphore(0)

    def items() -> Iterator[int]:
        for number in range(2):
            entered.release()
            assert may_continue.acquire(timeout=10)
            yield number

    stream = quick().streaming().call(items)
    got: list[int] = []

    def pull_meanwhile() -> None:
        assert entered.acquire(timeout=10)
        with pytest.raises(ValueError, match="already executing"):  # as of a generator
            next(stream)
        with pytest.raises(RuntimeError, match="waited for"):
            stream.close()
        may_continue.release()

    for _ in range(2):
        run_all([lambda: got.append(next(stream))], pull_meanwhile)
    assert got == [0, 1]


def pull_from(stream: Any, got: list[Any]) -> None:
    try:
        got.append(next(stream))
    except RuntimeError as error:
        got.append(str(error))


def test_two_threads_cannot_both_begin_a_stream() -> None:
    """The second one is refused even if it came before the first one had a generator."""

    def items() -> Iterator[int]:
        second.go_on()  # until it is refused
        yield 1

    stream, got = quick().streaming().call(items), list[Any]()
    second = Stopped(lambda: pull_from(stream, got), at="_generator")
    pull_from(stream, got)
    assert got == ["an item of this stream is being waited for already", 1]


@pytest.mark.parametrize("begun", [True, False])
def test_a_thread_cannot_begin_a_pull_while_another_one_closes_the_stream(begun: bool) -> None:
    bulkhead = Bulkhead(1)
    stream, got = bulkhead.streaming().call(range, 3), list[Any]()
    if begun:
        next(stream)
    closing = Stopped(stream.close, at="mark_closed")
    pull_from(stream, got)
    closing.go_on()
    assert got == ["an item of this stream is being waited for already"]
    assert next(stream, None) is None
    assert bulkhead.stats().in_flight == 0


async def test_pulls_may_be_created_before_they_are_awaited(tasks_world: World) -> None:
    for ends in (True, False):
        stream = quick().streaming().call(Source(tasks_world, [1, 2, 3]).function)
        assert await anext(stream, None) == 1
        made = [stream.__anext__() for _ in range(4)]
        if not ends:
            await stream.aclose()
        assert [await anext_or_none(it) for it in made] == ([2, 3, None, None] if ends else [None] * 4)


async def anext_or_none(pull: Any) -> Any:
    try:
        return await pull
    except StopAsyncIteration:
        return None


async def test_a_waiting_pull_may_be_closed(in_asyncio: World) -> None:
    """As that of a task whose event loop has ended: the source ends at its wait, and permits are released."""
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
