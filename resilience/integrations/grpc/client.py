"""Calls of a blocking gRPC channel under a policy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import Any, final

import grpc  # type: ignore[import-untyped]
from typing_extensions import override

from resilience.clock import clock
from resilience.context import Context
from resilience.errors import DeadlineExceeded
from resilience.integrations.grpc.calls import (
    Call,
    as_status,
    checked,
    is_replayable,
    method_of,
    out_of_time,
    ran_out,
)
from resilience.policy import Policy

__all__ = ["PolicyInterceptor"]


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
        self._unrepeatable = checked(policy, unrepeatable)
        self._policy = policy

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Make a call of one request and one reply."""
        return self._run(_Reply, continuation, client_call_details, lambda: request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Make a call of one request and many replies."""
        return self._run(_Replies, continuation, client_call_details, lambda: request)

    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """Make a call of many requests and one reply."""
        if is_replayable(request_iterator):
            return self._run(_Reply, continuation, client_call_details, lambda: iter(request_iterator))
        return self._run(_Reply, continuation, client_call_details, lambda: request_iterator, repeatable=False)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """Make a call of many requests and many replies."""
        if is_replayable(request_iterator):
            return self._run(_Replies, continuation, client_call_details, lambda: iter(request_iterator))
        return self._run(_Start, continuation, client_call_details, lambda: request_iterator, repeatable=False)

    def _run(
        self,
        kind: type[Call],
        continuation: Callable[..., Any],
        details: Any,
        requests: Callable[[], Any],
        *,
        repeatable: bool = True,
    ) -> Any:
        may_repeat = repeatable and method_of(details) not in self._unrepeatable
        call = kind(continuation, details, requests, repeatable=may_repeat)
        try:
            return call.of(self._policy.execute(call, call.context()), _Answer)
        except DeadlineExceeded as error:
            status = as_status(error)
        except Exception as error:
            call.mark(error)
            raise
        try:
            raise status
        finally:
            del status  # no cycle: error -> traceback -> this frame -> error


class _BlockingCall(Call):
    @override
    def __call__(self, ctx: Context) -> Any:
        outcome = self.begin(ctx)
        try:
            reply = self.wait(outcome)
        except grpc.RpcError as error:
            self.failed(error)
            if ran_out(error, ctx):
                clock.sleep(ctx.remaining())  # gRPC's timer is a little early
                raise out_of_time(error) from error
            raise
        self.keep(reply, reply if isinstance(reply, _Stream) else outcome)
        return reply

    @abstractmethod
    def wait(self, outcome: Any) -> Any:
        """Wait for as much of a call as the policy covers, and return what the policy sees of it."""


@final
class _Reply(_BlockingCall):
    @override
    def wait(self, outcome: Any) -> Any:
        return outcome.result()


@final
class _Replies(_BlockingCall):
    @override
    def wait(self, outcome: Any) -> _Stream:
        return _Stream(outcome)


@final
class _Start(_BlockingCall):
    @override
    def wait(self, outcome: Any) -> Any:
        return outcome


@final
class _Stream:
    """A call whose first reply has been waited for: its replies, and everything else that the call can do."""

    def __init__(self, call: Any) -> None:
        self._call = call
        try:
            first = [next(call)]
        except StopIteration:
            first = []
        except grpc.RpcError:
            raise
        except BaseException:  # Ctrl-C
            call.cancel()
            raise
        self._replies: Iterator[Any] = chain(first, call)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._replies)

    def close(self) -> None:
        """End a call whose replies nobody will read."""
        self._call.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


@final
class _Answer:
    """What a policy has answered in the place of a call: as much of a finished call as its users look at."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._replies: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._replies is None:
            self._replies = iter(self._value)
        return next(self._replies)

    def result(self, timeout: float | None = None) -> Any:
        return self._value

    def exception(self, timeout: float | None = None) -> None:
        return None

    def traceback(self, timeout: float | None = None) -> None:
        return None

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    def details(self) -> str:
        return "answered by a policy"

    def initial_metadata(self) -> tuple[()]:
        return ()

    def trailing_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> None:
        return None

    def add_done_callback(self, fn: Callable[[Any], Any]) -> None:
        fn(self)

    def add_callback(self, callback: Callable[[], Any]) -> bool:
        return False

    def done(self) -> bool:
        return True

    def is_active(self) -> bool:
        return False

    running = cancelled = cancel = is_active
