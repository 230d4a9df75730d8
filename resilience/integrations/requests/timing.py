"""The time that a request has: its timeouts within a deadline, and the deadline of a body.

requests' timeouts are for one wait each. For connecting and for the answer together urllib3 has a total; for a body
nothing has, so the time is looked at before each wait for a piece of it, and the socket told how long that may take.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Any, TypeAlias, final

import urllib3
from requests import ConnectionError as RequestsConnectionError
from requests import Response
from requests import Timeout as RequestsTimeout
from urllib3.exceptions import ProtocolError, ReadTimeoutError

from resilience.clock import clock
from resilience.errors import DeadlineExceeded, TimeoutExceeded

#: What requests takes as a timeout: for connecting and for each wait for bytes, or one of each.
TimeoutLike: TypeAlias = float | tuple[float | None, float | None] | urllib3.Timeout | None


def bounded(timeout: TimeoutLike, left: float) -> urllib3.Timeout:
    """Return a timeout of at most `left` seconds.

    `total` is what bounds connecting and waiting for the answer together; without it each could take all the time.
    """
    if isinstance(timeout, urllib3.Timeout):
        own: Any = timeout.clone()
        own.total = left if own.total is None else min(left, own.total)
        return own  # type: ignore[no-any-return]
    if not isinstance(timeout, tuple):
        timeout = (timeout, timeout)
    if len(timeout) != 2:
        raise ValueError(f"timeout must be a number of seconds or a pair (connect, read), not {timeout!r}")
    connect, read = timeout
    return urllib3.Timeout(connect=connect, read=read, total=left)


def _read_timeout(timeout: TimeoutLike, left: float) -> float | None:
    """Return how long each wait for a piece of the body may take."""
    limits = bounded(timeout, left)
    limits.start_connect()
    read = limits.read_timeout
    return None if read is None or read == inf else max(read, 0.001)  # 0 is "do not wait" to a socket


@final
class BodyTime:
    """The time that a body has: looked at before each wait for a piece of it, and the most that such a wait may take.

    :param late: makes the error for a body that is not there by then.
    """

    def __init__(self, deadline: float, late: Callable[[], Exception], timeout: TimeoutLike) -> None:
        self._deadline = deadline
        self._late = late
        self._timeout = timeout

    def watch(self, response: Response) -> None:
        """Look at the time while it is read: whoever reads it does so by `iter_content`."""
        known = weakref.ref(response)  # no cycle: the connection goes with the last one who has the response

        def iter_content(*args: Any, **options: Any) -> Iterator[Any]:
            response: Any = known()
            return self._checked(response, type(response).iter_content(response, *args, **options))

        response.iter_content = iter_content  # type: ignore[method-assign]

    def _checked(self, response: Response, pieces: Iterable[Any]) -> Iterator[Any]:
        self._begin_wait(response)
        try:
            for piece in pieces:
                yield piece
                self._begin_wait(response)
        except RequestsConnectionError as error:
            if has_timed_out(error):
                self._check()  # raises, if it was our time that is over
            raise
        vars(response).pop("iter_content", None)  # what has been read stays

    def _begin_wait(self, response: Response) -> None:
        if _is_complete(response):
            return
        try:
            self._check()
        except TimeoutExceeded:
            response.close()  # nobody will read on
            raise
        limit_wait(response, self._timeout, self._deadline - clock.now())

    def _check(self) -> None:
        if clock.now() >= self._deadline:
            raise self._late()


def limit_wait(response: Response, timeout: TimeoutLike, left: float) -> None:
    """Let the next wait for bytes take no longer than the user's timeout, and what is left, allow."""
    source = _socket_of(response.raw)
    if source is not None:
        source.settimeout(_read_timeout(timeout, left))


def _socket_of(raw: Any) -> Any:
    """Return the socket from which a body is read; None for none."""
    source = getattr(getattr(raw, "connection", None), "sock", None)
    if source is None:  # a connection that ends with this response: http.client has handed its socket to the reader
        reader = getattr(getattr(raw, "_fp", None), "fp", None)
        source = getattr(getattr(reader, "raw", None), "_sock", None)
    return source


def _is_complete(response: Response) -> bool:
    """Whether there is nothing left to wait for."""
    return getattr(response.raw, "length_remaining", None) == 0 or getattr(response.raw, "closed", True)


def attempt_is_late() -> DeadlineExceeded:
    """Return the error for a body that its attempt has no time left to read."""
    return DeadlineExceeded("the time that was left ran out while the body was read")


def has_timed_out(error: Exception) -> bool:
    """Whether a wait for the server took too long. Where a body is read, requests says so with a `ConnectionError`."""
    cause = error.args[0] if error.args else None
    if isinstance(cause, ProtocolError):  # "connection aborted", also by the timeout of a wait to send
        cause = cause.args[-1]
    return isinstance(error, RequestsTimeout) or (
        isinstance(error, RequestsConnectionError) and isinstance(cause, (ReadTimeoutError, TimeoutError))
    )
