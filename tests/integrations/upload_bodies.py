"""Bodies of requests that are no plain files or generators: streams of a few methods, a pipe, a slow file."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from tests.integrations.servers import PATIENCE

#: The content of each body.
ONCE = b"once"


class OnlyRead:
    """A length, and `read`: all that the encoder of `requests_toolbelt` has."""

    len = len(ONCE)

    def __init__(self) -> None:
        self._file = io.BytesIO(ONCE)

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)


class OnlySeek(OnlyRead):
    """Its position can be set, but not read."""

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(position, whence)


class SeekableStream(OnlySeek):
    """An object with the methods of a file, but of no type of files."""

    def tell(self) -> int:
        return self._file.tell()


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


def pipe() -> io.BufferedReader:
    return io.BufferedReader(Unsized())


async def pieces() -> AsyncIterator[bytes]:
    yield b"on"
    yield b"ce"


class SlowFile(io.BytesIO):
    """A file whose `read` calls `began`, and then waits for the test."""

    def __init__(self, data: bytes, began: Callable[[], object]) -> None:
        super().__init__(data)
        self._began = began
        self.may_continue = threading.Event()

    def read(self, size: int | None = -1) -> bytes:
        self._began()
        assert self.may_continue.wait(PATIENCE)
        return super().read(size)
