"""What SDKs for an HTTP API share, knowing none of them: a client whose every request runs through a policy.

The SDKs that are made by the generator Stainless (openai, anthropic) have one public method, `request`, through
which all that they do over HTTP goes: every resource, the streaming helpers, raw responses, each page of a list.
So `request` is wrapped, on a copy of the client. It is wrapped on the instance, and the client's class stays what
it is, because the SDKs look at the exact type in places. Copies of the copy are wrapped as it is.

Where a transport sees responses, an SDK has exceptions. What policies see is the SDK's own exception, where it means
that the service failed. Any other error (a bad request, a wrong key, a reply that cannot be parsed) is an answer: the
service did its work. Policies see it as a result; the caller gets the exception.
"""

from __future__ import annotations

import copy
import functools
import inspect
import uuid
from collections.abc import AsyncIterable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from typing_extensions import override

from resilience.ambient import current_context
from resilience.context import Context
from resilience.integrations.http.bodies import Body
from resilience.integrations.http.exchange import Attempt, BlockingExchange, Exchange, TaskExchange
from resilience.integrations.http.limits import hear
from resilience.integrations.http.perhost import Policies
from resilience.integrations.http.rules import retry_after
from resilience.integrations.http.settings import Settings

__all__ = ["SDK", "is_failure_status", "protected_copy"]

#: Statuses below 500 that the SDKs themselves try again. Of those from 500 on they try all.
_TRANSIENT = frozenset({408, 409, 429})

#: What an SDK raises for arguments, and for a reply that does not fit the caller's schema (pydantic's is a ValueError).
_MISTAKES = (ValueError, TypeError)

#: Where an SDK keeps what it sends. Older versions have not all of them.
_BODIES = ("json_data", "extra_json", "files", "content")


@final
@dataclass(frozen=True, slots=True)
class SDK:
    """What differs between two of them.

    :param errors: the base of all its exceptions.
    :param is_failure: whether an exception means that the service failed.
    :param timeout: its `Timeout`, which takes one number for all, or `connect`, `read`, `write` and `pool`.
    """

    errors: type[Exception]
    is_failure: Callable[[Any], bool]
    timeout: Callable[..., Any]


def is_failure_status(error: Any, *, lasting: bool = False) -> bool:
    """Whether the status that an error carries is one that the SDK would try again, by the rule that they share.

    The header `x-should-retry` has the last word. A failure now tells a Retry what to do about it, in `repeatable`
    and `retry_after`.

    :param lasting: whether waiting will not mend it, although the status promises so.
    """
    headers = error.response.headers
    told = headers.get("x-should-retry")
    if told != "true" and error.status_code not in _TRANSIENT and error.status_code < 500:
        return False
    vars(error).update(repeatable=told != "false" and not lasting, retry_after=retry_after(headers))
    return True


def protected_copy(client: Any, policy: Policies, sdk: SDK) -> Any:
    """Return a copy of the client that has no retries of its own, and runs each request through the policy.

    :raises TypeError: for what is no policy.
    """
    settings = Settings(policy)
    return _protect(client.with_options(max_retries=0), settings, sdk)


def _protect(client: Any, settings: Settings, sdk: SDK) -> Any:
    """Put the policy around the requests of this very client, and of the copies that are made of it."""
    send = client.request
    make_copy = client.copy
    parse = client._process_response

    @functools.wraps(send)
    def request(cast_to: Any, options: Any, **stream: Any) -> Any:
        return _BlockingCall(settings, sdk, client, functools.partial(send, cast_to, **stream), options).run()

    @functools.wraps(send)
    async def arequest(cast_to: Any, options: Any, **stream: Any) -> Any:
        return await _AsyncCall(settings, sdk, client, functools.partial(send, cast_to, **stream), options).run()

    @functools.wraps(make_copy)
    def copy_protected(*args: Any, **kwargs: Any) -> Any:
        return _protect(make_copy(*args, **kwargs), settings, sdk)

    @functools.wraps(parse)
    def parse_heard(*args: Any, **kwargs: Any) -> Any:  # a coroutine, where the client is asynchronous
        hear(current_context(), kwargs["response"].headers)
        return parse(*args, **kwargs)

    chosen = arequest if inspect.iscoroutinefunction(send) else request
    vars(client).update(request=chosen, copy=copy_protected, with_options=copy_protected, _process_response=parse_heard)
    return client


@final
class _Answer:
    """An error with which the service answered: a result to the policies, an exception to the caller."""

    __slots__ = ("_error", "_kind")

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error
        self._kind = type(error).__name__

    def __repr__(self) -> str:
        return f"<answered with {self._kind}>"

    def take(self) -> Exception | None:
        """Return the error, and forget it: its traceback leads to frames of policies, whose result this is."""
        error, self._error = self._error, None
        return error


class _Call(Exchange):
    """One request."""

    response_type = object
    timed_out = ()  # an SDK's timeout stays what it is

    def __init__(self, settings: Settings, sdk: SDK, client: Any, send: Callable[[Any], Any], options: Any) -> None:
        body = Body(*_sources([getattr(options, name, None) for name in _BODIES]))
        super().__init__(settings, options.method.upper(), client.base_url, {}, body)
        self.why_not_once_sent = None if body.can_be_sent_again else "its body can be sent only once"
        self._sdk = sdk
        self._known = (sdk.errors, *_MISTAKES)
        self._client = client
        self._send = send
        self._options = copy.copy(options)
        self._options.max_retries = 0
        if options.idempotency_key is None:  # the same for all attempts, where the client sends one
            self._options.idempotency_key = f"resilience-{uuid.uuid4()}"

    def _prepared(self, attempt: Attempt) -> Any:
        """Return what this attempt is made with: the client's or the call's timeouts, capped by what is left."""
        options = copy.copy(self._options)
        if attempt.left is not None:
            own = options.timeout if _is_timeout(options.timeout) else self._client.timeout
            if not hasattr(own, "connect"):
                own = self._sdk.timeout(own)
            phases = {phase: getattr(own, phase) for phase in ("connect", "read", "write", "pool")}
            left = attempt.left
            options.timeout = self._sdk.timeout(
                **{it: left if own is None else min(own, left) for it, own in phases.items()}
            )
        return options

    def _hear(self, error: Any, ctx: Context) -> None:
        """Let limiters obey the response that an error carries."""
        headers = getattr(getattr(error, "response", None), "headers", None)
        if headers is not None:
            hear(ctx, headers)

    @override
    def _judged(self, response: Any, ctx: Context) -> Any:
        return response  # a status that is a failure was an error

    @override
    def limit(self, response: Any) -> Any:
        if type(response) is not _Answer:
            return response
        error = response.take()
        if error is None:
            raise RuntimeError("a policy has returned the result of an earlier request, which was an error")
        try:
            raise error
        finally:
            del error  # no cycle: error -> traceback -> this frame -> error


@final
class _BlockingCall(_Call, BlockingExchange):
    @override
    def send(self, attempt: Attempt) -> Any:
        try:
            return self._send(self._prepared(attempt))
        except self._known as error:
            self._hear(error, attempt.ctx)
            if self._sdk.is_failure(error):
                raise
            return _Answer(error)

    @override
    async def _close(self, *responses: Any) -> None:
        await super()._close(*[getattr(it, "http_response", it) for it in responses])


@final
class _AsyncCall(_Call, TaskExchange):
    @override
    async def send(self, attempt: Attempt) -> Any:
        try:
            return await self._send(self._prepared(attempt))
        except self._known as error:
            self._hear(error, attempt.ctx)
            if self._sdk.is_failure(error):
                raise
            return _Answer(error)

    @override
    def _let_go(self) -> None:
        super()._let_go()
        del self._options


def _is_timeout(value: Any) -> bool:
    """Whether this says something. The SDKs have a value of their own for "not given"."""
    return value is None or isinstance(value, (int, float)) or hasattr(value, "connect")


def _sources(part: Any) -> Iterator[Any]:
    """Find files and iterators, however deep they are. Bytes and paths are read anew for each attempt."""
    if isinstance(part, Mapping):
        part = tuple(part.values())
    if isinstance(part, (list, tuple)):
        for each in part:
            yield from _sources(each)
    elif hasattr(part, "read") or isinstance(part, (Iterator, AsyncIterable)):
        yield part
