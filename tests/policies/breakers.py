"""Shared by the tests of circuit breakers."""

from __future__ import annotations

from typing import Any

from resilience import CircuitState, Policy, events
from tests.conftest import Boom, Script, World

CLOSED, OPEN, HALF_OPEN, ISOLATED = CircuitState


async def fails(world: World, breaker: Policy[Any], error: BaseException | None = None, times: int = 1) -> Any:
    """Make calls that fail; return the outcome of the last one."""
    for _ in range(times):
        result = await world.attempt(breaker, Script(error or Boom("no")).function())
    return result


async def works(world: World, breaker: Policy[Any], times: int = 1) -> Any:
    """Make calls that succeed; return the outcome of the last one."""
    for _ in range(times):
        result = await world.attempt(breaker, Script("fine").function())
    return result


class Moves:
    """An `on_transition` callback that records the transitions."""

    def __init__(self) -> None:
        self.events: list[events.CircuitChanged] = []

    def __call__(self, event: events.CircuitChanged) -> None:
        self.events.append(event)

    @property
    def states(self) -> list[CircuitState]:
        return [event.new for event in self.events]
