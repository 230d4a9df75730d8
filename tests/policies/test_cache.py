"""Cache: a value answers for a while, and for longer where the call fails; a missing one is loaded once."""

from __future__ import annotations

import asyncio
import collections
import copy
import gc
import pickle
import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from datetime import timedelta
from typing import Any

import anyio
import pytest

from resilience import Cache, CacheStats, CircuitBreaker, Context, DeadlineExceeded, Fallback, Pipeline, Rejected, Retry
from resilience.outcome import Failure, Success
from tests.callers import Slow, ask_from_everywhere, run_all
from tests.conftest import Boom, FakeClock, Incomparable, Script, Watched, World, no_collector
from tests.contention.storm import fine_grained_switching


def by_argument(*args: Any) -> str:
    return "same"


def made(**settings: Any) -> Cache:
    return Cache(settings.pop("ttl", 10.0), **{"key": by_argument, **settings})


def counts(cache: Cache) -> tuple[int, int, int, int]:
    stats = cache.stats()
    return stats.hits, stats.stale, stats.shared, stats.misses


class KeywordsOnly(Exception):
    """An exception that `copy` cannot copy."""

    def __init__(self, *, code: int) -> None:
        super().__init__("odd")
        self.code = code


class MadeOfKeywords(Exception):
    """One that cannot even be made without."""

    def __new__(cls, *, code: int) -> MadeOfKeywords:
        return super().__new__(cls, "odd")

    def __init__(self, *, code: int) -> None:
        super().__init__("odd")
        self.code = code


# --- fresh ---------------------------------------------------------------------------------------


async def test_a_value_answers_until_it_is_as_old_as_ttl(world: World, clock: FakeClock, heard: list[Any]) -> None:
    cache, script = made(ttl=timedelta(seconds=10)), Script(None, "two")
    assert [await world.execute(cache, script.function()) for _ in range(2)] == [None, None]
    clock.advance(9.999)
    assert await world.execute(cache, script.function()) is None
    clock.advance(0.001)
    assert await world.execute(cache, script.function()) == "two"
    assert cache.stats() == CacheStats(hits=2, stale=0, shared=0, misses=2, size=1)
    assert [it.how for it in heard if type(it).__name__ == "CacheUsed"] == ["fresh", "fresh"]


@pytest.mark.parametrize(
    ("ttl", "kept_for"), [(2, 2.0), (timedelta(seconds=3), 3.0), (0, 0.0), (-1.0, 0.0), (timedelta(-1), 0.0)]
)
def test_a_ttl_may_depend_on_the_value(clock: FakeClock, ttl: Any, kept_for: float) -> None:
    cache = Cache(lambda value: ttl)
    cache.call(str, 1)
    if kept_for:
        clock.advance(kept_for - 0.001)
        cache.call(str, 1)
        clock.advance(0.001)
    cache.call(str, 1)
    assert cache.stats().misses == 2
    assert cache.stats().hits == (1 if kept_for else 0)


@pytest.mark.parametrize("ttl", [float("nan"), "5", None, True])
def test_a_ttl_that_is_no_number_comes_out(ttl: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"ttl\(value\)"):
        Cache(lambda value: ttl).call(str, 1)


# --- misses --------------------------------------------------------------------------------------


def test_callers_of_every_runtime_wait_for_one_call() -> None:
    cache = Cache(60, key=lambda *_: "same")
    slow = Slow(lambda: "fine")
    got = ask_from_everywhere(
        cache, slow, lambda count: sum(len(it._followers) for it in list(cache._flights.leaders.values())) == count
    )
    assert got == [Success("fine")] * 9
    assert slow.calls == 1
    assert counts(cache) == (0, 0, 8, 1)


def test_who_comes_too_late_to_follow_finds_the_value() -> None:
    """It had looked before the other caller kept the value, and leads after that one has ended."""
    cache = Cache(60, key=lambda *_: "same")
    find, looks = cache._find, []

    def found_by_another(key: Any) -> Any:
        looks.append(key)
        if len(looks) == 1:
            cache._find = find  # type: ignore[method-assign]
            assert cache.call(lambda: "theirs") == "theirs"
            return None
        return find(key)

    cache._find = found_by_another  # type: ignore[method-assign]
    assert cache.call(lambda: "ours") == "theirs"
    assert counts(cache) == (1, 0, 0, 1)


async def test_sharing_is_reported(in_asyncio: World, heard: list[Any]) -> None:
    cache = Cache(60)
    await asyncio.gather(*(cache.acall(asyncio.sleep, 0.001) for _ in range(3)))
    assert [it.how for it in heard if type(it).__name__ == "CacheUsed"] == ["shared", "shared"]
    assert counts(cache) == (0, 0, 2, 1)


# --- stale ---------------------------------------------------------------------------------------


async def test_an_old_value_answers_where_the_refresh_fails(world: World, clock: FakeClock, heard: list[Any]) -> None:
    cache, script = made(stale=60), Script(1, Boom(), Boom(), 4)
    seen = [await world.execute(cache, script.function())]
    for seconds in (11, 0.999, 0.001, 1):
        clock.advance(seconds)
        seen.append(await world.execute(cache, script.function()))
    assert seen == [1, 1, 1, 1, 4]
    assert script.calls == 4  # the second and the third a second apart
    assert counts(cache) == (0, 3, 0, 2)  # each of the five calls once
    assert [it.how for it in heard if type(it).__name__ == "CacheUsed"] == ["stale"] * 3


@pytest.mark.parametrize(("seconds", "answered"), [(69.9, True), (70, False)])
async def test_it_does_so_for_the_stale_time(world: World, clock: FakeClock, seconds: float, answered: bool) -> None:
    cache, script = made(stale=60), Script(1, Boom())
    await world.execute(cache, script.function())
    clock.advance(seconds)
    result = await world.attempt(cache, script.function())
    assert (result == 1) is answered
    assert isinstance(result, Boom) is not answered


async def test_a_value_too_old_when_the_refresh_has_failed_is_no_answer(world: World, clock: FakeClock) -> None:
    cache = made(stale=60)
    await world.execute(cache, Script(1).function())
    clock.advance(69)

    async def fn(ctx: Context) -> None:
        clock.advance(2)
        raise Boom

    assert isinstance(await world.attempt(cache, fn), Boom)


@pytest.mark.parametrize(
    ("settings", "error"), [({"on": OSError}, Boom()), ({"ignore": Boom}, Boom()), ({}, KeyboardInterrupt())]
)
async def test_a_failure_that_is_not_handled_comes_out(
    world: World, clock: FakeClock, settings: Any, error: BaseException
) -> None:
    """The entry stays, and the next caller tries again."""
    cache, script = made(stale=60, **settings), Script(1, error, 3)
    await world.execute(cache, script.function())
    clock.advance(11)
    with pytest.raises(type(error)):
        await world.execute(cache, script.function())
    assert cache.stats().size == 1


@pytest.mark.parametrize("name", ["on", "keep_errors"])
async def test_what_a_predicate_raises_comes_out_as_a_miss(world: World, clock: FakeClock, name: str) -> None:
    cache, script = made(stale=5, **{name: lambda error: 1 / 0}), Script("old", Boom())
    await world.execute(cache, script.function())
    clock.advance(11 if name == "on" else 16)
    assert isinstance(await world.attempt(cache, script.function()), ZeroDivisionError)
    assert counts(cache) == (0, 0, 0, 2)


async def test_a_refusal_is_answered(world: World, clock: FakeClock) -> None:
    breaker = CircuitBreaker()
    pipeline = made(stale=60).wrap(breaker)
    await world.execute(pipeline, Script(1).function())
    clock.advance(11)
    breaker.isolate()
    assert await world.execute(pipeline, Script("never").function()) == 1


async def test_while_one_replaces_a_value_that_is_too_old_the_others_wait(tasks_world: World, clock: FakeClock) -> None:
    cache, numbers, got = made(stale=60, key=lambda *_: "same"), iter([1, 2]), []

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


async def test_while_one_refreshes_the_others_get_the_old_value(tasks_world: World) -> None:
    cache, called, got = Cache(0.02, stale=60, key=lambda *_: "same"), [], []
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


def test_a_refresh_that_has_failed_just_before_is_not_tried_again_at_once(clock: FakeClock) -> None:
    """Also by a caller that had found the old value before that failed, and asks only now."""

    class Store(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            looks.append(key)
            if len(looks) == 4:  # of the second call: once to find the old value, and once more before it calls
                assert cache.call(failing) == 1
            return super().get(key, default)

    def failing() -> int:
        called.append(1)
        raise Boom

    looks: list[Any] = []
    called: list[int] = []
    cache = made(stale=60, errors_ttl=5, store=Store())
    assert cache.call(int, 1) == 1
    clock.advance(11)
    assert cache.call(failing) == 1
    assert called == [1]
    assert counts(cache) == (0, 2, 0, 1)


async def test_a_cancelled_refresh_leaves_it_to_the_next(tasks_world: World) -> None:
    cache, called = Cache(0.01, stale=60, key=lambda *_: "same"), []

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


async def test_a_refresh_out_of_time_answers_with_the_old_value(world: World, clock: FakeClock) -> None:
    cache = made(stale=60)
    await world.execute(cache, Script(1).function())
    clock.advance(11)
    late = Script(DeadlineExceeded("late")).function()
    assert await world.execute(cache, late, Context(timeout=5)) == 1


# --- errors that are kept ------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyError("name"), KeywordsOnly(code=7), MadeOfKeywords(code=7)], ids=repr)
async def test_kept_errors_are_raised_again(world: World, clock: FakeClock, error: Exception) -> None:
    cache, script = made(keep_errors=type(error), errors_ttl=5), Script(error, "found")
    seen = [await world.attempt(cache, script.function()) for _ in range(3)]
    assert script.calls == 1
    assert len({id(it) for it in seen}) == 3
    assert [(type(it), it.args, vars(it)) for it in seen] == [(type(error), error.args, vars(error))] * 3
    assert counts(cache) == (2, 0, 0, 1)
    clock.advance(5)
    assert await world.execute(cache, script.function()) == "found"


def test_kept_errors_keep_no_frames_alive() -> None:
    cache, alive = Cache(60, keep_errors=KeyError, errors_ttl=60), []

    class Big:
        pass

    def fetch(key: str) -> None:
        big = Big()
        alive.append(weakref.ref(big))
        try:
            raise Boom(big)
        except Boom as cause:
            raise KeyError(key) from cause

    with pytest.raises(KeyError) as caught:
        cache.call(fetch, "a")
    assert isinstance(caught.value.__cause__, Boom)
    del caught
    gc.collect()
    assert alive[0]() is None
    with pytest.raises(KeyError) as caught:
        cache.call(fetch, "a")
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_nor_do_those_of_a_group() -> None:
    class Several(ExceptionGroup[Any]):
        """One that `derive` would make a plain group of."""

    cache, watched = Cache(60, keep_errors=Several, errors_ttl=60), Watched()

    def fetch() -> None:
        try:
            watched.fail()
        except Boom as first:
            raise Several("several", [first]) from first

    with pytest.raises(Several):
        cache.call(fetch)
    gc.collect()
    assert watched.alive == []
    with pytest.raises(Several, match="several") as caught:
        cache.call(fetch)
    assert [type(it) for it in caught.value.exceptions] == [Boom]


def test_a_stop_iteration_is_not_kept() -> None:
    cache, results = Cache(60, keep_errors=Exception), iter([1])
    assert cache.call(next, results) == 1
    results = iter([])
    for _ in range(2):
        with pytest.raises(StopIteration):
            cache.call(next, results)
    assert cache.stats().misses == 3


async def test_a_kept_error_does_not_replace_an_old_value(world: World, clock: FakeClock) -> None:
    cache, script = made(stale=60, keep_errors=Boom, errors_ttl=5, ignore=Boom), Script(1, Boom(), Boom(), 4)
    await world.execute(cache, script.function())
    clock.advance(11)
    assert isinstance(await world.attempt(cache, script.function()), Boom)
    assert await world.execute(cache, script.function()) == 1  # `errors_ttl` delays the next try
    clock.advance(60)
    assert isinstance(await world.attempt(cache, script.function()), Boom)
    assert isinstance(await world.attempt(cache, script.function()), Boom)
    assert script.calls == 3


# --- room ----------------------------------------------------------------------------------------


def test_the_size_is_bounded_and_what_is_asked_for_stays() -> None:
    """Beside that, the newest."""
    cache = Cache(60, max_size=100)
    cache.call(str, "often")
    for number in range(1000):
        cache.call(str, number)
        cache.call(str, "often")
    for number in range(901, 1000):
        cache.call(str, number)
    assert cache.stats() == CacheStats(hits=1099, stale=0, shared=0, misses=1001, size=100)


def test_a_value_that_is_kept_anew_takes_the_place_of_no_other(clock: FakeClock) -> None:
    cache = Cache(lambda value: 60 if value == "long" else 1, max_size=2)
    cache.call(str, "long")
    cache.call(str, "short")
    clock.advance(2)
    cache.call(str, "short")
    assert cache.stats().size == 2


def test_what_is_asked_for_is_found_also_while_another_goes() -> None:
    """A hit takes no lock: it may come between any two steps of a call that makes room."""
    cache, looks = Cache(60, max_size=2), []

    class Noted(OrderedDict[Any, Any]):
        def __delitem__(self, key: Any) -> None:
            looks.append((key, often in self))
            super().__delitem__(key)

    for number in (1, 1, 2):
        cache.call(str, number)
    often = (str, (1,))
    cache._entries = Noted(cache._entries)
    cache.call(str, 3)
    assert looks == [((str, (2,)), True)]


class Lossy(dict[Any, Any]):
    """A store that keeps two entries, and the last ones."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        while len(self) > 2:
            del self[next(iter(self))]


def test_a_store_of_the_users_own() -> None:
    store = Lossy()
    cache = Cache(60, store=store, max_size=1)
    for number in (1, 2, 3, 3, 2, 1):
        assert cache.call(str, number) == str(number)
    assert counts(cache) == (2, 0, 0, 4)
    assert cache.stats().size == len(store) == 2
    assert not cache._entries
    cache.forget((str, (1,)))
    assert len(store) == 1
    cache.clear()
    assert not store
    assert cache.describe().endswith("in a Lossy")


class Broken(dict[Any, Any]):
    def get(self, key: Any, default: Any = None) -> Any:
        raise OSError("gone")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise OSError("gone")


def test_what_is_none_of_ours_in_a_store_is_no_value() -> None:
    cache = Cache(60, store=collections.defaultdict(str, same="not ours"), key=by_argument)
    assert [cache.call(str, it) for it in (1, 2)] == ["1", "1"]


def test_a_store_that_raises_is_no_store(caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(60, store=Broken())
    assert [cache.call(str, 1) for _ in range(2)] == ["1", "1"]
    assert {it.message for it in caplog.records} == {
        "the store of Cache raised; the call is made",
        "the store of Cache raised; the result is not kept",
    }


@pytest.mark.parametrize("drop", [lambda it: it.forget("same"), lambda it: it.clear()], ids=["forget", "clear"])
def test_what_is_forgotten_during_a_call_is_not_kept(drop: Any) -> None:
    """What the call returns may be what it was before the change for which it was forgotten."""
    cache = Cache(60, key=lambda *_: "same")

    def read_and_change() -> str:
        drop(cache)
        return "old"

    assert cache.call(read_and_change) == "old"
    assert cache.call(lambda: "new") == "new"
    drop(cache)
    assert cache.stats().size == 0
    assert cache.call(lambda: "newer") == "newer"


def test_a_stampede_with_forgetting_and_failures_stays_exact() -> None:
    """Ten threads and two loops: each call of the cache is counted once."""
    cache = Cache(60, keep_errors=Boom, errors_ttl=0.001, max_size=8)
    calls = []

    def fetch(number: int) -> int:
        calls.append(number)
        if number % 5 == 0:
            raise Boom
        return number

    async def afetch(number: int) -> int:
        await anyio.sleep(0)
        return fetch(number)

    def thread() -> None:
        for number in range(200):
            with suppress(Boom):
                cache.call(fetch, number % 13)
            if number % 17 == 0:
                cache.clear()

    async def loop() -> None:
        for _ in range(50):
            await asyncio.gather(*(cache.acall(afetch, it % 13) for it in range(4)), return_exceptions=True)

    with fine_grained_switching():
        run_all(
            [threading.Thread(target=thread) for _ in range(10)]
            + [threading.Thread(target=lambda: asyncio.run(loop())) for _ in range(2)]
        )
    assert sum(counts(cache)) == 10 * 200 + 2 * 50 * 4
    assert cache.stats().misses == len(calls)
    assert not cache._flights.leaders
    assert cache.stats().size <= 8


# --- keys, misuse, the rest ----------------------------------------------------------------------


@pytest.mark.parametrize("store", [None, {}], ids=["own", "a store"])
def test_a_call_without_a_key_is_a_misuse(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = Pipeline(Fallback("no"), Retry(on=Exception, backoff=[0]), Cache(60, store=store))
    with pytest.raises(TypeError, match="give key="):
        pipeline.execute(lambda ctx: 1)
    with pytest.raises(TypeError, match="must be hashable"):
        pipeline.call(len, [])
    assert caplog.records == []


def test_what_the_comparison_of_keys_raises_is_no_misuse() -> None:
    cache = Cache(60, key=lambda *_: Incomparable())
    assert cache.call(lambda: "kept") == "kept"
    with pytest.raises(TypeError, match="cannot be compared"):
        cache.call(int)
    assert Fallback("answered").wrap(cache).call(int) == "answered"


def test_it_is_one_for_all_who_use_it() -> None:
    cache = Cache(60, stale=5, name="users")
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="users holds values"):
            make(cache)
    assert cache.describe() == (
        "users: keeps values for 60 s, 5 s more if a refresh fails, by function and its arguments, at most 1024"
    )
    assert Cache(len, key=max).describe() == "Cache: keeps values for what len says, by key of max, at most 1024"
    assert repr(cache) == "Cache(ttl=60, stale=5, name='users')"


async def test_it_leaves_no_cycle(world: World, clock: FakeClock) -> None:
    watched = Watched()
    cache = made(stale=60, keep_errors=Boom)
    with no_collector():
        for _ in range(3):
            await world.attempt(cache, watched.fn)
        assert watched.alive == []
        cache.clear()
        await world.execute(cache, Script("old").function())
        clock.advance(11)
        assert await world.execute(cache, watched.fn) == "old"
        assert watched.alive == []


def test_a_refusal_of_the_users_own_can_be_kept() -> None:
    cache = Cache(60, keep_errors=Rejected, key=by_argument)

    def refused(ctx: Context) -> None:
        raise Rejected("no", policy="theirs", retry_after=5)

    seen = [cache.capture(refused) for _ in range(2)]
    assert [(it.error.policy, it.error.retry_after) for it in seen if isinstance(it, Failure)] == [("theirs", 5)] * 2  # type: ignore[attr-defined]
    assert cache.stats().hits == 1
