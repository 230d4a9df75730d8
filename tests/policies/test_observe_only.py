"""`observe_only`: policies that report the calls that they would have refused, and refuse none."""

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
from tests.policies.blocks import entered
from tests.policies.breakers import CLOSED, HALF_OPEN, ISOLATED, OPEN, fails, works
from tests.policies.bulkheads import counts


def rejections(heard: list[Any]) -> list[tuple[str, float | None, bool]]:
    return [(it.reason, it.retry_after, it.shadow) for it in heard if isinstance(it, events.CallRejected)]


# --- a breaker -----------------------------------------------------------------------------------


async def test_an_observing_open_circuit_admits_and_reports(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """Their outcomes do not count: a success does not close the circuit, a failure does not keep it open for longer."""
    breaker = CircuitBreaker(1, open_for=30, observe_only=True)
    await fails(world, breaker)
    clock.advance(10)
    assert await works(world, breaker) == "fine"
    assert isinstance(await fails(world, breaker), Boom)
    assert breaker.state is OPEN
    assert rejections(heard) == [("CircuitOpen", 20.0, True)] * 2
    stats = breaker.stats()
    assert (stats.rejected, stats.retry_after, stats.opened) == (2, 20.0, 1)


async def test_errors_of_calls_under_an_open_circuit_reach_no_predicate(world: World, clock: FakeClock) -> None:
    passed: list[Exception] = []
    breaker = CircuitBreaker(1, open_for=30, observe_only=True, on=lambda error: not passed.append(error))
    await fails(world, breaker)
    await fails(world, breaker, times=3)
    assert len(passed) == 1


@pytest.mark.parametrize("ending", ["fine", Boom("no")])
async def test_calls_beside_a_probe_are_admitted_and_do_not_count(world: World, clock: FakeClock, ending: Any) -> None:
    """Without `observe_only` they would have been refused."""
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


async def test_a_nested_call_under_an_open_circuit_is_not_reported_again(world: World, clock: FakeClock) -> None:
    """If the outer call had been refused, there would have been no inner one."""
    breaker = CircuitBreaker(1, open_for=30, observe_only=True)
    await fails(world, breaker)

    async def outer(ctx: Context) -> Any:
        return await works(world, breaker)

    assert await world.attempt(breaker, outer) == "fine"
    assert breaker.stats().rejected == 1


async def test_calls_under_an_isolated_circuit_are_admitted_and_reported(world: World, heard: list[Any]) -> None:
    breaker = CircuitBreaker(observe_only=True)
    breaker.isolate()
    assert await works(world, breaker) == "fine"
    assert rejections(heard) == [("CircuitIsolated", None, True)]
    breaker.close()
    assert await works(world, breaker) == "fine"
    assert len(rejections(heard)) == 1
    assert breaker.stats().rejected == 1


async def test_results_under_an_open_circuit_do_not_count_in_the_next_window(world: World, clock: FakeClock) -> None:
    """Those from before the opening do not count either, so that the circuit does not open again at once."""
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
async def test_a_retry_stops_for_no_circuit_that_only_observes(world: World, clock: FakeClock, state: Any) -> None:
    """It will refuse no call."""
    breaker = CircuitBreaker(1, open_for=30, observe_only=True)
    if state is ISOLATED:
        breaker.isolate()
    script = Script(Boom(), "fine")
    assert await world.attempt(Pipeline(Retry(2, on=Boom, backoff=[8]), breaker), script.function()) == "fine"
    assert clock.sleeps == [8]


def test_a_guarded_block_under_an_open_circuit_is_entered_and_reported(clock: FakeClock, heard: list[Any]) -> None:
    breaker = CircuitBreaker(1, open_for=30, observe_only=True)
    for _ in range(3):
        with pytest.raises(Boom), breaker.guard():
            raise Boom
    with breaker.guard():
        pass
    assert breaker.state is OPEN
    assert (breaker.stats().opened, breaker.stats().rejected) == (1, 3)
    assert rejections(heard) == [("CircuitOpen", 30.0, True)] * 3


# --- a bulkhead ----------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", [0, 5])
async def test_calls_beyond_the_limit_run_without_a_permit(world: World, queue: int, heard: list[Any]) -> None:
    """No call waits, even with a queue: a policy that only observes delays nothing."""
    bulkhead = Bulkhead(1, queue=queue, observe_only=True)
    async with beside(world) as group:
        call = await group.inside(bulkhead)
        assert await world.attempt(bulkhead, Script("fine").function()) == "fine"
        error = Boom()
        assert await world.attempt(bulkhead, Script(error).function()) is error
        assert counts(bulkhead) == (1, 1, 0, 2)
        call.let_go()
        assert await call.result() == "fine"
    assert counts(bulkhead) == (1, 0, 0, 2)
    assert rejections(heard) == [("BulkheadFull", None, True)] * 2
    assert await world.attempt(bulkhead, Script("fine").function()) == "fine"
    assert counts(bulkhead) == (1, 0, 0, 2)


async def test_blocks_beyond_the_limit_run_without_a_permit(world: World, heard: list[Any]) -> None:
    bulkhead = Bulkhead(1, queue=3, observe_only=True)
    async with entered(world, bulkhead.slot()), entered(world, bulkhead.slot()):
        assert counts(bulkhead) == (1, 1, 0, 1)
    assert counts(bulkhead) == (1, 0, 0, 1)
    assert rejections(heard) == [("BulkheadFull", None, True)]


# --- telemetry and description -------------------------------------------------------------------


async def test_observed_refusals_are_shadows_in_metrics_and_infos_in_logs(world: World, clock: FakeClock) -> None:
    """Alerts on rejections must not fire, as the calls were made."""
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
