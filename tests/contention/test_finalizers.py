"""Garbage collection at the worst moments: abandoned coroutines are closed while locks are held.

The collector runs wherever memory is allocated, in the allocating thread, so also inside the library, and closes
the coroutines that it finds: calls inside a bulkhead release their permit, queued ones leave, probes are released.
With thresholds of 1 it runs all the time.

The calls here set no context variable (`call` and `acall` without a deadline do not): CPython 3.11 collects
inside `ContextVar.set`, and crashes if a finalizer then sets one itself.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from resilience import Bulkhead, BulkheadFull, CircuitBreaker, CircuitOpen, CircuitState, events
from tests.callers import run_all
from tests.contention.storm import fine_grained_switching

ROUNDS = 400


class Forever:
    """An awaitable that never ends."""

    def __await__(self) -> Iterator[None]:
        while True:
            yield


@contextmanager
def collecting_all_the_time() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        with fine_grained_switching():
            yield
    finally:
        gc.set_threshold(*before)
        gc.collect()


def throw_away(coroutine: Any) -> None:
    """Begin a coroutine, and leave it to the collector: only a reference cycle holds it."""
    try:
        coroutine.send(None)
    except (BulkheadFull, CircuitOpen):
        return
    box = [coroutine]
    box.append(box)


def run(function: Callable[[], None], threads: int = 1) -> None:
    """Run the function in this number of threads, while the collector runs all the time."""
    with collecting_all_the_time():
        run_all([function] * threads, patience=60.0)


@pytest.mark.filterwarnings("ignore:the wait in a queue of a blocking call")  # as intended here
@pytest.mark.parametrize("threads", [1, 4])
def test_garbage_collected_calls_release_their_permits(threads: int) -> None:
    """Inside a bulkhead or in its queue, from several loops, while others take and release permits."""
    bulkhead = Bulkhead(3, queue=4, max_wait=0.001)

    async def work() -> None:
        for _ in range(ROUNDS):
            throw_away(bulkhead.acall(Forever))
            with suppress(BulkheadFull):
                bulkhead.call(bulkhead.stats)

    run(lambda: asyncio.run(work()), threads)
    stats = bulkhead.stats()
    assert (stats.in_flight, stats.queued) == (0, 0)
    with bulkhead.slot(), bulkhead.slot(), bulkhead.slot(), pytest.raises(BulkheadFull):
        bulkhead.call(int)


@pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(),
    reason="a free-threaded collector runs at other times, and until then a waiter that was thrown away is queued",
)
def test_garbage_collected_waiters_leave_the_queue() -> None:
    """Half of the queued calls are never finished; the others are all served."""
    bulkhead = Bulkhead(1, queue=1000)
    served: list[int] = []

    async def main() -> None:
        async def call() -> None:
            served.append(1)
            await asyncio.sleep(0)

        for _ in range(20):
            async with bulkhead.slot():
                tasks = []
                for _ in range(5):
                    throw_away(bulkhead.acall(Forever))
                    tasks.append(asyncio.ensure_future(bulkhead.acall(call)))
                    await asyncio.sleep(0)
            await asyncio.gather(*tasks)

    run(lambda: asyncio.run(main()))
    assert len(served) == 100
    stats = bulkhead.stats()
    assert (stats.in_flight, stats.queued) == (0, 0)


@pytest.mark.parametrize("threads", [1, 4])
def test_garbage_collected_probes_are_released(threads: int) -> None:
    """The half-open circuit admits later calls."""
    breaker = CircuitBreaker(1, open_for=[0.0], probes=2, probe_successes=10**9)
    breaker.capture(lambda ctx: 1 / 0)
    admitted: list[int] = []

    def work() -> None:
        for _ in range(ROUNDS):
            with suppress(CircuitOpen):
                throw_away(breaker.acall(Forever))
            with suppress(CircuitOpen):
                admitted.append(breaker.call(int))
            breaker.stats()

    run(work, threads)
    assert admitted
    assert breaker.state is CircuitState.HALF_OPEN
    assert breaker.stats().probes == 0


def test_a_finalizer_may_use_the_policies_it_interrupts() -> None:
    """As an object whose finalizer calls a breaker and a bulkhead, and is collected inside them."""
    bulkhead = Bulkhead(2, queue=2, max_wait=0.001)
    breaker = CircuitBreaker(2, open_for=[0.0], on_transition=lambda event: None)
    ended: list[int] = []

    class Thing:
        pass

    def fail() -> None:
        with suppress(CircuitOpen, ZeroDivisionError), breaker.guard():
            1 / 0  # noqa: B018

    def finalize() -> None:
        bulkhead.stats()
        bulkhead.resize(2)
        breaker.stats()
        if sys.version_info >= (3, 12):  # a guard sets a context variable: see the docstring of the module
            fail()
        breaker.isolate()
        breaker.close()
        ended.append(1)

    def work() -> None:
        for _ in range(ROUNDS):
            thing: Any = Thing()
            thing.me = thing
            weakref.finalize(thing, finalize)
            del thing
            bulkhead.call(fail)
            breaker.isolate()
            breaker.close()

    run(work)
    assert len(ended) == ROUNDS
    assert bulkhead.stats().in_flight == 0


def test_a_finalizer_may_unsubscribe() -> None:
    """`weakref.finalize(thing, unsubscribe)`, collected during a subscription: no deadlock, and none is left."""
    seen: list[Any] = []

    class Thing:
        pass

    def work() -> None:
        for _ in range(ROUNDS):
            thing: Any = Thing()
            thing.me = thing
            weakref.finalize(thing, events.subscribe(seen.append, events.CircuitChanged))
            del thing
            events.subscribe(seen.append, events.CircuitChanged)()

    run(work)
    breaker = CircuitBreaker(1)
    breaker.isolate()
    assert seen == []
