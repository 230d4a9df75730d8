"""Streams, and policies that look at the call, keep the types of what they protect. Read by test_types.py; not run."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Hashable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from typing import Any, assert_type

from resilience import (
    Bulkhead,
    Cache,
    CircuitBreaker,
    CircuitState,
    Context,
    Fallback,
    Keyed,
    Pipeline,
    Policy,
    Retry,
    SingleFlight,
)
from resilience.integrations.http import PerHost, standard
from resilience.streams.iterators import AsyncStream, Stream
from resilience.work import Once
from tests.typing.execute import Client, aget, get

streaming = Retry().streaming(first=20.0, idle=10, resume={"after": lambda item: item})


@streaming
def generator(start: int, *, after: int = 0) -> Generator[int, None, None]:
    yield start + after


@streaming
def iterator(start: int) -> Iterator[int]:
    yield start


@streaming
async def async_generator(start: int) -> AsyncGenerator[int, None]:
    yield start


@streaming
async def async_iterator(start: int) -> AsyncIterator[int]:
    yield start


async def coroutine(start: int) -> AsyncIterator[int]:
    return async_iterator(start)


def plain(start: int) -> list[str]:
    return [str(start)]


def returns_async(start: int) -> AsyncIterator[int]:
    return async_iterator(start)


@contextmanager
def opened(start: int) -> Generator[list[int]]:
    yield [start]


@asynccontextmanager
async def aopened(start: int) -> AsyncGenerator[AsyncIterator[int]]:
    yield async_iterator(start)


def of_context(ctx: Context) -> Iterator[float]:
    yield ctx.remaining()


async def aof_context(ctx: Context) -> AsyncIterator[float]:
    yield ctx.remaining()


class Reader:
    @streaming
    def read(self, path: str) -> Iterator[bytes]:
        yield path.encode()

    @streaming
    async def aread(self, path: str) -> AsyncIterator[bytes]:
        yield path.encode()


async def decorated() -> None:
    assert_type(generator(1, after=2), Stream[int])
    assert_type(iterator(1), Stream[int])
    assert_type(async_generator(1), AsyncStream[int])
    assert_type(async_iterator(1), AsyncStream[int])
    assert_type(streaming(coroutine)(1), AsyncStream[int])
    assert_type(streaming(plain)(1), Stream[str])
    assert_type(Reader().read("p"), Stream[bytes])
    assert_type(Reader().aread("p"), AsyncStream[bytes])
    with closing(iterator(1)) as items:
        assert_type(next(items), int)
    with iterator(1) as entered:
        assert_type(next(entered), int)
    async with async_iterator(1) as aentered:
        assert_type(await anext(aentered), int)
    assert_type(await async_iterator(1), AsyncStream[int])
    generators: tuple[Generator[int, None, None], AsyncGenerator[int, None]] = iterator(1), async_iterator(1)
    assert_type(len(generators), int)
    async with aclosing(async_iterator(1)) as aitems:
        async for item in aitems:
            assert_type(item, int)


async def called() -> None:
    assert_type(streaming.call(plain, 1), Stream[str])
    assert_type(streaming.call(async_iterator, 1), AsyncStream[int])
    assert_type(streaming.call(coroutine, 1), AsyncStream[int])
    assert_type(streaming.acall(returns_async, 1), AsyncStream[int])
    assert_type(streaming.acall(coroutine, 1), AsyncStream[int])
    assert_type(streaming.call(opened, 1), Stream[int])
    assert_type(streaming.acall(aopened, 1), AsyncStream[int])
    assert_type(streaming.call(json.loads, "[]"), Any)
    assert_type(streaming.execute(of_context), Stream[float])
    assert_type(streaming.execute(aof_context, Context(timeout=5)), AsyncStream[float])
    assert_type(streaming.aexecute(aof_context), AsyncStream[float])
    assert_type(streaming.proxy(Reader(), "read"), Reader)
    assert_type(streaming.aproxy(Reader(), "aread"), Reader)


# --- policies that look at the call --------------------------------------------------------------


def length(value: Any) -> float:
    return float(len(value))


def by_url(url: str, **keywords: object) -> str:
    return url


cache = Cache(60.0, key=by_url, stale=3600, keep_errors=(KeyError, OSError), store={}, name="c")
keyed = Keyed(lambda host: CircuitBreaker(5, name=host), key=by_url, max_keys=10, idle=60.0)
flight = SingleFlight(key=by_url)


@cache
def cached(url: str, *, times: int = 1) -> int:
    return len(url) * times


@keyed
async def by_key(url: str) -> int:
    return len(url)


async def kept() -> None:
    assert_type(cached("u", times=2), int)
    assert_type(await by_key("u"), int)
    assert_type(flight.call(get, "u"), int)
    assert_type(await flight.acall(aget, "u"), int)
    assert_type(cache.wrap(keyed, flight).call(get, "u"), int)
    assert_type(Fallback(None).wrap(cache).call(get, "u"), int | None)
    assert_type(keyed.proxy(Client(), "get"), Client)
    Cache(length)
    assert_type(keyed.policies, Mapping[Hashable, CircuitBreaker])
    assert_type(keyed.policy_for("k").state, CircuitState)


def keys_as_lambdas() -> None:
    assert_type(Keyed(lambda host: Fallback(0), key=lambda url: url), Keyed[Fallback[int], int])
    Cache(60.0, key=lambda url, times=1: (url.lower(), times))
    SingleFlight(key=lambda ctx: ctx.properties["tenant"])
    Once({}, key=lambda order: order["id"], payload=lambda order: order)
    Cache(60.0, key=lambda: "constant")
    Once({}, key=lambda key, item, amount: key, payload=lambda key, item, amount: [item, amount])
    Keyed(lambda key: Retry(), key=lambda self, tenant, region, path="/": (tenant, region))


def make(tenant: str) -> Policy[Any]:
    return Retry().wrap(CircuitBreaker(name=tenant))


assert_type(Keyed(make, by_url).policy_for("k"), Policy[Any])
either = Keyed(lambda host: Policy.wrap(Fallback(None), Bulkhead(1, name=host)), by_url)


@either
def by_either(url: str) -> int:
    return len(url)


def answers() -> None:
    assert_type(either, Keyed[Pipeline[None], None])
    assert_type(either.call(get, "u"), int | None)
    assert_type(Policy.wrap(Retry(), either).call(get, "u"), int | None)
    assert_type(by_either("u"), int | None)
    assert_type(Keyed(lambda host: Fallback(0), by_url).policy_for("k"), Fallback[int])


def states(breakers: Keyed[CircuitBreaker], others: Keyed) -> list[CircuitState]:
    assert_type(others.policies, Mapping[Hashable, Policy[Any]])
    return [it.state for it in breakers.policies.values()]


states(keyed, Keyed(lambda host: Bulkhead(1), by_url))


def by_host(hosts: PerHost) -> None:
    assert_type(hosts.for_host("u"), Policy[Any])
    assert_type(standard().for_host("u").find(CircuitBreaker), CircuitBreaker)


by_host(PerHost(lambda origin: CircuitBreaker()))
by_host(standard())
