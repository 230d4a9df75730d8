"""Clients of the `anthropic` package that run every request through a policy."""

from __future__ import annotations

from typing import Any, TypeVar

from resilience.integrations._extras import needed_by

with needed_by("anthropic"):
    from anthropic import AnthropicError, APIStatusError, Timeout
    from anthropic._base_client import (  # the clients for Bedrock and Vertex derive from them, too
        AsyncAPIClient,
        SyncAPIClient,
    )

from resilience import checks
from resilience.integrations.http.perhost import PerHost
from resilience.integrations.http.sdk import SDK, protected_copy
from resilience.policy import Policy

__all__ = ["protect"]

C = TypeVar("C", bound=SyncAPIClient | AsyncAPIClient)


def protect(client: C, policy: Policy[Any] | PerHost) -> C:
    """Return a client of the same type whose every request runs through the policy.

    :param client: an `Anthropic` or `AsyncAnthropic`, or one for another platform (Bedrock, Vertex, Foundry). It is
        not changed. The new client shares its connections, so closing one closes both.
    :param policy: runs once for each request. The answer of a fallback in it is returned instead of the result of the
        API method, so it must have that type. A `PerHost` chooses the policy by the base URL.

    The SDK's own retries (2 by default, which would multiply with those of the policy) are off, regardless of a later
    `max_retries`. Copies made by `with_options` are protected, too.

    For the policies, a failure is an `APIConnectionError` (which includes timeouts), or a status that the SDK would
    retry: 408, 409, 429 and all from 500 on (529 is "overloaded"), unless the header `x-should-retry` says otherwise.
    `Retry()` retries these, also for POST, as the SDK does; it waits as long as `retry-after-ms` or `Retry-After` asks.
    Requests with a body that can be read only once are not retried. All other errors of the SDK are raised at once,
    and no policy counts or answers them.

    Each attempt gets the timeouts of the client or the call, shortened to the time left. A stream is under the policy
    until it is open; an error in the middle of it is raised.

    :raises TypeError: if `client` is not a client of the SDK, or `policy` is not a policy.

    >>> from anthropic import Anthropic
    >>> from resilience import Retry, Timeout
    >>> from resilience.integrations.anthropic import protect
    >>> client = protect(Anthropic(api_key="..."), Timeout(60.0).wrap(Retry(4)))
    >>> type(client).__name__, client.max_retries
    ('Anthropic', 0)
    """
    checks.instance("client", client, (SyncAPIClient, AsyncAPIClient), "an Anthropic or AsyncAnthropic")
    protected: C = protected_copy(client, policy, _SDK)
    return protected


_SDK = SDK(AnthropicError, APIStatusError, Timeout)
