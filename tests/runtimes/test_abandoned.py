"""Calls that were walked away from: counted, capped, and holding nothing that others wait for."""

from __future__ import annotations

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from resilience import (
    Bulkhead,
    CircuitBreaker,
    CircuitState,
    Context,
    Failure,
    Fallback,
    Policy,
    Rejected,
    Retry,
    Timeout,
    TimeoutExceeded,
    WorkersExhausted,
)
from resilience.clock import clock as process_clock
from resilience.runtimes import workers
from tests.conftest import Boom
from tests.runtimes.conftest import LONG, SHORT, abandon, until

# --- abandoned calls are counted, and capped ---


def test_abandoned_calls_are_counted_until_they_end(gate: threading.Event) -> None:
    """In the whole process, whichever policy left them behind."""
    for count in (1, 2, 3):
        abandon(gate)
        assert Timeout.abandoned() == count
    assert Timeout(LONG).call(lambda: "not counted") == "not counted"
    assert Timeout.abandoned() == 3
    gate.set()
    until(lambda: Timeout.abandoned() == 0)


def test_without_a_timeout_as_many_may_be_abandoned_as_by_default() -> None:
    """A hedge asks as well, and `Timeout` may not have been imported."""
    pool = workers.Pool()
    pool.abandoned = Timeout.max_abandoned - 1
    assert not pool.is_exhausted()
    pool.abandoned += 1
    assert pool.is_exhausted()


def test_too_many_abandoned_calls_are_refused(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """`WorkersExhausted`: the function is not entered, and it is not counted as an attempt."""
    monkeypatch.setattr(Timeout, "max_abandoned", 2)
    entered: list[int] = []
    ctx = Context()
    abandon(gate, 2)
    with pytest.raises(WorkersExhausted) as raised:
        Timeout(LONG, name="slow").execute(lambda ctx: entered.append(1), ctx)
    assert isinstance(raised.value, Rejected)
    assert (raised.value.policy, raised.value.retry_after) == ("slow", None)
    assert "2 abandoned calls" in str(raised.value)
    assert entered == []
    assert ctx.attempts == 0
    gate.set()
    until(lambda: Timeout.abandoned() == 0)
    assert Timeout(LONG).call(lambda: "again") == "again"


def test_a_refusal_for_want_of_workers_is_a_rejection_like_others(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fallback answers it; a retry and a breaker leave it alone; permits come back."""
    monkeypatch.setattr(Timeout, "max_abandoned", 1)
    abandon(gate)
    breaker, bulkhead, told = CircuitBreaker(1), Bulkhead(1), list[Any]()
    pipeline = Policy.wrap(
        Fallback("instead"), Retry(on=Exception, on_retry=told.append), breaker, bulkhead, Timeout(LONG)
    )
    assert pipeline.call(lambda: "fine") == "instead"
    assert told == []
    assert breaker.state is CircuitState.CLOSED
    assert bulkhead.stats().in_flight == 0


def test_the_cap_is_128_unless_it_is_changed() -> None:
    """`Timeout.max_abandoned`, for the process."""
    assert Timeout.max_abandoned == 128


def test_at_the_very_moment_of_the_limit_there_is_one_outcome_and_the_count_is_right() -> None:
    """A function that ends when its time does either delivers or is walked away from."""
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
    until(lambda: Timeout.abandoned() == 0)


def test_a_function_that_ends_before_it_is_counted_is_never_counted(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller has left it, and comes to say so when it is over: nothing would count it off any more."""
    counted: list[workers.Job] = []
    count_abandoned = workers.Pool.count_abandoned

    def late(pool: workers.Pool, job: workers.Job) -> None:
        gate.set()
        until(lambda: job.has_ended)
        counted.append(job)
        count_abandoned(pool, job)

    monkeypatch.setattr(workers.Pool, "count_abandoned", late)
    with pytest.raises(TimeoutExceeded):
        Timeout(SHORT).call(gate.wait, 10)
    assert len(counted) == 1
    assert Timeout.abandoned() == 0


# --- what is held comes back at once ---


def test_what_an_abandoned_function_does_later_moves_nothing(gate: threading.Event) -> None:
    """Its result does not reach the policies that it was called through."""
    breaker = CircuitBreaker(1)
    retry = Retry(2, on=TimeoutExceeded, backoff=[0])
    ctx = Context()

    def fn(ctx: Context) -> None:
        gate.wait(10)
        raise Boom

    with pytest.raises(TimeoutExceeded):
        Policy.wrap(retry, Timeout(SHORT), breaker).execute(fn, ctx)
    elapsed = ctx.elapsed
    gate.set()
    until(lambda: Timeout.abandoned() == 0)
    assert breaker.state is CircuitState.CLOSED
    assert ctx.attempts == 2
    assert ctx.elapsed == elapsed
    assert [failed.type for failed in ctx.failures] == ["TimeoutExceeded"] * 2


# --- interrupts ---


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals are sent to a thread on POSIX only")
def test_ctrl_c_while_waiting_is_felt_at_once(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller leaves, the call is counted as abandoned, what was held comes back."""
    main = threading.main_thread().ident
    assert main == threading.get_ident()
    bulkhead = Bulkhead(1)
    felt: list[int] = []
    waits = threading.Event()
    wait_for = process_clock.wait

    def interrupt(number: int, frame: object) -> None:
        if not felt:
            felt.append(number)
            raise KeyboardInterrupt

    def wait(waitable: Any, seconds: float | None) -> bool:
        waits.set()
        return wait_for(waitable, seconds)

    def fn() -> None:
        waits.wait(10)  # until then the caller still starts this thread
        while not felt:  # one that comes just before the lock begins to wait is noticed after it, by any Python
            signal.pthread_kill(main, signal.SIGINT)
            gate.wait(0.02)
        gate.wait(10)

    monkeypatch.setattr(process_clock, "wait", wait)
    before = signal.signal(signal.SIGINT, interrupt)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            Policy.wrap(Fallback("instead", on=BaseException), bulkhead, Timeout(LONG)).call(fn)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 5
    assert Timeout.abandoned() == 1
    assert bulkhead.stats().in_flight == 0
    gate.set()
    until(lambda: Timeout.abandoned() == 0)


def test_an_interrupt_that_comes_when_the_call_is_done_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function has ended by itself: nothing is left to count as abandoned."""

    def interrupted(waitable: Any, seconds: float | None) -> bool:
        assert waitable.acquire(True, 5)  # the worker has delivered
        raise KeyboardInterrupt

    monkeypatch.setattr(process_clock, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Timeout(LONG).call(lambda: "fine")
    assert Timeout.abandoned() == 0
