"""Thousands of clients in simulated time: the effect of a policy on a whole system, in seconds and repeatably.

A simulation has no event loop and no threads: see `resilience.runtimes.engine`. It sets the clock to the instant of the
earliest entry. All randomness comes from one seeded generator, so a seed repeats a simulation exactly.

Entries that no longer count (see the engine) are dropped each time the heap has doubled. Otherwise, a wait in a queue
that ends early would keep its entry until the end of its time limit.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context as Variables
from heapq import heapify, heappop
from math import inf
from typing import Any, Self, TypeVar, final

from typing_extensions import override

from resilience import backoff, checks
from resilience.callables import name_of
from resilience.checks import Duration
from resilience.clock import clock
from resilience.context import Context
from resilience.errors import SuspensionMisuse
from resilience.execution import arun
from resilience.policy import Policy
from resilience.runtimes.engine import Client, Engine, is_valid, until
from resilience.runtimes.tasks import TASKS
from resilience.testing.replacing import replaced

T = TypeVar("T")
D = TypeVar("D")

#: Up to this number of entries, none are dropped.
_MIN_ENTRIES = 1000

#: The lowest threshold of the garbage collector's youngest generation: a simulation may have thousands of clients.
_GC_THRESHOLD = 50_000


@final
class Simulation(Engine):
    """Clients that execute real policies against functions that you model, in one event queue.

    Clients are coroutines that await `simulation.sleep(seconds)` and `simulation.execute(policy, fn)`; so are the
    functions that they call. A simulated clock, which begins at 0, orders all events, and all randomness comes from
    `simulation.rng`, so the same seed gives the same events.

    While it runs, all policies of the process use its clock, so run nothing else at the same time.

    :param seed: the seed of the randomness, 0 by default.

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

    def __init__(self, seed: int = 0) -> None:
        super().__init__(TASKS)
        #: The source of randomness, for policies without their own and for the simulated functions.
        self.rng: random.Random = random.Random(seed)
        #: The current time, in seconds.
        self.time: float = 0.0
        self._max_entries = _MIN_ENTRIES  # with more entries, those that no longer count are dropped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @override
    def now(self) -> float:
        """Return the current time, in seconds."""
        return self.time

    def execute(
        self, policy: Policy[D], fn: Callable[[Context], Awaitable[T]], ctx: Context | None = None
    ) -> Awaitable[T | D]:
        """Run `fn(ctx)` under a policy, in this simulation. A client must await the result at once."""
        return arun(policy, fn, None, ctx=ctx, runtime=self.runtime)

    def start(self, coroutine: Coroutine[Any, None, object], after: Duration = 0.0) -> Client:
        """Add a client, which begins after `after` seconds."""
        delay = checks.seconds("after", after, zero=True)
        if not isinstance(coroutine, Coroutine):
            raise TypeError(f"a client is a coroutine, as client(...) of an async function, not {coroutine!r}")
        # Each client has its own ambient context.
        return self.add(coroutine, Variables().run, self.time + delay)

    async def sleep(self, seconds: float) -> None:
        """Suspend the client that awaits this for that many seconds."""
        await until(self.time + checks.number("seconds", seconds))

    def run(self, until: float = inf) -> float:
        """Run until all clients are done, no event is left, or the time is `until`; return the time.

        If a client raises, this raises its error, and the simulation ends.
        """
        until = checks.number("until", until)
        threshold, *rest = gc.get_threshold()
        # The garbage collector scans everything that the clients hold, and would take longer than they do.
        gc.set_threshold(threshold and max(threshold, _GC_THRESHOLD, 20 * len(self._clients)), *rest)
        try:
            with replaced(clock, now=self.now), replaced(backoff, SHARED_RANDOMNESS=self.rng):
                try:
                    self._run(until)
                except BaseException:
                    self.close()
                    raise
        finally:
            gc.set_threshold(threshold, *rest)
        if until != inf:
            self.time = max(self.time, until)
        return self.time

    def close(self) -> None:
        """End the simulation, and close the clients that are not done."""
        clients, self._clients, self._queue = self._clients, {}, []
        for client in clients:
            client.run(client.coroutine.close)

    @override
    def _misuse(self, client: Client) -> SuspensionMisuse:
        return SuspensionMisuse(
            f"{name_of(client.coroutine)} waits for something outside of the simulation: await only what "
            "simulation.sleep(...) and simulation.execute(...) return, and in a policy what ctx and ctx.runtime offer"
        )

    def _run(self, until: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until:
            if len(queue) > self._max_entries:
                queue[:] = filter(is_valid, queue)
                heapify(queue)
                self._max_entries = max(_MIN_ENTRIES, 2 * len(queue))
                continue
            entry = heappop(queue)
            if is_valid(entry):
                self.time = max(self.time, entry[0])
                self._run_entry(entry)
