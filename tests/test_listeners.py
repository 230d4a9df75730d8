"""Listeners: who gets which events, in which order, and what listeners may do."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from resilience import CircuitBreaker, CircuitState, Context, Fallback, Policy, Retry, Timeout, events
from resilience.testing import script
from tests.callers import in_threads
from tests.conftest import Boom, FakeClock, Script, World
from tests.custom import HandingOn
from tests.functions import raising
from tests.listening import ASKED_FOR, KINDS, every_kind, everything, facts, fails, kinds

# --- subscribing -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_unsubscribing_ends_only_its_own_subscription(kind: type[events.Event]) -> None:
    """The same listener may be subscribed twice; unsubscribing again has no effect."""
    seen: list[Any] = []

    def count() -> int:
        seen.clear()
        everything()
        assert all(type(event) is kind for event in seen)
        return len(seen)

    first = events.subscribe(seen.append, kind)
    once = count()
    second = events.subscribe(seen.append, kind)
    assert once > 0
    assert count() == 2 * once
    first()
    first()
    assert count() == once
    second()
    assert count() == 0


def test_a_kind_that_is_named_twice_is_reported_once() -> None:
    seen: list[Any] = []
    unsubscribe = events.subscribe(seen.append, events.CircuitChanged, events.CircuitChanged)
    CircuitBreaker().isolate()
    unsubscribe()
    assert len(seen) == 1


def interrupting(number: int, finalizer: Callable[[], object]) -> Callable[..., None]:
    """Return a profile function that runs a finalizer at the nth call, as the garbage collector may at any."""
    left = [number]

    def profile(frame: FrameType, what: str, argument: object) -> None:
        left[0] -= 1
        if left[0] == 0:  # the profile function stays installed: removing it here may crash CPython 3.11
            finalizer()

    return profile


def test_a_finalizer_may_subscribe_during_a_subscription() -> None:
    """In the same thread, at any call: both listeners get the next event once, and both can unsubscribe."""
    for number in range(1, 40):
        subscribe_during_a_subscription(number)


def subscribe_during_a_subscription(number: int) -> None:
    seen: list[str] = []
    endings: list[Callable[[], None]] = []

    def subscribe(name: str) -> None:
        endings.append(events.subscribe(lambda event: seen.append(name), events.CircuitChanged))

    sys.setprofile(interrupting(number, lambda: subscribe("finalizer")))
    try:
        subscribe("caller")
    finally:
        sys.setprofile(None)
    CircuitBreaker().isolate()
    assert sorted(seen) == (["caller"] if len(endings) == 1 else ["caller", "finalizer"])
    sys.setprofile(interrupting(number, endings[0]))
    try:
        endings[-1]()
    finally:
        sys.setprofile(None)
    endings[0]()
    seen.clear()
    CircuitBreaker().isolate()
    assert seen == []


async def test_after_unsubscribing_a_listener_gets_nothing_more(world: World) -> None:
    """Not even the remaining events of the current execution."""
    seen: list[Any] = []
    unsubscribe = events.subscribe(seen.append)
    fn = Script(Boom(), doing=lambda ctx: unsubscribe()).function()
    await world.attempt(Fallback("x").wrap(Retry(on=Boom, backoff=[0])), fn)
    assert seen == []


def test_a_subscription_made_in_a_listener_begins_with_the_next_event() -> None:
    """Listeners run outside every lock."""
    seen: list[Any] = []
    endings: list[Callable[[], None]] = []

    def listener(event: events.CircuitChanged) -> None:
        endings.pop()()
        endings.append(events.subscribe(seen.append, events.CircuitChanged))

    endings.append(events.subscribe(listener, events.CircuitChanged))
    breaker = CircuitBreaker()
    breaker.isolate()
    breaker.close()
    endings.pop()()
    assert [event.new for event in seen] == [CircuitState.CLOSED]


def test_many_threads_can_subscribe_and_unsubscribe_at_once() -> None:
    """No subscription is lost, and none is left."""
    counts: list[int] = []

    def churn() -> None:
        seen: list[Any] = []
        breaker = CircuitBreaker()
        for _ in range(200):
            unsubscribe = events.subscribe(lambda event: seen.append(event.policy), events.CircuitChanged)
            breaker.isolate()
            unsubscribe()
            breaker.close()
        counts.append(len(seen))

    in_threads(*[churn] * 4)
    assert len(counts) == 4
    assert all(count >= 200 for count in counts), "a listener missed an event of its own thread"


# --- listeners of pipelines ---


async def test_listeners_of_a_pipeline_get_the_events_inside_it_and_no_others(world: World, clock: FakeClock) -> None:
    """Every kind of its policies, and the end of its executions; not those of nested or other executions."""
    seen: list[Any] = []
    retry = Retry(2, on=Boom, backoff=[0])
    pipeline = Policy.wrap(Fallback("x"), retry, listeners=[seen.append])

    async def fn(ctx: Context) -> Any:
        return await world.execute(retry, Script(Boom()).function())

    await world.execute(pipeline, fn)
    await world.attempt(retry, Script(Boom()).function())
    assert kinds(seen) == [
        *(events.AttemptFailed, events.RetryScheduled, events.AttemptFailed, events.RetryGaveUp),
        *(events.FallbackUsed, events.ExecutionFinished),
    ]


async def test_a_callback_precedes_listeners_of_pipelines_and_they_global_ones(world: World, clock: FakeClock) -> None:
    """Each gets the same event object; those of one pipeline in the given order."""
    order: list[tuple[str, Any]] = []

    def record(listener: str) -> Callable[[Any], None]:
        return lambda event: order.append((listener, event))

    retry = Retry(2, on=Boom, backoff=[0], on_retry=record("callback"))
    pipeline = Policy.wrap(
        Policy.wrap(retry, listeners=[record("inner, 1"), record("inner, 2")]),
        listeners=[lambda event: record("outer")(event) if isinstance(event, events.RetryScheduled) else None],
    )
    unsubscribe = events.subscribe(record("global"), events.RetryScheduled)
    await world.execute(pipeline, Script(Boom(), "fine").function())
    unsubscribe()
    [scheduled] = [event for listener, event in order if listener == "callback"]
    listeners = [listener for listener, event in order if event is scheduled]
    assert listeners[0] == "callback"
    assert listeners[-1] == "global"
    assert sorted(listeners[1:-1]) == ["inner, 1", "inner, 2", "outer"]
    assert listeners.index("inner, 1") < listeners.index("inner, 2")


@pytest.mark.parametrize("nest", [Policy.wrap, HandingOn])
async def test_listeners_of_a_nested_pipeline_get_only_its_events(world: World, clock: FakeClock, nest: Any) -> None:
    """Also if another policy passes its call on to it."""
    inside: list[Any] = []
    outside: list[Any] = []
    inner = Policy.wrap(Retry(1, on=Boom, name="in"), listeners=[inside.append])
    pipeline = Policy.wrap(Retry(1, on=Boom, name="out"), nest(inner), listeners=[outside.append])
    await world.attempt(pipeline, Script(Boom()).function())
    assert {event.policy for event in inside} == {"in"}
    assert [event.policy for event in outside if isinstance(event, events.AttemptFailed)] == ["in", "out"]


# --- listeners only observe ---

CALLBACKS: dict[str, Callable[[Callable[[Any], Any]], Policy[Any]]] = {
    "on_retry": lambda listener: Retry(2, on=Boom, backoff=[0], on_retry=listener),
    "on_timeout": lambda listener: Timeout(0.01, on_timeout=listener),
    "on_transition": lambda listener: CircuitBreaker(1, on_transition=listener),
    "on_fallback": lambda listener: Fallback("x", on_fallback=listener),
    "listeners": lambda listener: Policy.wrap(Retry(2, on=Boom, backoff=[0]), listeners=[listener]),
    "subscribe": lambda listener: Retry(2, on=Boom, backoff=[0]),
}


@pytest.mark.parametrize("how", CALLBACKS)
async def test_a_listeners_error_is_only_logged(world: World, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """The outcome is the same, and the next listener is called."""
    heard: list[Any] = []

    def broken(event: object) -> None:
        heard.append(event)
        raise RuntimeError("the listener is broken")

    async def fn(ctx: Context) -> None:
        if how == "on_timeout":
            await world.hang()
        raise Boom

    policy = CALLBACKS[how](broken)
    quiet = CALLBACKS[how](lambda event: None)
    after: list[Any] = []
    endings = [events.subscribe(broken)] if how == "subscribe" else []
    endings.append(events.subscribe(after.append))
    with caplog.at_level(logging.ERROR, logger="resilience"):
        expected, got = (await world.attempt(quiet, fn), await world.attempt(policy, fn))
    for ending in endings:
        ending()
    assert (type(got), str(got)) == (type(expected), str(expected))
    assert heard
    assert after
    assert {record.name for record in caplog.records} == {"resilience"}
    assert len(caplog.records) >= len(heard)
    assert "RuntimeError: the listener is broken" in caplog.text
    assert type(heard[0]).__name__ in caplog.text


def test_an_error_of_a_listener_changes_nothing_if_it_cannot_be_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter or handler of the user's logging raises, as it may have in the listener."""
    monkeypatch.setattr(logging.getLogger("resilience"), "filters", [lambda record: record.request_id])
    heard: list[Any] = []
    policy = Policy.wrap(Fallback("answer"), listeners=[lambda event: event.no_such_field, heard.append])
    assert policy.call(script(Boom())) == "answer"
    assert kinds(heard) == [events.FallbackUsed, events.ExecutionFinished]


@pytest.mark.parametrize("how", [name for name in CALLBACKS if name != "subscribe"])
async def test_an_interrupt_in_a_listener_is_not_suppressed(world: World, how: str) -> None:
    """Ctrl-C may come while a listener runs."""

    async def fn(ctx: Context) -> None:
        if how == "on_timeout":
            await world.hang()
        raise Boom

    with pytest.raises(KeyboardInterrupt):
        await world.execute(CALLBACKS[how](raising(KeyboardInterrupt)), fn)


@pytest.mark.parametrize("kind", [*KINDS, ASKED_FOR])
def test_events_are_frozen_and_keyword_only(kind: type[events.Event]) -> None:
    """The fields common to all events come first."""
    names = [field.name for field in dataclasses.fields(kind)]
    assert names[:5] == ["policy", "operation", "time", "properties", "pipeline"]
    event = kind(**dict.fromkeys(names))
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.policy = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        kind("positional")  # type: ignore[misc]


def test_a_reported_event_compares_prints_copies_and_pickles_by_its_fields(heard: list[Any]) -> None:
    """The called function is none of them."""
    unsubscribe = events.subscribe(heard.append, ASKED_FOR)
    for policy in every_kind():
        policy.capture(fails, Context(operation="op", properties={"a": 1}))
    unsubscribe()
    assert set(kinds(heard)) == {*KINDS, ASKED_FOR} - {events.StreamOpened}
    for event in heard:
        built = type(event)(**facts(event))
        assert event.called.function is fails
        assert (event, repr(event)) == (built, repr(built))
        assert built.called is None
        for copied in (copy.copy(event), copy.deepcopy(event), pickle.loads(pickle.dumps(event))):
            assert vars(copied).keys() == facts(event).keys()
            assert copied.called is None
        assert copy.copy(event) == event
        assert dataclasses.replace(event, policy="other").policy == "other"
        with pytest.raises(dataclasses.FrozenInstanceError):
            event.policy = "other"
