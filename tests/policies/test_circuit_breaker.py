"""CircuitBreaker: when a circuit opens, what counts, and the circuit with other policies around and inside."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from resilience import (
    BulkheadFull,
    CircuitBreaker,
    CircuitOpen,
    ConsecutiveFailures,
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
from tests.contention.beside import beside, until
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


async def test_a_success_ends_the_row(world: World) -> None:
    """Four failures, a success, four failures: still closed."""
    breaker = CircuitBreaker()

    for _ in range(3):
        await fails(world, breaker, times=4)
        assert await works(world, breaker) == "fine"
    assert breaker.state is CLOSED
    await fails(world, breaker, times=5)
    assert breaker.state is OPEN


@pytest.mark.parametrize("trip", [3, ConsecutiveFailures(3)])
async def test_an_int_is_so_many_failures_in_a_row(world: World, trip: Any) -> None:
    """`CircuitBreaker(3)` and `CircuitBreaker(ConsecutiveFailures(3))` are the same."""
    breaker = CircuitBreaker(trip)

    await fails(world, breaker, times=2)
    assert breaker.state is CLOSED
    await fails(world, breaker)
    assert breaker.state is OPEN


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


async def test_a_failure_ratio_over_the_last_calls(world: World) -> None:
    """The last four calls, of whatever age."""
    breaker = CircuitBreaker(FailureRatio(0.75, min_calls=2, last=4))

    await works(world, breaker, times=4)
    await fails(world, breaker, times=2)
    assert breaker.state is CLOSED
    await fails(world, breaker)
    assert breaker.state is OPEN


async def test_the_result_that_completes_min_calls_may_be_a_success(world: World) -> None:
    """Thresholds are looked at after every result; what it tells is the failure before that."""
    breaker = CircuitBreaker(FailureRatio(0.5, min_calls=3, last=4))

    await fails(world, breaker, Boom("first"))
    await fails(world, breaker, Boom("second"))
    await works(world, breaker)
    assert breaker.state is OPEN
    assert (await works(world, breaker)).last_failure == "Boom: second"


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


async def test_either_condition_opens_it(world: World, clock: FakeClock) -> None:
    """`a | b` trips on either."""

    async def slow(ctx: Context) -> str:
        clock.advance(2.0)
        return "fine"

    def built() -> CircuitBreaker:
        return CircuitBreaker(ConsecutiveFailures(3) | SlowRatio(1.0, slower_than=timedelta(seconds=2), min_calls=2))

    by_failures, by_slowness = built(), built()
    await fails(world, by_failures, times=3)
    assert by_failures.state is OPEN
    await world.attempt(by_slowness, slow)
    await world.attempt(by_slowness, slow)
    assert by_slowness.state is OPEN


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


async def test_an_ignored_call_is_not_in_a_ratio(world: World) -> None:
    """Nothing recorded is nothing in the window, neither as a call nor as a failure."""
    breaker = CircuitBreaker(FailureRatio(1.0, min_calls=3, last=3), ignore=Other)

    await fails(world, breaker, times=2)
    await fails(world, breaker, Other("no"), times=5)
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
@pytest.mark.parametrize("on", [Exception, lambda error: True, (Boom, TimeoutError)], ids=["all", "predicate", "types"])
async def test_what_says_nothing_about_the_dependency_is_neutral(world: World, error: Exception, on: Any) -> None:
    """`Rejected` and `DeadlineExceeded` do not count unless they are named, and do not end a row either."""
    breaker = CircuitBreaker(2, on=on)

    await fails(world, breaker)
    assert await fails(world, breaker, error, times=5) is error
    assert breaker.state is CLOSED
    await fails(world, breaker)
    assert breaker.state is OPEN


@pytest.mark.parametrize("error", [TimeoutExceeded("late"), TimeoutError("mine"), ConnectionError("lost")])
async def test_a_timeout_is_a_failure(world: World, error: Exception) -> None:
    """A limit that was exceeded says something about the dependency."""
    breaker = CircuitBreaker(1)

    await fails(world, breaker, error)
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


# --- building ----------------------------------------------------------------------------------


async def test_waiting_for_probes_blocks_nobody(world: World, clock: FakeClock) -> None:
    """A refusal comes at once, however long the probe takes."""
    breaker = CircuitBreaker(1, open_for=5.0)

    await fails(world, breaker)
    clock.advance(5.0)
    async with beside(world) as group:
        await group.inside(breaker)
        refused = [group.start(breaker) for _ in range(5)]
        await until(world, lambda: all(call.left.is_set() for call in refused))
        assert all(isinstance(call.outcome, CircuitOpen) for call in refused)
        assert not any(call.entered.is_set() for call in refused)
