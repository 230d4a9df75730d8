"""What SDKs for an HTTP API share, knowing none of them: a client whose every request runs through a policy.

The SDKs that are made by the generator Stainless (openai, anthropic) have one public method, `request`, through
which all that they do over HTTP goes: every resource, the streaming helpers, raw responses, each page of a list.
So `request` is wrapped, on a copy of the client. It is wrapped on the instance, and the client's class stays what
it is, because the SDKs look at the exact type in places. Copies of the copy are wrapped as it is.

Where a transport sees responses, an SDK has exceptions. What policies see is the SDK's own exception, where it
means that the service failed. Any other error (a bad request, a wrong key, a reply that cannot be parsed) is an
answer: the service did its work. It passes the policies as a result, and comes out as the exception that it is.
"""

from __future__ import annotations

import copy
import functools
import inspect
import uuid
from collections.abc import AsyncIterable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from resilience.ambient import current_context
from resilience.context import Context
from resilience.integrations.http.bodies import is_used_up
from resilience.integrations.http.perhost import Policies, as_policies, policy_for
from resilience.integrations.http.rules import NotRepeatable, retry_after

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
    return _protect(client.with_options(max_retries=0), as_policies(policy), sdk)


def _protect(client: Any, policy: Policies, sdk: SDK) -> Any:
    """Put the policy around the requests of this very client, and of the copies that are made of it."""
    send = client.request
    make_copy = client.copy
    chosen = policy_for(policy, str(client.base_url))

    @functools.wraps(send)
    def request(cast_to: Any, options: Any, **stream: Any) -> Any:
        call = _Call(sdk, client, functools.partial(send, cast_to, **stream), options)
        return _come_out(chosen.execute(call, call.context()))

    @functools.wraps(send)
    async def arequest(cast_to: Any, options: Any, **stream: Any) -> Any:
        call = _AsyncCall(sdk, client, functools.partial(send, cast_to, **stream), options)
        return _come_out(await chosen.aexecute(call, call.context()))

    @functools.wraps(make_copy)
    def copy_protected(*args: Any, **kwargs: Any) -> Any:
        return _protect(make_copy(*args, **kwargs), policy, sdk)

    vars(client).update(
        request=arequest if inspect.iscoroutinefunction(send) else request,
        copy=copy_protected,
        with_options=copy_protected,
    )
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


def _come_out(result: Any) -> Any:
    if type(result) is not _Answer:
        return result
    error = result.take()
    if error is None:
        raise RuntimeError("a policy has returned the result of an earlier request, which was an error")
    try:
        raise error
    finally:
        del error  # no cycle: error -> traceback -> this frame -> error


class _Call:
    """One request: the function that the policy calls for each attempt."""

    def __init__(self, sdk: SDK, client: Any, send: Callable[[Any], Any], options: Any) -> None:
        self._is_failure = sdk.is_failure
        self._known = (sdk.errors, *_MISTAKES)
        self._timeout = sdk.timeout
        self._client = client
        self._send = send
        self._options = copy.copy(options)
        self._options.max_retries = 0
        if options.idempotency_key is None:  # the same for all attempts, where the client sends one
            self._options.idempotency_key = f"resilience-{uuid.uuid4()}"
        self._files = _Files(*(getattr(options, name, None) for name in _BODIES))
        self._attempts: set[object] = set()  # those that have not ended, in threads that were walked away from too

    @property
    def repeatable(self) -> bool:
        """Whether this may be sent a second time. A Retry asks the function that it calls."""
        return self._files.can_rewind and not self._is_being_read()

    def __call__(self, ctx: Context) -> Any:
        if self._is_being_read():
            raise NotRepeatable("the request was not sent again: its body is still being read by an earlier attempt")
        this = object()
        self._attempts.add(this)
        try:
            return self._attempt(ctx)
        finally:
            self._attempts.discard(this)

    def _is_being_read(self) -> bool:
        """Whether another attempt still reads the files: wound back under it, both would send parts of them."""
        return bool(self._attempts) and not self._files.were_read()

    def _attempt(self, ctx: Context) -> Any:
        options = self._prepare(ctx)
        try:
            return self._send(options)
        except self._known as error:
            if self._is_failure(error):
                raise
            return _Answer(error)

    def _resilience_dropped(self, outcome: object) -> None:
        """Close the stream that an attempt opened when its caller had left: a worker thread tells us."""
        _close(outcome)

    def context(self) -> Context:
        """Return the context to execute this under: the ambient one, with a name for what is done."""
        outer = current_context()
        name = f"{self._options.method.upper()} {self._client.base_url.host}"
        return Context(operation=outer.operation or name, properties=outer.properties)

    def _prepare(self, ctx: Context) -> Any:
        """Return what this attempt is made with: the client's or the call's timeouts, capped by what is left."""
        self._files.rewind()
        options = copy.copy(self._options)
        if ctx.timeout() is not None:
            own = options.timeout if _is_timeout(options.timeout) else self._client.timeout
            if not hasattr(own, "connect"):
                own = self._timeout(own)
            capped = {phase: ctx.timeout(getattr(own, phase)) for phase in ("connect", "read", "write", "pool")}
            options.timeout = self._timeout(**capped)
        return options


@final
class _AsyncCall(_Call):
    async def __call__(self, ctx: Context) -> Any:
        options = self._prepare(ctx)
        try:
            return await self._send(options)
        except self._known as error:
            if self._is_failure(error):
                raise
            return _Answer(error)


def _is_timeout(value: Any) -> bool:
    """Whether this says something. The SDKs have a value of their own for "not given"."""
    return value is None or isinstance(value, (int, float)) or hasattr(value, "connect")


def _close(result: Any) -> None:
    close = getattr(getattr(result, "http_response", result), "close", None)
    if callable(close):
        close()


@final
class _Files:
    """The parts of a request that sending uses up, and where they stood before it: sent again, they would be empty.

    :param parts: what is sent, nested as it may be. Bytes and paths are read anew for each attempt.
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

    def were_read(self) -> bool:
        """Whether there is nothing that a client would still read."""
        return all(is_used_up(file) for file, _ in self._positions)

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
