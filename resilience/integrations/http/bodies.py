"""Bodies of requests, and one rule: what is in memory or can be rewound may be sent again, all else is sent once.

Bytes, text and what can be iterated anew are in memory. A file is rewound to where it stood. Of a generator, a pipe or
another stream nothing is left the second time: a client would send an empty body, and the server would answer 200.

An abandoned attempt in a thread may still be reading a file. If the file were rewound meanwhile, both attempts would
send parts of it. So a file is rewound only when it was read to its end, or when no attempt reads it any more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, Final, final

from resilience.callables import close_coroutine
from resilience.integrations.http.rules import NotRepeatable

#: Bodies of which there is nothing to ask.
_PLAIN: Final = (type(None), bytes, str, bytearray, memoryview)

_STREAMS: Final = ("read", "aread", "__next__", "__anext__")


@final
class Body:
    """What a client reads while it sends a request.

    :param sources: the parts, each in memory, a file, or a stream.
    :param start: where a file is rewound to, if not to where it stands now.
    :param once: whether it can be sent only once, whatever it looks like.
    :raises NotRepeatable: for a part that was sent before, and can be sent only once.
    """

    __slots__ = ("_files", "_lock", "_readers", "can_be_sent_again")

    def __init__(self, *sources: Any, start: object = None, once: bool = False) -> None:
        self.can_be_sent_again: bool = not once
        self._files: list[tuple[Any, Any, Any]] = []  # with where to rewind each, and where it ends
        self._lock = threading.Lock()
        self._readers = 0
        for source in sources:
            if isinstance(source, Once):
                source.refuse_if_begun("the request was not sent: ")
                self.can_be_sent_again = False
            elif not isinstance(source, _PLAIN) and any(hasattr(source, name) for name in _STREAMS):
                self._add(source, start)

    def _add(self, source: Any, start: object) -> None:
        bounds = _bounds(source)
        if bounds is None:
            self.can_be_sent_again = False
        else:
            self._files.append((source, bounds[0] if start is None else start, bounds[1]))

    @property
    def start(self) -> Any:
        """Where the file is rewound to that is the body; None if it is none."""
        return self._files[0][1] if self._files else None

    @property
    def is_being_read(self) -> bool:
        """Whether an attempt that has not ended is in the middle of a file."""
        return self._readers > 0 and any(_position(file) != end for file, _, end in self._files)

    def begin(self) -> None:
        """Rewind all files, for an attempt that is about to read them.

        :raises NotRepeatable: if another attempt is reading them.
        """
        if self._files:
            with self._lock:
                if self.is_being_read:
                    raise NotRepeatable(f"the request was not sent again: {STILL_READ}")
                self._readers += 1
                for file, start, _ in self._files:
                    file.seek(start)

    def end(self) -> None:
        """Say that an attempt reads no more."""
        if self._files:
            with self._lock:
                self._readers -= 1


STILL_READ: Final = "its body is still being read by an earlier attempt"

#: The most usual one.
IN_MEMORY: Final = Body()


def body_of(source: Any, start: object = None) -> Body:
    """Return the body that is this one part. For the parameters, see `Body`."""
    return IN_MEMORY if isinstance(source, _PLAIN) else Body(source, start=start)


class Once:
    """A stream as the body of a request, that refuses to be sent a second time.

    It stands in the client's own request in the place of the stream, because the client sends the same body in
    another request where it follows a redirect, or answers a challenge.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._was_begun = False

    @classmethod
    def of(cls, source: Any) -> Once:
        """Return a stream as this, which it may be already."""
        return source if isinstance(source, Once) else cls(source)

    def refuse_if_begun(self, what: str = "") -> None:
        """Raise `NotRepeatable` if it was sent, or a part of it."""
        if self._was_begun:
            raise NotRepeatable(f"{what}its body was used up before, and can be sent only once")

    def _begin(self) -> Any:
        self.refuse_if_begun()
        self._was_begun = True  # not in `__iter__` itself: clients call that before they connect
        return self._source

    def __iter__(self) -> Iterator[Any]:
        source = self._begin()
        read = getattr(source, "read", None)
        yield from source if read is None else iter(partial(read, 65536), b"")

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for piece in self._begin():
            yield piece


def _bounds(file: Any) -> tuple[Any, Any] | None:
    """Return where a file stands and where it ends; None if it cannot be rewound.

    That it has `seek` says little: the body of a response has it, too.
    """
    try:
        if hasattr(file, "seekable") and not _answer(file.seekable):
            return None
        here = _answer(file.tell)
        if here is None:
            return None
        file.seek(0, os.SEEK_END)
        end = file.tell()
        file.seek(here)
    except (AttributeError, OSError, TypeError, ValueError):
        return None
    return here, end


def _answer(method: Callable[[], object]) -> int | None:
    """Return what a file answers; None where it would have to be awaited."""
    answer = method()
    if isinstance(answer, int):
        return answer
    close_coroutine(answer)
    return None


def _position(file: Any) -> object:
    try:
        return file.tell()
    except (OSError, ValueError):  # it was closed, or is being iterated
        return None
