"""Protected clients of the SDKs of language models: their common behaviour."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from resilience import CircuitBreaker, CircuitOpen, Fallback, Retry, deadline
from tests.conftest import FakeClock
from tests.integrations import llm_server as llm
from tests.integrations.sdks import Later, anthropic, openai
from tests.integrations.servers import Answer, FlakyServer, unused_url

SOON = Retry(3, backoff=[0.001])
QUESTION = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class SDK(NamedTuple):
    """The names that differ between the SDKs."""

    name: str
    module: Any
    client: str
    path: str
    error: Callable[..., Answer]
    answer: Callable[[], Answer]
    stream: Callable[..., Answer]
    completions_of: Callable[[Any], Any]
    text: Callable[[Any], str]

    def protect(self, client: Any, policy: Any) -> Any:
        return Later(f"resilience.integrations.{self.name}").protect(client, policy)

    @contextlib.contextmanager
    def protected(self, url: str, policy: Any) -> Iterator[Any]:
        base_url = f"{url}/v1" if self.name == "openai" else url
        with getattr(self.module, self.client)(api_key="k", base_url=base_url) as client:
            yield self.protect(client, policy)

    def ask(self, client: Any, **options: Any) -> Any:
        return self.completions_of(client).create(**QUESTION, max_tokens=9, **options)


OPENAI = SDK(
    "openai",
    openai,
    "OpenAI",
    llm.OPENAI_PATH,
    llm.openai_error,
    llm.completion,
    llm.completion_stream,
    lambda client: client.chat.completions,
    lambda completion: completion.choices[0].message.content,
)
ANTHROPIC = SDK(
    "anthropic",
    anthropic,
    "Anthropic",
    llm.ANTHROPIC_PATH,
    llm.anthropic_error,
    llm.message,
    llm.message_stream,
    lambda client: client.messages,
    lambda message: message.content[0].text,
)


@pytest.fixture(params=[OPENAI, ANTHROPIC], ids=lambda it: it.name)
def sdk(request: pytest.FixtureRequest) -> SDK:
    sdk: SDK = request.param
    return sdk


# --- failures and results ---


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
def test_statuses_that_the_sdk_would_retry_are_retried(server: FlakyServer, sdk: SDK, status: int) -> None:
    """A plain Retry does so with no configuration, for a POST too; the SDK adds no attempts."""
    server.script(sdk.path, sdk.error(status), sdk.error(status), sdk.answer())
    with sdk.protected(server.url, SOON) as client:
        assert sdk.text(sdk.ask(client)) == "fine"
    assert len(server.requests) == 3


def test_the_last_error_is_the_sdks_own_with_a_note(server: FlakyServer, sdk: SDK) -> None:
    """The note has the number of attempts."""
    server.script(sdk.path, sdk.error(429))
    with sdk.protected(server.url, SOON) as client, pytest.raises(sdk.module.RateLimitError) as caught:
        sdk.ask(client)
    assert len(server.requests) == 3
    assert "3 attempts" in caught.value.__notes__[0]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_statuses_that_the_sdk_would_not_retry_are_no_failure(server: FlakyServer, sdk: SDK, status: int) -> None:
    """They are raised immediately: not retried, not counted by a breaker, not replaced by a fallback."""
    server.script(sdk.path, sdk.error(status))
    breaker = CircuitBreaker(1)
    with sdk.protected(server.url, Fallback(None).wrap(SOON, breaker)) as client:
        for _ in range(2):
            with pytest.raises(sdk.module.APIStatusError):
                sdk.ask(client)
    assert len(server.requests) == 2
    assert breaker.state.name == "CLOSED"


@pytest.mark.parametrize(
    ("status", "should_retry", "requests"), [(400, "true", 3), (503, "false", 1), (429, "false", 1)]
)
def test_the_header_x_should_retry_decides(
    server: FlakyServer, sdk: SDK, status: int, should_retry: str, requests: int
) -> None:
    """Against the status."""
    server.script(sdk.path, sdk.error(status, x_should_retry=should_retry))
    with sdk.protected(server.url, SOON) as client, pytest.raises(sdk.module.APIStatusError):
        sdk.ask(client)
    assert len(server.requests) == requests


def test_a_server_that_is_away_opens_the_circuit(sdk: SDK) -> None:
    """The refusal is raised as `CircuitOpen`, and not as an unexpected error of the SDK."""
    with sdk.protected(unused_url(), CircuitBreaker(2)) as client:
        for _ in range(2):
            with pytest.raises(sdk.module.APIConnectionError):
                sdk.ask(client)
        with pytest.raises(CircuitOpen):
            sdk.ask(client)


@pytest.mark.parametrize(
    ("headers", "delay"), [({"retry_after": "7"}, 7.0), ({"retry_after_ms": "1500", "retry_after": "7"}, 1.5)]
)
def test_the_wait_is_at_least_what_the_server_asks_for(
    server: FlakyServer, sdk: SDK, clock: FakeClock, headers: dict[str, str], delay: float
) -> None:
    """`retry-after-ms` comes before `Retry-After`."""
    server.script(sdk.path, sdk.error(429, **headers), sdk.answer())
    with sdk.protected(server.url, SOON) as client:
        assert sdk.text(sdk.ask(client)) == "fine"
    assert clock.sleeps == [delay]


def test_a_wait_beyond_the_deadline_is_not_begun(server: FlakyServer, sdk: SDK) -> None:
    """The error is raised immediately."""
    server.script(sdk.path, sdk.error(429, retry_after="60"))
    with (
        sdk.protected(server.url, SOON) as client,
        deadline(30) as budget,
        pytest.raises(sdk.module.RateLimitError),
    ):
        sdk.ask(client)
    assert len(server.requests) == 1
    assert budget.remaining() > 20


# --- all parts of the client ---


def test_a_stream_is_tried_again_until_it_is_open(server: FlakyServer, sdk: SDK) -> None:
    """Failures before the first byte of the body are the policy's."""
    server.script(sdk.path, sdk.error(503), Answer(fault="reset"), sdk.stream("a", "b"))
    with sdk.protected(server.url, SOON) as client, sdk.ask(client, stream=True) as stream:
        assert len(list(stream)) >= 2
    assert len(server.requests) == 3


def test_the_protected_client_is_a_copy_of_the_same_type(sdk: SDK) -> None:
    """With the SDK's retries off; the original is unchanged."""
    kind = getattr(sdk.module, sdk.client)
    original = kind(api_key="k")
    with sdk.protect(original, SOON) as client:
        assert type(client) is kind
        assert (client.max_retries, original.max_retries) == (0, 2)
        assert "request" not in vars(original)


def test_copies_of_a_protected_client_are_protected(server: FlakyServer, sdk: SDK) -> None:
    """Their `max_retries` has no effect, so that attempts do not multiply."""
    server.script(sdk.path, sdk.error(503))
    with sdk.protected(server.url, SOON) as client:
        for derived in (client.with_options(max_retries=4), client.with_options(timeout=5).copy(max_retries=1)):
            server.requests.clear()
            with pytest.raises(sdk.module.InternalServerError):
                sdk.ask(derived)
            assert len(server.requests) == 3


def test_raw_and_streamed_responses_are_protected(server: FlakyServer, sdk: SDK) -> None:
    """Those of `with_raw_response` and `with_streaming_response`."""
    with sdk.protected(server.url, SOON) as client:
        server.script(sdk.path, sdk.error(503), sdk.answer())
        raw = sdk.completions_of(client).with_raw_response.create(**QUESTION, max_tokens=9)
        assert sdk.text(raw.parse()) == "fine"
        server.script(sdk.path, sdk.error(503), sdk.answer())
        with sdk.completions_of(client).with_streaming_response.create(**QUESTION, max_tokens=9) as response:
            assert sdk.text(response.parse()) == "fine"
    assert len(server.requests) == 4


def test_wrong_arguments_are_refused(sdk: SDK) -> None:
    """The message has the value."""
    with sdk.protected("http://x", SOON) as client:
        with pytest.raises(TypeError, match=r"policy must be a policy.*not 3"):
            sdk.protect(client, 3)
        with pytest.raises(TypeError, match=f"client must be an {sdk.client}.*not 'client'"):
            sdk.protect("client", SOON)
