"""One breaker and one bulkhead with many callers: both sides count, and their sums must agree.

Threads and two event loops call as fast as they can. Each caller counts the outcomes of its calls in its own book, so
that no lock of the test synchronizes the callers; the policies count under their own locks. There are two stages:

    counting    the circuit stays closed: each result is recorded once, even beside cancelled and refused calls
    moving      it opens and closes all the time: each refusal and each transition is counted once
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import anyio

from resilience import Bulkhead, BulkheadFull, CircuitBreaker, CircuitOpen, CircuitState, events
from resilience.state.trips import Tally, Trip
from tests.conftest import Boom, World
from tests.contention.storm import fine_grained_switching
from tests.policies.blocks import entered

THREADS = 16
TASKS_PER_LOOP = 12
LOOPS = ("asyncio", "trio")

LIMIT, QUEUE = 4, 34

#: The share of the calls in the first stage.
COUNTING = 0.9

#: The number of failures that open the circuit in the second stage.
TRIPS_AT = 50

#: The ways to make a call, and the policies that each of them uses.
THROUGH_BREAKER = ("both", "breaker", "guard")
THROUGH_BULKHEAD = ("both", "bulkhead", "slot")
WAYS = ("both", "both", "both", "breaker", "bulkhead", "guard", "slot")

#: The outcomes of the calls: (way, outcome) -> number of calls.
Book = Counter[tuple[str, str]]


def turn() -> None:
    """Let another thread run: the interpreter may switch threads where a function begins."""


class Counted(Trip):
    """A condition that counts the results that the breaker records, and relies on the breaker's lock."""

    def __init__(self) -> None:
        self.results = 0
        self.failures = 0
        self.trips_at: float = float("inf")

    def tally(self) -> Tally:
        return _CountedPeriod(self)


class _CountedPeriod(Tally):
    def __init__(self, trip: Counted) -> None:
        self._trip = trip
        self._failures = 0

    def add(self, failed: bool, duration: float, now: float) -> bool:
        results, failures = self._trip.results, self._trip.failures
        turn()  # without the lock, another thread could read the same numbers now
        self._trip.results, self._trip.failures = results + 1, failures + failed
        self._failures += failed
        return self._failures >= self._trip.trips_at


@dataclass
class Check:
    """One number, as counted by both sides."""

    what: str
    callers: int
    policies: int

    @property
    def agrees(self) -> bool:
        return self.callers == self.policies


class Subject:
    """The two policies, and the observations of their callers."""

    def __init__(self) -> None:
        self.trip = Counted()
        self.moves: list[events.CircuitChanged] = []
        self.breaker = CircuitBreaker(self.trip, open_for=[0.0005], probes=2, on_transition=self.moves.append)
        self.bulkhead = Bulkhead(LIMIT, queue=QUEUE)
        self.policies = {
            "both": self.breaker.wrap(self.bulkhead),
            "breaker": self.breaker,
            "bulkhead": self.bulkhead,
        }
        self.inside: deque[None] = deque()  # its operations are atomic, so no lock is needed
        self.too_many: deque[int] = deque()

    def enter(self) -> None:
        self.inside.append(None)
        if len(self.inside) > LIMIT:
            self.too_many.append(len(self.inside))

    def leave(self) -> None:
        self.inside.pop()


class Caller:
    """Makes one call after another, and counts their outcomes in its book."""

    def __init__(self, subject: Subject, world: World, seed: str) -> None:
        self._subject = subject
        self._rng = random.Random(seed)
        self.world = world
        self.book: Book = Counter()

    async def work(self, shares: Iterator[int]) -> None:
        for share in shares:
            for _ in range(share):
                await self._keep_the_book(self._rng.choice(WAYS))
            await self.world.sleep(0)

    async def _keep_the_book(self, way: str) -> None:
        outcome = "cancelled"
        may_cancel = not self.world.blocking and self._rng.random() < 0.05
        with anyio.move_on_after(0) if may_cancel else nullcontext():
            try:
                await self._call(way)
                outcome = "answered"
            except Exception as error:
                outcome = _name(error)
                await self.world.sleep(0)  # lets the calls in progress run
        self.book[way, outcome] += 1

    async def _call(self, way: str) -> None:
        if way == "guard":
            async with entered(self.world, self._subject.breaker.guard()):
                await self._function(way)
        elif way == "slot":
            async with entered(self.world, self._subject.bulkhead.slot()):
                await self._function(way)
        else:
            await self.world.call(self._subject.policies[way], self._function, way)

    async def _function(self, way: str) -> None:
        guarded = way in THROUGH_BULKHEAD
        self.book[way, "entered"] += 1
        if guarded:
            self._subject.enter()
        try:
            chance = self._rng.random()
            if chance < (0.03 if self.world.blocking else 0.25):
                await self.world.sleep(0)
            if chance > 0.75:
                raise Boom("no")
        except BaseException as error:
            self.book[way, "cancelled inside"] += not isinstance(error, Boom)
            raise
        finally:
            if guarded:
                self._subject.leave()


def _name(error: Exception) -> str:
    return {Boom: "failed", BulkheadFull: "full", CircuitOpen: "refused"}.get(type(error), repr(error))


class Stage:
    """A number of calls, shared among all callers."""

    CHUNK = 64

    def __init__(self, subject: Subject, name: str, calls: int, threads: int) -> None:
        self._subject = subject
        self._left = calls
        self._taking = threading.Lock()
        self._threads = threads
        self.name = name
        self.calls = calls
        self.callers: list[Caller] = []
        self.errors: list[BaseException] = []
        self.seconds = 0.0

    def run(self) -> Book:
        """Run all callers, and return the sum of their books."""
        counts = [("threads", 1)] * self._threads + [(name, TASKS_PER_LOOP) for name in LOOPS]
        callers = [[self._caller(world) for _ in range(count)] for world, count in counts]
        threads = [threading.Thread(target=self._work, args=[each], daemon=True) for each in callers]
        began = time.monotonic()
        with fine_grained_switching():
            for thread in threads:
                thread.start()
            patience = began + 120 + self.calls / 1000
            for thread in threads:
                thread.join(max(0.0, patience - time.monotonic()))
        self.seconds = time.monotonic() - began
        assert not any(thread.is_alive() for thread in threads), "a world hangs"
        if self.errors:
            raise self.errors[0]
        return sum((caller.book for caller in self.callers), Counter())

    def calls_by_world(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for caller in self.callers:
            counts[caller.world.name] += sum(n for (_, outcome), n in caller.book.items() if outcome in _ENDS)
        return counts

    def _caller(self, world: str) -> Caller:
        self.callers.append(Caller(self._subject, World(world), f"{self.name} {len(self.callers)}"))
        return self.callers[-1]

    def _shares(self) -> Iterator[int]:
        while not self.errors:
            with self._taking:
                share = min(self.CHUNK, self._left)
                self._left -= share
            if not share:
                return
            yield share

    def _work(self, callers: list[Caller]) -> None:
        world = callers[0].world

        async def tasks() -> None:
            async with anyio.create_task_group() as group:
                for caller in callers:
                    group.start_soon(caller.work, self._shares())

        try:
            world.run((lambda: callers[0].work(self._shares())) if world.blocking else tasks)
        except BaseException as error:
            self.errors.append(error)


#: The outcomes of a call; the other entries of a book count steps inside a call.
_ENDS = ("answered", "failed", "full", "refused", "cancelled")
_RESULTS = ("answered", "failed")


def of(book: Book, ways: tuple[str, ...], *outcomes: str) -> int:
    """Return how many calls that were made in one of these ways had one of these outcomes."""
    return sum(n for (way, outcome), n in book.items() if way in ways and outcome in outcomes)


def run(operations: int, threads: int = THREADS) -> tuple[list[Stage], list[Check]]:
    """Make this number of calls, and return the counts of both sides."""
    subject = Subject()
    counting = Stage(subject, "counting", int(operations * COUNTING), threads)
    book = counting.run()
    checks = [
        Check(
            "results that the breaker recorded", of(book, THROUGH_BREAKER, "answered", "failed"), subject.trip.results
        ),
        Check("failures among them", of(book, THROUGH_BREAKER, "failed"), subject.trip.failures),
        Check("openings, while it must not open", of(book, WAYS, "refused"), subject.breaker.stats().opened),
    ]
    subject.trip.trips_at = TRIPS_AT
    moving = Stage(subject, "moving", operations - counting.calls, threads)
    later = moving.run()
    opened = sum(move.new is CircuitState.OPEN for move in subject.moves)
    checks += [
        Check("calls that the breaker refused", of(later, WAYS, "refused"), subject.breaker.stats().rejected),
        Check("openings that were reported", opened, subject.breaker.stats().opened),
        Check("transitions that do not follow one another", 0, _breaks(subject.moves)),
    ]
    return [counting, moving], checks + _at_the_end(subject, book + later, operations)


def _at_the_end(subject: Subject, book: Book, operations: int) -> list[Check]:
    permits = subject.bulkhead.stats()
    ways = tuple(set(WAYS))
    return [
        Check("calls that the bulkhead refused", of(book, THROUGH_BULKHEAD, "full"), permits.rejected),
        Check("calls that ended", operations, of(book, ways, *_ENDS)),
        Check("functions entered", of(book, ways, "answered", "failed", "cancelled inside"), of(book, ways, "entered")),
        Check("calls inside beyond the limit", 0, len(subject.too_many)),
        Check("calls that are still inside", len(subject.inside), permits.in_flight),
        Check("callers that are still in the queue", 0, permits.queued),
        Check("probes that are still running", 0, subject.breaker.stats().probes),
    ]


def _breaks(moves: list[Any]) -> int:
    return sum(one.new is not other.old for one, other in itertools.pairwise(moves))
