"""Metrics for Prometheus, as a scrape sees them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from resilience import Bulkhead, Policy, Retry
from resilience.integrations.prometheus import instrument
from resilience.integrations.telemetry import INSTRUMENTS
from tests.integrations.exporters import policies_with_state


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_all_instruments_are_in_both_formats(registry: CollectorRegistry) -> None:
    """Also before any event; the output in the format of OpenMetrics can be parsed."""
    policies = policies_with_state()
    end = instrument(*policies, registry=registry)
    for text, parser in [
        (generate_latest(registry).decode(), parse),
        (generate_openmetrics(registry).decode(), parse_openmetrics),
    ]:
        families = {family.name: family for family in parser(text)}
        for it in INSTRUMENTS:
            name = it.name.replace(".", "_") + ("_seconds" if it.unit == "s" else "")
            assert families[name].type == it.kind
            assert families[name].documentation == it.description
    end()


def test_the_default_registry_is_that_of_prometheus_client() -> None:
    """As expected by a user who only mounts `make_asgi_app()`."""
    end = instrument(policy := Policy.wrap(Bulkhead(7), name="in-the-default-registry"))
    labels = {"pipeline": policy.name, "policy": "Bulkhead"}
    assert REGISTRY.get_sample_value("resilience_bulkhead_limit", labels) == 7
    end()
    assert REGISTRY.get_sample_value("resilience_bulkhead_limit", labels) is None


def test_a_name_in_use_is_an_error_that_leaves_the_registry_unchanged(registry: CollectorRegistry) -> None:
    mine = Counter("resilience_retries", "mine", registry=registry)
    with pytest.raises(ValueError, match="resilience_retries"):
        instrument(registry=registry)
    assert {family.name for family in registry.collect()} == {"resilience_retries"}
    registry.unregister(mine)
    instrument(registry=registry)()


def test_an_emptied_registry_is_filled_again(registry: CollectorRegistry) -> None:
    """By the next `instrument`: the counts go on. A test suite may unregister everything between its tests."""
    pipeline = Policy.wrap(Bulkhead(7), name="p")
    for count in (1, 2):
        end = instrument(pipeline, registry=registry)
        pipeline.call(int)
        labels = {"pipeline": "p", "operation": "int", "outcome": "success", "error_type": "", "cancelled_by": ""}
        assert registry.get_sample_value("resilience_execution_duration_seconds_count", labels) == count
        assert registry.get_sample_value("resilience_bulkhead_limit", {"pipeline": "p", "policy": "Bulkhead"}) == 7
        end()
        for collector in list(registry._collector_to_names):
            registry.unregister(collector)


def test_the_buckets_of_a_registry_cannot_change(registry: CollectorRegistry) -> None:
    """One histogram has one set of bounds."""
    end = instrument(registry=registry, buckets=[0.1, 1])
    Retry().execute(lambda ctx: None)
    [durations] = [it for it in registry.collect() if it.name == "resilience_execution_duration_seconds"]
    assert [it.labels["le"] for it in durations.samples if it.name.endswith("_bucket")] == ["0.1", "1.0", "+Inf"]
    with pytest.raises(ValueError, match=r"buckets of this registry are \(0.1, 1.0\) already"):
        instrument(registry=registry)
    end()


def test_a_registry_is_freed_after_the_end_of_the_export() -> None:
    registry = CollectorRegistry()
    instrument(registry=registry)()
    reference = weakref.ref(registry)
    del registry
    gc.collect()
    assert reference() is None


WORKER = """
from resilience import Bulkhead, Policy
from resilience.integrations.prometheus import instrument
pipeline = Policy.wrap(Bulkhead(1), name="p")
instrument(pipeline)
for _ in range(3):
    pipeline.execute(lambda ctx: None)
"""


def test_counts_of_several_processes_add_up(tmp_path: Path) -> None:
    """In the client's multiprocess mode. It has no gauges, as these would have to be read in each process."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", WORKER], env=environment, check=True, timeout=60)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]
    samples = {(it.name, it.labels.get("pipeline")): it.value for family in registry.collect() for it in family.samples}
    assert samples["resilience_execution_duration_seconds_count", "p"] == 6
    assert ("resilience_bulkhead_limit", "p") not in samples
