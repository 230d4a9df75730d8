"""CircuitBreaker: its events, and callbacks and listeners that use the breaker."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from resilience import CircuitBreaker, CircuitOpen, CircuitState, Context, events
from tests.conftest import Boom, FakeClock, Script, World
from tests.policies.breakers import CLOSED, HALF_OPEN, ISOLATED, OPEN, Moves, fails


async def test_an_event_carries_operation_and_properties_of_the_call_that_caused_it(world: World) -> None:
    """After a manual change it has none."""
    moves = Moves()
    breaker = CircuitBreaker(1, on_transition=moves)
    ctx = Context(operation="get-stock", properties={"tenant": "blue"})

    await world.attempt(breaker, Script(Boom("no")).function(), ctx)
    breaker.close()
    assert [(it.operation, dict(it.properties)) for it in moves.events] == [
        ("get-stock", {"tenant": "blue"}),
        (None, {}),
    ]


def test_an_interrupted_listener_does_not_lose_a_probe(threads: World, clock: FakeClock) -> None:
    """The interrupt is raised; the call that was not made releases its slot."""
    armed = [True]

    def listener(event: events.CircuitChanged) -> None:
        if event.new is HALF_OPEN and armed.pop():
            raise KeyboardInterrupt

    breaker = CircuitBreaker(1, open_for=5.0, on_transition=listener)
    breaker.capture(lambda ctx: 1 / 0)
    clock.advance(5.0)
    with pytest.raises(KeyboardInterrupt):
        breaker.execute(lambda ctx: "fine")
    assert breaker.stats().probes == 0
    assert breaker.execute(lambda ctx: "fine") == "fine"
    assert breaker.state is CLOSED


async def test_a_listener_may_change_the_circuit(world: World) -> None:
    """All listeners get the event of the opening before those of the changes that the first one makes."""
    received: list[tuple[str, CircuitState]] = []

    def first(event: events.CircuitChanged) -> None:
        received.append(("first", event.new))
        if event.new is OPEN:
            breaker.close()
            assert breaker.state is CLOSED
            breaker.isolate()

    breaker = CircuitBreaker(1, on_transition=first)
    unsubscribe = events.subscribe(lambda event: received.append(("second", event.new)), events.CircuitChanged)

    try:
        await fails(world, breaker)
    finally:
        unsubscribe()
    assert received == [(listener, state) for state in (OPEN, CLOSED, ISOLATED) for listener in ("first", "second")]


def test_a_listener_may_make_a_call_under_the_breaker(threads: World, clock: FakeClock) -> None:
    """It is refused or admitted like any other call."""
    outcomes: list[Any] = []

    def listener(event: events.CircuitChanged) -> None:
        outcomes.append(breaker.capture(lambda ctx: f"from {event.new.value}"))

    breaker = CircuitBreaker(1, open_for=5.0, on_transition=listener)
    breaker.capture(lambda ctx: 1 / 0)
    assert isinstance(outcomes[0].error, CircuitOpen)
    clock.advance(5.0)
    assert breaker.execute(lambda ctx: "fine") == "fine"
    assert isinstance(outcomes[1].error, CircuitOpen)  # half-open: the probe of this event is running
    assert outcomes[2].value == "from closed"


@pytest.mark.parametrize("where", ["on", "ignore", "on_result", "str"])
def test_predicates_and_messages_run_outside_the_lock(where: str) -> None:
    """Here each of them waits for another thread that uses the breaker."""
    free: list[bool] = []

    def use_breaker(value: object = None) -> bool:
        thread = threading.Thread(target=lambda: breaker.stats(), daemon=True)
        thread.start()
        thread.join(5.0)
        free.append(not thread.is_alive())
        return False

    class UsesBreakerInStr(Exception):
        def __str__(self) -> str:
            use_breaker()
            return "text"

    settings: dict[str, Any] = {} if where == "str" else {where: use_breaker}
    breaker = CircuitBreaker(1, **settings)

    def call(ctx: Context) -> str:
        if where == "on_result":
            return "fine"
        raise UsesBreakerInStr

    breaker.capture(call)
    assert free
    assert all(free)
