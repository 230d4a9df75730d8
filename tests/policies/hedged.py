"""Services with a long tail of latencies, with and without hedges, in simulated time. A seed repeats them exactly."""

from __future__ import annotations

import random
from typing import Any

from resilience.testing import Simulation


def calls_under(hedge: Any, latency: Any, calls: int, seed: int = 1) -> tuple[list[float], float]:
    """Return the latencies of the calls, sorted, and the mean number of requests of a call."""
    latencies: list[float] = []
    requests = 0
    with Simulation(seed) as simulation:

        async def fetch(ctx: Any) -> None:
            nonlocal requests
            requests += 1
            await simulation.sleep(latency(simulation.rng))

        async def client() -> None:
            for _ in range(calls):
                began = simulation.now()
                await simulation.execute(hedge, fetch)
                latencies.append(simulation.now() - began)
                await simulation.sleep(0.01)

        simulation.start(client())
        simulation.run()
    return sorted(latencies), requests / calls


def lognormal(rng: random.Random) -> float:
    return rng.lognormvariate(-4.0, 0.6)


def mostly_fast(rng: random.Random) -> float:
    """Return the seconds that a call takes: two in a hundred take more than 10 ms, some much more."""
    return rng.uniform(0.002, 0.01) if rng.random() >= 0.02 else 0.01 * rng.paretovariate(2.0)
