"""`standard(...)`, and a policy for each host, under real clients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from math import inf
from typing import Any

import anyio
import httpx
import pytest
import yarl

from resilience import CircuitOpen, Hedge, Quantile, Rate, Retry, RetryBudget, TimeoutExceeded, events
from resilience.backoff import Exponential
from resilience.integrations.http import PerHost, standard
from resilience.integrations.http.perhost import _origin_in, policy_for
from resilience.integrations.httpx import AsyncResilienceTransport
from resilience.testing import script
from resilience.work import IdempotencyKey
from tests.conftest import FakeClock, Virtual
from tests.functions import raising
from tests.integrations.http_clients import client_of
from tests.integrations.servers import Answer, Server, notes_of

# --- the policies of the pipeline ------------------------------------------------------------


def test_the_order_and_the_defaults_are_those_of_the_standard_handler() -> None:
    """Concurrency limit, total timeout, retry, breaker and attempt timeout, outermost first."""
    policies = standard().for_host("https://example.org/a").policies
    bulkhead, total, _body, retry, breaker, attempt = policies
    names = ["bulkhead of {}", "total timeout", "body", "Retry", "breaker of {}", "attempt timeout"]
    assert [it.name for it in policies] == [name.format("https://example.org:443") for name in names]
    assert (bulkhead.settings()["limit"], bulkhead.settings()["queue"]) == (1000, 0)
    assert (total.settings()["seconds"], attempt.settings()["seconds"]) == (30.0, 10.0)
    assert retry.settings()["attempts"] == 4
    assert repr(retry.settings()["backoff"]) == repr(Exponential(2.0, cap=30.0))
    assert repr(breaker.settings()["trip"]) == "FailureRatio(0.1, min_calls=100, window=30)"
    assert breaker.settings()["open_for"] == 5.0


@pytest.mark.parametrize(
    ("settings", "policy", "setting", "text"),
    [
        ({"concurrency": 7}, 0, "limit", "7"),
        ({"queue": 3}, 0, "queue", "3"),
        ({"queue": 3}, 0, "max_wait", "30.0"),
        ({"total_timeout": 20}, 1, "seconds", "20.0"),
        ({"attempts": 2}, 3, "attempts", "2"),
        ({"backoff": [1]}, 3, "backoff", "[1.0]"),
        ({"backoff": [1], "budget": 0.2}, 3, "backoff", "[1.0]"),
        ({"failure_ratio": 0.5}, 4, "trip", "FailureRatio(0.5, min_calls=100, window=30)"),
        ({"min_calls": 5}, 4, "trip", "FailureRatio(0.1, min_calls=5, window=30)"),
        ({"window": 60}, 4, "trip", "FailureRatio(0.1, min_calls=100, window=60)"),
        ({"open_for": 9}, 4, "open_for", "9.0"),
        ({"attempt_timeout": 2}, 5, "seconds", "2.0"),
        ({"attempt_timeout": 30, "window": 60}, 5, "seconds", "30.0"),
        ({"hedge": 0.5}, 5, "delay", "0.5"),
        ({"budget": 0.2}, 3, "budget", "RetryBudget(0.2, saved=10)"),
        ({"cooperative": True}, 5, "cooperative", "True"),
        ({"cooperative": True}, 1, "cooperative", "True"),
    ],
)
def test_every_setting_has_a_parameter(settings: dict[str, Any], policy: int, setting: str, text: str) -> None:
    policies = standard(**settings).for_host("https://example.org/").policies
    assert repr(policies[policy].settings()[setting]) == text


def test_every_host_has_the_listeners_of_an_iterator() -> None:
    heard: list[Any] = []
    policies = standard(cooperative=True, listeners=iter([heard.append]))
    for host in "ab":
        policies.for_host(f"https://{host}.example/").call(int)
    assert [type(it) for it in heard] == [events.ExecutionFinished] * 2


def test_describe_has_a_line_for_each_policy() -> None:
    text = standard().for_host("http://localhost:8080/").describe()
    assert text.splitlines()[0] == "standard pipeline of http://localhost:8080: 6 policies, outermost first"
    assert "body: has the time that is left of the total" in text


# --- a policy for each host ------------------------------------------------------------------


def test_a_host_is_identified_by_scheme_name_and_port() -> None:
    """Other spellings of a URL are the same host."""
    made: list[str] = []
    hosts = PerHost(lambda origin: made.append(origin) or Retry())
    same = ["https://example.org", "https://EXAMPLE.org:443/a?b", "https://me:pw@example.org./", "HTTPS://example.org"]
    same += [f"https://example.org{it}//www.example.org:1/" for it in ("?next=", "#")]
    same += ["https://exa\tmple.org/a", " https:\n//example.org/a"]
    others = ["http://example.org", "https://example.org:8443", "http://[::1]:8000", "https://www.example.org"]
    for url in same + others:
        hosts.for_host(url)
    assert made == ["https://example.org:443", "http://example.org:80", *others[1:3], "https://www.example.org:443"]


@pytest.mark.parametrize("make", [str, httpx.URL, yarl.URL, partial(yarl.URL, encoded=True)])
@pytest.mark.parametrize("url", ["https://Example.org./a", "http://[::1]:8000/", "ws://xn--bcher-kva.example/"])
def test_the_url_of_a_client_is_that_of_the_same_host(make: Callable[[str], Any], url: str) -> None:
    """That of an object of httpx or aiohttp, too, which writes the name in Unicode, or as its user has written it."""
    policies = standard()
    assert policy_for(policies, str(make(url))) is policies.for_host(url)
    assert len(policies.policies) == 1


def test_no_password_of_a_url_is_kept() -> None:
    """All users of a host share one entry of the cache. An `@` may also be part of a password, a path or a query."""
    policies = standard()
    _origin_in.cache_clear()
    for url in ("me:pw@example.org", "me:p@w@example.org/@a", "you@example.org?b=@c", "example.org#@d"):
        policies.for_host(f"https://{url}")
    assert len(policies.policies) == _origin_in.cache_info().currsize == 1


def test_the_number_of_hosts_is_bounded() -> None:
    policies = PerHost(lambda origin: Retry(), max_hosts=2)
    for host in "abc":
        policies.for_host(f"https://{host}.example")
    assert list(policies.policies) == ["https://b.example:443", "https://c.example:443"]


def test_a_ratio_is_a_budget_for_each_host_and_a_budget_is_shared_by_all() -> None:
    """Retries and hedges of a host share it, and both pay in: each request with half of the ratio."""

    def budgets(policies: PerHost) -> list[Any]:
        pipelines = [policies.for_host(f"https://{name}.example/") for name in ("a", "b")]
        return [it.policies[place].settings()["budget"] for it in pipelines for place in (3, 5)]

    a, also_a, b, also_b = budgets(standard(budget=0.2, hedge=1))
    assert a is also_a
    assert b is also_b
    assert a is not b
    retry: Any = standard(budget=0.2).for_host("https://a.example/").find(Retry)
    assert (repr(a), repr(retry.settings()["budget"])) == ("RetryBudget(0.1, saved=10)", "RetryBudget(0.2, saved=10)")
    shared = RetryBudget()
    assert budgets(standard(budget=shared, hedge=1)) == [shared] * 4
    assert budgets(standard(hedge=1)) == [None, 0.1, None, 0.1]


@contextlib.asynccontextmanager
async def slow_at_first(policy: Any) -> AsyncIterator[tuple[httpx.AsyncClient, list[httpx.Request]]]:
    """A client whose server answers late to the first request of each method; and the requests."""
    sent: list[httpx.Request] = []

    async def handler(request: httpx.Request) -> httpx.Response:
        if (trace := request.extensions.get("trace")) is not None:
            await trace("connection.connect_tcp.started", {})
        sent.append(request)
        number = [it.method for it in sent].count(request.method)
        await anyio.sleep(0.3 if number == 1 else 0)
        return httpx.Response(200, text=str([it.method for it in sent].count(request.method)))

    async with httpx.AsyncClient(transport=AsyncResilienceTransport(policy, httpx.MockTransport(handler))) as client:
        yield client, sent


def test_each_host_has_a_hedge_that_observes_the_latency_of_its_requests() -> None:
    quantile = Quantile(0.9, warm_up=1)
    policies = standard(hedge=quantile)
    quick, unknown = (policies.for_host(f"https://{host}.example/").find(Hedge) for host in "ab")
    quick.call(int)
    assert quick.settings()["delay"] == quantile
    assert quick.delay() < inf == unknown.delay()


async def test_only_a_repeatable_request_is_hedged(virtual_tasks: Virtual) -> None:
    """A GET is. A POST is not, even while it connects, as it may be sent: its first response is waited for."""
    async with slow_at_first(standard(hedge=0.02)) as (client, sent):
        assert (await client.get("https://a.example/")).text == "2"
        assert (await client.post("https://a.example/")).text == "1"
    assert [it.method for it in sent] == ["GET", "GET", "POST"]


async def test_a_post_that_waits_for_its_turn_is_not_hedged(virtual_tasks: Virtual) -> None:
    """Only one of two attempts could be sent, and the refusal of the other would end the call."""
    policies = standard(hedge=0.02, rate=Rate(1, per=0.1))
    async with slow_at_first(policies) as (client, sent), anyio.create_task_group() as tasks:
        for send in (client.patch, client.post):  # each is answered so late that another attempt would have its turn
            tasks.start_soon(send, "https://a.example/")
    assert len(sent) == 2


async def test_a_post_that_has_begun_with_an_idempotency_key_is_hedged(virtual_tasks: Virtual) -> None:
    """Both attempts send the same key."""
    async with slow_at_first(IdempotencyKey().wrap(Hedge(0.02))) as (client, sent):
        await client.post("https://a.example/")
    first, second = (it.headers["Idempotency-Key"] for it in sent)
    assert first == second


# --- behaviour -------------------------------------------------------------------------------


def test_the_standard_pipeline_retries_and_reports_to_its_listeners(clock: FakeClock) -> None:
    """Three times, after waits that double, or as long as the server asks."""
    reported: list[Any] = []
    answers = [httpx.Response(it, headers={"Retry-After": "9"} if it == 429 else {}) for it in (503, 429, 503, 200)]
    backoff = Exponential(2.0, cap=30.0, jitter="none")
    with client_of(
        standard(backoff=backoff, cooperative=True, listeners=[reported.append]), script(*answers)
    ) as client:
        assert client.get("http://example.org/").status_code == 200
    assert clock.sleeps == [2.0, 9.0, 8.0]
    assert [it.delay for it in reported if isinstance(it, events.RetryScheduled)] == [2.0, 9.0, 8.0]
    (finished,) = [it for it in reported if isinstance(it, events.ExecutionFinished)]
    assert finished.policy == "standard pipeline of http://example.org:80"
    assert finished.operation == "GET example.org"


def test_attempts_that_time_out_open_the_circuit(server: Server) -> None:
    """The breaker stands outside of the limit of an attempt, and inside of the retry."""
    server.script("/", Answer(200, hold=threading.Event()))
    policies = standard(min_calls=3, failure_ratio=1.0, attempts=3, backoff=[0], attempt_timeout=0.1)
    with client_of(policies) as client:
        with pytest.raises(TimeoutExceeded) as caught:
            client.get(server.url)
        assert caught.value.policy == "attempt timeout"
        assert "3 attempts" in notes_of(caught.value)
        with pytest.raises(CircuitOpen):
            client.get(server.url)


def test_a_mistake_of_the_caller_opens_no_circuit() -> None:
    """Only transient errors say something about the host."""
    handler = raising(httpx.LocalProtocolError("a header is malformed"))
    policies = standard(min_calls=2, failure_ratio=0.5, backoff=[0])
    with client_of(policies, handler) as client:
        for _ in range(4):
            with pytest.raises(httpx.LocalProtocolError):
                client.get("http://example.org/")


def test_the_pipeline_of_a_host_protects_other_calls_to_it(clock: FakeClock) -> None:
    """A function that is no client's request has the same limits, attempts and breaker."""
    left: list[float] = []

    def ping(ctx: Any) -> str:
        left.append(ctx.remaining())
        if len(left) == 1:
            raise ConnectionError("down")
        return "pong"

    pipeline = standard(cooperative=True).for_host("https://example.org")
    assert pipeline.execute(ping) == "pong"
    assert left == [10.0, 10.0]
