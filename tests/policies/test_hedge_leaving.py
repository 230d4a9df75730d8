"""Hedge: cancellation at every point, losers that resist it, late results, and resources that must be released."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import anyio
import pytest
import trio

from resilience import (
    Bulkhead,
    CircuitBreaker,
    Context,
    Hedge,
    Policy,
    Retry,
    RetryBudget,
    Timeout,
    WorkersExhausted,
    current_context,
    events,
)
from resilience.clock import clock as process_clock
from resilience.runtimes.races import ScheduledCall
from resilience.runtimes.races.threads import ThreadEngine
from resilience.testing import virtual_time
from tests.callers import wait_until
from tests.conftest import Virtual, World, no_collector
from tests.contention.storm import Storm
from tests.functions import raising
from tests.policies.hedges import Service
from tests.policies.retries import Response
from tests.test_repeats import CustomBudget

variable: ContextVar[int] = ContextVar("variable", default=0)


# --- cancellation by the caller ----------------------------------------------------------------------


@pytest.mark.parametrize("after", [0.05, 0.15, 0.25, 0.315])
async def test_the_caller_is_cancelled_exactly_once_in_asyncio(in_virtual_asyncio: Virtual, after: float) -> None:
    """`Task.cancelling()` is 1 if the cancellation came before the result, else 0."""
    ended: list[tuple[int, bool]] = []

    async def fn(ctx: Context) -> str:
        try:
            await asyncio.sleep(0.2)
            if ctx.hedge == 0:
                raise ConnectionError
        except asyncio.CancelledError:
            await asyncio.sleep(0.02)  # a clean-up is not cancelled a second time
            ended.append((ctx.hedge, True))
            raise
        ended.append((ctx.hedge, False))
        return "second"

    task = asyncio.create_task(Hedge(0.1).aexecute(fn))
    await asyncio.sleep(after)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() == (after < 0.3)
    assert task.cancelling() == (1 if after < 0.3 else 0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    cut_off = {0.05: [(0, True)], 0.15: [(0, True), (1, True)], 0.25: [(1, True)], 0.315: [(1, False)]}
    assert sorted(it for it in ended if after != 0.315 or it[0]) == cut_off[after]


def test_a_cancellation_while_a_loser_unwinds_is_raised_after_it_in_asyncio() -> None:
    """The winner's result is closed, and reported as lost."""
    answer = Response()
    ended: list[float] = []
    finished: list[Any] = []
    hedge = Hedge(0.1).wrap(listeners=[finished.append])

    async def fn(ctx: Context) -> Response:
        if ctx.hedge != loser:
            await asyncio.sleep(0.2 - 0.1 * ctx.hedge)
            return answer
        try:
            await asyncio.sleep(5)
        finally:
            await asyncio.sleep(0.5)
            ended.append(asyncio.get_running_loop().time())
        return Response()

    async def main() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        task = asyncio.create_task(hedge.aexecute(fn))
        for seconds in (0.3, 0.1, 0.1):  # the loser unwinds from 0.2 to 0.7
            await asyncio.sleep(seconds)
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        return loop.time() - began

    with virtual_time():
        loser = 1
        assert round(asyncio.run(main()), 6) == 0.7
        assert (len(ended), answer.closed) == (1, 1)
        loser = 0  # the loser runs in the caller's own task, so the cancellation ends its clean-up
        assert round(asyncio.run(main()), 6) == 0.5
        assert (len(ended), answer.closed) == (1, 2)
    assert [it.won for it in finished if isinstance(it, events.HedgeFinished)] == [None, None]


async def test_a_scope_of_anyio_cancels_the_caller_once_while_a_loser_unwinds(in_virtual_asyncio: Virtual) -> None:
    """It would in each iteration of the event loop, which would never rest."""
    requests: list[int] = []
    caller: Any = asyncio.current_task()

    async def fn(ctx: Context) -> None:
        try:
            await asyncio.sleep(5)
        finally:
            for _ in range(20 if ctx.hedge else 0):
                await asyncio.sleep(0)
                requests.append(caller.cancelling())

    with anyio.move_on_after(0.3) as scope:
        await Hedge(0.1).aexecute(fn)
    assert scope.cancelled_caught
    assert caller.cancelling() == 0
    assert len(requests) == 20
    assert requests[-1] == requests[2]


def test_a_cancellation_while_a_loser_unwinds_is_raised_after_it_in_trio() -> None:
    """The race waits for the loser, shielded."""
    ended: list[float] = []

    async def fn(ctx: Context) -> str:
        if ctx.hedge == 0:
            await trio.sleep(0.15)
            return "first"
        try:
            await trio.sleep(5)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.5)
            ended.append(trio.current_time())
        return "second"

    async def main() -> None:
        with trio.move_on_after(0.3) as scope:
            await Hedge(0.1).aexecute(fn)
            raise AssertionError("the call was not cancelled")
        assert scope.cancelled_caught
        assert len(ended) == 1

    with virtual_time():
        trio.run(main)


def test_a_call_whose_event_loop_is_closed_is_no_failure() -> None:
    """The policies around it see that its coroutine is closed; its permits are released.

    A discarded result is not closed, as that may have to wait.
    """

    class Slow:
        async def aclose(self) -> None:
            await asyncio.sleep(0)

    async def fn(ctx: Context) -> Slow:
        if not ctx.hedge:
            await asyncio.sleep(60)
        return Slow()

    breaker, bulkhead = CircuitBreaker(1), Bulkhead(2)
    loop = asyncio.new_event_loop()
    hedge = Hedge(0, on_result=lambda result: True, budget=None)
    call = breaker.wrap(hedge, bulkhead).aexecute(fn)
    tasks = {loop.create_task(call)}
    loop.run_until_complete(asyncio.sleep(0.01))
    tasks |= asyncio.all_tasks(loop)
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    call.close()
    del call, task, tasks
    gc.collect()
    assert (breaker.state.value, bulkhead.stats().in_flight) == ("closed", 0)


async def test_a_loser_that_swallows_its_cancellation_is_awaited_and_its_result_closed(anywhere: Virtual) -> None:
    """The caller gets the winner's result, and no cancellation is left. Closing may have to wait."""

    class Late(Response):
        async def aclose(self) -> None:
            await anywhere.sleep(0.05)
            self.close()

    late = Late()
    resisted: list[int] = []

    async def fn(ctx: Context) -> Any:
        if ctx.hedge == loser:
            try:
                await anywhere.sleep(5)
            except BaseException:
                resisted.append(ctx.hedge)
            return late
        await anywhere.sleep(0.2)
        return "answer"

    for loser in (0, 1):  # noqa: B007 (the function reads it)
        assert await anywhere.execute(Hedge(0.1), fn) == "answer"
        await anywhere.sleep(0)
        if anywhere.name == "asyncio" and (task := asyncio.current_task()) is not None:
            assert task.cancelling() == 0
    if anywhere.blocking:  # a thread is abandoned, and ends later
        await anywhere.sleep(6)
        wait_until(lambda: late.closed == 2)
    else:
        assert (resisted, late.closed) == ([0, 1], 2)


async def test_a_timeout_while_one_result_is_closed_still_closes_the_others(anywhere: Virtual) -> None:
    """Four bad results come at once; in tasks, closing one takes longer than the time that is left."""
    made: list[Slow] = []

    class Slow:
        closed = 0

        async def aclose(self) -> None:
            self.closed += 1
            await anywhere.sleep(0.1)

        def close(self) -> None:
            self.closed += 1

    async def fn(ctx: Context) -> Slow:
        await anywhere.sleep(0.1)
        made.append(Slow())
        return made[-1]

    hedge = Hedge(0, hedges=3, on_result=lambda result: True, budget=None)
    answer = await anywhere.attempt(Policy.wrap(Timeout(0.15), hedge), fn)
    assert [it.closed for it in made if it is not answer] == [1] * (3 if anywhere.blocking else 4)


async def test_a_callers_cancellation_that_the_function_swallows_is_not_lost(in_virtual_asyncio: Virtual) -> None:
    """The race and the caller cancel the same task, and the function sees only one cancellation."""

    async def fn(ctx: Context) -> str:
        if ctx.hedge:
            await asyncio.sleep(0.1)
            tasks[0].cancel()
            return "second"
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            pass
        return "first"

    tasks: list[asyncio.Task[str]] = []
    tasks.append(asyncio.create_task(Hedge(0.1).aexecute(fn)))
    await asyncio.wait(tasks)
    assert tasks[0].cancelled()


# --- errors that are no outcome ----------------------------------------------------------------------


class Stop(BaseException):
    """A `BaseException`, which no policy handles."""


async def test_a_base_exception_of_any_attempt_is_raised_at_once(anywhere: Virtual) -> None:
    """The other attempts are cut off, and release their permits."""
    bulkhead = Bulkhead(5)
    for place in (0, 1):
        service = Service(anywhere, *[(0.2 if number == place else 5, Stop()) for number in range(2)])
        service.began = anywhere.now()
        with pytest.raises(Stop):
            await anywhere.execute(Hedge(0.1).wrap(bulkhead), service.function())
        assert bulkhead.stats().in_flight == 0


async def test_errors_of_listeners_are_ignored_and_errors_of_the_budget_are_raised(anywhere: Virtual) -> None:
    """An error of the budget cuts off the first attempt."""
    hedge = Hedge(0.1, on_hedge=raising(LookupError))
    assert (await Service(anywhere, (5, "first"), (0.1, "second")).under(hedge))[0] == "second"
    budget = CustomBudget(OSError("no answer"))
    error, seconds = await Service(anywhere, (5, "first")).under(Hedge(0.1, budget=budget))
    assert (type(error), seconds) == (OSError, 0.1)


async def test_a_hedge_is_refunded_if_a_listener_is_interrupted(anywhere: Virtual) -> None:
    """Ctrl-C in `on_hedge` ends the call, so the hedge is not made."""
    budget = RetryBudget(0, saved=1)
    service = Service(anywhere, (5, "first"))
    service.began = anywhere.now()
    with pytest.raises(Stop):
        await anywhere.execute(Hedge(0.1, budget=budget, on_hedge=raising(Stop)), service.function())
    assert budget.balance == 1


async def test_the_answer_is_closed_if_the_budget_raises(anywhere: Virtual) -> None:
    """No caller will see it."""

    class Broken(CustomBudget):
        def succeeded(self) -> None:
            raise OSError("no answer")

    answer = Response()
    error, _ = await Service(anywhere, (0.05, answer)).under(Hedge(0.1, budget=Broken()))
    assert (type(error), answer.closed) == (OSError, 1)


# --- threads -----------------------------------------------------------------------------------------


def test_policies_run_in_the_callers_thread_and_functions_in_workers(threads: World) -> None:
    """A function sees a copy of the caller's context variables, and its own `Context`."""
    seen: list[threading.Thread] = []
    here = threading.current_thread()
    over = threading.Event()

    class Note(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            seen.append(threading.current_thread())
            return await call(ctx)

    def fn(ctx: Context) -> tuple[int, bool, bool]:
        if ctx.hedge == 0:
            over.wait(10)
        return variable.get(), threading.current_thread() is here, current_context() is ctx

    token = variable.set(7)
    assert Hedge(0.01).wrap(Note()).execute(fn) == (7, False, True)
    over.set()
    variable.reset(token)
    assert seen == [here, here]


def test_an_abandoned_loser_counts_towards_max_abandoned(threads: World) -> None:
    """At the cap neither a hedge nor a first attempt begins."""
    heard: list[Any] = []
    release = threading.Event()
    before = Timeout.abandoned()
    hedge = Hedge(0.01, budget=None, name="h").wrap(name="p", listeners=[heard.append])

    def fn(ctx: Context) -> int:
        if ctx.hedge == 0:
            release.wait(5)
        return ctx.hedge

    assert hedge.execute(fn) == 1
    assert Timeout.abandoned() == before + 1
    most, Timeout.max_abandoned = Timeout.max_abandoned, before + 1
    try:
        with pytest.raises(WorkersExhausted):
            hedge.execute(fn)
        refused = [it for it in heard if isinstance(it, events.CallRejected)]
        assert [it.reason for it in refused] == ["WorkersExhausted"]
    finally:
        Timeout.max_abandoned = most
        release.set()
    wait_until(lambda: Timeout.abandoned() == before)


async def test_a_hedged_call_leaves_no_reference_cycle(anywhere: Virtual) -> None:
    """A race refers to the context variables of its caller, and releases them."""

    class Value:
        pass

    async def fn(ctx: Context) -> int:
        await anywhere.sleep(0.1)
        return ctx.hedge

    context_variable: ContextVar[Value | None] = ContextVar("context_variable", default=None)
    with no_collector():
        value = Value()
        reference, token = weakref.ref(value), context_variable.set(value)
        assert await anywhere.attempt(Hedge(0.05), fn) == 0
        context_variable.reset(token)
        del value, token
        await anywhere.sleep(0.1)
        if anywhere.blocking:
            wait_until(lambda: reference() is None)
        assert reference() is None


def test_a_loser_that_ends_together_with_the_race_leaves_no_reference_cycle(threads: World) -> None:
    """Its worker has woken the client of the first attempt, which has ended."""
    judged = threading.Event()

    def fn(ctx: Context) -> int:
        if not ctx.hedge:
            judged.wait(5)
        return ctx.hedge

    def is_bad(result: int) -> bool:
        judged.set()
        time.sleep(0.02)  # until the other function has ended
        return False

    def engines() -> set[int]:
        return {id(it) for it in gc.get_objects() if isinstance(it, ThreadEngine)}

    with no_collector():
        before = engines()  # of functions that other tests have abandoned
        assert Hedge(0, on_result=is_bad, budget=None).execute(fn) == 1
        assert engines() <= before


def test_the_first_attempt_goes_on_if_a_hedge_gets_no_worker(threads: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hedge does not begin, and is not reported."""
    hedged: list[object] = []

    def fn(ctx: Context) -> int:
        monkeypatch.setattr(Timeout, "max_abandoned", 0)
        time.sleep(0.25)
        return ctx.hedge

    assert Hedge(0.2, budget=None, on_hedge=hedged.append).execute(fn) == 0
    assert hedged == []


class Interrupted(Policy[Any]):
    """Interrupts the attempt beside the first as that is cut off."""

    async def around(self, call: Any, ctx: Context) -> Any:
        try:
            return await call(ctx)
        finally:
            if ctx.hedge:
                raise KeyboardInterrupt


def test_an_interrupt_in_an_attempt_that_an_outer_timeout_cuts_off_is_not_lost(threads: World) -> None:
    with virtual_time(), pytest.raises(KeyboardInterrupt):
        Timeout(0.05).wrap(Hedge(0), Interrupted()).execute(lambda ctx: process_clock.sleep(1))


async def test_an_interrupt_in_a_nested_hedge_is_not_lost_if_the_outer_one_is_decided_meanwhile(
    anywhere: Virtual,
) -> None:
    """The nested hedge waits for the clean-up of its other attempt, while the outer one gets a result."""
    begun: list[int] = []

    class Outer(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            if ctx.hedge:
                await ctx.sleep(0.2)
                return "result"
            return await call(ctx)

    class Inner(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            begun.append(ctx.hedge)
            if begun == [0]:
                await ctx.sleep(0.1)
                raise KeyboardInterrupt
            try:
                return await call(ctx)
            finally:
                with anyio.CancelScope(shield=True) if anywhere.name == "trio" else nullcontext():
                    await ctx.sleep(0.5)

    async def fn(ctx: Context) -> None:
        await anywhere.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        await anywhere.execute(Policy.wrap(Hedge(0), Outer(), Hedge(0.05), Inner()), fn)


@pytest.mark.parametrize("is_interrupted", [False, True], ids=["timeout", "interrupt"])
def test_a_policy_that_waits_as_it_is_cut_off_is_not_cut_off_again(
    threads: World, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    """By an outer Timeout, or by Ctrl-C while the thread waits for the function."""
    ended: list[int] = []

    class Slow(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            try:
                return await call(ctx)
            finally:
                await ctx.sleep(0.02)
                ended.append(ctx.hedge)

    def interrupted(lock: Any, seconds: float | None) -> bool:
        monkeypatch.undo()
        raise KeyboardInterrupt

    if is_interrupted:
        monkeypatch.setattr(process_clock, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt if is_interrupted else TimeoutError):
        Timeout(5.0 if is_interrupted else 0.05).wrap(Hedge(5), Slow()).execute(threads.native(threads.hang))
    assert ended == [0]


def test_a_loser_that_fails_as_the_race_is_decided_is_not_retried(threads: World) -> None:
    """Its failure arrives while `on_result` looks at the result of the winner."""
    begun: list[int] = []
    may_fail = threading.Event()

    def fn(ctx: Context) -> str:
        begun.append(ctx.hedge)
        if ctx.hedge:
            may_fail.wait(5)
            raise ConnectionError
        wait_until(lambda: 1 in begun)
        return "first"

    def is_bad(result: str) -> bool:
        may_fail.set()
        time.sleep(0.05)
        return False

    assert Hedge(0, on_result=is_bad).wrap(Retry(3, backoff=[0])).execute(fn) == "first"
    time.sleep(0.05)
    assert sorted(begun) == [0, 1]


async def test_timers_of_ended_attempts_and_ended_waits_are_ignored(anywhere: Virtual) -> None:
    """A Timeout of an attempt that has ended, and the `max_wait` of a call that has left the queue."""
    bulkhead = Bulkhead(1, queue=5, max_wait=0.05)

    async def fn(ctx: Context) -> str:
        await anywhere.sleep(0.02 if ctx.hedge == 0 else 0.1)
        if ctx.attempt == 1:
            raise ConnectionError
        return "fine"

    retry = Retry(2, backoff=[0.06])
    assert await anywhere.execute(Hedge(0.01, budget=None).wrap(retry, Timeout(0.05)), fn) == "fine"
    assert await anywhere.execute(Hedge(0.01, budget=None).wrap(retry, bulkhead), fn) == "fine"


def test_an_error_of_the_race_itself_closes_its_attempts(threads: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clean-ups cannot wait either."""
    ended: list[int] = []
    over = threading.Event()

    class Slow(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            if ctx.hedge:  # here, and not in a worker, which may begin after the test
                monkeypatch.setattr(process_clock, "wait", raising(LookupError))
            try:
                return await call(ctx)
            finally:
                try:
                    await ctx.sleep(5)
                finally:
                    ended.append(ctx.hedge)

    with pytest.raises(LookupError):
        Hedge(0, budget=None).wrap(Slow()).execute(lambda ctx: over.wait(10))
    over.set()
    assert sorted(ended) == [0, 1]


async def test_an_error_that_a_loser_raises_on_cancellation_is_ignored(anywhere: Virtual) -> None:
    async def fn(ctx: Context) -> str:
        if ctx.hedge:
            return "second"
        try:
            await anywhere.sleep(5)
        except BaseException:
            raise ConnectionError from None
        return "first"

    assert await anywhere.execute(Hedge(0.1), fn) == "second"


async def test_a_base_exception_that_a_loser_raises_on_cancellation_is_raised(virtual_tasks: Virtual) -> None:
    async def fn(ctx: Context) -> str:
        try:
            await anyio.sleep(0.1 if ctx.hedge else 5)
        finally:
            if ctx.hedge == loser:
                raise Stop
        return "the other"

    for loser in (0, 1):  # noqa: B007 (the function reads it)
        with pytest.raises(Stop):
            await Hedge(0.1).aexecute(fn)


def test_a_stop_iteration_is_raised_unchanged(threads: World) -> None:
    """This holds with a delay, without a known delay, and if it is in `on`."""
    for hedge in (Hedge(1), Hedge(), Hedge(1, on=StopIteration)):
        with pytest.raises(StopIteration):
            hedge.execute(raising(StopIteration(5)))


def test_misuse_in_an_attempt_is_raised(threads: World) -> None:
    """An awaitable from a plain function, and a policy that suspends."""

    async def forgotten() -> None: ...

    class Waiting(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            await asyncio.sleep(0)

    with pytest.raises(TypeError, match="aexecute"):
        Hedge(1).execute(lambda ctx: forgotten())
    with pytest.raises(RuntimeError, match="Waiting suspended in blocking code"):
        Hedge(1).wrap(Waiting()).execute(lambda ctx: None)


# --- tasks -------------------------------------------------------------------------------------------


async def test_the_first_attempt_runs_in_the_callers_own_task(virtual_tasks: Virtual) -> None:
    """Its changes to context variables reach the caller; other attempts have a copy of them."""

    async def fn(ctx: Context) -> int:
        seen.append(variable.get())
        variable.set(ctx.hedge + 1)
        await anyio.sleep(0.05 if ctx.hedge == 0 else 5)
        return ctx.hedge

    seen: list[int] = []
    variable.set(7)
    assert await Hedge(0.01).aexecute(fn) == 0
    assert variable.get() == 1
    assert seen == [7, 7]
    variable.set(0)


def test_a_trio_run_keeps_few_scheduled_calls_of_finished_races() -> None:
    async def quick(ctx: Context) -> None:
        await trio.sleep(0)

    async def main() -> None:
        for _ in range(300):
            await Hedge(3600).aexecute(quick)
        assert sum(type(it) is ScheduledCall for it in gc.get_objects()) <= 64
        await Hedge(0.01).aexecute(lambda ctx: trio.sleep(0.03))

    with no_collector():
        trio.run(main)


async def test_attempts_begin_at_their_instants_among_those_of_many_finished_races(virtual_tasks: Virtual) -> None:
    begun: list[tuple[float, float]] = []
    rng = random.Random(0)

    async def call(delay: float, seconds: float) -> None:
        async def fn(ctx: Context) -> None:
            if ctx.hedge:
                begun.append((delay, virtual_tasks.now()))
            await anyio.sleep(seconds)

        await Hedge(delay, budget=None).aexecute(fn)

    async with anyio.create_task_group() as group:
        for _ in range(300):
            group.start_soon(call, rng.uniform(10, 20), rng.choice([0, 0, 0, 60]))
            await anyio.sleep(0)
    assert len(begun) > 50
    assert [now for _, now in begun] == pytest.approx([delay for delay, _ in begun])


# --- concurrency -------------------------------------------------------------------------------------


def test_permits_and_budget_are_exact_in_threads_and_two_event_loops() -> None:
    """No permit is lost, and the budget pays for each hedge."""
    budget, bulkhead, started, calls = RetryBudget(0.2, saved=5), Bulkhead(1000), list[Any](), 400
    hedge = Hedge(0.001, budget=budget, on_hedge=started.append).wrap(bulkhead, CircuitBreaker(10_000, on=Exception))

    async def operation(world: World, rng: random.Random) -> str:
        async def fn(ctx: Context) -> str:
            await world.sleep(0.002 if ctx.hedge == 0 else 0)
            return "answered"

        return str(await world.execute(hedge, fn))

    assert Storm(operation, calls).run() == {"answered": calls}
    assert bulkhead.stats().in_flight == 0
    assert 5 <= len(started) <= 5 + 0.2 * calls
    assert len(started) + budget.balance <= 5 + 0.2 * calls + 1e-6
