"""The objects that replace a call that was not made: a policy answered instead, or the deadline had passed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterator
from typing import Any, TypeAlias, final

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from resilience.errors import DeadlineExceeded

_Method: TypeAlias = Callable[..., Any]


def _constant(value: object) -> _Method:
    return lambda self, timeout=None: value


def _async_constant(value: object) -> _Method:
    async def method(self: object) -> Any:
        return value

    return method


class _Ended:
    """The methods that all finished calls have in common; `value` is what a policy answered."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        callback(self)

    def add_callback(self, callback: Callable[[], Any]) -> bool:
        return False

    done: _Method = _constant(True)
    cancelled: _Method = _constant(False)
    cancel: _Method = cancelled
    running: _Method = cancelled
    is_active: _Method = cancelled
    time_remaining: _Method = _constant(None)


@grpc.Call.register
@grpc.Future.register
@final
class DeadlineStatus(_Ended, DeadlineExceeded, grpc.aio.AioRpcError):  # type: ignore[misc]
    """The status of a call that was not made because its deadline had passed: `DEADLINE_EXCEEDED`.

    It is also a call: a blocking channel returns the error that one interceptor raises, as the call, to the next.
    """

    __repr__: Callable[..., str] = DeadlineExceeded.__repr__

    def __init__(self, message: str = "", *, policy: str | None = None, timeout: float | None = None) -> None:
        grpc.aio.AioRpcError.__init__(self, grpc.StatusCode.DEADLINE_EXCEEDED, (), (), message, "")
        DeadlineExceeded.__init__(self, message, policy=policy, timeout=timeout)

    def result(self, timeout: float | None = None) -> Any:
        """Raise: there is no reply."""
        raise self

    def exception(self, timeout: float | None = None) -> DeadlineStatus:
        """Return the error that `result` raises."""
        return self

    def traceback(self, timeout: float | None = None) -> Any:
        """Return the traceback of this error."""
        return self.__traceback__


_DETAILS = "answered by a policy"


@grpc.Call.register
@grpc.Future.register
@final
class Answer(_Ended):
    """A policy's answer in place of a blocking call: a message, or an iterable of messages."""

    _replies: Iterator[Any] | None = None

    code: _Method = _constant(grpc.StatusCode.OK)
    details: _Method = _constant(_DETAILS)
    initial_metadata: _Method = _constant(())
    trailing_metadata: _Method = initial_metadata
    exception: _Method = _constant(None)
    traceback: _Method = exception

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._replies is None:
            self._replies = iter(self._value)
        return next(self._replies)

    def result(self, timeout: float | None = None) -> Any:
        """Return the reply."""
        return self._value


class _AioEnded(_Ended):
    """The part of a finished call's interface that grpc.aio and its users need.

    Subclasses also derive from the call types of grpc.aio: it takes any other object for a reply, or attaches it to
    the last call that was made, and no call was made.
    """

    code: _Method = _async_constant(grpc.StatusCode.OK)
    details: _Method = _async_constant(_DETAILS)
    debug_error_string: _Method = _async_constant("")
    initial_metadata: _Method = _async_constant(grpc.aio.Metadata())
    trailing_metadata: _Method = initial_metadata
    wait_for_connection: _Method = _async_constant(None)
    done_writing: _Method = wait_for_connection

    async def write(self, request: Any) -> None:
        raise asyncio.InvalidStateError("a policy has answered: nothing reads what is written")


@final
class _AioAnswer(_AioEnded, grpc.aio.UnaryUnaryCall, grpc.aio.StreamUnaryCall):  # type: ignore[misc]
    def __await__(self) -> Generator[Any, None, Any]:
        return self._value
        yield


@final
class _AioAnswers(_AioEnded, grpc.aio.UnaryStreamCall, grpc.aio.StreamStreamCall):  # type: ignore[misc]
    """A policy's answer in place of a grpc.aio call with a stream of replies: any iterable of messages."""

    _reading: AsyncIterator[Any] | None = None

    async def __aiter__(self) -> AsyncIterator[Any]:
        if isinstance(self._value, AsyncIterable):
            async for reply in self._value:
                yield reply
            return
        for reply in self._value:
            yield reply

    async def read(self) -> Any:
        """Return the next reply, or `EOF`."""
        if self._reading is None:
            self._reading = aiter(self)
        return await anext(self._reading, grpc.aio.EOF)


def aio_answer(value: Any, by_stream: bool) -> Any:
    """Return the object that replaces a grpc.aio call when a policy answers with `value`."""
    return _AioAnswers(value) if by_stream else _AioAnswer(value)
