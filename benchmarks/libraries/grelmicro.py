"""grelmicro: patterns, which its stack sorts into a fixed order, for asyncio. Current versions need Python 3.12."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grelmicro.resilience import (
    Bulkhead,
    CircuitBreaker,
    ConstantBackoff,
    Fallback,
    MemoryCircuitBreakerAdapter,
    Retry,
    Stack,
    Timeout,
)

from benchmarks.functions import ATTEMPTS, BASE, CAP, FAILURE, FAILURES, LIMIT, OPEN_FOR, SECONDS
from benchmarks.libraries import Library
from benchmarks.timing import ASYNCIO, SYNC

library = Library("grelmicro", packages=("grelmicro",), imports=("grelmicro.resilience",))


def new_retry() -> Any:
    return Retry.exponential("benchmark", when=FAILURE, attempts=ATTEMPTS, base_delay=BASE, max_delay=CAP)


def new_breaker() -> Any:
    return CircuitBreaker.consecutive_count(
        "benchmark",
        error_threshold=FAILURES,
        reset_timeout=OPEN_FOR,
        success_threshold=1,
        backend=MemoryCircuitBreakerAdapter(),
    )


def patterns() -> list[Any]:
    answer = Fallback("benchmark", when=Exception, default=None)
    return [answer, new_retry(), new_breaker(), Bulkhead("benchmark", max_concurrent=LIMIT)]


@library.enters("retry", SYNC, ASYNCIO)
def retry(fn: Callable[..., Any]) -> Callable[..., Any]:
    protected: Callable[..., Any] = new_retry()(fn)
    return protected


@library.enters("retry at once", SYNC, ASYNCIO)
def retry_at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    at_once = ConstantBackoff(delay=1e-9)  # it refuses zero
    return Retry("benchmark", at_once, when=FAILURE, attempts=ATTEMPTS)(fn)


@library.enters("breaker", ASYNCIO)  # the form for threads needs an event loop in another thread
def breaker(fn: Callable[..., Any]) -> Callable[..., Any]:
    protected: Callable[..., Any] = new_breaker()(fn)
    return protected


@library.enters("bulkhead", ASYNCIO)
def bulkhead(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Bulkhead("benchmark", max_concurrent=LIMIT)(fn)


@library.enters("bulkhead of one", ASYNCIO)
def bulkhead_of_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Bulkhead("benchmark", max_concurrent=1)(fn)


@library.enters("fallback", SYNC, ASYNCIO)
def fallback(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Fallback("benchmark", when=Exception, default=None)(fn)


@library.enters("timeout", ASYNCIO)
def timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Timeout("benchmark", seconds=SECONDS)(fn)


@library.enters("four", ASYNCIO)
def four(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Stack("benchmark", patterns=patterns())(fn)


@library.enters("five, timeout", ASYNCIO)
def five_timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Stack("benchmark", patterns=[*patterns(), Timeout("benchmark", seconds=SECONDS)])(fn)
