"""Chaos: its effects, when it is on, which calls it injects into, and what it reports."""

from __future__ import annotations

import random
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest

from resilience import Chaos, Context, DeadlineExceeded, Failure, Retry, Success, events
from resilience.testing import seeded
from tests.conftest import Boom, FakeClock, Script, Virtual, World
from tests.contention.storm import Storm
from tests.policies.simulated import injected


class Draws:
    """A source of randomness that draws the given numbers."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def uniform(self, a: float, b: float) -> float:
        assert (a, b) == (0, 1)
        return self.numbers.pop(0)


# --- effects -------------------------------------------------------------------------------------


ERROR = Boom("one instance")


@pytest.mark.parametrize(
    ("error", "expected"),
    [(Boom, Boom()), (lambda ctx: Boom(ctx.operation), Boom("op")), (lambda ctx: Boom, Boom()), (ERROR, ERROR)],
    ids=["class", "function", "function to a class", "instance"],
)
async def test_an_error_is_raised_in_place_of_the_call(threads: World, error: Any, expected: Exception) -> None:
    chaos = Chaos(error=error)
    script = Script("fine")
    with chaos.injecting(1.0):
        raised = await threads.attempt(chaos, script.function(), Context(operation="op"))
    assert (type(raised), str(raised)) == (type(expected), str(expected))
    assert script.calls == 0


def test_an_injected_stop_iteration_is_raised_as_itself_in_blocking_code() -> None:
    for error in (StopIteration, StopIteration(5), lambda ctx: StopIteration()):
        chaos = Chaos(error=error)
        with chaos.injecting(1.0), pytest.raises(StopIteration):
            Retry(1).wrap(chaos).call(int)


async def test_the_traceback_of_an_error_instance_does_not_grow(world: World) -> None:
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
async def test_a_result_is_returned_in_place_of_the_call(threads: World, result: Any) -> None:
    """None and a class are results, too."""
    chaos = Chaos(result=result)
    script = Script("fine")
    with chaos.injecting(1.0):
        assert await threads.attempt(chaos, script.function()) is result
    assert script.calls == 0


@pytest.mark.parametrize(
    ("delay", "seconds"), [(2, 2), (timedelta(seconds=2), 2), (lambda ctx: 2 * ctx.attempt, 2), (lambda ctx: 0, 0)]
)
async def test_a_delay_comes_before_the_call(world: World, clock: FakeClock, delay: Any, seconds: int) -> None:
    chaos = Chaos(delay=delay)
    with chaos.injecting(1.0):
        assert await world.attempt(chaos, Script("fine").function()) == "fine"
    assert sum(clock.sleeps) == seconds


@pytest.mark.parametrize(
    ("effect", "wrong", "shown"),
    [("delay", it, "what delay(ctx) returned") for it in (-1, float("nan"), "2", None)]
    + [("error", it, repr(it)) for it in (None, "boom", KeyboardInterrupt(), int)],
)
async def test_a_function_that_returns_the_wrong_type_of_effect_is_refused(
    threads: World, effect: str, wrong: Any, shown: str
) -> None:
    chaos: Any = Chaos(**{effect: lambda ctx: wrong})
    with chaos.injecting(1.0):
        error = await threads.attempt(chaos, Script("fine").function())
    assert type(error) is TypeError or (effect, type(error)) == ("delay", ValueError)
    assert shown in str(error)


async def test_an_action_runs_before_the_call_and_its_error_replaces_it(world: World) -> None:
    """In tasks the action may be asynchronous."""
    seen: list[Any] = []
    action = Script(None, doing=lambda ctx: seen.append(ctx.operation)).function()
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


@pytest.mark.parametrize(("delay", "left", "slept"), [(5, 3, 3), (3, 3, 3), (2, 3, 2), (5, 0, 0), (5, -1, 0)])
async def test_a_delay_ends_at_the_deadline(world: World, clock: FakeClock, delay: int, left: int, slept: int) -> None:
    """Also if that has passed. After a delay that fits the call is made."""
    chaos = Chaos(delay=delay, name="havoc")
    script, ctx = Script("fine"), Context(timeout=3)
    clock.advance(3 - left)
    with chaos.injecting(1.0):
        outcome = await world.attempt(chaos, script.function(), ctx)
    assert sum(clock.sleeps) == slept
    if delay > left:
        assert (type(outcome), outcome.policy, script.calls) == (DeadlineExceeded, "havoc", 0)
    else:
        assert outcome == "fine"


# --- when it is on -------------------------------------------------------------------------------


async def test_chaos_is_off_until_it_is_switched_on_and_only_for_its_time(world: World, clock: FakeClock) -> None:
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


def test_on_lasts_five_minutes_by_default_and_a_second_on_starts_again(clock: FakeClock) -> None:
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


def test_a_block_restores_the_state_before_it(clock: FakeClock) -> None:
    """If chaos was on, it is on for the rest of its time."""
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


def test_overlapping_blocks_leave_chaos_off() -> None:
    """The block that began first ends first."""
    chaos = Chaos(error=Boom)
    first, second = chaos.injecting(1.0), chaos.injecting(1.0)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert chaos.is_on
    second.__exit__(None, None, None)
    assert not chaos.is_on


@pytest.mark.parametrize("stop", [lambda chaos: chaos.off(), lambda chaos: chaos.stop_all()])
def test_chaos_that_is_stopped_in_a_block_stays_off_after_it(stop: Any) -> None:
    chaos = Chaos(error=Boom)
    chaos.on()
    with chaos.injecting(1.0):
        stop(chaos)
        assert not chaos.is_on
    assert not chaos.is_on
    chaos.on()
    assert chaos.is_on


def test_stop_all_switches_every_chaos_off() -> None:
    several = [Chaos(error=Boom), Chaos(result=1), Chaos(delay=1)]
    for each in several:
        each.on()
    Chaos.stop_all()
    assert [each.is_on for each in several] == [False] * 3


@pytest.mark.parametrize("value", ["off", "OFF", "0"])
def test_an_environment_variable_forbids_chaos(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """It is read each time."""
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


# --- which calls ---------------------------------------------------------------------------------


def test_on_without_a_rate_uses_the_rate_of_the_constructor() -> None:
    chaos = Chaos(error=Boom, rng=Draws(0.0099, 0.01))
    chaos.on()
    for _ in range(2):
        chaos.capture(lambda ctx: "fine")
    assert chaos.injected == 1


async def test_calls_for_which_when_is_false_are_untouched(threads: World) -> None:
    """They draw no number, so that a seed repeats the same injections."""
    chaos = Chaos(1.0, result="other", when=lambda ctx: ctx.operation == "guinea-pig", rng=Draws(0.0))
    fine = Script("fine").function()
    with chaos.injecting():
        assert await threads.attempt(chaos, fine) == "fine"
        assert await threads.attempt(chaos, fine, Context(operation="guinea-pig")) == "other"
    assert chaos.injected == 1


@pytest.mark.parametrize("source", ["rng", "seeded", "simulation"])
def test_a_seed_repeats_the_injections(source: str) -> None:
    """A seed of its own `rng`, of the process, or of a simulation."""

    def injections() -> list[bool]:
        chaos = Chaos(0.3, error=Boom, rng=random.Random(3) if source == "rng" else None)
        world = Virtual("simulation") if source == "simulation" else World("threads")

        async def main() -> list[bool]:
            return [isinstance(await world.attempt(chaos, Script(None).function()), Boom) for _ in range(200)]

        with chaos.injecting(), seeded(3) if source == "seeded" else nullcontext():
            seen: list[bool] = world.run(main)
        assert 40 < chaos.injected == sum(seen) < 80
        return seen

    assert injections() == injections()


# --- events and descriptions ---------------------------------------------------------------------


@pytest.mark.parametrize("effect", ["error", "result", "delay", "action"])
async def test_each_injection_sends_an_event(threads: World, clock: FakeClock, heard: list[Any], effect: str) -> None:
    values: dict[str, Any] = {"error": Boom, "result": 1, "delay": 1, "action": lambda ctx: None}
    chaos: Any = Chaos(name="havoc", **{effect: values[effect]})
    with chaos.injecting(1.0):
        await threads.attempt(chaos, Script("fine").function())
    [event] = [it for it in heard if isinstance(it, events.ChaosInjected)]
    assert (event.policy, event.effect) == ("havoc", effect)


def test_the_description_of_a_chaos_that_is_on_names_the_time_left(clock: FakeClock) -> None:
    chaos = Chaos(result=1)
    chaos.on(0.5, 60)
    clock.advance(20)
    assert chaos.describe() == "Chaos: returns 1 in 50 % of the calls; on for 40 s more"
    clock.advance(39.8)
    assert chaos.describe().endswith("on for 0 s more")
    assert repr(chaos) == "Chaos(result=1)"


@pytest.mark.parametrize("given", [{}, {"error": Boom, "delay": 1}, {"result": None, "action": print}])
def test_a_chaos_has_exactly_one_effect(given: dict[str, Any]) -> None:
    make: Any = Chaos
    with pytest.raises(ValueError, match="exactly one of error, result, delay and action") as raised:
        make(**given)
    assert all(f"{name}={value!r}" in str(raised.value) for name, value in given.items())


@pytest.mark.slow
@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_retries_hide_all_but_a_power_of_the_faults_until_it_switches_itself_off(attempts: int) -> None:
    """If a fifth of the attempts fails, a fifth, a 25th or a 125th of the callers get an error."""
    faults = injected(Retry(attempts, backoff=[0.05]), 0.2, 100.0, 300, on_at=60.0, lasts=180.0)
    assert sum(faults.errors[60:240]) / (100 * 180) == pytest.approx(0.2**attempts, rel=0.2)
    assert sum(faults.injected[:60]) == sum(faults.injected[241:]) == 0


# --- concurrency ---------------------------------------------------------------------------------


def test_concurrent_injections_are_counted_exactly() -> None:
    """Some callers inject while others switch chaos on and off."""
    chaos = Chaos(0.5, error=Boom)

    async def operation(world: World, rng: random.Random) -> str:
        with chaos.injecting() if rng.random() < 0.1 else nullcontext():
            return str(await world.attempt(chaos, Script("fine").function()))

    outcomes = Storm(operation, 3000).run()
    assert chaos.injected == 3000 - outcomes["fine"] > 0
    assert not chaos.is_on
