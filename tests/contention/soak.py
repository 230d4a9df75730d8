"""Failures of all kinds, for any length of time: `python -m tests.contention.soak --seconds 600`.

Threads, an asyncio loop and a trio loop call through the same policies all the time. Functions fail, hang and are slow;
callers are cancelled and time out; circuits are opened and closed manually, bulkheads resized, listeners added and
removed; event loops end while their tasks wait in the queue. From time to time, all callers stop, and threads, tasks,
timers, objects, memory, permits and probes are counted. None may grow. Exits with 1 if one does.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import random
import sys
import threading
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import anyio
import trio

from resilience import (
    Bulkhead,
    CircuitBreaker,
    Context,
    DeadlineExceeded,
    FailureRatio,
    Fallback,
    Policy,
    Rejected,
    RetriesExhausted,
    Retry,
    Timeout,
    TimeoutExceeded,
    deadline,
    events,
)
from resilience.backoff import Exponential
from resilience.runtimes.workers import Worker
from tests.conftest import Boom, World
from tests.contention.storm import fine_grained_switching

THREADS, TASKS_PER_LOOP = 8, 12
LIMIT = 4

#: The most that a run may grow by from its first measurement to its last.
MOST = {"objects": 2_000, "python_kib": 512, "rss_mib": 16, "timers": 64}

#: The warning for a call that a busy machine has delayed.
LATE = ".*it ignores its deadline"

#: Seconds after which callers that do not stop count as hanging.
PATIENCE = 60.0


@dataclass
class Measurement:
    """The counts while all callers stand still."""

    calls: int
    threads: int  # without the library's workers
    workers: int
    tasks: int
    timers: int
    files: int
    objects: int
    python_kib: int
    rss_mib: int
    in_flight: int
    queued: int
    probes: int
    abandoned: int


class Gate:
    """A gate at which all callers stop during a measurement."""

    def __init__(self, callers: int) -> None:
        self._callers = callers
        self._counting = threading.Lock()
        self._stopped = 0
        self.closed = False
        self.over = False

    async def pass_through(self, world: World) -> bool:
        """Wait until the gate is open; return false at the end of the run."""
        if self.closed:
            self._count(+1)
            while self.closed:
                await world.sleep(0.005)
            self._count(-1)
        return not self.over

    def _count(self, change: int) -> None:
        with self._counting:
            self._stopped += change

    def close(self) -> None:
        """Stop all callers."""
        self.closed = True
        end = time.monotonic() + PATIENCE
        while self._stopped < self._callers:
            assert time.monotonic() < end, f"only {self._stopped} of {self._callers} callers stop: something hangs"
            time.sleep(0.005)

    def open(self) -> None:
        """Let the callers continue, and wait until they do."""
        self.closed = False
        while self._stopped:
            time.sleep(0.001)


class Dependency:
    """A dependency that answers, fails, is slow, or hangs."""

    def __init__(self) -> None:
        self.is_down = False

    def function(self, world: World, rng: random.Random) -> Callable[..., Any]:
        async def fn(ctx: Context | None = None) -> str:
            chance = rng.random()
            if chance < 0.02:
                await world.sleep(0.02)  # longer than any limit
            elif chance < 0.1:
                await world.sleep(0.0005)
            if self.is_down or chance > 0.8:
                raise Boom("no") if chance < 0.9 else ConnectionError("reset")
            return "answered"

        return fn


class Soak:
    """The policies, and the operations on them."""

    def __init__(self) -> None:
        self.dependency = Dependency()
        self.moves: list[events.CircuitChanged] = []
        self.transitions = 0
        self.bulkhead = Bulkhead(LIMIT, queue=12, max_wait=0.02)
        self.breaker = CircuitBreaker(
            FailureRatio(0.6, min_calls=20, window=1.0),
            open_for=Exponential(0.001, cap=0.05),
            probes=2,
            on_transition=self.moves.append,
        )
        backoff = Exponential(0.0001, cap=0.001)
        retry = Retry(3, on=(Boom, OSError), backoff=backoff)
        self.pipelines: list[Policy[Any]] = [
            Policy.wrap(Fallback("instead"), Timeout(0.05), retry, self.breaker, self.bulkhead, Timeout(0.005)),
            Policy.wrap(Timeout(0.01), self.bulkhead, Retry(2, backoff=backoff, wrap=True)),
            Policy.wrap(self.breaker, Timeout(0.005, cooperative=True), self.bulkhead),
            Policy.wrap(retry, self.bulkhead, listeners=[lambda event: None]),
            self.bulkhead,
        ]

    async def once(self, world: World, rng: random.Random) -> str:
        """Run one operation, and return its outcome."""
        chance = rng.random()
        if chance < 0.02:
            return self._manually(rng)
        if chance < 0.021 and world.blocking:
            return self._loop_that_ends_with_waiters()
        policy = rng.choice(self.pipelines)
        if chance < 0.1:  # a policy for one call, with its own limit
            policy = Timeout(rng.uniform(0.001, 0.01)).wrap(policy)
        fn = self.dependency.function(world, rng)
        if not world.blocking and chance > 0.8:
            with anyio.move_on_after(rng.choice([0.0, 0.0005, 0.002])):
                return await self._call(world, rng, policy, fn)
            return "cancelled"
        return await self._call(world, rng, policy, fn)

    async def _call(self, world: World, rng: random.Random, policy: Policy[Any], fn: Callable[..., Any]) -> str:
        chance = rng.random()
        try:
            if chance < 0.1:
                return str(await world.execute(policy, fn, Context(timeout=rng.choice([0.0, 0.0005, 0.005]))))
            if chance < 0.2:
                with deadline(rng.choice([0.0005, 0.005])):
                    return str(await world.execute(policy, fn))
            if chance < 0.25 and not world.blocking:
                async with deadline(0.001):
                    return str(await world.execute(policy, fn))
            return str(await world.execute(policy, fn))
        except Rejected:
            await world.sleep(0.0005)
            return "rejected"
        except (DeadlineExceeded, TimeoutExceeded):
            return "out of time"
        except (Boom, ConnectionError, RetriesExhausted):
            return "failed"

    def _manually(self, rng: random.Random) -> str:
        act = rng.choice(["up", "up", "up", "down", "isolate", "close", "close", "close", "resize", "listen"])
        if act in ("up", "down"):
            self.dependency.is_down = act == "down"
        elif act == "resize":
            self.bulkhead.resize(rng.randint(1, LIMIT))
        elif act == "listen":
            events.subscribe(lambda event: None)()
        else:
            getattr(self.breaker, act)()
        return "manual"

    def _loop_that_ends_with_waiters(self) -> str:
        """Close an event loop while its tasks hold a permit and wait for others."""
        loop = asyncio.new_event_loop()
        waiting = [loop.create_task(self.bulkhead.acapture(lambda ctx: asyncio.sleep(60))) for _ in range(3)]
        loop.run_until_complete(asyncio.sleep(0))
        for task in waiting:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        return "loops that ended with waiters"

    def rest(self) -> None:
        """Wait for the end of abandoned calls, and check the transitions of the circuit."""
        self.dependency.is_down = False
        self.bulkhead.resize(LIMIT)
        gc.collect()
        end = time.monotonic() + PATIENCE
        while Timeout.abandoned() and time.monotonic() < end:
            time.sleep(0.005)
        chain = list(self.moves)
        assert all(one.new is other.old for one, other in itertools.pairwise(chain)), "a transition is missing"
        assert not chain or chain[-1].new is self.breaker.state, "the last transition was not reported"
        self.transitions += len(chain)
        del self.moves[:-1]


class Callers:
    """Threads and loops that continue until the gate ends the run."""

    def __init__(self, soak: Soak) -> None:
        self._soak = soak
        self.gate = Gate(THREADS + 2 * TASKS_PER_LOOP)
        self.outcomes: list[Counter[str]] = []
        self.errors: list[BaseException] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self.trio_tasks = 0
        self.threads = [self._thread(self._in_a_thread, number) for number in range(THREADS)]
        self.threads += [self._thread(self._in_a_loop, name) for name in ("asyncio", "trio")]

    def _thread(self, target: Callable[..., None], argument: object) -> threading.Thread:
        thread = threading.Thread(target=self._watched, args=(target, argument), daemon=True)
        thread.start()
        return thread

    def _watched(self, target: Callable[..., None], argument: object) -> None:
        try:
            target(argument)
        except BaseException as error:
            self.errors.append(error)

    async def _work(self, world: World, seed: str) -> None:
        rng, outcomes = random.Random(seed), Counter[str]()
        self.outcomes.append(outcomes)
        while await self.gate.pass_through(world):
            outcomes[await self._soak.once(world, rng)] += 1
            if not world.blocking:
                await anyio.lowlevel.checkpoint()

    def _in_a_thread(self, number: int) -> None:
        world = World("threads")
        world.run(lambda: self._work(world, f"thread {number}"))

    def _in_a_loop(self, name: str) -> None:
        world = World(name)

        async def main() -> None:
            if name == "asyncio":
                self.loop = asyncio.get_running_loop()
            async with anyio.create_task_group() as tasks:
                for number in range(TASKS_PER_LOOP):
                    tasks.start_soon(self._work, world, f"{name} {number}")
                while name == "trio" and not self.gate.over:
                    self.trio_tasks = trio.lowlevel.current_statistics().tasks_living
                    await anyio.sleep(0.02)

        world.run(main)

    def measure(self) -> Measurement:
        """Count everything, while all callers stand still."""
        self._soak.rest()
        time.sleep(0.1)  # so that the trio loop counts its tasks
        gc.collect()
        permits, threads = self._soak.bulkhead.stats(), threading.enumerate()
        workers = sum(isinstance(thread, Worker) for thread in threads)
        loop: Any = self.loop
        return Measurement(
            calls=sum(sum(outcomes.values()) for outcomes in self.outcomes),
            threads=len(threads) - workers,
            workers=workers,
            tasks=len(asyncio.all_tasks(loop)) + self.trio_tasks,
            timers=len(loop._scheduled),
            files=len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
            objects=len(gc.get_objects()),
            python_kib=tracemalloc.get_traced_memory()[0] // 1024,
            rss_mib=resident_bytes() // 2**20,
            in_flight=permits.in_flight,
            queued=permits.queued,
            probes=self._soak.breaker.stats().probes,
            abandoned=Timeout.abandoned(),
        )


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def complaints(first: Measurement, last: Measurement) -> list[str]:
    """Return a text for each number that has grown, and for each resource that is still held."""
    held = [name for name in ("in_flight", "queued", "probes", "abandoned") if getattr(last, name)]
    texts = [f"{name}: {getattr(last, name)} are still held" for name in held]
    for name in ("threads", "tasks", "files", *MOST):
        growth = getattr(last, name) - getattr(first, name)
        if growth > MOST.get(name, 0):
            texts.append(f"{name} grew by {growth:,}")
    return texts


def run(seconds: float, rows: int, show: Callable[[str], object]) -> tuple[list[Measurement], Callers, Soak]:
    """Run for `seconds`, with `rows` measurements at equal intervals."""
    names = [field.name for field in fields(Measurement)]
    show("".join(f"{name:>{max(10, len(name) + 2)}}" for name in names))
    soak, measured = Soak(), []
    with fine_grained_switching():
        callers = Callers(soak)
        for _ in range(rows):
            time.sleep(seconds / rows)
            callers.gate.close()
            measured.append(callers.measure())
            row = zip(names, astuple(measured[-1]), strict=True)
            show("".join(f"{value:>{max(10, len(name) + 2)},}" for name, value in row))
            callers.gate.over = callers.gate.over or len(measured) == rows or bool(callers.errors)
            callers.gate.open()
            if callers.errors:
                raise callers.errors[0]
        for thread in callers.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a caller hangs"
    return measured, callers, soak


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.contention.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to run (60)")
    parser.add_argument("--rows", type=int, default=12, help="how often to measure (12)")
    options = parser.parse_args(arguments)

    print(f"{THREADS} threads, {TASKS_PER_LOOP} asyncio tasks, {TASKS_PER_LOOP} trio tasks, for {options.seconds:g} s")
    warnings.filterwarnings("ignore", LATE, RuntimeWarning)
    tracemalloc.start()
    measured, callers, soak = run(options.seconds, options.rows, lambda text: print(text, flush=True))
    outcomes = sum(callers.outcomes, Counter())
    print(", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.most_common()))
    print(f"{soak.transitions:,} transitions, each reported once and in order")
    texts = complaints(measured[min(1, len(measured) - 1)], measured[-1])
    print("; ".join(texts) or "flat: nothing has grown, nothing is held")
    return 1 if texts else 0


if __name__ == "__main__":
    sys.exit(main())
