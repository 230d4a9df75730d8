"""Retry: attempts, what is retried, notes, and the outcome after the last attempt."""

from __future__ import annotations

from typing import Any

import pytest

from resilience import Context, Failure, Policy, RetriesExhausted, Retry, Success
from tests.conftest import Boom, FakeClock, Frozen, Other, Script, Watched, World, no_collector
from tests.policies.retries import Response, notes_of, run

# --- attempts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("attempts", [1, 2, 5])
async def test_attempts_is_the_number_of_calls_with_the_first(world: World, clock: FakeClock, attempts: int) -> None:
    """A wait separates two attempts; none follows the last."""
    script = Script(Boom())
    assert isinstance(await run(world, Retry(attempts, on=Boom, backoff=[1.0]), script), Boom)
    assert script.calls == attempts
    assert clock.sleeps == [1.0] * (attempts - 1)


async def test_attempts_none_has_no_limit(world: World, clock: FakeClock) -> None:
    """Attempts end when the call succeeds, or the next wait does not fit in the time left."""
    script = Script(*[Boom()] * 60, "fine")
    assert await run(world, Retry(None, on=Boom, backoff=[1.0]), script) == "fine"
    assert script.calls == 61


async def test_each_attempt_knows_its_number(world: World, clock: FakeClock) -> None:
    """`ctx.attempt` begins at 1; each attempt has a new context, with the same deadline."""
    script = Script(Boom())
    await run(world, Retry(on=Boom, backoff=[1]), script, Context(timeout=60))
    assert [(ctx.attempt, ctx.deadline) for ctx in script.contexts] == [(1, 1060), (2, 1060), (3, 1060)]
    assert len({id(ctx) for ctx in script.contexts}) == 3


# --- what is retried ---------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [False, True])
async def test_an_unhandled_error_is_raised_at_once(world: World, clock: FakeClock, wrap: bool) -> None:
    """It is unchanged, also with `wrap`, and has no note. Each failure is matched separately."""
    for steps in ([Other()], [Boom(), Other()]):
        script = Script(*steps)
        assert await run(world, Retry(5, on=Boom, backoff=[0], wrap=wrap), script) is steps[-1]
        assert script.calls == len(steps)
        assert notes_of(steps[-1]) == []


# --- bad results -------------------------------------------------------------------------------


async def test_a_result_can_be_retried(world: World, clock: FakeClock) -> None:
    """`on_result` is a predicate over results, which returns any value with a truth value; `on` is for exceptions."""
    script = Script(503, Boom(), 503, 200)
    assert await run(world, Retry(5, on=Boom, on_result=lambda status: status // 500, backoff=[1]), script) == 200
    assert clock.sleeps == [1, 1, 1]


async def test_all_results_are_good_without_on_result(threads: World, clock: FakeClock) -> None:
    """So are None, False and empty values."""
    for value in (None, False, 0, "", []):
        script = Script(value)
        assert await run(threads, Retry(on=Exception), script) is value
        assert script.calls == 1


class ErrorWithoutTruth(Exception):
    """An exception that refuses truth and comparison."""

    def __bool__(self) -> bool:
        raise TypeError("the truth of an error is ambiguous")

    def __eq__(self, other: object) -> bool:
        raise TypeError("errors cannot be compared")

    __hash__ = Exception.__hash__


async def test_the_truth_value_of_an_error_is_never_used(world: World, clock: FakeClock) -> None:
    """Nor is that of the response that it carries."""
    error = ErrorWithoutTruth()
    error.response = Response()  # type: ignore[attr-defined]
    assert await run(world, Retry(on=ErrorWithoutTruth, backoff=[0]), Script(error)) is error


# --- notes -------------------------------------------------------------------------------------


async def test_the_note_contains_the_attempts_the_time_and_the_failures(world: World, clock: FakeClock) -> None:
    """Only the exception that is raised has it."""
    errors = [Boom("first"), ConnectionError("second"), Boom("third")]
    result = await run(world, Retry(on=(Boom, ConnectionError), backoff=[2, 5]), Script(*errors))
    assert result is errors[2], "not the first one, nor a copy"
    [note] = notes_of(result)
    assert "3 attempts" in note
    assert "7 s" in note
    assert note.index("Boom(first)") < note.index("ConnectionError(second)") < note.index("Boom(third)")
    assert notes_of(errors[0]) == notes_of(errors[1]) == []


async def test_the_note_names_a_bad_result_by_its_type(threads: World, clock: FakeClock) -> None:
    """Its text may be long, or secret."""
    result = await run(threads, Retry(2, on=Boom, on_result=bool, backoff=[0]), Script(["password"], Boom()))
    [note] = notes_of(result)
    assert "list" in note
    assert "password" not in note


async def test_an_earlier_note_of_a_retry_is_replaced(threads: World, clock: FakeClock) -> None:
    """The same object may be raised again. Other notes stay in their order, also those that are no text."""
    error = Boom("again")
    error.__notes__ = [42, "first"]  # type: ignore[list-item]
    await run(threads, Retry(2, on=Boom, backoff=[0]), Script(error))
    error.add_note("second")
    await run(threads, Retry(4, on=Boom, backoff=[0]), Script(error))
    *others, ours = notes_of(error)
    assert others == [42, "first", "second"]
    assert "4 attempts" in ours


async def test_the_length_of_the_note_is_bounded(threads: World, clock: FakeClock) -> None:
    """It contains the first and the last failures, and shortens long messages."""
    script = Script(*[Boom(f"<{n}>" + "x" * 10_000) for n in range(300)])
    result = await run(threads, Retry(300, on=Boom, backoff=[0]), script)
    [note] = notes_of(result)
    assert "300 attempts" in note
    assert "<0>" in note
    assert "<299>" in note
    assert "<150>" not in note
    assert len(note) < 3000


class WithoutText(Exception):
    """An exception whose `__str__` raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class WrongNotes(Exception):
    """An exception whose `__notes__` is not a list."""

    __notes__ = "not a list"  # type: ignore[assignment]


@pytest.mark.parametrize("error", [Frozen(1), WithoutText(), WrongNotes()], ids=["frozen", "no text", "wrong notes"])
async def test_an_exception_that_takes_no_note_is_unchanged(threads: World, clock: FakeClock, error: Exception) -> None:
    """The note never masks the original error."""
    assert await run(threads, Retry(on=type(error), backoff=[0]), Script(error)) is error


# --- wrap --------------------------------------------------------------------------------------


async def test_wrap_raises_retries_exhausted(world: World, clock: FakeClock) -> None:
    """It carries the number of attempts, the last outcome and the name, and the last error as its cause."""
    errors = [Boom("first"), Boom("second")]
    result = await run(world, Retry(2, on=Boom, backoff=[0], wrap=True, name="reader"), Script(*errors))
    assert type(result) is RetriesExhausted
    assert result.attempts == 2
    assert result.last == Failure(errors[1])
    assert result.__cause__ is errors[1]
    assert result.policy == "reader"
    assert "2 attempts" in str(result)


@pytest.mark.parametrize(
    ("settings", "timeout", "step"),
    [({"attempts": 2}, None, "bad"), ({"attempts": 9}, 5, Boom()), ({"attempts": 9, "max_elapsed": 5}, None, Boom())],
    ids=["a bad result", "the deadline", "max_elapsed"],
)
async def test_wrap_raises_retries_exhausted_whatever_ends_the_attempts(
    threads: World, clock: FakeClock, settings: dict[str, Any], timeout: float | None, step: Any
) -> None:
    """Without `wrap`, the last result is returned."""
    retry = Retry(on=Boom, on_result=bool, backoff=[3], wrap=True, **settings)
    result = await run(threads, retry, Script(step), Context(timeout=timeout))
    assert type(result) is RetriesExhausted
    assert (result.last, result.attempts) == (Success(step) if step == "bad" else Failure(step), 2)


async def test_failures_contains_each_failure_although_they_are_the_same_object(world: World, clock: FakeClock) -> None:
    """Here an inner policy fails before the function is called."""

    class Refusing(Policy[Any]):
        error = Boom("closed")

        async def around(self, call: Any, ctx: Context) -> Any:
            raise self.error

    ctx = Context()
    script = Script("never")
    await run(world, Policy.wrap(Retry(4, on=Boom, backoff=[1]), Refusing()), script, ctx)
    assert [str(failed) for failed in ctx.failures] == ["Boom(closed)"] * 4
    assert (script.calls, ctx.attempts) == (0, 0)


# --- state is per execution --------------------------------------------------------------------


async def test_a_retry_can_be_nested_in_itself(world: World, clock: FakeClock) -> None:
    """The inner execution counts its own attempts."""
    retry = Retry(2, on=Boom, backoff=lambda: iter([1.0, 9.0]))
    inner = Script(Boom())

    async def outer(ctx: Context) -> None:
        await world.execute(retry, inner.function())

    await world.attempt(retry, outer)
    assert [ctx.attempt for ctx in inner.contexts] == [1, 2, 1, 2]
    assert clock.sleeps == [1.0] * 3


async def test_only_the_last_error_is_kept_during_the_next_attempt(world: World, clock: FakeClock) -> None:
    """It would be the context of a refusal. The frames of earlier errors are released."""
    watched = Watched()
    counts: list[int] = []

    async def fn(ctx: Context) -> None:
        counts.append(watched.alive.count("Boom"))
        if ctx.attempt < 5:
            watched.fail()

    with no_collector():
        await world.execute(Retry(5, on=Boom, backoff=[0]), fn)
    assert counts == [0, 1, 1, 1, 1]
