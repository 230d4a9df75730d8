"""Metrics for OpenTelemetry, as the SDK's in-memory reader sees them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from resilience import Bulkhead, CircuitBreaker, Context, Fallback, Policy, Retry, Timeout
from resilience.integrations.opentelemetry import instrument
from resilience.integrations.telemetry import DURATION_BUCKETS, INSTRUMENTS
from tests.conftest import Boom, FakeClock, Script, World


class Measured:
    """A meter provider, and what a reader of it finds."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])
        self.endings: list[Callable[[], None]] = []

    def instrument(self, *policies: Policy[Any]) -> Callable[[], None]:
        self.endings.append(instrument(*policies, meter_provider=self.provider))
        return self.endings[-1]

    def metrics(self) -> dict[str, Any]:
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        [resource] = data.resource_metrics
        [scope] = resource.scope_metrics
        assert scope.scope.name == "resilience"
        return {metric.name: metric for metric in scope.metrics}

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        metric = self.metrics().get(f"resilience.{name}")
        return [] if metric is None else [(dict(point.attributes), point) for point in metric.data.data_points]

    def value(self, name: str, **attributes: str) -> Any:
        wanted = {_key(key): text for key, text in attributes.items()}
        [value] = [point.value for found, point in self.points(name) if found == wanted]
        return value


def _key(label: str) -> str:
    return "error.type" if label == "error_type" else f"resilience.{label}"


@pytest.fixture
def measured() -> Iterator[Measured]:
    it = Measured()
    yield it
    for ending in it.endings:
        ending()
    it.provider.shutdown()


def test_events_become_counters_and_histograms(world: World, clock: FakeClock, measured: Measured) -> None:
    """With attributes in our namespace, and OpenTelemetry's own for the class of an error."""
    pipeline = Policy.wrap(Fallback("x"), Retry(3, on=Boom, backoff=[1.5]), CircuitBreaker(2, name="db"), name="p")
    measured.instrument(pipeline)

    async def main() -> None:
        for _ in range(2):
            await world.execute(pipeline, Script(Boom()).function(), Context(operation="get", timeout=60))

    world.run(main)
    where = {"pipeline": "p", "operation": "get"}
    boom = "tests.conftest.Boom"
    assert measured.value("retries", **where, policy="Retry", error_type=boom) == 2
    assert measured.value("rejections", **where, policy="db", reason="CircuitOpen") == 2
    refused = "resilience.errors.CircuitOpen"
    assert measured.value("fallbacks", **where, policy="Fallback", error_type=refused) == 2
    assert measured.value("circuit.transitions", policy="db", old_state="closed", state="open") == 1
    [(attributes, point)] = measured.points("execution.duration")
    assert attributes == {
        "resilience.pipeline": "p",
        "resilience.operation": "get",
        "resilience.outcome": "success",
    }
    assert (point.count, point.sum, point.explicit_bounds) == (2, 3.0, DURATION_BUCKETS)
    [(attributes, point)] = measured.points("attempt.duration")
    assert (attributes["resilience.outcome"], attributes["error.type"], point.count) == ("failure", boom, 2)
    [(_, point)] = measured.points("attempt.remaining")
    assert (point.count, point.max, point.min) == (2, 60.0, 58.5)


def test_names_units_and_descriptions_are_those_of_the_instruments(
    world: World, clock: FakeClock, measured: Measured
) -> None:
    """Every one of them is there, with its kind."""
    pipeline = Policy.wrap(Fallback("x"), Timeout(5), Retry(3, on=Boom, backoff=[0]), CircuitBreaker(2), Bulkhead(1))
    measured.instrument(pipeline)

    async def main() -> None:
        for _ in range(2):
            await world.execute(pipeline, Script(Boom()).function())
        await world.attempt(Retry(1, on=Boom), Script(Boom()).function(), Context(timeout=5))
        await world.attempt(Timeout(5), Script(Boom()).function(), Context(timeout=0))

    world.run(main)
    found = measured.metrics()
    assert {it.name for it in INSTRUMENTS} == set(found)
    kinds = {"counter": "Sum", "histogram": "Histogram", "gauge": "Gauge"}
    for it in INSTRUMENTS:
        metric = found[it.name]
        assert (metric.unit, metric.description) == (it.unit, it.description)
        assert type(metric.data).__name__ == kinds[it.kind]


def test_gauges_are_observed_when_they_are_collected(measured: Measured) -> None:
    """The state of circuits, what bulkheads hold, and the calls that were abandoned."""
    pipeline = Policy.wrap(CircuitBreaker(name="db"), Bulkhead(3, queue=2, name="pool"), name="p")
    measured.instrument(pipeline)
    where = {"pipeline": "p", "policy": "pool"}
    assert pipeline.execute(lambda ctx: measured.value("bulkhead.in_flight", **where)) == 1
    assert measured.value("bulkhead.in_flight", **where) == 0
    assert measured.value("bulkhead.limit", **where) == 3
    assert measured.value("bulkhead.queued", **where) == 0
    assert measured.value("calls.abandoned") == Timeout.abandoned()
    pipeline.policies[0].isolate()  # type: ignore[attr-defined]
    assert measured.value("circuit.state", pipeline="p", policy="db", state="isolated") == 1
    assert measured.value("circuit.state", pipeline="p", policy="db", state="closed") == 0


def test_called_twice_for_one_provider_everything_is_counted_once(
    measured: Measured, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK has nothing to complain of, and each ending ends its own part."""
    first, second = Policy.wrap(Bulkhead(1), name="first"), Policy.wrap(Bulkhead(2), name="second")
    endings = [measured.instrument(first), measured.instrument(first, second)]
    first.execute(lambda ctx: None)
    assert [point.count for _, point in measured.points("execution.duration")] == [1]
    assert len(measured.points("bulkhead.limit")) == 2
    endings[1]()
    assert len(measured.points("bulkhead.limit")) == 1
    endings[0]()
    first.execute(lambda ctx: None)
    assert [point.count for _, point in measured.points("execution.duration")] == [1]
    assert measured.points("bulkhead.limit") == []
    measured.instrument()
    first.execute(lambda ctx: None)
    assert [point.count for _, point in measured.points("execution.duration")] == [2]
    assert caplog.records == []


def test_without_a_provider_it_is_the_global_one() -> None:
    """Which, where no SDK is set up, does nothing."""
    undo = instrument(policy := Policy.wrap(Retry(), Bulkhead(1)))
    assert policy.execute(lambda ctx: "fine") == "fine"
    undo()


LATER = """
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from resilience import Bulkhead, Policy
from resilience.integrations.opentelemetry import instrument
pipeline = Policy.wrap(Bulkhead(2), name="p")
instrument(pipeline)
reader = InMemoryMetricReader()
provider = MeterProvider([reader], shutdown_on_exit=False)
metrics.set_meter_provider(provider)
instrument()
instrument(meter_provider=provider)
pipeline.execute(lambda ctx: None)
found = {it.name: it.data.data_points for it in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics}
durations, limits = found["resilience.execution.duration"], found["resilience.bulkhead.limit"]
print([it.count for it in durations], [it.value for it in limits])
"""


def test_the_global_provider_may_be_set_later() -> None:
    """What was instrumented before counts from then on; and nothing counts twice."""
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("[1] [2]\n", "")


EARLIER = """
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from resilience import Policy, Retry
from resilience.integrations.opentelemetry import instrument
reader = InMemoryMetricReader()
provider = MeterProvider([reader], shutdown_on_exit=False)
instrument(meter_provider=provider)
metrics.set_meter_provider(provider)
instrument()
Policy.wrap(Retry(), name="p").execute(lambda ctx: None)
found = {it.name: it.data.data_points for it in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics}
print([it.count for it in found["resilience.execution.duration"]])
"""


def test_a_provider_that_becomes_the_global_one_counts_once() -> None:
    """What was given by hand before, and is the default now, is one provider."""
    done = subprocess.run([sys.executable, "-c", EARLIER], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("[1]\n", "")


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: instrument(meter_provider=1), TypeError, "meter_provider must be a MeterProvider, not 1"),  # type: ignore[arg-type]
        (lambda: instrument("weather"), TypeError, "only policies can be observed, not 'weather'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(build: Callable[[], object], error: type[Exception], message: str) -> None:
    """With the parameter and the value."""
    with pytest.raises(error, match=message):
        build()
