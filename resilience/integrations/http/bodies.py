"""Bodies of requests: which of them nothing would come out of any more."""

from __future__ import annotations

import inspect
import io
import os
import stat
from typing import Any


def is_used_up(source: Any, position: int | None = None) -> bool:
    """Whether a body was read to its end before: a generator that is over, a file that stands at its end.

    A client sends it as an empty body, and the server answers with 200. An empty file, and what cannot tell, are not
    used up. A file is sent from where it stands, or from a position to which the client winds it back.
    """
    if inspect.isgenerator(source):
        return source.gi_frame is None
    if inspect.isasyncgen(source):
        return source.ag_frame is None
    file = getattr(source, "file", source)  # a temporary file has one inside
    if not isinstance(file, (io.RawIOBase, io.BufferedIOBase, io.TextIOBase)):
        return False
    try:
        return 0 < _size(file) <= (file.tell() if position is None else position)
    except (OSError, ValueError):  # a pipe, a file that was closed
        return False


def _size(file: io.IOBase) -> int:
    """Return how much is in a file; 0 for what is neither in memory nor on a disk."""
    if isinstance(file, io.StringIO):
        return len(file.getvalue())
    if isinstance(file, io.BytesIO):
        return file.getbuffer().nbytes
    status = os.fstat(file.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
