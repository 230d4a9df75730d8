"""Calls of a blocking gRPC channel under a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, final

import grpc  # type: ignore[import-untyped]

from resilience.clock import clock
from resilience.context import Context
from resilience.integrations.grpc import calls
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
    context, or into its own `timeout`, as a `grpc.RpcError` with the status `DEADLINE_EXCEEDED`. A stub's `timeout`
    is for all attempts together. A call by `.future()` waits for its outcome here: interceptors of the blocking
    API cannot do otherwise. A policy of its own makes of it what grpc makes of an interceptor that raises.
    """

    def __init__(self, policy: Policy[Any], *, unrepeatable: Iterable[str] = ()) -> None:
        self._unrepeatable = calls.checked(policy, unrepeatable)
        self._policy = policy

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Make a call of one request and one reply."""
        return self._reply(_Call(continuation, client_call_details, lambda: request), repeatable=True)

    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """Make a call of many requests and one reply."""
        replayable = calls.is_replayable(request_iterator)
        requests = (lambda: iter(request_iterator)) if replayable else (lambda: request_iterator)
        return self._reply(_Call(continuation, client_call_details, requests), repeatable=replayable)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Make a call of one request and many replies."""
        return self._replies(_Call(continuation, client_call_details, lambda: request))

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """Make a call of many requests and many replies."""
        if calls.is_replayable(request_iterator):
            return self._replies(_Call(continuation, client_call_details, lambda: iter(request_iterator)))
        return self._start(_Call(continuation, client_call_details, lambda: request_iterator))

    def _reply(self, call: _Call, *, repeatable: bool) -> Any:
        kept = calls.Kept()

        def send(ctx: Context) -> Any:
            outcome = call.begin(ctx)
            try:
                reply = outcome.result()
            except grpc.RpcError as error:
                self._look_at(error, ctx, call, repeatable)
                raise
            kept.keep(reply, outcome)
            return reply

        return kept.call_of(self._run(send, call), _Answer)

    def _replies(self, call: _Call) -> Any:
        def send(ctx: Context) -> _Stream:
            outcome = call.begin(ctx)
            try:
                return _Stream(outcome)
            except grpc.RpcError as error:
                self._look_at(error, ctx, call, repeatable=True)
                raise

        replies = self._run(send, call)
        return replies if isinstance(replies, _Stream) else _Answer(replies)

    def _start(self, call: _Call) -> Any:
        kept = calls.Kept()

        def send(ctx: Context) -> Any:
            outcome = call.begin(ctx)
            kept.keep(outcome, outcome)
            return outcome

        return kept.call_of(self._run(send, call), _Answer)

    def _run(self, send: Callable[[Context], Any], call: _Call) -> Any:
        try:
            return self._policy.execute(send, calls.context_of(call.details))
        except calls.OutOfTime as error:
            status = error.status
        try:
            raise status
        finally:
            del status  # no cycle: error -> traceback -> this frame -> error

    def _look_at(self, error: Any, ctx: Context, call: _Call, repeatable: bool) -> None:
        """Give a failed call its hints; raise in its place what the policies have to see instead."""
        if calls.ran_out(error, ctx):
            clock.sleep(ctx.remaining())  # gRPC's timer is a little early
            raise calls.out_of_time(error) from error
        calls.add_hints(error, repeatable=repeatable and calls.method_of(call.details) not in self._unrepeatable)


@final
class _Call:
    """A call that can be begun several times."""

    def __init__(self, continuation: Callable[..., Any], details: Any, requests: Callable[[], Any]) -> None:
        self._continuation = continuation
        self.details = details
        self._requests = requests

    def begin(self, ctx: Context) -> Any:
        """Begin an attempt, with the time that is left."""
        return self._continuation(self.details._replace(timeout=ctx.timeout()), self._requests())


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
