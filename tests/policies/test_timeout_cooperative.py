"""Timeout(cooperative=True): a deadline that is carried, and nothing that is cut off."""

from __future__ import annotations

import asyncio
import linecache
import threading
import warnings
from typing import Any

import pytest

from resilience import Context, DeadlineExceeded, Fallback, Policy, Retry, Timeout, TimeoutExceeded
from resilience.testing import virtual_time
from tests.conftest import Boom, FakeClock, Script, World
from tests.policies.timeouts import LONG, SHORT, Stopwatch, hanging


async def test_a_cooperative_timeout_stays_in_its_thread_and_cuts_nothing_off(world: World) -> None:
    """It only carries the deadline. A late result is returned."""
    seen: list[Any] = []

    async def fn(ctx: Context) -> str:
        seen.append((threading.get_ident(), ctx.remaining() <= 0.005))
        await world.sleep(0.02)
        seen.append(ctx.expired)
        return "late"

    assert await world.attempt(Timeout(0.005, cooperative=True), fn) == "late"
    assert seen == [(threading.get_ident(), True), True]


async def test_what_looks_at_the_deadline_keeps_to_a_cooperative_limit(world: World, clock: FakeClock) -> None:
    """A retry inside it stops; a queue inside it gives up; `ctx.timeout` is what is left."""
    script = Script(Boom())
    pipeline = Policy.wrap(Timeout(5, cooperative=True), Retry(None, on=Boom, backoff=[2]))
    assert isinstance(await world.attempt(pipeline, script.function()), Boom)
    assert script.calls == 3
    assert script.contexts[2].deadline == 1005


@pytest.mark.parametrize(
    ("budget", "kind"), [(None, TimeoutExceeded), (60, TimeoutExceeded), (5, DeadlineExceeded), (3, DeadlineExceeded)]
)
async def test_a_function_that_checks_gets_the_error_of_whichever_ran_out(
    world: World, clock: FakeClock, budget: float | None, kind: type[TimeoutExceeded]
) -> None:
    """`ctx.check()` inside a limit of 5 s: the policy's own limit, or the execution's budget where that is earlier."""
    told: list[Any] = []

    async def fn(ctx: Context) -> None:
        clock.advance(5.5)
        ctx.check()

    timeout = Timeout(5, cooperative=True, name="outer", on_timeout=told.append)
    error = await world.attempt(timeout, fn, Context(timeout=budget))
    assert type(error) is kind
    if kind is TimeoutExceeded:
        assert (error.policy, error.timeout) == ("outer", 5)
        assert [(event.timeout, event.by_deadline) for event in told] == [(5, False)]


async def test_an_enforced_timeout_inside_a_cooperative_one_fires_at_its_limit(world: World) -> None:
    """And then it was the outer one's time that ran out."""
    pipeline = Policy.wrap(Timeout(SHORT, cooperative=True, name="outer"), Timeout(LONG, name="inner"))
    with Stopwatch() as took:
        error = await world.attempt(pipeline, hanging(world))
    assert type(error) is TimeoutExceeded
    assert error.policy == "outer"
    assert took.seconds < 5


async def test_a_function_that_was_quick_is_not_accused(world: World, clock: FakeClock) -> None:
    """The budget had been used up before the call began: that is not the function's doing."""
    ctx = Context(timeout=1)
    clock.advance(60)
    assert await world.attempt(Timeout(5, cooperative=True), Script("fine").function(), ctx) == "fine"


def test_at_the_very_instant_of_the_limit_it_is_over(clock: FakeClock) -> None:
    """A function that finds no time left has run into this limit, and not into a deadline of the execution's."""

    def fn(ctx: Context) -> None:
        clock.advance(5.0)
        ctx.check()

    with pytest.raises(TimeoutExceeded) as raised:
        Timeout(5.0, cooperative=True).execute(fn)
    assert type(raised.value) is TimeoutExceeded


@pytest.mark.parametrize(("took", "warned"), [(0.9, 0), (1.1, 1)])
def test_a_function_that_began_too_late_has_a_second(clock: FakeClock, took: float, warned: int) -> None:
    """As one that has next to no time: that its time was over long ago neither adds to it nor takes from it."""

    def fn(ctx: Context) -> None:
        clock.advance(took)

    ctx = Context(timeout=1)
    clock.advance(60)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Timeout(5, cooperative=True).execute(fn, ctx)
    assert len(caught) == warned


@pytest.mark.parametrize(("late", "left"), [(0.0, 0.25), (60.0, 0.0)])
def test_the_error_of_the_budget_says_what_was_left_of_it(late: float, left: float) -> None:
    """In seconds; never less than nothing, however late the call came."""
    gate = threading.Event()
    with virtual_time() as clock:
        ctx = Context(timeout=0.25)
        clock.advance(late)
        with pytest.raises(DeadlineExceeded) as raised:
            Timeout(5).execute(lambda ctx: gate.wait(10), ctx)
        gate.set()
    assert raised.value.timeout == left


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError])
def test_what_is_no_outcome_is_never_replaced_by_a_warning(
    threads: World, clock: FakeClock, kind: type[BaseException]
) -> None:
    """Where warnings are errors, a cancellation must not be swallowed for the sake of one."""

    async def fn(ctx: Context) -> None:
        clock.advance(60)
        raise kind

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(kind):
            Timeout(5, cooperative=True).execute(threads.native(fn))


@pytest.mark.parametrize(("operation", "who"), [(None, "patience (late)"), ("GET /users", "patience (GET /users)")])
@pytest.mark.parametrize("fails", [False, True])
def test_the_warning_of_an_overrun_names_the_call_and_points_at_its_line(
    clock: FakeClock, operation: str | None, who: str, fails: bool
) -> None:
    """The user's line, whatever policies stand between; also where the late call failed."""
    pipeline = Policy.wrap(Fallback("instead"), Retry(1), Timeout(2.0, cooperative=True, name="patience"))

    def fn(ctx: Context) -> str:
        clock.advance(7.0)
        if fails:
            raise Boom
        return "late"

    fn.__qualname__ = "late"
    with pytest.warns(RuntimeWarning) as caught:
        assert pipeline.execute(fn, Context(operation=operation)) == ("instead" if fails else "late")
    [warning] = caught
    assert str(warning.message).startswith(f"{who}: a call that had 2 s took 5 s more, so it ignores its deadline")
    assert warning.filename == __file__
    assert "pipeline.execute(fn" in linecache.getline(warning.filename, warning.lineno)


@pytest.mark.parametrize(("limit", "took", "warned"), [(0.5, 1.5, 0), (0.5, 1.75, 1), (4.0, 8.0, 0), (4.0, 8.25, 1)])
async def test_an_overrun_is_told_from_more_than_a_second_and_more_than_the_limit(
    world: World, clock: FakeClock, limit: float, took: float, warned: int
) -> None:
    """Neither at the very second, nor at the very double. The late result is returned."""

    async def fn(ctx: Context) -> str:
        clock.advance(took)
        return "late"

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert await world.execute(Timeout(limit, cooperative=True), fn) == "late"
    assert len(caught) == warned


def test_the_description_says_whether_it_cuts_off() -> None:
    """In a line, with the number."""
    assert Timeout(2.5).describe() == "Timeout: 2.5 s for everything inside, then it is cut off"
    carried = "Timeout: 2.5 s for everything inside, carried as a deadline, nothing is cut off"
    assert Timeout(2.5, cooperative=True).describe() == carried
