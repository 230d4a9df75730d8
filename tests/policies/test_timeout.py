"""Timeout: the limit, what is not a timeout, names in errors, the deadline, and the policies inside."""

from __future__ import annotations

import time
from datetime import timedelta
from math import inf
from typing import Any

import pytest

from resilience import (
    Bulkhead,
    CircuitBreaker,
    CircuitState,
    Context,
    DeadlineExceeded,
    Fallback,
    Policy,
    Retry,
    Timeout,
    TimeoutExceeded,
    current_context,
)
from resilience.clock import clock as process_clock
from tests.conftest import FakeClock, Script, Virtual, World
from tests.custom import Doing, Sleeping
from tests.policies.timeouts import LONG, SHORT, Stopwatch, hanging

# --- the limit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [SHORT, timedelta(milliseconds=20)])
async def test_a_call_beyond_its_limit_raises_timeout_exceeded(world: World, seconds: Any) -> None:
    """It is raised at the limit, long before the end of the call."""
    with Stopwatch() as took:
        error = await world.attempt(Timeout(seconds, name="quick"), hanging(world))
    assert type(error) is TimeoutExceeded
    assert isinstance(error, TimeoutError)
    assert (error.timeout, error.policy) == (SHORT, "quick")
    assert "0.02 s" in str(error)
    assert SHORT <= took.seconds < 5


@pytest.mark.parametrize("seconds", [1e300, 1e10, timedelta.max], ids=["1e300", "1e10", "max"])
async def test_an_enormous_limit_never_fires(world: World, seconds: Any) -> None:
    """Locks, event loops and cancel scopes have a longest time that they can wait."""

    async def fn(ctx: Context) -> str:
        await world.sleep(0.001)
        return "fine"

    assert await world.attempt(Timeout(seconds), fn) == "fine"


async def test_a_tiny_limit_fires_at_once(world: World) -> None:
    """Whether or not the function is entered, the error is `TimeoutExceeded`."""
    for seconds in (1e-9, 1e-300):
        error = await world.attempt(Timeout(seconds), hanging(world))
        assert type(error) is TimeoutExceeded
        assert error.timeout == seconds


async def test_the_error_does_not_depend_on_the_uptime(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """For half of all instants `(now + seconds) - now` is less than `seconds`, which is no earlier deadline."""
    for exponent in range(24):
        instant = 1.1 * 2.0**exponent
        monkeypatch.setattr(process_clock, "now", lambda instant=instant: instant)
        error = await world.attempt(Timeout(0.001), hanging(world))
        assert type(error) is TimeoutExceeded, f"at {instant!r}"
        assert error.timeout == 0.001


async def test_the_limit_is_the_deadline_of_the_context_inside(world: World, clock: FakeClock) -> None:
    """`ctx.remaining()` and `ctx.timeout()` can be passed to a client; the outer context has no deadline."""
    seen: list[float | None] = []

    async def fn(ctx: Context) -> None:
        clock.advance(2)
        seen.extend([ctx.remaining(), ctx.timeout(), ctx.timeout(1), current_context().remaining()])

    ctx = Context()
    await world.attempt(Timeout(5), fn, ctx)
    assert seen == [3, 3, 1, 3]
    assert ctx.remaining() == inf


# --- what is not a timeout ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TimeoutError, TimeoutExceeded, DeadlineExceeded])
async def test_a_timeout_error_of_the_function_is_unchanged(world: World, kind: type[Exception]) -> None:
    """The same object is raised, and no timeout is reported."""
    timeouts: list[object] = []
    error = kind("the client's own")
    for cooperative in (False, True):
        timeout = Timeout(LONG, cooperative=cooperative, on_timeout=timeouts.append)
        assert await world.attempt(timeout, Script(error).function()) is error
    assert timeouts == []


async def test_a_timeout_error_of_the_function_after_the_limit_is_unchanged(world: World, clock: FakeClock) -> None:
    error = TimeoutError("the client's own")
    assert await world.attempt(Timeout(LONG), Script(error, doing=lambda ctx: clock.advance(100)).function()) is error


async def test_a_late_result_of_a_task_that_blocks_its_event_loop_is_returned(tasks_world: World) -> None:
    """Such a task cannot be cancelled, and its result is not discarded."""
    fn = Script("late", doing=lambda ctx: time.sleep(0.03)).function()
    assert await tasks_world.attempt(Timeout(0.01), fn) == "late"


# --- names in errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outer", "inner", "named"), [(SHORT, LONG, "outer"), (LONG, SHORT, "inner"), (SHORT, SHORT, "outer")]
)
async def test_the_error_names_the_timer_that_fired(anywhere: Virtual, outer: float, inner: float, named: str) -> None:
    """Only that one reports a timeout."""
    timeouts: list[str] = []
    pipeline = Policy.wrap(
        Timeout(outer, name="outer", on_timeout=lambda event: timeouts.append(event.policy)),
        Timeout(inner, name="inner", on_timeout=lambda event: timeouts.append(event.policy)),
    )

    async def fn(ctx: Context) -> None:
        await anywhere.sleep(2 * LONG)

    error = await anywhere.attempt(pipeline, fn)
    assert type(error) is TimeoutExceeded
    assert (error.policy, error.timeout) == (named, SHORT)
    assert timeouts == [named]


# --- the deadline of the context ---------------------------------------------------------------


async def test_an_earlier_deadline_of_the_context_raises_deadline_exceeded(world: World) -> None:
    """The timer fires at the deadline, and the event has `by_deadline`."""
    timeouts: list[Any] = []
    with Stopwatch() as took:
        error = await world.attempt(
            Timeout(LONG, name="slow", on_timeout=timeouts.append), hanging(world), Context(timeout=0.1)
        )
    assert type(error) is DeadlineExceeded
    assert error.policy == "slow"
    assert 0 < error.timeout <= 0.1
    assert took.seconds < 5
    [event] = timeouts
    assert event.by_deadline is True


async def test_of_a_limit_and_a_deadline_at_one_instant_the_deadline_raises(threads: World, clock: FakeClock) -> None:
    """The deadline is the outer limit of the two."""
    pipeline = Policy.wrap(Timeout(5.0, name="limit"), Doing(lambda ctx: clock.advance(5.0)))
    error = await threads.attempt(pipeline, Script("fine").function(), Context(timeout=5.0))
    assert type(error) is DeadlineExceeded
    assert (error.policy, error.timeout) == ("limit", 5.0)


@pytest.mark.parametrize("cooperative", [False, True])
async def test_only_cooperative_timeouts_call_after_deadlines(
    world: World, cooperative: bool, clock: FakeClock
) -> None:
    """A cooperative timeout leaves the check to policies and functions inside."""
    script = Script("late")
    error = await world.attempt(Timeout(LONG, cooperative=cooperative), script.function(), Context(timeout=0))
    if cooperative:
        assert error == "late"
    else:
        assert type(error) is DeadlineExceeded
        assert script.calls == 0


# --- policies between the timer and the function -----------------------------------------------


async def test_inner_policies_ignore_a_timeout_of_an_outer_policy(world: World) -> None:
    """Inside it is a cancellation; only the Timeout that fired turns it into an error."""
    received: list[Any] = []
    breaker = CircuitBreaker(1, on=BaseException)
    retry = Retry(5, on=BaseException, backoff=[0])
    bulkhead = Bulkhead(1)
    fallback = Fallback("instead", on=BaseException)
    inside = Policy.wrap(fallback, retry, breaker, bulkhead, listeners=[received.append])
    error = await world.attempt(Timeout(SHORT).wrap(inside), hanging(world))
    assert type(error) is TimeoutExceeded
    assert breaker.state is CircuitState.CLOSED
    assert bulkhead.stats().in_flight == 0
    assert received == []


async def test_a_policy_that_sleeps_is_cut_off(world: World) -> None:
    """`ctx.sleep` ends with the outer timer, and the function is not entered."""
    script = Script("fine")
    with Stopwatch() as took:
        error = await world.attempt(Policy.wrap(Timeout(SHORT, name="outer"), Sleeping(10)), script.function())
    assert type(error) is TimeoutExceeded
    assert error.policy == "outer"
    assert SHORT <= took.seconds < 5
    assert script.calls == 0


@pytest.mark.parametrize("seconds", [1.0, 2.0])
async def test_a_function_is_not_entered_at_the_limit_or_after_it(
    threads: World, clock: FakeClock, seconds: float
) -> None:
    script, timeout = Script("fine"), Timeout(1.0)
    error = await threads.attempt(timeout.wrap(Doing(lambda ctx: clock.advance(seconds))), script.function())
    assert type(error) is TimeoutExceeded
    assert Timeout.abandoned() == timeout.abandoned() == 0
    time.sleep(0.01)
    assert script.calls == 0


async def test_a_wait_that_ends_at_the_limit_or_begins_after_it_is_cut_off(threads: World, clock: FakeClock) -> None:
    """Here after the call, whose result is dropped."""
    late = Doing(after=lambda ctx: clock.advance(15.0))
    for inside in (Sleeping(after=10.0), Sleeping(after=1.0).wrap(late)):
        error = await threads.attempt(Timeout(10.0).wrap(inside), Script("fine").function())
        assert type(error) is TimeoutExceeded
    assert clock.sleeps == [10.0, 0.0]
