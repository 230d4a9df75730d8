"""`each`: a bounded number of calls at the same time, which reads no more items than it has room for."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import count
from operator import itemgetter
from typing import Any

import anyio
import pytest

from resilience import Cache, Failure, Keyed, Policy, Retry, SingleFlight, Success, current_context, deadline
from resilience.clock import clock
from resilience.errors import Misuse
from resilience.work import each
from tests.callers import wait_until
from tests.conftest import Boom, Script, Watched, World, no_collector
from tests.contention.beside import until
from tests.contention.storm import Gauge
from tests.functions import fail_on_the_way_out, quick, raising
from tests.policies.blocks import entered
from tests.policies.retries import Response
from tests.streams.sources import Consumed
from tests.versions import is_installed


async def read(world: World, block: Any, into: list[Any]) -> None:
    """Enter the block, and add its pairs of item and outcome to the list, one by one."""
    async with entered(world, block) as pairs:
        await Consumed(world, pairs).all(into)


async def outcomes_of(world: World, function: Any, items: Any, policy: Any = None, **settings: Any) -> list[Any]:
    """Return all pairs of item and outcome."""
    pairs: list[Any] = []
    await read(world, each(policy or Retry(1), world.native(function), items, **settings), pairs)
    return pairs


async def same(number: int) -> int:
    return number


@pytest.fixture(params=[False, True], ids=["unordered", "ordered"])
def ordered(request: pytest.FixtureRequest) -> Any:
    """Whether the outcomes come in the order of the items."""
    return request.param


async def test_each_item_has_its_outcome(world: World, ordered: bool) -> None:
    failures = {number: Boom(number) for number in range(0, 20, 3)}

    async def work(number: int) -> int:
        if number in failures:
            raise failures[number]
        return number * 2

    pairs = await outcomes_of(world, work, range(20), limit=4, ordered=ordered)
    expected = [(it, Failure(failures[it]) if it in failures else Success(it * 2)) for it in range(20)]
    assert (pairs if ordered else sorted(pairs, key=itemgetter(0))) == expected


async def test_items_may_come_from_an_async_iterable(tasks_world: World) -> None:
    class Source:
        async def __aiter__(self) -> AsyncIterator[int]:
            for number in range(3):
                await anyio.sleep(0)
                yield number

    for items in (Source(), aiter(Source())):
        pairs = await outcomes_of(tasks_world, same, items, limit=2, ordered=True)
        assert pairs == [(number, Success(number)) for number in range(3)]


async def test_without_items_there_are_no_outcomes(world: World) -> None:
    assert await outcomes_of(world, str, [], limit=1) == []


async def test_the_policy_applies_to_each_call(world: World) -> None:
    script = Script(Boom(), Boom(), "fine")
    assert await outcomes_of(world, script.function(), [7], quick(5), limit=1) == [(7, Success("fine"))]
    assert script.contexts == [7, 7, 7]  # the argument of each call


async def test_the_deadline_of_the_block_applies_to_each_call(world: World) -> None:
    async def work(number: int) -> float:
        return current_context().remaining()

    with deadline(100):
        pairs = await outcomes_of(world, work, range(3), limit=2)
    assert all(90 < outcome.unwrap() <= 100 for _, outcome in pairs)


async def test_calls_and_read_items_are_bounded(world: World, ordered: bool) -> None:
    read_items, gauge = [], Gauge()

    def source() -> Iterator[int]:
        for number in range(1000):
            read_items.append(number)
            yield number

    async def work(number: int) -> None:
        gauge.enter()
        try:
            await world.sleep(0.0005)
        finally:
            gauge.leave()

    class Taken(list[Any]):
        def append(self, pair: Any) -> None:
            super().append(pair)
            assert len(read_items) <= len(self) + 10
            if len(self) == 50:
                raise Boom

    with pytest.raises(Boom):
        await read(world, each(Retry(1), world.native(work), source(), limit=5, ordered=ordered), Taken())
    assert 1 < gauge.most <= 5
    assert gauge.inside == 0


async def test_twice_the_limit_is_read_while_no_outcome_is_taken(tasks_world: World, ordered: bool) -> None:
    read_items: list[int] = []
    may_end = anyio.Event()

    def source() -> Iterator[int]:
        for number in range(100):
            read_items.append(number)
            if number == 2:  # while two calls run, the next item waits
                may_end.set()
            yield number

    async def work(number: int) -> None:
        await may_end.wait()

    async with each(Retry(1), work, source(), limit=2, ordered=ordered) as outcomes:
        await anyio.wait_all_tasks_blocked()
        assert len(read_items) == 4
        await anext(outcomes)
        await anyio.wait_all_tasks_blocked()
        assert len(read_items) == 5


def test_twice_the_limit_is_read_while_no_outcome_is_ready_in_threads(ordered: bool) -> None:
    read_items: list[int] = []
    may_end = threading.Event()

    def source() -> Iterator[int]:
        for number in range(100):
            read_items.append(number)
            if number == 3:
                may_end.set()
            yield number

    def work(number: int) -> bool:
        return may_end.wait(5)

    with each(Retry(1), work, source(), limit=2, ordered=ordered) as outcomes:
        assert next(outcomes)[1] == Success(True)
        assert len(read_items) == 4


async def test_the_wait_for_the_next_outcome_is_idle(tasks_world: World) -> None:
    may_end = anyio.Event()

    async def work(number: int) -> None:
        if number:
            await may_end.wait()

    async with each(Retry(1), work, range(2), limit=1) as outcomes, anyio.create_task_group() as group:
        await anext(outcomes)
        group.start_soon(outcomes.__anext__)
        with anyio.fail_after(5):
            await anyio.wait_all_tasks_blocked()
        may_end.set()


def test_items_that_have_ended_are_not_asked_again_in_threads() -> None:
    class Source(list[int]):
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            self.append(len(self))
            if len(self) > 1:
                raise StopIteration
            return self[-1]

    items = Source()
    with each(Retry(1), str, items, limit=2) as outcomes:
        assert list(outcomes) == [(0, Success("0"))]
    assert items == [0, 1]


def test_a_finished_outcome_is_returned_before_a_slow_item_is_read_in_threads(ordered: bool) -> None:
    may_read = threading.Event()

    def source() -> Iterator[int]:
        yield 0
        wait_until(outcomes._has_outcome)
        yield 1
        assert may_read.wait(5), "it was read first"
        yield 2

    outcomes: Any
    with each(Retry(1), str, source(), limit=2, ordered=ordered) as outcomes:
        assert next(outcomes)[0] in {0, 1}
        may_read.set()
        assert len(list(outcomes)) == 2


@pytest.mark.parametrize("leave", ["break", "raise", "cancel"])
async def test_leaving_the_block_cancels_the_calls_and_waits_for_them(tasks_world: World, leave: str) -> None:
    """The block's own error is not in an exception group. The generator of the items is closed."""
    begun, ended, closed = list[int](), list[int](), list[bool]()

    async def source() -> AsyncIterator[int]:
        try:
            for number in range(100):
                yield number
        finally:
            closed.append(True)

    async def work(number: int) -> int:
        begun.append(number)
        try:
            if number:
                await anyio.sleep(60)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.001)
            ended.append(number)
        return number

    async def block() -> None:
        async with each(Retry(1), work, source(), limit=4) as outcomes:
            async for _ in outcomes:
                if leave == "break":
                    break
                if leave == "raise":
                    raise Boom("of the block")
                scope.cancel()
                await anyio.sleep(60)

    with pytest.raises(Boom, match="of the block") if leave == "raise" else nullcontext():
        with anyio.CancelScope() as scope:
            await block()
        assert scope.cancelled_caught is (leave == "cancel")
    assert 0 in ended
    assert sorted(ended) == sorted(begun)
    assert closed == [True]


@pytest.mark.parametrize(
    ("make", "closes"),
    [
        (Retry, True),
        (lambda: Cache(60), False),
        (lambda: Retry().wrap(SingleFlight(key=int)), False),
        (lambda: Keyed(lambda number: Cache(60), key=int), False),
    ],
    ids=["retry", "cache", "flight", "keyed"],
)
async def test_results_that_are_not_delivered_are_closed(
    world: World, ordered: bool, make: Callable[[], Policy[Any]], closes: bool
) -> None:
    """As are those of calls that end while the block ends. But other callers may have what a cache returns."""
    made: list[Response] = []

    async def fetch(number: int) -> Response:
        made.append(Response())
        return made[-1]

    async with entered(world, each(make(), world.native(fetch), range(20), limit=3, ordered=ordered)) as pairs:
        _, outcome = await Consumed(world, pairs).next()
        await until(world, lambda: len(made) >= 3)
    assert [it.closed for it in made] == [int(closes and it is not outcome.unwrap()) for it in made]


async def test_a_result_is_closed_although_closing_another_one_is_cancelled(tasks_world: World) -> None:
    class Slow(Response):
        async def aclose(self) -> None:
            self.close()
            scope.cancel()
            await anyio.sleep(60)

    made = [Slow() for _ in range(3)]

    async def fetch(response: Slow) -> Slow:
        return response

    with anyio.CancelScope() as scope:
        async with each(Retry(1), fetch, made, limit=3):
            await anyio.wait_all_tasks_blocked()
    assert scope.cancelled_caught
    assert [it.closed for it in made] == [1, 1, 1]


async def test_no_call_begins_after_the_block_was_left(in_asyncio: World) -> None:
    """Although the last outcome has made room. Trio may schedule the reader first."""
    begun: list[int] = []

    async def work(number: int) -> None:
        begun.append(number)

    async with each(Retry(1), work, range(100), limit=1, ordered=True) as outcomes:
        async for _ in outcomes:
            break
    assert begun == [0]


@pytest.mark.parametrize("make", [Boom, Misuse])
@pytest.mark.parametrize("items", [2, 4])
async def test_after_the_block_no_outcome_is_delivered_and_none_is_kept(
    tasks_world: World, ordered: bool, items: int, make: Any
) -> None:
    """Whether the items have ended with an error, or are being read."""
    if tasks_world.name == "trio" and is_installed("trio<0.28"):
        pytest.skip("trio keeps the errors of tasks in a cycle")
    watched = Watched()

    def source() -> Iterator[int]:
        yield from range(items)
        watched.fail(make)

    async def work(number: int) -> None:
        watched.fail(make)

    with no_collector():
        async with each(Retry(1), work, source(), limit=2, ordered=ordered) as outcomes:
            await anyio.wait_all_tasks_blocked()
        assert [it async for it in outcomes] == []
        for _ in range(2):
            await anyio.lowlevel.checkpoint()
        assert watched.seen
        assert watched.alive == []


async def test_an_exit_exception_of_a_task_is_raised_by_a_block_that_does_not_take_it(tasks_world: World) -> None:
    async def work(number: int) -> None:
        raise Stop

    with pytest.raises(BaseExceptionGroup) as caught:
        async with each(Retry(1), work, [1], limit=1):
            await anyio.sleep(5)
    assert caught.group_contains(Stop)


def test_a_call_that_waits_for_a_thread_does_not_begin_after_the_block() -> None:
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        wait_until(lambda: outcomes._read == 4 or outcomes._is_over)
        if number:
            wait_until(lambda: outcomes._is_over)

    outcomes: Any
    with each(Retry(1), work, range(9), limit=2) as outcomes:
        next(outcomes)
        wait_until(lambda: len(begun) == 3)
    assert sorted(begun) == [0, 1, 2]


def test_leaving_the_block_waits_for_threads_and_begins_no_other_call() -> None:
    begun, ended = [], []

    def work(number: int) -> None:
        begun.append(number)
        time.sleep(0.01)
        ended.append(number)

    with pytest.raises(Boom), each(Retry(1), work, range(100), limit=3, ordered=True) as outcomes:
        next(outcomes)
        raise Boom
    assert sorted(begun) == sorted(ended)
    assert len(begun) <= 6
    assert list(outcomes) == []


def test_an_interrupt_ends_the_wait_for_running_calls(ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results that are there are closed."""
    ready, may_end, made = threading.Event(), threading.Event(), list[Response]()

    def fetch(number: int) -> Response:
        if number == 2:
            ready.set()
            may_end.wait(10)
        made.append(Response())
        return made[-1]

    def interrupt(lock: Any, seconds: float | None) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), each(Retry(1), fetch, range(3), limit=3, ordered=ordered) as outcomes:
        next(outcomes)
        wait_until(lambda: ready.is_set() and len(made) == 2)
        monkeypatch.setattr(clock, "wait", interrupt)
    may_end.set()
    assert sorted(it.closed for it in made[:2]) == [0, 1]


async def test_an_error_of_the_items_is_raised_after_all_outcomes(world: World, ordered: bool) -> None:
    """No outcome of an item that was read is lost, and no other item is read, even if the iterator could continue.

    The error is freed with its last reference.
    """
    watched, read_items, seen = Watched(), list[int](), list[Any]()

    class Source:
        def __iter__(self) -> Source:
            return self

        def __next__(self) -> int:
            read_items.append(len(read_items))
            if len(read_items) == 4:
                watched.fail()
            if len(read_items) == 9:
                raise StopIteration
            return read_items[-1]

    async def work(number: int) -> int:
        await world.sleep(0.01)
        return number

    with no_collector():
        block = each(Retry(1), world.native(work), Source(), limit=2, ordered=ordered)
        try:
            await read(world, block, seen)
        except Boom:
            seen.append(("raised", None))
        del block
        if not world.blocking:
            await anyio.lowlevel.checkpoint()
        assert watched.seen
        assert watched.alive == []
    items = [item for item, _ in seen]
    assert (sorted(items[:3]), items[3:], len(read_items)) == ([0, 1, 2], ["raised"], 4)


async def test_a_call_with_wrong_arguments_is_an_error_and_no_outcome(world: World, ordered: bool) -> None:
    with pytest.raises(TypeError, match="cannot be called with these arguments"):
        await outcomes_of(world, lambda number, other: None, range(5), limit=2, ordered=ordered)


async def test_an_error_is_freed_with_its_outcome(world: World, ordered: bool) -> None:
    watched = Watched()

    with no_collector():
        outcomes = await outcomes_of(world, watched.fn, range(3), limit=2, ordered=ordered)
        assert [type(outcome) for _, outcome in outcomes] == [Failure] * 3
        del outcomes
        if not world.blocking:
            await anyio.lowlevel.checkpoint()
        assert watched.alive == []


async def test_progress_is_called_for_each_outcome(world: World) -> None:
    counts: list[int] = []

    await outcomes_of(world, same, range(5), limit=2, progress=counts.append)
    assert counts == [1] * 5


async def test_an_error_of_progress_is_logged_and_loses_no_outcome(
    world: World, ordered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    progress = raising(Boom("no terminal"))
    outcomes = await outcomes_of(world, same, range(3), limit=2, ordered=ordered, progress=progress)
    assert sorted(item for item, _ in outcomes) == [0, 1, 2]
    assert [it.getMessage() for it in caplog.records] == ["progress raised; it changes nothing"] * 3


@pytest.mark.parametrize("start", [threading.Thread.start, lambda thread: None], ids=["has started", "never starts"])
@pytest.mark.parametrize("threads", [0, 1])
def test_if_no_more_threads_can_start_the_others_make_the_calls(
    threads: int, start: Callable[[threading.Thread], None], ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that fails may have started nevertheless. Without any thread, the error is raised."""
    names: set[str] = set()
    real, started = threading.Thread.start, count()

    def fail(thread: threading.Thread) -> None:
        if next(started) < threads:
            real(thread)
        else:
            start(thread)
            raise RuntimeError("can't start new thread")

    def work(item: str) -> str:
        names.add(threading.current_thread().name)
        return item

    monkeypatch.setattr(threading.Thread, "start", fail)
    items, pairs = iter("abc"), []
    with each(Retry(1), work, items, limit=2, ordered=ordered) as outcomes, suppress(RuntimeError):
        pairs += list(outcomes)
    assert sorted(item for item, _ in pairs) == (["a", "b", "c"] if names else [])
    assert list(items) == ([] if names else ["b", "c"])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("nth", "items"), [(1, 1), (1, 9), (2, 9)])
def test_an_interrupt_as_a_thread_starts_loses_no_outcome(
    nth: int, items: int, when: str, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it starts so late that another one has replaced it, it makes no call."""
    gauge, start, started = Gauge(), threading.Thread.start, list[threading.Thread]()

    def interrupt(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) != nth or when == "after":
            start(thread)
        if len(started) == nth:
            raise KeyboardInterrupt

    def work(number: int) -> None:
        gauge.enter()
        time.sleep(0.001)
        gauge.leave()

    monkeypatch.setattr(threading.Thread, "start", interrupt)
    numbers: list[int] = []
    with each(Retry(1), work, range(items), limit=2, ordered=ordered) as outcomes:
        with pytest.raises(KeyboardInterrupt):
            numbers.extend(number for number, _ in outcomes)
        if when == "before":
            start(started[nth - 1])
        numbers.extend(number for number, _ in outcomes)
    assert sorted(numbers) == [*range(items)]
    assert gauge.most <= 2


def test_many_items_are_worked_on_in_few_threads() -> None:
    def work(number: int) -> tuple[int, str]:
        return number, threading.current_thread().name

    seen: set[int] = set()
    with each(Retry(1), work, range(5000), limit=8) as outcomes:
        for item, outcome in outcomes:
            number, thread = outcome.unwrap()
            assert number == item
            assert thread.startswith("resilience-each")
            seen.add(item)
    assert len(seen) == 5000
    wait_until(lambda: not any(it.name.startswith("resilience-each") for it in threading.enumerate()))


async def test_an_item_is_freed_once_it_is_delivered(world: World, ordered: bool) -> None:
    class Item: ...

    alive: weakref.WeakSet[Item] = weakref.WeakSet()

    def source() -> Iterator[Item]:
        for _ in range(20):
            item = Item()
            alive.add(item)
            yield item
            del item

    async def work(item: Item) -> None: ...

    async with entered(world, each(Retry(1), world.native(work), source(), limit=2, ordered=ordered)) as pairs:
        consumed = Consumed(world, pairs)
        for _ in range(20):
            await consumed.next()
        await until(world, lambda: not alive)


def test_async_items_or_an_async_function_in_a_blocking_block_are_refused() -> None:
    async def items() -> AsyncIterator[int]:
        yield 1

    blocks: list[Any] = [
        each(Retry(), str, items(), limit=1),  # type: ignore[call-overload]
        each(Retry(), same, [1], limit=1),
    ]
    for block in blocks:
        with pytest.raises(TypeError, match="async with"), block:
            pass
    block = each(Retry(), lambda item: same(item), [1], limit=1)
    with block as outcomes, pytest.raises(TypeError, match="<lambda> returned an awaitable"):
        next(outcomes)


def test_a_block_that_is_not_entered_cannot_be_iterated_over() -> None:
    block: Any = each(Retry(), str, [1], limit=1)
    with pytest.raises(TypeError, match=r"with each\(\.\.\.\) as outcomes"):
        list(block)
    with pytest.raises(TypeError, match=r"with each\(\.\.\.\) as outcomes"):
        aiter(block)


async def test_a_cancelled_wait_for_an_outcome_loses_none(tasks_world: World, ordered: bool) -> None:
    async def work(number: int) -> int:
        await anyio.sleep(0.002)
        return number

    seen: list[int] = []
    tries = count()
    async with each(Retry(1), work, range(30), limit=3, ordered=ordered) as outcomes:
        while len(seen) < 30:
            with anyio.move_on_after(0.0005 * (next(tries) % 6)):
                async for item, _ in outcomes:
                    seen.append(item)
            await anyio.sleep(0)
    assert sorted(seen) == [*range(30)]


@pytest.mark.parametrize("steps", range(6))
async def test_an_outcome_during_a_cancellation_is_not_lost(in_asyncio: World, ordered: bool, steps: int) -> None:
    """In whichever step of the loop the task is cancelled."""
    may_end = asyncio.Event()

    async def work(number: int) -> None:
        await may_end.wait()

    async with asyncio.timeout(5), each(Retry(1), work, [7], limit=1, ordered=ordered) as outcomes:
        task = asyncio.ensure_future(anext(outcomes))
        for _ in range(10):  # until both wait
            await asyncio.sleep(0)
        may_end.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        got = [task.result()] if not task.cancelled() else [it async for it in outcomes]
    assert got == [(7, Success(None))]


async def test_the_cancellation_of_a_future_that_a_call_awaits_is_raised(in_asyncio: World, ordered: bool) -> None:
    """Other code has cancelled it: that is no outcome."""
    cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    seen: list[int] = []

    async def work(number: int) -> None:
        if number == 2:
            await cancelled

    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            async with each(Retry(1), work, range(5), limit=1, ordered=ordered) as outcomes:
                async for number, _ in outcomes:
                    seen.append(number)
    assert seen == [0, 1]


async def test_a_shielded_loop_does_not_wait_for_cancelled_calls(tasks_world: World, ordered: bool) -> None:
    seen: list[int] = []

    async def work(number: int) -> None:
        await anyio.sleep(60 if number else 0)

    with anyio.CancelScope() as scope:
        async with each(Retry(1), work, range(3), limit=2, ordered=ordered) as outcomes:
            with anyio.CancelScope(shield=True), anyio.fail_after(5):
                async for number, _ in outcomes:
                    seen.append(number)
                    scope.cancel()
    assert scope.cancelled_caught
    assert seen == [0]


async def test_a_block_in_use_cannot_be_entered_again(world: World) -> None:
    block = each(Retry(1), world.native(same), [1, 2], limit=1)
    for _ in range(2):
        async with entered(world, block) as outcomes:
            with pytest.raises(RuntimeError, match="in use: open another one"):
                async with entered(world, block):
                    pass
            assert [number for number, _ in await Consumed(world, outcomes).all()] == [1, 2]


class Stop(BaseException):
    """As `SystemExit`, of which there are no weak references."""


def test_an_exit_exception_of_a_thread_is_raised_once(ordered: bool) -> None:
    """The consumer may catch it, and continue."""

    def work(number: int) -> None:
        if number == 1:
            raise Stop

    seen: list[Any] = []
    with each(Retry(1), work, range(4), limit=2, ordered=ordered) as outcomes:
        for _ in range(4):
            try:
                seen.append(next(outcomes)[0])
            except Stop as error:
                seen.append(type(error))
        assert next(outcomes, "over") == "over"
    assert sorted(seen, key=str) == [0, 2, 3, Stop]


def test_an_exit_exception_of_a_thread_is_freed(ordered: bool) -> None:
    watched = Watched()
    with no_collector():
        with each(Retry(1), watched.fail, [Stop], limit=1, ordered=ordered) as outcomes, suppress(Stop):
            pytest.fail(f"got {next(outcomes)}")
        del outcomes
        assert watched.seen
        assert watched.alive == []


@pytest.mark.parametrize("raises", [False, True])
async def test_an_error_of_closing_the_items_is_in_no_exception_group(tasks_world: World, raises: bool) -> None:
    async def items() -> AsyncIterator[int]:
        try:
            for number in range(9):
                yield number
        finally:
            raise Boom("on closing")

    with pytest.raises(Boom, match="on closing"):
        async with each(Retry(1), same, items(), limit=1) as outcomes:
            async for _ in outcomes:
                if raises:
                    raise ValueError("of the block")
                break


@pytest.mark.parametrize("ends", ["by an error", "early", "by a cancellation"])
async def test_a_call_that_fails_on_the_way_out_changes_nothing(tasks_world: World, ends: str) -> None:
    """The error of the block is in no group, and a block that is left or cancelled raises none."""

    async def work(number: int) -> int:
        if number:
            await fail_on_the_way_out()
        await anyio.sleep(0.01)
        return number

    async def consume() -> None:
        async with each(Retry(1), work, range(3), limit=3) as outcomes:
            async for _ in outcomes:
                if ends == "by an error":
                    raise KeyError("block")
                if ends == "early":
                    break

    with anyio.move_on_after(0.05) as scope, pytest.raises(KeyError) if ends == "by an error" else nullcontext():
        await consume()
    assert scope.cancelled_caught == (ends == "by a cancellation")


async def test_a_group_with_an_interrupt_reaches_the_consumer(world: World) -> None:
    group = BaseExceptionGroup("of a child", [KeyboardInterrupt()])
    with pytest.raises(BaseExceptionGroup) as raised:
        await outcomes_of(world, raising(group), [1], limit=1)
    assert raised.group_contains(KeyboardInterrupt)
