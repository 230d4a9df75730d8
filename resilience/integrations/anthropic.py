"""Protects a client of the `anthropic` package: every request that it makes runs through a policy."""

from __future__ import annotations

from typing import Any, TypeVar

from resilience.integrations.extras import needed_by

with needed_by("anthropic"):
    from anthropic import AnthropicError, APIStatusError, Timeout
    from anthropic._base_client import (  # what those for Bedrock and Vertex derive from, too
        AsyncAPIClient,
        SyncAPIClient,
    )


from resilience.integrations.http.perhost import PerHost
from resilience.integrations.http.sdk import SDK, is_failure_status, protected_copy
from resilience.network_errors import transient
from resilience.policy import Policy

__all__ = ["protect"]

C = TypeVar("C", bound=SyncAPIClient | AsyncAPIClient)


def protect(client: C, policy: Policy[Any] | PerHost) -> C:
    """Return a client of the same type whose every request runs through the policy.

    :param client: an `Anthropic` or `AsyncAnthropic`, or one for another platform (Bedrock, Vertex, Foundry). It is
        left as it is. The new one shares its connections, so closing one closes both.
    :param policy: runs once for each request. What a fallback in it answers is returned in the place of what the
        API method returns, so it has to be of that type. One for each host (`PerHost`) goes by the base URL.

    The SDK's own retries (2 by default, which would multiply with those of the policy) are off, regardless of a later
    `max_retries`. Copies made by `with_options` are protected like the client that made them.

    A failure, to the policies, is an `APIConnectionError` (timeouts are such), or a status that the SDK would try
    again: 408, 409, 429 and all from 500 on (529 is "overloaded"), where the header `x-should-retry` has the last word.
    `Retry()` repeats these, also for POST, as the SDK does; it waits as long as `retry-after-ms` or `Retry-After` ask.
    Not repeated are requests with a body that can be read only once. All other errors of the SDK are raised at once,
    and no policy counts or answers them.

    Each attempt gets the timeouts that the client or the call has, capped by what is left of the deadline. A stream is
    under the policy until it is open; an error in the middle of it is raised.

    :raises TypeError: for what is no client, or no policy.

    >>> from anthropic import Anthropic
    >>> from resilience import Retry, Timeout
    >>> from resilience.integrations.anthropic import protect
    >>> client = protect(Anthropic(api_key="..."), Timeout(60.0).wrap(Retry(4)))
    >>> type(client).__name__, client.max_retries
    ('Anthropic', 0)
    """
    if not isinstance(client, (SyncAPIClient, AsyncAPIClient)):
        raise TypeError(f"client must be an Anthropic or AsyncAnthropic, not {client!r}")
    protected: C = protected_copy(client, policy, _SDK)
    return protected


def _is_failure(error: Exception) -> bool:
    return is_failure_status(error) if isinstance(error, APIStatusError) else transient(error)


_SDK = SDK(AnthropicError, _is_failure, Timeout)
