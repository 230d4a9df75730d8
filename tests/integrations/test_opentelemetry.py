"""Metrics and spans for OpenTelemetry, read with the in-memory exporters of its SDK."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import pytest
from opentelemetry import context, metrics, trace
from opentelemetry.metrics import NoOpMeter, NoOpMeterProvider
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from resilience import Bulkhead, CircuitBreaker, Context, Fallback, Hedge, Policy, Retry, Timeout
from resilience.integrations.opentelemetry import Tracing, instrument
from resilience.integrations.telemetry import DURATION_BUCKETS, INSTRUMENTS
from resilience.testing import script
from tests.callers import run_all
from tests.conftest import Boom, FakeClock, Watched, World, no_collector
from tests.custom import Recording
from tests.functions import raising
from tests.integrations.exporters import Metrics, OpenTelemetry, WithoutText, policies_with_state, report_everything

# --- metrics ---------------------------------------------------------------------------------


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
    """A provider that was given explicitly, and is the default now, is one provider. Another one counts for itself."""
    exporter = OpenTelemetry()
    ends = [exporter.instrument()]
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: exporter.provider)
    other = OpenTelemetry()
    ends += [instrument(), other.instrument()]
    Policy.wrap(Retry(), name="p").execute(lambda ctx: None)
    for it in (exporter, other):
        assert [value[0] for (name, _), value in it.series().items() if name == "execution.duration"] == [1]
    for end in ends:
        end()


def test_all_gauges_of_a_collection_are_read_at_once() -> None:
    """Policies of many hosts are expensive to read. The next collection reads them again."""
    bulkhead, reads = Bulkhead(2, name="pool"), []

    class Counting:
        @property
        def policies(self) -> dict[str, Bulkhead]:
            reads.append(bulkhead.stats().in_flight)
            return {"one": bulkhead}

    counting, exporter = Counting(), OpenTelemetry()
    exported = Metrics(exporter)
    exported.instrument(counting)
    reads.clear()  # it has asked whether there are policies
    where = {"pipeline": "pool", "policy": "pool"}
    with bulkhead.slot():
        assert exported.value("bulkhead.in_flight", **where) == 1
    assert exported.value("bulkhead.in_flight", **where) == 0
    assert reads == [1, 0]
    exported.end()


def test_what_no_gauge_has_taken_for_a_second_is_read_again(clock: FakeClock) -> None:
    """A second reader may have collected only some of the gauges, long ago."""
    bulkhead, gauges = Bulkhead(2), dict[str, Callable[..., Any]]()

    class Meter(NoOpMeter):
        def create_observable_gauge(self, name: str, callbacks: Any = None, *rest: Any) -> Any:
            gauges[name] = callbacks[0]

    class Provider(NoOpMeterProvider):
        def get_meter(self, name: str, *rest: Any) -> Any:
            return Meter(name)

    end = instrument(bulkhead, meter_provider=Provider())
    gauges["resilience.bulkhead.limit"](None)
    with bulkhead.slot():
        clock.advance(1.5)
        (seen,) = gauges["resilience.bulkhead.in_flight"](None)
    assert seen.value == 1
    end()


def test_the_scope_has_the_version_of_the_package(traced: Traced) -> None:
    """So a backend can tell which release has sent the numbers and the spans."""
    exporter = OpenTelemetry()
    end = exporter.instrument()
    traced.policy().call(int)
    [resource] = exporter.reader.get_metrics_data().resource_metrics
    scopes = [traced.only.instrumentation_scope, *(it.scope for it in resource.scope_metrics)]
    assert [(it.name, it.version) for it in scopes] == [("resilience", version("resilience-pipeline"))] * 2
    end()


# --- spans -----------------------------------------------------------------------------------


class Traced:
    """A tracer provider, and its finished spans."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("the function's own")

    def policy(self, **options: Any) -> Tracing:
        return Tracing(tracer_provider=self.provider, **options)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    @property
    def only(self) -> ReadableSpan:
        [span] = self.spans
        return span


@pytest.fixture
def traced() -> Iterator[Traced]:
    traced = Traced()
    yield traced
    traced.provider.shutdown()


def names(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


async def test_the_span_is_the_parent_of_the_functions_spans(world: World, traced: Traced) -> None:
    """Also in the worker thread of a Timeout, and with one span for each attempt."""
    pipeline = Policy.wrap(traced.policy(), Retry(2, on=Boom, backoff=[0]), traced.policy(each="attempt"), Timeout(5))
    step = script(Boom("no"), "fine")

    async def fn(ctx: Context) -> object:
        with traced.tracer.start_as_current_span(f"query {ctx.attempt}"):
            return step()

    with traced.tracer.start_as_current_span("request"):
        await world.execute(pipeline, fn, Context(operation="get"))
        assert trace.get_current_span().name == "request"  # type: ignore[attr-defined]
    assert trace.get_current_span() is trace.INVALID_SPAN
    spans = {span.context.span_id: span for span in traced.spans}
    parents = [(span.name, spans[span.parent.span_id].name if span.parent else None) for span in traced.spans]
    assert parents == [
        ("query 1", "get attempt"),
        ("get attempt", "get"),
        ("query 2", "get attempt"),
        ("get attempt", "get"),
        ("get", "request"),
        ("request", None),
    ]
    attempts = [span for span in traced.spans if span.name == "get attempt"]
    assert [span.attributes["resilience.attempt"] for span in attempts] == [1, 2]
    assert [span.status.status_code for span in attempts] == [StatusCode.ERROR, StatusCode.UNSET]


def test_events_of_policies_become_events_of_the_span(clock: FakeClock, traced: Traced) -> None:
    """Failed attempts, waits, refusals, changes of the circuit, and fallbacks."""
    inner = Policy.wrap(Retry(3, on=Boom, backoff=[1.5]), CircuitBreaker(2, name="db"))
    pipeline = Policy.wrap(traced.policy(), Fallback("x", name="spare"), inner)
    for _ in range(2):
        pipeline.execute(script(Boom("secret"), ...), Context(operation="get", timeout=9))
    span, refused = traced.spans
    where = {"resilience.operation": "get", "resilience.pipeline": "Pipeline"}
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes == {**where, "resilience.remaining": 9.0}
    kinds = "attempt_failed retry_scheduled circuit_changed attempt_failed retry_gave_up fallback_used"
    assert names(span) == [f"resilience.{kind}" for kind in kinds.split()]
    assert names(refused) == ["resilience.call_rejected", "resilience.fallback_used"]
    boom = {"error.type": "tests.conftest.Boom"}
    scheduled = {"resilience.policy": "Retry", "resilience.attempt": 1, "resilience.delay": 1.5}
    assert span.events[1].attributes == {**where, **boom, **scheduled}
    assert span.events[-2].attributes["resilience.reason"] == "circuit_open"
    spare = {**where, "resilience.policy": "spare"}
    assert span.events[-1].attributes == spare | boom
    assert refused.events[-1].attributes == spare | {"error.type": "resilience.errors.CircuitOpen"}
    assert "secret" not in str([event.attributes for event in (*span.events, *refused.events)])


@pytest.mark.parametrize("error", [Boom("secret"), WithoutText()], ids=["with text", "without text"])
@pytest.mark.parametrize("record_exceptions", [True, False])
def test_a_failure_is_recorded_in_the_span(traced: Traced, record_exceptions: bool, error: Exception) -> None:
    """Status, class, message and traceback of the exception. Messages, which could hold a secret, can be left out.

    The exception is raised unchanged, also if its `__str__`, which the SDK calls, raises: the span has no message then.
    """
    with pytest.raises(type(error)):
        traced.policy(record_exceptions=record_exceptions).execute(script(error), Context(operation="get"))
    span, kind = traced.only, f"{type(error).__module__}.{type(error).__name__}"
    assert (span.name, span.attributes["error.type"], span.status.status_code) == ("get", kind, StatusCode.ERROR)
    if not record_exceptions:
        assert "secret" not in span.to_json()
        assert (span.status.description, span.events) == (kind, ())
    elif isinstance(error, Boom):
        assert span.status.description == f"{kind}: secret"
        [event] = span.events
        assert event.attributes["exception.message"] == "secret"
        assert "Traceback" in event.attributes["exception.stacktrace"]


async def test_an_attempt_that_a_timeout_cut_off_is_cancelled_by_the_deadline(world: World, traced: Traced) -> None:
    """It is no error of the attempt's span; that of the execution has the error, and the scope of the timeout."""

    attempt = Timeout(0.01).wrap(traced.policy(each="attempt"))
    pipeline = Policy.wrap(traced.policy(), Retry(2, backoff=[0]), attempt, name="p")
    await world.attempt(pipeline, world.hang, Context(operation="get"))
    *attempts, execution = traced.spans
    assert len(attempts) == 2
    for attempt in attempts:
        assert attempt.attributes["resilience.cancelled_by"] == "deadline"
        assert 0 <= attempt.attributes["resilience.remaining"] <= 0.01
        assert (attempt.status.status_code, names(attempt)) == (StatusCode.UNSET, [])
    timed_out = [event for event in execution.events if event.name == "resilience.timed_out"]
    assert [event.attributes["resilience.scope"] for event in timed_out] == ["attempt"] * 2
    assert execution.attributes["error.type"] == "resilience.errors.TimeoutExceeded"


async def test_the_spans_of_hedged_attempts_show_which_one_lost(world: World, traced: Traced) -> None:
    """Also without metrics. The number is that of the attempt beside the first."""

    async def fn(ctx: Context) -> object:
        return "fast" if ctx.hedge else await world.hang(ctx)

    pipeline = Policy.wrap(Hedge(0.01), traced.policy(each="attempt"))
    assert await world.execute(pipeline, fn, Context(operation="get")) == "fast"
    found = {
        span.attributes.get("resilience.hedge"): span.attributes.get("resilience.cancelled_by") for span in traced.spans
    }
    assert found == {1: None, None: "hedge"}


def test_a_span_without_an_operation_is_named_after_its_function(traced: Traced) -> None:
    """By the qualified name, as log lines and metrics; by its policy if the caller has given an empty operation.

    It has the name of the pipeline, as events have.
    """
    pipeline = Policy.wrap(traced.policy(name="spans"), name="p")
    pipeline.call(max, 3, 5)
    pipeline.execute(lambda ctx: None, Context(operation=""))
    assert [span.name for span in traced.spans] == ["max", "spans"]
    assert traced.spans[0].attributes == {"resilience.operation": "max", "resilience.pipeline": "p"}


def test_an_interrupt_is_no_error(traced: Traced) -> None:
    with pytest.raises(KeyboardInterrupt):
        traced.policy().execute(raising(KeyboardInterrupt))
    assert traced.only.attributes["resilience.cancelled_by"] == "interrupt"
    assert traced.only.status.status_code is StatusCode.UNSET


async def test_a_closed_coroutine_ends_its_span(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    """And detaches nothing elsewhere, also without an SDK."""
    for policy in (traced.policy(), Tracing(tracer_provider=trace.NoOpTracerProvider())):
        execution = policy.aexecute(lambda ctx: asyncio.sleep(10))

        async def step(execution: Any = execution) -> None:
            execution.send(None)

        await asyncio.create_task(step())
        execution.close()
    assert traced.only.attributes["resilience.cancelled_by"] == "closed"
    assert caplog.records == []


def test_a_span_that_the_function_leaves_current_ends_with_ours(traced: Traced) -> None:
    left = traced.tracer.start_span("left")
    before = context.get_current()
    traced.policy().call(lambda: context.attach(trace.set_span_in_context(left)))
    assert context.get_current() == before


def test_a_stop_iteration_is_recorded_as_itself(traced: Traced) -> None:
    """And not as the exception that carries it through a coroutine."""
    with pytest.raises(StopIteration):
        traced.policy().execute(lambda ctx: next(iter([])))
    assert traced.only.attributes["error.type"] == "StopIteration"


def test_a_span_that_is_not_sampled_records_no_events() -> None:
    """It adds no listener, so that it costs little."""
    provider = TracerProvider(ALWAYS_OFF, shutdown_on_exit=False)
    recording = Recording()
    Policy.wrap(recording, Tracing(tracer_provider=provider), recording).call(int)
    assert recording.seen[0] is recording.seen[1]


def test_a_change_that_is_reported_after_the_span_is_left_out(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    """Changes are reported in order, here by another call, which is still reporting an earlier one."""
    held, may_go_on = threading.Event(), threading.Event()

    def hold(event: Any) -> None:
        if not held.is_set():
            held.set()
            may_go_on.wait(20)

    def probe() -> None:
        assert held.wait(20)
        time.sleep(0.02)
        assert traced.policy().wrap(breaker).execute(lambda ctx: "probe") == "probe"
        assert names(traced.only) == []

    breaker = CircuitBreaker(1, open_for=0.01, on_transition=hold)
    run_all([lambda: breaker.capture(lambda ctx: 1 / 0)], probe, may_go_on.set)
    assert (breaker.state.name, names(traced.only), caplog.records) == ("CLOSED", [], [])


def test_a_failed_call_is_freed_without_the_cyclic_collector(traced: Traced) -> None:
    """Spans hold text, not exceptions."""
    policy = traced.policy(record_exceptions=False).wrap(Retry(2, on=Boom, backoff=[0]))
    watched = Watched()
    with no_collector():
        policy.capture(lambda ctx: watched.fail())
        traced.exporter.clear()
        assert watched.seen
        assert watched.alive == []


def test_repr_and_describe_show_the_settings() -> None:
    assert repr(Tracing()) == "Tracing()"
    assert repr(Tracing(each="attempt", name="spans")) == "Tracing(each='attempt', name='spans')"
    assert Tracing(each="attempt", name="spans").describe() == "spans: a span for each attempt"
