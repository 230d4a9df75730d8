"""A bulkhead's queue and a circuit breaker, in both orders, when the service dies with two hundred calls queued."""

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
    """Takes a tenth of a second to fail."""

    def __init__(self) -> None:
        self.reached = 0

    async def fn(self, ctx: Any) -> Any:
        self.reached += 1
        await anyio.sleep(0.1)
        raise Boom("dead")


async def storm(world: World, pipeline: Pipeline[Any]) -> tuple[int, list[str]]:
    """Make all calls at once; return how many reached the service, and what the others came out with."""
    service, results = DeadService(), []

    async def one() -> None:
        results.append(type(await world.attempt(pipeline, service.fn)).__name__)

    async with anyio.create_task_group() as group:
        for _ in range(CALLS):
            group.start_soon(one)
    return service.reached, results


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_bulkhead_outside_the_breaker_spares_the_service(backend: str) -> None:
    """The recommended order: whoever leaves the queue finds the circuit open."""
    world = World(backend)
    pipeline = Pipeline(Bulkhead(5, queue=CALLS), CircuitBreaker(5, open_for=60))
    with virtual_time() as clock:
        reached, results = world.run(partial(storm, world, pipeline))
        assert clock.now() == pytest.approx(0.1)
    assert reached == 5
    assert results.count(CircuitOpen.__name__) == CALLS - 5


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_breaker_outside_the_bulkhead_does_not(backend: str) -> None:
    """Each was admitted before it queued: the queue drains into a service that is known to be dead."""
    world = World(backend)
    pipeline = Pipeline(CircuitBreaker(5, open_for=60), Bulkhead(5, queue=CALLS))
    with virtual_time() as clock:
        reached, results = world.run(partial(storm, world, pipeline))
        assert clock.now() == pytest.approx(4.0)
    assert (reached, results.count("Boom")) == (CALLS, CALLS)
