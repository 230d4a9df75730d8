"""Retry: how long to wait, and when there is no time for another attempt."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from resilience import (
    Context,
    DeadlineExceeded,
    Policy,
    RetriesExhausted,
    Retry,
    Success,
    TimeoutExceeded,
    events,
)
from resilience.clock import clock as process_clock
from tests.conftest import Boom, FakeClock, Script, World
from tests.policies.retries import Other, Response, Told, bad, notes_of, run

# --- time --------------------------------------------------------------------------------------


async def test_max_elapsed_counts_the_attempts_themselves(world: World, clock: FakeClock) -> None:
    """A slow failure uses it up as a wait does."""
    calls: list[float] = []

    async def slow(ctx: Context) -> None:
        calls.append(clock.time)
        clock.advance(4)
        raise Boom

    await world.attempt(Retry(None, on=Boom, backoff=[1], max_elapsed=timedelta(seconds=8)), slow)
    assert calls == [1000, 1005]
    assert clock.sleeps == [1]


async def test_an_attempt_that_would_begin_at_the_very_end_of_max_elapsed_is_not_made(
    world: World, clock: FakeClock
) -> None:
    """The instant itself is over, as that of a deadline is; a moment before it there is an attempt."""
    script = Script(Boom())
    await run(world, Retry(None, on=Boom, backoff=[2.0], max_elapsed=4), script)
    assert (script.calls, clock.sleeps) == (2, [2.0])
    script = Script(Boom())
    await run(world, Retry(None, on=Boom, backoff=[2.0], max_elapsed=4.001), script)
    assert script.calls == 3


@pytest.mark.parametrize("late", [2.0, 3.0])
async def test_a_wait_that_ends_at_the_very_end_of_max_elapsed_or_later_starts_no_attempt(
    world: World, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    """And that is told as the end that it is."""
    oversleep(clock, monkeypatch, late)
    told: list[events.RetryGaveUp] = []
    script = Script(Boom())
    pipeline = Policy.wrap(Retry(None, on=Boom, backoff=[2.0], max_elapsed=4), listeners=[only_ends(told)])
    assert isinstance(await run(world, pipeline, script), Boom)
    assert script.calls == 1
    assert [(event.reason, event.attempts, event.elapsed) for event in told] == [("max_elapsed", 1, 2.0 + late)]


async def test_a_wait_that_leads_beyond_the_deadline_is_told_as_the_end(
    world: World, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the wait there was time left, so a retry was announced; after it there is none."""
    oversleep(clock, monkeypatch, 10.0)
    told: list[events.RetryGaveUp] = []
    pipeline = Policy.wrap(Retry(None, on=Boom, backoff=[2.0]), listeners=[only_ends(told)])
    error = await run(world, pipeline, Script(Boom()), Context(timeout=5.0))
    assert isinstance(error, Boom)
    assert "1 attempt " in notes_of(error)[0]
    assert [(event.reason, event.attempts, event.elapsed) for event in told] == [("deadline", 1, 12.0)]


def only_ends(told: list[events.RetryGaveUp]) -> Any:
    """A listener for the ends of retries alone."""

    def listen(event: events.Event) -> None:
        if isinstance(event, events.RetryGaveUp):
            told.append(event)

    return listen


async def test_a_result_that_was_closed_before_a_wait_that_took_too_long_is_not_handed_out(
    world: World, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes out says that the time is over, and who found that out; with `wrap`, `RetriesExhausted` as ever."""
    oversleep(clock, monkeypatch, 10.0)
    error = await run(world, Retry(on_result=bool, backoff=[2.0], name="reader"), Script(1), Context(timeout=5.0))
    assert type(error) is DeadlineExceeded
    assert error.policy == "reader"
    error = await run(world, Retry(on_result=bool, backoff=[2.0], wrap=True), Script(1), Context(timeout=5.0))
    assert type(error) is RetriesExhausted
    assert (error.last, error.attempts) == (Success(1), 1)


def oversleep(clock: FakeClock, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Make every wait take so many seconds more."""
    asked = clock.sleep

    def late(delay: float) -> None:
        asked(delay)
        clock.advance(seconds)

    monkeypatch.setattr(process_clock, "sleep", late)
    monkeypatch.setattr(process_clock, "shorten", lambda delay: late(delay) or 0.0)


@pytest.mark.parametrize(("delay", "calls"), [(4.9, 2), (5.0, 1), (5.1, 1)])
async def test_a_wait_that_does_not_fit_in_the_deadline_is_not_begun(
    world: World, clock: FakeClock, delay: float, calls: int
) -> None:
    """It stops at once with the failure that it has: no sleep that cannot pay off."""
    script = Script(Boom("the failure"))
    error = await run(world, Retry(2, on=Boom, backoff=[delay]), script, Context(timeout=5))
    assert isinstance(error, Boom)
    assert script.calls == calls
    assert clock.time == 1000 + (delay if calls == 2 else 0)
    assert len(notes_of(error)) == 1


async def test_a_result_that_cannot_be_improved_in_time_comes_out(world: World, clock: FakeClock) -> None:
    """The same for results: the one there is, not closed."""
    response = Response()
    script = Script(response)
    assert await run(world, Retry(on_result=bad, backoff=[9]), script, Context(timeout=5)) is response
    assert response.closed == 0
    assert clock.sleeps == []


async def test_no_attempt_starts_after_the_deadline_that_passed_in_an_attempt(world: World, clock: FakeClock) -> None:
    """Not even one without a wait before it."""
    calls: list[int] = []

    async def slow(ctx: Context) -> None:
        calls.append(ctx.attempt)
        clock.advance(6)
        raise Boom

    assert isinstance(await world.attempt(Retry(9, on=Boom, backoff=[0]), slow, Context(timeout=10)), Boom)
    assert calls == [1, 2]


async def test_nothing_is_tried_when_the_deadline_is_over_before_the_first_attempt(
    world: World, clock: FakeClock
) -> None:
    """No attempt starts after the deadline, the first one included."""
    script = Script("fine")
    error = await run(world, Retry(name="reader"), script, Context(timeout=0))
    assert type(error) is DeadlineExceeded
    assert error.policy == "reader"
    assert script.calls == 0


async def test_the_attempts_all_have_the_same_deadline(world: World, clock: FakeClock) -> None:
    """A budget is for the whole execution."""
    script = Script(Boom())
    await run(world, Retry(on=Boom, backoff=[1]), script, Context(timeout=60))
    assert {ctx.deadline for ctx in script.contexts} == {1060.0}


async def test_the_time_of_day_is_never_read(world: World, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """It jumps: by an hour, or by what a time server says."""

    def jumping() -> float:
        raise AssertionError("somebody looks at the clock on the wall")

    monkeypatch.setattr(time, "time", jumping)
    script = Script(Boom(), "fine")
    ctx = Context(timeout=60)

    assert await world.execute(Retry(on=Boom, backoff=[1], max_elapsed=30), script.function(), ctx) == "fine"
    monkeypatch.undo()


# --- how long to wait --------------------------------------------------------------------------


async def test_the_default_backoff_is_exponential_with_full_jitter(world: World, clock: FakeClock) -> None:
    """From 0.1 s, doubling, at most 10 s."""
    same = random.Random(42)
    await run(world, Retry(12, on=Boom, rng=random.Random(42)), Script(Boom()))
    assert clock.sleeps == [same.uniform(0, min(10.0, 0.1 * 2**n)) for n in range(11)]


async def test_a_backoff_is_not_started_for_a_call_that_succeeds(world: World, clock: FakeClock) -> None:
    """Nor asked for a delay that nobody waits: no draw is wasted after the last attempt."""
    drawn: list[float] = []

    def schedule() -> Iterator[float]:
        for delay in (1.0, 2.0, 3.0, 4.0):
            drawn.append(delay)
            yield delay

    await run(world, Retry(on=Boom, backoff=schedule), Script("fine"))
    assert drawn == []
    await run(world, Retry(3, on=Boom, backoff=schedule), Script(Boom()))
    assert drawn == [1.0, 2.0]


@pytest.mark.parametrize(
    ("asked", "waited"),
    [
        (7, 7),
        (7.5, 7.5),
        (timedelta(seconds=9), 9),
        (0.25, 0.25),
        (0.125, 0.25),
        (0, 0.25),
        (-5, 0.25),
        (timedelta(seconds=-5), 0.25),
        (None, 0.25),
        (math.nan, 0.25),
        (True, 0.25),
        ("7", 0.25),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.25),
        (b"7", 0.25),
        ([7], 0.25),
        (lambda: 7, 0.25),
        (object(), 0.25),
    ],
)
async def test_an_error_that_carries_a_delay_raises_the_wait_to_it(
    threads: World, clock: FakeClock, asked: Any, waited: float
) -> None:
    """To at least that; what is no number of seconds is as good as none."""
    await run(threads, Retry(2, on=Told, backoff=[0.25]), Script(Told(asked)))
    assert clock.sleeps == [waited]


async def test_a_result_that_carries_a_delay_raises_the_wait_too(world: World, clock: FakeClock) -> None:
    """Responses carry `retry_after` as errors do."""
    responses = [Response(retry_after=7), Response(retry_after=1), Response(200)]
    await run(world, Retry(on_result=bad, backoff=[2]), Script(*responses))
    assert clock.sleeps == [7, 2]


async def test_retry_after_obeys_the_deadline(world: World, clock: FakeClock) -> None:
    """A delay that does not fit ends it at once; it is not shortened, for then the call would be refused again."""
    error = Told(60)
    script = Script(error)
    assert await run(world, Retry(on=Told, backoff=[1]), script, Context(timeout=30)) is error
    assert await run(world, Retry(on=Told, backoff=[1], max_elapsed=30), script) is error
    assert script.calls == 2
    assert clock.sleeps == []


@pytest.mark.parametrize("asked", [math.inf, 1e300, 10**400], ids=["inf", "1e300", "10**400"])
async def test_a_delay_beyond_all_measure_does_not_mask_the_error(world: World, clock: FakeClock, asked: Any) -> None:
    """A server may ask for anything. Whatever is made of it, a thread can wait for, and the budget bounds it."""
    error = Told(asked)
    assert await run(world, Retry(2, on=Told, backoff=[1]), Script(error), Context(timeout=5)) is error
    assert await run(world, Retry(2, on=Told, backoff=[1]), Script(error)) is error
    assert all(0 <= slept <= threading.TIMEOUT_MAX for slept in clock.sleeps)


class Once(Exception):
    """An error that says whether its call may be made again."""

    def __init__(self, repeatable: Any) -> None:
        super().__init__()
        self.repeatable = repeatable


async def test_a_failure_that_says_that_it_must_not_be_repeated_is_the_last(world: World, clock: FakeClock) -> None:
    """Whatever `on` says: the call may have been carried out. The event tells why."""
    error, told = Once(repeatable=False), []
    retry = Policy.wrap(Retry(5, on=Exception, retry_after=False), listeners=[told.append])
    script = Script(error)
    assert await run(world, retry, script) is error
    assert (script.calls, clock.sleeps) == (1, [])
    assert [event.reason for event in told if isinstance(event, events.RetryGaveUp)] == ["unrepeatable"]


async def test_a_result_may_say_so_too(world: World, clock: FakeClock) -> None:
    """It comes out as it is, and open: it is the caller's."""
    response = Response(repeatable=False)
    script = Script(response)
    assert await run(world, Retry(5, on_result=bad), script) is response
    assert script.calls == 1
    assert response.closed == 0


@pytest.mark.parametrize("said", [True, None, 0, "", []])
async def test_only_false_itself_says_that_a_failure_must_not_be_repeated(
    world: World, clock: FakeClock, said: Any
) -> None:
    """An attribute of that name may mean something else in a user's class."""
    script = Script(Once(said), "fine")
    assert await run(world, Retry(2, on=Once, backoff=[0]), script) == "fine"


class Sending:
    """A function that may be called again for as long as it has not been entered."""

    repeatable = True

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls = 0

    def __call__(self, ctx: Context) -> Any:
        self.calls += 1
        self.repeatable = False
        raise self.error


class AsyncSending(Sending):
    async def __call__(self, ctx: Context) -> Any:
        return super().__call__(ctx)


async def test_the_function_itself_may_say_that_it_must_not_be_called_again(world: World, clock: FakeClock) -> None:
    """The failure may be another policy's, a timeout's, which knows nothing of the function."""
    sending = (Sending if world.blocking else AsyncSending)(TimeoutExceeded("no result"))

    assert await world.attempt(Retry(5), sending) is sending.error
    assert sending.calls == 1


def test_a_block_inside_of_such_a_function_is_another_matter(clock: FakeClock) -> None:
    """What the function says of itself says nothing about a block of attempts in it."""
    rounds = []

    class Function:
        repeatable = False

        def __call__(self, ctx: Context) -> None:
            for attempt in Retry(2, on=Other).attempts():
                with attempt:
                    rounds.append(attempt.number)
                    if attempt.number == 1:
                        raise Other

    Retry().execute(Function())
    assert rounds == [1, 2]


class Touchy(Exception):
    """An error whose attributes raise, as some clients' properties do outside their moment."""

    @property
    def retry_after(self) -> float:
        raise RuntimeError("not now")

    repeatable = retry_after

    @property
    def response(self) -> object:
        raise RuntimeError("the response has not been set")


async def test_an_error_whose_attributes_raise_is_not_masked(world: World, clock: FakeClock) -> None:
    """What cannot be read is not there."""
    error = Touchy()
    script = Script(error)
    assert await run(world, Retry(on=Touchy, backoff=[1]), script) is error
    assert script.calls == 3
