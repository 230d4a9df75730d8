"""Scale: many hosts, many running tasks, many simulated clients, and the threads that a burst leaves behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TypeAlias

from benchmarks.cells import Result, Wanted, name_of
from benchmarks.functions import answer
from benchmarks.libraries import OURS, Library
from benchmarks.timing import ASYNCIO, Effort
from resilience import CircuitBreaker, FailureRatio, Fallback, Policy, Retry, Timeout
from resilience.integrations.http import standard
from resilience.testing import Simulation

HOSTS = "standard(), a host"
TASKS = "asyncio, a task under five"
CLIENTS = "simulation of 30,000 clients"
CELL = "a call / with 1,000"
WITHOUT = "without policies"
THREADS = "threads after a burst"


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    small = effort.rounds <= 2
    cells: list[tuple[str, str, str, Callable[[], float], int]] = [
        (HOSTS, "made and called", "bytes", lambda: _bytes_of_a_host(20 if small else 1000), 1),
        (HOSTS, "made, the 20,000th", "ns", lambda: _time_to_make(10 if small else 20_000), 3),
        (HOSTS, "found", "ns", lambda: _time_to_find(10 if small else 2000), effort.rounds),
        (THREADS, "after 3 s", "threads", lambda: _threads_left(20 if small else 200, 0.01 if small else 3.0), 1),
    ]
    for group, cell, unit, function, rounds in cells:
        if wanted(name_of(group, cell)):
            yield Result(group, cell, unit, {OURS: [function() for _ in range(rounds)]})
    if wanted(CLIENTS):
        samples: dict[str, list[float]] = {OURS: [], WITHOUT: []}
        for _ in range(3):
            for name, protect in ((OURS, _protected), (WITHOUT, _unprotected)):
                samples[name].append(_slower_with_clients(50 if small else 1000, protect))
        yield Result(CLIENTS, CELL, "", samples)
    if wanted(TASKS):
        sizes = {
            it.name: [_bytes_of_a_task(it, 20 if small else 1000)]
            for it in libraries
            if ("five, timeout", ASYNCIO) in it.entries
        }
        yield Result(TASKS, "bytes while it runs", "bytes", sizes)


# --- hosts ---


def _bytes_of_a_host(hosts: int) -> float:
    policies = standard(cooperative=True, max_hosts=hosts + 1)
    policies.for_host("https://first.example/").call(answer)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(hosts):
            policies.for_host(f"https://{number}.example/").call(answer)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / hosts
    finally:
        tracemalloc.stop()


def _time_to_make(hosts: int) -> float:
    """Return the median nanoseconds of making the policies of one of the last tenth of the hosts."""
    policies = standard(max_hosts=hosts)
    times = [_timed(policies.for_host, f"https://{number}.example/") for number in range(hosts)]
    return sorted(times[-hosts // 10 :])[hosts // 20]


def _time_to_find(lookups: int) -> float:
    """Return the median nanoseconds of a lookup of one of 100 known hosts, with another path each time."""
    policies = standard()
    urls = [f"https://{number % 100}.example/{number}" for number in range(lookups + 100)]
    for url in urls[:100]:
        policies.for_host(url)
    return sorted(_timed(policies.for_host, url) for url in urls[100:])[lookups // 2]


def _timed(function: Callable[[str], object], argument: str) -> float:
    began = time.perf_counter_ns()
    function(argument)
    return time.perf_counter_ns() - began


# --- tasks ---


def _bytes_of_a_task(library: Library, tasks: int) -> float:
    """Return how many more bytes a task holds inside five policies than without them."""

    async def main() -> float:
        let_go = asyncio.Event()

        async def wait(ctx: object = None) -> None:
            await let_go.wait()

        protect = library.entries["five, timeout", ASYNCIO]
        sizes = []
        for make in (lambda: wait, lambda: protect(wait)):
            # One function per call, because the bulkheads of all libraries have a limit.
            functions = [make() for _ in range(tasks + 1)]
            running = []
            for each in functions:
                running.append(asyncio.create_task(each()))
                await asyncio.sleep(0)  # excludes what the first call allocates
            let_go.set()
            await asyncio.gather(*running)
            let_go.clear()
            running.clear()
            gc.collect()
            tracemalloc.start()
            running += [asyncio.create_task(each()) for each in functions]
            await asyncio.sleep(0)
            # Without the set of all tasks in asyncio, which grows now and then.
            traced = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, "*_weakrefset.py")])
            sizes.append(sum(it.size for it in traced.statistics("filename")) / len(running))
            tracemalloc.stop()
            let_go.set()
            await asyncio.gather(*running)
            let_go.clear()
        return sizes[1] - sizes[0]

    return asyncio.run(main())


# --- simulated clients ---


#: Makes the call of a simulated client from what is called.
Protection: TypeAlias = Callable[[Simulation, Callable[[object], Awaitable[None]]], Callable[[], Awaitable[None]]]


def _protected(simulation: Simulation, call: Callable[[object], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    policy = Policy.wrap(Fallback(None), Timeout(30.0), Retry(3), CircuitBreaker(FailureRatio(0.5)), Timeout(10.0))
    return lambda: simulation.execute(policy, call)


def _unprotected(simulation: Simulation, call: Callable[[object], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    return lambda: call(None)


def _slower_with_clients(few: int, protection: Protection) -> float:
    return _time_per_simulated_call(30 * few, 5.0, protection) / _time_per_simulated_call(few, 30.0, protection)


def _time_per_simulated_call(clients: int, seconds: float, protection: Protection) -> float:
    calls = count()
    with Simulation(seed=1) as simulation:

        async def work(ctx: object) -> None:
            next(calls)
            await simulation.sleep(0.05)

        call = protection(simulation, work)

        async def client() -> None:
            while simulation.now() < seconds:
                await call()
                await simulation.sleep(simulation.rng.expovariate(1.0))

        for _ in range(clients):
            simulation.start(client(), after=simulation.rng.random())
        began = time.process_time()
        simulation.run()
        return (time.process_time() - began) / next(calls)


# --- threads ---


def _threads_left(calls: int, seconds: float) -> float:
    """Return how many threads remain some seconds after a burst of concurrent calls under an enforced timeout."""
    before = threading.active_count()
    together = threading.Barrier(calls)
    with ThreadPoolExecutor(calls) as callers:
        any(callers.map(lambda _: Timeout(60).call(together.wait), range(calls)))
    time.sleep(seconds)
    return threading.active_count() - before
