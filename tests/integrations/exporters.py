"""The exporters of metrics, each read with its own client, and an event for each of their instruments."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse

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
from resilience.integrations import opentelemetry, prometheus
from resilience.integrations.telemetry import INSTRUMENTS
from tests.conftest import Boom, Script, World
from tests.functions import raising
from tests.listening import park_a_task, retry_without_budget

#: Name and labels of a series (an empty label is left out) -> its value; of a histogram, the count and the sum.
Series = dict[tuple[str, frozenset[tuple[str, str]]], Any]

NAMES = {it.name.replace(".", "_") + ("_seconds" if it.unit == "s" else ""): it for it in INSTRUMENTS}


class Prometheus:
    """A registry, and the series in a scrape of it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def instrument(self, *policies: Any, **options: Any) -> Callable[[], None]:
        return prometheus.instrument(*policies, registry=self.registry, **options)

    def series(self) -> Series:
        found: Series = {}
        for family in parse(generate_latest(self.registry).decode()):
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
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader], shutdown_on_exit=False)

    def instrument(self, *policies: Any, **options: Any) -> Callable[[], None]:
        return opentelemetry.instrument(*policies, meter_provider=self.provider, **options)

    def metrics(self) -> list[Any]:
        data = self.reader.get_metrics_data()
        if data is None:
            return []
        [resource] = data.resource_metrics
        [scope] = resource.scope_metrics
        assert scope.scope.name == "resilience"
        return list(scope.metrics)

    def series(self) -> Series:
        return {
            (metric.name.removeprefix("resilience."), self._labels(point)): (
                (point.count, point.sum) if hasattr(point, "count") else point.value
            )
            for metric in self.metrics()
            for point in metric.data.data_points
        }

    def _labels(self, point: Any) -> frozenset[tuple[str, str]]:
        assert all(name.startswith("resilience.") or name == "error.type" for name in point.attributes)
        names = {it: it.removeprefix("resilience.").replace("error.type", "error_type") for it in point.attributes}
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
        found = [dict(labels) for name, labels in self.exporter.series() if name.startswith(prefix)]
        return {labels[label] for labels in found if label in labels}

    def end(self) -> None:
        for end in self._ends:
            end()


def policies_with_state() -> tuple[Policy[Any], Policy[Any], Policy[Any]]:
    """Return policies with something to show in each gauge."""
    return (
        Policy.wrap(Fallback("x"), Timeout(5), Retry(3, on=Boom, backoff=[0]), CircuitBreaker(2), Bulkhead(1)),
        Policy.wrap(AdaptiveThrottle(), RateLimiter(1, max_wait=0, observe_only=True)),
        Cache(60).wrap(Keyed(lambda key: Retry(), key=str)),
    )


class WithoutText(Exception):
    """An exception whose `__str__` raises."""

    __str__ = raising(ZeroDivisionError)


def report_timeouts() -> None:
    """Let an attempt, two executions, a caller's deadline and two waits in a queue time out."""

    def endless(ctx: Context) -> None:
        while True:
            ctx.check()
            time.sleep(0.001)

    get = Context(operation="get")
    Policy.wrap(Retry(1), Timeout(0.01, name="each"), name="p").capture(endless, get)
    Policy.wrap(Timeout(0.01, name="whole"), Retry(1), name="p").capture(endless, get)
    Timeout(0.01, name="alone").capture(endless, get)
    Timeout(5.0, name="budget").capture(endless, Context(timeout=0.01, operation="get"))
    bulkhead = Bulkhead(1, queue=1, max_wait=0.01, name="pool")
    with bulkhead.slot():
        bulkhead.capture(endless, get)
        bulkhead.capture(endless, Context(timeout=0.005, operation="get"))


async def report_everything(world: World, pipeline: Policy[Any], limits: Policy[Any], kept: Policy[Any]) -> None:
    """Let these and other policies report something to each other instrument."""
    failing, fine = Script(Boom()).function(), Script(1).function()
    for _ in range(2):
        kept.call(str, 1)
        await world.execute(pipeline, failing)
        await world.execute(limits, fine)  # the second is over the rate
    list(Retry().streaming().call(iter, [1]))
    park_a_task()
    chaos = Chaos(result=1)
    with chaos.injecting(rate=1.0):
        await world.execute(chaos, fine)
    await world.attempt(Hedge(5, on=Boom, eager=True), failing)
    await world.attempt(retry_without_budget(), failing)
    await world.attempt(Retry(1, on=Boom), failing, Context(timeout=5))
    await world.attempt(Timeout(5), failing, Context(timeout=0))
