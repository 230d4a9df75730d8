"""Events: the fields of each kind, the end of executions, and the calls of the function."""

from __future__ import annotations

import asyncio
import gc
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from resilience import Bulkhead, CircuitBreaker, CircuitState, Context, Fallback, Policy, Retry, Timeout, events
from resilience.errors import DeadlineExceeded
from resilience.outcome import Failure, Success
from resilience.testing import recording
from tests.conftest import Boom, FakeClock, Script, World
from tests.custom import HandingOn
from tests.functions import raising
from tests.listening import KINDS, every_kind, facts, kinds
from tests.streams.sources import Source, streamed

# --- the fields of each kind ---


async def test_a_retry_reports_each_failure_delay_and_its_end(world: World, clock: FakeClock, heard: list[Any]) -> None:
    boom = Boom("no")
    retry = Retry(2, on=Boom, backoff=[1.5], name="r")
    began = clock.now()
    fn = Script(boom, doing=lambda ctx: clock.advance(0.25)).function()
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


async def test_a_retry_reports_a_bad_result_as_a_success(world: World, clock: FakeClock, heard: list[Any]) -> None:
    retry = Retry(2, on_result=lambda result: result == "bad", backoff=[0])
    assert await world.execute(retry, Script("bad").function()) == "bad"
    assert [event.outcome for event in heard] == [Success("bad")] * 5


async def test_a_timeout_reports_whether_it_limits_an_attempt_or_the_total(world: World) -> None:
    """Inside a Retry it limits each attempt, also if another policy is between them."""
    heard: list[Any] = []
    each, total = Timeout(0.01), Timeout(0.03)
    pipeline = partial(Policy.wrap, name="p", listeners=[heard.append])
    await world.attempt(pipeline(Timeout(5.0), Retry(2, backoff=[0]), Bulkhead(1), each), world.hang)
    await world.attempt(pipeline(total, Retry(2), Timeout(5.0)), world.hang)
    timed_out = [(event.pipeline, event.scope) for event in heard if isinstance(event, events.TimedOut)]
    assert timed_out == [("p", "attempt"), ("p", "attempt"), ("p", "total")]


async def test_a_timeout_at_an_unknown_or_ambiguous_place_reports_no_scope(world: World, heard: list[Any]) -> None:
    """Another policy passed its call on to it, outside or inside of a Retry; or it is at both places."""
    twice = Timeout(0.01)
    for policy in (
        HandingOn(Timeout(0.01)),
        HandingOn(Timeout(0.01)).wrap(Retry(1)),
        Retry(1).wrap(HandingOn(Timeout(0.01))),
        HandingOn(Retry(1).wrap(Timeout(0.01))),
        twice.wrap(Retry(1), twice),
    ):
        heard.clear()
        await world.attempt(policy, world.hang)
        (timed_out,) = [event for event in heard if isinstance(event, events.TimedOut)]
        assert (timed_out.pipeline, timed_out.scope) == (policy.name, None)


async def test_an_event_names_the_pipeline_although_the_execution_keeps_no_record(world: World) -> None:
    """Only listeners of a pipeline, or for `ExecutionFinished` or `CallFinished`, make an execution keep a record."""
    with recording(events.TimedOut) as recorder:
        await world.attempt(Timeout(0.01, name="alone"), world.hang)
        await world.attempt(Policy.wrap(Retry(1), Timeout(0.01), name="p"), world.hang)
    reported = [(event.pipeline, event.scope) for event in recorder.of(events.TimedOut)]
    assert reported == [("alone", "total"), ("p", "attempt")]


async def test_a_circuit_reports_its_changes_and_refusals(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """Each once, in order, with the failure that opened it as text."""
    breaker = CircuitBreaker(2, open_for=30.0, name="db")
    began = clock.now()
    for step in (Boom("one"), Boom("two"), "refused"):
        await world.attempt(breaker, Script(step).function(), Context(operation="op", properties={"a": 1}))
        clock.advance(10.0)
    clock.advance(10.0)
    fine = Script("fine").function()
    await world.attempt(breaker, fine)
    common = {"policy": "db", "pipeline": "db"}
    closed, opened, half = CircuitState.CLOSED, CircuitState.OPEN, CircuitState.HALF_OPEN
    names = "operation properties time old new retry_after last_failure failure_type reason counted".split()
    tripped = "failures 2 of 2; the last failure was Boom", events.TripCount("failures", 2, 2)
    waited, probed = "the 30 s of the open period have passed", "probes succeeded, 1 of 1"
    changes = [
        ("op", {"a": 1}, began + 10.0, closed, opened, 30.0, "Boom: two", "Boom", *tripped),
        (fine.__qualname__, {}, began + 40.0, opened, half, None, "Boom: two", "Boom", waited, None),
        (fine.__qualname__, {}, began + 40.0, half, closed, None, None, None, probed, None),
    ]
    refusal = {"operation": "op", "properties": {"a": 1}, "reason": "CircuitOpen", "retry_after": 20.0}
    changed = [(events.CircuitChanged, {**common, **dict(zip(names, row, strict=True))}) for row in changes]
    refused = (events.CallRejected, {**common, **refusal, "time": began + 20.0, "waited": 0.0, "shadow": False})
    reported = [(type(event), facts(event)) for event in heard if not isinstance(event, events.ExecutionFinished)]
    assert reported == [changed[0], refused, *changed[1:]]


# --- the end of an execution -------------------------------------------------------------------


async def test_a_nested_execution_is_reported_before_the_outer_one(world: World, heard: list[Any]) -> None:
    async def outer(ctx: Context) -> Any:
        return await world.execute(Retry(name="inner"), Script("fine").function())

    await world.execute(Retry(name="outer"), outer)
    assert [event.policy for event in heard] == ["inner", "outer"]


# --- each call of the function -----------------------------------------------------------------


@pytest.fixture
def calls() -> Iterator[list[Any]]:
    """Collect every call of a function during the test."""
    with recording(events.CallFinished) as recorder:
        yield recorder.events


async def test_each_call_is_reported_to_listeners_of_calls(world: World, clock: FakeClock, calls: list[Any]) -> None:
    """With its attempt, duration, remaining time and outcome."""
    boom = Boom()
    steps = iter([boom, "fine"])

    async def fn(ctx: Context) -> object:
        clock.advance(0.25)
        if isinstance(step := next(steps), Exception):
            raise step
        return step

    pipeline = Policy.wrap(Retry(on=Boom, backoff=[1.0]), name="p")
    other = Policy.wrap(Retry(on=Boom), name="other")
    await world.execute(pipeline, fn, Context(timeout=5.0, operation="op", properties={"a": 1}))
    await world.execute(other, Script("fine").function())
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
    assert [(event.pipeline, event.remaining) for event in calls[2:]] == [("other", float("inf"))]


async def test_a_call_that_was_cut_off_is_reported_without_an_outcome(world: World, calls: list[Any]) -> None:
    """Its duration is the time its caller waited."""
    await world.attempt(Timeout(0.2), world.hang)
    [call] = calls
    assert call.outcome is None
    assert 0.05 < call.elapsed < 5


@pytest.mark.parametrize(
    ("error", "timeout", "cause"),
    [
        (KeyboardInterrupt(), 0.0, "interrupt"),
        (SystemExit(), None, "interrupt"),
        (GeneratorExit(), None, "closed"),
        (asyncio.CancelledError(), 0.0, "deadline"),
        (asyncio.CancelledError(), 5.0, "caller"),
        (asyncio.CancelledError(), None, "caller"),
    ],
)
def test_a_cancelled_execution_reports_the_cause(
    threads: World, heard: list[Any], calls: list[Any], error: BaseException, timeout: float | None, cause: str
) -> None:
    """As far as it can be known: an interrupt, an exceeded deadline, or else the caller."""
    with pytest.raises(type(error)):
        Fallback("x").execute(raising(error), Context(timeout=timeout))
    [finished] = heard
    [call] = calls
    assert (finished.outcome, finished.cancelled_by) == (None, cause)
    assert (call.outcome, call.cancelled_by) == (None, cause)


def test_a_function_not_entered_is_no_call(threads: World, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Because a policy refused it, or too many abandoned workers still run."""
    breaker = CircuitBreaker()
    breaker.isolate()
    breaker.capture(lambda ctx: "never")
    monkeypatch.setattr(Timeout, "max_abandoned", 0)
    Timeout(5.0).capture(lambda ctx: "never")
    assert calls == []


async def test_listeners_that_did_not_ask_for_calls_get_none(world: World, calls: list[Any]) -> None:
    """Neither those of a pipeline nor those for every kind, although another listener gets them."""
    own: list[Any] = []
    pipeline = Policy.wrap(Retry(), listeners=[own.append])
    with recording() as everything:
        await world.execute(pipeline, Script("fine").function())
    assert (len(calls), kinds(own), everything.kinds) == (1, [events.ExecutionFinished], [events.ExecutionFinished])


async def test_after_the_last_listener_unsubscribed_calls_cost_nothing_extra(world: World) -> None:
    """The function runs as few frames deep as before the first one subscribed."""
    frames: list[int] = []

    async def fn(ctx: Context) -> None:
        frames.append(sum(1 for _ in traceback.walk_stack(None)))

    retry = Retry()
    await world.execute(retry, fn)
    with recording(events.CallFinished):
        await world.execute(retry, fn)
    await world.execute(retry, fn)
    before, during, *after = frames
    assert during > before
    assert after == [before]


async def test_an_execution_that_began_before_the_subscription_reports_no_call(world: World) -> None:
    """And one that ends after the last listener unsubscribed is not disturbed."""
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


# --- without listeners ---


async def test_no_event_is_built_without_a_listener(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any kind, even if everything fails."""
    built: list[str] = []
    gc.collect()  # events that other tests left
    monkeypatch.setattr(events.Event, "__del__", lambda event: built.append(type(event).__name__), raising=False)

    async def main() -> None:
        for policy in every_kind():
            await world.attempt(policy, Script(Boom()).function())
        await streamed(world, Retry(), Source(world, [1])).all()

    await main()
    assert built == []
    with recording():
        await main()
    assert set(built) == {kind.__name__ for kind in KINDS}, "the patch does not notice each kind"


async def test_only_subscribed_kinds_are_built(world: World, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events.AttemptFailed, "__init__", None)
    monkeypatch.setattr(events.ExecutionFinished, "__init__", None)
    with recording(events.RetryScheduled) as recorder:
        assert isinstance(await world.attempt(Retry(2, on=Boom, backoff=[0]), Script(Boom()).function()), Boom)
    assert recorder.kinds == [events.RetryScheduled]


async def test_an_exceeded_deadline_is_reported_as_the_outcome(world: World, heard: list[Any]) -> None:
    await world.attempt(Retry(), Script("never").function(), Context(timeout=0))
    [finished] = heard
    assert isinstance(finished.outcome.error, DeadlineExceeded)
    assert finished.attempts == 0
