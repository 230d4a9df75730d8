"""A cancelled call leaves everything as it was, at whichever suspension it is cancelled.

The harness runs a scene once and counts its suspensions. Then it runs the scene again for each of them and
interferes there: it cancels the task, cancels the outer scope, throws the cancellation into the coroutine, or
closes the coroutine (`GeneratorExit`). So there is no point at which a permit, the slot of a probe, a place in a
queue or the ambient context could be lost without a failing test.

Threads cannot be cancelled; `test_interrupts.py` interrupts them instead.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import pytest

from resilience import (
    AdaptiveLimit,
    AdaptiveThrottle,
    Bulkhead,
    Cache,
    CircuitBreaker,
    CircuitState,
    Context,
    Fallback,
    Hedge,
    Keyed,
    Policy,
    Rate,
    RateLimiter,
    Retry,
    SingleFlight,
    Timeout,
    current_context,
    deadline,
    events,
)
from resilience.clock import clock as process_clock
from resilience.testing import virtual_time
from resilience.work import Gate, IdempotencyKey, KeyInUse, Once
from tests.callers import leaders
from tests.conftest import Boom, FakeClock, Script, Virtual, World

LONG = 60.0

# --- the harness ---


class Closed(BaseException):
    """Raised in place of the `GeneratorExit` of a closed coroutine."""


class Suspensions:
    """Awaits a coroutine, counts its suspensions, and interferes at one of them.

    :param at: the number of the suspension, from 1; 0 is none.
    :param act: called at that suspension. An exception that it returns is thrown in instead of the wait.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int, act: Callable[[], BaseException | None]) -> None:
        self.coroutine = coroutine
        self.at = at
        self.act = act
        self.count = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[], Any] = partial(self.coroutine.send, None)
        while True:
            try:
                waiting = resume()
            except StopIteration as done:
                return done.value
            self.count += 1
            if self.count == self.at and (thrown := self.act()) is not None:
                if isinstance(thrown, GeneratorExit):
                    self.coroutine.close()
                    raise Closed
                resume = partial(self.coroutine.throw, thrown)
                continue
            try:
                resume = partial(self.coroutine.send, (yield waiting))
            except BaseException as error:  # the event loop interferes
                resume = partial(self.coroutine.throw, error)


@dataclass
class Scene:
    """A call, and what must hold after its cancellation.

    :param call: starts it.
    :param as_before: asserts that the call left nothing behind.
    :param seen: the events of the execution.
    """

    call: Callable[[], Coroutine[Any, Any, Any]]
    as_before: Callable[[], None] = lambda: None
    seen: list[Any] = field(default_factory=list)


def cancel_task() -> None:
    """Cancel the task from outside, while it waits."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


WAYS = ["asyncio-task", "asyncio-throw", "asyncio-close", "asyncio-scope", "trio-scope"]


async def interfere(scene: Scene, way: str, at: int) -> tuple[int, object]:
    """Run the scene and interfere at one suspension. Return the number of suspensions, and the result or the error."""
    acts: dict[str, Callable[[], BaseException | None]] = {
        "task": cancel_task,
        "throw": asyncio.CancelledError,
        "close": GeneratorExit,
    }
    outcome: object = None
    with anyio.CancelScope() as scope:
        acts["scope"] = scope.cancel
        run = Suspensions(scene.call(), at, acts[way.partition("-")[2]])
        try:
            outcome = await run
        except (Closed, anyio.get_cancelled_exc_class()) as error:
            outcome = type(error)
            if scope.cancel_called:
                raise
        finally:
            ambient = current_context()
            assert (ambient.operation, ambient.remaining()) == (None, float("inf")), "the context is still ambient"
    if way == "asyncio-task":
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == (1 if run.count >= at > 0 else 0), "the count of cancellations is wrong"
        while task.cancelling():
            task.uncancel()
    return run.count, outcome


def sweep(make: Callable[[], Scene], way: str) -> None:
    """Interfere at every suspension of the scene, in a run for each, and check that nothing is left behind."""
    world = World(way.partition("-")[0])
    points, result = world.run(lambda: interfere(make(), way, 0))
    assert result == "fine"
    assert points >= 3
    for at in range(1, points + 1):
        scene = make()
        count, outcome = world.run(partial(interfere, scene, way, at))
        where = f"{way} at suspension {at} of {points}"
        if count < at and world.name == "trio":  # trio schedules tasks in random order: this run suspended less often
            assert outcome == "fine"
            continue
        assert isinstance(outcome, type), f"{where}: swallowed, {outcome!r} came out"
        assert Timeout.abandoned() == 0, where
        finished = [event for event in scene.seen if isinstance(event, events.ExecutionFinished)]
        assert [event.outcome for event in finished] in ([], [None]), f"{where}: it was an outcome"
        try:
            scene.as_before()
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error


# --- what the scenes are made of ---


async def work(ctx: Context | None = None) -> str:
    """Wait in three ways, and succeed."""
    await anyio.sleep(0)
    await anyio.sleep(0.0001)
    await anyio.sleep(0)
    return "fine"


async def fail_at_first(ctx: Context) -> str:
    """Fail in the first attempt."""
    await anyio.sleep(0)
    if ctx.attempt == 1:
        raise Boom
    return await work()


def fail(ctx: Context) -> None:
    """Fail in blocking code."""
    raise Boom


def one_failure_short(**parameters: Any) -> CircuitBreaker:
    """Return a closed breaker that opens with the next failure, and whose count a success would reset."""
    breaker = CircuitBreaker(2, **parameters)
    breaker.capture(fail)
    return breaker


def still_one_failure_short(breaker: CircuitBreaker) -> None:
    assert breaker.state is CircuitState.CLOSED, "the cancellation was counted as a failure"
    breaker.capture(fail)
    assert breaker.state is CircuitState.OPEN, "the cancellation was counted as a success"


def about_to_probe(**parameters: Any) -> CircuitBreaker:
    """Return an open breaker whose next call is a probe."""
    breaker = CircuitBreaker(1, open_for=0.0001, **parameters)
    breaker.capture(fail)
    process_clock.sleep(0.0002)
    return breaker


def still_about_to_probe(breaker: CircuitBreaker) -> None:
    assert breaker.state is CircuitState.HALF_OPEN, "the cancelled probe was counted"
    assert breaker.stats().probes == 0, "the cancelled probe kept its slot"
    assert breaker.stats().opened == 1
    assert breaker.execute(lambda ctx: "admitted") == "admitted"
    assert breaker.state is CircuitState.CLOSED


def no_probe_is_left(breaker: CircuitBreaker) -> None:
    stats = breaker.stats()
    assert (stats.probes, stats.opened) == (0, 1), "the cancelled probe kept its slot, or was counted"


def same(ctx: Context) -> str:
    return "same"


def no_flight_is_left(policy: SingleFlight | Cache) -> None:
    assert policy.execute(lambda ctx: "second call") in ("second call", "old"), "the cancelled flight never ends"
    assert not leaders(policy)


def nothing_is_cached(cache: Cache) -> None:
    assert cache.stats().size == 0
    no_flight_is_left(cache)


def no_turn_is_taken(limiter: RateLimiter) -> None:
    assert limiter.stats().queued == 0
    assert limiter.stats().next_turn <= 1 / 32, "a turn was kept"


def gate_is_empty(gate: Gate) -> None:
    assert gate.stats().inside == 0
    assert gate.drain(0), "the cancelled call is still counted"


def all_permits_are_free(bulkhead: Bulkhead) -> None:
    stats = bulkhead.stats()
    assert (stats.in_flight, stats.queued) == (0, 0), "a permit or a place in the queue was kept"
    assert stats.rejected == 0
    with bulkhead.slot():
        assert bulkhead.stats().in_flight == 1


def executing(policy: Policy[Any], fn: Any = work, as_before: Callable[[], None] = lambda: None) -> Scene:
    """Return the scene of one execution, with an operation and a timeout that must not stay ambient."""
    scene = Scene(lambda: pipeline.aexecute(fn, Context(operation="scene", timeout=LONG)), as_before)
    pipeline = Policy.wrap(policy, listeners=[scene.seen.append])
    return scene


def checked(policy: Any, as_before: Callable[[Any], None]) -> Scene:
    """Return the scene of one execution under this policy, which is checked afterwards."""
    return executing(policy, work, partial(as_before, policy))


# --- the scenes ---


def single_policies() -> dict[str, Callable[[], Scene]]:
    def once() -> Scene:
        store: dict[str, Any] = {}
        policy = Once(store, key=lambda ctx: "key")

        def as_before() -> None:
            [row] = store.values()
            assert row.result is None, "the cancelled call was kept as done"
            assert isinstance(policy.capture(lambda ctx: "again").error, KeyInUse)  # type: ignore[union-attr]

        return executing(policy, work, as_before)

    def limiter() -> Scene:
        policy = RateLimiter(Rate(32, burst=1), Rate(10**6))
        scene = executing(policy, work, lambda: no_turn_is_taken(policy))
        call = scene.call

        def waits() -> Coroutine[Any, Any, Any]:
            policy.try_take()
            return call()

        scene.call = waits
        return scene

    def hedge_of_permits() -> Scene:
        policy = Bulkhead(3)
        hedge = Hedge(0, hedges=2, budget=None, on=BaseException)
        return executing(hedge.wrap(policy), work, lambda: all_permits_are_free(policy))

    def refresh() -> Scene:
        policy = Cache(0.0001, key=same, stale=LONG, on=BaseException)
        policy.execute(lambda ctx: "old")
        process_clock.sleep(0.0002)

        def as_before() -> None:
            assert (policy.stats().size, policy.stats().stale) == (1, 0), "a cancellation was answered"
            no_flight_is_left(policy)

        return executing(policy, work, as_before)

    def keyed() -> Scene:
        bulkhead = Bulkhead(1)
        return executing(Keyed(lambda key: bulkhead, same), work, lambda: all_permits_are_free(bulkhead))

    return {
        "flight": lambda: checked(SingleFlight(key=same), no_flight_is_left),
        "cache": lambda: checked(Cache(LONG, key=same, keep_errors=BaseException), nothing_is_cached),
        "refresh": refresh,
        "keyed": keyed,
        "limiter": limiter,
        "hedge": lambda: executing(Hedge(LONG, on=BaseException)),
        "hedge-of-permits": hedge_of_permits,
        "gate": lambda: checked(Gate(), gate_is_empty),
        "once": once,
        "key": lambda: executing(IdempotencyKey()),
        "retry": lambda: executing(Retry(on=BaseException)),
        "timeout": lambda: executing(Timeout(LONG)),
        "cooperative": lambda: executing(Timeout(LONG, cooperative=True)),
        "fallback": lambda: executing(Fallback("instead", on=BaseException)),
        "breaker": lambda: checked(
            one_failure_short(on=BaseException, on_result=lambda value: False), still_one_failure_short
        ),
        "probe": lambda: checked(about_to_probe(), still_about_to_probe),
        "probe-of-the-users": lambda: checked(about_to_probe(probe=work), no_probe_is_left),
        "bulkhead": lambda: checked(Bulkhead(1), all_permits_are_free),
    }


def policies_with_failures() -> dict[str, Callable[[], Scene]]:
    def retry() -> Scene:
        return executing(Retry(3, on=Boom, backoff=[0.0001]), fail_at_first)

    def discarding() -> Scene:
        class Response:
            async def aclose(self) -> None:
                await anyio.sleep(0)
                await anyio.sleep(0.0001)

        async def fn(ctx: Context) -> object:
            return Response() if ctx.attempt == 1 else await work()

        return executing(Retry(on_result=lambda result: result != "fine", backoff=[0.0001]), fn)

    def handler() -> Scene:
        async def answer(failure: object, ctx: Context) -> str:
            return await work()

        return executing(Fallback(handler=answer), fail_at_first)

    return {"retry": retry, "discarding": discarding, "handler": handler}


def pipelines() -> dict[str, Callable[[], Scene]]:
    def usual() -> Scene:
        breaker, bulkhead = about_to_probe(), Bulkhead(1)

        def as_before() -> None:
            still_about_to_probe(breaker)
            all_permits_are_free(bulkhead)

        pipeline = Policy.wrap(
            Fallback("instead"), Timeout(LONG), breaker, bulkhead, Retry(on=Boom, backoff=[0.0001]), Timeout(LONG / 2)
        )
        return executing(pipeline, fail_at_first, as_before)

    def nested() -> Scene:
        breaker, outer, inner = one_failure_short(), Bulkhead(1), Bulkhead(1)

        def as_before() -> None:
            still_one_failure_short(breaker)
            all_permits_are_free(outer)
            all_permits_are_free(inner)

        async def fn(ctx: Context) -> Any:
            await anyio.sleep(0)
            return await Policy.wrap(Retry(on=Boom, backoff=[0]), inner, Timeout(LONG)).aexecute(fail_at_first)

        return executing(Policy.wrap(Timeout(LONG), breaker, outer), fn, as_before)

    def twice() -> Scene:
        bulkhead = Bulkhead(2)
        pipeline = Policy.wrap(Timeout(LONG), bulkhead, Timeout(LONG), bulkhead, Timeout(LONG, cooperative=True))
        return executing(pipeline, work, lambda: all_permits_are_free(bulkhead))

    return {"usual": usual, "nested": nested, "twice": twice}


def blocks() -> dict[str, Callable[[], Scene]]:
    def attempts() -> Scene:
        async def call() -> str:
            async with deadline(LONG):
                async for attempt in Retry(on=Boom, backoff=[0.0001]).attempts():
                    with attempt:
                        await anyio.sleep(0)
                        if attempt.number == 1:
                            raise Boom
                        return await work()
            raise AssertionError

        return Scene(call)

    def block(policy: Any, make: Callable[[], Any], as_before: Callable[[Any], None]) -> Scene:
        async def call() -> str:
            async with make():
                return await work()

        return Scene(call, partial(as_before, policy))

    def guard() -> Scene:
        breaker = about_to_probe()
        return block(breaker, breaker.guard, still_about_to_probe)

    def slot() -> Scene:
        bulkhead = Bulkhead(1)
        return block(bulkhead, bulkhead.slot, all_permits_are_free)

    def budget() -> Scene:
        async def call() -> str:
            with deadline(LONG):
                async with deadline(LONG / 2):
                    return await work()

        return Scene(call)

    return {"attempts": attempts, "guard": guard, "slot": slot, "deadline": budget}


def streaming() -> dict[str, Callable[[], Scene]]:
    def stream(**limits: Any) -> Scene:
        bulkhead, opened, closed = Bulkhead(1), [], []

        async def items() -> AsyncIterator[str]:
            opened.append(1)
            try:
                await anyio.sleep(0)
                if len(opened) == 1:
                    raise Boom
                for item in ("fi", "ne"):
                    await anyio.sleep(0.0001)
                    yield item
            finally:
                closed.append(1)

        async def call() -> str:
            policy = Policy.wrap(Timeout(LONG), bulkhead, Retry(on=Boom, backoff=[0.0001]))
            async with aclosing(policy.streaming(**limits).call(items)) as stream:
                return "".join([item async for item in stream])

        def as_before() -> None:
            all_permits_are_free(bulkhead)
            assert len(closed) == len(opened), "a source is open"

        return Scene(call, as_before)

    return {"stream": stream, "limited-stream": partial(stream, first=LONG, idle=LONG)}


SCENES = {
    f"{group.__name__}-{name}": make
    for group in (single_policies, policies_with_failures, pipelines, blocks, streaming)
    for name, make in group().items()
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", SCENES.values(), ids=SCENES.keys())
def test_a_call_that_is_cancelled_leaves_everything_as_it_was(make: Callable[[], Scene], way: str) -> None:
    """At any of its suspensions. In virtual time, so that a busy machine does not change the number of waits."""
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    with virtual_time(ignore=others):
        sweep(make, way)


# --- queues ---


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("way", WAYS)
def test_a_cancelled_waiting_call_leaves_the_queue_or_passes_its_permit_on(way: str, turns: int) -> None:
    """Before, at or after the grant, which comes after `turns` turns of the event loop: the next call is admitted."""
    world = World(way.partition("-")[0])
    behind: list[str] = []

    async def run(at: int) -> tuple[int, object, Bulkhead]:
        bulkhead = Bulkhead(1, queue=5)
        slot = bulkhead.slot()
        slot.__enter__()
        released: list[bool] = []

        async def release() -> None:
            for _ in range(turns):
                await anyio.sleep(0)
            slot.__exit__(None, None, None)
            released.append(True)

        async def wait_behind() -> None:
            while not bulkhead.stats().queued and not released:
                await anyio.sleep(0)
            behind.append(await bulkhead.aexecute(work))

        scene = executing(Policy.wrap(Timeout(LONG), bulkhead))
        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(release)
                group.start_soon(wait_behind)
                count, outcome = await interfere(scene, way, at)
        return count, outcome, bulkhead

    points, outcome, _ = world.run(lambda: run(0))
    assert outcome == "fine"
    for at in range(1, points + 1):
        behind.clear()
        _, outcome, bulkhead = world.run(partial(run, at))
        where = f"{way} at suspension {at} of {points}"
        assert isinstance(outcome, type) or at == points, f"{where}: swallowed"
        assert behind == ["fine"], f"{where}: the next call in the queue was not admitted"
        all_permits_are_free(bulkhead)


# --- when the call has ended ---


async def test_a_function_that_cancels_its_own_task_and_returns_keeps_its_result(in_asyncio: World) -> None:
    """The cancellation is delivered at the next suspension, which is outside of the call."""
    fn = Script("fine", doing=lambda ctx: cancel_task()).function()

    async def call() -> Any:
        result = await Policy.wrap(Fallback("instead"), Timeout(LONG), Bulkhead(1)).aexecute(fn)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        return result

    task = asyncio.create_task(call())
    assert await task == "fine"


# --- a cancellation that the function hides ---


class Client:
    """Its first call lasts until it is cancelled. Then its clean-up fails, which hides the cancellation."""

    calls = 0

    async def __call__(self) -> None:
        self.calls += 1
        try:
            await anyio.sleep(LONG if self.calls == 1 else 0)
        except anyio.get_cancelled_exc_class():
            try:
                raise OSError("broken pipe")
            except OSError:
                raise ConnectionError("clean-up failed") from None


async def test_a_retry_does_not_repeat_a_failure_that_hides_a_cancellation(in_asyncio: World) -> None:
    """asyncio cancels once, so no limit around would end the next attempt."""
    with pytest.raises(ConnectionError, match="clean-up failed"):
        async with asyncio.timeout(0.01):
            await Retry(3, backoff=[0]).acall(Client())
    client = Client()
    with pytest.raises(ConnectionError, match="clean-up failed"):
        async with asyncio.timeout(0.01):
            async for attempt in Retry(3, backoff=[0]).attempts():
                with attempt:
                    await client()


@pytest.mark.parametrize("limit", [None, 0.01], ids=["cancelled", "timeout"])
async def test_a_fallback_does_not_answer_a_failure_that_hides_a_cancellation(
    tasks_world: World, limit: float | None
) -> None:
    """The task would go on, although it was cancelled. But it answers one that hides a timeout inside."""
    fallback = Fallback("instead")
    with pytest.raises(ConnectionError, match="clean-up failed"), anyio.move_on_after(0.01):
        await (fallback if limit is None else Timeout(limit / 2).wrap(fallback)).acall(Client())
    assert await fallback.wrap(Timeout(0.01)).acall(Client()) == "instead"


async def test_a_stale_value_is_no_answer_to_a_failure_that_hides_a_cancellation(
    tasks_world: World, clock: FakeClock
) -> None:
    """And the next caller refreshes the value."""
    cache, client = Cache(1, stale=60, key=lambda *args: "key"), Client()
    assert await cache.acall(Script("old").function()) == "old"
    clock.advance(2)
    with pytest.raises(ConnectionError, match="clean-up failed"), anyio.move_on_after(0.01):
        await cache.acall(client)
    assert await cache.acall(client) is None
    assert client.calls == 2


async def test_a_group_of_failures_that_hide_a_cancellation_is_not_repeated(in_asyncio: World) -> None:
    clients = [Client(), Client()]

    async def load() -> None:
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client())

    with pytest.raises(ExceptionGroup):
        async with asyncio.timeout(0.01):
            await Retry(3, backoff=[0]).acall(load)
    assert [client.calls for client in clients] == [1, 1]


async def test_a_group_with_a_failure_of_its_own_is_repeated(in_asyncio: World) -> None:
    """The group has then cancelled its other children and its body; before Python 3.13, that may leave a request."""
    waits: list[float] = [LONG, LONG, 0]  # of the body, the last one first
    ring = OSError("in a ring")
    ring.__context__ = ExceptionGroup("around itself", [ring])

    async def fail() -> None:
        await asyncio.sleep(0)
        try:
            raise ring
        except OSError:
            raise ConnectionError("reset") from None

    async def load() -> str:
        if not waits:
            return "fine"
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(Client()())
            await asyncio.sleep(waits.pop())
        raise AssertionError

    assert await Retry(4, backoff=[0]).acall(load) == "fine"


@pytest.mark.parametrize("delay", [0, LONG])
async def test_a_hedge_ends_with_a_failure_that_hides_a_cancellation(in_asyncio: World, delay: float) -> None:
    """The other attempts are cut off, and no further one begins."""
    client, began = Client(), []

    async def fetch() -> None:
        began.append(current_context().hedge)
        await (client() if len(began) == 1 else asyncio.sleep(LONG))

    with pytest.raises(ConnectionError, match="clean-up failed"):
        async with asyncio.timeout(0.01):
            await Retry(3, backoff=[0]).wrap(Hedge(delay, eager=True)).acall(fetch)
    assert began == ([0] if delay else [0, 1])


async def test_a_hedge_ends_with_a_failure_that_hides_the_cancellation_of_another_attempt(in_asyncio: World) -> None:
    """Its task was cancelled by other code, such as the end of the event loop, which cancels all tasks."""
    client = Client()

    async def fetch() -> None:
        if current_context().hedge and (task := asyncio.current_task()) is not None:
            task.cancel()
            await client()
        await asyncio.sleep(LONG)

    with pytest.raises(ConnectionError, match="clean-up failed"):
        await Hedge(0).acall(fetch)


async def in_a_group(client: Client) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(client)


@pytest.mark.parametrize("limit", [None, 0.01], ids=["cancelled", "timeout"])
@pytest.mark.parametrize("make", [SingleFlight, partial(Cache, LONG, keep_errors=ConnectionError)])
@pytest.mark.parametrize(("load", "error"), [(Client.__call__, ConnectionError), (in_a_group, ExceptionGroup)])
async def test_no_caller_gets_a_failure_that_hides_the_cancellation_of_another(
    virtual_tasks: Virtual,
    load: Any,
    error: type[Exception],
    make: Callable[[], SingleFlight | Cache],
    limit: float | None,
) -> None:
    """Nor a group of such failures."""
    client, policy = Client(), make()

    async def lead() -> None:
        with pytest.raises(error), anyio.move_on_after(0.01):
            await (policy if limit is None else Timeout(limit / 2).wrap(policy)).acall(load, client)

    async with anyio.create_task_group() as group:
        group.start_soon(lead)
        await anyio.sleep(0.001)
        assert await policy.acall(load, client) is None
    assert client.calls == 2


@pytest.mark.parametrize("limit", [None, 0.01], ids=["cancelled", "timeout"])
async def test_a_failure_that_hides_a_cancellation_is_not_counted(tasks_world: World, limit: float | None) -> None:
    """But one that hides a timeout inside is."""
    breaker, throttle = CircuitBreaker(1), AdaptiveThrottle()
    adaptive = AdaptiveLimit(slower_than=LONG, initial=10, window=0.001, min_samples=1)
    counting = Policy.wrap(breaker, throttle, adaptive)
    with pytest.raises(ConnectionError, match="clean-up failed"), anyio.move_on_after(0.01):
        await (counting if limit is None else Timeout(limit / 2).wrap(counting)).acall(Client())
    assert (breaker.state, throttle.stats().requests, adaptive.stats().limit) == (CircuitState.CLOSED, 0, 10)
    with pytest.raises(ConnectionError, match="clean-up failed"):
        await counting.wrap(Timeout(0.01)).acall(Client())
    assert (breaker.state, throttle.stats().requests, adaptive.stats().limit) == (CircuitState.OPEN, 1, 9)


async def test_all_callers_get_a_failure_that_hides_a_limit_inside(tasks_world: World) -> None:
    client, policy = Client(), SingleFlight()

    async def fetch() -> None:
        with anyio.move_on_after(0.01):
            await client()

    async def caller() -> None:
        with pytest.raises(ConnectionError, match="clean-up failed"):
            await policy.acall(fetch)

    async with anyio.create_task_group() as group:
        group.start_soon(caller)
        group.start_soon(caller)
    assert client.calls == 1


async def test_a_failure_that_hides_the_cancellation_of_another_future_is_repeated(in_asyncio: World) -> None:
    """As that of a pooled connection."""
    loop = asyncio.get_running_loop()
    free: list[asyncio.Future[str]] = [loop.create_future(), loop.create_future()]
    free[0].set_result("fine")
    free[1].cancel()

    async def fetch() -> str:
        try:
            return await free.pop()
        except asyncio.CancelledError:
            raise ConnectionError("the connection was closed") from None

    assert await Retry(2, backoff=[0]).acall(fetch) == "fine"


@pytest.mark.parametrize("is_handled", [True, False])
async def test_a_clean_up_of_a_cancelled_task_is_retried(in_asyncio: World, is_handled: bool) -> None:
    """Also after a timeout, which is a cancellation, too; and after an error that is a context of itself."""
    ring = ConnectionError("b")
    ring.__context__ = OSError("refused")
    ring.__context__.__context__ = ring
    failures = [TimeoutError(), ring, ConnectionError("a")]

    async def clean_up() -> str:
        failure = failures.pop() if failures else None
        if isinstance(failure, TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.sleep(LONG)
        elif failure is not None:
            raise failure
        return "cleaned up"

    async def work() -> str:
        retry = Retry(4, backoff=[0])
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            if is_handled:
                return await retry.acall(clean_up)
        return await retry.acall(clean_up)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "cleaned up"


async def test_a_failed_task_group_is_repeated_although_an_earlier_one_has_left_a_request_to_cancel(
    in_asyncio: World,
) -> None:
    """Before Python 3.13, a group does if a child fails after its body has ended."""
    bodies = [0.0, LONG, 0.0]

    async def fail() -> None:
        raise ConnectionError("refused")

    async def fetch() -> str:
        if not bodies:
            return "fine"
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            if body := bodies.pop(0):
                await asyncio.sleep(body)
        return "never"

    assert await Retry(4, on=Exception, backoff=[0]).acall(fetch) == "fine"
