"""Interceptors that run the calls of a channel under a policy, for blocking channels and for `grpc.aio`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, final

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from resilience.integrations.grpc.calls import KINDS, Call, Kind, Settings
from resilience.policy import Policy
from resilience.runtimes.driving import drive


def _intercept(kind: Kind) -> Callable[..., Any]:
    def intercept(self: PolicyInterceptor, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Make a call under the policy."""
        call = Call(self._settings, kind, continuation, client_call_details, request)
        try:
            return drive(call.run())
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
    :param unrepeatable: methods (``"/package.Service/Method"``) that no Retry repeats.

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
    return [_aio_interceptor(settings, kind) for kind in KINDS]


def _aio_interceptor(settings: Settings, kind: Kind) -> Any:
    async def intercept(self: object, continuation: Any, client_call_details: Any, request: Any) -> Any:
        call = Call(settings, kind, continuation, client_call_details, request)
        return await call.run()

    name = kind.name.title().replace("_", "") + "ClientInterceptor"
    return type(name, (getattr(grpc.aio, name),), {f"intercept_{kind.name}": intercept})()
