"""Why a circuit changes its state, in counts and in words; and what of a failure other callers may see."""

from __future__ import annotations

import contextvars
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from resilience import CircuitBreaker, CircuitOpen, CircuitState, ConsecutiveFailures, FailureRatio, SlowRatio, events
from resilience.events import CircuitChanged, TripCount
from resilience.state.trips import Tally, Trip
from tests.conftest import Boom, FakeClock, World

TOKEN = "https://api.example/?token=4711"


class Watched:
    """A breaker, what its calls end with, and its transitions."""

    def __init__(self, world: World, clock: FakeClock, **settings: Any) -> None:
        self._world, self._clock = world, clock
        self.changes: list[CircuitChanged] = []
        self.breaker = CircuitBreaker(**settings, on_transition=self.changes.append, name="db")

    async def __call__(self, *results: object, seconds: float = 0.0) -> list[object]:
        """Make a call for each result: an error, or a value."""
        pending: Iterator[object] = iter(results)

        async def fn(ctx: object) -> object:
            self._clock.advance(seconds)
            result = next(pending)
            if isinstance(result, Exception):
                raise result
            return result

        return [await self._world.attempt(self.breaker, fn) for _ in results]


async def test_consecutive_failures_are_counted(world: World, clock: FakeClock) -> None:
    """The count, the type of the last failure and a sentence of both; never its message."""
    watched = Watched(world, clock, trip=2)
    await watched(Boom(TOKEN), KeyError(TOKEN))
    [change] = watched.changes
    assert change.counted == TripCount("failures", 2, 2, None)
    assert change.failure_type == "KeyError"
    assert change.reason == "failures 2 of 2; the last failure was KeyError"
    assert change.last_failure is not None
    assert TOKEN in change.last_failure
    assert TOKEN not in repr(change)
    assert pickle.loads(pickle.dumps(change)) == change


async def test_a_ratio_is_told_with_its_threshold(world: World, clock: FakeClock) -> None:
    """Of the calls that the window holds."""
    watched = Watched(world, clock, trip=FailureRatio(0.5, min_calls=4))
    await watched(1, 1, Boom(), Boom())
    [change] = watched.changes
    assert change.counted == TripCount("failures", 2, 4, 0.5)
    assert change.counted.ratio == 0.5
    assert change.reason == "failures 2 of 4, a ratio of 0.5 of at least 0.5; the last failure was Boom"


async def test_slow_calls_are_no_failures(world: World, clock: FakeClock) -> None:
    """No failure, no type."""
    watched = Watched(world, clock, trip=SlowRatio(0.25, slower_than=1, last=10, min_calls=2))
    await watched(1, 1, seconds=2.0)
    [change] = watched.changes
    assert change.counted == TripCount("slow calls", 2, 2, 0.25)
    assert (change.failure_type, change.reason) == (None, "slow calls 2 of 2, a ratio of 1 of at least 0.25")
    [refusal] = await watched(1)
    assert str(refusal) == "the circuit is open, after slow calls"


@pytest.mark.parametrize(
    ("failures", "counted"), [(3, TripCount("failures", 3, 3)), (2, TripCount("failures", 2, 4, 0.5))]
)
async def test_of_two_conditions_the_one_that_tripped_is_told(
    world: World, clock: FakeClock, failures: int, counted: TripCount
) -> None:
    """Both count, one trips first."""
    watched = Watched(world, clock, trip=ConsecutiveFailures(3) | FailureRatio(0.5, min_calls=4))
    await watched(*([] if failures == 3 else [1, 1]), *[Boom() for _ in range(failures)])
    assert [change.counted for change in watched.changes] == [counted]


async def test_every_other_transition_says_why(world: World, clock: FakeClock) -> None:
    """Probes, time, and the two that are made manually."""
    watched = Watched(world, clock, trip=1, probe_successes=2)
    await watched(Boom(TOKEN))
    clock.advance(30)
    await watched(KeyError(TOKEN))
    clock.advance(30)
    await watched(1, 1)
    watched.breaker.isolate()
    watched.breaker.close()
    assert [change.reason for change in watched.changes[1:]] == [
        "the 30 s of the open period have passed",
        "a probe failed with KeyError",
        "the 30 s of the open period have passed",
        "probes succeeded, 2 of 2",
        "it was isolated manually",
        "it was closed manually",
    ]
    assert [change.counted for change in watched.changes[1:]] == [None] * 6
    assert watched.changes[2].failure_type == "KeyError"


async def test_a_slow_probe_says_so(world: World, clock: FakeClock) -> None:
    """It has not failed."""
    watched = Watched(world, clock, trip=SlowRatio(0.5, slower_than=1, min_calls=1))
    await watched(1, seconds=2.0)
    clock.advance(30)
    await watched(1, seconds=2.0)
    assert watched.changes[-1].reason == "a probe was slow"
    assert watched.changes[-1].failure_type is None


def test_a_condition_of_ones_own_need_not_say_what_it_counts() -> None:
    """The last failure is told all the same."""

    class Never(Tally):
        def add(self, failed: bool, duration: float, now: float) -> bool:
            return failed

    class AtOnce(Trip):
        def tally(self) -> Tally:
            return Never()

    changes: list[CircuitChanged] = []
    CircuitBreaker(AtOnce(), on_transition=changes.append).capture(lambda ctx: 1 / 0)
    assert (changes[0].counted, changes[0].reason) == (None, "the last failure was ZeroDivisionError")


def test_an_empty_window_has_no_ratio() -> None:
    """Nothing divided by nothing is nothing."""
    assert str(TripCount("failures", 0, 0, 0.5)) == "failures 0 of 0, a ratio of 0 of at least 0.5"


# --- what other callers see --------------------------------------------------------------------


async def test_a_refusal_names_the_failure_of_another_caller_by_its_type(world: World, clock: FakeClock) -> None:
    """Its message may hold that caller's URL, with a token in it. It stays in `.last_failure`."""
    watched = Watched(world, clock, trip=1)
    await watched(Boom(TOKEN))
    [refusal] = await watched(1)
    assert str(refusal) == "the circuit is open, after Boom"
    assert TOKEN not in repr(refusal)
    assert isinstance(refusal, CircuitOpen)
    assert refusal.last_failure == f"Boom: {TOKEN}"


def test_a_half_open_circuit_refuses_in_the_same_words(clock: FakeClock) -> None:
    """While its probe is out."""
    breaker = CircuitBreaker(1)
    breaker.capture(lambda ctx: raising())
    clock.advance(30)
    with breaker.guard():
        refusal = in_another_context(lambda: breaker.capture(lambda ctx: None)).error
    assert str(refusal) == "the circuit is half-open and all its probes are out, after Boom"
    assert TOKEN not in repr(refusal)


def raising() -> None:
    raise Boom(TOKEN)


def in_another_context(fn: Any) -> Any:
    """Call it as another caller would: inside a call that the breaker has admitted, it would belong to that one."""
    return contextvars.Context().run(fn)


async def test_a_bad_result_is_named_as_one(world: World, clock: FakeClock) -> None:
    """Its type is no type of an error."""
    watched = Watched(world, clock, trip=1, on_result=lambda result: result == TOKEN)
    await watched(TOKEN)
    [refusal] = await watched(1)
    assert str(refusal) == "the circuit is open, after a result that was not good enough"
    assert watched.changes[0].reason == "failures 1 of 1; the last failure was a result that was not good enough"


def test_the_event_is_made_without_the_new_fields_too() -> None:
    """A test of a user's may make one."""
    made = events.CircuitChanged(
        policy="db",
        operation=None,
        time=0.0,
        properties={},
        old=CircuitState.OPEN,
        new=CircuitState.CLOSED,
        retry_after=None,
        last_failure=None,
    )
    assert (made.reason, made.failure_type, made.counted) == ("", None, None)
