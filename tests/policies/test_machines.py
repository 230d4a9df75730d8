"""Breakers and bulkheads with many concurrent calls, against simple models.

Executions suspend inside their function, and end in any order and in any way: with a result, a failure, an ignored
error or a cancellation.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from contextvars import Context as Variables
from functools import reduce
from operator import or_
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resilience import Bulkhead, BulkheadFull, CircuitBreaker, CircuitOpen, Context, DeadlineExceeded, Policy, events
from resilience.clock import clock as process_clock
from tests.conftest import Boom
from tests.policies.circuit_model import (
    CLOSED,
    HALF_OPEN,
    ISOLATED,
    OPEN,
    Condition,
    Model,
    ModelAdmission,
    conditions,
    small,
)
from tests.policies.machines import TasksInVirtualTime


class Ignored(Exception):
    """An error that says nothing about the dependency."""


class Unexpected(Exception):
    """An error that is not in `on`: the dependency has responded."""


@pytest.mark.parametrize("policy", [CircuitBreaker(), Bulkhead(1)])
def test_statistics_are_comparable_and_immutable(policy: Any) -> None:
    stats = policy.stats()
    assert stats == policy.stats()
    for name in ("rejected", "comment"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(stats, name, 1)
    assert not hasattr(stats, "__dict__")


class Call:
    """An execution that has entered its function, and waits there for its outcome."""

    def __init__(self, policy: Policy[Any]) -> None:
        class Ending:
            def __await__(self) -> Generator[None, Any, Any]:
                return (yield)

        async def fn(ctx: Context) -> Any:
            return await Ending()

        self._coroutine: Coroutine[Any, Any, Any] = policy.aexecute(fn)
        self._run = Variables().run  # each call has its own context, like a task
        self._run(self._coroutine.send, None)

    def end(self, how: object) -> None:
        """Return or raise `how` from the function, or close the coroutine if it is None."""
        outcome: object = None
        try:
            if how is None:
                self._run(self._coroutine.close)
            elif isinstance(how, BaseException):
                self._run(self._coroutine.throw, how)
            else:
                self._run(self._coroutine.send, how)
        except StopIteration as done:
            outcome = done.value
        except BaseException as error:
            outcome = error
        assert outcome is how


class BreakerAgainstModel(RuleBasedStateMachine):
    """Executions and guarded blocks, in a time that only the rules advance."""

    @initialize(
        conditions=conditions,
        periods=st.sampled_from([[5.0], [5.0, 10.0, 20.0], [1.0, 2.0], [40.0], [0.0, 3.0]]),
        probes=small,
        successes=small,
        probe_timeout=st.none() | st.sampled_from([1.0, 3.0, 10.0]),
    )
    def build(
        self,
        conditions: list[Condition],
        periods: list[float],
        probes: int,
        successes: int,
        probe_timeout: float | None,
    ) -> None:
        self.now = 1000.0
        self.changes: list[Any] = []
        self.calls: list[tuple[Call, ModelAdmission, float]] = []
        self.refused = 0
        self.model = Model(conditions, periods, probes, successes, probe_timeout)
        self.breaker = CircuitBreaker(
            reduce(or_, [condition.trip() for condition in conditions]),
            open_for=periods,
            probes=probes,
            probe_successes=successes,
            probe_timeout=probe_timeout,
            on=Boom,
            on_result=lambda value: value == "bad",
            ignore=Ignored,
            on_transition=self.changes.append,
        )

    @contextmanager
    def clock(self) -> Any:
        with patch.object(process_clock, "now", lambda: self.now):
            yield

    @rule(seconds=st.sampled_from([1, 2, 3, 5, 10, 30, 40]))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(times=st.integers(1, 4))
    def begin(self, times: int) -> None:
        with self.clock():
            for _ in range(times):
                expected = self.model.admit(self.now)
                if expected is not None:
                    self.calls.append((Call(self.breaker), expected, self.now))
                    continue
                self.refused += 1
                with pytest.raises(CircuitOpen) as raised:
                    Call(self.breaker)
                assert raised.value.state is self.model.state
                left = max(0.0, self.model.until - self.now) if self.model.state is OPEN else None
                assert raised.value.retry_after == left

    @precondition(lambda self: self.calls)
    @rule(
        data=st.data(),
        how=st.sampled_from(["good", "bad", "boom", "boom", "boom", "unexpected", "ignored", "cancelled", "closed"]),
    )
    def end(self, data: st.DataObject, how: str) -> None:
        self.end_one(data.draw(st.integers(0, len(self.calls) - 1)), how)

    def end_one(self, index: int, how: str) -> None:
        call, expected, began = self.calls.pop(index)
        if how in ("good", "bad", "boom", "unexpected"):
            self.model.record(expected, how in ("bad", "boom"), self.now - began, self.now)
        else:
            self.model.release(expected)
        endings = {
            "boom": Boom(),
            "unexpected": Unexpected(),
            "ignored": Ignored(),
            "cancelled": asyncio.CancelledError(),
        }
        with self.clock():
            call.end(None if how == "closed" else endings.get(how, how))

    @precondition(lambda self: self.model.state is CLOSED)
    @rule(wait=st.booleans())
    def outage(self, wait: bool) -> None:
        """Slow failures until the circuit opens, and perhaps a probe: random results rarely trip a circuit."""
        self.begin(12)
        self.now += 3
        while self.calls and self.model.state is CLOSED:
            self.end_one(len(self.calls) - 1, "boom")
        if wait and self.model.state is OPEN:
            self.now = max(self.now, self.model.until)
            self.begin(1)

    @rule(failing=st.booleans())
    def block(self, failing: bool) -> None:
        """A guarded block that begins and ends at once."""
        expected = self.model.admit(self.now)
        entered = False
        with self.clock():
            try:
                with self.breaker.guard():
                    entered = True
                    if failing:
                        raise Boom
            except CircuitOpen:
                self.refused += 1
            except Boom:
                assert failing
        assert entered is (expected is not None)
        if expected is not None:
            self.model.record(expected, failing, 0.0, self.now)

    @rule(change=st.sampled_from(["close", "isolate"]))
    def move(self, change: str) -> None:
        if change == "close":
            self.model.close()
        elif self.model.state is not ISOLATED:
            self.model.move(ISOLATED)
        with self.clock():
            getattr(self.breaker, change)()

    @invariant()
    def policy_and_model_agree(self) -> None:
        if not hasattr(self, "breaker"):
            return
        model = self.model
        assert self.breaker.state is model.state
        assert [(event.old, event.new) for event in self.changes] == model.moves
        for event in self.changes[-1:]:
            assert isinstance(event, events.CircuitChanged)
            assert (event.last_failure is None) is (event.new in (CLOSED, ISOLATED))
            assert event.retry_after == (model.lasts if event.new is OPEN else None)
        with self.clock():
            stats = self.breaker.stats()
        assert (stats.opened, stats.rejected) == ([new for _, new in model.moves].count(OPEN), self.refused)
        assert stats.retry_after == (max(0.0, model.until - self.now) if model.state is OPEN else None)
        assert len(model.probes_out(self.now)) <= stats.probes <= model.probes or model.state is not HALF_OPEN
        assert (stats.last_failure is not None) is (model.state in (OPEN, HALF_OPEN))

    def teardown(self) -> None:
        for call, _, _ in getattr(self, "calls", []):
            call.end(None)


TestBreakerAgainstModel = BreakerAgainstModel.TestCase
TestBreakerAgainstModel.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)


class BulkheadAgainstModel(TasksInVirtualTime):
    """Tasks of one event loop that hold permits and wait for them in order, in virtual time."""

    @initialize(limit=st.integers(1, 3), queue=st.integers(0, 4), max_wait=st.none() | st.just(5.0))
    def build(self, limit: int, queue: int, max_wait: float | None) -> None:
        self.open()
        max_wait = max_wait if queue else None
        self.bulkhead = Bulkhead(limit, queue=queue, max_wait=max_wait)
        self.entered: list[int] = []
        self.endings: dict[int, asyncio.Future[None]] = {}
        # The model:
        self.limit, self.queue, self.max_wait = limit, queue, max_wait
        self.inside: list[int] = []
        self.waiting: deque[tuple[int, float, type[Exception]]] = deque()  # the name, the end of the wait, its error
        self.served: list[int] = []
        self.results: dict[int, type | None] = {}  # the type of each call's error, None for a result
        self.rejected = 0

    def settle(self) -> None:
        """Run all tasks until they wait, without advancing the time."""
        self.turn()
        while self.waiting and len(self.inside) < self.limit:
            self.serve(self.waiting.popleft()[0])

    def serve(self, name: int) -> None:
        self.inside.append(name)
        self.served.append(name)

    @rule(budget=st.none() | st.sampled_from([3.0, 8.0]))
    def arrive(self, budget: float | None) -> None:
        name = len(self.tasks)

        async def fn(ctx: Context) -> None:
            self.entered.append(name)
            self.endings[name] = self.loop.create_future()
            await self.endings[name]

        self.tasks[name] = self.loop.create_task(self.bulkhead.aexecute(fn, Context(timeout=budget)))
        ends: list[tuple[float, type[Exception]]] = [
            (now + (self.max_wait or float("inf")), BulkheadFull) for now in [self.clock.now()]
        ]
        ends.append((self.clock.now() + (budget or float("inf")), DeadlineExceeded))
        if len(self.inside) < self.limit and not self.waiting:
            self.serve(name)
        elif len(self.waiting) < self.queue:
            until, error = min(ends, key=lambda end: end[0])
            self.waiting.append((name, until, error))
        else:
            self.results[name] = BulkheadFull
            self.rejected += 1
        self.settle()

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), failing=st.booleans())
    def leave(self, data: st.DataObject, failing: bool) -> None:
        name = self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1)))
        self.results[name] = Boom if failing else None
        if failing:
            self.endings[name].set_exception(Boom())
        else:
            self.endings[name].set_result(None)
        self.settle()

    @precondition(lambda self: self.inside or self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiting = [name for name, _, _ in self.waiting]
        name = data.draw(st.sampled_from(self.inside + waiting))
        self.tasks[name].cancel()
        self.results[name] = asyncio.CancelledError
        self.forget(name)
        self.settle()

    @precondition(lambda self: self.inside and self.waiting)
    @rule(data=st.data())
    def cancel_after_the_grant(self, data: st.DataObject) -> None:
        """Cancel a task that was granted a permit and has not run since: the permit is passed on to the next."""
        leaving, (granted, _, _) = self.inside[0], self.waiting[0]
        self.endings[leaving].set_result(None)
        self.loop.call_soon(self.tasks[granted].cancel)
        self.results[leaving] = None
        self.results[granted] = asyncio.CancelledError
        self.inside.remove(leaving)
        self.forget(granted)
        self.settle()

    @rule(limit=st.integers(1, 5))
    def resize(self, limit: int) -> None:
        self.limit = limit
        self.bulkhead.resize(limit)
        self.settle()

    @rule(seconds=st.sampled_from([1.0, 2.5, 6.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for name, until, error in list(self.waiting):
            if until <= self.clock.now():
                self.forget(name)
                self.results[name] = error
                self.rejected += 1
        self.settle()

    def forget(self, name: int) -> None:
        if name in self.inside:
            self.inside.remove(name)
        self.waiting = deque(it for it in self.waiting if it[0] != name)

    @invariant()
    def policy_and_model_agree(self) -> None:
        if not self.is_open:
            return
        assert self.entered == self.served  # the same calls in the same order
        stats = self.bulkhead.stats()
        assert (stats.limit, stats.in_flight, stats.queued) == (self.limit, len(self.inside), len(self.waiting))
        assert stats.rejected == self.rejected
        assert {name for name, task in self.tasks.items() if task.done()} == set(self.results)
        for name, expected in self.results.items():
            task = self.tasks[name]
            assert (asyncio.CancelledError if task.cancelled() else type(task.exception())) is (expected or type(None))

    def teardown(self) -> None:
        super().teardown()
        assert not self.is_open or self.bulkhead.stats().in_flight == 0


TestBulkheadAgainstModel = BulkheadAgainstModel.TestCase
TestBulkheadAgainstModel.settings = settings(max_examples=20, stateful_step_count=50, deadline=None)
