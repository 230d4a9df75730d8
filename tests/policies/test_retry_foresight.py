"""Retry: no wait for an open circuit inside, notes on refusals, and `max_retry_after`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from resilience import Bulkhead, Cache, CircuitBreaker, Context, Fallback, Keyed, Pipeline, Policy, Retry
from resilience.errors import BulkheadFull, CircuitIsolated, CircuitOpen, Rejected
from tests.callers import in_threads
from tests.conftest import Boom, FakeClock, Script, World
from tests.functions import raising
from tests.policies.breakers import CLOSED, OPEN


class BoomRetryAfter(Boom):
    """A failure with a `retry_after`."""

    def __init__(self, retry_after: Any) -> None:
        super().__init__("not now")
        self.retry_after = retry_after


def reasons(heard: list[Any]) -> list[str]:
    return [event.reason for event in heard if type(event).__name__ == "RetryGaveUp"]


# --- an inner circuit ----------------------------------------------------------------------------


@pytest.mark.parametrize("around", [[], [Bulkhead(1)]], ids=["alone", "in an inner pipeline"])
async def test_the_last_failure_is_raised_at_once_if_the_inner_circuit_stays_open(
    world: World, clock: FakeClock, heard: list[Any], around: list[Policy[Any]]
) -> None:
    """The next attempt after 8 s would be refused with `CircuitOpen`."""
    script = Script(Boom("reset"))
    pipeline = Pipeline(Retry(5, on=Boom, backoff=[8]), Pipeline(*around, CircuitBreaker(1, open_for=30)))
    error = await world.attempt(pipeline, script.function())
    assert isinstance(error, Boom)
    assert (script.calls, clock.sleeps) == (1, [])
    assert error.__notes__ == ["resilience: 1 attempt in 0 s, failed with Boom(reset)"]
    assert reasons(heard) == ["circuit_open"]


@pytest.mark.parametrize(
    ("failure", "wait", "calls"),
    [(Boom(), 29.9, 1), (Boom(), 30, 2), (Boom(), 31, 2), (BoomRetryAfter(31), 1, 2)],
    ids=["too early", "in time", "later", "retry_after"],
)
async def test_a_wait_until_a_probe_is_admitted_begins(
    threads: World, clock: FakeClock, failure: Exception, wait: float, calls: int
) -> None:
    """`retry_after` counts as part of the wait."""
    script = Script(failure, "fine")
    pipeline = Pipeline(Retry(5, on=Boom, backoff=[wait]), CircuitBreaker(1, open_for=30))
    await threads.attempt(pipeline, script.function())
    assert script.calls == calls


async def test_only_the_rest_of_the_open_period_counts(world: World, clock: FakeClock) -> None:
    """Another caller opened the circuit 25 s before this attempt failed: of 30 s 5 s are left, and the wait is 10 s."""
    breaker = CircuitBreaker(1, open_for=30)

    async def fail_after_25_seconds(ctx: Context) -> str:
        if ctx.attempt == 1:
            in_threads(lambda: breaker.capture(raising(Boom)))  # in a context of its own
            clock.advance(25)
            raise Boom
        return "fine"

    pipeline = Pipeline(Retry(2, on=Boom, backoff=[10]), breaker)
    assert await world.attempt(pipeline, fail_after_25_seconds) == "fine"
    assert clock.sleeps == [10]


async def test_no_wait_is_started_for_an_isolated_circuit(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """Here it is isolated during an attempt."""
    breaker = CircuitBreaker(5)
    isolates = Script(Boom("reset"), doing=lambda ctx: breaker.isolate()).function()
    error = await world.attempt(Pipeline(Retry(5, on=Boom, backoff=[1e6]), breaker), isolates)
    assert isinstance(error, Boom)
    assert clock.sleeps == []
    assert reasons(heard) == ["circuit_open"]


@pytest.mark.parametrize(
    ("named", "waits"), [(CircuitOpen, True), (CircuitIsolated, True), (Rejected, True), (BulkheadFull, False)]
)
async def test_a_wait_begins_if_on_has_the_refusal(
    threads: World, clock: FakeClock, named: type[Exception], waits: bool
) -> None:
    pipeline = Pipeline(Retry(2, on=(Boom, named), backoff=[8]), CircuitBreaker(1, open_for=30))
    error = await threads.attempt(pipeline, Script(Boom()).function())
    assert isinstance(error, CircuitOpen if waits else Boom)
    assert clock.sleeps == [8] * waits


async def test_an_outer_circuit_is_ignored(world: World, clock: FakeClock) -> None:
    """It admitted the execution before the first attempt."""
    outside = CircuitBreaker(1, open_for=30)
    script = Script(Boom(), "fine")

    async def opens(ctx: Any) -> Any:
        outside.isolate()
        return await script.function()(ctx)

    assert await world.attempt(Pipeline(outside, Retry(2, on=Boom, backoff=[8])), opens) == "fine"
    assert clock.sleeps == [8]


async def test_a_circuit_inside_a_fallback_is_ignored(world: World, clock: FakeClock) -> None:
    """It answers the refusal of the next attempt."""
    pipeline = Pipeline(Retry(2, on=Boom, backoff=[8]), Fallback("kept", on=CircuitOpen), CircuitBreaker(1))
    assert await world.attempt(pipeline, Script(Boom()).function()) == "kept"
    assert clock.sleeps == [8]


async def test_a_circuit_inside_a_cache_is_ignored(world: World, clock: FakeClock) -> None:
    """It answers the refusal of the next attempt with an old value."""
    cache, breaker = Cache(1, key=lambda ctx: 1, stale=60, on=CircuitOpen), CircuitBreaker(1)
    pipeline = Pipeline(Retry(2, on=Boom, backoff=[8]), cache, breaker)
    function = Script("old", Boom()).function()
    assert await world.attempt(pipeline, function) == "old"
    clock.advance(2)
    assert await world.attempt(pipeline, function) == "old"
    assert clock.sleeps == [8]


async def test_a_circuit_around_a_fallback_is_not_ignored(world: World, clock: FakeClock) -> None:
    """Nor is a `Fallback` around the Retry, which answers at once."""
    inside = Pipeline(CircuitBreaker(1), Fallback("kept", on=CircuitOpen))
    pipeline = Pipeline(Fallback("answer", on=Boom), Retry(2, on=Boom, backoff=[8]), inside)
    assert await world.attempt(pipeline, Script(Boom()).function()) == "answer"
    assert clock.sleeps == []


async def test_a_circuit_is_found_in_a_pipeline_that_a_keyed_has_chosen(world: World, clock: FakeClock) -> None:
    """The Retry is in it, too. One around the `Keyed` waits, as the next attempt may have another key."""
    hosts = Keyed(lambda host: Pipeline(Retry(5, on=Boom, backoff=[8]), CircuitBreaker(1, open_for=30)), lambda ctx: 1)
    assert isinstance(await world.attempt(Pipeline(Bulkhead(1), hosts), Script(Boom()).function()), Boom)
    assert clock.sleeps == []
    replicas = Keyed(lambda number: CircuitBreaker(1, open_for=30), lambda ctx: ctx.attempt)
    script = Script(Boom(), "fine")
    assert await world.attempt(Pipeline(Retry(5, on=Boom, backoff=[8]), replicas), script.function()) == "fine"
    assert clock.sleeps == [8]


async def test_a_bad_result_is_returned_at_once_if_the_inner_circuit_stays_open(world: World, clock: FakeClock) -> None:
    breaker = CircuitBreaker(1, open_for=30, on_result=lambda value: value is None)
    pipeline = Pipeline(Retry(5, on_result=lambda value: value is None, backoff=[8]), breaker)
    assert await world.attempt(pipeline, Script(None).function()) is None
    assert (clock.sleeps, breaker.state) == ([], OPEN)


async def test_a_half_open_circuit_does_not_prevent_the_wait(world: World, clock: FakeClock) -> None:
    """The end of a probe cannot be predicted."""
    breaker = CircuitBreaker(1, open_for=30)
    await world.attempt(breaker, Script(Boom()).function())
    clock.advance(30)
    pipeline = Pipeline(Retry(2, on=Boom, backoff=[31]), breaker)
    assert await world.attempt(pipeline, Script(Boom(), "fine").function()) == "fine"
    assert breaker.state is CLOSED


# --- a refusal after a wait ----------------------------------------------------------------------


FIRST, LAST, REFUSED = Boom("first"), Boom("last"), BulkheadFull("full")


@pytest.mark.parametrize(
    ("steps", "note", "context"),
    [
        ([FIRST, LAST, REFUSED], ["resilience: 2 attempts in 2 s, failed with Boom(first), Boom(last)"], LAST),
        ([FIRST, None, REFUSED], ["resilience: 2 attempts in 2 s, failed with Boom(first), result(NoneType)"], None),
        ([REFUSED], [], None),
    ],
    ids=["errors", "a bad result", "the first attempt"],
)
async def test_a_refusal_has_a_note_about_the_failures_and_the_last_one_as_context(
    world: World, clock: FakeClock, steps: list[Any], note: list[str], context: Exception | None
) -> None:
    """A result cannot be a context. One that it has already is kept."""
    retry = Retry(5, on=Boom, on_result=lambda it: it is None, backoff=[1])
    for own in (None, KeyError("token")):
        REFUSED.__context__, REFUSED.__notes__ = own, []
        assert await world.attempt(retry, Script(*steps).function()) is REFUSED
        assert REFUSED.__context__ is (own or context)
        assert REFUSED.__notes__ == note


async def test_a_refusal_of_a_circuit_that_opens_during_the_wait_has_a_note(world: World, clock: FakeClock) -> None:
    """That refusal is constructed without `__init__`."""
    breaker = CircuitBreaker(5, open_for=30)
    failed = Boom("reset")
    retry = Retry(5, on=Boom, backoff=[1], on_retry=lambda event: breaker.isolate())
    error = await world.attempt(Pipeline(retry, breaker), Script(failed).function())
    assert isinstance(error, CircuitIsolated)
    assert error.__context__ is failed
    assert error.__notes__[0].endswith("failed with Boom(reset)")


async def test_a_refusal_in_an_except_block_has_the_last_failure_as_context(world: World, clock: FakeClock) -> None:
    """The context of that one is the error that the caller handles."""
    handled, last = KeyError("outside"), Boom("last")
    try:
        raise handled
    except KeyError:
        error = await world.attempt(Retry(5, on=Boom), Script(last, BulkheadFull("full")).function())
    assert error.__context__ is last
    assert last.__context__ is handled


async def test_a_group_that_contains_only_refusals_is_a_refusal(world: World, clock: FakeClock) -> None:
    """The group may be nested, as child tasks raise it."""
    failed, refused = Boom("reset"), BulkheadFull("full")
    retry = Retry(5, on=Boom, backoff=[1])
    refusals = ExceptionGroup("two children", [refused, ExceptionGroup("nested", [CircuitOpen("open")])])
    assert await world.attempt(retry, Script(failed, refusals).function()) is refusals
    assert refusals.__context__ is failed
    assert refusals.__notes__ == ["resilience: 1 attempt in 1 s, failed with Boom(reset)"]
    mixed = ExceptionGroup("two children", [refused, KeyError()])
    assert await world.attempt(retry, Script(failed, mixed).function()) is mixed
    assert not hasattr(mixed, "__notes__")


# --- max_retry_after -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "retry_after", "sleeps"),
    [
        ({}, 300, [300]),
        ({}, timedelta(minutes=5), [300]),
        ({}, 300.1, []),
        ({}, float("inf"), []),
        ({"max_retry_after": 10}, 60, []),
        ({"max_retry_after": timedelta(seconds=60)}, 60, [60]),
        ({"max_retry_after": float("inf")}, 60, [60]),
        ({"max_retry_after": 1, "backoff": [3600]}, 60, [3600]),
        ({"retry_after": False}, 86_400, [1]),
    ],
)
async def test_max_retry_after_is_300_seconds_by_default_and_holds_for_delays_that_a_service_requests(
    threads: World, clock: FakeClock, settings: dict[str, Any], retry_after: Any, sleeps: list[float]
) -> None:
    """The backoff may exceed it, and a `retry_after` that is not read is not capped."""
    retry = Retry(2, **{"on": Boom, "backoff": [1], **settings})
    await threads.attempt(retry, Script(BoomRetryAfter(retry_after), "fine").function())
    assert clock.sleeps == sleeps
