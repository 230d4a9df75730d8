"""A protected client of the `anthropic` package, against a server that fails as scripted.

The tests that hold for both SDKs are in `test_sdks.py`, those of `anthropic` alone here.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from resilience import Retry, transient
from tests.conftest import World
from tests.integrations import llm_server as llm
from tests.integrations.sdks import Later, anthropic
from tests.integrations.servers import Answer, FlakyServer

PATH = llm.ANTHROPIC_PATH
SOON = Retry(3, backoff=[0.001])
HELLO = [{"role": "user", "content": "hi"}]


def protect(client: Any, policy: Any) -> Any:
    return Later("resilience.integrations.anthropic").protect(client, policy)


@contextlib.contextmanager
def protected(url: str, policy: Any, **options: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(api_key="k", base_url=url, **options) as client:
        yield protect(client, policy)


@contextlib.asynccontextmanager
async def aprotected(url: str, policy: Any, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(api_key="k", base_url=url, **options) as client:
        yield protect(client, policy)


def ask(namespace: Any, **options: Any) -> Any:
    """Send a message through `client.messages`, `client.beta.messages`, or another namespace."""
    return namespace.create(**{"model": "m", "max_tokens": 9, "messages": HELLO, **options})


def text(message: Any) -> str:
    return message.content[0].text


def test_the_method_stream_is_protected(server: FlakyServer) -> None:
    """Until the stream is open."""
    server.script(PATH, llm.anthropic_error(529), llm.message_stream("a", "b"))
    with (
        protected(server.url, SOON) as client,
        client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream,  # type: ignore[arg-type]
    ):
        assert "".join(stream.text_stream) == "ab"


def test_the_beta_namespace_is_protected(server: FlakyServer) -> None:
    server.script(PATH, llm.anthropic_error(503), llm.message())
    with protected(server.url, SOON) as client:
        assert text(ask(client.beta.messages)) == "fine"


def test_a_message_with_an_iterator_is_sent_once(server: FlakyServer) -> None:
    """This SDK accepts iterators in a message; the second attempt would send an empty one."""
    server.script(PATH, llm.anthropic_error(503))
    with protected(server.url, SOON) as client, pytest.raises(anthropic.InternalServerError):
        ask(client.messages, extra_body={"metadata": {"tags": iter(["a", "b"])}})
    assert len(server.requests) == 1


def test_an_open_file_in_a_message_is_sent_again_from_its_position(server: FlakyServer) -> None:
    """Each attempt reads it into the body."""
    image = io.BytesIO(b"skipped;pixels")
    image.seek(8)
    source = {"type": "base64", "media_type": "image/png", "data": image}
    server.script(PATH, llm.anthropic_error(503), llm.message())
    with protected(server.url, SOON) as client:
        ask(client.messages, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])
    sent = [json.loads(it.body)["messages"][0]["content"][0]["source"]["data"] for it in server.requests]
    assert [base64.b64decode(it) for it in sent] == [b"pixels", b"pixels"]


def test_an_earlier_reply_in_a_message_can_be_sent_again(server: FlakyServer) -> None:
    """Its content consists of objects of the SDK, which can be read repeatedly."""
    server.script(PATH, llm.message())
    with protected(server.url, SOON) as client:
        earlier = ask(client.messages)
        server.requests.clear()
        server.script(PATH, llm.anthropic_error(503), llm.message())
        ask(client.messages, messages=[*HELLO, {"role": "assistant", "content": earlier.content}, *HELLO])
    first, second = (json.loads(it.body) for it in server.requests)
    assert first == second


async def test_an_async_client_is_protected_like_a_blocking_one(server: FlakyServer, tasks_world: World) -> None:
    """Errors, results, streams, pages and copies."""
    async with aprotected(server.url, SOON) as client:
        assert type(client) is anthropic.AsyncAnthropic
        server.script(PATH, llm.anthropic_error(529), Answer(fault="reset"), llm.message())
        assert text(await ask(client.messages)) == "fine"
        server.script(PATH, llm.anthropic_error(529), llm.message_stream("a", "b"))
        async with client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream:  # type: ignore[arg-type]
            assert [it async for it in stream.text_stream] == ["a", "b"]
        server.script(PATH, llm.anthropic_error(401))
        with pytest.raises(anthropic.AuthenticationError):
            await ask(client.with_options(max_retries=4).messages)
        models = {"data": [{"id": "m", "type": "model"}], "has_more": False, "first_id": "m", "last_id": "m"}
        server.script("/v1/models", llm.anthropic_error(503), llm.reply(models))
        assert [it.id async for it in client.models.list()] == ["m"]
    assert len(server.requests) == 3 + 2 + 1 + 2


def test_a_retryable_error_of_a_middleware_is_a_failure(server: FlakyServer) -> None:
    """`RetryableError` is a class of the SDK."""

    def refuse(request: Any, call_next: Any) -> Any:
        response = call_next(request)
        if len(server.requests) < 3:
            raise anthropic.RetryableError("the reply was nonsense")
        return response

    server.script(PATH, llm.message())
    with protected(server.url, SOON, middleware=[refuse]) as client:
        assert text(ask(client.messages)) == "fine"
    assert len(server.requests) == 3
    assert transient(anthropic.RetryableError("no"))


def test_clients_for_other_platforms_are_protected() -> None:
    """Those for Bedrock and Vertex share no public base class with it."""
    with anthropic.AnthropicVertex(region="r", project_id="p", access_token="t") as client:
        assert type(protect(client, SOON)) is anthropic.AnthropicVertex
