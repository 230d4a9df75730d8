"""Garbage collection at the worst moments: coroutines that nobody finishes are thrown away while locks are held.

The collector runs wherever memory is asked for, in whatever thread asks, so also inside of the library, and
closes what it finds: calls inside a bulkhead give their permit back, queued ones leave, probes are released.
With thresholds of 1 it runs all the time.

The calls here set no context variable (`call` and `acall` outside of any budget do not): CPython 3.11 collects
inside of `ContextVar.set`, and crashes if a finalizer then sets one itself.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from resilience import Bulkhead, BulkheadFull, CircuitBreaker, CircuitOpen, CircuitState, events
from tests.contention.storm import fine_grained_switching

ROUNDS = 400


class Forever:
    """An awaitable that never comes back."""

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
    """Begin it, and leave it to the collector: it is held by nothing but a cycle."""
    try:
        coroutine.send(None)
    except (BulkheadFull, CircuitOpen):
        return
    box = [coroutine]
    box.append(box)


def bounded(function: Callable[[], None], threads: int = 1) -> None:
    """Run it in so many threads; a hang is a failure, not a hang."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # the test's thread raises it
            errors.append(error)

    started = [threading.Thread(target=run, daemon=True) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(60)
        assert not thread.is_alive(), "a thread waits for itself"
    if errors:
        raise errors[0]


@pytest.mark.filterwarnings("ignore:the wait in a queue of a blocking call")  # that is what is tried here
@pytest.mark.parametrize("threads", [1, 4])
def test_calls_that_are_thrown_away_give_their_permits_back(threads: int) -> None:
    """Inside a bulkhead or in its queue, from several loops, while others take and give permits."""
    bulkhead = Bulkhead(3, queue=4, max_wait=0.001)

    async def work() -> None:
        for _ in range(ROUNDS):
            throw_away(bulkhead.acall(Forever))
            with suppress(BulkheadFull):
                bulkhead.call(bulkhead.stats)

    with collecting_all_the_time():
        bounded(lambda: asyncio.run(work()), threads)
    stats = bulkhead.stats()
    assert (stats.in_flight, stats.queued) == (0, 0)
    slots = [bulkhead.slot() for _ in range(3)]
    for slot in slots:
        slot.__enter__()
    assert isinstance(bulkhead.capture(lambda ctx: None).error, BulkheadFull)  # type: ignore[union-attr]


@pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(),
    reason="a free-threaded collector comes when it likes, and until then a waiter that was thrown away is one",
)
def test_waiters_that_are_thrown_away_leave_the_queue() -> None:
    """Half of those that queue are never finished; the others are all served."""
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

    with collecting_all_the_time():
        bounded(lambda: asyncio.run(main()))
    assert len(served) == 100
    stats = bulkhead.stats()
    assert (stats.in_flight, stats.queued) == (0, 0)


@pytest.mark.parametrize("threads", [1, 4])
def test_probes_that_are_thrown_away_are_released(threads: int) -> None:
    """A half-open circuit whose probes vanish refuses nobody for long, and closes when one comes back."""
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

    with collecting_all_the_time():
        bounded(work, threads)
    assert admitted
    assert breaker.state is CircuitState.HALF_OPEN
    assert breaker.stats().probes == 0


def test_a_finalizer_may_use_the_very_policies_it_interrupts() -> None:
    """An object whose end calls back into breaker and bulkhead, collected in the middle of them."""
    bulkhead = Bulkhead(2, queue=2, max_wait=0.001)
    breaker = CircuitBreaker(2, open_for=[0.0], on_transition=lambda event: None)
    ended: list[int] = []

    class Thing:
        pass

    def fail() -> None:
        with suppress(CircuitOpen, ZeroDivisionError), breaker.guard():
            1 / 0  # noqa: B018

    def last_words() -> None:
        bulkhead.stats()
        bulkhead.resize(2)
        breaker.stats()
        if sys.version_info >= (3, 12):  # a guard sets a context variable: see above
            fail()
        breaker.isolate()
        breaker.close()
        ended.append(1)

    def work() -> None:
        for _ in range(ROUNDS):
            thing: Any = Thing()
            thing.me = thing
            weakref.finalize(thing, last_words)
            del thing
            bulkhead.call(fail)
            breaker.isolate()
            breaker.close()

    with collecting_all_the_time():
        bounded(work)
    assert len(ended) == ROUNDS
    assert bulkhead.stats().in_flight == 0


def test_a_finalizer_may_end_a_subscription() -> None:
    """`weakref.finalize(thing, unsubscribe)`, collected while somebody subscribes: no deadlock, and none is left."""
    heard: list[Any] = []

    class Thing:
        pass

    def work() -> None:
        for _ in range(ROUNDS):
            thing: Any = Thing()
            thing.me = thing
            weakref.finalize(thing, events.subscribe(heard.append, events.CircuitChanged))
            del thing
            events.subscribe(heard.append, events.CircuitChanged)()

    with collecting_all_the_time():
        bounded(work)
    breaker = CircuitBreaker(1)
    breaker.isolate()
    assert heard == []
