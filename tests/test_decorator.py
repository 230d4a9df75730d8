"""Policies as decorators of functions, methods and other callables."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable
from typing import Any

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


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "a method": lambda policy, fn: policy(fn),
    "below classmethod": lambda policy, fn: classmethod(policy(fn)),
    "above classmethod": lambda policy, fn: policy(classmethod(fn)),
    "below staticmethod": lambda policy, fn: staticmethod(policy(fn)),
    "above staticmethod": lambda policy, fn: policy(staticmethod(fn)),
}


@pytest.mark.parametrize("form", FORMS)
async def test_methods_of_every_kind_can_be_decorated(world: World, clock: FakeClock, form: str) -> None:
    """Synchronous or not, called on the class and on an instance."""
    calls: list[Any] = []

    async def fn(*args: Any) -> Any:
        calls.append(args)
        if len(calls) % 2:
            raise Boom
        return args

    kind: Any = type("Service", (), {"method": FORMS[form](quick(), world.native(fn))})
    service = kind()
    first = (kind,) * ("class" in form) or (service,) * (form == "a method")
    assert await world.result(service.method(1)) == (*first, 1)
    assert await world.result(kind.method(*([service] if form == "a method" else []), 2)) == (*first, 2)
    assert calls == [(*first, 1)] * 2 + [(*first, 2)] * 2
    assert type(vars(kind)["method"]).__name__ in f"{form} function"


def test_a_decorated_abstract_method_stays_abstract() -> None:
    class Client(abc.ABC):
        @quick()
        @abc.abstractmethod
        def get(self) -> str: ...

    with pytest.raises(TypeError, match="abstract"):
        Client()  # type: ignore[abstract]
