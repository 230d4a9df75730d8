"""What the order of policies means: the same five policies, nested in different ways."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from resilience import Bulkhead, CircuitBreaker, CircuitState, Context, Fallback, Policy, Retry, Timeout, events
from resilience.errors import BulkheadFull, CircuitOpen, TimeoutExceeded
from tests.conftest import Boom, FakeClock, Script, Virtual, World
from tests.custom import Tag


async def run(world: World, policy: Policy[Any], script: Script) -> Any:
    """Return the outcome of one execution: the value, or the exception as a value."""
    return await world.attempt(policy, script.function())


async def test_each_attempt_goes_through_everything_inside_the_retry(world: World, clock: FakeClock) -> None:
    """Each execution goes once through everything outside."""
    log: list[str] = []
    pipeline = Policy.wrap(Tag("a", log), Retry(on=Boom, backoff=[0]), Tag("b", log))
    await run(world, pipeline, Script(Boom(), Boom(), "fine"))
    assert "".join(log) == "abBbBbBA"


@pytest.mark.parametrize(
    ("pipeline", "remaining", "sleeps"),
    [
        (Policy.wrap(Retry(3, on=Boom, backoff=[1]), Timeout(10)), [10, 10, 10], [1, 1]),
        (Policy.wrap(Timeout(10), Retry(None, on=Boom, backoff=[1])), [10, 6, 2], [1, 1]),
    ],
    ids=["inside", "around"],
)
async def test_a_timeout_inside_a_retry_limits_each_attempt_and_one_around_it_all_attempts_and_delays(
    world: World, clock: FakeClock, pipeline: Policy[Any], remaining: list[float], sleeps: list[float]
) -> None:
    """A delay that does not fit is not begun."""
    left: list[float] = []

    async def fn(ctx: Context) -> None:
        left.append(ctx.remaining())
        clock.advance(3)
        raise Boom

    assert isinstance(await world.attempt(pipeline, fn), Boom)
    assert (left, clock.sleeps) == (remaining, sleeps)


async def test_a_timeout_of_an_attempt_is_retried_but_not_one_of_the_whole(anywhere: Virtual) -> None:
    """Two attempts hang, the third succeeds."""
    entered: list[int] = []

    async def fn(ctx: Context) -> str:
        entered.append(ctx.attempt)
        if ctx.attempt < 3:
            await anywhere.sleep(60)
        return "third time lucky"

    pipeline = Policy.wrap(Timeout(60), Retry(3, backoff=[0]), Timeout(0.02))
    assert await anywhere.execute(pipeline, fn) == "third time lucky"
    assert entered == [1, 2, 3]
    entered.clear()
    with pytest.raises(TimeoutExceeded):
        await anywhere.execute(Policy.wrap(Timeout(0.02), Retry(3, backoff=[0])), fn)
    assert entered == [1]


async def test_a_fallback_inside_a_breaker_hides_failures_from_it(world: World) -> None:
    """A fallback around the breaker does not."""
    inner_fallback, outer_fallback = CircuitBreaker(1), CircuitBreaker(1)
    assert await run(world, Policy.wrap(inner_fallback, Fallback("instead")), Script(Boom())) == "instead"
    assert await run(world, Policy.wrap(Fallback("instead"), outer_fallback), Script(Boom())) == "instead"
    assert inner_fallback.state is CircuitState.CLOSED
    assert outer_fallback.state is CircuitState.OPEN


async def test_a_breaker_around_a_retry_counts_executions(world: World, clock: FakeClock) -> None:
    """Three failed attempts are one failure."""
    breaker = CircuitBreaker(2)
    pipeline = Policy.wrap(breaker, Retry(3, on=Boom, backoff=[0]))
    await run(world, pipeline, Script(Boom()))
    assert breaker.state is CircuitState.CLOSED
    await run(world, pipeline, Script(Boom()))
    assert breaker.state is CircuitState.OPEN


async def test_an_open_circuit_takes_no_permit(world: World) -> None:
    """Outside the bulkhead it refuses before the queue; inside, the permit is released at once."""
    for wrap in (lambda c, b: Policy.wrap(c, b), lambda c, b: Policy.wrap(b, c)):
        breaker, bulkhead = CircuitBreaker(1), Bulkhead(1)
        breaker.isolate()
        for _ in range(3):
            assert isinstance(await run(world, wrap(breaker, bulkhead), Script("fine")), CircuitOpen)
        assert bulkhead.stats().in_flight == 0


@pytest.mark.parametrize(("outside", "held"), [(True, 1), (False, 0)])
async def test_an_outer_permit_is_held_in_delays(world: World, clock: FakeClock, outside: bool, held: int) -> None:
    bulkhead = Bulkhead(1)
    seen: list[int] = []
    retry = Retry(3, on=Boom, backoff=[1], on_retry=lambda event: seen.append(bulkhead.stats().in_flight))
    await run(world, Policy.wrap(bulkhead, retry) if outside else Policy.wrap(retry, bulkhead), Script(Boom()))
    assert seen == [held, held]
    assert bulkhead.stats().in_flight == 0


async def test_a_policy_that_is_twice_in_a_pipeline_shares_its_state(world: World, clock: FakeClock) -> None:
    """A bulkhead of one is full; retries multiply."""
    bulkhead, retry = Bulkhead(1), Retry(2, on=Boom, backoff=[0])
    assert isinstance(await run(world, Policy.wrap(bulkhead, bulkhead), Script("fine")), BulkheadFull)
    assert bulkhead.stats().in_flight == 0
    script = Script(Boom())
    await run(world, Policy.wrap(retry, retry), script)
    assert [ctx.attempt for ctx in script.contexts] == [1, 2, 1, 2]


FIVE = ("fallback", "retry", "breaker", "bulkhead", "timeout")


@pytest.mark.parametrize("order", list(itertools.permutations(FIVE))[::7], ids="-".join)
async def test_in_any_order_calls_leave_nothing_held(world: World, clock: FakeClock, order: tuple[str, ...]) -> None:
    """At the first attempt, after a failure, or with the fallback."""
    breaker, bulkhead = CircuitBreaker(100), Bulkhead(1)
    policies: dict[str, Policy[Any]] = {
        "fallback": Fallback("instead", on=Boom),
        "retry": Retry(3, on=Boom, backoff=[1]),
        "breaker": breaker,
        "bulkhead": bulkhead,
        "timeout": Timeout(60),
    }
    pipeline = Policy.wrap(*(policies[name] for name in order))
    assert await run(world, pipeline, Script("fine")) == "fine"
    hidden = order.index("fallback") > order.index("retry")
    assert await run(world, pipeline, Script(Boom(), "fine")) == ("instead" if hidden else "fine")
    assert await run(world, pipeline, Script(Boom())) == "instead"
    assert bulkhead.stats().in_flight == 0
    assert breaker.state is CircuitState.CLOSED
    assert isinstance(await run(world, pipeline, Script(KeyError("passes"))), KeyError)
    assert bulkhead.stats().in_flight == 0


async def test_the_events_of_an_outage_are_reported_in_order(world: World, clock: FakeClock) -> None:
    """Failures, delays, the circuit, and the answer."""
    seen: list[Any] = []
    breaker = CircuitBreaker(2, open_for=30)
    pipeline = Policy.wrap(
        Fallback("instead"), Retry(3, on=Boom, backoff=[1]), breaker, Bulkhead(1), Timeout(60), listeners=[seen.append]
    )
    assert await run(world, pipeline, Script(Boom())) == "instead"
    assert [type(event) for event in seen] == [
        *(events.AttemptFailed, events.RetryScheduled, events.CircuitChanged, events.AttemptFailed),
        *(events.RetryGaveUp, events.FallbackUsed, events.ExecutionFinished),
    ]
    assert [event.time for event in seen] == [1000, 1000, 1001, 1001, 1001, 1001, 1001]
    assert seen[4].reason == "circuit_open"
    seen.clear()
    assert await run(world, pipeline, Script("never asked")) == "instead"
    assert [type(event) for event in seen] == [events.CallRejected, events.FallbackUsed, events.ExecutionFinished]
    seen.clear()
    clock.advance(30)
    assert await run(world, pipeline, Script("back")) == "back"
    assert [type(event) for event in seen] == [events.CircuitChanged, events.CircuitChanged, events.ExecutionFinished]
    assert [(event.old.name, event.new.name) for event in seen[:2]] == [("OPEN", "HALF_OPEN"), ("HALF_OPEN", "CLOSED")]
