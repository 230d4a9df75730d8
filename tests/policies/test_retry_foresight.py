"""A Retry does not wait for a refusal that it can foresee, nor for as long as a server likes."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from resilience import (
    Bulkhead,
    BulkheadFull,
    CircuitBreaker,
    CircuitIsolated,
    CircuitOpen,
    Context,
    Pipeline,
    Rejected,
    Retry,
)
from tests.conftest import Boom, FakeClock, Script, World
from tests.policies.breakers import CLOSED, OPEN


class Asks(Boom):
    """A failure that asks for a delay."""

    def __init__(self, retry_after: Any) -> None:
        super().__init__("not now")
        self.retry_after = retry_after


def reasons(heard: list[Any]) -> list[str]:
    return [event.reason for event in heard if type(event).__name__ == "RetryGaveUp"]


# --- a circuit inside ----------------------------------------------------------------------------


async def test_it_stops_with_the_failure_that_it_has(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """It slept for 8 seconds, and raised `CircuitOpen` without a note."""
    script = Script(Boom("reset"))
    pipeline = Pipeline(Retry(5, on=Boom, backoff=[8]), CircuitBreaker(1, open_for=30))
    error = await world.attempt(pipeline, script.function())
    assert isinstance(error, Boom)
    assert (script.calls, clock.sleeps) == (1, [])
    assert error.__notes__ == ["resilience: 1 attempt in 0 s, failed with Boom(reset)"]
    assert reasons(heard) == ["circuit_open"]


@pytest.mark.parametrize(("wait", "calls"), [(29.9, 1), (30, 2), (31, 2)])
async def test_it_waits_where_a_probe_is_admitted_then(world: World, clock: FakeClock, wait: float, calls: int) -> None:
    script = Script(Boom(), "fine")
    pipeline = Pipeline(Retry(5, on=Boom, backoff=[wait]), CircuitBreaker(1, open_for=30))
    await world.attempt(pipeline, script.function())
    assert script.calls == calls


async def test_the_wait_that_a_failure_asks_for_counts(world: World, clock: FakeClock) -> None:
    """The backoff alone would be too short."""
    script = Script(Asks(31), "fine")
    pipeline = Pipeline(Retry(5, on=Boom, backoff=[1]), CircuitBreaker(1, open_for=30))
    assert await world.attempt(pipeline, script.function()) == "fine"
    assert clock.sleeps == [31]


async def test_what_is_over_of_the_open_period_counts(world: World, clock: FakeClock) -> None:
    """Another caller has opened the circuit 25 seconds before this attempt failed: 5 are left, and it waits for 10."""
    breaker = CircuitBreaker(1, open_for=30)

    def raises(ctx: Context) -> None:
        raise Boom

    async def takes_long(ctx: Context) -> str:
        if ctx.attempt == 1:
            thread = threading.Thread(target=breaker.capture, args=[raises])  # with variables of its own
            thread.start()
            thread.join()
            clock.advance(25)
            raise Boom
        return "fine"

    pipeline = Pipeline(Retry(2, on=Boom, backoff=[10]), breaker)
    assert await world.attempt(pipeline, takes_long) == "fine"
    assert clock.sleeps == [10]


async def test_an_isolated_circuit_is_not_waited_for(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """It is opened manually in the middle of an attempt, and stays so for good."""
    breaker = CircuitBreaker(5)

    async def isolates(ctx: Any) -> None:
        breaker.isolate()
        raise Boom("reset")

    error = await world.attempt(Pipeline(Retry(5, on=Boom, backoff=[1e6]), breaker), isolates)
    assert isinstance(error, Boom)
    assert clock.sleeps == []
    assert reasons(heard) == ["circuit_open"]


@pytest.mark.parametrize("named", [CircuitOpen, CircuitIsolated, Rejected])
async def test_a_refusal_that_on_names_is_waited_for(world: World, clock: FakeClock, named: type[Exception]) -> None:
    script = Script(Boom(), "fine")
    pipeline = Pipeline(Retry(2, on=(Boom, named), backoff=[8]), CircuitBreaker(1, open_for=30))
    assert isinstance(await world.attempt(pipeline, script.function()), CircuitOpen)
    assert clock.sleeps == [8]


async def test_naming_another_refusal_changes_nothing(world: World, clock: FakeClock) -> None:
    pipeline = Pipeline(Retry(5, on=(Boom, BulkheadFull), backoff=[8]), CircuitBreaker(1, open_for=30))
    assert isinstance(await world.attempt(pipeline, Script(Boom()).function()), Boom)
    assert clock.sleeps == []


async def test_a_circuit_outside_is_none_of_its_business(world: World, clock: FakeClock) -> None:
    """It was asked once, before the first attempt."""
    outside = CircuitBreaker(1, open_for=30)
    script = Script(Boom(), "fine")

    async def opens(ctx: Any) -> Any:
        outside.isolate()
        return await script.function()(ctx)

    assert await world.attempt(Pipeline(outside, Retry(2, on=Boom, backoff=[8])), opens) == "fine"
    assert clock.sleeps == [8]


async def test_a_circuit_in_a_pipeline_inside_is_seen(world: World, clock: FakeClock) -> None:
    inner = Pipeline(Bulkhead(1), CircuitBreaker(1, open_for=30))
    assert isinstance(
        await world.attempt(Pipeline(Retry(5, on=Boom, backoff=[8]), inner), Script(Boom()).function()), Boom
    )
    assert clock.sleeps == []


async def test_a_result_that_is_not_good_enough_comes_back_at_once(world: World, clock: FakeClock) -> None:
    breaker = CircuitBreaker(1, open_for=30, on_result=lambda value: value is None)
    pipeline = Pipeline(Retry(5, on_result=lambda value: value is None, backoff=[8]), breaker)
    assert await world.attempt(pipeline, Script(None).function()) is None
    assert (clock.sleeps, breaker.state) == ([], OPEN)


async def test_a_half_open_circuit_is_not_foreseen(world: World, clock: FakeClock) -> None:
    """Nothing says when a probe will end: the Retry waits and asks."""
    breaker = CircuitBreaker(1, open_for=30)
    await world.attempt(breaker, Script(Boom()).function())
    clock.advance(30)
    pipeline = Pipeline(Retry(2, on=Boom, backoff=[31]), breaker)
    assert await world.attempt(pipeline, Script(Boom(), "fine").function()) == "fine"
    assert breaker.state is CLOSED


# --- a refusal that could not be foreseen --------------------------------------------------------


async def refused_after(world: World, clock: FakeClock, *failures: Exception) -> Any:
    """Return what comes out where the attempts fail so, and the next one is refused."""
    bulkhead = Bulkhead(1)
    taken = bulkhead.slot()

    def takes_it(event: Any) -> None:
        if event.attempt == len(failures):
            taken.__enter__()

    retry = Retry(5, on=Boom, backoff=[1], on_retry=takes_it)
    return await world.attempt(Pipeline(retry, bulkhead), Script(*failures).function())


async def test_a_refusal_after_failures_has_their_history_and_the_last_one(world: World, clock: FakeClock) -> None:
    first, last = Boom("first"), Boom("last")
    error = await refused_after(world, clock, first, last)
    assert isinstance(error, BulkheadFull)
    assert error.__context__ is last
    assert len(error.__notes__) == 1
    assert error.__notes__ == ["resilience: 2 attempts in 2 s, failed with Boom(first), Boom(last)"]


async def test_a_refusal_in_a_block_after_failures_has_their_history(world: World, clock: FakeClock) -> None:
    """What failed was let go of before the next attempt."""
    steps = iter([Boom("first"), Boom("last"), BulkheadFull("no")])
    with pytest.raises(BulkheadFull) as caught:
        if world.blocking:
            for attempt in Retry(5, on=Boom, backoff=[1]).attempts():
                with attempt:
                    raise next(steps)
        else:
            async for attempt in Retry(5, on=Boom, backoff=[1]).attempts():
                with attempt:
                    raise next(steps)
    assert caught.value.__notes__ == ["resilience: 2 attempts in 2 s, failed with Boom(first), Boom(last)"]


async def test_a_circuit_that_another_caller_opens_in_the_wait(world: World, clock: FakeClock) -> None:
    """The refusal is made without `__init__`, and carries the note nevertheless."""
    breaker = CircuitBreaker(5, open_for=30)
    failed = Boom("reset")
    retry = Retry(5, on=Boom, backoff=[1], on_retry=lambda event: breaker.isolate())
    error = await world.attempt(Pipeline(retry, breaker), Script(failed).function())
    assert isinstance(error, CircuitIsolated)
    assert error.__context__ is failed
    assert error.__notes__[0].endswith("failed with Boom(reset)")


async def test_a_refusal_keeps_the_context_that_it_has(world: World, clock: FakeClock) -> None:
    cause = KeyError("token")
    refusal = Rejected("no token", policy="tokens")
    refusal.__context__ = cause
    error = await world.attempt(Retry(5, on=Boom, backoff=[1]), Script(Boom("reset"), refusal).function())
    assert error is refusal
    assert error.__context__ is cause
    assert error.__notes__[0].endswith("failed with Boom(reset)")


async def test_a_group_of_refusals_is_a_refusal(world: World, clock: FakeClock) -> None:
    """As child tasks raise it, nested or not. A group with something else in it is none."""
    failed, refused = Boom("reset"), BulkheadFull("full")
    retry = Retry(5, on=Boom, backoff=[1])
    refusals = ExceptionGroup("two children", [refused, ExceptionGroup("its own", [CircuitOpen("open")])])
    assert await world.attempt(retry, Script(failed, refusals).function()) is refusals
    assert refusals.__context__ is failed
    assert refusals.__notes__ == ["resilience: 1 attempt in 1 s, failed with Boom(reset)"]
    mixed = ExceptionGroup("two children", [refused, KeyError()])
    assert await world.attempt(retry, Script(failed, mixed).function()) is mixed
    assert not hasattr(mixed, "__notes__")


async def test_a_refusal_of_the_first_attempt_carries_nothing(world: World) -> None:
    breaker = CircuitBreaker(1)
    breaker.isolate()
    error = await world.attempt(Pipeline(Retry(5, on=Boom), breaker), Script("never").function())
    assert isinstance(error, CircuitIsolated)
    assert error.__context__ is None
    assert not hasattr(error, "__notes__")


# --- max_retry_after -----------------------------------------------------------------------------


async def test_a_day_is_not_waited_for(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """It gives up at once, with the failure, though there is no deadline."""
    script = Script(Asks(86_400), "fine")
    error = await world.attempt(Retry(3, on=Boom, backoff=[1]), script.function())
    assert isinstance(error, Asks)
    assert (script.calls, clock.sleeps) == (1, [])
    assert reasons(heard) == ["retry_after"]
    assert error.__notes__[0].endswith("failed with Asks(not now)")


@pytest.mark.parametrize(("asked", "sleeps"), [(300, [300]), (300.1, []), (timedelta(minutes=5), [300])])
async def test_the_cap_is_300_seconds(world: World, clock: FakeClock, asked: Any, sleeps: list[float]) -> None:
    await world.attempt(Retry(2, on=Boom, backoff=[1]), Script(Asks(asked), "fine").function())
    assert clock.sleeps == sleeps


@pytest.mark.parametrize(("cap", "sleeps"), [(10, []), (timedelta(seconds=60), [60]), (float("inf"), [60])])
async def test_the_cap_can_be_set(world: World, clock: FakeClock, cap: Any, sleeps: list[float]) -> None:
    retry = Retry(2, on=Boom, backoff=[1], max_retry_after=cap)
    await world.attempt(retry, Script(Asks(60), "fine").function())
    assert clock.sleeps == sleeps


async def test_the_own_backoff_may_be_longer_than_the_cap(world: World, clock: FakeClock) -> None:
    """What the user has written is no server's word; and a server that asks for less changes nothing."""
    retry = Retry(2, on=Boom, backoff=[3600], max_retry_after=1)
    assert await world.attempt(retry, Script(Asks(60), "fine").function()) == "fine"
    assert clock.sleeps == [3600]


async def test_what_is_not_read_is_not_capped(world: World, clock: FakeClock) -> None:
    retry = Retry(2, on=Boom, backoff=[1], retry_after=False)
    assert await world.attempt(retry, Script(Asks(86_400), "fine").function()) == "fine"
    assert clock.sleeps == [1]


def test_a_block_gives_up_as_well(clock: FakeClock) -> None:
    with pytest.raises(Asks):  # the loop is what raises
        for attempt in Retry(3, on=Boom, backoff=[1]).attempts():
            with attempt:
                raise Asks(86_400)
    assert clock.sleeps == []
