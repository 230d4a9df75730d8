"""Policies as decorators of functions, methods and other callables."""

from __future__ import annotations

import abc
import functools
import inspect
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from tests.conftest import Boom, FakeClock, Script, World
from tests.functions import quick


def test_a_decorated_function_keeps_its_name_docstring_and_signature() -> None:
    def fetch(url: str, *, limit: int = 3) -> list[str]:
        """Fetch the url."""
        return [url] * limit

    fetch.route = "/fetch"  # type: ignore[attr-defined]

    async def afetch(url: str, *, limit: int = 3) -> list[str]:
        """Fetch the url."""
        return [url] * limit

    for function in (fetch, afetch):
        wrapped = quick()(function)
        assert wrapped.__name__ == function.__name__
        assert wrapped.__qualname__ == function.__qualname__
        assert wrapped.__module__ == __name__
        assert wrapped.__doc__ == "Fetch the url."
        assert inspect.signature(wrapped) == inspect.signature(function)
        assert wrapped.__annotations__ == function.__annotations__
        assert wrapped.__wrapped__ is function  # type: ignore[union-attr]
    assert quick()(fetch).route == "/fetch"  # type: ignore[attr-defined]


async def test_each_call_of_a_decorated_function_is_an_execution(world: World, clock: FakeClock) -> None:
    script = Script(Boom(), "one", Boom(), Boom(), "two")

    async def fetch(word: str) -> str:
        return word + await script.function()()

    decorated = quick()(world.native(fetch))

    assert await world.result(decorated(">")) == ">one"
    assert await world.result(decorated(word=">")) == ">two"
    assert script.calls == 5


def test_a_decorated_function_takes_arguments_of_any_name() -> None:
    @quick()
    def fn(self: int, fn: int, ctx: int, policy: int, *, call: int, args: int, kwargs: int) -> tuple[int, ...]:
        return self, fn, ctx, policy, call, args, kwargs

    assert fn(self=1, fn=2, ctx=3, policy=4, call=5, args=6, kwargs=7) == (1, 2, 3, 4, 5, 6, 7)


async def test_methods_of_every_kind_can_be_decorated(tasks_world: World, clock: FakeClock) -> None:
    """Above and below `staticmethod` and `classmethod`, synchronous or not, called on the class and on an instance."""

    class Service:
        calls = 0

        @quick()
        def method(self, x: int) -> Any:
            Service.calls += 1
            if Service.calls == 1:
                raise Boom
            return self, x

        @quick()
        async def amethod(self, x: int) -> Any:
            return self, x

        @classmethod
        @quick()
        def below_class(cls, x: int) -> Any:
            return cls, x

        @quick()
        @classmethod
        def above_class(cls, x: int) -> Any:
            return cls, x

        @quick()
        @classmethod
        async def above_aclass(cls, x: int) -> Any:
            return cls, x

        @staticmethod
        @quick()
        def below_static(x: int) -> Any:
            return x

        @quick()
        @staticmethod
        def above_static(x: int) -> Any:
            return x

        @quick()
        @staticmethod
        async def above_astatic(x: int) -> Any:
            return x

    service = Service()
    assert service.method(1) == (service, 1)
    assert Service.calls == 2
    assert Service.method(service, 2) == (service, 2)
    for owner in (Service, service):
        assert owner.below_class(3) == owner.above_class(3) == (Service, 3)
        assert owner.below_static(4) == owner.above_static(4) == 4
    assert isinstance(vars(Service)["above_class"], classmethod)
    assert isinstance(vars(Service)["above_static"], staticmethod)

    assert [await service.amethod(5), await Service.above_aclass(6), await service.above_astatic(7)] == [
        (service, 5),
        (Service, 6),
        7,
    ]


def test_a_decorated_abstract_method_stays_abstract() -> None:
    class Client(abc.ABC):
        @quick()
        @abc.abstractmethod
        def get(self) -> str: ...

    with pytest.raises(TypeError, match="abstract"):
        Client()  # type: ignore[abstract]


async def test_callables_without_a_name_can_be_decorated(tasks_world: World) -> None:
    """Objects, partials, built-in functions, classes, mocks."""

    class Adder:
        def __call__(self, x: int) -> int:
            return x + 1

    class LaterAdder:
        async def __call__(self, x: int) -> int:
            return x + 1

    async def add(x: int, y: int) -> int:
        return x + y

    assert quick()(Adder())(1) == 2
    assert quick()(functools.partial(max, 3))(1) == 3
    assert quick()(len)("four") == 4
    assert quick().call(dict, a=1) == {"a": 1}
    assert quick()(Mock(return_value="mocked"))() == "mocked"

    two, three, _ = [
        await quick()(LaterAdder())(1),
        await quick()(functools.partial(add, 1))(2),
        await quick()(AsyncMock())(),
    ]
    assert (two, three) == (2, 3)
    assert inspect.iscoroutinefunction(quick()(LaterAdder()))
