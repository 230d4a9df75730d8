"""Simulated time: many clients that execute the real policies, in one event queue with its own clock.

There is no event loop and no thread in it: see `resilience.runtimes.engine`. The engine sets the clock to the instant
of the earliest entry. All randomness comes from one seeded generator, so a simulation is repeated exactly by its seed.

Entries that no longer count (see there) are dropped each time that the heap has doubled: a wait in a queue that ends in
time would keep its entry for as long as it was to last at most.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Coroutine
from contextvars import Context as Variables
from heapq import heapify, heappop
from math import inf
from typing import Any, Self

from typing_extensions import override

from resilience import backoff, checks
from resilience.checks import Duration
from resilience.clock import clock
from resilience.runtimes import engine
from resilience.runtimes.engine import Alarm, Client, counts, until
from resilience.runtimes.tasks import TASKS

#: So many entries are never looked through.
_FEW = 1000

#: How many objects more there are, at least, before the collector looks at them: clients may come in thousands.
_RARELY = 50_000


class Engine(engine.Engine):
    """The queue of events, the clock and the clients.

    While it runs it is the clock, and the source of randomness, of the whole process: nothing else may run
    policies at the same time.

    :param seed: the seed of the randomness.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(TASKS)
        #: The source of randomness, for policies without one of their own and for what the functions do.
        self.rng: random.Random = random.Random(seed)
        #: The current time, in seconds.
        self.time: float = 0.0
        self._most_entries = _FEW  # beyond so many, those that no longer count are dropped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @override
    def now(self) -> float:
        """Return the current time, in seconds."""
        return self.time

    def start(self, coroutine: Coroutine[Any, None, object], after: Duration = 0.0) -> Client:
        """Add a client, which begins that many seconds from now."""
        delay = checks.seconds("after", after, zero=True)
        # Ambient contexts are each client's own.
        return self.add(coroutine, Variables().run, self.time + delay)

    async def sleep(self, seconds: float) -> None:
        """Let the client that awaits this wait for that many seconds."""
        await until(self.time + seconds)

    def run(self, until: float = inf) -> float:
        """Run until every client is done, no event is left, or it is `until`; return the time.

        If a client raises, this raises its error, and the simulation ends.
        """
        now, source, (often, *rest) = clock.now, backoff.SHARED_RANDOMNESS, gc.get_threshold()
        clock.now, backoff.SHARED_RANDOMNESS = self.now, self.rng
        # The collector looks through all that the clients hold, and would take longer than they: it comes less often.
        gc.set_threshold(often and max(often, _RARELY, 20 * len(self._clients)), *rest)
        try:
            self._run(until)
        except BaseException:
            self.close()
            raise
        finally:
            clock.now, backoff.SHARED_RANDOMNESS = now, source
            gc.set_threshold(often, *rest)
        if until != inf:
            self.time = max(self.time, until)
        return self.time

    def close(self) -> None:
        """End the simulation: clients that are not done are closed."""
        clients, self._clients, self._queue = self._clients, {}, []
        for client in clients:
            client.run(client.coroutine.close)

    def _drop_what_no_longer_counts(self) -> None:
        queue = self._queue
        queue[:] = filter(counts, queue)
        heapify(queue)
        self._most_entries = max(_FEW, 2 * len(queue))

    def _run(self, until: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until:
            if len(queue) > self._most_entries:
                self._drop_what_no_longer_counts()
                continue
            entry = heappop(queue)
            if not counts(entry):
                continue
            instant, _, client, due = entry
            if instant > self.time:
                self.time = instant
            if type(due) is Alarm:
                due.ring()
                continue
            self.current = client
            try:
                if due is None:
                    suspended_until = client.run(client.coroutine.send, None)
                else:
                    suspended_until = client.run(client.coroutine.throw, due.expire())
            except StopIteration:
                client.is_done = True
                client.resumes_at = -1
                del self._clients[client]
            else:
                self.suspend(client, suspended_until)
