"""Timeout: the caller is let go after so many seconds, and nothing else is taken for a timeout.

Limits here are 10 to 50 ms of real time. A limit that must not fire is 60 s; a call that hangs would
take ten. So nothing depends on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import linecache
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from math import inf
from typing import Any, Never

import anyio
import anyio.lowlevel
import pytest
import trio
import trio.testing

from resilience import (
    Bulkhead,
    BulkheadFull,
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
    deadline,
    events,
)
from resilience.testing import virtual_time
from tests.conftest import Boom, FakeClock, Script, World, no_collector

SHORT = 0.02
LONG = 60.0


@pytest.fixture(autouse=True)
def nobody_is_left_behind() -> Iterator[None]:
    """The functions that a test walked away from have ended when the next one begins."""
    yield
    end = time.monotonic() + 5
    while Timeout.abandoned() and time.monotonic() < end:
        time.sleep(0.001)
    assert Timeout.abandoned() == 0


def hanging(world: World) -> Callable[..., Awaitable[None]]:
    async def fn(ctx: Context) -> None:
        await world.hang()

    return fn


class Stopwatch:
    """Seconds that really passed."""

    def __enter__(self) -> Stopwatch:
        self.began = time.monotonic()
        return self

    def __exit__(self, *exc: object) -> None:
        self.seconds = time.monotonic() - self.began


# --- the limit ---


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


async def test_the_function_is_entered_once(world: World) -> None:
    """A timeout is no retry."""
    entered: list[int] = []

    async def fn(ctx: Context) -> None:
        entered.append(ctx.attempt)
        await world.hang()

    assert isinstance(await world.attempt(Timeout(SHORT), fn), TimeoutExceeded)
    assert entered == [1]


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


async def test_each_error_is_a_fresh_one(world: World) -> None:
    """A shared one would collect the tracebacks of all callers."""
    timeout = Timeout(0.01)
    errors = [await world.attempt(timeout, hanging(world)) for _ in range(2)]
    assert errors[0] is not errors[1]


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


async def test_the_context_tells_of_a_timeout(world: World) -> None:
    """As of any attempt that failed."""
    ctx = Context()
    await world.attempt(Timeout(SHORT), hanging(world), ctx)
    assert ctx.attempts == 1
    [failed] = ctx.failures
    assert failed.type == "TimeoutExceeded"
    assert ctx.elapsed >= SHORT


async def test_executions_at_the_same_time_have_their_own_timers(tasks_world: World) -> None:
    """One policy object; the one that hangs does not pull the others along."""
    timeout = Timeout(0.05)
    results: dict[int, Any] = {}

    async def call(n: int) -> None:
        async def fn(ctx: Context) -> int:
            await anyio.sleep(10 if n % 2 else 0)
            return n

        results[n] = await tasks_world.attempt(timeout, fn)

    async with anyio.create_task_group() as group:
        for n in range(10):
            group.start_soon(call, n)
    assert [results[n] for n in range(0, 10, 2)] == [0, 2, 4, 6, 8]
    assert {type(results[n]) for n in range(1, 10, 2)} == {TimeoutExceeded}


# --- what is not a timeout ---


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


# --- who is named ---


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


async def test_an_inner_timeout_never_outlives_an_outer_one(world: World) -> None:
    """What is inside sees the earlier of the two deadlines, and is cut off then."""
    seen: list[float] = []

    async def fn(ctx: Context) -> None:
        seen.append(ctx.remaining())
        await world.hang()

    with Stopwatch() as took:
        await world.attempt(Policy.wrap(Timeout(0.1), Timeout(LONG), Timeout(LONG)), fn)
    assert seen[0] <= 0.1
    assert took.seconds < 5


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


async def test_three_nested_timers_fire_from_the_inside_out(world: World) -> None:
    """Each attempt of the inner retry gets its own limit, all of them together the outer one."""
    attempts: list[int] = []

    async def fn(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        await world.hang()

    pipeline = Policy.wrap(
        Timeout(LONG, name="all"), Retry(3, on=TimeoutExceeded, backoff=[0]), Timeout(0.1, name="one")
    )
    error = await world.attempt(pipeline, fn)
    assert error.policy == "one"
    assert attempts == [1, 2, 3]


async def test_a_total_limit_holds_over_all_attempts(world: World) -> None:
    """However many attempts there may be and however long each."""
    attempts: list[int] = []

    async def fn(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        await world.hang()

    pipeline = Policy.wrap(
        Timeout(0.05, name="all"), Retry(None, on=TimeoutExceeded, backoff=[0]), Timeout(0.02, name="one")
    )
    with Stopwatch() as took:
        error = await world.attempt(pipeline, fn)
    assert isinstance(error, TimeoutExceeded)
    assert took.seconds < 5
    assert len(attempts) <= 3


async def test_a_total_limit_holds_over_attempts_that_fail_at_once(world: World) -> None:
    """A retry without waits does not run for ever inside a timeout."""
    script = Script(Boom())
    with Stopwatch() as took:
        error = await world.attempt(Policy.wrap(Timeout(SHORT), Retry(None, on=Boom, backoff=[0])), script.function())
    assert isinstance(error, (Boom, TimeoutExceeded))
    assert type(error) is not DeadlineExceeded
    assert took.seconds < 5


# --- the budget ---


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


async def test_where_the_budget_ends_later_it_is_timeout_exceeded(world: World) -> None:
    """The policy's own limit."""
    error = await world.attempt(Timeout(SHORT), hanging(world), Context(timeout=LONG))
    assert type(error) is TimeoutExceeded


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


async def test_the_budget_of_an_outer_block_counts(world: World) -> None:
    """`with deadline(...)` cuts nothing off; an enforced timeout inside it does."""

    with deadline(SHORT):
        assert type(await world.attempt(Timeout(LONG), hanging(world))) is DeadlineExceeded


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


# --- telling ---


async def test_on_timeout_is_told_once(world: World) -> None:
    """With the limit, the names and the properties."""
    told: list[Any] = []
    timeout = Timeout(SHORT, name="quick", on_timeout=told.append)
    await world.attempt(timeout, hanging(world), Context(operation="fetch", properties={"tenant": 7}))
    [event] = told
    assert isinstance(event, events.TimedOut)
    assert (event.timeout, event.by_deadline) == (SHORT, False)
    assert (event.policy, event.operation, event.properties["tenant"]) == ("quick", "fetch", 7)


# --- between the timer and the function ---


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


async def test_the_policies_around_count_and_answer_it(world: World) -> None:
    """Out there it is an error like others."""
    breaker = CircuitBreaker(1)
    assert await world.attempt(Policy.wrap(Fallback("instead"), breaker, Timeout(SHORT)), hanging(world)) == "instead"
    assert breaker.state is CircuitState.OPEN


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


async def test_a_retry_does_not_begin_a_wait_that_the_limit_would_cut_off(world: World) -> None:
    """It comes out at once with the failure that it has, not after the limit with a timeout."""
    error = Boom()
    with Stopwatch() as took:
        pipeline = Policy.wrap(Timeout(5), Retry(on=Boom, backoff=[30]))
        assert await world.attempt(pipeline, Script(error).function()) is error
    assert took.seconds < 4


async def test_a_wait_in_a_queue_ends_with_the_error_of_the_timeout_around_it(world: World) -> None:
    """And the queue is empty again."""
    bulkhead = Bulkhead(1, queue=5)
    script = Script("fine")

    with bulkhead.slot():
        error = await world.attempt(Policy.wrap(Timeout(SHORT, name="outer"), bulkhead), script.function())
    assert type(error) is TimeoutExceeded
    assert error.policy == "outer"
    assert script.calls == 0
    stats = bulkhead.stats()
    assert (stats.in_flight, stats.queued) == (0, 0)


async def test_a_wait_in_a_queue_that_has_its_own_limit_ends_with_whichever_is_first(world: World) -> None:
    """`max_wait` is the bulkhead's own, the budget the execution's."""

    async def main(pipeline: Policy[Any], bulkhead: Bulkhead, budget: float | None) -> Any:
        with bulkhead.slot():
            return await world.attempt(pipeline, Script("fine").function(), Context(timeout=budget))

    bulkhead = Bulkhead(1, queue=5, max_wait=SHORT)
    assert type(await main(Timeout(LONG).wrap(bulkhead), bulkhead, None)) is BulkheadFull
    patient = Bulkhead(1, queue=5)
    assert type(await main(Timeout(LONG).wrap(patient), patient, SHORT)) is DeadlineExceeded
    assert type(await main(patient, patient, SHORT)) is DeadlineExceeded


async def test_a_limit_counts_from_where_it_stands(world: World, clock: FakeClock) -> None:
    """What policies around it wait for is not taken off."""
    seen: list[float] = []

    async def fn(ctx: Context) -> None:
        seen.append(ctx.remaining())

    await world.attempt(Policy.wrap(Nap(), Timeout(LONG)), fn)
    await world.attempt(Policy.wrap(Timeout(LONG), Nap()), fn)
    assert seen == [LONG, LONG - 10]


# --- cancellation, in both worlds of tasks ---


@pytest.mark.parametrize("first", ["caller", "timer"])
async def test_a_caller_who_cancels_at_the_very_moment_of_the_timer_is_served(tasks_world: World, first: str) -> None:
    """Both are due when the loop looks again: the caller has asked for more than this call to end.

    Only under asyncio, and only where the timer was first, the call ends with its timeout all the same: anyio
    delivers to a task that is being cancelled already no second time, but at its next wait.
    """
    told: list[object] = []
    limits = (0.01, 0.011) if first == "caller" else (0.011, 0.01)

    async def fn(ctx: Context) -> None:
        await anyio.lowlevel.checkpoint()
        time.sleep(0.03)  # the loop sees neither of the two until both are due
        await tasks_world.hang()

    with Stopwatch() as took:
        with anyio.move_on_after(limits[0]) as scope:
            try:
                await Timeout(limits[1], on_timeout=told.append).aexecute(fn)
            except TimeoutExceeded:
                assert (tasks_world.name, first) == ("asyncio", "timer")
            await anyio.sleep(10)
        assert scope.cancelled_caught
    assert took.seconds < 5
    if (tasks_world.name, first) != ("asyncio", "timer"):
        assert told == []


async def test_a_function_that_swallows_its_cancellation_has_its_result_returned(tasks_world: World) -> None:
    """It came to an end after all, and that is what the caller gets."""
    told: list[object] = []

    async def fn(ctx: Context) -> str:
        try:
            await anyio.sleep(10)
        except BaseException:  # what no function should do
            pass
        return "all the same"

    assert await tasks_world.attempt(Timeout(SHORT, on_timeout=told.append), fn) == "all the same"
    assert told == []


async def test_a_function_that_turns_its_cancellation_into_an_error_has_it_raised(tasks_world: World) -> None:
    """Clients do that; the error is their word on what happened."""
    error = Boom("cancelled, says the client")

    async def fn(ctx: Context) -> None:
        try:
            await anyio.sleep(10)
        except BaseException:
            raise error from None

    assert await tasks_world.attempt(Timeout(SHORT), fn) is error


async def test_a_users_scope_around_that_ends_first_is_served(tasks_world: World) -> None:
    """`anyio.fail_after` raises its own `TimeoutError`, `move_on_after` moves on."""

    with pytest.raises(TimeoutError) as raised, anyio.fail_after(0.01):
        await Timeout(LONG).aexecute(hanging(tasks_world))
    assert type(raised.value) is TimeoutError


async def test_a_users_scope_around_that_ends_later_sees_our_error(tasks_world: World) -> None:
    """And is not cancelled itself."""

    with anyio.move_on_after(LONG) as scope:
        with pytest.raises(TimeoutExceeded):
            await Timeout(0.01).aexecute(hanging(tasks_world))
        await anyio.sleep(0)
    assert not scope.cancel_called


async def test_a_users_scope_inside_that_ends_first_is_its_own(tasks_world: World) -> None:
    """What it cancels is not ours; what it raises is a user's own `TimeoutError`."""

    async def moves_on(ctx: Context) -> str:
        with anyio.move_on_after(0.01):
            await anyio.sleep(10)
        await anyio.sleep(0)
        return "moved on"

    async def fails(ctx: Context) -> None:
        with anyio.fail_after(0.01):
            await anyio.sleep(10)

    assert await tasks_world.attempt(Timeout(LONG), moves_on) == "moved on"
    assert type(await tasks_world.attempt(Timeout(LONG), fails)) is TimeoutError


async def test_a_users_scope_inside_that_ends_later_is_left_by_our_timeout(tasks_world: World) -> None:
    """It does not swallow what is ours."""

    async def fn(ctx: Context) -> str:
        with anyio.move_on_after(LONG):
            await anyio.sleep(10)
        return "moved on"

    assert type(await tasks_world.attempt(Timeout(SHORT), fn)) is TimeoutExceeded


async def test_a_shielded_part_is_finished_first(tasks_world: World) -> None:
    """anyio's shield holds against our timer under trio; under asyncio it holds against anyio's scopes alone."""
    done: list[str] = []

    async def fn(ctx: Context) -> None:
        try:
            await anyio.sleep(10)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)
                done.append("cleaned up")

    assert type(await tasks_world.attempt(Timeout(SHORT), fn)) is TimeoutExceeded
    assert done == ["cleaned up"]


async def test_a_task_group_inside_is_wound_up(tasks_world: World) -> None:
    """Its children are cancelled and waited for before the caller hears of the timeout."""
    ended: list[int] = []

    async def child(n: int) -> None:
        try:
            await anyio.sleep(10)
        finally:
            ended.append(n)

    async def fn(ctx: Context) -> None:
        async with anyio.create_task_group() as group:
            for n in range(3):
                group.start_soon(child, n)

    assert type(await tasks_world.attempt(Timeout(SHORT), fn)) is TimeoutExceeded
    assert sorted(ended) == [0, 1, 2]


async def test_a_task_group_around_that_is_cancelled_by_a_sibling_is_served(tasks_world: World) -> None:
    """The group raises the sibling's error and nothing else."""

    async def fail() -> None:
        await anyio.sleep(0.01)
        raise Boom

    with pytest.raises(ExceptionGroup) as raised:
        async with anyio.create_task_group() as group:
            group.start_soon(fail)
            group.start_soon(Timeout(LONG).aexecute, hanging(tasks_world))
    assert [type(error) for error in raised.value.exceptions] == [Boom]


async def test_a_timeout_is_one_error_of_a_group_like_others(tasks_world: World) -> None:
    """It cancels the siblings, and the group raises it."""

    with pytest.raises(ExceptionGroup) as raised:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 10)
            group.start_soon(Timeout(0.01).aexecute, hanging(tasks_world))
    assert [type(error) for error in raised.value.exceptions] == [TimeoutExceeded]


async def test_a_cancelled_scope_around_is_served_at_once(tasks_world: World) -> None:
    """A call that is made where everything is cancelled already ends at its first wait."""

    with anyio.CancelScope() as scope:
        scope.cancel()
        await Timeout(LONG).aexecute(hanging(tasks_world))
    assert scope.cancelled_caught


# --- asyncio: the semantics of asyncio.timeout ---


def test_a_clean_up_that_awaits_completes() -> None:
    """One delivery: what is awaited in a `finally` is not cancelled again."""
    done: list[str] = []

    async def fn(ctx: Context) -> None:
        try:
            await asyncio.sleep(10)
        finally:
            for step in ("rollback", "close"):
                await asyncio.sleep(0.005)
                done.append(step)

    async def main() -> None:
        with pytest.raises(TimeoutExceeded):
            await Timeout(0.01).aexecute(fn)

    asyncio.run(main())
    assert done == ["rollback", "close"]


def test_a_swallowed_cancellation_is_not_delivered_again() -> None:
    """The function may go on for as long as it likes."""

    async def fn(ctx: Context) -> str:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            for _ in range(5):
                await asyncio.sleep(0.005)
        return "went on"

    async def main() -> None:
        assert await Timeout(0.01).aexecute(fn) == "went on"
        assert current_task().cancelling() == 0
        await asyncio.sleep(0)

    asyncio.run(main())


def current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def forever(ctx: Context) -> None:
    await asyncio.sleep(10)


def test_the_count_of_cancellations_is_back_to_what_it_was() -> None:
    """`Task.cancelling()`, after one timer, after nested ones, after many."""

    async def main() -> None:
        nested = Policy.wrap(Timeout(0.011), Fallback(on=Boom), Timeout(0.01), Timeout(LONG))
        for policy in (Timeout(0.005), nested, *[Timeout(0.001)] * 20):
            with pytest.raises(TimeoutExceeded):
                await policy.aexecute(forever)
            assert current_task().cancelling() == 0
        await asyncio.sleep(0)  # and no cancellation is left to be delivered

    asyncio.run(main())


def test_nested_timers_that_are_due_at_once_leave_nothing_behind() -> None:
    """Both have fired: the outer one has the word, and both have taken their cancellation back."""

    async def fn(ctx: Context) -> None:
        await asyncio.sleep(0)
        time.sleep(0.03)
        await asyncio.sleep(10)

    async def main() -> None:
        told: list[str] = []
        tell = lambda event: told.append(event.policy)  # noqa: E731
        pipeline = Policy.wrap(
            Timeout(0.011, name="outer", on_timeout=tell), Timeout(0.01, name="inner", on_timeout=tell)
        )
        with pytest.raises(TimeoutExceeded) as raised:
            await pipeline.aexecute(fn)
        assert [raised.value.policy] == told
        assert current_task().cancelling() == 0
        await asyncio.sleep(0)

    asyncio.run(main())


def test_a_task_that_had_been_cancelled_before_may_still_time_out() -> None:
    """Somebody swallowed an earlier cancellation without `uncancel`: it is still counted, and not ours."""

    async def main() -> None:
        current_task().cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(1)
        assert current_task().cancelling() == 1
        with pytest.raises(TimeoutExceeded):
            await Timeout(0.01).aexecute(forever)
        assert current_task().cancelling() == 1

    asyncio.run(main())


@pytest.mark.parametrize("first", ["caller", "timer"])
def test_a_task_that_is_cancelled_at_the_moment_of_the_timer_is_cancelled(first: str) -> None:
    """In whichever order the loop comes to the two."""
    told: list[object] = []
    counts: list[int] = []

    async def fn(ctx: Context) -> None:
        loop, task = asyncio.get_running_loop(), current_task()
        if first == "caller":
            loop.call_later(0.005, task.cancel)
        else:
            loop.call_later(0.015, task.cancel)
        await asyncio.sleep(0)
        time.sleep(0.03)
        await asyncio.sleep(10)

    async def call() -> None:
        try:
            await Timeout(0.01, on_timeout=told.append).aexecute(fn)
        finally:
            counts.append(current_task().cancelling())

    async def main() -> None:
        task = asyncio.create_task(call())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())
    assert told == []
    assert counts == [1]


def test_a_task_that_is_cancelled_while_it_cleans_up_after_a_timeout_is_cancelled() -> None:
    """The caller's word comes later and weighs more."""

    async def fn(ctx: Context) -> None:
        try:
            await asyncio.sleep(10)
        finally:
            current_task().cancel()
            await asyncio.sleep(10)

    async def main() -> None:
        task = asyncio.create_task(Timeout(0.01).aexecute(fn))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())


def test_asyncio_timeout_around_that_ends_first_raises_its_own_error() -> None:
    """The builtin `TimeoutError`, as without us."""

    async def main() -> None:
        with pytest.raises(TimeoutError) as raised:
            async with asyncio.timeout(0.01):
                await Timeout(LONG).aexecute(forever)
        assert type(raised.value) is TimeoutError
        assert current_task().cancelling() == 0

    asyncio.run(main())


def test_asyncio_timeout_around_that_ends_later_lets_ours_through() -> None:
    """It is not expired."""

    async def main() -> None:
        async with asyncio.timeout(LONG) as outer:
            with pytest.raises(TimeoutExceeded):
                await Timeout(0.01).aexecute(forever)
        assert not outer.expired()
        assert current_task().cancelling() == 0

    asyncio.run(main())


@pytest.mark.parametrize("limits", [(0.01, 0.011), (0.011, 0.01)], ids=["outer", "inner"])
@pytest.mark.parametrize("ours", ["outside", "inside"])
def test_two_timeouts_of_different_makes_at_the_same_moment(limits: tuple[float, float], ours: str) -> None:
    """The outer one of two that are due at once has the word, whosever it is."""

    async def fn(ctx: Any = None) -> None:
        await asyncio.sleep(0)
        time.sleep(0.03)
        await asyncio.sleep(10)

    async def theirs(ctx: Context) -> None:
        async with asyncio.timeout(limits[1]):
            await fn()

    async def main() -> None:
        with pytest.raises(TimeoutError) as raised:
            if ours == "outside":
                await Timeout(limits[0]).aexecute(theirs)
            else:
                async with asyncio.timeout(limits[0]):
                    await Timeout(limits[1]).aexecute(fn)
        assert type(raised.value) is (TimeoutExceeded if ours == "outside" else TimeoutError)
        assert current_task().cancelling() == 0
        await asyncio.sleep(0)

    asyncio.run(main())


def test_asyncio_timeout_inside_is_the_functions_own() -> None:
    """Its `TimeoutError` passes; where ours is first, it passes ours on."""

    async def quick(ctx: Context) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(10)

    async def slow(ctx: Context) -> None:
        async with asyncio.timeout(LONG):
            await asyncio.sleep(10)

    async def main() -> None:
        with pytest.raises(TimeoutError) as raised:
            await Timeout(LONG).aexecute(quick)
        assert type(raised.value) is TimeoutError
        with pytest.raises(TimeoutExceeded):
            await Timeout(0.01).aexecute(slow)
        assert current_task().cancelling() == 0

    asyncio.run(main())


def test_asyncio_wait_for_around_and_inside() -> None:
    """The older way of saying it."""

    async def quick(ctx: Context) -> None:
        await asyncio.wait_for(asyncio.sleep(10), 0.01)

    async def slow(ctx: Context) -> None:
        await asyncio.wait_for(asyncio.sleep(10), LONG)

    async def main() -> None:
        with pytest.raises(TimeoutError) as raised:
            await Timeout(LONG).aexecute(quick)
        assert type(raised.value) is TimeoutError
        with pytest.raises(TimeoutExceeded):
            await Timeout(0.01).aexecute(slow)
        with pytest.raises(TimeoutError) as raised:
            await asyncio.wait_for(Timeout(LONG).aexecute(forever), 0.01)
        assert type(raised.value) is TimeoutError

    asyncio.run(main())


def test_asyncio_task_groups_inside_and_around() -> None:
    """Children are cancelled, siblings' errors are served, and the group's own accounting is left intact."""
    ended: list[str] = []

    async def child() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0)
            ended.append("child")

    async def with_group(ctx: Context) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(child())
            group.create_task(child())

    async def fail() -> None:
        await asyncio.sleep(0.005)
        raise Boom

    async def main() -> None:
        with pytest.raises(TimeoutExceeded):
            await Timeout(0.01).aexecute(with_group)
        assert ended == ["child", "child"]
        assert current_task().cancelling() == 0
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                await Timeout(LONG).aexecute(forever)
        assert [type(error) for error in raised.value.exceptions] == [Boom]
        assert current_task().cancelling() == 0

    asyncio.run(main())


def test_a_task_group_around_is_served_when_it_is_cancelled_at_the_moment_of_the_timer() -> None:
    """The sibling's failure and the limit are due at once: the group's cancellation is not taken for ours."""

    async def fail() -> None:
        await asyncio.sleep(0.005)
        raise Boom

    async def fn(ctx: Context) -> None:
        await asyncio.sleep(0)
        time.sleep(0.03)
        await asyncio.sleep(10)

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                await Timeout(0.02).aexecute(fn)
        assert Boom in [type(error) for error in raised.value.exceptions]
        assert current_task().cancelling() == 0

    asyncio.run(main())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
def test_an_eager_task_can_time_out() -> None:
    """It runs before the loop has ever seen it."""

    async def main() -> None:
        factory: Any = asyncio.eager_task_factory  # type: ignore[attr-defined]
        asyncio.get_running_loop().set_task_factory(factory)
        with pytest.raises(TimeoutExceeded):
            await asyncio.create_task(Timeout(0.01).aexecute(forever))
        assert await asyncio.create_task(Timeout(LONG).aexecute(Script("at once").function())) == "at once"

    asyncio.run(main())


def test_a_timer_that_did_not_fire_never_does() -> None:
    """It is taken back when the call ends: the task may live on for longer than the limit."""

    async def main() -> None:
        for script in (Script("fine"), Script(Boom())):
            await World("asyncio").attempt(Timeout(0.01), script.function())
        await asyncio.sleep(0.03)

    asyncio.run(main())


# --- trio ---


def test_trio_scopes_around_are_served() -> None:
    """`trio.fail_after` and `trio.move_on_after`, with their own error and their own word."""

    async def main() -> None:
        world = World("trio")
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.01):
            await Timeout(LONG).aexecute(hanging(world))
        with trio.move_on_after(0.01) as scope:
            await Timeout(LONG).aexecute(hanging(world))
        assert scope.cancelled_caught

    trio.run(main)


def test_trio_has_a_clock_of_its_own() -> None:
    """Where it runs faster than the process, a limit is over when *its* seconds have passed."""
    clock: Any = trio.testing.MockClock(rate=1000)

    async def main() -> None:
        with Stopwatch() as took, pytest.raises(TimeoutExceeded):
            await Timeout(20).aexecute(hanging_in_trio)
        assert took.seconds < 5

    async def hanging_in_trio(ctx: Context) -> None:
        await trio.sleep(10_000)

    trio.run(main, clock=clock)


# --- cooperative ---


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


async def test_a_queue_inside_a_cooperative_limit_ends_with_a_timeout(world: World) -> None:
    """The budget that it found used up was the policy's, so the error is the policy's."""
    bulkhead = Bulkhead(1, queue=5)

    with bulkhead.slot():
        pipeline = Policy.wrap(Timeout(SHORT, cooperative=True, name="outer"), bulkhead)
        error = await world.attempt(pipeline, Script("fine").function())
    assert type(error) is TimeoutExceeded
    assert error.policy == "outer"


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


async def test_a_timeout_error_of_a_cooperative_limit_is_tried_again(world: World, clock: FakeClock) -> None:
    """By a retry around it, as any timeout of one attempt."""
    attempts: list[float] = []

    async def fn(ctx: Context) -> str:
        attempts.append(ctx.remaining())
        if ctx.attempt < 3:
            clock.advance(5.5)
            ctx.check()
        return "fine"

    assert await world.attempt(Policy.wrap(Retry(backoff=[1]), Timeout(5, cooperative=True)), fn) == "fine"
    assert attempts == [5, 5, 5]


async def test_an_enforced_timeout_inside_a_cooperative_one_fires_at_its_limit(world: World) -> None:
    """And then it was the outer one's time that ran out."""
    pipeline = Policy.wrap(Timeout(SHORT, cooperative=True, name="outer"), Timeout(LONG, name="inner"))
    with Stopwatch() as took:
        error = await world.attempt(pipeline, hanging(world))
    assert type(error) is TimeoutExceeded
    assert error.policy == "outer"
    assert took.seconds < 5


async def test_a_cooperative_timeout_inside_an_enforced_one_is_cut_off_with_it(world: World) -> None:
    """The enforced one cuts off whatever is inside it."""
    pipeline = Policy.wrap(Timeout(SHORT, name="outer"), Timeout(LONG, cooperative=True))
    error = await world.attempt(pipeline, hanging(world))
    assert type(error) is TimeoutExceeded
    assert error.policy == "outer"


@pytest.mark.parametrize(
    ("limit", "took", "warned"),
    [
        (5, 10.5, True),
        (5, 9.5, False),  # less than twice
        (0.1, 1.05, False),  # less than a second too late
        (0.1, 1.25, True),
        (5, 4.5, False),
    ],
)
async def test_a_function_that_badly_overran_its_limit_is_reported(
    world: World, clock: FakeClock, limit: float, took: float, warned: bool
) -> None:
    """More than twice its time, and more than a second: it ignores its deadline. The late result is returned."""

    async def fn(ctx: Context) -> str:
        clock.advance(took)
        return "late"

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert await world.execute(Timeout(limit, cooperative=True), fn) == "late"
    assert [it.category for it in caught] == ([RuntimeWarning] if warned else [])
    assert all("deadline" in str(it.message) for it in caught)


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


# --- memory ---


async def test_a_deadline_error_that_became_a_timeout_needs_no_cyclic_collector(world: World, clock: FakeClock) -> None:
    """The error that was found inside is not held by the frame that raised the other one."""
    alive: list[weakref.ref[Any]] = []

    async def fn(ctx: Context) -> None:
        clock.advance(5.5)
        try:
            ctx.check()
        except DeadlineExceeded as error:
            alive.append(weakref.ref(error))
            raise

    async def main() -> None:
        try:
            await world.execute(Timeout(5, cooperative=True), fn)
        except TimeoutExceeded as error:
            alive.append(weakref.ref(error))

    with no_collector():
        await main()
        assert [ref() for ref in alive] == [None, None]


def test_no_failed_task_needs_the_cyclic_collector() -> None:
    """A task whose call failed, or was cut off, is gone when nobody wants it any more."""
    alive: list[weakref.ref[Any]] = []

    async def fail(ctx: Context) -> None:
        raise Boom

    async def start(fn: Callable[[Context], Awaitable[None]]) -> None:
        task = asyncio.create_task(Timeout(0.005).aexecute(fn))
        alive.append(weakref.ref(task))
        await asyncio.wait([task])
        assert isinstance(task.exception(), (Boom, TimeoutExceeded))

    async def main() -> None:
        for fn in (fail, forever):
            await start(fn)
        await asyncio.sleep(0)
        assert [ref() for ref in alive] == [None, None]

    with no_collector():
        asyncio.run(main())


async def test_no_timeout_needs_the_cyclic_collector(world: World) -> None:
    """Neither the error nor the context of the call is held by a cycle."""
    alive: list[weakref.ref[Any]] = []

    class Local:
        """Something that lives in the caller's frame."""

    async def caller() -> None:
        local = Local()
        alive.append(weakref.ref(local))
        try:
            await world.execute(Timeout(0.005), hanging(world))
        except TimeoutExceeded as error:
            alive.append(weakref.ref(error))

    with no_collector():
        await caller()
        assert [ref() for ref in alive] == [None, None]


# --- building one ---


@pytest.mark.parametrize(("operation", "who"), [(None, "patience"), ("GET /users", "patience (GET /users)")])
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

    with pytest.warns(RuntimeWarning) as caught:
        assert pipeline.execute(fn, Context(operation=operation)) == ("instead" if fails else "late")
    [warning] = caught
    assert str(warning.message).startswith(f"{who}: a call that had 2 s took 5 s more, so it ignores its deadline")
    assert warning.filename == __file__
    assert "pipeline.execute(fn" in linecache.getline(warning.filename, warning.lineno)


@pytest.mark.parametrize(("limit", "took", "warned"), [(0.5, 1.5, 0), (0.5, 1.75, 1), (4.0, 8.0, 0), (4.0, 8.25, 1)])
def test_an_overrun_is_told_from_more_than_a_second_and_more_than_the_limit(
    clock: FakeClock, limit: float, took: float, warned: int
) -> None:
    """Neither at the very second, nor at the very double."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Timeout(limit, cooperative=True).execute(lambda ctx: clock.advance(took))
    assert len(caught) == warned


def test_the_description_says_whether_it_cuts_off() -> None:
    """In a line, with the number."""
    assert Timeout(2.5).describe() == "Timeout: 2.5 s for everything inside, then it is cut off"
    carried = "Timeout: 2.5 s for everything inside, carried as a deadline, nothing is cut off"
    assert Timeout(2.5, cooperative=True).describe() == carried
