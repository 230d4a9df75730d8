"""Many threads that call one pipeline of four policies: the wall time per call, over all threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from itertools import repeat
from time import perf_counter_ns
from typing import Any

from benchmarks.cells import Result, Wanted
from benchmarks.functions import ANSWER, answer
from benchmarks.libraries import Library
from benchmarks.timing import SYNC, Effort

GROUP = "threads on one pipeline of four"
THREADS = (1, 4, 16)


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    if not wanted(GROUP):
        return
    functions = {it.name: it.entries["four", SYNC](answer) for it in libraries if ("four", SYNC) in it.entries}
    calls = {name: _calls_in(25 * effort.batch, function) for name, function in functions.items()}
    samples: dict[int, dict[str, list[float]]] = {threads: {name: [] for name in functions} for threads in THREADS}
    order = [(name, threads) for name in functions for threads in THREADS]
    for _ in range(effort.rounds):
        random.shuffle(order)
        for name, threads in order:
            samples[threads][name].append(wall_time(functions[name], threads, calls[name]))
    for threads in THREADS:
        yield Result(GROUP, f"{threads} threads" if threads > 1 else "1 thread", "ns", samples[threads])
    yield Result(
        GROUP,
        "throughput of 16 / of 1",
        "",
        {
            name: [one / many for one, many in zip(samples[1][name], samples[16][name], strict=True)]
            for name in functions
        },
    )


def wall_time(function: Callable[[], Any], threads: int, calls: int) -> float:
    """Return nanoseconds per call, when a number of threads share a number of calls."""
    each = calls // threads
    barrier = threading.Barrier(threads)
    spans: list[tuple[int, int]] = []

    def work() -> None:
        barrier.wait()
        began = perf_counter_ns()
        for _ in repeat(None, each):
            function()
        spans.append((began, perf_counter_ns()))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return (max(ended for _, ended in spans) - min(began for began, _ in spans)) / (each * threads)


def _calls_in(nanoseconds: float, function: Callable[[], Any]) -> int:
    assert function() == ANSWER
    calls = 16 * 10
    return max(calls, int(nanoseconds / wall_time(function, 1, calls)))
