"""A protected client of the `openai` package, against a server that fails as scripted.

The tests that hold for both SDKs are in `test_sdks.py`, those of `openai` alone here.
"""

from __future__ import annotations

import gc
import io
import threading
import weakref
from typing import Any

import httpx
import httpx2
import pydantic
import pytest

from resilience import CircuitBreaker, CircuitOpen, Fallback, Policy, Timeout, TimeoutExceeded
from resilience.integrations.http import PerHost
from tests.conftest import no_collector
from tests.custom import Recording
from tests.integrations import sdks as llm
from tests.integrations.sdks import OPENAI, QUESTION, SOON, openai
from tests.integrations.servers import Answer, Server, unused_url
from tests.integrations.upload_bodies import pipe
from tests.versions import is_installed, needs

PATH = llm.OPENAI_PATH
BASE: Any = httpx2 if is_installed("openai>=3") else httpx  # the HTTP library that the SDK is based on
ask, text, protect, protected, aprotected = OPENAI.ask, OPENAI.text, OPENAI.protect, OPENAI.protected, OPENAI.aprotected


# --- failures and results ---


@pytest.mark.parametrize("status", [400, 503])
def test_an_error_is_freed_without_the_cyclic_collector(server: Server, status: int) -> None:
    """As soon as the caller drops it, whether it was a failure or a result."""
    server.script(PATH, llm.openai_error(status))
    with protected(server.url, Timeout(20, cooperative=True).wrap(SOON)) as client, no_collector():
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client)
        error = weakref.ref(caught.value)
        del caught
        assert error() is None


def test_a_policy_cannot_return_the_error_of_an_earlier_request(server: Server) -> None:
    """A policy that keeps results, here one for all requests, sees in its repr that this one was an error."""

    class Cached(Policy):
        kept: Any = None

        async def around(self, call: Any, ctx: Any) -> Any:
            self.kept = self.kept or await call(ctx)
            return self.kept

    server.script(PATH, llm.openai_error(400))
    cached = Cached()
    with protected(server.url, cached) as client:
        with pytest.raises(openai.BadRequestError):
            ask(client)
        assert repr(cached.kept) == "<answered with BadRequestError>"
        with pytest.raises(RuntimeError, match="an earlier request"):
            ask(client)


class Number(pydantic.BaseModel):
    number: int


@needs("openai>=1.92")  # `completions.parse`
def test_a_reply_that_does_not_match_the_schema_is_a_result(server: Server) -> None:
    """The model made a mistake, or the schema is wrong; the service is available."""
    server.script(PATH, llm.completion('{"number": "none"}'))
    breaker = CircuitBreaker(1)
    with protected(server.url, Fallback(None).wrap(SOON, breaker)) as client, pytest.raises(pydantic.ValidationError):
        client.chat.completions.parse(**QUESTION, response_format=Number)
    assert len(server.requests) == 1
    assert breaker.state.name == "CLOSED"


def test_an_exhausted_quota_is_a_failure_that_is_not_repeated(server: Server) -> None:
    """A breaker counts it, and a fallback may replace it; a repeat would not help."""
    server.script(PATH, llm.openai_error(429, "insufficient_quota"))
    breaker = CircuitBreaker(2)
    with protected(server.url, Fallback("elsewhere").wrap(SOON, breaker)) as client:
        assert ask(client) == "elsewhere"
        assert len(server.requests) == 1
        assert ask(client) == "elsewhere"
    assert breaker.state.name == "OPEN"


def timeouts_of(policy: Any, on_client: dict[str, Any], on_call: dict[str, Any]) -> dict[str, float | None]:
    """Return the timeouts of a request."""
    seen: list[dict[str, float | None]] = []

    def answer(request: Any) -> Any:
        seen.append(request.extensions["timeout"])
        return BASE.Response(200, json={})

    http_client = BASE.Client(transport=BASE.MockTransport(answer))
    with protected("http://x", policy, http_client=http_client, **on_client) as client:
        ask(client, **on_call)
    return seen[0]


@pytest.mark.parametrize("own", [5.0, {"timeout": 5.0, "connect": 0.9}, {"timeout": None, "read": 0.9}, 0.9, None])
@pytest.mark.parametrize("where", ["client", "call"])
def test_the_sdks_timeouts_hold_if_they_are_shorter_than_the_deadline(own: Any, where: str) -> None:
    """Each of the four timeouts is the shorter of the two; None becomes the time left."""
    own = openai.Timeout(**own) if isinstance(own, dict) else own
    on_client, on_call = ({"timeout": own}, {}) if where == "client" else ({}, {"timeout": own})
    expected = BASE.Timeout(**(own.as_dict() if isinstance(own, openai.Timeout) else {"timeout": own})).as_dict()
    for key, value in timeouts_of(Timeout(3.0, cooperative=True), on_client, on_call).items():
        assert value is not None
        assert value == expected[key] if (expected[key] or 9.0) < 3.0 else 1.0 < value <= 3.0
    assert timeouts_of(SOON, on_client, on_call) == expected  # without a deadline


@pytest.mark.parametrize("raw", [False, True])
def test_a_stream_that_opens_after_its_deadline_is_closed(server: Server, raw: bool) -> None:
    """A `Timeout` abandons a blocking call; its connection still returns to the pool."""
    go = threading.Event()

    class Late(BASE.HTTPTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            response = super().handle_request(request)
            go.wait(10)
            return response

    server.script(PATH, llm.completion_stream("a"))
    transport = Late(limits=BASE.Limits(max_connections=1))
    http_client = BASE.Client(transport=transport)
    with openai.OpenAI(api_key="k", base_url=f"{server.url}/v1", http_client=http_client, max_retries=0) as original:
        client = protect(original, Timeout(0.2))
        with pytest.raises(TimeoutExceeded):
            completions = client.chat.completions.with_raw_response if raw else client.chat.completions
            completions.create(**QUESTION, stream=True)
        go.set()
        server.wait_until(lambda: Timeout.abandoned() == 0)
        server.script(PATH, llm.completion())
        assert text(ask(original, timeout=5)) == "fine"  # the pool has one connection


# --- all parts of the client ---


def test_a_client_with_the_users_httpx_client_is_protected(server: Server) -> None:
    """The SDK itself has moved to `httpx2`."""
    server.script(PATH, llm.openai_error(503), llm.completion())
    with protected(server.url, Timeout(10, cooperative=True).wrap(SOON), http_client=httpx.Client()) as client:  # type: ignore[arg-type]
        assert text(ask(client)) == "fine"


def test_the_base_url_selects_the_policy_of_a_host(server: Server) -> None:
    """A copy for another base URL has the policy of that host."""
    breakers = PerHost(lambda origin: CircuitBreaker(1))
    server.script(PATH, llm.completion())
    with protected(unused_url(), breakers) as client:
        with pytest.raises(openai.APIConnectionError):
            ask(client)
        with pytest.raises(CircuitOpen):
            ask(client)
        assert text(ask(client.with_options(base_url=f"{server.url}/v1"))) == "fine"


@needs("openai>=2.16")  # `content`
def test_an_open_file_is_sent_again_from_its_first_position(server: Server) -> None:
    """A second attempt without a rewind would send nothing."""
    server.script("/v1/upload", llm.openai_error(503), llm.reply({}))
    file = io.BytesIO(b"skipped;the content")
    file.seek(8)
    with protected(server.url, SOON) as client:
        client.post("/upload", content=file, cast_to=object)
    assert [it.body for it in server.requests] == [b"the content", b"the content"]


def test_a_one_shot_body_is_sent_once(server: Server) -> None:
    """Also after a `Timeout` has cut the attempt off, when there is no error of the client."""
    server.script("/v1/files", Answer(delay=20))
    with protected(server.url, SOON.wrap(Timeout(0.3))) as client, pytest.raises((openai.APIError, TimeoutError)):
        client.files.create(file=("name", pipe()), purpose="batch")
    assert len(server.requests) == 1


def test_a_file_that_was_sent_is_sent_again_after_a_timeout(server: Server) -> None:
    """The abandoned attempt waits for its response, and no longer reads the file."""
    server.script("/v1/files", Answer(delay=20), llm.reply({"id": "f1"}))
    with protected(server.url, SOON.wrap(Timeout(0.5))) as client:
        assert client.files.create(file=("name", io.BytesIO(b"the content")), purpose="batch").id == "f1"
    assert all(b"the content" in it.body for it in server.requests)


def test_all_attempts_carry_the_same_idempotency_key(server: Server) -> None:
    """If the client sends one; the SDK sends none by default."""
    server.script(PATH, llm.openai_error(503), llm.completion())
    with protected(server.url, SOON) as client:
        ask(client)
        assert all(it.headers["Idempotency-Key"] is None for it in server.requests)
        server.requests.clear()
        server.script(PATH, llm.openai_error(503), llm.completion())
        client._idempotency_header = "Idempotency-Key"
        ask(client)
    first, second = (it.headers["Idempotency-Key"] for it in server.requests)
    assert first == second
    assert first


async def test_the_body_of_a_finished_request_is_freed(server: Server) -> None:
    """Also if a context is kept, which keeps the function that it calls."""
    recording = Recording()
    async with aprotected(server.url, recording) as client:
        server.script("/v1/files", llm.reply({"id": "f", "object": "file"}))
        upload = io.BytesIO(b"content")
        sent = weakref.ref(upload)
        await client.files.create(file=upload, purpose="assistants")
        del upload
        gc.collect()
        assert sent() is None
    assert len(server.requests) == 1
    assert [it.operation for it in recording.seen] == ["POST 127.0.0.1"]
