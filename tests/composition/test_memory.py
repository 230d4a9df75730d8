"""Memory: a failed call is freed when it ends, and 20,000 calls leave no more behind than one.

An exception refers to its traceback, the traceback to the frames of the call, and the frames to their local
variables. So a local variable that still holds the exception when it is raised again closes a cycle, and all
objects of the call then wait for the cyclic collector. These tests switch the collector off, and watch objects of
each call.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from resilience import (
    AdaptiveLimit,
    AdaptiveThrottle,
    Bulkhead,
    Cache,
    Chaos,
    CircuitBreaker,
    ConsecutiveFailures,
    Context,
    FailureRatio,
    Fallback,
    Hedge,
    Keyed,
    Policy,
    Rate,
    RateLimiter,
    Retry,
    SingleFlight,
    SlowRatio,
    Timeout,
    deadline,
    events,
)
from resilience.policies.live_circuit import Admitted
from resilience.runtimes import lowering
from tests.conftest import Boom, Heavy, Watched, World, no_collector
from tests.custom import Driven
from tests.policies.retries import Attempts

Scenario = Callable[[World, Watched], Awaitable[object]]


def executes(make: Callable[[], Policy[Any]], ctx: Callable[[], Context | None] = lambda: None) -> Scenario:
    """Return a scenario that fails under the policy."""

    async def scenario(world: World, watched: Watched) -> None:
        await world.execute(make(), watched.fn, ctx())

    return scenario


async def without_policy(world: World, watched: Watched) -> None:
    """Fail without any policy: what Python itself leaves behind."""
    await watched.fn()


def calls(make: Callable[[], Policy[Any]], step: Callable[[Watched, Context], Any]) -> Scenario:
    """Return a scenario in which the function takes this step."""

    async def scenario(world: World, watched: Watched) -> None:
        async def fn(ctx: Context) -> Any:
            return step(watched, ctx)

        await world.execute(make(), fn)

    return scenario


def returns_an_object(watched: Watched, ctx: Context) -> Any:
    return watched.watch(Heavy())


def fails_with_a_response(watched: Watched, ctx: Context) -> None:
    class Response:
        def close(self) -> None: ...

    def make() -> Boom:
        error = Boom("status")
        error.response = watched.watch(Response())  # type: ignore[attr-defined]
        return error

    watched.fail(make)


def raises(kind: type[BaseException]) -> Callable[[Watched, Context], Any]:
    """Return a step that raises, with a class of its own: builtin exceptions have no weak references."""
    watchable: type[BaseException] = type(kind.__name__, (kind,), {})
    return lambda watched, ctx: watched.fail(watchable)


def five_policies() -> Policy[Any]:
    return Fallback("x").wrap(Retry(on=Exception), CircuitBreaker(), Bulkhead(1), Timeout(5.0))


async def captures(world: World, watched: Watched) -> None:
    policy = Retry(2, on=Boom, backoff=[0]).wrap(CircuitBreaker())
    await world.result((policy.capture if world.blocking else policy.acapture)(world.native(watched.fn)))


async def decorates(world: World, watched: Watched) -> None:
    decorated = Retry(2, on=Boom, backoff=[0])(world.native(watched.fn))
    await world.result(decorated())


class Client:
    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def get(self) -> None:
        self._watched.fail()

    async def aget(self) -> None:
        self._watched.fail()

    def later(self) -> Awaitable[None]:
        return self.aget()

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        self._watched.fail()
        yield


async def through_a_proxy(world: World, watched: Watched) -> None:
    policy = Retry(2, on=Boom, backoff=[0])
    if world.blocking:
        policy.proxy(Client(watched)).get()
    else:
        await policy.aproxy(Client(watched), "later").later()


async def entering_through_a_proxy(world: World, watched: Watched) -> None:
    proxy: Any = Retry(2, on=Boom, backoff=[0]).aproxy(Client(watched), "enter")
    async with proxy.enter() if not world.blocking else nullcontext():
        watched.fail()


class Fine:
    """A client that does not fail."""

    def get(self) -> str:
        return "got"

    async def aget(self) -> str:
        return "later"

    def later(self) -> Awaitable[str]:
        return self.aget()

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        yield


async def failing_inside_an_entered_proxy(world: World, watched: Watched) -> None:
    if world.blocking:
        watched.fail()
    else:
        async with Retry().aproxy(Fine(), "enter").enter():
            watched.fail()


def cut_off(make: Callable[[], Policy[Any]]) -> Scenario:
    """Return a scenario in which the policy cuts a function off."""

    async def scenario(world: World, watched: Watched) -> None:
        async def fn(heavy: Heavy) -> None:
            await world.sleep(0.05)

        try:
            await world.call(make(), fn, watched.watch(Heavy()))
        finally:
            if world.blocking:
                await world.sleep(0.1)  # the abandoned function ends

    return scenario


async def finds_no_time(world: World, watched: Watched) -> None:
    async def fn(ctx: Context) -> None:
        heavy = watched.watch(Heavy())
        ctx.child(deadline=0.0).check()
        del heavy

    await world.execute(Timeout(5.0, cooperative=True), fn)


async def is_rejected(world: World, watched: Watched) -> None:
    breaker = CircuitBreaker(1)
    bulkhead = Bulkhead(1, queue=1, max_wait=0.001)
    await world.attempt(breaker, watched.fn)

    async def outer(ctx: Context) -> None:
        heavy = watched.watch(Heavy())
        await world.attempt(Retry(2, on=Exception, backoff=[0]).wrap(breaker), watched.fn)
        await world.attempt(bulkhead, watched.fn)
        with deadline(0.001):
            await world.attempt(bulkhead, watched.fn)
        del heavy

    await world.execute(bulkhead, outer)


def refused_by(make: Callable[[], Policy[Any]]) -> Scenario:
    """Return a scenario in which the policy refuses the call of a frame that holds an object."""

    async def scenario(world: World, watched: Watched) -> None:
        policy = make()
        heavy = watched.watch(Heavy())
        await world.execute(policy, watched.fn)
        del heavy

    return scenario


def isolated() -> Policy[Any]:
    breaker = CircuitBreaker()
    breaker.isolate()
    return breaker


def twice(policy: Policy[Any]) -> Policy[Any]:
    """Return a pipeline in which a policy with one permit refuses what it has admitted."""
    return policy.wrap(policy)


def throttling() -> Policy[Any]:
    throttle = AdaptiveThrottle(min_calls=1, most=1.0, on=Boom, rng=SimpleNamespace(uniform=min))
    while not throttle.stats().rejected:
        throttle.capture(lambda ctx: Watched().fail())
    return throttle


async def cannot_take_the_context(world: World, watched: Watched) -> None:
    async def fn() -> None: ...

    heavy = watched.watch(Heavy())
    await world.execute(Fallback("x"), fn)
    del heavy


async def fails_again_and_again_in_half_open(world: World, watched: Watched) -> None:
    breaker = CircuitBreaker(1, open_for=0.0001)
    for _ in range(3):
        await world.attempt(breaker, watched.fn)
        await world.sleep(0.001)


async def handler_raises_another(world: World, watched: Watched) -> None:
    def handler(failure: Any, ctx: Context) -> None:
        watched.fail()

    await world.execute(Fallback(handler=handler), watched.fn)


async def asynchronous_handler_raises(world: World, watched: Watched) -> None:
    async def handler(failure: Any, ctx: Context) -> None:
        raise failure.error

    await world.execute(Fallback(handler=handler if not world.blocking else world.native(handler)), watched.fn)


def predicate_raises(word: str) -> Scenario:
    async def scenario(world: World, watched: Watched) -> None:
        def predicate(value: object) -> bool:
            watched.fail()
            return True

        for kind in (Retry, CircuitBreaker, Fallback):
            settings: dict[str, Any] = {"on": Exception, word: predicate}
            if kind is Retry:
                settings["backoff"] = [0]
            await world.attempt(kind(**settings), watched.fn)

            async def fn(ctx: Context) -> Any:
                return watched.watch(Heavy())

            await world.attempt(kind(**settings), fn)

    return scenario


class Stop(StopIteration):
    """One that can be watched."""


def stops_iterating(run: Callable[[Policy[Any], Callable[[], Any]], Any]) -> Scenario:
    async def scenario(world: World, watched: Watched) -> None:
        policy = Fallback("x", on=Boom).wrap(Retry(2, on=StopIteration, backoff=[0]), Driven(), Timeout(5.0))
        run(policy, lambda: watched.fail(Stop))

    return scenario


async def is_misused(world: World, watched: Watched) -> None:
    heavy = watched.watch(Heavy())
    policy = Fallback("x").wrap(Retry(on=Exception), CircuitBreaker(), Bulkhead(1))
    if world.blocking:
        policy.execute(lambda ctx: asyncio.sleep(0, heavy))
    else:
        await policy.aexecute(lambda ctx: heavy)


class Custom(Policy):
    """Lowered in blocking code."""

    async def around(self, call: Any, ctx: Context) -> Any:
        try:
            return await call(ctx)
        except ValueError:
            return None
        finally:
            ctx.child()


async def tries_in_a_block(world: World, watched: Watched, **settings: Any) -> None:
    async for attempt in Attempts(world, Retry(3, on=Boom, **{"backoff": [0], **settings})):
        with attempt:
            watched.fail()


def no_delays() -> Iterator[float]:
    raise Boom
    yield 0


async def fails_in_blocks(world: World, watched: Watched) -> None:
    breaker, bulkhead = CircuitBreaker(), Bulkhead(1)
    if world.blocking:
        with breaker.guard(), bulkhead.slot(), deadline(5.0):
            watched.fail()
    else:
        async with breaker.guard(), bulkhead.slot(), deadline(5.0):
            watched.fail()


async def with_listeners(world: World, watched: Watched) -> None:
    pipeline = Policy.wrap(
        Fallback("x", on=ValueError),
        Retry(3, on=Boom, backoff=[0], on_retry=lambda event: None),
        CircuitBreaker(2, on_transition=lambda event: None),
        Timeout(5.0),
        listeners=[lambda event: None],
    )
    unsubscribe = events.subscribe(lambda event: None)
    try:
        await world.execute(pipeline, watched.fn, Context())
    finally:
        unsubscribe()


async def nests_in_one_breaker(world: World, watched: Watched) -> None:
    pipeline = Retry(2, on=Boom, backoff=[0]).wrap(CircuitBreaker())

    async def fn(heavy: Heavy) -> None:
        await world.call(pipeline, watched.fn)

    await world.call(pipeline, fn, watched.watch(Heavy()))


async def nests(world: World, watched: Watched) -> None:
    pipeline = Retry(2, on=Boom, backoff=[0]).wrap(Timeout(5.0), CircuitBreaker())

    async def fn(ctx: Context) -> None:
        heavy = watched.watch(Heavy())
        await world.execute(pipeline, watched.fn, Context())
        del heavy

    await world.execute(pipeline, fn)


async def keeps_an_error(world: World, watched: Watched) -> None:
    cache = Cache(60, key=lambda ctx: "same", keep_errors=Boom)
    for _ in range(2):
        await world.attempt(cache, watched.fn)
    cache.clear()


SCENARIOS: dict[str, Scenario] = {
    "no policy": without_policy,
    "Retry, not handled": executes(lambda: Retry(on=ValueError)),
    "Retry, out of attempts": executes(lambda: Retry(3, on=Boom, backoff=[0])),
    "Retry, out of time": executes(lambda: Retry(3, on=Boom, backoff=[9]), lambda: Context(timeout=5.0)),
    "Retry, out of max_elapsed": executes(lambda: Retry(3, on=Boom, backoff=[9], max_elapsed=5.0)),
    "Retry, too late": executes(Retry, lambda: Context(timeout=0)),
    "Retry, wrapped": executes(lambda: Retry(2, on=Boom, backoff=[0], wrap=True)),
    "Retry, wrapped result": executes(lambda: Fallback("x").wrap(Retry(1, on_result=lambda result: True, wrap=True))),
    "Retry, success in the end": calls(
        lambda: Retry(on=Boom, backoff=[0]), lambda watched, ctx: watched.fail() if ctx.attempt < 3 else "fine"
    ),
    "Retry, discarded results": calls(lambda: Retry(3, on_result=lambda result: True, backoff=[0]), returns_an_object),
    "Retry, discarded response of an error": calls(lambda: Retry(2, on=Boom, backoff=[0]), fails_with_a_response),
    "Retry around Retry": executes(lambda: Retry(2, on=Boom, backoff=[0]).wrap(Retry(2, on=Boom, backoff=[0]))),
    "Timeout, failed": executes(lambda: Timeout(5.0)),
    "Timeout, cut off": cut_off(lambda: Retry(2, backoff=[0]).wrap(Timeout(0.02))),
    "Hedge, cut off": cut_off(lambda: Timeout(0.02).wrap(Hedge(5))),
    "Timeout, too late": executes(lambda: Timeout(5.0), lambda: Context(timeout=0)),
    "Timeout, cooperative": executes(lambda: Timeout(5.0, cooperative=True)),
    "Timeout, cooperative and out of time": finds_no_time,
    "CircuitBreaker, counted": executes(CircuitBreaker),
    "CircuitBreaker, opened": executes(lambda: CircuitBreaker(1)),
    "CircuitBreaker, ignored": executes(lambda: CircuitBreaker(ignore=Boom)),
    "CircuitBreaker, timed": executes(lambda: CircuitBreaker(SlowRatio(0.5, slower_than=1.0))),
    "CircuitBreaker, probes": fails_again_and_again_in_half_open,
    "Bulkhead": executes(lambda: Bulkhead(1)),
    "RateLimiter": executes(lambda: RateLimiter(1000)),
    "AdaptiveLimit": executes(lambda: AdaptiveLimit(60, initial=1, min_samples=1, on=Boom)),
    "AdaptiveThrottle": executes(lambda: AdaptiveThrottle(on=Boom)),
    "Chaos": executes(lambda: Chaos(result=1)),
    "Cache": executes(lambda: Cache(60, key=lambda ctx: "same")),
    "Cache, keeps errors": keeps_an_error,
    "SingleFlight": executes(lambda: SingleFlight(key=lambda ctx: "same")),
    "Keyed": executes(lambda: Keyed(lambda key: Retry(2, on=Boom, backoff=[0]), lambda ctx: "same")),
    "Hedge": executes(lambda: Hedge(5, on=Boom)),
    "Hedge, attempt after attempt": executes(lambda: Hedge(5, on=Boom, eager=True)),
    "Hedge, attempts beside one another": executes(lambda: Hedge(0, on=Boom, budget=None)),
    "rejected": is_rejected,
    "CircuitBreaker, isolated": refused_by(isolated),
    "Bulkhead, full": refused_by(lambda: twice(Bulkhead(1))),
    "Bulkhead, waited in vain": refused_by(lambda: twice(Bulkhead(1, queue=1, max_wait=0.001))),
    "AdaptiveLimit, full": refused_by(lambda: twice(AdaptiveLimit(60, initial=1))),
    "AdaptiveThrottle, refusing": refused_by(throttling),
    "Fallback, not handled": executes(lambda: Fallback("x", on=ValueError)),
    "Fallback, answered": executes(lambda: Fallback("x")),
    "Fallback, handled": executes(lambda: Fallback(handler=lambda failure, ctx: "x")),
    "Fallback, handler raises another": handler_raises_another,
    "Fallback, handler unwraps": executes(lambda: Fallback(handler=lambda failure, ctx: failure.unwrap())),
    "Fallback, asynchronous handler raises": asynchronous_handler_raises,
    "Fallback, results": calls(lambda: Fallback("x", on_result=lambda result: True), returns_an_object),
    "Fallback, handled results": calls(
        lambda: Fallback(handler=lambda failure, ctx: "x", on_result=lambda result: True), returns_an_object
    ),
    "a predicate raises (on)": predicate_raises("on"),
    "a predicate raises (ignore)": predicate_raises("ignore"),
    "a predicate raises (on_result)": predicate_raises("on_result"),
    "a custom policy": executes(Custom),
    "a custom policy, driven": executes(Driven),
    "all of them": executes(
        lambda: Policy.wrap(
            Fallback("x", on=ValueError),
            Retry(2, on=Boom, backoff=[0]),
            Custom(),
            CircuitBreaker(),
            Driven(),
            Bulkhead(1),
            Timeout(5.0),
        )
    ),
    "with a context": executes(lambda: Retry(2, on=Boom, backoff=[0]).wrap(Timeout(5.0)), Context),
    "with listeners": with_listeners,
    "nested executions": nests,
    "nested executions, one breaker": nests_in_one_breaker,
    "capture": captures,
    "decorator": decorates,
    "proxy": through_a_proxy,
    "proxy, entered": entering_through_a_proxy,
    "proxy, inside": failing_inside_an_entered_proxy,
    "StopIteration": stops_iterating(lambda policy, fn: policy.call(fn)),
    "StopIteration, decorated": stops_iterating(lambda policy, fn: policy(fn)()),
    "misuse": is_misused,
    "misuse, without a parameter": cannot_take_the_context,
    "attempts()": tries_in_a_block,
    "attempts(), the backoff raises": partial(tries_in_a_block, backoff=no_delays),
    "blocks": fails_in_blocks,
    "KeyboardInterrupt": calls(five_policies, raises(KeyboardInterrupt)),
    "GeneratorExit": calls(five_policies, raises(GeneratorExit)),
}


@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_failed_call_leaves_no_reference_cycle(world: World, name: str) -> None:
    """Every object of the call is freed with the last reference to it, for each failure of each policy."""
    watched = Watched()

    async def scenario() -> None:
        try:
            await SCENARIOS[name](world, watched)
        except (Exception, KeyboardInterrupt, GeneratorExit):  # pytest's own outcomes are others
            pass

    async def main() -> list[Any]:
        await scenario()  # chains are composed, workers started and modules imported once
        with no_collector():
            await scenario()
            for _ in range(1000):  # a worker or loop releases what it ran only shortly after its caller continues
                await world.sleep(0.002)
                if not watched.alive:
                    break
            return watched.alive

    assert await main() == []
    assert watched.seen or "too late" in name or name == "Retry, wrapped result"


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "proxy" not in name])
async def test_a_failed_driven_call_leaves_no_cycle(threads: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in blocking code without lowering."""
    monkeypatch.setattr(lowering, "enabled", False)
    await test_a_failed_call_leaves_no_reference_cycle(threads, name)


#: Policies that are shared for the life of a process.
SHARED: dict[str, Callable[[], Policy[Any]]] = {
    "Retry": lambda: Retry(2, on=Boom, backoff=[0]),
    "cooperative Timeout": lambda: Timeout(60.0, cooperative=True),
    "Timeout": lambda: Timeout(60.0),
    "CircuitBreaker": lambda: CircuitBreaker(ConsecutiveFailures(10**9)),
    "open CircuitBreaker": lambda: CircuitBreaker(1, open_for=3600.0),
    "CircuitBreaker over time": lambda: CircuitBreaker(FailureRatio(1.0, min_calls=10**9, window=3600.0)),
    "CircuitBreaker over calls": lambda: CircuitBreaker(
        FailureRatio(1.0, min_calls=50, last=100) | SlowRatio(1.0, slower_than=9.0)
    ),
    "Bulkhead": lambda: Bulkhead(1),
    "RateLimiter": lambda: RateLimiter(Rate(1e9), Rate(1e9, burst=1e9)),
    "Fallback": lambda: Fallback(handler=lambda failure, ctx: "x"),
    "a custom policy, driven": Driven,
    "all of them": lambda: Policy.wrap(
        Fallback("x", on=ValueError),
        Retry(2, on=Boom, backoff=[0]),
        CircuitBreaker(ConsecutiveFailures(10**9)),
        Bulkhead(1),
        Timeout(60.0, cooperative=True),
    ),
}


@pytest.mark.parametrize("name", SHARED)
async def test_a_cancelled_call_leaves_no_reference_cycle(tasks_world: World, name: str) -> None:
    policy = SHARED[name]()
    watched = Watched()

    async def fn(ctx: Context) -> None:
        heavy = watched.watch(Heavy())
        await anyio.sleep(4)
        del heavy

    async def cancelled() -> None:
        with anyio.move_on_after(0.02):
            await policy.aexecute(fn)

    async def main() -> list[Any]:
        await cancelled()
        with no_collector():
            await cancelled()
            await anyio.sleep(0)
            return watched.alive

    assert await main() == []
    assert watched.seen == 2


async def test_the_watch_notices_a_reference_cycle(world: World) -> None:
    """A local variable that holds the exception when it is raised again: what these tests look for."""
    watched = Watched()

    class Leaking(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            try:
                return await call(ctx)
            except Boom as error:
                saved = error
                raise saved from None

    async def main() -> list[Any]:
        with no_collector():
            try:
                await world.execute(Leaking(), watched.fn)
            except Boom:
                pass
            return watched.alive

    assert await main() == ["Heavy", "Boom"]
    gc.collect()
    assert watched.alive == []


@pytest.mark.parametrize(
    "policy", [Policy.wrap(Retry(2), Timeout(60), CircuitBreaker(5)), Hedge(5), SingleFlight(), Cache(60)], ids=repr
)
async def test_a_task_that_outlives_its_call_keeps_no_earlier_calls(in_asyncio: World, policy: Policy[Any]) -> None:
    """Each call of this job starts the task that makes the next one, in a copy of its context variables."""
    kept, done = list[int](), asyncio.Event()

    async def job(run: int) -> None:
        kept.append(sum(issubclass(type(it), Context | Admitted) for it in gc.get_objects()))
        if run < 9:
            tasks["next"] = asyncio.create_task(later(run + 1))
        else:
            done.set()

    async def later(run: int) -> None:
        await asyncio.sleep(0)
        await policy.acall(job, run)

    tasks: dict[str, Any] = {}
    with no_collector():
        await later(0)
        await done.wait()
        await tasks["next"]
    assert kept[9] <= kept[1]


async def test_a_task_that_outlives_its_block_keeps_no_call_around_the_block(in_asyncio: World) -> None:
    tasks: list[asyncio.Task[None]] = []

    async def fn(heavy: Heavy) -> None:
        with deadline(60):
            tasks.append(asyncio.create_task(asyncio.sleep(60)))

    watched = Watched()
    await Retry(2).wrap(listeners=[str]).acall(fn, watched.watch(Heavy()))
    gc.collect()
    assert (watched.seen, watched.alive) == (1, [])
    tasks[0].cancel()


# --- no growth -------------------------------------------------------------------------------

CALLS = 20_000
FEWER = 2_000  # for policies whose calls are slow

#: What may remain after any number of calls: the loop discards a cancelled timer only when its time comes,
#: and trio keeps up to a thousand of them, at five blocks each.
LEFTOVERS = 400
CANCELLED_TIMERS = 6_000


def fill_free_lists() -> None:
    """Fill CPython's lists of freed tuples, up to 2,000 per length, which count as allocated."""
    for length in range(1, 20):
        [tuple(range(length)) for _ in range(2_000)]


async def left_behind(make: Callable[[int], Awaitable[None]], count: int) -> int:
    """Return how many blocks or tracked objects, whichever are more, remain after this number of calls."""
    with no_collector():
        await make(200)
        fill_free_lists()
        blocks, objects = sys.getallocatedblocks(), len(gc.get_objects())
        await make(count)
        return max(sys.getallocatedblocks() - blocks, len(gc.get_objects()) - objects)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [False, True], ids=["succeeding", "failing"])
@pytest.mark.parametrize("name", SHARED)
async def test_many_calls_leave_no_more_behind_than_one(world: World, name: str, failing: bool) -> None:
    """With the cyclic collector off: neither objects that it would free, nor others, accumulate."""
    policy = SHARED[name]()
    ctx = Context()

    async def fn(inner: Context) -> str:
        if failing:
            raise Boom("no")
        return "fine"

    async def make(count: int) -> None:
        for number in range(count):
            await world.attempt(policy, fn, ctx if number % 2 else None)
            if number % 100 == 0:
                await world.sleep(0)  # loops discard cancelled timers in their turns

    timers = name == "Timeout" and not world.blocking
    count = CALLS if name == "all of them" or timers else FEWER
    assert await left_behind(make, count) < (CANCELLED_TIMERS if timers else LEFTOVERS)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["decorated", "proxied", "awaited through a proxy", "blocks"])
async def test_many_calls_by_decorators_proxies_and_blocks_leave_nothing_behind(tasks_world: World, way: str) -> None:
    """The small objects that are made for each call are freed."""
    retry, breaker, bulkhead = Retry(2, on=Boom, backoff=[0]), CircuitBreaker(10**9), Bulkhead(1)
    pipeline, client = retry.wrap(breaker, bulkhead), Fine()
    decorated, proxy, aproxy = pipeline(lambda: "fine"), pipeline.proxy(client), pipeline.aproxy(client)

    async def once() -> None:
        if way == "decorated":
            decorated()
        elif way == "proxied":
            proxy.get()
            pipeline.proxy(client, "get")
        elif way == "awaited through a proxy":
            await aproxy.later()
            async with aproxy.enter():
                pass
        else:
            with breaker.guard(), bulkhead.slot(), deadline(60.0):
                pass
            for attempt in retry.attempts():
                with attempt:
                    pass

    async def make(count: int) -> None:
        for _ in range(count):
            await once()

    assert await left_behind(make, FEWER) < LEFTOVERS
