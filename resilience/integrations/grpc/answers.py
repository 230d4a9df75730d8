"""What stands in the place of a call that was not made: a policy has answered instead, or its time was over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterator
from typing import Any, TypeAlias, final

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from typing_extensions import override

from resilience.errors import DeadlineExceeded

_Method: TypeAlias = Callable[..., Any]


def _now(value: object) -> _Method:
    """Return a method of a call that always has this answer; what it waits for is there."""
    return lambda self, timeout=None: value


def _later(value: object) -> _Method:
    """Return the same as grpc.aio has it, to be awaited."""

    async def method(self: object) -> Any:
        return value

    return method


class _Ended:
    """What every call that has ended says of itself."""

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        callback(self)

    def add_callback(self, callback: Callable[[], Any]) -> bool:
        return False

    done: _Method = _now(True)
    cancelled: _Method = _now(False)
    cancel: _Method = cancelled
    running: _Method = cancelled
    is_active: _Method = cancelled
    time_remaining: _Method = _now(None)


@final
class DeadlineStatus(_Ended, DeadlineExceeded, grpc.aio.AioRpcError):  # type: ignore[misc]
    """The status of a call that was not made, because its time was over: `DEADLINE_EXCEEDED`.

    To an interceptor around ours it is also the call itself, which grpc's blocking channels hand out in its place.
    """

    def __init__(self, message: str = "", *, policy: str | None = None, timeout: float | None = None) -> None:
        DeadlineExceeded.__init__(self, message, policy=policy, timeout=timeout)
        self.message: str = message

    code: _Method = _now(grpc.StatusCode.DEADLINE_EXCEEDED)
    debug_error_string: _Method = _now("")
    initial_metadata: _Method = _now(())
    trailing_metadata: _Method = initial_metadata

    def details(self) -> str:
        """Say what went wrong."""
        return self.message

    def result(self, timeout: float | None = None) -> Any:
        """Raise: there is no reply."""
        raise self

    def exception(self, timeout: float | None = None) -> DeadlineStatus:
        """Return the error that `result` raises."""
        return self

    def traceback(self, timeout: float | None = None) -> Any:
        """Return where it was raised."""
        return self.__traceback__

    @override
    def __str__(self) -> str:
        return self.message

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r})"


_DETAILS = "answered by a policy"


@final
class Answer(_Ended):
    """What a policy has answered in the place of a blocking call: a message, or an iterable of messages."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._replies: Iterator[Any] | None = None

    code: _Method = _now(grpc.StatusCode.OK)
    details: _Method = _now(_DETAILS)
    initial_metadata: _Method = _now(())
    trailing_metadata: _Method = initial_metadata
    exception: _Method = _now(None)
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
    """As much of a finished call as grpc.aio and its users look at.

    What derives from it is a call by type, too: anything else grpc.aio would take for a reply, or join to the last
    call that was made, and there was none.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    code: _Method = _later(grpc.StatusCode.OK)
    details: _Method = _later(_DETAILS)
    debug_error_string: _Method = _later("")
    initial_metadata: _Method = _later(grpc.aio.Metadata())
    trailing_metadata: _Method = initial_metadata
    wait_for_connection: _Method = _later(None)
    done_writing: _Method = wait_for_connection

    async def write(self, request: Any) -> None:
        raise asyncio.InvalidStateError("a policy has answered: nothing reads what is written")


@final
class _AioAnswer(_AioEnded, grpc.aio.UnaryUnaryCall, grpc.aio.StreamUnaryCall):  # type: ignore[misc]
    """What a policy has answered in the place of a call of grpc.aio with one reply."""

    def __await__(self) -> Generator[Any, None, Any]:
        return self._value
        yield


@final
class _AioAnswers(_AioEnded, grpc.aio.UnaryStreamCall, grpc.aio.StreamStreamCall):  # type: ignore[misc]
    """The same of one with many replies: messages, from any iterable."""

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
    """Return what stands for a call of grpc.aio that a policy has answered."""
    return _AioAnswers(value) if by_stream else _AioAnswer(value)
