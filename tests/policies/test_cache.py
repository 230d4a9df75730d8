"""Cache: fresh and stale values, errors that are kept, shared loads, size, and stores."""

from __future__ import annotations

import collections
import gc
import random
from collections import OrderedDict
from contextlib import suppress
from datetime import timedelta
from typing import Any

import anyio
import pytest

from resilience import Cache, CacheStats, Context, DeadlineExceeded, Pipeline, Rejected
from resilience.events import CacheUsed
from resilience.outcome import Failure, Success
from tests.callers import KeywordsOnly, Slow, ask_from_everywhere
from tests.conftest import Boom, FakeClock, Frozen, Script, Watched, World, no_collector
from tests.contention.storm import Gauge, Storm
from tests.functions import raising
from tests.policies.retries import Response


def same_key(*args: Any) -> str:
    return "same"


def make_cache(**settings: Any) -> Cache:
    return Cache(settings.pop("ttl", 10.0), **{"key": same_key, **settings})


def counts(cache: Cache) -> tuple[int, int, int, int]:
    stats = cache.stats()
    return stats.hits, stats.stale, stats.shared, stats.misses


class MadeOfKeywords(Exception):
    """An exception that cannot be constructed without its keyword."""

    def __new__(cls, *, code: int) -> MadeOfKeywords:
        return super().__new__(cls, "odd")

    def __init__(self, *, code: int) -> None:
        super().__init__("odd")
        self.code = code


class Slotted(Exception):
    """An exception that `copy` cannot copy, with an attribute that it leaves out."""

    __slots__ = ("code",)

    def __init__(self, *, code: int) -> None:
        super().__init__("odd")
        self.code = code


class Delegating(Exception):
    """An exception whose other attributes are looked up in its argument, which raises a `KeyError`."""

    def __getattr__(self, name: str) -> Any:
        return self.args[0][name]


# --- fresh values --------------------------------------------------------------------------------


async def test_a_value_is_returned_until_it_is_as_old_as_ttl(world: World, clock: FakeClock, heard: list[Any]) -> None:
    cache, script = make_cache(ttl=timedelta(seconds=10)), Script(None, "two")
    assert [await world.execute(cache, script.function()) for _ in range(2)] == [None, None]
    clock.advance(9.999)
    assert await world.execute(cache, script.function()) is None
    clock.advance(0.001)
    assert await world.execute(cache, script.function()) == "two"
    assert cache.stats() == CacheStats(hits=2, stale=0, shared=0, misses=2, size=1)
    assert [it.how for it in heard if type(it).__name__ == "CacheUsed"] == ["fresh", "fresh"]


def test_the_listeners_of_a_pipeline_get_the_answers_of_its_cache() -> None:
    heard: list[Any] = []
    pipeline = Pipeline(Cache(60), listeners=[heard.append])
    assert [pipeline.call(int, "7") for _ in range(2)] == [7, 7]
    assert [it.how for it in heard if isinstance(it, CacheUsed)] == ["fresh"]


@pytest.mark.parametrize(
    ("ttl", "kept_for"), [(2, 2.0), (timedelta(seconds=3), 3.0), (0, 0.0), (-1.0, 0.0), (timedelta(-1), 0.0)]
)
def test_a_ttl_function_gets_the_value_and_returns_a_duration(clock: FakeClock, ttl: Any, kept_for: float) -> None:
    cache = Cache(lambda value: ttl)
    cache.call(str, 1)
    if kept_for:
        clock.advance(kept_for - 0.001)
        cache.call(str, 1)
        clock.advance(0.001)
    cache.call(str, 1)
    assert cache.stats().misses == 2
    assert cache.stats().hits == cache.stats().size == (1 if kept_for else 0)


@pytest.mark.parametrize("ttl", [float("nan"), "5", None, True])
def test_a_ttl_function_that_returns_no_duration_is_an_error(ttl: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"ttl\(value\)"):
        Cache(lambda value: ttl).call(str, 1)


# --- misses --------------------------------------------------------------------------------------


def test_concurrent_callers_of_all_runtimes_share_one_call(heard: list[Any]) -> None:
    cache = Cache(60, key=same_key)
    slow = Slow(lambda: "fine")
    got = ask_from_everywhere(cache, slow)
    assert got == [Success("fine")] * 9
    assert slow.calls == 1
    assert counts(cache) == (0, 0, 8, 1)
    assert [it.how for it in heard if type(it).__name__ == "CacheUsed"] == ["shared"] * 8


def test_a_caller_that_missed_the_shared_call_finds_its_value() -> None:
    """It looked before the other caller stored the value, and became the leader after that call had ended."""

    class Store(dict[Any, Any]):
        lookups = 0

        def get(self, key: Any, default: Any = None) -> Any:
            self.lookups += 1
            if self.lookups == 1:
                assert cache.call(lambda: "theirs") == "theirs"
                return None
            return super().get(key, default)

    cache = make_cache(store=Store())
    assert cache.call(lambda: "ours") == "theirs"
    assert counts(cache) == (1, 0, 0, 1)


# --- stale values --------------------------------------------------------------------------------


async def test_a_stale_value_is_returned_if_the_refresh_fails(world: World, clock: FakeClock, heard: list[Any]) -> None:
    cache, script = make_cache(stale=60), Script(1, Boom(), Boom(), 4)
    seen = [await world.execute(cache, script.function())]
    for seconds in (11, 0.999, 0.001, 1):
        clock.advance(seconds)
        seen.append(await world.execute(cache, script.function()))
    assert seen == [1, 1, 1, 1, 4]
    assert script.calls == 4  # one refresh at most in each second
    assert counts(cache) == (0, 3, 0, 2)  # each of the five calls is counted once
    assert [it.how for it in heard if type(it).__name__ == "CacheUsed"] == ["stale"] * 3


async def test_the_response_of_a_failed_refresh_is_closed_if_the_answer_is_stale(
    world: World, clock: FakeClock
) -> None:
    """No caller gets that failure. If it is raised, the caller may read its response."""
    answered, raised = Boom(), Boom()
    answered.response, raised.response = Response(), Response()  # type: ignore[attr-defined]
    cache, script = make_cache(stale=5), Script("old", answered, raised)
    for seconds in (0, 10, 10):
        clock.advance(seconds)
        await world.attempt(cache, script.function())
    assert script.calls == 3
    assert (answered.response.closed, raised.response.closed) == (1, 0)  # type: ignore[attr-defined]


async def test_a_value_that_becomes_too_old_in_its_refresh_is_not_returned(threads: World, clock: FakeClock) -> None:
    cache = make_cache(stale=60)
    await threads.execute(cache, Script(1).function())
    clock.advance(69)
    assert isinstance(await threads.attempt(cache, Script(Boom(), doing=lambda ctx: clock.advance(2)).function()), Boom)


@pytest.mark.parametrize(
    ("settings", "error"), [({"on": OSError}, Boom()), ({"ignore": Boom}, Boom()), ({}, KeyboardInterrupt())]
)
async def test_an_unhandled_error_of_a_refresh_is_raised_and_keeps_the_entry(
    world: World, clock: FakeClock, settings: Any, error: BaseException
) -> None:
    cache, script = make_cache(stale=60, **settings), Script(1, error, 3)
    await world.execute(cache, script.function())
    clock.advance(11)
    with pytest.raises(type(error)):
        await world.execute(cache, script.function())
    assert cache.stats().size == 1


@pytest.mark.parametrize("name", ["on", "keep_errors"])
async def test_a_predicates_error_is_raised_and_counts_as_a_miss(threads: World, clock: FakeClock, name: str) -> None:
    cache, script = make_cache(stale=5, **{name: lambda error: 1 / 0}), Script("old", Boom())
    await threads.execute(cache, script.function())
    clock.advance(11 if name == "on" else 16)
    assert isinstance(await threads.attempt(cache, script.function()), ZeroDivisionError)
    assert counts(cache) == (0, 0, 0, 2)


@pytest.mark.parametrize("error", [Rejected("no"), DeadlineExceeded("late")], ids=repr)
async def test_a_stale_value_replaces_a_rejected_refresh(world: World, clock: FakeClock, error: Exception) -> None:
    cache, script = make_cache(stale=60), Script(1, error)
    await world.execute(cache, script.function())
    clock.advance(11)
    assert await world.execute(cache, script.function(), Context(timeout=5)) == 1


async def test_callers_wait_while_a_value_that_is_too_old_is_replaced(tasks_world: World, clock: FakeClock) -> None:
    cache, numbers, got = make_cache(stale=60), iter([1, 2]), []

    async def ask() -> None:
        got.append(await cache.acall(fetch))

    async def fetch() -> int:
        await anyio.lowlevel.checkpoint()
        return next(numbers)

    await ask()
    clock.advance(1000)
    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        group.start_soon(ask)
    assert got == [1, 2, 2]


async def test_other_callers_get_the_stale_value_during_a_refresh(tasks_world: World) -> None:
    cache, called, got = make_cache(ttl=0.02, stale=60), [], []
    go = anyio.Event()

    async def fetch() -> int:
        called.append(1)
        if len(called) > 1:
            await go.wait()
        return len(called)

    async def ask() -> None:
        got.append(await cache.acall(fetch))

    await ask()
    await anyio.sleep(0.03)
    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        for _ in range(20):
            await ask()
        assert got == [1] * 21
        go.set()
    assert got[-1] == 2
    assert counts(cache) == (0, 20, 0, 2)


def test_a_refresh_that_has_just_failed_is_not_repeated_at_once(clock: FakeClock) -> None:
    """A caller that found the stale value before that failure does not repeat it either."""

    class Store(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            lookups.append(key)
            if len(lookups) == 4:  # the second call looks once for the stale value, and once more before its refresh
                assert cache.call(failing) == 1
            return super().get(key, default)

    def failing() -> int:
        called.append(1)
        raise Boom

    lookups: list[Any] = []
    called: list[int] = []
    cache = make_cache(stale=60, errors_ttl=5, store=Store())
    assert cache.call(int, 1) == 1
    clock.advance(11)
    assert cache.call(failing) == 1
    assert called == [1]
    assert counts(cache) == (0, 2, 0, 1)


async def test_after_a_cancelled_refresh_the_next_caller_refreshes(tasks_world: World) -> None:
    cache, called = make_cache(ttl=0.01, stale=60), []

    async def fetch() -> int:
        called.append(1)
        if len(called) == 2:
            await anyio.sleep(60)
        return len(called)

    assert await cache.acall(fetch) == 1
    await anyio.sleep(0.02)
    with anyio.move_on_after(0.01) as scope:
        await cache.acall(fetch)
    assert scope.cancelled_caught
    assert await cache.acall(fetch) == 3


# --- kept errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        *(KeyError("name"), KeywordsOnly(code=7), MadeOfKeywords(code=7), Frozen(code=7)),
        *(Slotted(code=7), Delegating({"code": 7})),
    ],
    ids=repr,
)
async def test_a_kept_error_is_raised_again_as_a_copy(threads: World, clock: FakeClock, error: Exception) -> None:
    cache, script = make_cache(keep_errors=type(error), errors_ttl=5), Script(error, "found")
    seen = [await threads.attempt(cache, script.function()) for _ in range(3)]
    assert script.calls == 1
    assert len({id(it) for it in seen}) == 3
    assert [(type(it), it.args, vars(it)) for it in seen] == [(type(error), error.args, vars(error))] * 3
    assert [getattr(it, "code", None) for it in seen] == [getattr(error, "code", None)] * 3
    assert counts(cache) == (2, 0, 0, 1)
    clock.advance(5)
    assert await threads.execute(cache, script.function()) == "found"


def test_a_note_on_a_kept_error_is_not_added_to_its_copies() -> None:
    cache, error = Cache(60, keep_errors=KeywordsOnly, errors_ttl=60), KeywordsOnly(code=7)
    error.add_note("of the call")
    fetch = raising(error)
    for _ in range(3):
        with pytest.raises(KeywordsOnly) as caught:
            cache.call(fetch)
        assert caught.value.__notes__ == ["of the call"]
        caught.value.add_note("of one")


class Several(ExceptionGroup[Any]):
    """A group that `derive` would turn into a plain `ExceptionGroup`."""


@pytest.mark.parametrize(
    "make", [lambda cause: KeyError(), lambda cause: Several("several", [cause])], ids=["an error", "a group"]
)
def test_a_kept_error_keeps_no_frames_alive(make: Any) -> None:
    """Not by its cause, nor by the errors of a group."""
    cache, watched = Cache(60, keep_errors=(KeyError, Several), errors_ttl=60), Watched()

    def fetch() -> None:
        try:
            watched.fail()
        except Boom as cause:
            raise make(cause) from cause

    with pytest.raises((KeyError, Several)) as caught:
        cache.call(fetch)
    assert isinstance(caught.value.__cause__, Boom)
    del caught
    gc.collect()
    assert watched.alive == []
    with pytest.raises((KeyError, Several)) as caught:
        cache.call(fetch)
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert [type(it) for it in getattr(caught.value, "exceptions", [Boom()])] == [Boom]


def test_a_stop_iteration_is_not_kept() -> None:
    cache, results = Cache(60, keep_errors=Exception), iter([1])
    assert cache.call(next, results) == 1
    results = iter([])
    for _ in range(2):
        with pytest.raises(StopIteration):
            cache.call(next, results)
    assert cache.stats().misses == 3


async def test_the_end_of_a_callers_own_budget_is_not_kept(threads: World, clock: FakeClock) -> None:
    """The next caller may have more time."""
    cache = make_cache(keep_errors=Exception, errors_ttl=60)

    async def fn(ctx: Context) -> str:
        clock.advance(5)
        ctx.check()
        return "fine"

    assert isinstance(await threads.attempt(cache, fn, Context(timeout=1)), DeadlineExceeded)
    assert await threads.execute(cache, fn, Context(timeout=9)) == "fine"


# --- size and stores -----------------------------------------------------------------------------


@pytest.mark.parametrize("listeners", [[], [str]], ids=["unobserved", "observed"])
def test_the_size_is_bounded_and_used_entries_are_kept(listeners: Any) -> None:
    """Apart from them, the newest entries are."""
    cache = Cache(60, max_size=100)
    pipeline = cache.wrap(listeners=listeners)
    pipeline.call(str, "often")
    for number in range(1000):
        pipeline.call(str, number)
        pipeline.call(str, "often")
    for number in range(901, 1000):
        pipeline.call(str, number)
    assert cache.stats() == CacheStats(hits=1099, stale=0, shared=0, misses=1001, size=100)


def test_replacing_a_value_evicts_no_other(clock: FakeClock) -> None:
    cache = Cache(lambda value: 60 if value == "long" else 1, max_size=2)
    cache.call(str, "long")
    cache.call(str, "short")
    clock.advance(2)
    cache.call(str, "short")
    assert cache.stats().size == 2


def test_a_used_entry_is_found_during_an_eviction() -> None:
    """A hit takes no lock: it may happen between any two steps of an eviction."""
    cache, lookups = Cache(60, max_size=2), []

    class Recorded(OrderedDict[Any, Any]):
        def __delitem__(self, key: Any) -> None:
            lookups.append((key, often in self))
            super().__delitem__(key)

    for number in (1, 1, 2):
        cache.call(str, number)
    often = (str, (1,))
    cache._own = cache._entries = Recorded(cache._entries)
    cache.call(str, 3)
    assert lookups == [((str, (2,)), True)]


class Lossy(dict[Any, Any]):
    """A store that keeps the last two entries."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        while len(self) > 2:
            del self[next(iter(self))]


def test_a_custom_store_is_read_written_and_cleared(caplog: pytest.LogCaptureFixture) -> None:
    store = Lossy()
    cache = Cache(60, store=store, max_size=1)
    for number in (1, 2, 3, 3, 2, 1):
        assert cache.call(str, number) == str(number)
    assert counts(cache) == (2, 0, 0, 4)
    assert cache.stats().size == len(store) == 2
    cache.forget((str, (1,)))
    assert len(store) == 1
    cache.clear()
    assert not store
    assert cache.describe().endswith("in a Lossy")
    assert caplog.messages == []


class Broken(dict[Any, Any]):
    def get(self, key: Any, default: Any = None) -> Any:
        raise OSError("gone")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise OSError("gone")


def test_foreign_values_in_a_store_are_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(60, store=collections.defaultdict(str, same="not ours"), key=same_key)
    assert [cache.call(str, it) for it in (1, 2)] == ["1", "1"]
    assert caplog.messages[0] == "the store of Cache holds an unknown str; the call is made"


def test_errors_of_a_store_are_logged_and_the_call_is_made(caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(60, store=Broken())
    assert [cache.call(str, 1) for _ in range(2)] == ["1", "1"]
    assert {it.message for it in caplog.records} == {
        "the store of Cache raised; the call is made",
        "the store of Cache raised; the result is not kept",
    }


@pytest.mark.parametrize("drop", [lambda it: it.forget("same"), lambda it: it.clear()], ids=["forget", "clear"])
def test_a_value_that_is_forgotten_during_its_call_is_not_kept(drop: Any) -> None:
    """The call may have read it before the change for which it was forgotten."""
    cache = make_cache(ttl=60)

    def read_and_change() -> str:
        drop(cache)
        return "old"

    assert cache.call(read_and_change) == "old"
    assert cache.call(lambda: "new") == "new"
    drop(cache)
    assert cache.stats().size == 0
    assert cache.call(lambda: "newer") == "newer"


def test_concurrent_calls_failures_and_clears_are_counted_exactly() -> None:
    """In threads and two event loops each call is counted once."""
    cache, gauge = Cache(60, key=lambda number: number, keep_errors=Boom, errors_ttl=0.001, max_size=8), Gauge()

    async def operation(world: World, rng: random.Random) -> str:
        async def fetch(number: int) -> None:
            gauge.enter()
            gauge.leave()
            if number % 5 == 0:
                raise Boom

        if rng.random() < 0.05:
            cache.clear()
        with suppress(Boom):
            await world.call(cache, fetch, rng.randrange(13))
        return "ended"

    Storm(operation, 2500).run()
    assert sum(counts(cache)) == 2500
    assert cache.stats().misses == gauge.entered
    assert not cache._flights.leaders
    assert cache.stats().size <= 8


# --- descriptions and cycles ---------------------------------------------------------------------


async def test_a_failed_refresh_leaves_no_reference_cycle(world: World, clock: FakeClock) -> None:
    cache, watched = make_cache(stale=60), Watched()
    await world.execute(cache, Script("old").function())
    clock.advance(11)
    with no_collector():
        assert await world.execute(cache, watched.fn) == "old"
        assert watched.alive == []


def test_a_rejection_raised_by_the_function_can_be_kept() -> None:
    cache = Cache(60, keep_errors=Rejected, key=same_key)
    seen = [cache.capture(raising(Rejected("no", policy="theirs", retry_after=5))) for _ in range(2)]
    assert [(it.error.policy, it.error.retry_after) for it in seen if isinstance(it, Failure)] == [("theirs", 5)] * 2  # type: ignore[attr-defined]
    assert cache.stats().hits == 1
