"""Rate limits in the headers of responses, and the limiters that obey them."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from email.utils import format_datetime
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience import (
    Context,
    Hedge,
    Keyed,
    Pipeline,
    Policy,
    Rate,
    RateLimiter,
    RepeatCap,
    Retry,
    Timeout,
    current_context,
)
from resilience.integrations.http import standard
from resilience.integrations.http.limits import learned
from resilience.integrations.httpx import AsyncResilienceTransport
from resilience.testing import script, virtual_time
from resilience.work import IdempotencyKey
from tests.conftest import Virtual, World
from tests.integrations.http_clients import client_of
from tests.integrations.sdks import ANTHROPIC, OPENAI, SDK
from tests.integrations.servers import Server

SPENT = {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "30"}


def from_now(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


def openai_headers(kind: str, remaining: object, reset: str, limit: object = 60) -> dict[str, str]:
    values = {"limit": limit, "remaining": remaining, "reset": reset}
    return {f"x-ratelimit-{name}-{kind}": str(value) for name, value in values.items()}


def anthropic_headers(kind: str, remaining: object, reset: str) -> dict[str, str]:
    return {f"anthropic-ratelimit-{kind}-remaining": str(remaining), f"anthropic-ratelimit-{kind}-reset": reset}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        # the IETF's, newest first
        ({"RateLimit": '"default";r=50;t=30', "RateLimit-Policy": '"default";q=100;w=60'}, (50, 30)),
        ({"RateLimit": '"day";r=0', "RateLimit-Policy": '"hour";q=9;w=3600, "day";q=100;w=86400'}, (0, 86400)),
        ({"RateLimit": '"a";r=5;t=3, "b" ; r=2 ; t=40;pk=:cGs=:'}, (2, 40)),
        ({"RateLimit": '"bytes";r=9;t=5', "RateLimit-Policy": '"bytes";q=100;w=9;qu="content-bytes"'}, None),
        ({"RateLimit": '"bytes";r=0;t=5', "RateLimit-Policy": '"bytes";q=100;w=9;qu="content-bytes"'}, (0, 5)),
        ({"RateLimit": "default;r=7;t=8"}, (7, 8)),
        ({"RateLimit": "limit=100, remaining=50, reset=5"}, (50, 5)),
        ({"RateLimit-Limit": "100, 100;w=60", "RateLimit-Remaining": "3", "RateLimit-Reset": "20"}, (3, 20)),
        # with X-
        ({"X-RateLimit-Limit": "60", "X-RateLimit-Remaining": "3", "X-RateLimit-Reset": "20"}, (3, 20)),
        ({"x-ratelimit-remaining": "299.0", "x-ratelimit-reset": "201", "x-ratelimit-used": "301"}, (299, 201)),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "9", "x-ratelimit-reset-after": "0.5"}, (0, 0.5)),
        # OpenAI's reset is until full: only where nothing is left
        (openai_headers("requests", 59, "1s"), None),
        (openai_headers("requests", 0, "6m0s"), (0, 360)),
        (openai_headers("tokens", 0, "12ms"), (0, 0.012)),
        (openai_headers("tokens", 0, "1h2m3.5s"), (0, 3723.5)),
        (openai_headers("requests", 0, "1s") | openai_headers("tokens", 0, "6m0s"), (0, 360)),
        (openai_headers("tokens", 0, "6m0s") | {"x-ratelimit-remaining": "5", "x-ratelimit-reset": "9"}, (0, 360)),
        (openai_headers("tokens", 0, "6s") | {"x-ratelimit-remaining": "1", "x-ratelimit-reset": "9"}, (0, 6)),
        (openai_headers("tokens", 0, "6m0s") | {"x-ratelimit-remaining": "0.5", "x-ratelimit-reset": "9"}, (0, 360)),
        (openai_headers("tokens", 1, "6s"), None),
        ({"x-ratelimit-limit": "1", "x-ratelimit-remaining": "0", "x-ratelimit-reset": "5"}, (0, 5)),
        # invalid
        ({}, None),
        ({"x-ratelimit-remaining": "0"}, None),
        ({"x-ratelimit-reset": "20"}, None),
        (openai_headers("requests", -1, "6m0s"), None),
        *((openai_headers("requests", 0, "6m0s", limit=it), None) for it in (0, -1)),
        *(
            ({**SPENT, "x-ratelimit-reset": it}, None)
            for it in ("-5", "0", "soon", "1700000000", "0001-01-01T00:00:00")
        ),
        ({"x-ratelimit-remaining": "none", "x-ratelimit-reset": "5"}, None),
        ({"x-ratelimit-remaining": "nan", "x-ratelimit-reset": "inf"}, None),
        *(({"RateLimit": it}, None) for it in ('"a";r=x;t=3', '"a";t=3', ";;;,,,")),
    ],
    ids=str,
)
def test_limits_are_read_from_headers(headers: dict[str, str], expected: Any) -> None:
    """In upper and lower case."""
    assert learned(headers) == expected
    assert learned({name.upper(): value for name, value in headers.items()}) == expected
    assert learned(httpx.Headers(headers)) == expected


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the zone of a process cannot be set there")
def test_an_instant_is_in_utc_unless_it_has_another_zone(in_tokyo: None) -> None:
    """Independently of this machine's zone."""
    elsewhere = datetime.now(timezone(timedelta(hours=-5))) + timedelta(seconds=30)
    for text in (from_now(30)[:19], elsewhere.isoformat()):
        assert learned(anthropic_headers("requests", 4, text)) == (4, pytest.approx(30, abs=10))


def test_an_instant_is_on_the_clock_of_the_server() -> None:
    """Its `Date` tells that clock, in seconds since 1970 and in RFC 3339 format."""
    there = datetime.now(UTC) - timedelta(hours=1)
    date = {"DATE": format_datetime(there, usegmt=True)}
    reset = there.replace(microsecond=0) + timedelta(seconds=30)
    assert learned({**date, **anthropic_headers("requests", 4, reset.isoformat())}) == (4, 30)
    assert learned({**date, "X-RateLimit-Remaining": "4", "X-RateLimit-Reset": f"{reset.timestamp():.0f}"}) == (4, 30)
    cached = {**date, "Age": "10", "X-RateLimit-Remaining": "4", "X-RateLimit-Reset": f"{reset.timestamp():.0f}"}
    assert learned(cached) == (4, 20)


def test_values_that_are_no_text_are_read_as_text_or_ignored() -> None:
    """As those of a mapping that a program has made itself."""
    numbers: Any = {"X-RateLimit-Remaining": 3, "X-RateLimit-Reset": 20, 1: 2}
    others: Any = {b"X-RateLimit-Remaining": b"3", "X-RateLimit-Remaining": None, "X-RateLimit-Reset": ["20"]}
    assert (learned(numbers), learned(others)) == ((3, 20), None)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: {"x-ratelimit-remaining": "4", "x-ratelimit-reset": str(int(time.time()) + 30)}, (4, 30)),
        (lambda: {"x-ratelimit-remaining": "4", "x-ratelimit-reset": str(int(time.time() + 30) * 1000)}, (4, 30)),
        (lambda: {"x-ratelimit-remaining": "4", "x-ratelimit-reset": f"{time.time() + 30:.3f}"}, (4, 30)),
        (lambda: anthropic_headers("requests", 4, from_now(30).replace("+00:00", "Z")), (4, 30)),
        (lambda: anthropic_headers("requests", 4, from_now(30)[:19]), (4, 30)),
        (lambda: anthropic_headers("tokens", 4, from_now(30)), None),
        (lambda: anthropic_headers("input-tokens", 0, from_now(30)), (0, 30)),
        (lambda: anthropic_headers("output-tokens", 0, from_now(-30)), None),
    ],
)
def test_the_instant_of_a_reset_is_converted_to_seconds(make: Callable[[], dict[str, str]], expected: Any) -> None:
    limits = learned(make())
    assert limits == (expected if expected is None else pytest.approx(expected, abs=1.5))


_NAMES = ["RateLimit", "RateLimit-Policy", *openai_headers("tokens", 0, ""), *anthropic_headers("requests", 0, "")]
_NAMES += [f"{prefix}ratelimit-{it}" for prefix in ("", "x-") for it in ("limit", "remaining", "reset", "reset-after")]
_TEXTS = st.text(st.sampled_from('0123456789.-+:TZ";=,rtqwu msh\n\u0660\u00e9\x00'), max_size=40)


@given(st.dictionaries(st.sampled_from(_NAMES), _TEXTS))
def test_any_header_is_parsed_as_numbers_or_nothing(headers: dict[str, str]) -> None:
    limits = learned(headers)
    if limits is not None:
        RateLimiter(1).learn(*limits)
        assert limits[0] >= 0
        assert limits[1] > 0


def test_a_hostile_header_is_parsed_in_linear_time() -> None:
    began = time.monotonic()
    for part in ('; ; "', ";a=b ", '"', "1h", "a;", "  "):
        for name in ("RateLimit", "RateLimit-Policy", "x-ratelimit-reset"):
            learned({name: "a" + part * 30_000 + '"', "x-ratelimit-remaining": "0"})
    assert time.monotonic() - began < 5


# --- clients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 429])
def test_a_limiter_obeys_the_headers_of_responses(status: int) -> None:
    """Of results and of failures. With `retry_after=False` it obeys neither."""
    for limiter, closed_for in [(RateLimiter(1000), 30), (RateLimiter(1000, longest_pause=5), 5)]:
        with (
            virtual_time(),
            client_of(Timeout(60).wrap(limiter), lambda _: httpx.Response(status, headers=SPENT)) as client,
        ):
            client.get("http://a.test")
            assert limiter.stats().next_turn == closed_for
    limiter = RateLimiter(1000, retry_after=False)
    with client_of(limiter, lambda _: httpx.Response(status, headers=SPENT)) as client:
        client.get("http://a.test")
        assert limiter.stats().next_turn == 0


def test_a_limiter_that_only_observes_obeys_no_response_of_a_call_without_a_turn() -> None:
    """As it moves nothing by the result or the error of that call either."""
    limiter = RateLimiter(Rate(1, per=5), observe_only=True)
    with virtual_time() as clock, client_of(limiter, lambda _: httpx.Response(200, headers=SPENT)) as client:
        assert limiter.try_take() == 0
        client.get("http://a.test")
        assert limiter.stats().next_turn == 5
        clock.advance(5)
        client.get("http://a.test")
        assert limiter.stats().next_turn == 30


@pytest.mark.parametrize("make", [lambda: RateLimiter(10), lambda: Retry(3).wrap(RateLimiter(10))])
def test_a_policy_that_has_obeyed_headers_can_be_collected(make: Callable[[], Policy[Any]]) -> None:
    """A crawler creates one for each host, and drops those that it no longer needs."""
    policy = make()
    client_of(policy, lambda request: httpx.Response(200)).get("https://example.org/")
    known = weakref.ref(policy)
    del policy
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("status", [200, 429])
def test_a_limiter_of_a_key_obeys_the_responses_of_that_key(status: int) -> None:
    """And of no other key. `key` is called once for each call, as it may take turns."""
    keys: list[str] = []

    def key(ctx: Context) -> str:
        keys.append(ctx.properties["tenant"])
        return keys[-1]

    def handler(request: httpx.Request) -> httpx.Response:
        left = "0" if request.headers["tenant"] == "spent" else "50"
        return httpx.Response(status, headers={"x-ratelimit-remaining": left, "x-ratelimit-reset": "30"})

    tenants = Keyed(lambda tenant: RateLimiter(1000, name=tenant), key)

    def ask(ctx: Context) -> None:
        client.get("http://a.test", headers={"tenant": ctx.properties["tenant"]})

    with virtual_time(), client_of(Timeout(60).wrap(tenants), handler) as client:
        for tenant in ("rich", "spent"):
            Retry(1).execute(ask, Context(properties={"tenant": tenant}))
        closed = {name: limiter.stats().next_turn for name, limiter in limiters_of(tenants).items()}
        assert closed == {"rich": 0, "spent": 30}
    assert keys == ["rich", "spent"]


def limiters_of(keyed: Keyed) -> dict[Any, RateLimiter]:
    return {key: Pipeline(policy).find(RateLimiter) for key, policy in keyed.policies.items()}


@pytest.mark.parametrize(
    "between",
    [RepeatCap(1), IdempotencyKey(), Hedge(10), Policy.wrap(Timeout(60), listeners=[lambda event: None])],
    ids=lambda it: it.name,
)
def test_limiters_in_nested_keyed_policies_obey_the_headers(between: Policy[Any]) -> None:
    """With any policy between them and the request."""
    inner = Keyed(lambda host: Policy.wrap(RateLimiter(1000), between), lambda ctx: ctx.operation)
    outer = Keyed(lambda host: Policy.wrap(RateLimiter(1000), between, inner), lambda ctx: ctx.operation)
    with client_of(outer, lambda _: httpx.Response(200, headers=SPENT)) as client:
        client.get("http://a.test")
    for keyed in (outer, inner):
        assert 29 < limiters_of(keyed)["GET a.test"].stats().next_turn <= 30


async def test_hedged_attempts_of_several_keys_teach_their_own_limiters(in_virtual_asyncio: Virtual) -> None:
    """Each replica's limiter obeys that replica."""
    replicas = Keyed(lambda number: RateLimiter(1000).wrap(Timeout(60)), lambda ctx: ctx.hedge)

    async def handler(request: httpx.Request) -> httpx.Response:
        number = current_context().hedge
        await anyio.sleep(0.1 + 0.1 * number)
        headers = {"x-ratelimit-remaining": str(50 * number), "x-ratelimit-reset": "30"}
        return httpx.Response(200 if number else 503, headers=headers)

    transport = AsyncResilienceTransport(Hedge(0.01).wrap(replicas), httpx.MockTransport(handler))
    async with httpx.AsyncClient(transport=transport) as client:
        assert (await client.get("http://a.test")).status_code == 200
    assert 29 < limiters_of(replicas)[0].stats().next_turn <= 30
    assert limiters_of(replicas)[1].stats().next_turn == 0


def test_the_rate_of_the_standard_pipeline_counts_attempts() -> None:
    """For each host separately; each attempt of a retry waits for its turn."""
    handler = script(*map(httpx.Response, (503, 503, 200, 200)))
    policies = standard(rate=Rate(1, per=4, burst=1), backoff=[0.5])
    with virtual_time():
        with client_of(policies, handler) as client:
            assert client.get("http://a.test").status_code == 200
            client.get("http://b.test")
        assert [call.at for call in handler.calls] == [0, 4, 8, 8]
        pipeline: Any = policies.for_host("http://a.test")
        names = [it.name for it in pipeline.policies]
        assert names.index("breaker of http://a.test:80") + 1 == names.index("rate limiter of http://a.test:80")


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize(
    ("sdk", "make"),
    [
        (OPENAI, lambda: openai_headers("tokens", 0, "40s")),
        (ANTHROPIC, lambda: anthropic_headers("requests", 0, from_now(40))),
    ],
    ids=["openai", "anthropic"],
)
async def test_a_limiter_obeys_the_headers_of_an_sdk(
    server: Server, in_asyncio: World, sdk: SDK, make: Callable[[], dict[str, str]], status: int
) -> None:
    """Those of replies and of errors, in blocking code and in coroutines."""
    answer = sdk.answer() if status == 200 else sdk.error(status)
    server.script(sdk.path, replace(answer, headers={"Content-Type": "application/json", **make()}))
    blocking, tasks = RateLimiter(1000), RateLimiter(1000)
    with contextlib.suppress(sdk.module.BadRequestError), sdk.protected(server.url, blocking) as client:
        sdk.ask(client)
    with contextlib.suppress(sdk.module.BadRequestError):
        async with sdk.aprotected(server.url, Policy.wrap(Retry(1), tasks)) as client:
            await sdk.ask(client)
    for limiter in (blocking, tasks):
        assert 20 < limiter.stats().next_turn <= 40
