"""Metrics for OpenTelemetry, read with the SDK's in-memory reader."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry import metrics

from resilience import Policy, Retry
from resilience.integrations.opentelemetry import instrument
from resilience.integrations.telemetry import DURATION_BUCKETS, INSTRUMENTS
from tests.conftest import FakeClock, World
from tests.integrations.exporters import Metrics, OpenTelemetry, policies_with_state, report_everything


async def test_names_units_and_descriptions_are_those_of_the_instruments(threads: World, clock: FakeClock) -> None:
    """Each instrument is exported with its kind."""
    exporter = OpenTelemetry()
    exported = Metrics(exporter)
    policies = policies_with_state()
    exported.instrument(*policies)
    await report_everything(threads, *policies)
    found = {it.name: it for it in exporter.metrics()}
    exported.end()
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


def test_a_provider_that_becomes_the_global_one_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider that was given explicitly, and is the default now, is one provider."""
    exporter = OpenTelemetry()
    ends = [exporter.instrument()]
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: exporter.provider)
    ends.append(instrument())
    try:
        Policy.wrap(Retry(), name="p").execute(lambda ctx: None)
        assert [value[0] for (name, _), value in exporter.series().items() if name == "execution.duration"] == [1]
    finally:
        for end in ends:
            end()
