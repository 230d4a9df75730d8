"""What the dashboard counts, and when it listens."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread

from resilience import CircuitBreaker, Fallback, Policy, Retry, events
from resilience.integrations.dashboard import Dashboard
from resilience.integrations.dashboard.rates import MOST_PIPELINES, RATES, SPAN
from resilience.integrations.dashboard.watch import LINGER
from tests.conftest import Boom, FakeClock
from tests.integrations.dashboard.requests import Viewer, fail, heard, run, told


def test_executions_are_counted_by_the_second_while_there_is_a_viewer(
    make: Callable[..., Dashboard], clock: FakeClock
) -> None:
    """Complete seconds only, and nothing is claimed for the time before."""
    pipeline = Policy.wrap(Retry(1), name="p")
    app = make(pipeline)

    async def main() -> Any:
        pipeline.call(int)  # nobody looks
        clock.advance(10.5)
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            for number in (3, 0, 2):
                for _ in range(number):
                    pipeline.call(int)
                clock.advance(1)
            pipeline.capture(fail())
            return (await told(app))["now"]["rates"]

    rates = run(main)
    assert rates["executions"]["seconds"][-4:] == [None, 3, 0, 2]
    assert len(rates["executions"]["seconds"]) == 59
    assert (rates["executions"]["total"], rates["failures"]["total"]) == (6, 1)


def test_a_minute_later_a_second_is_counted_anew(make: Callable[..., Dashboard], clock: FakeClock) -> None:
    """What is kept is bounded, and old counts are in none of the new ones."""
    breaker = CircuitBreaker()
    app = make(breaker)
    breaker.isolate()
    for number in (3, 0, *[1] * SPAN, 0, 2):
        for _ in range(number):
            breaker.capture(fail())
        clock.advance(1)
    rejections = run(lambda: told(app))["now"]["rates"]["rejections"]
    assert (rejections["seconds"], rejections["total"]) == ([*[1] * (SPAN - 3), 0, 2], 3 + SPAN + 2)


def test_each_pipeline_has_its_own_rates(make: Callable[..., Dashboard], clock: FakeClock) -> None:
    """So that executions inside of others can be told from them; as the mean of the last complete seconds."""
    inside = Policy.wrap(Retry(2, on=Boom, backoff=[0]), name="inside")
    outside = Policy.wrap(Fallback("x"), name="outside")
    app = make()

    async def main() -> Any:
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            for _ in range(4):
                for _ in range(3):
                    outside.execute(lambda ctx: inside.execute(fail()))
                clock.advance(1)
            return (await told(app))["now"]

    now = run(main)
    rates = {it["name"]: {name: rate["present"] for name, rate in it["rates"].items()} for it in now["pipelines"]}
    none = dict.fromkeys(RATES, 0.0)
    assert rates == {
        "inside": {**none, "executions": 3.0, "failures": 3.0, "retries": 3.0},
        "outside": {**none, "executions": 3.0, "fallbacks": 3.0},
    }
    assert now["rates"]["executions"]["present"] == 6.0
    assert now["rates"]["executions"]["total"] == 24


def test_only_so_many_pipelines_have_their_own_rates(make: Callable[..., Dashboard]) -> None:
    """Memory is bounded, and the counts of the process are whole."""
    app = make()

    async def main() -> Any:
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            for number in range(MOST_PIPELINES + 10):
                Policy.wrap(Retry(), name=f"p{number}").call(int)
            return (await told(app))["now"]

    now = run(main)
    assert len(now["pipelines"]) == MOST_PIPELINES
    assert now["rates"]["executions"]["total"] == MOST_PIPELINES + 10


def test_no_count_is_lost_between_threads(make: Callable[..., Dashboard]) -> None:
    """Eight threads at once: as many executions and rejections as there were."""
    breaker = CircuitBreaker(name="db")
    app = make(breaker)
    breaker.isolate()

    async def main() -> Any:
        async with Viewer(app) as viewer:
            await viewer.until(lambda it: bool(it.updates()))
            threads = [threading.Thread(target=lambda: [breaker.capture(fail()) for _ in range(250)]) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                await anyio.to_thread.run_sync(thread.join)
            return await told(app)

    it = run(main)
    totals = {name: rate["total"] for name, rate in it["now"]["rates"].items()}
    assert (totals["executions"], totals["failures"], totals["rejections"]) == (2000, 2000, 2000)
    assert sum(row["count"] for row in it["rows"] if row["kind"] == "call_rejected") == 2000


async def test_successful_calls_are_not_listened_to_without_a_viewer(
    make: Callable[..., Dashboard], clock: FakeClock
) -> None:
    """The end of executions is heard from the first viewer until a while after the last one."""
    app = make()
    assert not heard(events.ExecutionFinished)
    assert heard(events.CircuitChanged)
    async with Viewer(app) as viewer:
        await viewer.until(lambda it: bool(it.updates()))
        assert heard(events.ExecutionFinished)
    for seconds in (0, LINGER - 1, 2):
        assert heard(events.ExecutionFinished)
        clock.advance(seconds)
        Retry().call(int)  # the first execution after the time notices
    assert not heard(events.ExecutionFinished)
    async with Viewer(app) as viewer:
        await viewer.until(lambda it: bool(it.updates()))
        assert heard(events.ExecutionFinished)


async def test_without_history_nothing_is_listened_to_without_a_viewer(
    make: Callable[..., Dashboard], clock: FakeClock
) -> None:
    """And what was before the first viewer is not known."""
    breaker = CircuitBreaker(name="db")
    app = make(breaker, history=False)
    kinds = (events.CircuitChanged, events.RetryScheduled, events.ExecutionFinished)
    assert not any(map(heard, kinds))
    breaker.isolate()
    async with Viewer(app) as viewer:
        await viewer.until(lambda it: bool(it.updates()))
        assert all(map(heard, kinds))
        breaker.close()
        await viewer.until(lambda it: bool(it.rows()))
        assert [row["state"] for row in viewer.answer.rows()] == ["closed"]
    clock.advance(LINGER)
    Retry().call(int)
    assert not any(map(heard, kinds))


def test_a_dashboard_that_is_dropped_or_closed_hears_nothing() -> None:
    """No subscription keeps it alive, or outlives it."""
    app = Dashboard()
    assert heard(events.CircuitChanged)
    del app
    gc.collect()
    assert not heard(events.CircuitChanged)
    Dashboard().close()
    assert not heard(events.CircuitChanged)
