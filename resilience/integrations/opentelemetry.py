"""Metrics and spans for OpenTelemetry. This module needs only the API; the application chooses the SDK.

Metrics come from the events of the whole process (`instrument`). A span has to be the parent of the spans that the
function creates, so it is created by a policy around the function (`Tracing`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import distributions
from math import inf
from types import NoneType
from typing import ClassVar, Literal, Never, TypeVar, final
from weakref import WeakKeyDictionary

from resilience.integrations._extras import needed_by

with needed_by("opentelemetry"):
    from opentelemetry import context, metrics, trace
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Span, Status, StatusCode, TracerProvider

from typing_extensions import override

from resilience import checks, forks
from resilience.clock import clock
from resilience.context import Context
from resilience.endings import canceller
from resilience.events import Event
from resilience.integrations.telemetry import (
    DURATION_BUCKETS,
    INSTRUMENTS,
    Feed,
    Instrument,
    Labels,
    Observable,
    error_type,
    facts,
    kind_of,
)
from resilience.outcome import message_of, unwrap_stop_iteration
from resilience.policy import Call, Policy

__all__ = ["Tracing", "instrument"]

T = TypeVar("T")

_SCOPE = "resilience"
_VERSION = next((it.version for it in distributions(name="resilience-pipeline")), None)  # None if it is not installed

#: Where a context has the mark of the `Tracing` that has attached it.
_MARK = context.create_key("resilience")


def _attribute(label: str) -> str:
    """Return the attribute for a label: OpenTelemetry's own name if there is one, else a name in our namespace."""
    return "error.type" if label == "error_type" else f"resilience.{label}"


# --- metrics ---------------------------------------------------------------------------------


def instrument(
    *policies: Observable,
    meter_provider: MeterProvider | None = None,
    hosts: bool = False,
    max_names: int = 200,
    attempts: bool = True,
) -> Callable[[], None]:
    """Measure what all policies of this process do, and export the state of the given ones as gauges.

    :param policies: whose circuit breakers, bulkheads and the like get gauges: policies, pipelines, and objects with
        many of them (`PerHost`, `standard()` for HTTP clients). They are held by weak references.
    :param meter_provider: where the metrics go; the global provider by default, which may be set later. Further calls
        for the same provider add policies; each event is counted once.
    :param hosts: whether names keep the host that they contain: ``GET example.org`` instead of ``GET``. Without it,
        policies that then have the same attributes share their gauges: the sum, or the largest share or time.
    :param max_names: how many pipelines, policies, operations and error types there may be, 200 of each by default.
        Further ones are ``"other"``.
    :param attempts: whether single calls of functions are measured besides whole executions, as `attempt.duration` and
        `attempt.remaining`. Without them, a successful call costs half as much.
    :returns: a function that undoes it.
    :raises TypeError: for an object that is no policy, or no meter provider.
    :raises ValueError: if an earlier call for the provider had other settings.

    >>> from opentelemetry.sdk.metrics import MeterProvider
    >>> from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    >>> from resilience import Policy, Retry
    >>> from resilience.integrations.opentelemetry import instrument
    >>> reader = InMemoryMetricReader()
    >>> provider = MeterProvider([reader])
    >>> undo = instrument(meter_provider=provider)
    >>> Policy.wrap(Retry(), name="weather").call(max, 3, 5)
    5
    >>> [metric] = [
    ...     metric
    ...     for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    ...     if metric.name == "resilience.execution.duration"
    ... ]
    >>> dict(metric.data.data_points[0].attributes)
    {'resilience.pipeline': 'weather', 'resilience.operation': 'max', 'resilience.outcome': 'success'}
    >>> undo()
    >>> provider.shutdown()
    """
    checks.instance("meter_provider", meter_provider, (MeterProvider, NoneType), "a MeterProvider")
    labels = Labels(hosts=hosts, max_names=max_names)
    feed = _feed_for(meter_provider, labels, attempts)
    feed.refuse_others(labels, attempts)
    return feed.add(*policies)


_lock = forks.lock_of(sys.modules[__name__])
_feeds: WeakKeyDictionary[object, Feed] = WeakKeyDictionary()


def _feed_for(given: MeterProvider | None, labels: Labels, attempts: bool) -> Feed:
    current = metrics.get_meter_provider()
    # The global provider is a different object once it is set, so its key is the module that has it.
    key: object = metrics if given is None or given is current else given
    with _lock:
        feed = _feeds.get(key)
        if feed is None and key is metrics:
            feed = _feeds.get(current)  # made for this provider before it became the global one
        if feed is None:
            feed = _feeds[key] = _make_feed(given or current, labels, attempts)
        return feed


def _make_feed(provider: MeterProvider, labels: Labels, attempts: bool) -> Feed:
    """Create the instruments of a meter provider, and the feed that records with them."""
    meter = provider.get_meter(_SCOPE, _VERSION)
    record: dict[Instrument, Callable[..., None]] = {}
    feed = Feed(lambda it, values: partial(record[it], attributes=_attributes(values)), labels, attempts=attempts)
    gauges = _Gauges(feed)
    for it in INSTRUMENTS:
        if it.kind == "counter":
            record[it] = meter.create_counter(it.name, it.unit, it.description).add
        elif it.kind == "histogram":
            record[it] = meter.create_histogram(
                it.name, it.unit, it.description, explicit_bucket_boundaries_advisory=DURATION_BUCKETS
            ).record
        else:
            meter.create_observable_gauge(it.name, [partial(gauges.observe, it)], it.unit, it.description)
    return feed


@final
class _Gauges:
    """Reads all policies once for a collection, in which each gauge has a callback.

    The first callback reads them, and the others take what it has found. What a gauge has taken is gone, so in the next
    collection the first callback reads them again. What none has taken for a second is not used: a second reader may
    collect some of the gauges.
    """

    FRESH: ClassVar[float] = 1.0

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._found: dict[Instrument, list[Observation]] = {}
        self._read_at: float = -inf

    def observe(self, it: Instrument, options: CallbackOptions) -> Iterable[Observation]:
        observations = self._found.pop(it, None)
        if observations is None or clock.now() > self._read_at + self.FRESH:
            found: dict[Instrument, list[Observation]] = {each: [] for each in INSTRUMENTS}
            for gauge, value, labels in self._feed.gauges():
                found[gauge].append(Observation(value, _attributes(labels)))
            observations = found.pop(it)
            self._found, self._read_at = found, clock.now()
        return observations


def _attributes(labels: Mapping[str, str]) -> dict[str, str]:
    return {_attribute(name): text for name, text in labels.items() if text}


# --- spans -----------------------------------------------------------------------------------


@final
class Tracing(Policy[Never]):
    """Create a span for each execution, or for each attempt: the parent of the spans that the function creates.

    :param each: ``"execution"`` (the default) for the outermost place in a pipeline: failed attempts, waits, timeouts
        and refusals inside are events of its span. ``"attempt"`` for a place inside a Retry, best the innermost.
    :param record_exceptions: whether the span contains message and traceback of the exception, as is usual with
        OpenTelemetry; True by default. The span always contains the exception's class, as `error.type`.
    :param tracer_provider: creates the spans; the global provider by default, which may be set later.
    :param name: the name of this policy in errors and events; "Tracing" by default.

    A span is named after the operation of the execution, by default the qualified name of the function; the name of an
    attempt's span ends with ``" attempt"``. A failure sets the status to error. A cancellation leaves it unset, and
    sets `resilience.cancelled_by` to ``"deadline"``, ``"caller"``, ``"hedge"``, ``"interrupt"`` or ``"closed"``.

    >>> from opentelemetry.sdk.trace import TracerProvider
    >>> from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    >>> from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    >>> from resilience import Context, Retry
    >>> from resilience.integrations.opentelemetry import Tracing
    >>> from resilience.testing import script
    >>> exporter, provider = InMemorySpanExporter(), TracerProvider()
    >>> provider.add_span_processor(SimpleSpanProcessor(exporter))
    >>> fetch = Tracing(tracer_provider=provider).wrap(
    ...     Retry(backoff=[0]), Tracing(each="attempt", tracer_provider=provider)
    ... )
    >>> fetch.execute(script(ConnectionError("reset"), "fine"), Context(operation="fetch"))
    'fine'
    >>> [span.name for span in exporter.get_finished_spans()]
    ['fetch attempt', 'fetch attempt', 'fetch']
    >>> provider.shutdown()
    """

    def __init__(
        self,
        *,
        each: Literal["execution", "attempt"] = "execution",
        record_exceptions: bool = True,
        tracer_provider: TracerProvider | None = None,
        name: str | None = None,
    ) -> None:
        self._resilience_set_up(locals())
        if each not in ("execution", "attempt"):
            raise ValueError(f"each must be 'execution' or 'attempt', not {each!r}")
        checks.instance("tracer_provider", tracer_provider, (TracerProvider, NoneType), "a TracerProvider")
        self._each = each
        self._resilience_keeps_record = each == "attempt"  # it knows which attempts a Hedge cuts off
        self._record_exceptions = checks.flag("record_exceptions", record_exceptions)
        self._tracer = trace.get_tracer(_SCOPE, _VERSION, tracer_provider)

    @override
    async def around(self, call: Call[T], ctx: Context) -> T:
        span = self._start(ctx)
        mark = object()  # not the span, because all spans are the same object without an SDK
        token = context.attach(context.set_value(_MARK, mark, trace.set_span_in_context(span)))
        try:
            if not span.is_recording():
                return await call(ctx)
            return await call(ctx._with(listeners=(*ctx._info.listeners, partial(_add_event, span))))
        except Exception as error:
            self._fail(span, unwrap_stop_iteration(error))
            raise
        except BaseException as error:
            span.set_attribute("resilience.cancelled_by", canceller(error, ctx))
            raise
        finally:
            # If another task or the garbage collector closes the coroutine, our context is not the current one here.
            if context.get_value(_MARK) is mark:
                context.detach(token)
            span.end()

    def _start(self, ctx: Context) -> Span:
        name = ctx.operation or self.name
        pipeline = self.name if ctx._executed is None else ctx._executed.name
        attributes: dict[str, str | int | float] = {"resilience.operation": name, "resilience.pipeline": pipeline}
        if self._each == "attempt":
            name = f"{name} attempt"
            attributes["resilience.attempt"] = ctx.attempt
            if ctx.hedge:
                attributes["resilience.hedge"] = ctx.hedge
        if (left := ctx.remaining()) < inf:
            attributes["resilience.remaining"] = left
        return self._tracer.start_span(name, attributes=attributes)

    def _fail(self, span: Span, error: Exception) -> None:
        kind = error_type(error)
        span.set_attribute("error.type", kind)
        if not self._record_exceptions:
            span.set_status(Status(StatusCode.ERROR, kind))
            return
        span.set_status(Status(StatusCode.ERROR, f"{kind}: {message_of(error)}"))
        with suppress(Exception):  # the SDK calls `str` of it, which may raise
            span.record_exception(error)

    @override
    def describe(self) -> str:
        return f"{self.name}: a span for each {self._each}"


def _add_event(span: Span, event: Event) -> None:
    if span.is_recording():  # a change of a circuit may be reported late, by another call
        attributes = {_attribute(name): value for name, value in facts(event).items()}
        span.add_event(f"resilience.{kind_of(event)}", attributes)
