"""The iterators of a stream, which its consumer can close."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, Never, Self, TypeVar, cast, final

from typing_extensions import override

from resilience.runtimes.driving import drive
from resilience.streams.driver import Driver
from resilience.streams.pulls import END, Item

T = TypeVar("T")

_NO_SEND = "a stream takes no value, because its source is called again if it is retried: use `next` or `anext`"
_NO_THROW = "nothing can be thrown into a stream: close it"
_NO_COPY = "a stream cannot be copied or pickled, because each of its items is delivered once"


@final
class Stream(chain[T], Generator[T, None, None]):
    """The items of a stream in blocking code. Close it if you do not consume it to its end.

    It is a `chain` of generators, because `for` calls the `__next__` of that class without a frame of Python, which
    takes a third less time for each item. There is only one, unless an interrupt between two items ends it.
    """

    __slots__ = ("_driver",)

    _driver: Driver

    def __new__(cls, driver: Driver) -> Self:
        """Make the stream of a driver."""
        stream = cast("Self", super().from_iterable(iter(partial(_generator, driver), None)))
        stream._driver = driver
        return stream

    @override
    def send(self, value: object, /) -> Never:
        raise TypeError(_NO_SEND)

    @override
    def throw(self, *error: object) -> Never:
        raise TypeError(_NO_THROW)

    @override
    def close(self) -> None:
        """End the stream: let the policies release what they hold, and close the source."""
        drive(self._driver.close())

    def __enter__(self) -> Self:
        """Return the stream, and close it after the block, as the streams of many clients do."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @override
    def __reduce__(self) -> Never:
        raise TypeError(_NO_COPY)

    def __del__(self) -> None:
        """Close a stream that is garbage-collected, as generators do."""
        self.close()


def _generator(driver: Driver) -> Generator[Any, None, None] | None:
    """Return a generator of the items that are left; None after the end of the stream."""
    return None if driver.is_over else _pulled(driver)


def _pulled(driver: Driver) -> Generator[Any, None, None]:
    while True:
        if driver.is_busy:  # there are two generators, or another thread closes the stream
            driver.refuse()
        try:
            driver.is_busy = True
            item = driver.pull()
        except BaseException as error:
            failed = error
        else:
            driver.is_busy = False
            yield item
            continue
        try:
            item = driver.step(failed)
        finally:
            driver.is_busy = False
            del failed  # no cycle: error -> traceback -> this frame -> error
        if item is END:
            return
        yield item


@final
class AsyncStream(AsyncGenerator[T, None]):
    """The items of a stream in tasks. Use `contextlib.aclosing` if you do not consume it to its end."""

    __slots__ = ("__weakref__", "_driver", "_finalizer")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._finalizer: Callable[[AsyncGenerator[Any, Any]], object] | None = None

    @override
    async def __anext__(self) -> T:
        driver, failed = self._driver, None
        if driver.is_busy:
            driver.refuse()
        try:
            driver.is_busy = True
            try:
                out = driver.pull()
                if type(out) is Item:
                    return out.value  # type: ignore[no-any-return]
            except BaseException as error:
                failed = error
            if self._finalizer is None:
                first_iteration, self._finalizer = sys.get_asyncgen_hooks()
                if first_iteration is not None:
                    first_iteration(self)
            item = await driver.wait(out if failed is None else driver.step(failed))
        finally:
            driver.is_busy = False
            failed = None  # no cycle: error -> traceback -> this frame -> error
        if item is END:
            raise StopAsyncIteration
        return item.value  # type: ignore[no-any-return]

    def __await__(self) -> Generator[Never, None, Self]:
        """Return the stream: a client's coroutine function, for which this may stand, is awaited to get one."""
        yield from ()
        return self

    @override
    async def asend(self, value: object, /) -> Never:
        raise TypeError(_NO_SEND)

    @override
    async def athrow(self, *error: object) -> Never:
        raise TypeError(_NO_THROW)

    @override
    async def aclose(self) -> None:
        """End the stream: let the policies release what they hold, and close the source."""
        await self._driver.close()

    async def __aenter__(self) -> Self:
        """Return the stream, and close it after the block, as the streams of many clients do."""
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    @override
    def __reduce__(self) -> Never:
        raise TypeError(_NO_COPY)

    def __del__(self) -> None:
        """Let the event loop close a stream that is garbage-collected, as asynchronous generators do (PEP 525)."""
        finalizer = self._finalizer
        if finalizer is None or self._driver.is_over:
            return
        closed: AsyncGenerator[Any, Any] = self
        is_in_its_loop = sys.get_asyncgen_hooks().finalizer == finalizer
        if is_in_its_loop:
            closed = _closing(self._driver)
            with suppress(StopIteration):
                closed.__anext__().__await__().send(None)
        with suppress(RuntimeError):  # the run of trio is over
            finalizer(closed)


async def _closing(driver: Driver) -> AsyncGenerator[None, None]:
    """Close a stream when this generator, which has begun, is closed.

    At the end of its run, a loop cancels the task that closes a stream, perhaps before its first step. Then nothing of
    an `aclose()` of ours would run, but the `finally` of a generator does.
    """
    try:
        yield
    finally:
        await driver.close()
