"""Clients that ask for the same few things again and again, in simulated time. Repeated exactly by the seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from resilience import CircuitOpen, Context, Policy
from resilience.testing import Simulation


class Load(NamedTuple):
    """What came to the other side, and what the clients got of it, second by second.

    :param calls: calls that began.
    :param at_once: the most that ran at the same time.
    :param failed: clients that got an error.
    """

    calls: list[int]
    at_once: list[int]
    failed: list[int]


def thing(ctx: Context) -> Any:
    """The key of a call: what is asked for."""
    return ctx.properties["thing"]


def asked(
    policy: Policy[Any],
    seconds: int,
    *,
    demand: float = 50.0,
    things: int = 20,
    takes: Callable[[float], float] = lambda now: 0.1,
    is_up: Callable[[float, int], bool] = lambda now, thing: True,
    whose: Callable[[int], bool] = lambda thing: True,
    seed: int = 3,
) -> Load:
    """Clients come as a Poisson stream, `demand` a second; each asks for one of some things.

    :param takes: how many seconds a call takes that begins now.
    :param is_up: whether a call that begins now, for that thing, is answered; if not, it fails at its end.
    :param whose: the things whose errors are counted.
    """
    calls, at_once, failed = ([0] * seconds for _ in range(3))
    running = 0
    with Simulation(seed) as simulation:

        def second() -> int:
            return min(seconds - 1, int(simulation.now()))

        async def answer(ctx: Context) -> str:
            nonlocal running
            now, running = simulation.now(), running + 1
            calls[second()] += 1
            at_once[second()] = max(at_once[second()], running)
            try:
                await simulation.sleep(takes(now))
            finally:
                running -= 1
            if not is_up(now, thing(ctx)):
                raise ConnectionError("down")
            return "an answer"

        async def client() -> None:
            ctx = Context(properties={"thing": simulation.rng.randrange(things)})
            try:
                await simulation.execute(policy, answer, ctx)
            except (ConnectionError, CircuitOpen):
                failed[second()] += whose(thing(ctx))

        async def arrivals() -> None:
            while simulation.now() < seconds:
                await simulation.sleep(simulation.rng.expovariate(demand))
                simulation.start(client())

        simulation.start(arrivals())
        simulation.run(until=seconds)
    return Load(calls, at_once, failed)
