"""The SDKs of language models, imported on first use.

Their imports take a second and a half, and every worker imports every test.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

from resilience import Retry
from tests.integrations import llm_server as llm
from tests.integrations.servers import Answer


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
