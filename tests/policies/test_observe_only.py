"""Shadow mode: policies that decide as ever, announce what they would have refused, and refuse nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from resilience import Bulkhead, CircuitBreaker, Context, FailureRatio, Pipeline, Policy, Retry, events
from resilience.integrations.telemetry import measurements
from resilience.integrations.telemetry.lines import Lines
from resilience.integrations.telemetry.words import Line
from tests.conftest import Boom, FakeClock, Script, World
from tests.contention.beside import beside
from tests.policies.breakers import CLOSED, HALF_OPEN, ISOLATED, OPEN, fails, works
from tests.policies.bulkheads import facts


def announced(heard: list[Any]) -> list[tuple[str, float | None, bool]]:
    return [(it.reason, it.retry_after, it.shadow) for it in heard if isinstance(it, events.CallRejected)]


# --- a breaker -----------------------------------------------------------------------------------


async def test_an_open_circuit_lets_calls_pass_and_says_so(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """What they end with moves nothing: neither does a success close it, nor a failure keep it open for longer."""
    breaker = CircuitBreaker(1, open_for=30, observe_only=True)
    await fails(world, breaker)
    clock.advance(10)
    assert await works(world, breaker) == "fine"
    assert isinstance(await fails(world, breaker), Boom)
    assert breaker.state is OPEN
    assert announced(heard) == [("CircuitOpen", 20.0, True)] * 2
    stats = breaker.stats()
    assert (stats.rejected, stats.retry_after, stats.opened) == (2, 20.0, 1)


async def test_what_a_call_that_it_let_pass_raises_is_not_judged(world: World, clock: FakeClock) -> None:
    """No predicate is asked, and the error is not taken for one that was counted."""
    asked: list[Exception] = []
    breaker = CircuitBreaker(1, open_for=30, observe_only=True, on=lambda error: not asked.append(error))
    await fails(world, breaker)
    await fails(world, breaker, times=3)
    assert len(asked) == 1


async def test_its_circuit_goes_through_its_states(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """The first call after the open period is the probe, and its success closes the circuit."""
    breaker = CircuitBreaker(1, open_for=30, observe_only=True)
    await fails(world, breaker)
    clock.advance(30)
    assert await works(world, breaker) == "fine"
    assert breaker.state is CLOSED
    assert announced(heard) == []


@pytest.mark.parametrize("ending", ["fine", Boom("no")])
async def test_beside_a_probe_calls_pass_and_move_nothing(world: World, clock: FakeClock, ending: Any) -> None:
    """They would have been refused, as all probes were out."""
    breaker = CircuitBreaker(1, open_for=30, observe_only=True, on=Boom)
    await fails(world, breaker)
    clock.advance(30)
    async with beside(world) as group:
        probe = await group.inside(breaker)
        assert await world.attempt(breaker, Script(ending).function()) is ending
        assert (breaker.state, breaker.stats().probes, breaker.stats().rejected) == (HALF_OPEN, 1, 1)
        probe.let_go()
        assert await probe.result() == "fine"
    assert breaker.state is CLOSED


async def test_a_call_inside_one_that_it_let_pass_belongs_to_it(world: World, clock: FakeClock) -> None:
    """It is announced once: had the outer one been refused, there would have been no inner one."""
    breaker = CircuitBreaker(1, open_for=30, observe_only=True)
    await fails(world, breaker)

    async def outer(ctx: Context) -> Any:
        return await works(world, breaker)

    assert await world.attempt(breaker, outer) == "fine"
    assert breaker.stats().rejected == 1


async def test_what_is_done_manually_is_announced_likewise(world: World, heard: list[Any]) -> None:
    breaker = CircuitBreaker(observe_only=True)
    breaker.isolate()
    assert await works(world, breaker) == "fine"
    assert announced(heard) == [("CircuitIsolated", None, True)]
    breaker.close()
    assert await works(world, breaker) == "fine"
    assert len(announced(heard)) == 1
    assert breaker.stats().rejected == 1


async def test_results_that_it_let_pass_count_in_no_window(world: World, clock: FakeClock) -> None:
    """Neither the failures that were already counted, nor those that were not, make it open again at once."""
    breaker = CircuitBreaker(
        FailureRatio(0.5, min_calls=4), open_for=30, observe_only=True, on_result=lambda it: it == "bad"
    )
    await fails(world, breaker, times=4)
    for _ in range(10):
        await world.attempt(breaker, Script("bad").function())
    clock.advance(30)
    await works(world, breaker)
    assert breaker.state is CLOSED
    await fails(world, breaker, times=3)
    assert breaker.state is CLOSED


@pytest.mark.parametrize("state", [OPEN, ISOLATED])
async def test_a_retry_foresees_no_refusal_from_it(world: World, clock: FakeClock, state: Any) -> None:
    """There will be none, so the next attempt is made."""
    breaker = CircuitBreaker(1, open_for=30, observe_only=True)
    if state is ISOLATED:
        breaker.isolate()
    script = Script(Boom(), "fine")
    assert await world.attempt(Pipeline(Retry(2, on=Boom, backoff=[8]), breaker), script.function()) == "fine"
    assert clock.sleeps == [8]


def test_a_guarded_block_is_entered_all_the_same(clock: FakeClock, heard: list[Any]) -> None:
    breaker = CircuitBreaker(1, open_for=30, observe_only=True)
    for _ in range(3):
        with pytest.raises(Boom), breaker.guard():
            raise Boom
    with breaker.guard():
        pass
    assert breaker.state is OPEN
    assert (breaker.stats().opened, breaker.stats().rejected) == (1, 3)
    assert announced(heard) == [("CircuitOpen", 30.0, True)] * 3


# --- a bulkhead ----------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", [0, 5])
async def test_calls_beyond_the_limit_run_without_a_permit(world: World, queue: int, heard: list[Any]) -> None:
    """None waits, whatever the queue: it would be delayed by what is only to observe."""
    bulkhead = Bulkhead(1, queue=queue, observe_only=True)
    async with beside(world) as group:
        call = await group.inside(bulkhead)
        assert await world.attempt(bulkhead, Script("fine").function()) == "fine"
        error = Boom()
        assert await world.attempt(bulkhead, Script(error).function()) is error
        assert facts(bulkhead) == (1, 1, 0, 2)
        call.let_go()
        assert await call.result() == "fine"
    assert facts(bulkhead) == (1, 0, 0, 2)
    assert announced(heard) == [("BulkheadFull", None, True)] * 2
    assert await world.attempt(bulkhead, Script("fine").function()) == "fine"
    assert facts(bulkhead) == (1, 0, 0, 2)


async def test_so_do_blocks(world: World, heard: list[Any]) -> None:
    bulkhead = Bulkhead(1, queue=3, observe_only=True)
    if world.blocking:
        with bulkhead.slot(), bulkhead.slot():
            assert facts(bulkhead) == (1, 1, 0, 1)
    else:
        async with bulkhead.slot(), bulkhead.slot():
            assert facts(bulkhead) == (1, 1, 0, 1)
    assert facts(bulkhead) == (1, 0, 0, 1)
    assert announced(heard) == [("BulkheadFull", None, True)]


# --- what is told of it --------------------------------------------------------------------------


async def test_it_is_no_rejection_in_metrics_and_no_warning_in_a_log(world: World, clock: FakeClock) -> None:
    """The calls were made; alerts on rejections stay quiet."""
    heard: list[events.CallRejected] = []
    lines: list[Line] = []
    breaker = CircuitBreaker(1, open_for=30, observe_only=True, name="db")
    write = Lines(lines.append, lambda level: True, repeats=5, interval=60.0, messages=False)
    pipeline = Policy.wrap(breaker, name="shop", listeners=[heard.append])
    breaker.isolate()
    end = write.begin()
    await works(world, pipeline)
    end()
    [refused] = [it for it in heard if isinstance(it, events.CallRejected)]
    [(instrument, value, labels)] = measurements(refused)
    assert (instrument.name, value, labels["reason"]) == ("resilience.shadow_rejections", 1, "CircuitIsolated")
    [line] = [it for it in lines if it.kind == "call_rejected"]
    assert line.level == logging.INFO
    assert "db only observes, and would have refused a call with CircuitIsolated" in line.text
    assert line.facts["shadow"] is True


@pytest.mark.parametrize("policy", [CircuitBreaker(observe_only=True), Bulkhead(2, queue=1, observe_only=True)])
def test_it_is_described(policy: Policy[Any]) -> None:
    assert policy.describe().endswith("; only observes")
    assert "observe_only=True" in repr(policy)
