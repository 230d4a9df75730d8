"""What the dashboard shows of policies and of their events."""

from __future__ import annotations

import gc
import re
import weakref

import anyio
import pytest

from resilience import (
    AdaptiveThrottle,
    Bulkhead,
    Cache,
    CircuitBreaker,
    Context,
    Fallback,
    Keyed,
    Policy,
    Rate,
    RateLimiter,
    Retry,
    Timeout,
    TimeoutExceeded,
    events,
)
from resilience.integrations.dashboard import Dashboard
from resilience.integrations.dashboard.log import Row
from resilience.integrations.dashboard.rates import RATES
from resilience.integrations.dashboard.state import MOST
from tests.conftest import Boom, FakeClock
from tests.integrations.dashboard.requests import Make, ask, fail, state_of, viewing

SECRET = "hunter2"


async def test_the_state_of_circuits_and_bulkheads_is_shown(make: Make, clock: FakeClock) -> None:
    """State, time until the next probe and last failure; running, queued and refused calls."""
    breaker = CircuitBreaker(2, open_for=30, name="db")
    bulkhead = Bulkhead(3, queue=2, name="pool")
    pipeline = Policy.wrap(breaker, bulkhead, name="stock")
    app = make(pipeline)
    for _ in range(3):
        pipeline.capture(fail())
    clock.advance(10)
    with bulkhead.slot():
        now = (await state_of(app))["now"]
    (circuit,) = now["circuits"]
    assert (circuit["name"], circuit["pipelines"], circuit["state"]) == ("db", ["stock"], "open")
    assert (circuit["retry_after"], circuit["open_for"]) == (20, 30)
    assert (circuit["last_failure"], circuit["opened"], circuit["rejected"]) == ("Boom", 1, 1)
    assert circuit["about"].startswith("opens on ConsecutiveFailures(2) for 30 s")
    (held,) = now["bulkheads"]
    assert [held[it] for it in ("limit", "in_flight", "queue", "queued", "rejected")] == [3, 1, 2, 0, 0]


async def test_the_state_of_rate_limiters_is_shown(make: Make, clock: FakeClock) -> None:
    """How many calls wait, and how long another would; a call that can never run has no number."""
    limiter, never = RateLimiter(2, name="partner"), RateLimiter(Rate(0.5, cost=lambda ctx: 1))
    for _ in range(2):
        limiter.call(int)
    first, second = (await state_of(make(limiter, never)))["now"]["limiters"]
    assert [first[it] for it in ("name", "queued", "next_turn", "rejected")] == ["partner", 0, 1.0, 0]
    assert first["about"] == "at most 2 calls in any second; the others wait for their turn"
    assert second["next_turn"] is None


async def test_the_state_of_throttles_is_shown(make: Make, clock: FakeClock) -> None:
    """The share of refused calls, and the counts that it is computed from."""
    throttle = AdaptiveThrottle(on=Boom, min_calls=10, name="search")
    for number in range(10):
        throttle.capture(fail() if number else lambda ctx: None)
    (shown,) = (await state_of(make(throttle)))["now"]["throttles"]
    assert [shown[it] for it in ("name", "requests", "accepts", "rejected")] == ["search", 10, 1, 0]
    assert shown["rejection_rate"] == throttle.stats().rejection_rate > 0.5
    assert shown["about"].startswith("lets 2 calls through for each that was accepted in the last 30 s")


async def test_the_state_of_caches_is_shown(make: Make, clock: FakeClock) -> None:
    """How its calls were answered, also if a key's policy holds the cache."""
    cache = Cache(10, stale=50, name="prices")
    keyed = Keyed(lambda key: Policy.wrap(cache, CircuitBreaker(name=key)), key=lambda text: text)
    for _ in range(3):
        keyed.call(str, "a")
    now = (await state_of(make(keyed)))["now"]
    (shown,) = now["caches"]
    assert [shown[it] for it in ("name", "hits", "stale", "shared", "misses", "size")] == ["prices", 2, 0, 0, 1, 1]
    assert shown["about"].startswith("keeps values for 10 s, 50 s more if a refresh fails")
    assert [it["name"] for it in now["circuits"]] == ["a"]


async def test_a_policy_in_two_pipelines_is_shown_once(make: Make) -> None:
    breaker = CircuitBreaker(name="db")
    first, second = Policy.wrap(Retry(), breaker, name="read"), Policy.wrap(breaker, name="write")
    (circuit,) = (await state_of(make(first, second, first)))["now"]["circuits"]
    assert circuit["pipelines"] == ["read", "write"]


async def test_circuits_of_one_name_are_different_cards(make: Make) -> None:
    """A key of the page for each, which stays its own as others come and go."""
    hosts = Keyed(lambda host: CircuitBreaker(name="host"), key=lambda host: host)
    for host in "abc":
        hosts.call(str, host)
    app = make(hosts)
    shown = [{it["key"] for it in (await state_of(app))["now"]["circuits"]}]
    hosts.forget("a")
    shown.append({it["key"] for it in (await state_of(app))["now"]["circuits"]})
    assert (len(shown[0]), len(shown[1])) == (3, 2)
    assert shown[1] < shown[0]


async def test_of_many_circuits_the_ones_that_are_not_closed_are_shown_first(make: Make) -> None:
    """The others are left out, and counted."""
    breakers = [CircuitBreaker(name=f"b{number}") for number in range(MOST + 5)]
    app = make(*breakers)
    breakers[-1].isolate()
    now = (await state_of(app))["now"]
    assert len(now["circuits"]) == MOST
    assert now["circuits"][0]["name"] == f"b{MOST + 4}"
    assert now["left_out"] == {"circuits": 5, "bulkheads": 0, "throttles": 0, "limiters": 0, "caches": 0}


def test_failures_before_the_first_viewer_are_shown(make: Make, clock: FakeClock) -> None:
    """The rows and counts of all events but executions, which are counted only for a viewer."""
    retry, breaker = Retry(2, on=Boom, backoff=[0.5]), CircuitBreaker(2, name="db")
    pipeline = Policy.wrap(Fallback("x"), retry, breaker, name="weather")
    app = make(pipeline)
    pipeline.call(fail(), Context())
    state = anyio.run(state_of, app)
    kinds = ["retry_scheduled", "circuit_changed", "retry_gave_up", "fallback_used"]
    assert [row["kind"] for row in state["rows"]] == kinds
    assert [row["number"] for row in state["rows"]] == [1, 2, 3, 4]
    assert state["rows"][1]["state"] == "open"
    assert "circuit db: closed -> open" in state["rows"][1]["text"]
    rates = state["now"]["rates"]
    totals = {name: rate["total"] for name, rate in rates.items()}
    assert totals == {**dict.fromkeys(RATES, 0), "retries": 1, "fallbacks": 1}
    assert set(rates["executions"]["seconds"]) == {None}


async def test_equal_events_in_a_row_are_one_row(make: Make, clock: FakeClock) -> None:
    """With a count. Later they are another row, so that the viewer sees the time."""
    breaker = CircuitBreaker(name="db")
    app = make(breaker)
    breaker.isolate()
    for _ in range(50):
        breaker.capture(fail())
    clock.advance(5)
    breaker.capture(fail())
    rows = (await state_of(app))["rows"]
    counts = [(row["kind"], row["count"]) for row in rows]
    assert counts == [("circuit_changed", 1), ("call_rejected", 50), ("call_rejected", 1)]


async def test_timeouts_of_attempts_and_of_the_execution_are_different_rows(make: Make, clock: FakeClock) -> None:
    """Also if the policies have the same name, and the events are close together."""
    limits = [Timeout(seconds, cooperative=True, name="limit") for seconds in (1.0, 0.5)]
    pipeline = Policy.wrap(limits[0], Retry(9, on=TimeoutExceeded, backoff=[0]), limits[1], name="weather")
    app = make(pipeline)

    def slow(ctx: Context) -> None:
        clock.advance(0.3)
        ctx.check()
        clock.advance(0.3)
        ctx.check()

    pipeline.capture(slow, Context(operation="get"))
    state = await state_of(app)
    rows = [(row["text"], row["count"]) for row in state["rows"] if row["kind"] == "timed_out"]
    assert rows == [
        ("weather (get): an attempt took longer than the 0.5 s of limit", 1),
        ("weather (get): the execution took longer than the 1 s of limit", 1),
    ]
    assert state["now"]["rates"]["timeouts"]["total"] == 2


def test_a_dashboard_may_be_collected_while_an_event_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Another listener may have held the last reference; the remaining listeners are called."""
    breaker = CircuitBreaker(name="db")
    breaker.isolate()
    apps: list[Dashboard] = []

    def drop(event: events.Event) -> None:
        apps.clear()
        gc.collect()

    unsubscribe = events.subscribe(drop, events.CallRejected)
    try:
        apps.append(Dashboard(breaker))
        reference = weakref.ref(apps[0])
        breaker.capture(fail())
    finally:
        unsubscribe()
    assert reference() is None
    assert caplog.records == []


def rows_in_memory() -> int:
    return sum(isinstance(it, Row) for it in gc.get_objects())


async def test_the_log_keeps_a_bounded_number_of_rows(make: Make, clock: FakeClock) -> None:
    """The latest ones; the others are freed."""
    breaker = CircuitBreaker(name="db")
    before = rows_in_memory()
    app = make(breaker, keep=3)
    for _ in range(10):
        breaker.isolate()
        breaker.close()
    state = await state_of(app)
    assert [row["number"] for row in state["rows"]] == [18, 19, 20]
    for number in range(10):
        refusing = CircuitBreaker(name=f"b{number}")
        refusing.isolate()
        refusing.capture(fail())
    assert rows_in_memory() <= before + 3


@pytest.mark.parametrize("messages", [False, True])
async def test_no_secret_is_shown(make: Make, messages: bool) -> None:
    """Never arguments, results or properties; the messages of errors only on request."""
    pipeline = Policy.wrap(
        Fallback(f"fallback {SECRET}"),
        Retry(2, on=Boom, on_result=lambda value: True, backoff=[0]),
        CircuitBreaker(2, on_result=lambda value: True, name="db"),
        name="p",
    )
    app = make(pipeline, messages=messages)

    async with viewing(app) as viewer:
        pipeline.execute(lambda ctx: f"result {SECRET}", Context(properties={"token": f"property {SECRET}"}))
        pipeline.call(lambda token: SECRET, f"argument {SECRET}")
        CircuitBreaker(1).capture(fail(f"message {SECRET}"))
        await viewer.until(lambda it: any(row["kind"] == "execution_finished" for row in it.rows()))
        sent = (viewer.answer.body + (await ask(app, "/state")).body).decode()
    assert set(re.findall(rf"(\w+) {SECRET}", sent)) == ({"message"} if messages else set())
    assert "Boom" in sent
