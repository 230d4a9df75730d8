"""resilix: stacked `protect` decorators merge into one policy, run by one engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilix import CircuitBreaker, protect

from benchmarks.functions import (
    ATTEMPTS,
    BASE,
    CAP,
    FAILURE,
    FAILURES,
    LIMIT,
    OPEN_FOR,
    OTHER_FAILURE,
    SECONDS,
    TOO_SHORT,
)
from benchmarks.libraries import Library
from benchmarks.timing import ASYNCIO, SYNC

library = Library("resilix", packages=("resilix",), imports=("resilix",))


@library.enters("retry", SYNC, ASYNCIO)
def retry(fn: Callable[..., Any]) -> Callable[..., Any]:
    return protect.when(FAILURE, retry=ATTEMPTS, delay=BASE, backoff="exponential", jitter=True, max_delay=CAP)(fn)


@library.enters("retry at once", SYNC, ASYNCIO)
def retry_at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    return protect.when(FAILURE, retry=ATTEMPTS)(fn)


@library.enters("breaker", SYNC, ASYNCIO)
def breaker(fn: Callable[..., Any]) -> Callable[..., Any]:
    return CircuitBreaker(failures=FAILURES, reset_timeout=OPEN_FOR)(fn)


@library.enters("bulkhead", SYNC, ASYNCIO)
def bulkhead(fn: Callable[..., Any]) -> Callable[..., Any]:
    return protect.bulkhead(LIMIT, wait=False)(fn)


@library.enters("bulkhead of one", SYNC, ASYNCIO)
def bulkhead_of_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    return protect.bulkhead(1, wait=False)(fn)


@library.enters("queue", ASYNCIO)
def queue(fn: Callable[..., Any]) -> Callable[..., Any]:
    return protect.bulkhead(1)(fn)


@library.enters("fallback", SYNC, ASYNCIO)
def fallback(fn: Callable[..., Any]) -> Callable[..., Any]:
    return protect.when(Exception, return_=None)(fn)


@library.enters("timeout", SYNC)
def timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return protect.timeout(SECONDS, allow_sync=True)(fn)


@library.enters("timeout", ASYNCIO)
def timeout_task(fn: Callable[..., Any]) -> Callable[..., Any]:
    return protect.timeout(SECONDS)(fn)


# The breaker is one layer, and everything around it a second one, in which the bulkhead's permit is held for all
# attempts together. To take a permit for each attempt, as the other libraries do, would need a third layer.


@library.enters("four", SYNC, ASYNCIO)
def four(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fallback(retry(bulkhead(breaker(fn))))


@library.enters("five, timeout", SYNC)
def five_timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fallback(retry(bulkhead(timeout(breaker(fn)))))


@library.enters("five, timeout", ASYNCIO)
def five_timeout_task(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fallback(retry(bulkhead(timeout_task(breaker(fn)))))


@library.enters("four, listened", SYNC, ASYNCIO)
def four_listened(fn: Callable[..., Any]) -> Callable[..., Any]:
    def listener(info: object) -> None:
        pass

    return protect.observe(on_finish=listener)(four(fn))


@library.enters("four, unanswered", SYNC, ASYNCIO)
def four_unanswered(fn: Callable[..., Any]) -> Callable[..., Any]:
    breaker = CircuitBreaker(failures=FAILURES, reset_timeout=OPEN_FOR, on=OTHER_FAILURE)
    inner = protect.when(OTHER_FAILURE, retry=ATTEMPTS)(protect.bulkhead(LIMIT, wait=False)(breaker(fn)))
    return protect.when(OTHER_FAILURE, return_=None)(inner)


@library.enters("short timeout", ASYNCIO)
def short_timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return protect.timeout(TOO_SHORT)(fn)
