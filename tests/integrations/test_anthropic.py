"""A protected client of the `anthropic` package, against a server that fails as scripted.

The tests that hold for both SDKs are in `test_sdks.py`, those of `anthropic` alone here.
"""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest

from resilience import transient
from tests.integrations import llm_server as llm
from tests.integrations.sdks import ANTHROPIC, QUESTION, SOON, anthropic
from tests.integrations.servers import Server

PATH = llm.ANTHROPIC_PATH
HELLO = QUESTION["messages"]
text, protect, protected = ANTHROPIC.text, ANTHROPIC.protect, ANTHROPIC.protected
ask = ANTHROPIC.ask


def test_a_message_with_an_iterator_is_sent_once(server: Server) -> None:
    """This SDK accepts iterators in a message; the second attempt would send an empty one."""
    server.script(PATH, llm.anthropic_error(503))
    with protected(server.url, SOON) as client, pytest.raises(anthropic.InternalServerError):
        ask(client, extra_body={"metadata": {"tags": iter(["a", "b"])}})
    assert len(server.requests) == 1


def test_an_open_file_in_a_message_is_sent_again_from_its_position(server: Server) -> None:
    """Each attempt reads it into the body."""
    image = io.BytesIO(b"skipped;pixels")
    image.seek(8)
    source = {"type": "base64", "media_type": "image/png", "data": image}
    server.script(PATH, llm.anthropic_error(503), llm.message())
    with protected(server.url, SOON) as client:
        ask(client, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])
    sent = [json.loads(it.body)["messages"][0]["content"][0]["source"]["data"] for it in server.requests]
    assert [base64.b64decode(it) for it in sent] == [b"pixels", b"pixels"]


def test_an_earlier_reply_in_a_message_can_be_sent_again(server: Server) -> None:
    """Its content consists of objects of the SDK, which can be read repeatedly."""
    server.script(PATH, llm.message())
    with protected(server.url, SOON) as client:
        earlier = ask(client)
        server.requests.clear()
        server.script(PATH, llm.anthropic_error(503), llm.message())
        ask(client, messages=[*HELLO, {"role": "assistant", "content": earlier.content}, *HELLO])
    first, second = (json.loads(it.body) for it in server.requests)
    assert first == second


def test_a_retryable_error_of_a_middleware_is_a_failure(server: Server) -> None:
    """`RetryableError` is a class of the SDK."""

    def refuse(request: Any, call_next: Any) -> Any:
        response = call_next(request)
        if len(server.requests) < 3:
            raise anthropic.RetryableError("the reply was nonsense")
        return response

    server.script(PATH, llm.message())
    with protected(server.url, SOON, middleware=[refuse]) as client:
        assert text(ask(client)) == "fine"
    assert len(server.requests) == 3
    assert transient(anthropic.RetryableError("no"))


def test_clients_for_other_platforms_are_protected() -> None:
    """Those for Bedrock and Vertex share no public base class with it."""
    with anthropic.AnthropicVertex(region="r", project_id="p", access_token="t") as client:
        assert type(protect(client, SOON)) is anthropic.AnthropicVertex
