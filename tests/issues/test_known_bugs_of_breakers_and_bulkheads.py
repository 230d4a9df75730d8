"""Bugs that libraries of this kind have had, each as its user would meet it. None of them may come back here.

The rules behind them are tested at length in `tests/policies`; this is the list to look through.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from resilience import Bulkhead, BulkheadFull, CircuitBreaker, CircuitOpen, CircuitState, Retry, Timeout
from tests.conftest import Boom, FakeClock, Script, World
from tests.contention.beside import beside


async def test_a_slow_success_from_before_the_outage_closes_the_circuit(world: World, clock: FakeClock) -> None:
    """Breakers that call `on_success` without asking who was admitted when."""
    breaker = CircuitBreaker(1, open_for=5.0)

    async with beside(world) as group:
        slow = await group.inside(breaker)
        await world.attempt(breaker, Script(Boom("down")).function())
        slow.let_go()
        await slow.result()
        assert isinstance(await world.attempt(breaker, Script("fine").function()), CircuitOpen)


async def test_everybody_is_a_probe_once_the_open_period_is_over(world: World, clock: FakeClock) -> None:
    """Breakers whose half-open state is a state of mind: the dependency gets the whole load at once."""
    breaker = CircuitBreaker(1, open_for=5.0)

    await world.attempt(breaker, Script(Boom("down")).function())
    clock.advance(5.0)
    async with beside(world) as group:
        first = await group.inside(breaker)
        others = [group.start(breaker) for _ in range(10)]
        for call in others:
            assert isinstance(await call.result(), CircuitOpen)
        assert not first.left.is_set()


async def test_a_cancelled_probe_keeps_the_circuit_half_open_for_ever(tasks_world: World, clock: FakeClock) -> None:
    """Breakers that count probes in and out only on success and failure."""
    breaker = CircuitBreaker(1, open_for=5.0)

    await tasks_world.attempt(breaker, Script(Boom("down")).function())
    clock.advance(5.0)
    with anyio.move_on_after(0.005):
        await breaker.aexecute(lambda ctx: anyio.sleep(10))
    assert await tasks_world.attempt(breaker, Script("fine").function()) == "fine"
    assert breaker.state is CircuitState.CLOSED


def test_a_context_manager_that_records_but_lets_everybody_in(threads: World) -> None:
    """`with breaker:` that only looks at what the block raised."""
    breaker = CircuitBreaker(1)
    with pytest.raises(Boom), breaker.guard():
        raise Boom("down")
    with pytest.raises(CircuitOpen), breaker.guard():
        pytest.fail("entered")


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_a_changed_system_clock_opens_or_closes(threads: World, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """`time.time()` and `datetime.now()` jump with NTP and with daylight saving; a circuit must not."""
    breaker = CircuitBreaker(1, open_for=3600.0)
    breaker.capture(lambda ctx: 1 / 0)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert breaker.stats().retry_after == pytest.approx(3600.0, abs=60.0)
    with pytest.raises(CircuitOpen):
        breaker.execute(lambda ctx: "fine")


def test_a_slow_protected_function_blocks_all_other_threads(threads: World) -> None:
    """Breakers that hold their lock while the user's function runs."""
    breaker, bulkhead = CircuitBreaker(), Bulkhead(2)
    pipeline = breaker.wrap(bulkhead)

    def outer(ctx: object) -> list[Any]:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(pipeline.execute(lambda ctx: "inner")), daemon=True)
        thread.start()
        thread.join(10)
        return results

    assert pipeline.execute(outer) == ["inner"]


async def test_a_retry_around_hammers_an_open_circuit(world: World) -> None:
    """Retries that take a refusal for a failure, and go on asking: ours gives up when the circuit has opened."""
    breaker = CircuitBreaker(2)
    script = Script(Boom("down"))

    assert isinstance(
        await world.attempt(Retry(10, on=Exception, backoff=[0]).wrap(breaker), script.function()), CircuitOpen
    )
    assert script.calls == 2


async def test_a_waiter_that_gives_up_takes_a_permit_with_it(world: World) -> None:
    """Semaphores that hand a permit to somebody who has just left."""
    bulkhead = Bulkhead(1, queue=1)

    for _ in range(5):
        async with beside(world) as group:
            holder = await group.inside(bulkhead)
            await world.attempt(Timeout(0.005).wrap(bulkhead), Script("never").function())
            holder.let_go()
            await holder.result()
    assert await world.attempt(bulkhead, Script("fine").function()) == "fine"


@pytest.mark.parametrize("make", [lambda: CircuitBreaker(), lambda: Bulkhead(1, queue=1)])
def test_objects_that_need_a_running_loop_to_be_built(make: Callable[[], Any]) -> None:
    """Locks and events of asyncio that bind to the loop of whoever imports the module first."""
    policy = make()

    async def main() -> str:
        return await policy.aexecute(Script("fine").function())

    for backend in ("asyncio", "asyncio", "trio"):
        assert anyio.run(main, backend=backend) == "fine"


def test_a_bulkhead_for_each_loop(threads: World) -> None:
    """A limit of one is one for the process, not one for every loop and another for threads."""
    bulkhead = Bulkhead(1)

    async def other_loop() -> Any:
        return await World("asyncio").attempt(bulkhead, Script("fine").function())

    with bulkhead.slot():
        assert isinstance(anyio.run(other_loop), BulkheadFull)
        assert isinstance(anyio.run(other_loop, backend="trio"), BulkheadFull)
