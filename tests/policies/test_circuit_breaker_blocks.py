"""CircuitBreaker: manual changes, statistics, and `guard()` around a block."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from resilience import CircuitBreaker, CircuitIsolated, CircuitOpen, CircuitState, DeadlineExceeded, SlowRatio
from tests.callers import in_threads
from tests.conftest import Boom, FakeClock, Other, World
from tests.contention.beside import beside
from tests.functions import raising
from tests.policies.blocks import entered
from tests.policies.breakers import CLOSED, HALF_OPEN, ISOLATED, OPEN, fails, works

# --- manual changes and statistics -------------------------------------------------------------


async def test_an_isolated_circuit_refuses_calls_until_it_is_closed(world: World, clock: FakeClock) -> None:
    """No time ends that, and the refusal has no `retry_after`."""
    breaker = CircuitBreaker(name="inventory")
    breaker.isolate()
    clock.advance(1e6)
    error = await works(world, breaker)
    assert type(error) is CircuitIsolated
    assert (error.retry_after, error.state, error.policy) == (None, ISOLATED, "inventory")
    assert breaker.state is ISOLATED
    breaker.close()
    assert await works(world, breaker) == "fine"


@pytest.mark.parametrize("state", [OPEN, HALF_OPEN, ISOLATED])
def test_a_bare_call_is_refused_as_any_other(clock: FakeClock, state: CircuitState) -> None:
    """A blocking `call` without a listener or a context around it takes a shorter way."""
    breaker, refused = CircuitBreaker(1, open_for=5.0), list[CircuitState]()

    def call() -> None:
        try:
            breaker.call(int)
        except CircuitOpen as error:
            refused.append(error.state)

    breaker.capture(raising(Boom()))
    if state is HALF_OPEN:
        clock.advance(5.0)
        breaker.call(in_threads, call)
    else:
        if state is ISOLATED:
            breaker.isolate()
        call()
    assert refused == [state]


async def test_a_half_open_circuit_refuses_calls_beside_its_probes(world: World, clock: FakeClock) -> None:
    """The slot of a probe that has ended is used again."""
    breaker = CircuitBreaker(1, open_for=5.0, probes=2, probe_successes=9)
    await fails(world, breaker, Boom("down"))
    clock.advance(5.0)
    async with beside(world) as group:
        calls = [await group.inside(breaker) for _ in range(2)]
        refused = await works(world, breaker)
        assert type(refused) is CircuitOpen
        assert (refused.state, refused.retry_after, refused.last_failure) == (HALF_OPEN, None, "Boom: down")
        calls[0].let_go()
        await calls[0].result()
        assert await works(world, breaker) == "fine"


async def test_statistics_follow_the_circuit_through_its_states(world: World, clock: FakeClock) -> None:
    """State, `retry_after`, the last failure as text, running probes, openings and refusals."""
    breaker = CircuitBreaker(1, open_for=5.0)

    def statistics() -> tuple[Any, ...]:
        stats = breaker.stats()
        return stats.state, stats.retry_after, stats.last_failure, stats.probes, stats.opened, stats.rejected

    assert statistics() == (CLOSED, None, None, 0, 0, 0)
    await fails(world, breaker)
    assert statistics() == (OPEN, pytest.approx(5.0), "Boom: no", 0, 1, 0)
    await works(world, breaker, times=3)
    assert statistics() == (OPEN, pytest.approx(5.0), "Boom: no", 0, 1, 3)
    clock.advance(5.0)
    async with beside(world) as group:
        probe = await group.inside(breaker, Boom("again"))
        assert statistics() == (HALF_OPEN, None, "Boom: no", 1, 1, 3)
        await works(world, breaker)
        assert statistics() == (HALF_OPEN, None, "Boom: no", 1, 1, 4)
        probe.let_go()
        await probe.result()
    assert statistics() == (OPEN, pytest.approx(5.0), "Boom: again", 0, 2, 4)
    stats = breaker.stats()
    assert stats.failure_type == "Boom"
    assert "Boom" in repr(stats)
    assert "again" not in repr(stats)
    breaker.isolate()
    assert statistics() == (ISOLATED, None, None, 0, 2, 4)
    assert breaker.stats().failure_type is None
    breaker.close()
    assert statistics() == (CLOSED, None, None, 0, 2, 4)


# --- guard -------------------------------------------------------------------------------------


class Block:
    """`with breaker.guard():` in threads, `async with` in tasks, around a block that returns or raises."""

    def __init__(self, world: World, breaker: CircuitBreaker) -> None:
        self._world = world
        self._breaker = breaker
        self.entered = 0

    async def __call__(self, outcome: Any = "fine") -> Any:
        """Run the block; return its result, or its exception as a value."""
        try:
            async with entered(self._world, self._breaker.guard()):
                self.entered += 1
                if isinstance(outcome, BaseException):
                    raise outcome
                return outcome
        except Exception as error:
            return error


async def test_on_and_ignore_hold_for_a_guarded_block_and_on_result_does_not(world: World) -> None:
    """A block has no result."""
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


async def test_a_slow_guarded_block_counts_as_a_slow_call(world: World, clock: FakeClock) -> None:
    breaker = CircuitBreaker(SlowRatio(1.0, slower_than=2.0, min_calls=2, last=2))

    async def block(seconds: float) -> None:
        async with entered(world, breaker.guard()):
            clock.advance(seconds)

    await block(2.0)
    await block(1.9)
    await block(2.0)
    assert breaker.state is CLOSED
    await block(2.0)
    assert breaker.state is OPEN


def test_an_interrupted_block_is_not_recorded_and_releases_a_probes_slot(threads: World, clock: FakeClock) -> None:
    """A success would reset the count, and close a half-open circuit."""
    breaker = CircuitBreaker(2, open_for=5.0)
    breaker.capture(raising(Boom()))
    with pytest.raises(KeyboardInterrupt), breaker.guard():
        raise KeyboardInterrupt
    breaker.capture(raising(Boom()))
    assert breaker.state is OPEN
    clock.advance(5.0)
    with pytest.raises(KeyboardInterrupt), breaker.guard():
        raise KeyboardInterrupt
    assert (breaker.state, breaker.stats().probes) == (HALF_OPEN, 0)
    with breaker.guard():
        pass
    assert breaker.state is CLOSED


async def test_a_guard_inside_a_guard_of_another_circuit_counts_for_its_own(world: World) -> None:
    outer, inner = CircuitBreaker(1), CircuitBreaker(1)
    async with entered(world, outer.guard()):
        await Block(world, inner)(Boom("down"))
    assert (outer.state, inner.state) == (CLOSED, OPEN)


async def test_an_error_of_a_predicate_is_raised_from_a_guarded_block(world: World) -> None:
    """Its context is the error of the block."""
    broken = ZeroDivisionError("a bug")
    block = Block(world, CircuitBreaker(1, on=raising(broken)))
    original = Boom("no")
    assert await block(original) is broken
    assert broken.__context__ is original


class Listener:
    """A callback that shows whether its breaker is alive."""

    def __call__(self, event: object) -> None: ...


@pytest.mark.parametrize("probe", [None, lambda: False])
async def test_a_breaker_whose_guard_refused_can_be_freed(world: World, clock: FakeClock, probe: Any) -> None:
    """The thread or task in which it refused does not keep it alive."""
    listener = Listener()
    breaker = CircuitBreaker(1, probe=probe, on_transition=listener)
    await fails(world, breaker)
    if probe is not None:
        clock.advance(30.0)
    assert isinstance(await Block(world, breaker)(), CircuitOpen)
    watched = weakref.ref(listener)
    del breaker, listener
    gc.collect()
    assert watched() is None


def test_a_guard_that_an_interrupt_left_without_attributes_can_be_dropped() -> None:
    """It may come as `guard` makes it; an error of the finalizer would be reported, and fail this test."""
    kind: Any = type(CircuitBreaker().guard())
    kind()


def test_leaving_a_guard_that_refused_records_nothing(threads: World) -> None:
    """Callers of `__exit__` may leave a guard that they could not enter."""
    breaker = CircuitBreaker(1)
    breaker.isolate()
    guard = breaker.guard()
    with pytest.raises(CircuitIsolated):
        guard.__enter__()
    guard.__exit__(None, None, None)
    breaker.close()
    with guard:
        pass
