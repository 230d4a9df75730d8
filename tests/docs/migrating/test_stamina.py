"""The page on migrating, from stamina."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import stamina

from resilience import Retry, events
from resilience.testing import no_sleeping, switched_off
from tests.docs.migrating.rows import ANSWERS, FAILS, Asks, Check, cases, predicate, row, written
from tests.docs.side_by_side import code_in, in_blocks, ours, same, theirs


def stamina_with(arguments: str) -> Callable[..., Any]:
    decorator: Callable[..., Any] = written(f"retry({arguments})", {"retry": stamina.retry, "OSError": OSError})
    return decorator


#: Without the jitter of both libraries, for rows that are not about jitter.
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
    same(their, written(f"Retry(3, on=Exception, {code_in(right)})"), Asks(), ...)


@row("stamina", "`for attempt in stamina.retry_context(", "`attempt.num`")
def _(left: str, right: str) -> None:
    numbers: list[int] = []

    def context() -> Any:
        return stamina.retry_context(on=OSError, wait_initial=1, wait_exp_base=1, wait_jitter=0, attempts=3)

    their = in_blocks(context, lambda attempt: numbers.append(attempt.num))
    our = in_blocks(Retry(3, on=OSError, backoff=[1]).attempts, lambda attempt: numbers.append(attempt.number))
    same(their, our, *FAILS)
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

    def their(function: Callable[[], Any]) -> Any:
        return lambda: caller(OSError, asynchronous(function))

    same(their, lambda function: lambda: retry.acall(asynchronous(function)), *FAILS)


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


@pytest.mark.parametrize(("left", "right", "check"), cases("stamina"))
def test_both_sides_of_a_row_behave_the_same(left: str, right: str, check: Check) -> None:
    check(left, right)
