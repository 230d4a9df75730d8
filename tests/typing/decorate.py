"""Decorators and proxies keep the types of what they protect. Read by test_types.py; not run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import cached_property
from typing import Any, Generic, NoReturn, ParamSpec, Self, TypeVar, assert_type, overload

from resilience import CircuitBreaker, Fallback, Policy, Retry, Timeout
from tests.typing.execute import Client, aget, get

P = ParamSpec("P")
T = TypeVar("T")


@Retry()
def plain(url: str, *, times: int = 1) -> int:
    return len(url) * times


@Fallback(None).wrap(Retry(), Timeout(1.0))
async def asynchronous(url: str, *, times: int = 1) -> int:
    return len(url) * times


@Retry()
@Timeout(1.0)
@CircuitBreaker()
def thrice(url: str) -> int:
    return len(url)


@Retry()
def first(items: Sequence[T]) -> T:
    return items[0]


class Service:
    @Retry()
    def method(self, x: int) -> str:
        return str(x)

    @Fallback(None)
    def answered(self, x: int) -> str:
        return str(x)

    @Retry()
    async def amethod(self, x: int) -> str:
        return str(x)

    @classmethod
    @Retry()
    def below_class(cls, x: int) -> str:
        return str(x)

    @Retry()
    @classmethod
    def above_class(cls, x: int) -> str:
        return str(x)

    @staticmethod
    @Retry()
    def below_static(x: int) -> str:
        return str(x)

    @Retry()
    @staticmethod
    def above_static(x: int) -> str:
        return str(x)

    @Fallback(None)
    @staticmethod
    def answered_static(x: int) -> str:
        return str(x)

    @Fallback(None)
    @classmethod
    async def answered_class(cls, x: int) -> str:
        return str(x)

    @property
    @Fallback(None)
    def size(self) -> int:
        return 1

    @cached_property
    @Retry()
    def name(self) -> str:
        return ""

    @Fallback(None)
    def itself(self) -> Self:
        return self


class Box(Generic[T]):
    def __init__(self, item: T) -> None:
        self.item = item

    @Fallback(None)
    def get(self) -> T:
        return self.item

    @Retry()
    async def aget(self) -> T:
        return self.item


@overload
def doubled(x: int) -> int: ...
@overload
def doubled(x: str) -> str: ...
def doubled(x: Any) -> Any:
    return x * 2


@Retry()
def stops() -> NoReturn:
    raise SystemExit


# --- decorators of the user's own, around a policy -------------------------------------------


def retried(fn: Callable[P, T]) -> Callable[P, T]:
    return Retry()(fn)


def or_none(fn: Callable[P, T]) -> Callable[P, T | None]:
    return Fallback(None)(fn)


def later_or_none(fn: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T | None]]:
    return Fallback(None)(fn)


def named(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    def decorate(fn: Callable[P, T]) -> Callable[P, T]:
        return Policy.wrap(Retry(), name=name)(fn)

    return decorate


def called(fn: Callable[P, T]) -> Callable[P, T]:
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return Retry().call(fn, *args, **kwargs)

    return run


def awaited(fn: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T | None]]:
    async def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return await Fallback(None).acall(fn, *args, **kwargs)

    return run


async def through_own_decorators() -> None:
    assert_type(retried(get)("u", times=2), int)
    assert_type(await retried(aget)("u", times=2), int)
    assert_type(or_none(get)("u", times=2), "int | None")
    assert_type(await later_or_none(aget)("u", times=2), "int | None")
    assert_type(named("n")(get)("u", times=2), int)
    assert_type(called(get)("u", times=2), int)
    assert_type(await awaited(aget)("u", times=2), "int | None")


async def decorated() -> None:
    assert_type(plain("u", times=2), int)
    assert_type(await asynchronous("u", times=2), "int | None")
    assert_type(thrice("u"), int)
    assert_type(first([1]), int)
    assert_type(Retry()(get)("u", times=2), int)
    assert_type(Fallback(None)(get)("u"), "int | None")
    assert_type(await Retry()(aget)("u", times=2), int)
    assert_type(await Fallback(None)(aget)("u"), "int | None")
    assert_type(Retry()(doubled)("a"), str)
    assert_type(Retry().call(doubled, 1), int)
    assert_type(stops, Callable[[], NoReturn])
    callback: Callable[[str], int] = thrice
    later: Callable[[str], Coroutine[Any, Any, int]] = Retry()(aget)
    print(callback, later)


async def methods(service: Service) -> None:
    assert_type(service.method(1), str)
    assert_type(Service.method(service, 1), str)
    assert_type(service.answered(1), "str | None")
    assert_type(await service.amethod(1), str)
    assert_type(Service.below_class(1), str)
    assert_type(Service.above_class(1), str)
    assert_type(service.above_class(1), str)
    assert_type(Service.below_static(1), str)
    assert_type(Service.above_static(1), str)
    assert_type(Service.answered_static(1), "str | None")
    assert_type(await Service.answered_class(1), "str | None")
    assert_type(service.size, "int | None")
    assert_type(service.name, str)
    assert_type(service.itself(), "Service | None")
    assert_type(Box(1).get(), "int | None")
    assert_type(await Box(1).aget(), int)


async def proxied() -> None:
    assert_type(Retry().proxy(Client()), Client)
    assert_type(Retry().proxy(Client(), "get", "aget"), Client)
    assert_type(Retry().proxy(Client()).get("u"), bytes)
    assert_type(Retry().aproxy(Client(), "later"), Client)
    assert_type(await Retry().aproxy(Client()).aget("u"), bytes)
    assert_type(await Fallback(None).wrap(Retry()).aproxy(Client()).later("u"), bytes)
