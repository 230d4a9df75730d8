"""A model of a retry storm that outlives its cause, and of budgets that end it or not.

The model has the shape of Bronson et al., "Metastable Failures in Distributed Systems" (HotOS 2021). A server does 300
requests a second, first come, first served, and does not notice that a client has given up. Clients come as a Poisson
stream, give an attempt a second, and make up to three. For ten seconds the server does half as many. Goodput is what is
answered in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any

from resilience import Bulkhead, Context, Rejected, Retry, Timeout
from resilience.backoff import Exponential
from resilience.testing import Simulation
from tests.policies.simulated import start_clients

CAPACITY, WORKERS = 300.0, 30
TRIGGER = (60.0, 70.0)


class PerRequest:
    """A budget filled by requests of the last ten seconds: Finagle, Linkerd and the SRE book."""

    def __init__(self, ratio: float, simulation: Simulation) -> None:
        self.ratio, self.now = ratio, simulation.now
        self.requests: deque[float] = deque()
        self.repeats: deque[float] = deque()

    def requested(self) -> None:
        self.requests.append(self.now())

    def succeeded(self) -> None: ...

    def give_back(self) -> None: ...

    def withdraw(self) -> bool:
        for each in (self.requests, self.repeats):
            while each and each[0] < self.now() - 10:
                each.popleft()
        if len(self.repeats) + 1 > self.ratio * len(self.requests):
            return False
        self.repeats.append(self.now())
        return True


def goodput(
    budget_of: Callable[[Simulation], Any], load: float, *, attempts: int = 3, seconds: float, seed: int = 7
) -> list[float]:
    """Return the share of the requests that succeed in time, for each half minute in which they arrive."""
    arrived, succeeded_in_time = ([0] * int(seconds // 30) for _ in range(2))
    with Simulation(seed) as simulation:
        rng = simulation.rng
        budget = budget_of(simulation)
        workers = Bulkhead(WORKERS, queue=10**9)

        async def work(ctx: Context) -> None:
            slowness = 2.0 if TRIGGER[0] <= simulation.now() < TRIGGER[1] else 1.0
            await simulation.sleep(rng.expovariate(CAPACITY / WORKERS / slowness))

        async def serve(reply: Any) -> None:
            await simulation.execute(workers, work)  # whether or not its client still waits
            reply.wake()

        async def request(ctx: Context) -> None:
            reply = ctx.runtime.waiter()
            simulation.start(serve(reply))
            await reply.wait(inf, None)

        retry = Retry(attempts, on=TimeoutError, backoff=Exponential(0.05, cap=1.0), budget=budget)
        policy = retry.wrap(Timeout(1.0))

        async def client() -> None:
            half_minute = min(len(arrived) - 1, int(simulation.now() // 30))
            arrived[half_minute] += 1
            if isinstance(budget, PerRequest):
                budget.requested()
            try:
                await simulation.execute(policy, request)
            except (TimeoutError, Rejected):
                return
            succeeded_in_time[half_minute] += 1

        start_clients(simulation, client, load, seconds)
        simulation.run(until=seconds + 5)
    return [succeeded / all_ for succeeded, all_ in zip(succeeded_in_time, arrived, strict=True)]


def none(simulation: Simulation) -> None:
    return None
