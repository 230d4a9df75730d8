"""The queue of a bulkhead and a circuit breaker, in both orders, when a service fails with 200 calls queued."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from resilience import Bulkhead, CircuitBreaker, CircuitOpen, Pipeline
from tests.conftest import Boom, Virtual, World

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


async def test_a_bulkhead_outside_the_breaker_spares_a_dead_service(virtual_tasks: Virtual) -> None:
    """The recommended order: calls that leave the queue find the circuit open."""
    reached, results = await storm(virtual_tasks, Pipeline(Bulkhead(5, queue=CALLS), CircuitBreaker(5, open_for=60)))
    assert virtual_tasks.now() == pytest.approx(0.1)
    assert reached == 5
    assert results.count(CircuitOpen.__name__) == CALLS - 5


async def test_a_bulkhead_inside_the_breaker_sends_its_queue_to_a_dead_service(virtual_tasks: Virtual) -> None:
    """Each call was admitted before it queued."""
    reached, results = await storm(virtual_tasks, Pipeline(CircuitBreaker(5, open_for=60), Bulkhead(5, queue=CALLS)))
    assert virtual_tasks.now() == pytest.approx(4.0)
    assert (reached, results.count("Boom")) == (CALLS, CALLS)
