"""Responses of the APIs of OpenAI and Anthropic, for the server in `servers.py`.

They contain only what the SDKs need: a completion, a stream of events, an error, a list of two pages.
"""

from __future__ import annotations

import json
from typing import Any

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
    return {
        "id": "m1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": content,
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }


def completion_stream(*texts: str, **how: Any) -> Answer:
    """Return the chunks of a completion, one event each. `how`: `fault="cut"` or `drip=event`, as for an `Answer`."""
    chunks = [
        {
            "id": "c1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}],
        }
        for text in texts
    ]
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


def _events(pieces: list[bytes], **how: Any) -> Answer:
    return Answer(200, {"Content-Type": "text/event-stream"}, pieces, chunked=True, **how)
