"""Blocking code: a policy that suspends there is reported as the bug that it is, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import pytest

from resilience import Bulkhead, CircuitBreaker, CircuitState, Context, Failure, Fallback, Policy, Retry, Timeout
from resilience.errors import SuspensionMisuse
from resilience.events import ExecutionFinished
from resilience.runtimes import lowering
from tests.conftest import World, nothing_is_left_unawaited


@pytest.fixture(params=["lowered", "driven"], autouse=True)
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(lowering, "enabled", request.param == "lowered")
    return str(request.param)


class Suspends:
    """An awaitable that is not done."""

    def __await__(self) -> Generator[Any, Any, None]:
        yield


class Forgetful(Policy):
    """Awaits something that is neither its call nor of its context."""

    def __init__(self) -> None:
        self.left = 0

    async def around(self, call: Any, ctx: Context) -> Any:
        try:
            await Suspends()
            return await call(ctx)
        finally:
            self.left += 1


class Helped(Policy):
    """The same, somewhere further down."""

    async def helper(self) -> None:
        await asyncio.sleep(0)

    async def around(self, call: Any, ctx: Context) -> Any:
        await self.helper()
        return await call(ctx)


class AfterTheCall(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        await call(ctx)
        await Suspends()


class HandingOn(Policy):
    """Driven in any case."""

    async def helper(self, call: Any, ctx: Context) -> Any:
        await Suspends()
        return await call(ctx)

    async def around(self, call: Any, ctx: Context) -> Any:
        return await self.helper(call, ctx)


class Unnamed(Forgetful):
    """Inherits the mistake."""


@pytest.mark.parametrize("kind", [Forgetful, Helped, AfterTheCall, HandingOn])
def test_a_suspension_names_the_policy(kind: Callable[[], Policy[Any]]) -> None:
    """Alone, and between others; the error says what a policy may await."""
    policy = kind()
    for pipeline in (
        policy,
        Retry().wrap(policy, Timeout(5.0, cooperative=True)),
        Timeout(5.0).wrap(Bulkhead(1), policy),
    ):
        with (
            nothing_is_left_unawaited(),
            pytest.raises(RuntimeError, match=f"^{type(policy).__name__} suspended") as caught,
        ):
            pipeline.execute(lambda ctx: "fine")
        assert "only its call and what ctx and ctx.runtime offer" in str(caught.value)


def test_an_inherited_suspension_names_a_class_that_one_finds() -> None:
    """The one whose code it is, or the one that was used."""
    with pytest.raises(SuspensionMisuse, match=r"^(Forgetful|Unnamed) suspended"):
        Unnamed().execute(lambda ctx: "fine")


def test_a_policy_that_suspends_is_closed() -> None:
    """Its `finally` runs at once, and what it holds is given back."""
    policy = Forgetful()
    bulkhead = Bulkhead(1)
    with pytest.raises(SuspensionMisuse):
        bulkhead.wrap(policy).execute(lambda ctx: "fine")
    assert policy.left == 1
    assert bulkhead.stats().in_flight == 0


def test_a_suspension_is_no_outcome() -> None:
    """It is a bug of the policy's: not retried, counted or answered by those around it."""
    seen: list[Any] = []
    policy = Forgetful()
    breaker = CircuitBreaker(1, on=lambda error: True)
    pipeline = Fallback("x", on=lambda error: True, on_fallback=seen.append).wrap(
        Retry(3, on=lambda error: True, backoff=[0], on_retry=seen.append), breaker, policy
    )
    with pytest.raises(SuspensionMisuse):
        pipeline.execute(lambda ctx: "fine")
    with pytest.raises(SuspensionMisuse):
        pipeline.capture(lambda ctx: "fine")
    assert seen == []
    assert policy.left == 2
    assert breaker.state is CircuitState.CLOSED


class Catching(Policy):
    """Takes every error for an answer."""

    async def around(self, call: Any, ctx: Context) -> Any:
        try:
            return await call(ctx)
        except Exception:
            return "answered"


class CatchingItself(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        try:
            await Suspends()
        except Exception:
            return "answered"


@pytest.mark.parametrize("make", [lambda: Catching().wrap(Forgetful()), CatchingItself], ids=["around it", "in it"])
def test_a_suspension_is_reported_past_a_policy_that_catches_every_error(
    make: Callable[[], Policy[Any]],
) -> None:
    """A bug is not to be taken for a failure of the call."""
    with pytest.raises(SuspensionMisuse):
        make().execute(lambda ctx: "fine")


def test_a_suspension_is_what_the_execution_ended_with() -> None:
    """In its event and in its record, as in what is raised."""
    ended: list[ExecutionFinished] = []
    ctx = Context()
    pipeline = Catching().wrap(Forgetful(), listeners=[lambda it: ended.append(it)])
    with pytest.raises(SuspensionMisuse) as caught:
        pipeline.execute(lambda ctx: "fine", ctx)
    (event,) = ended
    assert event.outcome == Failure(caught.value)
    assert event.cancelled_by is None
    assert ctx.failures == ()


def test_a_suspension_under_a_timeout_is_no_timeout() -> None:
    """Also where the function that meets it runs in a thread of its own."""
    inner = Catching().wrap(Forgetful())
    with pytest.raises(SuspensionMisuse, match=r"^Forgetful suspended"):
        Timeout(5.0).call(inner.call, lambda: "fine")
    with pytest.raises(SuspensionMisuse, match=r"^Forgetful suspended"):
        Timeout(5.0).wrap(inner).call(lambda: "fine")


def test_a_suspension_in_a_policy_that_another_one_runs_names_the_inner_one() -> None:
    """The one whose code it is."""

    class Running(Policy):
        inner = Forgetful()

        async def around(self, call: Any, ctx: Context) -> Any:
            await self.inner.around(Retry().around, ctx)
            return await call(ctx)

    with pytest.raises(SuspensionMisuse, match=r"^Forgetful suspended"):
        Running().execute(lambda ctx: "fine")


async def test_the_same_policy_may_well_suspend_in_a_task(in_asyncio: World) -> None:
    """There an await is an await (though `ctx` is the better choice, as trio has no asyncio.sleep)."""

    async def fine(ctx: Context) -> str:
        return "fine"

    assert await Retry().wrap(Helped()).aexecute(fine) == "fine"


def test_a_policy_that_swallows_its_being_closed_is_reported_all_the_same() -> None:
    """Python's own error, or ours: no silence."""

    class Stubborn(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            try:
                await Suspends()
            except GeneratorExit:
                await Suspends()

    with pytest.raises(RuntimeError):
        Stubborn().execute(lambda ctx: "fine")


def test_an_awaitable_that_is_done_may_be_awaited_whatever_it_is() -> None:
    """A policy may await an object of its own that has nothing to wait for."""

    class Done:
        def __await__(self) -> Generator[Any, Any, str]:
            return "done"
            yield

    class Waits(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            return await Done(), await call(ctx)

    assert Waits().execute(lambda ctx: "fine") == ("done", "fine")


def test_an_error_of_asyncios_own_without_a_loop_comes_out() -> None:
    """`asyncio.sleep(1)` asks for the running loop first: what it says is clear enough."""

    class Sleeps(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            await asyncio.sleep(1)

    outcome = Sleeps().capture(lambda ctx: "fine")
    assert isinstance(outcome, Failure)
    assert "running event loop" in str(outcome.error)
