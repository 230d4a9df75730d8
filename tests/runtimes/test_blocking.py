"""Blocking code: a policy that suspends is reported by name, as a bug."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import pytest
import trio

from resilience import Bulkhead, Context, Failure, Fallback, Policy, Retry, Timeout
from resilience.errors import SuspensionMisuse
from resilience.events import ExecutionFinished
from resilience.runtimes import lowering
from tests.conftest import nothing_is_left_unawaited
from tests.custom import Driven, HandingOn
from tests.functions import raising


@pytest.fixture(params=["lowered", "driven"], autouse=True)
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(lowering, "enabled", request.param == "lowered")
    return str(request.param)


class Suspends:
    """An awaitable that suspends."""

    def __await__(self) -> Generator[Any, Any, None]:
        yield


class Forgetful(Policy):
    """Awaits something else than its call and what its context offers."""

    def __init__(self) -> None:
        self.left = 0

    async def around(self, call: Any, ctx: Context) -> Any:
        try:
            await Suspends()
            return await call(ctx)
        finally:
            self.left += 1


class Helped(Policy):
    """Does so in a helper coroutine."""

    async def helper(self) -> None:
        await asyncio.sleep(0)

    async def around(self, call: Any, ctx: Context) -> Any:
        await self.helper()
        return await call(ctx)


class AfterTheCall(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        await call(ctx)
        await Suspends()


class SuspendsDriven(Driven):
    """Is driven in any case."""

    async def pass_on(self, call: Any, ctx: Context) -> Any:
        await Suspends()
        return await call(ctx)


class Sleeping(Policy):
    """Awaits what raises at once where no event loop runs."""

    async def around(self, call: Any, ctx: Context) -> Any:
        await asyncio.sleep(1)
        return await call(ctx)


class SleepsDriven(Driven):
    """Does so, and is driven in any case."""

    async def pass_on(self, call: Any, ctx: Context) -> Any:
        await trio.sleep(1)
        return await call(ctx)


@pytest.mark.parametrize("kind", [Forgetful, Helped, AfterTheCall, SuspendsDriven, Sleeping, SleepsDriven])
def test_a_suspension_is_an_error_that_names_the_policy(kind: Callable[[], Policy[Any]]) -> None:
    """Alone and between others; the error says what a policy may await."""
    policy = kind()
    for pipeline in (
        policy,
        Fallback("x").wrap(policy),
        Retry().wrap(policy, Timeout(5.0, cooperative=True)),
        Timeout(5.0).wrap(Bulkhead(1), policy),
    ):
        with (
            nothing_is_left_unawaited(),
            pytest.raises(RuntimeError, match=f"^{type(policy).__name__} suspended") as caught,
        ):
            pipeline.execute(lambda ctx: "fine")
        assert "only its call and what ctx and ctx.runtime offer" in str(caught.value)


def test_a_policy_that_suspends_is_closed() -> None:
    """Its `finally` runs at once, and permits are released."""
    policy = Forgetful()
    bulkhead = Bulkhead(1)
    with pytest.raises(SuspensionMisuse):
        bulkhead.wrap(policy).execute(lambda ctx: "fine")
    assert policy.left == 1
    assert bulkhead.stats().in_flight == 0


class Catching(Policy):
    """Answers every error."""

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


@pytest.mark.parametrize("make", [lambda: Catching().wrap(Forgetful()), CatchingItself], ids=["outside", "inside"])
def test_a_suspension_is_reported_although_a_policy_catches_every_error(make: Callable[[], Policy[Any]]) -> None:
    with pytest.raises(SuspensionMisuse):
        make().execute(lambda ctx: "fine")


@pytest.mark.parametrize("policy", [Retry(), Driven(), Driven().wrap(Retry(), Driven())])
def test_a_function_that_needs_an_event_loop_is_no_suspension_of_a_policy(policy: Policy[Any]) -> None:
    """Its error is an outcome like any other."""

    def function() -> None:
        asyncio.sleep(1).send(None)

    with pytest.raises(RuntimeError, match=r"^no running event loop$"):
        policy.call(function)
    assert Fallback("x").wrap(policy).call(function) == "x"


def test_a_runtime_error_of_a_handler_is_no_suspension() -> None:
    """It is raised as it is."""
    with pytest.raises(RuntimeError, match=r"^busy$"):
        Fallback(handler=raising(RuntimeError("busy"))).execute(lambda ctx: 1 / 0)


def test_a_suspension_is_the_outcome_in_the_event_of_the_execution() -> None:
    ended: list[ExecutionFinished] = []
    ctx = Context()
    pipeline = Catching().wrap(Forgetful(), listeners=[lambda event: ended.append(event)])
    with pytest.raises(SuspensionMisuse) as caught:
        pipeline.execute(lambda ctx: "fine", ctx)
    (event,) = ended
    assert event.outcome == Failure(caught.value)
    assert event.cancelled_by is None
    assert ctx.failures == ()


def test_a_suspension_under_a_timeout_is_reported() -> None:
    """Also if the function that meets it runs on a worker."""
    inner = Catching().wrap(Forgetful())
    with pytest.raises(SuspensionMisuse, match=r"^Forgetful suspended"):
        Timeout(5.0).call(inner.call, lambda: "fine")
    with pytest.raises(SuspensionMisuse, match=r"^Forgetful suspended"):
        Timeout(5.0).wrap(inner).call(lambda: "fine")


def test_a_suspension_in_a_policy_called_by_another_one_names_the_inner_one() -> None:
    with pytest.raises(SuspensionMisuse, match=r"^Forgetful suspended"):
        HandingOn(Forgetful()).execute(lambda ctx: "fine")


def test_a_policy_that_suppresses_its_closing_is_reported() -> None:
    """By Python's own error, or that of this library."""

    class Stubborn(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            try:
                await Suspends()
            except GeneratorExit:
                await Suspends()

    with pytest.raises(RuntimeError):
        Stubborn().execute(lambda ctx: "fine")
