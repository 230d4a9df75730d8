"""The common behaviour of the metrics of Prometheus and OpenTelemetry, each read with its own client."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from resilience import (
    AdaptiveThrottle,
    Bulkhead,
    CircuitBreaker,
    Context,
    Fallback,
    Keyed,
    Policy,
    Rate,
    RateLimiter,
    Retry,
    Timeout,
)
from resilience.integrations.http import PerHost, standard
from resilience.integrations.wire import OfHost
from resilience.testing import script
from tests.conftest import Boom, FakeClock, Script, World
from tests.integrations.exporters import Metrics, OpenTelemetry, Prometheus
from tests.integrations.http_clients import client_of


@pytest.fixture(params=[Prometheus, OpenTelemetry], ids=["prometheus", "opentelemetry"])
def metrics(request: pytest.FixtureRequest) -> Iterator[Metrics]:
    metrics = Metrics(request.param())
    yield metrics
    metrics.end()


async def test_events_become_counters_and_histograms(threads: World, clock: FakeClock, metrics: Metrics) -> None:
    """With labels for the pipeline, the policy, the operation and the error."""
    pipeline = Policy.wrap(Fallback("x"), Retry(3, on=Boom, backoff=[1.5]), CircuitBreaker(2, name="db"), name="p")
    metrics.instrument(pipeline)
    for _ in range(2):
        await threads.execute(pipeline, Script(Boom()).function(), Context(operation="get", timeout=60))
    where = {"pipeline": "p", "operation": "get"}
    boom, refused = "tests.conftest.Boom", "resilience.errors.CircuitOpen"
    assert metrics.value("retries", **where, policy="Retry", error_type=boom) == 1
    assert metrics.value("give_ups", **where, policy="Retry", error_type=boom, reason="circuit_open") == 1
    assert metrics.value("rejections", **where, policy="db", reason="CircuitOpen") == 1
    assert metrics.value("fallbacks", **where, policy="Fallback", error_type=boom) == 1
    assert metrics.value("fallbacks", **where, policy="Fallback", error_type=refused) == 1
    assert metrics.value("circuit.transitions", policy="db", old_state="closed", state="open") == 1
    assert metrics.value("execution.duration", **where, outcome="success") == (2, 1.5)
    assert metrics.value("attempt.duration", **where, outcome="failure", error_type=boom) == (2, 0.0)
    assert metrics.value("attempt.remaining", **where) == (2, 118.5)


def test_gauges_show_the_present_state(metrics: Metrics) -> None:
    """The state of circuits, the calls in bulkheads, and the abandoned calls."""
    breaker = CircuitBreaker(name="db")
    pipeline = Policy.wrap(breaker, Bulkhead(3, queue=2, name="pool"), name="p")
    metrics.instrument(pipeline)
    where = {"pipeline": "p", "policy": "pool"}
    assert pipeline.execute(lambda ctx: metrics.value("bulkhead.in_flight", **where)) == 1
    assert metrics.value("bulkhead.in_flight", **where) == 0
    assert metrics.value("bulkhead.limit", **where) == 3
    assert metrics.value("bulkhead.queued", **where) == 0
    assert metrics.value("calls.abandoned") == Timeout.abandoned()
    breaker.isolate()
    states = ("closed", "open", "half_open", "isolated")
    found = [metrics.value("circuit.state", pipeline="p", policy="db", state=state) for state in states]
    assert found == [0, 0, 0, 1]


def test_instrumenting_a_registry_twice_counts_once(metrics: Metrics, caplog: pytest.LogCaptureFixture) -> None:
    """Each call adds its policies, and each end removes them; nothing is logged."""
    first, second = Policy.wrap(Bulkhead(1), name="first"), Policy.wrap(Bulkhead(2), name="second")

    def executed() -> Any:
        first.execute(lambda ctx: None, Context(operation="get"))
        return metrics.value("execution.duration", pipeline="first", operation="get", outcome="success")[0]

    ends = [metrics.instrument(first), metrics.instrument(first, second)]
    assert executed() == 1
    assert metrics.value("bulkhead.limit", pipeline="second", policy="Bulkhead") == 2
    ends[1]()
    assert metrics.value("bulkhead.limit", pipeline="second", policy="Bulkhead") is None
    assert executed() == 2
    for _ in range(2):  # the second time is a no-op
        ends[0]()
    assert executed() == 2
    assert metrics.labels("policy", "bulkhead") == set()
    metrics.instrument()
    assert executed() == 3
    assert caplog.records == []


def test_instrumenting_a_value_that_is_no_policy_is_refused(metrics: Metrics) -> None:
    """Such as a class instead of an object. Nothing is counted after the error."""
    for value in (Retry, PerHost, "weather", None):
        with pytest.raises(TypeError, match=f"only policies can be observed, not {re.escape(repr(value))}"):
            metrics.instrument(value)
    with pytest.raises(TypeError, match=r"unpack them, with \*policies$"):
        metrics.instrument([Retry()])
    Retry().execute(lambda ctx: None)
    assert metrics.labels("pipeline") == set()


# --- the number of series --------------------------------------------------------------------


def ask(policies: Any, hosts: range) -> None:
    """Send a request to each host; half of them answer 503."""
    turn = itertools.count()
    with client_of(policies, lambda _: httpx.Response(503 if next(turn) % 2 else 200)) as client:
        for number in hosts:
            client.get(f"https://host-{number}.example/")


def test_the_number_of_series_does_not_grow_with_hosts(metrics: Metrics, clock: FakeClock) -> None:
    """The user of a service may choose the host: names are without it, and policies of many hosts are added up."""
    policies = standard(max_hosts=5, attempts=2)
    metrics.instrument(policies)
    ask(policies, range(10))
    before = len(metrics.exporter.series())
    ask(policies, range(10, 300))
    assert len(metrics.exporter.series()) == before
    assert metrics.labels("pipeline") == {"standard pipeline"}
    assert metrics.labels("operation") == {"GET"}
    assert metrics.labels("policy", "circuit.state") == {"breaker"}
    assert metrics.value("bulkhead.limit", pipeline="standard pipeline", policy="bulkhead") == 5 * 1000
    assert metrics.value("circuit.state", pipeline="standard pipeline", policy="breaker", state="closed") == 5


def test_the_policies_of_many_keys_take_one_name(metrics: Metrics) -> None:
    """They leave room for the names of other policies, whose gauges show their own state."""
    tenants = Keyed(lambda key: CircuitBreaker(name="tenant"), key=lambda number: number)
    alone = CircuitBreaker(name="alone")
    metrics.instrument(tenants, alone, max_names=5)
    for number in range(10):
        tenants.call(abs, number)
    tenants.policies[3].isolate()
    where = {"pipeline": "Keyed", "policy": "tenant"}
    assert metrics.value("circuit.state", **where, state="closed") == 9
    assert metrics.value("circuit.state", **where, state="isolated") == 1
    assert metrics.value("circuit.state", pipeline="alone", policy="alone", state="closed") == 1


def test_shares_and_times_of_policies_with_the_same_labels_are_not_added_up(metrics: Metrics, clock: FakeClock) -> None:
    """A sum of them means nothing: the gauge shows the largest."""

    def make(host: str) -> Policy[Any]:
        name = OfHost(f"p of {host}", common="p")
        return Policy.wrap(AdaptiveThrottle(min_calls=1), RateLimiter(Rate(1, 60.0)), name=name)

    hosts = PerHost(make)
    metrics.instrument(hosts)
    for number in range(3):
        hosts.for_host(f"https://host-{number}.example/").capture(script(ConnectionError()))
        clock.advance(1)
    assert metrics.value("throttle.rejection_rate", pipeline="p", policy="AdaptiveThrottle") == 0.5
    assert metrics.value("rate_limiter.next_turn", pipeline="p", policy="RateLimiter") == 59


def test_host_names_are_kept_on_request_up_to_max_names(metrics: Metrics, clock: FakeClock) -> None:
    """Further ones are "other", in counts and in gauges."""
    policies = standard(attempts=2)
    metrics.instrument(policies, hosts=True, max_names=3)
    ask(policies, range(50))
    assert metrics.labels("operation") == {*(f"GET host-{number}.example" for number in range(3)), "other"}
    assert len(metrics.labels("pipeline")) == 4
    assert metrics.value("bulkhead.limit", pipeline="other", policy="other") == 47 * 1000


def test_a_name_that_is_no_valid_text_can_be_exported(metrics: Metrics) -> None:
    """Such as that of a file. One would make every scrape fail."""
    metrics.instrument()
    Retry().execute(lambda ctx: None, Context(operation="read \udcff"))
    assert metrics.labels("operation") == {r"read \udcff"}


def test_classes_of_errors_that_a_program_makes_are_bounded(metrics: Metrics) -> None:
    metrics.instrument(max_names=2)
    for number in range(5):
        Retry().capture(script(type(f"Error{number}", (Exception,), {"__module__": "app"})()))
    assert metrics.labels("error_type") == {"app.Error0", "app.Error1", "other"}


def test_an_unused_name_makes_room_for_another(clock: FakeClock) -> None:
    """Its series are no longer in a scrape. (Series of OpenTelemetry cannot be removed.)"""
    metrics = Metrics(Prometheus())
    metrics.instrument(max_names=2)
    for name in ("a", "b", "a", "late"):
        Retry(name=name).execute(lambda ctx: None)
    assert metrics.labels("pipeline") == {"a", "b", "other"}
    clock.advance(600)
    for name in ("a", "late", "later"):
        Retry(name=name).execute(lambda ctx: None)
    assert metrics.labels("pipeline") == {"a", "late", "other"}
    metrics.end()


def test_series_that_cannot_be_removed_make_no_room(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the multiprocess mode of Prometheus' client, so that the number of series is bounded there, too."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "unused")
    metrics = Metrics(Prometheus())
    metrics.instrument(max_names=1)
    for name in ("a", "late"):
        Retry(name=name).execute(lambda ctx: None)
        clock.advance(601)
    assert metrics.labels("pipeline") == {"a", "other"}
    metrics.end()


def test_settings_cannot_change_while_metrics_are_exported(metrics: Metrics) -> None:
    metrics.instrument(hosts=True, max_names=7)
    for other in ({}, {"hosts": True}, {"max_names": 7}):
        with pytest.raises(ValueError, match=r"these metrics are \(True, 7, True\) already"):
            metrics.instrument(**other)
    with pytest.raises(TypeError, match="hosts must be True or False"):
        metrics.instrument(hosts=1)
    metrics.instrument(hosts=True, max_names=7)


def test_measuring_attempts_can_be_switched_off(metrics: Metrics) -> None:
    """It doubles the cost of a call; whole executions are always measured. This setting cannot change either."""
    metrics.instrument(attempts=False)
    Retry(name="quick").execute(lambda ctx: None, Context(timeout=5, operation="get"))
    assert metrics.value("execution.duration", pipeline="quick", operation="get", outcome="success")[0] == 1
    assert metrics.labels("pipeline", "attempt.duration") == metrics.labels("pipeline", "attempt.remaining") == set()
    with pytest.raises(ValueError, match=r"\(False, 200, False\) already, not \(False, 200, True\)"):
        metrics.instrument()
    with pytest.raises(TypeError, match="attempts must be True or False"):
        metrics.instrument(attempts=0)
