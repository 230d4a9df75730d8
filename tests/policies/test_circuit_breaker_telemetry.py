"""CircuitBreaker: its events, listeners that use it, reasons of changes, and what other callers see of a failure."""

from __future__ import annotations

import contextvars
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from resilience import (
    CircuitBreaker,
    CircuitState,
    ConsecutiveFailures,
    Context,
    FailureCount,
    FailureRatio,
    SlowRatio,
    events,
)
from resilience.errors import CircuitOpen
from resilience.events import CircuitChanged, TripCount
from resilience.state.trips import Tally, Trip
from tests.callers import is_free
from tests.conftest import Boom, FakeClock, World
from tests.policies.breakers import CLOSED, ISOLATED, OPEN, Moves, fails


async def test_the_event_of_a_manual_change_belongs_to_no_call(world: World) -> None:
    moves = Moves()
    breaker = CircuitBreaker(1, on_transition=moves)
    await fails(world, breaker)
    breaker.close()
    assert (moves.events[-1].operation, dict(moves.events[-1].properties)) == (None, {})


async def test_a_listener_may_change_the_circuit(world: World) -> None:
    """All listeners get the event of the opening before those of the changes that the first one makes."""
    received: list[tuple[str, CircuitState]] = []

    def first(event: events.CircuitChanged) -> None:
        received.append(("first", event.new))
        if event.new is OPEN:
            breaker.close()
            assert breaker.state is CLOSED
            breaker.isolate()

    breaker = CircuitBreaker(1, on_transition=first)
    unsubscribe = events.subscribe(lambda event: received.append(("second", event.new)), events.CircuitChanged)
    try:
        await fails(world, breaker)
    finally:
        unsubscribe()
    assert received == [(listener, state) for state in (OPEN, CLOSED, ISOLATED) for listener in ("first", "second")]


def test_a_listener_may_make_a_call_under_the_breaker(threads: World, clock: FakeClock) -> None:
    """It is refused or admitted like any other call."""
    outcomes: list[Any] = []

    def listener(event: events.CircuitChanged) -> None:
        outcomes.append(breaker.capture(lambda ctx: f"from {event.new.value}"))

    breaker = CircuitBreaker(1, open_for=5.0, on_transition=listener)
    breaker.capture(lambda ctx: 1 / 0)
    assert isinstance(outcomes[0].error, CircuitOpen)
    clock.advance(5.0)
    assert breaker.execute(lambda ctx: "fine") == "fine"
    assert isinstance(outcomes[1].error, CircuitOpen)  # half-open: the probe of this event is running
    assert outcomes[2].value == "from closed"


@pytest.mark.parametrize("where", ["on", "ignore", "on_result", "str", "open_for"])
def test_predicates_messages_and_backoffs_run_outside_the_lock(where: str) -> None:
    """Here each of them waits for another thread that uses the breaker."""
    free: list[bool] = []

    def use_breaker(value: object = None) -> bool:
        free.append(is_free(lambda: breaker.stats()))
        return False

    class UsesBreakerInStr(Exception):
        def __str__(self) -> str:
            use_breaker()
            return "text"

    def periods() -> Iterator[float]:
        yield 5.0
        use_breaker()
        yield 5.0

    settings: dict[str, Any] = {} if where == "str" else {where: periods if where == "open_for" else use_breaker}
    breaker = CircuitBreaker(1, **settings)

    def call(ctx: Context) -> str:
        if where == "on_result":
            return "fine"
        raise UsesBreakerInStr

    breaker.capture(call)
    assert free
    assert all(free)


# --- the reasons of changes --------------------------------------------------------------------


TOKEN = "https://api.example/?token=4711"


class RecordedBreaker:
    """A breaker and its recorded changes of state."""

    def __init__(self, world: World, clock: FakeClock, **settings: Any) -> None:
        self._world, self._clock = world, clock
        self.changes: list[CircuitChanged] = []
        self.breaker = CircuitBreaker(**settings, on_transition=self.changes.append, name="db")

    async def __call__(self, *results: object, seconds: float = 0.0) -> list[object]:
        """Make a call for each result, a value or an error; return the outcomes."""
        pending: Iterator[object] = iter(results)

        async def fn(ctx: object) -> object:
            self._clock.advance(seconds)
            result = next(pending)
            if isinstance(result, Exception):
                raise result
            return result

        return [await self._world.attempt(self.breaker, fn) for _ in results]


TWO = ConsecutiveFailures(3) | FailureRatio(0.5, min_calls=4)
SLOW = SlowRatio(0.25, slower_than=1, last=10, min_calls=2)
BAD = "a result that was not good enough"
OF_TWO = "failures 2 of 2; the last failure was KeyError"
OF_FOUR = "failures 2 of 4, a ratio of 0.5 of at least 0.5; the last failure was Boom"


@pytest.mark.parametrize(
    ("trip", "results", "counted", "reason", "after"),
    [
        (2, [Boom(), KeyError(TOKEN)], (2, 2), OF_TWO, "KeyError"),
        (FailureRatio(0.5, min_calls=4), [1, 1, Boom(), Boom(TOKEN)], (2, 4, 0.5), OF_FOUR, "Boom"),
        (FailureCount(2), [Boom(), 1, 1, KeyError(TOKEN)], (2, 2), OF_TWO, "KeyError"),
        (TWO, [Boom(), Boom(), Boom(TOKEN)], (3, 3), "failures 3 of 3; the last failure was Boom", "Boom"),
        (TWO, [1, 1, Boom(), Boom(TOKEN)], (2, 4, 0.5), OF_FOUR, "Boom"),
        (1, [TOKEN], (1, 1), f"failures 1 of 1; the last failure was {BAD}", BAD),
        (SLOW, [1, 1], (2, 2, 0.25), "slow calls 2 of 2, a ratio of 1 of at least 0.25", "slow calls"),
    ],
    ids=[
        "consecutive failures",
        "a ratio",
        "a number",
        "the first of two",
        "the second of two",
        "a bad result",
        "slow calls",
    ],
)
async def test_the_reason_of_an_opening_contains_the_counts_and_names_the_last_failure_by_its_type(
    threads: World,
    clock: FakeClock,
    trip: Any,
    results: list[object],
    counted: tuple[Any, ...],
    reason: str,
    after: str,
) -> None:
    """So do refusals of other calls. A message may contain a token: it is in `.last_failure` only."""
    recorded = RecordedBreaker(threads, clock, trip=trip, on_result=lambda result: result == TOKEN)
    await recorded(*results, seconds=2.0 if trip is SLOW else 0.0)
    [change] = recorded.changes
    assert change.counted == TripCount("slow calls" if trip is SLOW else "failures", *counted)
    assert (change.reason, change.failure_type) == (reason, {BAD: "result", "slow calls": None}.get(after, after))
    assert pickle.loads(pickle.dumps(change)) == change
    [refusal] = await recorded(1)
    assert isinstance(refusal, CircuitOpen)
    assert str(refusal) == f"db: the circuit is open, after {after}"
    assert refusal.last_failure == change.last_failure
    assert (TOKEN in str(refusal.last_failure)) is (after in ("KeyError", "Boom"))
    assert TOKEN not in repr(change) + repr(refusal) + repr(recorded.breaker.stats())


async def test_the_statistics_of_a_closed_circuit_show_each_conditions_count(threads: World, clock: FakeClock) -> None:
    """Failures that have left the window do not count, even if no call has come since."""
    trip = ConsecutiveFailures(3) | FailureRatio(0.9, min_calls=4, window=10) | SlowRatio(0.5, slower_than=1, last=9)
    trip |= FailureCount(4, window=10)
    recorded = RecordedBreaker(threads, clock, trip=trip)
    stats = recorded.breaker.stats
    assert stats().counted == (
        TripCount("failures", 0, 3),
        TripCount("failures", 0, 0, 0.9),
        TripCount("slow calls", 0, 0, 0.5),
        TripCount("failures", 0, 4),
    )
    await recorded(Boom(), 1, Boom(), Boom())
    assert [str(count) for count in stats().counted[:2]] == [
        "failures 2 of 3",
        "failures 3 of 4, a ratio of 0.75 of at least 0.9",
    ]
    clock.advance(10)
    assert [(count.bad, count.of) for count in stats().counted] == [(2, 3), (0, 0), (0, 4), (0, 4)]
    await recorded(Boom())
    assert (stats().state, stats().counted) == ("open", ())
    clock.advance(30)
    await recorded(1)
    assert [(count.bad, count.of) for count in stats().counted] == [(0, 3), (0, 0), (0, 0), (0, 4)]
    recorded.breaker.isolate()
    assert stats().counted == ()


async def test_all_other_changes_have_a_reason(threads: World, clock: FakeClock) -> None:
    """The end of the open period, probes, and manual changes."""
    recorded = RecordedBreaker(threads, clock, trip=1, probe_successes=2)
    await recorded(Boom(TOKEN))
    clock.advance(30)
    await recorded(KeyError(TOKEN))
    clock.advance(30)
    await recorded(1, 1)
    recorded.breaker.isolate()
    recorded.breaker.close()
    assert recorded.changes[0].last_failure == f"Boom: {TOKEN}"
    assert [change.reason for change in recorded.changes[1:]] == [
        *("the 30 s of the open period have passed", "a probe failed with KeyError"),
        *("the 30 s of the open period have passed", "probes succeeded, 2 of 2"),
        *("it was isolated manually", "it was closed manually"),
    ]
    assert [change.counted for change in recorded.changes[1:]] == [None] * 6
    assert recorded.changes[2].failure_type == "KeyError"


async def test_the_reason_of_a_slow_probe_names_no_failure(threads: World, clock: FakeClock) -> None:
    recorded = RecordedBreaker(threads, clock, trip=SlowRatio(0.5, slower_than=1, min_calls=1))
    await recorded(1, seconds=2.0)
    clock.advance(30)
    await recorded(1, seconds=2.0)
    assert recorded.changes[-1].reason == "a probe was slow"
    assert recorded.changes[-1].failure_type is None


def test_a_custom_trip_condition_need_not_report_its_counts() -> None:
    """The reason is the last failure then."""

    class FailureTally(Tally):
        def add(self, failed: bool, duration: float, now: float) -> bool:
            return failed

    class FirstFailure(Trip):
        def tally(self) -> Tally:
            return FailureTally()

    changes: list[CircuitChanged] = []
    breaker = CircuitBreaker(FirstFailure(), on_transition=changes.append)
    assert breaker.stats().counted == ()
    breaker.capture(lambda ctx: 1 / 0)
    assert (changes[0].counted, changes[0].reason) == (None, "the last failure was ZeroDivisionError")


def test_the_ratio_of_an_empty_window_is_zero() -> None:
    assert str(TripCount("failures", 0, 0, 0.5)) == "failures 0 of 0, a ratio of 0 of at least 0.5"


# --- what other callers see --------------------------------------------------------------------


def test_the_refusal_of_a_half_open_circuit_names_the_failure_by_its_type(clock: FakeClock) -> None:
    breaker = CircuitBreaker(1)
    breaker.capture(lambda ctx: raising())
    clock.advance(30)
    with breaker.guard():
        refusal = in_another_context(lambda: breaker.capture(lambda ctx: None)).error
    assert str(refusal) == "CircuitBreaker: the circuit is half-open and all its probes are running, after Boom"
    assert TOKEN not in repr(refusal)


def raising() -> None:
    raise Boom(TOKEN)


def in_another_context(fn: Any) -> Any:
    """Call `fn` as another caller: in the context of an admitted call it would belong to that call."""
    return contextvars.Context().run(fn)


def test_the_event_can_be_constructed_without_reason_type_and_counts() -> None:
    """Tests of users may construct one."""
    required: Any = dict.fromkeys("policy operation time properties old new retry_after last_failure".split())
    event = events.CircuitChanged(**required)
    assert (event.reason, event.failure_type, event.counted) == ("", None, None)
