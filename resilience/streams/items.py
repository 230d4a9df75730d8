"""What the consumer of a stream has: an iterator, which it can close."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Generator
from typing import Any, Never, TypeVar, final

from typing_extensions import override

from resilience.runtimes.blocking import drive
from resilience.streams.driver import END, Driver, steps

T = TypeVar("T")


@final
class Stream(Generator[T, None, None]):
    """The items of a stream in blocking code. Close it where you do not consume it to its end."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @override
    def __next__(self) -> T:
        driver = self._driver
        if driver.take is None:
            item = drive(driver.pull())
        else:
            if driver.is_busy:
                driver.refuse()
            driver.is_busy, failed = True, None
            try:
                item = driver.take()
            except BaseException as error:
                failed = error
            driver.is_busy = False
            if failed is None and item is not END:
                driver.runtime.items += 1
                return item  # type: ignore[no-any-return]
            try:
                item = drive(driver.go_on(failed))
            finally:
                failed = None
        if item is END:
            raise StopIteration
        return item  # type: ignore[no-any-return]

    @override
    def send(self, value: None, /) -> T:
        _refuse_value("send", value)
        return next(self)

    @override
    def throw(self, *error: object) -> Never:
        raise TypeError("nothing can be thrown into a stream: close it")

    @override
    def close(self) -> None:
        """End the stream: give back what the policies hold, and close the source."""
        drive(self._driver.close())

    def __del__(self) -> None:
        """End a stream that was left behind, as a generator does."""
        self.close()


@final
class AsyncStream(AsyncGenerator[T, None]):
    """The items of a stream in tasks. Use `contextlib.aclosing` where you do not consume it to its end."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @override
    def __anext__(self) -> Awaitable[T]:  # type: ignore[override]
        return self._pull() if self._driver.take is None else _QuickPull(self._driver)

    async def _pull(self) -> T:
        item = await self._driver.pull()
        if item is END:
            raise StopAsyncIteration
        return item  # type: ignore[no-any-return]

    @override
    async def asend(self, value: None, /) -> T:
        _refuse_value("asend", value)
        return await self.__anext__()

    @override
    async def athrow(self, *error: object) -> Never:
        raise TypeError("nothing can be thrown into a stream: close it")

    @override
    async def aclose(self) -> None:
        """End the stream: give back what the policies hold, and close the source."""
        await self._driver.close()


@final
class _QuickPull:
    """The next item of a source that has brought one: straight from there, without a coroutine of ours."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __await__(self) -> Generator[Any, Any, Any]:
        driver, failed = self._driver, None
        if driver.is_busy:
            driver.refuse()
        driver.is_busy = True
        try:
            item = yield from steps(driver.run, driver.take())  # type: ignore[misc]
            if item is not END:
                driver.runtime.items += 1
                return item
        except StopAsyncIteration:
            pass
        except BaseException as error:
            failed = error
        finally:
            driver.is_busy = False
        try:
            return (yield from _after(driver, failed).__await__())
        finally:
            failed = None


async def _after(driver: Driver, error: BaseException | None) -> Any:
    """Return the next item after a quick pull that has brought none, but an error or the end of the source."""
    try:
        item = await driver.go_on(error)
    finally:
        error = None  # no cycle: error -> traceback -> this frame -> error
    if item is END:
        raise StopAsyncIteration
    return item


def _refuse_value(method: str, value: object) -> None:
    if value is not None:
        raise TypeError(f"{method}() of a stream takes no value: its source is called anew where it is repeated")
