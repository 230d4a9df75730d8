"""Calls in tasks of asyncio and trio: everything happens in the caller's own task."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import sys
import threading
import time
import types
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
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
    DeadlineExceeded,
    Fallback,
    Hedge,
    Policy,
    Rate,
    RateLimiter,
    Retry,
    Timeout,
    TimeoutExceeded,
    current_context,
    deadline,
)
from resilience.clock import clock
from resilience.errors import SuspensionMisuse
from resilience.runtimes import alarms, tasks
from resilience.runtimes.alarms import AsyncioTimer
from resilience.runtimes.blocking import BLOCKING
from resilience.testing import virtual_time
from tests.conftest import Boom, FakeClock, Heavy, Script, Virtual, Watched, World

LONG = 60.0

PIPELINE = Policy.wrap(
    Fallback(on=LookupError), Timeout(LONG), Retry(on=Boom, backoff=[0]), CircuitBreaker(), Bulkhead(100), Timeout(30)
)


# --- the task and the thread of a call ---


@pytest.mark.parametrize("where", ["no event loop", "a callback"])
@pytest.mark.parametrize(
    "policy",
    [Timeout(LONG), Retry(on=Boom, backoff=[0.01]), Hedge(0.01), RateLimiter(Rate(1, per=LONG))],
    ids=["timer", "sleep", "race", "queue"],
)
def test_a_call_that_has_to_wait_in_no_task_is_a_misuse(
    monkeypatch: pytest.MonkeyPatch, policy: Policy[Never], where: str
) -> None:
    """For example in an event loop of Twisted: no policy answers the error. trio need not be imported."""
    if isinstance(policy, RateLimiter):
        policy.try_take()

    def step() -> None:
        call = Fallback("instead").wrap(policy).acall(fail)
        with pytest.raises(SuspensionMisuse, match="outside of a task of asyncio or trio"):
            call.send(None)
        seen.append(where)

    async def fail() -> Never:
        raise Boom("no")

    async def main() -> None:
        asyncio.get_running_loop().call_soon(step)
        await asyncio.sleep(0)

    seen: list[str] = []
    for name in ("trio", "trio.lowlevel"):
        monkeypatch.delitem(sys.modules, name)
    if where == "a callback":
        asyncio.run(main())
    else:
        step()
    assert seen == [where]


async def test_the_function_runs_in_the_callers_own_task(tasks_world: World) -> None:
    """No task, thread or copy of the context variables is made: the caller sees what the function sets."""
    seen: list[Any] = []
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")

    async def fn(ctx: Context) -> None:
        seen.append((anyio.get_current_task().id, threading.get_ident()))
        variable.set("from inside")

    await PIPELINE.aexecute(fn)
    assert seen == [(anyio.get_current_task().id, threading.get_ident())]
    assert variable.get() == "from inside"


async def test_a_call_without_waits_does_not_suspend(tasks_world: World) -> None:
    """A successful call costs no turn of the loop."""

    async def fn(ctx: Context) -> str:
        return "at once"

    coroutine = PIPELINE.aexecute(fn)
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    assert done.value.value == "at once"


async def test_blocking_code_inside_a_task_uses_a_worker_for_its_timeout(tasks_world: World) -> None:
    gate = threading.Event()
    assert PIPELINE.execute(lambda ctx: "plain") == "plain"
    with pytest.warns(RuntimeWarning, match="stops the event loop"), pytest.raises(TimeoutExceeded):
        Timeout(0.005).execute(lambda ctx: gate.wait(10))
    gate.set()


# --- the ambient context ---


async def test_a_block_that_a_function_leaves_open_does_not_keep_its_context_ambient(tasks_world: World) -> None:
    """As in a stream that is read and closed after the call that opened it: its deadline was that of the call."""

    async def stream() -> AsyncGenerator[int, None]:
        with deadline(LONG):
            yield 1

    async def opened(*_: object) -> AsyncGenerator[int, None]:
        opened_stream = stream()
        await anext(opened_stream)
        return opened_stream

    async def fails(ctx: Context) -> Never:
        raise Boom

    for policy, fn in ((Timeout(5.0), opened), (Timeout(5.0).wrap(Fallback(handler=opened)), fails)):
        opened_stream = await policy.aexecute(fn)
        assert current_context().remaining() == inf
        await opened_stream.aclose()
        assert current_context().remaining() == inf


async def test_a_callback_of_the_loop_is_not_cut_off_by_the_timer_of_a_call_that_has_ended(in_asyncio: World) -> None:
    """It inherits the context of that call, whose deadline ends its wait, but it runs in no task."""
    bulkhead, ended = Bulkhead(1, queue=1), asyncio.get_running_loop().create_future()

    def callback() -> None:
        try:
            bulkhead.slot().__enter__()
        except BaseException as error:
            ended.set_result(error)

    async def fn(ctx: Context) -> None:
        asyncio.get_running_loop().call_soon(callback)

    with bulkhead.slot():
        await Timeout(0.01).aexecute(fn)
        with pytest.warns(RuntimeWarning, match="stops the event loop"):
            error = await ended
    assert isinstance(error, DeadlineExceeded)


@pytest.mark.parametrize("in_handler", [False, True])
async def test_a_coroutine_closed_in_another_context_releases_its_permit(in_asyncio: World, in_handler: bool) -> None:
    """The `finally` of a coroutine, or of an asynchronous handler, may run with other context variables."""
    ended: list[str] = []

    async def hangs(*_: object) -> None:
        try:
            await asyncio.sleep(10)
        finally:
            ended.append("closed")

    bulkhead, handling = Bulkhead(1), Fallback(handler=hangs)
    coroutine = Policy.wrap(bulkhead, handling, Retry(1)).aexecute(
        Script(Boom()).function() if in_handler else hangs, Context(timeout=LONG)
    )
    elsewhere = contextvars.copy_context()
    elsewhere.run(coroutine.send, None)
    assert bulkhead.stats().in_flight == 1
    assert elsewhere.run(current_context).deadline < inf
    contextvars.copy_context().run(coroutine.close)
    assert bulkhead.stats().in_flight == 0
    assert ended == ["closed"]
    assert current_context().deadline == inf


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts the timers it schedules."""

    timers = 0

    def call_later(self, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        self.timers += 1
        return super().call_later(*args, **kwargs)


def test_two_loops_have_a_timer_each() -> None:
    """Also when their calls alternate under one policy: no timer is made per call, and none serves both loops."""
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


# --- what can be awaited ---


async def test_a_future_and_a_task_of_asyncio_can_be_awaited(in_asyncio: World) -> None:
    """A timeout cancels the task that the call waits for, as `await` does."""
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, "done")
    assert await PIPELINE.aexecute(lambda ctx: future) == "done"
    task = asyncio.create_task(asyncio.sleep(10))
    with pytest.raises(TimeoutExceeded):
        await Timeout(0.005).aexecute(lambda ctx: task)
    assert task.cancelled()


# --- loops ---


async def test_trio_may_run_as_a_guest_of_an_asyncio_loop(in_asyncio: World) -> None:
    """Its tasks run in callbacks of asyncio; the timeout is a scope of trio all the same."""

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
    assert (await asyncio.wait_for(done, 10)).unwrap() == "fine"


# --- the timers of asyncio ---


def test_closing_a_call_from_another_thread_while_its_alarm_rings_delays_no_other_call() -> None:
    """The interpreter may switch threads, or collect garbage, wherever a function written in C has returned."""

    reported: list[dict[str, Any]] = []

    async def main(at: int) -> bool:
        """Close a call at this place. Return whether the alarm reached the place."""
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        places = 0
        timeout = Timeout(0.02)
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
        except asyncio.CancelledError:  # the interrupted task was this one
            done, late = await asyncio.wait(others, timeout=0.5)
        finally:
            sys.setprofile(before)
        closed.close()
        assert not late
        assert all(isinstance(task.exception(), TimeoutExceeded) for task in done)
        return places >= at

    at = 1
    with virtual_time():
        while asyncio.run(main(at)):
            at += 1
    assert at > 1
    assert reported == []


@pytest.mark.parametrize("policy", [Timeout(LONG), Timeout(LONG).wrap(Retry(2))], ids=["alone", "around a retry"])
def test_a_closed_loop_keeps_no_unfinished_task_alive(policy: Policy[Any]) -> None:
    """The task is collected as without a policy, and its `finally` runs then."""
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
    loop.set_exception_handler(lambda loop, context: None)  # that a pending task was destroyed is expected here
    loop.run_until_complete(main())
    loop.close()
    gc.collect()
    assert cleaned == ["up"]


async def test_unused_timers_do_not_accumulate(in_asyncio: World) -> None:
    """A timeout of a minute around calls of a millisecond does not leave a timer in the loop for each call."""
    loop: Any = asyncio.get_running_loop()
    timeout = Timeout(LONG)

    async def fn(ctx: Context) -> None:
        """Keep no reference to the context: a context keeps its timer."""

    for number in range(1500):
        await timeout.aexecute(fn)
        await timeout.aexecute(fn, Context(timeout=LONG / 2 - number / 100))  # due earlier each time
    await asyncio.sleep(0)
    gc.collect()  # of earlier tests
    assert not [it for it in gc.get_objects() if type(it) is AsyncioTimer]
    assert sum(not handle.cancelled() for handle in loop._scheduled) <= 2  # one for the policy, one for all contexts
    assert len(loop._scheduled) < 500


async def test_a_wait_in_a_queue_that_has_ended_leaves_no_timer(in_asyncio: World) -> None:
    loop: Any = asyncio.get_running_loop()
    bulkhead = Bulkhead(1, queue=1, max_wait=LONG)
    for _ in range(10):
        await asyncio.gather(bulkhead.acall(asyncio.sleep, 0), bulkhead.acall(asyncio.sleep, 0))
    assert all(handle.cancelled() for handle in loop._scheduled)


async def test_each_call_under_a_shared_timeout_is_cut_off_in_its_own_time(virtual_tasks: Virtual) -> None:
    """They begin one after the other; some end before the timeout, the very first among them."""
    limit, step = 0.04, 0.004
    timeout = Timeout(limit)
    took: dict[int, float] = {}

    async def call(n: int) -> None:
        await anyio.sleep(n * step)
        began = virtual_tasks.now()
        seconds = 0.001 if n % 3 == 0 else 10
        result = await virtual_tasks.attempt(timeout, lambda ctx: anyio.sleep(seconds))
        assert (result is None) == (n % 3 == 0)
        if result is not None:
            took[n] = virtual_tasks.now() - began

    async with anyio.create_task_group() as group:
        for n in range(12):
            group.start_soon(call, n)
    assert len(took) == 8
    assert [*took.values()] == pytest.approx([limit] * 8)


async def test_hundreds_of_distinct_timeouts_all_cut_off_in_time(in_asyncio: World) -> None:
    """As with timeouts that are computed for each call. The number of timers that they keep is bounded."""

    async def cut_off(limit: float) -> None:
        began = time.monotonic()
        with pytest.raises(TimeoutExceeded) as raised:
            await Timeout(limit).aexecute(lambda ctx: asyncio.sleep(10))
        assert raised.value.timeout == limit
        assert time.monotonic() - began >= limit

    began = time.monotonic()
    async with anyio.create_task_group() as group:
        for n in range(400):
            group.start_soon(cut_off, 0.01 + n // 2 * 0.0001)
    assert time.monotonic() - began < 5
    loop: Any = asyncio.get_running_loop()
    for n in range(200):
        assert await Timeout(60.0 + n / 1000).acall(asyncio.sleep, 0, n) == n
    assert sum(not handle.cancelled() for handle in loop._scheduled) <= 64
    await cut_off(0.0123)


async def test_calls_around_a_clock_set_back_are_all_cut_off(in_asyncio: World, clock: FakeClock) -> None:
    """Calls under one timeout then no longer end in the order in which they began, nor does one wait for another."""
    timeout = Timeout(0.02)
    cut_off: list[str] = []
    await timeout.aexecute(Script("fine").function())  # its alarm also serves the next call

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


def test_timeouts_of_ended_loops_leave_room_for_those_of_the_next_loop() -> None:
    """All calls under one timeout share one timer of the loop, however many timeouts the ended loops had."""

    async def fn(ctx: Context) -> None:
        """Keep no reference to the context: a context keeps its timer."""

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


async def test_a_timer_keeps_nothing_of_an_ended_call_alive(in_asyncio: World) -> None:
    """Neither its task nor the values of its context variables, however far away the deadline is."""
    variable: contextvars.ContextVar[object] = contextvars.ContextVar("variable")
    watched = Watched()

    async def call() -> None:
        variable.set(watched.watch(Heavy()))
        watched.watch(asyncio.current_task())
        await Timeout(LONG).aexecute(Script("fine").function())

    await asyncio.create_task(call())
    await asyncio.sleep(0)  # the loop itself releases a task one turn after its end
    gc.collect()
    assert (watched.seen, watched.alive) == (2, [])


# --- policies that start or create the call early ---


async def waits_not() -> str:
    return "at once"


async def waits(seconds: float) -> str:
    """Wait twice."""
    await anyio.sleep(0)
    await anyio.sleep(seconds)
    return "done"


async def fails() -> None:
    await anyio.sleep(0)
    raise LookupError


async def swallows() -> str:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(LONG)
    return "done"


async def cleans_up(ended: list[str]) -> None:
    try:
        await anyio.sleep(LONG)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0)
        ended.append("cleaned up")


async def test_an_awaitable_is_cut_off_at_an_instant(tasks_world: World) -> None:
    """It can clean up. One that does not take so long returns its result, or raises its own error."""
    ended: list[str] = []
    soon = clock.now() + 0.02
    assert await tasks.cut_off_at(clock.now() + LONG, waits(0), Boom) == "done"
    with pytest.raises(Boom):
        await tasks.cut_off_at(soon, cleans_up(ended), Boom)
    assert ended == ["cleaned up"]
    with pytest.raises(LookupError):
        await tasks.cut_off_at(clock.now() + LONG, fails(), Boom)
    with pytest.raises(Boom):
        await tasks.cut_off_at(soon, waits(0), Boom)  # its wait begins after that instant


async def test_a_result_that_needs_no_wait_is_returned_at_any_time(in_asyncio: World) -> None:
    """So is the result of an awaitable that swallows its cancellation."""
    assert await tasks.cut_off_at(0.0, waits_not(), Boom) == "at once"
    assert await tasks.cut_off_at(clock.now() + 0.02, swallows(), Boom) == "done"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


class InOwnTask(Policy[Never]):
    """Starts the call in a task of its own, as a hedge does."""

    async def around(self, call: Call[Any], ctx: Context) -> Any:
        task = asyncio.ensure_future(call(ctx))
        try:
            return await task
        except Boom:
            return "caught"


def answers() -> Any:
    future = asyncio.get_running_loop().create_future()
    future.set_result("fine")
    return future


def raises() -> Any:
    raise Boom


@pytest.mark.parametrize("listening", [False, True])
async def test_a_function_called_in_another_task_raises_where_it_is_awaited(in_asyncio: World, listening: bool) -> None:
    """Also a plain function that raises before it returns an awaitable."""
    policy = InOwnTask().wrap(listeners=[repr] * listening)
    assert await policy.acall(answers) == "fine"
    assert await policy.acall(raises) == "caught"


class CreatesEarly(Policy[Never]):
    """Creates the call first, and awaits it later."""

    async def around(self, call: Call[Any], ctx: Context) -> Any:
        called = call(ctx)
        begun.append("policy")
        return await called


begun: list[str] = []


async def begins() -> None:
    begun.append("function")


def begins_when_called() -> Any:
    begun.append("function")
    return begins()


class Begins:
    def __call__(self) -> Any:
        return begins_when_called()

    def plain(self) -> Any:
        return begins_when_called()

    async def method(self) -> None:
        await begins()


@pytest.mark.parametrize(
    "function",
    [
        begins,
        begins_when_called,
        lambda: begins_when_called(),
        partial(begins_when_called),
        Begins(),
        Begins().plain,
        Begins().method,
    ],
)
async def test_no_function_begins_before_its_call_is_awaited(tasks_world: World, function: Any) -> None:
    """An `async def` begins there anyway; any other callable is only called there."""
    for run in (lambda: CreatesEarly().acall(function), lambda: CreatesEarly().aexecute(lambda ctx: function())):
        begun.clear()
        await run()
        assert begun[:2] == ["policy", "function"]


# --- without an event loop ---


@pytest.mark.parametrize("name", ["asyncio.tasks", "trio.lowlevel"])
def test_no_task_is_found_in_a_library_that_is_not_imported(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The search imports nothing. Another thread may be importing the library, or its import may be forbidden."""
    monkeypatch.delitem(sys.modules, name)
    assert tasks.find_runtime() is BLOCKING
    assert name not in sys.modules
    for unusable in (types.ModuleType(name), None):
        monkeypatch.setitem(sys.modules, name, unusable)  # type: ignore[arg-type]
        assert tasks.find_runtime() is BLOCKING


def test_a_task_of_asyncio_is_found() -> None:
    async def find() -> object:
        return tasks.find_runtime()

    assert asyncio.run(find()) is tasks.TASKS
    assert tasks.find_runtime() is BLOCKING


def test_a_task_of_trio_is_found_in_its_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The `in_trio_task` of its 0.29 is not needed."""
    monkeypatch.delattr(trio.lowlevel, "in_trio_task", raising=False)

    async def find() -> object:
        async with Retry().aproxy(Client(), "get").get() as found:
            return found

    class Client:
        @asynccontextmanager
        async def get(self) -> AsyncIterator[object]:
            yield tasks.find_runtime()

    assert trio.run(find) is tasks.TASKS
    assert tasks.find_runtime() is BLOCKING


@pytest.mark.parametrize("policy", [Retry(2, on=Boom, backoff=[1]), Timeout(1)], ids=["retry", "timeout"])
def test_a_wait_without_an_event_loop_is_an_error(policy: Policy[Any]) -> None:
    """A coroutine that is sent on manually gets the error of anyio, which names the supported loops."""
    coroutine = policy.acall(Script(Boom()).function())
    with pytest.raises(RuntimeError, match="asyn"):
        coroutine.send(None)
