"""Metrics for Prometheus, by `prometheus_client`.

Counters and histograms are the client's own, which work in its multiprocess mode. Gauges are read from the policies at
each scrape by a custom collector, which that mode does not support: there the gauges are missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import final
from weakref import WeakKeyDictionary

from resilience.integrations._extras import needed_by

with needed_by("prometheus"):
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.core import GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

from typing_extensions import override

from resilience import checks, forks
from resilience.integrations.telemetry import DURATION_BUCKETS, INSTRUMENTS, Feed, Instrument, Labels, Observable

__all__ = ["instrument"]


def instrument(
    *policies: Observable,
    registry: CollectorRegistry | None = None,
    buckets: Sequence[float] = DURATION_BUCKETS,
    hosts: bool = False,
    max_names: int = 200,
    attempts: bool = True,
) -> Callable[[], None]:
    """Measure what all policies of this process do, and export the state of the given ones as gauges.

    :param policies: whose circuit breakers, bulkheads and the like get gauges: policies, pipelines, and objects with
        many of them (`PerHost`, `standard()` for HTTP clients). They are held by weak references.
    :param registry: where the metrics go; `prometheus_client.REGISTRY` by default. Further calls for the same registry
        add policies; each event is counted once.
    :param buckets: upper bounds of the histograms in seconds, ascending.
    :param hosts: whether names keep the host that they contain: ``GET example.org`` instead of ``GET``. Without it,
        policies that then have the same labels share their gauges: the sum, or the largest share or time.
    :param max_names: how many pipelines, policies, operations and error types there may be, 200 of each by default.
        Further ones are ``"other"``; a name that was not seen for ten minutes is replaced, and its series are removed
        (not in the multiprocess mode of the client, which cannot remove any).
    :param attempts: whether single calls of functions are measured besides whole executions, as `attempt.duration` and
        `attempt.remaining`. Without them, a successful call costs half as much.
    :returns: a function that undoes it. The counts stay in the registry, and no longer change.
    :raises TypeError: for an object that is no policy, or no registry.
    :raises ValueError: if the buckets do not ascend, if an earlier call for the registry had other settings, or if the
        registry already has a metric with one of the names.

    >>> from prometheus_client import CollectorRegistry, generate_latest
    >>> from resilience import Policy, Retry
    >>> from resilience.integrations.prometheus import instrument
    >>> registry = CollectorRegistry()
    >>> undo = instrument(registry=registry)
    >>> Policy.wrap(Retry(), name="weather").call(max, 3, 5)
    5
    >>> registry.get_sample_value(
    ...     "resilience_execution_duration_seconds_count",
    ...     {"pipeline": "weather", "operation": "max", "outcome": "success", "error_type": "", "cancelled_by": ""},
    ... )
    1.0
    >>> undo()
    """
    chosen = REGISTRY if registry is None else registry
    checks.instance("registry", chosen, CollectorRegistry, "a CollectorRegistry")
    bounds = _ascending(buckets)
    with _lock:
        exporter = _exporters.get(chosen)
        if exporter is None:
            exporter = _Exporter(chosen, bounds, hosts=hosts, max_names=max_names, attempts=attempts)
            _exporters[chosen] = exporter
        exporter.feed.refuse_others(Labels(hosts=hosts, max_names=max_names), attempts)
        if exporter.buckets != bounds:
            raise ValueError(f"buckets of this registry are {exporter.buckets!r} already, not {bounds!r}")
        exporter.register_missing(chosen)
    return exporter.feed.add(*policies)


@final
class _Exporter(Collector):
    """The metrics of one registry, with their feed; the collector of the gauges."""

    def __init__(
        self, registry: CollectorRegistry, buckets: tuple[float, ...], *, hosts: bool, max_names: int, attempts: bool
    ) -> None:
        self.buckets: tuple[float, ...] = buckets
        # In its multiprocess mode, the client cannot remove series.
        keeps_all = not os.environ.keys().isdisjoint(("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"))
        labels = Labels(hosts=hosts, max_names=max_names, forget=None if keeps_all else self._forget)
        self.feed: Feed = Feed(self._recorder, labels, attempts=attempts)
        self._metrics: dict[Instrument, Counter | Histogram] = {}
        self._series: set[tuple[Instrument, tuple[str, ...]]] = set()
        registry.register(self)
        try:
            for it in INSTRUMENTS:
                if it.kind != "gauge":
                    kind = Counter if it.kind == "counter" else partial(Histogram, buckets=buckets)
                    self._metrics[it] = kind(_name(it), it.description, it.labels, registry=registry)
        except ValueError:  # another metric has one of the names: unregister ours
            for collector in (self, *self._metrics.values()):
                registry.unregister(collector)
            raise

    def register_missing(self, registry: CollectorRegistry) -> None:
        """Register again what was unregistered, for example by a test that empties the registry."""
        for collector in (self, *self._metrics.values()):
            with suppress(ValueError):  # it is registered
                registry.register(collector)

    def _recorder(self, it: Instrument, labels: Mapping[str, str]) -> Callable[[float], object]:
        texts = tuple(labels[name] for name in it.labels)
        series = self._metrics[it].labels(*texts)
        self._series.add((it, texts))
        return series.inc if isinstance(series, Counter) else series.observe

    def _forget(self, label: str, text: str) -> None:
        """Remove the series of a name that is replaced by another."""
        for it, texts in tuple(self._series):
            if (label, text) in zip(it.labels, texts, strict=True):
                self._series.discard((it, texts))
                self._metrics[it].remove(*texts)

    @override
    def collect(self) -> Iterator[Metric]:
        families = _families()
        for it, value, labels in self.feed.gauges():
            families[it].add_metric([labels[name] for name in it.labels], value)
        yield from (family for family in families.values() if family.samples)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the families that `collect` may return, so that a registry finds duplicate names without a scrape."""
        return _families().values()


def _families() -> dict[Instrument, GaugeMetricFamily]:
    gauges = (it for it in INSTRUMENTS if it.kind == "gauge")
    return {it: GaugeMetricFamily(_name(it), it.description, labels=it.labels) for it in gauges}


_lock = forks.lock_of(sys.modules[__name__])
_exporters: WeakKeyDictionary[CollectorRegistry, _Exporter] = WeakKeyDictionary()


def _name(it: Instrument) -> str:
    """Return the name in the style of Prometheus: underscores, and the unit at the end. The client adds `_total`."""
    name = it.name.replace(".", "_")
    return f"{name}_seconds" if it.unit == "s" else name


def _ascending(buckets: Sequence[float]) -> tuple[float, ...]:
    bounds = tuple(checks.number("buckets", bound) for bound in checks.several("buckets", buckets, "numbers"))
    if not bounds or any(low >= high for low, high in pairwise(bounds)):
        raise ValueError(f"buckets must ascend, not {buckets!r}")
    return bounds
