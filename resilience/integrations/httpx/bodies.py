"""Bodies: how a response's is read within its time, and which of a request's can be sent twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, final

from typing_extensions import override

from resilience.errors import DeadlineExceeded
from resilience.integrations.http.bodies import is_seekable
from resilience.integrations.httpx.libraries import AsyncStream, Stream, classes
from resilience.runtimes.tasks import timer_until

if TYPE_CHECKING:
    from resilience.context import Context

_TIMED_OUT = classes("TimeoutException")


class TimeLimit(Protocol):
    """The time within which a body is to be read, as the request that brought it knows it."""

    @property
    def body_deadline(self) -> float:
        """The instant at which it is over."""
        ...

    def body_is_late(self) -> Exception:
        """Return the error for a body that is not read by then."""
        ...

    def begin_wait(self) -> None:
        """Look at the time before waiting for a piece; raise if it is over."""
        ...

    def restore_timeouts(self) -> None:
        """Let the client have its own timeouts."""
        ...


@final
class Body(Stream):
    """The body of a response, in blocking code. The time is looked at before each wait for more of it."""

    def __init__(self, stream: Any, limit: TimeLimit) -> None:
        self._stream = stream
        self._limit = limit

    @override
    def __iter__(self) -> Iterator[bytes]:
        self._limit.begin_wait()
        try:
            for chunk in self._stream:
                yield chunk
                self._limit.begin_wait()
        except _TIMED_OUT:
            self._limit.begin_wait()  # raises, if it was our time that is over
            raise

    @override
    def close(self) -> None:
        self._stream.close()


@final
class AsyncBody(AsyncStream):
    """The body of a response, in a task. A wait for more of it is cut off when the time is over."""

    def __init__(self, stream: Any, limit: TimeLimit) -> None:
        self._stream = stream
        self._limit = limit

    @override
    async def __aiter__(self) -> AsyncIterator[bytes]:
        self._limit.restore_timeouts()
        chunks = self._stream.__aiter__()
        try:
            while True:
                # Also when the time is over already: what is cancelled cleans up all the generators inside of it.
                with timer_until(self._limit.body_deadline) as timer:
                    chunk = await anext(chunks, None)
                if timer.fired:
                    raise self._limit.body_is_late()
                if chunk is None:
                    return
                yield chunk
        finally:
            if hasattr(chunks, "aclose"):
                await chunks.aclose()

    @override
    async def aclose(self) -> None:
        await self._stream.aclose()


@final
class InMemory(Stream, AsyncStream):
    """The body of a response that was read in its attempt, as it came over the wire."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    @override
    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces

    @override
    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def read(response: Any, ctx: Context, timeouts: Callable[[], None]) -> Any:
    """Return a response like this one with its body in memory.

    :param timeouts: cuts the client's timeouts, again: of the time that there was, the headers have taken some.
    :raises DeadlineExceeded: for a piece that comes after the time of the attempt. Those timeouts begin anew with
        each piece, so nothing else ends a body without an end, and the thread that reads it.
    """
    pieces = []
    try:
        timeouts()
        for piece in response.iter_raw():
            ctx.check()
            pieces.append(piece)
    finally:
        response.close()
    return _with_body(response, pieces)


async def aread(response: Any, ctx: Context) -> Any:
    """Do the same in a task. A wait for a piece is cut off."""
    limit = nullcontext() if ctx.deadline == inf else timer_until(ctx.deadline)
    try:
        with limit as timer:
            pieces = [piece async for piece in response.aiter_raw()]
    finally:
        await response.aclose()
    if timer is not None and timer.fired:
        raise DeadlineExceeded("the time that was left ran out while the body was read")
    return _with_body(response, pieces)


def _with_body(response: Any, pieces: list[bytes]) -> Any:
    # A new one: the client is still to read it, and would take this one for one that was read by its user.
    fields = {"headers": response.headers, "stream": InMemory(pieces), "extensions": response.extensions}
    return type(response)(response.status_code, **fields)


def sources(stream: Any) -> list[Any]:
    """Return what the client reads a request's body from, and does not wind back: an iterator, a file, a stream."""
    files = [getattr(field, "file", b"") for field in getattr(stream, "fields", ())]
    if files:
        return [it for it in files if not isinstance(it, (str, bytes)) and not is_seekable(it)]
    source = getattr(stream, "_stream", None)
    return [] if source is None else [source]


def is_replayable(stream: Any) -> bool:
    """Whether a request's body can be produced a second time. What is unknown cannot."""
    if isinstance(stream, classes("ByteStream")):
        return True
    kind = type(stream)
    if kind.__module__.partition(".")[0] not in {"httpx", "httpx2"}:
        return False
    files = [getattr(field, "file", b"") for field in getattr(stream, "fields", ())]
    if files or kind.__name__ == "MultipartStream":  # the client winds its files back by itself, if it can
        return all(isinstance(it, (str, bytes)) or (hasattr(it, "seekable") and it.seekable()) for it in files)
    source = getattr(stream, "_stream", None)  # of `content=`: a list can be iterated again, an iterator or file cannot
    one_shot = ("read", "aread", "__next__", "__anext__")
    return source is not None and not any(hasattr(source, name) for name in one_shot)
