"""Clients that request the same few items again and again, in simulated time. A seed repeats them exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from resilience import CircuitOpen, Context, Policy
from resilience.testing import Simulation
from tests.policies.simulated import start_clients


class Load(NamedTuple):
    """The load of the service and the failures of its clients, for each second.

    :param calls: calls that began.
    :param at_once: the most that ran concurrently.
    :param failed: clients that got an error.
    """

    calls: list[int]
    at_once: list[int]
    failed: list[int]


def item(ctx: Context) -> Any:
    """The key of a call: the item that it requests."""
    return ctx.properties["item"]


def simulate(
    policy: Policy[Any],
    seconds: int,
    *,
    demand: float = 50.0,
    items: int = 20,
    takes: Callable[[float], float] = lambda now: 0.1,
    is_up: Callable[[float, int], bool] = lambda now, item: True,
    counted: Callable[[int], bool] = lambda item: True,
    seed: int = 3,
) -> Load:
    """Simulate clients that come as a Poisson stream, `demand` a second, and each request one item.

    :param takes: the seconds that a call takes that begins at this time.
    :param is_up: whether a call that begins at this time, for this item, succeeds; if not, it fails at its end.
    :param counted: whether errors of this item are counted.
    """
    calls, at_once, failed = ([0] * seconds for _ in range(3))
    running = 0
    with Simulation(seed) as simulation:

        def second() -> int:
            return min(seconds - 1, int(simulation.now()))

        async def serve(ctx: Context) -> str:
            nonlocal running
            now, running = simulation.now(), running + 1
            calls[second()] += 1
            at_once[second()] = max(at_once[second()], running)
            try:
                await simulation.sleep(takes(now))
            finally:
                running -= 1
            if not is_up(now, item(ctx)):
                raise ConnectionError("down")
            return "an answer"

        async def client() -> None:
            ctx = Context(properties={"item": simulation.rng.randrange(items)})
            try:
                await simulation.execute(policy, serve, ctx)
            except (ConnectionError, CircuitOpen):
                failed[second()] += counted(item(ctx))

        start_clients(simulation, client, demand, seconds)
        simulation.run(until=seconds)
    return Load(calls, at_once, failed)
