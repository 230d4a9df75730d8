"""Metrics for OpenTelemetry, read with the SDK's in-memory reader."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from resilience import (
    AdaptiveThrottle,
    Bulkhead,
    Cache,
    Chaos,
    CircuitBreaker,
    Context,
    Fallback,
    Hedge,
    Keyed,
    Policy,
    RateLimiter,
    Retry,
    Timeout,
)
from resilience.integrations.opentelemetry import instrument
from resilience.integrations.telemetry import DURATION_BUCKETS, INSTRUMENTS
from tests.conftest import Boom, FakeClock, Script, World
from tests.listening import park_a_task, retry_without_budget


class Measured:
    """A meter provider, and the metrics of a reader of it."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])
        self.ends: list[Callable[[], None]] = []

    def instrument(self, *policies: Policy[Any]) -> Callable[[], None]:
        self.ends.append(instrument(*policies, meter_provider=self.provider))
        return self.ends[-1]

    def metrics(self) -> dict[str, Any]:
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        [resource] = data.resource_metrics
        [scope] = resource.scope_metrics
        assert scope.scope.name == "resilience"
        return {metric.name: metric for metric in scope.metrics}


@pytest.fixture
def measured() -> Iterator[Measured]:
    measured = Measured()
    yield measured
    for end in measured.ends:
        end()
    measured.provider.shutdown()


async def test_names_units_and_descriptions_are_those_of_the_instruments(
    world: World, clock: FakeClock, measured: Measured
) -> None:
    """Each instrument is exported with its kind."""
    pipeline = Policy.wrap(Fallback("x"), Timeout(5), Retry(3, on=Boom, backoff=[0]), CircuitBreaker(2), Bulkhead(1))
    chaos, limits = Chaos(result=1), Policy.wrap(AdaptiveThrottle(), RateLimiter(1, max_wait=0, observe_only=True))
    kept = Cache(60).wrap(Keyed(lambda key: Retry(), key=str))
    measured.instrument(pipeline, limits, kept)
    for _ in range(2):
        kept.call(str, 1)
    list(Retry().streaming().call(iter, [1]))
    park_a_task()
    await world.attempt(Hedge(5, on=Boom, eager=True), Script(Boom()).function())
    for _ in range(2):
        await world.execute(pipeline, Script(Boom()).function())
        await world.execute(limits, Script(1).function())  # the second is over the rate
    with chaos.injecting(rate=1.0):
        await world.execute(chaos, Script(2).function())
    await world.attempt(retry_without_budget(), Script(Boom()).function())
    await world.attempt(Retry(1, on=Boom), Script(Boom()).function(), Context(timeout=5))
    await world.attempt(Timeout(5), Script(Boom()).function(), Context(timeout=0))
    found = measured.metrics()
    assert {it.name for it in INSTRUMENTS} == set(found)
    kinds = {"counter": "Sum", "histogram": "Histogram", "gauge": "Gauge"}
    for it in INSTRUMENTS:
        metric = found[it.name]
        assert (metric.unit, metric.description) == (it.unit, it.description)
        assert type(metric.data).__name__ == kinds[it.kind]
        if it.kind == "histogram":
            assert metric.data.data_points[0].explicit_bounds == DURATION_BUCKETS


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
    """Policies that were instrumented before count from then on, and nothing counts twice."""
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
    """A provider that was given explicitly, and is the default now, is one provider."""
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
    """The message names the parameter and the value."""
    with pytest.raises(error, match=message):
        build()
