"""A protected client has the type of the client. Read by test_types.py; not run."""

from __future__ import annotations

from typing import assert_type

from anthropic import Anthropic, AsyncAnthropic
from anthropic.lib.vertex import AnthropicVertex
from anthropic.types import Message
from openai import AsyncAzureOpenAI, AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion

from resilience import Retry
from resilience.integrations import anthropic, http, openai


def same_type(azure: AsyncAzureOpenAI, vertex: AnthropicVertex) -> None:
    assert_type(openai.protect(OpenAI(), Retry()), OpenAI)
    assert_type(openai.protect(AsyncOpenAI(), http.standard()), AsyncOpenAI)
    assert_type(openai.protect(azure, Retry()), AsyncAzureOpenAI)
    assert_type(anthropic.protect(Anthropic(), Retry()), Anthropic)
    assert_type(anthropic.protect(AsyncAnthropic(), Retry()), AsyncAnthropic)
    assert_type(anthropic.protect(vertex, http.standard()), AnthropicVertex)


async def same_results() -> None:
    client = openai.protect(AsyncOpenAI(), Retry())
    assert_type(await client.chat.completions.create(model="m", messages=[]), ChatCompletion)
    assert_type(anthropic.protect(Anthropic(), Retry()).messages.create(model="m", max_tokens=1, messages=[]), Message)
