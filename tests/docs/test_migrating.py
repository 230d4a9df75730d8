"""The page on migrating: each row runs the original library and ours side by side."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import backoff
import pybreaker
import pytest
import stamina
import tenacity

import resilience
from resilience import (
    CircuitBreaker,
    CircuitOpen,
    CircuitState,
    Context,
    Policy,
    RetriesExhausted,
    Retry,
    Success,
    events,
)
from resilience import backoff as backoffs
from resilience.integrations.logging import log_events
from resilience.testing import no_sleeping, recording, script, switched_off, virtual_time
from tests.docs.side_by_side import code_in, ours, rows_of, same, their_time, theirs

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
ROWS = {library: rows_of(PAGE, library) for library in ("tenacity", "stamina", "backoff", "pybreaker")}
TESTED: dict[tuple[str, str], Callable[[str, str], None]] = {}

Check = Callable[[str, str], None]


def row(library: str, *lefts: str) -> Callable[[Check], Check]:
    """Mark the test of rows, which are named by what they begin with."""

    def mark(check: Check) -> Check:
        TESTED.update({(library, left): check for left in lefts})
        return check

    return mark


def cases() -> list[Any]:
    found = []
    for (library, left), check in TESTED.items():
        cells = [it for it in ROWS[library] if it.startswith(left)]
        exact = [it for it in cells if it == left] or cells
        found += [pytest.param(library, it, check, id=f"{library}: {it}") for it in exact[:1]]
    return found


class Asks(Exception):
    """Says how long to wait, in the way of each library."""

    seconds = 7.0
    retry_after = 7.0


def predicate(value: object) -> bool:
    return value in (None, "bad") or (isinstance(value, Exception) and "busy" in str(value))


FAILS = (OSError("busy"), ...)
NAMES: dict[str, Any] = {
    **vars(tenacity),
    **{name: getattr(backoffs, name) for name in backoffs.__all__},
    **{name: getattr(resilience, name) for name in resilience.__all__},
    "predicate": predicate,
    "random": random,
    "re": re,
}
#: Under these names both have something else.
THEIRS = {**NAMES, "retry": tenacity.retry, "RetryError": tenacity.RetryError}


def written(code: str, names: dict[str, Any] = NAMES) -> Any:
    """Return what a piece of the page evaluates to."""
    return eval(code, dict(names))


# --- tenacity ---------------------------------------------------------------------------------


def tenacity_with(arguments: str) -> Callable[..., Any]:
    decorator: Callable[..., Any] = written(f"retry({arguments})", THEIRS)
    return decorator


@row("tenacity", "`@retry(stop=stop_after_attempt(5))`")
def _(left: str, right: str) -> None:
    same(tenacity_with("stop=stop_after_attempt(5), reraise=True"), written(code_in(right)[1:]), ValueError(), ...)
    assert isinstance(theirs(written(code_in(left)[1:], THEIRS), *FAILS).end, tenacity.RetryError)


STOPS = ("`stop_after_attempt(5)`", "`stop_before_delay(30)`", "`stop_after_attempt(5) | stop_before_delay(30)`")


@row("tenacity", *STOPS)
def _(left: str, right: str) -> None:
    arguments = code_in(right).removeprefix("Retry(").removesuffix(")")
    for wait in (4, 7, 10):
        their = tenacity_with(f"stop={code_in(left)}, wait=wait_fixed({wait}), reraise=True")
        same(their, written(f"Retry({arguments}, backoff=[{wait}], on=OSError)"), *FAILS)


@row("tenacity", "`stop_after_delay(30)`")
def _(left: str, right: str) -> None:
    their = theirs(tenacity_with(f"stop={code_in(left)}, wait=wait_fixed(7), reraise=True"), *FAILS)
    our = ours(Retry(None, max_elapsed=30, on=OSError, backoff=[7]), *FAILS)
    assert code_in(right) == "Retry(None, max_elapsed=30)"
    assert their.at == [0, 7, 14, 21, 28, 35]
    assert our.at == their.at[:-1]


@row("tenacity", "`stop_never`")
def _(left: str, right: str) -> None:
    steps = [*[OSError()] * 40, "fine"]
    same(tenacity_with(f"stop={code_in(left)}"), written(f"{code_in(right)[:-1]}, on=OSError, backoff=[0])"), *steps)


@row("tenacity", *(it for it in ROWS["tenacity"] if it.startswith("`wait_") and "exception" not in it))
def _(left: str, right: str) -> None:
    their = tenacity_with(f"stop=stop_after_attempt(11), wait={code_in(left)}, reraise=True")
    runs = same(their, written(f"Retry(11, on=OSError, {code_in(right)})"), *FAILS)
    assert len(runs[0].at) == 11


@row("tenacity", "`wait_exception(")
def _(left: str, right: str) -> None:
    assert "`retry_after`" in right
    our = written(f"Retry(3, on=Exception, {right.split('`')[3]})")
    runs = same(tenacity_with(f"stop=stop_after_attempt(3), wait={code_in(left)}, reraise=True"), our, Asks(), ...)
    assert runs[0].waits == [7, 7]


CONDITIONS = [
    it for it in ROWS["tenacity"] if it.startswith(("`retry_if_", "`retry_any", "`retry_all")) and "result(" not in it
]
ANSWERS = (
    [OSError("busy"), "fine"],
    [OSError("idle"), "fine"],
    [ValueError("busy"), "fine"],
    [ValueError("very busy"), "fine"],
    [KeyError("idle"), "fine"],
    ["bad", OSError("busy"), "fine"],
    [None, ValueError("busy"), "fine"],
    ["fine"],
)


@row("tenacity", *CONDITIONS, "`retry_any(")
@row("tenacity", *(it for it in ROWS["tenacity"] if it.startswith(("`retry_if_result", "`retry_if_not_result"))))
def _(left: str, right: str) -> None:
    condition = code_in(right)
    for steps in ANSWERS:
        their = tenacity_with(f"stop=stop_after_attempt(3), wait=wait_fixed(2), retry={code_in(left)}, reraise=True")
        our = written(f"Retry(3, {condition}, backoff=[2])")
        if "not_result" in left:
            steps = ["fine" if it in ("bad", None) else None if it == "fine" else it for it in steps]
        same(their, our, *steps)


def test_a_result_that_stays_bad() -> None:
    """tenacity raises, with `reraise=True` as well; here it is returned, or `wrap=True` raises."""
    for more in ("", ", reraise=True"):
        their = tenacity_with(f"stop=stop_after_attempt(3), retry=retry_if_result(predicate){more}")
        assert isinstance(theirs(their, "bad", ...).end, tenacity.RetryError)
    assert ours(Retry(3, on_result=predicate, backoff=[0]), "bad", ...).end == "bad"
    error = ours(Retry(3, on_result=predicate, backoff=[0], wrap=True), "bad", ...).end
    assert isinstance(error, RetriesExhausted)
    assert error.last == Success("bad")


def test_interrupts_are_retried_by_tenacity_only() -> None:
    """Under `retry_if_not_exception_type`, it repeats what a Ctrl-C ended."""
    their = script(KeyboardInterrupt(), "fine")
    tenacity.retry(retry=tenacity.retry_if_not_exception_type(ValueError))(their)()
    assert len(their.calls) == 2
    our = script(KeyboardInterrupt(), "fine")
    with pytest.raises(KeyboardInterrupt):
        Retry(on=Exception, ignore=ValueError).call(our)
    assert len(our.calls) == 1


@row("tenacity", "`raise TryAgain`")
def _(left: str, right: str) -> None:
    class Again(Exception): ...

    their = theirs(tenacity_with("stop=stop_after_attempt(3), wait=wait_fixed(1)"), tenacity.TryAgain(), "fine")
    our = ours(Retry(3, on=Again, backoff=[1]), Again(), "fine")
    assert their.comparable == our.comparable == ([0, 1], "fine")


@row("tenacity", "`before=callback`")
def _(left: str, right: str) -> None:
    before: list[int] = []
    with their_time():
        their = tenacity.retry(before=lambda state: before.append(state.attempt_number))(
            script(OSError(), OSError(), 1)
        )
        their()
    numbers: list[int] = []
    steps = script(OSError(), OSError(), 1)

    @Retry(on=OSError, backoff=[0])
    def function() -> Any:
        numbers.append(written(right.split("`")[1]) if "attempt" in right.split("`")[1] else 0)
        return steps()

    function()
    assert "current_context().attempt" in right
    assert numbers == before == [1, 2, 3]


@row("tenacity", "`before_sleep=callback`")
def _(left: str, right: str) -> None:
    their: list[tuple[int, float]] = []
    our: list[tuple[int, float]] = []
    same(
        tenacity.retry(
            stop=tenacity.stop_after_attempt(3),
            wait=tenacity.wait_fixed(2),
            before_sleep=lambda state: their.append((state.attempt_number, state.upcoming_sleep)),
            reraise=True,
        ),
        Retry(on=OSError, backoff=[2], on_retry=lambda event: our.append((event.attempt, event.delay))),
        *FAILS,
    )
    assert their == our
    assert our[:2] == [(1, 2), (2, 2)]


@row("tenacity", "`after=callback`")
def _(left: str, right: str) -> None:
    after: list[int] = []
    their = tenacity.retry(
        stop=tenacity.stop_after_attempt(3), after=lambda it: after.append(it.attempt_number), reraise=True
    )
    for steps in (FAILS, (OSError(), "fine")):
        after.clear()
        theirs(their, *steps)
        with recording(written(f"events.{code_in(right.split('for ')[1])}", {"events": events})) as recorder:
            ours(Retry(3, on=OSError, backoff=[0]), *steps)
        assert [event.attempt for event in recorder.events] == after  # type: ignore[attr-defined]
        assert after


@row("tenacity", "`before_log`")
def _(left: str, right: str) -> None:
    assert "log_events()" in right
    records: list[logging.LogRecord] = []
    logger = logging.getLogger("tests.migrating")
    logger.setLevel(logging.DEBUG)
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        before_sleep = tenacity.before_sleep_log(logger, logging.WARNING)
        theirs(tenacity.retry(stop=tenacity.stop_after_attempt(2), before_sleep=before_sleep), *FAILS)
        assert len(records) == 1
        records.clear()
        stop = log_events(logger)
        ours(Retry(2, on=OSError, backoff=[0]), *FAILS)
        stop()
        assert len(records) >= 1
    finally:
        logger.removeHandler(handler)


@row("tenacity", "`retry_error_callback=callback`")
def _(left: str, right: str) -> None:
    their = tenacity.retry(
        stop=tenacity.stop_after_attempt(5),
        retry=tenacity.retry_if_exception_type(OSError) | tenacity.retry_if_result(predicate),
        retry_error_callback=lambda state: "answer",
    )
    _, outer, _, inner, *_ = right.split("`")
    names = {**NAMES, "callback": lambda outcome, ctx: "answer"}
    our = written(outer, names).wrap(written(f"{inner[:-1]}, on=OSError, on_result=predicate, backoff=[0])", names))
    for steps in ([*FAILS], ["bad", ...], [OSError(), "fine"], [ValueError(), ...], [OSError(), ValueError()]):
        same(their, our, *steps)
    assert ours(our, ValueError(), ...).comparable == ([0], "ValueError")  # a plain Fallback answers this, too


@row("tenacity", "`reraise=True`")
def _(left: str, right: str) -> None:
    same(tenacity_with(f"stop=stop_after_attempt(3), {code_in(left)}"), Retry(3, on=OSError, backoff=[0]), *FAILS)


@row("tenacity", "`reraise=False`")
def _(left: str, right: str) -> None:
    their = theirs(tenacity_with(f"stop=stop_after_attempt(3), {code_in(left)}"), *FAILS)
    our = ours(written(f"Retry(3, on=OSError, backoff=[0], {code_in(right)})"), *FAILS)
    assert their.at == our.at
    assert isinstance(their.end, tenacity.RetryError)
    assert isinstance(our.end, RetriesExhausted)
    assert isinstance(our.end.__cause__, OSError)


@row("tenacity", "`for attempt in Retrying(...): with attempt:`")
def _(left: str, right: str) -> None:
    def their(function: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            for attempt in tenacity.Retrying(
                stop=tenacity.stop_after_attempt(3), wait=tenacity.wait_fixed(2), reraise=True
            ):
                with attempt:
                    return function()
            return None

        return run

    def our(function: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            for attempt in Retry(3, on=OSError, backoff=[2]).attempts():
                with attempt:
                    return function()
            return None

        return run

    same(their, our, *FAILS)
    same(their, our, OSError(), "fine")


@row("tenacity", "`Retrying(...)(function, *args)`")
def _(left: str, right: str) -> None:
    retrying = tenacity.Retrying(stop=tenacity.stop_after_attempt(3), reraise=True)
    retry = Retry(3, on=OSError, backoff=[0])
    for steps in (FAILS, (OSError(), "fine")):
        same(lambda function: lambda: retrying(function, 1), lambda function: lambda: retry.call(function, 1), *steps)


@row("tenacity", "`AsyncRetrying(...)`")
def _(left: str, right: str) -> None:
    retry = Retry(3, on=OSError, backoff=[0])

    def block(attempts: Callable[[], Any]) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        def wrapped(function: Callable[[], Any]) -> Callable[[], Any]:
            async def run() -> Any:
                async for attempt in attempts():
                    with attempt:
                        return function()
                return None

            return run

        return wrapped

    their = block(lambda: tenacity.AsyncRetrying(stop=tenacity.stop_after_attempt(3), reraise=True))
    for steps in (FAILS, (OSError(), "fine")):
        same(their, block(retry.attempts), *steps)


@row("tenacity", "`function.retry_with(")
def _(left: str, right: str) -> None:
    def their(function: Callable[..., Any]) -> Callable[[], Any]:
        return tenacity.retry(stop=tenacity.stop_after_attempt(3))(function).retry_with(  # type: ignore[attr-defined, no-any-return]
            stop=tenacity.stop_after_attempt(5), reraise=True
        )

    same(their, lambda function: lambda: Retry(5, on=OSError, backoff=[0]).call(function), *FAILS)


@row("tenacity", "`sleep=`")
def _(left: str, right: str) -> None:
    slept: list[float] = []
    tenacity.retry(wait=tenacity.wait_fixed(60), sleep=slept.append)(script(OSError(), "fine"))()
    with virtual_time() as clock:
        Retry(on=OSError, backoff=[60]).call(script(OSError(), "fine"))
    with no_sleeping():
        Retry(on=OSError, backoff=[60]).call(script(OSError(), "fine"))
    assert slept == clock.sleeps == [60]


@row("tenacity", "`function.statistics`")
def _(left: str, right: str) -> None:
    function: Any = tenacity.retry(script(OSError(), "fine"))
    function()
    ctx, steps = Context(), script(OSError(), "fine")
    Retry(on=OSError, backoff=[0]).execute(lambda ctx: steps(), ctx)
    assert function.statistics["attempt_number"] == ctx.attempts == 2


# --- stamina ----------------------------------------------------------------------------------


def stamina_with(arguments: str) -> Callable[..., Any]:
    decorator: Callable[..., Any] = written(f"retry({arguments})", {"retry": stamina.retry, "OSError": OSError})
    return decorator


#: The jitter of both is left out where it is not what the row is about.
PLAIN = "on=OSError, wait_initial=1, wait_exp_base=1, wait_jitter=0"


@row("stamina", "`@stamina.retry(on=OSError)`")
def _(left: str, right: str) -> None:
    their = theirs(written(code_in(left)[1:], {"stamina": stamina}), *FAILS)
    our = ours(written(code_in(right)[1:]), *FAILS)
    assert len(their.at) == len(our.at) == 10
    same(stamina_with(PLAIN), written(f"{code_in(right)[1:-1]}, backoff=[1])"), *FAILS)


@row("stamina", "`attempts=5`")
def _(left: str, right: str) -> None:
    same(stamina_with(f"{PLAIN}, {code_in(left)}"), written(f"{code_in(right)[:-1]}, on=OSError, backoff=[1])"), *FAILS)


@row("stamina", "`timeout=45.0`")
def _(left: str, right: str) -> None:
    slow = PLAIN.replace("wait_initial=1", "wait_initial=7").replace("wait_jitter=0", "wait_jitter=0, wait_max=9")
    their = theirs(stamina_with(f"{slow}, attempts=None, {code_in(left)}"), *FAILS)
    our = ours(written(f"Retry(None, on=OSError, backoff=[7], {code_in(right)})"), *FAILS)
    assert our.at == [0, 7, 14, 21, 28, 35, 42]
    assert their.at == [*our.at, 49]  # its last wait may end after the limit


@row(
    "stamina",
    "`wait_initial=0.1, wait_max=5.0, wait_exp_base=2, wait_jitter=0`",
    "`wait_initial=0.1, wait_max=5.0, wait_jitter=1.0`",
)
def _(left: str, right: str) -> None:
    same(stamina_with(f"on=OSError, {code_in(left)}"), written(f"Retry(10, on=OSError, {code_in(right)})"), *FAILS)


@row("stamina", "`on=hook` that returns a bool")
def _(left: str, right: str) -> None:
    for steps in ANSWERS[:5]:
        their = stamina.retry(on=predicate, wait_jitter=0, wait_initial=1)
        same(their, written(f"Retry(10, backoff=[1], {code_in(right)})"), *steps)


@row("stamina", "`on=hook` that returns seconds")
def _(left: str, right: str) -> None:
    their = stamina.retry(on=lambda error: error.seconds, attempts=3)  # type: ignore[attr-defined]
    assert "`retry_after`" in right
    same(their, written(f"Retry(3, on=Exception, {right.split('`')[3]})"), Asks(), ...)


@row("stamina", "`for attempt in stamina.retry_context(", "`attempt.num`")
def _(left: str, right: str) -> None:
    numbers: list[int] = []

    def block(attempts: Callable[[], Any], number: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        def wrapped(function: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                for attempt in attempts():
                    with attempt:
                        numbers.append(getattr(attempt, number))
                        return function()
                return None

            return run

        return wrapped

    def context() -> Any:
        return stamina.retry_context(on=OSError, wait_initial=1, wait_exp_base=1, wait_jitter=0, attempts=3)

    same(block(context, "num"), block(Retry(3, on=OSError, backoff=[1]).attempts, "number"), *FAILS)
    assert numbers == [1, 2, 3] * 6


@row("stamina", "`stamina.RetryingCaller()`")
def _(left: str, right: str) -> None:
    caller = stamina.RetryingCaller(attempts=3, wait_initial=1, wait_exp_base=1, wait_jitter=0).on(OSError)
    retry = Retry(3, on=OSError, backoff=[1])
    same(lambda function: lambda: caller(function), lambda function: lambda: retry.call(function), *FAILS)


@row("stamina", "`stamina.AsyncRetryingCaller()`")
def _(left: str, right: str) -> None:
    caller = stamina.AsyncRetryingCaller(attempts=3, wait_initial=1, wait_exp_base=1, wait_jitter=0)
    retry = Retry(3, on=OSError, backoff=[1])

    def asynchronous(function: Callable[[], Any]) -> Callable[[], Any]:
        async def run() -> Any:
            return function()

        return run

    same(
        lambda function: lambda: caller(OSError, asynchronous(function)),
        lambda function: lambda: retry.acall(asynchronous(function)),
        *FAILS,
    )


@row("stamina", "`stamina.instrumentation.set_on_retry_hooks(", "the hooks for structlog")
def _(left: str, right: str) -> None:
    seen: list[float] = []
    stamina.instrumentation.set_on_retry_hooks([lambda details: seen.append(details.wait_for)])
    try:
        theirs(stamina_with(f"{PLAIN}, attempts=3"), *FAILS)
    finally:
        stamina.instrumentation.set_on_retry_hooks(None)
    ours_seen: list[float] = []
    unsubscribe = events.subscribe(lambda event: ours_seen.append(event.delay), events.RetryScheduled)
    ours(Retry(3, on=OSError, backoff=[1]), *FAILS)
    unsubscribe()
    assert seen == ours_seen == [1, 1]


@row("stamina", "`stamina.set_active(False)`")
def _(left: str, right: str) -> None:
    stamina.set_active(False)
    try:
        their = theirs(stamina_with(PLAIN), *FAILS)
    finally:
        stamina.set_active(True)
    with switched_off():
        our = ours(Retry(10, on=OSError), *FAILS)
    assert their.comparable == our.comparable == ([0], "OSError")


@row("stamina", "`stamina.set_testing(True)`")
def _(left: str, right: str) -> None:
    stamina.set_testing(True, attempts=10)
    try:
        their = theirs(stamina_with(PLAIN), *FAILS)
    finally:
        stamina.set_testing(False)
    with no_sleeping():
        our = ours(Retry(10, on=OSError, backoff=[1]), *FAILS)
    assert len(their.at) == len(our.at) == 10


# --- backoff ----------------------------------------------------------------------------------


BACKOFF = {"backoff": backoff, "OSError": OSError, "predicate": predicate}


def on_exception(arguments: str, generator: str = "constant, OSError, interval=2, jitter=None") -> Callable[..., Any]:
    decorator: Callable[..., Any] = written(f"backoff.on_exception(backoff.{generator}, {arguments})", BACKOFF)
    return decorator


@row("backoff", "`@backoff.on_exception(", "`@backoff.on_predicate(")
def _(left: str, right: str) -> None:
    steps = FAILS if "exception" in left else [None] * 4 + ["fine"]
    same(written(code_in(left)[1:], BACKOFF), written(code_in(right)[1:]), *steps)


@row("backoff", "`max_time=60`")
def _(left: str, right: str) -> None:
    for wait in (7, 20):
        their = theirs(on_exception(code_in(left), f"constant, OSError, interval={wait}, jitter=None"), *FAILS)
        our = ours(written(f"Retry(None, on=OSError, backoff=[{wait}], {code_in(right)})"), *FAILS)
        assert their.at == [*our.at, 60]  # the last wait is shortened
        assert all(it < 60 for it in our.at)


GENERATORS = {
    "`backoff.expo`": "expo, OSError, factor=0.5, base=3, max_value=60, max_tries=9",
    "`backoff.constant`": "constant, OSError, interval=2, max_tries=9",
}


@row("backoff", *GENERATORS)
def _(left: str, right: str) -> None:
    generator = GENERATORS[f"`{code_in(left)}`"]
    assert all(it.strip(" `") in generator for it in left.split(",")[1:])
    same(
        written(f"backoff.on_exception(backoff.{generator})", BACKOFF),
        written(f"Retry(9, on=OSError, backoff={code_in(right)})"),
        *FAILS,
    )


@row("backoff", "`backoff.fibo`")
def _(left: str, right: str) -> None:
    def fibonacci() -> Any:
        a, b = 1, 1
        while True:
            yield a
            a, b = b, a + b

    same(on_exception("OSError, jitter=None, max_tries=9", "fibo"), Retry(9, on=OSError, backoff=fibonacci), *FAILS)


@row("backoff", "`jitter=backoff.full_jitter`")
def _(left: str, right: str) -> None:
    same(
        on_exception(f"OSError, max_tries=5, {code_in(left)}", "expo"),
        Retry(5, on=OSError, backoff=backoffs.Exponential(1)),
        *FAILS,
    )
    same(
        on_exception(f"OSError, interval=2, max_tries=5, {code_in(left)}", "constant"),
        written(f"Retry(5, on=OSError, backoff=Constant(2, {right.split('`')[3]}))"),
        *FAILS,
    )


@row("backoff", "`jitter=None`")
def _(left: str, right: str) -> None:
    their = on_exception(f"OSError, max_tries=5, {code_in(left)}", "expo")
    same(their, written(f"Retry(5, on=OSError, backoff=Exponential(1, {code_in(right)}))"), *FAILS)


@row("backoff", "`giveup=predicate`")
def _(left: str, right: str) -> None:
    for steps in ANSWERS[:2]:
        same(
            on_exception(f"max_tries=5, {code_in(left)}"),
            written(f"Retry(5, on=OSError, backoff=[2], {code_in(right)})"),
            *steps,
        )


@row("backoff", "`on_backoff=handler`")
def _(left: str, right: str) -> None:
    their: list[float] = []
    our: list[float] = []
    theirs(
        backoff.on_exception(
            backoff.constant,
            OSError,
            interval=2,
            jitter=None,
            max_tries=3,
            on_backoff=lambda it: their.append(it["wait"]),
        ),
        *FAILS,
    )
    ours(Retry(3, on=OSError, backoff=[2], on_retry=lambda event: our.append(event.delay)), *FAILS)
    assert their == our == [2, 2]


@row("backoff", "`on_giveup=handler`")
def _(left: str, right: str) -> None:
    their: list[int] = []
    arguments: dict[str, Any] = {
        "interval": 2,
        "jitter": None,
        "max_tries": 3,
        "on_giveup": lambda it: their.append(it["tries"]),
    }
    theirs(backoff.on_exception(backoff.constant, OSError, **arguments), *FAILS)
    with recording(events.RetryGaveUp) as recorder:
        ours(Retry(3, on=OSError, backoff=[2]), *FAILS)
    assert [event.attempts for event in recorder.of(events.RetryGaveUp)] == their == [3]
    recorder.clear()
    theirs(backoff.on_exception(backoff.constant, OSError, giveup=predicate, **arguments), *FAILS)
    with recording(events.RetryGaveUp) as recorder:
        ours(Retry(3, on=OSError, ignore=predicate, backoff=[2]), *FAILS)
    assert their == [3, 1]
    assert recorder.events == []


@row("backoff", "`on_success=handler`")
def _(left: str, right: str) -> None:
    for steps, succeeded in ((FAILS, 0), ((OSError(), "fine"), 1)):
        their: list[object] = []
        theirs(
            backoff.on_exception(
                backoff.constant, OSError, interval=2, jitter=None, max_tries=3, on_success=their.append
            ),
            *steps,
        )
        with recording(events.ExecutionFinished) as recorder:
            ours(Retry(3, on=OSError, backoff=[2]), *steps)
        our = [event for event in recorder.of(events.ExecutionFinished) if isinstance(event.outcome, Success)]
        assert len(their) == len(our) == succeeded


@row("backoff", "`raise_on_giveup=False`")
def _(left: str, right: str) -> None:
    their = on_exception(f"max_tries=3, {code_in(left)}")
    our = written(code_in(right)).wrap(Retry(3, on=OSError, backoff=[2]))
    for steps in (FAILS, [OSError(), "fine"], [ValueError(), ...], [OSError(), ValueError()]):
        same(their, our, *steps)


@row("backoff", "`backoff.runtime`")
def _(left: str, right: str) -> None:
    arguments = left.split("`")[3]
    their = written(
        f"backoff.on_exception(backoff.runtime, Exception, max_tries=3, {arguments})",
        {**BACKOFF, "Exception": Exception},
    )
    same(their, written(f"Retry(3, on=Exception, {right.split('`')[3]})"), Asks(), ...)


# --- pybreaker --------------------------------------------------------------------------------


class NotFound(Exception): ...


def after_each(
    breaker: Any, function: Callable[..., Any], *steps: Any, clock: Any, waits: dict[int, float]
) -> list[str]:
    """Make a call per step through a breaker, and return what came of each: a value or the name of an error."""
    ends = []
    for number in range(len(steps)):
        clock(waits.get(number, 0.0))
        try:
            ends.append(str(breaker.call(function)))
        except (pybreaker.CircuitBreakerError, CircuitOpen):
            ends.append("refused")
        except Exception as error:
            ends.append(type(error).__name__)
    return ends


def same_breakers(their: Any, our: CircuitBreaker, *steps: Any, waits: dict[int, float]) -> list[str]:
    """Assert that both let through and refuse the same calls; a step that is not taken stays for the next call."""
    with their_time() as clock:
        first = after_each(their, script(*steps, ...), *steps, clock=clock.sleep, waits=waits)
    with virtual_time() as virtual:
        advance = lambda seconds: virtual.advance(seconds) if seconds else None  # noqa: E731
        second = after_each(our, script(*steps, ...), *steps, clock=advance, waits=waits)
    assert first == second
    return first


def pybreaker_with(arguments: str) -> Any:
    return written(
        f"CircuitBreaker({arguments}, throw_new_error_on_trip=False)",
        {"CircuitBreaker": pybreaker.CircuitBreaker, "NotFound": NotFound},
    )


WITH_NOT_FOUND = {**NAMES, "NotFound": NotFound}


@row("pybreaker", "`CircuitBreaker(fail_max=5, reset_timeout=60)`")
def _(left: str, right: str) -> None:
    arguments = code_in(left).removeprefix("CircuitBreaker(")[:-1]
    steps = [OSError()] * 3 + [1] + [OSError()] * 6 + [2] * 5
    ends = same_breakers(
        pybreaker_with(arguments), written(code_in(right)), *steps, waits={10: 59.0, 12: 2.0, 13: 61.0}
    )
    assert ends.count("refused") >= 3
    assert ends[-1] == "2"


@row("pybreaker", "`success_threshold=3`")
def _(left: str, right: str) -> None:
    steps = [OSError(), 1, 2, OSError(), 3, 4, 5, OSError(), OSError()]
    their = pybreaker_with(f"fail_max=1, reset_timeout=60, {code_in(left)}")
    same_breakers(their, written(f"CircuitBreaker(1, open_for=60, {code_in(right)})"), *steps, waits={1: 61.0, 4: 61.0})


@row("pybreaker", "`exclude=[NotFound]`")
def _(left: str, right: str) -> None:
    steps = [OSError(), NotFound(), OSError(), NotFound(), OSError(), OSError(), 1]
    their = pybreaker_with(f"fail_max=2, reset_timeout=60, {code_in(left)}")
    our = written(f"CircuitBreaker(2, open_for=60, {code_in(right)})", WITH_NOT_FOUND)
    assert same_breakers(their, our, *steps, waits={})[-1] == "refused"


@row("pybreaker", "`@breaker`", "`breaker.call(function, *args)`", "`with breaker.calling():`")
def _(left: str, right: str) -> None:
    def used(breaker: Any, form: str) -> list[str]:
        function = script(OSError(), "fine")
        decorated = breaker(function)

        def block() -> Any:
            with getattr(breaker, form)():
                return function()

        how = {"@breaker": decorated, "breaker.call(function, *args)": lambda: breaker.call(function)}
        ends = []
        for _ in range(2):
            try:
                ends.append(str(how.get(code_in(left), block)()))
            except (pybreaker.CircuitBreakerError, CircuitOpen):
                ends.append("refused")
            except OSError:
                ends.append("OSError")
        return ends

    assert ".guard()" in right or code_in(left) == code_in(right)
    assert used(pybreaker_with("fail_max=1"), "calling") == used(CircuitBreaker(1), "guard") == ["OSError", "refused"]


@row("pybreaker", "`breaker.call_async(function, *args)`")
def _(left: str, right: str) -> None:
    async def fails() -> None:
        raise OSError

    async def through(breaker: Any) -> list[str]:
        ends = []
        for _ in range(2):
            try:
                await breaker.call(fails)
            except Exception as error:
                ends.append(type(error).__name__)
        return ends

    their = pybreaker_with("fail_max=1")
    try:  # it needs Tornado, of which this is what is called
        asyncio.run(their.call_async(fails))
    except (NameError, ImportError, AttributeError):
        assert asyncio.run(through(their)) == ["OSError", "OSError"]  # failures of an `async def` are not counted
    assert asyncio.run(through(CircuitBreaker(1))) == ["OSError", "CircuitOpen"]


@row("pybreaker", "`breaker.open()`", "`breaker.close()`", "`breaker.current_state", "`except CircuitBreakerError`")
def _(left: str, right: str) -> None:
    their, our = pybreaker_with("fail_max=1, reset_timeout=60"), CircuitBreaker(1, open_for=60)
    names = {**NAMES, "breaker": our}
    states = CircuitState.CLOSED, CircuitState.ISOLATED
    with their_time() as clock, virtual_time() as virtual:
        their.open()
        our.isolate()
        assert (their.current_state, our.state) == ("open", states[1])
        for breaker, error in ((their, pybreaker.CircuitBreakerError), (our, CircuitOpen)):
            with pytest.raises(error):
                breaker.call(int)
        clock.sleep(61)
        virtual.advance(61)
        assert their.call(int) == 0  # which is over after the reset timeout; ours is not
        with pytest.raises(CircuitOpen):
            our.call(int)
        their.close()
        our.close()
        assert (their.current_state, our.state) == ("closed", states[0])
        for breaker in (their, our):
            with pytest.raises(OSError, match="down"):
                breaker.call(script(OSError("down")))
        assert their.current_state == "open"
        assert written("breaker.state is CircuitState.OPEN", names)
    if "current_state" in left:
        assert code_in(right) == "breaker.state is CircuitState.OPEN"


@row("pybreaker", "`breaker.half_open()`")
def _(left: str, right: str) -> None:
    steps = [OSError(), 1, OSError(), OSError()]
    their, our = pybreaker_with("fail_max=1, reset_timeout=60"), CircuitBreaker(1, open_for=60)
    assert same_breakers(their, our, *steps, waits={1: 61.0}) == ["OSError", "1", "OSError", "refused"]


@row(
    "pybreaker",
    "`CircuitBreakerListener.state_change`",
    "`CircuitBreakerListener.success`",
    "`CircuitBreakerListener.before_call`",
)
def _(left: str, right: str) -> None:
    class Listener(pybreaker.CircuitBreakerListener):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def before_call(self, cb: Any, func: Any, *args: Any, **kwargs: Any) -> None:
            self.seen.append(f"before {args}")

        def success(self, cb: Any) -> None:
            self.seen.append("success")

        def failure(self, cb: Any, exc: BaseException) -> None:
            self.seen.append(f"failure {exc!r}")

        def state_change(self, cb: Any, old_state: Any, new_state: Any) -> None:
            self.seen.append(f"{old_state.name} {new_state.name}")

    class Before(Policy[Any]):
        async def around(self, call: Any, ctx: Context) -> Any:
            assert ctx.called is not None
            seen.append(f"before {ctx.called.arguments}")
            return await call(ctx)

    seen: list[str] = []
    listener = Listener()
    their = pybreaker.CircuitBreaker(fail_max=1, reset_timeout=60, listeners=[listener])
    breaker = CircuitBreaker(
        1, open_for=60, on_transition=lambda it: seen.append(f"{it.old.value} {it.new.value}".replace("_", "-"))
    )
    unsubscribe = events.subscribe(
        lambda it: seen.append("success" if isinstance(it.outcome, Success) else f"failure {it.outcome.error!r}"),
        events.CallFinished,
    )
    steps = [1, OSError("down"), 3, 4]
    with their_time() as clock:
        after_each(CallWith(their), script(*steps), *steps, clock=clock.sleep, waits={2: 61.0})
    with virtual_time() as virtual:
        advance = lambda seconds: virtual.advance(seconds) if seconds else None  # noqa: E731
        after_each(CallWith(breaker.wrap(Before())), script(*steps), *steps, clock=advance, waits={2: 61.0})
    unsubscribe()
    assert sorted(seen) == sorted(it.replace("half_open", "half-open") for it in listener.seen)


class CallWith:
    """Calls with an argument."""

    def __init__(self, breaker: Any) -> None:
        self._breaker = breaker

    def call(self, function: Callable[..., Any]) -> Any:
        return self._breaker.call(function, 7)


@row("pybreaker", "`state_storage=CircuitRedisStorage(...)`")
def _(left: str, right: str) -> None:
    assert right.startswith("nothing")
    assert "state_storage" in inspect.signature(pybreaker.CircuitBreaker).parameters
    assert not any("storage" in it for it in inspect.signature(CircuitBreaker).parameters)


# --- the page ---------------------------------------------------------------------------------


def test_every_row_of_the_page_is_run() -> None:
    """A row that no test names is a promise that nothing checks."""
    run = {(case.values[0], case.values[1]) for case in cases()}
    assert {(library, left) for library, rows in ROWS.items() for left in rows} == run
    assert len(run) > 80


@pytest.mark.parametrize(("library", "left", "check"), cases())
def test_a_row_holds(library: str, left: str, check: Check) -> None:
    """What stands on the left and on the right calls at the same instants and ends in the same way."""
    check(left, ROWS[library][left])
