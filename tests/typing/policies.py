"""The settings of the policies, their blocks, and users' policies. Read by test_types.py; not run."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Never, TypeVar, assert_type

from typing_extensions import override

from resilience import (
    AdaptiveLimit,
    AdaptiveThrottle,
    Bulkhead,
    Call,
    Chaos,
    CircuitBreaker,
    CircuitOpen,
    CircuitState,
    ConsecutiveFailures,
    Context,
    Failure,
    FailureCount,
    FailureRatio,
    Fallback,
    Hedge,
    Keyed,
    Outcome,
    Pipeline,
    Policy,
    Quantile,
    Rate,
    RateLimiter,
    RepeatCap,
    RetriesExhausted,
    Retry,
    RetryBudget,
    Sample,
    Seeking,
    SlowRatio,
    Success,
    Timeout,
    Trip,
    deadline,
    detached,
    events,
    transient,
)
from resilience.backoff import Constant, Decorrelated, Exponential, Linear
from tests.typing.execute import afetch, fetch

T = TypeVar("T")


# --- permitted settings ----------------------------------------------------------------------


class Response:
    status: int = 200


class Savings:
    def succeeded(self) -> None: ...

    def withdraw(self) -> bool:
        return True

    def give_back(self) -> None: ...


class Racing(Policy[Never]):
    races = True

    async def around(self, call: Call[T], ctx: Context) -> T:
        assert_type(ctx.hedge, int)
        await ctx.runtime.race(call, ctx, Twice(ctx))
        return await call(ctx.child(hedge=1))


class Twice:
    due: float = 0.0

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    def begin(self) -> Context | None:
        return self.ctx

    def ended(self, number: int, outcome: Outcome[Any]) -> bool:
        return number == 1


def waits() -> Iterator[float]:
    yield 0.5


def asked(outcome: Outcome[Any]) -> float | timedelta | None:
    return outcome.error.retry_after if isinstance(outcome.error, CircuitOpen) else None


def settings() -> None:
    Retry(on=CircuitOpen, retry_after=asked)
    Retry(retry_after=lambda outcome: 1.0)
    Retry(
        5, on=OSError, ignore=(FileNotFoundError, PermissionError), backoff=[0.1, 1], max_elapsed=timedelta(minutes=1)
    )
    Retry(None, on=lambda error: isinstance(error, OSError), on_result=lambda response: response.status >= 500)
    Retry(on=lambda error: re.search("deadlock", str(error)), ignore=lambda error: error.args and error.args[0] == 1213)
    Retry(retry_after=lambda failure: getattr(failure.error, "seconds", None))
    Retry(on=transient, backoff=waits, rng=random.Random(42), on_retry=lambda event: print(event.delay))
    Retry(on=(OSError, ValueError), backoff=Decorrelated(0.1, cap=2.0), rng=random)
    Retry(on=CircuitOpen, backoff=Linear(1, cap=timedelta(seconds=5), jitter=0.25), retry_after=False, wrap=True)
    Timeout(timedelta(seconds=2), cooperative=True, on_timeout=print, name="t")
    Timeout.max_abandoned = 64
    CircuitBreaker(5, open_for=30)
    CircuitBreaker(FailureCount(5, window=timedelta(minutes=1)) | FailureCount(3, last=10))
    CircuitBreaker(FailureRatio(0.5, last=100) | SlowRatio(0.5, slower_than=1.0), open_for=Exponential(1, cap=60))
    CircuitBreaker(probe=lambda: fetch(Context()), probe_timeout=2)
    CircuitBreaker(probe=lambda: afetch(Context()))
    CircuitBreaker(ConsecutiveFailures(5), open_for=[1, 2, timedelta(seconds=4)], probe_timeout=5)
    Bulkhead(10, queue=100, max_wait=timedelta(milliseconds=50))
    RateLimiter(10, max_wait=timedelta(seconds=2), told=lambda result: (0, 1.5)).resize(20)
    RateLimiter(
        Rate(500, timedelta(minutes=1)), Rate(10, burst=2, cost=lambda ctx: len(ctx.properties), actual=len), name="llm"
    )
    Retry(budget=0.1)
    Retry(budget=RetryBudget(0.2, saved=5, per_second=0.5))
    Hedge(
        timedelta(milliseconds=50), hedges=2, eager=True, budget=Savings(), on_hedge=lambda event: print(event.number)
    )
    Hedge(
        Quantile(0.99, least=0.01, most=timedelta(seconds=1)),
        on=OSError,
        on_result=lambda result: result is None,
        budget=None,
    )
    Hedge([0.1, timedelta(milliseconds=50)], hedges=2)
    assert_type(Hedge().execute(fetch), str)
    assert_type(RepeatCap(2).wrap(Fallback(None), Hedge()).execute(fetch), str | None)
    AdaptiveLimit(timedelta(seconds=0.3), queue=5, max_wait=1, on_change=lambda event: print(event.new))
    AdaptiveLimit(Seeking(target=0.3), initial=5).reset()
    AdaptiveLimit(Fixed())
    AdaptiveThrottle(1.5, window=timedelta(minutes=1), on=ConnectionError, rng=random.Random(1)).reset()
    Chaos(0.01, error=ConnectionError, when=lambda ctx: ctx.attempt == 1).on(0.5, lasts=timedelta(seconds=5))
    Constant(1, jitter="equal")
    Context(timeout=5, operation="get-user", properties={"tenant": "acme"})


class Fixed:
    """A user's algorithm."""

    def update(self, limit: float, sample: Sample) -> float:
        return limit

    def reset(self) -> None: ...


def listening(event: events.CircuitChanged) -> None:
    assert_type(event.new, CircuitState)


def reporting(event: events.RetryScheduled) -> None:
    assert_type(event.outcome.error, Exception | None)


def exhausted(error: RetriesExhausted) -> object:
    """There is always a last outcome. The last result has no type, as in events and handlers."""
    assert_type(error.last.error, Exception | None)
    return error.last.value.status if isinstance(error.last, Success) else error.last


def observed() -> None:
    CircuitBreaker(on_transition=listening)
    assert_type(events.subscribe(listening, events.CircuitChanged), Callable[[], None])
    assert_type(Pipeline(Retry()).find(CircuitBreaker), CircuitBreaker)
    assert_type(Pipeline(Retry())["Retry"], Policy[Any])
    assert_type(Pipeline(Fallback(None)).find(Fallback[None]).execute(fetch), str | None)
    breakers = Pipeline(Retry()).find(Keyed[CircuitBreaker])
    assert_type(breakers.policy_for("key"), CircuitBreaker)
    assert_type(RateLimiter(1).call(int), int)
    assert_type(AdaptiveLimit(1).call(int), int)
    assert_type(Chaos(error=lambda ctx: OSError(ctx.operation)), Chaos[Never])
    assert_type(Chaos(result="x"), Chaos[str])
    assert_type(Chaos(result="x").call(int), int | str)
    assert_type(Chaos(delay=1.0).call(int), int)
    assert_type(ConsecutiveFailures(1) | FailureRatio(0.5), Trip)


# --- fallbacks -------------------------------------------------------------------------------


def number(failure: Outcome[Any], ctx: Context) -> int:
    return ctx.attempt


async def anumber(failure: Outcome[Any], ctx: Context) -> int:
    return ctx.attempt


def file(failure: Failure, ctx: Context) -> Never:
    raise failure.error


async def afile(failure: Failure, ctx: Context) -> Never:
    raise failure.error


def forward(failure: Outcome[Any], ctx: Context) -> Never:
    raise CircuitOpen from failure.error


def load(failure: Failure, ctx: Context) -> Any:
    return json.loads("{}")


async def fallbacks() -> None:
    assert_type(Fallback(), Fallback[None])
    assert_type(Fallback(None), Fallback[None])
    assert_type(Fallback(5), Fallback[int])
    assert_type(Fallback(handler=number), Fallback[int])
    assert_type(Fallback(handler=anumber), Fallback[int])
    assert_type(Fallback(handler=lambda failure, ctx: ctx.remaining()), Fallback[float])
    assert_type(Fallback(handler=number).execute(fetch), "str | int")
    assert_type(await Fallback(handler=anumber).aexecute(afetch), "str | int")
    assert_type(
        Fallback(handler=number, on=OSError, on_result=lambda result: result == "").wrap(Retry()).execute(fetch),
        "str | int",
    )
    Fallback(
        handler=lambda failure, ctx: failure.value if isinstance(failure, Success) else str(failure.error),
        on_result=bool,
    )
    Fallback(handler=lambda failure, ctx: failure.unwrap())
    assert_type(Fallback(handler=lambda failure, ctx: failure.error), Fallback[Exception])
    assert_type(Fallback(handler=file, on=OSError).call(len, ""), int)
    assert_type(await Fallback(handler=afile).acall(afetch, Context()), str)
    assert_type(Fallback(handler=forward, on_result=bool).call(len, ""), int)
    assert_type(Fallback(handler=load), Fallback[Any])
    assert_type(Fallback(handler=lambda failure, ctx: json.loads("{}"), on_result=bool), Fallback[Any])


# --- blocks ----------------------------------------------------------------------------------


async def blocks() -> None:
    with deadline(1.0) as ctx:
        assert_type(ctx, Context)
    async with deadline(timedelta(seconds=1)) as actx:
        assert_type(actx, Context)
    for attempt in Retry().attempts():
        with attempt:
            assert_type(attempt.number, int)
    async for attempt in Retry().attempts():
        with attempt as same:
            assert_type(same.number, int)
    with CircuitBreaker().guard(), Bulkhead(1).slot(), RateLimiter(1).turn():
        pass
    async with CircuitBreaker().guard(), Bulkhead(1).slot(), RateLimiter(1).turn(2.5):
        pass


def a_block_that_does_not_swallow() -> int:
    """Type checkers know that these blocks swallow no exception, so that the end is never reached without a return."""
    with deadline(1.0), detached(1.0), CircuitBreaker().guard(), Bulkhead(1).slot(), RateLimiter(1).turn():
        return 1


async def an_async_block_that_does_not_swallow() -> int:
    """Neither do they in async code, where a budget cuts its block off, with an error of its own."""
    async with deadline(1.0), detached(1.0), CircuitBreaker().guard(), Bulkhead(1).slot(), RateLimiter(1).turn():
        return 1


# --- users' policies -------------------------------------------------------------------------


class Plain(Policy):
    async def around(self, call: Call[T], ctx: Context) -> T:
        return await call(ctx)


class Answering(Policy[int]):
    def __init__(self, *, name: str = "Answering") -> None:
        self.name = name
        self._limit = 3

    @override
    async def around(self, call: Call[T], ctx: Context) -> T | int:
        if ctx.attempt > self._limit:
            return ctx.attempt
        await ctx.sleep(0.1)
        return await call(ctx.child(attempt=ctx.attempt + 1))

    @override
    def settings(self) -> dict[str, object]:
        return {"limit": self._limit}


D = TypeVar("D")


class Caching(Policy[D]):
    def __init__(self, answer: D) -> None:
        self._answer = answer

    async def around(self, call: Call[T], ctx: Context) -> T | D:
        return self._answer if ctx.operation == "cached" else await call(ctx)


async def own_policies() -> None:
    policy: Policy[Never] = Plain()
    assert_type(policy.execute(fetch), str)
    assert_type(Plain().execute(fetch), str)
    assert_type(Answering().execute(fetch), "str | int")
    assert_type(Caching(b"").execute(fetch), "str | bytes")
    assert_type(await Answering().aexecute(afetch), "str | int")
    assert_type(Plain().wrap(Retry()).execute(fetch), str)
    assert_type(Retry().wrap(Answering(), Timeout(1.0)).execute(fetch), "str | int")
    assert_type(Policy.wrap(Plain(), Caching(None), Answering()).execute(fetch), "str | None | int")
    assert_type(Answering()(fetch)(Context()), "str | int")
