"""Decorators and proxies keep the types of what they protect. Read by test_types.py; not run."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, assert_type

from resilience import CircuitBreaker, Fallback, Retry, Timeout
from tests.typing.execute import Client, aget, get

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


async def decorated() -> None:
    assert_type(plain("u", times=2), int)
    assert_type(await asynchronous("u", times=2), "int | None")
    assert_type(thrice("u"), int)
    assert_type(first([1]), int)
    assert_type(Retry()(get)("u", times=2), int)
    assert_type(Fallback(None)(get)("u"), "int | None")
    assert_type(await Retry()(aget)("u", times=2), int)
    assert_type(await Fallback(None)(aget)("u"), "int | None")
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


async def proxied() -> None:
    assert_type(Retry().proxy(Client()), Client)
    assert_type(Retry().proxy(Client(), "get", "aget"), Client)
    assert_type(Retry().proxy(Client()).get("u"), bytes)
    assert_type(Retry().aproxy(Client(), "later"), Client)
    assert_type(await Retry().aproxy(Client()).aget("u"), bytes)
    assert_type(await Fallback(None).wrap(Retry()).aproxy(Client()).later("u"), bytes)
