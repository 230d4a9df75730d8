"""Simulated time: many clients that execute the real policies, in one queue of events with its own clock.

There is no event loop and no thread in it. A client is a coroutine; whatever it awaits comes down to
one of two suspensions: until an instant, or until it is woken. The engine takes the earliest
entry of a heap, sets the clock to its instant and sends the client on. Entries of one instant are
taken in the order in which they were made, and all randomness comes from one seeded generator, so a
simulation is repeated exactly by its seed.

An entry that no longer counts, because the client was woken or cut off before, or because the block of the timer has
been left, stays in the heap. It is passed over when its turn comes; and each time that the heap has doubled, all of
them are dropped at once: the limit of a call that ends in time would keep its entry for as long as that limit is.
"""

from __future__ import annotations

import gc
import random
import types
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context as Variables
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Self, final

from typing_extensions import override

from resilience import backoff, checks
from resilience.checks import Duration
from resilience.clock import clock
from resilience.runtimes.base import DEFAULT_MAX_ABANDONED, Expired, Runtime, Timer, Waiter
from resilience.runtimes.tasks import TASKS

#: So many entries are never looked through.
_FEW = 1000


@types.coroutine
def _until(instant: float) -> Generator[float, None, None]:
    """Suspend the client until an instant; infinity: until it is woken."""
    yield instant


@final
class Client:
    """One coroutine of a simulation.

    :param coroutine: what it does.
    """

    __slots__ = ("coroutine", "is_done", "resumes_at", "run")

    def __init__(self, coroutine: Coroutine[float, None, object]) -> None:
        self.coroutine: Coroutine[float, None, object] = coroutine
        self.run: Callable[..., Any] = Variables().run  # ambient contexts are each client's own
        self.resumes_at: int = -1  # the number of the entry that sends it on; others no longer count
        #: Whether it has come to its end.
        self.is_done: bool = False


@final
class SimulatedTimer(Timer):
    """An entry of its own, which cuts the client off if its block has not been left by then."""

    __slots__ = ("_engine", "deadline", "fired", "is_armed")

    def __init__(self, engine: Engine, deadline: float) -> None:
        self.deadline: float = deadline
        self.fired: bool = False
        self.is_armed: bool = False
        self._engine = engine

    @override
    def start(self) -> None:
        self.is_armed = True
        self._engine.enter(self.deadline, self._engine.current, self)

    @override
    def stop(self, error: BaseException | None) -> bool:
        self.is_armed = False
        self.fired = isinstance(error, Expired) and error.timer is self
        return self.fired


@final
class SimulatedWaiter(Waiter):
    """A client in a queue."""

    __slots__ = ("_client", "_engine", "_waits", "_woken")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._client = engine.current
        self._waits = False
        self._woken = False

    @override
    def wake(self) -> None:
        self._woken = True
        if self._waits:  # else it does something else, and is not to be sent on from that
            self._client.resumes_at = self._engine.enter(self._engine.time, self._client)

    @override
    def is_alive(self) -> bool:
        return not self._client.is_done

    @override
    async def wait(self, deadline: float, timer: Timer | None) -> bool:
        if not self._woken:
            self._waits = True
            try:
                await _until(deadline)
            finally:
                self._waits = False
        return self._woken


@final
class SimulatedRuntime(Runtime):
    """What policies may ask of a simulation."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @override
    async def sleep(self, seconds: float, timer: Timer | None) -> None:
        await _until(self._engine.time + seconds)

    @override
    def timer(
        self,
        deadline: float,
        limit: float | None = None,
        policy: str = "",
        max_abandoned: int = DEFAULT_MAX_ABANDONED,
    ) -> SimulatedTimer:
        return SimulatedTimer(self._engine, deadline)

    @override
    def waiter(self) -> SimulatedWaiter:
        return SimulatedWaiter(self._engine)

    @override
    async def run(self, function: Callable[..., Any], /, *args: object) -> Any:
        return await TASKS.run(function, *args)

    @override
    async def close(self, resource: object) -> None:
        await TASKS.close(resource)


class Engine:
    """The queue of events, the clock and the clients.

    While it runs it is the clock, and the source of randomness, of the whole process: nothing else may run
    policies at the same time.

    :param seed: where the randomness begins.
    """

    def __init__(self, seed: int = 0) -> None:
        #: The source of randomness, for policies without one of their own and for what the functions do.
        self.rng: random.Random = random.Random(seed)
        #: What time it is, in seconds.
        self.time: float = 0.0
        self.runtime: SimulatedRuntime = SimulatedRuntime(self)
        self.current: Client
        self._queue: list[tuple[float, int, Client, SimulatedTimer | None]] = []
        self._entries = 0
        self._most_entries = _FEW  # beyond so many, those that no longer count are dropped
        self._clients: dict[Client, None] = {}  # those that are not done, in order

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def now(self) -> float:
        """Return what time it is, in seconds."""
        return self.time

    def start(self, coroutine: Coroutine[Any, None, object], after: Duration = 0.0) -> Client:
        """Add a client, which begins so many seconds from now."""
        delay = checks.seconds("after", after, zero=True)
        client = Client(coroutine)
        self._clients[client] = None
        client.resumes_at = self.enter(self.time + delay, client)
        return client

    async def sleep(self, seconds: float) -> None:
        """Let the client that awaits this wait for so many seconds."""
        await _until(self.time + seconds)

    def run(self, until: float = inf) -> float:
        """Run until every client is done, or nothing happens any more, or it is `until`; return what time it is.

        What a client raises comes out, and ends the simulation.
        """
        now, source, (often, *rest) = clock.now, backoff.SHARED_RANDOMNESS, gc.get_threshold()
        clock.now, backoff.SHARED_RANDOMNESS = self.now, self.rng
        # The collector looks through all that the clients hold, and would take longer than they: it comes less often.
        gc.set_threshold(often and max(often, 20 * len(self._clients)), *rest)
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

    def enter(self, instant: float, client: Client, timer: SimulatedTimer | None = None) -> int:
        """Make an entry; return its number."""
        self._entries = number = self._entries + 1
        heappush(self._queue, (instant, number, client, timer))
        return number

    def _drop_what_no_longer_counts(self) -> None:
        queue = self._queue
        queue[:] = [it for it in queue if (it[2].resumes_at == it[1] if it[3] is None else it[3].is_armed)]
        heapify(queue)
        self._most_entries = max(_FEW, 2 * len(queue))

    def _run(self, until: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until:
            if len(queue) > self._most_entries:
                self._drop_what_no_longer_counts()
                continue
            instant, number, client, timer = heappop(queue)
            if timer is None:
                if client.resumes_at != number:
                    continue
            elif not timer.is_armed:
                continue
            if instant > self.time:
                self.time = instant
            self.current = client
            try:
                if timer is None:
                    suspended_until = client.run(client.coroutine.send, None)
                else:
                    suspended_until = client.run(client.coroutine.throw, Expired(timer))
            except StopIteration:
                client.is_done = True
                client.resumes_at = -1
                del self._clients[client]
                continue
            self._entries = number = self._entries + 1
            client.resumes_at = number
            if suspended_until != inf:
                heappush(queue, (suspended_until, number, client, None))
