"""Bodies of requests that can be read only once without showing it, in all forms that users have."""

from __future__ import annotations

import io
import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tests.integrations.servers import PATIENCE

#: The content of each body.
ONCE = b"once"


class Slotted:
    """An iterator without support for weak references."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces = iter([b"on", b"ce"])

    def __iter__(self) -> Slotted:
        return self

    def __next__(self) -> bytes:
        return next(self._pieces)


class Asynchronous:
    """An asynchronous iterator that is not a generator."""

    def __init__(self) -> None:
        self._pieces = [b"ce", b"on"]

    def __aiter__(self) -> Asynchronous:
        return self

    async def __anext__(self) -> bytes:
        if not self._pieces:
            raise StopAsyncIteration
        return self._pieces.pop()


class Stream:
    """A stream that can only be read."""

    def __init__(self) -> None:
        self._file = io.BytesIO(ONCE)

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> bytes:
        if piece := self.read():
            return piece
        raise StopIteration


class SeekableStream(Stream):
    """An object with the methods of a file, but of no type of files."""

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(position, whence)

    def tell(self) -> int:
        return self._file.tell()


class OnlyRead:
    """A length, and `read`: all that the encoder of `requests_toolbelt` has."""

    len = len(ONCE)

    def __init__(self) -> None:
        self._file = io.BytesIO(ONCE)

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)


class OnlySeek(OnlyRead):
    """Its position can be set, but not read."""

    def seek(self, position: int) -> None:
        self._file.seek(position)


class Reader(OnlyRead):
    """A readable object that is neither a file nor an iterator, as the bodies of some clients are."""

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._file)


class Unsized(io.RawIOBase):
    """A file of unknown length, as a pipe is one."""

    def __init__(self) -> None:
        self._file = io.BytesIO(ONCE)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer)


class Spool(tempfile.SpooledTemporaryFile[bytes]):
    """A temporary file that closes itself, because no client does."""

    def __del__(self) -> None:
        self.close()


class RawPipe(io.FileIO):
    """The end of a pipe from which to read; it closes itself, too."""

    def __del__(self) -> None:
        self.close()


class Pipe(io.BufferedReader):
    """The same, buffered. In a reference cycle, either of the two may be finalized first."""

    def __del__(self) -> None:
        self.close()


def pipe() -> Pipe:
    reader, writer = os.pipe()
    os.write(writer, ONCE)
    os.close(writer)
    return Pipe(RawPipe(reader))


def spooled() -> Any:
    file = Spool()
    file.write(ONCE)
    file.seek(0)
    return file


#: Iterators that blocking clients take.
ITERATORS: dict[str, Callable[[], Any]] = {
    "iterator of a list": lambda: iter([b"on", b"ce"]),
    "map": lambda: map(bytes, [b"on", b"ce"]),
    "chain": lambda: itertools.chain([b"on"], [b"ce"]),
    "slots": Slotted,
    "stream": Stream,
}

#: Files in a wider sense, which are at their end after they were sent.
FILES: dict[str, Callable[[], Any]] = {
    "memory": lambda: io.BytesIO(ONCE),
    "buffered memory": lambda: io.BufferedReader(io.BytesIO(ONCE)),
    "spooled": spooled,
    "seekable stream": SeekableStream,
}


class SlowFile(io.BytesIO):
    """A file whose `read` waits for the test."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.is_read = threading.Event()
        self.may_continue = threading.Event()

    def read(self, size: int | None = -1) -> bytes:
        self.is_read.set()
        assert self.may_continue.wait(PATIENCE)
        return super().read(size)
