"""Abandoned calls: they are counted, limited, and hold nothing that other calls wait for."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from resilience import CircuitBreaker, CircuitState, Context, Failure, Fallback, Policy, Retry, Timeout
from resilience.clock import clock as process_clock
from resilience.errors import Misuse, Rejected, TimeoutExceeded, WorkersExhausted
from resilience.events import CallRejected
from resilience.runtimes import workers
from resilience.testing import recording
from tests.callers import wait_until
from tests.conftest import Boom
from tests.functions import raising
from tests.runtimes.conftest import LONG, abandon, waits_end_at_once
from tests.streams.sources import anext_of, paced

# --- counting and limiting abandoned calls ---


def test_abandoned_calls_are_counted_until_they_end(gate: threading.Event) -> None:
    for count in (1, 2, 3):
        abandon(gate)
        assert Timeout.abandoned() == count
    assert Timeout(LONG).call(lambda: "not counted") == "not counted"
    assert Timeout.abandoned() == 3
    gate.set()
    wait_until(lambda: Timeout.abandoned() == 0)


def test_without_timeout_the_default_limit_of_abandoned_calls_applies() -> None:
    """Of 128. A hedge checks it as well, and `Timeout` may not have been imported."""
    assert Timeout.max_abandoned == 128
    pool = workers.Pool()
    pool.abandoned = {workers.Job(int, (), {}) for _ in range(Timeout.max_abandoned - 1)}
    assert not pool.is_exhausted()
    pool.abandoned.add(workers.Job(int, (), {}))
    assert pool.is_exhausted()


class Limited(Policy):
    async def around(self, call: Any, ctx: Context) -> Any:
        with ctx.runtime.timer(process_clock.now() + LONG) as timer:
            return await call(ctx.child(timer=timer))


def test_a_limit_of_abandoned_calls_that_is_no_number_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no policy answers it. It may come from an environment variable."""
    monkeypatch.setattr(Timeout, "max_abandoned", "5")
    with pytest.raises(Misuse, match=r"Timeout\.max_abandoned must be a whole number, not '5'"):
        Policy.wrap(Fallback("answered"), Timeout(LONG)).call(int)


def test_too_many_abandoned_calls_are_refused(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `WorkersExhausted`; and so is a stream with a limit, or a call under another policy's timer.

    The function is not entered, and is no attempt.
    """
    monkeypatch.setattr(Timeout, "max_abandoned", 2)
    entered: list[int] = []
    ctx = Context()
    abandon(gate, 2)
    with recording(CallRejected) as recorder, pytest.raises(WorkersExhausted) as raised:
        Timeout(LONG, name="slow").execute(lambda ctx: entered.append(1), ctx)
    assert [(event.policy, event.reason) for event in recorder.of(CallRejected)] == [("slow", "WorkersExhausted")]
    assert isinstance(raised.value, Rejected)
    assert (raised.value.policy, raised.value.retry_after) == ("slow", None)
    assert "2 abandoned calls" in str(raised.value)
    of_stream = Context()
    with recording(CallRejected) as recorder, pytest.raises(WorkersExhausted):
        next(Retry().streaming(first=LONG).execute(lambda ctx: map(entered.append, [1]), of_stream))
    assert [(event.policy, event.reason) for event in recorder.of(CallRejected)] == [("streaming", "WorkersExhausted")]
    with pytest.raises(WorkersExhausted):
        Limited().call(entered.append, 1)
    assert entered == []
    assert (ctx.attempts, of_stream.attempts) == (0, 0)
    assert next(Retry().streaming().call(iter, [1])) == 1  # needs no worker, as one in a task
    assert asyncio.run(anext_of(Retry().streaming(first=LONG).call(paced, 0))) == 0
    gate.set()
    wait_until(lambda: Timeout.abandoned() == 0)
    assert Timeout(LONG).call(lambda: "again") == "again"


def test_a_call_that_ends_at_its_timeout_has_one_outcome_and_the_count_is_right() -> None:
    chance = random.Random(3)
    timeout = Timeout(0.002)
    outcomes: list[Any] = []

    def calls(_: int) -> None:
        for n in range(60):
            outcome = timeout.capture(lambda ctx, n=n: (time.sleep(chance.uniform(0.001, 0.003)), n)[1])  # type: ignore[misc]
            outcomes.append(type(outcome.error) if isinstance(outcome, Failure) else outcome.value == n)

    with ThreadPoolExecutor(4) as callers:
        list(callers.map(calls, range(4)))
    assert len(outcomes) == 240
    assert set(outcomes) <= {True, TimeoutExceeded}
    wait_until(lambda: Timeout.abandoned() == 0)


def test_a_function_that_ends_early_is_not_counted(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would decrease the count any more."""
    counted: list[workers.Job] = []

    class Late(set[workers.Job]):
        def add(self, job: workers.Job) -> None:
            gate.set()
            wait_until(lambda: job.has_ended)
            counted.append(job)
            super().add(job)

        def discard(self, job: workers.Job) -> None:
            assert job.has_ended  # otherwise, a caller that adds it after this would not see that it has
            super().discard(job)

    monkeypatch.setattr(workers.pool, "abandoned", Late())
    with waits_end_at_once(), pytest.raises(TimeoutExceeded):
        Timeout(LONG).call(gate.wait, 10)
    assert len(counted) == 1
    assert Timeout.abandoned() == 0


# --- effects of abandoned calls ---


def test_an_abandoned_function_affects_no_policy_afterwards(gate: threading.Event) -> None:
    breaker = CircuitBreaker(1)
    retry = Retry(2, on=TimeoutExceeded, backoff=[0])
    ctx = Context()

    def fn(ctx: Context) -> None:
        gate.wait(10)
        raise Boom

    with waits_end_at_once(), pytest.raises(TimeoutExceeded):
        Policy.wrap(retry, Timeout(LONG), breaker).execute(fn, ctx)
    elapsed = ctx.elapsed
    assert Timeout.abandoned() == 2
    gate.set()
    wait_until(lambda: Timeout.abandoned() == 0)
    assert breaker.state is CircuitState.CLOSED
    assert ctx.attempts == 2
    assert ctx.elapsed == elapsed
    assert [failed.type for failed in ctx.failures] == ["TimeoutExceeded"] * 2


# --- interrupts ---


def test_an_interrupted_call_is_abandoned_until_it_ends(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(process_clock, "wait", raising(KeyboardInterrupt))
        Timeout(LONG).call(gate.wait, 10)
    assert Timeout.abandoned() == 1
    gate.set()
    wait_until(lambda: Timeout.abandoned() == 0)
