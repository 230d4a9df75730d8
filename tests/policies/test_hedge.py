"""Hedge: when another attempt begins, which one decides, and what becomes of the others."""

from __future__ import annotations

from typing import Any, cast

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
    RepeatCap,
    Retry,
    RetryBudget,
    Success,
    Timeout,
    TimeoutExceeded,
    events,
)
from tests.conftest import Boom, Virtual
from tests.policies.hedges import Service
from tests.policies.retries import Response, bad, notes_of

# --- when another attempt begins ----------------------------------------------------------------


async def test_a_call_that_is_quick_is_made_once(anywhere: Virtual) -> None:
    """Nothing begins beside it before its delay."""
    service = Service(anywhere, (0.09, "quick"))
    assert await service.under(Hedge(0.1)) == ("quick", 0.09)
    assert service.begun == [(0, 0.0)]


async def test_every_call_of_the_function_is_reported(anywhere: Virtual) -> None:
    """To listeners that ask for it: also the one that is cut off."""
    service, ended = Service(anywhere, (5, "first"), (0.01, "second")), list[Any]()
    end = events.subscribe(lambda event: ended.append(event.outcome), events.CallFinished)
    await service.under(Hedge(0.1))
    end()
    assert ended == [Success("second"), None]


async def test_the_first_answer_wins(anywhere: Virtual) -> None:
    """The loser is cut off before it is returned."""
    service = Service(anywhere, (5, "first"), (0.01, "second"))
    assert await service.under(Hedge(0.1)) == ("second", 0.11)
    assert service.cut_off == ([] if anywhere.blocking else [0])


async def test_the_first_attempt_may_win_as_well(anywhere: Virtual) -> None:
    """Then the other one is cut off."""
    service = Service(anywhere, (0.2, "first"), (5, "second"))
    assert await service.under(Hedge(0.1)) == ("first", 0.2)
    assert service.cut_off == ([] if anywhere.blocking else [1])


async def test_the_schedule_is_that_of_grpc(anywhere: Virtual) -> None:
    """With a delay of d and four attempts: sent at 0, d, 2d, 3d (gRFC A6)."""
    service = Service(anywhere, (1, "fine"))
    assert await service.under(Hedge(0.1, hedges=3, budget=None)) == ("fine", 1)
    assert service.begun == [(0, 0), (1, 0.1), (2, 0.2), (3, 0.3)]


async def test_without_a_delay_all_begin_at_once(anywhere: Virtual) -> None:
    """And the quickest decides, whichever it is."""
    for quick in range(3):
        steps = [(0.1 if number == quick else 5, number) for number in range(3)]
        service = Service(anywhere, *steps)
        assert await service.under(Hedge(0, hedges=2, budget=None)) == (quick, 0.1)
        assert sorted(service.begun) == [(0, 0), (1, 0), (2, 0)]


async def test_no_attempt_begins_after_the_deadline(anywhere: Virtual) -> None:
    """That of the context, which cuts nothing off."""
    service = Service(anywhere, (1, "late"))
    assert await service.under(Hedge(0.1, hedges=5, budget=None), Context(timeout=0.15)) == ("late", 1)
    assert len(service.begun) == 2


async def test_what_must_not_be_repeated_is_not(anywhere: Virtual) -> None:
    """A callable object says so; on a plain function the attribute means nothing."""
    service = Service(anywhere, (1, "paid"), (0.1, "paid twice"))

    class Payment:
        def __init__(self) -> None:
            self.function = service.function()
            self.repeatable = False

        async def __call__(self, ctx: Context) -> Any:
            return await self.function(ctx)

    service.began = anywhere.now()
    payment = Payment()
    if anywhere.blocking:
        blocking: Any = _Blocking(anywhere.native(payment.function))
        assert Hedge(0.1).execute(blocking) == "paid"
    else:
        assert await anywhere.execute(Hedge(0.1), cast("Any", payment)) == "paid"
    assert len(service.begun) == 1


class _Blocking:
    repeatable = False

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, ctx: Context) -> Any:
        return self.function(ctx)


# --- what decides -------------------------------------------------------------------------------


async def test_a_failure_does_not_win_while_another_attempt_runs(anywhere: Virtual) -> None:
    """Nor does a result that is not good enough, which is closed."""
    for loser in (Boom("first"), Response()):
        service = Service(anywhere, (0.2, loser), (0.5, "second"))
        assert await service.under(Hedge(0.1, on=Boom, on_result=_is_bad)) == ("second", 0.6)
        assert getattr(loser, "closed", 1) == 1


def _is_bad(value: object) -> bool:
    return isinstance(value, Response) and bad(value)


async def test_a_failure_with_none_beside_it_ends_the_call(anywhere: Virtual) -> None:
    """A `Retry` outside is there to repeat it."""
    service = Service(anywhere, (0.05, Boom()), (0, "never"))
    error, seconds = await service.under(Hedge(0.1, on=Boom))
    assert (type(error), seconds, service.begun) == (Boom, 0.05, [(0, 0)])
    response = Response()
    service = Service(anywhere, (0.05, response), (0, "never"))
    assert await service.under(Hedge(0.1, on_result=_is_bad)) == (response, 0.05)
    assert response.closed == 0


async def test_the_response_of_a_failure_that_is_discarded_is_closed(anywhere: Virtual) -> None:
    discarded = Boom("first")
    discarded.response = Response()  # type: ignore[attr-defined]
    service = Service(anywhere, (0.2, discarded), (0.5, "second"))
    assert await service.under(Hedge(0.1, on=Boom)) == ("second", 0.6)
    assert discarded.response.closed == 1  # type: ignore[attr-defined]


async def test_eager_begins_the_next_attempt_at_once(anywhere: Virtual) -> None:
    """Where one has failed; so many as there may be."""
    service = Service(anywhere, (0.05, Boom("a")), (0.05, Boom("b")), (0.05, "third"))
    assert await service.under(Hedge(10, hedges=2, on=Boom, eager=True)) == ("third", 0.15)
    service = Service(anywhere, (0.05, Boom("a")), (0.05, Boom("b")))
    error, seconds = await service.under(Hedge(10, hedges=1, on=Boom, eager=True))
    assert (error.args, seconds) == (("a",), 0.1)


async def test_the_first_attempts_failure_comes_out_where_all_fail(anywhere: Virtual) -> None:
    """With a note on the others, in whatever order they ended."""
    for first in (0.15, 0.5):
        one = Service(anywhere, (first, Boom("a")), (0.1, Boom("b")))
        error, _ = await one.under(Hedge(0.1, on=Boom))
        assert notes_of(error) == ["resilience: 1 attempt beside it failed with Boom(b)"]
        service = Service(anywhere, (first, Boom("a")), (0.12, Boom("b")), (0.12, ConnectionError("c")))
        error, _ = await service.under(Hedge(0.1, hedges=2, on=(Boom, ConnectionError)))
        assert error.args == ("a",)
        assert notes_of(error) == ["resilience: 2 attempts beside it failed with Boom(b), ConnectionError(c)"]


async def test_the_first_attempts_result_comes_out_where_none_is_good(anywhere: Virtual) -> None:
    """The others are closed."""
    first, second = Response(), Response()
    service = Service(anywhere, (0.15, first), (0.2, second))
    assert await service.under(Hedge(0.1, on_result=_is_bad)) == (first, 0.3)
    assert (first.closed, second.closed) == (0, 1)


async def test_a_failure_that_refuses_attributes_goes_without_a_note(anywhere: Virtual) -> None:
    """It comes out all the same."""

    class Frozen(ConnectionError):
        def add_note(self, note: str) -> None:
            raise AttributeError

    service = Service(anywhere, (0.15, Frozen("first")), (0.1, ConnectionError("second")))
    error, _ = await service.under(Hedge(0.1))
    assert (type(error), notes_of(error)) == (Frozen, [])


async def test_a_result_that_is_not_good_enough_earns_nothing(anywhere: Virtual) -> None:
    """Neither of a call that is hedged nor of one that is not."""
    budget, response = RetryBudget(1.0, saved=1), Response()
    budget.withdraw()
    for delay in (Quantile(), 60):
        hedge = Hedge(delay, on_result=_is_bad, budget=budget)
        assert await Service(anywhere, (0.1, response)).under(hedge) == (response, 0.1)
        assert budget.balance == 0
        assert await Service(anywhere, (0.1, "fine")).under(hedge) == ("fine", 0.1)
        assert budget.withdraw()


async def test_a_failure_that_is_not_named_ends_it_at_once(anywhere: Virtual) -> None:
    """A wrong request is wrong everywhere; and `ignore` is stronger than `on`."""
    for options in ({}, {"on": Exception, "ignore": Boom}):
        service = Service(anywhere, (5, "first"), (0.1, Boom("wrong")))
        error, seconds = await service.under(Hedge(0.1, **options))  # type: ignore[arg-type]
        assert (type(error), seconds) == (Boom, 0.2)
        assert notes_of(error) == []


@pytest.mark.parametrize("refusal", [BulkheadFull("full"), DeadlineExceeded("late")], ids=repr)
async def test_a_refusal_of_one_attempt_never_decides_while_another_runs(anywhere: Virtual, refusal: Exception) -> None:
    """It says nothing of the other one; alone, it comes out at once."""
    service = Service(anywhere, (0.5, "first"), (0.1, refusal))
    assert await service.under(Hedge(0.1)) == ("first", 0.5)
    service = Service(anywhere, (0.2, refusal), (0.5, "second"))
    assert await service.under(Hedge(0.1)) == ("second", 0.6)
    service = Service(anywhere, (0.05, refusal))
    assert await service.under(Hedge(0.1, eager=True)) == (refusal, 0.05)


async def test_what_a_predicate_raises_comes_out(anywhere: Virtual) -> None:
    """Whichever attempt it was asked about; the others are cut off, and nothing is left."""

    def broken(value: object) -> bool:
        raise LookupError("broken")

    bulkhead = Bulkhead(5)
    for first, second in ((0.05, 5), (5, 0.05)):
        for policy, step in ((Hedge(0.02, on_result=broken), "x"), (Hedge(0.02, on=broken), Boom())):
            service = Service(anywhere, (first, step), (second, step))
            error, _ = await service.under(policy.wrap(bulkhead))
            assert type(error) is LookupError
            assert bulkhead.stats().in_flight == 0


# --- what pays for it ---------------------------------------------------------------------------


async def test_a_spent_budget_lets_the_attempts_be_that_run(anywhere: Virtual) -> None:
    """No further one begins; a good result earns."""
    heard: list[Any] = []
    budget = RetryBudget(0.5, saved=1)
    for expected in ("second", "first", "second"):
        service = Service(anywhere, (0.5, "first"), (0.1, "second"))
        answer, _ = await service.under(Hedge(0.1, budget=budget, name="h").wrap(listeners=[heard.append]))
        assert answer == expected
        budget.succeeded() if expected == "first" else None
    spent = [event for event in heard if isinstance(event, events.BudgetSpent)]
    assert [(it.policy, it.repeat) for it in spent] == [("h", "hedge")]


async def test_a_hedge_that_was_refused_costs_nothing(anywhere: Virtual) -> None:
    """As for a Retry: it has called nothing."""
    budget = RetryBudget(0, saved=1)
    policy = Hedge(0.1, budget=budget).wrap(Bulkhead(1))
    for _ in range(2):
        assert await Service(anywhere, (0.5, "first")).under(policy) == ("first", 0.5)
    assert budget.balance == 1


async def test_a_cap_counts_hedges(anywhere: Virtual) -> None:
    """Together with retries, and is no spent budget."""
    heard: list[Any] = []
    service = Service(anywhere, (1, "fine"))
    policy = RepeatCap(2).wrap(Hedge(0.1, hedges=5, budget=None), listeners=[heard.append])
    assert await service.under(policy) == ("fine", 1)
    assert [number for number, _ in service.begun] == [0, 1, 2]
    assert not [event for event in heard if isinstance(event, events.BudgetSpent)]


# --- with other policies ------------------------------------------------------------------------


async def test_what_losers_hold_comes_back_at_once(anywhere: Virtual) -> None:
    """Permits and probes; and a breaker inside counts no loser."""
    bulkhead = Bulkhead(2)
    breaker = CircuitBreaker(1, open_for=0.1, probes=2, on=Exception)
    await Service(anywhere, (0, Boom())).under(breaker)
    await anywhere.sleep(0.2)
    service = Service(anywhere, (5, "first"), (0.1, "second"))
    assert await service.under(Policy.wrap(Hedge(0.1), bulkhead, breaker)) == ("second", 0.2)
    assert bulkhead.stats().in_flight == 0
    assert (breaker.state, breaker.stats().probes) == (CircuitState.CLOSED, 0)


async def test_a_timeout_around_fires_as_itself(anywhere: Virtual) -> None:
    """Through all attempts, and ends them."""
    bulkhead = Bulkhead(2)
    service = Service(anywhere, (5, "first"))
    error, seconds = await service.under(Policy.wrap(Timeout(0.25, name="total"), Hedge(0.1), bulkhead))
    assert (type(error), error.policy, seconds) == (TimeoutExceeded, "total", 0.25)
    assert bulkhead.stats().in_flight == 0


async def test_a_timeout_inside_is_one_for_each_attempt(anywhere: Virtual) -> None:
    """A first attempt that times out is a failure in `on`."""
    service = Service(anywhere, (5, "first"), (0.15, "second"))
    assert await service.under(Hedge(0.1).wrap(Timeout(0.2))) == ("second", 0.25)
    service = Service(anywhere, (5, "first"))
    error, seconds = await service.under(Hedge(0.1).wrap(Timeout(0.2)))
    assert (type(error), seconds) == (TimeoutExceeded, 0.3)


async def test_a_retry_around_repeats_the_hedged_call(anywhere: Virtual) -> None:
    """`ctx.attempt` is the Retry's, `ctx.hedge` the Hedge's, `ctx.attempts` counts both."""
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


async def test_retries_inside_end_with_their_attempt(anywhere: Virtual) -> None:
    """A loser that waits for its next attempt makes none."""
    calls: list[tuple[int, int]] = []

    async def fn(ctx: Context) -> str:
        calls.append((ctx.hedge, ctx.attempt))
        if ctx.hedge == 0:
            raise ConnectionError
        return "second"

    assert await anywhere.execute(Hedge(0.1).wrap(Retry(9, backoff=[0.3])), fn) == "second"
    await anywhere.sleep(5)
    assert calls == [(0, 1), (1, 1)]


async def test_hedges_may_stand_inside_one_another(anywhere: Virtual) -> None:
    """Each with its own attempts."""
    service = Service(anywhere, (5, "first"), (0.01, "second"))
    assert await service.under(Hedge(1).wrap(Hedge(0.1))) == ("second", 0.11)
    service = Service(anywhere, (5, "never"))
    inner = Hedge(1, budget=None).wrap(Timeout(1.5))
    error, seconds = await service.under(Hedge(0.5, budget=None).wrap(inner))
    assert (type(error), seconds) == (TimeoutExceeded, 3.0)
    assert len(service.begun) == 4


async def test_a_bulkhead_inside_queues_attempts(anywhere: Virtual) -> None:
    """A hedge that waits in a queue leaves it when the first attempt has answered."""
    bulkhead = Bulkhead(1, queue=5)
    service = Service(anywhere, (0.5, "first"))
    assert await service.under(Hedge(0.1).wrap(bulkhead)) == ("first", 0.5)
    stats = bulkhead.stats()
    assert (stats.in_flight, stats.queued) == (0, 0)
    if anywhere.name == "trio":  # a task that has been woken runs to where it waits again
        assert service.cut_off == [1]
    else:
        assert len(service.begun) == 1


# --- telling ------------------------------------------------------------------------------------


async def test_it_tells_when_it_hedges_and_what_came_of_it(anywhere: Virtual) -> None:
    """Only of calls of which more than one attempt was made."""
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
    assert [(it.policy, it.number, round(it.elapsed, 6)) for it in started] == [("h", 1, 0.1)] * 4
    assert [it for it in heard if isinstance(it, events.HedgeStarted)] == started
    finished = [it for it in heard if isinstance(it, events.HedgeFinished)]
    told = [(it.won, it.attempts, round(it.elapsed, 6)) for it in finished]
    assert told == [(1, 2, 0.2), (0, 2, 0.2), (None, 2, 0.3), (None, 2, 0.2)]


def test_a_hedge_says_what_it_does() -> None:
    """In a line, and as it was written."""
    assert repr(Hedge()) == "Hedge()"
    assert repr(Hedge(0.5, hedges=2, budget=None)) == "Hedge(delay=0.5, hedges=2, budget=None)"
    assert Hedge(0.5, budget=None).describe() == "Hedge: another attempt beside one that takes longer than 0.5 s"
    assert Hedge(hedges=2, name="h").describe() == (
        "h: up to 2 more attempts, one after another, beside one that takes longer than 95 % of the calls take; "
        "paid for by RetryBudget(0.1, saved=10)"
    )
