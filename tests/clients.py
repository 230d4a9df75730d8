"""The clients that the tests of proxies wrap."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, ClassVar

import anyio

from tests.conftest import Boom


class Client:
    """A client that fails `failures` times, and records its calls."""

    retries: ClassVar[int] = 0

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.calls: list[Any] = []
        self.touched: list[str] = []
        self.on_request = lambda url: self._note("on_request", url)

    def _note(self, name: str, argument: Any) -> str:
        self.calls.append((name, argument))
        if self.failures > 0:
            self.failures -= 1
            raise Boom(name)
        return f"{name} {argument}"

    def get(self, url: str, *, params: str = "") -> str:
        """Get one thing."""
        return self._note("get", url + params)

    def get_twice(self, url: str) -> list[str]:
        return [self.get(url), self.get(url)]

    async def fetch(self, url: str) -> str:
        """Get one thing asynchronously."""
        await anyio.sleep(0)
        return self._note("fetch", url)

    def later(self, url: str) -> Awaitable[str]:
        """Return an awaitable, from a plain method."""
        return self.fetch(url)

    def _hidden(self, url: str) -> str:
        return self._note("hidden", url)

    def pages(self, url: str) -> Iterator[str]:
        yield self._note("pages", url)

    async def apages(self, url: str) -> AsyncIterator[str]:
        yield self._note("apages", url)

    @classmethod
    def of_class(cls, x: int) -> tuple[type, int]:
        return cls, x

    @staticmethod
    def static(x: int) -> int:
        return 2 * x

    partial = functools.partialmethod(get, params="?partial")

    class Options:
        """A nested class, which is not a method."""

    @property
    def state(self) -> str:
        self.touched.append("state")
        return "connected"

    @property
    def broken(self) -> str:
        raise AssertionError("this property must not be read")

    @functools.cached_property
    def connection(self) -> Callable[[], str]:
        self.touched.append("connection")
        return lambda: "connected"
