"""A call inside a call that the same breaker admitted is part of it: it is admitted, and counted once.

`test_nested_trees.py` nests calls and guards in random ways; here are rules that need other threads, tasks or errors.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest

from resilience import CircuitBreaker, CircuitOpen, Context, Hedge, Keyed, Pipeline, Policy, Retry, Timeout
from resilience.ambient import get_ambient
from tests.callers import in_threads
from tests.conftest import Boom, FakeClock, Script, World
from tests.functions import raising
from tests.policies.breakers import CLOSED, OPEN, fails


class Translated(Exception):
    """The exception that a client raises for a failure."""


async def executed(world: World, policy: Any, fn: Any) -> Any:
    """Run `async def fn` under the policy, which passes the context: a breaker then notes each call in any state."""
    return await world.execute(policy, fn)


async def called(world: World, policy: Any, fn: Any) -> Any:
    """Run it as a decorator does: while nothing fails, a closed breaker notes no call."""
    return await world.call(policy, fn)


async def failure_of(awaitable: Any) -> Exception | None:
    """Return the exception that the awaitable raises."""
    try:
        await awaitable
    except Exception as error:
        return error
    return None


class Forever:
    """An awaitable that never ends."""

    def __await__(self) -> Any:
        yield


async def never(ctx: Any) -> Any:
    await Forever()


def nested(world: World, breaker: Any, fn: Any, depth: int = 1, run: Any = executed) -> Any:
    """Return an `async def` that makes the call under the same breaker, nested to the given depth."""

    async def call(ctx: Any = None) -> Any:
        return await run(world, breaker, fn)

    return call if depth == 1 else nested(world, breaker, call, depth - 1, run)


both_ways = pytest.mark.parametrize("run", [executed, called])


async def fine(ctx: Any = None) -> str:
    return "fine"


async def fail(ctx: Any = None) -> Any:
    raise Boom("no")


async def half_open(world: World, clock: FakeClock, **settings: Any) -> CircuitBreaker:
    """Return a breaker that admits one probe."""
    breaker = CircuitBreaker(1, open_for=10, **settings)
    await fails(world, breaker)
    assert breaker.state is OPEN
    clock.advance(10)
    return breaker


# --- a probe -------------------------------------------------------------------------------------


async def test_a_nested_call_is_part_of_the_probe_around_another_breakers_probe(world: World, clock: FakeClock) -> None:
    outer, inner = await half_open(world, clock), await half_open(world, clock)
    assert await world.execute(outer, nested(world, inner, nested(world, outer, fine))) == "fine"
    assert outer.state is inner.state is CLOSED


async def test_child_tasks_of_a_probe_are_part_of_it(tasks_world: World, clock: FakeClock) -> None:
    breaker = await half_open(tasks_world, clock)

    async def gathers(ctx: Any) -> None:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(breaker.aexecute, fine)

    await breaker.aexecute(gathers)
    assert breaker.state is CLOSED


async def test_calls_outside_of_a_probe_are_refused(world: World, clock: FakeClock) -> None:
    breaker = await half_open(world, clock)
    refused: list[Exception | None] = []

    def apart() -> None:
        refused.append(breaker.capture(lambda ctx: "fine").error)  # type: ignore[union-attr]

    await world.execute(breaker, Script(None, doing=lambda ctx: in_threads(apart)).function())
    assert isinstance(refused[0], CircuitOpen)


async def test_a_nested_call_of_another_breaker_is_counted_there(world: World, clock: FakeClock) -> None:
    outer, inner = await half_open(world, clock), CircuitBreaker(5)
    await world.attempt(outer, nested(world, inner, fail))
    assert (outer.state, inner.stats().opened) == (OPEN, 0)
    await fails(world, inner, times=4)
    assert inner.state is OPEN


async def test_a_task_that_outlives_its_probe_is_no_part_of_it(tasks_world: World, clock: FakeClock) -> None:
    """It calls when the circuit is open again, although it still has the context variables of the probe."""
    breaker = await half_open(tasks_world, clock)
    over, answers = anyio.Event(), []

    async def background() -> None:
        await over.wait()
        answers.append(await tasks_world.attempt(breaker, fine))

    async with anyio.create_task_group() as group:

        async def probe(ctx: Any) -> None:
            group.start_soon(background)
            await anyio.sleep(0)
            raise Boom("no")

        await tasks_world.attempt(breaker, probe)
        assert breaker.state is OPEN
        over.set()
    assert isinstance(answers[0], CircuitOpen)


def test_calls_of_a_task_that_outlives_the_call_it_began_in_are_counted() -> None:
    """The task has a copy of the context variables of that call."""
    breaker = CircuitBreaker(3)

    async def main() -> None:
        await breaker.acapture(fail)  # from here on, the breaker notes calls
        over = asyncio.Event()

        async def background() -> None:
            await over.wait()
            await breaker.acapture(fail)
            await breaker.acapture(fail)

        async def begins(ctx: Any) -> asyncio.Task[None]:
            return asyncio.create_task(background())

        task = await breaker.aexecute(begins)
        await breaker.acapture(fail)  # the success before has reset the count
        over.set()
        await task

    asyncio.run(main())
    assert breaker.state is OPEN


def test_a_call_in_a_probing_guard_is_part_of_it_although_another_guard_has_ended_meanwhile(clock: FakeClock) -> None:
    """As in two generators that are consumed together: their blocks end in any order."""

    def guarded(breaker: CircuitBreaker) -> Iterator[None]:
        with breaker.guard():
            yield

    other, probed = CircuitBreaker(), CircuitBreaker(1, open_for=5.0)
    probed.capture(lambda ctx: 1 / 0)
    clock.advance(5.0)
    first, second = guarded(other), guarded(probed)
    next(first)
    next(second)
    first.close()
    assert probed.call(str, "fine") == "fine"
    second.close()
    assert probed.stats().probes == 0


# --- while the circuit is closed ---


@both_ways
@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize("beside", [0, 1])
@pytest.mark.parametrize("kind", [ExceptionGroup, Translated])
async def test_a_failure_of_a_child_task_is_counted_once(
    tasks_world: World, earlier: int, kind: type[Exception], beside: int, run: Any
) -> None:
    """It is raised by the task group, perhaps with errors of other tasks, in a group, which a client may translate."""
    breaker = CircuitBreaker(3 + earlier)
    for _ in range(earlier):
        await fails(tasks_world, breaker)

    async def gathers(ctx: Any = None) -> None:
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(run, tasks_world, breaker, fail)
                for _ in range(beside):
                    group.start_soon(fail)
        except ExceptionGroup as error:
            if kind is ExceptionGroup:
                raise
            raise Translated from error

    for state in (CLOSED, CLOSED, OPEN):
        assert isinstance(await failure_of(run(tasks_world, breaker, gathers)), kind)
        assert breaker.state is state


class Frozen(Boom):
    """An exception that refuses attributes, as a frozen dataclass does, and has no truth."""

    def __bool__(self) -> bool:
        raise TypeError

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


@both_ways
@pytest.mark.parametrize("kind", [Boom, Frozen])
async def test_a_failure_on_a_worker_is_counted_once(threads: World, kind: type[Boom], run: Any) -> None:
    breaker = CircuitBreaker(3)
    pipeline = Pipeline(breaker, Timeout(5.0))

    async def fn(ctx: Any = None) -> None:
        raise kind("no")

    async def translates(ctx: Any = None) -> None:
        try:
            await run(threads, pipeline, fn)
        except kind as error:
            raise Translated from error

    for function, raised in ((nested(threads, pipeline, fn, run=run), kind), (translates, Translated)):
        for state in (CLOSED, CLOSED, OPEN):
            assert isinstance(await failure_of(run(threads, pipeline, function)), raised)
            assert breaker.state is state
        breaker.close()


@both_ways
@pytest.mark.parametrize("kept", [Boom("kept"), Frozen("no")], ids=["plain", "refuses attributes"])
async def test_the_same_exception_raised_again_is_another_failure(world: World, run: Any, kept: Boom) -> None:
    """Some code keeps an exception and raises it in several calls."""
    breaker = CircuitBreaker(3)

    async def fn(ctx: Any = None) -> None:
        raise kept

    for state in (CLOSED, CLOSED, OPEN):
        assert await failure_of(run(world, breaker, fn)) is kept
        assert breaker.state is state


@both_ways
async def test_the_attempts_of_a_retry_are_counted_separately(world: World, run: Any) -> None:
    """Each failure has the previous one as its context."""
    breaker = CircuitBreaker(3)
    await failure_of(run(world, Pipeline(Retry(3, on=Boom, backoff=[0]), breaker), fail))
    assert breaker.state is OPEN


@both_ways
async def test_a_failure_in_the_handler_of_an_earlier_one_counts(world: World, run: Any) -> None:
    """It has the earlier one as its context, but is a call of its own."""
    breaker = CircuitBreaker(2)
    try:
        await run(world, breaker, fail)
    except Boom:
        assert isinstance(await failure_of(run(world, breaker, fail)), Boom)
    assert breaker.state is OPEN


def test_a_failure_counts_although_another_caller_failed_meanwhile() -> None:
    breaker = CircuitBreaker(2)

    def fails() -> None:
        with pytest.raises(Boom):
            breaker.call(raising(Boom))

    def fails_after_another() -> None:
        in_threads(fails)
        raise Boom

    with pytest.raises(Boom):
        breaker.call(fails_after_another)
    assert breaker.state is OPEN


def as_it_is(policy: Policy) -> Policy:
    return policy


def keyed(policy: Policy) -> Keyed:
    return Keyed(lambda key: policy, lambda *args: 1)


@both_ways
@pytest.mark.parametrize(
    ("outside", "inside"),
    [
        (as_it_is, Timeout(5.0)),
        (as_it_is, Hedge(5.0)),
        (as_it_is, keyed(Timeout(5.0))),
        (keyed, Timeout(5.0)),
        (keyed, Hedge(5.0)),
    ],
)
async def test_a_handled_failure_on_a_worker_does_not_count(
    threads: World, outside: Callable[[Policy], Policy], inside: Policy, run: Any
) -> None:
    """The frames of the outer call are in another thread, so such a pipeline notes each call."""
    breaker = CircuitBreaker(1)

    async def answers(ctx: Any = None) -> str:
        assert isinstance(await failure_of(run(threads, breaker, fail)), Boom)
        return threading.current_thread().name

    assert "worker" in await run(threads, Pipeline(outside(breaker), inside), answers)
    assert breaker.state is CLOSED


def test_a_call_under_a_keyed_is_noted_only_if_a_breaker_may_be_around_it() -> None:
    """Otherwise nothing looks for it from a worker, and noting it would double its time."""
    inside = keyed(CircuitBreaker())
    assert contextvars.Context().run(Pipeline(Retry(), inside).call, get_ambient) is None
    assert contextvars.Context().run(Pipeline(CircuitBreaker(), inside).call, get_ambient) is not None


@both_ways
async def test_a_bad_inner_result_does_not_count_if_the_outer_result_is_good(world: World, run: Any) -> None:
    breaker = CircuitBreaker(1, on_result=lambda result: result == 503)

    async def unavailable(ctx: Any = None) -> int:
        return 503

    async def answers(ctx: Any = None) -> int:
        assert await run(world, breaker, unavailable) == 503
        return 200

    assert await run(world, breaker, answers) == 200
    assert breaker.state is CLOSED


def test_a_failure_that_a_thread_has_counted_is_not_counted_by_the_guard_that_it_leaves() -> None:
    """The call in the thread is not nested: the thread has context variables of its own."""
    breaker = CircuitBreaker(5)
    with ThreadPoolExecutor(1) as pool, pytest.raises(Boom), breaker.guard():
        pool.submit(breaker.call, raising(Boom)).result()
    assert breaker.stats().counted[0].bad == 1


@both_ways
async def test_handled_failures_of_child_tasks_of_a_guard_do_not_count(tasks_world: World, run: Any) -> None:
    breaker = CircuitBreaker(1)

    async def handles() -> None:
        assert isinstance(await failure_of(run(tasks_world, breaker, fail)), Boom)

    async with breaker.guard(), anyio.create_task_group() as group:
        group.start_soon(handles)
    assert breaker.state is CLOSED


def failure_of_another_caller(breaker: CircuitBreaker) -> None:
    """Let a call without the context variables of this test fail."""
    contextvars.Context().run(breaker.capture, raising(Boom("of another caller")))


@both_ways
async def test_a_handled_inner_failure_does_not_count_if_another_caller_failed(world: World, run: Any) -> None:
    """From then on calls are noted, but the outer one began before."""
    breaker = CircuitBreaker(2)

    async def answers(ctx: Any = None) -> str:
        in_threads(lambda: failure_of_another_caller(breaker))
        assert isinstance(await failure_of(run(world, breaker, fail)), Boom)
        with pytest.raises(Boom), breaker.guard():
            raise Boom("no")
        return "fine"

    assert await run(world, breaker, answers) == "fine"
    assert breaker.state is CLOSED


@both_ways
async def test_an_inner_failure_counts_if_the_circuit_was_closed_manually_meanwhile(world: World, run: Any) -> None:
    """The result of the outer call no longer counts."""
    breaker = CircuitBreaker(1)

    async def answers(ctx: Any = None) -> str:
        breaker.close()
        assert isinstance(await failure_of(run(world, breaker, fail)), Boom)
        return "fine"

    assert await called(world, breaker, answers) == "fine"
    assert breaker.state is OPEN


def test_a_failure_in_a_predicate_that_judges_a_noted_call_counts() -> None:
    """By then, that call has ended."""

    def is_bad(result: object) -> bool:
        failure_of_another_caller(breaker)
        return True

    breaker = CircuitBreaker(3, on_result=is_bad)
    failure_of_another_caller(breaker)
    assert breaker.execute(lambda ctx: "bad") == "bad"
    assert breaker.state is OPEN


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_failure_that_another_breaker_counted_counts_here_too(earlier: int) -> None:
    """Also if this breaker counted another failure meanwhile."""
    breaker, other = CircuitBreaker(2 + earlier), CircuitBreaker()
    for _ in range(earlier):
        failure_of_another_caller(breaker)
    with pytest.raises(Boom), breaker.guard():
        failure_of_another_caller(breaker)
        with other.guard():
            raise Boom("no")
    assert breaker.state is OPEN


def test_an_exception_that_an_earlier_guard_counted_is_another_failure_although_others_failed_meanwhile() -> None:
    breaker, kept = CircuitBreaker(4), Boom("kept")
    for state in (CLOSED, OPEN):
        with pytest.raises(Boom), breaker.guard():
            failure_of_another_caller(breaker)
            raise kept
        assert breaker.state is state


def caused_by_one_another() -> Boom:
    failed, cause = Boom("no"), Boom("why")
    failed.__cause__, cause.__cause__ = cause, failed
    return failed


def caused_by_their_group() -> Boom:
    """As after `raise group.exceptions[0] from group`. Each of several errors in the group has it as the cause."""
    children = [Boom(name) for name in "abc"]
    group = ExceptionGroup("children", children)
    for child in children:
        child.__cause__ = group
    return children[0]


@pytest.mark.parametrize("make", [caused_by_one_another, caused_by_their_group])
def test_a_failure_with_a_cycle_of_causes_counts(make: Callable[[], Boom]) -> None:
    """Also if another failure was counted meanwhile, and is searched for among the causes."""
    breaker = CircuitBreaker(2, on=Boom)
    with pytest.raises(Boom), breaker.guard():
        failure_of_another_caller(breaker)
        raise make()
    assert breaker.state is OPEN


@pytest.mark.parametrize("is_child", [False, True])
async def test_a_call_closed_in_another_context_keeps_no_probe(world: World, clock: FakeClock, is_child: bool) -> None:
    """As when another task closes the coroutine, which may be a child task of the call."""
    breaker = await half_open(world, clock)
    call = breaker.around(never, Context())
    context = contextvars.copy_context()
    context.run(call.send, None)
    (context.copy() if is_child else contextvars.copy_context()).run(call.close)
    assert breaker.stats().probes == 0
    await fails(world, breaker)
    assert breaker.state is OPEN
