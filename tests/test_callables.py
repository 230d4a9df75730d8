"""How a policy classifies the callables it decorates: asynchronous, plain, or generator functions, which it refuses."""

from __future__ import annotations

import asyncio
import functools
import inspect
import types
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock, create_autospec

import pytest

from resilience import Retry
from resilience.callables import is_coroutine_function, is_generator_function
from tests.conftest import World, shown
from tests.functions import coroutine


def plain(*args: object) -> None: ...


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


class Awaitable:
    def __await__(self) -> Generator[Any, Any, str]:
        yield
        return "later"


class Lazy(dict[str, int]):
    """An awaitable of a type whose instances usually are not awaitable."""

    def __await__(self) -> Generator[Any, Any, int]:
        yield
        return 1


class Owned(Awaitable):
    """An awaitable that has an owner and must not be closed."""

    def close(self) -> None:
        raise AssertionError("closed")


@types.coroutine
def old_style() -> Generator[Any, Any, None]:
    yield


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
    create_autospec(coroutine),
    create_autospec(Methods()).coroutine,
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
    AsyncCalled,  # a class: calling it makes an instance
    Mock(),
    MagicMock(),
    create_autospec(plain),
    lambda: generator(),  # its own work is done when it returns the generator
    GeneratorCalled,  # calling the class makes an instance
    iter,
]

GENERATORS: list[Callable[..., Any]] = [
    *(generator, async_generator, Methods().generator, Methods().async_generator, Methods.generator),
    *(Methods.generator_of_class, GeneratorCalled(), AsyncGeneratorCalled(), functools.partial(generator)),
    *(functools.partial(Methods().async_generator), functools.partial(GeneratorCalled())),
]


@pytest.mark.parametrize("fn", ASYNCHRONOUS, ids=shown)
def test_a_callable_that_returns_a_coroutine_is_decorated_as_a_coroutine_function(fn: Callable[..., Any]) -> None:
    """An `async def`, a method or partial of one, an object whose `__call__` is one, and functions marked as one."""
    assert inspect.iscoroutinefunction(Retry()(fn))


@pytest.mark.parametrize("fn", SYNCHRONOUS, ids=shown)
def test_other_callables_are_decorated_as_plain_functions(fn: Callable[..., Any]) -> None:
    """Also a lambda that returns a coroutine, which only a call would show, and classes."""
    assert not is_coroutine_function(fn)
    if not isinstance(fn, type):
        assert not inspect.iscoroutinefunction(Retry()(fn))


@pytest.mark.parametrize("mock", [Mock(spec=plain), MagicMock(spec=generator)], ids=shown)
def test_a_mock_of_a_function_is_a_plain_function(mock: Mock) -> None:
    """It passes for a function, but attributes of its code are mocks."""
    assert Retry().call(mock) is mock.return_value
    assert not is_generator_function(mock)


@pytest.mark.parametrize("fn", GENERATORS, ids=shown)
def test_a_generator_function_is_refused(fn: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="is a generator function"):
        Retry()(fn)


@pytest.mark.parametrize("make", [Awaitable, Lazy, Owned, old_style], ids=shown)
def test_an_awaitable_is_no_result_of_blocking_code(make: Callable[..., Any]) -> None:
    """Objects with `__await__`, and generators marked as coroutines."""
    with pytest.raises(TypeError, match="acall"):
        Retry().call(lambda: make())


async def test_a_task_or_future_is_no_result_and_is_not_closed(in_asyncio: World) -> None:
    """Its work is going on elsewhere."""
    task = asyncio.create_task(asyncio.sleep(0, "done"))
    future = asyncio.get_running_loop().create_future()
    for awaitable in (task, future):
        with pytest.raises(TypeError, match="acall"):
            Retry().call(lambda awaitable=awaitable: awaitable)
    assert not future.done()
    assert await task == "done"


@pytest.mark.parametrize("methods", ["send throw close", "close", "send close", "throw close", "send throw", "send"])
def test_only_an_awaitable_that_is_like_a_coroutine_is_closed(methods: str) -> None:
    """As the requests of aiohttp, which warn if they are dropped. A connection with `close` may be used again."""
    called: list[str] = []
    noting = {name: lambda self, name=name: called.append(name) for name in methods.split()}
    refused = type("Refused", (Awaitable,), noting)()
    with pytest.raises(TypeError, match="acall"):
        Retry().call(lambda: refused)
    assert called == (["close"] if methods == "send throw close" else [])


@pytest.mark.parametrize(
    "value", [None, 0, "", [], {}, object(), generator(), coroutine, Awaitable, Mock(), ...], ids=shown
)
def test_any_other_value_is_a_result(value: object) -> None:
    """A class with `__await__` is no awaitable, nor is a plain generator."""
    assert Retry().call(lambda: value) is value
