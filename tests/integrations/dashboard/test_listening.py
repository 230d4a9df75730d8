"""What the dashboard counts, and when it is subscribed to events."""

from __future__ import annotations

import gc

import anyio
import anyio.to_thread
import pytest

from resilience import CircuitBreaker, CircuitOpen, Fallback, Policy, Retry, events
from resilience.integrations.dashboard import Dashboard
from resilience.integrations.dashboard.rates import MOST_PIPELINES, RATES, SPAN
from resilience.integrations.dashboard.watch import LINGER
from tests.callers import in_threads
from tests.conftest import Boom, FakeClock
from tests.integrations.dashboard.requests import Make, fail, is_subscribed, state_of, viewing


async def test_executions_are_counted_for_each_second_with_a_viewer(make: Make, clock: FakeClock) -> None:
    """Complete seconds only; the time before the first viewer is unknown."""
    pipeline = Policy.wrap(Retry(1), name="p")
    app = make(pipeline)

    pipeline.call(int)  # without a viewer
    clock.advance(10.5)
    async with viewing(app):
        for number in (3, 0, 2):
            for _ in range(number):
                pipeline.call(int)
            clock.advance(1)
        pipeline.capture(fail())
        rates = (await state_of(app))["now"]["rates"]
    assert rates["executions"]["seconds"][-4:] == [None, 3, 0, 2]
    assert len(rates["executions"]["seconds"]) == 59
    assert (rates["executions"]["total"], rates["failures"]["total"]) == (6, 1)


async def test_the_counts_of_a_second_are_dropped_after_a_minute(make: Make, clock: FakeClock) -> None:
    """The memory is bounded, and old counts are in none of the new ones."""
    breaker = CircuitBreaker()
    app = make(breaker)
    breaker.isolate()
    for number in (3, 0, *[1] * SPAN, 0, 2):
        for _ in range(number):
            breaker.capture(fail())
        clock.advance(1)
    rejections = (await state_of(app))["now"]["rates"]["rejections"]
    assert (rejections["seconds"], rejections["total"]) == ([*[1] * (SPAN - 3), 0, 2], 3 + SPAN + 2)


async def test_each_pipeline_has_its_own_rates(make: Make, clock: FakeClock) -> None:
    """So that nested executions are visible; a rate is the mean of the last complete seconds."""
    inside = Policy.wrap(Retry(2, on=Boom, backoff=[0]), name="inside")
    outside = Policy.wrap(Fallback("x"), name="outside")
    app = make()

    async with viewing(app):
        for _ in range(4):
            for _ in range(3):
                outside.execute(lambda ctx: inside.execute(fail()))
            clock.advance(1)
        now = (await state_of(app))["now"]
    rates = {it["name"]: {name: rate["present"] for name, rate in it["rates"].items()} for it in now["pipelines"]}
    none = dict.fromkeys(RATES, 0.0)
    assert rates["inside"] == {**none, "executions": 3.0, "failures": 3.0, "retries": 3.0}
    assert rates["outside"] == {**none, "executions": 3.0, "fallbacks": 3.0}
    assert now["rates"]["executions"]["present"] == 6.0
    assert now["rates"]["executions"]["total"] == 24


async def test_a_refused_block_counts_for_the_process_only(make: Make) -> None:
    """No pipeline is executed in it."""
    breaker = CircuitBreaker()
    app = make(breaker)
    breaker.isolate()
    with pytest.raises(CircuitOpen), breaker.guard():
        raise AssertionError("it was entered")
    now = (await state_of(app))["now"]
    assert (now["rates"]["rejections"]["total"], now["pipelines"]) == (1, [])


async def test_a_refusal_that_is_only_observed_is_a_row_and_is_not_counted(make: Make) -> None:
    """The call was made."""
    breaker = CircuitBreaker(observe_only=True)
    app = make(breaker)
    breaker.isolate()
    breaker.call(int)
    state = await state_of(app)
    assert state["rows"][-1]["kind"] == "call_rejected"
    assert state["now"]["rates"]["rejections"]["total"] == 0


async def test_a_failed_execution_is_a_row_if_no_retry_has_reported_it(make: Make) -> None:
    async with viewing(app := make()):
        Retry(2, on=Boom, backoff=[0], name="again").capture(fail())
        Retry(2, on=KeyError).capture(fail())
        rows = (await state_of(app))["rows"]
    assert [row["kind"] for row in rows] == ["retry_scheduled", "retry_gave_up", "execution_finished"]


async def test_a_bounded_number_of_pipelines_has_its_own_rates(make: Make) -> None:
    """The counts of the process include the others."""
    app = make()

    async with viewing(app):
        for number in range(MOST_PIPELINES + 10):
            Policy.wrap(Retry(), name=f"p{number}").call(int)
        now = (await state_of(app))["now"]
    assert len(now["pipelines"]) == MOST_PIPELINES
    assert now["rates"]["executions"]["total"] == MOST_PIPELINES + 10


async def test_no_count_is_lost_between_threads(make: Make) -> None:
    breaker = CircuitBreaker(name="db")
    app = make(breaker)
    breaker.isolate()

    async with viewing(app):
        await anyio.to_thread.run_sync(in_threads, *[lambda: [breaker.capture(fail()) for _ in range(250)]] * 8)
        state = await state_of(app)
    totals = {name: rate["total"] for name, rate in state["now"]["rates"].items()}
    assert (totals["executions"], totals["failures"], totals["rejections"]) == (2000, 2000, 2000)
    assert sum(row["count"] for row in state["rows"] if row["kind"] == "call_rejected") == 2000


async def test_the_ends_of_executions_are_subscribed_to_while_there_is_a_viewer(make: Make, clock: FakeClock) -> None:
    """And for a while after the last one."""
    app = make()
    assert not is_subscribed(events.ExecutionFinished)
    assert is_subscribed(events.CircuitChanged)
    async with viewing(app):
        assert is_subscribed(events.ExecutionFinished)
    for seconds in (0, LINGER - 1, 2):
        assert is_subscribed(events.ExecutionFinished)
        clock.advance(seconds)
        Retry().call(int)  # the first execution after the time notices
    assert not is_subscribed(events.ExecutionFinished)
    async with viewing(app):
        assert is_subscribed(events.ExecutionFinished)


async def test_without_history_nothing_is_subscribed_to_without_a_viewer(make: Make, clock: FakeClock) -> None:
    """Events before the first viewer are unknown."""
    breaker = CircuitBreaker(name="db")
    app = make(breaker, history=False)
    kinds = (events.CircuitChanged, events.RetryScheduled, events.ExecutionFinished)
    assert not any(map(is_subscribed, kinds))
    breaker.isolate()
    async with viewing(app) as viewer:
        assert all(map(is_subscribed, kinds))
        breaker.close()
        await viewer.until(lambda it: bool(it.rows()))
        assert [row["state"] for row in viewer.answer.rows()] == ["closed"]
        clock.advance(1)
        assert (await state_of(app))["now"]["rates"]["rejections"]["seconds"][-2:] == [None, 0]
    clock.advance(LINGER)
    Retry().call(int)
    assert not any(map(is_subscribed, kinds))


def test_a_dashboard_that_is_dropped_or_closed_is_unsubscribed() -> None:
    """No subscription keeps it alive, or outlives it."""
    app = Dashboard()
    assert is_subscribed(events.CircuitChanged)
    del app
    gc.collect()
    assert not is_subscribed(events.CircuitChanged)
    Dashboard().close()
    assert not is_subscribed(events.CircuitChanged)
