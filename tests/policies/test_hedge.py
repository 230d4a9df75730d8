"""Hedge: when another attempt begins, which attempt decides, and how the others end."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from itertools import count
from typing import Any

import pytest

from resilience import (
    Bulkhead,
    BulkheadFull,
    CircuitBreaker,
    CircuitState,
    Context,
    DeadlineExceeded,
    Hedge,
    Policy,
    Quantile,
    Rate,
    RateLimiter,
    RepeatCap,
    Retry,
    RetryBudget,
    Success,
    Timeout,
    TimeoutExceeded,
    events,
)
from resilience.testing import recording
from tests.conftest import Boom, Script, Virtual, World
from tests.functions import fail_on_the_way_out, raising
from tests.policies.hedges import Service
from tests.policies.retries import Response, bad, notes_of

# --- when another attempt begins ----------------------------------------------------------------


async def test_each_attempt_is_reported_as_a_finished_call(anywhere: Virtual) -> None:
    """One that is cut off has the outcome None, and was cancelled by the hedge."""
    service, ended = Service(anywhere, (5, "first"), (0.01, "second")), list[Any]()
    end = events.subscribe(lambda event: ended.append((event.outcome, event.cancelled_by)), events.CallFinished)
    await service.under(Hedge(0.1))
    end()
    assert ended == [(Success("second"), None), (None, "hedge")]


async def test_only_the_losers_of_a_hedge_are_cancelled_by_it(anywhere: Virtual) -> None:
    """Not the attempts of the next call in the same execution, nor the execution."""

    async def fn(ctx: Context) -> None:
        if ctx.attempt == 1 and ctx.hedge:
            raise ConnectionError
        await anywhere.sleep(5)

    policy = Policy.wrap(Timeout(1), Retry(2, backoff=[0]), Hedge(0.1, on=KeyError, budget=None))
    with recording(events.CallFinished, events.ExecutionFinished) as recorder:
        await anywhere.attempt(policy, fn)
    ended = [(type(it).__name__, it.cancelled_by) for it in recorder.events]
    calls = [("CallFinished", by) for by in (None, "hedge", "deadline", "deadline")]
    assert ended == [*calls, ("ExecutionFinished", None)]


async def test_a_loser_that_fails_on_the_way_out_changes_nothing(tasks_world: World) -> None:
    calls = count(1)

    async def fetch() -> str:
        if next(calls) == 1:
            await fail_on_the_way_out()
        return "second"

    assert await Hedge(0.01).acall(fetch) == "second"


async def test_a_group_that_a_predicate_raises_reaches_the_caller(world: World) -> None:
    group = ExceptionGroup("of a predicate", [KeyError()])
    error = await world.attempt(Hedge(60, on=raising(group)), Script(Boom()).function())
    assert error is group


@pytest.mark.parametrize(
    ("seconds", "expected", "loser"), [((5, 0.01), ("second", 0.11), 0), ((0.2, 5), ("first", 0.2), 1)]
)
async def test_the_first_result_wins_and_the_loser_is_cut_off(
    anywhere: Virtual, seconds: tuple[float, float], expected: tuple[str, float], loser: int
) -> None:
    service = Service(anywhere, (seconds[0], "first"), (seconds[1], "second"))
    assert await service.under(Hedge(0.1)) == expected
    assert service.cut_off == ([] if anywhere.blocking else [loser])


@pytest.mark.parametrize("error", [ConnectionError, BulkheadFull])
async def test_a_delay_of_zero_makes_all_attempts_while_others_fail(world: World, error: type[Exception]) -> None:
    """In real time, in which the clock moves between any two attempts."""
    assert await world.execute(Hedge(0, hedges=4), failing_but_for_the_last(error)) == 4


@pytest.mark.parametrize("error", [ConnectionError, BulkheadFull])
async def test_with_a_delay_of_zero_all_attempts_are_made_if_the_clock_stands_still(
    anywhere: Virtual, error: type[Exception]
) -> None:
    """Or if its steps are coarse. Then, the next attempt is due exactly when one ends."""
    assert await anywhere.execute(Hedge(0, hedges=4), failing_but_for_the_last(error)) == 4


def failing_but_for_the_last(error: type[Exception]) -> Any:
    async def fn(ctx: Context) -> int:
        if ctx.hedge < 4:
            raise error
        return ctx.hedge

    return fn


@pytest.mark.parametrize("timeout", [0.15, 0.25])
async def test_no_attempt_begins_at_or_after_the_deadline_of_the_context(anywhere: Virtual, timeout: float) -> None:
    """That deadline cuts off no attempt."""
    service = Service(anywhere, (1, "late"))
    assert await service.under(Hedge(0.125, hedges=5, budget=None), Context(timeout=timeout)) == ("late", 1)
    assert len(service.begun) == 2


@pytest.mark.parametrize("may_begin", [False, True], ids=["never", "until it has begun"])
async def test_a_callable_that_must_not_be_repeated_is_not_hedged(anywhere: Virtual, may_begin: bool) -> None:
    """If it says so before it begins, it needs no other thread."""
    ran_in: list[int] = []
    service = Service(anywhere, (1, "paid"), (0.1, "paid twice"))
    function = anywhere.native(service.function())

    class Payment:
        @property
        def repeatable(self) -> bool:
            return may_begin and not service.begun

        def __call__(self, ctx: Context) -> Any:
            ran_in.append(threading.get_ident())
            return function(ctx)

    service.began = anywhere.now()
    assert await anywhere.execute(Hedge(0.1), Payment()) == "paid"
    assert len(ran_in) == 1
    assert may_begin or ran_in == [threading.get_ident()]


class Unanswered(ConnectionError):
    repeatable = False


@pytest.mark.parametrize("eager", [False, True])
async def test_no_attempt_begins_after_a_failure_that_must_not_be_repeated(anywhere: Virtual, eager: bool) -> None:
    """Running attempts continue. The same holds for a result."""
    hedge = Hedge(0.1, hedges=3, eager=eager, on_result=_is_bad, budget=None)
    for failure in (Unanswered("sent, then reset"), Response(repeatable=False)):
        alone = Service(anywhere, (0.05, failure), (0.01, "paid twice"))
        assert await alone.under(hedge) == (failure, 0.05)
        assert len(alone.begun) == 1
        beside = Service(anywhere, (0.5, "paid"), (0.05, failure), (0.01, "paid twice"))
        assert await beside.under(hedge) == ("paid", 0.5)
        assert len(beside.begun) == 2


async def test_no_retry_repeats_a_call_if_the_failure_of_one_attempt_forbids_it(anywhere: Virtual) -> None:
    """Although the error is that of the first attempt."""
    service = Service(anywhere, (0.5, ConnectionError("refused")), (0.05, Unanswered("sent, then reset")))
    error, _ = await service.under(Retry(3, backoff=[0]).wrap(Hedge(0.1, budget=None)))
    assert (type(error), len(service.begun)) == (ConnectionError, 2)


# --- which attempt decides ----------------------------------------------------------------------


async def test_a_failure_does_not_win_while_another_attempt_runs(anywhere: Virtual) -> None:
    """Nor does a bad result. It is closed, as is the response of the failure."""
    failed = Boom("first")
    failed.response = Response()  # type: ignore[attr-defined]
    for loser in (failed, Response()):
        service = Service(anywhere, (0.2, loser), (0.5, "second"))
        assert await service.under(Hedge(0.1, on=Boom, on_result=_is_bad)) == ("second", 0.6)
        assert getattr(loser, "response", loser).closed == 1


def _is_bad(value: object) -> bool:
    return isinstance(value, Response) and bad(value)


async def test_the_first_attempts_failure_is_raised_if_all_attempts_fail(in_simulation: Virtual) -> None:
    """It has a note about the others, in whatever order they ended."""
    for first in (0.15, 0.5):
        two_attempts = Service(in_simulation, (first, Boom("a")), (0.1, Boom("b")))
        error, _ = await two_attempts.under(Hedge(0.1, on=Boom))
        assert notes_of(error) == ["resilience: 1 attempt beside it failed with Boom(b)"]
        service = Service(in_simulation, (first, Boom("a")), (0.12, Boom("b")), (0.12, ConnectionError("c")))
        error, _ = await service.under(Hedge(0.1, hedges=2, on=(Boom, ConnectionError)))
        assert error.args == ("a",)
        assert notes_of(error) == ["resilience: 2 attempts beside it failed with Boom(b), ConnectionError(c)"]
    many = Service(in_simulation, (1, Boom("a")), (0.1, Boom("b")))
    error, _ = await many.under(Hedge(0, hedges=8, on=Boom, budget=None))
    assert notes_of(error)[0].startswith("resilience: 8 attempts beside it failed with Boom(b), ")


async def test_the_note_of_an_earlier_call_is_replaced(in_simulation: Virtual) -> None:
    """The note of a Retry inside or outside is kept."""
    service = Service(in_simulation, (0.15, Boom("a")), (0.1, Boom("b")))
    hedge, retry = Hedge(0.1, on=Boom), Retry(1, on=Boom)
    for policy, notes in ((hedge, 1), (hedge.wrap(retry), 2), (retry.wrap(hedge), 2)):
        for _ in range(2):
            error, _ = await service.under(policy)
            assert len(notes_of(error)) == notes


async def test_the_first_attempts_result_is_returned_if_no_result_is_good(anywhere: Virtual) -> None:
    """The others are closed."""
    first, second = Response(), Response()
    service = Service(anywhere, (0.15, first), (0.2, second))
    assert await service.under(Hedge(0.1, on_result=_is_bad)) == (first, 0.3)
    assert (first.closed, second.closed) == (0, 1)


async def test_a_bad_result_adds_nothing_to_the_budget(in_simulation: Virtual) -> None:
    """The delay may be observed or fixed."""
    budget, response = RetryBudget(1.0, saved=1), Response()
    budget.withdraw()
    for delay in (Quantile(), 60):
        hedge = Hedge(delay, on_result=_is_bad, budget=budget)
        assert await Service(in_simulation, (0.1, response)).under(hedge) == (response, 0.1)
        assert budget.balance == 0
        assert await Service(in_simulation, (0.1, "fine")).under(hedge) == ("fine", 0.1)
        assert budget.withdraw()


async def test_an_unhandled_error_ends_the_call_at_once(anywhere: Virtual) -> None:
    """`ignore` has priority over `on`."""
    for options in ({}, {"on": Exception, "ignore": Boom}):
        service = Service(anywhere, (5, "first"), (0.1, Boom("wrong")))
        error, seconds = await service.under(Hedge(0.1, **options))  # type: ignore[arg-type]
        assert (type(error), seconds) == (Boom, 0.2)
        assert notes_of(error) == []


@pytest.mark.parametrize(
    "rejection",
    [BulkheadFull("full"), DeadlineExceeded("late"), ExceptionGroup("children", [BulkheadFull("full")])],
    ids=repr,
)
async def test_a_rejected_attempt_does_not_decide_while_another_runs(anywhere: Virtual, rejection: Exception) -> None:
    """A rejection of the only attempt is raised at once."""
    service = Service(anywhere, (0.5, "first"), (0.1, rejection))
    assert await service.under(Hedge(0.1)) == ("first", 0.5)
    service = Service(anywhere, (0.2, rejection), (0.5, "second"))
    assert await service.under(Hedge(0.1)) == ("second", 0.6)
    service = Service(anywhere, (0.05, rejection))
    assert await service.under(Hedge(0.1, eager=True)) == (rejection, 0.05)


async def test_an_error_of_a_predicate_is_raised_and_cuts_off_the_attempts(anywhere: Virtual) -> None:
    broken = raising(LookupError("broken"))
    bulkhead, response = Bulkhead(5), Response()
    for first, second in ((0.05, 5), (5, 0.05)):
        for policy, step in ((Hedge(0.02, on_result=broken), response), (Hedge(0.02, on=broken), Boom())):
            service = Service(anywhere, (first, step), (second, step))
            error, _ = await service.under(policy.wrap(bulkhead))
            assert type(error) is LookupError
            assert bulkhead.stats().in_flight == 0
    assert response.closed == 2


# --- budgets ------------------------------------------------------------------------------------


async def test_a_spent_budget_allows_no_further_attempt(in_simulation: Virtual) -> None:
    """Running attempts go on, and a good result adds to the budget."""
    heard: list[Any] = []
    budget = RetryBudget(0.5, saved=1)
    for expected in ("second", "first", "second"):
        service = Service(in_simulation, (0.5, "first"), (0.1, "second"))
        answer, _ = await service.under(Hedge(0.1, budget=budget, name="h").wrap(listeners=[heard.append]))
        assert answer == expected
        budget.succeeded() if expected == "first" else None
    spent = [event for event in heard if isinstance(event, events.BudgetSpent)]
    assert [(it.policy, it.repeat) for it in spent] == [("h", "hedge")]


async def test_a_rejected_hedge_costs_nothing(in_simulation: Virtual) -> None:
    """It has made no call. A hedge that fails is paid, also if the first attempt was rejected."""
    budget = RetryBudget(0, saved=1)
    policy = Hedge(0.1, budget=budget).wrap(Bulkhead(1))
    for _ in range(2):
        assert await Service(in_simulation, (0.5, "first")).under(policy) == ("first", 0.5)
    assert budget.balance == 1
    failing = Service(in_simulation, (0.2, BulkheadFull("full")), (0.3, Boom()))
    assert isinstance((await failing.under(Hedge(0.1, budget=budget)))[0], Boom)
    assert budget.balance == 0


async def test_a_hedge_is_paid_if_a_retry_inside_has_made_a_call_before_it_was_rejected(in_simulation: Virtual) -> None:
    """As a retry is: otherwise neither a budget nor a cap would bound such hedges."""
    budget = RetryBudget(0, saved=1)
    inside = Retry(2, on=Boom, backoff=[0]).wrap(RateLimiter(Rate(2, per=10), max_wait=0))
    service = Service(in_simulation, (0.5, "first"), (0.1, Boom()))
    assert await service.under(Hedge(0.1, budget=budget).wrap(inside)) == ("first", 0.5)
    assert (len(service.begun), budget.balance) == (2, 0)


async def test_a_repeat_cap_counts_hedges(in_simulation: Virtual) -> None:
    """A reached cap is no spent budget."""
    heard: list[Any] = []
    service = Service(in_simulation, (1, "fine"))
    policy = RepeatCap(2).wrap(Hedge(0.1, hedges=5, budget=None), listeners=[heard.append])
    assert await service.under(policy) == ("fine", 1)
    assert [number for number, _ in service.begun] == [0, 1, 2]
    assert not [event for event in heard if isinstance(event, events.BudgetSpent)]


# --- with other policies ------------------------------------------------------------------------


async def test_losers_release_permits_and_probes_at_once(anywhere: Virtual) -> None:
    """An inner breaker records no outcome for a loser."""
    bulkhead = Bulkhead(2)
    breaker = CircuitBreaker(1, open_for=0.1, probes=2, on=Exception)
    await Service(anywhere, (0, Boom())).under(breaker)
    await anywhere.sleep(0.2)
    service = Service(anywhere, (5, "first"), (0.1, "second"))
    assert await service.under(Policy.wrap(Hedge(0.1), bulkhead, breaker)) == ("second", 0.2)
    assert bulkhead.stats().in_flight == 0
    assert (breaker.state, breaker.stats().probes) == (CircuitState.CLOSED, 0)


async def test_an_inner_timeout_holds_for_each_attempt(anywhere: Virtual) -> None:
    """An attempt that times out is a handled failure."""
    service = Service(anywhere, (5, "first"), (0.15, "second"))
    assert await service.under(Hedge(0.1).wrap(Timeout(0.2))) == ("second", 0.25)
    service = Service(anywhere, (5, "first"))
    error, seconds = await service.under(Hedge(0.1).wrap(Timeout(0.2)))
    assert (type(error), seconds) == (TimeoutExceeded, 0.3)


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        (Timeout(0.5).wrap(Hedge(0.25)), [0.5, 5]),
        (Timeout(0.5).wrap(Hedge(0.25)), [5, 0.25]),
        (Hedge(1).wrap(Timeout(0.5)), [0.5, 5]),
    ],
    ids=["outer, first attempt", "outer, hedge", "inner"],
)
async def test_a_result_that_comes_as_a_timeout_is_due_is_too_late(
    anywhere: Virtual, policy: Policy[Any], seconds: list[float]
) -> None:
    """In threads it exists, and is closed."""
    result = Response()
    error, after = await Service(anywhere, *((each, result) for each in seconds)).under(policy)
    assert (type(error), after) == (TimeoutExceeded, 0.5)
    if anywhere.blocking:
        await anywhere.sleep(0.25)
        assert result.closed == 1


async def test_an_outer_retry_repeats_the_hedged_call(anywhere: Virtual) -> None:
    """`ctx.attempt` counts retries, `ctx.hedge` hedges, `ctx.attempts` both."""
    seen: list[tuple[int, int]] = []
    ctx = Context()

    async def fn(inner: Context) -> str:
        seen.append((inner.attempt, inner.hedge))
        await anywhere.sleep(0.2)
        if inner.attempt == 1:
            raise ConnectionError("down")
        return "fine"

    policy = Retry(2, backoff=[0]).wrap(Hedge(0.1))
    assert await anywhere.execute(policy, fn, ctx) == "fine"
    assert seen == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert ctx.attempts == 4
    assert [it.message for it in ctx.failures] == ["down", "down"]


@pytest.mark.parametrize(("first", "order"), [(0.5, "120"), (0.3, "102"), (0.2, "012"), (0.05, "0")])
async def test_the_context_lists_the_failures_of_all_attempts(in_simulation: Virtual, first: float, order: str) -> None:
    """Each once, in the order in which they end, even if all raise the same error, or one has the `id` of another."""
    same = ConnectionError("same")
    for error, messages in ((None, list(order)), (same, ["same"] * len(order))):
        ctx = Context()

        async def fn(inner: Context) -> None:
            await in_simulation.sleep(0.15 if inner.hedge else first)
            raise error or ConnectionError(str(inner.hedge))  # noqa: B023 (called in this iteration)

        with pytest.raises(ConnectionError):
            await in_simulation.execute(Retry(1).wrap(Hedge(0.1, hedges=2)), fn, ctx)
        assert [it.message for it in ctx.failures] == messages


async def test_the_context_lists_a_failure_once_if_the_budget_pays_for_no_other_attempt(world: World) -> None:
    """The failure asks for another attempt at once, and the policy around notes it, too."""
    ctx, budget = Context(), RetryBudget(0.0, saved=1)
    budget.withdraw()
    policy = Retry(2, backoff=[0]).wrap(Hedge(60, eager=True, budget=budget))
    script = Script(ConnectionError("first"), ConnectionError("second"))
    assert str(await world.attempt(policy, script.function(), ctx)) == "second"
    assert [it.message for it in ctx.failures] == ["first", "second"]


async def test_inner_retries_end_with_their_attempt(anywhere: Virtual) -> None:
    """A loser that waits for its next retry makes none."""
    calls: list[tuple[int, int]] = []

    async def fn(ctx: Context) -> str:
        calls.append((ctx.hedge, ctx.attempt))
        if ctx.hedge == 0:
            raise ConnectionError
        return "second"

    assert await anywhere.execute(Hedge(0.1).wrap(Retry(9, backoff=[0.3])), fn) == "second"
    await anywhere.sleep(5)
    assert calls == [(0, 1), (1, 1)]


async def test_hedges_can_be_nested(anywhere: Virtual) -> None:
    service = Service(anywhere, (5, "first"), (0.01, "second"))
    assert await service.under(Hedge(1).wrap(Hedge(0.1))) == ("second", 0.11)
    service = Service(anywhere, (5, "never"))
    inner = Hedge(1, budget=None).wrap(Timeout(1.5))
    error, seconds = await service.under(Hedge(0.5, budget=None).wrap(inner))
    assert (type(error), seconds) == (TimeoutExceeded, 3.0)
    assert len(service.begun) == 4


async def test_a_hedge_that_waits_for_an_inner_bulkhead_leaves_its_queue(anywhere: Virtual) -> None:
    """It leaves when the first attempt has its result."""
    bulkhead = Bulkhead(1, queue=5)
    service = Service(anywhere, (0.5, "first"))
    assert await service.under(Hedge(0.1).wrap(bulkhead)) == ("first", 0.5)
    stats = bulkhead.stats()
    assert (stats.in_flight, stats.queued) == (0, 0)
    assert len(service.begun) == 1, "the hedge is cancelled after it was granted the permit, and passes it on"


# --- events and description ---------------------------------------------------------------------


async def test_events_report_each_hedge_and_the_outcome_of_the_race(anywhere: Virtual) -> None:
    """Calls of a single attempt send none."""
    heard: list[Any] = []
    started: list[Any] = []
    policy = Hedge(0.1, on=Boom, on_hedge=started.append, name="h").wrap(listeners=[heard.append])
    for steps in (
        [(0.05, "quick")],
        [(5, "first"), (0.1, "second")],
        [(0.2, "first"), (5, "second")],
        [(0.2, Boom())],
        [(5, "first"), (0.1, KeyError("wrong"))],
    ):
        await Service(anywhere, *steps).under(policy)
    await Service(anywhere, (5, "cut off")).under(Timeout(1).wrap(policy))
    assert [(it.policy, it.number, round(it.elapsed, 6)) for it in started] == [("h", 1, 0.1)] * 5
    assert [it for it in heard if isinstance(it, events.HedgeStarted)] == started
    finished = [it for it in heard if isinstance(it, events.HedgeFinished)]
    results = [(it.won, it.attempts, round(it.elapsed, 6)) for it in finished]
    assert results == [(1, 2, 0.2), (0, 2, 0.2), (None, 2, 0.3), (None, 2, 0.2), (None, 2, 1)]


async def test_a_listener_to_a_hedge_sees_the_context_variables_of_the_caller(anywhere: Virtual) -> None:
    """Those of a log record, or of a trace, for example."""
    variable: ContextVar[str] = ContextVar("variable", default="of no caller")
    variable.set("of the caller")
    seen: list[str] = []
    hedge = Hedge(0.1, on_hedge=lambda event: seen.append(variable.get()))
    await Service(anywhere, (5, "first"), (0.1, "second")).under(hedge)
    assert seen == ["of the caller"]
