"""The world of tasks: everything happens in the caller's own task, in asyncio and in trio, and nothing in between."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import importlib.util
import sys
import threading
import time
import types
import weakref
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from typing import Any, Never

import anyio
import anyio.to_thread
import pytest
import trio

from resilience import (
    Bulkhead,
    Call,
    CircuitBreaker,
    Context,
    Fallback,
    Policy,
    Retry,
    Timeout,
    TimeoutExceeded,
    current_context,
    deadline,
)
from resilience.runtimes import alarms, tasks, workers
from resilience.runtimes.blocking import BLOCKING
from tests.conftest import Boom, FakeClock, Script, World

LONG = 60.0

PIPELINE = Policy.wrap(
    Fallback(on=LookupError), Timeout(LONG), Retry(on=Boom, backoff=[0]), CircuitBreaker(), Bulkhead(100), Timeout(30)
)


# --- where things run ---


async def test_the_function_runs_in_the_callers_own_task(tasks_world: World) -> None:
    """No task is made for it, no thread, and no context of variables: what it sets, its caller sees."""
    seen: list[Any] = []
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")

    async def fn(ctx: Context) -> None:
        seen.append((anyio.get_current_task().id, threading.get_ident()))
        variable.set("from inside")

    await PIPELINE.aexecute(fn)
    assert seen == [(anyio.get_current_task().id, threading.get_ident())]
    assert variable.get() == "from inside"


async def test_a_call_that_waits_for_nothing_does_not_suspend(tasks_world: World) -> None:
    """The happy path costs no turn of the loop."""

    async def fn(ctx: Context) -> str:
        return "at once"

    coroutine = PIPELINE.aexecute(fn)
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    assert done.value.value == "at once"


async def test_blocking_code_inside_a_task_is_blocking_code(tasks_world: World) -> None:
    """A plain function under the same pipeline runs to its end there; its limit is enforced by a worker."""

    gate = threading.Event()

    assert PIPELINE.execute(lambda ctx: "plain") == "plain"
    with pytest.raises(TimeoutExceeded):
        Timeout(0.005).execute(lambda ctx: gate.wait(10))
    gate.set()
    end = time.monotonic() + 5
    while Timeout.abandoned() and time.monotonic() < end:
        time.sleep(0.001)


async def test_no_worker_is_taken(tasks_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for a limit that fires."""

    def forbidden(*args: object) -> Never:
        raise AssertionError("a worker thread was asked for")

    monkeypatch.setattr(workers.Pool, "begin", forbidden)

    with pytest.raises(TimeoutExceeded):
        await Timeout(0.005).aexecute(lambda ctx: anyio.sleep(10))


async def test_waiting_lets_other_tasks_run(tasks_world: World) -> None:
    """A retry's wait is a suspension, also one of no seconds."""
    turns: list[int] = []

    async def other() -> None:
        while True:
            turns.append(1)
            await anyio.sleep(0)

    async with anyio.create_task_group() as group:
        group.start_soon(other)
        with pytest.raises(Boom):
            await Retry(20, on=Boom, backoff=[0]).aexecute(Script(Boom()).function())
        group.cancel_scope.cancel()
    assert len(turns) >= 15


# --- the ambient context ---


def test_a_block_that_a_function_leaves_open_does_not_keep_its_context_ambient(tasks_world: World) -> None:
    """A stream that is read, and closed, after the call that opened it: its budget was that of the call."""

    async def stream() -> AsyncGenerator[int, None]:
        with deadline(LONG):
            yield 1

    async def opened(*_: object) -> AsyncGenerator[int, None]:
        it = stream()
        await anext(it)
        return it

    async def fails(ctx: Context) -> Never:
        raise Boom

    async def main() -> list[float]:
        left = []
        for policy, fn in ((Timeout(5.0), opened), (Timeout(5.0).wrap(Fallback(handler=opened)), fails)):
            it = await policy.aexecute(fn)
            left.append(current_context().remaining())
            await it.aclose()
            left.append(current_context().remaining())
        return left

    assert tasks_world.run(main) == [inf] * 4


async def test_a_coroutine_that_is_closed_from_elsewhere_leaves_in_peace(in_asyncio: World) -> None:
    """A generator's `finally` may run anywhere: where it began is not always where it ends."""
    ended: list[str] = []

    async def fn(ctx: Context) -> None:
        try:
            await asyncio.sleep(10)
        finally:
            ended.append("closed")

    bulkhead = Bulkhead(1)
    coroutine = Policy.wrap(Fallback("instead"), Retry(on=Exception), bulkhead).aexecute(fn)
    contextvars.copy_context().run(coroutine.send, None)
    assert bulkhead.stats().in_flight == 1
    contextvars.copy_context().run(coroutine.close)
    assert bulkhead.stats().in_flight == 0
    assert ended == ["closed"]


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts the timers which it was asked for."""

    timers = 0

    def call_later(self, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        self.timers += 1
        return super().call_later(*args, **kwargs)


def test_two_loops_have_a_timer_each() -> None:
    """Also where their calls alternate, under one policy: none is made for each call, and none serves both."""
    timeout, loops = Timeout(61.5), list[CountingLoop]()

    def new_loop() -> CountingLoop:
        loops.append(CountingLoop())
        return loops[-1]

    with (
        asyncio.Runner(loop_factory=new_loop) as one,
        ThreadPoolExecutor(1) as elsewhere,
        asyncio.Runner(loop_factory=new_loop) as other,
    ):
        for _ in range(5):
            assert one.run(timeout.acall(asyncio.sleep, 0, "one")) == "one"
            assert elsewhere.submit(other.run, timeout.acall(asyncio.sleep, 0, "other")).result() == "other"
        elsewhere.submit(other.close).result()
    assert [loop.timers for loop in loops] == [1, 1]


async def test_limits_without_end_keep_no_more_than_some_timers(in_asyncio: World) -> None:
    """What is kept of limits that never come again is bounded, and every call is cut off all the same."""

    loop: Any = asyncio.get_running_loop()
    for n in range(200):
        assert await Timeout(60.0 + n / 1000).acall(asyncio.sleep, 0, n) == n
    assert sum(not handle.cancelled() for handle in loop._scheduled) <= 64
    with pytest.raises(TimeoutExceeded):
        await Timeout(0.0123).acall(asyncio.sleep, LONG)


# --- what can be awaited ---


async def test_a_future_and_a_task_of_asyncio_can_be_awaited(in_asyncio: World) -> None:
    """And a limit cancels the task that it waits for, as `await` does."""

    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, "done")
    assert await PIPELINE.aexecute(lambda ctx: future) == "done"
    task = asyncio.create_task(asyncio.sleep(10))
    with pytest.raises(TimeoutExceeded):
        await Timeout(0.005).aexecute(lambda ctx: task)
    assert task.cancelled()


# --- loops ---


def test_the_same_policies_serve_many_loops_at_once() -> None:
    """Two asyncio loops, two trio loops, two threads: each call ends in its own world."""

    def world(name: str) -> list[Any]:
        it = World(name)

        async def main() -> list[Any]:
            results: list[Any] = []
            for n in range(30):
                results.append(await it.attempt(PIPELINE, Script(Boom(), n).function()))
                if n % 10 == 0:
                    results.append(type(await it.attempt(Timeout(0.002), lambda ctx: it.sleep(0.05))))
            return results

        return it.run(main)  # type: ignore[no-any-return]

    names = ["asyncio", "trio", "asyncio", "trio"]
    with ThreadPoolExecutor(len(names)) as pool:
        results = list(pool.map(world, names))
    expected = [it for n in range(30) for it in ([n, TimeoutExceeded] if n % 10 == 0 else [n])]
    assert results == [expected] * len(names)


async def test_trio_may_be_a_guest_in_a_loop_of_asyncio(in_asyncio: World) -> None:
    """There a task of trio runs in a callback of asyncio: its limit is a scope of trio all the same."""
    outcome: list[Any] = []

    async def in_trio() -> str:
        with pytest.raises(TimeoutExceeded):
            await Timeout(0.01).aexecute(lambda ctx: trio.sleep(10))
        bulkhead = Bulkhead(1, queue=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bulkhead.aexecute, lambda ctx: trio.sleep(0.005))
            await trio.sleep(0)
            assert await bulkhead.aexecute(Script("after the wait").function()) == "after the wait"
        return "fine"

    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    trio.lowlevel.start_guest_run(
        in_trio,
        run_sync_soon_threadsafe=loop.call_soon_threadsafe,
        done_callback=done.set_result,
        host_uses_signal_set_wakeup_fd=True,
    )
    outcome.append((await asyncio.wait_for(done, 10)).unwrap())
    assert outcome == ["fine"]


def test_asyncio_in_debug_mode_has_nothing_to_say() -> None:
    """No slow callback, no coroutine that was not awaited."""

    async def main() -> None:
        assert await PIPELINE.aexecute(Script(Boom(), "fine").function()) == "fine"
        with pytest.raises(TimeoutExceeded):
            await Timeout(0.005).aexecute(lambda ctx: asyncio.sleep(10))

    asyncio.run(main(), debug=True)
    gc.collect()


# --- the timers of asyncio ---


def test_a_block_that_is_closed_by_another_thread_while_its_alarm_rings_keeps_nobody_waiting() -> None:
    """The interpreter may switch, or collect, wherever a function that is written in C has returned."""

    async def main(at: int) -> bool:
        """Close a block at this place; say whether the alarm came by it."""
        places = 0
        timeout = Timeout(0.005)
        closed = timeout.acall(asyncio.sleep, LONG)
        contextvars.Context().run(closed.send, None)
        others = [asyncio.ensure_future(timeout.acall(asyncio.sleep, LONG)) for _ in range(2)]
        await asyncio.sleep(0)

        def look(frame: types.FrameType, event: str, argument: Any) -> None:
            nonlocal places
            if event in ("return", "c_return") and frame.f_code.co_filename == alarms.__file__:
                places += 1
                if places == at:
                    sys.setprofile(None)
                    closed.close()

        before = sys.getprofile()
        sys.setprofile(look)
        try:
            done, late = await asyncio.wait(others, timeout=0.5)
        except asyncio.CancelledError:  # it was this task that stepped into the block
            done, late = await asyncio.wait(others, timeout=0.5)
        finally:
            sys.setprofile(before)
        closed.close()
        assert not late
        assert all(isinstance(task.exception(), TimeoutExceeded) for task in done)
        return places >= at

    at = 1
    while asyncio.run(main(at)):
        at += 1
    assert at > 1


@pytest.mark.parametrize("policy", [Timeout(LONG), Timeout(LONG).wrap(Retry(2))], ids=["alone", "around a retry"])
def test_a_loop_that_is_closed_keeps_no_task_that_still_ran(policy: Policy[Any]) -> None:
    """It is collected as without us, and its `finally` runs then: what is remembered of a loop holds nothing of it."""
    cleaned: list[str] = []

    async def hang() -> None:
        try:
            await asyncio.sleep(LONG)
        finally:
            cleaned.append("up")

    async def main() -> None:
        task = asyncio.ensure_future(policy.acall(hang))
        await asyncio.sleep(0.001)
        assert not task.done()

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, told: None)  # that a task was destroyed, which it was
    loop.run_until_complete(main())
    loop.close()
    gc.collect()
    assert cleaned == ["up"]


async def test_timers_that_did_not_fire_do_not_pile_up(in_asyncio: World) -> None:
    """A limit of a minute on calls of a millisecond: the loop has not one timer for each of them to wait for."""

    loop: Any = asyncio.get_running_loop()
    timeout, fn = Timeout(LONG), Script("fine").function()
    for _ in range(1500):
        await timeout.aexecute(fn)
        await timeout.aexecute(fn, Context(timeout=LONG / 2))
    await asyncio.sleep(0)
    assert sum(not handle.cancelled() for handle in loop._scheduled) <= 2  # for the policy's limit, and for all others
    assert len(loop._scheduled) < 500


def test_calls_under_the_same_limit_are_each_cut_off_in_their_own_time(tasks_world: World) -> None:
    """They begin one after the other; some end by themselves, the first of all among them."""
    limit, step = 0.04, 0.004
    timeout = Timeout(limit)
    took: dict[int, float] = {}

    async def call(n: int) -> None:
        await anyio.sleep(n * step)
        began = time.monotonic()
        seconds = 0.001 if n % 3 == 0 else 10
        result = await tasks_world.attempt(timeout, lambda ctx: anyio.sleep(seconds))
        assert (result is None) == (n % 3 == 0)
        if result is not None:
            took[n] = time.monotonic() - began

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for n in range(12):
                group.start_soon(call, n)

    began = time.monotonic()
    tasks_world.run(main)
    whole = time.monotonic() - began
    assert len(took) == 8
    assert min(took.values()) >= limit
    assert whole < 3


async def test_a_limit_is_set_again_after_it_has_fired(tasks_world: World) -> None:
    """Again and again, at once and after a while, with calls in between that end by themselves."""
    timeout = Timeout(0.005)

    for pause in (0, 0.01, 0, 0.002, 0.01):
        assert await timeout.aexecute(Script("quick").function()) == "quick"
        with pytest.raises(TimeoutExceeded):
            await timeout.aexecute(lambda ctx: anyio.sleep(10))
        await anyio.sleep(pause)


def test_a_loop_that_has_ended_takes_no_timer_with_it() -> None:
    """The next loop of the same thread sets its own, also where the last one left one behind."""
    timeout = Timeout(0.02)

    async def quick() -> None:
        await timeout.aexecute(Script("quick").function())

    async def slow() -> None:
        with pytest.raises(TimeoutExceeded):
            await timeout.aexecute(lambda ctx: asyncio.sleep(10))

    for main in (quick, slow, quick, quick, slow, slow):
        asyncio.run(main())


def test_two_loops_that_take_turns_in_one_thread_have_their_own_timers() -> None:
    """Each rings in its own loop only."""
    timeout = Timeout(0.02)
    loops = [asyncio.new_event_loop() for _ in range(2)]

    async def call() -> Any:
        return await World("asyncio").attempt(timeout, lambda ctx: asyncio.sleep(10))

    async def wait() -> None:
        await asyncio.sleep(0.001)

    try:
        tasks = [loop.create_task(call()) for loop in loops]
        for _ in range(5):
            for loop in loops:
                loop.run_until_complete(wait())
        for loop, task in zip(loops, tasks, strict=True):
            began = time.monotonic()
            assert type(loop.run_until_complete(task)) is TimeoutExceeded
            assert time.monotonic() - began < 5
    finally:
        for loop in loops:
            loop.close()


def test_any_number_of_different_limits_is_kept() -> None:
    """Limits that are computed anew for each call among them."""

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for n in range(200):
                group.start_soon(cut_off, 0.01 + n * 0.0001)
                group.start_soon(cut_off, 0.01 + n * 0.0001)

    async def cut_off(limit: float) -> None:
        began = time.monotonic()
        with pytest.raises(TimeoutExceeded) as raised:
            await Timeout(limit).aexecute(lambda ctx: asyncio.sleep(10))
        assert raised.value.timeout == limit
        assert time.monotonic() - began >= limit

    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < 5


async def test_a_clock_that_is_put_back_leaves_every_timer_its_time(in_asyncio: World, clock: FakeClock) -> None:
    """Calls under one limit no longer end in the order in which they began; each is cut off all the same."""
    timeout = Timeout(0.02)
    cut_off: list[str] = []

    async def call(name: str) -> None:
        with pytest.raises(TimeoutExceeded):
            await timeout.aexecute(lambda ctx: asyncio.sleep(10))
        cut_off.append(name)

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(call("before"))
        await asyncio.sleep(0)
        clock.advance(-100)
        group.create_task(call("after"))
    assert sorted(cut_off) == ["after", "before"]


async def test_a_clock_that_is_put_back_makes_nobody_wait_for_an_earlier_call(
    in_asyncio: World, clock: FakeClock
) -> None:
    """Of the earlier one the deadline is far away now; it shall not stand before those of later calls."""
    timeout = Timeout(0.02)

    async def hang(ctx: Context) -> None:
        await asyncio.sleep(10)

    await timeout.aexecute(Script("fine").function())  # its alarm will ring for the next one as well
    earlier = asyncio.create_task(timeout.aexecute(hang))
    await asyncio.sleep(0)
    clock.advance(-100)
    with pytest.raises(TimeoutExceeded):
        async with asyncio.timeout(5):
            await timeout.aexecute(hang)
    earlier.cancel()


def test_limits_of_loops_that_have_ended_leave_room_for_those_of_the_next() -> None:
    """However many there were: calls under one limit have one timer of the loop between them."""

    async def fn(ctx: Context) -> None:
        """Keep nothing: a context keeps its timer."""

    async def many_limits() -> None:
        for n in range(100):
            await Timeout(LONG + n).aexecute(fn)

    async def one_limit() -> None:
        loop: Any = asyncio.get_running_loop()
        timeout = Timeout(LONG / 3)
        for _ in range(50):
            await timeout.aexecute(fn)
        assert len(loop._scheduled) == 1

    asyncio.run(many_limits())
    gc.collect()
    asyncio.run(one_limit())


async def test_a_timer_keeps_nothing_of_a_call_that_has_ended(in_asyncio: World) -> None:
    """Neither its task nor what its context variables held, however far away the limit is."""
    variable: contextvars.ContextVar[object] = contextvars.ContextVar("variable")
    alive: list[weakref.ref[Any]] = []

    class Thing:
        """Something that takes memory."""

    async def call() -> None:
        thing = Thing()
        variable.set(thing)
        task = asyncio.current_task()
        assert task is not None
        alive.extend([weakref.ref(thing), weakref.ref(task)])
        await Timeout(LONG).aexecute(Script("fine").function())

    await asyncio.create_task(call())
    await asyncio.sleep(0)  # the loop itself lets go of a task one turn after it has ended
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


# --- being woken ---


@pytest.mark.parametrize("waker", ["thread", "asyncio", "trio"])
def test_a_task_that_queues_is_woken_from_any_world(tasks_world: World, waker: str) -> None:
    """Its event lives in its own loop; whoever gives the permit back only asks that loop."""
    bulkhead = Bulkhead(1, queue=1)
    held, queued = threading.Event(), threading.Event()

    def hold() -> None:
        def blocking(ctx: Context) -> None:
            held.set()
            queued.wait(5)
            time.sleep(0.005)

        async def task(ctx: Context) -> None:
            blocking(ctx)

        if waker == "thread":
            bulkhead.execute(blocking)
        else:
            anyio.run(bulkhead.aexecute, task, backend=waker)

    async def main() -> str:
        async with anyio.create_task_group() as group:
            group.start_soon(tell_when_queued)
            return await bulkhead.aexecute(Script("got in").function())  # type: ignore[no-any-return]
        raise AssertionError

    async def tell_when_queued() -> None:
        while not bulkhead.stats().queued:
            await anyio.sleep(0.001)
        queued.set()

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(5)
    began = time.monotonic()
    assert tasks_world.run(main) == "got in"
    assert time.monotonic() - began < 4
    holder.join()
    assert bulkhead.stats().in_flight == 0


# --- what a policy may ask for ---


class Beside(Policy[Never]):
    """Starts the call in a task of its own, as a hedge does."""

    async def around(self, call: Call[Any], ctx: Context) -> Any:
        beside = asyncio.ensure_future(call(ctx))
        try:
            return await beside
        except Boom:
            return "caught"


def answers() -> Any:
    future = asyncio.get_running_loop().create_future()
    future.set_result("fine")
    return future


def raises() -> Any:
    raise Boom


@pytest.mark.parametrize("listening", [False, True])
async def test_a_call_that_is_awaited_later_has_not_begun(in_asyncio: World, listening: bool) -> None:
    """Whatever the function is: one that raises at once raises where the call is awaited."""
    policy = Beside().wrap(listeners=[repr] * listening)
    assert await policy.acall(answers) == "fine"
    assert await policy.acall(raises) == "caught"


class LooksFirst(Policy[Never]):
    """Makes the call, and awaits it later."""

    async def around(self, call: Call[Any], ctx: Context) -> Any:
        called = call(ctx)
        begun.append("policy")
        return await called


begun: list[str] = []


async def begins() -> None:
    begun.append("function")


def begins_early() -> Any:
    begun.append("function")
    return begins()


class Begins:
    def __call__(self) -> Any:
        return begins_early()

    def plain(self) -> Any:
        return begins_early()

    async def method(self) -> None:
        await begins()


@pytest.mark.parametrize(
    "function",
    [begins, begins_early, lambda: begins_early(), partial(begins_early), Begins(), Begins().plain, Begins().method],
)
async def test_no_function_begins_before_its_call_is_awaited(tasks_world: World, function: Any) -> None:
    """An `async def` begins there by itself; any other callable is only called there."""
    for run in (lambda: LooksFirst().acall(function), lambda: LooksFirst().aexecute(lambda ctx: function())):
        begun.clear()
        await run()
        assert begun[:2] == ["policy", "function"]


# --- without an event loop -------------------------------------------------------------------


def first_loaded() -> Any:
    """The runtime of tasks, as a process has it that has run none yet."""
    spec = importlib.util.spec_from_file_location("resilience.runtimes.first_loaded", tasks.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_no_asyncio_task_where_asyncio_was_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for one does not import it; nor where its import is forbidden, and `sys.modules` says None of it."""
    runtimes = first_loaded()
    monkeypatch.delitem(sys.modules, "asyncio")
    assert runtimes.find_runtime() is BLOCKING
    assert "asyncio" not in sys.modules
    monkeypatch.setitem(sys.modules, "asyncio", None)  # type: ignore[arg-type]
    assert runtimes.find_runtime() is BLOCKING


def test_the_first_task_of_a_process_is_found() -> None:
    """And the next ones."""
    runtimes = first_loaded()

    async def main() -> list[object]:
        return [runtimes.find_runtime(), runtimes.find_runtime()]

    assert asyncio.run(main()) == [runtimes.TASKS] * 2
    assert runtimes.find_runtime() is BLOCKING


@pytest.mark.parametrize("policy", [Retry(2, on=Boom, backoff=[1]), Timeout(1)], ids=["retry", "timeout"])
def test_without_an_event_loop_there_is_nothing_to_wait_in(policy: Policy[Any]) -> None:
    """A coroutine that is sent on manually gets the error of anyio, which names the loops that it knows."""
    coroutine = policy.acall(Script(Boom()).function())
    with pytest.raises(RuntimeError, match="asyn"):
        coroutine.send(None)
