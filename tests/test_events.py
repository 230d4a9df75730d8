"""Events: each kind with its numbers, and the calls of the function."""

from __future__ import annotations

import asyncio
import gc
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Never

import pytest

from resilience import (
    AdaptiveLimit,
    Bulkhead,
    BulkheadFull,
    Cache,
    Call,
    Chaos,
    CircuitBreaker,
    CircuitOpen,
    CircuitState,
    Context,
    DeadlineExceeded,
    Failure,
    Fallback,
    Hedge,
    Policy,
    Retry,
    Success,
    Timeout,
    events,
)
from tests.conftest import Boom, FakeClock, Script, World
from tests.listening import KINDS, facts, kinds, retry_without_budget
from tests.streams.sources import Source, streamed

# --- each kind with its numbers ----------------------------------------------------------------


async def test_a_retry_tells_of_each_failure_each_wait_and_its_end(
    world: World, clock: FakeClock, heard: list[Any]
) -> None:
    """In this order, with the numbers of each."""
    boom = Boom("no")
    retry = Retry(2, on=Boom, backoff=[1.5], name="r")
    began = clock.now()

    async def fn(ctx: Context) -> None:
        clock.advance(0.25)
        raise boom

    assert await world.attempt(retry, fn, Context(operation="op", properties={"a": 1})) is boom
    common = {"policy": "r", "operation": "op", "properties": {"a": 1}, "pipeline": "r"}
    failed, ended = Failure(boom), {"cancelled_by": None, "items": None}
    assert [(type(event), facts(event)) for event in heard] == [
        (events.AttemptFailed, {**common, "time": began + 0.25, "attempt": 1, "outcome": failed, "elapsed": 0.25}),
        (events.RetryScheduled, {**common, "time": began + 0.25, "attempt": 1, "delay": 1.5, "outcome": failed}),
        (events.AttemptFailed, {**common, "time": began + 2.0, "attempt": 2, "outcome": failed, "elapsed": 2.0}),
        (
            events.RetryGaveUp,
            {**common, "time": began + 2.0, "attempts": 2, "elapsed": 2.0, "outcome": failed, "reason": "attempts"},
        ),
        (
            events.ExecutionFinished,
            {**common, "time": began + 2.0, "attempts": 2, "elapsed": 2.0, "outcome": failed, **ended},
        ),
    ]


async def test_a_retry_tells_of_a_result_that_was_not_good_enough(
    world: World, clock: FakeClock, heard: list[Any]
) -> None:
    """As the `Success` that it was."""
    retry = Retry(2, on_result=lambda result: result == "bad", backoff=[0])
    assert await world.execute(retry, Script("bad").function()) == "bad"
    assert [event.outcome for event in heard] == [Success("bad")] * 5


async def test_a_timeout_tells_whether_it_limits_an_attempt_or_the_total(world: World, heard: list[Any]) -> None:
    """By where it stands: inside a Retry there is a limit for each attempt."""

    async def hang(ctx: Context) -> None:
        await world.hang()

    each, total, alone = Timeout(0.01), Timeout(0.03), Timeout(0.01)

    await world.attempt(Policy.wrap(Timeout(5.0), Retry(2, backoff=[0]), each, name="p"), hang)
    await world.attempt(Policy.wrap(total, Retry(2), Timeout(5.0), name="p"), hang)
    await world.attempt(alone, hang)
    told = [(event.pipeline, event.scope) for event in heard if isinstance(event, events.TimedOut)]
    assert told == [("p", "attempt"), ("p", "attempt"), ("p", "total"), ("Timeout", "total")]


class HandingOn(Policy[Never]):
    """Hands its call on to another policy."""

    def __init__(self, other: Policy[Any]) -> None:
        self._other = other

    async def around(self, call: Call[Any], ctx: Context) -> Any:
        return await self._other.around(call, ctx)


async def test_a_timeout_whose_place_is_not_known_says_nothing_of_what_it_limits(
    world: World, heard: list[Any]
) -> None:
    """Another policy handed its call on to it, outside of a Retry or inside; or it stands in both places."""

    async def hang(ctx: Context) -> None:
        await world.hang()

    twice = Timeout(0.01)
    for policy in (
        HandingOn(Timeout(0.01)),
        HandingOn(Timeout(0.01)).wrap(Retry(1)),
        Retry(1).wrap(HandingOn(Timeout(0.01))),
        HandingOn(Retry(1).wrap(Timeout(0.01))),
        twice.wrap(Retry(1), twice),
    ):
        heard.clear()
        await world.attempt(policy, hang)
        (timed_out,) = [event for event in heard if isinstance(event, events.TimedOut)]
        assert (timed_out.pipeline, timed_out.scope) == (policy.name, None)


async def test_an_event_names_the_pipeline_although_no_record_is_kept(world: World) -> None:
    """Only a listener for `ExecutionFinished` or `CallFinished`, or a pipeline's own, makes an execution keep one."""
    seen: list[Any] = []
    unsubscribe = events.subscribe(seen.append, events.TimedOut)

    async def hang(ctx: Context) -> None:
        await world.hang()

    await world.attempt(Timeout(0.01, name="alone"), hang)
    await world.attempt(Policy.wrap(Retry(1), Timeout(0.01), name="p"), hang)
    unsubscribe()
    assert [(event.pipeline, event.scope) for event in seen] == [("alone", "total"), ("p", "attempt")]


async def test_a_circuit_tells_of_its_changes_and_of_the_calls_that_it_refuses(
    world: World, clock: FakeClock, heard: list[Any]
) -> None:
    """Once each, in order, with the failure that opened it as text."""
    breaker = CircuitBreaker(2, open_for=30.0, name="db")

    began = clock.now()
    for step in (Boom("one"), Boom("two"), "refused"):
        await world.attempt(breaker, Script(step).function(), Context(operation="op"))
        clock.advance(10.0)
    clock.advance(10.0)
    fine = Script("fine").function()
    await world.attempt(breaker, fine)
    told = [(type(event), facts(event)) for event in heard if not isinstance(event, events.ExecutionFinished)]
    common = {"policy": "db", "properties": {}, "pipeline": "db"}
    closed, opened, half = CircuitState.CLOSED, CircuitState.OPEN, CircuitState.HALF_OPEN
    why = "Boom: two"

    def changed(operation: str, after: float, **numbers: Any) -> tuple[type, dict[str, Any]]:
        return events.CircuitChanged, {**common, "operation": operation, "time": began + after, **numbers}

    assert told == [
        changed(
            "op",
            10.0,
            old=closed,
            new=opened,
            retry_after=30.0,
            last_failure=why,
            failure_type="Boom",
            reason="failures 2 of 2; the last failure was Boom",
            counted=events.TripCount("failures", 2, 2),
        ),
        (
            events.CallRejected,
            {
                **common,
                "operation": "op",
                "time": began + 20.0,
                "reason": "CircuitOpen",
                "retry_after": 20.0,
                "waited": 0.0,
                "shadow": False,
            },
        ),
        changed(
            fine.__qualname__,
            40.0,
            old=opened,
            new=half,
            retry_after=None,
            last_failure=why,
            failure_type="Boom",
            reason="the 30 s of the open period have passed",
            counted=None,
        ),
        changed(
            fine.__qualname__,
            40.0,
            old=half,
            new=closed,
            retry_after=None,
            last_failure=None,
            failure_type=None,
            reason="probes succeeded, 1 of 1",
            counted=None,
        ),
    ]


async def test_a_bulkhead_tells_of_the_calls_that_it_turns_away(world: World, heard: list[Any]) -> None:
    """With no time to come back at: nobody can tell."""
    bulkhead = Bulkhead(1, name="pool")

    async def outer(ctx: Context) -> object:
        return await world.attempt(bulkhead, Script("never").function())

    assert isinstance(await world.execute(bulkhead, outer, Context(operation="op")), BulkheadFull)
    [rejected] = [event for event in heard if isinstance(event, events.CallRejected)]
    assert facts(rejected) == {
        "policy": "pool",
        "operation": "op",
        "time": rejected.time,
        "properties": {},
        "pipeline": "pool",
        "reason": "BulkheadFull",
        "retry_after": None,
        "waited": 0.0,
        "shadow": False,
    }


# --- the end of an execution -------------------------------------------------------------------


async def test_the_end_of_an_execution_is_told_with_its_outcome(
    world: World, clock: FakeClock, heard: list[Any]
) -> None:
    """Once for a success and once for a failure, last of all, named for the outermost policy."""
    boom = Boom("no")
    pipeline = Policy.wrap(Retry(3, on=Boom, backoff=[2.0]), Timeout(60.0), name="users")

    await world.attempt(pipeline, Script(Boom(), "fine").function(), Context(operation="op"))
    fails = Script(boom).function()
    await world.attempt(pipeline, fails)
    finished = [event for event in heard if isinstance(event, events.ExecutionFinished)]
    assert heard[-1] is finished[-1]
    assert [(it.policy, it.operation, it.attempts, it.elapsed, it.outcome) for it in finished] == [
        ("users", "op", 2, 2.0, Success("fine")),
        ("users", fails.__qualname__, 3, 4.0, Failure(boom)),
    ]


async def test_a_plain_policy_is_an_execution_as_well(world: World, heard: list[Any]) -> None:
    """Named by its name, or that of its class."""
    await world.execute(Retry(), Script(1).function())
    await world.execute(Retry(name="r"), Script(2).function())
    assert [(event.policy, event.attempts, event.outcome) for event in heard] == [
        ("Retry", 1, Success(1)),
        ("r", 1, Success(2)),
    ]


async def test_a_nested_execution_is_told_as_one_of_its_own(world: World, heard: list[Any]) -> None:
    """It ends before the one around it."""

    async def outer(ctx: Context) -> Any:
        return await world.execute(Retry(name="inner"), Script("fine").function())

    await world.execute(Retry(name="outer"), outer)
    assert [event.policy for event in heard] == ["inner", "outer"]


# --- each call of the function -----------------------------------------------------------------


@pytest.fixture
def calls() -> Iterator[list[Any]]:
    """Every call of a function, while the test runs."""
    seen: list[Any] = []
    unsubscribe = events.subscribe(seen.append, events.CallFinished)
    yield seen
    unsubscribe()


async def test_each_call_of_the_function_is_told_to_who_asks_for_it(
    world: World, clock: FakeClock, calls: list[Any]
) -> None:
    """With its number, how long it took, how much time it had, and how it ended."""
    boom = Boom()
    steps = iter([boom, "fine"])

    async def fn(ctx: Context) -> object:
        clock.advance(0.25)
        if isinstance(step := next(steps), Exception):
            raise step
        return step

    pipeline = Policy.wrap(Retry(on=Boom, backoff=[1.0]), name="p")
    quiet = Policy.wrap(Retry(on=Boom), name="quiet")

    await world.execute(pipeline, fn, Context(timeout=5.0, operation="op", properties={"a": 1}))
    await world.execute(quiet, Script("fine").function())
    common = {
        "policy": "p",
        "operation": "op",
        "properties": {"a": 1},
        "pipeline": "p",
        "elapsed": 0.25,
        "cancelled_by": None,
    }
    assert [facts(event) for event in calls[:2]] == [
        {**common, "time": 1000.25, "attempt": 1, "remaining": 5.0, "outcome": Failure(boom)},
        {**common, "time": 1001.5, "attempt": 2, "remaining": 3.75, "outcome": Success("fine")},
    ]
    assert [(event.pipeline, event.remaining) for event in calls[2:]] == [("quiet", float("inf"))]


async def test_a_call_that_was_cut_off_has_no_outcome(world: World, calls: list[Any]) -> None:
    """And took as long as its caller waited for it."""

    async def hang(ctx: Context) -> None:
        await world.hang()

    await world.attempt(Timeout(0.2), hang)
    [call] = calls
    assert call.outcome is None
    assert 0.05 < call.elapsed < 5


@pytest.mark.parametrize(
    ("error", "timeout", "by"),
    [
        (KeyboardInterrupt(), 0.0, "interrupt"),
        (SystemExit(), None, "interrupt"),
        (GeneratorExit(), None, "closed"),
        (asyncio.CancelledError(), 0.0, "deadline"),
        (asyncio.CancelledError(), 5.0, "caller"),
        (asyncio.CancelledError(), None, "caller"),
    ],
)
def test_what_was_cancelled_says_by_whom(
    threads: World, heard: list[Any], calls: list[Any], error: BaseException, timeout: float | None, by: str
) -> None:
    """As far as that can be known: an interrupt, a deadline that has passed, or else the caller."""

    def fn(ctx: Context) -> None:
        raise error

    with pytest.raises(type(error)):
        Fallback("x").execute(fn, Context(timeout=timeout))
    [finished] = heard
    [call] = calls
    assert (finished.outcome, finished.cancelled_by) == (None, by)
    assert (call.outcome, call.cancelled_by) == (None, by)


def test_a_function_that_is_not_entered_is_no_call(
    threads: World, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused in front of it, by a policy or because too many workers hang."""
    breaker = CircuitBreaker()
    breaker.isolate()
    breaker.capture(lambda ctx: "never")
    monkeypatch.setattr(Timeout, "max_abandoned", 0)
    Timeout(5.0).capture(lambda ctx: "never")
    assert calls == []


async def test_listeners_that_did_not_ask_hear_of_no_call(world: World, calls: list[Any]) -> None:
    """Neither those of a pipeline nor those for every kind, while somebody else does."""
    own: list[Any] = []
    everything: list[Any] = []
    unsubscribe = events.subscribe(everything.append)
    pipeline = Policy.wrap(Retry(), listeners=[own.append])

    await world.execute(pipeline, Script("fine").function())
    unsubscribe()
    assert (len(calls), kinds(own), kinds(everything)) == (1, [events.ExecutionFinished], [events.ExecutionFinished])


async def test_when_no_listener_is_left_calls_are_made_as_before(world: World) -> None:
    """With nothing more around the function than there was before the first listener came."""
    frames: list[int] = []

    async def fn(ctx: Context) -> None:
        frames.append(sum(1 for _ in traceback.walk_stack(None)))

    retry = Retry()

    await world.execute(retry, fn)
    unsubscribe = events.subscribe(lambda event: None, events.CallFinished)
    await world.execute(retry, fn)
    unsubscribe()
    await world.execute(retry, fn)
    before, during, *after = frames
    assert during > before
    assert after == [before]


async def test_an_execution_that_had_begun_before_tells_of_no_call(world: World) -> None:
    """And one that ends after the last listener has left does so in peace."""
    seen: list[Any] = []
    endings: list[Callable[[], None]] = []

    async def fn(ctx: Context) -> str:
        if not endings:
            endings.append(events.subscribe(seen.append, events.CallFinished))
            raise Boom
        endings.pop()()
        return "fine"

    assert await world.execute(Retry(2, on=Boom, backoff=[0]), fn) == "fine"
    assert seen == []


# --- nobody listens ----------------------------------------------------------------------------


async def test_no_event_is_built_while_nobody_listens(
    world: World, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of any kind, also where everything fails."""
    built: list[str] = []
    gc.collect()  # events that others have kept
    monkeypatch.setattr(events.Event, "__del__", lambda event: built.append(type(event).__name__), raising=False)
    breaker = CircuitBreaker(2, open_for=60.0)
    full = Bulkhead(1)
    chaos = Chaos(result="x")
    cache = Cache(60, key=lambda ctx: "same", keep_errors=Boom)
    pipeline = Fallback("x").wrap(Retry(on=(Boom, CircuitOpen), backoff=[0]), breaker, Timeout(60.0))

    async def main() -> None:
        for _ in range(3):
            await world.execute(pipeline, Script(Boom()).function())
        breaker.close()
        await world.attempt(Timeout(60.0), Script("never").function(), Context(timeout=0))
        await world.attempt(retry_without_budget(), Script(Boom()).function())
        await world.attempt(Hedge(0.01, on=Boom, eager=True), Script(Boom()).function())

        async def outer(ctx: Context) -> None:
            assert isinstance(await world.attempt(full, Script("never").function()), BulkheadFull)

        await world.execute(full, outer)
        await world.execute(AdaptiveLimit(60, initial=1, min_samples=1), Script("fine").function())
        with chaos.injecting(rate=1.0):
            await world.execute(chaos, Script("never").function())
        cache.clear()
        for _ in range(2):
            await world.attempt(cache, Script(Boom()).function())
        await streamed(world, Retry(), Source(world, [1])).all()

    await main()
    assert built == []
    unsubscribe = events.subscribe(lambda event: None)
    await main()
    unsubscribe()
    assert set(built) == {kind.__name__ for kind in KINDS}, "the trap would have noticed each kind"


async def test_only_the_kinds_that_somebody_hears_are_built(
    world: World, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener for one kind does not make the others cost."""
    monkeypatch.setattr(events.AttemptFailed, "__init__", None)
    monkeypatch.setattr(events.ExecutionFinished, "__init__", None)
    seen: list[Any] = []
    unsubscribe = events.subscribe(seen.append, events.RetryScheduled)

    try:
        assert isinstance(await world.attempt(Retry(2, on=Boom, backoff=[0]), Script(Boom()).function()), Boom)
    finally:
        unsubscribe()
    assert kinds(seen) == [events.RetryScheduled]


async def test_the_errors_of_deadlines_are_told_like_others(world: World, heard: list[Any]) -> None:
    """An execution whose budget is used up fails with `DeadlineExceeded`, and that is its outcome."""
    await world.attempt(Retry(), Script("never").function(), Context(timeout=0))
    [finished] = heard
    assert isinstance(finished.outcome.error, DeadlineExceeded)
    assert finished.attempts == 0
