"""Clients of the SDKs for an HTTP API (openai, anthropic) that run every request through a policy.

SDKs that the generator Stainless has created send everything through one public method, `request`: every resource, the
streaming helpers, raw responses, each page of a list. So `request` is wrapped, on a copy of the client. The instance
is changed, and not its class, because the SDKs check the exact type in some places. Copies of the copy are wrapped in
the same way.

An SDK raises exceptions where a transport returns responses. If an exception means that the service failed, policies
see it as a failure. Any other exception (a bad request, a wrong key, a reply that cannot be parsed) is an answer of a
working service: policies see it as a result, and the caller gets the exception.
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
from resilience.integrations.http.exchange import Exchange
from resilience.integrations.http.limits import inform_limiters
from resilience.integrations.http.perhost import Policies
from resilience.integrations.http.rules import IDEMPOTENT_METHODS, Rules, retry_after
from resilience.integrations.http.settings import Settings
from resilience.network_errors import transient
from resilience.outcome import ErrorAnswer

#: Statuses below 500 that the SDKs themselves retry. They retry all statuses from 500 on.
_TRANSIENT = frozenset({408, 409, 429})

#: The SDKs repeat a request regardless of its method.
_RULES = Rules(methods=IDEMPOTENT_METHODS | {"POST", "PATCH"})

#: An SDK's errors for wrong arguments, and for a reply that does not fit the caller's schema (pydantic's ValueError).
_MISTAKES = (ValueError, TypeError)

#: The attributes in which an SDK keeps the parts of a body. Older versions do not have all of them.
_BODIES = ("json_data", "extra_json", "files", "content")


@final
@dataclass(frozen=True, slots=True)
class SDK:
    """What differs between SDKs.

    :param errors: the base class of all exceptions of the SDK.
    :param status_error: the class of those for a status.
    :param timeout: the SDK's class `Timeout`, which takes one number, or `connect`, `read`, `write` and `pool`.
    """

    errors: type[Exception]
    status_error: type[Any]
    timeout: Callable[..., Any]

    def is_failure(self, error: Any) -> bool:
        """Whether an error means that the service failed: a network error, or a status that the SDK would retry.

        The header `x-should-retry` takes precedence over the status. If the error is a failure with a status, this sets
        its `repeatable` and `retry_after`, which a Retry reads.
        """
        if not isinstance(error, self.status_error):
            return transient(error)
        headers = error.response.headers
        should_retry = headers.get("x-should-retry")
        if should_retry != "true" and error.status_code not in _TRANSIENT and error.status_code < 500:
            return False
        # OpenAI answers 429 to a used-up quota, too, which is permanent.
        is_permanent = "insufficient_quota" in {getattr(error, "code", None), getattr(error, "type", None)}
        repeatable = should_retry != "false" and not is_permanent
        vars(error).update(repeatable=repeatable, retry_after=retry_after(headers))
        return True


def protected_copy(client: Any, policy: Policies, sdk: SDK) -> Any:
    """Return a copy of the client that has no retries of its own, and runs each request through the policy."""
    return _protect(client.with_options(max_retries=0), Settings(policy, _RULES), sdk)


def _protect(client: Any, settings: Settings, sdk: SDK) -> Any:
    """Wrap the method `request` of this client, in place, and of all copies of it."""
    send = client.request
    make_copy = client.copy
    parse = client._process_response

    in_tasks = inspect.iscoroutinefunction(send)

    @functools.wraps(send)
    def request(cast_to: Any, options: Any, **stream: Any) -> Any:
        call = _Call(settings, sdk, client, functools.partial(send, cast_to, **stream), options, in_tasks)
        return call.run()

    @functools.wraps(send)
    async def arequest(*args: Any, **kwargs: Any) -> Any:
        return await request(*args, **kwargs)

    @functools.wraps(make_copy)
    def copy_protected(*args: Any, **kwargs: Any) -> Any:
        return _protect(make_copy(*args, **kwargs), settings, sdk)

    @functools.wraps(parse)
    def process(*args: Any, **kwargs: Any) -> Any:  # returns a coroutine if the client is asynchronous
        inform_limiters(current_context(), kwargs["response"].headers)
        return parse(*args, **kwargs)

    # A cycle, which the cyclic collector frees. If it were weak, `client.with_options(...).copy()` would lose the first
    # copy, which nothing else holds. Without a policy a copy is a cycle, too, once one of its resources was read.
    wrapped = arequest if in_tasks else request
    vars(client).update(request=wrapped, copy=copy_protected, with_options=copy_protected, _process_response=process)
    return client


@final
class _Call(Exchange):
    response_type = object
    timed_out = ()  # the timeout errors of an SDK are raised unchanged

    def __init__(
        self, settings: Settings, sdk: SDK, client: Any, send: Callable[[Any], Any], options: Any, in_tasks: bool
    ) -> None:
        body = Body(*_sources([getattr(options, name, None) for name in _BODIES]))
        super().__init__(settings, options.method.upper(), str(client.base_url), {}, body)
        self.in_tasks: bool = in_tasks
        self._sdk = sdk
        self._known = (sdk.errors, *_MISTAKES)
        self._client = client
        self._send = send
        self._request = copy.copy(options)
        self._request.max_retries = 0
        if options.idempotency_key is None:  # the same key for all attempts, if the client sends one
            self._request.idempotency_key = f"resilience-{uuid.uuid4()}"

    @override
    async def send(self, ctx: Context, left: float | None, headers: Mapping[str, str]) -> Any:
        try:
            reply = self._send(self._prepared(left))
            return await reply if self.in_tasks else reply
        except self._known as error:
            if (response := getattr(error, "response", None)) is not None:
                inform_limiters(ctx, response.headers)
            if self._sdk.is_failure(error):
                raise
            return ErrorAnswer(error)

    def _prepared(self, left: float | None) -> Any:
        """Return the options of one attempt: the timeouts of the call or the client, shortened to the time left."""
        options = copy.copy(self._request)
        if left is not None:
            own = options.timeout if _is_timeout(options.timeout) else self._client.timeout
            if not hasattr(own, "connect"):
                own = self._sdk.timeout(own)
            phases = {phase: getattr(own, phase) for phase in ("connect", "read", "write", "pool")}
            options.timeout = self._sdk.timeout(
                **{it: left if own is None else min(own, left) for it, own in phases.items()}
            )
        return options

    @override
    def _judge(self, response: Any, ctx: Context) -> Any:
        return response  # a failure would have been raised by the SDK

    @override
    async def _run(self) -> Any:
        response = await super()._run()
        if type(response) is not ErrorAnswer:
            return response
        error = response.take()
        if error is None:
            raise RuntimeError("a policy has returned the result of an earlier request, which was an error")
        try:
            raise error
        finally:
            del error  # no cycle: error -> traceback -> this frame -> error

    @override
    async def _close(self, *responses: Any) -> None:
        await super()._close(*[getattr(it, "http_response", it) for it in responses])


def _is_timeout(value: Any) -> bool:
    """Whether this is a timeout, and not the SDK's own value for "not given"."""
    return value is None or isinstance(value, (int, float)) or hasattr(value, "connect")


def _sources(part: Any) -> Iterator[Any]:
    """Find files and iterators at any depth. Bytes and paths are read again for each attempt."""
    if isinstance(part, Mapping):
        part = tuple(part.values())
    if isinstance(part, (list, tuple)):
        for each in part:
            yield from _sources(each)
    elif hasattr(part, "read") or isinstance(part, (Iterator, AsyncIterable)):
        yield part
