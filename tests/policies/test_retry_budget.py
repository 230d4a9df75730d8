"""Retry with a budget: what retries cost, what calls earn, and when a retry is refunded."""

from __future__ import annotations

import contextlib
import gc
from functools import partial
from typing import Any

import anyio
import pytest

from resilience import CircuitBreaker, Context, Rate, RateLimiter, Retry, RetryBudget, events
from resilience.errors import CircuitOpen, DeadlineExceeded, RateLimited, Rejected
from tests.conftest import Boom, FakeClock, Script, Virtual, World
from tests.functions import quick, raising
from tests.policies.retries import Attempts, Response, bad, notes_of, run
from tests.test_repeats import CustomBudget


def reasons(heard: list[Any]) -> list[str]:
    return [event.reason for event in heard if isinstance(event, events.RetryGaveUp)]


def spent(heard: list[Any]) -> list[tuple[str, str]]:
    return [(event.policy, event.repeat) for event in heard if isinstance(event, events.BudgetSpent)]


async def test_a_spent_budget_ends_with_the_last_failure(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """It is raised at once with its note, and the event gives the reason."""
    budget = RetryBudget(0, saved=1)
    error = await run(world, Retry(3, on=Boom, backoff=[60], budget=budget, name="r"), Script(Boom("a"), Boom("b")))
    assert error.args == ("b",)
    assert "2 attempts" in notes_of(error)[0]
    assert clock.sleeps == [60]
    assert (reasons(heard), spent(heard)) == (["budget"], [("r", "retry")])


async def test_retries_of_bad_results_cost_and_bad_results_earn_nothing(world: World, clock: FakeClock) -> None:
    budget = RetryBudget(1.0, saved=2)
    result = await run(
        world, Retry(9, on_result=bad, backoff=[0], budget=budget), Script(*[Response() for _ in range(9)])
    )
    assert result.closed == 0
    assert (budget.balance, budget.refused) == (0, 1)


async def test_only_successful_calls_earn(world: World, clock: FakeClock) -> None:
    """Neither unhandled errors nor refusals do."""
    budget = RetryBudget(0.5, saved=1)
    retry = Retry(2, on=Boom, backoff=[0], budget=budget)
    await run(world, retry, Script(Boom()))
    for error in (ValueError(), CircuitOpen("open")):
        await run(world, retry, Script(error))
    assert budget.balance == 0
    await run(world, retry, Script("fine"))
    assert budget.balance == 0.5


async def test_the_budget_is_the_last_reason_to_stop(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """A call that ends anyway costs nothing."""
    budget = RetryBudget(0, saved=1)
    unrepeatable = Boom()
    unrepeatable.repeatable = False  # type: ignore[attr-defined]
    await run(world, Retry(1, on=Boom, budget=budget), Script(Boom()))
    await run(world, Retry(on=Boom, budget=budget), Script(unrepeatable))
    await run(world, Retry(on=Boom, backoff=[5], budget=budget), Script(Boom()), Context(timeout=1))
    await run(world, Retry(on=Boom, backoff=[5], max_elapsed=1, budget=budget), Script(Boom()))
    open_inside = Retry(on=Boom, backoff=[5], budget=budget).wrap(CircuitBreaker(1, open_for=30))
    await run(world, open_inside, Script(Boom()))
    assert reasons(heard) == ["attempts", "unrepeatable", "deadline", "max_elapsed", "circuit_open"]
    assert (budget.balance, budget.refused) == (1, 0)


async def test_a_retry_that_an_inner_policy_refuses_costs_nothing(world: World, clock: FakeClock) -> None:
    """It made no call, whether the refusal is retried or raised."""
    budget = RetryBudget(0, saved=1)
    breaker = CircuitBreaker(1, open_for=30)
    waiting = Retry(5, on=(Boom, Rejected), backoff=[0], retry_after=False, budget=budget).wrap(breaker)
    assert isinstance(await run(world, waiting, Script(Boom())), CircuitOpen)
    assert budget.balance == 1
    assert isinstance(await run(world, waiting, Script(Boom())), CircuitOpen)
    assert budget.balance == 1
    refused = Retry(5, on=Boom, backoff=[0], budget=budget)
    assert isinstance(await run(world, refused, Script(Boom(), Rejected("full"))), Rejected)
    assert budget.balance == 1
    assert budget.withdraw()
    assert isinstance(await run(world, waiting, Script()), CircuitOpen)  # the first attempt, which nothing was paid for
    assert budget.balance == 0


async def test_a_retry_is_paid_if_an_inner_one_made_a_call_and_was_refused(world: World, clock: FakeClock) -> None:
    """Otherwise a budget would not bound the calls of nested retries."""
    budget, script = RetryBudget(0, saved=2), Script(Boom())
    outer = Retry(6, on=(Boom, Rejected), backoff=[10], retry_after=False, budget=budget)
    inner = Retry(2, on=Boom, backoff=[0]).wrap(RateLimiter(Rate(1, per=10), max_wait=0))
    assert isinstance(await run(world, outer.wrap(inner), script), RateLimited)
    assert (script.calls, budget.balance, budget.refused) == (3, 0, 1)


class SlowToClose(Boom):
    """A failure with a response that takes 100 s to close."""

    def __init__(self, clock: FakeClock) -> None:
        self.response = self
        self.close = partial(clock.advance, 100)


async def test_a_retry_too_late_after_its_wait_is_refunded(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """No attempt was made."""
    budget = RetryBudget(0, saved=2)
    for limits in (Context(timeout=10), None):
        retry = Retry(3, on=Boom, backoff=[1], max_elapsed=None if limits else 10, budget=budget)
        await run(world, retry, Script(SlowToClose(clock)), limits)
    assert reasons(heard) == ["deadline", "max_elapsed"]
    assert budget.balance == 2
    if world.blocking:
        with pytest.raises(Boom):
            for attempt in Retry(3, on=Boom, backoff=[1], max_elapsed=10, budget=budget).attempts():
                with attempt:
                    raise SlowToClose(clock)
        assert budget.balance == 2


async def test_a_retry_that_is_cancelled_during_its_wait_is_refunded(virtual_tasks: Virtual) -> None:
    """This holds for a call and for a block."""
    budget = RetryBudget(0, saved=5)
    retry = Retry(5, on=Boom, backoff=[60], budget=budget)

    async def block() -> None:
        async for attempt in retry.attempts():
            with attempt:
                raise Boom

    for wait in (lambda: retry.aexecute(Script(Boom()).function()), block):
        with anyio.move_on_after(0.01) as scope:
            await wait()
        assert scope.cancelled_caught
        assert budget.balance == 5


async def test_a_retry_is_refunded_if_a_listener_is_interrupted(world: World, clock: FakeClock) -> None:
    """Ctrl-C in `on_retry` ends the call before the wait, so no retry is made."""
    budget = RetryBudget(0, saved=1)
    with pytest.raises(KeyboardInterrupt):
        await run(world, quick(budget=budget, on_retry=raising(KeyboardInterrupt)), Script(Boom()))
    assert budget.balance == 1


async def test_an_attempt_that_was_made_is_not_refunded(world: World, clock: FakeClock) -> None:
    """It may end with an unhandled error or at a deadline."""
    for last in (ValueError(), DeadlineExceeded("late"), Boom()):
        budget = RetryBudget(0, saved=1)
        await run(world, Retry(2, on=Boom, backoff=[0], budget=budget), Script(Boom(), last))
        assert budget.balance == 0


async def test_a_block_earns_pays_and_refunds_like_a_call(threads: World, clock: FakeClock, heard: list[Any]) -> None:
    budget = RetryBudget(0.25, saved=2)
    retry = Retry(9, on=Boom, backoff=[1], budget=budget)
    with pytest.raises(Boom):
        for attempt in retry.attempts():
            with attempt:
                raise Boom
    assert (attempt.number, clock.sleeps, reasons(heard)) == (3, [1, 1], ["budget"])
    assert budget.balance == 0
    for attempt in retry.attempts():
        with attempt:
            pass
    assert budget.balance == 0.25
    budget = RetryBudget(0, saved=1)
    with pytest.raises(Rejected):
        for attempt in Retry(9, on=Boom, backoff=[1], budget=budget).attempts():
            with attempt:
                raise Boom if attempt.number == 1 else Rejected("full")
    assert budget.balance == 1
    with contextlib.suppress(Rejected):
        for attempt in Retry(9, on=Boom, budget=budget).attempts():
            with attempt:
                raise Rejected("full")
    assert budget.balance == 1


async def test_a_retry_is_refunded_if_the_loop_is_left_after_a_failed_block(world: World, clock: FakeClock) -> None:
    budget = RetryBudget(0, saved=1)

    async def leave() -> None:
        async for attempt in Attempts(world, Retry(on=Boom, backoff=[1], budget=budget)):
            with attempt:
                raise Boom
            assert budget.balance == 0
            break

    await leave()
    gc.collect()  # the error, its traceback, the frame of the loop and the attempts are a cycle
    assert budget.balance == 1


@pytest.mark.parametrize("how", ["break", "continue"])
async def test_a_retry_whose_attempt_is_not_entered_is_refunded(world: World, clock: FakeClock, how: str) -> None:
    budget = RetryBudget(0, saved=1)

    async def loop() -> None:
        async for attempt in Attempts(world, Retry(on=Boom, backoff=[1], budget=budget)):
            if attempt.number == 2:
                assert budget.balance == 0
                if how == "break":
                    break
                continue
            with attempt:
                raise Boom

    with contextlib.nullcontext() if how == "break" else pytest.warns(RuntimeWarning, match="was not entered"):
        await loop()
        gc.collect()
    assert budget.balance == 1


async def test_a_custom_budget_is_called_and_its_errors_are_raised(world: World, clock: FakeClock) -> None:
    budget = CustomBudget(True, OSError("no answer"))
    await run(world, Retry(3, on=Boom, backoff=[0], budget=budget), Script(Boom(), "fine"))
    error = await run(world, Retry(3, on=Boom, backoff=[0], budget=budget), Script(Boom()))
    assert isinstance(error, OSError)
    assert budget.calls == ["withdraw", "succeeded", "withdraw"]
