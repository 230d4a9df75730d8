"""RepeatCap: the total number of repeats inside, over all layers, executions, threads and tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import anyio
import anyio.to_thread
import pytest

from resilience import Context, Policy, RepeatCap, Retry, RetryBudget, detached, events
from tests.callers import in_threads
from tests.conftest import Boom, FakeClock, Script, World
from tests.policies.retries import run
from tests.policies.simulated import layered

LAYER = Retry(3, on=Boom, backoff=[0])


async def calls_through_layers(world: World, *around: Policy[Any], inner: Policy[Any] = LAYER) -> int:
    """Return how often the innermost of three layers is called."""
    script = Script(Boom())

    async def middle(ctx: Context) -> Any:
        return await world.execute(inner, script.function())

    async def top(ctx: Context) -> Any:
        return await world.execute(inner, middle)

    await world.attempt(Policy.wrap(*around, inner), top)
    return script.calls


async def test_a_cap_bounds_the_repeats_of_all_layers(world: World, clock: FakeClock) -> None:
    """Three attempts in each of three layers are 27 calls, and 1 + 2 under a cap of 2."""
    assert await calls_through_layers(world, Retry(1)) == 27
    assert await calls_through_layers(world, RepeatCap(2)) == 3
    assert await calls_through_layers(world, RepeatCap(0)) == 1


async def test_each_call_has_a_cap_of_its_own(world: World, clock: FakeClock) -> None:
    """Repeats of an earlier call do not count."""
    policy = RepeatCap(1).wrap(LAYER)
    for _ in range(2):
        script = Script(Boom())
        await run(world, policy, script)
        assert script.calls == 2


async def test_a_cap_may_be_of_any_size(world: World) -> None:
    """It takes no memory for repeats that are not made."""
    script = Script(Boom())
    await run(world, RepeatCap(10**400).wrap(LAYER), script)
    assert script.calls == 3


async def test_repeats_under_two_caps_count_for_both(world: World, clock: FakeClock) -> None:
    """The smaller one holds, whether it is outside or inside."""
    for outer, inner in ((2, 5), (5, 2)):
        script = Script(Boom())
        await run(world, Policy.wrap(RepeatCap(outer), RepeatCap(inner), Retry(9, on=Boom, backoff=[0])), script)
        assert script.calls == 3


async def test_the_cap_is_checked_before_the_budget(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """A repeat that the cap refuses costs the budget nothing, and the budget does not count as spent."""
    budget = RetryBudget(0, saved=5)
    policy = RepeatCap(1).wrap(Retry(9, on=Boom, backoff=[0], budget=budget))
    await run(world, policy, Script(Boom()))
    assert (budget.balance, budget.refused) == (4, 0)
    assert [event.reason for event in heard if isinstance(event, events.RetryGaveUp)] == ["cap"]
    assert not [event for event in heard if isinstance(event, events.BudgetSpent)]


async def test_a_cap_holds_in_detached_blocks_and_for_explicit_contexts(world: World, clock: FakeClock) -> None:
    """Both are executions inside the capped one."""
    script = Script(Boom())

    async def fn(ctx: Context) -> None:
        with detached(timeout=5):
            await world.attempt(LAYER, script.function())
        await world.attempt(LAYER, script.function(), Context(timeout=5))
        await world.attempt(LAYER, script.function(), ctx)

    await world.execute(RepeatCap(1), fn)
    assert script.calls == 4
    await world.attempt(LAYER, script.function())
    assert script.calls == 7


def test_a_cap_holds_for_its_context_in_another_thread(threads: World, clock: FakeClock) -> None:
    """The thread has not inherited the context variables."""
    script = Script(Boom())

    def fn(ctx: Context) -> None:
        in_threads(lambda: LAYER.capture(threads.native(script.function()), ctx))

    RepeatCap(1).execute(fn)
    assert script.calls == 2


def test_threads_and_event_loops_share_one_cap_exactly() -> None:
    """A thread and two event loops run inside one call."""
    retry = Retry(None, on=Boom, backoff=[0])
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        assert len(calls) <= 17 + 500, "no cap applies"
        raise Boom

    async def afail() -> None:
        await anyio.sleep(0)
        fail()

    async def attempt(function: Any, *args: Any) -> None:
        with pytest.raises(Boom):
            await function(*args)

    async def in_thread() -> None:
        await anyio.to_thread.run_sync(retry.call, fail)

    async def loop() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(attempt, retry.acall, afail)
                group.start_soon(attempt, in_thread)

    def in_all(ctx: Context) -> None:
        with ThreadPoolExecutor(3) as pool:
            works: list[Callable[[], object]] = [
                lambda: anyio.run(loop),
                lambda: anyio.run(loop, backend="trio"),
                lambda: retry.capture(lambda ctx: fail()),
            ]
            for job in [pool.submit(copy_context().run, work) for work in works]:
                job.result()

    RepeatCap(500).execute(in_all)
    assert len(calls) == 17 + 500


async def test_a_retry_that_is_cancelled_during_its_wait_does_not_count(in_asyncio: World) -> None:
    """The repeat was not made."""
    script = Script(Boom())

    async def fn(ctx: Context) -> None:
        task = asyncio.create_task(Retry(2, on=Boom, backoff=[60]).aexecute(script.function()))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        await in_asyncio.attempt(LAYER, script.function())

    await in_asyncio.execute(RepeatCap(1), fn)
    assert script.calls == 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_cap_bounds_the_load_below_three_layers_in_an_outage(seed: int) -> None:
    """The service gets 27 calls for each one that is made, or three under a cap of 2."""

    def reached(policy: Policy[Any]) -> int:
        return sum(layered(policy, 10.0, 100, down=(20, 100), seed=seed)[30:90])

    never = sum(layered(Retry(1), 10.0, 100, down=(0, 0), seed=seed)[30:90])
    assert reached(Retry(1)) / never == pytest.approx(27, rel=0.1)
    assert reached(RepeatCap(2)) / never == pytest.approx(3, rel=0.1)
