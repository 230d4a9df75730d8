"""Misuse is refused at the place where it is written or called, and the error says what to write instead."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import re
import sys
import time
import types
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from operator import getitem
from types import SimpleNamespace
from typing import Any, Optional

import anyio
import anyio.to_thread
import pytest
from typing_extensions import override

from resilience import (
    AdaptiveLimit,
    Bulkhead,
    Cache,
    Chaos,
    CircuitBreaker,
    ConsecutiveFailures,
    FailureCount,
    FailureRatio,
    Fallback,
    Hedge,
    Keyed,
    Pipeline,
    Policy,
    Quantile,
    RateLimiter,
    Retry,
    RetryBudget,
    SlowRatio,
    Timeout,
    TimeoutExceeded,
    current_context,
    deadline,
    events,
)
from resilience.backoff import Constant, Decorrelated, Exponential
from resilience.callables import name_of
from resilience.clock import FOREVER
from resilience.clock import clock as process_clock
from resilience.errors import BulkheadFull
from resilience.testing import script
from tests.conftest import Boom, World
from tests.custom import Passing, Sleeping
from tests.functions import coroutine, quick
from tests.streams.sources import Source, streamed
from tests.test_repeats import CustomBudget


def fetch() -> str:
    return "fetched"


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


@contextmanager
def transaction() -> Iterator[None]:
    yield


@asynccontextmanager
async def async_transaction() -> AsyncIterator[None]:
    yield


class Client:
    def fetch(self) -> str:
        return "fetched"

    @contextmanager
    def transaction(self) -> Iterator[str]:
        yield "entered"

    @asynccontextmanager
    async def later(self) -> AsyncIterator[str]:
        yield "entered later"


def refused(error: type[Exception], *words: str) -> Any:
    """Expect an error whose message matches these patterns, in this order."""
    return pytest.raises(error, match=".*".join(words))


def budget(withdraw: Any) -> Any:
    return SimpleNamespace(succeeded=fetch, withdraw=withdraw, give_back=fetch)


def object_with(*methods: str) -> Any:
    return SimpleNamespace(**dict.fromkeys(methods, fetch))


def algorithm(update: Any = max, reset: Any = fetch) -> Any:
    return SimpleNamespace(update=update, reset=reset)


# --- at construction ---------------------------------------------------------------------------

#: A pattern of the error (the value, what is allowed, what to write instead), and what is built or decorated.
OF_TYPES: list[tuple[str, Callable[[], object]]] = [
    (r"fetch.*did you mean @Retry\(\)\?", lambda: Retry(fetch)),
    (r"fetch.*did you mean @CircuitBreaker\(\)\?", lambda: CircuitBreaker(fetch)),
    (r"fetch.*did you mean @Timeout\(2.0\)\?", lambda: Timeout(fetch)),
    (r"fetch.*did you mean @Bulkhead\(10\)\?", lambda: Bulkhead(fetch)),
    (r"fetch.*did you mean @Chaos\(error=\.\.\.\)\?", lambda: Chaos(fetch, result=1)),
    (r"fetch.*Pipeline\(\.\.\.\)\(fetch\)", lambda: Pipeline(fetch)),
    ("at least one", lambda: Pipeline(name="empty")),
    ("at least one", lambda: Policy.wrap()),
    ("make an instance", lambda: Pipeline(Retry, Timeout(1.0))),
    ("make an instance", lambda: Policy.wrap(Retry, Timeout(1.0))),
    (r"not <class 'object'>; to run object", lambda: Pipeline(object)),
    (r"delay must be seconds.*not Retry\(\)", lambda: Hedge(Retry())),
    (r"mean Timeout\(\.\.\.\)\.wrap\(\.\.\.\)", lambda: Timeout.wrap(quick())),
    (r"on_retry\(event\), which .*cannot take.*'more'", lambda: Retry(on_retry=lambda event, *, more: None)),
    (r"mean Retry\(\.\.\.\)\.wrap\(\.\.\.\)", lambda: Retry.wrap()),
    (r"mean Retry\(\.\.\.\)\.wrap\(\.\.\.\)", lambda: Retry.wrap(Timeout(1.0), Retry())),
    (r"Pipeline\(\*policies\)", lambda: Pipeline([Retry()])),
    (r"seconds \(an int or a float\) or a timedelta", lambda: Timeout("1")),
    (
        r"a condition such as ConsecutiveFailures\(5\), or an int, not 0\.5; .*FailureRatio\(0\.5\)\?",
        lambda: CircuitBreaker(0.5),
    ),
    (r"not 5\.0$", lambda: CircuitBreaker(5.0)),
    ("unsupported operand", lambda: ConsecutiveFailures(3) | 5),
    ("unsupported operand", lambda: ConsecutiveFailures(3) | None),
    (r"must be an exception type.*did you mean a tuple\?", lambda: Retry(on={OSError})),
    (r"must be an exception type.*did you mean a tuple\?", lambda: Retry(on=OSError | KeyError)),
    (r"must be an exception type.*did you mean a tuple\?", lambda: Retry(on=getitem(Optional, OSError))),
    (r"must be an exception type.*did you mean a tuple\?", lambda: Retry(ignore=[OSError])),
    ("must be an exception type.*ExceptionGroup", lambda: Retry(on=ExceptionGroup[OSError])),
    (r"Constant\(2\.5\)", lambda: Retry(backoff=2.5)),
    (r"backoff is called as backoff\(\), .* cannot take.*\[1, 2, 4\]$", lambda: Retry(backoff=lambda attempt: attempt)),
    (r"did you mean to derive SimpleNamespace from Backoff\?", lambda: Retry(backoff=SimpleNamespace(delays=print))),
    (r"did you mean Constant\(\.\.\.\)\?", lambda: Retry(backoff=Constant)),
    (r"mean Constant\(datetime", lambda: Retry(backoff=timedelta(seconds=1))),
    ("mean a list of its items", lambda: Retry(backoff=iter([1.0]))),
    (r"did you mean \[0\]", lambda: Retry(backoff=None)),
    (r"'full', 'equal', 'none' or a ratio.*did you mean 'full'\?", lambda: Constant(1, jitter=True)),
    (r"'full', 'equal', 'none' or a ratio.*did you mean 'none'\?", lambda: Constant(1, jitter=False)),
    (r"'full', 'equal', 'none' or a ratio.*did you mean 'none'\?", lambda: Constant(1, jitter=None)),
    ("'full', 'equal', 'none' or a ratio, not \\[1\\]$", lambda: Constant(1, jitter=[1])),
    ("a function of the outcome", lambda: Retry(retry_after=5)),
    (r"not 60; did you mean Rate\(100, per=60\)\?", lambda: RateLimiter(100, 60)),
    ("each, not '60'$", lambda: RateLimiter(100, "60")),
    ("plain function", lambda: Retry(on_retry=coroutine)),
    ("not one policy", lambda: Keyed(CircuitBreaker(), fetch)),
    (r"make is called as make\(key\), which ", lambda: Keyed(fetch, fetch)),
    (r"0 given.*use error=lambda ctx: UnicodeDecodeError\(", lambda: Chaos(error=UnicodeDecodeError)),
    (r"slower_than.update must be a plain function", lambda: AdaptiveLimit(algorithm(update=coroutine))),
    (r"slower_than.update is called as .*update\(limit, sample\)", lambda: AdaptiveLimit(algorithm(update=len))),
    (r"slower_than.reset must be a plain function", lambda: AdaptiveLimit(algorithm(reset=coroutine))),
    (r"or have update\(limit, sample\) and reset\(\), not", lambda: AdaptiveLimit(object_with("update"))),
    (r"budget must be .*, not .*; it has no method withdraw\(\)", lambda: Retry(budget=object_with("succeeded"))),
    (r"budget must be .*, not .*, and not a class", lambda: Retry(budget=CustomBudget)),
    (r"budget\.withdraw must be a plain", lambda: Retry(budget=budget(coroutine))),
    (r"budget\.withdraw is called as .*withdraw\(\)", lambda: Retry(budget=budget(lambda cost: False))),
    (r"resilience\.events", lambda: events.subscribe(print, Boom)),
    ("no client", lambda: quick().proxy(None)),
    ("no client", lambda: quick().aproxy(None)),
    (r"Client is a class.*decorate its methods.*policy\.proxy\(Client", lambda: quick()(Client)),
    (r"put a policy around Timeout.*policy\.wrap\(Timeout", lambda: quick()(Timeout(1))),
    ("decorate the function below it", lambda: quick()(property(fetch))),
    (r"transaction.*retry\.attempts\(\)", lambda: quick()(async_transaction)),
    (r"transaction.*retry\.attempts\(\)", lambda: quick()(functools.partial(transaction))),
    (r"policy\.call\(fetch, \.\.\.\)", lambda: quick()(fetch, "url")),
    (r"not None; write `@policy` without parentheses, or `policy\.call\(fetch", lambda: quick()()),
    (r"write `policy\.call\(fetch, \.\.\.\)`", lambda: quick()(timeout=5)),
    (r"the ttl of this Cache is .*@Cache\(60\.0\)", lambda: Cache(lambda url: url)("url")),
    ("decorates callables, not 3$", lambda: Cache(60.0)(3)),
    (r"write Fallback\(\.\.\.\)\.wrap\(Retry\(\)\)", lambda: Fallback(Retry())),
    (r"handler must be a function, not the policy", lambda: Fallback(handler=Retry())),
]
OF_VALUES: list[tuple[str, Callable[[], object]]] = [
    ("more than zero", lambda: Timeout(0)),
    ("at least 1", lambda: Bulkhead(0)),
    ("at least 0", lambda: Bulkhead(1, queue=-1)),
    ("max_wait=1.*queue", lambda: Bulkhead(5, max_wait=1)),
    ("max_wait=1.*queue", lambda: AdaptiveLimit(0.3, max_wait=1)),
    ("at least 1 and finite, not", lambda: Exponential(1, factor=0.5)),
    ("at most 1000, not 1001$", lambda: RetryBudget(1001)),
    (r"at most 1, not 1\.5; did you mean 0\.015\?$", lambda: FailureRatio(1.5)),
    (r"not 100; did you mean 1\?$", lambda: FailureRatio(100)),
    (r"not 100\.5$", lambda: FailureRatio(100.5)),
    ("less than 1, not 1$", lambda: Quantile(1)),
    (r"not 1\.5; did you mean 0\.015\?$", lambda: Quantile(1.5)),
    (r"not 99\.5; did you mean 0\.995\?$", lambda: Quantile(99.5)),
    ("less than 1, not 100$", lambda: Quantile(100)),
    (r"window=30\.0.*last=5", lambda: FailureRatio(0.5, window=30.0, last=5)),
    (r"hedges=1: \(0\.5, 2\.0\); did you mean hedges=2\?", lambda: Hedge([0.5, 2])),
    ("n must be at most last=5.*not 6", lambda: FailureCount(6, last=5)),
    ("window=3.*last=5", lambda: SlowRatio(0.5, slower_than=1.0, window=3, last=5)),
    ("not 0;.*did you mean 'none'", lambda: Constant(1, jitter=0)),
    (r"at least base \(2\.0\)", lambda: Decorrelated(2, cap=1)),
    ("'x'.*handler", lambda: Fallback("x", handler=print)),
    ("None.*handler", lambda: Fallback(None, handler=print)),
    ("initial must be at least 6", lambda: AdaptiveLimit(1, initial=5, least=6)),
    ("initial must be at most 4", lambda: AdaptiveLimit(1, initial=5, most=4)),
    ("most must be at least 5", lambda: AdaptiveLimit(1, least=5, most=4)),
]
MISUSES = [*((TypeError, *row) for row in OF_TYPES), *((ValueError, *row) for row in OF_VALUES)]


@pytest.mark.parametrize(("error", "pattern", "make"), MISUSES, ids=lambda it: it if isinstance(it, str) else "")
def test_the_error_of_a_misuse_says_what_to_write_instead(error: type[Exception], pattern: str, make: Any) -> None:
    with pytest.raises(error, match=pattern):
        make()


def test_arguments_that_are_nearly_misuses_are_accepted() -> None:
    Bulkhead(5, queue=1, max_wait=1)
    Retry(backoff=lambda base=1.0: [base])
    assert quick().call(Client).fetch() == "fetched"


def test_a_fallback_used_as_a_bare_decorator_is_refused_when_called() -> None:
    """`Fallback(fetch)` is legal: it answers with the function. But it is no replacement for `fetch`."""
    with pytest.warns(RuntimeWarning, match="did you mean"):
        bare: Any = Fallback(fetch)
    for call in (bare, lambda: bare("url"), lambda: bare(url="url"), lambda: bare(fetch, "url")):
        with refused(TypeError, "answers with fetch", "did you mean @Fallback"):
            call()
    with pytest.raises(TypeError, match=r"^a policy decorates callables, not 'url'$"):
        Fallback("text")("url")  # type: ignore[call-overload]
    assert bare.call(raising) is fetch
    assert bare(fetch)() == "fetched"
    assert bare(staticmethod(fetch)).__func__() == "fetched"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Fallback, "answers with the function {0} itself.*did you mean Fallback.handler={0}.*failure, ctx: {0}"),
        (lambda it: Chaos(1.0, result=it), "Chaos returns the function {0} itself.*Fallback.handler=.*error="),
    ],
    ids=["Fallback", "Chaos"],
)
@pytest.mark.parametrize("value", [fetch, coroutine, lambda failure, ctx: "answer", Client().fetch], ids=name_of)
def test_a_function_as_a_value_causes_a_warning_that_says_how_to_make_a_new_one(
    make: Callable[[Any], Any], words: str, value: Any
) -> None:
    """The policy returns the function itself. A handler that returns the function does the same without the warning."""
    with pytest.warns(RuntimeWarning, match=words.format(re.escape(name_of(value)))) as caught:
        policy = make(value)
    assert [warning.filename for warning in caught] == [__file__]
    with policy.injecting() if isinstance(policy, Chaos) else contextlib.nullcontext():
        assert policy.call(raising) is value
    assert Fallback(handler=lambda failure, ctx: value).call(raising) is value


def test_an_exception_class_as_the_value_of_a_fallback_causes_a_warning_that_names_on() -> None:
    words = r"answers with the class Boom itself: did you mean Fallback\(..., on=Boom\)"
    with pytest.warns(RuntimeWarning, match=words):
        assert Fallback(Boom).call(raising) is Boom


def test_a_coroutine_as_the_value_of_a_fallback_is_refused_and_closed() -> None:
    value = coroutine()
    with refused(TypeError, "coroutine, which can be awaited only once", r"Fallback\(handler=\.\.\.\)"):
        Fallback(value)
    assert value.cr_frame is None


def raising() -> str:
    raise Boom


@pytest.mark.parametrize(
    ("make", "parameter", "call"),
    [
        (lambda fn: Fallback(handler=fn), "handler", "failure, ctx"),
        (lambda fn: Fallback(on_fallback=fn), "on_fallback", "event"),
        (lambda fn: Retry(on=fn), "on", "error"),
        (lambda fn: Retry(ignore=fn), "ignore", "error"),
        (lambda fn: Retry(on_result=fn), "on_result", "result"),
        (lambda fn: Retry(on_retry=fn), "on_retry", "event"),
        (lambda fn: Timeout(1, on_timeout=fn), "on_timeout", "event"),
        (lambda fn: CircuitBreaker(on_transition=fn), "on_transition", "event"),
        (lambda fn: Pipeline(Retry(), listeners=[fn]), "listeners", "event"),
        (lambda fn: events.subscribe(fn), "listener", "event"),
    ],
)
def test_a_callback_that_cannot_be_called_is_refused(make: Callable[[Any], object], parameter: str, call: str) -> None:
    """Too few, too many, or keyword-only; the message shows the call and the signature."""
    for wrong in (fetch, lambda a, b, c: None, lambda *, event: None, functools.partial(lambda a: None, 1)):
        with refused(TypeError, rf"{parameter} is called as {parameter}\({call}\)", "cannot take"):
            make(wrong)
    for fitting in (lambda *args: None, lambda a, b=None: [0.0], print) if call != "failure, ctx" else (print,):
        unsubscribe = make(fitting)
        if callable(unsubscribe) and not isinstance(unsubscribe, Policy):
            unsubscribe()


def test_a_callback_without_a_signature_is_accepted() -> None:
    """Some builtins have none, and an object may have an invalid one."""

    class Strange:
        __signature__ = "none"

        def __call__(self, event: object) -> None: ...

    Retry(on_result=max, on_retry=Strange())


# --- calling -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        (
            [generator, async_generator, functools.partial(generator)],
            ["is a generator function", "decorate what each step calls"],
        ),
        ([transaction, async_transaction], ["makes a context manager", r"retry\.attempts\(\)"]),
    ],
    ids=["generators", "context managers"],
)
async def test_a_generator_or_context_manager_is_refused(world: World, functions: list[Any], words: list[str]) -> None:
    """Directly or under a timeout. The error is no outcome: it is neither repeated nor answered."""
    policy = Fallback("answered").wrap(Retry(on=Exception, backoff=[0]))
    for function, each in itertools.product(functions, (policy, Timeout(10).wrap(policy))):
        with refused(TypeError, *words):
            await world.call(each, function)


async def test_a_function_that_returns_a_generator_or_a_context_manager_can_be_called(threads: World) -> None:
    """Its own work is done by the call."""
    assert list(quick().call(lambda: generator())) == [1]
    with quick().call(lambda: transaction()):
        pass


async def test_a_policy_instead_of_a_function_is_refused(world: World) -> None:
    """It can be called, because it is a decorator: its error would be answered, and `fetch` never entered."""
    answering: Any = Fallback("instead")
    for run in (world.call, world.execute):
        with refused(TypeError, r"not Retry\(", r"write `policy\.wrap\(other\)\.call\(fetch, url\)`"):
            await run(answering, quick())
    with refused(TypeError, r"write `policy\.wrap\("):
        await world.call(answering, quick(), fetch)


async def test_a_coroutine_instead_of_a_function_is_refused_and_closed(world: World) -> None:
    """So there is no warning that it was never awaited."""

    async def later() -> None: ...

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in (quick().call, quick().execute):
            with refused(TypeError, r"policy\.call\(fetch, url\)"):
                call(later())  # type: ignore[arg-type, call-overload]


# --- custom policies ---


class Forgetful(Policy[Any]):
    """A policy whose `await` is missing."""

    @override
    async def around(self, call: Any, ctx: Any) -> Any:
        return call(ctx)


class Plain(Policy[Any]):
    """A policy that is no coroutine function."""

    @override
    def around(self, call: Any, ctx: Any) -> Any:  # type: ignore[override]
        return "answered"


class Handing(Policy[Any]):
    """Returns the awaitable of the call from a plain function, which is unusual but valid."""

    @override
    def around(self, call: Any, ctx: Any) -> Any:
        return call(ctx)


@pytest.mark.parametrize(
    "around",
    [
        lambda policy: policy,
        lambda policy: quick().wrap(policy),
        lambda policy: policy.wrap(quick()),
        lambda policy: policy.wrap(Handing()),
    ],
)
@pytest.mark.parametrize(("policy", "remedy"), [(Forgetful(), "return await call"), (Plain(), "async def around")])
async def test_an_around_that_does_not_await_is_refused_by_name(
    world: World, around: Callable[[Policy[Any]], Policy[Any]], policy: Policy[Any], remedy: str
) -> None:
    """At any place in a pipeline, also around a stream. No coroutine is left unawaited."""

    async def fn(ctx: object) -> str:
        return "fetched"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with refused(TypeError, rf"^{type(policy).__name__}\.around", remedy):
            await world.execute(around(policy), fn)
        with refused(TypeError, rf"^{type(policy).__name__}\.around", remedy):
            await world.result(around(policy)(world.native(fn))(None))
        with refused(TypeError, rf"^{type(policy).__name__}\.around", remedy):
            await streamed(world, around(policy), Source(world, [1])).all()


class Fetch:
    async def __call__(self) -> str:
        return "fetched"


@pytest.mark.parametrize("function", [functools.partial(Fetch().__call__), Fetch(), lambda: Fetch()()])
async def test_an_around_without_await_is_refused_for_any_function(
    tasks_world: World, function: Callable[[], Awaitable[str]]
) -> None:
    """Also for partials, objects, and functions that only return an awaitable."""
    with refused(TypeError, r"Forgetful\.around", "return await call"):
        await Forgetful().acall(function)


async def test_a_coroutine_that_a_function_returns_is_its_result(tasks_world: World) -> None:
    """Only the coroutine of the call itself must not be returned."""

    async def inner() -> str:
        return "fetched"

    async def outer() -> Any:
        return inner()

    assert await (await Handing().acall(outer)) == "fetched"


# --- attributes ---


@pytest.mark.parametrize(
    ("policy", "name", "words"),
    [
        *((Retry(), name, f"{name} .*does not change") for name in ("call", "execute", "wrap")),
        *((Retry(), name, rf"{name} .*does not change.*Retry\({name}=5\)") for name in ("attempts", "max_elapsed")),
        (Retry(), "max_tries", "is no attribute of Retry, which does not change"),  # as another library names it
        (Timeout(1), "max_abandoned", "is an attribute of Timeout, which does"),  # one number for the process
    ],
)
def test_settings_of_a_policy_cannot_be_assigned(policy: Policy[Any], name: str, words: str) -> None:
    """`retry.attempts = 5` would hide a method and change nothing."""
    with refused(AttributeError, words):
        setattr(policy, name, 5)


def test_methods_can_be_stubbed_and_custom_policies_may_have_public_attributes() -> None:
    own: Any = Passing()
    own.seconds, own.name = 2.0, "own"
    assert own.call(fetch) == "fetched"
    breaker = CircuitBreaker()
    breaker.isolate = lambda: None  # type: ignore[method-assign]
    breaker.isolate()
    assert breaker.call(fetch) == "fetched"


# --- clients -----------------------------------------------------------------------------------


async def test_context_managers_of_a_client_are_not_protected_and_cannot_be_named(world: World) -> None:
    """Calling such a method does none of its work."""
    proxy = quick().proxy(Client())
    with proxy.transaction() as entered:
        assert entered == "entered"
    with refused(TypeError, "makes a context manager"):
        quick().proxy(Client(), "transaction")
    if not world.blocking:
        async with proxy.later() as entered:
            assert entered == "entered later"
        async with quick().aproxy(Client()).later() as entered:
            assert entered == "entered later"


# --- blocks ------------------------------------------------------------------------------------

LOOP = "for attempt in retry.attempts(): with attempt:"

#: A policy, and what its error says to write: in blocking code, in tasks.
BLOCKS: list[tuple[Callable[[], Policy[Any]], str, str]] = [
    (lambda: CircuitBreaker(5), "with breaker.guard():", "async with breaker.guard():"),
    (lambda: Bulkhead(5), "with bulkhead.slot():", "async with bulkhead.slot():"),
    (lambda: AdaptiveLimit(0.3), "with limit.slot():", "async with limit.slot():"),
    (lambda: RateLimiter(5), "with limiter.turn():", "async with limiter.turn():"),
    (lambda: Timeout(5), "timeout.call(fn, *args)", "async with deadline(5.0):"),
    (Retry, LOOP, f"async {LOOP}"),
    (lambda: Cache(5), "policy.call(fn, *args)", "await policy.acall(fn, *args)"),
    (lambda: Pipeline(Retry()), "policy.call(fn, *args)", "await policy.acall(fn, *args)"),
]


@pytest.mark.parametrize(("make", "blocking", "in_tasks"), BLOCKS, ids=lambda it: it if isinstance(it, str) else "")
async def test_a_policy_is_not_entered_itself(
    tasks_world: World, make: Callable[[], Any], blocking: str, in_tasks: str
) -> None:
    """The locks and limiters of other libraries are blocks themselves. No code may take a policy for one."""
    policy = make()
    name = type(policy).__name__
    with refused(AttributeError, re.escape(f"{name} is not entered itself: write `{blocking}`")), policy:
        pass
    with refused(AttributeError, re.escape(f"{name} is not entered itself: write `{in_tasks}`")):
        async with policy:
            pass
    assert not hasattr(policy, "__enter__")
    assert not hasattr(policy, "__aenter__")


def test_a_retry_is_not_iterated_itself() -> None:
    """tenacity's object is."""
    for iterate in (iter, aiter):
        with refused(TypeError, "Retry is not iterated itself", r"for attempt in retry\.attempts\(\):"):
            iterate(Retry())  # type: ignore[arg-type]


def test_an_attempt_can_be_entered_only_once() -> None:
    """A second entry would leave its context ambient, also after the first entry has ended."""
    attempt = next(iter(Retry().attempts()))
    with deadline(5.0) as ctx:
        with attempt, refused(RuntimeError, "entered before", "with attempt:"):
            attempt.__enter__()
        assert current_context() is ctx
        with refused(RuntimeError, "entered before"):
            attempt.__enter__()
        assert current_context() is ctx


async def test_attempts_that_are_not_entered_cause_a_warning_at_the_loop(world: World) -> None:
    """Their failures are not retried."""

    async def loop() -> None:
        if world.blocking:
            for _ in Retry().attempts():
                fetch()
        else:
            async for _ in Retry().attempts():
                fetch()

    with pytest.warns(RuntimeWarning, match="Retry: an attempt was not entered.*`with attempt:`") as caught:
        await loop()
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("leave", ["an error", "return", "break"])
async def test_a_loop_that_is_left_at_an_attempt_that_was_not_entered_causes_a_warning_too(
    world: World, leave: str
) -> None:
    """Without a block, the first error leaves the loop."""

    def work() -> bool:
        if leave == "an error":
            raise Boom
        return leave == "break"

    async def loop() -> None:
        if world.blocking:
            for _ in Retry().attempts():
                if work():
                    break
                return
        else:
            async for _ in Retry().attempts():
                if work():
                    break
                return

    with (
        pytest.warns(RuntimeWarning, match="Retry: an attempt was not entered.*`with attempt:`") as caught,
        contextlib.suppress(Boom),
    ):
        await loop()
    assert [warning.filename for warning in caught] == [__file__]


async def test_an_attempt_that_was_entered_causes_no_warning_when_the_loop_is_left(world: World) -> None:
    """With an error, a result or an interrupt, and neither does a further attempt that is not wanted."""
    retry = Retry(on=Boom, backoff=[0])
    for error in [None, KeyError(), KeyboardInterrupt()]:
        with contextlib.suppress(KeyError, KeyboardInterrupt):
            for attempt in retry.attempts():
                with attempt:
                    if error is not None:
                        raise error
                    break
    for attempt in retry.attempts():
        if attempt.number == 2:
            break
        with attempt:
            raise Boom
    retry.attempts()  # not begun


async def fails_in_a_loop() -> None:
    """Retry in a blocking call, while an event loop runs in this thread."""
    Retry(2, on=Boom, backoff=[0.001]).call(raising)


async def queues_in_a_loop() -> None:
    """Wait for a permit that the same thread holds."""
    bulkhead = Bulkhead(1, queue=1, max_wait=0.001)
    with bulkhead.slot():
        bulkhead.call(fetch)


async def times_out_in_a_loop() -> None:
    """Wait for a function until the limit passes."""
    Timeout(0.001).call(time.sleep, 0.01)


async def loops_in_a_loop() -> None:
    """Use the block form without `async`."""
    for attempt in Retry(2, on=Boom, backoff=[0.001]).attempts():
        with attempt:
            raise Boom


@pytest.mark.parametrize(
    ("block", "error"),
    [
        (fails_in_a_loop, Boom),
        (queues_in_a_loop, BulkheadFull),
        (times_out_in_a_loop, TimeoutExceeded),
        (loops_in_a_loop, Boom),
    ],
)
async def test_a_blocking_wait_in_an_event_loop_causes_a_warning(
    tasks_world: World, block: Callable[[], Awaitable[None]], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops all tasks. The warning points to the user's line, and says what to write instead."""
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # imported by the tests of notebooks
    with (
        pytest.warns(RuntimeWarning, match=r"stops the event loop.*aexecute.*to_thread") as caught,
        pytest.raises(error),
    ):
        await block()
    assert [warning.filename for warning in caught] == [__file__]


async def test_other_blocking_calls_cause_no_warning(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls without a wait, in another thread, or without an event loop, also if nothing has imported asyncio."""
    assert quick(on_result=lambda result: result != "fetched").call(script(io.StringIO(), "fetched")) == "fetched"
    policy = Retry(2, on=Boom, backoff=[0.001])
    with pytest.raises(Boom):
        if world.blocking:
            monkeypatch.delitem(sys.modules, "asyncio.events")
            policy.call(raising)
        else:
            await anyio.to_thread.run_sync(policy.call, raising)


async def test_cells_of_a_notebook_may_block_their_loop(tasks_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in a loop, and are meant to block."""
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    with pytest.raises(Boom):
        await fails_in_a_loop()


# --- waits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "seconds"), [(None, 1e10), (2e10, 1e10), (1e10, 2e10)])
def test_a_sleep_of_centuries_is_cut_to_what_is_possible(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, seconds: float
) -> None:
    """`time.sleep(1e10)` is an `OverflowError`."""
    slept: list[float] = []
    monkeypatch.setattr(process_clock, "sleep", slept.append)
    policy: Policy[Any] = Sleeping(seconds) if limit is None else Timeout(limit).wrap(Sleeping(seconds))
    with contextlib.suppress(TimeoutExceeded):  # the limit ends before the sleep
        assert policy.call(fetch) == "fetched"
    assert slept == [FOREVER]
    assert FOREVER * 1e9 < 2**63  # Python counts nanoseconds in 64 bits
