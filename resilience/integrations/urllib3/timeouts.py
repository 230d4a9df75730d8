"""Time limits for a request and its body, for urllib3 and for requests.

urllib3's timeouts limit each single wait. `total` limits connecting and the wait for the response together, but not the
body. So the time is checked before each wait for a part of the body, and the socket's timeout is set to the time left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import Any, Final, TypeAlias, TypeVar, final

from typing_extensions import override
from urllib3 import HTTPResponse, Timeout
from urllib3 import exceptions as errors

from resilience.clock import MAX_CLIENT_TIMEOUT, clock

T = TypeVar("T")

#: A timeout in seconds for connecting and for each wait for bytes, or a pair of them.
TimeoutLike: TypeAlias = float | tuple[float | None, float | None] | Timeout | None

#: The shortest timeout of a socket, in seconds: with 0 it would not wait at all.
_SHORTEST_WAIT: Final = 0.001

#: If a body is read as a whole, the time is checked after each chunk of so many bytes.
_CHUNK_SIZE: Final = 10_240


def bounded(timeout: TimeoutLike, left: float) -> Timeout:
    """Return a timeout of at most `left` seconds.

    `total` limits connecting and the wait for the response together; without it, each of them could take all the time.
    """
    if isinstance(timeout, Timeout):
        own: Any = timeout.clone()
        own.total = left if own.total is None else min(left, own.total)
        return own  # type: ignore[no-any-return]
    if not isinstance(timeout, tuple):
        timeout = (timeout, timeout)
    if len(timeout) != 2:
        raise ValueError(f"timeout must be a number of seconds or a pair (connect, read), not {timeout!r}")
    connect, read = timeout
    return Timeout(connect=connect, read=read, total=left)


def limit_body(response: Any, timeout: TimeoutLike, deadline: float, late: Callable[[], Exception]) -> None:
    """Set the deadline for reading the body of a response, with any of its methods.

    :param timeout: the user's own timeout, which still applies to each wait.
    :param late: creates the error for a body that is not read by then.
    """
    if type(response) is HTTPResponse:
        response.__class__ = LimitedResponse  # urllib3 creates its responses itself, and has no option for their class
    if isinstance(response, LimitedResponse):
        response.longest_wait = _longest_wait(timeout)
        response.deadline, response.late = deadline, late
        response.limit_wait()


def was_cut_short(response: Any) -> bool:
    """Whether a response was closed before its body was read: urllib3 would show an empty one."""
    return bool(getattr(response, "closed", False)) and getattr(response, "length_remaining", 0) != 0


def _longest_wait(timeout: TimeoutLike) -> float:
    """Return how many seconds each wait for bytes may take under a timeout; infinity if there is no limit."""
    wait: Any = timeout[1] if isinstance(timeout, tuple) else timeout
    if isinstance(timeout, Timeout):
        own = timeout.clone()
        own.start_connect()  # `read_timeout` takes `total` into account only after this
        wait = own.read_timeout
    return inf if wait is None or wait is Timeout.DEFAULT_TIMEOUT else float(wait)


@final
class LimitedResponse(HTTPResponse):
    """A response of urllib3 with a time limit on its body."""

    longest_wait: float = inf
    deadline: float = inf
    late: Callable[[], Exception]

    @override
    def read(self, amt: int | None = None, decode_content: bool | None = None, cache_content: bool = False) -> bytes:
        if amt is not None and amt >= 0:
            return self._wait_for(partial(super().read, amt, decode_content))
        decodes = self.decode_content if decode_content is None else decode_content  # `stream` has another default
        pieces: Iterator[bytes] = self.stream(_CHUNK_SIZE, decodes)
        if self.tell() > 0:  # perhaps in the middle of a chunk, which `stream` does not know
            pieces = iter(partial(self.read, _CHUNK_SIZE, decodes), b"")
        data = b"".join(pieces)
        if cache_content:
            self._body = data
        return data

    @override
    def read1(self, amt: int | None = None, decode_content: bool | None = None) -> bytes:
        return self._wait_for(partial(super().read1, amt, decode_content))

    @override
    def read_chunked(self, amt: int | None = None, decode_content: bool | None = None) -> Iterator[bytes]:  # type: ignore[override]
        pieces = super().read_chunked(amt, decode_content)
        while (piece := self._wait_for(partial(next, pieces, None))) is not None:
            yield piece

    @override
    def close(self) -> None:
        super().close()
        self.release_conn()  # otherwise its slot in the pool would be lost

    def _wait_for(self, read: Callable[[], T]) -> T:
        if self._is_late() and self.length_remaining != 0 and not self.closed:
            self.close()  # discards the rest of the body
            raise self.late()
        self.limit_wait()
        try:
            return read()
        except errors.ReadTimeoutError as error:
            if self._is_late():
                raise self.late() from error
            raise

    def _is_late(self) -> bool:
        return clock.now() >= self.deadline

    def limit_wait(self) -> None:
        """Limit the next wait for bytes to the user's timeout and to the time left."""
        source = _socket_of(self)
        if source is not None:
            wait = max(_SHORTEST_WAIT, min(self.longest_wait, self.deadline - clock.now()))
            source.settimeout(wait if wait <= MAX_CLIENT_TIMEOUT else None)


def _socket_of(response: Any) -> Any:
    """Return the socket from which a body is read; None if there is none."""
    source = getattr(response.connection, "sock", None)
    if source is None:  # if the connection ends with this response, http.client has passed its socket to the reader
        reader = getattr(getattr(response, "_fp", None), "fp", None)
        source = getattr(getattr(reader, "raw", None), "_sock", None)
    return source
