"""Protected clients of the SDKs of language models: their common behaviour, and that of `anthropic` alone."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest

from resilience import AdaptiveThrottle, CircuitBreaker, Fallback, Hedge, Policy, Quantile, Rate, RateLimiter, Retry
from resilience.network_errors import transient
from tests.conftest import FakeClock, World
from tests.integrations import sdks as llm
from tests.integrations.http_clients import each_of
from tests.integrations.sdks import ANTHROPIC, OPENAI, QUESTION, SDK, SOON, anthropic
from tests.integrations.servers import Answer, Server
from tests.versions import needs

sdk = each_of([OPENAI, ANTHROPIC], ids=lambda it: it.name)


# --- failures and results ---


def test_statuses_that_the_sdk_would_retry_are_retried(server: Server, sdk: SDK) -> None:
    """A plain Retry does so with no configuration, for a POST too; the SDK adds no attempts."""
    with sdk.protected(server.url, SOON) as client:
        for status in (408, 409, 429, 500, 502, 503, 504, 529):
            server.requests.clear()
            server.script(sdk.path, sdk.error(status), sdk.error(status), sdk.answer())
            assert sdk.text(sdk.ask(client)) == "fine"
            assert len(server.requests) == 3


def test_statuses_that_the_sdk_would_not_retry_are_no_failure(server: Server, sdk: SDK) -> None:
    """They are raised immediately: not retried, not counted by a breaker, not replaced by a fallback."""
    breaker = CircuitBreaker(1)
    statuses = [400, 401, 403, 404, 413, 422]
    with sdk.protected(server.url, Fallback(None).wrap(SOON, breaker)) as client:
        for status in statuses:
            server.script(sdk.path, sdk.error(status))
            with pytest.raises(sdk.module.APIStatusError):
                sdk.ask(client)
    assert len(server.requests) == len(statuses)
    assert breaker.state.name == "CLOSED"


@pytest.mark.parametrize("status", [400, 200])
def test_functions_of_results_see_only_replies(server: Server, sdk: SDK, status: int) -> None:
    """An error that is no failure is not one either: the caller gets it, and no predicate is asked about it."""
    server.script(sdk.path, sdk.answer() if status == 200 else sdk.error(status))
    seen: list[str] = []

    def see(reply: Any) -> int:
        seen.append(sdk.text(reply))
        return 0

    policies = [
        Fallback(None, on_result=see),
        Retry(on_result=see),
        AdaptiveThrottle(on_result=see),
        CircuitBreaker(1, on_result=see),
        Hedge(60, on_result=see),
        Hedge(Quantile(), on_result=see),
        RateLimiter(Rate(100, actual=see), told=lambda reply: see(reply) or None),
    ]
    with sdk.protected(server.url, Policy.wrap(*policies)) as client:
        if status == 200:
            assert sdk.text(sdk.ask(client)) == "fine"
        else:
            with pytest.raises(sdk.module.BadRequestError):
                sdk.ask(client)
    assert seen == ["fine"] * (8 if status == 200 else 0)


@pytest.mark.parametrize(
    ("status", "should_retry", "requests"), [(400, "true", 3), (503, "false", 1), (429, "false", 1)]
)
def test_x_should_retry_decides(server: Server, sdk: SDK, status: int, should_retry: str, requests: int) -> None:
    server.script(sdk.path, sdk.error(status, x_should_retry=should_retry))
    with sdk.protected(server.url, SOON) as client, pytest.raises(sdk.module.APIStatusError):
        sdk.ask(client)
    assert len(server.requests) == requests


@pytest.mark.parametrize(
    ("headers", "delay"), [({"retry_after": "7"}, 7.0), ({"retry_after_ms": "1500", "retry_after": "7"}, 1.5)]
)
def test_the_wait_is_at_least_what_the_server_asks_for(
    server: Server, sdk: SDK, clock: FakeClock, headers: dict[str, str], delay: float
) -> None:
    """`retry-after-ms` comes before `Retry-After`."""
    server.script(sdk.path, sdk.error(429, **headers), sdk.answer())
    with sdk.protected(server.url, SOON) as client:
        assert sdk.text(sdk.ask(client)) == "fine"
    assert clock.sleeps == [delay]


# --- all parts of the client ---


def test_a_stream_is_tried_again_until_it_is_open(server: Server, sdk: SDK) -> None:
    """Failures before the first byte of the body are the policy's."""
    server.script(sdk.path, sdk.error(503), Answer(fault="reset"), sdk.stream("a", "b"))
    with sdk.protected(server.url, SOON) as client, sdk.ask(client, stream=True) as stream:
        assert len(list(stream)) >= 2
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("sdk", "kind", "attempts"),
    [
        (ANTHROPIC, "overloaded_error", 2),
        (ANTHROPIC, "rate_limit_error", 2),
        (ANTHROPIC, "invalid_request_error", 1),
        (OPENAI, "server_error", 2),
        (OPENAI, "insufficient_quota", 1),
    ],
)
def test_an_error_that_begins_a_stream_is_repeated_if_it_says_not_now(
    server: Server, sdk: SDK, kind: str, attempts: int
) -> None:
    """An overloaded service may answer 200 first, and then report the error as the first event of the stream."""
    server.script(sdk.path, sdk.stream_error(kind), sdk.stream("a", "b"))
    with sdk.protected(server.url, CircuitBreaker(5)) as client:
        items = SOON.streaming().call(lambda: sdk.ask(client, stream=True))
        if attempts == 1:
            with pytest.raises(sdk.module.APIError, match="sorry"):
                list(items)
        else:
            assert len(list(items)) >= 2
    assert len(server.requests) == attempts


def test_the_protected_client_is_a_copy_of_the_same_type(sdk: SDK) -> None:
    """With the SDK's retries off; the original is unchanged."""
    kind = getattr(sdk.module, sdk.client)
    original = kind(api_key="k")
    with sdk.protect(original, SOON) as client:
        assert type(client) is kind
        assert (client.max_retries, original.max_retries) == (0, 2)
        assert "request" not in vars(original)


def test_copies_of_a_protected_client_are_protected(server: Server, sdk: SDK) -> None:
    """Their `max_retries` has no effect, so that attempts do not multiply."""
    server.script(sdk.path, sdk.error(503))
    with sdk.protected(server.url, SOON) as client:
        for derived in (client.with_options(max_retries=4), client.with_options(timeout=5).copy(max_retries=1)):
            server.requests.clear()
            with pytest.raises(sdk.module.InternalServerError):
                sdk.ask(derived)
            assert len(server.requests) == 3


def test_raw_and_streamed_responses_are_protected(server: Server, sdk: SDK) -> None:
    """Those of `with_raw_response` and `with_streaming_response`."""
    with sdk.protected(server.url, SOON) as client:
        server.script(sdk.path, sdk.error(503), sdk.answer())
        raw = sdk.completions_of(client).with_raw_response.create(**QUESTION, max_tokens=9)
        assert sdk.text(raw.parse()) == "fine"
        server.script(sdk.path, sdk.error(503), sdk.answer())
        with sdk.completions_of(client).with_streaming_response.create(**QUESTION, max_tokens=9) as response:
            assert sdk.text(response.parse()) == "fine"
    assert len(server.requests) == 4


async def test_an_async_client_is_protected_like_a_blocking_one(server: Server, tasks_world: World, sdk: SDK) -> None:
    """Errors, results, pages and copies; and one protection around another."""
    breaker = CircuitBreaker(1)
    async with sdk.aprotected(server.url, SOON) as client:
        assert type(client) is getattr(sdk.module, f"Async{sdk.client}")
        server.script(sdk.path, sdk.error(429), Answer(fault="reset"), sdk.answer())
        assert sdk.text(await sdk.ask(client)) == "fine"
        server.script(sdk.path, sdk.error(401))
        with pytest.raises(sdk.module.AuthenticationError):
            await sdk.ask(sdk.protect(client.with_options(max_retries=4), breaker))
        assert breaker.state.name == "CLOSED"
        server.script("/v1/models", sdk.error(503), llm.models())
        assert [it.id async for it in client.models.list()] == ["m"]
    assert len(server.requests) == 3 + 1 + 2


def test_wrong_arguments_are_refused(sdk: SDK) -> None:
    with sdk.protected("http://x", SOON) as client:
        with pytest.raises(TypeError, match=r"policy must be a policy.*not 3"):
            sdk.protect(client, 3)
        with pytest.raises(TypeError, match=f"client must be an {sdk.client}.*not 'client'"):
            sdk.protect("client", SOON)


# --- anthropic alone ---


@needs("anthropic>=0.77")  # before, it accepts none
def test_a_message_with_an_iterator_is_sent_once(server: Server) -> None:
    """This SDK accepts iterators in a message; the second attempt would send an empty one."""
    server.script(llm.ANTHROPIC_PATH, llm.anthropic_error(503))
    with ANTHROPIC.protected(server.url, SOON) as client, pytest.raises(anthropic.InternalServerError):
        ANTHROPIC.ask(client, extra_body={"metadata": {"tags": iter(["a", "b"])}})
    assert len(server.requests) == 1


def test_an_open_file_in_a_message_is_sent_again_from_its_position(server: Server) -> None:
    """Each attempt reads it into the body."""
    image = io.BytesIO(b"skipped;pixels")
    image.seek(8)
    source = {"type": "base64", "media_type": "image/png", "data": image}
    server.script(llm.ANTHROPIC_PATH, llm.anthropic_error(503), llm.message())
    with ANTHROPIC.protected(server.url, SOON) as client:
        ANTHROPIC.ask(client, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])
    sent = [json.loads(it.body)["messages"][0]["content"][0]["source"]["data"] for it in server.requests]
    assert [base64.b64decode(it) for it in sent] == [b"pixels", b"pixels"]


def test_an_earlier_reply_in_a_message_can_be_sent_again(server: Server) -> None:
    """Its content consists of objects of the SDK, which can be read repeatedly."""
    server.script(llm.ANTHROPIC_PATH, llm.message())
    hello = QUESTION["messages"]
    with ANTHROPIC.protected(server.url, SOON) as client:
        earlier = ANTHROPIC.ask(client)
        server.requests.clear()
        server.script(llm.ANTHROPIC_PATH, llm.anthropic_error(503), llm.message())
        ANTHROPIC.ask(client, messages=[*hello, {"role": "assistant", "content": earlier.content}, *hello])
    first, second = (json.loads(it.body) for it in server.requests)
    assert first == second


@needs("anthropic>=0.108")  # `middleware`
def test_a_retryable_error_of_a_middleware_is_a_failure(server: Server) -> None:
    """`RetryableError` is a class of the SDK."""

    def refuse(request: Any, call_next: Any) -> Any:
        response = call_next(request)
        if len(server.requests) < 3:
            raise anthropic.RetryableError("the reply was nonsense")
        return response

    server.script(llm.ANTHROPIC_PATH, llm.message())
    with ANTHROPIC.protected(server.url, SOON, middleware=[refuse]) as client:
        assert ANTHROPIC.text(ANTHROPIC.ask(client)) == "fine"
    assert len(server.requests) == 3
    assert transient(anthropic.RetryableError("no"))


def test_clients_for_other_platforms_are_protected() -> None:
    """Those for Bedrock and Vertex share no public base class with it."""
    with anthropic.AnthropicVertex(region="r", project_id="p", access_token="t") as client:
        assert type(ANTHROPIC.protect(client, SOON)) is anthropic.AnthropicVertex
