"""Retry around a block: `for attempt in retry.attempts(): with attempt: ...`, and `async for` likewise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import pytest

from resilience import Context, Retry, current_context, deadline, events
from resilience.errors import BlockMisuse, BulkheadFull, CircuitOpen, DeadlineExceeded
from resilience.policies.retry_state import RetryState
from tests.conftest import Boom, FakeClock, Watched, World, no_collector
from tests.policies.retries import Attempts, RetryAfter, notes_of, oversleep

#: The error that a block raises in its n-th attempt; None for a success.
Steps = list[BaseException | None]


async def block(world: World, retry: Retry, steps: Steps) -> list[int]:
    """Run a block under the retry, one step per attempt and then the last one; return the attempts' numbers."""
    numbers: list[int] = []

    def step(number: int) -> None:
        numbers.append(number)
        error = steps[min(number, len(steps)) - 1]
        if error is not None:
            raise error

    try:
        async for attempt in Attempts(world, retry):
            with attempt:
                step(attempt.number)
    except BaseException as error:
        error.numbers = numbers  # type: ignore[attr-defined]
        raise
    return numbers


async def failing(world: World, retry: Retry, steps: Steps, kind: type[BaseException]) -> Any:
    """Return the exception that the block raises, which has to be of this type."""
    with pytest.raises(kind) as raised:
        await block(world, retry, steps)
    return raised.value


# --- attempts ---


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"backoff": lambda: iter([1.0, 2.0])}, [Boom(), Boom(), None]),
        ({}, [Boom("a"), Boom("b"), Boom("c")]),
        ({}, [KeyError("k")]),
        ({}, [Boom("first"), KeyError("not handled, and no refusal")]),
        ({"ignore": Boom}, [Boom()]),
        ({"on": Exception}, [CircuitOpen("open")]),
        ({"attempts": 2, "wrap": True}, [Boom()]),
        ({"attempts": None}, [Boom("until the deadline")]),
        ({"attempts": None, "max_elapsed": 5}, [Boom("until then")]),
        ({}, [RetryAfter(86_400)]),
        ({}, [Boom("first"), Boom("last"), BulkheadFull("the refusal gets a note")]),
        ({"oversleeps": 60}, [Boom("and no attempt begins")]),
        ({"oversleeps": 60, "wrap": True}, [Boom()]),
    ],
)
async def test_a_block_is_retried_like_a_call(
    world: World, clock: FakeClock, heard: list[Any], settings: dict[str, Any], steps: Steps, monkeypatch: Any
) -> None:
    """With the same waits, events, error and note. Loops of one policy share no delays."""
    if late := settings.get("oversleeps"):
        oversleep(clock, monkeypatch, late)
        settings = {name: value for name, value in settings.items() if name != "oversleeps"}
    retry = Retry(**{"on": (Boom, RetryAfter), "backoff": [2], **settings})

    async def call(ctx: Context) -> None:
        if (error := steps[min(ctx.attempt, len(steps)) - 1]) is not None:
            raise error

    async def course(execution: Awaitable[Any]) -> Any:
        error, before = None, len(clock.sleeps)
        heard.clear()
        for step in filter(None, steps):
            step.__notes__ = []  # not those of the course before
        with deadline(9):
            try:
                await execution
            except Exception as raised:
                error = getattr(raised, "last", raised), raised.__cause__, notes_of(raised)
        reported = [type(it) for it in heard if not isinstance(it, events.ExecutionFinished)]
        return error, clock.sleeps[before:], reported

    of_a_call = await course(world.execute(retry, call))
    for _ in range(2):
        assert await course(block(world, retry, steps)) == of_a_call


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError])
async def test_a_base_exception_is_raised_at_once(threads: World, clock: FakeClock, kind: type[BaseException]) -> None:
    """This holds even if it is in `on`."""
    error = await failing(threads, Retry(on=BaseException, backoff=[0]), [kind()], kind)
    assert error.numbers == [1]


# --- leaving the block


async def test_break_leaves_the_block(world: World, clock: FakeClock) -> None:
    """It may stand inside or outside the `with`; the context of the attempt is left, too."""
    numbers: list[int] = []
    for where in ("inside", "outside"):
        async for attempt in Attempts(world, Retry(9, on=Boom, backoff=[1])):
            with attempt:
                numbers.append(attempt.number)
                if where == "inside" and attempt.number == 2:
                    break
                raise Boom
            if attempt.number == 2:
                break
    assert current_context().attempt == 1
    assert numbers == [1, 2, 1, 2]


async def test_continue_counts_as_a_success(world: World, clock: FakeClock) -> None:
    """The block has ended without an exception."""
    numbers: list[int] = []
    async for attempt in Attempts(world, Retry(on=Boom)):
        with attempt:
            numbers.append(attempt.number)
            continue
    assert numbers == [1]


async def test_an_exception_between_the_attempts_is_raised(world: World, clock: FakeClock) -> None:
    """Only an exception inside the `with` is retried."""
    with pytest.raises(Boom, match="outside"):
        async for attempt in Attempts(world, Retry(on=Boom, backoff=[0])):
            with attempt:
                pass
            raise Boom("outside")


# --- time ---


async def test_a_block_is_not_entered_after_the_deadline(world: World, clock: FakeClock) -> None:
    """The loop raises `DeadlineExceeded` with the name of the policy."""
    with pytest.raises(DeadlineExceeded) as raised, deadline(0):
        await block(world, Retry(name="reader"), [None])
    assert raised.value.numbers == []  # type: ignore[attr-defined]
    assert raised.value.policy == "reader"


@pytest.mark.parametrize(("delay", "seconds"), [(0, 5), (1, 5), (1, 4)])
async def test_no_block_begins_if_code_between_two_blocks_leaves_no_time_for_it(
    world: World, clock: FakeClock, delay: float, seconds: float
) -> None:
    """The loop raises the last failure, without a wait."""
    numbers: list[int] = []

    async def main() -> None:
        with deadline(5):
            async for attempt in Attempts(world, Retry(on=Boom, backoff=[delay])):
                with attempt:
                    numbers.append(attempt.number)
                    raise Boom
                clock.advance(seconds)

    with pytest.raises(Boom) as raised:
        await main()
    assert "1 attempt " in notes_of(raised.value)[0]
    assert (numbers, clock.sleeps) == ([1], [])


async def test_a_deadline_between_the_loop_and_an_attempt_holds_in_it(world: World, clock: FakeClock) -> None:
    """And the deadline around the loop, if it is earlier."""
    seen: list[float] = []
    with deadline(60):
        async for attempt in Attempts(world, Retry(on=Boom, backoff=[50])):
            with deadline(30), attempt:
                seen.append(current_context().deadline)
                if attempt.number < 2:
                    raise Boom
    assert seen == [1030, 1060]


async def test_the_context_around_the_loop_counts_not_that_of_the_call_of_attempts(
    world: World, clock: FakeClock
) -> None:
    attempts = Attempts(world, Retry(9, on=Boom, backoff=[2]))
    with pytest.raises(Boom), deadline(5):
        async for attempt in attempts:
            with attempt:
                raise Boom
    assert clock.sleeps == [2, 2]


@pytest.mark.parametrize("ends", ["by success", "by failure", "early"])
def test_attempts_are_for_one_loop(ends: str) -> None:
    """A second loop would end before its first attempt."""
    attempts = Retry(1, on=Boom).attempts()
    with suppress(Boom):
        for attempt in attempts:
            with attempt:
                if ends == "early":
                    break
                if ends == "by failure":
                    raise Boom
    for again in (iter, aiter):
        with pytest.raises(BlockMisuse, match="for one loop"):
            again(attempts)


# --- context, events, resources ---


async def test_the_block_runs_in_the_context_of_its_attempt(world: World, clock: FakeClock) -> None:
    """`current_context()` has the attempt and the deadline, and is the outer context again after the block."""
    seen: list[tuple[int, float]] = []
    with deadline(60) as outer:
        async for attempt in Attempts(world, Retry(on=Boom, backoff=[1])):
            with attempt:
                seen.append((current_context().attempt, current_context().deadline))
                if attempt.number < 3:
                    raise Boom
            assert current_context() is outer
    assert seen == [(1, 1060), (2, 1060), (3, 1060)]


async def test_a_block_inside_an_execution_is_not_in_its_report(world: World, clock: FakeClock) -> None:
    ctx = Context()
    inner = Retry(on=Boom, backoff=[1])

    async def fn(_: Context) -> None:
        await block(world, inner, [Boom("of the block"), None])
        raise ConnectionError("of the call")

    assert isinstance(await world.attempt(Retry(1), fn, ctx), ConnectionError)
    assert (ctx.attempts, [failed.message for failed in ctx.failures]) == (1, ["of the call"])


# --- state ---


async def test_an_error_raised_after_a_wait_leaves_no_reference_cycle(
    world: World, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the time is over then."""
    watched = Watched()
    seen: list[list[str]] = []

    async def main(timeout: float) -> None:
        try:
            with deadline(timeout):
                async for attempt in Attempts(world, Retry(3, on=Boom, backoff=[1])):
                    seen.append(watched.alive)
                    with attempt:
                        watched.fail()
        except Boom:
            pass

    with no_collector():
        await main(60)
        assert seen == [[]] * 3
        oversleep(clock, monkeypatch, 60)
        await main(5)
        assert seen == [[]] * 4
        assert watched.alive == []


def test_a_second_attempt_that_is_not_entered_causes_a_warning(threads: World) -> None:
    """Like a first one."""
    attempts = Retry(on=Boom, backoff=[0]).attempts()
    with next(attempts):
        raise Boom
    assert next(attempts).number == 2
    with pytest.warns(RuntimeWarning, match="Retry: an attempt was not entered"), pytest.raises(StopIteration):
        next(attempts)


def test_entering_an_attempt_returns_it_and_sets_its_context(threads: World) -> None:
    """Leaving an attempt that was not entered changes nothing."""
    for attempt in Retry().attempts():
        with attempt as entered:
            assert entered is attempt
            assert current_context().attempt == 1
    attempt = next(iter(Retry().attempts()))
    with deadline(5.0) as ctx:
        assert not attempt.__exit__(None, None, None)
        assert current_context() is ctx
    with pytest.warns(RuntimeWarning, match="Retry: an attempt was not entered"):
        del attempt


def test_an_interrupt_just_before_a_failure_is_recorded_propagates(
    threads: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*failed: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(RetryState, "decide", interrupted)
    attempt = next(iter(Retry(on=Boom).attempts()))
    with pytest.raises(KeyboardInterrupt), attempt:
        raise Boom


def test_a_block_whose_end_was_interrupted_ends_with_its_attempt(threads: World) -> None:
    """Its context applies no longer."""
    attempt = next(iter(Retry().attempts()))
    attempt.__enter__()
    assert current_context().attempt == 1
    assert current_context() is current_context()
    del attempt
    assert current_context() is not current_context()
