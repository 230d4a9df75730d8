"""Retry: attempts, what is tried again, and what comes out when they are used up."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from resilience import Context, Failure, Policy, RetriesExhausted, Retry, Success
from tests.conftest import Boom, FakeClock, Script, World, no_collector
from tests.policies.retries import Other, Response, bad, notes_of, run

# --- attempts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("attempts", [1, 2, 5])
async def test_attempts_count_calls_the_first_one_included(world: World, clock: FakeClock, attempts: int) -> None:
    """There is a wait between two attempts, and none after the last one."""
    script = Script(Boom())
    assert isinstance(await run(world, Retry(attempts, on=Boom, backoff=[1.0]), script), Boom)
    assert script.calls == attempts
    assert clock.sleeps == [1.0] * (attempts - 1)


async def test_no_number_of_attempts_means_as_many_as_time_allows(world: World, clock: FakeClock) -> None:
    """`attempts=None` goes on until the call succeeds, or the next wait does not fit."""
    script = Script(*[Boom()] * 60, "fine")
    assert await run(world, Retry(None, on=Boom, backoff=[1.0]), script) == "fine"
    assert script.calls == 61


async def test_each_attempt_knows_its_number(world: World, clock: FakeClock) -> None:
    """`ctx.attempt` is 1 for the first; the context itself is a new one each time."""
    script = Script(Boom())
    await run(world, Retry(on=Boom, backoff=[0]), script)
    assert [ctx.attempt for ctx in script.contexts] == [1, 2, 3]
    assert len({id(ctx) for ctx in script.contexts}) == 3


# --- what is tried again -----------------------------------------------------------------------


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


# --- results that are not good enough ----------------------------------------------------------


async def test_a_result_may_be_tried_again(world: World, clock: FakeClock) -> None:
    """`on_result` is a predicate over the value; exceptions go by `on` as ever."""
    script = Script(503, Boom(), 503, 200)
    assert await run(world, Retry(5, on=Boom, on_result=lambda status: status >= 500, backoff=[1]), script) == 200
    assert clock.sleeps == [1, 1, 1]


async def test_results_are_good_unless_told_otherwise(world: World, clock: FakeClock) -> None:
    """None, False and empty things are results like any other."""
    for value in (None, False, 0, "", []):
        script = Script(value)
        assert await run(world, Retry(on=Exception), script) is value
        assert script.calls == 1


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


# --- notes -------------------------------------------------------------------------------------


async def test_one_note_says_how_many_attempts_in_what_time_and_what_failed(world: World, clock: FakeClock) -> None:
    """On the exception that comes out, and on no other."""
    errors = [Boom("first"), ConnectionError("second"), Boom("third")]
    result = await run(world, Retry(on=(Boom, ConnectionError), backoff=[2, 5]), Script(*errors))
    assert result is errors[2], "and neither the first, nor a copy"
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


# --- wrap --------------------------------------------------------------------------------------


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


# --- state is per execution --------------------------------------------------------------------


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


async def test_a_retry_may_be_used_inside_itself(world: World, clock: FakeClock) -> None:
    """Re-entrance: the inner execution counts for itself."""
    retry = Retry(2, on=Boom, backoff=lambda: iter([1.0, 9.0]))
    inner = Script(Boom())

    async def outer(ctx: Context) -> None:
        await world.execute(retry, inner.function())

    await world.attempt(retry, outer)
    assert [ctx.attempt for ctx in inner.contexts] == [1, 2, 1, 2]
    assert clock.sleeps == [1.0] * 3


async def test_only_the_last_error_is_kept_while_the_next_attempt_runs(world: World, clock: FakeClock) -> None:
    """A refusal would have it as its context. Attempts that go on for hours do not pile up the others' frames."""
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
    assert counts == [0, 1, 1, 1, 1]
