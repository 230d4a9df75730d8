"""Races: custom policies that race, refused races, and races that end without a winner."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from math import inf
from typing import Any, ClassVar

import pytest

from resilience import Bulkhead, Context, Hedge, Keyed, Policy, Retry, Success, Timeout
from resilience.errors import Misuse
from resilience.runtimes import workers
from resilience.runtimes.base import Plan
from resilience.runtimes.engine import EngineTimer
from resilience.testing import Simulation, virtual_time
from tests.callers import wait_until
from tests.conftest import Virtual, World
from tests.policies.hedges import Service


class Both:
    """A custom plan: several attempts at once, and all their outcomes."""

    def __init__(self, ctx: Context, attempts: int) -> None:
        self.ctx = ctx
        self.left = attempts
        self.due = 0.0
        self.outcomes: dict[int, Any] = {}

    def begin(self) -> Context | None:
        if self.left == 0:
            self.due = inf
            return None
        self.left -= 1
        return self.ctx.child(hedge=len(self.outcomes))

    def ended(self, number: int, outcome: Any) -> bool:
        self.outcomes[number] = outcome
        return False


class Gather(Policy):
    """Runs its call several times at once, and returns all outcomes."""

    races: ClassVar[bool] = True

    def __init__(self, attempts: int) -> None:
        self.attempts = attempts

    async def around(self, call: Any, ctx: Context) -> Any:
        plan = Both(ctx, self.attempts)
        checked: Plan[Context] = plan

        async def counted(inner: Context) -> Any:  # the raced function need not be the call itself
            return await call(inner)

        await ctx.runtime.race(counted, ctx, checked)
        return [plan.outcomes[number] for number in sorted(plan.outcomes)]


async def test_a_custom_policy_may_race(anywhere: Virtual) -> None:
    """In every runtime, inside and outside of other policies."""
    service = Service(anywhere, (0.1, "fine"))
    pipeline = Policy.wrap(Retry(), Gather(3), Bulkhead(5), Timeout(1))
    assert await service.under(pipeline) == ([Success("fine")] * 3, 0.1)


async def test_a_race_without_attempts_ends_at_once(anywhere: Virtual) -> None:
    service = Service(anywhere, (0.1, "never"))
    assert await service.under(Gather(0)) == ([], 0)
    assert service.begun == []


async def test_an_undeclared_race_is_refused(anywhere: Virtual) -> None:
    """In every runtime, although it would fail only in threads."""

    class Undeclared(Gather):
        races = False

    error, _ = await Service(anywhere, (0.1, "never")).under(Retry(on=Exception).wrap(Undeclared(2)))
    assert isinstance(error, Misuse)
    assert isinstance(error, TypeError)
    assert "set `races = True` in the class of the policy" in str(error)


async def test_a_race_outside_an_execution_is_refused(world: World) -> None:
    with pytest.raises(TypeError, match="outside an execution"):
        await Context().runtime.race(lambda ctx: asyncio.sleep(0), Context(), Both(Context(), 1))


async def test_a_policy_chosen_by_key_may_race(anywhere: Virtual) -> None:
    keyed = Keyed(lambda key: Hedge(0.1, name=key), key=lambda ctx: "a")
    assert await Service(anywhere, (5, "first"), (0.1, "second")).under(keyed) == ("second", 0.2)


# --- asyncio --------------------------------------------------------------------------------------


async def test_an_attempt_that_is_cancelled_from_outside_ends_the_race(in_asyncio: World) -> None:
    async def fn(ctx: Context) -> None:
        if ctx.hedge:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        await asyncio.sleep(5)

    with pytest.raises(asyncio.CancelledError):
        await Hedge(0.01).aexecute(fn)
    assert len(asyncio.all_tasks()) == 1


async def test_an_attempt_that_is_cut_off_before_it_began_calls_nothing(in_asyncio: World) -> None:
    """The first one has succeeded in the same turn of the loop."""
    calls: list[int] = []

    async def fn(ctx: Context) -> int:
        calls.append(ctx.hedge)
        await asyncio.sleep(0)
        return ctx.hedge

    assert await Hedge(0, budget=None).aexecute(fn) == 0
    assert calls in ([0], [0, 1])
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
async def test_attempts_may_be_eager_tasks(in_asyncio: World) -> None:  # pragma: no cover (measured on 3.11)
    """They run, and may end, while they are being started."""

    async def fn(ctx: Context) -> int:
        if ctx.hedge == 0:
            await asyncio.sleep(5)
        return ctx.hedge

    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
    assert await Hedge(0.01).aexecute(fn) == 1


async def test_closing_the_coroutine_cancels_all_attempts(in_asyncio: World) -> None:
    """Without waiting: the tasks end later."""
    bulkhead = Bulkhead(5)

    async def fn(ctx: Context) -> None:
        await asyncio.get_running_loop().create_future()

    running = Hedge(0.01).wrap(bulkhead).aexecute(fn)
    running.send(None)
    await asyncio.sleep(0.02)
    running.close()
    for _ in range(3):
        await asyncio.sleep(0)
    assert bulkhead.stats().in_flight == 0
    assert len(asyncio.all_tasks()) == 1


async def test_of_two_attempts_that_raise_base_exceptions_one_is_raised(anywhere: Virtual) -> None:
    class Stop(BaseException):
        pass

    async def fn(ctx: Context) -> None:
        try:
            await anywhere.sleep(0.1 if ctx.hedge else 5)
        finally:
            if ctx.hedge:
                raise Stop(ctx.hedge)

    with pytest.raises(Stop):
        await anywhere.execute(Hedge(0, hedges=2, budget=None), fn)


# --- simulations and threads ----------------------------------------------------------------------


def test_the_delay_of_an_attempt_that_has_failed_begins_no_other(threads: World) -> None:
    """The next one has begun at once, and still runs when that delay ends."""
    begun: list[int] = []

    def fn(ctx: Context) -> str:
        begun.append(ctx.hedge)
        if ctx.hedge == 0:
            raise ConnectionError
        time.sleep(0.08)
        return "second"

    assert Hedge(0.05, eager=True, budget=None).execute(fn) == "second"
    assert sorted(begun) == [0, 1]  # on a busy machine, the first may enter the function later


def test_a_simulation_that_ends_during_a_race_closes_its_attempts() -> None:
    """The running ones and those that have not begun."""
    bulkhead = Bulkhead(5)
    with Simulation(1) as simulation:

        async def fn(ctx: Context) -> None:
            await simulation.sleep(60)

        async def client() -> None:
            await simulation.execute(Hedge(0.1, hedges=2, budget=None).wrap(bulkhead), fn)

        simulation.start(client())
        simulation.run(until=0.15)
        assert bulkhead.stats().in_flight == 2
    assert bulkhead.stats().in_flight == 0


def test_an_interrupt_as_an_attempt_beside_the_first_begins_ends_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the race also cuts off the attempt, which has ended by itself."""
    released, start = threading.Event(), EngineTimer.start
    begun: list[EngineTimer] = []

    def interrupted(timer: EngineTimer) -> None:
        start(timer)
        begun.append(timer)
        if len(begun) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(EngineTimer, "start", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            Hedge(0.0, budget=None).call(released.wait, 10)
    finally:
        released.set()
    assert len(begun) == 2


def test_during_interpreter_shutdown_the_function_runs_in_the_calling_thread(
    threads: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    assert Hedge(5).execute(lambda ctx: "flushed") == "flushed"


def test_a_result_that_comes_as_its_attempt_ends_is_closed(threads: World, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Result:
        def close(self) -> None:
            closed.append("closed")

    def fn(ctx: Context) -> Result:
        return Result()

    def begin(job: Any, policy: object) -> bool:
        job.run()
        assert job.claim()  # it is cut off before its result is delivered
        return True

    monkeypatch.setattr(workers.pool, "begin", begin)
    with virtual_time(), pytest.raises(TimeoutError):
        Policy.wrap(Timeout(0.1), Hedge(5)).execute(fn)
    assert closed == ["closed"]


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_result_is_closed_if_an_interrupt_comes_as_its_function_begins(
    threads: World, monkeypatch: pytest.MonkeyPatch, has_ended: bool
) -> None:
    """No caller waits for the function, which runs on."""
    begun, closed = threading.Event(), threading.Event()

    class Result:
        def close(self) -> None:
            closed.set()

    def fn(ctx: Context) -> Result:
        assert has_ended or begun.wait(5)
        return Result()

    begin = workers.pool.begin

    def interrupted(job: Any, policy: str) -> bool:
        begin(job, policy)
        if has_ended:
            wait_until(lambda: job._claim.locked())
        raise KeyboardInterrupt

    monkeypatch.setattr(workers.pool, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Hedge(5).execute(fn)
    begun.set()
    assert closed.wait(5)
