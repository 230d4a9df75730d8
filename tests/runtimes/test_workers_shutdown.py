"""Worker threads at the end of the process, and when no thread can be started."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

from resilience import (
    Bulkhead,
    CircuitBreaker,
    CircuitState,
    Context,
    Hedge,
    Policy,
    RetryBudget,
    Success,
    Timeout,
    WorkersExhausted,
)
from resilience.events import CallRejected
from resilience.runtimes import workers
from resilience.testing import recording
from tests.functions import raising
from tests.runtimes.conftest import LONG


def refused(self: threading.Thread) -> None:
    """Raise the error of a system that has no thread left."""
    raise RuntimeError("can't start new thread")


def refused_at_shutdown(self: threading.Thread) -> None:
    """Raise the error of CPython 3.12 and later."""
    raise RuntimeError("can't create new thread at interpreter shutdown")


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [(workers.sys, "is_finalizing", lambda: True), (workers.Worker, "start", refused_at_shutdown)],
    ids=["modules are torn down", "no thread is started"],
)
def test_during_interpreter_shutdown_a_function_runs_in_the_calling_thread(
    owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With its deadline, and a warning that it cannot be cut off."""
    seen: list[tuple[threading.Thread, float]] = []

    def flush(ctx: Context) -> str:
        seen.append((threading.current_thread(), ctx.remaining()))
        return "flushed"

    monkeypatch.setattr(workers, "pool", workers.Pool())
    Timeout(LONG).call(len, "")  # starts a worker, which is then idle
    if owner is workers.Worker:
        workers.pool.idle.clear()
    bulkhead = Bulkhead(1)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value)
        assert Policy.wrap(bulkhead, Timeout(LONG, name="late")).execute(flush) == "flushed"
        assert Timeout(LONG, name="late").call(sorted, "ab", reverse=True) == ["b", "a"]
    ((thread, left),) = seen
    assert thread is threading.current_thread()
    assert 0 < left <= LONG
    assert bulkhead.stats().in_flight == 0
    warning = "the interpreter is shutting down: late cannot cut off what it limits"
    assert caplog.record_tuples == [("resilience", logging.WARNING, warning)] * 2


def test_workers_exhausted_inside_a_function_is_an_error_of_that_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function was entered, so it counts as an attempt; the inner Timeout reports the rejection, once."""
    inner = Timeout(LONG, name="inner")

    def nested() -> int:
        with monkeypatch.context() as patch:
            patch.setattr(workers.Worker, "start", refused)
            return inner.call(len, "")

    monkeypatch.setattr(workers, "pool", workers.Pool())
    ctx = Context()
    with recording(CallRejected) as recorder, pytest.raises(WorkersExhausted):
        Timeout(LONG, name="outer").execute(lambda ctx: nested(), ctx)
    assert ctx.attempts == len(ctx.failures) == 1
    assert [event.policy for event in recorder.of(CallRejected)] == ["inner"]


@pytest.mark.parametrize(
    ("step", "why"), [("start", "can't start new thread"), ("__init__", "daemon threads are disabled in this")]
)
def test_a_call_is_refused_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch, step: str, why: str) -> None:
    """The error suggests `cooperative=True`, no circuit counts it, permits are released, and the next call works.

    A subinterpreter refuses to make a daemon thread.
    """
    monkeypatch.setattr(workers, "pool", workers.Pool())
    bulkhead, breaker = Bulkhead(1), CircuitBreaker(1)
    seen: list[Any] = []
    pipeline = Policy.wrap(breaker, bulkhead, Timeout(LONG, name="slow"), listeners=[lambda event: seen.append(event)])
    ctx = Context()
    with monkeypatch.context() as patch:
        patch.setattr(workers.Worker, step, raising(RuntimeError(why)))
        with pytest.raises(WorkersExhausted, match=f"{why}.*cooperative=True") as caught:
            pipeline.execute(lambda ctx: 4, ctx)
    assert caught.value.policy == "slow"
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (ctx.attempts, ctx.failures) == (0, ())
    rejected, ended = seen
    assert (rejected.reason, rejected.policy, ended.attempts) == ("WorkersExhausted", "slow", 0)
    assert breaker.state is CircuitState.CLOSED
    assert bulkhead.stats().in_flight == 0
    assert pipeline.call(len, "four") == 4


@pytest.mark.parametrize("workers_left", [0, 1])
def test_an_attempt_of_a_hedge_that_gets_no_thread_is_refused(
    monkeypatch: pytest.MonkeyPatch, workers_left: int
) -> None:
    """The function was not entered, so it does not count as an attempt. The first attempt runs on without the hedge."""
    may_start = iter(range(workers_left))

    def start(worker: workers.Worker) -> None:
        if next(may_start, None) is None:
            refused(worker)
        threading.Thread.start(worker)

    ctx, budget = Context(), RetryBudget(0)
    monkeypatch.setattr(workers, "pool", workers.Pool())
    with monkeypatch.context() as patch, recording(CallRejected) as recorder:
        patch.setattr(workers.Worker, "start", start)
        outcome = Hedge(0.01, budget=budget).capture(lambda ctx: time.sleep(0.1), ctx)
    assert isinstance(outcome, Success) == bool(workers_left)
    assert (ctx.attempts, ctx.failures) == (workers_left, ())
    assert [it.reason for it in recorder.of(CallRejected)] == ["WorkersExhausted"]
    assert budget.balance == 10


def test_a_call_that_leaves_no_stack_to_start_a_worker_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets the `RecursionError`, although that is a `RuntimeError` like the one of a missing thread."""
    monkeypatch.setattr(workers, "pool", workers.Pool())
    bulkhead = Bulkhead(1)
    monkeypatch.setattr(workers.Worker, "start", raising(RecursionError))
    with pytest.raises(RecursionError):
        Policy.wrap(bulkhead, Timeout(LONG)).call(len, "four")
    assert bulkhead.stats().in_flight == 0
