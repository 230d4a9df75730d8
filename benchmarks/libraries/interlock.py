"""interlock (interlock-cb): a pipeline of strategies in an explicit order; its retry is tenacity's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from interlock import (
    BulkheadStrategy,
    CircuitBreaker,
    CircuitBreakerStrategy,
    Config,
    FallbackStrategy,
    Pipeline,
    TimeoutStrategy,
    WindowType,
)
from interlock.integrations.tenacity import RetryStrategy, retry_unless_open
from tenacity import wait_none, wait_random_exponential

from benchmarks.functions import ATTEMPTS, BASE, CAP, FAILURE, FAILURES, LIMIT, OPEN_FOR, SECONDS
from benchmarks.libraries import Library
from benchmarks.timing import ASYNCIO, SYNC

library = Library(
    "interlock",
    packages=("interlock-cb", "tenacity"),
    imports=("interlock", "interlock.integrations.tenacity", "tenacity"),
)

#: It has only windows. A window of five calls, all of which failed, stands for five failures in a row.
IN_A_ROW = Config(
    failure_rate_threshold=1.0,
    minimum_number_of_calls=FAILURES,
    window_size=FAILURES,
    wait_duration_in_open=OPEN_FOR,
    permitted_calls_in_half_open=1,
)
RATIO = Config(
    failure_rate_threshold=0.5,
    minimum_number_of_calls=FAILURES,
    window_type=WindowType.TIME_BASED,
    window_size=30,
    wait_duration_in_open=OPEN_FOR,
    permitted_calls_in_half_open=1,
)


def retrying(wait: Any) -> RetryStrategy:
    return RetryStrategy(attempts=ATTEMPTS, retry=retry_unless_open(FAILURE), wait=wait)


def stack() -> list[Any]:
    breaker = CircuitBreakerStrategy(CircuitBreaker(name="benchmark", config=IN_A_ROW))
    wait = wait_random_exponential(multiplier=BASE, max=CAP)
    return [FallbackStrategy(lambda error: None), retrying(wait), breaker, BulkheadStrategy(LIMIT)]


@library.enters("retry", SYNC, ASYNCIO)
def retry(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Pipeline(retrying(wait_random_exponential(multiplier=BASE, max=CAP)))(fn)


@library.enters("retry at once", SYNC, ASYNCIO)
def retry_at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Pipeline(retrying(wait_none()))(fn)


@library.enters("breaker", SYNC, ASYNCIO)
def breaker(fn: Callable[..., Any]) -> Callable[..., Any]:
    return CircuitBreaker(name="benchmark", config=IN_A_ROW)(fn)


@library.enters("breaker, ratio", SYNC, ASYNCIO)
def breaker_ratio(fn: Callable[..., Any]) -> Callable[..., Any]:
    return CircuitBreaker(name="benchmark", config=RATIO)(fn)


@library.enters("bulkhead", SYNC, ASYNCIO)
def bulkhead(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Pipeline(BulkheadStrategy(LIMIT))(fn)


@library.enters("bulkhead of one", SYNC, ASYNCIO)
def bulkhead_of_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Pipeline(BulkheadStrategy(1))(fn)


@library.enters("fallback", SYNC, ASYNCIO)
def fallback(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Pipeline(FallbackStrategy(lambda error: None))(fn)


@library.enters("timeout", SYNC, ASYNCIO)
def timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Pipeline(TimeoutStrategy(SECONDS))(fn)


@library.enters("four", SYNC, ASYNCIO)
def four(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Pipeline(*stack())(fn)


@library.enters("five, timeout", SYNC, ASYNCIO)
def five_timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Pipeline(*stack(), TimeoutStrategy(SECONDS))(fn)


@library.enters("four, call", SYNC, ASYNCIO)
def four_call(fn: Callable[..., Any]) -> Callable[..., Any]:
    return partial(Pipeline(*stack()).call, fn)
