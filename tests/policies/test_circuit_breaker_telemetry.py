"""CircuitBreaker: what its callbacks and listeners hear, and what they may do."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from resilience import CircuitBreaker, CircuitOpen, CircuitState, Context, events
from tests.conftest import Boom, FakeClock, Script, World
from tests.policies.breakers import CLOSED, HALF_OPEN, ISOLATED, OPEN, Moves, fails


async def test_an_event_tells_of_the_call_that_moved_the_circuit(world: World) -> None:
    """Operation and properties of its context; none where a hand moved it."""
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
    """Ctrl-C in a listener comes out; the call that it kept from being made leaves its slot free."""
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


async def test_a_listener_may_call_back(world: World) -> None:
    """It closes the circuit that just opened; what it causes is told after what it was told."""
    heard: list[tuple[str, CircuitState]] = []

    def first(event: events.CircuitChanged) -> None:
        heard.append(("first", event.new))
        if event.new is OPEN:
            breaker.close()
            assert breaker.state is CLOSED
            breaker.isolate()

    breaker = CircuitBreaker(1, on_transition=first)
    unsubscribe = events.subscribe(lambda event: heard.append(("second", event.new)), events.CircuitChanged)

    try:
        await fails(world, breaker)
    finally:
        unsubscribe()
    assert heard == [(who, state) for state in (OPEN, CLOSED, ISOLATED) for who in ("first", "second")]


def test_a_listener_may_make_a_call(threads: World, clock: FakeClock) -> None:
    """Through the very breaker: it is refused or admitted as anybody else's."""
    outcomes: list[Any] = []

    def listener(event: events.CircuitChanged) -> None:
        outcomes.append(breaker.capture(lambda ctx: f"from {event.new.value}"))

    breaker = CircuitBreaker(1, open_for=5.0, on_transition=listener)
    breaker.capture(lambda ctx: 1 / 0)
    assert isinstance(outcomes[0].error, CircuitOpen)
    clock.advance(5.0)
    assert breaker.execute(lambda ctx: "fine") == "fine"
    assert isinstance(outcomes[1].error, CircuitOpen)  # half-open: the probe whose admission it hears of is out
    assert outcomes[2].value == "from closed"


@pytest.mark.parametrize("where", ["on", "ignore", "on_result", "str"])
def test_predicates_and_messages_run_outside_the_lock(where: str) -> None:
    """A predicate that waits for another thread that uses the breaker is no deadlock."""
    free: list[bool] = []

    def look(value: object = None) -> bool:
        thread = threading.Thread(target=lambda: breaker.stats(), daemon=True)
        thread.start()
        thread.join(5.0)
        free.append(not thread.is_alive())
        return False

    class Telling(Exception):
        def __str__(self) -> str:
            look()
            return "told"

    settings: dict[str, Any] = {} if where == "str" else {where: look}
    breaker = CircuitBreaker(1, **settings)

    def call(ctx: Context) -> str:
        if where == "on_result":
            return "fine"
        raise Telling

    breaker.capture(call)
    assert free
    assert all(free)
