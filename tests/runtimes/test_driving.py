"""Driven chains: whatever ends one of them, the next ones run to their end, and nothing of a call is kept."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from resilience import Context, Policy, Retry
from resilience.errors import SuspensionMisuse
from resilience.runtimes import driving
from tests.conftest import Boom, no_collector
from tests.custom import HandingOn
from tests.functions import raising
from tests.runtimes.test_blocking import Forgetful

DRIVEN = HandingOn(Retry(1))


class Answer:
    """A result that can be referred to weakly."""


def test_a_result_is_not_kept() -> None:
    with no_collector():
        answer = DRIVEN.call(Answer)
        ref = weakref.ref(answer)
        del answer
        assert ref() is None


def test_calls_may_be_nested() -> None:
    def nested(depth: int) -> list[int]:
        return [depth, *DRIVEN.call(nested, depth - 1)] if depth else []

    assert nested(20) == list(range(20, 0, -1))


def test_threads_run_chains_at_once() -> None:
    together = threading.Barrier(8)

    def meet(number: int) -> int:
        together.wait(10)
        return number

    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            assert list(threads.map(lambda number: DRIVEN.call(meet, number), range(8))) == list(range(8))


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_error_ends_one_call_only(error: type[BaseException]) -> None:
    for _ in range(3):
        with pytest.raises(error):
            DRIVEN.execute(raising(error))
        assert DRIVEN.call(int) == 0


def test_a_suspension_ends_one_call_only() -> None:
    for _ in range(3):
        with pytest.raises(SuspensionMisuse):
            HandingOn(Forgetful()).call(int)
        assert DRIVEN.call(int) == 0


def test_a_value_that_a_policy_yields_is_no_result() -> None:
    """Whatever it is: a chain that suspends is a bug."""

    class Yields:
        def __await__(self) -> Any:
            yield "no result"

    class Suspending(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            await Yields()
            return await call(ctx)

    with pytest.raises(SuspensionMisuse, match=r"Suspending suspended"):
        HandingOn(Suspending()).call(int)


def test_calls_share_their_runners() -> None:
    """One after another, they need one; a call that fails uses one up."""
    driving._idle_runners.clear()
    for _ in range(3):
        DRIVEN.call(int)
    assert len(driving._idle_runners) == 1
    with suppress(ZeroDivisionError):
        DRIVEN.execute(lambda ctx: 1 / 0)
    assert len(driving._idle_runners) == 0
