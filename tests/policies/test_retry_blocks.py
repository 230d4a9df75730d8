"""Retry around a block: `for attempt in retry.attempts(): with attempt: ...`, and `async for` likewise."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from resilience import (
    CircuitOpen,
    DeadlineExceeded,
    Failure,
    RetriesExhausted,
    Retry,
    current_context,
    deadline,
    events,
)
from resilience.clock import clock as process_clock
from tests.conftest import Boom, FakeClock, Watched, World, no_collector

#: What a block does in its n-th attempt: raise this, or nothing.
Steps = list[BaseException | None]


async def block(world: World, retry: Retry, steps: Steps) -> list[int]:
    """Run a block under the retry, one step per attempt and the last one for ever; return the attempts' numbers."""
    numbers: list[int] = []

    def step(number: int) -> None:
        numbers.append(number)
        error = steps[min(number, len(steps)) - 1]
        if error is not None:
            raise error

    try:
        if world.blocking:
            for attempt in retry.attempts():
                with attempt:
                    step(attempt.number)
        else:
            async for attempt in retry.attempts():
                with attempt:
                    step(attempt.number)
    except BaseException as error:
        error.numbers = numbers  # type: ignore[attr-defined]
        raise
    return numbers


async def failing(world: World, retry: Retry, steps: Steps, kind: type[BaseException]) -> Any:
    """Return what came out of the block, which has to be of this kind."""
    with pytest.raises(kind) as raised:
        await block(world, retry, steps)
    return raised.value


# --- attempts ---


async def test_a_block_that_fails_runs_again_after_a_wait(world: World, clock: FakeClock) -> None:
    """The exception is held back while there is another attempt to make."""
    assert await block(world, Retry(on=Boom, backoff=[1, 2]), [Boom(), Boom(), None]) == [1, 2, 3]
    assert clock.sleeps == [1, 2]


async def test_the_last_exception_itself_comes_out_of_the_block(world: World, clock: FakeClock) -> None:
    """With one note, and without a wait after it."""
    errors = [Boom("a"), Boom("b"), Boom("c")]
    error = await failing(world, Retry(on=Boom, backoff=[1]), list(errors), Boom)
    assert error is errors[2]
    assert error.numbers == [1, 2, 3]
    assert clock.sleeps == [1, 1]
    [note] = error.__notes__
    assert "3 attempts" in note
    assert "Boom(a), Boom(b), Boom(c)" in note


async def test_an_exception_that_is_not_handled_passes_at_once(world: World, clock: FakeClock) -> None:
    """Unchanged, without a note; so does one that is ignored, and a refusal that is not named."""
    for error, retry in [
        (KeyError("k"), Retry(on=Boom)),
        (Boom(), Retry(on=Boom, ignore=Boom)),
        (CircuitOpen("open"), Retry(on=Exception)),
    ]:
        came_out = await failing(world, retry, [error], type(error))
        assert came_out is error
        assert came_out.numbers == [1]
        assert not hasattr(error, "__notes__")
    assert clock.sleeps == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError])
async def test_only_an_exception_is_held_back(threads: World, clock: FakeClock, kind: type[BaseException]) -> None:
    """An interrupt leaves the block whatever `on` says."""
    error = await failing(threads, Retry(on=BaseException, backoff=[0]), [kind()], kind)
    assert error.numbers == [1]


# --- leaving it ---


async def test_break_leaves_the_block(world: World, clock: FakeClock) -> None:
    """From inside and from outside of the `with`; nothing is left behind."""
    numbers: list[int] = []
    for where in ("inside", "outside"):
        retry = Retry(9, on=Boom, backoff=[1])
        if world.blocking:
            for attempt in retry.attempts():
                with attempt:
                    numbers.append(attempt.number)
                    if where == "inside" and attempt.number == 2:
                        break
                    raise Boom
                if attempt.number == 2:
                    break
        else:
            async for attempt in retry.attempts():
                with attempt:
                    numbers.append(attempt.number)
                    if where == "inside" and attempt.number == 2:
                        break
                    raise Boom
                if attempt.number == 2:
                    break
    assert current_context().attempt == 1
    assert numbers == [1, 2, 1, 2]


async def test_return_leaves_the_block_with_its_value(world: World, clock: FakeClock) -> None:
    """The usual way of getting a result out of it."""

    def blocking() -> str:
        for attempt in Retry(on=Boom, backoff=[0]).attempts():
            with attempt:
                if attempt.number < 3:
                    raise Boom
                return f"attempt {attempt.number}"
        raise AssertionError("a block that is left by `return` does not come here")

    async def task() -> str:
        async for attempt in Retry(on=Boom, backoff=[0]).attempts():
            with attempt:
                if attempt.number < 3:
                    raise Boom
                return f"attempt {attempt.number}"
        raise AssertionError("a block that is left by `return` does not come here")

    assert (blocking() if world.blocking else await task()) == "attempt 3"


async def test_continue_counts_as_a_success(world: World, clock: FakeClock) -> None:
    """The block has ended without an exception, so there is nothing to try again."""
    numbers: list[int] = []
    if world.blocking:
        for attempt in Retry(on=Boom).attempts():
            with attempt:
                numbers.append(attempt.number)
                continue
    else:
        async for attempt in Retry(on=Boom).attempts():
            with attempt:
                numbers.append(attempt.number)
                continue
    assert numbers == [1]


async def test_what_is_raised_between_the_blocks_is_not_held_back(world: World, clock: FakeClock) -> None:
    """Only the block itself is protected."""
    with pytest.raises(Boom, match="outside"):
        if world.blocking:
            for attempt in Retry(on=Boom, backoff=[0]).attempts():
                with attempt:
                    pass
                raise Boom("outside")
        else:
            async for attempt in Retry(on=Boom, backoff=[0]).attempts():
                with attempt:
                    pass
                raise Boom("outside")


# --- wrap ---


async def test_wrap_holds_for_a_block(world: World, clock: FakeClock) -> None:
    """`RetriesExhausted` with the last error as its cause."""
    errors = [Boom("a"), Boom("b")]
    error = await failing(world, Retry(2, on=Boom, backoff=[0], wrap=True), list(errors), RetriesExhausted)
    assert error.attempts == 2
    assert error.last == Failure(errors[1])
    assert error.__cause__ is errors[1]


# --- time ---


async def test_the_ambient_deadline_holds_for_a_block(world: World, clock: FakeClock) -> None:
    """No wait that does not fit, and the failure at hand comes out."""
    with pytest.raises(Boom) as raised, deadline(5):
        await block(world, Retry(None, on=Boom, backoff=[2]), [Boom()])
    assert clock.sleeps == [2, 2]
    assert "3 attempts" in raised.value.__notes__[0]


async def test_no_block_is_entered_when_the_deadline_is_over(world: World, clock: FakeClock) -> None:
    """`DeadlineExceeded` from the loop itself, with the name of the policy."""
    with pytest.raises(DeadlineExceeded) as raised, deadline(0):
        await block(world, Retry(name="reader"), [None])
    assert raised.value.numbers == []  # type: ignore[attr-defined]
    assert raised.value.policy == "reader"


async def test_max_elapsed_holds_for_a_block(world: World, clock: FakeClock) -> None:
    """Counted from the moment that the attempts were asked for."""
    assert (await failing(world, Retry(None, on=Boom, backoff=[2], max_elapsed=7), [Boom()], Boom)).numbers == [
        1,
        2,
        3,
        4,
    ]


def oversleep(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every wait take a minute."""

    def late(seconds: float) -> None:
        clock.advance(60)

    monkeypatch.setattr(process_clock, "sleep", late)
    monkeypatch.setattr(process_clock, "shorten", lambda seconds: late(seconds) or 0.0)


async def test_a_block_is_not_entered_when_the_deadline_passed_in_the_wait(
    world: World, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure that was held back comes out of the loop, noted; with `wrap`, what stands for it."""
    oversleep(clock, monkeypatch)
    error = Boom()

    async def main(retry: Retry) -> None:
        with deadline(5):
            await block(world, retry, [error])

    with pytest.raises(Boom) as raised:
        await main(Retry(on=Boom, backoff=[1]))
    assert raised.value is error
    assert error.numbers == [1]  # type: ignore[attr-defined]
    assert "1 attempt " in error.__notes__[0]
    with pytest.raises(RetriesExhausted) as wrapped:
        await main(Retry(on=Boom, backoff=[1], wrap=True))
    assert wrapped.value.__cause__ is error


# --- context, events, resources ---


async def test_the_block_runs_in_the_context_of_its_attempt(world: World, clock: FakeClock) -> None:
    """`current_context()` tells attempt, deadline and operation, and goes back to what it was."""
    seen: list[tuple[int, float]] = []

    with deadline(60) as outer:
        if world.blocking:
            for attempt in Retry(on=Boom, backoff=[1]).attempts():
                with attempt:
                    seen.append((current_context().attempt, current_context().deadline))
                    if attempt.number < 3:
                        raise Boom
                assert current_context() is outer
        else:
            async for attempt in Retry(on=Boom, backoff=[1]).attempts():
                with attempt:
                    seen.append((current_context().attempt, current_context().deadline))
                    if attempt.number < 3:
                        raise Boom
                assert current_context() is outer
    assert seen == [(1, 1060), (2, 1060), (3, 1060)]


async def test_on_retry_and_listeners_hear_of_a_block(world: World, clock: FakeClock) -> None:
    """The same events as for a call."""
    told: list[Any] = []
    asked: list[Any] = []
    unsubscribe = events.subscribe(told.append)
    try:
        await failing(world, Retry(2, on=Boom, backoff=[1], on_retry=asked.append), [Boom()], Boom)
    finally:
        unsubscribe()
    assert [type(event) for event in told] == [
        events.AttemptFailed,
        events.RetryScheduled,
        events.AttemptFailed,
        events.RetryGaveUp,
    ]
    assert [(event.attempt, event.delay) for event in asked] == [(1, 1)]


class Closing(Exception):
    """An error that carries a response."""

    def __init__(self) -> None:
        super().__init__()
        self.response = self
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


async def test_the_response_of_a_discarded_error_of_the_block_is_closed(world: World, clock: FakeClock) -> None:
    """The one that comes out is left to the caller."""
    errors = [Closing(), Closing()]
    await failing(world, Retry(2, on=Closing, backoff=[0]), list(errors), Closing)
    assert [error.closed for error in errors] == [1, 0]


# --- state ---


async def test_every_loop_starts_anew(world: World, clock: FakeClock) -> None:
    """One policy, many blocks; no iterator is shared."""
    retry = Retry(on=Boom, backoff=lambda: iter([1.0, 2.0, 3.0]))
    for _ in range(2):
        assert await block(world, retry, [Boom(), Boom(), None]) == [1, 2, 3]
    assert clock.sleeps == [1, 2, 1, 2]


def test_loops_inside_one_another_count_for_themselves(threads: World, clock: FakeClock) -> None:
    """Also where both are of the same policy."""
    retry = Retry(2, on=Boom, backoff=[0])
    numbers: list[tuple[int, int]] = []
    with pytest.raises(Boom):
        for outer in retry.attempts():
            with outer:
                for inner in retry.attempts():
                    with inner:
                        numbers.append((outer.number, inner.number))
                        raise Boom
    assert numbers == [(1, 1), (1, 2), (2, 1), (2, 2)]


async def test_the_error_that_was_held_back_is_let_go_of(
    world: World, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the next attempt; and it makes no cycle where it has to come out after all, because time is over."""
    watched = Watched()
    seen: list[list[str]] = []

    async def main(timeout: float) -> None:
        try:
            with deadline(timeout):
                if world.blocking:
                    for attempt in Retry(3, on=Boom, backoff=[1]).attempts():
                        seen.append(watched.alive)
                        with attempt:
                            watched.fail()
                else:
                    async for attempt in Retry(3, on=Boom, backoff=[1]).attempts():
                        seen.append(watched.alive)
                        with attempt:
                            watched.fail()
        except Boom:
            pass

    with no_collector():
        await main(60)
        assert seen == [[]] * 3
        oversleep(clock, monkeypatch)
        await main(5)
        assert seen == [[]] * 4
        assert watched.alive == []


def test_an_attempt_is_what_its_block_is_entered_with(threads: World) -> None:
    """`with attempt as it:` names it; one that is left without having been entered changes nothing."""
    for attempt in Retry().attempts():
        with attempt as entered:
            assert entered is attempt
            assert current_context().attempt == 1
    attempt = next(iter(Retry().attempts()))
    with deadline(5.0) as ctx:
        assert not attempt.__exit__(None, None, None)
        assert current_context() is ctx
