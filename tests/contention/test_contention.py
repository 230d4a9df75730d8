"""Policies shared by eight threads, an asyncio loop and a trio loop count exactly, and never exceed their limits.

`RESILIENCE_STORM` in the environment is the number of operations of a storm (20,000 by default).
`python -m tests.contention.soak --seconds 600` takes longer.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest

from resilience import (
    AdaptiveLimit,
    AdaptiveThrottle,
    Bulkhead,
    CircuitBreaker,
    CircuitOpen,
    CircuitState,
    Context,
    DeadlineExceeded,
    Policy,
    Rate,
    RateLimiter,
    Retry,
    Sample,
    Timeout,
    events,
)
from tests.conftest import Boom, World
from tests.contention.storm import Gauge, Storm, call, pause, through_a_bulkhead

OPERATIONS = int(os.environ.get("RESILIENCE_STORM", "20000"))

CLOSED, OPEN, HALF_OPEN, ISOLATED = CircuitState

#: A busy machine delays calls past their deadlines.
pytestmark = pytest.mark.filterwarnings("ignore:.*it ignores its deadline:RuntimeWarning")


@pytest.mark.parametrize(("limit", "queue", "max_wait"), [(3, 1000, None), (2, 4, 0.002), (1, 1000, 0.05)])
def test_a_bulkhead_never_exceeds_its_limit_and_loses_no_permit(limit: int, queue: int, max_wait: float | None) -> None:
    """At the end all permits are free, and all counts are right."""
    bulkhead = Bulkhead(limit, queue=queue, max_wait=max_wait)
    gauge = Gauge()
    pipelines: list[Policy[Any]] = [bulkhead, bulkhead.wrap(Retry(2, on=Boom, backoff=[0]))]
    outcomes = Storm(through_a_bulkhead(bulkhead, pipelines, gauge), OPERATIONS // 3).run()

    assert sum(outcomes.values()) == OPERATIONS // 3
    assert outcomes["answered"]
    assert outcomes["failed"]
    assert gauge.inside == 0
    assert 1 <= gauge.most <= limit
    stats = bulkhead.stats()
    assert (stats.limit, stats.in_flight, stats.queued) == (limit, 0, 0)
    # A call that ran out of time in the queue was rejected, too; one that was cancelled or cut off was not.
    out_of_time = outcomes["no time left"] + outcomes["timed out"] + outcomes["cancelled"]
    assert outcomes["full"] <= stats.rejected <= outcomes["full"] + out_of_time
    with ExitStack() as stack:
        for _ in range(limit):
            stack.enter_context(bulkhead.slot())
        assert bulkhead.stats().in_flight == limit


@pytest.mark.serial
def test_a_bulkhead_can_be_resized_under_load() -> None:
    """Never more calls than the largest limit, and the last limit holds at the end."""
    bulkhead = Bulkhead(4, queue=1000)
    gauge = Gauge()
    calls = through_a_bulkhead(bulkhead, [bulkhead], gauge)

    async def operation(world: World, rng: random.Random) -> str:
        if rng.random() < 0.02:
            bulkhead.resize(rng.randint(1, 6))
        return await calls(world, rng)

    outcomes = Storm(operation, OPERATIONS // 4).run()
    assert sum(outcomes.values()) == OPERATIONS // 4
    assert gauge.most <= 6
    bulkhead.resize(2)
    stats = bulkhead.stats()
    assert (stats.limit, stats.in_flight, stats.queued) == (2, 0, 0)
    with bulkhead.slot(), bulkhead.slot(), pytest.raises(DeadlineExceeded):
        bulkhead.execute(lambda ctx: None, Context(timeout=0.001))


def test_an_adaptive_limit_is_never_exceeded_and_loses_no_permit() -> None:
    """In threads and two loops, with a queue, while the limit changes."""
    limits = random.Random(3)

    class Jumping:
        def update(self, limit: float, sample: Sample) -> float:
            return limits.randint(1, 6)

        def reset(self) -> None: ...

    limit = AdaptiveLimit(Jumping(), initial=4, most=6, queue=1000, min_samples=20, window=1e-6, headroom=1000)
    gauge = Gauge()

    async def operation(world: World, rng: random.Random) -> str:
        async def fn(ctx: Context) -> None:
            await gauge.pass_through(world, rng)

        error = await world.attempt(limit, fn, Context(timeout=0.0005) if rng.random() < 0.1 else None)
        return "answered" if error is None else type(error).__name__

    outcomes = Storm(operation, OPERATIONS // 8).run()
    assert set(outcomes) <= {"answered", "DeadlineExceeded"}
    assert outcomes["answered"] == gauge.entered
    assert gauge.most <= 6
    stats = limit.stats()
    assert (stats.in_flight, stats.queued, stats.rejected) == (0, 0, outcomes["DeadlineExceeded"])


def test_a_throttle_counts_every_call_once() -> None:
    """In threads and two loops: accepted, refused and throttled calls."""
    throttle = AdaptiveThrottle(1.2, window=1e6, on=Boom)

    async def operation(world: World, rng: random.Random) -> str:
        async def fn(ctx: Context) -> None:
            await pause(world, rng)
            if rng.random() < 0.5:
                raise Boom

        error = await world.attempt(throttle, fn)
        return "answered" if error is None else type(error).__name__

    outcomes = Storm(operation, OPERATIONS // 8).run()
    stats = throttle.stats()
    assert stats.requests == sum(outcomes.values()) == OPERATIONS // 8
    assert (stats.accepts, stats.rejected) == (outcomes["answered"], outcomes["Throttled"])
    assert min(outcomes["answered"], outcomes["Boom"], outcomes["Throttled"]) > 0


def test_transitions_are_reported_once_each_and_in_order() -> None:
    """The reports of a circuit that opens, probes and closes all the time form a chain."""
    changes: list[events.CircuitChanged] = []

    def record(event: events.CircuitChanged) -> None:
        time.sleep(0)  # lets another thread overtake
        changes.append(event)

    probing = {"probes": 2, "probe_successes": 2, "probe_timeout": 0.001}
    breaker = CircuitBreaker(3, open_for=[0.0, 0.0005], on_transition=record, **probing)
    gauge = Gauge()
    pipelines: list[Policy[Any]] = [breaker, Timeout(0.001).wrap(breaker), Retry(on=Boom, backoff=[0]).wrap(breaker)]

    async def operation(world: World, rng: random.Random) -> str:
        chance = rng.random()
        if chance < 0.01:
            breaker.isolate()
        elif chance < 0.05:
            breaker.close()
        return await call(world, rng, rng.choice(pipelines), gauge)

    outcomes = Storm(operation, OPERATIONS // 2).run()
    assert sum(outcomes.values()) == OPERATIONS // 2
    assert changes[0].old is CLOSED
    assert all(change.new is following.old for change, following in itertools.pairwise(changes))
    assert all(change.old is not change.new for change in changes)
    assert changes[-1].new is breaker.state
    kinds = Counter(change.new for change in changes)
    assert min(kinds[state] for state in CircuitState) > 10
    assert breaker.stats().opened == kinds[OPEN]
    breaker.close()
    assert breaker.stats().probes == 0


def test_there_are_never_more_probes_than_allowed() -> None:
    """Many calls at a half-open circuit: three at a time are admitted, the others refused."""
    gauge = Gauge()
    breaker = CircuitBreaker(1, open_for=[0.0], probes=3, probe_successes=10**9)
    breaker.capture(lambda ctx: 1 / 0)

    async def operation(world: World, rng: random.Random) -> str:
        async def fn(ctx: Context) -> None:
            await gauge.pass_through(world, rng)

        error = await world.attempt(breaker, fn)
        assert error is None or isinstance(error, CircuitOpen)
        return "probe" if error is None else "refused"

    outcomes = Storm(operation, OPERATIONS // 2).run()
    assert gauge.most == 3
    assert gauge.entered == outcomes["probe"]
    assert breaker.stats().rejected == outcomes["refused"]
    assert outcomes["refused"] > 0
    assert breaker.stats().probes == 0


@pytest.mark.parametrize("spread", [False, True], ids=["window", "bucket"])
def test_a_rate_limiter_admits_exactly_its_rate(spread: bool) -> None:
    """All other calls of threads and loops are refused and counted."""
    count = OPERATIONS // 4
    allowed = count // 2
    limiter = RateLimiter(Rate(allowed, per=10**9, burst=allowed if spread else None), max_wait=0)

    async def fn(ctx: Context) -> None: ...

    async def operation(world: World, rng: random.Random) -> str:
        if rng.random() < 0.2:
            return "begun" if limiter.try_take() == 0 else "not taken"
        error = await world.attempt(limiter, fn)
        return "begun" if error is None else type(error).__name__

    outcomes = Storm(operation, count).run()
    assert outcomes["begun"] == allowed
    assert outcomes["RateLimited"] + outcomes["not taken"] == count - allowed
    assert (limiter.stats().queued, limiter.stats().rejected) == (0, outcomes["RateLimited"])


@pytest.mark.serial
def test_every_queued_call_of_a_rate_limiter_gets_its_turn_once() -> None:
    """While some calls time out, pause the limiter or resize it."""
    limiter = RateLimiter(Rate(20_000, burst=1))

    async def fn(ctx: Context) -> None: ...

    async def operation(world: World, rng: random.Random) -> str:
        if rng.random() < 0.02:
            limiter.pause(0.001)
        if rng.random() < 0.02:
            limiter.resize(rng.choice([10_000, 20_000]))
        policy = Timeout(0.002).wrap(limiter) if rng.random() < 0.1 else limiter
        error = await world.attempt(policy, fn)
        return "begun" if error is None else type(error).__name__

    count = OPERATIONS // 8
    outcomes = Storm(operation, count).run()
    assert sum(outcomes.values()) == count
    assert set(outcomes) <= {"begun", "RateLimited", "TimeoutExceeded"}
    assert outcomes["begun"] >= count * 0.5
    assert limiter.stats().queued == 0
