"""Timeout: the caller gets an error after so many seconds, and nothing else is taken for a timeout."""

from __future__ import annotations

import time
from datetime import timedelta
from math import inf
from typing import Any, Never

import pytest

from resilience import (
    Bulkhead,
    Call,
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
from tests.conftest import Boom, FakeClock, Script, World
from tests.policies.timeouts import LONG, SHORT, Stopwatch, hanging

# --- the limit ---------------------------------------------------------------------------------


async def test_a_call_within_its_limit_passes(world: World) -> None:
    """Result and error as they are, and nobody is told."""
    told: list[object] = []
    timeout = Timeout(LONG, on_timeout=told.append)
    value, error = object(), Boom()
    assert await world.attempt(timeout, Script(value).function()) is value
    assert await world.attempt(timeout, Script(error).function()) is error
    assert told == []


@pytest.mark.parametrize("seconds", [SHORT, timedelta(milliseconds=20)])
async def test_after_its_limit_the_caller_gets_timeout_exceeded(world: World, seconds: Any) -> None:
    """In every world, not earlier, and long before the call would have ended."""
    with Stopwatch() as took:
        error = await world.attempt(Timeout(seconds, name="quick"), hanging(world))
    assert type(error) is TimeoutExceeded
    assert isinstance(error, TimeoutError)
    assert (error.timeout, error.policy) == (SHORT, "quick")
    assert "0.02 s" in str(error)
    assert SHORT <= took.seconds < 5


@pytest.mark.parametrize("seconds", [1e300, 1e10, timedelta.max], ids=["1e300", "1e10", "max"])
async def test_a_limit_beyond_all_measure_is_as_good_as_none(world: World, seconds: Any) -> None:
    """No lock, loop or scope is asked for more than it can count."""

    async def fn(ctx: Context) -> str:
        await world.sleep(0.001)
        return "fine"

    assert await world.attempt(Timeout(seconds), fn) == "fine"


async def test_a_limit_that_is_next_to_nothing_fires_at_once(world: World) -> None:
    """Whether or not the function is entered: the error is the policy's own."""
    for seconds in (1e-9, 1e-300):
        error = await world.attempt(Timeout(seconds), hanging(world))
        assert type(error) is TimeoutExceeded
        assert error.timeout == seconds


async def test_the_error_does_not_depend_on_the_uptime_of_the_machine(world: World, clock: FakeClock) -> None:
    """`(now + seconds) - now` is a hair less than `seconds` for half of all instants. No budget has run out there."""
    for exponent in range(24):
        clock.time = 1.1 * 2.0**exponent
        error = await world.attempt(Timeout(0.001), hanging(world))
        assert type(error) is TimeoutExceeded, f"at {clock.time!r}"
        assert error.timeout == 0.001


async def test_what_is_inside_sees_the_limit_as_its_deadline(world: World, clock: FakeClock) -> None:
    """`ctx.remaining()` and `ctx.timeout()` are what to hand to a client; outside there is no limit."""
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
async def test_a_users_own_timeout_error_passes_unchanged(world: World, kind: type[Exception]) -> None:
    """The very object, before the limit, without an event."""
    told: list[object] = []
    error = kind("the client's own")
    for cooperative in (False, True):
        timeout = Timeout(LONG, cooperative=cooperative, on_timeout=told.append)
        assert await world.attempt(timeout, Script(error).function()) is error
    assert told == []


async def test_a_users_own_timeout_error_passes_after_the_limit_too(world: World, clock: FakeClock) -> None:
    """What was raised was raised, however late."""
    error = TimeoutError("the client's own")

    async def fn(ctx: Context) -> None:
        clock.advance(100)
        raise error

    assert await world.attempt(Timeout(LONG), fn) is error


async def test_a_result_that_is_late_and_was_never_cut_off_is_returned(tasks_world: World) -> None:
    """A task that holds the loop cannot be cancelled; its result is there, so it is not thrown away."""

    async def fn(ctx: Context) -> str:
        time.sleep(0.03)
        return "late"

    assert await tasks_world.attempt(Timeout(0.01), fn) == "late"


# --- who is named ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outer", "inner", "named"), [(SHORT, LONG, "outer"), (LONG, SHORT, "inner"), (SHORT, SHORT, "outer")]
)
async def test_the_timer_that_fired_is_the_one_that_is_named(
    world: World, outer: float, inner: float, named: str
) -> None:
    """And the caller is told by that one alone."""
    told: list[str] = []
    pipeline = Policy.wrap(
        Timeout(outer, name="outer", on_timeout=lambda event: told.append(event.policy)),
        Timeout(inner, name="inner", on_timeout=lambda event: told.append(event.policy)),
    )
    error = await world.attempt(pipeline, hanging(world))
    assert type(error) is TimeoutExceeded
    assert (error.policy, error.timeout) == (named, SHORT)
    assert told == [named]


async def test_a_timeout_in_an_execution_inside_the_function_never_outlives_the_outer_one(world: World) -> None:
    """The outer one is named: to the inner execution it is the budget that has run out."""
    outer, inner = Timeout(0.01, name="outer"), Timeout(LONG, name="inner")

    async def fn(ctx: Context) -> Any:
        return await world.execute(inner, hanging(world))

    for _ in range(10):
        with Stopwatch() as took:
            error = await world.attempt(outer, fn)
        assert type(error) is TimeoutExceeded
        assert error.policy == "outer"
        assert took.seconds < 5


async def test_a_total_limit_holds_over_attempts_that_fail_at_once(world: World) -> None:
    """A retry without waits does not run for ever inside a timeout."""
    script = Script(Boom())
    with Stopwatch() as took:
        error = await world.attempt(Policy.wrap(Timeout(SHORT), Retry(None, on=Boom, backoff=[0])), script.function())
    assert isinstance(error, (Boom, TimeoutExceeded))
    assert type(error) is not DeadlineExceeded
    assert took.seconds < 5


# --- the budget --------------------------------------------------------------------------------


async def test_where_the_budget_ends_earlier_it_is_deadline_exceeded(world: World) -> None:
    """The timer fires then, and `by_deadline` says so."""
    told: list[Any] = []
    with Stopwatch() as took:
        error = await world.attempt(
            Timeout(LONG, name="slow", on_timeout=told.append), hanging(world), Context(timeout=SHORT)
        )
    assert type(error) is DeadlineExceeded
    assert error.policy == "slow"
    assert error.timeout == pytest.approx(SHORT, abs=SHORT / 2)
    assert took.seconds < 5
    [event] = told
    assert event.by_deadline is True


async def test_where_budget_and_limit_end_at_the_same_instant_it_is_the_limit(threads: World, clock: FakeClock) -> None:
    """Which the caller knows by its name."""

    class Slow(Policy[Never]):
        async def around(self, call: Call[Any], ctx: Context) -> Any:
            clock.advance(5.0)
            return await call(ctx)

    pipeline = Policy.wrap(Timeout(5.0, name="limit"), Slow())
    error = await threads.attempt(pipeline, Script("fine").function(), Context(timeout=5.0))
    assert type(error) is TimeoutExceeded
    assert (error.policy, error.timeout) == ("limit", 5.0)


@pytest.mark.parametrize("cooperative", [False, True])
async def test_a_budget_that_is_over_is_not_begun(world: World, cooperative: bool, clock: FakeClock) -> None:
    """An enforced timeout does not enter the function; a cooperative one leaves that to what looks at the deadline."""
    script = Script("late")
    error = await world.attempt(Timeout(LONG, cooperative=cooperative), script.function(), Context(timeout=0))
    if cooperative:
        assert error == "late"
    else:
        assert type(error) is DeadlineExceeded
        assert script.calls == 0


# --- between the timer and the function --------------------------------------------------------


async def test_the_policies_between_neither_count_nor_answer_what_the_timer_does(world: World) -> None:
    """It travels inside as no `Exception`; only the timeout that owns it converts it."""
    told: list[Any] = []
    breaker = CircuitBreaker(1, on=BaseException)
    retry = Retry(5, on=BaseException, backoff=[0])
    bulkhead = Bulkhead(1)
    fallback = Fallback("instead", on=BaseException)
    inside = Policy.wrap(fallback, retry, breaker, bulkhead, listeners=[told.append])
    error = await world.attempt(Timeout(SHORT).wrap(inside), hanging(world))
    assert type(error) is TimeoutExceeded
    assert breaker.state is CircuitState.CLOSED
    assert bulkhead.stats().in_flight == 0
    assert told == []


class Nap(Policy[Never]):
    """A user's policy that waits before each call."""

    async def around(self, call: Call[Any], ctx: Context) -> Any:
        await ctx.sleep(10)
        return await call(ctx)


async def test_a_policy_that_sleeps_is_cut_off(world: World) -> None:
    """`ctx.sleep` ends with the timer around it, and the function is not entered."""
    script = Script("fine")
    with Stopwatch() as took:
        error = await world.attempt(Policy.wrap(Timeout(SHORT, name="outer"), Nap()), script.function())
    assert type(error) is TimeoutExceeded
    assert error.policy == "outer"
    assert SHORT <= took.seconds < 5
    assert script.calls == 0


async def test_a_function_is_not_entered_when_its_time_is_over_already(threads: World) -> None:
    """A policy in between that blocks without asking the context has used it up."""

    class Slow(Policy[Never]):
        async def around(self, call: Call[Any], ctx: Context) -> Any:
            time.sleep(0.02)
            return await call(ctx)

    script = Script("fine")
    timeout = Timeout(0.01)
    assert type(await threads.attempt(Policy.wrap(timeout, Slow()), script.function())) is TimeoutExceeded
    assert Timeout.abandoned() == timeout.abandoned() == 0
    time.sleep(0.01)
    assert script.calls == 0


async def test_a_limit_counts_from_where_it_stands(world: World, clock: FakeClock) -> None:
    """What policies around it wait for is not taken off."""
    seen: list[float] = []

    async def fn(ctx: Context) -> None:
        seen.append(ctx.remaining())

    await world.attempt(Policy.wrap(Nap(), Timeout(LONG)), fn)
    await world.attempt(Policy.wrap(Timeout(LONG), Nap()), fn)
    assert seen == [LONG, LONG - 10]
