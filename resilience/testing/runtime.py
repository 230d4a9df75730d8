"""Simulated time: many clients that execute the real policies, in one event queue with its own clock.

A simulation has no event loop and no threads: see `resilience.runtimes.engine`. The engine sets the clock to the
instant of the earliest entry. All randomness comes from one seeded generator, so a seed repeats a simulation exactly.

Entries that no longer count (see the engine) are dropped each time the heap has doubled. Otherwise, a wait in a queue
that ends early would keep its entry until the end of its time limit.
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
from resilience.runtimes.engine import Alarm, Client, is_valid, until
from resilience.runtimes.tasks import TASKS

#: Up to this number of entries, none are dropped.
_MIN_ENTRIES = 1000

#: The lowest threshold of the garbage collector's youngest generation: a simulation may have thousands of clients.
_GC_THRESHOLD = 50_000


class Engine(engine.Engine):
    """The queue of events, the clock and the clients.

    While it runs, it is the clock and the source of randomness of the whole process, so nothing else may run policies
    at the same time.

    :param seed: the seed of the randomness.
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

    def start(self, coroutine: Coroutine[Any, None, object], after: Duration = 0.0) -> Client:
        """Add a client, which begins after `after` seconds."""
        delay = checks.seconds("after", after, zero=True)
        # Each client has its own ambient context.
        return self.add(coroutine, Variables().run, self.time + delay)

    async def sleep(self, seconds: float) -> None:
        """Suspend the client that awaits this for that many seconds."""
        await until(self.time + seconds)

    def run(self, until: float = inf) -> float:
        """Run until all clients are done, no event is left, or the time is `until`; return the time.

        If a client raises, this raises its error, and the simulation ends.
        """
        now, source, (threshold, *rest) = clock.now, backoff.SHARED_RANDOMNESS, gc.get_threshold()
        clock.now, backoff.SHARED_RANDOMNESS = self.now, self.rng
        # The garbage collector scans everything that the clients hold, and would take longer than they do.
        gc.set_threshold(threshold and max(threshold, _GC_THRESHOLD, 20 * len(self._clients)), *rest)
        try:
            self._run(until)
        except BaseException:
            self.close()
            raise
        finally:
            clock.now, backoff.SHARED_RANDOMNESS = now, source
            gc.set_threshold(threshold, *rest)
        if until != inf:
            self.time = max(self.time, until)
        return self.time

    def close(self) -> None:
        """End the simulation, and close the clients that are not done."""
        clients, self._clients, self._queue = self._clients, {}, []
        for client in clients:
            client.run(client.coroutine.close)

    def _drop_stale_entries(self) -> None:
        queue = self._queue
        queue[:] = filter(is_valid, queue)
        heapify(queue)
        self._max_entries = max(_MIN_ENTRIES, 2 * len(queue))

    def _run(self, until: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until:
            if len(queue) > self._max_entries:
                self._drop_stale_entries()
                continue
            entry = heappop(queue)
            if not is_valid(entry):
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
                client.valid_entry = -1
                del self._clients[client]
            else:
                self.suspend(client, suspended_until)
