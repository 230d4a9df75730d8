"""The common behaviour of the metrics of Prometheus and OpenTelemetry, each read with its own client."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse

from resilience import Bulkhead, CircuitBreaker, Context, Fallback, Policy, Retry, Timeout
from resilience.integrations import opentelemetry, prometheus
from resilience.integrations.http import PerHost, standard
from resilience.integrations.httpx import ResilienceTransport
from resilience.integrations.telemetry import INSTRUMENTS
from tests.conftest import Boom, FakeClock, Script, World

#: Name and labels of a series (an empty label is left out) -> its value; of a histogram, the count and the sum.
Series = dict[tuple[str, frozenset[tuple[str, str]]], Any]

NAMES = {it.name.replace(".", "_") + ("_seconds" if it.unit == "s" else ""): it for it in INSTRUMENTS}


class Prometheus:
    """A registry, and the series in a scrape of it."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

    def instrument(self, *policies: Any, **options: Any) -> Callable[[], None]:
        return prometheus.instrument(*policies, registry=self._registry, **options)

    def series(self) -> Series:
        found: Series = {}
        for family in parse(generate_latest(self._registry).decode()):
            if family.name not in NAMES:  # the instant at which a series was created
                continue
            samples: Series = {}
            for it in family.samples:
                key = it.name.removeprefix(family.name), frozenset((k, v) for k, v in it.labels.items() if v)
                assert key not in samples, "one series, one sample"
                samples[key] = it.value
            name = NAMES[family.name].name.removeprefix("resilience.")
            for (kind, labels), value in samples.items():
                if kind in ("", "_total"):
                    found[name, labels] = value
                elif kind == "_count":
                    found[name, labels] = value, samples["_sum", labels]
        return found


class OpenTelemetry:
    """A meter provider, and the series in a reader of it."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider([self._reader], shutdown_on_exit=False)

    def instrument(self, *policies: Any, **options: Any) -> Callable[[], None]:
        return opentelemetry.instrument(*policies, meter_provider=self._provider, **options)

    def series(self) -> Series:
        data = self._reader.get_metrics_data()
        metrics = [] if data is None else data.resource_metrics[0].scope_metrics[0].metrics
        return {
            (metric.name.removeprefix("resilience."), self._labels(point)): (
                (point.count, point.sum) if hasattr(point, "count") else point.value
            )
            for metric in metrics
            for point in metric.data.data_points
        }

    def _labels(self, point: Any) -> frozenset[tuple[str, str]]:
        assert all(name.startswith("resilience.") or name == "error.type" for name in point.attributes)
        names = {
            name: name.removeprefix("resilience.").replace("error.type", "error_type") for name in point.attributes
        }
        return frozenset((names[name], text) for name, text in point.attributes.items())


class Metrics:
    """One of the two exporters."""

    def __init__(self, exporter: Any) -> None:
        self.exporter = exporter
        self._ends: list[Callable[[], None]] = []

    def instrument(self, *policies: Any, **options: Any) -> Callable[[], None]:
        self._ends.append(self.exporter.instrument(*policies, **options))
        return self._ends[-1]

    def value(self, name: str, **labels: str) -> Any:
        return self.exporter.series().get((name, frozenset(labels.items())))

    def labels(self, label: str, prefix: str = "") -> set[str]:
        return {
            dict(labels)[label]
            for name, labels in self.exporter.series()
            if label in dict(labels) and name.startswith(prefix)
        }

    def end(self) -> None:
        for end in self._ends:
            end()


@pytest.fixture(params=[Prometheus, OpenTelemetry], ids=["prometheus", "opentelemetry"])
def metrics(request: pytest.FixtureRequest) -> Iterator[Metrics]:
    metrics = Metrics(request.param())
    yield metrics
    metrics.end()


async def test_events_become_counters_and_histograms(world: World, clock: FakeClock, metrics: Metrics) -> None:
    """With labels for the pipeline, the policy, the operation and the error."""
    pipeline = Policy.wrap(Fallback("x"), Retry(3, on=Boom, backoff=[1.5]), CircuitBreaker(2, name="db"), name="p")
    metrics.instrument(pipeline)
    for _ in range(2):
        await world.execute(pipeline, Script(Boom()).function(), Context(operation="get", timeout=60))
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


def test_instrumenting_one_registry_twice_counts_everything_once(
    metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
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
    ends[0]()
    assert executed() == 2
    assert metrics.labels("policy", "bulkhead") == set()
    metrics.instrument()
    assert executed() == 3
    assert caplog.records == []


# --- the number of series --------------------------------------------------------------------


def ask(policies: Any, hosts: range) -> None:
    """Send a request to each host; half of them answer 503."""
    turn = itertools.count()
    answer = httpx.MockTransport(lambda request: httpx.Response(503 if next(turn) % 2 else 200))
    with httpx.Client(transport=ResilienceTransport(policies, transport=answer)) as client:
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


def test_host_names_are_kept_on_request_up_to_max_names(metrics: Metrics, clock: FakeClock) -> None:
    """Further ones are "other", in counts and in gauges."""
    policies = standard(attempts=2)
    metrics.instrument(policies, hosts=True, max_names=3)
    ask(policies, range(50))
    assert metrics.labels("operation") == {*(f"GET host-{number}.example" for number in range(3)), "other"}
    assert len(metrics.labels("pipeline")) == 4
    assert metrics.value("bulkhead.limit", pipeline="other", policy="other") == 47 * 1000


def test_names_that_hold_ids_are_bounded(metrics: Metrics) -> None:
    """Of policies and of operations."""
    metrics.instrument(max_names=10)
    for number in range(100):
        Retry(name=f"user {number}").execute(lambda ctx: None, Context(operation=f"get-{number}"))
    assert len(metrics.labels("pipeline")) == len(metrics.labels("operation")) == 11


def test_a_name_that_is_no_valid_text_can_be_exported(metrics: Metrics) -> None:
    """Such as that of a file. One would make every scrape fail."""
    metrics.instrument()
    Retry().execute(lambda ctx: None, Context(operation="read \udcff"))
    assert metrics.labels("operation") == {r"read \udcff"}


def test_names_that_the_user_gives_to_hosts_are_kept(metrics: Metrics) -> None:
    """They are few, or bounded as all names are."""
    policies = PerHost(lambda origin: Policy.wrap(CircuitBreaker(name="breaker"), name=origin))
    metrics.instrument(policies)
    policies.for_host("https://a.example/")
    assert metrics.labels("pipeline") == {"https://a.example:443"}


def test_an_unused_name_makes_room_for_another(clock: FakeClock) -> None:
    """Its series are no longer in a scrape. (Series of OpenTelemetry cannot be removed.)"""
    metrics = Metrics(Prometheus())
    metrics.instrument(max_names=2)
    for name in ("a", "b", "a", "late"):
        Retry(name=name).execute(lambda ctx: None)
    assert metrics.labels("pipeline") == {"a", "b", "other"}
    clock.advance(601)
    Retry(name="a").execute(lambda ctx: None)
    Retry(name="late").execute(lambda ctx: None)
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
        with pytest.raises(ValueError, match="hosts and max_names of these metrics are True and 7 already"):
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
    with pytest.raises(ValueError, match="attempts of these metrics is False already, not True"):
        metrics.instrument()
    with pytest.raises(TypeError, match="attempts must be True or False"):
        metrics.instrument(attempts=0)


def test_recorders_are_kept_for_a_bounded_number_of_names(metrics: Metrics) -> None:
    """Calls under further names are counted too."""
    metrics.instrument(max_names=2, attempts=False)
    for number in range(1005):
        Retry(name="p").execute(lambda ctx: None, Context(operation=f"get-{number}"))
    assert metrics.value("execution.duration", pipeline="p", operation="other", outcome="success")[0] == 1003
