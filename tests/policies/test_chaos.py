"""Chaos: what it does to a call, to which calls, and when it is on."""

from __future__ import annotations

import random
import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from resilience import (
    Chaos,
    Context,
    DeadlineExceeded,
    Failure,
    Success,
    events,
)
from resilience.testing import Simulation, seeded, virtual_time
from tests.conftest import Boom, FakeClock, Script, World


class Draws:
    """A source of randomness that gives what it was given."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def uniform(self, a: float, b: float) -> float:
        assert (a, b) == (0, 1)
        return self.numbers.pop(0)


# --- what it does --------------------------------------------------------------------------------


ERROR = Boom("one for all")


@pytest.mark.parametrize(
    ("error", "came_out"),
    [(Boom, Boom()), (lambda ctx: Boom(ctx.operation), Boom("op")), (lambda ctx: Boom, Boom()), (ERROR, ERROR)],
    ids=["class", "function", "function to a class", "instance"],
)
async def test_it_raises_in_place_of_the_call(world: World, error: Any, came_out: Exception) -> None:
    chaos = Chaos(error=error)
    script = Script("fine")
    with chaos.injecting(1.0):
        told = await world.attempt(chaos, script.function(), Context(operation="op"))
    assert (type(told), str(told)) == (type(came_out), str(came_out))
    assert script.calls == 0


async def test_one_exception_for_many_calls_gathers_no_tracebacks(world: World) -> None:
    """Each time it is raised anew."""
    chaos = Chaos(error=ERROR)
    lengths = []
    with chaos.injecting(1.0):
        for _ in range(3):
            assert await world.attempt(chaos, Script("fine").function()) is ERROR
            traceback, length = ERROR.__traceback__, 0
            while traceback is not None:
                traceback, length = traceback.tb_next, length + 1
            lengths.append(length)
    assert len(set(lengths)) == 1


@pytest.mark.parametrize("result", ["other", None, 0, Boom])
async def test_it_answers_in_place_of_the_call(world: World, result: Any) -> None:
    """None is a result; a class is one too."""
    chaos = Chaos(result=result)
    script = Script("fine")
    with chaos.injecting(1.0):
        assert await world.attempt(chaos, script.function()) is result
    assert script.calls == 0


@pytest.mark.parametrize("delay", [2, timedelta(seconds=2), lambda ctx: 2 * ctx.attempt])
async def test_it_waits_before_the_call(world: World, clock: FakeClock, delay: Any) -> None:
    chaos = Chaos(delay=delay)
    with chaos.injecting(1.0):
        assert await world.attempt(chaos, Script("fine").function()) == "fine"
    assert clock.sleeps == [2]


async def test_a_delay_that_a_function_computes_may_be_none(world: World, clock: FakeClock) -> None:
    chaos = Chaos(delay=lambda ctx: 0)
    with chaos.injecting(1.0):
        assert await world.attempt(chaos, Script("fine").function()) == "fine"


@pytest.mark.parametrize("wrong", [-1, float("nan"), "2", None])
async def test_a_function_that_returns_no_delay_is_told(world: World, wrong: Any) -> None:
    chaos = Chaos(delay=lambda ctx: wrong)
    with chaos.injecting(1.0):
        told = await world.attempt(chaos, Script("fine").function())
    assert isinstance(told, (TypeError, ValueError))
    assert "what delay(ctx) returned" in str(told)


@pytest.mark.parametrize("wrong", [None, "boom", KeyboardInterrupt(), int])
async def test_a_function_that_returns_no_error_is_told(world: World, wrong: Any) -> None:
    chaos = Chaos(error=lambda ctx: wrong)
    with chaos.injecting(1.0):
        told = await world.attempt(chaos, Script("fine").function())
    assert type(told) is TypeError
    assert repr(wrong) in str(told)


async def test_it_calls_an_action_before_the_call(world: World) -> None:
    """Which may be asynchronous where the call is; what it raises comes out, and the call is not made."""
    seen: list[Any] = []

    async def action(ctx: Context) -> None:
        seen.append(ctx.operation)

    for each in (world.native(action), lambda ctx: seen.append(ctx.operation)):
        chaos = Chaos(action=each)
        with chaos.injecting(1.0):
            assert await world.attempt(chaos, Script("fine").function(), Context(operation="op")) == "fine"
    assert seen == ["op", "op"]

    script, failing = Script("fine"), Chaos(action=lambda ctx: 1 / 0)
    with failing.injecting(1.0):
        assert type(await world.attempt(failing, script.function())) is ZeroDivisionError
    assert script.calls == 0


# --- time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("delay", "slept"), [(5, [3]), (3, [3]), (2, [2])])
async def test_a_delay_ends_at_the_deadline(world: World, clock: FakeClock, delay: int, slept: list[int]) -> None:
    """One that fits is followed by the call."""
    chaos = Chaos(delay=delay, name="havoc")
    script = Script("fine")
    with chaos.injecting(1.0):
        told = await world.attempt(chaos, script.function(), Context(timeout=3))
    assert clock.sleeps == slept
    if delay > 3:
        assert (type(told), told.policy, script.calls) == (DeadlineExceeded, "havoc", 0)
    else:
        assert told == "fine"


# --- when it is on -------------------------------------------------------------------------------


async def test_it_is_off_until_it_is_switched_on_and_off_again_by_itself(world: World, clock: FakeClock) -> None:
    chaos = Chaos(1.0, error=Boom)
    fine = Script("fine").function()
    assert (await world.attempt(chaos, fine), chaos.is_on) == ("fine", False)
    chaos.on(lasts=10)
    clock.advance(9.9)
    assert isinstance(await world.attempt(chaos, fine), Boom)
    assert chaos.is_on
    clock.advance(0.1)
    assert (await world.attempt(chaos, fine), chaos.is_on) == ("fine", False)
    assert chaos.injected == 1


def test_it_stays_on_for_five_minutes_by_default_and_on_again_is_anew(clock: FakeClock) -> None:
    chaos = Chaos(error=Boom)
    chaos.on()
    clock.advance(200)
    chaos.on(0.5)
    clock.advance(299.5)
    assert chaos.is_on
    clock.advance(0.5)
    assert not chaos.is_on
    with chaos.injecting():
        clock.advance(299.5)
        assert chaos.is_on
        clock.advance(0.5)
        assert not chaos.is_on
    chaos.on(lasts=timedelta(days=1))
    clock.advance(86_399)
    assert chaos.is_on
    chaos.off()
    assert not chaos.is_on


def test_a_block_leaves_it_as_it_was(clock: FakeClock) -> None:
    """On for the rest of its time, if it was on."""
    chaos = Chaos(error=Boom, rng=Draws(0.5, 0.5, 0.5))
    with chaos.injecting(1.0):
        assert isinstance(chaos.capture(lambda ctx: "fine"), Failure)
    assert not chaos.is_on
    chaos.on(0.4, 100)
    with chaos.injecting(0.6, 5):
        assert isinstance(chaos.capture(lambda ctx: "fine"), Failure)
        clock.advance(5)
        assert chaos.is_on  # the block's time is over, that of `on` is not
    assert chaos.capture(lambda ctx: "fine") == Success("fine")
    clock.advance(95)
    assert not chaos.is_on


def test_blocks_that_overlap_leave_it_off() -> None:
    """The one that began first also ends first."""
    chaos = Chaos(error=Boom)
    first, second = chaos.injecting(1.0), chaos.injecting(1.0)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert chaos.is_on
    second.__exit__(None, None, None)
    assert not chaos.is_on


@pytest.mark.parametrize("stop", [lambda chaos: chaos.off(), lambda chaos: chaos.stop_all()])
def test_what_was_stopped_in_a_block_stays_off_after_it(stop: Any) -> None:
    chaos = Chaos(error=Boom)
    chaos.on()
    with chaos.injecting(1.0):
        stop(chaos)
        assert not chaos.is_on
    assert not chaos.is_on
    chaos.on()
    assert chaos.is_on


def test_all_are_stopped_at_once() -> None:
    several = [Chaos(error=Boom), Chaos(result=1), Chaos(delay=1)]
    for each in several:
        each.on()
    Chaos.stop_all()
    assert [each.is_on for each in several] == [False] * 3


@pytest.mark.parametrize("value", ["off", "OFF", "0"])
def test_the_environment_can_forbid_it(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """It is looked at each time."""
    chaos = Chaos(error=Boom)
    monkeypatch.setenv("RESILIENCE_CHAOS", value)
    with pytest.raises(RuntimeError, match="RESILIENCE_CHAOS"):
        chaos.on()
    with pytest.raises(RuntimeError, match="RESILIENCE_CHAOS"), chaos.injecting():
        pass
    assert not chaos.is_on
    monkeypatch.setenv("RESILIENCE_CHAOS", "on")
    chaos.on()
    assert chaos.is_on


# --- to whom it happens --------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "injected"), [(0.6, 1), (0.3, 0), (0.5, 0)])
async def test_a_draw_below_the_rate_injects(world: World, rate: float, injected: int) -> None:
    """As Polly's Simmy: a rate of 0.6 and a draw of 0.5 injects, 0.3 does not."""
    chaos = Chaos(error=Boom, rng=Draws(0.5))
    with chaos.injecting(rate):
        await world.attempt(chaos, Script("fine").function())
    assert chaos.injected == injected


def test_its_own_rate_holds_where_no_other_is_given() -> None:
    chaos = Chaos(error=Boom, rng=Draws(0.0099, 0.01))
    chaos.on()
    for _ in range(2):
        chaos.capture(lambda ctx: "fine")
    assert chaos.injected == 1


async def test_a_predicate_says_whom(world: World) -> None:
    """The others draw nothing, so with a seed the course is the same."""
    chaos = Chaos(1.0, result="other", when=lambda ctx: ctx.operation == "guinea-pig", rng=Draws(0.0))
    fine = Script("fine").function()
    with chaos.injecting():
        assert await world.attempt(chaos, fine) == "fine"
        assert await world.attempt(chaos, fine, Context(operation="guinea-pig")) == "other"
    assert chaos.injected == 1


@pytest.mark.parametrize("source", ["rng", "seeded", "simulation"])
def test_it_can_be_repeated(source: str) -> None:
    """By its own source, by that of the process, and in a simulation by the seed of that."""

    def course() -> list[bool]:
        chaos = Chaos(0.3, error=Boom, rng=random.Random(3) if source == "rng" else None)
        seen: list[bool] = []

        def one(ctx: Context) -> None: ...

        async def another(ctx: Context) -> None: ...

        async def client() -> None:
            for _ in range(200):
                try:
                    await simulation.execute(chaos, another)
                    seen.append(False)
                except Boom:
                    seen.append(True)

        if source == "simulation":
            with Simulation(3) as simulation, chaos.injecting():
                simulation.start(client())
                simulation.run()
        else:
            with seeded(3), chaos.injecting():
                seen += [isinstance(chaos.capture(one), Failure) for _ in range(200)]
        assert 40 < chaos.injected == sum(seen) < 80
        return seen

    assert course() == course()


# --- with others, and what is told ---------------------------------------------------------------


@pytest.mark.parametrize("effect", ["error", "result", "delay", "action"])
async def test_each_injection_is_told(world: World, clock: FakeClock, heard: list[Any], effect: str) -> None:
    values: dict[str, Any] = {"error": Boom, "result": 1, "delay": 1, "action": lambda ctx: None}
    chaos: Any = Chaos(name="havoc", **{effect: values[effect]})
    with chaos.injecting(1.0):
        await world.attempt(chaos, Script("fine").function())
    [event] = [it for it in heard if isinstance(it, events.ChaosInjected)]
    assert (event.policy, event.effect) == ("havoc", effect)


@pytest.mark.parametrize(
    ("chaos", "told"),
    [
        (Chaos(error=ConnectionError, name="reset"), "reset: raises ConnectionError in 1 % of the calls; off"),
        (Chaos(0.25, error=Boom("x")), "Chaos: raises Boom('x') in 25 % of the calls; off"),
        (Chaos(result=None), "Chaos: returns None in 1 % of the calls; off"),
        (Chaos(delay=2), "Chaos: delays by 2 s 1 % of the calls; off"),
        (Chaos(delay=abs), "Chaos: delays by abs 1 % of the calls; off"),
        (Chaos(action=print), "Chaos: calls print before 1 % of the calls; off"),
    ],
)
def test_it_is_described(chaos: Chaos[Any], told: str) -> None:
    assert chaos.describe() == told


def test_it_is_described_while_it_is_on(clock: FakeClock) -> None:
    chaos = Chaos(result=1)
    chaos.on(0.5, 60)
    clock.advance(20)
    assert chaos.describe() == "Chaos: returns 1 in 50 % of the calls; on for 40 s more"
    assert repr(chaos) == "Chaos(result=1)"


@pytest.mark.parametrize("given", [{}, {"error": Boom, "delay": 1}, {"result": None, "action": print}])
def test_it_is_given_exactly_one_effect(given: dict[str, Any]) -> None:
    make: Any = Chaos
    with pytest.raises(ValueError, match="exactly one of error, result, delay and action") as told:
        make(**given)
    assert all(f"{name}={value!r}" in str(told.value) for name, value in given.items())


def test_a_class_of_errors_is_made_without_arguments() -> None:
    """Else its calls would fail with another error than the one that was asked for."""
    with pytest.raises(TypeError, match=r"0 given.*use error=lambda ctx: UnicodeDecodeError\("):
        Chaos(error=UnicodeDecodeError)


# --- many at once --------------------------------------------------------------------------------


def test_what_it_did_is_counted_exactly() -> None:
    """By threads at once, while others switch it on and off."""
    chaos = Chaos(0.5, error=Boom)
    totals: Counter[str] = Counter()

    def work() -> None:
        failed = 0
        for number in range(400):
            if number % 50 == 0:
                with chaos.injecting(0.5):
                    failed += isinstance(chaos.capture(lambda ctx: None), Failure)
            failed += isinstance(chaos.capture(lambda ctx: None), Failure)
        totals["failed"] += failed

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chaos.injected == totals["failed"]
    assert not chaos.is_on


def test_virtual_time_switches_it_off() -> None:
    chaos = Chaos(1.0, delay=4)
    with virtual_time() as time:
        chaos.on(lasts=10)
        for _ in range(5):
            chaos.call(int)
        assert time.now() == 12
    assert chaos.injected == 3
