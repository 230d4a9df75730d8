"""Bodies of requests. A body in memory, or one that can be rewound, may be sent again; any other body is sent once.

Bytes, text and re-iterable objects are in memory. A file is rewound to its position at the start. A generator, a pipe
or another stream is empty the second time: a client would send an empty body, and the server would answer 200.

An abandoned attempt in a thread may still be reading a file. If the file were rewound meanwhile, both attempts would
send parts of it. So a file is rewound only if it was read to its end, or if no attempt is reading it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, Final, final

from resilience.callables import close_coroutine
from resilience.integrations.http.rules import NotRepeatable

#: Types of bodies that are in memory.
_PLAIN: Final = (type(None), bytes, str, bytearray, memoryview)

_STREAM_METHODS: Final = ("read", "aread", "__next__", "__anext__")


@final
class Body:
    """What a client reads while it sends a request.

    :param sources: the parts, each in memory, a file, or a stream.
    :param start: the position to which files are rewound; by default the current position of each.
    :param once: whether the body can be sent only once, regardless of its parts.
    :raises NotRepeatable: for a part that was sent before, and can be sent only once.
    """

    __slots__ = ("_files", "_lock", "_readers", "can_be_sent_again")

    def __init__(self, *sources: Any, start: object = None, once: bool = False) -> None:
        self.can_be_sent_again: bool = not once
        self._files: list[tuple[Any, Any, Any]] = []  # each with the positions of its start and its end
        self._lock = threading.RLock()  # reentrant: a finalizer may run while it is held
        self._readers = 0
        for source in sources:
            if isinstance(source, OneShot):
                source.refuse_if_begun("the request was not sent: ")
                self.can_be_sent_again = False
            elif not isinstance(source, _PLAIN) and any(hasattr(source, name) for name in _STREAM_METHODS):
                self._add(source, start)

    def _add(self, source: Any, start: object) -> None:
        bounds = _bounds(source)
        if bounds is None:
            self.can_be_sent_again = False
        else:
            self._files.append((source, bounds[0] if start is None else start, bounds[1]))

    @property
    def start(self) -> Any:
        """The position to which the body is rewound, if it is a file; None if it is not."""
        return self._files[0][1] if self._files else None

    @property
    def why_not_now(self) -> str | None:
        """Why no attempt may begin: another one is running that has not read every file to its end. None if one may."""
        if self._readers > 0 and any(_position(file) != end for file, _, end in self._files):
            return "its body is still being read by an earlier attempt"
        return None

    def begin(self) -> None:
        """Rewind all files for an attempt that is about to read them.

        :raises NotRepeatable: if another attempt is reading them.
        """
        if self._files:
            with self._lock:
                if (reason := self.why_not_now) is not None:
                    raise NotRepeatable(f"the request was not sent again: {reason}")
                self._readers += 1
                for file, start, _ in self._files:
                    file.seek(start)

    def end(self) -> None:
        """Note that an attempt has stopped reading."""
        if self._files:
            with self._lock:
                self._readers -= 1


#: A body in memory, which most requests have.
IN_MEMORY: Final = Body()


def body_of(source: Any, start: object = None) -> Body:
    """Return a body that consists of one part. For the parameters, see `Body`."""
    return IN_MEMORY if isinstance(source, _PLAIN) else Body(source, start=start)


class OneShot:
    """A wrapper for a stream as the body of a request, which raises `NotRepeatable` if it is sent a second time.

    It replaces the stream in the client's request, because a client that follows a redirect or answers a challenge
    sends the same body in another request.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._was_begun = False

    @classmethod
    def of(cls, source: Any) -> OneShot:
        """Wrap a stream, unless it is wrapped already."""
        return source if isinstance(source, OneShot) else cls(source)

    def refuse_if_begun(self, what: str = "") -> None:
        """Raise `NotRepeatable` if the stream, or a part of it, was sent before."""
        if self._was_begun:
            raise NotRepeatable(f"{what}its body was used up before, and can be sent only once")

    def _begin(self) -> Any:
        self.refuse_if_begun()
        self._was_begun = True  # set with the first item, and not by `iter()`, which clients call before they connect
        return self._source

    def __iter__(self) -> Iterator[Any]:
        source = self._begin()
        read = getattr(source, "read", None)
        yield from source if read is None else iter(partial(read, 65536), b"")

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for piece in self._begin():
            yield piece


def _bounds(file: Any) -> tuple[Any, Any] | None:
    """Return the current position of a file and that of its end; None if it cannot be rewound.

    A method `seek` does not prove that it can: the body of a response has one, too.
    """
    try:
        if hasattr(file, "seekable") and not _int_of(file.seekable):
            return None
        here = _int_of(file.tell)
        if here is None:
            return None
        file.seek(0, os.SEEK_END)
        end = file.tell()
        file.seek(here)
    except (AttributeError, OSError, TypeError, ValueError):
        return None
    return here, end


def _int_of(method: Callable[[], object]) -> int | None:
    """Call a method of a file. Return its integer or flag; None if it would have to be awaited."""
    result = method()
    if isinstance(result, int):
        return result
    close_coroutine(result)
    return None


def _position(file: Any) -> object:
    try:
        return file.tell()
    except (OSError, ValueError):  # the file was closed, or is being iterated
        return None
