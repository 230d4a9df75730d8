"""What a callable is: asynchronous, a generator, awaitable, and what it is called in a message."""

from __future__ import annotations

import asyncio
import functools
import inspect
import types
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest

from resilience.callables import (
    PLAIN,
    close_coroutine,
    is_awaitable,
    is_coroutine_function,
    is_generator_function,
    name_of,
    refuse_awaitable,
    refuse_plain,
)
from resilience.errors import AwaitableMisuse


def plain(*args: object) -> None: ...


async def coroutine(*args: object) -> None: ...


def generator(*args: object) -> Iterator[int]:
    yield 1


async def async_generator(*args: object) -> AsyncIterator[int]:
    yield 1


class Methods:
    def plain(self) -> None: ...

    async def coroutine(self) -> None: ...

    def generator(self) -> Iterator[int]:
        yield 1

    async def async_generator(self) -> AsyncIterator[int]:
        yield 1

    @classmethod
    async def of_class(cls) -> None: ...

    @staticmethod
    async def static() -> None: ...

    @classmethod
    def generator_of_class(cls) -> Iterator[int]:
        yield 1


class Called:
    def __call__(self) -> None: ...


class AsyncCalled:
    async def __call__(self) -> None: ...


class GeneratorCalled:
    def __call__(self) -> Iterator[int]:
        yield 1


class AsyncGeneratorCalled:
    async def __call__(self) -> AsyncIterator[int]:
        yield 1


class Iterates:
    """A class, which makes objects and no generator, though its objects are called as one."""

    def __call__(self) -> Iterator[int]:
        yield 1


class Awaitable:
    def __await__(self) -> Generator[Any, Any, str]:
        yield
        return "later"


if hasattr(inspect, "markcoroutinefunction"):

    @inspect.markcoroutinefunction
    def marked() -> Any:
        return coroutine()

    MARKED: list[Callable[..., Any]] = [marked]
else:
    MARKED = []

ASYNCHRONOUS: list[Callable[..., Any]] = [
    coroutine,
    Methods().coroutine,
    Methods.coroutine,
    Methods.of_class,
    Methods.static,
    AsyncCalled(),
    functools.partial(coroutine, 1),
    functools.partial(functools.partial(coroutine, 1), 2),
    functools.partial(Methods().coroutine),
    functools.partial(AsyncCalled()),
    AsyncMock(),
    *MARKED,
]

SYNCHRONOUS: list[Callable[..., Any]] = [
    plain,
    lambda: coroutine(),
    Methods().plain,
    Called(),
    functools.partial(plain, 1),
    len,
    [].append,
    dict,
    AsyncCalled,  # a class: calling it makes an object
    generator,
    async_generator,
    Mock(),
    MagicMock(),
    Mock(spec=plain),  # says that it is a function, and answers every question about its code with a mock
    MagicMock(spec=generator),
]

GENERATORS: list[Callable[..., Any]] = [
    generator,
    async_generator,
    Methods().generator,
    Methods().async_generator,
    Methods.generator,
    Methods.generator_of_class,
    GeneratorCalled(),
    AsyncGeneratorCalled(),
    functools.partial(generator),
    functools.partial(Methods().async_generator),
    functools.partial(GeneratorCalled()),
]

NO_GENERATORS: list[Callable[..., Any]] = [
    plain,
    coroutine,
    lambda: generator(),
    Methods().plain,
    Called(),
    AsyncCalled(),
    Iterates,
    len,
    dict,
    iter,
    functools.partial(plain),
    Mock(),
    AsyncMock(),
    Mock(spec=generator),
    MagicMock(spec=plain),
]


@pytest.mark.parametrize("fn", ASYNCHRONOUS, ids=name_of)
def test_what_gives_a_coroutine_is_a_coroutine_function(fn: Callable[..., Any]) -> None:
    """An `async def`, a method or partial of one, an object whose `__call__` is one, and what is marked as one."""
    assert is_coroutine_function(fn)


@pytest.mark.parametrize("fn", SYNCHRONOUS, ids=name_of)
def test_everything_else_is_a_plain_function(fn: Callable[..., Any]) -> None:
    """Also a lambda that returns a coroutine: only calling it would tell."""
    assert not is_coroutine_function(fn)


@pytest.mark.parametrize("fn", GENERATORS, ids=name_of)
def test_what_gives_a_generator_is_a_generator_function(fn: Callable[..., Any]) -> None:
    """Synchronous or not, in whatever it is wrapped."""
    assert is_generator_function(fn)


@pytest.mark.parametrize("fn", NO_GENERATORS, ids=name_of)
def test_what_gives_no_generator_is_no_generator_function(fn: Callable[..., Any]) -> None:
    """A function that returns somebody else's generator has done its own work when it returns."""
    assert not is_generator_function(fn)


def test_awaitables_are_known_by_what_await_takes() -> None:
    """Coroutines, futures, objects with `__await__`, and generators that are marked as coroutines."""

    @types.coroutine
    def old_style() -> Generator[Any, Any, None]:
        yield

    loop = asyncio.new_event_loop()
    it = coroutine()
    try:
        assert is_awaitable(it)
        assert is_awaitable(loop.create_future())
        assert is_awaitable(Awaitable())
        assert is_awaitable(old_style())
    finally:
        it.close()
        loop.close()


@pytest.mark.parametrize(
    "value", [None, 0, "", [], {}, object(), generator(), coroutine, Awaitable, Mock(), ...], ids=name_of
)
def test_other_values_are_no_awaitables(value: object) -> None:
    """A class with `__await__` is none, nor is a plain generator."""
    assert not is_awaitable(value)


def test_plain_types_really_have_no_await() -> None:
    """The short cut for the usual results must be true."""
    assert not any(hasattr(kind, "__await__") for kind in PLAIN)


def test_a_subclass_of_a_plain_type_may_be_awaitable() -> None:
    """The short cut looks at the exact type."""

    class Lazy(dict[str, int]):
        def __await__(self) -> Generator[Any, Any, int]:
            yield
            return 1

    assert is_awaitable(Lazy())


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (plain, "plain"),
        (Methods().plain, "Methods.plain"),
        (functools.partial(functools.partial(plain, 1), 2), "plain"),
        (Called(), "Called"),
        (len, "len"),
        (dict, "dict"),
    ],
    ids=name_of,
)
def test_a_callable_is_named_as_its_user_knows_it(fn: Callable[..., Any], name: str) -> None:
    """A partial by what it calls, an object by its class."""
    assert name_of(fn) == name


def test_the_refusal_of_an_awaitable_names_the_function_and_the_way_out() -> None:
    """And closes the coroutine, so that it is not reported as never awaited as well."""
    it = coroutine()
    error = refuse_awaitable(plain, it)
    assert isinstance(error, AwaitableMisuse)
    assert isinstance(error, TypeError)
    for word in ("plain", "aexecute", "acall"):
        assert word in str(error)
    assert inspect.getcoroutinestate(it) == inspect.CORO_CLOSED


def test_the_refusal_of_a_plain_value_names_the_function_its_result_and_the_way_out() -> None:
    """The other way round: awaiting what cannot be awaited."""
    error = refuse_plain(plain, 5)
    assert isinstance(error, TypeError)
    for word in ("plain", "int", "execute"):
        assert word in str(error)


def test_what_closes_like_a_coroutine_is_closed() -> None:
    """By duck type: aiohttp's requests are no coroutines, and warn all the same if they are dropped."""

    class Request:
        closed = False

        def send(self, value: object) -> None: ...

        def throw(self, error: BaseException) -> None: ...

        def close(self) -> None:
            self.closed = True

    request = Request()
    close_coroutine(request)
    assert request.closed


def test_somebodys_running_work_is_left_alone() -> None:
    """A Task or Future is not ours to end, nor is a file that happens to have `close`."""

    class File:
        def close(self) -> None:
            raise AssertionError("not ours to close")

    class Thrower(File):
        def throw(self, error: BaseException) -> None: ...

    class Socket(File):
        def send(self, data: bytes) -> None: ...

    async def main() -> str:
        task = asyncio.ensure_future(asyncio.sleep(0, "done"))
        future = asyncio.get_running_loop().create_future()
        close_coroutine(task)
        close_coroutine(future)
        assert not future.cancelled()
        return await task

    for resource in (File(), Thrower(), Socket()):
        close_coroutine(resource)
    close_coroutine(None)
    assert asyncio.run(main()) == "done"
