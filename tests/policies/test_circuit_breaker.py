"""CircuitBreaker: when a circuit opens, which outcomes count, outer timeouts, open periods and probes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from resilience import CircuitBreaker, CircuitOpen, Rejected, SlowRatio, backoff
from tests.conftest import Boom, FakeClock, Script, World
from tests.policies.breakers import CLOSED, HALF_OPEN, OPEN, Moves, fails

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
    for _ in range(50):
        await world.execute(breaker, Script(None, doing=lambda ctx: clock.advance(0.3)).function())
    assert breaker.state is OPEN


# --- which outcomes count ----------------------------------------------------------------------


@pytest.mark.parametrize("where", ["on", "ignore", "on_result"])
async def test_an_error_of_a_predicate_is_raised_and_not_recorded(world: World, clock: FakeClock, where: str) -> None:
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


# --- open --------------------------------------------------------------------------------------


async def test_the_refusal_of_an_open_circuit_carries_its_facts(world: World, clock: FakeClock) -> None:
    """`CircuitOpen` carries `retry_after`, the state, the last failure as text, and the name of the policy."""
    breaker = CircuitBreaker(1, open_for=12.0, name="inventory")
    script = Script("fine")
    await fails(world, breaker, Boom("connection refused"))
    clock.advance(4.5)
    error = await world.attempt(breaker, script.function())
    assert type(error) is CircuitOpen
    assert isinstance(error, Rejected)
    assert error.retry_after == pytest.approx(7.5)
    assert error.state is OPEN
    assert error.last_failure == "Boom: connection refused"
    assert error.policy == "inventory"
    assert script.calls == 0


@pytest.mark.parametrize(
    ("open_for", "periods"),
    [
        (backoff.Exponential(1.0, cap=6.0, jitter="none"), [1.0, 2.0, 4.0, 6.0, 6.0]),
        (backoff.Linear(2.0, jitter="none"), [2.0, 4.0, 6.0]),
        (backoff.Constant(7.0), [7.0, 7.0]),
        (lambda: iter([3.0, 1.0]), [3.0, 1.0, 1.0]),
        ([timedelta(seconds=2), 9], [2.0, 9.0, 9.0]),
        (4, [4.0, 4.0]),
    ],
)
def test_open_for_accepts_any_backoff(threads: World, clock: FakeClock, open_for: Any, periods: list[float]) -> None:
    """An object of `resilience.backoff`, a sequence, a callable that returns an iterable, or a number."""
    breaker = CircuitBreaker(1, open_for=open_for)
    seen = []
    for _ in periods:
        breaker.capture(lambda ctx: 1 / 0)
        seen.append(breaker.stats().retry_after or 0.0)
        clock.advance(seen[-1])
    assert seen == pytest.approx(periods)


def test_a_close_while_the_next_period_is_computed_starts_the_periods_again() -> None:
    """The next opening has the first period."""
    computing, go_on = threading.Event(), threading.Event()

    def periods() -> Iterator[float]:
        yield 5.0
        computing.set()
        go_on.wait(10)
        yield 10.0

    breaker = CircuitBreaker(1, open_for=periods)
    thread = threading.Thread(target=lambda: breaker.capture(lambda ctx: 1 / 0), daemon=True)
    thread.start()
    assert computing.wait(10)
    breaker.close()
    go_on.set()
    thread.join(10)
    assert breaker.state is CLOSED
    breaker.capture(lambda ctx: 1 / 0)
    assert breaker.stats().retry_after == pytest.approx(5.0, abs=0.5)


def test_an_error_of_the_backoff_is_raised_and_the_circuit_opens_anyway(threads: World, clock: FakeClock) -> None:
    """It opens for the last period again."""
    moves = Moves()

    def periods() -> Iterator[float]:
        yield 5.0
        raise ZeroDivisionError("a bug in the backoff")

    breaker = CircuitBreaker(1, open_for=periods, on_transition=moves)
    with pytest.raises(ZeroDivisionError, match="in the backoff"):
        breaker.execute(lambda ctx: {}["no"])
    assert breaker.state is OPEN
    assert moves.states == [OPEN]
    clock.advance(5.0)
    breaker.capture(lambda ctx: 1 / 0)
    assert breaker.stats().retry_after == pytest.approx(5.0)
    clock.advance(5.0)
    assert breaker.execute(lambda ctx: "fine") == "fine"
    assert moves.states == [OPEN, HALF_OPEN, OPEN, HALF_OPEN, CLOSED]


def test_the_text_of_a_failure_is_bounded_and_survives_a_broken_str(threads: World, clock: FakeClock) -> None:
    """An exception whose `__str__` raises has the name of its type as text; a long message is cut."""

    class Silent(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    breaker = CircuitBreaker(1)

    def fail(error: Exception) -> str:
        breaker.capture(lambda ctx: Script(error).function()(ctx).send(None))
        assert breaker.state is OPEN
        text = breaker.stats().last_failure
        assert text is not None
        breaker.close()
        return text

    assert fail(Silent()).startswith("Silent")
    assert fail(Boom("x" * 100_000)) == "Boom: " + "x" * 200
