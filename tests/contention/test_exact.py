"""One breaker and one bulkhead with many callers: both sides count, and their sums must agree.

The callers of a storm count the outcomes of their calls, and the policies count under their own locks.
`RESILIENCE_STORM=10000000` in the environment makes it ten million calls.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter, deque
from contextlib import nullcontext

import anyio

from resilience import Bulkhead, BulkheadFull, CircuitBreaker, CircuitOpen, CircuitState, events
from resilience.state.trips import Tally, Trip
from tests.conftest import Boom, World
from tests.contention.storm import Storm
from tests.policies.blocks import entered

OPERATIONS = int(os.environ.get("RESILIENCE_STORM", "20000"))
THREADS = 16

LIMIT, QUEUE = 4, 34

#: The share of the calls in the first storm.
COUNTING = 0.9

#: The number of failures that open the circuit in the second storm.
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


class Subject:
    """The two policies, and the observations of their callers."""

    def __init__(self) -> None:
        self.trip = Counted()
        self.moves: list[events.CircuitChanged] = []
        self.breaker = CircuitBreaker(self.trip, open_for=[0.0005], probes=2, on_transition=self.moves.append)
        self.bulkhead = Bulkhead(LIMIT, queue=QUEUE)
        self.policies = {"both": self.breaker.wrap(self.bulkhead), "breaker": self.breaker, "bulkhead": self.bulkhead}
        self.inside: deque[None] = deque()  # its operations are atomic, so no lock is needed
        self.entered: deque[None] = deque()
        self.cancelled: deque[None] = deque()  # inside the function
        self.too_many: deque[int] = deque()

    def enter(self) -> None:
        self.inside.append(None)
        if len(self.inside) > LIMIT:
            self.too_many.append(len(self.inside))

    def leave(self) -> None:
        self.inside.pop()

    async def operation(self, world: World, rng: random.Random) -> tuple[str, str]:
        """Make a call, and return its way and its outcome."""
        way, outcome = rng.choice(WAYS), "cancelled"
        may_cancel = not world.blocking and rng.random() < 0.05
        with anyio.move_on_after(0) if may_cancel else nullcontext():
            try:
                await self._call(way, world, rng)
                outcome = "answered"
            except Exception as error:
                outcome = _name(error)
                await world.sleep(0)  # lets the calls in progress run
        return way, outcome

    async def _call(self, way: str, world: World, rng: random.Random) -> None:
        if way == "guard":
            async with entered(world, self.breaker.guard()):
                await self._function(way, world, rng)
        elif way == "slot":
            async with entered(world, self.bulkhead.slot()):
                await self._function(way, world, rng)
        else:
            await world.call(self.policies[way], self._function, way, world, rng)

    async def _function(self, way: str, world: World, rng: random.Random) -> None:
        guarded = way in THROUGH_BULKHEAD
        self.entered.append(None)
        if guarded:
            self.enter()
        try:
            chance = rng.random()
            if chance < (0.03 if world.blocking else 0.25):
                await world.sleep(0)
            if chance > 0.75:
                raise Boom("no")
        except BaseException as error:
            if not isinstance(error, Boom):
                self.cancelled.append(None)
            raise
        finally:
            if guarded:
                self.leave()


def _name(error: Exception) -> str:
    return {Boom: "failed", BulkheadFull: "full", CircuitOpen: "refused"}.get(type(error), repr(error))


def of(book: Book, ways: tuple[str, ...], *outcomes: str) -> int:
    """Return how many calls that were made in one of these ways had one of these outcomes."""
    return sum(n for (way, outcome), n in book.items() if way in ways and outcome in outcomes)


def test_callers_and_policies_count_the_same() -> None:
    """While the circuit stays closed, then while it opens and closes; beside cancelled and refused calls."""
    subject = Subject()
    book = Storm(subject.operation, int(OPERATIONS * COUNTING), THREADS).run()
    failed = of(book, THROUGH_BREAKER, "failed")
    assert failed > 0
    assert (subject.trip.failures, subject.trip.results) == (failed, of(book, THROUGH_BREAKER, "answered") + failed)
    assert (subject.breaker.stats().opened, of(book, WAYS, "refused")) == (0, 0)
    subject.trip.trips_at = TRIPS_AT
    later = Storm(subject.operation, OPERATIONS - book.total(), THREADS).run()
    assert subject.breaker.stats().rejected == of(later, WAYS, "refused") > 0
    assert subject.breaker.stats().opened == sum(move.new is CircuitState.OPEN for move in subject.moves) > 0
    assert all(one.new is other.old for one, other in itertools.pairwise(subject.moves)), "a transition is missing"
    assert subject.breaker.stats().probes == 0

    book += later
    results = of(book, WAYS, "answered", "failed")
    assert results + of(book, WAYS, "full", "refused", "cancelled") == OPERATIONS
    assert len(subject.entered) == results + len(subject.cancelled)
    permits = subject.bulkhead.stats()
    assert permits.rejected == of(book, THROUGH_BULKHEAD, "full") > 0
    assert (permits.in_flight, permits.queued, len(subject.inside), list(subject.too_many)) == (0, 0, 0, [])
