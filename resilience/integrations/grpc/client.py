"""Interceptors that run the calls of a channel under a policy: of a blocking one, and of one of `grpc.aio`."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, final

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from typing_extensions import override

from resilience.clock import clock
from resilience.context import Context
from resilience.integrations.grpc.answers import Answer, aio_answer
from resilience.integrations.grpc.calls import KINDS, Call, Calls, Kind
from resilience.policy import Policy
from resilience.runtimes.blocking import drive

__all__ = ["PolicyInterceptor", "aio_interceptors"]


@final
class PolicyInterceptor(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[misc]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
):
    """Run each call of a channel under a policy, with the time that is left as its deadline.

    :param policy: what stands around each call. It sees a failed call as the `grpc.RpcError` that it is, and
        a reply as its message.
    :param unrepeatable: methods (``"/package.Service/Method"``) that no Retry repeats.

    By the kind of method, a policy covers, and a Retry repeats:

    - one request: the whole call; of a stream of replies, everything up to the first one.
    - a stream of requests that is a list or a tuple: the same.
    - any other stream of requests: it may be used up, so it is never sent twice. With one reply the policy
      covers the whole call, with a stream of replies only its start.

    `Rejected` and the errors of a `Timeout` come out as they are; a call that ran into the deadline of the
    context, or into its own `timeout`, as a `grpc.RpcError` with the status `DEADLINE_EXCEEDED`. Where the time was
    over before a call was made, that error is a `DeadlineExceeded` as well, and nothing was sent. A stub's `timeout`
    is for all attempts together. A call by `.future()` waits for its outcome here: interceptors of the blocking
    API cannot do otherwise. A policy of its own makes of it what grpc makes of an interceptor that raises.
    """

    def __init__(self, policy: Policy[Any], *, unrepeatable: Collection[str] = ()) -> None:
        self._calls = Calls(policy, unrepeatable)

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Make a call of one request and one reply."""
        return self._run(Kind(False, False), continuation, client_call_details, request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Make a call of one request and many replies."""
        return self._run(Kind(False, True), continuation, client_call_details, request)

    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """Make a call of many requests and one reply."""
        return self._run(Kind(True, False), continuation, client_call_details, request_iterator)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """Make a call of many requests and many replies."""
        return self._run(Kind(True, True), continuation, client_call_details, request_iterator)

    def _run(self, kind: Kind, *made: Any) -> Any:
        call = _BlockingCall(self._calls, kind, *made)
        return drive(call.run(self._calls.policy.execute))


def aio_interceptors(policy: Policy[Any], *, unrepeatable: Collection[str] = ()) -> list[Any]:
    """Return interceptors for a channel of `grpc.aio`, with the parameters and rules of `PolicyInterceptor`.

    Two things differ. They are a list, because grpc.aio registers an interceptor for one kind of method only. And of a
    stream of requests that is no list or tuple, and of `call.write`, a policy covers only the start of the call, also
    with one reply: a caller who writes requests one by one waits in each write for the interceptors, so they must not
    wait for a reply.

    ``grpc.aio.insecure_channel("localhost:50051", interceptors=aio_interceptors(policy))``
    """
    calls = Calls(policy, unrepeatable)
    return [_aio_interceptor(calls, kind) for kind in KINDS]


def _aio_interceptor(calls: Calls, kind: Kind) -> Any:
    async def intercept(self: object, continuation: Any, client_call_details: Any, request: Any) -> Any:
        call = _AioCall(calls, kind, continuation, client_call_details, request)
        return await call.run(calls.policy.aexecute)

    name = kind.name.title().replace("_", "") + "ClientInterceptor"
    return type(name, (getattr(grpc.aio, name),), {f"intercept_{kind.name}": intercept})()


@final
class _BlockingCall(Call):
    iterate, following = iter, next
    covers_once = "reply"

    @override
    def __call__(self, ctx: Context) -> Any:
        return drive(self.attempt(ctx), PolicyInterceptor.__name__)

    @override
    def result(self, call: Any) -> Any:
        return call.result()

    @override
    def sleep(self, seconds: float) -> None:
        clock.sleep(seconds)

    @override
    def answered(self, value: Any, *, by_stream: bool) -> Answer:
        return Answer(value)


@final
class _AioCall(Call):
    iterate, following = aiter, anext
    covers_once = "start"

    @override
    async def __call__(self, ctx: Context) -> Any:
        return await self.attempt(ctx)

    @override
    def result(self, call: Any) -> Any:
        return call

    @override
    def sleep(self, seconds: float) -> Any:
        return asyncio.sleep(seconds)

    @override
    def answered(self, value: Any, *, by_stream: bool) -> Any:
        return aio_answer(value, by_stream=by_stream)
