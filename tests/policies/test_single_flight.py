"""SingleFlight: one call at a time for each key, in all runtimes; concurrent callers get its outcome."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import Any

import anyio
import pytest

from resilience import Context, Pipeline, SingleFlight, SingleFlightStats, Timeout, deadline
from resilience.errors import DeadlineExceeded, TimeoutExceeded
from resilience.outcome import Failure, Success
from tests.callers import (
    KeywordsOnly,
    Slow,
    aoutcome_of,
    ask_from_everywhere,
    fail_first_wake,
    followers,
    in_threads,
    outcome_of,
    run_all,
    wait_until,
)
from tests.conftest import Boom, Frozen, Heavy, Incomparable, Virtual, Watched, World, no_collector, shown
from tests.contention.beside import until
from tests.contention.storm import Gauge, Storm
from tests.functions import raising


class Swapped(Exception):
    """An exception whose copy has its arguments reversed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*reversed(args))


class Fickle(Exception):
    """An exception whose copy has an argument that cannot be compared with that of the original."""

    def __init__(self, *args: Any) -> None:
        super().__init__(Incomparable())


class Finalized(Exception):
    """An exception whose finalizer fails if its constructor has not ended, as that of a gRPC stream."""

    def __init__(self, *, state: list[str]) -> None:
        super().__init__()
        self.state = state

    def __del__(self) -> None:
        self.state.append("finalized")


@contextmanager
def led(flight: SingleFlight, slow: Slow) -> Iterator[list[Any]]:
    """Let a thread lead during the block; yield a list that has its outcome afterwards."""
    got: list[Any] = []
    leader = threading.Thread(target=lambda: got.append(outcome_of(lambda: flight.call(slow.blocking))))
    leader.start()
    assert slow.entered.wait(5)
    yield got
    slow.may_end.set()
    leader.join(5)


def followed(flight: SingleFlight, call: Callable[[], Any], *then: Callable[[], object], count: int = 1) -> list[Any]:
    """Make this call in a thread, and then these steps, once so many follow; return a list with its result."""
    got: list[Any] = []
    run_all([lambda: got.append(call())], lambda: wait_until(lambda: followers(flight) == count), *then)
    return got


def same_key(*args: Any) -> str:
    return "same"


# --- sharing -------------------------------------------------------------------------------------


def test_concurrent_callers_of_all_runtimes_share_one_call() -> None:
    flight, result = SingleFlight(key=same_key), object()
    slow = Slow(lambda: result)
    got = ask_from_everywhere(flight, slow)
    assert got == [Success(result)] * 9
    assert slow.calls == 1
    assert flight.stats() == SingleFlightStats(in_flight=0, shared=8)


def test_each_follower_raises_a_copy_with_the_traceback_of_the_call() -> None:
    flight, error, cause = SingleFlight(key=same_key), Boom("no"), Boom("why")
    error.add_note("of the call")
    error.__cause__ = cause
    slow = Slow(raising(error))
    got = ask_from_everywhere(flight, slow)
    errors = [it.error for it in got]
    assert len({id(it) for it in errors}) == 9
    assert {(type(it), it.args, tuple(it.__notes__)) for it in errors} == {(Boom, ("no",), ("of the call",))}
    for it in errors:
        assert it.__cause__ is cause
        frames = traceback.extract_tb(it.__traceback__)
        assert "fn" in [frame.name for frame in frames]
        assert len(frames) < 20
    errors[0].add_note("of one")
    assert [it.__notes__ for it in errors[1:]] == [["of the call"]] * 8


@pytest.mark.parametrize(
    "error", [KeywordsOnly(code=3), Swapped(1, 2), Fickle(), Frozen(3), Finalized(state=[])], ids=shown
)
def test_an_error_that_cannot_be_copied_is_shared(error: Exception) -> None:
    flight = SingleFlight(key=same_key)
    slow = Slow(raising(error))
    got = ask_from_everywhere(flight, slow)
    assert [it.error is error for it in got] == [True] * 9


async def test_the_traceback_of_a_shared_error_does_not_grow(tasks_world: World) -> None:
    """Each follower raises it with the traceback of the call, not with that of another caller."""
    flight, error, depths = SingleFlight(key=same_key), Swapped(1, 2), list[int]()

    async def fetch() -> None:
        await until(tasks_world, lambda: followers(flight) == 8)
        raise error

    async def ask() -> None:
        outcome = await aoutcome_of(lambda: flight.acall(fetch))
        assert outcome.error is error
        depths.append(len(traceback.extract_tb(error.__traceback__)))

    async with anyio.create_task_group() as group:
        for _ in range(9):
            group.start_soon(ask)
    assert len(depths) == 9
    assert len(set(depths[1:])) == 1, "the followers, behind the leader"


async def test_calls_with_different_arguments_are_not_shared(tasks_world: World) -> None:
    flight, called = SingleFlight(), []

    async def fetch(*args: Any, **kwargs: Any) -> Any:
        called.append((args, kwargs))
        await anyio.sleep(0.01)
        return args, kwargs

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        *(((1,), {}), ((2,), {}), ((1,), {"a": 1, "b": 2})),
        *(((1,), {"b": 2, "a": 1}), ((1,), {"a": 2}), ((1,), {})),
    ]
    async with anyio.create_task_group() as group:
        for args, kwargs in calls:
            group.start_soon(lambda args=args, kwargs=kwargs: flight.acall(fetch, *args, **kwargs))
    assert len(called) == 4  # trio begins tasks in any order
    assert all(it in called for it in (calls[0], calls[1], calls[2], calls[4]))


async def test_after_forget_the_next_caller_makes_a_new_call(tasks_world: World) -> None:
    """Callers that wait already get the result of the first call."""
    flight, got, go = SingleFlight(key=same_key), [], anyio.Event()

    async def first() -> str:
        await go.wait()
        return "first"

    async def second() -> str:
        return "second"

    async def ask(fn: Any) -> None:
        got.append(await flight.acall(fn))

    async with anyio.create_task_group() as group:
        group.start_soon(ask, first)
        group.start_soon(ask, first)
        await anyio.wait_all_tasks_blocked()
        flight.forget("same")
        await ask(second)
        go.set()
    assert got == ["second", "first", "first"]


class Stepped(str):
    """A key during whose look-ups other threads run: flights take no lock, so they may run between any two steps."""

    def let(self, *steps: tuple[int, Callable[[], object]]) -> None:
        """From now on, make each of these steps at the look-up with its number, from 1."""
        self.steps, self.numbers = dict(steps), itertools.count(1)

    def __hash__(self) -> int:
        if "steps" in vars(self):
            self.steps.pop(next(self.numbers), int)()
        return super().__hash__()


def stepped() -> tuple[SingleFlight, Stepped]:
    """Return a `SingleFlight`, and the key of its first call. Other calls have a plain key that is equal to it."""
    key = Stepped("same")
    keys = iter([key])
    return SingleFlight(key=lambda *args: next(keys, "same")), key


def lead_next(flight: SingleFlight, slow: Slow, until: ExitStack) -> None:
    flight.forget("same")
    until.enter_context(led(flight, slow))


@pytest.mark.parametrize("begins", [1, 2])
def test_a_flight_that_is_forgotten_at_its_end_does_not_end_the_next_one(begins: int) -> None:
    (flight, key), slow = stepped(), Slow(lambda: "next")
    with ExitStack() as stack:
        flight.call(lambda: key.let((begins, lambda: lead_next(flight, slow, stack))))
        assert (slow.calls, flight.stats().in_flight) == (1, 1)


@pytest.mark.parametrize(("begins", "ends"), [*itertools.combinations(range(1, 6), 2)])
async def test_a_flight_that_ends_while_another_one_is_being_removed_keeps_no_caller_waiting(
    world: World, begins: int, ends: int
) -> None:
    """The other one takes it out by mistake, and puts it back."""
    (flight, key), slow = stepped(), Slow(lambda: "next")

    async def third() -> str:
        return "third"

    with ExitStack() as stack:
        flight.call(lambda: key.let((begins, lambda: lead_next(flight, slow, stack)), (ends, stack.close)))
    assert flight.stats().in_flight == 0
    assert await world.call(flight, third) == "third"


@pytest.mark.parametrize("comes", [1, 2])
def test_a_caller_does_not_wait_for_a_leader_that_is_being_removed(comes: int) -> None:
    """Another thread may have taken it out by mistake, and puts it back only if its call is not over."""
    (flight, key), got = stepped(), list[str]()

    def ask() -> None:
        got.append(flight.execute(lambda ctx: "new", Context(timeout=2)))

    flight.call(lambda: key.let((comes, lambda: in_threads(ask))))
    assert got == ["new"]


def test_a_key_that_the_function_makes_unhashable_keeps_no_caller_waiting() -> None:
    """The key may be a record that the function deletes. The next caller of the key makes a new call."""

    class Record:
        is_deleted = False

        def __hash__(self) -> int:
            if self.is_deleted:
                raise TypeError("it has no number")
            return 1

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Record)

    record = Record()
    flight = SingleFlight(key=lambda: Record() if slow.calls else record)
    slow = Slow(lambda: setattr(record, "is_deleted", True))
    with led(flight, slow) as led_to:
        got = followed(flight, lambda: flight.call(slow.blocking), slow.may_end.set)
    assert (str(led_to[0].error), got) == ("it has no number", [None])
    assert flight.call(lambda: "next") == "next"
    assert flight.stats().in_flight == 0


async def test_a_recursive_call_does_not_wait_for_itself(world: World) -> None:
    flight = SingleFlight(key=same_key)

    async def fn(n: int) -> int:
        return n if n == 0 else n + await world.call(flight, fn, n - 1)

    assert await world.call(flight, fn, 3) == 6
    assert flight.stats() == SingleFlightStats(in_flight=0, shared=0)


def test_a_call_in_a_worker_thread_of_the_leader_does_not_wait_for_it() -> None:
    flight = SingleFlight(key=same_key)
    inner = Pipeline(Timeout(5.0), flight)
    assert Pipeline(flight, Timeout(5.0)).call(lambda: inner.call(lambda: "inner")) == "inner"


async def test_calls_of_a_child_task_that_outlives_the_leader_are_shared(in_virtual_asyncio: Virtual) -> None:
    flight, called = SingleFlight(key=same_key), []

    async def fetch() -> int:
        called.append(1)
        await asyncio.sleep(0.01)
        return len(called)

    async def later() -> list[int]:
        await asyncio.sleep(0.02)
        return await asyncio.gather(flight.acall(fetch), flight.acall(fetch))

    async def leads() -> asyncio.Task[list[int]]:
        return asyncio.create_task(later())

    assert await (await flight.acall(leads)) == [1, 1]


def test_a_call_during_the_end_of_a_flight_in_its_own_thread_is_a_new_call() -> None:
    """A signal handler, a finalizer or, as here, `__copy__` of an error runs in the leader's thread."""
    flight, results = SingleFlight(key=same_key), []

    class CallsOnCopy(Exception):
        def __copy__(self) -> CallsOnCopy:
            results.append(flight.call(lambda: "new"))
            return CallsOnCopy()

    got = ask_from_everywhere(flight, Slow(raising(CallsOnCopy())))
    assert {type(it.error) for it in got} == {CallsOnCopy}
    assert set(results) == {"new"}
    assert flight.stats().in_flight == 0


# --- leaders without a result --------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.01, 0.0])
async def test_after_a_cancelled_leader_one_follower_makes_the_call(tasks_world: World, seconds: float) -> None:
    """All others get its outcome, even if it returns before they wake up."""
    flight, called, got = SingleFlight(key=same_key), [], []

    async def fetch() -> int:
        called.append(1)
        if len(called) == 1:
            await anyio.sleep(10)
        elif seconds:
            await anyio.sleep(seconds)
        return len(called)

    async def ask() -> None:
        got.append(await flight.acall(fetch))

    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as inner:
                inner.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                for _ in range(10):
                    group.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
    assert got == [2] * 10
    assert flight.stats() == SingleFlightStats(in_flight=0, shared=9)


@pytest.mark.parametrize("outer", [Timeout(1.0), Timeout(1.0, cooperative=True)], ids=["cut off", "cooperative"])
async def test_after_a_leaders_own_time_limit_a_follower_calls(in_virtual_asyncio: Virtual, outer: Timeout) -> None:
    """An outer Timeout cuts it off, or the function ends at the leader's deadline."""
    flight, called = SingleFlight(key=same_key), []

    async def fetch(ctx: Context) -> int:
        called.append(1)
        if len(called) > 1:
            return 2
        await ctx.sleep(1.5)
        ctx.check()
        return 1

    hurried = asyncio.create_task(Pipeline(outer, flight).acapture(fetch))
    await asyncio.sleep(0)
    patient = asyncio.create_task(flight.aexecute(fetch))
    outcome = await hurried
    assert isinstance(outcome, Failure)
    assert isinstance(outcome.error, TimeoutExceeded)
    assert await patient == 2


@pytest.mark.parametrize(("limit", "error"), [(Timeout, TimeoutExceeded), (deadline, DeadlineExceeded)])
async def test_the_end_of_an_inner_limit_is_a_shared_outcome(in_asyncio: World, limit: Any, error: Any) -> None:
    """It is not the end of the leader's own time."""
    flight = SingleFlight(key=same_key)

    async def fetch(ctx: Context) -> None:
        if limit is Timeout:
            await Timeout(0.01).acall(asyncio.sleep, 5)
        async with deadline(0.01):
            await asyncio.sleep(5)

    outcomes = await asyncio.gather(*(flight.acapture(fetch) for _ in range(3)))
    assert [type(it.error) for it in outcomes if isinstance(it, Failure)] == [error] * 3
    assert flight.stats().shared == 2


async def test_another_error_after_the_leaders_time_limit_is_a_shared_outcome(in_virtual_asyncio: Virtual) -> None:
    flight = SingleFlight(key=same_key)
    hurried = Timeout(1.0, cooperative=True).wrap(flight)

    async def fetch(ctx: Context) -> None:
        await ctx.sleep(1.5)
        raise Boom

    outcomes = await asyncio.gather(*(it.acapture(fetch) for it in (hurried, flight)))
    assert [type(it.error) for it in outcomes if isinstance(it, Failure)] == [Boom] * 2
    assert flight.stats().shared == 1


@pytest.mark.parametrize("end", [KeyboardInterrupt(), StopIteration("end")], ids=["interrupted", "StopIteration"])
def test_after_a_leader_without_an_outcome_to_share_a_follower_makes_the_call(end: BaseException) -> None:
    """A task cannot raise a `StopIteration`."""
    flight, slow = SingleFlight(key=same_key), Slow(raising(end))

    async def fine() -> str:
        return "fine"

    with led(flight, slow):
        got = followed(flight, lambda: asyncio.run(flight.acall(fine)), slow.may_end.set)
    assert got == ["fine"]
    assert flight.stats().in_flight == 0


@pytest.mark.parametrize("limit", [lambda it: Timeout(60).wrap(it), lambda it: it.wrap(Timeout(60))], ids=["out", "in"])
def test_after_a_leader_whose_event_loop_was_closed_a_follower_makes_the_call(limit: Any) -> None:
    """The call of the leader never ends, but it is garbage, although a timer knows its task."""
    flight = SingleFlight(key=same_key)
    policy = limit(flight)
    loop = asyncio.new_event_loop()
    task = loop.create_task(policy.acall(asyncio.sleep, 60))
    loop.run_until_complete(asyncio.sleep(0.01))
    task._log_destroy_pending = False
    loop.close()

    def collect() -> None:
        nonlocal task
        del task
        gc.collect()

    assert followed(flight, lambda: flight.call(lambda: "fine"), collect) == ["fine"]


def test_after_a_leader_to_whose_task_another_follower_refers_a_follower_makes_the_call() -> None:
    """Of several tasks of a closed event loop, for example: `gather` lets each of them refer to the others."""
    flight, got = SingleFlight(key=same_key), list[Any]()
    loop = asyncio.new_event_loop()

    async def twice() -> None:
        await asyncio.gather(*(flight.acall(asyncio.sleep, 60) for _ in range(2)))

    task = loop.create_task(twice())
    loop.run_until_complete(asyncio.sleep(0.01))
    for it in asyncio.all_tasks(loop):
        it._log_destroy_pending = False  # type: ignore[attr-defined]
    del it

    def collect() -> None:
        nonlocal task
        del task
        loop.close()
        gc.collect()

    run_all(
        [lambda: got.append(flight.call(lambda: "fine"))], lambda: wait_until(lambda: followers(flight) == 2), collect
    )
    assert got == ["fine"]


def test_a_caller_does_not_wait_for_a_leader_that_is_about_to_be_finalized() -> None:
    """Its flight is gone, but has not ended yet: a finalizer of the same garbage, which runs before, makes the call."""
    flight, got = SingleFlight(key=same_key), list[str]()

    class Caller:
        def __del__(self) -> None:
            got.append(flight.execute(lambda ctx: "fine", Context(timeout=2)))

    async def lead(caller: Caller) -> None:
        await flight.acall(asyncio.sleep, 60)

    with no_collector():
        loop = asyncio.new_event_loop()
        task = loop.create_task(lead(Caller()))
        loop.run_until_complete(asyncio.sleep(0.01))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        del task
        gc.collect()
    assert got == ["fine"]
    assert flight.stats() == SingleFlightStats(in_flight=0, shared=0)


def test_a_follower_whose_event_loop_has_ended_delays_no_other() -> None:
    """Code that inherits the leader's variables, such as a child task, does not keep it alive either."""
    flight, inherited = SingleFlight(key=same_key), list[Any]()
    slow = Slow(lambda: inherited.append(copy_context()))
    with led(flight, slow) as led_to:
        loop = asyncio.new_event_loop()
        task = loop.create_task(flight.acall(slow.task))
        loop.run_until_complete(asyncio.sleep(0.01))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        got = followed(flight, lambda: flight.call(slow.blocking), slow.may_end.set, count=2)
    assert (led_to, got, len(inherited)) == ([Success(None)], [None], 1)
    follower = weakref.ref(task)
    del task
    gc.collect()
    assert follower() is None


def test_a_follower_is_woken_although_no_stack_was_left_to_wake_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `RecursionError` is a `RuntimeError`, but not the one of a closed event loop: the leader tries again."""
    flight, slow = SingleFlight(key=same_key), Slow(lambda: "fine")
    with led(flight, slow) as led_to:
        got = followed(
            flight, lambda: flight.call(slow.blocking), lambda: fail_first_wake(monkeypatch), slow.may_end.set
        )
    assert (type(led_to[0].error), got) == (RecursionError, ["fine"])


# --- followers that stop waiting -----------------------------------------------------------------


async def test_a_follower_stops_waiting_at_its_own_deadline_or_timeout(in_virtual_asyncio: Virtual) -> None:
    flight = SingleFlight(key=same_key)
    leader = asyncio.create_task(flight.acall(asyncio.sleep, 0.1, "fine"))
    await asyncio.sleep(0)
    with deadline(0.01), pytest.raises(DeadlineExceeded, match="while another caller made the same call") as caught:
        await flight.acall(asyncio.sleep, 0.1, "never")
    assert caught.value.policy == "SingleFlight"
    with pytest.raises(TimeoutExceeded):
        await Pipeline(Timeout(0.01), flight).acall(asyncio.sleep, 0.1, "never")
    assert followers(flight) == 0
    assert await leader == "fine"


def test_a_follower_in_a_thread_stops_waiting_at_its_own_deadline() -> None:
    flight, slow = SingleFlight(key=same_key), Slow(lambda: "fine")
    too_late = pytest.raises(DeadlineExceeded, match="while another caller made the same call")
    with led(flight, slow), deadline(0.01), too_late:
        flight.call(slow.blocking)


async def test_a_cancelled_follower_leaves_the_flight_unaffected(in_virtual_asyncio: Virtual) -> None:
    flight = SingleFlight(key=same_key)
    leader = asyncio.create_task(flight.acall(asyncio.sleep, 0.05, "fine"))
    await asyncio.sleep(0)
    follower = asyncio.create_task(flight.acall(asyncio.sleep, 0.05))
    await asyncio.sleep(0.01)
    follower.cancel()
    with pytest.raises(asyncio.CancelledError):
        await follower
    assert followers(flight) == 0
    assert await leader == "fine"


# --- contention ----------------------------------------------------------------------------------


def test_calls_of_one_key_never_overlap() -> None:
    """Of threads and two event loops; each caller that made no call shared one."""
    flight, gauge = SingleFlight(key=same_key), Gauge()

    async def operation(world: World, rng: random.Random) -> str:
        async def fn() -> None:
            await gauge.pass_through(world, rng)

        await world.call(flight, fn)
        return "answered"

    assert Storm(operation, 1000).run() == {"answered": 1000}
    assert gauge.most == 1
    assert flight.stats() == SingleFlightStats(in_flight=0, shared=1000 - gauge.entered)
    assert flight.stats().shared > 0


# --- descriptions, cycles and events -------------------------------------------------------------


async def test_a_failed_flight_leaves_no_reference_cycle(world: World) -> None:
    """This holds for the leader and, in asyncio, for followers, one of which may lead after a cancelled leader."""
    watched = Watched()
    flight = SingleFlight(key=same_key)
    with no_collector():
        await world.attempt(flight, watched.fn)
        if world.name == "asyncio":

            async def slow() -> None:
                await asyncio.sleep(0.001)
                watched.fail()

            for cancelled in (0, 1):
                tasks = [asyncio.create_task(flight.acall(slow)) for _ in range(3)]
                await asyncio.sleep(0)
                for task in tasks[:cancelled]:
                    task.cancel()
                await asyncio.wait(tasks)
                for task in tasks[cancelled:]:
                    watched.watch(task.exception())
                del task, tasks
                await asyncio.sleep(0)
        assert watched.seen >= 2
        assert watched.alive == []


async def test_a_task_that_outlives_its_flight_keeps_no_result(in_asyncio: World) -> None:
    watched, done, tasks = Watched(), asyncio.Event(), []

    async def stays() -> Heavy:
        tasks.append(asyncio.create_task(done.wait()))
        return watched.watch(Heavy())  # type: ignore[no-any-return]

    with no_collector():
        await SingleFlight(key=same_key).acall(stays)
        assert watched.alive == []
    done.set()
    await asyncio.wait(tasks)


async def test_sharing_is_reported(in_asyncio: World, heard: list[Any]) -> None:
    flight = SingleFlight(key=same_key, name="users")
    await asyncio.gather(*(flight.acall(asyncio.sleep, 0.001) for _ in range(3)))
    used = [it for it in heard if type(it).__name__ == "CacheUsed"]
    assert [(it.policy, it.how, it.operation) for it in used] == [("users", "shared", "sleep")] * 2
