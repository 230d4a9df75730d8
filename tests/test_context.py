"""Contexts: the remaining time, the facts of an execution, and its report."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from resilience import CircuitBreaker, Context, Policy, Retry, Timeout, current_context, deadline
from resilience.errors import CircuitOpen, DeadlineExceeded, TimeoutExceeded
from tests.conftest import Boom, FakeClock, Script, Watched, World, no_collector
from tests.custom import INF, PASSING
from tests.functions import raising

# --- time --------------------------------------------------------------------------------------


def test_a_context_without_a_timeout_has_an_infinite_deadline(clock: FakeClock) -> None:
    ctx = Context()
    assert ctx.deadline == INF
    assert ctx.remaining() == INF
    assert not ctx.expired
    assert ctx.timeout() is None
    assert ctx.timeout(3) == 3.0
    clock.advance(1e9)
    assert ctx.check() is None  # type: ignore[func-returns-value]


def test_a_timeout_counts_from_now_on_the_process_clock(clock: FakeClock) -> None:
    ctx = Context(timeout=timedelta(seconds=8))
    assert ctx.deadline == clock.now() + 8.0
    assert ctx.remaining() == 8.0
    clock.advance(3.0)
    assert ctx.remaining() == 5.0
    assert not ctx.expired
    ctx.check()


def test_a_deadline_has_passed_at_its_very_instant(clock: FakeClock) -> None:
    """The remaining time is then zero, and never negative."""
    ctx = Context(timeout=2.0)
    clock.advance(2.0)
    assert ctx.expired
    assert ctx.remaining() == 0.0
    with pytest.raises(DeadlineExceeded):
        ctx.check()
    clock.advance(100.0)
    assert ctx.remaining() == 0.0


def test_the_timeout_for_a_client_is_the_smaller_of_the_limit_and_the_remaining_time(clock: FakeClock) -> None:
    ctx = Context(timeout=5.0)
    assert ctx.timeout() == 5.0
    assert ctx.timeout(2.0) == ctx.timeout(timedelta(seconds=2)) == 2.0
    assert ctx.timeout(20.0) == 5.0
    assert ctx.timeout(INF) == 5.0
    clock.advance(4.5)
    assert ctx.timeout(2.0) == 0.5
    assert Context().timeout(INF) is None


def test_the_timeout_for_a_client_has_an_upper_bound(clock: FakeClock) -> None:
    """Many clients count milliseconds in 31 bits, and fail, or time out at once, beyond that."""
    longest = 2_147_483.0
    assert Context(timeout=1e10).timeout() == Context(timeout=1e300).timeout() == longest
    assert Context().timeout(1e10) == Context(timeout=1e10).timeout(1e9) == longest
    assert Context(timeout=longest).timeout() == longest
    assert Context(timeout=1e10).timeout(2.0) == 2.0


def test_the_timeout_for_a_client_is_never_zero(clock: FakeClock) -> None:
    """Zero means "no timeout" to aiohttp, redis, grpc and SQL, so an exceeded deadline raises."""
    ctx = Context(timeout=1.0)
    clock.advance(1.0)
    for limit in (None, 5.0):
        with pytest.raises(DeadlineExceeded):
            ctx.timeout(limit)
    with pytest.raises(ValueError, match="limit"):
        Context().timeout(0)


def test_the_timeout_for_a_client_reads_the_clock_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second reading could make it zero."""
    ctx = Context(timeout=1.0)
    readings = iter([ctx.deadline - 0.001, ctx.deadline])
    monkeypatch.setattr("resilience.clock.clock.now", lambda: next(readings))
    assert ctx.timeout() == pytest.approx(0.001)
    with pytest.raises(DeadlineExceeded):
        ctx.timeout()


# --- operation, properties, attempt ------------------------------------------------------------


def test_properties_are_an_immutable_copy() -> None:
    """Contexts are shared by threads and tasks."""
    given = {"tenant": "acme"}
    ctx = Context(properties=given)
    given["tenant"] = "other"
    assert ctx.properties == {"tenant": "acme"}
    with pytest.raises(TypeError):
        ctx.properties["tenant"] = "other"  # type: ignore[index]


def test_a_child_inherits_and_can_only_shorten_the_deadline(clock: FakeClock) -> None:
    ctx = Context(timeout=5.0, operation="op", properties={"a": 1})
    child = ctx.child(deadline=ctx.deadline - 3.0, attempt=2)
    grandchild = child.child(deadline=ctx.deadline + 100.0)
    assert (child.remaining(), child.attempt) == (2.0, 2)
    assert (grandchild.remaining(), grandchild.attempt) == (2.0, 2)
    assert (ctx.remaining(), ctx.attempt) == (5.0, 1)
    for derived in (child, grandchild):
        assert derived.operation == "op"
        assert derived.properties == {"a": 1}
        assert isinstance(derived, Context)
    assert ctx.child().deadline == ctx.deadline


def test_the_repr_of_a_context_shows_its_operation_remaining_time_and_attempt() -> None:
    assert repr(Context()) == "<Context attempt=1>"
    text = repr(Context(timeout=5, operation="get-user"))
    assert text.startswith("<Context operation='get-user' remaining=")
    assert text.endswith(" attempt=1>")


# --- the report --------------------------------------------------------------------------------


async def test_the_report_contains_attempts_elapsed_time_and_failures(world: World, clock: FakeClock) -> None:
    ctx = Context()
    script = Script(Boom("one"), Boom("two"), "fine")
    assert await world.execute(Retry(on=Boom, backoff=[1.5, 2.5]), script.function(), ctx) == "fine"
    clock.advance(100.0)
    assert ctx.attempts == 3
    assert ctx.elapsed == 4.0, "it still grows after the end of the execution"
    assert [(failed.type, failed.message) for failed in ctx.failures] == [("Boom", "one"), ("Boom", "two")]
    assert [str(failed) for failed in ctx.failures] == ["Boom(one)", "Boom(two)"]


def test_the_elapsed_time_is_not_negative_if_the_clock_is_set_back(clock: FakeClock) -> None:
    """As when virtual time, which begins at 0, begins inside the function."""
    ctx = Context()
    Retry().execute(lambda inner: clock.advance(-500.0), ctx)
    assert ctx.elapsed == 0.0


def test_a_failure_is_described_on_one_line() -> None:
    """Messages of some clients have many lines."""
    ctx = Context()
    Retry(1, on=Boom).capture(raising(Boom("terminated with:\n\tstatus = 14\n")), ctx)
    assert [str(failed) for failed in ctx.failures] == ["Boom(terminated with: status = 14)"]


async def test_the_report_is_available_during_the_execution(world: World, clock: FakeClock) -> None:
    """The function reads it from its own context."""
    seen: list[tuple[int, float, int]] = []
    fn = Script(Boom(), doing=lambda ctx: seen.append((ctx.attempts, ctx.elapsed, len(ctx.failures)))).function()
    await world.attempt(Retry(3, on=Boom, backoff=[1.0]), fn, Context())
    assert seen == [(1, 0.0, 0), (2, 1.0, 1), (3, 2.0, 2)]


async def test_of_many_failures_the_first_and_the_last_three_are_kept(world: World, clock: FakeClock) -> None:
    ctx = Context()
    script = Script(*(Boom(f"number {n}") for n in range(1, 51)), "fine")
    assert await world.execute(Retry(None, on=Boom, backoff=[1.0]), script.function(), ctx) == "fine"
    assert ctx.attempts == 51
    assert [failed.message for failed in ctx.failures] == [f"number {n}" for n in (1, 2, 3, 48, 49, 50)]


async def test_messages_in_the_report_are_bounded(world: World) -> None:
    ctx = Context()
    await world.attempt(PASSING, Script(Boom("x" * 100_000)).function(), ctx)
    [failed] = ctx.failures
    assert failed.message.startswith("xxx")
    assert len(failed.message) < 1_000


async def test_failures_are_kept_as_text(world: World) -> None:
    """An exception would keep the frames of the call alive; a result might be a secret."""
    ctx = Context()
    retry = Retry(2, on=Boom, on_result=lambda result: result == "secret", backoff=[0])
    await world.execute(retry, Script("secret").function(), ctx)
    assert [tuple(failed) for failed in ctx.failures] == [("result", "str")] * 2
    assert all(type(text) is str for failed in ctx.failures for text in failed)


async def test_a_rejected_attempt_is_a_failed_attempt_without_a_call(world: World, clock: FakeClock) -> None:
    """The circuit refuses the second one: one call, two failed attempts."""
    ctx = Context()
    pipeline = Retry(2, on=(Boom, CircuitOpen), backoff=[1.0]).wrap(CircuitBreaker(1))
    await world.attempt(pipeline, Script(Boom("no")).function(), ctx)
    assert ctx.attempts == 1
    assert [failed.type for failed in ctx.failures] == ["Boom", "CircuitOpen"]


async def test_an_attempt_that_was_cut_off_is_reported_as_a_timeout(world: World) -> None:
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


async def test_an_error_that_a_policy_raises_instead_of_another_is_reported_too(world: World) -> None:
    """Even if it could get the address of the other one, which the policy has dropped. None is kept after the end."""
    watched = Watched()

    class Translating(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            try:
                return await call(ctx)
            except Boom as error:
                address = id(error)
            raise next((it for it in [Boom() for _ in range(100)] if id(it) == address), watched.watch(Boom("another")))

    ctx = Context()
    with no_collector():
        await world.attempt(Retry(2, on=Boom, backoff=[0]).wrap(Translating()), watched.fn, ctx)
        assert [failed.message for failed in ctx.failures] == ["", "another"] * 2
        assert (watched.seen, watched.alive) == (6, [])


async def test_a_failure_that_a_policy_makes_of_a_result_is_a_failed_attempt(world: World, clock: FakeClock) -> None:
    """As `raise_for_status` in a custom policy."""

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


async def test_nested_retries_report_each_failure_once(world: World, clock: FakeClock) -> None:
    """A rejection that passes through both is one failure of one attempt."""
    ctx = Context()
    breaker = CircuitBreaker()
    breaker.isolate()
    pipeline = Retry(1, on=CircuitOpen).wrap(Retry(1, on=CircuitOpen), breaker)
    await world.attempt(pipeline, Script("never").function(), ctx)
    assert ctx.attempts == 0
    assert [failed.type for failed in ctx.failures] == ["CircuitIsolated"]


async def test_a_deadline_exceeded_inside_is_reported_as_the_callers_timeout(world: World, clock: FakeClock) -> None:
    """Once, after any number of failures."""
    for failures in (0, 2, 3, 4, 9):
        ctx = Context()

        async def fn(inner: Context, failures: int = failures) -> None:
            if inner.attempt <= failures:
                raise Boom(str(inner.attempt))
            clock.advance(20.0)
            inner.check()

        pipeline = Timeout(10.0, cooperative=True).wrap(Retry(None, on=Boom, backoff=[0]))
        assert type(await world.attempt(pipeline, fn, ctx)) is TimeoutExceeded
        reported = [failed.type for failed in ctx.failures]
        assert reported == ["Boom"] * (len(reported) - 1) + ["TimeoutExceeded"]
        assert len(reported) == min(failures + 1, 6)


async def test_a_misuse_is_no_failure_of_the_call(world: World) -> None:
    ctx = Context()
    with pytest.raises(TypeError, match="await"):
        if world.blocking:
            Retry().execute(lambda ctx: asyncio.sleep(0), ctx)
        else:
            await Retry().aexecute(lambda ctx: 5, ctx)  # type: ignore[arg-type,return-value]
    assert ctx.failures == ()


async def test_a_context_that_is_used_again_reports_the_last_execution(world: World, clock: FakeClock) -> None:
    """The deadline stays the same."""
    ctx = Context(timeout=10.0)
    retry = Retry(on=Boom, backoff=[1.0])
    reports = []
    for script in (Script(Boom("no"), "fine"), Script("fine")):
        await world.execute(retry, script.function(), ctx)
        reports.append((ctx.attempts, ctx.elapsed, len(ctx.failures), ctx.remaining()))
    assert reports == [(2, 1.0, 1, 9.0), (1, 0.0, 0, 9.0)]


async def test_a_nested_execution_reports_to_its_own_context_only(world: World, clock: FakeClock) -> None:
    outer, inner = Context(), Context()
    retry = Retry(on=Boom, backoff=[1.0])
    script = Script(Boom("in"), Boom("in"), "fine")

    async def fn(ctx: Context) -> Any:
        await world.execute(retry, Script(Boom("unreported"), "fine").function())
        return await world.execute(retry, script.function(), inner)

    assert await world.execute(PASSING, fn, outer) == "fine"
    assert (outer.attempts, outer.elapsed, outer.failures) == (1, 3.0, ())
    assert (inner.attempts, inner.elapsed, len(inner.failures)) == (3, 2.0, 2)


async def test_a_context_passed_to_a_nested_execution_reports_the_outer_one(world: World, clock: FakeClock) -> None:
    """The function's context is another object than the caller's."""
    outer = Context()
    attempts: list[int] = []
    retry = Retry(on=Boom, backoff=[1.0])

    async def fn(ctx: Context) -> Any:
        result = await world.execute(retry, Script(Boom("in"), Boom("in"), "fine").function(), ctx)
        attempts.append(ctx.attempts)
        return result

    assert await world.execute(PASSING, fn, outer) == "fine"
    assert attempts == [3], "the function's own context reports the execution that it was passed to"
    assert (outer.attempts, outer.failures) == (1, ())


# --- sleeping, and contexts outside of executions ---


async def test_a_context_outside_an_execution_has_the_runtime_of_the_calling_code(world: World) -> None:
    """So `current_context().sleep` waits as the other code there does."""
    closed: list[str] = []

    class Resource:
        def close(self) -> Any:
            closed.append("blocking")

        async def aclose(self) -> None:
            closed.append("tasks")

    with deadline(5.0) as ctx:
        await current_context().sleep(0.001)
        runtime = ctx.runtime
        timer, waiter = runtime.timer(ctx.deadline), runtime.waiter()
        waiter.wake()
        woken = await waiter.wait(ctx.deadline, None)
        await runtime.close(Resource())
        with timer:
            answer = await runtime.run(lambda *args: args == (ctx, 1) and current_context() is ctx, ctx, 1)
        assert (waiter.is_alive(), woken, answer, timer.fired) == (True, True, True, False)
    assert closed == ["blocking" if world.blocking else "tasks"]


async def test_a_context_outside_an_execution_keeps_no_failure_alive(world: World) -> None:
    """The traceback of a failure that a handler raises again does not refer to it: no cycle."""
    watched = Watched()

    def raise_again(error: Exception) -> None:
        try:
            raise error
        finally:
            del error

    with no_collector():
        try:
            await Context().runtime.run(raise_again, watched.watch(Boom()))
        except Boom:
            pass
        assert (watched.seen, watched.alive) == (1, [])
