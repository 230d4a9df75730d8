"""Protects a client of the `openai` package: every request that it makes runs through a policy.

All that the SDK does over HTTP goes through one public method of the client, `request`: every resource, the
streaming helpers, `with_raw_response`, `parse`, each page of a list. So `request` is wrapped, on a copy of the
client. The copy has the type of the original, shares its connections, and has no retries of its own.

What policies see is the SDK's own exception, where it is a failure of the service: a broken connection, a
timeout, a status that the SDK would try again. Any other error (a bad request, a wrong key, a reply that was cut
off) is an answer: the service did its work. It passes the policies as a result, and comes out as the exception.
"""

from __future__ import annotations

import copy
import functools
import uuid
from collections.abc import AsyncIterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

from openai import APIConnectionError, APIStatusError, AsyncOpenAI, NotGiven, OpenAI, OpenAIError, Timeout

from resilience.clock import clock
from resilience.context import Context
from resilience.errors import DeadlineExceeded
from resilience.integrations.http import retry_after
from resilience.policy import Policy

__all__ = ["protect"]

C = TypeVar("C", bound=OpenAI | AsyncOpenAI)

#: Statuses below 500 that the SDK itself tries again. Of those from 500 on it tries all.
_TRANSIENT = frozenset({408, 409, 429})


def protect(client: C, policy: Policy[Any]) -> C:
    """Return a client of the same type whose every request runs through the policy.

    :param client: an `OpenAI` or `AsyncOpenAI`, or one of their subclasses, for Azure say. It is left as it is. The
        new one shares its connections, so closing one closes both.
    :param policy: runs once for each request. What a fallback in it answers is returned in the place of what the
        API method returns, so it has to be of that type.

    The SDK's own retries (2 by default, which would multiply with those of the policy) are off, whatever
    `max_retries` says later. Copies made by `with_options` are protected like the client that made them.

    A failure, to the policies, is an `APIConnectionError` (timeouts are such), or a status that the SDK would try
    again: 408, 409, 429 and all from 500 on, where the header `x-should-retry` has the last word. `Retry()` repeats
    these, also for POST, as the SDK does; it waits as long as `retry-after-ms` or `Retry-After` ask. Not repeated
    are `insufficient_quota`, which waiting does not mend, and requests with a body that can be read only once. All
    other errors come out at once, and no policy counts or answers them.

    Each attempt gets the timeouts that the client or the call has, capped by what is left of the deadline. A stream
    is under the policy until it is open; an error in the middle of it comes out.

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
    if not isinstance(policy, Policy):
        raise TypeError(f"policy must be a policy, not {policy!r}")
    protected: C = _guard(client.with_options(max_retries=0), policy)
    return protected


def _guard(client: Any, policy: Policy[Any]) -> Any:
    """Put the policy around the requests of this very client, and of the copies that are made of it."""
    send = client.request
    make_copy = client.copy

    @functools.wraps(send)
    def request(cast_to: Any, options: Any, **stream: Any) -> Any:
        return _come_out(policy.execute(_Call(client, send, cast_to, options, stream)))

    @functools.wraps(send)
    async def arequest(cast_to: Any, options: Any, **stream: Any) -> Any:
        return _come_out(await policy.aexecute(_AsyncCall(client, send, cast_to, options, stream)))

    @functools.wraps(make_copy)
    def guarded_copy(*args: Any, **kwargs: Any) -> Any:
        return _guard(make_copy(*args, **kwargs), policy)

    # On the instance, not on a subclass: the SDK looks at the exact type in places.
    vars(client).update(
        request=arequest if isinstance(client, AsyncOpenAI) else request,
        copy=guarded_copy,
        with_options=guarded_copy,
    )
    return client


@final
@dataclass(frozen=True, slots=True)
class _Answer:
    """An error with which the service answered: a result to the policies, an exception to the caller."""

    error: OpenAIError


def _come_out(result: Any) -> Any:
    if type(result) is not _Answer:
        return result
    try:
        raise result.error
    finally:
        del result  # no cycle: error -> traceback -> this frame -> error


class _Call:
    """One request: the function that the policy calls for each attempt."""

    def __init__(self, client: OpenAI | AsyncOpenAI, send: Any, cast_to: Any, options: Any, stream: Any) -> None:
        self._client = client
        self._send = functools.partial(send, cast_to, **stream)
        self._options = copy.copy(options)
        self._options.max_retries = 0
        if options.idempotency_key is None:  # the same for all attempts, where the client sends one
            self._options.idempotency_key = f"resilience-{uuid.uuid4()}"
        self._files = _Files(options.files, options.content, options.json_data)
        #: Whether this may be sent a second time. A Retry asks the function that it calls.
        self.repeatable: bool = self._files.can_rewind

    def __call__(self, ctx: Context) -> Any:
        options = self._prepare(ctx)
        try:
            result = self._send(options)
        except OpenAIError as error:
            if _is_failure(error):
                raise
            return _Answer(error)
        if ctx._timer is not None and clock.now() >= ctx._timer.deadline:
            # The caller has left, so nobody else would close the connection of a stream.
            _close(result)
            raise DeadlineExceeded("the response came after its time")
        return result

    def _prepare(self, ctx: Context) -> Any:
        self._files.rewind()
        options = copy.copy(self._options)
        if ctx.timeout() is not None:
            given = self._client.timeout if isinstance(options.timeout, NotGiven) else options.timeout
            options.timeout = _capped(given, ctx)
        return options


@final
class _AsyncCall(_Call):
    async def __call__(self, ctx: Context) -> Any:
        options = self._prepare(ctx)
        try:
            return await self._send(options)
        except OpenAIError as error:
            if _is_failure(error):
                raise
            return _Answer(error)


def _is_failure(error: OpenAIError) -> bool:
    """Whether the service failed. If it did, with a status, the error now tells a Retry what to do about it."""
    if not isinstance(error, APIStatusError):
        return isinstance(error, APIConnectionError)
    headers = error.response.headers
    told = headers.get("x-should-retry")
    if told != "true" and error.status_code not in _TRANSIENT and error.status_code < 500:
        return False
    may_repeat = told != "false" and "insufficient_quota" not in {error.code, error.type}
    vars(error).update(repeatable=may_repeat, retry_after=retry_after(headers))
    return True


def _capped(given: Any, ctx: Context) -> Timeout:
    """Return the client's timeouts, none of them longer than what is left."""
    own = given if hasattr(given, "connect") else Timeout(given)
    return Timeout(
        connect=ctx.timeout(own.connect),
        read=ctx.timeout(own.read),
        write=ctx.timeout(own.write),
        pool=ctx.timeout(own.pool),
    )


def _close(result: Any) -> None:
    close = getattr(getattr(result, "http_response", result), "close", None)
    if callable(close):
        close()


@final
class _Files:
    """The parts of a request that sending uses up, and where they stood before. Sent again as they are, they are empty.

    :param parts: files, content and JSON of the request. A path or bytes are read anew for each attempt.
    """

    def __init__(self, *parts: object) -> None:
        self.can_rewind: bool = True
        self._positions: list[tuple[Any, int]] = []
        for part in _used_up(parts):
            seekable = getattr(part, "seekable", None)
            if callable(seekable) and seekable():
                self._positions.append((part, part.tell()))
            else:
                self.can_rewind = False

    def rewind(self) -> None:
        """Put every file back to where it stood."""
        for file, position in self._positions:
            file.seek(position)


def _used_up(part: Any) -> Iterator[Any]:
    """Find files and iterators, however deep they are."""
    if isinstance(part, Mapping):
        part = tuple(part.values())
    if isinstance(part, (list, tuple)):
        for each in part:
            yield from _used_up(each)
    elif hasattr(part, "read") or isinstance(part, (Iterator, AsyncIterable)):
        yield part
