"""Calls of a channel of `grpc.aio` under a policy.

grpc.aio registers an interceptor for one kind of method only, however many it can do: so there are four.
Each runs in a task of its own, begun with the call. A caller who writes requests one by one
(`await call.write(...)`) waits in each write for that task to end; so a stream of requests that is no list is
only begun under the policy, or both would wait for ever.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Generator
from typing import Any, final

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from typing_extensions import override

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

__all__ = ["aio_interceptors"]


def aio_interceptors(policy: Policy[Any], *, unrepeatable: Collection[str] = ()) -> list[Any]:
    """Return interceptors that run each call of a channel under a policy, with the time that is left as its deadline.

    :param policy: what stands around each call. It sees a failed call as the `grpc.RpcError` that it is, and
        a reply as its message.
    :param unrepeatable: methods (``"/package.Service/Method"``) that no Retry repeats.

    By the kind of method, a policy covers, and a Retry repeats:

    - one request: the whole call; of a stream of replies, everything up to the first one.
    - a stream of requests that is a list or a tuple: the same.
    - any other stream of requests, and `call.write`: only the start of the call, which is never repeated.

    `Rejected` and the errors of a `Timeout` come out as they are; a call that ran into the deadline of the
    context, or into its own `timeout`, as a `grpc.RpcError` with the status `DEADLINE_EXCEEDED`. Where the time was
    over before a call was made, that error is a `DeadlineExceeded` as well, and nothing was sent. A stub's `timeout`
    is for all attempts together.

    ``grpc.aio.insecure_channel("localhost:50051", interceptors=aio_interceptors(policy))``
    """
    runner = _Runner(policy, checked(policy, unrepeatable))
    return [_UnaryUnary(runner), _UnaryStream(runner), _StreamUnary(runner), _StreamStream(runner)]


class _UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    def __init__(self, runner: _Runner) -> None:
        self._runner = runner

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._runner.run(_Reply, _Answer, continuation, client_call_details, request)


class _UnaryStream(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[misc]
    def __init__(self, runner: _Runner) -> None:
        self._runner = runner

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._runner.run(_Replies, _StreamAnswer, continuation, client_call_details, request)


class _StreamUnary(grpc.aio.StreamUnaryClientInterceptor):  # type: ignore[misc]
    def __init__(self, runner: _Runner) -> None:
        self._runner = runner

    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        kind = _Reply if is_replayable(request_iterator) else _Start
        return await self._runner.run(kind, _Answer, continuation, client_call_details, request_iterator)


class _StreamStream(grpc.aio.StreamStreamClientInterceptor):  # type: ignore[misc]
    def __init__(self, runner: _Runner) -> None:
        self._runner = runner

    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        kind = _Replies if is_replayable(request_iterator) else _Start
        return await self._runner.run(kind, _StreamAnswer, continuation, client_call_details, request_iterator)


@final
class _Runner:
    """Runs calls under the policy."""

    def __init__(self, policy: Policy[Any], unrepeatable: frozenset[str]) -> None:
        self._policy = policy
        self._unrepeatable = unrepeatable

    async def run(
        self,
        kind: type[Call],
        answer: Callable[[Any], Any],
        continuation: Callable[..., Any],
        details: Any,
        request: Any,
    ) -> Any:
        may_repeat = kind is not _Start and method_of(details) not in self._unrepeatable
        call = kind(continuation, details, lambda: request, repeatable=may_repeat)
        try:
            return call.of(await self._policy.aexecute(call, call.context()), answer)
        except DeadlineExceeded as error:
            status = as_status(error)
        except Exception as error:
            call.mark(error)
            raise
        try:
            raise status
        finally:
            del status  # no cycle: error -> traceback -> this frame -> error


class _AsyncCall(Call):
    @override
    async def __call__(self, ctx: Context) -> Any:
        outcome = await self.begin(ctx)
        try:
            reply = await self.wait(outcome)
        except grpc.RpcError as error:
            self.failed(error)
            if ran_out(error, ctx):
                await asyncio.sleep(ctx.remaining())  # gRPC's timer is a little early
                raise out_of_time(error) from error
            raise
        self.keep(reply, reply if isinstance(reply, _Stream) else outcome)
        return reply

    @abstractmethod
    async def wait(self, outcome: Any) -> Any:
        """Wait for as much of a call as the policy covers, and return what the policy sees of it."""


@final
class _Reply(_AsyncCall):
    @override
    async def wait(self, outcome: Any) -> Any:
        return await outcome


@final
class _Replies(_AsyncCall):
    @override
    async def wait(self, outcome: Any) -> _Stream:
        return await _Stream.begun(outcome)


@final
class _Start(_AsyncCall):
    """The start of a call alone; what may be used up is never sent twice."""

    @override
    async def wait(self, outcome: Any) -> Any:
        return outcome


@final
class _Stream:
    """The replies of a call whose first one has been waited for."""

    def __init__(self, call: Any, replies: AsyncIterator[Any], first: list[Any]) -> None:
        self._call = call
        self._replies = replies
        self._first = first

    @classmethod
    async def begun(cls, call: Any) -> _Stream:
        replies = aiter(call)
        try:
            first = [await anext(replies)]
        except StopAsyncIteration:
            first = []
        return cls(call, replies, first)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return self._first.pop() if self._first else await anext(self._replies)

    async def aclose(self) -> None:
        """End a call whose replies nobody will read."""
        self._call.cancel()


class _Finished:
    """As much of a finished call as grpc.aio and its users look at.

    What derives from it is a call by type, too: anything else grpc.aio would take for a reply, or join to the last
    call that was made, and there was none.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    async def details(self) -> str:
        return "answered by a policy"

    async def debug_error_string(self) -> str:
        return ""

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def wait_for_connection(self) -> None:
        return None

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        callback(self)

    def time_remaining(self) -> None:
        return None

    def done(self) -> bool:
        return True  # so nobody writes to it, or waits

    def cancelled(self) -> bool:
        return False

    def cancel(self) -> bool:
        return False

    async def write(self, request: Any) -> None:
        raise asyncio.InvalidStateError("a policy has answered: nobody reads what is written")

    async def done_writing(self) -> None:
        return None


@final
class _Answer(_Finished, grpc.aio.UnaryUnaryCall, grpc.aio.StreamUnaryCall):  # type: ignore[misc]
    """What a policy has answered in the place of a call with one reply."""

    def __await__(self) -> Generator[Any, None, Any]:
        return self._value
        yield


@final
class _StreamAnswer(_Finished, grpc.aio.UnaryStreamCall, grpc.aio.StreamStreamCall):  # type: ignore[misc]
    """What a policy has answered in the place of a call with many replies: messages, from any iterable."""

    _reading: AsyncIterator[Any] | None = None

    async def __aiter__(self) -> AsyncIterator[Any]:
        if isinstance(self._value, AsyncIterable):
            async for reply in self._value:
                yield reply
            return
        for reply in self._value:
            yield reply

    async def read(self) -> Any:
        if self._reading is None:
            self._reading = aiter(self)
        return await anext(self._reading, grpc.aio.EOF)
