"""Retry: delays, deadlines, `max_elapsed`, `retry_after` and failures that must not be repeated."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from types import MethodType
from typing import Any

import anyio
import pytest

from resilience import Context, Failure, Hedge, Outcome, Policy, Retry, RetryBudget, Success, Timeout, deadline, events
from resilience.errors import DeadlineExceeded, RetriesExhausted, TimeoutExceeded
from tests.conftest import Boom, FakeClock, Other, Script, Virtual, World
from tests.functions import raising
from tests.policies.retries import Response, RetryAfter, bad, notes_of, oversleep, run

# --- time --------------------------------------------------------------------------------------


async def retried_block(retry: Retry, fn: Callable[[], Awaitable[None]]) -> None:
    async for attempt in retry.attempts():
        with attempt:
            await fn()


#: The forms of a retried call in a task.
TASK_FORMS: dict[str, Callable[[Retry, Callable[[], Awaitable[None]]], Awaitable[None]]] = {
    "call": lambda retry, fn: retry.acall(fn),
    "pipeline": lambda retry, fn: Policy.wrap(Timeout(60), retry).acall(fn),
    "block": retried_block,
}


@pytest.mark.parametrize("form", TASK_FORMS)
async def test_of_retries_without_a_delay_the_first_begins_before_other_tasks(tasks_world: World, form: str) -> None:
    """Trio runs the tasks of a turn in random order, so the other task may miss the first of its turns."""
    happened: list[str] = []

    async def fails() -> None:
        happened.append("attempt")
        raise Boom

    async def other() -> None:
        happened.append("other task")

    async with anyio.create_task_group() as group:
        group.start_soon(other)
        with pytest.raises(Boom):
            await TASK_FORMS[form](Retry(4, on=Boom, backoff=[0]), fails)
    assert happened[:2] == ["attempt", "attempt"]
    assert happened.index("other task") <= 3


async def test_no_sleep_precedes_the_first_retry_of_a_result_without_a_delay(world: World, clock: FakeClock) -> None:
    """In threads, none comes before the other ones either."""
    await run(world, Retry(4, on_result=lambda it: it is None, backoff=[0]), Script(None))
    assert clock.sleeps == ([] if world.blocking else [0, 0])


async def test_the_first_retry_waits_for_a_delay_that_the_failure_asks_for(world: World, clock: FakeClock) -> None:
    await run(world, Retry(2, on=RetryAfter, backoff=[0]), Script(RetryAfter(2)))
    assert clock.sleeps == [2]


@pytest.mark.parametrize("form", TASK_FORMS)
async def test_endless_retries_without_delay_starve_no_task_and_can_be_cancelled(tasks_world: World, form: str) -> None:
    """Although the function never suspends."""
    calls = []

    async def fails() -> None:
        calls.append(1)
        raise Boom

    async with anyio.create_task_group() as group:
        group.start_soon(TASK_FORMS[form], Retry(None, on=Boom, backoff=[0]), fails)
        while len(calls) < 10:
            await anyio.sleep(0)
        group.cancel_scope.cancel()
    assert len(calls) < 20


def test_endless_attempts_without_a_delay_starve_no_task_of_a_loop_inside_a_blocking_call() -> None:
    """The context around the block is that of a thread, although the block itself runs in a task."""
    calls: list[int] = []

    async def fails() -> None:
        calls.append(1)
        if len(calls) == 1000:
            raise Other
        raise Boom

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(retried_block, Retry(None, on=Boom, backoff=[0]), fails)
            while len(calls) < 10:
                await anyio.sleep(0)
            group.cancel_scope.cancel()

    Retry().execute(lambda ctx: asyncio.run(main()))
    assert len(calls) < 20


@pytest.mark.parametrize("layers", [1, 2])
async def test_endless_retries_without_a_delay_can_be_timed_out(world: World, layers: int) -> None:
    """Each layer of retries begins its own first one at once."""
    retry = Retry(None, on=Boom, backoff=[0])
    policy = Policy.wrap(Timeout(0.02, name="limit"), *[retry] * layers)
    with pytest.raises((Boom, TimeoutExceeded)) as raised:
        await world.execute(policy, Script(Boom()).function())
    assert type(raised.value) is not DeadlineExceeded


@pytest.mark.parametrize(
    ("settings", "timeout", "note"),
    [
        ({}, None, "2 attempts in 3 s after the first failure"),
        ({"attempts": 1}, None, "1 attempt"),
        ({"max_elapsed": 60}, None, "2 attempts in 4 s"),
        ({}, 60, "2 attempts in 4 s"),
    ],
)
async def test_the_note_says_in_what_time(
    world: World, clock: FakeClock, settings: dict[str, Any], timeout: float | None, note: str
) -> None:
    """The clock is not read before the first attempt if only the note would need it."""
    retry = Retry(**{"attempts": 2, "on": Boom, "backoff": [2], **settings})
    fails = Script(Boom(), doing=lambda ctx: clock.advance(1)).function()
    with pytest.raises(Boom) as raised, nullcontext() if timeout is None else deadline(timeout):
        await world.call(retry, fails)
    assert notes_of(raised.value)[0].partition(", ")[0] == f"resilience: {note}"


async def test_max_elapsed_counts_the_attempts_themselves(world: World, clock: FakeClock) -> None:
    """A slow failure uses it up, just like a wait."""
    calls: list[float] = []

    async def slow() -> None:
        calls.append(clock.time)
        clock.advance(4)
        raise Boom

    with pytest.raises(Boom):
        await world.call(Retry(None, on=Boom, backoff=[1], max_elapsed=timedelta(seconds=8)), slow)
    assert calls == [1000, 1005]
    assert clock.sleeps == [1]


async def test_no_attempt_begins_at_the_very_end_of_max_elapsed(world: World, clock: FakeClock) -> None:
    """At that instant the time is over, as with a deadline; a moment earlier an attempt begins."""
    script = Script(Boom())
    await run(world, Retry(None, on=Boom, backoff=[2.0], max_elapsed=4), script)
    assert (script.calls, clock.sleeps) == (2, [2.0])
    script = Script(Boom())
    await run(world, Retry(None, on=Boom, backoff=[2.0], max_elapsed=4.001), script)
    assert script.calls == 3


@pytest.mark.parametrize(
    ("limits", "late", "reason"),
    [((4, None), 2.0, "max_elapsed"), ((4, None), 3.0, "max_elapsed"), ((None, 5.0), 10.0, "deadline")],
)
async def test_no_attempt_begins_after_a_wait_that_oversleeps_the_time_limit(
    threads: World, clock: FakeClock, heard: list[Any], monkeypatch: Any, limits: Any, late: float, reason: str
) -> None:
    """The event gives the limit as the reason, although a retry was announced before the wait."""
    oversleep(clock, monkeypatch, late)
    script = Script(Boom())
    retry = Retry(None, on=Boom, backoff=[2.0], max_elapsed=limits[0])
    error = await run(threads, retry, script, Context(timeout=limits[1]))
    assert isinstance(error, Boom)
    assert "1 attempt " in notes_of(error)[0]
    assert script.calls == 1
    ends = [event for event in heard if isinstance(event, events.RetryGaveUp)]
    assert [(event.reason, event.attempts, event.elapsed) for event in ends] == [(reason, 1, 2.0 + late)]


@pytest.mark.parametrize("limit", [{"timeout": 1.0}, {"max_elapsed": 1.0}], ids=["deadline", "max_elapsed"])
@pytest.mark.parametrize("delay", [0.0, 0.25])
async def test_nothing_begins_after_a_callback_that_leaves_no_time_for_it(
    world: World, clock: FakeClock, limit: dict[str, float], delay: float
) -> None:
    """No wait, as its attempt would come too late, and without a delay not even the first retry."""
    last = limit.get("max_elapsed")
    retry = Retry(on=Boom, backoff=[delay], max_elapsed=last, on_retry=lambda event: clock.advance(1.0 - delay))
    script = Script(Boom(), "fine")
    error = await run(world, retry, script, Context(timeout=limit.get("timeout")))
    assert isinstance(error, Boom)
    assert (script.calls, clock.sleeps) == (1, [])


@pytest.mark.parametrize("seconds", [3.0, 5.0])
async def test_a_callback_that_leaves_no_time_for_an_attempt_leaves_the_last_result_to_the_caller(
    world: World, clock: FakeClock, heard: list[Any], seconds: float
) -> None:
    """The result is not closed, the retry that is not made costs no budget, and the end is reported."""
    budget, response = RetryBudget(saved=1), Response()
    retry = Retry(on_result=bad, backoff=[2.0], budget=budget, on_retry=lambda event: clock.advance(seconds))
    result = await run(world, retry, Script(response), Context(timeout=5.0))
    assert result is response
    assert (response.closed, clock.sleeps, budget.balance) == (0, [], 1.0)
    assert [event.reason for event in heard if isinstance(event, events.RetryGaveUp)] == ["deadline"]


@pytest.mark.parametrize("fails", [False, True], ids=["result", "failure"])
@pytest.mark.parametrize("limit", [{"timeout": 5.0}, {"max_elapsed": 5.0}], ids=["deadline", "max_elapsed"])
async def test_no_wait_begins_after_a_response_took_too_long_to_close(
    world: World, clock: FakeClock, limit: dict[str, float], fails: bool
) -> None:
    """The attempt after it would come too late. As the response is closed, it cannot be returned."""
    budget, response = RetryBudget(saved=1), Response(close=lambda: clock.advance(3.5))
    failure = Boom("no")
    failure.response = response  # type: ignore[attr-defined]
    last = limit.get("max_elapsed")
    retry = Retry(on=Boom, on_result=bad, backoff=[2.0], budget=budget, max_elapsed=last)
    script = Script(failure if fails else response)
    error = await run(world, retry, script, Context(timeout=limit.get("timeout")))
    assert type(error) is (Boom if fails else DeadlineExceeded)
    assert (script.calls, clock.sleeps, budget.balance) == (1, [], 1.0)


async def test_a_closed_result_is_not_returned_after_a_wait_that_oversleeps_the_deadline(
    world: World, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retry raises `DeadlineExceeded` with its name; with `wrap`, `RetriesExhausted`."""
    oversleep(clock, monkeypatch, 10.0)
    error = await run(world, Retry(on_result=bool, backoff=[2.0], name="reader"), Script(1), Context(timeout=5.0))
    assert type(error) is DeadlineExceeded
    assert error.policy == "reader"
    error = await run(world, Retry(on_result=bool, backoff=[2.0], wrap=True), Script(1), Context(timeout=5.0))
    assert type(error) is RetriesExhausted
    assert (error.last, error.attempts) == (Success(1), 1)


@pytest.mark.parametrize(("delay", "calls"), [(4.9, 2), (5.0, 1), (5.1, 1)])
async def test_no_wait_begins_beyond_the_deadline(threads: World, clock: FakeClock, delay: float, calls: int) -> None:
    """The last failure is raised at once."""
    script = Script(Boom("the failure"))
    error = await run(threads, Retry(2, on=Boom, backoff=[delay]), script, Context(timeout=5))
    assert isinstance(error, Boom)
    assert script.calls == calls
    assert clock.time == 1000 + (delay if calls == 2 else 0)
    assert len(notes_of(error)) == 1


@pytest.mark.parametrize(
    ("call", "wait", "timeout", "max_elapsed", "took"), [(0.2, 0.3, 1, None, 0.7), (0.1, 0.2, None, 0.6, 0.4)]
)
async def test_rounding_starts_no_wait_that_ends_at_the_limit(
    anywhere: Virtual, call: float, wait: float, timeout: float | None, max_elapsed: float | None, took: float
) -> None:
    """1 - 0.7 is more than 0.3, but 0.7 + 0.3 is 1."""
    response = Response()

    async def fn(ctx: Context) -> Response:
        await anywhere.sleep(call)
        return response

    began = 0.0 if timeout else 0.4
    await anywhere.sleep(began)
    retry = Retry(None, on_result=bad, backoff=[wait], max_elapsed=max_elapsed)
    assert await anywhere.execute(retry, fn, Context(timeout=timeout)) is response
    assert anywhere.now() - began == pytest.approx(took)


async def test_no_first_attempt_starts_after_the_deadline(world: World, clock: FakeClock) -> None:
    """The retry raises `DeadlineExceeded` with its name."""
    script = Script("fine")
    error = await run(world, Retry(name="reader"), script, Context(timeout=0))
    assert type(error) is DeadlineExceeded
    assert error.policy == "reader"
    assert script.calls == 0


async def test_the_wall_clock_is_never_read(world: World, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can jump: by an hour, or when a time server adjusts it."""
    monkeypatch.setattr(time, "time", raising(AssertionError("the wall clock was read")))
    script = Script(Boom(), "fine")
    ctx = Context(timeout=60)
    assert await world.execute(Retry(on=Boom, backoff=[1], max_elapsed=30), script.function(), ctx) == "fine"
    monkeypatch.undo()


# --- delays ------------------------------------------------------------------------------------


async def test_the_default_backoff_is_exponential_with_full_jitter(threads: World, clock: FakeClock) -> None:
    """The bound of the jitter begins at 0.1 s and doubles up to 10 s."""
    generator = random.Random(42)
    await run(threads, Retry(12, on=Boom, rng=random.Random(42)), Script(Boom()))
    assert clock.sleeps == [generator.uniform(0, min(10.0, 0.1 * 2**n)) for n in range(11)]


async def test_no_delay_is_drawn_without_a_wait(threads: World, clock: FakeClock) -> None:
    """A call that succeeds and a last attempt draw none."""
    draws: list[float] = []

    def schedule() -> Iterator[float]:
        for delay in (1.0, 2.0, 3.0, 4.0):
            draws.append(delay)
            yield delay

    await run(threads, Retry(on=Boom, backoff=schedule), Script("fine"))
    assert draws == []
    await run(threads, Retry(3, on=Boom, backoff=schedule), Script(Boom()))
    assert draws == [1.0, 2.0]


NO_LONGER = [0.25, 0.125, 0, -5, timedelta(seconds=-5)]
NO_SECONDS = [None, math.nan, True, "7", "Wed, 21 Oct 2015 07:28:00 GMT", b"7", [7], lambda: 7, object()]


@pytest.mark.parametrize(
    ("retry_after", "waited"),
    [(7, 7), (7.5, 7.5), (timedelta(seconds=9), 9), *((it, 0.25) for it in (*NO_LONGER, *NO_SECONDS))],
)
async def test_retry_after_raises_the_delay(threads: World, clock: FakeClock, retry_after: Any, waited: float) -> None:
    """The wait is at least that long; a value that is no number of seconds is ignored."""
    await run(threads, Retry(2, on=RetryAfter, backoff=[0.25]), Script(RetryAfter(retry_after)))
    assert clock.sleeps == [waited]


async def test_a_group_asks_for_the_longest_delay_of_its_errors(threads: World, clock: FakeClock) -> None:
    error = ExceptionGroup("children", [RetryAfter(3), ExceptionGroup("", [RetryAfter(7)]), RetryAfter(None)])
    await run(threads, Retry(2, on=RetryAfter, backoff=[0.25]), Script(error))
    assert clock.sleeps == [7]


async def test_retry_after_of_a_result_raises_the_delay(world: World, clock: FakeClock) -> None:
    responses = [Response(retry_after=7), Response(retry_after=1), Response(200)]
    await run(world, Retry(on_result=bad, backoff=[2]), Script(*responses))
    assert clock.sleeps == [7, 2]


def carried(outcome: Outcome[Any]) -> Any:
    return outcome.value if isinstance(outcome, Success) else outcome.error


async def test_a_function_reads_a_delay_that_a_failure_carries_elsewhere(world: World, clock: FakeClock) -> None:
    """Of errors and results; the attribute does not count then. The backoff is the least, and None asks for nothing."""
    seen: list[Any] = []

    def asked(outcome: Outcome[Any]) -> float | None:
        seen.append(outcome)
        return outcome.error.args[0] if outcome.error else outcome.unwrap().status / 100

    failures = [Boom(7), Boom(None), Boom(1), Boom(-3), Response(503, retry_after=99), Boom(timedelta(seconds=9))]
    retry = Retry(None, on=Boom, on_result=bad, backoff=[2], retry_after=asked)
    await run(world, retry, Script(*failures, Response(200)))
    assert clock.sleeps == [7, 2, 2, 2, 5.03, 9]
    assert all(it is failed for it, failed in zip(map(carried, seen), failures, strict=True))


class Delays(dict[str, float]):
    """Delays by their failures, which are read by a call; there may be none yet."""

    def __call__(self, outcome: Outcome[Any]) -> float | None:
        return self.setdefault(str(outcome.error), 7)


async def test_an_empty_object_that_can_be_called_reads_the_delay(threads: World, clock: FakeClock) -> None:
    await run(threads, Retry(on=Boom, retry_after=Delays()), Script(Boom(), "fine"))
    assert clock.sleeps == [7]


async def test_a_delay_that_a_function_reads_is_capped_and_obeys_the_deadline(threads: World, clock: FakeClock) -> None:
    error = Boom()
    assert await run(threads, Retry(2, on=Boom, retry_after=lambda outcome: 301), Script(error)) is error
    patient = Retry(2, on=Boom, retry_after=lambda outcome: 60)
    assert await run(threads, patient, Script(error), Context(timeout=30)) is error
    assert clock.sleeps == []


async def test_what_the_function_that_reads_the_delay_raises_reaches_the_caller(world: World, clock: FakeClock) -> None:
    """It decides, as a predicate does. A discarded result is closed."""
    response = Response(503)
    for step in (Boom(), response):
        retry, script = Retry(on=Boom, on_result=bad, retry_after=lambda outcome: {}["x"]), Script(step)
        error = await run(world, retry, script)
        assert (type(error), script.calls) == (KeyError, 1)
    assert (response.closed, clock.sleeps) == (1, [])


@pytest.mark.parametrize("asked", ["120", True, [5.0]])
async def test_a_delay_that_is_no_number_is_an_error_of_the_call(world: World, clock: FakeClock, asked: Any) -> None:
    """As the text of a header, which would otherwise be ignored: the service would be called again too early."""
    script = Script(Boom(), "fine")
    error = await run(world, Retry(on=Boom, retry_after=lambda outcome: asked), script)
    assert (type(error), script.calls, clock.sleeps) == (TypeError, 1, [])
    assert repr(asked) in str(error)


async def test_a_retry_after_beyond_the_deadline_ends_the_retries(world: World, clock: FakeClock) -> None:
    """The delay is not shortened: the service would refuse an earlier call."""
    error = RetryAfter(60)
    script = Script(error)
    assert await run(world, Retry(on=RetryAfter, backoff=[1]), script, Context(timeout=30)) is error
    assert await run(world, Retry(on=RetryAfter, backoff=[1], max_elapsed=30), script) is error
    assert script.calls == 2
    assert clock.sleeps == []


@pytest.mark.parametrize("retry_after", [math.inf, 1e300, 10**400], ids=["inf", "1e300", "10**400"])
async def test_an_enormous_retry_after_masks_no_error(threads: World, clock: FakeClock, retry_after: Any) -> None:
    """The delay is at most what a thread can wait for, and the deadline bounds it."""
    error = RetryAfter(retry_after)
    assert await run(threads, Retry(2, on=RetryAfter, backoff=[1]), Script(error), Context(timeout=5)) is error
    assert await run(threads, Retry(2, on=RetryAfter, backoff=[1]), Script(error)) is error
    assert all(0 <= slept <= threading.TIMEOUT_MAX for slept in clock.sleeps)


class Once(Exception):
    """An error with an attribute `repeatable`."""

    def __init__(self, repeatable: Any) -> None:
        super().__init__()
        self.repeatable = repeatable


@pytest.mark.parametrize("groups", [0, 1, 2])
async def test_an_error_with_repeatable_false_is_not_retried(threads: World, clock: FakeClock, groups: int) -> None:
    """It may be in `on`, or in a group: the call may have been carried out. The event gives the reason."""
    error: Exception = Once(repeatable=False)
    for _ in range(groups):
        error = ExceptionGroup("children", [ConnectionError(), error])
    received: list[Any] = []
    retry = Policy.wrap(Retry(5, on=Exception, retry_after=False), listeners=[received.append])
    script = Script(error)
    assert await run(threads, retry, script) is error
    assert (script.calls, clock.sleeps) == (1, [])
    assert [event.reason for event in received if isinstance(event, events.RetryGaveUp)] == ["unrepeatable"]


def test_a_result_may_be_a_proxy_without_a_class() -> None:
    """As those of werkzeug are, outside of a request."""

    class Unbound:
        @property
        def __class__(self) -> Any:
            raise RuntimeError("bound to nothing")

    assert type(Retry(2, on_result=lambda result: True, backoff=[0]).call(Unbound)) is Unbound


async def test_a_result_with_repeatable_false_is_not_retried(world: World, clock: FakeClock) -> None:
    """It is returned to the caller, and not closed."""
    response = Response(repeatable=False)
    script = Script(response)
    assert await run(world, Retry(5, on_result=bad), script) is response
    assert script.calls == 1
    assert response.closed == 0


@pytest.mark.parametrize("repeatable", [True, None, 0, "", []])
async def test_only_false_marks_an_error_as_not_repeatable(threads: World, clock: FakeClock, repeatable: Any) -> None:
    """An attribute of that name may have another meaning in a user's class."""
    script = Script(Once(repeatable), "fine")
    assert await run(threads, Retry(2, on=Once, backoff=[0]), script) == "fine"


class Sending:
    """A callable that may not be called again once it has been entered."""

    repeatable = True

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls = 0

    def __call__(self, ctx: Context) -> Any:
        self.calls += 1
        self.repeatable = False
        raise self.error


async def test_a_function_with_repeatable_false_is_not_called_again(world: World, clock: FakeClock) -> None:
    """The error may be that of another policy, such as a Timeout, which does not know the function."""
    sending = Sending(TimeoutExceeded("no result"))
    assert await world.attempt(Retry(5), sending) is sending.error
    assert sending.calls == 1


@pytest.mark.parametrize("policy", [Retry(2, on=Boom, backoff=[0]), Hedge(60, on=Boom, eager=True)])
@pytest.mark.parametrize("bind", [lambda fn: fn, lambda fn: MethodType(fn, Context())], ids=["function", "method"])
def test_on_a_plain_function_repeatable_false_means_nothing(policy: Policy[Any], bind: Callable[..., Any]) -> None:
    """Nor on a method, which has the attributes of its function."""
    calls = []

    def fn(*args: Context) -> None:
        calls.append(args)
        raise Boom

    fn.repeatable = False  # type: ignore[attr-defined]
    assert isinstance(policy.capture(bind(fn)), Failure)
    assert len(calls) == 2


def test_a_callable_whose_property_repeatable_raises_is_called_again() -> None:
    """It says nothing then, as an error or a result with such a property."""
    attempts = []

    class Function:
        @property
        def repeatable(self) -> bool:
            raise LookupError

        def __call__(self, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            raise Boom

    with pytest.raises(Boom):
        Retry(2, on=Boom, backoff=[0]).execute(Function())
    assert attempts == [1, 2]


def test_a_retried_block_inside_a_function_with_repeatable_false_is_repeated(clock: FakeClock) -> None:
    """The attribute of the function does not hold for a block of attempts in it."""
    attempts = []

    class Function:
        repeatable = False

        def __call__(self, ctx: Context) -> None:
            for attempt in Retry(2, on=Other).attempts():
                with attempt:
                    attempts.append(attempt.number)
                    if attempt.number == 1:
                        raise Other

    Retry().execute(Function())
    assert attempts == [1, 2]


class RaisingAttributes(Exception):
    """An error whose properties raise, as those of some clients do before they are set."""

    @property
    def retry_after(self) -> float:
        raise RuntimeError("not now")

    repeatable = retry_after

    @property
    def response(self) -> object:
        raise RuntimeError("the response has not been set")


async def test_an_error_whose_attributes_raise_is_not_masked(world: World, clock: FakeClock) -> None:
    """An attribute that cannot be read counts as absent."""
    error = RaisingAttributes()
    script = Script(error)
    assert await run(world, Retry(on=RaisingAttributes, backoff=[1]), script) is error
    assert script.calls == 3
