"""CircuitBreaker: when a circuit opens, what counts, and the circuit with other policies around and inside."""

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
    Timeout,
    TimeoutExceeded,
    WorkersExhausted,
)
from tests.conftest import Boom, FakeClock, Script, World
from tests.policies.breakers import CLOSED, HALF_OPEN, OPEN, fails, works

# --- when it opens -----------------------------------------------------------------------------


async def test_five_failures_in_a_row_open_it_by_default(world: World) -> None:
    """Four do not, the fifth does, and the sixth call is not made."""
    breaker = CircuitBreaker()
    script = Script(Boom("no"))

    for _ in range(4):
        await world.attempt(breaker, script.function())
        assert breaker.state is CLOSED
    await world.attempt(breaker, script.function())
    assert breaker.state is OPEN
    assert isinstance(await world.attempt(breaker, script.function()), CircuitOpen)
    assert script.calls == 5


# --- what counts -------------------------------------------------------------------------------


OWN = [
    BulkheadFull("no room"),
    CircuitOpen("another one"),
    WorkersExhausted("none left"),
    Rejected("no"),
    DeadlineExceeded("over"),
]


@pytest.mark.parametrize("error", OWN, ids=lambda error: type(error).__name__)
async def test_what_says_nothing_about_the_dependency_is_neutral(world: World, error: Exception) -> None:
    """`Rejected` and `DeadlineExceeded` do not count unless they are named, and do not end a row either."""
    breaker = CircuitBreaker(2)

    await fails(world, breaker)
    assert await fails(world, breaker, error, times=5) is error
    assert breaker.state is CLOSED
    await fails(world, breaker)
    assert breaker.state is OPEN


@pytest.mark.parametrize("where", ["on", "ignore", "on_result"])
async def test_what_a_predicate_raises_comes_out_and_nothing_is_recorded(
    world: World, clock: FakeClock, where: str
) -> None:
    """Predicates decide. One that cannot leaves the row as it was, and gives a probe's slot back."""
    broken = ZeroDivisionError("a bug in the predicate")
    switch = [False]

    def predicate(value: object) -> bool:
        if switch[0]:
            raise broken
        return where != "ignore" and not (where == "on_result" and value == "fine")

    breaker = CircuitBreaker(2, **{where: predicate})  # type: ignore[arg-type]
    bad: Any = "not good" if where == "on_result" else Boom("no")

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
        assert await call() is broken  # a probe each: the slot is free again
    assert breaker.state is HALF_OPEN
    assert breaker.stats().probes == 0


# --- with others -------------------------------------------------------------------------------


async def test_a_timeout_around_is_neutral(world: World, clock: FakeClock) -> None:
    """The caller's patience is not the dependency's failure: not counted, and a probe's slot comes back."""
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


def test_all_worlds_share_one_circuit(clock: FakeClock) -> None:
    """Failures in a thread, in asyncio and in trio make a row; a probe in one closes it for all."""
    breaker = CircuitBreaker(3, open_for=5.0)
    worlds = [World(name) for name in ("threads", "asyncio", "trio")]
    for world in worlds:
        assert breaker.state is CLOSED
        world.run(lambda world=world: fails(world, breaker))  # type: ignore[misc]
    assert breaker.state is OPEN
    for world in worlds:
        assert isinstance(world.run(lambda world=world: works(world, breaker)), CircuitOpen)  # type: ignore[misc]
    clock.advance(5.0)
    assert worlds[2].run(lambda: works(worlds[2], breaker)) == "fine"
    assert breaker.state is CLOSED
