"""Interceptors that run the calls of a channel under a policy, for blocking channels and for `grpc.aio`.

gRPC enforces one deadline per call, in the client and on the server. So the time that is left becomes the
`timeout` of each attempt, and a call that exceeds it ends by itself: nothing has to be cancelled. To the
policies such a call has exceeded its deadline (`DeadlineExceeded`), and the server has not failed; a `Timeout`
whose limit was exceeded turns it into its own error. A `DeadlineExceeded` that leaves the pipeline becomes the
status that gRPC's callers know, also if a policy raised it because the time was up before a call was made.
"""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from itertools import product
from typing import Any, Final, NamedTuple, final

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from typing_extensions import override

from resilience import checks
from resilience.ambient import current_context
from resilience.callables import maybe_await
from resilience.clock import clock
from resilience.context import Context
from resilience.errors import DeadlineExceeded
from resilience.hints import forbid_repeat
from resilience.integrations._calls import ClientCall
from resilience.integrations.grpc.answers import Answer, DeadlineStatus, aio_answer
from resilience.integrations.http import NotRepeatable
from resilience.integrations.wire import parse_milliseconds
from resilience.network_errors import grpc_status
from resilience.policy import Policy, as_pipeline

#: The metadata key by which a server limits retries (gRFC A6): milliseconds to wait, or -1 for no retry.
PUSHBACK: Final = "grpc-retry-pushback-ms"

#: Seconds by which gRPC's timers and our clock may differ.
CLOCK_TOLERANCE: Final = 0.05

#: How many of its latest replies a call keeps. A policy may reject results, and repeat the call, for hours.
_KEPT_REPLIES: Final = 8

#: The name of a method. The part before the last slash, the service, is any path.
_METHOD: Final = re.compile(r"/[\w./-]+/[\w.-]+")


class Kind(NamedTuple):
    """A kind of method: whether its requests are a stream, and whether its replies are."""

    sends_stream: bool
    gets_stream: bool

    @property
    def name(self) -> str:
        """The name that grpc uses, such as ``"unary_stream"``."""
        return "_".join("stream" if is_stream else "unary" for is_stream in self)


def _intercept(kind: Kind) -> Callable[..., Any]:
    def intercept(self: PolicyInterceptor, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Make a call under the policy."""
        call = Call(self._settings, kind, continuation, client_call_details, request)
        try:
            return call.run()
        except grpc.RpcError as error:
            if not hasattr(error, "__next__"):
                raise
            return error  # a stream or a future is its own error; raised, gRPC would hide its status and metadata

    return intercept


@final
class PolicyInterceptor(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[misc]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
):
    """Run each call of a channel under a policy, with the time that is left as its deadline.

    :param policy: the policy around each call. It sees a failed call as its `grpc.RpcError`, and a reply as its
        message.
    :param unrepeatable: methods (``"/package.Service/Method"``) that no Retry repeats. By default there is none: a call
        that has done its work may fail, too, and is made again. A name is not checked against any service.

    By the kind of method, a policy covers, and a Retry repeats:

    - one request: the whole call; if the replies are a stream, everything up to the first one.
    - a stream of requests from a list or a tuple: the same.
    - any other stream of requests: it can be read only once, so it is never sent twice. If there is one reply, the
      policy covers the whole call; if the replies are a stream, only its start.

    `Rejected` and the errors of a `Timeout` are raised as they are; a call that exceeds the deadline of the context, or
    its own `timeout`, raises a `grpc.RpcError` with the status `DEADLINE_EXCEEDED`. If the time was up before a call
    was made, that error is also a `DeadlineExceeded`, and nothing was sent. A stub's `timeout` limits all attempts
    together. A call by `.future()` blocks until its outcome is known: interceptors of the blocking API cannot do
    otherwise. If a policy raises an error of its own, gRPC handles it as an error that an interceptor raises.
    """

    def __init__(self, policy: Policy[Any], *, unrepeatable: Collection[str] = ()) -> None:
        self._settings = Settings(policy, unrepeatable, in_tasks=False)

    intercept_unary_unary: Callable[..., Any] = _intercept(Kind(False, False))
    intercept_unary_stream: Callable[..., Any] = _intercept(Kind(False, True))
    intercept_stream_unary: Callable[..., Any] = _intercept(Kind(True, False))
    intercept_stream_stream: Callable[..., Any] = _intercept(Kind(True, True))


def aio_interceptors(policy: Policy[Any], *, unrepeatable: Collection[str] = ()) -> list[Any]:
    """Return interceptors for a channel of `grpc.aio`, with the parameters and rules of `PolicyInterceptor`.

    Two things differ. They are a list, because grpc.aio registers an interceptor for one kind of method only. And if
    the requests are a stream that is no list or tuple, or are sent by `call.write`, a policy covers only the start of
    the call, even if there is one reply: each write waits for the interceptors, so an interceptor must not wait for a
    reply.

    ``grpc.aio.insecure_channel("localhost:50051", interceptors=aio_interceptors(policy))``
    """
    settings = Settings(policy, unrepeatable, in_tasks=True)
    return [_aio_interceptor(settings, Kind(*streams)) for streams in product((False, True), repeat=2)]


def _aio_interceptor(settings: Settings, kind: Kind) -> Any:
    async def intercept(self: object, continuation: Any, client_call_details: Any, request: Any) -> Any:
        call = Call(settings, kind, continuation, client_call_details, request)
        return await call.run()

    name = kind.name.title().replace("_", "") + "ClientInterceptor"
    return type(name, (getattr(grpc.aio, name),), {f"intercept_{kind.name}": intercept})()


# --- one call under a policy -------------------------------------------------------------------


@final
class Settings:
    """The settings that the calls of one channel share. Calls of grpc.aio are `in_tasks`: they have to be awaited."""

    def __init__(self, policy: Policy[Any], unrepeatable: Collection[str], *, in_tasks: bool) -> None:
        self.policy: Policy[Any] = as_pipeline(checks.instance("policy", policy, Policy, "a policy"))
        methods = checks.several("unrepeatable", unrepeatable, "a collection of methods")
        for method in methods:
            if not isinstance(method, str) or not _METHOD.fullmatch(method):
                raise ValueError(f"unrepeatable must name methods as '/package.Service/Method', not {method!r}")
        self.unrepeatable: frozenset[str] = frozenset(methods)
        self.in_tasks: bool = in_tasks


@final
class OutOfTime(DeadlineExceeded):
    """A call that exceeded the `timeout` that we gave it; `status` is the error that gRPC raised."""

    def __init__(self, message: str = "", *, status: Any = None) -> None:
        super().__init__(message)
        self.status: Any = status  # its cause, too, which a handler that raises it again may change


@final
class Call(ClientCall):
    """One call through a policy: the function that the policy calls for each attempt.

    :param continuation: grpc's function that makes an attempt.
    :param details: grpc's details of the call, among them its method and timeout.
    :param request: a message, or an iterable of messages.
    """

    def __init__(
        self, settings: Settings, kind: Kind, continuation: Callable[..., Any], details: Any, request: Any
    ) -> None:
        self.in_tasks: bool = settings.in_tasks
        self._policy = settings.policy
        self._kind = kind
        self._continuation = continuation
        if hasattr(getattr(details, "metadata", None), "__next__"):  # a second attempt would find an iterator empty
            details = _changed(details, "metadata", tuple(details.metadata))
        self._details = details
        method: str = details.method.decode() if isinstance(details.method, bytes) else details.method
        self._request = request
        # Requests that are not in a list or tuple may come from an iterator, which a second attempt would find empty.
        self._is_replayable = kind.sends_stream and isinstance(request, Sequence)
        self._sends_once = kind.sends_stream and not self._is_replayable
        self._resilience_operation = method  # the default operation of the execution
        # Whether it may be made again, which a Hedge reads; and whether it may be made now, which a Retry reads.
        self._resilience_may_overlap = not self._sends_once and method not in settings.unrepeatable
        self.repeatable: bool = True
        self._replies: list[tuple[object, Any]] = []

    @override
    async def _run(self) -> Any:
        """Return what grpc hands to the caller."""
        try:
            reply = self._execute(self._policy, ctx=self._context())
            return self._call_of(await reply if self.in_tasks else reply)
        except DeadlineExceeded as error:
            status: Any = error.status if isinstance(error, OutOfTime) else None
            status = status or DeadlineStatus(*error.args, policy=error.policy, timeout=error.timeout)
        except Exception as error:
            if not self.repeatable:  # marked, also if it is an error of a policy, so that no outer Retry repeats it
                forbid_repeat(error)
            raise
        finally:  # a grpc.aio call keeps the context variables that it was made with, which refer to this: a cycle
            self._replies.clear()
            del self._continuation, self._request
        try:
            raise status
        finally:
            del status  # no cycle: error -> traceback -> this frame -> error

    @override
    async def _attempt(self, ctx: Context) -> Any:
        """Return what the policies see of an attempt."""
        call = self._begin(ctx)
        if self.in_tasks:
            call = await call
        try:
            reply = await self._covered(call)
        except grpc.RpcError as error:
            _mark_pushback(error)
            if _ran_out(error, ctx):
                sleep = asyncio.sleep if self.in_tasks else clock.sleep
                await maybe_await(sleep(ctx.remaining()))  # gRPC's timer may fire a little early
                raise OutOfTime("the call ran into the deadline of the execution", status=error) from error
            raise
        self._replies.append((reply, reply if isinstance(reply, Replies) else call))
        del self._replies[:-_KEPT_REPLIES]
        return reply

    def _context(self) -> Context | None:
        """Return the context of the execution: the caller's `timeout` limits all attempts together, as in gRPC."""
        if self._details.timeout is None:
            return None
        outer = current_context()
        timeout = max(0.0, self._details.timeout)
        return Context(timeout=timeout, operation=outer._info.operation, properties=outer.properties)

    def _begin(self, ctx: Context) -> Any:
        """Begin an attempt with the time that is left; refuse if the requests were sent and cannot be sent again."""
        timeout = ctx.timeout()
        if not self.repeatable:
            raise NotRepeatable("the call was not made again: its requests, or its method, allow it only once")
        self.repeatable = self._resilience_may_overlap
        request = iter(self._request) if self._is_replayable else self._request
        details = self._details
        if timeout != details.timeout:
            details = _changed(details, "timeout", timeout)
        return self._continuation(details, request)

    async def _covered(self, call: Any) -> Any:
        """Wait for the part of the call that the policy covers, and return the result that the policy sees."""
        if self._sends_once and (self._kind.gets_stream or self.in_tasks):
            return call  # in grpc.aio also if there is one reply: each write waits for the interceptors
        if not self._kind.gets_stream:
            return await call if self.in_tasks else call.result()
        replies = aiter(call) if self.in_tasks else iter(call)
        try:
            first = [await anext(replies) if self.in_tasks else next(replies)]
        except (StopIteration, StopAsyncIteration):
            first = []
        except grpc.RpcError:
            raise
        except BaseException:  # such as KeyboardInterrupt
            _cancel(call)
            raise
        return Replies(call, replies, first)

    def _call_of(self, reply: object) -> Any:
        """Return the grpc call that this reply object came from, or the call that represents a policy's answer."""
        for each, call in tuple(self._replies):  # a copy: an abandoned thread may append to it
            if each is reply:
                return call
        return aio_answer(reply, self._kind.gets_stream) if self.in_tasks else Answer(reply)


@grpc.Call.register  # the methods are in the call
@grpc.Future.register
@final
class Replies:
    """An iterator over the replies of a call, the first of which has arrived; other attributes are the call's own."""

    def __init__(self, call: Any, replies: Any, first: list[Any]) -> None:
        self._call = call
        self._replies = replies
        self._first = first

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._first.pop() if self._first else next(self._replies)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return self._first.pop() if self._first else await anext(self._replies)

    def close(self) -> None:
        """Cancel the call; the rest of its replies is not needed."""
        _cancel(self._call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def _cancel(call: Any) -> None:
    """Cancel a call. An interceptor inside this one, such as OpenTelemetry's, may have put a generator in its place."""
    end = getattr(call, "cancel", None) or getattr(call, "close", None)
    if end is not None:
        end()


def _changed(details: Any, name: str, value: object) -> Any:
    """Return the details of the call with another value for one field."""
    fields = getattr(details, "_fields", None)
    if fields is not None:  # a named tuple, as grpc's own are; its `_replace` takes twice the time
        values = list(details)
        values[fields.index(name)] = value
        return details._make(values)
    changed = copy.copy(details)
    setattr(changed, name, value)
    return changed


def _ran_out(error: Any, ctx: Context) -> bool:
    """Whether a call failed because it exceeded the `timeout` that we gave it.

    grpc.aio reports an internal error of its own if it was about to send one of several requests.
    """
    if ctx.remaining() > CLOCK_TOLERANCE:
        return False
    status = grpc_status(error)
    return status == "DEADLINE_EXCEEDED" or (status == "INTERNAL" and error.details() == "Internal error from Core")


def _mark_pushback(error: Any) -> None:
    """Set the server's pushback on the error, as the attributes that Retry reads."""
    metadata: Any = getattr(error, "trailing_metadata", tuple)() or ()
    values = [value for key, value in metadata if key == PUSHBACK]
    if values:
        seconds = parse_milliseconds(str(values[-1]))
        if seconds is None:  # negative, or not readable: no retry (A6)
            forbid_repeat(error)
        else:
            error.retry_after = seconds
