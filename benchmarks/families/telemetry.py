"""The cost that listeners, metrics, traces and logs add to a call under five policies.

Hand-written metrics are one histogram and one counter. "The same series" are those that our metrics consist of: how
long the attempt took, how much time it had left when it began, and how long the execution took.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import repeat
from time import perf_counter, perf_counter_ns
from typing import Any, TypeAlias

from benchmarks.cells import Result, Wanted
from benchmarks.functions import ANSWER, answering
from benchmarks.libraries import Library
from benchmarks.libraries.ours import new_four
from benchmarks.timing import DEPTHS, SYNC, Effort, at_depth
from resilience import Timeout, events
from resilience.integrations.telemetry import DURATION_BUCKETS

GROUP = "telemetry"
CELL = "added to a call"

#: The limit of the call in seconds.
SECONDS = 5.0
#: The histograms that our metrics consist of, and the labels of a success.
SERIES = ("attempt", "remaining", "execution")
OUTCOME = {"pipeline": "benchmark", "operation": "answer", "outcome": "success"}

Call: TypeAlias = Callable[[], Any]

#: A context manager that switches on a kind of telemetry, and yields the function to time.
Listening: TypeAlias = Callable[[Call], AbstractContextManager[Call]]

Record: TypeAlias = Callable[[float], object]


def measure(libraries: list[Library], effort: Effort, wanted: Wanted) -> Iterator[Result]:
    """Time each kind of telemetry in turn, each beside the plain call, because most kinds affect the whole process."""
    if not wanted(f"{GROUP}: {CELL}"):
        return
    call = new_four(Timeout(SECONDS, cooperative=True), name="benchmark")(answering(SYNC))
    kinds = contestants()
    samples: dict[str, list[float]] = {name: [] for name in kinds}
    calls = _calls_in(effort.batch, call)
    for _ in range(effort.rounds):
        for name in random.sample(list(kinds), len(kinds)):
            plain = _fastest(call, calls, effort.batches)
            with kinds[name](call) as function:
                samples[name].append(_fastest(function, calls, effort.batches) - plain)
    yield Result(GROUP, CELL, "ns", samples)


def _calls_in(nanoseconds: float, function: Call) -> int:
    assert function() == ANSWER
    return max(10, int(nanoseconds / _fastest(function, 1000, 3)))


def _fastest(function: Call, calls: int, batches: int) -> float:
    """Return nanoseconds per call."""
    function()
    return min(at_depth(DEPTHS * number, _batch, function, calls) for number in range(batches)) / calls


def _batch(function: Call, calls: int) -> int:
    began = perf_counter_ns()
    for _ in repeat(None, calls):
        function()
    return perf_counter_ns() - began


def contestants() -> dict[str, Listening]:
    """Return the kinds of telemetry whose packages are installed."""
    kinds: dict[str, Listening] = {
        "a listener to the end of executions": _listening(events.ExecutionFinished),
        "a listener to single calls, too": _listening(events.ExecutionFinished, events.CallFinished),
        "logging at INFO, with nothing to say": _logging,
    }
    for more in (_prometheus, _opentelemetry):
        try:
            kinds |= more()
        except ModuleNotFoundError:
            continue
    return kinds


def _listening(*kinds: type[events.Event]) -> Listening:
    return lambda call: _subscribed(lambda: events.subscribe(_nothing, *kinds), call)


def _nothing(event: events.Event) -> None:
    return


@contextmanager
def _subscribed(begin: Callable[[], Callable[[], None]], call: Call) -> Iterator[Call]:
    with ExitStack() as endings:
        endings.callback(begin())
        yield call


def _logging(call: Call) -> AbstractContextManager[Call]:
    from resilience.integrations.logging import log_events

    return _subscribed(lambda: log_events(logging.Logger("benchmark", level=logging.INFO)), call)


def _recording(attempt: Record, remaining: Record, execution: Record) -> Listening:
    """Record the series that our metrics consist of."""

    def listening(call: Call) -> AbstractContextManager[Call]:
        def measured() -> Any:
            began = perf_counter()
            result = call()
            elapsed = perf_counter() - began
            attempt(elapsed)
            remaining(SECONDS)
            execution(elapsed)
            return result

        return nullcontext(measured)

    return listening


def _prometheus() -> dict[str, Listening]:
    from prometheus_client import CollectorRegistry, Counter, Histogram

    from resilience.integrations.prometheus import instrument

    registry, apart, mine = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
    duration = Histogram("duration_seconds", "", ("operation",), registry=mine).labels("answer")
    total = Counter("calls", "", ("operation", "outcome"), registry=mine).labels("answer", "success")
    series = [
        Histogram(name, "", OUTCOME, registry=mine, buckets=DURATION_BUCKETS).labels(*OUTCOME.values()).observe
        for name in SERIES
    ]

    def manually(call: Call) -> AbstractContextManager[Call]:
        def measured() -> Any:
            began = perf_counter()
            result = call()
            duration.observe(perf_counter() - began)
            total.inc()
            return result

        return nullcontext(measured)

    return {
        "Prometheus": lambda call: _subscribed(lambda: instrument(registry=registry), call),
        "Prometheus, attempts=False": lambda call: _subscribed(
            lambda: instrument(registry=apart, attempts=False), call
        ),
        "Prometheus, hand-written": manually,
        "Prometheus, the same series": _recording(*series),
    }


def _opentelemetry() -> dict[str, Listening]:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider

    from resilience.integrations.opentelemetry import Tracing, instrument

    provider, apart, mine = (MeterProvider([InMemoryMetricReader()]) for _ in range(3))
    meter, tracer_provider = mine.get_meter("benchmark"), TracerProvider()
    duration, total = meter.create_histogram("duration"), meter.create_counter("calls")
    series = [partial(meter.create_histogram(name).record, attributes=OUTCOME) for name in SERIES]
    tracer = tracer_provider.get_tracer("benchmark")
    attributes = {"operation": "answer", "outcome": "success"}
    policies = Tracing(tracer_provider=tracer_provider), new_four(Timeout(SECONDS, cooperative=True))
    traced = policies[0].wrap(policies[1])(answering(SYNC))

    def manually(call: Call) -> AbstractContextManager[Call]:
        def measured() -> Any:
            began = perf_counter()
            result = call()
            duration.record(perf_counter() - began, attributes)
            total.add(1, attributes)
            return result

        return nullcontext(measured)

    def spanned(call: Call) -> AbstractContextManager[Call]:
        def measured() -> Any:
            with tracer.start_as_current_span("answer"):
                return call()

        return nullcontext(measured)

    return {
        "OpenTelemetry": lambda call: _subscribed(lambda: instrument(meter_provider=provider), call),
        "OpenTelemetry, attempts=False": lambda call: _subscribed(
            lambda: instrument(meter_provider=apart, attempts=False), call
        ),
        "OpenTelemetry, hand-written": manually,
        "OpenTelemetry, the same series": _recording(*series),
        "a span": lambda call: nullcontext(traced),
        "a span, hand-written": spanned,
    }
