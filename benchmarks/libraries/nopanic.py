"""nopanic: policies are decorators, stacked by `compose`. Its breaker has only a ratio over a time window."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import nopanic
from nopanic import backoff, compose

from benchmarks.functions import (
    ATTEMPTS,
    BASE,
    CAP,
    FAILURE,
    FAILURES,
    KEEP_FOR,
    LIMIT,
    OPEN_FOR,
    OTHER_FAILURE,
    RATE,
    SECONDS,
    TOO_SHORT,
)
from benchmarks.libraries import Library
from benchmarks.timing import ASYNCIO, SYNC, TRIO

library = Library("nopanic", packages=("nopanic",), imports=("nopanic",))


def new_retry() -> nopanic.retry:
    return nopanic.retry(ATTEMPTS, on=FAILURE, backoff=backoff.full_jitter(base=BASE, cap=CAP))


def new_breaker() -> nopanic.circuit_breaker:
    return nopanic.circuit_breaker(failure_threshold=0.5, min_calls=FAILURES, window=30.0, reset_timeout=OPEN_FOR)


def new_four(*inside: Any) -> compose:
    return compose(nopanic.fallback(None), new_retry(), new_breaker(), nopanic.bulkhead(LIMIT, max_wait=0), *inside)


@library.enters("cache hit", SYNC, ASYNCIO)
def cache_hit(fn: Callable[..., Any]) -> Callable[..., Any]:
    return nopanic.cache(KEEP_FOR)(fn)


@library.enters("keyed", SYNC, ASYNCIO)
def keyed(fn: Callable[..., Any]) -> Callable[..., Any]:
    return nopanic.keyed(lambda key: new_breaker(), key=lambda *args: args)(fn)


@library.enters("stream", SYNC, ASYNCIO)
def stream(fn: Callable[..., Any]) -> Callable[..., Any]:
    return compose(new_retry(), new_breaker(), nopanic.bulkhead(LIMIT, max_wait=0))(fn)


@library.enters("retry", SYNC, ASYNCIO, TRIO)
def retry(fn: Callable[..., Any]) -> Callable[..., Any]:
    return new_retry()(fn)


@library.enters("retry at once", SYNC, ASYNCIO, TRIO)
def retry_at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    return nopanic.retry(ATTEMPTS, on=FAILURE, backoff=0.0)(fn)


@library.enters("retry, budget", SYNC, ASYNCIO, TRIO)
def retry_budget(fn: Callable[..., Any]) -> Callable[..., Any]:
    return nopanic.retry(ATTEMPTS, on=FAILURE, budget=nopanic.RetryBudget(0.1))(fn)


@library.enters("hedge", ASYNCIO, TRIO)
def hedge(fn: Callable[..., Any]) -> Callable[..., Any]:
    return nopanic.hedge(delay=SECONDS)(fn)


@library.enters("breaker", SYNC, ASYNCIO, TRIO)
@library.enters("breaker, ratio", SYNC, ASYNCIO, TRIO)
def breaker(fn: Callable[..., Any]) -> Callable[..., Any]:
    return new_breaker()(fn)


@library.enters("bulkhead", SYNC, ASYNCIO, TRIO)
def bulkhead(fn: Callable[..., Any]) -> Callable[..., Any]:
    return nopanic.bulkhead(LIMIT, max_wait=0)(fn)


@library.enters("bulkhead of one", SYNC, ASYNCIO, TRIO)
def bulkhead_of_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    return nopanic.bulkhead(1, max_wait=0)(fn)


@library.enters("queue", ASYNCIO)
def queue(fn: Callable[..., Any]) -> Callable[..., Any]:
    return nopanic.bulkhead(1)(fn)


@library.enters("rate", SYNC, ASYNCIO, TRIO)
def rate(fn: Callable[..., Any]) -> Callable[..., Any]:
    return nopanic.rate_limit(RATE, 1.0)(fn)


@library.enters("fallback", SYNC, ASYNCIO, TRIO)
def fallback(fn: Callable[..., Any]) -> Callable[..., Any]:
    return nopanic.fallback(None)(fn)


@library.enters("deadline", SYNC, ASYNCIO, TRIO)
def deadline(fn: Callable[..., Any]) -> Callable[..., Any]:
    return nopanic.deadline(SECONDS)(fn)


@library.enters("timeout", SYNC, ASYNCIO, TRIO)
def timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return nopanic.timeout(SECONDS)(fn)


@library.enters("four", SYNC, ASYNCIO, TRIO)
def four(fn: Callable[..., Any]) -> Callable[..., Any]:
    return new_four()(fn)


@library.enters("five, deadline", SYNC, ASYNCIO, TRIO)
def five_deadline(fn: Callable[..., Any]) -> Callable[..., Any]:
    return new_four(nopanic.deadline(SECONDS))(fn)


@library.enters("five, timeout", SYNC, ASYNCIO, TRIO)
def five_timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return new_four(nopanic.timeout(SECONDS))(fn)


# No entry for "four, listened": its listeners are called only for failures, so a call that succeeds is "four".


@library.enters("four, call", SYNC)
def four_call(fn: Callable[..., Any]) -> Callable[..., Any]:
    return partial(new_four().call, fn)


@library.enters("four, call", ASYNCIO, TRIO)
def four_acall(fn: Callable[..., Any]) -> Callable[..., Any]:
    return partial(new_four().acall, fn)


@library.enters("four, unanswered", SYNC, ASYNCIO, TRIO)
def four_unanswered(fn: Callable[..., Any]) -> Callable[..., Any]:
    other = OTHER_FAILURE
    retry, breaker = nopanic.retry(on=other), nopanic.circuit_breaker(on=other)
    return compose(nopanic.fallback(None, on=other), retry, breaker, nopanic.bulkhead(LIMIT, max_wait=0))(fn)


@library.enters("short timeout", ASYNCIO)
def short_timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return nopanic.timeout(TOO_SHORT)(fn)


@library.enters("deadline, block", SYNC)
def deadline_block(fn: Callable[..., Any]) -> Callable[..., Any]:
    def block() -> Any:
        with nopanic.deadline(SECONDS):
            return fn()

    return block
