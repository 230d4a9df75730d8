"""CircuitBreaker: moved manually, and around a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from resilience import CircuitBreaker, CircuitIsolated, CircuitOpen, DeadlineExceeded, SlowRatio
from tests.conftest import Boom, FakeClock, Script, World
from tests.contention.beside import beside
from tests.policies.breakers import CLOSED, HALF_OPEN, ISOLATED, OPEN, Other, fails, works


def raising(error: Exception) -> Callable[[object], bool]:
    def predicate(value: object) -> bool:
        raise error

    return predicate


# --- by hand -----------------------------------------------------------------------------------


async def test_an_isolated_circuit_refuses_until_a_hand_closes_it(world: World, clock: FakeClock) -> None:
    """No time is long enough, and nobody can say when to come back."""
    breaker = CircuitBreaker(name="inventory")
    script = Script("fine")

    breaker.isolate()
    assert breaker.state is ISOLATED
    clock.advance(1e6)
    error = await world.attempt(breaker, script.function())
    assert breaker.state is ISOLATED
    breaker.close()
    assert await world.attempt(breaker, script.function()) == "fine"
    assert type(error) is CircuitIsolated
    assert isinstance(error, CircuitOpen)
    assert (error.retry_after, error.state, error.policy) == (None, ISOLATED, "inventory")
    assert script.calls == 1


async def test_stats_tell_what_the_breaker_knows(world: World, clock: FakeClock) -> None:
    """State, when to come back, the failure as text, probes that are out, how often it opened and refused."""
    breaker = CircuitBreaker(1, open_for=5.0)

    def facts() -> tuple[Any, ...]:
        it = breaker.stats()
        return it.state, it.retry_after, it.last_failure, it.probes, it.opened, it.rejected

    assert facts() == (CLOSED, None, None, 0, 0, 0)
    await fails(world, breaker)
    assert facts() == (OPEN, pytest.approx(5.0), "Boom: no", 0, 1, 0)
    await works(world, breaker, times=3)
    assert facts() == (OPEN, pytest.approx(5.0), "Boom: no", 0, 1, 3)
    clock.advance(5.0)
    async with beside(world) as group:
        probe = await group.inside(breaker, Boom("again"))
        assert facts() == (HALF_OPEN, None, "Boom: no", 1, 1, 3)
        await works(world, breaker)
        assert facts() == (HALF_OPEN, None, "Boom: no", 1, 1, 4)
        probe.let_go()
        await probe.result()
    assert facts() == (OPEN, pytest.approx(5.0), "Boom: again", 0, 2, 4)
    stats = breaker.stats()
    assert stats.failure_type == "Boom"
    assert "Boom" in repr(stats)
    assert "again" not in repr(stats)
    breaker.isolate()
    assert facts() == (ISOLATED, None, None, 0, 2, 4)
    assert breaker.stats().failure_type is None
    breaker.close()
    assert facts() == (CLOSED, None, None, 0, 2, 4)


# --- guard: a block ----------------------------------------------------------------------------


class Block:
    """`with breaker.guard():` in threads, `async with` in tasks, around something that answers or raises."""

    def __init__(self, world: World, breaker: CircuitBreaker) -> None:
        self._world = world
        self._breaker = breaker
        self.entered = 0

    async def __call__(self, answer: Any = "fine") -> Any:
        """Run the block and return what came out of it, as a value."""
        try:
            if self._world.blocking:
                with self._breaker.guard():
                    return self._inside(answer)
            async with self._breaker.guard():
                await anyio.lowlevel.checkpoint()
                return self._inside(answer)
        except Exception as error:
            return error

    def _inside(self, answer: Any) -> Any:
        self.entered += 1
        if isinstance(answer, BaseException):
            raise answer
        return answer


async def test_a_guarded_block_counts_and_really_refuses(world: World, clock: FakeClock) -> None:
    """What the block raises is recorded, and while the circuit is open the block is not entered."""
    breaker = CircuitBreaker(2, open_for=5.0)
    block = Block(world, breaker)

    error = Boom("no")
    assert await block(error) is error
    assert await block() == "fine"
    await block(error)
    assert breaker.state is CLOSED
    await block(error)
    assert breaker.state is OPEN
    assert block.entered == 4
    refused = await block()
    assert isinstance(refused, CircuitOpen)
    assert refused.retry_after == pytest.approx(5.0)
    assert block.entered == 4
    clock.advance(5.0)
    assert await block() == "fine"
    assert breaker.state is CLOSED


async def test_a_guarded_block_judges_as_a_call_does(world: World) -> None:
    """`on` and `ignore`; and `on_result` has nothing to look at."""
    seen: list[object] = []
    breaker = CircuitBreaker(2, on=Boom, ignore=KeyError, on_result=lambda value: seen.append(value) is None)
    block = Block(world, breaker)

    await block(Boom("no"))
    for _ in range(3):
        await block(KeyError("neutral"))
        await block(DeadlineExceeded("neutral"))
    await block(Other("a success"))
    await block(Boom("no"))
    assert breaker.state is CLOSED
    await block()
    await block(Boom("no"))
    assert breaker.state is CLOSED
    await block(Boom("no"))
    assert breaker.state is OPEN
    assert seen == []


async def test_a_guarded_block_counts_its_time(world: World, clock: FakeClock) -> None:
    """A slow block is a slow call, and a fast one is not."""
    breaker = CircuitBreaker(SlowRatio(1.0, slower_than=2.0, min_calls=2, last=2))

    async def block(seconds: float) -> None:
        if world.blocking:
            with breaker.guard():
                clock.advance(seconds)
        else:
            async with breaker.guard():
                clock.advance(seconds)

    await block(2.0)
    await block(1.9)
    await block(2.0)
    assert breaker.state is CLOSED
    await block(2.0)
    assert breaker.state is OPEN


def test_an_interrupted_block_counts_nothing(threads: World, clock: FakeClock) -> None:
    """And a probe's slot is free again."""
    breaker = CircuitBreaker(1, open_for=5.0)
    with pytest.raises(KeyboardInterrupt), breaker.guard():
        raise KeyboardInterrupt
    assert breaker.state is CLOSED
    breaker.capture(lambda ctx: 1 / 0)
    clock.advance(5.0)
    with pytest.raises(KeyboardInterrupt), breaker.guard():
        raise KeyboardInterrupt
    assert breaker.stats().probes == 0
    with breaker.guard():
        pass
    assert breaker.state is CLOSED


async def test_what_a_predicate_raises_at_the_end_of_a_block_comes_out(world: World) -> None:
    """As it does from a call; the error of the block is its context."""
    broken = ZeroDivisionError("a bug")
    block = Block(world, CircuitBreaker(1, on=raising(broken)))
    original = Boom("no")

    assert await block(original) is broken
    assert broken.__context__ is original


def test_a_guard_in_use_is_refused(threads: World) -> None:
    """One guard, one block at a time; it can be used again afterwards, and guards may nest."""
    breaker = CircuitBreaker(1)
    guard = breaker.guard()
    with guard, pytest.raises(RuntimeError, match="in use"):
        guard.__enter__()
    with guard, breaker.guard():
        pass
    assert breaker.state is CLOSED


def test_a_guard_that_refused_counts_nothing_when_it_is_left(threads: World) -> None:
    """`ExitStack` and hand-written code may leave what they could not enter."""
    breaker = CircuitBreaker(1)
    breaker.isolate()
    guard = breaker.guard()
    with pytest.raises(CircuitIsolated):
        guard.__enter__()
    guard.__exit__(None, None, None)
    breaker.close()
    with guard:
        pass
