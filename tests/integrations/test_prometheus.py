"""Metrics for Prometheus, as a scrape sees them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from resilience import AdaptiveThrottle, Bulkhead, Cache, CircuitBreaker, Keyed, Policy, RateLimiter, Retry
from resilience.integrations.httpx import ResilienceTransport
from resilience.integrations.prometheus import instrument
from resilience.integrations.telemetry import INSTRUMENTS
from tests.conftest import FakeClock


class Scraped:
    """A registry, and the samples in a scrape of it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ends: list[Callable[[], None]] = []

    def instrument(self, *policies: Policy[Any], **options: Any) -> Callable[[], None]:
        end = instrument(*policies, registry=self.registry, **options)
        self.ends.append(end)
        return end

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Name and labels of each sample (an empty label is left out) -> value."""
        found = {}
        for family in parse(generate_latest(self.registry).decode()):
            for it in family.samples:
                key = it.name, frozenset((name, text) for name, text in it.labels.items() if text)
                assert key not in found, "one series, one sample"
                found[key] = it.value
        return found

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples().get((f"resilience_{name}", frozenset(labels.items())))


@pytest.fixture
def scraped() -> Iterator[Scraped]:
    scraped = Scraped()
    yield scraped
    for end in scraped.ends:
        end()


def test_a_rejected_response_is_counted_by_its_status(clock: FakeClock, scraped: Scraped) -> None:
    """Although its caller gets a response, and no error."""
    scraped.instrument()
    answer = httpx.MockTransport(lambda request: httpx.Response(503))
    transport = ResilienceTransport(Policy.wrap(Retry(2, backoff=[1]), name="api"), transport=answer)
    with httpx.Client(transport=transport) as client:
        assert client.get("https://example.org/").status_code == 503
    found = scraped.samples().items()
    retries = {dict(labels)["error_type"]: value for (name, labels), value in found if "retries_total" in name}
    assert retries == {"503": 1}


def test_all_instruments_are_in_both_formats(scraped: Scraped) -> None:
    """Also before any event; the output in the format of OpenMetrics can be parsed."""
    pipeline = Policy.wrap(
        AdaptiveThrottle(), CircuitBreaker(), RateLimiter(1), Bulkhead(1), Cache(1), Keyed(lambda key: Retry(), str)
    )
    scraped.instrument(pipeline)
    for text, parser in [
        (generate_latest(scraped.registry).decode(), parse),
        (generate_openmetrics(scraped.registry).decode(), parse_openmetrics),
    ]:
        families = {family.name: family for family in parser(text)}
        for it in INSTRUMENTS:
            name = it.name.replace(".", "_") + ("_seconds" if it.unit == "s" else "")
            assert families[name].type == it.kind
            assert families[name].documentation == it.description


def test_the_default_registry_is_that_of_prometheus_client() -> None:
    """As expected by a user who only mounts `make_asgi_app()`."""
    end = instrument(policy := Policy.wrap(Bulkhead(7), name="in-the-default-registry"))
    labels = {"pipeline": policy.name, "policy": "Bulkhead"}
    assert REGISTRY.get_sample_value("resilience_bulkhead_limit", labels) == 7
    end()
    assert REGISTRY.get_sample_value("resilience_bulkhead_limit", labels) is None


def test_a_name_in_use_is_an_error_that_leaves_the_registry_unchanged(scraped: Scraped) -> None:
    mine = Counter("resilience_retries", "mine", registry=scraped.registry)
    with pytest.raises(ValueError, match="resilience_retries"):
        scraped.instrument()
    assert {family.name for family in scraped.registry.collect()} == {"resilience_retries"}
    scraped.registry.unregister(mine)
    scraped.instrument()


def test_the_buckets_of_a_registry_cannot_change(scraped: Scraped) -> None:
    """One histogram has one set of bounds."""
    scraped.instrument(buckets=[0.1, 1])
    Retry().execute(lambda ctx: None)
    bounds = {
        dict(labels)["le"]
        for name, labels in scraped.samples()
        if name == "resilience_execution_duration_seconds_bucket"
    }
    assert bounds == {"0.1", "1.0", "+Inf"}
    with pytest.raises(ValueError, match=r"buckets of this registry are \(0.1, 1.0\) already"):
        scraped.instrument()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"registry": "REGISTRY"}, TypeError, "registry must be a CollectorRegistry, not 'REGISTRY'"),
        ({"buckets": []}, ValueError, r"buckets must ascend, not \[\]"),
        ({"buckets": [2, 1]}, ValueError, r"buckets must ascend, not \[2, 1\]"),
        ({"buckets": ["1"]}, TypeError, "buckets must be a number, not '1'"),
    ],
)
def test_wrong_arguments_are_refused(options: Any, error: type[Exception], message: str) -> None:
    """The message names the parameter and the value."""
    with pytest.raises(error, match=message):
        instrument(**{"registry": CollectorRegistry(), **options})


def test_instrumenting_a_value_that_is_no_policy_is_refused(scraped: Scraped) -> None:
    """And nothing is counted after the error."""
    with pytest.raises(TypeError, match="only policies can be observed"):
        scraped.instrument("weather")  # type: ignore[arg-type]
    Retry().execute(lambda ctx: None)
    assert scraped.value("execution_duration_seconds_count", pipeline="Retry", outcome="success") is None


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
