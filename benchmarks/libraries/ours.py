"""The library in this repository."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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
from benchmarks.libraries import OURS, Library, Protect
from benchmarks.timing import ASYNCIO, SYNC, TRIO
from resilience import (
    Bulkhead,
    Cache,
    CircuitBreaker,
    FailureRatio,
    Fallback,
    Hedge,
    Keyed,
    Pipeline,
    Policy,
    Rate,
    RateLimiter,
    Retry,
    SingleFlight,
    Timeout,
    events,
)
from resilience import deadline as open_deadline
from resilience.backoff import Exponential

#: `import resilience` alone would import none of them.
IMPORTS = tuple(f"resilience.policies.{it}" for it in ("bulkhead", "circuit_breaker", "fallback", "retry", "timeout"))

library = Library(OURS, packages=("resilience-pipeline", "anyio"), imports=IMPORTS)


def new_retry() -> Retry:
    return Retry(ATTEMPTS, on=FAILURE, backoff=Exponential(BASE, cap=CAP))


def new_breaker() -> CircuitBreaker:
    return CircuitBreaker(FAILURES, open_for=OPEN_FOR)


def new_four(*inside: Policy[Any], **options: Any) -> Pipeline[Any]:
    return Policy.wrap(Fallback(None), new_retry(), new_breaker(), Bulkhead(LIMIT), *inside, **options)


@library.enters("cache hit", SYNC, ASYNCIO)
def cache_hit(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Cache(KEEP_FOR)(fn)


@library.enters("flight", SYNC, ASYNCIO)
def flight(fn: Callable[..., Any]) -> Callable[..., Any]:
    return SingleFlight()(fn)


@library.enters("keyed", SYNC, ASYNCIO)
def keyed(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Keyed(lambda key: new_breaker(), lambda *args: args)(fn)


@library.enters("stream", SYNC, ASYNCIO)
def stream(fn: Callable[..., Any]) -> Callable[..., Any]:
    return new_retry().wrap(new_breaker(), Bulkhead(LIMIT)).streaming()(fn)


@library.enters("stream, idle", ASYNCIO)
def stream_idle(fn: Callable[..., Any]) -> Callable[..., Any]:
    return new_retry().wrap(new_breaker(), Bulkhead(LIMIT)).streaming(idle=SECONDS)(fn)


@library.enters("retry", SYNC, ASYNCIO, TRIO)
def retry(fn: Callable[..., Any]) -> Callable[..., Any]:
    return new_retry()(fn)


@library.enters("retry at once", SYNC, ASYNCIO, TRIO)
def retry_at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Retry(ATTEMPTS, on=FAILURE, backoff=[0])(fn)


@library.enters("retry, budget", SYNC, ASYNCIO, TRIO)
def retry_budget(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Retry(ATTEMPTS, on=FAILURE, budget=0.1)(fn)


@library.enters("hedge", SYNC, ASYNCIO, TRIO)
def hedge(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Hedge(SECONDS)(fn)


@library.enters("breaker", SYNC, ASYNCIO, TRIO)
def breaker(fn: Callable[..., Any]) -> Callable[..., Any]:
    return new_breaker()(fn)


@library.enters("breaker, ratio", SYNC, ASYNCIO, TRIO)
def breaker_ratio(fn: Callable[..., Any]) -> Callable[..., Any]:
    return CircuitBreaker(FailureRatio(0.5, min_calls=FAILURES, window=30.0), open_for=OPEN_FOR)(fn)


@library.enters("bulkhead", SYNC, ASYNCIO, TRIO)
def bulkhead(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Bulkhead(LIMIT)(fn)


@library.enters("bulkhead of one", SYNC, ASYNCIO, TRIO)
def bulkhead_of_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Bulkhead(1)(fn)


@library.enters("queue", ASYNCIO)
def queue(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Bulkhead(1, queue=20_000)(fn)


@library.enters("rate", SYNC, ASYNCIO, TRIO)
def rate(fn: Callable[..., Any]) -> Callable[..., Any]:
    return RateLimiter(Rate(RATE, burst=RATE))(fn)


@library.enters("fallback", SYNC, ASYNCIO, TRIO)
def fallback(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Fallback(None)(fn)


@library.enters("deadline", SYNC, ASYNCIO, TRIO)
def deadline(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Timeout(SECONDS, cooperative=True)(fn)


@library.enters("timeout", SYNC, ASYNCIO, TRIO)
def timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Timeout(SECONDS)(fn)


@library.enters("four", SYNC, ASYNCIO, TRIO)
def four(fn: Callable[..., Any]) -> Callable[..., Any]:
    return new_four()(fn)


@library.enters("five, deadline", SYNC, ASYNCIO, TRIO)
def five_deadline(fn: Callable[..., Any]) -> Callable[..., Any]:
    return new_four(Timeout(SECONDS, cooperative=True))(fn)


@library.enters("five, timeout", SYNC, ASYNCIO, TRIO)
def five_timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return new_four(Timeout(SECONDS))(fn)


@library.enters("four, listened", SYNC, ASYNCIO, TRIO)
def four_listened(fn: Callable[..., Any]) -> Callable[..., Any]:
    def listener(event: events.Event) -> None:
        pass

    return new_four(listeners=[listener])(fn)


@library.enters("four, call", SYNC, ASYNCIO, TRIO)
def four_call(fn: Callable[..., Any]) -> Callable[..., Any]:
    return partial(new_four().call, fn)


@library.enters("four, execute", SYNC, ASYNCIO, TRIO)
def four_execute(fn: Callable[..., Any]) -> Callable[..., Any]:
    return partial(new_four().execute, fn)


@library.enters("four, proxy", SYNC, ASYNCIO, TRIO)
def four_proxy(fn: Callable[..., Any]) -> Callable[..., Any]:
    class Client:
        get = staticmethod(fn)

    client = new_four().proxy(Client(), "get")
    return lambda: client.get()


@library.enters("four, unanswered", SYNC, ASYNCIO, TRIO)
def four_unanswered(fn: Callable[..., Any]) -> Callable[..., Any]:
    other = OTHER_FAILURE
    return Policy.wrap(Fallback(None, on=other), Retry(on=other), CircuitBreaker(on=other), Bulkhead(LIMIT))(fn)


@library.enters("short timeout", ASYNCIO)
def short_timeout(fn: Callable[..., Any]) -> Callable[..., Any]:
    return Timeout(TOO_SHORT)(fn)


@library.enters("deadline, block", SYNC)
def deadline_block(fn: Callable[..., Any]) -> Callable[..., Any]:
    def block() -> Any:
        with open_deadline(SECONDS):
            return fn()

    return block


@library.enters("deadline, block", ASYNCIO)
def deadline_block_task(fn: Callable[..., Any]) -> Callable[..., Any]:
    async def block() -> Any:
        async with open_deadline(SECONDS):
            return await fn()

    return block


def _in_block(open_block: Callable[[], Any]) -> tuple[Protect, Protect]:
    """Return an entry that runs the function in a block, for blocking code and for tasks."""

    def protect(fn: Callable[..., Any]) -> Callable[..., Any]:
        def block() -> Any:
            with open_block():
                return fn()

        return block

    def protect_task(fn: Callable[..., Any]) -> Callable[..., Any]:
        async def block() -> Any:
            async with open_block():
                return await fn()

        return block

    return protect, protect_task


_BLOCKS: dict[str, Callable[[], Any]] = {
    "guard, block": new_breaker().guard,
    "slot, block": Bulkhead(LIMIT).slot,
}
for _name, _block in _BLOCKS.items():
    _protect, _protect_task = _in_block(_block)
    library.enters(_name, SYNC)(_protect)
    library.enters(_name, ASYNCIO)(_protect_task)
