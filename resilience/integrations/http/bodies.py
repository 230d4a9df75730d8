"""Bodies of requests: which of them nothing would come out of any more.

A client sends such a body as an empty one, and the server answers with 200. A file tells whether it stands at its end,
and a generator whether it is over. Other iterators, and streams that cannot be wound back, tell nothing: of those, and
of generators that were sent in part, it is remembered that they were sent.
"""

from __future__ import annotations

import inspect
import io
import os
import stat
import threading
from typing import Any
from weakref import WeakValueDictionary

from resilience.callables import close_coroutine, is_awaitable


def is_used_up(source: Any, position: int | None = None) -> bool:
    """Whether a body was sent or read to its end before: a generator that is over, a file that stands at its end.

    An empty file, and what cannot tell, are not used up. A file is sent from where it stands, or from a position to
    which the client winds it back.
    """
    was_sent = source in _sent
    if inspect.isgenerator(source):
        return source.gi_frame is None or (was_sent and (source.gi_suspended or source.gi_running))
    if inspect.isasyncgen(source):
        has_begun = source.ag_running or getattr(source, "ag_suspended", True)  # Python 3.11 does not tell
        return source.ag_frame is None or (was_sent and has_begun)
    if was_sent:
        return True
    try:
        return _stands_at_its_end(_file_in(source), position)
    except (AttributeError, OSError, TypeError, ValueError):  # a pipe, a file that was closed, no file at all
        return False


def note_sent(source: Any) -> None:
    """Remember that a body is being sent, if it can be produced only once."""
    if _is_one_shot(source):
        _sent.add(source)


def forget_sent(source: Any) -> None:
    """Take that back: it turned out that nothing was sent."""
    _sent.discard(source)


# --- files -----------------------------------------------------------------------------------


def _file_in(source: Any) -> Any:
    """Return the file inside of what holds one: an asynchronous file of anyio, an upload, a temporary file."""
    for name in ("wrapped", "file"):
        source = getattr(source, name, source)
    return source


def _stands_at_its_end(file: Any, position: int | None) -> bool:
    size = _size(file)
    if size is not None:
        return 0 < size <= (file.tell() if position is None else position)
    if position is not None or is_seekable(file) is not True or not (here := file.tell()):
        return False
    if hasattr(file, "peek"):  # unpacked as it is read: the end would be far away
        return not file.peek(1)
    end = file.seek(0, os.SEEK_END)
    if end is None:
        end = file.tell()
    file.seek(here)
    return bool(end <= here)


def _size(file: Any) -> int | None:
    """Return how much is in a file; 0 for what has no size, None where it would have to be tried out."""
    while isinstance(file, (io.TextIOWrapper, io.BufferedReader, io.BufferedRandom)):
        file = file.buffer if isinstance(file, io.TextIOWrapper) else file.raw
    if isinstance(file, io.StringIO):
        return len(file.getvalue())
    if isinstance(file, io.BytesIO):
        return file.getbuffer().nbytes
    if not isinstance(file, io.FileIO):
        return None
    status = os.fstat(file.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def is_seekable(file: Any) -> bool | None:
    """Whether a file can be wound back; None for an asynchronous one, which would have to be awaited.

    That it has `seek` and `tell` says little: the body of a response has both.
    """
    if not hasattr(file, "seekable"):
        return hasattr(file, "seek")
    answer = file.seekable()
    if is_awaitable(answer):
        close_coroutine(answer)
        return None
    return bool(answer)


# --- what was sent ---------------------------------------------------------------------------


def _is_one_shot(source: Any) -> bool:
    if hasattr(source, "read") or hasattr(source, "aread"):
        return is_seekable(_file_in(source)) is False
    return hasattr(source, "__next__") or hasattr(source, "__anext__")


class _Sent:
    """Bodies by their identity, as not all of them can be hashed; and not all can be referred to weakly.

    Of those that cannot, as `map` and the iterator of a list, the last few are kept. Once they are used up they hold
    next to nothing.
    """

    MOST = 64

    def __init__(self) -> None:
        self._weakly: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._strongly: tuple[Any, ...] = ()
        self._lock = threading.Lock()

    def add(self, body: Any) -> None:
        try:
            self._weakly[id(body)] = body
        except TypeError:
            with self._lock:
                self._strongly = (*self._strongly[1 - self.MOST :], body)

    def discard(self, body: Any) -> None:
        if self._weakly.get(id(body), self) is body:
            self._weakly.pop(id(body), None)
        with self._lock:
            self._strongly = tuple(it for it in self._strongly if it is not body)

    def __contains__(self, body: Any) -> bool:
        return self._weakly.get(id(body), self) is body or any(it is body for it in self._strongly)


_sent = _Sent()
