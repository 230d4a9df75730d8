"""What exporters share: what events add to which instrument, and what is read from policies."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any, Never

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
import pytest

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
from resilience.integrations.http import PerHost, TransientStatus
from resilience.integrations.telemetry import (
    INSTRUMENTS,
    Feed,
    Instrument,
    Labels,
    Measurement,
    Observed,
    error_type,
)
from resilience.outcome import Failure, Success
from tests.conftest import Boom, FakeClock, Script, World
from tests.listening import park_a_task, retry_without_budget


@pytest.fixture
def taken() -> Any:
    """What a feed records while the test runs."""
    seen: list[Measurement] = []

    def recorder(it: Instrument, labels: Mapping[str, str]) -> Callable[[float], None]:
        return lambda value: seen.append(Measurement(it, value, labels))

    remove = Feed(recorder, Labels()).add()
    yield seen
    remove()


def of(seen: list[Measurement], name: str) -> list[tuple[float, dict[str, str]]]:
    return [(it.value, dict(it.labels)) for it in seen if it.instrument.name == f"resilience.{name}"]


# --- the numbers -----------------------------------------------------------------------------


def test_instruments_are_named_as_opentelemetry_names_them() -> None:
    """Dotted lower case, one name each; durations in seconds, what is counted in braces."""
    names = [it.name for it in INSTRUMENTS]
    assert len(set(names)) == len(names)
    for it in INSTRUMENTS:
        assert it.name.startswith("resilience.")
        assert it.name == it.name.lower()
        assert it.unit in ("s", "1") or (it.unit[0], it.unit[-1]) == ("{", "}")
        assert it.description.endswith(".")


async def test_every_measurement_has_the_labels_of_its_instrument(
    world: World, clock: FakeClock, taken: list[Measurement]
) -> None:
    """All of them and no others, as text; what is not known is empty."""
    breaker, bulkhead = CircuitBreaker(2), Bulkhead(1)
    pipeline = Fallback("x").wrap(Retry(3, on=Boom, backoff=[0]), breaker, bulkhead)
    for _ in range(2):
        await world.execute(pipeline, Script(Boom()).function())
    await world.attempt(Timeout(5), Script(1).function(), Context(timeout=0))
    await world.attempt(retry_without_budget(), Script(Boom()).function())
    await world.attempt(Hedge(5, on=Boom, eager=True), Script(Boom()).function())
    await world.attempt(Retry(1, on=Boom), Script(Boom()).function(), Context(timeout=5))
    chaos = Chaos(result=1)
    with chaos.injecting(rate=1.0):
        await world.attempt(chaos, Script(1).function())
    cache, keyed = Cache(1), Keyed(lambda key: Retry(), key=str)
    for _ in range(2):
        cache.call(str, 1)
    [*Retry().streaming().call(iter, [1])]
    park_a_task()
    throttle = AdaptiveThrottle()
    limiter = RateLimiter(1)
    taken += list(Observed(throttle, limiter, cache, keyed).gauges())
    shadow = CircuitBreaker(observe_only=True)
    shadow.isolate()
    await world.attempt(shadow, Script(1).function())
    taken += list(Observed(pipeline).gauges())
    assert {it.instrument for it in taken} == set(INSTRUMENTS)
    for it in taken:
        assert set(it.labels) == set(it.instrument.labels)
        assert all(isinstance(text, str) for text in it.labels.values())


async def test_timeouts_are_counted_by_what_timed_out(world: World, taken: list[Measurement]) -> None:
    """An attempt, the total, the wait in a queue, or the budget that the caller gave."""

    async def hang(ctx: Context) -> None:
        await world.hang()

    bulkhead = Bulkhead(1, queue=1, max_wait=0.01, name="pool")

    async def inside(ctx: Context) -> None:
        await world.attempt(bulkhead, Script("never").function())
        await world.attempt(bulkhead, Script("never").function(), Context(timeout=0.005))

    await world.attempt(Policy.wrap(Retry(1), Timeout(0.01, name="each")), hang)
    await world.attempt(Policy.wrap(Timeout(0.01, name="whole"), Retry(1)), hang)
    await world.attempt(Timeout(5.0, name="budget"), hang, Context(timeout=0.01))
    await world.execute(bulkhead, inside)
    assert [(labels["policy"], labels["scope"]) for _, labels in of(taken, "timeouts")] == [
        ("each", "attempt"),
        ("whole", "total"),
        ("budget", "deadline"),
        ("pool", "queue"),
        ("pool", "deadline"),
    ]


async def test_a_call_that_is_turned_away_at_once_has_not_timed_out(world: World, taken: list[Measurement]) -> None:
    """It is a rejection and nothing else, by the name of its error."""
    bulkhead = Bulkhead(1, name="pool")

    async def inside(ctx: Context) -> None:
        await world.attempt(bulkhead, Script("never").function())

    await world.execute(bulkhead, inside)
    assert [labels["reason"] for _, labels in of(taken, "rejections")] == ["BulkheadFull"]
    assert of(taken, "timeouts") == []


async def test_a_cancelled_execution_is_no_failure(tasks_world: World, taken: list[Measurement]) -> None:
    """It is counted as what it is."""
    import anyio

    with anyio.move_on_after(0.01):
        await Retry().aexecute(lambda ctx: anyio.sleep(10))
    [(_, labels)] = of(taken, "execution.duration")
    assert (labels["outcome"], labels["error_type"], labels["cancelled_by"]) == ("cancelled", "", "caller")


class Odd(Exception):
    """Has the attributes of some client's errors, of which one raises."""

    def __init__(self, status_code: object) -> None:
        self.status_code = status_code

    @property
    def status(self) -> int:
        raise RuntimeError("not read yet")


class Coded(Exception):
    """No error of gRPC's, whose `code()` nobody has to call."""

    def code(self) -> Any:
        raise AssertionError


def failed_call(status: grpc.StatusCode) -> Exception:
    """Of a channel of asyncio; those of a blocking one have another class, whose name begins with an underscore."""
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
        (Odd(200), "tests.integrations.test_telemetry.Odd"),
        (Odd("500"), "tests.integrations.test_telemetry.Odd"),
        (Odd(None), "tests.integrations.test_telemetry.Odd"),
        (failed_call(grpc.StatusCode.UNAVAILABLE), "UNAVAILABLE"),
        (grpc.RpcError("without a status"), "grpc.RpcError"),
        (Coded("secret"), "tests.integrations.test_telemetry.Coded"),
    ],
)
def test_an_error_is_named_by_its_class_or_its_status(what: Any, name: str) -> None:
    """Never by its message, which may be anything; a foreign attribute that raises has nothing to say."""
    assert error_type(what) == name


# --- what is observed ------------------------------------------------------------------------


def test_breakers_and_bulkheads_are_found_in_pipelines_that_nest() -> None:
    """Under the name of the pipeline that was handed over."""
    breaker, bulkhead = CircuitBreaker(name="db"), Bulkhead(3, name="pool")
    inner = Policy.wrap(Retry(), breaker, name="inner")
    outer = Policy.wrap(Timeout(5), inner, bulkhead, name="outer")
    assert [tuple(it) for it in Observed(outer, breaker)] == [
        ("outer", "db", breaker),
        ("outer", "pool", bulkhead),
        ("db", "db", breaker),
    ]


def test_policies_of_one_name_are_numbered() -> None:
    """Two series of one metric must not be one; the same policy twice is one series."""
    first, second, third = CircuitBreaker(name="db"), CircuitBreaker(name="db"), Bulkhead(1, name="db")
    observed = Observed(Policy.wrap(first, second, third, first, name="p"))
    assert [(it.name, it.policy) for it in observed] == [("db", first), ("db-2", second), ("db", third)]


def test_observing_keeps_nothing_alive() -> None:
    """A policy that nobody else has is gone, and its series with it."""
    bulkhead = Bulkhead(1)
    observed = Observed(bulkhead)
    assert len(list(observed)) == 1
    del bulkhead
    gc.collect()
    assert list(observed) == []


def test_a_policy_that_makes_others_is_looked_into_each_time() -> None:
    """One that has a breaker for each host, say: those that came later are seen as well."""

    class PerHost(Policy[Never]):
        def __init__(self) -> None:
            self.policies: list[Policy[Any]] = []

        async def around(self, call: Any, ctx: Context) -> Any:
            return await call(ctx)

    hosts = PerHost()
    observed = Observed(Policy.wrap(Retry(), hosts, name="p"))
    assert list(observed) == []
    hosts.policies.append(Policy.wrap(CircuitBreaker(name="example.org"), Timeout(1)))
    assert [it.name for it in observed] == ["example.org"]
    assert [it.name for it in Observed(hosts)] == ["example.org"]


def test_a_policy_for_each_host_is_observed_under_its_own_name() -> None:
    """As the HTTP clients take them; hosts that are asked for later appear then."""
    hosts = PerHost(lambda origin: Policy.wrap(CircuitBreaker(name="breaker"), name=origin))
    observed = Observed(hosts)
    assert list(observed) == []
    for host in ("a", "b"):
        hosts.for_host(f"https://{host}.org")
    assert [(it.pipeline, it.name) for it in observed] == [
        ("https://a.org:443", "breaker"),
        ("https://b.org:443", "breaker"),
    ]


def test_what_is_kept_for_keys_is_counted(taken: list[Measurement]) -> None:
    """The policy of each key is observed as well as the number of keys; entries of caches are a number only."""
    keyed = Keyed(lambda key: CircuitBreaker(name=key), key=lambda text: text, name="hosts")
    cache = Cache(60, name="prices")
    observed = Observed(Policy.wrap(cache, keyed, name="p"))
    for text in "aba":
        cache.wrap(keyed).call(str, text)
    assert [it.name for it in observed] == ["prices", "hosts", "a", "b"]
    gauges = {it.instrument.name: it.value for it in observed.gauges()}
    assert (gauges["resilience.cache.size"], gauges["resilience.keyed.keys"]) == (2, 2)
    [(value, labels)] = of(taken, "cache.answers")
    assert (value, labels["policy"], labels["how"]) == (1, "prices", "fresh")


async def test_streams_are_measured_by_their_first_item_and_by_all(
    world: World, clock: FakeClock, taken: list[Measurement]
) -> None:
    """The time since the first pull, in all attempts; one that brings nothing has no first item."""

    def items() -> Any:
        clock.advance(2)
        yield from "abc"

    list(Policy.wrap(Retry(), name="letters").streaming().call(items))
    list(Retry().streaming().call(iter, []))
    labels = {"pipeline": "letters", "operation": items.__qualname__}
    assert of(taken, "stream.first_item") == [(2.0, labels)]
    assert of(taken, "stream.items") == [(3, labels)]


@pytest.mark.parametrize("thing", [Retry, PerHost, "weather", None])
def test_what_is_no_policy_cannot_be_observed(thing: Any) -> None:
    """A class in the place of an object is the usual slip."""
    with pytest.raises(TypeError, match="only policies can be observed, not "):
        Observed(thing)
