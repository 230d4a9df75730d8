"""The SDKs of language models, imported on first use, and responses of their APIs for the server in `servers.py`.

Their imports take a second and a half, and every worker imports every test. The responses contain only what the SDKs
need: a completion, a stream of events, an error, a list of one page.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

from resilience import Retry
from tests.integrations.servers import Answer

OPENAI_PATH = "/v1/chat/completions"
ANTHROPIC_PATH = "/v1/messages"


def reply(body: object, status: int = 200, **headers: str) -> Answer:
    """Return a JSON response; `retry_after="1"` is a header."""
    pairs = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, {"Content-Type": "application/json", **pairs}, json.dumps(body).encode())


def openai_error(status: int, code: str | None = None, **headers: str) -> Answer:
    body = {"error": {"message": "sorry", "type": code or "error", "param": None, "code": code}}
    return reply(body, status, **headers)


def anthropic_error(status: int, kind: str = "api_error", **headers: str) -> Answer:
    return reply({"type": "error", "error": {"type": kind, "message": "sorry"}}, status, **headers)


def models() -> Answer:
    """Return the only page of a list, as both APIs write it."""
    page = {"data": [{"id": "m", "type": "model"}], "has_more": False, "first_id": "m", "last_id": "m"}
    return reply({"object": "list", **page})


def completion(text: str = "fine") -> Answer:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    return reply({"id": "c1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})


def message(text: str = "fine") -> Answer:
    return reply(_message([{"type": "text", "text": text}]))


def _message(content: list[Any]) -> dict[str, Any]:
    usage = {"input_tokens": 1, "output_tokens": 1}
    about = {"id": "m1", "type": "message", "role": "assistant", "model": "m", "usage": usage}
    return {**about, "content": content, "stop_reason": "end_turn", "stop_sequence": None}


def completion_stream(*texts: str, **how: Any) -> Answer:
    """Return the chunks of a completion, one event each. `how`: `fault="cut"` or `drip=event`, as for an `Answer`."""
    about = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    deltas = [{"role": "assistant", "content": text} for text in texts]
    chunks = [{**about, "choices": [{"index": 0, "delta": it, "finish_reason": None}]} for it in deltas]
    events = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks]
    return _events([*events, b"data: [DONE]\n\n"], **how)


def message_stream(*texts: str, **how: Any) -> Answer:
    """Return the events of a message, with a delta for each text."""
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**_message([]), "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}} for text in texts),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]
    return _events([f"event: {it['type']}\ndata: {json.dumps(it)}\n\n".encode() for it in events], **how)


def openai_stream_error(kind: str, code: str | None = None) -> Answer:
    """Return a stream that begins with an error, after status 200."""
    return _events([b"data: %b\n\n" % json.dumps({"error": {"message": "sorry", "type": kind, "code": code}}).encode()])


def anthropic_stream_error(kind: str) -> Answer:
    """Return a stream that begins with an error, after status 200."""
    error = {"type": "error", "error": {"type": kind, "message": "sorry"}}
    return _events([b"event: error\ndata: %b\n\n" % json.dumps(error).encode()])


def _events(pieces: list[bytes], **how: Any) -> Answer:
    return Answer(200, {"Content-Type": "text/event-stream"}, pieces, chunked=True, **how)


class Later:
    """A module that is imported when one of its public attributes is first read. Pytest reads others of any object."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


anthropic: Any = Later("anthropic")
openai: Any = Later("openai")

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
    stream_error: Callable[..., Answer]
    completions_of: Callable[[Any], Any]
    text: Callable[[Any], str]

    def protect(self, client: Any, policy: Any) -> Any:
        return Later(f"resilience.integrations.{self.name}").protect(client, policy)

    def make(self, prefix: str, url: str, **options: Any) -> Any:
        base_url = f"{url}/v1" if self.name == "openai" else url
        return getattr(self.module, prefix + self.client)(api_key="k", base_url=base_url, **options)

    @contextlib.contextmanager
    def protected(self, url: str, policy: Any, **options: Any) -> Iterator[Any]:
        with self.make("", url, **options) as client:
            yield self.protect(client, policy)

    @contextlib.asynccontextmanager
    async def aprotected(self, url: str, policy: Any, **options: Any) -> AsyncIterator[Any]:
        async with self.make("Async", url, **options) as client:
            yield self.protect(client, policy)

    def ask(self, client: Any, **options: Any) -> Any:
        """Make a completion; the client of Anthropic requires `max_tokens`."""
        return self.completions_of(client).create(**{**QUESTION, "max_tokens": 9, **options})


OPENAI = SDK(
    *("openai", openai, "OpenAI", OPENAI_PATH, openai_error, completion, completion_stream, openai_stream_error),
    completions_of=lambda client: client.chat.completions,
    text=lambda completion: completion.choices[0].message.content,
)
ANTHROPIC = SDK(
    *(
        "anthropic",
        anthropic,
        "Anthropic",
        ANTHROPIC_PATH,
        anthropic_error,
        message,
        message_stream,
        anthropic_stream_error,
    ),
    completions_of=lambda client: client.messages,
    text=lambda message: message.content[0].text,
)
