"""The queue of a bulkhead and a circuit breaker, in both orders, when a service fails with 200 calls queued."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

from resilience import Bulkhead, CircuitBreaker, CircuitOpen, Pipeline
from resilience.testing import virtual_time
from tests.conftest import Boom, World

CALLS = 200


class DeadService:
    """Fails after a tenth of a second."""

    def __init__(self) -> None:
        self.reached = 0

    async def fn(self, ctx: Any) -> Any:
        self.reached += 1
        await anyio.sleep(0.1)
        raise Boom("dead")


async def storm(world: World, pipeline: Pipeline[Any]) -> tuple[int, list[str]]:
    """Make all calls at once. Return how many reached the service, and the types of the outcomes."""
    service, results = DeadService(), []

    async def call() -> None:
        results.append(type(await world.attempt(pipeline, service.fn)).__name__)

    async with anyio.create_task_group() as group:
        for _ in range(CALLS):
            group.start_soon(call)
    return service.reached, results


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_bulkhead_outside_the_breaker_spares_a_dead_service(backend: str) -> None:
    """The recommended order: calls that leave the queue find the circuit open."""
    world = World(backend)
    pipeline = Pipeline(Bulkhead(5, queue=CALLS), CircuitBreaker(5, open_for=60))
    with virtual_time() as clock:
        reached, results = world.run(partial(storm, world, pipeline))
        assert clock.now() == pytest.approx(0.1)
    assert reached == 5
    assert results.count(CircuitOpen.__name__) == CALLS - 5


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_bulkhead_inside_the_breaker_sends_its_queue_to_a_dead_service(backend: str) -> None:
    """Each call was admitted before it queued."""
    world = World(backend)
    pipeline = Pipeline(CircuitBreaker(5, open_for=60), Bulkhead(5, queue=CALLS))
    with virtual_time() as clock:
        reached, results = world.run(partial(storm, world, pipeline))
        assert clock.now() == pytest.approx(4.0)
    assert (reached, results.count("Boom")) == (CALLS, CALLS)
