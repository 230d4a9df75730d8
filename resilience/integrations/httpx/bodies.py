"""Bodies: how a response's is read within its time, and what a request's is made of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, final

from typing_extensions import override

from resilience.clock import clock
from resilience.integrations.http.bodies import IN_MEMORY, Body, OneShot, body_of
from resilience.integrations.httpx.libraries import AsyncStream, Stream, classes
from resilience.integrations.httpx.pools import completed
from resilience.runtimes.tasks import timer_until

_TIMED_OUT = classes("TimeoutException")
_BYTES = classes("ByteStream")


@final
class LimitedStream(Stream):
    """The body of a response, in blocking code. The time is looked at before each wait for more of it.

    :param late: makes the error for a body that is not read by the deadline.
    """

    def __init__(self, stream: Any, deadline: float, late: Callable[[], Exception]) -> None:
        self._stream = stream
        self._deadline = deadline
        self._late = late

    @override
    def __iter__(self) -> Iterator[bytes]:
        self._look()
        try:
            for chunk in self._stream:
                yield chunk
                self._look()
        except _TIMED_OUT:
            self._look()  # raises, if it was our time that is over
            raise

    def _look(self) -> None:
        if clock.now() >= self._deadline:
            raise self._late()

    @override
    def close(self) -> None:
        self._stream.close()


@final
class AsyncLimitedStream(AsyncStream):
    """The body of a response, in a task. A wait for more of it is cut off when the time is over.

    :param late: as above.
    """

    def __init__(self, stream: Any, deadline: float, late: Callable[[], Exception]) -> None:
        self._stream = stream
        self._chunks: Any = None
        self._deadline = deadline
        self._late = late

    @override
    def __aiter__(self) -> AsyncIterator[bytes]:
        self._chunks = self._stream.__aiter__()
        return self

    async def __anext__(self) -> bytes:
        # Also when the time is over already: what is cancelled cleans up all the generators inside of it.
        with timer_until(self._deadline) as timer:
            chunk: bytes = await self._chunks.__anext__()
        if timer.fired:
            raise self._late()
        return chunk

    @override
    async def aclose(self) -> None:
        if hasattr(self._chunks, "aclose"):
            await self._chunks.aclose()
        await completed(self._stream.aclose(), self._stream)


def is_in_memory(response: Any) -> bool:
    """Whether there is nothing to wait for."""
    return response.is_closed or isinstance(response.stream, _BYTES)


def with_body(response: Any, body: bytes) -> Any:
    """Return a response like this one with its body, as it came over the wire, in memory.

    A new one: the client is still to read it, and would take this one for one that was read by its user.
    """
    (kind,) = (it for it in _BYTES if it.__module__.partition(".")[0] == type(response).__module__.partition(".")[0])
    fields = {"headers": response.headers, "stream": kind(body), "extensions": response.extensions}
    return type(response)(response.status_code, **fields)


@final
class OneShotStream(OneShot, Stream, AsyncStream):
    """The body of a request that can be sent only once."""


def body_in(stream: Any) -> Body:
    """Return what the client reads while it sends this stream."""
    if isinstance(stream, _BYTES):
        return IN_MEMORY
    if isinstance(stream, OneShotStream):
        return Body(stream)
    if type(stream).__module__.partition(".")[0] not in {"httpx", "httpx2"}:
        return Body(once=True)  # only its author knows
    if hasattr(stream, "fields"):  # a form; the client rewinds its files by itself
        return Body(*[getattr(field, "file", None) for field in stream.fields])
    return body_of(getattr(stream, "_stream", iter(())))  # of `content=`: a list, an iterator, a file
