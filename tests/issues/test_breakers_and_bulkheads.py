"""What other libraries of this kind got wrong once, and holds here; the rules that `tests/policies` does not have."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from resilience import Bulkhead, CircuitBreaker, CircuitOpen, Timeout
from tests.conftest import Script, World
from tests.contention.beside import beside


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_a_changed_system_clock_moves_no_circuit(threads: World, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """`time.time()` and `datetime.now()` jump with NTP and with daylight saving."""
    breaker = CircuitBreaker(1, open_for=3600.0)
    breaker.capture(lambda ctx: 1 / 0)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert breaker.stats().retry_after == pytest.approx(3600.0, abs=60.0)
    with pytest.raises(CircuitOpen):
        breaker.execute(lambda ctx: "fine")


def test_no_lock_is_held_while_the_function_runs(threads: World) -> None:
    """Another thread gets through meanwhile."""
    breaker, bulkhead = CircuitBreaker(), Bulkhead(2)
    pipeline = breaker.wrap(bulkhead)

    def outer(ctx: object) -> list[Any]:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(pipeline.execute(lambda ctx: "inner")), daemon=True)
        thread.start()
        thread.join(10)
        return results

    assert pipeline.execute(outer) == ["inner"]


async def test_a_waiter_that_gives_up_takes_no_permit_with_it(world: World) -> None:
    """The permit that comes just then is not handed to it."""
    bulkhead = Bulkhead(1, queue=1)

    for _ in range(5):
        async with beside(world) as group:
            holder = await group.inside(bulkhead)
            await world.attempt(Timeout(0.005).wrap(bulkhead), Script("never").function())
            holder.let_go()
            await holder.result()
    assert await world.attempt(bulkhead, Script("fine").function()) == "fine"
