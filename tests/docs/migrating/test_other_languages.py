"""The page on migrating, from libraries of other languages: only our side can be run."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from resilience import CircuitState, Failure, Retry, RetryBudget
from resilience.backoff import Constant
from resilience.testing import ascript, hang, script, virtual_time
from tests.docs.migrating.rows import NAMES, PAGE, written
from tests.docs.side_by_side import rows_of

NAMED_BY_THE_READER = {
    "budget": RetryBudget(0.2),
    "cache": {},
    "cached": lambda failure, ctx: "cached",
    "fn": str,
    "key": str,
    "predicate": bool,
}


def built(cell: str) -> list[Any]:
    """Build all objects that a cell of the page shows."""
    return [
        written(code, NAMES | NAMED_BY_THE_READER) for code in re.findall(r"`(?:backoff=)?([A-Z]\w+\([^`]*\))`", cell)
    ]


@pytest.mark.parametrize("library", ["Polly", "resilience4j", "failsafe-go"])
def test_the_replacements_can_be_built(library: str) -> None:
    assert len([it for right in rows_of(PAGE, library).values() for it in built(right)]) > 10


def policies_in(library: str, left: str) -> list[Any]:
    """Return the policies on our side of the row that begins with this text."""
    [right] = [right for cell, right in rows_of(PAGE, library).items() if cell.startswith(left)]
    return built(right)


@pytest.mark.parametrize(("backoff", "waits"), [([0], [7, 0.5]), (Constant(2), [7, 2])], ids=repr)
def test_the_delay_of_an_outcome_never_shortens_the_wait(backoff: Any, waits: list[float]) -> None:
    """`DelayGenerator` and `WithDelayFunc` replace the wait: so does `retry_after`, where the backoff has none."""
    seconds = {"retry_after": lambda outcome: outcome.value, "backoff": backoff}
    retry = Retry(3, on_result=lambda value: value != "fine", **seconds)
    with virtual_time() as clock:
        assert retry.call(script(7, 0.5, "fine")) == "fine"
        assert clock.sleeps == waits


@pytest.mark.parametrize("error", [ConnectionError("refused"), ValueError("wrong")], ids=repr)
def test_the_first_error_ends_a_hedge_of_failsafe_go(error: Exception) -> None:
    hedge = policies_in("failsafe-go", "`hedgepolicy.NewWithDelay")[0]
    with virtual_time() as clock:
        assert asyncio.run(hedge.acapture(ascript(hang(60), error))) == Failure(error)
        assert clock.now() == pytest.approx(0.1)


def test_the_fallback_mode_of_polly_asks_one_after_another_and_raises_the_first_error() -> None:
    hedge = policies_in("Polly", "`Delay = 0 s`; `Delay = -1 ms`")[1]

    async def fails_late(ctx: Any) -> None:
        await asyncio.sleep(10)
        raise ValueError(ctx.hedge, clock.now())

    with virtual_time() as clock:
        failure = asyncio.run(hedge.acapture(fails_late))
        assert failure.error.args == (0, 10.0)
        assert clock.now() == 40.0


@pytest.mark.parametrize(
    ("library", "left", "begun"),
    [
        ("Polly", "`DelayGenerator` of `AddHedging`", [0, 0, 10, 20]),
        ("failsafe-go", "`NewWithDelayFunc(...)`", [0, 0.1, 0.15, 0.2]),
    ],
)
def test_each_hedge_begins_after_its_own_delay(library: str, left: str, begun: list[float]) -> None:
    [hedge] = policies_in(library, left)
    began = []

    async def fails_late(ctx: Any) -> None:
        began.append(clock.now())
        await asyncio.sleep(10)
        raise ValueError

    with virtual_time() as clock:
        asyncio.run(hedge.acapture(fails_late))
        assert began == pytest.approx(begun)


def test_three_failures_among_five_calls_open_a_circuit() -> None:
    [breaker] = policies_in("failsafe-go", "`WithFailureThresholdRatio(3, 5)`")
    states = []
    for step in (OSError(), "fine", OSError(), "fine", "fine", OSError(), OSError()):
        breaker.capture(script(step))
        states.append(breaker.state)
    assert states == [CircuitState.CLOSED] * 6 + [CircuitState.OPEN]


def test_a_result_that_cache_if_refuses_is_not_kept() -> None:
    [cache] = policies_in("failsafe-go", "`CacheIf(")
    load = script("", "first", "second")
    assert [cache.call(load) for _ in range(3)] == ["", "first", "first"]
