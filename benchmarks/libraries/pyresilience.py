"""pyresilience: one decorator that takes a configuration for each policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyresilience import BulkheadConfig, CircuitBreakerConfig, FallbackConfig, RetryConfig, TimeoutConfig, resilient

from benchmarks.functions import ATTEMPTS, BASE, CAP, FAILURE, FAILURES, LIMIT, OPEN_FOR, SECONDS
from benchmarks.libraries import Library
from benchmarks.timing import ASYNCIO, SYNC

library = Library("pyresilience", packages=("pyresilience",), imports=("pyresilience",))

RETRY = RetryConfig(max_attempts=ATTEMPTS, delay=BASE, max_delay=CAP, retry_on=(FAILURE,))
BREAKER = CircuitBreakerConfig(failure_threshold=FAILURES, recovery_timeout=OPEN_FOR, success_threshold=1)
BULKHEAD = BulkheadConfig(max_concurrent=LIMIT)
FALLBACK = FallbackConfig(handler=lambda error: None)
TIMEOUT = TimeoutConfig(seconds=SECONDS)


@library.enters("retry", SYNC, ASYNCIO)
def retry(fn: Callable[..., Any]) -> Callable[..., Any]:
    return resilient(retry=RETRY)(fn)


@library.enters("retry at once", SYNC, ASYNCIO)
def retry_at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    return resilient(retry=RetryConfig(max_attempts=ATTEMPTS, delay=0, retry_on=(FAILURE,)))(fn)


@library.enters("breaker", SYNC, ASYNCIO)
def breaker(fn: Callable[..., Any]) -> Callable[..., Any]:
    return resilient(circuit_breaker=BREAKER)(fn)


@library.enters("bulkhead", SYNC, ASYNCIO)
def bulkhead(fn: Callable[..., Any]) -> Callable[..., Any]:
    return resilient(bulkhead=BULKHEAD)(fn)


@library.enters("bulkhead of one", SYNC, ASYNCIO)
def bulkhead_of_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    return resilient(bulkhead=BulkheadConfig(max_concurrent=1))(fn)


@library.enters("fallback", SYNC, ASYNCIO)
def fallback(fn: Callable[..., Any]) -> Callable[..., Any]:
    return resilient(fallback=FALLBACK)(fn)


@library.enters("timeout", SYNC, ASYNCIO)
def timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return resilient(timeout=TIMEOUT)(fn)


@library.enters("four", SYNC, ASYNCIO)
def four(fn: Callable[..., Any]) -> Callable[..., Any]:
    return resilient(retry=RETRY, circuit_breaker=BREAKER, bulkhead=BULKHEAD, fallback=FALLBACK)(fn)


@library.enters("five, timeout", SYNC, ASYNCIO)
def five_timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return resilient(retry=RETRY, circuit_breaker=BREAKER, bulkhead=BULKHEAD, fallback=FALLBACK, timeout=TIMEOUT)(fn)


@library.enters("four, listened", SYNC, ASYNCIO)
def four_listened(fn: Callable[..., Any]) -> Callable[..., Any]:
    def listener(event: object) -> None:
        pass

    protect = resilient(
        retry=RETRY, circuit_breaker=BREAKER, bulkhead=BULKHEAD, fallback=FALLBACK, listeners=[listener]
    )
    return protect(fn)
