"""Wrong arguments are refused when they are passed, with the parameter and the value in the message.

One table has every constructor and entry point, parameter by parameter.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import random
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Never, TypeAlias

import pytest

import resilience
from resilience import (
    AdaptiveLimit,
    AdaptiveThrottle,
    Bulkhead,
    Cache,
    Chaos,
    CircuitBreaker,
    ConsecutiveFailures,
    Context,
    FailureCount,
    FailureRatio,
    Fallback,
    Hedge,
    Keyed,
    Pipeline,
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
    backoff,
    deadline,
    detached,
    events,
    work,
)
from resilience.backoff import Constant, Decorrelated, Exponential, Linear
from resilience.work import Gate, IdempotencyKey, Once, Supervisor, each
from tests.conftest import Boom

NAN, INF = math.nan, math.inf


async def later(*args: object) -> None:
    """A coroutine function, where a plain function is expected."""


class Later:
    """An object whose `__call__` is a coroutine function."""

    async def __call__(self, *args: object) -> None: ...


class Incomparable:
    """As an array of numpy: a comparison with it has no truth value."""

    def __eq__(self, other: object) -> Never:
        raise ValueError("the truth value is ambiguous")

    __hash__ = None  # type: ignore[assignment]


def plain(*args: object) -> None: ...


def plain_without() -> None: ...


class Case(NamedTuple):
    """One wrong argument."""

    where: str
    make: Callable[[Any], object]
    error: type[Exception]
    parameter: str
    value: Any
    shown: str  # the value as the message shows it


#: The values that a parameter refuses, by the type of the error.
Wrong: TypeAlias = dict[str, list[Any]]


def wrong(type_errors: list[Any], value_errors: list[Any]) -> Wrong:
    return {"type_errors": type_errors, "value_errors": value_errors}


def required(values: Wrong) -> Wrong:
    """For a required parameter, None is wrong as well."""
    return {**values, "type_errors": [*values["type_errors"], None]}


def table(where: str, make: Callable[[Any], object], parameter: str, values: Wrong) -> list[Case]:
    """The wrong values of one parameter."""
    return [
        Case(where, make, error, parameter, value, show(value))
        for error, kind in ((TypeError, "type_errors"), (ValueError, "value_errors"))
        for value in values[kind]
    ]


def of(make: Callable[..., object], given: dict[str, Any] | None = None, /, **parameters: Wrong) -> list[Case]:
    """The wrong values of parameters of a constructor, each with the other required arguments."""
    return [
        case
        for parameter, values in parameters.items()
        for case in table(
            make.__name__, lambda value, name=parameter: make(**{**(given or {}), name: value}), parameter, values
        )
    ]


def ways_to_wrap(parameter: str, values: Wrong) -> list[Case]:
    """The wrong values of a parameter of a pipeline, for each way to build one."""
    return [
        case
        for wrap in (Pipeline, Policy.wrap, Retry().wrap)
        for case in table("wrap", lambda value, wrap=wrap: wrap(Retry(), **{parameter: value}), parameter, values)
    ]


def show(value: Any) -> str:
    """Return the value as a message shows it: its `repr`, a duration in seconds, or the name of a function."""
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g}"
    if value is plain_without:
        return "plain_without"
    if isinstance(value, Later):
        return "Later"
    if value is later or isinstance(value, partial):
        return "later"
    return repr(value)


#: The values that each kind of parameter refuses.
NO_DURATION = wrong(
    ["1", b"1", True, False, [1], 1j, Fraction(1, 2), object],
    [0, 0.0, -1, -0.5, NAN, INF, -INF, timedelta(0), timedelta(-1), 10**400],
)
NO_DELAY = wrong(["1", True, [1]], [-1, -0.5, NAN, INF, timedelta(seconds=-1)])
NO_COUNT = wrong(["3", 3.0, True, False, [3], NAN], [0, -1])
NO_RATIO = wrong(["0.5", True, None, [0.5]], [0, -0.1, 1.1, NAN, INF])
NO_RATE = wrong(["0.5", True, [0.5]], [-0.1, 1.1, NAN, INF])
NO_AMOUNT = wrong(["1", True, [1]], [0, -1, NAN, INF, -INF])
NO_UNITS = wrong(["1", True, [1]], [-1, NAN, INF, -INF])
NO_FLAG = wrong([1, 0, "yes", None], [])
NO_RANDOMNESS = wrong([5, "random", 0, False, random.Random], [])
NO_NAME = wrong([5, b"db", ["db"]], [""])
NO_LISTENER = wrong([5, "print", [print], later, partial(later), Later()], [])
NO_PREDICATE = wrong([5, "yes", [plain], True, later], [])
NO_EXCEPTIONS = wrong(
    [5, "ValueError", Boom("instance"), [ValueError], int, (ValueError, 5), (int,), None, later, Incomparable()], []
)
NO_BACKOFF = wrong(
    [5, 0.5, "1", b"1", {1, 2}, ["1"], [True], [None], Constant, None, object(), later, iter([1.0])],
    [[], (), [-1], [1, NAN], [INF], [timedelta(seconds=-1)]],
)
NO_KEY = wrong([5, "url", [plain], later, partial(later)], [])
NO_HEDGING = wrong(
    ["1", b"1", True, None, {1, 2}, ["1"], [True], (None,), iter([1.0])],
    [*NO_DELAY["value_errors"], [], (), [-1], [NAN], (INF,)],
)
NO_SHARE = wrong(["1", True, [1], None], [-0.1, 1001, NAN, INF])
NO_SAVINGS = wrong(["1", True, None], [0, 0.5, -1, NAN, INF])
NO_INCOME = wrong(["1", True, None], [-0.1, NAN, INF, -INF])
NO_BUDGET = wrong(["0.1", True, object(), RetryBudget, [0.1]], [-0.1, 1001, NAN, INF])
#: What `on` refuses: other values than exceptions, and an empty tuple.
NO_FAILURES = wrong(NO_EXCEPTIONS["type_errors"], [()])
NO_JITTER = wrong([True, None, [0.5], b"full"], ["none at all", "FULL", 0, -0.5, 1.5, NAN, INF])

#: What parameters of these names refuse, in each class that has them and none of its own below.
COMMON: dict[str, Wrong] = {
    "name": NO_NAME,
    "on": NO_FAILURES,
    "on_result": NO_PREDICATE,
    "rng": NO_RANDOMNESS,
    "budget": NO_BUDGET,
    "jitter": NO_JITTER,
    "backoff": NO_BACKOFF,
    "delay": NO_DELAY,
    "key": NO_KEY,
    "ratio": NO_RATIO,
    **dict.fromkeys("ignore keep_errors".split(), NO_EXCEPTIONS),
    **dict.fromkeys("attempts hedges last".split(), NO_COUNT),
    **dict.fromkeys("min_calls probes probe_successes n limit max_size max_keys initial".split(), required(NO_COUNT)),
    **dict.fromkeys("cap max_elapsed max_wait probe_timeout idle".split(), NO_DURATION),
    **dict.fromkeys("seconds lease keep within errors_ttl window slower_than".split(), required(NO_DURATION)),
    **dict.fromkeys("stale step base".split(), required(NO_DELAY)),
    **dict.fromkeys("observe_only cooperative wrap eager ordered".split(), NO_FLAG),
    **dict.fromkeys("on_retry on_hedge on_timeout on_transition on_fallback on_change on_parked".split(), NO_LISTENER),
}


def every(make: Callable[..., object], given: dict[str, Any] | None = None, /, **own: Wrong) -> list[Case]:
    """The wrong values of all parameters of a constructor: its own, and the common ones."""
    common = {name: COMMON[name] for name in inspect.signature(make).parameters if name in COMMON}
    return of(make, given, **{**common, **own})


NO_END = {**required(NO_DELAY), "value_errors": [-1, -0.5, NAN, -INF, 10**400]}
NO_SHORTER_END = {**NO_DELAY, "value_errors": [-1, -0.5, NAN, -INF, 10**400]}
NO_FACTOR = wrong(["2", True, None, [2]], [0.99, 0, -2, NAN, INF])
NO_QUEUE = wrong(["3", 3.0, True, None], [-1])
NO_MIDDLE = {**NO_RATIO, "value_errors": [0, 1, -0.1, NAN, INF]}
NO_PERIOD = wrong(["30", True, None, {1, 2}, ["1"], Constant, later], [0, -1, NAN, INF, timedelta(0), [], [-1], [NAN]])
NO_MOST_OF = wrong(NO_DURATION["type_errors"], [0, -1, NAN, -INF, timedelta(0)])
NO_SERIALIZER = wrong([5, SimpleNamespace(dumps=str), SimpleNamespace(loads=str)], [])

CASES: list[Case] = [
    *every(
        Retry, max_retry_after=required(NO_MOST_OF), retry_after=wrong([1, 5, 0, "yes", None, plain_without, later], [])
    ),
    *every(Hedge, delay=NO_HEDGING),
    *every(
        Quantile,
        share=wrong(["1", True, None, [1]], [0, 1, 95, -0.1, NAN, INF]),
        least=required(NO_DURATION),
        most=NO_MOST_OF,
        warm_up=NO_COUNT,
    ),
    *of(Quantile, {"least": 0.5}, most=wrong([], [0.4])),
    *every(RetryBudget, ratio=NO_SHARE, saved=NO_SAVINGS, per_second=NO_INCOME),
    *every(RepeatCap, {"repeats": 1}, repeats=wrong(["3", 3.0, True, None, NAN], [-1])),
    *every(Timeout, {"seconds": 1.0}),
    *every(
        CircuitBreaker,
        trip=wrong(["5", 5.0, 0.5, True, None, [5], ConsecutiveFailures], [0, -1]),
        open_for=NO_PERIOD,
        probe=wrong([5, "ping"], []),
    ),
    *every(
        Once,
        {"store": {}, "key": plain},
        key=wrong([5, "key", None, later], []),
        payload=wrong([5, later], []),
        store=wrong([5, "store", None], []),
        serializer=NO_SERIALIZER,
    ),
    *every(IdempotencyKey, make=wrong([5, "k", later], [])),
    *every(Gate),
    *table("Gate.drain", lambda it: Gate().drain(it), "timeout", {**required(NO_DELAY), "value_errors": [-1, NAN]}),
    *every(Supervisor, restart=wrong(["1", True], []), max_restarts=wrong(["3", 3.0, True], [-1])),
    *every(
        each,
        {"policy": Retry(), "function": plain, "items": [], "limit": 1},
        policy=wrong([5, Retry, None], []),
        items=wrong([5, None], []),
        progress=wrong([5, "bar", later], []),
    ),
    *every(ConsecutiveFailures),
    *every(FailureCount, {"n": 1}, window=NO_DURATION),
    *every(FailureRatio, {"ratio": 0.5}, window=NO_DURATION),
    *every(SlowRatio, {"slower_than": 1.0, "ratio": 0.5}, window=NO_DURATION),
    *every(Bulkhead, {"limit": 1}, queue=wrong(["3", 3.0, True, None, NAN], [-1])),
    *table("Bulkhead.resize", lambda value: Bulkhead(1).resize(value), "limit", required(NO_COUNT)),
    *every(
        Rate,
        {"limit": 1},
        limit=required(NO_AMOUNT),
        per=required(NO_DURATION),
        burst=NO_AMOUNT,
        cost={**required(NO_AMOUNT), "value_errors": [0, -1, NAN, INF, 2]},
    ),
    *of(Rate, {"burst": 1}, limit=wrong([], [5e-324])),
    *of(Rate, {"limit": 1}, cost=wrong([later, plain_without], []), actual=NO_PREDICATE),
    *table("RateLimiter", lambda value: RateLimiter(1, value), "more", wrong([5, "1", None, [Rate(1)]], [])),
    *every(
        RateLimiter,
        {"rate": 1},
        rate={**required(NO_AMOUNT), "value_errors": [*NO_AMOUNT["value_errors"], 0.4]},
        max_wait=NO_DELAY,
        longest_pause=wrong(["1", True, None], [0, -1, NAN]),
        told=NO_PREDICATE,
        retry_after=NO_FLAG,
    ),
    *table("RateLimiter.resize", lambda value: RateLimiter(1).resize(value), "limit", required(NO_AMOUNT)),
    *table("RateLimiter.turn", lambda value: RateLimiter(1).turn(value), "cost", required(NO_UNITS)),
    *table("RateLimiter.try_take", lambda value: RateLimiter(1).try_take(value), "cost", required(NO_UNITS)),
    *table("RateLimiter.pause", lambda value: RateLimiter(1).pause(value), "seconds", required(NO_DELAY)),
    *table("RateLimiter.learn", lambda value: RateLimiter(1).learn(value, 5), "remaining", required(NO_UNITS)),
    *table("RateLimiter.learn", lambda value: RateLimiter(1).learn(1, value), "reset_after", required(NO_DELAY)),
    *every(
        Cache,
        {"ttl": 1},
        ttl={**NO_DURATION, "type_errors": ["1", True, None, [1], later, plain_without]},
        store=wrong([5, "dict", [], dict, True], []),
    ),
    *every(SingleFlight),
    *every(Keyed, {"key": plain, "make": plain}, make=required(NO_KEY), key=required(NO_KEY)),
    *table("streaming", lambda it: Retry().streaming(first=it), "first", NO_DURATION),
    *table("streaming", lambda it: Retry().streaming(idle=it), "idle", NO_DURATION),
    *table("streaming", lambda it: Retry().streaming(resume=it), "resume", wrong([5, "after", plain, {5: plain}], [])),
    *table("streaming", lambda it: Retry().streaming(resume={"a": it}), "resume", wrong([5, "id", later], [])),
    *every(Fallback, handler=wrong([5, "x", [plain], False], [])),
    *every(Chaos, {"result": 1}, rate=required(NO_RATE), when=NO_PREDICATE, delay=wrong([], [])),
    *table("Chaos.on", lambda value: Chaos(result=1).on(value), "rate", NO_RATE),
    *of(
        Chaos,
        error=wrong([5, "boom", KeyboardInterrupt, KeyboardInterrupt(), int, later], []),
        delay={**NO_DURATION, "type_errors": ["1", True, [1], later]},
        action=wrong([5, "x", [plain], False], []),
    ),
    *table(
        "Chaos.on",
        lambda value: Chaos(result=1).on(lasts=value),
        "lasts",
        {**required(NO_DURATION), "value_errors": [0, -1, NAN, INF, 86400.1, 1000000000.0]},
    ),
    *every(
        AdaptiveLimit,
        {"slower_than": 1},
        slower_than={**required(NO_DURATION), "type_errors": ["1", True, None, [1], Seeking, {}]},
        least=required(NO_COUNT),
        most={**required(NO_COUNT), "value_errors": [*NO_COUNT["value_errors"], 10**400]},
        queue=NO_QUEUE,
        min_samples={**required(NO_COUNT), "value_errors": [*NO_COUNT["value_errors"], 10_001]},
        headroom=NO_FACTOR,
    ),
    *every(Seeking, dither=NO_MIDDLE, gain=NO_RATIO, target=NO_MIDDLE),
    *every(AdaptiveThrottle, k=NO_FACTOR, most=NO_RATIO),
    *every(Constant, {"delay": 1}, delay=required(NO_DELAY)),
    *every(Linear, {"step": 1}),
    *every(Exponential, {"base": 1}, factor=NO_FACTOR),
    *every(Decorrelated, {"base": 1}),
    *of(Decorrelated, {"base": 5}, cap=wrong([], [4.9])),
    *every(
        Context,
        timeout=NO_SHORTER_END,
        operation=wrong([5, b"op", ["op"]], []),
        properties=wrong([5, "ab", ["a"], {1}], []),
    ),
    *table("Context.timeout", lambda it: Context().timeout(it), "limit", {**NO_DURATION, "value_errors": [0, -1, NAN]}),
    *every(deadline, timeout=NO_END),
    *every(detached, timeout=NO_SHORTER_END),
    *(
        case
        for wrap in (Pipeline, Policy.wrap, Retry().wrap)
        for case in table("wrap", wrap, "policies", wrong([42, None, "retry", len, object, (Retry(), 5)], []))
    ),
    *ways_to_wrap("name", NO_NAME),
    *ways_to_wrap("listeners", wrong([5, print, [5], ["print"], [None], [later], None], [])),
    *table("subscribe", lambda it: events.subscribe(it), "listener", required(NO_LISTENER)),
    *table(
        "subscribe",
        lambda value: events.subscribe(print, value),
        "kinds",
        wrong([5, "RetryScheduled", ValueError, Boom, events.Event, None], []),
    ),
]


def is_shown(case: Case, message: str) -> bool:
    """Return whether the message shows the value or, for a list, its one wrong element."""
    candidates = [case.shown]
    if isinstance(case.value, (list, tuple)):
        candidates += [show(element) for element in case.value]
    return any(candidate in message for candidate in candidates)


PARAMETERS = [list(cases) for _, cases in itertools.groupby(CASES, lambda case: (case.where, case.parameter))]


@pytest.mark.parametrize("cases", PARAMETERS, ids=lambda cases: f"{cases[0].where} {cases[0].parameter}")
def test_a_wrong_argument_is_refused_with_its_name_and_value(cases: list[Case]) -> None:
    """With the appropriate type of error, in one line."""
    for case in cases:
        with pytest.raises((TypeError, ValueError)) as caught:
            pytest.fail(f"{case} was accepted: {case.make(case.value)}")
        message = str(caught.value)
        assert type(caught.value) is case.error, message
        assert case.parameter in message
        assert is_shown(case, message), (case, message)
        assert "\n" not in message


def test_the_table_has_every_parameter_of_every_constructor() -> None:
    """Of all policies, and of all classes and functions in it, except those that take any value."""
    public = {name: getattr(module, name) for module in (resilience, backoff, work) for name in module.__all__}
    where = {case.where for case in CASES}
    where |= {name for name, kind in public.items() if isinstance(kind, type) and issubclass(kind, Policy)}
    where -= {"Policy", "Pipeline", "detached"}  # a Pipeline is made in three ways: see `ways_to_wrap`
    elsewhere = {("Fallback", "value"), ("Chaos", "result"), ("each", "function")}
    expected = {
        (name, parameter) for name in where & public.keys() for parameter in inspect.signature(public[name]).parameters
    }
    assert expected - elsewhere <= {(case.where, case.parameter) for case in CASES}


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
    "each": lambda policy, fn: each(policy, fn, [], limit=1),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("fn", NOT_CALLABLE, ids=repr)
def test_a_function_that_is_not_callable_is_refused_and_no_policy_handles_the_error(entry: str, fn: Any) -> None:
    """It is a mistake in the program: a Fallback that answered it would hide it."""
    seen: list[Any] = []
    policy = Fallback("answered", on_fallback=seen.append).wrap(
        Retry(on=Exception, backoff=[0], on_retry=seen.append), CircuitBreaker(1, on_transition=seen.append)
    )
    with pytest.raises(TypeError) as caught:
        ENTRIES[entry](policy, fn)
    assert "callable" in str(caught.value)
    assert repr(fn) in str(caught.value)
    shown = {"decorator": "decorates callables", "each": "`each(policy, fetch, urls, limit=10)`"}
    assert shown.get(entry, "`policy.call(fetch, url)`") in str(caught.value)
    assert seen == []


@pytest.mark.parametrize("entry", ["execute", "capture", "aexecute", "acapture"])
@pytest.mark.parametrize("ctx", [5, "ctx", 0, {}, 2.5, Context], ids=repr)
def test_an_argument_that_is_no_context_is_refused(entry: str, ctx: Any) -> None:
    """`execute(fn, 5)` is not a timeout of five seconds; 0 and {} are not None."""

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
    assert "use `call` or `acall`" in str(caught.value)


@pytest.mark.parametrize("seconds", [-1, NAN, INF, "1", True, None], ids=repr)
def test_a_sleep_of_an_invalid_number_of_seconds_is_refused(seconds: Any) -> None:
    """`ctx.sleep` names its parameter."""

    class Sleeping(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            await ctx.sleep(seconds)

    with pytest.raises((TypeError, ValueError), match="seconds"):
        Sleeping().execute(lambda ctx: "never")


def test_a_member_of_an_int_enumeration_is_a_whole_number() -> None:
    limits = IntEnum("limits", {"NONE": 0, "ONE": 1, "MOST": 10_000})
    assert Bulkhead(limits.ONE).stats().limit == 1
    AdaptiveLimit(1, min_samples=limits.MOST)
    with pytest.raises(ValueError, match="limit must be at least 1"):
        Bulkhead(limits.NONE)


def test_valid_arguments_at_the_bounds_are_accepted() -> None:
    Retry(1)
    Retry(None, max_elapsed=1)
    Retry(ignore=())
    Retry(budget=0)
    Retry(budget=1000)
    RetryBudget(1000, saved=1)
    Retry(backoff=[0])
    Retry(backoff=(timedelta(0), 1))
    Hedge((timedelta(0), 1), hedges=2)
    Retry(on=BaseException, ignore=lambda error: False)
    Timeout(5e-324)
    Timeout(timedelta(days=365))
    CircuitBreaker(1, open_for=timedelta(milliseconds=1))
    FailureCount(5, last=5)
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
    Context(timeout=timedelta(0))
    Context(timeout=type("Number", (float,), {})(INF))
    Retry(rng=random)
    assert Retry().wrap(listeners=()).name == "Pipeline"
