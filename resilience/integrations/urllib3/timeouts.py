"""How the time of a request, and of its body, is limited, for urllib3 and for requests.

urllib3's timeouts are for one wait each. For connecting and for the answer together it has a total; for a body nothing
has, so the time is looked at before each wait for a piece of it, and the socket told how long that may take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import Any, Final, TypeAlias, TypeVar, final

from typing_extensions import override
from urllib3 import HTTPResponse, Timeout
from urllib3 import exceptions as errors

from resilience.clock import clock
from resilience.errors import DeadlineExceeded

T = TypeVar("T")

#: A timeout: for connecting and for each wait for bytes, or one of each.
TimeoutLike: TypeAlias = float | tuple[float | None, float | None] | Timeout | None

#: The shortest wait, in seconds: 0 is "do not wait" to a socket.
_LEAST: Final = 0.001

#: The time is looked at each time that so many bytes of a body have been read.
_BLOCK: Final = 10_240


def bounded(timeout: TimeoutLike, left: float) -> Timeout:
    """Return a timeout of at most `left` seconds.

    `total` is what bounds connecting and waiting for the answer together; without it each could take all the time.
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
    """Have the body of a response read by `deadline`, in whatever way it is read.

    :param timeout: the user's own, which stays where it is shorter.
    :param late: makes the error for a body that is not there by then.
    """
    if type(response) is HTTPResponse:
        response.__class__ = LimitedResponse  # urllib3 makes its responses itself, and asks for no class
    if isinstance(response, LimitedResponse):
        response.longest_wait = _longest_wait(timeout)
        response.deadline, response.late = deadline, late
        response.limit_wait()


def _longest_wait(timeout: TimeoutLike) -> float:
    """Return for how many seconds a timeout lets each wait for bytes last; infinity for no limit."""
    wait: Any = timeout[1] if isinstance(timeout, tuple) else timeout
    if isinstance(timeout, Timeout):
        own = timeout.clone()
        own.start_connect()  # before that, it does not say
        wait = own.read_timeout
    return inf if wait is None or wait is Timeout.DEFAULT_TIMEOUT else float(wait)


def attempt_is_late() -> DeadlineExceeded:
    """Return the error for a body that its attempt has no time left to read."""
    return DeadlineExceeded("the time that was left ran out while the body was read")


@final
class LimitedResponse(HTTPResponse):
    """A response of urllib3 whose body has its time."""

    longest_wait: float = inf
    deadline: float = inf
    late: Callable[[], Exception]

    @override
    def read(self, amt: int | None = None, decode_content: bool | None = None, cache_content: bool = False) -> bytes:
        if amt is not None and amt >= 0:
            return self._wait_for(partial(super().read, amt, decode_content))
        data = b"".join(self.stream(_BLOCK, decode_content))
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
        self.release_conn()  # or its place in the pool would be lost

    def _wait_for(self, read: Callable[[], T]) -> T:
        if self._is_late() and self.length_remaining != 0 and not self.closed:
            self.close()  # nothing more is read
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
        """Let the next wait for bytes take no longer than the user's timeout, and what is left, allow."""
        source = _socket_of(self)
        if source is not None:
            wait = max(_LEAST, min(self.longest_wait, self.deadline - clock.now()))
            source.settimeout(None if wait == inf else wait)


def _socket_of(response: Any) -> Any:
    """Return the socket from which a body is read; None for none."""
    source = getattr(response.connection, "sock", None)
    if source is None:  # a connection that ends with this response: http.client has handed its socket to the reader
        reader = getattr(getattr(response, "_fp", None), "fp", None)
        source = getattr(getattr(reader, "raw", None), "_sock", None)
    return source
