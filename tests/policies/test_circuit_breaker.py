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
    FailureRatio,
    Rejected,
    SlowRatio,
    Timeout,
    TimeoutExceeded,
    WorkersExhausted,
)
from tests.conftest import Boom, FakeClock, Script, World
from tests.policies.breakers import CLOSED, HALF_OPEN, OPEN, Other, fails, works

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


async def test_a_failure_ratio_over_time_forgets(world: World, clock: FakeClock) -> None:
    """Half of at least four calls within ten seconds: older ones do not count."""
    breaker = CircuitBreaker(FailureRatio(0.5, min_calls=4, window=10.0))

    await fails(world, breaker, times=3)
    clock.advance(10.0)
    await fails(world, breaker)
    await works(world, breaker, times=2)
    assert breaker.state is CLOSED  # one failure of three
    await fails(world, breaker)
    assert breaker.state is OPEN  # two of four


async def test_slow_calls_open_it(world: World, clock: FakeClock) -> None:
    """Half of at least two calls that took a second or more; slow failures count as slow, fast ones do not."""

    async def takes(seconds: float, error: Exception | None = None) -> None:
        async def fn(ctx: Context) -> str:
            clock.advance(seconds)
            if error is not None:
                raise error
            return "fine"

        await world.attempt(breaker, fn)

    breaker = CircuitBreaker(SlowRatio(0.5, slower_than=1.0, min_calls=2))
    await takes(0.99)
    await takes(0.5, Boom("fast"))
    await takes(0.99)
    assert breaker.state is CLOSED
    await takes(1.0)
    await takes(7.0, Boom("slow"))
    assert breaker.state is CLOSED  # two of five
    await takes(1.0)
    assert breaker.state is OPEN  # three of six


async def test_the_time_that_counts_is_that_of_the_call_alone(world: World, clock: FakeClock) -> None:
    """What passes between two calls makes neither of them slow."""
    breaker = CircuitBreaker(SlowRatio(0.1, slower_than=1.0, min_calls=1))

    for _ in range(5):
        await works(world, breaker)
        clock.advance(5.0)
    assert breaker.state is CLOSED


# --- what counts -------------------------------------------------------------------------------


async def test_what_on_does_not_name_is_a_success(world: World) -> None:
    """The dependency has answered: a row of failures ends."""
    breaker = CircuitBreaker(2, on=Boom)
    await fails(world, breaker)
    error = Other("an answer")
    assert await fails(world, breaker, error) is error
    await fails(world, breaker)
    assert breaker.state is CLOSED
    await fails(world, breaker)
    assert breaker.state is OPEN


@pytest.mark.parametrize("ignore", [Other, (Other, KeyError), lambda error: isinstance(error, Other)])
async def test_an_ignored_exception_is_neither_a_failure_nor_a_success(world: World, ignore: Any) -> None:
    """Nothing is recorded: it does not open, and it does not end the row."""
    breaker = CircuitBreaker(3, ignore=ignore)

    await fails(world, breaker, times=2)
    error = Other("ignored")
    assert await fails(world, breaker, error, times=9) is error
    assert breaker.state is CLOSED
    await fails(world, breaker)
    assert breaker.state is OPEN


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


async def test_on_result_makes_an_answer_a_failure(world: World) -> None:
    """The answer comes out as it is, and counts as a failure; others count as successes."""
    breaker = CircuitBreaker(2, on_result=lambda status: status >= 500)

    async def answer(status: int) -> Any:
        return await world.attempt(breaker, Script(status).function())

    assert await answer(503) == 503
    assert await answer(200) == 200
    assert await answer(503) == 503
    assert breaker.state is CLOSED
    assert await answer(500) == 500
    assert breaker.state is OPEN
    refused = await answer(200)
    assert isinstance(refused, CircuitOpen)
    assert refused.last_failure == "result: int"


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


async def test_a_timeout_inside_is_a_failure(world: World) -> None:
    """A limit that belongs to the call says that the dependency was too slow."""
    breaker = CircuitBreaker(2)
    pipeline = breaker.wrap(Timeout(0.02))

    async def hang(ctx: Context) -> None:
        await world.hang()

    for _ in range(2):
        assert isinstance(await world.attempt(pipeline, hang), TimeoutExceeded)
    assert breaker.state is OPEN
    world.release()


async def test_a_deadline_that_ends_a_timeout_inside_is_neutral(world: World) -> None:
    """It was the caller who had no time left."""
    breaker = CircuitBreaker(1)
    pipeline = breaker.wrap(Timeout(60.0))

    async def hang(ctx: Context) -> None:
        await world.hang()

    error = await world.attempt(pipeline, hang, Context(timeout=0.02))
    assert isinstance(error, DeadlineExceeded)
    assert breaker.state is CLOSED
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
