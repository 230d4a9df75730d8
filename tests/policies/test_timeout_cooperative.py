"""`Timeout(cooperative=True)`: a deadline in the context, no call that is cut off, and warnings of overruns."""

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


async def test_a_cooperative_timeout_runs_the_function_in_the_callers_thread_to_its_end(world: World) -> None:
    """The context has the deadline, and a late result is returned."""
    seen: list[Any] = []

    async def fn(ctx: Context) -> str:
        seen.append((threading.get_ident(), ctx.remaining() <= 0.005))
        await world.sleep(0.02)
        seen.append(ctx.expired)
        return "late"

    assert await world.attempt(Timeout(0.005, cooperative=True), fn) == "late"
    assert seen == [(threading.get_ident(), True), True]


@pytest.mark.parametrize("passed", [5.0, 5.5])
@pytest.mark.parametrize(
    ("budget", "kind"), [(None, TimeoutExceeded), (60, TimeoutExceeded), (5, DeadlineExceeded), (3, DeadlineExceeded)]
)
async def test_check_raises_the_error_of_the_limit_or_of_an_earlier_deadline(
    world: World, clock: FakeClock, budget: float | None, kind: type[TimeoutExceeded], passed: float
) -> None:
    """`ctx.check()` at the end of a limit of 5 s or later, with a deadline before, at or after it."""
    timeouts: list[Any] = []

    async def fn(ctx: Context) -> None:
        clock.advance(passed)
        ctx.check()

    timeout = Timeout(5, cooperative=True, name="outer", on_timeout=timeouts.append)
    error = await world.attempt(timeout, fn, Context(timeout=budget))
    assert type(error) is kind
    if kind is TimeoutExceeded:
        assert (error.policy, error.timeout) == ("outer", 5)
        assert [(event.timeout, event.by_deadline) for event in timeouts] == [(5, False)]
    else:  # the error of the check itself: this limit has cut nothing off
        assert (error.policy, timeouts) == (None, [])


async def test_an_enforced_timeout_inside_a_cooperative_one_fires_at_its_limit(world: World) -> None:
    """The error names the cooperative one."""
    pipeline = Policy.wrap(Timeout(SHORT, cooperative=True, name="outer"), Timeout(LONG, name="inner"))
    with Stopwatch() as took:
        error = await world.attempt(pipeline, hanging(world))
    assert type(error) is TimeoutExceeded
    assert error.policy == "outer"
    assert took.seconds < 5


@pytest.mark.parametrize(("after", "kind"), [(4.9, DeadlineExceeded), (4.999, TimeoutExceeded)])
def test_a_wait_inside_may_end_before_the_limit(clock: FakeClock, after: float, kind: type[TimeoutExceeded]) -> None:
    """The timers of uvloop are up to a millisecond early. A wait that ends earlier had another deadline."""

    def fn() -> None:
        clock.advance(after)
        raise DeadlineExceeded

    with pytest.raises(TimeoutExceeded) as raised:
        Timeout(5.0, cooperative=True).call(fn)
    assert type(raised.value) is kind


@pytest.mark.parametrize(("took", "warned"), [(0.9, 0), (1.1, 1)])
def test_a_function_begun_after_the_deadline_has_a_second(clock: FakeClock, took: float, warned: int) -> None:
    """The time between the deadline and the call does not count."""

    def fn(ctx: Context) -> None:
        clock.advance(took)

    ctx = Context(timeout=1)
    clock.advance(60)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Timeout(5, cooperative=True).execute(fn, ctx)
    assert len(caught) == warned


@pytest.mark.parametrize(("late", "left"), [(0.0, 0.25), (60.0, 0.0)])
def test_deadline_exceeded_carries_the_time_that_was_left(late: float, left: float) -> None:
    """It is never negative, however late the call began."""
    gate = threading.Event()
    with virtual_time() as clock:
        ctx = Context(timeout=0.25)
        clock.advance(late)
        with pytest.raises(DeadlineExceeded) as raised:
            Timeout(5).execute(lambda ctx: gate.wait(10), ctx)
        gate.set()
    assert raised.value.timeout == left


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError])
def test_no_warning_replaces_a_base_exception(threads: World, clock: FakeClock, kind: type[BaseException]) -> None:
    """This holds even if warnings are errors."""
    fn = Script(kind(), doing=lambda ctx: clock.advance(60)).function()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(kind):
            Timeout(5, cooperative=True).execute(threads.native(fn))


@pytest.mark.parametrize(("operation", "who"), [(None, "patience (late)"), ("GET /users", "patience (GET /users)")])
@pytest.mark.parametrize("fails", [False, True])
def test_the_warning_names_call_and_line(clock: FakeClock, operation: str | None, who: str, fails: bool) -> None:
    """It is the line of the user's call, also if the late call failed."""
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


def test_code_without_the_name_of_a_module_gets_its_late_result(clock: FakeClock) -> None:
    """As that of a sandbox, which may set `__name__` to None. Python does not show a warning there."""
    namespace: dict[str, Any] = {"__name__": None, "call": Timeout(2.0, cooperative=True).call}
    exec("def late(fn): return call(fn)", namespace)
    assert namespace["late"](lambda: clock.advance(7.0) or "late") == "late"


@pytest.mark.parametrize(("limit", "took", "warned"), [(0.5, 1.5, 0), (0.5, 1.75, 1), (4.0, 8.0, 0), (4.0, 8.25, 1)])
async def test_an_overrun_of_more_than_a_second_and_more_than_the_limit_is_a_warning(
    world: World, clock: FakeClock, limit: float, took: float, warned: int
) -> None:
    """Both bounds are exclusive. The late result is returned."""
    fn = Script("late", doing=lambda ctx: clock.advance(took)).function()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert await world.execute(Timeout(limit, cooperative=True), fn) == "late"
    assert len(caught) == warned
