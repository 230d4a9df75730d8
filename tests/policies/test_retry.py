"""Retry: which failures are tried again, how often, after which wait, and what comes out in the end."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import random
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import anyio
import pytest

from resilience import (
    CircuitOpen,
    Context,
    DeadlineExceeded,
    Failure,
    Policy,
    RetriesExhausted,
    Retry,
    Success,
    TimeoutExceeded,
    current_context,
    events,
)
from resilience.backoff import Exponential
from resilience.clock import clock as process_clock
from tests.conftest import Boom, FakeClock, Script, World, no_collector


class Other(Exception):
    """A failure that the policy under test is not told to handle."""


async def run(world: World, policy: Policy[Any], script: Script, ctx: Context | None = None) -> Any:
    """Return what comes out of one execution: the value, or the exception as a value."""
    return await world.attempt(policy, script.function(), ctx)


def notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


# --- attempts ---


async def test_a_call_that_succeeds_is_made_once(world: World, clock: FakeClock) -> None:
    """Nothing is repeated and nothing waited for on the happy path."""
    script = Script("fine")
    assert await run(world, Retry(), script) == "fine"
    assert script.calls == 1
    assert clock.sleeps == []


@pytest.mark.parametrize("attempts", [1, 2, 5])
async def test_attempts_count_calls_the_first_one_included(world: World, clock: FakeClock, attempts: int) -> None:
    """There is a wait between two attempts, and none after the last one."""
    script = Script(Boom())
    assert isinstance(await run(world, Retry(attempts, on=Boom, backoff=[1.0]), script), Boom)
    assert script.calls == attempts
    assert clock.sleeps == [1.0] * (attempts - 1)


async def test_the_last_exception_itself_comes_out(world: World, clock: FakeClock) -> None:
    """Unwrapped, the very object, and neither the first nor a copy."""
    errors = [Boom("first"), Boom("second"), Boom("third")]
    assert await run(world, Retry(on=Boom, backoff=[0]), Script(*errors)) is errors[2]


async def test_the_result_of_the_attempt_that_succeeds_comes_out(world: World, clock: FakeClock) -> None:
    """As soon as one attempt succeeds there is no other."""
    script = Script(Boom(), "fine", "too many")
    assert await run(world, Retry(5, on=Boom, backoff=[0]), script) == "fine"
    assert script.calls == 2


async def test_no_number_of_attempts_means_as_many_as_time_allows(world: World, clock: FakeClock) -> None:
    """`attempts=None` goes on until the call succeeds ..."""
    script = Script(*[Boom()] * 60, "fine")
    assert await run(world, Retry(None, on=Boom, backoff=[1.0]), script) == "fine"
    assert script.calls == 61


async def test_attempts_without_a_number_end_with_the_deadline(world: World, clock: FakeClock) -> None:
    """... or until the next wait does not fit."""
    script = Script(Boom())
    assert isinstance(await run(world, Retry(None, on=Boom, backoff=[1.0]), script, Context(timeout=10.5)), Boom)
    assert script.calls == 11
    assert clock.time == 1010.0


async def test_each_attempt_knows_its_number(world: World, clock: FakeClock) -> None:
    """`ctx.attempt` is 1 for the first; the context itself is a new one each time."""
    script = Script(Boom())
    await run(world, Retry(on=Boom, backoff=[0]), script)
    assert [ctx.attempt for ctx in script.contexts] == [1, 2, 3]
    assert len({id(ctx) for ctx in script.contexts}) == 3


# --- what is tried again ---


@pytest.mark.parametrize(
    "error", [ConnectionError(), ConnectionResetError(), BrokenPipeError(), TimeoutError(), TimeoutExceeded("late")]
)
async def test_network_errors_are_tried_again_by_default(world: World, clock: FakeClock, error: Exception) -> None:
    """`transient` is the default of `on`, three the default of `attempts`."""
    script = Script(error)
    assert await run(world, Retry(), script) is error
    assert script.calls == 3


@pytest.mark.parametrize("error", [ValueError(), OSError(), FileNotFoundError(), KeyError(), ZeroDivisionError()])
async def test_other_errors_are_not(world: World, clock: FakeClock, error: Exception) -> None:
    """A bug does not go away by trying again."""
    script = Script(error)
    assert await run(world, Retry(), script) is error
    assert script.calls == 1


@pytest.mark.parametrize("on", [Other, (Other, KeyError), lambda error: False], ids=["type", "tuple", "predicate"])
async def test_what_on_does_not_name_comes_out_at_once(world: World, clock: FakeClock, on: Any) -> None:
    """Unchanged, without a note, without a wait."""
    error = Boom("not mine")
    script = Script(error)
    assert await run(world, Retry(on=on, backoff=[1]), script) is error
    assert script.calls == 1
    assert clock.sleeps == []
    assert notes_of(error) == []


async def test_an_error_of_another_kind_ends_the_retries(world: World, clock: FakeClock) -> None:
    """Each failure is looked at for itself."""
    error = Other()
    script = Script(Boom(), error)
    assert await run(world, Retry(5, on=Boom, backoff=[0]), script) is error
    assert script.calls == 2


def test_an_interrupt_while_waiting_ends_the_wait(threads: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two attempts comes out, and there is no further attempt."""

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(process_clock, "sleep", interrupted)
    script = Script(Boom())
    with pytest.raises(KeyboardInterrupt):
        Retry(on=Boom).execute(threads.native(script.function()))
    assert script.calls == 1


# --- results that are not good enough ---


async def test_a_result_may_be_tried_again(world: World, clock: FakeClock) -> None:
    """`on_result` is a predicate over the value; exceptions go by `on` as ever."""
    script = Script(503, Boom(), 503, 200)
    assert await run(world, Retry(5, on=Boom, on_result=lambda status: status >= 500, backoff=[1]), script) == 200
    assert clock.sleeps == [1, 1, 1]


async def test_the_last_result_comes_out_as_it_is(world: World, clock: FakeClock) -> None:
    """Where no attempt gave a better one, the very object that the last one gave."""
    results = [[1], [2], [3]]
    assert await run(world, Retry(on_result=bool, backoff=[0]), Script(*results)) is results[2]


async def test_results_are_good_unless_told_otherwise(world: World, clock: FakeClock) -> None:
    """None, False and empty things are results like any other."""
    for value in (None, False, 0, "", []):
        script = Script(value)
        assert await run(world, Retry(on=Exception), script) is value
        assert script.calls == 1


def test_an_exception_that_is_returned_is_a_result(clock: FakeClock) -> None:
    """Only what is raised is a failure."""
    error = ConnectionError("a value")
    assert Retry().execute(lambda ctx: error) is error


class Response:
    """A result that refuses truth and comparison, as SQL expressions and arrays do, and can be closed."""

    retry_after: Any = None

    def __init__(self, status: int = 503, **attributes: Any) -> None:
        self.status = status
        self.closed = 0
        vars(self).update(attributes)

    def __bool__(self) -> bool:
        raise TypeError("the truth of a response is ambiguous")

    def __eq__(self, other: object) -> bool:
        raise TypeError("responses cannot be compared")

    __hash__ = object.__hash__

    def close(self) -> None:
        self.closed += 1


def bad(response: Response) -> bool:
    return response.status >= 500


async def test_a_result_is_never_asked_for_its_truth(world: World, clock: FakeClock) -> None:
    """Responses and SQL expressions refuse it, be they good, bad or last."""
    responses = [Response(), Response(), Response(200)]
    assert await run(world, Retry(on_result=bad, backoff=[0]), Script(*responses)) is responses[2]
    responses = [Response(), Response(), Response()]
    assert await run(world, Retry(on_result=bad, backoff=[0]), Script(*responses)) is responses[2]
    exhausted = await run(world, Retry(1, on_result=bad, wrap=True), Script(responses[0]))
    assert exhausted.last.value is responses[0]


class ShyError(Exception):
    """An exception that refuses truth and comparison."""

    def __bool__(self) -> bool:
        raise TypeError("the truth of an error is ambiguous")

    def __eq__(self, other: object) -> bool:
        raise TypeError("errors cannot be compared")

    __hash__ = Exception.__hash__


async def test_an_error_is_never_asked_for_its_truth_either(world: World, clock: FakeClock) -> None:
    """Nor is the response that it carries."""
    error = ShyError()
    error.response = Response()  # type: ignore[attr-defined]
    assert await run(world, Retry(on=ShyError, backoff=[0]), Script(error)) is error


async def test_a_predicate_may_answer_with_anything_that_has_a_truth(world: World, clock: FakeClock) -> None:
    """As predicates everywhere in Python."""
    script = Script([1], [])
    assert await run(world, Retry(on_result=lambda value: value, backoff=[0]), script) == []
    assert script.calls == 2


# --- what decides, and raises ---


def broken(*args: object) -> Any:
    raise LookupError("the predicate is broken")


async def test_what_on_result_raises_comes_out_and_is_not_tried_again(world: World, clock: FakeClock) -> None:
    """Not even where `on` would name it: the call itself has succeeded."""
    script = Script("fine")
    result = await run(world, Retry(on=LookupError, on_result=broken, backoff=[0]), script)
    assert isinstance(result, LookupError)
    assert script.calls == 1


async def test_what_a_backoff_raises_comes_out(world: World, clock: FakeClock) -> None:
    """With the failure as its context."""
    error = Boom()

    def schedule() -> Iterator[float]:
        yield 1.0
        raise LookupError("no more")

    result = await run(world, Retry(5, on=Boom, backoff=schedule), Script(error))
    assert isinstance(result, LookupError)
    assert result.__context__ is error
    assert clock.sleeps == [1.0]


# --- notes ---


async def test_one_note_says_how_many_attempts_in_what_time_and_what_failed(world: World, clock: FakeClock) -> None:
    """On the exception that comes out, and on no other."""
    errors = [Boom("first"), ConnectionError("second"), Boom("third")]
    result = await run(world, Retry(on=(Boom, ConnectionError), backoff=[2, 5]), Script(*errors))
    [note] = notes_of(result)
    assert "3 attempts" in note
    assert "7 s" in note
    assert note.index("Boom(first)") < note.index("ConnectionError(second)") < note.index("Boom(third)")
    assert notes_of(errors[0]) == notes_of(errors[1]) == []


async def test_a_result_that_failed_is_told_in_the_note(world: World, clock: FakeClock) -> None:
    """By its type: its text may be long, or secret."""
    result = await run(world, Retry(2, on=Boom, on_result=bool, backoff=[0]), Script(["password"], Boom()))
    [note] = notes_of(result)
    assert "list" in note
    assert "password" not in note


async def test_an_earlier_note_of_ours_is_replaced(world: World, clock: FakeClock) -> None:
    """The same object may be raised again and again; notes of others stay, in their order."""
    error = Boom("again")
    error.add_note("mine")
    await run(world, Retry(2, on=Boom, backoff=[0]), Script(error))
    error.add_note("mine too")
    await run(world, Retry(4, on=Boom, backoff=[0]), Script(error))
    *others, ours = notes_of(error)
    assert others == ["mine", "mine too"]
    assert "4 attempts" in ours


async def test_nested_retries_leave_one_note(world: World, clock: FakeClock) -> None:
    """That of the outermost, which saw it last."""
    result = await run(
        world, Policy.wrap(Retry(2, on=Boom, backoff=[0]), Retry(3, on=Boom, backoff=[0])), Script(Boom())
    )
    [note] = notes_of(result)
    assert "2 attempts" in note


async def test_the_note_is_bounded_however_long_one_tries(world: World, clock: FakeClock) -> None:
    """The first few and the last few failures, and not the whole of a long message."""
    script = Script(*[Boom(f"<{n}>" + "x" * 10_000) for n in range(300)])
    result = await run(world, Retry(300, on=Boom, backoff=[0]), script)
    [note] = notes_of(result)
    assert "300 attempts" in note
    assert "<0>" in note
    assert "<299>" in note
    assert "<150>" not in note
    assert len(note) < 3000


async def test_no_note_where_the_call_succeeds_in_the_end(world: World, clock: FakeClock) -> None:
    """An exception that nobody gets needs none."""
    error = Boom()
    await run(world, Retry(on=Boom, backoff=[0]), Script(error, "fine"))
    assert notes_of(error) == []


class Frozen(Exception):
    """An exception that takes no attributes, as frozen dataclasses do."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot assign to field {name!r}")

    def add_note(self, note: str) -> None:
        raise AttributeError("cannot assign to field '__notes__'")


class Wordless(Exception):
    """An exception without a text of its own."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Scribbled(Exception):
    """An exception with notes that are none."""

    __notes__ = "not a list"  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Frozen, Wordless, Scribbled])
async def test_an_exception_that_cannot_be_noted_comes_out_all_the_same(
    world: World, clock: FakeClock, kind: type[Exception]
) -> None:
    """The original error is never masked by what we have to say about it."""
    error = kind()
    assert await run(world, Retry(on=kind, backoff=[0]), Script(error)) is error


# --- wrap ---


async def test_wrap_raises_retries_exhausted(world: World, clock: FakeClock) -> None:
    """With the number of attempts, the last outcome, the name, and the last error as its cause."""
    errors = [Boom("first"), Boom("second")]
    result = await run(world, Retry(2, on=Boom, backoff=[0], wrap=True, name="reader"), Script(*errors))
    assert type(result) is RetriesExhausted
    assert result.attempts == 2
    assert result.last == Failure(errors[1])
    assert result.__cause__ is errors[1]
    assert result.policy == "reader"
    assert "2 attempts" in str(result)


async def test_wrap_raises_for_a_last_result_as_well(world: World, clock: FakeClock) -> None:
    """Without `wrap` it would have been returned."""
    result = await run(world, Retry(2, on_result=bool, backoff=[0], wrap=True), Script(1, 2))
    assert type(result) is RetriesExhausted
    assert result.last == Success(2)
    assert result.attempts == 2


async def test_wrap_holds_when_the_deadline_ended_it(world: World, clock: FakeClock) -> None:
    """And when `max_elapsed` did."""
    result = await run(world, Retry(9, on=Boom, backoff=[3], wrap=True), Script(Boom()), Context(timeout=5))
    assert type(result) is RetriesExhausted
    assert result.attempts == 2
    result = await run(world, Retry(9, on=Boom, backoff=[3], wrap=True, max_elapsed=5), Script(Boom()))
    assert type(result) is RetriesExhausted
    assert result.attempts == 2


async def test_wrap_leaves_errors_alone_that_are_not_tried_again(world: World, clock: FakeClock) -> None:
    """Nothing was exhausted."""
    error = Other()
    assert await run(world, Retry(on=Boom, wrap=True), Script(error)) is error


async def test_each_retries_exhausted_is_a_fresh_one(world: World, clock: FakeClock) -> None:
    """A shared one would collect tracebacks."""
    retry = Retry(1, on=Boom, wrap=True)
    script = Script(Boom())
    assert await run(world, retry, script) is not await run(world, retry, script)


async def test_notes_that_are_no_text_are_left_where_they_are(world: World, clock: FakeClock) -> None:
    """Somebody may have put anything there; ours is added all the same, and once."""
    error = Boom("no")
    error.__notes__ = [42, "theirs"]  # type: ignore[list-item]
    for _ in range(2):
        assert await run(world, Retry(2, on=Boom, backoff=[1]), Script(error)) is error
        assert notes_of(error)[:2] == [42, "theirs"]
        assert [str(note).partition(":")[0] for note in notes_of(error)[2:]] == ["resilience"]


async def test_every_refusal_is_told_though_it_is_always_the_same_error(world: World, clock: FakeClock) -> None:
    """Attempts that never come to the function fail all the same; `ctx.failures` tells of each of them."""

    class Refusing(Policy[Any]):
        error = Boom("closed")

        async def around(self, call: Any, ctx: Context) -> Any:
            raise self.error

    ctx = Context()
    script = Script("never")
    await run(world, Policy.wrap(Retry(4, on=Boom, backoff=[1]), Refusing()), script, ctx)
    assert [str(failed) for failed in ctx.failures] == ["Boom(closed)"] * 4
    assert (script.calls, ctx.attempts) == (0, 0)


# --- time ---


async def test_max_elapsed_ends_the_attempts(world: World, clock: FakeClock) -> None:
    """Every attempt begins less than so many seconds after the first; the wait that leads beyond is not waited."""
    script = Script(Boom())
    assert isinstance(await run(world, Retry(None, on=Boom, backoff=[2.0], max_elapsed=7), script), Boom)
    assert clock.sleeps == [2.0] * 3
    assert script.calls == 4


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


async def test_a_wait_that_takes_longer_than_it_should_starts_no_attempt_after_max_elapsed(
    world: World, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sleeping is never exact; the limit is."""
    oversleep(clock, monkeypatch, 10)
    script = Script(Boom())
    assert isinstance(await run(world, Retry(None, on=Boom, backoff=[1], max_elapsed=5), script), Boom)
    assert script.calls == 1


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
    assert isinstance(await run(world, pipeline, Script(Boom()), Context(timeout=5.0)), Boom)
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


async def test_no_attempt_starts_after_a_deadline_that_passed_in_a_wait(
    world: World, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sleeping is never exact: the last failure comes out, with its note."""
    oversleep(clock, monkeypatch, 10)
    script = Script(Boom())
    error = await run(world, Retry(9, on=Boom, backoff=[1]), script, Context(timeout=5))
    assert isinstance(error, Boom)
    assert script.calls == 1
    assert "1 attempt " in notes_of(error)[0]


async def test_a_result_that_comes_out_after_an_overlong_wait_is_not_a_closed_one(
    world: World, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the result is there to be read, or the error says that time is over."""
    oversleep(clock, monkeypatch, 10)
    response = Response()
    result = await run(world, Retry(on_result=bad, backoff=[1]), Script(response), Context(timeout=5))
    assert isinstance(result, DeadlineExceeded) or (result is response and response.closed == 0)


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


# --- how long to wait ---


async def test_the_default_backoff_is_exponential_with_full_jitter(world: World, clock: FakeClock) -> None:
    """From 0.1 s, doubling, at most 10 s."""
    same = random.Random(42)
    await run(world, Retry(12, on=Boom, rng=random.Random(42)), Script(Boom()))
    assert clock.sleeps == [same.uniform(0, min(10.0, 0.1 * 2**n)) for n in range(11)]


async def test_a_sequence_or_a_callable_is_a_backoff(world: World, clock: FakeClock) -> None:
    """The last value repeats."""
    await run(world, Retry(5, on=Boom, backoff=[1, timedelta(seconds=2)]), Script(Boom()))
    await run(world, Retry(4, on=Boom, backoff=lambda: iter([3, 4])), Script(Boom()))
    assert clock.sleeps == [1, 2, 2, 2, 3, 4, 4]


async def test_every_execution_starts_its_backoff_anew(world: World, clock: FakeClock) -> None:
    """No iterator is shared between calls."""
    made: list[int] = []

    def schedule() -> Iterator[float]:
        made.append(1)
        return iter([1.0, 2.0, 3.0])

    retry = Retry(on=Boom, backoff=schedule)
    for _ in range(3):
        await run(world, retry, Script(Boom()))
    assert clock.sleeps == [1, 2] * 3
    assert len(made) == 3


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


class Told(Exception):
    """An error that says when to come back."""

    def __init__(self, retry_after: Any) -> None:
        super().__init__()
        self.retry_after = retry_after


@pytest.mark.parametrize(
    ("asked", "waited"),
    [
        (7, 7),
        (7.5, 7.5),
        (timedelta(seconds=9), 9),
        (2, 2),
        (1, 2),
        (0, 2),
        (-5, 2),
        (timedelta(seconds=-5), 2),
        (None, 2),
        (math.nan, 2),
        (True, 2),
        ("7", 2),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 2),
        (b"7", 2),
        ([7], 2),
        (lambda: 7, 2),
        (object(), 2),
    ],
)
async def test_an_error_that_carries_a_delay_raises_the_wait_to_it(
    world: World, clock: FakeClock, asked: Any, waited: float
) -> None:
    """To at least that; what is no number of seconds is as good as none."""
    await run(world, Retry(2, on=Told, backoff=[2]), Script(Told(asked)))
    assert clock.sleeps == [waited]


async def test_a_result_that_carries_a_delay_raises_the_wait_too(world: World, clock: FakeClock) -> None:
    """Responses carry `retry_after` as errors do."""
    responses = [Response(retry_after=7), Response(retry_after=1), Response(200)]
    await run(world, Retry(on_result=bad, backoff=[2]), Script(*responses))
    assert clock.sleeps == [7, 2]


async def test_a_refusal_by_a_circuit_says_when_to_come_back(world: World, clock: FakeClock) -> None:
    """`CircuitOpen.retry_after` is such a delay."""
    error = CircuitOpen("open", retry_after=12.5)
    await run(world, Retry(2, on=CircuitOpen, backoff=[1]), Script(error))
    assert clock.sleeps == [12.5]


async def test_retry_after_may_be_switched_off(world: World, clock: FakeClock) -> None:
    """Then the backoff alone decides."""
    await run(world, Retry(2, on=Told, backoff=[2], retry_after=False), Script(Told(60)))
    assert clock.sleeps == [2]


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


async def test_a_context_that_is_kept_does_not_keep_the_function(world: World) -> None:
    """Event loops keep the ambient context with a connection that was opened under it."""
    kept: list[Context] = []

    class Request:
        def __call__(self, ctx: Context) -> None:
            kept.append(current_context())

    class AsyncRequest:
        async def __call__(self, ctx: Context) -> None:
            kept.append(current_context())

    async def main() -> weakref.ref[Any]:
        request = (Request if world.blocking else AsyncRequest)()
        await world.attempt(Retry(2), request)
        return weakref.ref(request)

    request = await main()
    assert kept
    assert request() is None


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

    @property
    def response(self) -> object:
        raise RuntimeError("the response has not been set")


async def test_an_error_whose_attributes_raise_is_not_masked(world: World, clock: FakeClock) -> None:
    """What cannot be read is not there."""
    error = Touchy()
    script = Script(error)
    assert await run(world, Retry(on=Touchy, backoff=[1]), script) is error
    assert script.calls == 3


# --- telling ---


async def test_on_retry_is_called_before_each_wait_and_never_after_the_last_failure(
    world: World, clock: FakeClock
) -> None:
    """With one event that tells the delay, the attempt that failed, and what it failed with."""
    order: list[Any] = []
    errors = [Boom("a"), Boom("b"), Boom("c")]
    script = Script(*errors)
    retry = Retry(on=Boom, backoff=[1, 2], name="reader", on_retry=lambda event: order.append((event, clock.time)))
    await run(world, retry, script, Context(operation="read", properties={"tenant": 7}))
    [(one, at_one), (two, at_two)] = order
    assert (one.attempt, one.delay, one.outcome, at_one) == (1, 1, Failure(errors[0]), 1000)
    assert (two.attempt, two.delay, two.outcome, at_two) == (2, 2, Failure(errors[1]), 1001)
    assert (one.policy, one.operation, one.properties["tenant"], one.time) == ("reader", "read", 7, 1000)
    assert isinstance(one, events.RetryScheduled)


async def test_on_retry_hears_of_results_too(world: World, clock: FakeClock) -> None:
    """The outcome is then the `Success` that was not good enough."""
    told: list[Any] = []
    await run(world, Retry(on_result=lambda it: it < 3, backoff=[0], on_retry=told.append), Script(1, 2, 3))
    assert [event.outcome for event in told] == [Success(1), Success(2)]


async def test_on_retry_is_not_called_for_a_wait_that_does_not_fit(world: World, clock: FakeClock) -> None:
    """There is no retry to tell of."""
    told: list[Any] = []
    await run(world, Retry(on=Boom, backoff=[9], on_retry=told.append), Script(Boom()), Context(timeout=5))
    await run(world, Retry(1, on=Boom, on_retry=told.append), Script(Boom()))
    await run(world, Retry(on=Boom, on_retry=told.append), Script(Other()))
    assert told == []


async def test_the_event_tells_the_delay_that_is_really_waited(world: World, clock: FakeClock) -> None:
    """With jitter drawn and `retry_after` taken in."""
    told: list[Any] = []
    await run(world, Retry(6, on=Boom, backoff=Exponential(1), on_retry=told.append), Script(Boom()))
    await run(world, Retry(2, on=Told, backoff=[1], on_retry=told.append), Script(Told(5)))
    assert [event.delay for event in told] == clock.sleeps
    assert clock.sleeps[-1] == 5


# --- what is thrown away is closed ---


async def test_discarded_results_are_closed_and_the_one_that_comes_out_is_not(world: World, clock: FakeClock) -> None:
    """A connection that nobody will read goes back to its pool, once."""
    good = [Response(), Response(), Response(200)]
    await run(world, Retry(on_result=bad, backoff=[1]), Script(*good))
    assert [response.closed for response in good] == [1, 1, 0]
    last = [Response(), Response()]
    await run(world, Retry(2, on_result=bad, backoff=[1]), Script(*last))
    assert [response.closed for response in last] == [1, 0]


async def test_what_is_thrown_away_is_closed_before_the_wait(world: World, clock: FakeClock) -> None:
    """Its connection is of use to others meanwhile."""
    closed_at: list[float] = []

    class Timed(Response):
        def close(self) -> None:
            closed_at.append(clock.time)

    await run(
        world, Retry(3, on=StatusError, on_result=bad, backoff=[5]), Script(Timed(), StatusError(Timed()), Timed(200))
    )
    assert closed_at == [1000, 1005]


async def test_the_last_result_of_a_wrapped_end_is_not_closed(world: World, clock: FakeClock) -> None:
    """It is in `RetriesExhausted.last`, for whoever wants to read it."""
    responses = [Response(), Response()]
    await run(world, Retry(2, on_result=bad, backoff=[1], wrap=True), Script(*responses))
    assert [response.closed for response in responses] == [1, 0]


class StatusError(Exception):
    """An error that carries the response it is about, as httpx's and openai's do."""

    def __init__(self, response: Any) -> None:
        super().__init__()
        self.response = response


async def test_the_response_that_a_discarded_error_carries_is_closed(world: World, clock: FakeClock) -> None:
    """The one of the error that comes out is not."""
    responses = [Response(), Response(), Response()]
    await run(world, Retry(on=StatusError, backoff=[1]), Script(*[StatusError(it) for it in responses]))
    assert [response.closed for response in responses] == [1, 1, 0]


async def test_an_error_that_is_not_tried_again_keeps_its_response(world: World, clock: FakeClock) -> None:
    """The caller will want to read it."""
    response = Response()
    await run(world, Retry(on=Boom), Script(StatusError(response)))
    assert response.closed == 0


class AsyncResponse:
    """A response of an asynchronous client: `aclose` has to be awaited."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    async def aclose(self) -> None:
        await anyio.sleep(0)
        self.closed.append("aclose")

    def close(self) -> None:
        self.closed.append("close")


async def test_aclose_is_awaited_where_there_is_one(tasks_world: World, clock: FakeClock) -> None:
    """In tasks it comes before `close`; of an error's response as well."""
    results = [AsyncResponse(), AsyncResponse(), AsyncResponse()]
    script = Script(results[0], StatusError(results[1]), results[2])
    await run(tasks_world, Retry(on=StatusError, on_result=lambda it: True, backoff=[0]), script)
    assert [it.closed for it in results] == [["aclose"], ["aclose"], []]


async def test_blocking_code_has_nobody_to_await_aclose(threads: World, clock: FakeClock) -> None:
    """There `close` is called, and `aclose` not even begun."""
    results = [AsyncResponse(), AsyncResponse()]
    await run(threads, Retry(2, on_result=lambda it: True, backoff=[0]), Script(*results))
    assert [it.closed for it in results] == [["close"], []]


class Coroutines:
    """A response whose `close` is `async def`, as aiohttp's sessions have it."""

    def __init__(self) -> None:
        self.closed = 0

    async def close(self) -> None:
        await anyio.sleep(0)
        self.closed += 1


async def test_a_close_that_returns_an_awaitable_is_awaited(tasks_world: World, clock: FakeClock) -> None:
    """Clients do not agree on the name."""
    results = [Coroutines(), Coroutines()]
    await run(tasks_world, Retry(2, on_result=lambda it: True, backoff=[0]), Script(*results))
    assert [it.closed for it in results] == [1, 0]


async def test_a_close_that_returns_an_awaitable_leaves_no_warning_in_blocking_code(
    threads: World, clock: FakeClock
) -> None:
    """Nobody can await it there: it is not run, and not reported as forgotten either."""
    results = [Coroutines(), Coroutines()]
    assert await run(threads, Retry(2, on_result=lambda it: True, backoff=[0]), Script(*results)) is results[1]
    gc.collect()
    assert results[0].closed == 0


class Stubborn:
    """A response that fails to close."""

    def close(self) -> None:
        raise OSError("already gone")


async def test_a_close_that_raises_is_logged_and_changes_nothing(
    world: World, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The call goes on to its next attempt."""
    script = Script(Stubborn(), StatusError(Stubborn()), "fine")
    retry = Retry(on=StatusError, on_result=lambda it: it != "fine", backoff=[1])
    assert await run(world, retry, script) == "fine"
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert clock.sleeps == [1, 1]


def test_an_interrupt_in_a_close_is_not_swallowed(threads: World, clock: FakeClock) -> None:
    """Only an `Exception` is."""

    class Interrupted:
        def close(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Retry(on_result=lambda it: True, backoff=[0]).execute(lambda ctx: Interrupted())


@pytest.mark.parametrize("value", [0, "text", None, {"close": 1}, len], ids=repr)
async def test_what_cannot_be_closed_is_simply_dropped(world: World, clock: FakeClock, value: Any) -> None:
    """Most results are plain values."""
    assert await run(world, Retry(2, on_result=lambda it: True, backoff=[0]), Script(value)) is value


async def test_a_close_that_is_no_method_is_left_alone(world: World, clock: FakeClock) -> None:
    """A column of a table may have that name."""

    class Prices:
        close = 101.5
        aclose = None

    assert isinstance(await run(world, Retry(2, on_result=lambda it: True, backoff=[0]), Script(Prices())), Prices)


# --- state is per execution ---


def test_executions_at_the_same_time_have_nothing_in_common(clock: FakeClock) -> None:
    """Threads: attempts and delays of each are as if it were alone."""
    policy = Retry(4, on=Boom, backoff=lambda: iter([1.0, 2.0, 3.0]))
    together = threading.Barrier(8)
    asked: list[list[float]] = []

    def call(_: int) -> list[int]:
        mine: list[float] = []
        numbers: list[int] = []

        def fn(ctx: Context) -> None:
            together.wait(5)
            numbers.append(ctx.attempt)
            raise Boom

        heard = Policy.wrap(policy, listeners=[lambda event: mine.append(getattr(event, "delay", 0))])
        heard.capture(fn)
        asked.append([delay for delay in mine if delay])
        return numbers

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(8))) == [[1, 2, 3, 4]] * 8
    assert asked == [[1.0, 2.0, 3.0]] * 8


async def test_tasks_at_the_same_time_have_nothing_in_common(tasks_world: World, clock: FakeClock) -> None:
    """Tasks: the same."""
    policy = Retry(4, on=Boom, backoff=lambda: iter([1.0, 2.0, 3.0]))
    numbers: dict[int, list[int]] = {n: [] for n in range(8)}
    waited: dict[int, list[float]] = {n: [] for n in range(8)}

    async def call(n: int) -> None:
        async def fn(ctx: Context) -> None:
            numbers[n].append(ctx.attempt)
            await anyio.sleep(0)
            raise Boom

        heard = Policy.wrap(policy, listeners=[lambda event: waited[n].append(getattr(event, "delay", 0))])
        with contextlib.suppress(Boom):
            await heard.aexecute(fn)

    async with anyio.create_task_group() as group:
        for n in range(8):
            group.start_soon(call, n)
    assert list(numbers.values()) == [[1, 2, 3, 4]] * 8
    assert [[delay for delay in it if delay] for it in waited.values()] == [[1.0, 2.0, 3.0]] * 8


async def test_a_retry_may_be_used_inside_itself(world: World, clock: FakeClock) -> None:
    """Re-entrance: the inner execution counts for itself."""
    retry = Retry(2, on=Boom, backoff=lambda: iter([1.0, 9.0]))
    inner = Script(Boom())

    async def outer(ctx: Context) -> None:
        await world.execute(retry, inner.function())

    await world.attempt(retry, outer)
    assert [ctx.attempt for ctx in inner.contexts] == [1, 2, 1, 2]
    assert clock.sleeps == [1.0] * 3


async def test_an_error_is_not_kept_while_the_next_attempt_runs(world: World, clock: FakeClock) -> None:
    """Attempts that go on for hours must not pile up the frames of the failed ones."""
    alive: list[weakref.ref[Boom]] = []
    counts: list[int] = []

    async def fn(ctx: Context) -> None:
        counts.append(sum(ref() is not None for ref in alive))
        if ctx.attempt == 5:
            return
        error = Boom()
        alive.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    async def main() -> None:
        await world.execute(Retry(5, on=Boom, backoff=[0]), fn)

    with no_collector():
        await main()
    assert counts == [0] * 5


# --- building one ---
