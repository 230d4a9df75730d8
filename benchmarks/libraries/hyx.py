"""hyx: decorators for asyncio, stacked. `attempts` counts the retries; the answer of a fallback has to be awaited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyx.bulkhead import bulkhead as hyx_bulkhead
from hyx.circuitbreaker import consecutive_breaker
from hyx.fallback import fallback as hyx_fallback
from hyx.retry import retry as hyx_retry
from hyx.retry.backoffs import expo
from hyx.timeout import timeout as hyx_timeout

from benchmarks.functions import ATTEMPTS, BASE, CAP, FAILURE, FAILURES, LIMIT, OPEN_FOR, SECONDS
from benchmarks.libraries import Library
from benchmarks.timing import ASYNCIO

library = Library(
    "hyx",
    packages=("hyx",),
    imports=("hyx.bulkhead", "hyx.circuitbreaker", "hyx.fallback", "hyx.retry", "hyx.timeout"),
)


async def nothing(*args: object, **kwargs: object) -> None:
    pass


@library.enters("retry", ASYNCIO)
def retry(fn: Callable[..., Any]) -> Callable[..., Any]:
    delays = expo(min_delay_secs=BASE, max_delay_secs=CAP)
    return hyx_retry(on=FAILURE, attempts=ATTEMPTS - 1, backoff=delays)(fn)


@library.enters("retry at once", ASYNCIO)
def retry_at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    return hyx_retry(on=FAILURE, attempts=ATTEMPTS - 1, backoff=0.0)(fn)


@library.enters("breaker", ASYNCIO)
def breaker(fn: Callable[..., Any]) -> Callable[..., Any]:
    return consecutive_breaker(failure_threshold=FAILURES, recovery_time_secs=OPEN_FOR, recovery_threshold=1)(fn)


@library.enters("bulkhead", ASYNCIO)
def bulkhead(fn: Callable[..., Any]) -> Callable[..., Any]:
    return hyx_bulkhead(max_concurrency=LIMIT, max_capacity=LIMIT)(fn)


@library.enters("bulkhead of one", ASYNCIO)
def bulkhead_of_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    return hyx_bulkhead(max_concurrency=1, max_capacity=1)(fn)


@library.enters("fallback", ASYNCIO)
def fallback(fn: Callable[..., Any]) -> Callable[..., Any]:
    return hyx_fallback(nothing)(fn)


@library.enters("timeout", ASYNCIO)
def timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return hyx_timeout(SECONDS)(fn)


@library.enters("four", ASYNCIO)
def four(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fallback(retry(breaker(bulkhead(fn))))


@library.enters("five, timeout", ASYNCIO)
def five_timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fallback(retry(breaker(bulkhead(timeout(fn)))))
