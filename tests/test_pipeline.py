"""Pipelines: order, flattening, names, listeners, representations and copies."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest

from resilience import (
    AdaptiveLimit,
    AdaptiveThrottle,
    Bulkhead,
    Cache,
    Chaos,
    CircuitBreaker,
    ConsecutiveFailures,
    FailureCount,
    FailureRatio,
    Fallback,
    Hedge,
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
    events,
)
from resilience.backoff import Constant, Decorrelated, Exponential, Linear
from tests.conftest import Boom, FakeClock, Script, World
from tests.custom import Passing, Tag


def tags(letters: str, log: list[str] | None = None) -> list[Tag]:
    return [Tag(letter, [] if log is None else log) for letter in letters]


# --- order and flattening --------------------------------------------------------------------

SHAPES: dict[str, Callable[[Any, Any, Any], Pipeline[Any]]] = {
    "constructor": lambda a, b, c: Pipeline(a, b, c),
    "constructors": lambda a, b, c: Pipeline(a, Pipeline(b, Pipeline(c))),
    "method": lambda a, b, c: a.wrap(b, c),
    "class": lambda a, b, c: Policy.wrap(a, b, c),
    "class of the first policy": lambda a, b, c: Tag.wrap(a, b, c),
    "left": lambda a, b, c: a.wrap(b).wrap(c),
    "right": lambda a, b, c: a.wrap(b.wrap(c)),
    "nested": lambda a, b, c: Policy.wrap(Policy.wrap(a), Policy.wrap(b, c)),
    "nested with a name": lambda a, b, c: Policy.wrap(a, Policy.wrap(b, c, name="inner")),
    "nested with listeners": lambda a, b, c: Policy.wrap(Policy.wrap(a, b, listeners=[print_nothing]), c),
}


def print_nothing(event: object) -> None: ...


@pytest.mark.parametrize("shape", SHAPES)
async def test_the_first_policy_is_outermost_however_the_pipeline_was_built(world: World, shape: str) -> None:
    """a(b(c(fn))), and `policies` is flat."""
    log: list[str] = []
    policies = tags("abc", log)
    pipeline = SHAPES[shape](*policies)
    assert isinstance(pipeline, Pipeline)
    assert isinstance(pipeline, Policy)
    assert pipeline.policies == tuple(policies)
    assert await world.execute(pipeline, Script("result", doing=lambda ctx: log.append("-")).function()) == "result"
    assert "".join(log) == "abc-CBA"


def test_a_subclass_can_extend_wrap() -> None:
    class Named(Tag):
        def wrap(self, *more: Any, **settings: Any) -> Any:  # type: ignore[override]
            return super().wrap(*more, name="named", **settings)

    assert Named("a", []).wrap(Retry()).name == "named"


# --- names and listeners ---------------------------------------------------------------------


async def test_the_constructor_and_both_wrap_methods_build_equal_pipelines(world: World, clock: FakeClock) -> None:
    """With the same name, listeners, settings, representation and description."""
    seen: list[str] = []

    def listen(event: events.Event) -> None:
        seen.append(event.policy)

    a, b = Retry(2, on=Boom, backoff=[0]), Timeout(60.0)
    made = [
        Pipeline(a, b, name="users", listeners=[listen]),
        Policy.wrap(a, b, name="users", listeners=[listen]),
        a.wrap(b, name="users", listeners=[listen]),
        Pipeline(a.wrap(b), name="users", listeners=(listen,)),
    ]
    for pipeline in made:
        assert type(pipeline) is Pipeline
        assert pipeline.policies == (a, b)
        assert await world.execute(pipeline, Script(Boom(), "fine").function()) == "fine"
    assert seen == ["Retry", "Retry", "users"] * 4
    assert len({repr(pipeline) for pipeline in made}) == len({pipeline.describe() for pipeline in made}) == 1
    assert [pipeline.settings() for pipeline in made] == [
        {"policies": (a, b), "name": "users", "listeners": (listen,)}
    ] * 4


def test_a_pipeline_is_named_pipeline_by_default() -> None:
    """A pipeline that wraps it does not inherit its name."""
    assert Retry().wrap(Timeout(1.0)).name == "Pipeline"
    assert Retry().wrap(Timeout(1.0), name="users").name == "users"
    assert Retry.wrap(Retry(), Timeout(1.0), name="users").name == "users"
    assert Policy.wrap(Retry(), name="users").wrap(Timeout(1.0)).name == "Pipeline"
    assert Pipeline(Retry()).name == "Pipeline"
    assert Pipeline(Retry(), name="users").name == "users"


def test_listeners_may_be_any_iterable() -> None:
    """It is read once, when the pipeline is built."""
    seen: list[Any] = []
    pipeline = Retry().wrap(listeners=(listener for listener in [seen.append]))
    for _ in range(2):
        pipeline.execute(lambda ctx: "x")
    assert len(seen) == 2


# --- representations ---


@pytest.mark.parametrize(
    "text",
    [
        "Retry()",
        "Retry(attempts=4)",
        "Retry(attempts=None, max_elapsed=61.0)",
        "Retry(backoff=Constant(2))",
        "Retry(backoff=[1.0, 2.5])",
        "Timeout(seconds=60.0, cooperative=True)",
        "CircuitBreaker()",
        "CircuitBreaker(trip=ConsecutiveFailures(3))",
        "CircuitBreaker(trip=FailureRatio(0.5, min_calls=10, window=30) | "
        "SlowRatio(0.2, slower_than=1.5, min_calls=10, last=50), open_for=5.0, name='db')",
        "CircuitBreaker(open_for=Linear(2, cap=8))",
        "CircuitBreaker(observe_only=True)",
        "Bulkhead(limit=13)",
        "Bulkhead(limit=13, queue=4, max_wait=0.5)",
        "Bulkhead(limit=2, queue=1, observe_only=True)",
        "RateLimiter(Rate(60, per=60), Rate(10, burst=2, cost=3), max_wait=5.0, name='llm')",
        "AdaptiveLimit(slower_than=2.0)",
        "AdaptiveThrottle()",
        "AdaptiveThrottle(k=3.0, min_calls=2)",
        "Cache(ttl=60, stale=5, name='users')",
        "SingleFlight(name='users')",
        "Hedge()",
        "Hedge(delay=0.5, hedges=2, budget=None)",
        "Hedge(delay=(0.5, 0.25), hedges=2)",
        "RepeatCap(repeats=2)",
        "Retry(budget=0.1)",
        "Fallback(value='x')",
        "Fallback(value=None)",
    ],
)
def test_the_repr_of_a_policy_is_the_call_that_builds_it(text: str) -> None:
    """With the arguments that differ from the defaults."""
    assert repr(eval(text)) == text


def test_the_repr_shows_normalized_arguments_and_no_defaults() -> None:
    assert repr(Retry(4, backoff=Exponential(0.1, cap=10.0))) == "Retry(attempts=4)"
    assert repr(Retry(on=Boom, name="r")) == "Retry(on=<class 'tests.conftest.Boom'>, name='r')"
    assert repr(Timeout(timedelta(minutes=1))) == "Timeout(seconds=60.0)"
    assert repr(RateLimiter(5, max_wait=timedelta(seconds=3))) == "RateLimiter(Rate(5), max_wait=3.0)"
    assert repr(AdaptiveThrottle(window=timedelta(minutes=1))) == "AdaptiveThrottle(window=60.0)"
    assert repr(CircuitBreaker(3)) == "CircuitBreaker(trip=ConsecutiveFailures(3))"
    assert repr(Fallback()) == "Fallback(value=None)"
    assert repr(Fallback(handler=max)) == "Fallback(handler=<built-in function max>)"


def test_the_repr_of_a_pipeline_is_the_expression_that_builds_it() -> None:
    """Including nested pipelines with names."""
    inner = Policy.wrap(Bulkhead(3), Timeout(2), name="inner")
    pipeline = Retry(4).wrap(inner, name="users")
    assert repr(pipeline) == (
        "Policy.wrap(Retry(attempts=4), Policy.wrap(Bulkhead(limit=3), Timeout(seconds=2.0), name='inner'), "
        "name='users')"
    )
    assert "listeners=[<built-in function print>]" in repr(Retry().wrap(listeners=[print]))


#: Policies with distinct numbers, and all of those numbers.
NUMBERS: list[tuple[Policy[Any], list[str]]] = [
    (
        Retry(attempts=41, max_elapsed=61.5, max_retry_after=83, backoff=Exponential(0.31, factor=1.7, cap=19)),
        ["41", "61.5", "83", "0.31", "1.7", "19"],
    ),
    (Retry(attempts=41, backoff=Decorrelated(0.31, cap=19)), ["41", "0.31", "19"]),
    (Retry(attempts=41, backoff=Linear(0.31, cap=19, jitter=0.23)), ["41", "0.31", "19", "0.23"]),
    (Retry(attempts=41, backoff=[0.31, 19]), ["41", "0.31", "19"]),
    (Retry(attempts=41, backoff=Constant(0.31)), ["41", "0.31"]),
    (CircuitBreaker(17, open_for=43, probes=2, probe_successes=7, probe_timeout=91.5), ["17", "43", "2", "7", "91.5"]),
    (CircuitBreaker(FailureRatio(0.47, min_calls=23, window=53)), ["0.47", "23", "53", "30"]),
    (CircuitBreaker(FailureRatio(0.47, min_calls=23, last=59)), ["0.47", "23", "59"]),
    (CircuitBreaker(SlowRatio(0.47, slower_than=3.5, min_calls=23, window=53)), ["0.47", "3.5", "23", "53"]),
    (CircuitBreaker(FailureCount(23, window=53) | FailureCount(29, last=59)), ["23", "53", "29", "59"]),
    (CircuitBreaker(ConsecutiveFailures(17) | FailureRatio(0.47)), ["17", "0.47"]),
    (CircuitBreaker(open_for=Exponential(0.31, cap=19)), ["0.31", "19"]),
    (
        Hedge(Quantile(0.29, least=0.7, most=1.1, window=13, warm_up=17), hedges=19),
        ["29 %", "0.7", "1.1", "13", "17", "19"],
    ),
    (Hedge(0.31, budget=0.47), ["0.31", "0.47"]),
    (AdaptiveThrottle(1.7, window=11, min_calls=13, most=0.29), ["1.7", "11", "13 calls", "29 %"]),
    (AdaptiveLimit(0.31, window=1.7, min_samples=59, headroom=2.3), ["0.31", "1.7 s", "59 calls", "2.3 times"]),
    (RateLimiter(Rate(11, per=7, cost=3, burst=5), longest_pause=19), ["11", "7", "3 for each", "5 at once", "19 s"]),
    (Cache(11, stale=13, max_size=17, errors_ttl=1.9), ["11", "13", "17", "1.9 s"]),
    (Timeout(1_234_567.5), ["1234567.5"]),
    (Timeout(604_800), ["604800"]),
    (Retry(max_elapsed=2_592_000.5), ["2592000.5"]),
    (CircuitBreaker(open_for=1_234_567), ["1234567"]),
    (CircuitBreaker(probe_timeout=timedelta(minutes=2)), ["120 s"]),
    (Bulkhead(1, queue=1, max_wait=1_234_567.5), ["1234567.5"]),
]


@pytest.mark.parametrize(
    ("policy", "numbers"), NUMBERS, ids=lambda value: repr(value) if isinstance(value, Policy) else ""
)
def test_describe_contains_every_number(policy: Policy[Any], numbers: list[str]) -> None:
    """Not rounded, in one line, with the name of the policy."""
    described = policy.describe()
    assert [number for number in numbers if number not in described] == []
    assert policy.name in described
    assert "\n" not in described


def test_describe_leaves_out_a_number_without_effect() -> None:
    assert "83" not in Retry(retry_after=False, max_retry_after=83).describe()


#: What `describe()` says, word for word.
DESCRIPTIONS: dict[str, Policy[Any]] = {
    "Timeout: 2.5 s for everything inside, then it is cut off": Timeout(2.5),
    "Timeout: 2.5 s for everything inside, carried as a deadline, nothing is cut off": Timeout(2.5, cooperative=True),
    "Bulkhead: at most 2 at once, no queue": Bulkhead(2),
    "Bulkhead: at most 2 at once, 3 may wait": Bulkhead(2, queue=3),
    "Bulkhead: at most 2 at once, 3 may wait, at most 1 s": Bulkhead(2, queue=3, max_wait=1),
    "RateLimiter: at most 7 calls in any second; none waits": RateLimiter(7, max_wait=0),
    "RateLimiter: at most 7 calls in 9 s, spread, 1 at once; the others wait for their turn": RateLimiter(
        Rate(7, per=9, burst=1)
    ),
    "llm: at most 60 calls in any 60 s and 10 units a second, 3 for each call, spread, 2 at once; "
    "the others wait at most 5 s": RateLimiter(Rate(60, per=60), Rate(10, burst=2, cost=3), max_wait=5, name="llm"),
    "search: 1 to 200 at once, 5 now, lower while a tenth of the calls takes longer than 0.3 s; no queue": (
        AdaptiveLimit(0.3, initial=5, name="search")
    ),
    "AdaptiveLimit: 1 to 200 at once, 20 now, by Seeking(dither=0.15, gain=0.25, target=0.5); 3 may wait, "
    "at most 2 s; only observes": AdaptiveLimit(Seeking(), queue=3, max_wait=2, observe_only=True),
    "search: lets 1.5 calls through for each that was accepted in the last 10 s, and rejects at most 50 %": (
        AdaptiveThrottle(1.5, window=10, most=0.5, name="search")
    ),
    f"AdaptiveThrottle: lets 2 calls through for each that was accepted in the last 30 s, and rejects at most 90 %, "
    f"from {10**400} calls on": AdaptiveThrottle(min_calls=10**400),
    "users: keeps values for 60 s, 5 s more if a refresh fails, by function and its arguments, at most 1024": (
        Cache(60, stale=5, name="users")
    ),
    "Cache: keeps values for what len says, by key of max, at most 1024": Cache(len, key=max),
    "users: one call at a time for each function and its arguments, shared by all concurrent callers": (
        SingleFlight(name="users")
    ),
    "cap: at most 2 retries and hedges in everything inside, nested calls included": RepeatCap(2, name="cap"),
    "Hedge: another attempt beside one that takes longer than 0.5 s": Hedge(0.5, budget=None),
    "Hedge: another attempt beside one that fails or takes longer than 0.5 s": Hedge(0.5, eager=True, budget=None),
    "Hedge: another attempt at once with the first": Hedge(0, budget=None),
    "Hedge: up to 2 more attempts at once with the first": Hedge([0], hedges=2, budget=None),
    "Hedge: up to 3 more attempts, one after another, beside one that takes longer than 0.5 s, then 0.25 s, then 0 s": (
        Hedge([0.5, 0.25, 0], hedges=3, budget=None)
    ),
    "h: up to 2 more attempts, one after another, beside one that takes longer than 95 % of the calls take, "
    "by Quantile(0.95); paid for by RetryBudget(0.1, saved=10)": Hedge(hedges=2, name="h"),
    "reset: raises ConnectionError in 1 % of the calls; off": Chaos(error=ConnectionError, name="reset"),
    "Chaos: raises Boom('x') in 25 % of the calls; off": Chaos(0.25, error=Boom("x")),
    "Chaos: returns None in 1 % of the calls; off": Chaos(result=None),
    "Chaos: delays 1 % of the calls by 2 s; off": Chaos(delay=2),
    "Chaos: delays 1 % of the calls by abs; off": Chaos(delay=abs),
    "Chaos: calls print before 1 % of the calls; off": Chaos(action=print),
}


@pytest.mark.parametrize("description", DESCRIPTIONS)
def test_describe_says_what_a_policy_does(description: str) -> None:
    assert DESCRIPTIONS[description].describe() == description


def test_describe_ends_with_the_budget_or_that_the_policy_only_observes() -> None:
    retry = Retry(3, budget=RetryBudget(0.2, saved=5))
    assert retry.describe().endswith("; paid for by RetryBudget(0.2, saved=5)")
    for policy in (CircuitBreaker(observe_only=True), Bulkhead(2, queue=1, observe_only=True)):
        assert policy.describe().endswith("; only observes")
    assert RateLimiter(7, observe_only=True).describe().endswith("in any second; only observes")


def test_describe_of_a_pipeline_has_a_numbered_line_for_each_policy() -> None:
    """Outermost first, below the name of the pipeline."""
    pipeline = Policy.wrap(
        Fallback("empty", name="answer"),
        Retry(4),
        Policy.wrap(CircuitBreaker(7), name="inner"),
        Timeout(2.5),
        name="users",
    )
    lines = pipeline.describe().splitlines()
    assert lines[0].startswith("users")
    assert [line.partition(".")[0] for line in lines[1:]] == ["1", "2", "3", "4"]
    for line, words in zip(lines[1:], ["answer 'empty'", "Retry 4", "CircuitBreaker 7", "Timeout 2.5"], strict=True):
        for word in words.split():
            assert word in line


def test_describe_uses_the_singular_for_one() -> None:
    """No "1 policies", no "1 attempts", and no delay before another one."""
    assert Policy.wrap(Retry(1), name="once").describe() == "once: 1 policy\n1. Retry: 1 attempt"
    assert "at most 1 retry or hedge" in RepeatCap(1).describe()
    assert "at most 1 call in any second;" in RateLimiter(1).describe()
    throttled = AdaptiveThrottle(1, min_calls=1).describe()
    assert "lets 1 call through" in throttled
    assert throttled.endswith(", from 1 call on")
    assert ", after 1 call;" in AdaptiveLimit(1, min_samples=1).describe()


def test_describe_of_a_pipeline_uses_that_of_a_custom_policy_or_its_repr() -> None:
    class Described(Passing):
        def describe(self) -> str:
            return "does nothing, 7 times"

    described = Described().wrap(*tags("a")).describe()
    assert "does nothing, 7 times" in described
    assert "Tag(a)" in described


def test_a_mock_of_a_policy_can_be_wrapped() -> None:
    mock = Mock(spec=Retry())
    assert Pipeline(mock).policies == (mock,)
