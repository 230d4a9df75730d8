"""What exporters share: the measurements of events, and the gauges that are read from policies."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any
from weakref import ref

import anyio
import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
import httpx
import pytest

from resilience import Bulkhead, Cache, CircuitBreaker, Context, Keyed, Policy, Retry, Timeout
from resilience.integrations.http import TransientStatus
from resilience.integrations.telemetry import INSTRUMENTS, Feed, Instrument, Labels, Measurement, Observed, error_type
from resilience.integrations.telemetry import labels as module
from resilience.integrations.wire import OfHost
from resilience.outcome import Failure, Success
from tests.conftest import Boom, FakeClock, World
from tests.functions import raising
from tests.integrations.exporters import policies_with_state, report_everything, report_timeouts
from tests.state.stepping import TO_THE_END, TRACING_CRASHES, Stage


@pytest.fixture
def measurements() -> Any:
    """The measurements that a feed records during the test."""
    seen: list[Measurement] = []

    def recorder(instrument: Instrument, labels: Mapping[str, str]) -> Callable[[float], None]:
        return lambda value: seen.append(Measurement(instrument, value, labels))

    remove = Feed(recorder, Labels()).add()
    yield seen
    remove()


def of(seen: list[Measurement], name: str) -> list[tuple[float, dict[str, str]]]:
    return [(it.value, dict(it.labels)) for it in seen if it.instrument.name == f"resilience.{name}"]


# --- the numbers -----------------------------------------------------------------------------


def test_names_and_units_of_instruments_follow_opentelemetry() -> None:
    """Dotted lower case, one name each; durations in seconds, counts in braces."""
    names = [it.name for it in INSTRUMENTS]
    assert len(set(names)) == len(names)
    for it in INSTRUMENTS:
        assert it.name.startswith("resilience.")
        assert it.name == it.name.lower()
        assert it.unit in ("s", "1") or (it.unit[0], it.unit[-1]) == ("{", "}")
        assert it.description.endswith(".")


async def test_measurements_have_all_labels(threads: World, clock: FakeClock, measurements: list[Measurement]) -> None:
    """All of them and no others, as text; an unknown one is empty."""
    policies = policies_with_state()
    await report_everything(threads, *policies)
    measurements += Observed(*policies).gauges()
    assert {it.instrument for it in measurements} == set(INSTRUMENTS)
    for it in measurements:
        assert set(it.labels) == set(it.instrument.labels)
        assert all(isinstance(text, str) for text in it.labels.values())


def test_timeouts_are_counted_by_what_timed_out(measurements: list[Measurement]) -> None:
    report_timeouts()
    assert [(labels["policy"], labels["scope"]) for _, labels in of(measurements, "timeouts")] == [
        ("each", "attempt"),
        ("whole", "total"),
        ("alone", "total"),
        ("budget", "deadline"),
        ("pool", "queue"),
        ("pool", "deadline"),
    ]


def test_a_call_that_is_refused_immediately_has_not_timed_out(measurements: list[Measurement]) -> None:
    """It is only a rejection, under the name of its error."""
    bulkhead = Bulkhead(1, name="pool")
    with bulkhead.slot():
        bulkhead.capture(int)
    assert [labels["reason"] for _, labels in of(measurements, "rejections")] == ["BulkheadFull"]
    assert of(measurements, "timeouts") == []


async def test_a_cancelled_execution_is_no_failure(tasks_world: World, measurements: list[Measurement]) -> None:
    with anyio.move_on_after(0.01):
        await Retry().aexecute(lambda ctx: anyio.sleep(10))
    [(_, labels)] = of(measurements, "execution.duration")
    assert (labels["outcome"], labels["error_type"], labels["cancelled_by"]) == ("cancelled", "", "caller")


class Odd(Exception):
    """An error with the attributes of some client's errors, one of which raises."""

    def __init__(self, status_code: object) -> None:
        self.status_code = status_code

    status = property(raising(RuntimeError("not read yet")))


class Coded(Exception):
    """An error that is not gRPC's, although it has a method `code`."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE


def failed_call(status: grpc.StatusCode) -> Exception:
    """An error of an asyncio channel; those of a blocking one have a private class."""
    error: Exception = grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), details="secret")
    return error


@pytest.mark.parametrize(
    ("what", "name"),
    [
        (Failure(ValueError("secret")), "ValueError"),
        (Failure(Boom("secret")), "tests.conftest.Boom"),
        (ConnectionError("secret"), "ConnectionError"),
        (Success("bad"), "result"),
        (TransientStatus("secret", status=503), "503"),
        (Odd(404), "404"),
        (Odd(HTTPStatus.BAD_GATEWAY), "502"),
        (httpx.HTTPStatusError("secret", request=httpx.Request("GET", "/"), response=httpx.Response(503)), "503"),
        *((Odd(it), "tests.integrations.test_telemetry.Odd") for it in (200, "500", None)),
        (failed_call(grpc.StatusCode.UNAVAILABLE), "UNAVAILABLE"),
        (grpc.RpcError("without a status"), "grpc.RpcError"),
        (Coded("secret"), "tests.integrations.test_telemetry.Coded"),
    ],
)
def test_an_error_is_named_by_its_class_or_its_status(what: Any, name: str) -> None:
    """Never by its message, which may hold anything; a foreign attribute that raises is ignored."""
    assert error_type(what) == name


@pytest.mark.skipif(TRACING_CRASHES, reason="CPython 3.12 crashes where several threads trace opcodes")
def test_new_names_of_two_threads_keep_the_bound() -> None:
    """One of them is kept, wherever the second thread comes in between."""

    def interleave(first: int) -> int:
        stage, labels, names = Stage(module), Labels(max_names=1), list[str]()
        stage.give_locks(labels)
        threads = [lambda name=name: names.append(labels.bounded({"policy": name})["policy"]) for name in "ab"]
        steps, _ = stage.interleave(threads, (first, TO_THE_END))
        assert sorted(names) in (["a", "other"], ["b", "other"])
        return steps

    for first in range(interleave(TO_THE_END)):
        interleave(first)


def test_labels_have_few_values_by_default() -> None:
    """Two hundred names, without the hosts in them."""
    labels, ids = Labels(), range(300)
    names = [labels.bounded({"operation": OfHost(f"GET {it}.example", common=f"GET /{it}")})["operation"] for it in ids]
    assert names == [f"GET /{it}" if it < 200 else "other" for it in ids]


def test_what_a_recorder_returns_is_kept_for_a_second(clock: FakeClock) -> None:
    """So a recorder need not be fast. Those of a thousand series are kept, because names may contain ids."""
    seen, made = list[float](), list[ref[Any]]()

    def recorder(instrument: Instrument, labels: Mapping[str, str]) -> Callable[[float], None]:
        def record(value: float) -> None:
            seen.append(value)

        made.append(ref(record))
        return record

    remove = Feed(recorder, Labels(), attempts=False).add()
    for seconds in (0.0, 0.5, 0.5, -60.0):  # the clock goes back at the end of virtual time
        clock.advance(seconds)
        Retry().call(int)
        Retry().call(str)
    assert len(made) == 6
    for number in range(1500):
        Retry().execute(lambda ctx: None, Context(operation=f"get-{number}"))
    assert len(seen) == 1508
    assert len([it for it in made if it() is not None]) <= 1000
    remove()


@pytest.mark.parametrize("raises", [False, True])
def test_an_event_in_the_middle_of_a_measurement_is_measured_afterwards(raises: bool) -> None:
    """As in a finalizer or a signal handler: the locks of a client are not reentrant. Also if it fails."""
    lock, seen, results = threading.Lock(), list[str](), list[int]()

    def recorder(instrument: Instrument, labels: Mapping[str, str]) -> Callable[[float], None]:
        assert lock.acquire(blocking=False)
        try:
            if not results:
                results.append(0)
                results.append(Retry().call(int, "7"))
                if raises:
                    raise Boom
        finally:
            lock.release()
        return lambda value: seen.append(labels["operation"])

    remove = Feed(recorder, Labels(), attempts=False).add()
    Retry().call(str)
    remove()
    assert results == [0, 7]
    assert seen == (["int"] if raises else ["str", "int"])


def test_an_event_of_another_thread_does_not_wait_for_a_measurement() -> None:
    """It is measured in its own thread."""
    other = threading.Thread(target=Retry().call, args=(int, "7"))
    seen: list[tuple[str, bool]] = []

    def recorder(instrument: Instrument, labels: Mapping[str, str]) -> Callable[[float], None]:
        if labels["operation"] == "str" and other.ident is None:
            other.start()
            other.join()
        return lambda value: seen.append((labels["operation"], threading.current_thread() is other))

    remove = Feed(recorder, Labels(), attempts=False).add()
    Retry().call(str)
    remove()
    assert seen == [("int", True), ("str", False)]


# --- observed policies -----------------------------------------------------------------------


def test_breakers_and_bulkheads_are_found_in_nested_pipelines() -> None:
    """Under the name of the outermost pipeline."""
    breaker, bulkhead = CircuitBreaker(name="db"), Bulkhead(3, name="pool")
    inner = Policy.wrap(Retry(), breaker, name="inner")
    outer = Policy.wrap(Timeout(5), inner, bulkhead, name="outer")
    found = [tuple(it) for it in Observed(outer, breaker)]
    assert found == [("outer", "db", breaker), ("outer", "pool", bulkhead), ("db", "db", breaker)]


def test_policies_of_one_name_are_numbered() -> None:
    """Two policies must not share one series; the same policy twice is one series."""
    first, second, third = CircuitBreaker(name="db"), CircuitBreaker(name="db"), Bulkhead(1, name="db")
    observed = Observed(Policy.wrap(first, second, third, first, name="p"))
    assert [(it.name, it.policy) for it in observed] == [("db", first), ("db-2", second), ("db", third)]


def test_pipelines_of_one_name_share_their_names() -> None:
    """As in counters. A policy that is in both is one member, and changes no number of the others."""
    first, both, last = Bulkhead(1), Bulkhead(2), Bulkhead(3)
    observed = Observed(Policy.wrap(first, both), Policy.wrap(both, last))
    assert [(it.name, it.policy) for it in observed] == [
        ("Bulkhead", first),
        ("Bulkhead-2", both),
        ("Bulkhead-2", last),
    ]


def test_policies_of_different_keys_are_not_numbered() -> None:
    """Each number would be a name, and an evicted policy would leave its number to another. One key's own are."""
    keyed = Keyed(lambda key: Policy.wrap(Bulkhead(1), Bulkhead(2)), key=lambda text: text, name="tenants")
    pipeline = Policy.wrap(Bulkhead(3), keyed, Bulkhead(4), name="p")
    observed = Observed(pipeline)
    for text in "ab":
        keyed.call(str, text)
    names = [it.name for it in observed]
    assert names == ["Bulkhead", "tenants", "Bulkhead", "Bulkhead-2", "Bulkhead", "Bulkhead-2", "Bulkhead-2"]


def test_observing_keeps_no_policy_alive() -> None:
    """The series of a freed policy ends."""
    bulkhead = Bulkhead(1)
    observed = Observed(bulkhead)
    assert len(list(observed)) == 1
    del bulkhead
    gc.collect()
    assert list(observed) == []


def test_the_policies_of_keys_are_observed_and_counted(measurements: list[Measurement]) -> None:
    """Of the entries of caches, only the number is read."""
    keyed = Keyed(lambda key: CircuitBreaker(name=key), key=lambda text: text, name="hosts")
    cache = Cache(60, name="prices")
    observed = Observed(Policy.wrap(cache, keyed, name="p"))
    for text in "aba":
        cache.wrap(keyed).call(str, text)
    assert [it.name for it in observed] == ["prices", "hosts", "a", "b"]
    gauges = {it.instrument.name: it.value for it in observed.gauges()}
    assert (gauges["resilience.cache.size"], gauges["resilience.keyed.keys"]) == (2, 2)
    [(value, labels)] = of(measurements, "cache.answers")
    assert (value, labels["policy"], labels["how"]) == (1, "prices", "fresh")


def test_the_first_and_the_number_of_items_are_measured(clock: FakeClock, measurements: list[Measurement]) -> None:
    """The time includes all attempts; a stream without items has no first item."""

    def items() -> Any:
        clock.advance(2)
        yield from "abc"

    list(Policy.wrap(Retry(), name="letters").streaming().call(items))
    list(Retry().streaming().call(iter, []))
    labels = {"pipeline": "letters", "operation": items.__qualname__}
    assert of(measurements, "stream.first_item") == [(2.0, labels)]
    assert of(measurements, "stream.items") == [(3, labels)]
