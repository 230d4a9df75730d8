"""Metrics and spans for OpenTelemetry, as the SDK's in-memory readers and exporters see them."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from resilience import Bulkhead, CircuitBreaker, CircuitOpen, Context, Fallback, Policy, Retry, Timeout
from resilience.integrations.opentelemetry import Tracing, instrument
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


class Traced:
    """A tracer provider, and the spans that it was given."""

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
    it = Traced()
    yield it
    it.provider.shutdown()


def names(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


# --- metrics ---------------------------------------------------------------------------------


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


# --- spans -----------------------------------------------------------------------------------


def test_the_span_is_the_parent_of_what_the_function_traces(world: World, traced: Traced) -> None:
    """Also on the worker thread of a Timeout, and for each attempt its own."""
    pipeline = Policy.wrap(traced.policy(), Retry(2, on=Boom, backoff=[0]), traced.policy(each="attempt"), Timeout(5))
    steps = iter([Boom("no"), "fine"])

    async def fn(ctx: Context) -> object:
        with traced.tracer.start_as_current_span(f"query {ctx.attempt}"):
            if isinstance(step := next(steps), Exception):
                raise step
            return step

    async def main() -> None:
        with traced.tracer.start_as_current_span("request"):
            await world.execute(pipeline, fn, Context(operation="get"))
            assert trace.get_current_span().name == "request"  # type: ignore[attr-defined]
        assert trace.get_current_span() is trace.INVALID_SPAN

    world.run(main)
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


def test_what_happens_inside_is_told_as_events_of_the_span(world: World, clock: FakeClock, traced: Traced) -> None:
    """Failed attempts, waits, refusals, changes of the circuit, and the answer instead."""
    inner = Policy.wrap(Retry(3, on=Boom, backoff=[1.5]), CircuitBreaker(2, name="db"))
    pipeline = Policy.wrap(traced.policy(), Fallback("x", name="spare"), inner)

    async def main() -> None:
        await world.execute(pipeline, Script(Boom("secret")).function(), Context(operation="get", timeout=9))

    world.run(main)
    span = traced.only
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes == {
        "resilience.operation": "get",
        "resilience.pipeline": "Pipeline",
        "resilience.remaining": 9.0,
    }
    assert names(span) == [
        f"resilience.{kind}"
        for kind in "attempt_failed retry_scheduled circuit_changed attempt_failed retry_scheduled "
        "call_rejected fallback_used".split()
    ]
    where = {"resilience.operation": "get", "resilience.pipeline": "Pipeline"}
    assert span.events[1].attributes == {
        **where,
        "resilience.policy": "Retry",
        "resilience.attempt": 1,
        "resilience.delay": 1.5,
        "error.type": "tests.conftest.Boom",
    }
    assert span.events[-1].attributes == {
        **where,
        "resilience.policy": "spare",
        "error.type": "resilience.errors.CircuitOpen",
    }
    assert "secret" not in str([event.attributes for event in span.events])


def test_a_failure_is_recorded_as_it_comes_out(world: World, traced: Traced) -> None:
    """Status, class, message and traceback of the exception."""

    async def main() -> None:
        await world.attempt(traced.policy(), Script(Boom("no")).function(), Context(operation="get"))

    world.run(main)
    span = traced.only
    assert span.name == "get"
    assert span.attributes["error.type"] == "tests.conftest.Boom"
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "tests.conftest.Boom: no")
    [event] = span.events
    assert event.attributes["exception.message"] == "no"
    assert "Traceback" in event.attributes["exception.stacktrace"]


def test_messages_can_be_left_out(world: World, traced: Traced) -> None:
    """Where they could hold a secret; the class of the error stays."""

    async def main() -> None:
        await world.attempt(traced.policy(record_exceptions=False), Script(Boom("secret")).function())

    world.run(main)
    assert "secret" not in traced.only.to_json()
    assert traced.only.status.description == "tests.conftest.Boom"


def test_a_refused_call_is_a_failure_of_its_span(world: World, traced: Traced) -> None:
    """The class of the error says which policy refused."""
    breaker = CircuitBreaker()
    breaker.isolate()

    async def main() -> object:
        return await world.attempt(traced.policy().wrap(breaker), Script("never").function())

    assert isinstance(world.run(main), CircuitOpen)
    assert traced.only.attributes["error.type"] == "resilience.errors.CircuitIsolated"
    assert names(traced.only) == ["resilience.call_rejected", "exception"]


def test_an_attempt_that_a_timeout_cut_off_is_cancelled_by_the_deadline(world: World, traced: Traced) -> None:
    """No error of its own: the execution has that, and says what timed out."""

    async def hang(ctx: Context) -> None:
        await world.hang()

    pipeline = Policy.wrap(
        traced.policy(), Retry(2, backoff=[0]), Timeout(0.01), traced.policy(each="attempt"), name="p"
    )

    async def main() -> None:
        await world.attempt(pipeline, hang, Context())

    world.run(main)
    *attempts, execution = traced.spans
    assert len(attempts) == 2
    for attempt in attempts:
        assert attempt.attributes["resilience.cancelled_by"] == "deadline"
        assert 0 < attempt.attributes["resilience.remaining"] <= 0.01
        assert (attempt.status.status_code, names(attempt)) == (StatusCode.UNSET, [])
    timed_out = [event for event in execution.events if event.name == "resilience.timed_out"]
    assert [event.attributes["resilience.scope"] for event in timed_out] == ["attempt"] * 2
    assert execution.attributes["error.type"] == "resilience.errors.TimeoutExceeded"
    assert execution.name == "p"


def test_the_cancellation_of_a_caller_is_no_error(tasks_world: World, traced: Traced) -> None:
    """The status stays unset, and the reason is told."""

    async def main() -> None:
        with anyio.move_on_after(0.01):
            await traced.policy().aexecute(lambda ctx: anyio.sleep(10))

    tasks_world.run(main)
    assert traced.only.status.status_code is StatusCode.UNSET
    assert traced.only.attributes["resilience.cancelled_by"] == "caller"
    assert names(traced.only) == []


def test_an_interrupt_is_no_error(threads: World, traced: Traced) -> None:
    """Nor is it swallowed."""

    def fn(ctx: Context) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        traced.policy().execute(fn)
    assert traced.only.attributes["resilience.cancelled_by"] == "interrupt"
    assert traced.only.status.status_code is StatusCode.UNSET


def test_a_coroutine_that_is_thrown_away_ends_its_span_in_peace(
    traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    """In whatever context it is closed."""

    async def main() -> None:
        execution = traced.policy().aexecute(lambda ctx: asyncio.sleep(10))
        asyncio.get_running_loop().call_soon(lambda: None)

        async def step() -> None:
            execution.send(None)

        await asyncio.create_task(step())
        execution.close()

    asyncio.run(main())
    assert traced.only.attributes["resilience.cancelled_by"] == "closed"
    assert caplog.records == []


def test_a_stop_iteration_is_recorded_as_itself(threads: World, traced: Traced) -> None:
    """Not as the carrier that brings it through a coroutine."""
    with pytest.raises(StopIteration):
        traced.policy().execute(lambda ctx: next(iter([])))
    assert traced.only.attributes["error.type"] == "StopIteration"


def test_a_span_that_is_not_sampled_hears_nothing(world: World) -> None:
    """No listener, no events: sampling away is what makes it cheap."""
    provider = TracerProvider(ALWAYS_OFF, shutdown_on_exit=False)
    seen: list[Context] = []

    class Look(Policy[Any]):
        async def around(self, call: Any, ctx: Context) -> Any:
            seen.append(ctx)
            return await call(ctx)

    async def main() -> None:
        await world.execute(Policy.wrap(Look(), Tracing(tracer_provider=provider), Look()), Script("fine").function())

    world.run(main)
    assert seen[0] is seen[1]


def test_a_change_that_is_reported_after_the_end_is_left_out(
    traced: Traced, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A circuit's change may be reported by another call, when the span of its own has ended."""
    breaker = CircuitBreaker(1)
    monkeypatch.setattr(breaker, "_reporting", True)  # somebody else holds the baton
    traced.policy().wrap(breaker).capture(lambda ctx: 1 / 0)
    assert len(traced.spans) == 1
    monkeypatch.setattr(breaker, "_reporting", False)
    breaker.close()
    assert caplog.records == []


def test_no_failed_call_needs_the_collector(threads: World, traced: Traced) -> None:
    """Spans hold text, not exceptions."""
    policy = traced.policy(record_exceptions=False).wrap(Retry(2, on=Boom, backoff=[0]))
    policy.capture(lambda ctx: "warm")
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            policy.capture(lambda ctx: 1 / 0)
        traced.exporter.clear()
        assert gc.collect() < 10
    finally:
        gc.enable()


def test_it_says_how_it_was_built() -> None:
    """In its repr, and in a line of `describe`."""
    assert repr(Tracing()) == "Tracing()"
    assert repr(Tracing(each="attempt", name="spans")) == "Tracing(each='attempt', name='spans')"
    assert Tracing(each="attempt").describe() == "Tracing: a span for each attempt"


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Tracing(each="call"), ValueError, "each must be 'execution' or 'attempt', not 'call'"),  # type: ignore[arg-type]
        (lambda: Tracing(tracer_provider=1), TypeError, "tracer_provider must be a TracerProvider, not 1"),  # type: ignore[arg-type]
        (lambda: Tracing(record_exceptions=1), TypeError, "record_exceptions must be True or False, not 1"),  # type: ignore[arg-type]
        (lambda: Tracing(name=""), ValueError, "name must not be empty"),
        (lambda: instrument(meter_provider=1), TypeError, "meter_provider must be a MeterProvider, not 1"),  # type: ignore[arg-type]
        (lambda: instrument("weather"), TypeError, "only policies can be observed, not 'weather'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(build: Callable[[], object], error: type[Exception], message: str) -> None:
    """With the parameter and the value."""
    with pytest.raises(error, match=message):
        build()
