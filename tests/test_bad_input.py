"""Wrong arguments: refused where they are written, with the parameter and the value in the message.

One table: each constructor and entry point, parameter by parameter.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import random
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import pytest

from resilience import (
    AdaptiveLimit,
    AdaptiveThrottle,
    Bulkhead,
    Cache,
    Chaos,
    CircuitBreaker,
    ConsecutiveFailures,
    Context,
    FailureRatio,
    Fallback,
    Hedge,
    Keyed,
    Policy,
    Quantile,
    Rate,
    RateLimiter,
    RepeatCap,
    Retry,
    RetryBudget,
    Seeking,
    SingleFlight,
    SlowRatio,
    Timeout,
    deadline,
    detached,
    events,
)
from resilience.backoff import Constant, Decorrelated, Exponential, Linear
from resilience.work import Gate, IdempotencyKey, Once, Supervisor, each
from tests.conftest import Boom

NAN, INF = math.nan, math.inf


async def later(*args: object) -> None:
    """What nobody would await."""


class Later:
    """An object that is called as a coroutine function."""

    async def __call__(self, *args: object) -> None: ...


def plain(*args: object) -> None: ...


def plain_without() -> None: ...


class Case(NamedTuple):
    """One wrong argument."""

    where: str
    make: Callable[[Any], object]
    error: type[Exception]
    parameter: str
    value: Any
    told: str  # how the message tells the value


def table(
    where: str, make: Callable[[Any], object], parameter: str, *, type_errors: list[Any], value_errors: list[Any]
) -> list[Case]:
    """The wrong values of one parameter."""
    return [
        Case(where, make, error, parameter, value, tell(value))
        for error, values in ((TypeError, type_errors), (ValueError, value_errors))
        for value in values
    ]


def tell(value: Any) -> str:
    """How a message tells a value: as `repr` does, a duration in seconds, a function by its name."""
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g}"
    if value is plain_without:
        return "plain_without"
    if value is later or isinstance(value, (Later, partial)):
        return "later"
    if isinstance(value, str) and not value:
        return "empty"
    return repr(value)


#: What is refused by each kind of parameter.
NO_DURATION: dict[str, list[Any]] = {
    "type_errors": ["1", b"1", True, False, [1], 1j, Fraction(1, 2), object],
    "value_errors": [0, -1, -0.5, NAN, INF, -INF, timedelta(0), timedelta(-1), 10**400],
}
NO_DELAY = {"type_errors": ["1", True, [1]], "value_errors": [-1, -0.5, NAN, INF, timedelta(seconds=-1)]}
NO_COUNT = {"type_errors": ["3", 3.0, True, False, [3], NAN], "value_errors": [0, -1]}
NO_RATIO = {"type_errors": ["0.5", True, None, [0.5]], "value_errors": [0, -0.1, 1.1, NAN, INF]}
NO_RATE = {"type_errors": ["0.5", True, [0.5]], "value_errors": [-0.1, 1.1, NAN, INF]}
NO_AMOUNT: dict[str, list[Any]] = {"type_errors": ["1", True, [1]], "value_errors": [0, -1, NAN, INF, -INF]}
NO_UNITS: dict[str, list[Any]] = {"type_errors": ["1", True, [1]], "value_errors": [-1, NAN, INF, -INF]}
NO_FLAG = {"type_errors": [1, 0, "yes", None], "value_errors": []}
NO_RANDOMNESS: Any = {"type_errors": [5, "random", 0, False, random.Random], "value_errors": []}
NO_NAME = {"type_errors": [5, b"db", ["db"]], "value_errors": [""]}
NO_LISTENER: dict[str, list[Any]] = {
    "type_errors": [5, "print", [print], later, partial(later), Later()],
    "value_errors": [],
}
NO_PREDICATE: dict[str, list[Any]] = {"type_errors": [5, "yes", [plain], True, later], "value_errors": []}
NO_EXCEPTIONS: dict[str, list[Any]] = {
    "type_errors": [5, "ValueError", Boom("instance"), [ValueError], int, (ValueError, 5), (int,), None, later],
    "value_errors": [],
}
NO_BACKOFF: dict[str, list[Any]] = {
    "type_errors": [5, 0.5, "1", b"1", {1, 2}, ["1"], [True], [None], Constant, None, object(), later],
    "value_errors": [[], (), [-1], [1, NAN], [INF], [timedelta(seconds=-1)]],
}


NO_KEY: dict[str, list[Any]] = {"type_errors": [5, "url", [plain], later, partial(later)], "value_errors": []}
NO_SHARE: dict[str, list[Any]] = {"type_errors": ["1", True, [1], None], "value_errors": [-0.1, 1001, NAN, INF]}
NO_SAVINGS: dict[str, list[Any]] = {"type_errors": ["1", True, None], "value_errors": [0, 0.5, -1, NAN, INF]}
NO_INCOME: dict[str, list[Any]] = {"type_errors": ["1", True, None], "value_errors": [-0.1, NAN, INF, -INF]}
NO_BUDGET: dict[str, list[Any]] = {
    "type_errors": ["0.1", True, object(), RetryBudget, [0.1]],
    "value_errors": [-0.1, 1001, NAN, INF],
}


def required(wrong: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Of a parameter that has to be given, None is wrong as well."""
    return {**wrong, "type_errors": [*wrong["type_errors"], None]}


CASES: list[Case] = [
    # --- Retry
    *table("Retry", lambda it: Retry(it), "attempts", **NO_COUNT),
    *table("Retry", lambda it: Retry(on=it), "on", type_errors=NO_EXCEPTIONS["type_errors"], value_errors=[()]),
    *table("Retry", lambda it: Retry(ignore=it), "ignore", **NO_EXCEPTIONS),
    *table("Retry", lambda it: Retry(on_result=it), "on_result", **NO_PREDICATE),
    *table("Retry", lambda it: Retry(backoff=it), "backoff", **NO_BACKOFF),
    *table("Retry", lambda it: Retry(max_elapsed=it), "max_elapsed", **NO_DURATION),
    *table("Retry", lambda it: Retry(retry_after=it), "retry_after", **NO_FLAG),
    *table(
        "Retry",
        lambda it: Retry(max_retry_after=it),
        "max_retry_after",
        type_errors=[*NO_DURATION["type_errors"], None],
        value_errors=[0, -1, NAN, -INF, timedelta(0)],
    ),
    *table("Retry", lambda it: Retry(budget=it), "budget", **NO_BUDGET),
    *table("Retry", lambda it: Retry(wrap=it), "wrap", **NO_FLAG),
    *table("Retry", lambda it: Retry(on_retry=it), "on_retry", **NO_LISTENER),
    *table("Retry", lambda it: Retry(name=it), "name", **NO_NAME),
    *table("Retry", lambda it: Retry(rng=it), "rng", **NO_RANDOMNESS),
    # --- Hedge
    *table("Hedge", lambda it: Hedge(it), "delay", **NO_DELAY),
    *table("Hedge", lambda it: Hedge(hedges=it), "hedges", **NO_COUNT),
    *table("Hedge", lambda it: Hedge(on=it), "on", type_errors=NO_EXCEPTIONS["type_errors"], value_errors=[()]),
    *table("Hedge", lambda it: Hedge(on_result=it), "on_result", **NO_PREDICATE),
    *table("Hedge", lambda it: Hedge(ignore=it), "ignore", **NO_EXCEPTIONS),
    *table("Hedge", lambda it: Hedge(eager=it), "eager", **NO_FLAG),
    *table("Hedge", lambda it: Hedge(budget=it), "budget", **NO_BUDGET),
    *table("Hedge", lambda it: Hedge(on_hedge=it), "on_hedge", **NO_LISTENER),
    *table("Hedge", lambda it: Hedge(name=it), "name", **NO_NAME),
    # --- Quantile
    *table("Quantile", Quantile, "share", type_errors=["1", True, None, [1]], value_errors=[0, 1, 95, -0.1, NAN, INF]),
    *table("Quantile", lambda it: Quantile(least=it), "least", **required(NO_DURATION)),
    *table("Quantile", lambda it: Quantile(most=it), "most", **NO_DURATION),
    *table("Quantile", lambda it: Quantile(least=0.5, most=it), "most", type_errors=[], value_errors=[0.4]),
    *table("Quantile", lambda it: Quantile(window=it), "window", **required(NO_DURATION)),
    *table("Quantile", lambda it: Quantile(warm_up=it), "warm_up", **NO_COUNT),
    # --- RetryBudget
    *table("RetryBudget", lambda it: RetryBudget(it), "ratio", **NO_SHARE),
    *table("RetryBudget", lambda it: RetryBudget(saved=it), "saved", **NO_SAVINGS),
    *table("RetryBudget", lambda it: RetryBudget(per_second=it), "per_second", **NO_INCOME),
    # --- RepeatCap
    *table("RepeatCap", RepeatCap, "repeats", type_errors=["3", 3.0, True, None, NAN], value_errors=[-1]),
    *table("RepeatCap", lambda it: RepeatCap(1, name=it), "name", **NO_NAME),
    # --- Timeout
    *table("Timeout", lambda it: Timeout(it), "seconds", **required(NO_DURATION)),
    *table("Timeout", lambda it: Timeout(1.0, cooperative=it), "cooperative", **NO_FLAG),
    *table("Timeout", lambda it: Timeout(1.0, on_timeout=it), "on_timeout", **NO_LISTENER),
    *table("Timeout", lambda it: Timeout(1.0, name=it), "name", **NO_NAME),
    # --- CircuitBreaker
    *table(
        "CircuitBreaker",
        lambda it: CircuitBreaker(it),
        "trip",
        type_errors=["5", 5.0, 0.5, True, None, [5], ConsecutiveFailures],
        value_errors=[0, -1],
    ),
    *table(
        "CircuitBreaker",
        lambda it: CircuitBreaker(open_for=it),
        "open_for",
        type_errors=["30", True, None, {1, 2}, ["1"], Constant, later],
        value_errors=[0, -1, NAN, INF, timedelta(0), [], [-1], [NAN]],
    ),
    *table("CircuitBreaker", lambda it: CircuitBreaker(probes=it), "probes", **required(NO_COUNT)),
    *table("CircuitBreaker", lambda it: CircuitBreaker(probe_successes=it), "probe_successes", **required(NO_COUNT)),
    *table("CircuitBreaker", lambda it: CircuitBreaker(probe_timeout=it), "probe_timeout", **NO_DURATION),
    *table(
        "CircuitBreaker",
        lambda it: CircuitBreaker(on=it),
        "on",
        type_errors=NO_EXCEPTIONS["type_errors"],
        value_errors=[()],
    ),
    *table("CircuitBreaker", lambda it: CircuitBreaker(ignore=it), "ignore", **NO_EXCEPTIONS),
    *table("CircuitBreaker", lambda it: CircuitBreaker(on_result=it), "on_result", **NO_PREDICATE),
    *table("CircuitBreaker", lambda it: CircuitBreaker(on_transition=it), "on_transition", **NO_LISTENER),
    *table("CircuitBreaker", lambda it: CircuitBreaker(probe=it), "probe", type_errors=[5, "ping"], value_errors=[]),
    *table("CircuitBreaker", lambda it: CircuitBreaker(observe_only=it), "observe_only", **NO_FLAG),
    *table("CircuitBreaker", lambda it: CircuitBreaker(name=it), "name", **NO_NAME),
    # --- work around a call
    *table("Once", lambda it: Once({}, key=it), "key", type_errors=[5, "key", None, later], value_errors=[]),
    *table("Once", lambda it: Once({}, key=plain, payload=it), "payload", type_errors=[5, later], value_errors=[]),
    *table("Once", lambda it: Once(it, key=plain), "store", type_errors=[5, "store", None], value_errors=[]),
    *table("Once", lambda it: Once({}, key=plain, lease=it), "lease", **required(NO_DURATION)),
    *table("Once", lambda it: Once({}, key=plain, keep=it), "keep", **required(NO_DURATION)),
    *table("Once", lambda it: Once({}, key=plain, serializer=it), "serializer", type_errors=[5], value_errors=[]),
    *table("Once", lambda it: Once({}, key=plain, name=it), "name", **NO_NAME),
    *table("IdempotencyKey", lambda it: IdempotencyKey(it), "make", type_errors=[5, "k", later], value_errors=[]),
    *table("IdempotencyKey", lambda it: IdempotencyKey(name=it), "name", **NO_NAME),
    *table("Gate", lambda it: Gate(name=it), "name", **NO_NAME),
    *table(
        "Supervisor",
        lambda it: Supervisor(max_restarts=it),
        "max_restarts",
        type_errors=["3", 3.0, True],
        value_errors=[-1],
    ),
    *table(
        "Supervisor",
        lambda it: Supervisor(max_restarts=it),
        "max_restarts",
        type_errors=["3", 3.0, True],
        value_errors=[-1],
    ),
    *table("Supervisor", lambda it: Supervisor(within=it), "within", **required(NO_DURATION)),
    *table("Supervisor", lambda it: Supervisor(on_parked=it), "on_parked", **NO_LISTENER),
    *table("Supervisor", lambda it: Supervisor(name=it), "name", **NO_NAME),
    *table("each", lambda it: each(Retry(), plain, [], limit=it), "limit", **required(NO_COUNT)),
    *table("each", lambda it: each(Retry(), plain, [], limit=1, ordered=it), "ordered", **NO_FLAG),
    # --- trip conditions
    *table("ConsecutiveFailures", lambda it: ConsecutiveFailures(it), "n", **required(NO_COUNT)),
    *table("FailureRatio", lambda it: FailureRatio(it), "ratio", **NO_RATIO),
    *table("FailureRatio", lambda it: FailureRatio(0.5, min_calls=it), "min_calls", **required(NO_COUNT)),
    *table("FailureRatio", lambda it: FailureRatio(0.5, window=it), "window", **NO_DURATION),
    *table("FailureRatio", lambda it: FailureRatio(0.5, last=it), "last", **NO_COUNT),
    *table("SlowRatio", lambda it: SlowRatio(it, slower_than=1.0), "ratio", **NO_RATIO),
    *table("SlowRatio", lambda it: SlowRatio(0.5, slower_than=it), "slower_than", **required(NO_DURATION)),
    *table("SlowRatio", lambda it: SlowRatio(0.5, slower_than=1.0, min_calls=it), "min_calls", **required(NO_COUNT)),
    *table("SlowRatio", lambda it: SlowRatio(0.5, slower_than=1.0, window=it), "window", **NO_DURATION),
    *table("SlowRatio", lambda it: SlowRatio(0.5, slower_than=1.0, last=it), "last", **NO_COUNT),
    # --- Bulkhead
    *table("Bulkhead", lambda it: Bulkhead(it), "limit", **required(NO_COUNT)),
    *table(
        "Bulkhead",
        lambda it: Bulkhead(1, queue=it),
        "queue",
        type_errors=["3", 3.0, True, None, NAN],
        value_errors=[-1],
    ),
    *table("Bulkhead", lambda it: Bulkhead(1, max_wait=it), "max_wait", **NO_DURATION),
    *table("Bulkhead", lambda it: Bulkhead(1, observe_only=it), "observe_only", **NO_FLAG),
    *table("Bulkhead", lambda it: Bulkhead(1, name=it), "name", **NO_NAME),
    *table("Bulkhead.resize", lambda it: Bulkhead(1).resize(it), "limit", **required(NO_COUNT)),
    # --- Rate and RateLimiter
    *table("Rate", lambda it: Rate(it), "limit", **required(NO_AMOUNT)),
    *table("Rate", lambda it: Rate(1, per=it), "per", **required(NO_DURATION)),
    *table("Rate", lambda it: Rate(1, burst=it), "burst", **NO_AMOUNT),
    *table(
        "Rate", lambda it: Rate(1, cost=it), "cost", **{**required(NO_AMOUNT), "value_errors": [0, -1, NAN, INF, 2]}
    ),
    *table("Rate", lambda it: Rate(1, cost=it), "cost", type_errors=[later, plain_without], value_errors=[]),
    *table("Rate", lambda it: Rate(1, actual=it), "actual", **NO_PREDICATE),
    *table("RateLimiter", lambda it: RateLimiter(it), "rate", **required(NO_AMOUNT)),
    *table(
        "RateLimiter", lambda it: RateLimiter(1, it), "more", type_errors=[5, "1", None, [Rate(1)]], value_errors=[]
    ),
    *table("RateLimiter", lambda it: RateLimiter(1, max_wait=it), "max_wait", **NO_DELAY),
    *table("RateLimiter", lambda it: RateLimiter(1, retry_after=it), "retry_after", **NO_FLAG),
    *table(
        "RateLimiter",
        lambda it: RateLimiter(1, longest_pause=it),
        "longest_pause",
        type_errors=["1", True, None],
        value_errors=[0, -1, NAN],
    ),
    *table("RateLimiter", lambda it: RateLimiter(1, told=it), "told", **NO_PREDICATE),
    *table("RateLimiter", lambda it: RateLimiter(1, observe_only=it), "observe_only", **NO_FLAG),
    *table("RateLimiter", lambda it: RateLimiter(1, name=it), "name", **NO_NAME),
    *table("RateLimiter.resize", lambda it: RateLimiter(1).resize(it), "limit", **required(NO_AMOUNT)),
    *table("RateLimiter.turn", lambda it: RateLimiter(1).turn(it), "cost", **required(NO_UNITS)),
    *table("RateLimiter.try_take", lambda it: RateLimiter(1).try_take(it), "cost", **required(NO_UNITS)),
    *table("RateLimiter.pause", lambda it: RateLimiter(1).pause(it), "seconds", **required(NO_DELAY)),
    *table("RateLimiter.learn", lambda it: RateLimiter(1).learn(it, 5), "remaining", **required(NO_UNITS)),
    *table("RateLimiter.learn", lambda it: RateLimiter(1).learn(1, it), "reset_after", **required(NO_DELAY)),
    # --- Cache, SingleFlight and Keyed
    *table("Cache", lambda it: Cache(it), "ttl", **{**required(NO_DURATION), "type_errors": ["1", True, None, [1]]}),
    *table("Cache", lambda it: Cache(it), "ttl", type_errors=[later, plain_without], value_errors=[]),
    *table("Cache", lambda it: Cache(1, key=it), "key", **NO_KEY),
    *table("Cache", lambda it: Cache(1, max_size=it), "max_size", **required(NO_COUNT)),
    *table("Cache", lambda it: Cache(1, stale=it), "stale", **required(NO_DELAY)),
    *table("Cache", lambda it: Cache(1, on=it), "on", type_errors=NO_EXCEPTIONS["type_errors"], value_errors=[()]),
    *table("Cache", lambda it: Cache(1, ignore=it), "ignore", **NO_EXCEPTIONS),
    *table("Cache", lambda it: Cache(1, keep_errors=it), "keep_errors", **NO_EXCEPTIONS),
    *table("Cache", lambda it: Cache(1, errors_ttl=it), "errors_ttl", **required(NO_DURATION)),
    *table("Cache", lambda it: Cache(1, store=it), "store", type_errors=[5, "dict", [], dict, True], value_errors=[]),
    *table("Cache", lambda it: Cache(1, name=it), "name", **NO_NAME),
    *table("SingleFlight", lambda it: SingleFlight(key=it), "key", **NO_KEY),
    *table("SingleFlight", lambda it: SingleFlight(name=it), "name", **NO_NAME),
    *table("Keyed", lambda it: Keyed(it, plain), "make", **required(NO_KEY)),
    *table("Keyed", lambda it: Keyed(plain, it), "key", **required(NO_KEY)),
    *table("Keyed", lambda it: Keyed(plain, plain, max_keys=it), "max_keys", **required(NO_COUNT)),
    *table("Keyed", lambda it: Keyed(plain, plain, idle=it), "idle", **NO_DURATION),
    *table("Keyed", lambda it: Keyed(plain, plain, name=it), "name", **NO_NAME),
    # --- streams
    *table("streaming", lambda it: Retry().streaming(first=it), "first", **NO_DURATION),
    *table("streaming", lambda it: Retry().streaming(idle=it), "idle", **NO_DURATION),
    *table(
        "streaming",
        lambda it: Retry().streaming(resume=it),
        "resume",
        type_errors=[5, "after", [plain], plain],
        value_errors=[],
    ),
    *table(
        "streaming",
        lambda it: Retry().streaming(resume={"after": it}),
        "resume",
        type_errors=[5, "id", later],
        value_errors=[],
    ),
    # --- Fallback
    *table(
        "Fallback", lambda it: Fallback(handler=it), "handler", type_errors=[5, "x", [plain], False], value_errors=[]
    ),
    *table("Fallback", lambda it: Fallback(on=it), "on", type_errors=NO_EXCEPTIONS["type_errors"], value_errors=[()]),
    *table("Fallback", lambda it: Fallback(ignore=it), "ignore", **NO_EXCEPTIONS),
    *table("Fallback", lambda it: Fallback(on_result=it), "on_result", **NO_PREDICATE),
    *table("Fallback", lambda it: Fallback(on_fallback=it), "on_fallback", **NO_LISTENER),
    *table("Fallback", lambda it: Fallback(name=it), "name", **NO_NAME),
    # --- Chaos
    *table("Chaos", lambda it: Chaos(it, result=1), "rate", **required(NO_RATE)),
    *table("Chaos.on", lambda it: Chaos(result=1).on(it), "rate", **NO_RATE),
    *table(
        "Chaos",
        lambda it: Chaos(error=it),
        "error",
        type_errors=[5, "boom", KeyboardInterrupt, KeyboardInterrupt(), int, later],
        value_errors=[],
    ),
    *table("Chaos", lambda it: Chaos(delay=it), "delay", **{**NO_DURATION, "type_errors": ["1", True, [1], later]}),
    *table("Chaos", lambda it: Chaos(action=it), "action", type_errors=[5, "x", [plain], False], value_errors=[]),
    *table("Chaos", lambda it: Chaos(result=1, when=it), "when", **NO_PREDICATE),
    *table("Chaos", lambda it: Chaos(result=1, name=it), "name", **NO_NAME),
    *table(
        "Chaos",
        lambda it: Chaos(result=1, rng=it),
        "rng",
        type_errors=[5, "random", 0, False, random.Random],
        value_errors=[],
    ),
    *table(
        "Chaos.on",
        lambda it: Chaos(result=1).on(lasts=it),
        "lasts",
        **{**required(NO_DURATION), "value_errors": [0, -1, NAN, INF, 86_400.1, 1e9]},
    ),
    # --- AdaptiveLimit
    *table(
        "AdaptiveLimit",
        lambda it: AdaptiveLimit(it),
        "slower_than",
        **{**required(NO_DURATION), "type_errors": ["1", True, None, [1], Seeking, {}]},
    ),
    *table("AdaptiveLimit", lambda it: AdaptiveLimit(1, initial=it), "initial", **required(NO_COUNT)),
    *table("AdaptiveLimit", lambda it: AdaptiveLimit(1, least=it), "least", **required(NO_COUNT)),
    *table("AdaptiveLimit", lambda it: AdaptiveLimit(1, most=it), "most", **required(NO_COUNT)),
    *table(
        "AdaptiveLimit",
        lambda it: AdaptiveLimit(1, queue=it),
        "queue",
        type_errors=["3", 3.0, True, None],
        value_errors=[-1],
    ),
    *table("AdaptiveLimit", lambda it: AdaptiveLimit(1, max_wait=it), "max_wait", **NO_DURATION),
    *table("AdaptiveLimit", lambda it: AdaptiveLimit(1, window=it), "window", **required(NO_DURATION)),
    *table("AdaptiveLimit", lambda it: AdaptiveLimit(1, min_samples=it), "min_samples", **required(NO_COUNT)),
    *table(
        "AdaptiveLimit",
        lambda it: AdaptiveLimit(1, headroom=it),
        "headroom",
        type_errors=["2", True, None, [2]],
        value_errors=[0.99, 0, -2, NAN, INF],
    ),
    *table(
        "AdaptiveLimit",
        lambda it: AdaptiveLimit(1, on=it),
        "on",
        type_errors=NO_EXCEPTIONS["type_errors"],
        value_errors=[()],
    ),
    *table("AdaptiveLimit", lambda it: AdaptiveLimit(1, on_change=it), "on_change", **NO_LISTENER),
    *table("AdaptiveLimit", lambda it: AdaptiveLimit(1, observe_only=it), "observe_only", **NO_FLAG),
    *table("AdaptiveLimit", lambda it: AdaptiveLimit(1, name=it), "name", **NO_NAME),
    *table("Seeking", lambda it: Seeking(it), "dither", **{**NO_RATIO, "value_errors": [0, 1, -0.1, NAN, INF]}),
    *table("Seeking", lambda it: Seeking(gain=it), "gain", **NO_RATIO),
    *table("Seeking", lambda it: Seeking(target=it), "target", **{**NO_RATIO, "value_errors": [0, 1, -0.1, NAN, INF]}),
    # --- AdaptiveThrottle
    *table(
        "AdaptiveThrottle",
        lambda it: AdaptiveThrottle(it),
        "k",
        type_errors=["2", True, None, [2]],
        value_errors=[0.99, 0, -2, NAN, INF],
    ),
    *table("AdaptiveThrottle", lambda it: AdaptiveThrottle(window=it), "window", **required(NO_DURATION)),
    *table("AdaptiveThrottle", lambda it: AdaptiveThrottle(min_calls=it), "min_calls", **required(NO_COUNT)),
    *table("AdaptiveThrottle", lambda it: AdaptiveThrottle(most=it), "most", **NO_RATIO),
    *table(
        "AdaptiveThrottle",
        lambda it: AdaptiveThrottle(on=it),
        "on",
        type_errors=NO_EXCEPTIONS["type_errors"],
        value_errors=[()],
    ),
    *table("AdaptiveThrottle", lambda it: AdaptiveThrottle(on_result=it), "on_result", **NO_PREDICATE),
    *table("AdaptiveThrottle", lambda it: AdaptiveThrottle(ignore=it), "ignore", **NO_EXCEPTIONS),
    *table("AdaptiveThrottle", lambda it: AdaptiveThrottle(observe_only=it), "observe_only", **NO_FLAG),
    *table("AdaptiveThrottle", lambda it: AdaptiveThrottle(name=it), "name", **NO_NAME),
    *table("AdaptiveThrottle", lambda it: AdaptiveThrottle(rng=it), "rng", **NO_RANDOMNESS),
    # --- backoffs
    *table("Constant", lambda it: Constant(it), "delay", **required(NO_DELAY)),
    *table("Linear", lambda it: Linear(it), "step", **required(NO_DELAY)),
    *table("Linear", lambda it: Linear(1, cap=it), "cap", **NO_DURATION),
    *table("Exponential", lambda it: Exponential(it), "base", **required(NO_DELAY)),
    *table("Exponential", lambda it: Exponential(1, cap=it), "cap", **NO_DURATION),
    *table(
        "Exponential",
        lambda it: Exponential(1, factor=it),
        "factor",
        type_errors=["2", True, None, [2]],
        value_errors=[0.99, 0, -2, NAN, INF],
    ),
    *table("Decorrelated", lambda it: Decorrelated(it), "base", **required(NO_DELAY)),
    *table("Decorrelated", lambda it: Decorrelated(1, cap=it), "cap", **NO_DURATION),
    *table("Decorrelated", lambda it: Decorrelated(5, cap=it), "cap", type_errors=[], value_errors=[4.9]),
    *(
        case
        for kind in (Constant, Linear, Exponential)
        for case in table(
            kind.__name__,
            lambda it, kind=kind: kind(1, jitter=it),
            "jitter",
            type_errors=[True, None, [0.5], b"full"],
            value_errors=["none at all", "FULL", 0, -0.5, 1.5, NAN, INF],
        )
    ),
    # --- contexts and budgets
    *table("Context", lambda it: Context(timeout=it), "timeout", **{**NO_DELAY, "value_errors": [-1, NAN, -INF]}),
    *table("Context", lambda it: Context(operation=it), "operation", type_errors=[5, b"op", ["op"]], value_errors=[]),
    *table(
        "Context", lambda it: Context(properties=it), "properties", type_errors=[5, "ab", ["a"], {1}], value_errors=[]
    ),
    *table(
        "Context.timeout", lambda it: Context().timeout(it), "limit", **{**NO_DURATION, "value_errors": [0, -1, NAN]}
    ),
    *table("deadline", lambda it: deadline(it), "timeout", **{**required(NO_DELAY), "value_errors": [-1, NAN, -INF]}),
    *table("detached", lambda it: detached(it), "timeout", **{**NO_DELAY, "value_errors": [-1, NAN, -INF]}),
    # --- pipelines
    *table("wrap", lambda it: Retry().wrap(name=it), "name", **NO_NAME),
    *table(
        "wrap",
        lambda it: Retry().wrap(listeners=it),
        "listeners",
        type_errors=[5, print, [5], ["print"], [later], None],
        value_errors=[],
    ),
    # --- listeners of the process
    *table(
        "subscribe",
        lambda it: events.subscribe(it),
        "listener",
        type_errors=[*NO_LISTENER["type_errors"], None],
        value_errors=[],
    ),
    *table(
        "subscribe",
        lambda it: events.subscribe(print, it),
        "kinds",
        type_errors=[5, "RetryScheduled", ValueError, Boom, events.Event, None],
        value_errors=[],
    ),
]


def told(case: Case, message: str) -> bool:
    """Whether the message tells the value; that of a list may tell the one element that is wrong."""
    candidates = [case.told]
    if isinstance(case.value, (list, tuple)):
        candidates += [tell(each) for each in case.value]
    return any(candidate.lower() in message.lower() for candidate in candidates)


PARAMETERS = [list(cases) for _, cases in itertools.groupby(CASES, lambda it: (it.where, it.parameter))]


@pytest.mark.parametrize("cases", PARAMETERS, ids=lambda it: f"{it[0].where} {it[0].parameter}")
def test_a_wrong_argument_is_refused_with_its_name_and_value(cases: list[Case]) -> None:
    """At once, by the type of error that fits, in one sentence."""
    for case in cases:
        with pytest.raises((TypeError, ValueError)) as caught:
            pytest.fail(f"{case} was taken: {case.make(case.value)}")
        message = str(caught.value)
        assert type(caught.value) is case.error, message
        assert case.parameter in message
        assert told(case, message), (case, message)
        assert "\n" not in message


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Timeout(0), "more than zero"),
        (lambda: Timeout("1"), "seconds (a number) or a timedelta"),  # type: ignore[arg-type]
        (lambda: Bulkhead(0), "at least 1"),
        (lambda: Bulkhead(1, queue=-1), "at least 0"),
        (lambda: FailureRatio(2), "at most 1"),
        (lambda: Retry(on_retry=later), "plain function"),
        (lambda: Retry(backoff=2.5), "Constant(2.5)"),  # type: ignore[arg-type]
        (lambda: CircuitBreaker(0.5), "a condition such as ConsecutiveFailures(5), or an int"),  # type: ignore[arg-type]
        (lambda: events.subscribe(print, Boom), "resilience.events"),  # type: ignore[arg-type]
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_the_message_says_what_would_have_been_right(make: Callable[[], object], says: str) -> None:
    """Bounds, units, and what to write instead."""
    with pytest.raises((TypeError, ValueError)) as caught:
        make()
    assert says in str(caught.value)


def test_the_table_leaves_no_parameter_out() -> None:
    """Each parameter of each constructor is in it, but those that take anything."""
    takes_anything = {("Fallback", "value"), ("Chaos", "result")}
    kinds = [
        Retry,
        Timeout,
        CircuitBreaker,
        Bulkhead,
        Fallback,
        Chaos,
        AdaptiveThrottle,
        Rate,
        RateLimiter,
        AdaptiveLimit,
        Seeking,
        ConsecutiveFailures,
        FailureRatio,
        SlowRatio,
    ]
    kinds += [Constant, Linear, Exponential, Decorrelated, Context, deadline]
    expected = {
        (kind.__name__, name) for kind in kinds for name in list(inspect.signature(kind).parameters)
    } - takes_anything
    assert expected <= {(case.where, case.parameter) for case in CASES}


# --- two at once -----------------------------------------------------------------------------


def test_a_value_and_a_handler_are_refused_together() -> None:
    """Also where the value is None: it was written down."""
    for value in ("x", None):
        with pytest.raises(ValueError, match=r"value.*handler") as caught:
            Fallback(value, handler=plain)  # type: ignore[call-overload]
        assert repr(value) in str(caught.value)


def test_a_window_of_time_and_one_of_calls_are_refused_together() -> None:
    """One or the other."""
    for make in (
        lambda: FailureRatio(0.5, window=30.0, last=100),
        lambda: SlowRatio(0.5, slower_than=1.0, window=30.0, last=100),
    ):
        with pytest.raises(ValueError, match=r"window=30\.0.*last=100"):
            make()


def test_conditions_combine_with_conditions() -> None:
    """`ConsecutiveFailures(3) | 5` is not guessed at."""
    for stranger in (5, None, "x", Boom):
        with pytest.raises(TypeError):
            ConsecutiveFailures(3) | stranger  # type: ignore[operator]


def test_a_missing_argument_is_pythons_own_error() -> None:
    """What has no default has to be given; what is keyword-only has to be named."""
    for make in (
        lambda: Timeout(),  # type: ignore[call-arg]
        lambda: Bulkhead(),  # type: ignore[call-arg]
        lambda: SlowRatio(0.5),  # type: ignore[call-arg]
        lambda: deadline(),  # type: ignore[call-arg]
        lambda: Retry(3, Boom),  # type: ignore[misc]
        lambda: CircuitBreaker(5, 30.0),  # type: ignore[misc]
        lambda: Fallback("value", plain),  # type: ignore[call-overload]
        lambda: FailureRatio(0.5, 10),  # type: ignore[misc]
        lambda: SlowRatio(0.5, 10),  # type: ignore[misc]
        lambda: Timeout(1.0, True),  # type: ignore[misc]
        lambda: Bulkhead(1, 2),  # type: ignore[misc]
        lambda: Context(5.0),  # type: ignore[misc]
        lambda: Retry(tries=3),  # type: ignore[call-arg]
    ):
        with pytest.raises(TypeError):
            make()


# --- entry points ----------------------------------------------------------------------------

NOT_CALLABLE = [42, None, "fetch", [len]]
ENTRIES: dict[str, Callable[[Policy[Any], Any], Any]] = {
    "execute": lambda policy, fn: policy.execute(fn),
    "call": lambda policy, fn: policy.call(fn),
    "capture": lambda policy, fn: policy.capture(fn),
    "aexecute": lambda policy, fn: asyncio.run(policy.aexecute(fn)),
    "acall": lambda policy, fn: asyncio.run(policy.acall(fn)),
    "acapture": lambda policy, fn: asyncio.run(policy.acapture(fn)),
    "decorator": lambda policy, fn: policy(fn),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("fn", NOT_CALLABLE, ids=repr)
def test_what_cannot_be_called_is_refused_and_no_policy_takes_it_for_an_outcome(entry: str, fn: Any) -> None:
    """It is a mistake in the program: a Fallback that answers it would hide it for ever."""
    seen: list[Any] = []
    policy = Fallback("answered", on_fallback=seen.append).wrap(
        Retry(on=Exception, backoff=[0], on_retry=seen.append), CircuitBreaker(1, on_transition=seen.append)
    )
    with pytest.raises(TypeError) as caught:
        ENTRIES[entry](policy, fn)
    assert "callable" in str(caught.value)
    assert repr(fn) in str(caught.value)
    assert seen == []


@pytest.mark.parametrize("entry", ["execute", "capture", "aexecute", "acapture"])
@pytest.mark.parametrize("ctx", [5, "ctx", 0, {}, 2.5, Context], ids=repr)
def test_what_is_no_context_is_refused(entry: str, ctx: Any) -> None:
    """`execute(fn, 5)` is not a timeout of five seconds; and 0 and {} are no None."""

    async def afn(ctx: Context) -> str:
        return "fine"

    policy = Fallback("answered")
    with pytest.raises(TypeError) as caught:
        if entry.startswith("a"):
            asyncio.run(getattr(policy, entry)(afn, ctx))
        else:
            getattr(policy, entry)(lambda ctx: "fine", ctx)
    assert "ctx" in str(caught.value)
    assert repr(ctx) in str(caught.value)


@pytest.mark.parametrize("seconds", [-1, NAN, INF, "1", True, None], ids=repr)
def test_a_policy_cannot_sleep_for_nonsense(seconds: Any) -> None:
    """`ctx.sleep` names what it was given."""

    class Sleeping(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            await ctx.sleep(seconds)

    with pytest.raises((TypeError, ValueError), match="seconds"):
        Sleeping().execute(lambda ctx: "never")


@pytest.mark.parametrize("wrong", [[], [NAN], [-1.0], ["1"], [INF], 5, None], ids=repr)
def test_a_backoff_that_computes_nonsense_is_told_when_it_does(wrong: Any) -> None:
    """It decides, so what is wrong with it comes out; there is no wait for a NaN."""
    retry = Retry(2, on=Boom, backoff=lambda: wrong)

    def fail(ctx: Context) -> None:
        raise Boom

    with pytest.raises((TypeError, ValueError)):
        retry.execute(fail)


def test_right_arguments_at_the_edges_are_taken() -> None:
    """What looks odd and means something."""
    Retry(1)
    Retry(None, max_elapsed=1)
    Retry(ignore=())
    Retry(backoff=[0])
    Retry(backoff=(timedelta(0), 1))
    Retry(on=BaseException, ignore=lambda error: False)
    Timeout(5e-324)
    Timeout(timedelta(days=365))
    CircuitBreaker(1, open_for=timedelta(milliseconds=1))
    FailureRatio(1)
    FailureRatio(0.5, min_calls=10, last=5)
    Bulkhead(10**9, queue=0)
    Constant(0)
    Linear(0)
    Exponential(0)
    Exponential(5, cap=1)
    Exponential(1, factor=1)
    Decorrelated(1, cap=1)
    Constant(1, jitter=1)
    Context(timeout=0, operation="", properties={})
    Context(timeout=INF)
    Retry(rng=random)
    assert Retry().wrap(listeners=()).name == "Pipeline"
