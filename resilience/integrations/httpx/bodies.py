"""Bodies: the time limit for the body of a response, and whether the body of a request can be sent again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from math import inf
from typing import Any, final

from typing_extensions import override

from resilience.clock import clock
from resilience.integrations.http.bodies import IN_MEMORY, Body, OneShot, body_of
from resilience.integrations.httpx.libraries import AsyncStream, Stream, classes
from resilience.integrations.httpx.pools import close_completely
from resilience.runtimes.tasks import cut_off_at

_TIMED_OUT = classes("TimeoutException")
#: The streams that are in memory, so that reading them does not wait.
BYTES = classes("ByteStream")


class _Limited:
    """The body of a response.

    :param deadline: the instant by which it has to be read; infinity for no limit.
    :param late: creates the error for a body that is not read by then.
    """

    def __init__(self, stream: Any, deadline: float, late: Callable[[], Exception]) -> None:
        self._stream = stream
        self._deadline = deadline
        self._late = late


@final
class LimitedStream(_Limited, Stream):
    """A body in blocking code. The time is checked before each wait for more data, and the timeouts limit that wait."""

    @override
    def __iter__(self) -> Iterator[bytes]:
        self._check_time()
        try:
            for chunk in self._stream:
                yield chunk
                self._check_time()
        except _TIMED_OUT:
            self._check_time()  # raises if the deadline has passed
            raise

    def _check_time(self) -> None:
        if clock.now() >= self._deadline:
            raise self._late()

    @override
    def close(self) -> None:
        self._stream.close()


@final
class AsyncLimitedStream(_Limited, AsyncStream):
    """A body in a task. A wait for more data is cut off at the deadline. No cancellation cuts off the close.

    So a policy that discards the response closes it completely.
    """

    _chunks: Any = None

    @override
    def __aiter__(self) -> AsyncIterator[bytes]:
        self._chunks = self._stream.__aiter__()
        return self

    def __anext__(self) -> Awaitable[bytes]:
        chunk: Awaitable[bytes] = self._chunks.__anext__()
        return chunk if self._deadline == inf else cut_off_at(self._deadline, chunk, self._late)

    @override
    async def aclose(self) -> None:
        try:
            if not getattr(self._chunks, "ag_running", True):  # not if another task is reading: its wait fails instead
                await self._chunks.aclose()
        finally:
            await close_completely(self._stream.aclose(), self._stream)


@final
class OneShotStream(OneShot, Stream, AsyncStream):
    """The body of a request that can be sent only once."""


def body_in(stream: Any) -> Body:
    """Return the body that the client reads while it sends this stream."""
    if isinstance(stream, BYTES):
        return IN_MEMORY
    if isinstance(stream, OneShotStream):
        return Body(stream)
    if type(stream).__module__.partition(".")[0] not in {"httpx", "httpx2"}:
        return Body(once=True)  # a user's own stream, which perhaps cannot be read twice
    if hasattr(stream, "fields"):  # a form, whose files the client rewinds itself
        return Body(*[getattr(field, "file", None) for field in stream.fields])
    return body_of(getattr(stream, "_stream", iter(())))  # from `content=`: a list, an iterator, a file
