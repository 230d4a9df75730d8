"""Thousands of clients in simulated time: the effect of a policy on a whole system, in seconds and repeatably."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, final

from resilience.context import Context
from resilience.execution import aprotect
from resilience.policy import Policy
from resilience.testing.runtime import Engine

T = TypeVar("T")
D = TypeVar("D")


@final
class Simulation(Engine):
    """Clients that execute real policies against functions that you model, in one event queue.

    Clients are coroutines that await `simulation.sleep(seconds)` and `simulation.execute(policy, fn)`; so are the
    functions that they call. A simulated clock, which begins at 0, orders all events, and all randomness comes from
    `simulation.rng`, so the same seed gives the same events.

    While it runs, all policies of the process use its clock, so run nothing else at the same time.

    >>> from resilience import CircuitBreaker, CircuitOpen
    >>> from resilience.testing import Simulation
    >>> with Simulation(seed=1) as simulation:
    ...     breaker = CircuitBreaker(10, open_for=30)
    ...     calls = []
    ...
    ...     async def down(ctx):
    ...         calls.append(simulation.now())
    ...         await simulation.sleep(0.1)
    ...         raise ConnectionError("down")
    ...
    ...     async def client():
    ...         while simulation.now() < 60:
    ...             try:
    ...                 await simulation.execute(breaker, down)
    ...             except (ConnectionError, CircuitOpen):
    ...                 await simulation.sleep(simulation.rng.uniform(0, 2))
    ...
    ...     for _ in range(100):
    ...         client_of_many = simulation.start(client())
    ...     seconds = simulation.run()
    >>> len(calls)  # 100 before the circuit opened, then a probe every 30 seconds
    101
    """

    def execute(
        self, policy: Policy[D], fn: Callable[[Context], Awaitable[T]], ctx: Context | None = None
    ) -> Awaitable[T | D]:
        """Run `fn(ctx)` under a policy, in this simulation. A client must await the result at once."""
        return aprotect(policy, fn, ctx, takes_context=True, runtime=self.runtime)()
