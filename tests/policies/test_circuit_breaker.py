"""CircuitBreaker: when a circuit opens, which outcomes count, and outer timeouts."""

from __future__ import annotations

from typing import Any

import pytest

from resilience import (
    BulkheadFull,
    CircuitBreaker,
    CircuitOpen,
    Context,
    DeadlineExceeded,
    Rejected,
    SlowRatio,
    Timeout,
    TimeoutExceeded,
    WorkersExhausted,
)
from tests.conftest import Boom, FakeClock, Script, World
from tests.policies.breakers import CLOSED, HALF_OPEN, OPEN, fails

# --- opening -----------------------------------------------------------------------------------


async def test_five_consecutive_failures_open_a_circuit_by_default(world: World) -> None:
    """The sixth call is not made."""
    breaker = CircuitBreaker()
    script = Script(Boom("no"))

    for _ in range(4):
        await world.attempt(breaker, script.function())
        assert breaker.state is CLOSED
    await world.attempt(breaker, script.function())
    assert breaker.state is OPEN
    assert isinstance(await world.attempt(breaker, script.function()), CircuitOpen)
    assert script.calls == 5


async def test_a_call_that_takes_exactly_the_limit_is_slow_despite_rounding(world: World, clock: FakeClock) -> None:
    """In floats, (now + 0.3) - now is less than 0.3 at many instants."""
    breaker = CircuitBreaker(SlowRatio(1.0, slower_than=0.3, min_calls=50, last=50))

    async def fn(ctx: Context) -> None:
        clock.advance(0.3)

    for _ in range(50):
        await world.execute(breaker, fn)
    assert breaker.state is OPEN


# --- which outcomes count ----------------------------------------------------------------------


async def test_rejections_and_exceeded_deadlines_neither_count_nor_end_a_row(world: World) -> None:
    """They say nothing about the dependency, unless they are in `on`."""
    breaker = CircuitBreaker(2)
    await fails(world, breaker)
    for error in (BulkheadFull(), CircuitOpen(), WorkersExhausted(), Rejected(), DeadlineExceeded()):
        assert await fails(world, breaker, error, times=2) is error
    assert breaker.state is CLOSED
    await fails(world, breaker)
    assert breaker.state is OPEN


@pytest.mark.parametrize("where", ["on", "ignore", "on_result"])
async def test_an_error_of_a_predicate_is_raised_and_the_call_is_not_recorded(
    world: World, clock: FakeClock, where: str
) -> None:
    """The row of failures stays as it was, and a probe releases its slot."""
    broken = ZeroDivisionError("a bug in the predicate")
    switch = [False]

    def predicate(value: object) -> bool:
        if switch[0]:
            raise broken
        return where != "ignore" and not (where == "on_result" and value == "fine")

    breaker = CircuitBreaker(2, **{where: predicate})  # type: ignore[arg-type]
    bad: Any = "bad" if where == "on_result" else Boom("no")

    async def call() -> Any:
        return await world.attempt(breaker, Script(bad).function())

    await call()
    switch[0] = True
    for _ in range(3):
        error = await call()
        assert error is broken
    assert breaker.state is CLOSED
    switch[0] = False
    await call()
    assert breaker.state is OPEN
    clock.advance(30.0)
    switch[0] = True
    for _ in range(3):
        assert await call() is broken  # each call is a probe: the slot was released
    assert breaker.state is HALF_OPEN
    assert breaker.stats().probes == 0


async def test_an_outer_timeout_does_not_count_and_releases_the_slot_of_a_probe(world: World, clock: FakeClock) -> None:
    """The impatience of a caller is no failure of the dependency."""
    breaker = CircuitBreaker(1, open_for=5.0)

    async def hang(ctx: Context) -> None:
        await world.hang()

    for _ in range(2):
        assert isinstance(await world.attempt(Timeout(0.02).wrap(breaker), hang), TimeoutExceeded)
    assert breaker.state is CLOSED
    await fails(world, breaker)
    clock.advance(5.0)
    assert isinstance(await world.attempt(Timeout(0.02).wrap(breaker), hang), TimeoutExceeded)
    assert breaker.state is HALF_OPEN
    assert breaker.stats().probes == 0
    world.release()
