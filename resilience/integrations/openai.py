"""Protects a client of the `openai` package: every request that it makes runs through a policy."""

from __future__ import annotations

from typing import Any, TypeVar

from resilience.integrations.extras import needed_by

with needed_by("openai"):
    from openai import APIStatusError, AsyncOpenAI, OpenAI, OpenAIError, Timeout


from resilience.integrations.http.perhost import PerHost
from resilience.integrations.http.sdk import SDK, is_failure_status, protected_copy
from resilience.network_errors import transient
from resilience.policy import Policy

__all__ = ["protect"]

C = TypeVar("C", bound=OpenAI | AsyncOpenAI)


def protect(client: C, policy: Policy[Any] | PerHost) -> C:
    """Return a client of the same type whose every request runs through the policy.

    :param client: an `OpenAI` or `AsyncOpenAI`, or one of their subclasses, for Azure say. It is left as it is. The
        new one shares its connections, so closing one closes both.
    :param policy: runs once for each request. What a fallback in it answers is returned in the place of what the
        API method returns, so it has to be of that type. One for each host (`PerHost`) goes by the base URL.

    The SDK's own retries (2 by default, which would multiply with those of the policy) are off, regardless of a later
    `max_retries`. Copies made by `with_options` are protected like the client that made them.

    A failure, to the policies, is an `APIConnectionError` (timeouts are such), or a status that the SDK would try
    again: 408, 409, 429 and all from 500 on, where the header `x-should-retry` has the last word. `Retry()` repeats
    these, also for POST, as the SDK does; it waits as long as `retry-after-ms` or `Retry-After` ask. Not repeated are
    `insufficient_quota`, which waiting does not mend, and requests with a body that can be read only once. All other
    errors of the SDK are raised at once, and no policy counts or answers them.

    Each attempt gets the timeouts that the client or the call has, capped by what is left of the deadline. A stream is
    under the policy until it is open; an error in the middle of it is raised.

    :raises TypeError: for what is no client, or no policy.

    >>> from openai import OpenAI
    >>> from resilience import Retry, Timeout
    >>> from resilience.integrations.openai import protect
    >>> client = protect(OpenAI(api_key="..."), Timeout(60.0).wrap(Retry(4)))
    >>> type(client).__name__, client.max_retries
    ('OpenAI', 0)
    """
    if not isinstance(client, (OpenAI, AsyncOpenAI)):
        raise TypeError(f"client must be an OpenAI or AsyncOpenAI, not {client!r}")
    protected: C = protected_copy(client, policy, _SDK)
    return protected


def _is_failure(error: Exception) -> bool:
    if not isinstance(error, APIStatusError):
        return transient(error)
    return is_failure_status(error, lasting="insufficient_quota" in {error.code, error.type})


_SDK = SDK(OpenAIError, _is_failure, Timeout)
