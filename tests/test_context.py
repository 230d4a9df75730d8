"""Contexts: the time that is left, what an execution tells afterwards, and how budgets travel and nest."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from resilience import (
    Bulkhead,
    CircuitBreaker,
    CircuitOpen,
    Context,
    DeadlineExceeded,
    Fallback,
    Policy,
    Retry,
    Timeout,
    TimeoutExceeded,
    current_context,
    deadline,
)
from tests.conftest import Boom, FakeClock, Script, Watched, World, no_collector

INF = float("inf")


class Other(Exception):
    """A failure that does not happen here."""


class Passing(Policy):
    """A policy that does nothing."""

    async def around(self, call: Any, ctx: Context) -> Any:
        return await call(ctx)


PASSING = Passing()


# --- time ------------------------------------------------------------------------------------


def test_a_context_has_no_limit_unless_it_is_given_one(clock: FakeClock) -> None:
    """Infinity is a number that every comparison understands."""
    ctx = Context()
    assert ctx.deadline == INF
    assert ctx.remaining() == INF
    assert not ctx.expired
    assert ctx.timeout() is None
    assert ctx.timeout(3) == 3.0
    clock.advance(1e9)
    assert ctx.check() is None  # type: ignore[func-returns-value]


def test_a_timeout_is_seconds_from_now_on_the_process_clock(clock: FakeClock) -> None:
    """The deadline is an instant, and what remains of it counts down."""
    ctx = Context(timeout=8)
    assert ctx.deadline == clock.now() + 8.0
    assert ctx.remaining() == 8.0
    clock.advance(3.0)
    assert ctx.remaining() == 5.0
    assert not ctx.expired
    ctx.check()


def test_a_timeout_may_be_a_timedelta(clock: FakeClock) -> None:
    """As all durations."""
    assert Context(timeout=timedelta(minutes=2)).remaining() == 120.0
    assert Context(timeout=5.0).timeout(timedelta(milliseconds=250)) == 0.25


def test_an_infinite_timeout_is_none(clock: FakeClock) -> None:
    """Whoever computes a timeout need not treat "no limit" as a case of its own."""
    ctx = Context(timeout=INF)
    assert ctx.deadline == INF
    assert ctx.timeout() is None


def test_a_deadline_has_passed_at_its_very_instant(clock: FakeClock) -> None:
    """Nothing is left then, and what is left is never negative."""
    ctx = Context(timeout=2.0)
    clock.advance(2.0)
    assert ctx.expired
    assert ctx.remaining() == 0.0
    with pytest.raises(DeadlineExceeded):
        ctx.check()
    clock.advance(100.0)
    assert ctx.remaining() == 0.0


def test_a_timeout_of_zero_is_over_already(clock: FakeClock) -> None:
    """It is not "no limit", as 0 is to so many clients."""
    ctx = Context(timeout=0)
    assert ctx.expired
    assert ctx.remaining() == 0.0
    with pytest.raises(DeadlineExceeded):
        ctx.timeout()


async def test_nothing_is_executed_with_a_timeout_of_zero(world: World, clock: FakeClock) -> None:
    """A Retry makes no attempt after the deadline, and a Timeout enters nothing."""
    for policy in (Retry(), Timeout(5.0), Retry().wrap(Timeout(5.0))):
        script = Script("fine")

        async def main(policy: Policy[Any] = policy, script: Script = script) -> object:
            return await world.attempt(policy, script.function(), Context(timeout=0))

        assert isinstance(await main(), DeadlineExceeded)
        assert script.calls == 0


def test_the_timeout_for_a_client_is_the_smaller_of_the_limit_and_what_is_left(clock: FakeClock) -> None:
    """None where there is neither."""
    ctx = Context(timeout=5.0)
    assert ctx.timeout() == 5.0
    assert ctx.timeout(2.0) == 2.0
    assert ctx.timeout(20.0) == 5.0
    assert ctx.timeout(INF) == 5.0
    clock.advance(4.5)
    assert ctx.timeout(2.0) == 0.5
    assert Context().timeout(INF) is None


def test_the_timeout_for_a_client_is_never_zero(clock: FakeClock) -> None:
    """0 means "for ever" to aiohttp, redis, grpc and SQL: where nothing is left it raises."""
    ctx = Context(timeout=1.0)
    clock.advance(1.0)
    for limit in (None, 5.0):
        with pytest.raises(DeadlineExceeded):
            ctx.timeout(limit)
    with pytest.raises(ValueError, match="limit"):
        Context().timeout(0)


def test_the_timeout_is_not_zero_if_the_clock_moves_between_two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check and the subtraction are two readings of a clock that does not wait."""
    ctx = Context(timeout=1.0)
    readings = iter([ctx.deadline - 0.001, ctx.deadline])
    monkeypatch.setattr("resilience.clock.clock.now", lambda: next(readings))
    with pytest.raises(DeadlineExceeded):
        ctx.timeout()


def test_the_error_of_a_context_is_a_timeout_error(clock: FakeClock) -> None:
    """And says in one sentence what is over."""
    with pytest.raises(TimeoutError, match="deadline") as caught:
        Context(timeout=0).check()
    assert isinstance(caught.value, DeadlineExceeded)


def test_each_error_of_a_context_is_a_fresh_one(clock: FakeClock) -> None:
    """One shared exception would grow its traceback with each raise."""
    ctx = Context(timeout=0)
    seen = []
    for _ in range(2):
        with pytest.raises(DeadlineExceeded) as caught:
            ctx.check()
        seen.append(caught.value)
    assert seen[0] is not seen[1]


async def test_a_budget_by_itself_cuts_nothing_off(world: World) -> None:
    """Only a Timeout and `async with deadline` do: what is running comes to its own end."""

    async def late(ctx: Context) -> str:
        await world.sleep(ctx.remaining() + 0.005)
        return "late"

    assert await world.execute(Retry(), late, Context(timeout=0.25)) == "late"


# --- operation, properties, attempt ----------------------------------------------------------


async def test_operation_and_properties_are_visible_inside(world: World) -> None:
    """To the function, to callbacks and events, through every policy and attempt."""
    pipeline = Retry(2, on=Boom, backoff=[0]).wrap(CircuitBreaker(), Timeout(5.0), Bulkhead(1), Fallback("x", on=Other))
    seen: list[tuple[int, str | None, dict[str, Any]]] = []

    async def fn(ctx: Context) -> None:
        seen.append((ctx.attempt, ctx.operation, dict(ctx.properties)))
        raise Boom

    await world.attempt(pipeline, fn, Context(operation="get-user", properties={"tenant": "acme"}))
    assert seen == [(1, "get-user", {"tenant": "acme"}), (2, "get-user", {"tenant": "acme"})]


def test_a_context_without_them_has_none() -> None:
    """No operation, no properties: None and an empty mapping."""
    ctx = Context()
    assert ctx.operation is None
    assert dict(ctx.properties) == {}
    assert ctx.attempt == 1


def test_properties_are_a_copy_that_nobody_can_change() -> None:
    """Contexts are handed to threads and tasks: they must not change under anybody's feet."""
    given = {"tenant": "acme"}
    ctx = Context(properties=given)
    given["tenant"] = "other"
    assert ctx.properties == {"tenant": "acme"}
    with pytest.raises(TypeError):
        ctx.properties["tenant"] = "other"  # type: ignore[index]


def test_a_child_inherits_and_only_shortens(clock: FakeClock) -> None:
    """Contexts are derived, never mutated."""
    ctx = Context(timeout=5.0, operation="op", properties={"a": 1})
    child = ctx.child(deadline=ctx.deadline - 3.0, attempt=2)
    grandchild = child.child(deadline=ctx.deadline + 100.0)
    assert (child.remaining(), child.attempt) == (2.0, 2)
    assert (grandchild.remaining(), grandchild.attempt) == (2.0, 2)
    assert (ctx.remaining(), ctx.attempt) == (5.0, 1)
    for each in (child, grandchild):
        assert each.operation == "op"
        assert each.properties == {"a": 1}
        assert isinstance(each, Context)
    assert ctx.child().deadline == ctx.deadline


async def test_the_attempt_is_the_innermost_retrys(world: World, clock: FakeClock) -> None:
    """Two retries around one another each count their own."""
    pipeline = Retry(2, on=Boom, backoff=[0]).wrap(Retry(2, on=Boom, backoff=[0]))
    script = Script(Boom("no"))

    await world.attempt(pipeline, script.function())
    assert [ctx.attempt for ctx in script.contexts] == [1, 2, 1, 2]


def test_a_context_says_what_it_is() -> None:
    """For whoever prints it while looking for a mistake."""
    assert repr(Context()) == "<Context attempt=1>"
    text = repr(Context(timeout=5, operation="get-user"))
    assert text.startswith("<Context operation='get-user' remaining=")
    assert text.endswith(" attempt=1>")


# --- the report ------------------------------------------------------------------------------


def test_before_an_execution_there_is_nothing_to_tell() -> None:
    """No attempts, no time, no failures."""
    ctx = Context()
    assert (ctx.attempts, ctx.elapsed, ctx.failures) == (0, 0.0, ())


async def test_the_context_tells_what_happened(world: World, clock: FakeClock) -> None:
    """How often the function was entered, how long it all took, and what the attempts failed with."""
    ctx = Context()
    script = Script(Boom("one"), Boom("two"), "fine")

    assert await world.execute(Retry(on=Boom, backoff=[1.5, 2.5]), script.function(), ctx) == "fine"
    clock.advance(100.0)
    assert ctx.attempts == 3
    assert ctx.elapsed == 4.0, "it stands still once the execution is over"
    assert [(failed.type, failed.message) for failed in ctx.failures] == [("Boom", "one"), ("Boom", "two")]
    assert [str(failed) for failed in ctx.failures] == ["Boom(one)", "Boom(two)"]


def test_a_clock_that_is_put_back_gives_no_negative_time(clock: FakeClock) -> None:
    """As it is when virtual time, which begins at 0, begins inside of the function."""
    ctx = Context()
    Retry().execute(lambda inner: clock.advance(-500.0), ctx)
    assert ctx.elapsed == 0.0


def test_a_failure_is_told_on_one_line() -> None:
    """The note of a Retry tells of several, and some clients' messages go over many lines."""

    def fail(ctx: Context) -> None:
        raise Boom("terminated with:\n\tstatus = 14\n")

    ctx = Context()
    Retry(1, on=Boom).capture(fail, ctx)
    assert [str(failed) for failed in ctx.failures] == ["Boom(terminated with: status = 14)"]


async def test_it_tells_the_same_of_an_execution_that_failed(world: World, clock: FakeClock) -> None:
    """That is when somebody asks."""
    ctx = Context()

    assert isinstance(await world.attempt(Retry(2, on=Boom, backoff=[1.0]), Script(Boom("no")).function(), ctx), Boom)
    assert (ctx.attempts, ctx.elapsed) == (2, 1.0)
    assert [str(failed) for failed in ctx.failures] == ["Boom(no)"] * 2


async def test_the_report_is_there_while_it_runs(world: World, clock: FakeClock) -> None:
    """The function can ask, through its own context, how far it has come."""
    seen: list[tuple[int, float, int]] = []

    async def fn(ctx: Context) -> None:
        seen.append((ctx.attempts, ctx.elapsed, len(ctx.failures)))
        raise Boom

    await world.attempt(Retry(3, on=Boom, backoff=[1.0]), fn, Context())
    assert seen == [(1, 0.0, 0), (2, 1.0, 1), (3, 2.0, 2)]


async def test_of_many_failures_the_first_and_the_last_few_are_kept(world: World, clock: FakeClock) -> None:
    """Bounded, however long one keeps trying."""
    ctx = Context()
    script = Script(*(Boom(f"number {n}") for n in range(1, 51)), "fine")

    assert await world.execute(Retry(None, on=Boom, backoff=[1.0]), script.function(), ctx) == "fine"
    assert ctx.attempts == 51
    assert [failed.message for failed in ctx.failures] == [f"number {n}" for n in (1, 2, 3, 48, 49, 50)]


async def test_messages_are_bounded_too(world: World) -> None:
    """An error that quotes a whole page does not make the report as long."""
    ctx = Context()

    await world.attempt(PASSING, Script(Boom("x" * 100_000)).function(), ctx)
    [failed] = ctx.failures
    assert failed.message.startswith("xxx")
    assert len(failed.message) < 1_000


async def test_failures_are_kept_as_text(world: World) -> None:
    """An exception would keep the frames of the call alive, a result might be a secret."""
    ctx = Context()
    retry = Retry(2, on=Boom, on_result=lambda result: result == "secret", backoff=[0])

    await world.execute(retry, Script("secret").function(), ctx)
    assert [tuple(failed) for failed in ctx.failures] == [("result", "str")] * 2
    assert all(type(text) is str for failed in ctx.failures for text in failed)


async def test_a_rejected_attempt_is_a_failed_attempt_that_entered_nothing(world: World, clock: FakeClock) -> None:
    """The circuit refuses the second one: the function was entered once, two attempts have failed."""
    ctx = Context()
    pipeline = Retry(2, on=(Boom, CircuitOpen), backoff=[1.0]).wrap(CircuitBreaker(1))

    await world.attempt(pipeline, Script(Boom("no")).function(), ctx)
    assert ctx.attempts == 1
    assert [failed.type for failed in ctx.failures] == ["Boom", "CircuitOpen"]


async def test_an_attempt_that_was_cut_off_is_told_as_the_timeout_that_it_was(world: World) -> None:
    """The function was entered, and its attempt failed with what the Retry saw."""
    ctx = Context()
    calls: list[int] = []

    async def fn(inner: Context) -> str:
        calls.append(inner.attempt)
        if inner.attempt == 1:
            await world.hang()
        return "fine"

    assert await world.execute(Retry(2, backoff=[0]).wrap(Timeout(0.1)), fn, ctx) == "fine"
    assert calls == [1, 2]
    assert ctx.attempts == 2
    assert [failed.type for failed in ctx.failures] == ["TimeoutExceeded"]


async def test_one_failed_attempt_is_told_once(world: World, clock: FakeClock) -> None:
    """A cooperative Timeout turns the `DeadlineExceeded` of its function into its own: that is one failure."""
    ctx = Context()

    async def fn(inner: Context) -> None:
        clock.advance(2.0)
        inner.check()

    assert isinstance(await world.attempt(Timeout(1.5, cooperative=True), fn, ctx), TimeoutExceeded)
    assert ctx.attempts == 1
    assert len(ctx.failures) == 1, ctx.failures


async def test_a_failure_that_a_policy_makes_of_a_result_is_a_failed_attempt(world: World, clock: FakeClock) -> None:
    """`raise_for_status` in a policy of one's own: the function returned, the attempt failed all the same."""

    class Demanding(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            status = await call(ctx)
            if status >= 500:
                raise Boom(f"status {status}")
            return status

    ctx = Context()

    retry = Retry(on=Boom, backoff=[0])
    assert await world.execute(retry.wrap(Demanding()), Script(503, 500, 200).function(), ctx) == 200
    assert ctx.attempts == 3
    assert [failed.message for failed in ctx.failures] == ["status 503", "status 500"]


async def test_two_retries_around_one_another_tell_each_failure_once(world: World, clock: FakeClock) -> None:
    """A rejection that passes through both is one failure of one attempt."""
    ctx = Context()
    breaker = CircuitBreaker()
    breaker.isolate()
    pipeline = Retry(1, on=CircuitOpen).wrap(Retry(1, on=CircuitOpen), breaker)

    await world.attempt(pipeline, Script("never").function(), ctx)
    assert ctx.attempts == 0
    assert [failed.type for failed in ctx.failures] == ["CircuitIsolated"]


async def test_a_timeout_stands_for_the_deadline_that_somebody_inside_found_over(
    world: World, clock: FakeClock
) -> None:
    """After however many failures, its own is told once: as the timeout that the caller gets."""
    for failures in (0, 2, 3, 4, 9):
        ctx = Context()

        async def fn(inner: Context, failures: int = failures) -> None:
            if inner.attempt <= failures:
                raise Boom(str(inner.attempt))
            clock.advance(20.0)
            inner.check()

        async def main(ctx: Context = ctx, fn: Any = fn) -> object:
            return await world.attempt(Timeout(10.0, cooperative=True).wrap(Retry(None, on=Boom, backoff=[0])), fn, ctx)

        assert type(await main()) is TimeoutExceeded
        told = [failed.type for failed in ctx.failures]
        assert told == ["Boom"] * (len(told) - 1) + ["TimeoutExceeded"]
        assert len(told) == min(failures + 1, 6 if failures < 6 else 5 + 1)


async def test_a_misuse_is_no_failure_of_the_call(world: World) -> None:
    """It is no outcome, in any world."""
    ctx = Context()

    async def main() -> object:
        if world.blocking:
            return Retry().execute(lambda ctx: asyncio.sleep(0), ctx)
        return await Retry().aexecute(lambda ctx: 5, ctx)  # type: ignore[arg-type,return-value]

    with pytest.raises(TypeError, match="await"):
        await main()
    assert ctx.failures == ()


async def test_a_context_that_is_used_again_tells_of_the_last_execution(world: World, clock: FakeClock) -> None:
    """Its report begins anew; its budget does not."""
    ctx = Context(timeout=10.0)
    retry = Retry(on=Boom, backoff=[1.0])
    reports = []

    for script in (Script(Boom("no"), "fine"), Script("fine")):
        await world.execute(retry, script.function(), ctx)
        reports.append((ctx.attempts, ctx.elapsed, len(ctx.failures), ctx.remaining()))
    assert reports == [(2, 1.0, 1, 9.0), (1, 0.0, 0, 9.0)]


async def test_a_nested_execution_reports_to_the_context_it_was_given_and_no_other(
    world: World, clock: FakeClock
) -> None:
    """The outer report counts the outer function; the inner one, made with a context of its own, its own."""
    outer, inner = Context(), Context()
    retry = Retry(on=Boom, backoff=[1.0])
    script = Script(Boom("in"), Boom("in"), "fine")

    async def fn(ctx: Context) -> Any:
        await world.execute(retry, Script(Boom("unreported"), "fine").function())
        return await world.execute(retry, script.function(), inner)

    assert await world.execute(PASSING, fn, outer) == "fine"
    assert (outer.attempts, outer.elapsed, outer.failures) == (1, 3.0, ())
    assert (inner.attempts, inner.elapsed, len(inner.failures)) == (3, 2.0, 2)


async def test_a_context_that_is_handed_on_to_a_nested_execution_still_tells_of_the_outer_one(
    world: World, clock: FakeClock
) -> None:
    """What the function got is not what the caller has: passing it on spoils nobody's report."""
    outer = Context()
    told: list[int] = []
    retry = Retry(on=Boom, backoff=[1.0])

    async def fn(ctx: Context) -> Any:
        result = await world.execute(retry, Script(Boom("in"), Boom("in"), "fine").function(), ctx)
        told.append(ctx.attempts)
        return result

    assert await world.execute(PASSING, fn, outer) == "fine"
    assert told == [3], "the function's own context now tells of the execution that it was passed to"
    assert (outer.attempts, outer.failures) == (1, ())


# --- sleeping, and the world -----------------------------------------------------------------


async def test_a_policy_sleeps_through_its_context(world: World, clock: FakeClock) -> None:
    """In whatever way its world sleeps."""

    class Slow(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            await ctx.sleep(2.5)
            return await call(ctx)

    assert await world.execute(Slow(), Script("fine").function()) == "fine"
    assert clock.sleeps == [2.5]


async def test_a_policy_really_waits(world: World) -> None:
    """Not only on the clock of these tests."""

    class Slow(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            await ctx.sleep(0.02)
            return ctx.runtime

    loop_time: list[float] = []

    began = time.monotonic()
    runtime = await world.execute(Slow(), Script("never").function())
    loop_time.append(time.monotonic() - began)
    assert loop_time[0] >= 0.019
    assert ("Blocking" in type(runtime).__name__) is world.blocking


async def test_a_context_outside_an_execution_is_in_the_world_of_the_code_that_asks(world: World) -> None:
    """So that `current_context().sleep` waits as everything else there does."""
    closed: list[str] = []

    class Resource:
        def close(self) -> Any:
            closed.append("blocking")

        async def aclose(self) -> None:
            closed.append("tasks")

    timers = {"threads": "BlockingTimer", "asyncio": "AsyncioTimer", "trio": "ScopeTimer"}
    with deadline(5.0) as ctx:
        await current_context().sleep(0.001)
        runtime = ctx.runtime
        timer, waiter = runtime.timer(Bulkhead(1), ctx.deadline), runtime.waiter()
        waiter.wake()
        woken = await waiter.wait(ctx.deadline, ctx)
        await runtime.close(Resource())
        with timer:
            answer = await runtime.run(lambda ctx: current_context() is ctx, own := Context(), own)
        assert [type(timer).__name__, waiter.is_alive(), woken, answer, timer.fired] == [
            timers[world.name],
            True,
            True,
            True,
            False,
        ]
    assert closed == ["blocking" if world.blocking else "tasks"]


async def test_a_context_outside_an_execution_keeps_no_failure_that_a_handler_raises_again(world: World) -> None:
    """What its runtime was handed is in no frame of that failure's traceback: no cycle."""
    watched = Watched()

    def raise_again(error: Exception) -> None:
        try:
            raise error
        finally:
            del error

    async def main() -> None:
        try:
            await Context().runtime.run(raise_again, Context(), watched.watch(Boom()))
        except Boom:
            pass

    with no_collector():
        await main()
        assert (watched.seen, watched.alive) == (1, [])


# --- the ambient context ---------------------------------------------------------------------


def test_without_an_execution_the_ambient_context_is_a_fresh_unlimited_one() -> None:
    """Code that asks for it need not know whether anybody protects it."""
    one, two = current_context(), current_context()
    assert one is not two
    assert one.deadline == INF
    assert one.timeout() is None
    assert (one.operation, one.attempt, one.attempts) == (None, 1, 0)


async def test_who_listens_to_an_execution_does_not_hear_those_inside_of_it(world: World) -> None:
    """Nor does its context count their attempts: also where the inner pipeline has been called before."""
    heard: list[str] = []
    inner = Retry(2, on=Boom, backoff=[0], name="inner").wrap(Bulkhead(1))
    outer = Retry(name="outer").wrap(Bulkhead(1), listeners=[lambda event: heard.append(event.policy)])
    ctx = Context(operation="both")
    operations: list[str | None] = []

    async def innermost() -> str:
        operations.append(current_context().operation)
        if len(operations) % 2:
            raise Boom
        return "fine"

    async def fn(ctx: Context) -> object:
        if world.blocking:
            return inner.call(world.native(innermost))
        return await inner.acall(innermost)

    await fn(ctx)
    assert await world.execute(outer, fn, ctx) == "fine"
    assert (ctx.attempts, ctx.failures) == (1, ())
    assert heard == [outer.name]
    assert operations == [None, None, "both", "both"]


@pytest.mark.parametrize("timeout_is_last_elsewhere", [False, True])
async def test_only_the_function_finds_the_context_of_a_timeout(world: World, timeout_is_last_elsewhere: bool) -> None:
    """Not the policies inside of it, nor what they call: that is the same in every world, whoever sets the variable."""
    seen: dict[str, set[float]] = {}

    def look(who: str) -> None:
        seen.setdefault(who, set()).add(current_context().deadline)

    class Looking(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            look("policy")
            try:
                return await call(ctx)
            finally:
                look("policy")

    timeout = Timeout(60.0)
    retry = Retry(
        2,
        on=lambda error: look("on") is None,
        on_result=lambda result: look("on_result") is not None,
        on_retry=lambda event: look("on_retry"),
        backoff=[0],
    )

    if timeout_is_last_elsewhere:
        await world.execute(Retry().wrap(timeout), Script("fine").function())
    script = Script(Boom(), "fine")

    async def fn(ctx: Context) -> Any:
        look("function")
        return await script.function()(ctx)

    for _ in range(2):
        await world.attempt(timeout.wrap(Looking(), retry), fn)
    assert all(deadline < INF for deadline in seen.pop("function"))
    assert seen == {"policy": {INF}, "on": {INF}, "on_result": {INF}, "on_retry": {INF}}


async def test_inside_a_function_the_ambient_context_is_its_own(world: World, clock: FakeClock) -> None:
    """The one that was passed to it, attempt by attempt; afterwards it is gone."""
    same: list[bool] = []

    async def fn(ctx: Context) -> None:
        same.append(current_context() is ctx)
        raise Boom

    await world.attempt(Retry(2, on=Boom, backoff=[0]).wrap(Timeout(5.0)), fn)
    assert current_context().deadline == INF
    assert same == [True, True]


async def test_a_function_that_takes_no_context_finds_it(world: World) -> None:
    """`call`, decorators and proxies pass only the function's own arguments."""

    async def fn(word: str) -> tuple[str, str | None, bool]:
        return word, current_context().operation, current_context().remaining() <= 5.0

    async def main() -> object:
        with deadline(5.0):
            if world.blocking:
                return Retry().call(world.native(fn), "hello")
            return await Retry().acall(fn, "hello")

    assert await main() == ("hello", None, True)


async def test_a_nested_execution_inherits_deadline_operation_and_properties(world: World, clock: FakeClock) -> None:
    """Without a word in between: somebody else's library, called inside, obeys the same budget."""
    seen: list[Context] = []

    async def inner(ctx: Context) -> None:
        seen.append(ctx)

    async def outer(ctx: Context) -> None:
        clock.advance(2.0)
        await world.execute(PASSING, inner)

    await world.execute(PASSING, outer, Context(timeout=8.0, operation="op", properties={"a": 1}))
    [ctx] = seen
    assert (ctx.remaining(), ctx.operation, dict(ctx.properties)) == (6.0, "op", {"a": 1})
    assert ctx.attempt == 1


@pytest.mark.parametrize(("ambient", "given", "left"), [(5.0, 9.0, 5.0), (9.0, 5.0, 5.0), (5.0, None, 5.0)])
async def test_an_explicit_context_inside_a_budget_holds_as_long_as_the_earlier_of_the_two(
    world: World, clock: FakeClock, ambient: float, given: float | None, left: float
) -> None:
    """Budgets only shorten, also where somebody brings his own."""
    seen: list[Context] = []

    async def fn(ctx: Context) -> None:
        seen.append(ctx)

    own = Context(timeout=given, operation="own")

    with deadline(ambient):
        await world.execute(PASSING, fn, own)
    assert seen[0].remaining() == left
    assert seen[0].operation == "own"
    assert own.remaining() == (INF if given is None else given), "the caller's own context is not changed"


async def test_a_nested_retry_gives_up_at_the_outer_deadline(world: World, clock: FakeClock) -> None:
    """No sleep that cannot pay off, whoever set the limit."""
    script = Script(Boom("no"))

    async def outer(ctx: Context) -> None:
        await world.execute(Retry(None, on=Boom, backoff=[2.0]), script.function())

    assert isinstance(await world.attempt(Timeout(5.0, cooperative=True), outer), Boom)
    assert clock.sleeps == [2.0, 2.0]
    assert script.calls == 3


async def test_the_ambient_context_follows_into_tasks(tasks_world: World) -> None:
    """A task is started with a copy of its parent's variables; what it does there is its own."""
    seen: list[tuple[str | None, float]] = []

    async def child() -> None:
        ctx = current_context()
        seen.append((ctx.operation, ctx.deadline))
        with deadline(0.5):
            await anyio.sleep(0)

    async def fn(ctx: Context) -> float:
        async with anyio.create_task_group() as group:
            group.start_soon(child)
            group.start_soon(child)
        assert current_context() is ctx, "a child's own block changes nothing here"
        return ctx.deadline

    limit = float(await PASSING.aexecute(fn, Context(timeout=5.0, operation="op")))
    assert seen == [("op", limit)] * 2


async def test_tasks_side_by_side_have_their_own_ambient_contexts(tasks_world: World) -> None:
    """They wait in the middle of each other's functions, and nobody sees another's context."""
    wrong: list[object] = []

    async def fn(ctx: Context) -> None:
        for _ in range(5):
            await anyio.sleep(0)
            if current_context() is not ctx:
                wrong.append(ctx)

    async def one(number: int) -> None:
        await Retry().wrap(Timeout(5.0)).aexecute(fn, Context(operation=str(number)))
        if current_context().operation is not None:
            wrong.append(number)

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(one, number)
    assert wrong == []


async def test_the_ambient_context_follows_through_anyio_to_thread_and_back(tasks_world: World) -> None:
    """What a worker thread executes there is a nested execution, and so is what it sends back to the loop."""
    seen: list[tuple[str, str | None, float]] = []

    def note(where: str) -> None:
        ctx = current_context()
        seen.append((where, ctx.operation, ctx.deadline))

    async def in_the_loop_again() -> None:
        note("loop")

    def in_the_thread() -> None:
        note("thread")
        Retry().execute(lambda ctx: note("nested"))
        anyio.from_thread.run(in_the_loop_again)

    async def fn(ctx: Context) -> float:
        await anyio.to_thread.run_sync(in_the_thread)
        return ctx.deadline

    limit = float(await PASSING.aexecute(fn, Context(timeout=5.0, operation="op")))
    assert seen == [("thread", "op", limit), ("nested", "op", limit), ("loop", "op", limit)]


def test_the_workers_of_a_timeout_see_the_callers_context(threads: World) -> None:
    """And its other context variables: they run in a copy of them."""
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")
    tenant.set("acme")
    here = threading.get_ident()

    def fn(ctx: Context) -> tuple[bool, str, bool]:
        found = tenant.get()
        tenant.set("changed on the worker")
        nested = Retry().execute(lambda inner: inner.deadline)
        return current_context() is ctx and nested == ctx.deadline, found, threading.get_ident() != here

    assert Timeout(5.0).execute(fn, Context(timeout=8.0)) == (True, "acme", True)
    assert tenant.get() == "acme"
    assert current_context().deadline == INF


def test_a_plain_thread_begins_without_a_context(threads: World) -> None:
    """`threading.Thread` copies no context variables: there it is a fresh one, and no error."""
    found: list[float] = []

    def fn(ctx: Context) -> None:
        thread = threading.Thread(target=lambda: found.append(current_context().deadline))
        thread.start()
        thread.join()

    Retry().execute(fn, Context(timeout=5.0))
    assert found == [INF]


async def test_the_ambient_context_is_put_back_whatever_happens(world: World) -> None:
    """After a failure, and after an interrupt."""

    for error in (Boom(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            await world.execute(PASSING, Script(error).function(), Context(timeout=5.0))
        assert current_context().deadline == INF


class Waiting:
    """Suspends whoever awaits it, and notes when that is over."""

    def __init__(self) -> None:
        self.is_closed = False

    def __await__(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.is_closed = True


def test_an_execution_that_is_closed_from_elsewhere_ends_in_peace() -> None:
    """A coroutine that is thrown away half-way may be closed in another context: no error of ours is added."""
    waiting = Waiting()

    async def fn(ctx: Context) -> None:
        await waiting

    coroutine = Retry().wrap(Bulkhead(1)).aexecute(fn)
    contextvars.copy_context().run(coroutine.send, None)
    coroutine.close()
    assert waiting.is_closed


def test_a_handler_that_is_closed_from_elsewhere_ends_in_peace() -> None:
    """The same while a fallback's handler waits: in other variables there is no context to restore."""
    waiting = Waiting()

    async def handler(failure: object, ctx: Context) -> None:
        await waiting

    coroutine = Fallback(handler=handler).aexecute(Script(Boom()).function(), Context(timeout=60.0))
    elsewhere = contextvars.copy_context()
    elsewhere.run(coroutine.send, None)
    assert elsewhere.run(current_context).deadline < INF
    coroutine.close()
    assert waiting.is_closed
    assert current_context().deadline == INF


async def test_a_handler_sees_the_context_of_its_execution(world: World) -> None:
    """It may call out as well: then the same budget holds."""

    def handler(failure: object, ctx: Context) -> bool:
        return current_context() is ctx

    assert await world.execute(Fallback(handler=handler), Script(Boom()).function(), Context(timeout=5.0)) is True


def test_remaining_seconds_cross_from_one_world_to_another(clock: FakeClock) -> None:
    """Neither event loop has the process clock: under a fake one the budget is still so many seconds."""
    for name in ("asyncio", "trio"):

        async def main() -> float:
            with deadline(3600.0):
                clock.advance(600.0)
                return float(await Timeout(7200.0).aexecute(remaining))

        async def remaining(ctx: Context) -> float:
            await anyio.sleep(0)
            return ctx.remaining()

        assert World(name).run(main) == 3000.0


def test_the_deadline_is_infinite_not_merely_large() -> None:
    """`math.isinf` is how one asks for "no limit"."""
    assert math.isinf(Context().deadline)
    assert math.isinf(Context().remaining())
