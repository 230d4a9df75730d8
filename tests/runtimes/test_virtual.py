"""Simulation: real policies with many simulated clients reproduce published numbers.

The contention model takes the mean of 30 trials per backoff; `RESILIENCE_TRIALS=100` in the environment makes it 100,
as published. Retries without a backoff, which hardly vary, take a third of the trials.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import anyio
import pytest

from resilience import Bulkhead, Context, Fallback, Policy, Retry, Timeout, current_context
from resilience import backoff as backoffs
from resilience.backoff import Backoff, Decorrelated, Exponential
from resilience.clock import clock as process_clock
from resilience.errors import DeadlineExceeded, TimeoutExceeded
from resilience.runtimes.base import Waiter
from resilience.testing import Simulation, switched_off
from tests.conftest import Boom, Script, Virtual
from tests.custom import Sleeping

TRIALS = int(os.environ.get("RESILIENCE_TRIALS", "30"))


# --- published: "Exponential Backoff And Jitter", Marc Brooker, AWS Architecture Blog, 2015 -------------------


class Conflict(Exception):
    """Another client has written the row since it was read."""


def contention(clients: int, backoff: Backoff | Sequence[float], seed: int) -> tuple[float, int]:
    """Let clients write one row once each. Return the milliseconds until the last one is done, and the writes.

    A write is refused if the row has another version than the client read. Every message takes
    |N(10, 2)| ms each way.
    """
    with Simulation(seed) as simulation:
        version = writes = 0
        retry = Retry(None, on=Conflict, backoff=backoff)

        async def message() -> None:
            await simulation.sleep(abs(simulation.rng.gauss(10, 2)) / 1000)

        async def update(ctx: Context) -> None:
            nonlocal version, writes
            await message()
            seen = version
            await message()
            await message()
            writes += 1
            written = seen == version
            version += written
            await message()
            if not written:
                raise Conflict

        async def client() -> None:
            await simulation.execute(retry, update)

        for _ in range(clients):
            simulation.start(client())
        took = simulation.run() * 1000
        assert version == clients
        return took, writes


PUBLISHED: dict[str, tuple[Backoff | Sequence[float], int, int]] = {  # N = 100: milliseconds, writes
    "none": ([0.0], 2026, 2422),
    "exponential": (Exponential(0.010, cap=2.0, jitter="none"), 63086, 1847),
    "equal": (Exponential(0.010, cap=2.0, jitter="equal"), 6573, 813),
    "decorrelated": (Decorrelated(0.005, cap=2.0), 4581, 1003),
    "full": (Exponential(0.010, cap=2.0, jitter="full"), 4886, 796),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_contention_on_one_row_costs_what_was_published(name: str) -> None:
    backoff, milliseconds, writes = PUBLISHED[name]
    trials = TRIALS // 3 if name == "none" and TRIALS < 100 else TRIALS
    results = [contention(100, backoff, seed) for seed in range(trials)]
    assert fmean(took for took, _ in results) == pytest.approx(milliseconds, rel=0.05)
    assert fmean(count for _, count in results) == pytest.approx(writes, rel=0.05)


def test_a_simulation_is_reproducible_by_its_seed() -> None:
    """Another seed gives another course."""
    full = Exponential(0.010, cap=2.0)
    assert contention(20, full, 1) == contention(20, full, 1) != contention(20, full, 2)


# --- policies in a simulation ---


def simulated(*clients: Callable[[Simulation], Any]) -> float:
    """Run clients to their end. Return the simulated duration."""
    with Simulation() as simulation:
        for client in clients:
            simulation.start(client(simulation))
        return simulation.run()


async def test_a_nested_timeout_cuts_off_no_clean_up_at_the_outer_limit(in_simulation: Virtual) -> None:
    """Nor does a fallback around it answer."""
    nested, cleaned_up = Fallback("answer").wrap(Timeout(50)), []

    async def clean_up(ctx: Context) -> None:
        try:
            await in_simulation.sleep(100)
        finally:
            await in_simulation.sleep(1)
            cleaned_up.append(in_simulation.now())

    with pytest.raises(TimeoutExceeded):
        await in_simulation.execute(Timeout(5), lambda ctx: in_simulation.execute(nested, clean_up))
    assert cleaned_up == [6]


async def test_a_function_that_handles_its_cancellation_returns_its_result(in_simulation: Virtual) -> None:
    """The timer of a block that ended in time has no effect."""

    async def stubborn(ctx: Context) -> str:
        try:
            await in_simulation.sleep(100)
        except BaseException:
            return "saved"
        return "not cut off"

    assert await in_simulation.execute(Timeout(5), stubborn) == "saved"
    assert in_simulation.now() == 5
    assert await in_simulation.execute(Timeout(5), Script("quick").function()) == "quick"
    await in_simulation.sleep(50)
    assert in_simulation.now() == 55


def test_the_end_of_a_simulation_releases_permits_and_empties_queues() -> None:
    bulkhead = Bulkhead(1, queue=5)

    async def client(simulation: Simulation) -> None:
        async def fn(ctx: Context) -> None:
            await simulation.sleep(1000)

        await simulation.execute(bulkhead, fn)

    with Simulation() as simulation:
        clients = [simulation.start(client(simulation)) for _ in range(3)]
        assert simulation.run(until=10) == 10
        assert (bulkhead.stats().in_flight, bulkhead.stats().queued) == (1, 2)
    assert (bulkhead.stats().in_flight, bulkhead.stats().queued) == (0, 0)
    assert not any(client.is_done for client in clients)


def test_each_client_has_its_own_deadline_and_ambient_context() -> None:
    """A nested execution inherits from the outer one, not from another client's."""
    seen: list[tuple[float, float | None]] = []

    def client(timeout: float) -> Callable[[Simulation], Any]:
        async def run(simulation: Simulation) -> None:
            async def inner(ctx: Context) -> None:
                await simulation.sleep(2)
                assert current_context() is ctx
                seen.append((timeout, ctx.remaining()))

            async def outer(ctx: Context) -> None:
                await simulation.sleep(1)
                await simulation.execute(Retry(), inner)

            ctx = Context(timeout=timeout)
            await simulation.execute(Retry(), outer, ctx)
            assert ctx.attempts == 1
            assert ctx.elapsed == 3
            with pytest.raises(DeadlineExceeded):
                await simulation.execute(Retry(), outer, Context(timeout=0))

        return run

    simulated(client(10), client(20))
    assert seen == [(10, 7), (20, 17)]


async def test_a_custom_policy_and_an_asynchronous_handler_run_in_a_simulation(in_simulation: Virtual) -> None:
    """So do `ctx.sleep` and the closing of a discarded result."""
    closed: list[float] = []

    class Response:
        async def aclose(self) -> None:
            closed.append(process_clock.now())

    async def handler(failure: object, ctx: Context) -> str:
        await in_simulation.sleep(4)
        return "handled"

    fallback = Fallback(handler=handler, on_result=lambda result: True)
    pipeline = fallback.wrap(Sleeping(3), Retry(2, on_result=lambda result: True, backoff=[5]))
    assert await in_simulation.execute(pipeline, Script(Response()).function()) == "handled"
    assert in_simulation.now() == 12
    assert closed == [3]


def test_a_waiter_may_be_woken_before_during_or_after_its_wait() -> None:
    """It returns whether it was woken. After the end of its client it is not alive."""
    results: list[tuple[float, bool]] = []
    waiters: list[Waiter] = []

    class Waiting(Policy):
        async def around(self, call: Any, ctx: Context) -> Any:
            waiters.extend(ctx.runtime.waiter() for _ in range(3))
            early, late, meanwhile = waiters
            await ctx.sleep(5)
            for waiter, until in ((early, math.inf), (late, 6), (meanwhile, 20), (late, 20)):
                results.append((process_clock.now(), await waiter.wait(until, None)))

    async def client(simulation: Simulation) -> None:
        await simulation.execute(Waiting(), Script(None).function())

    async def other(simulation: Simulation) -> None:
        for instant, waiter in ((1, 0), (8, 1), (9, 2)):
            await simulation.sleep(instant - simulation.now())
            assert waiters[waiter].is_alive()
            waiters[waiter].wake()

    assert simulated(client, other) == 9
    assert results == [(5, True), (5, False), (6, True), (9, True)]
    assert not waiters[0].is_alive()


async def test_switched_off_policies_are_off_in_a_simulation(in_simulation: Virtual) -> None:
    fn = Script(Boom()).function()
    assert await in_simulation.execute(Fallback("unknown"), fn) == "unknown"
    with switched_off(), pytest.raises(Boom):
        await in_simulation.execute(Fallback("unknown"), fn)


# --- the engine ------------------------------------------------------------------------------


def test_clients_that_are_due_at_the_same_instant_run_in_the_order_of_their_start() -> None:
    log: list[tuple[float, str]] = []

    async def client(name: str, *pauses: float) -> None:
        for pause in (0.0, *pauses):
            await simulation.sleep(pause)
            log.append((simulation.now(), name))

    with Simulation() as simulation:
        simulation.start(client("late", 1), after=2)
        simulation.start(client("a", 1, 2))
        simulation.start(client("b", 3))
        simulation.run()
    assert log == [(0, "a"), (0, "b"), (1, "a"), (2, "late"), (3, "b"), (3, "a"), (3, "late")]


def test_a_simulation_can_run_in_parts() -> None:
    """`until` is the instant at which the part ends."""
    log: list[float] = []

    async def client() -> None:
        for _ in range(4):
            await simulation.sleep(10)
            log.append(simulation.now())

    with Simulation() as simulation:
        simulation.start(client())
        assert simulation.run(until=20) == 20
        assert log == [10, 20]
        assert simulation.run(until=25) == 25
        simulation.start(client())
        assert simulation.run() == 65
    assert log == [10, 20, 30, 35, 40, 45, 55, 65]


def test_after_a_run_the_process_clock_and_randomness_are_restored() -> None:
    """Also after a run that ended with the error of a client; the other clients are closed."""
    now, source = process_clock.now, backoffs.SHARED_RANDOMNESS
    closed: list[str] = []

    async def fails() -> None:
        await simulation.sleep(1)
        assert process_clock.now() == 1
        assert backoffs.SHARED_RANDOMNESS is simulation.rng
        raise Boom

    async def waits() -> None:
        try:
            await simulation.sleep(1000)
        finally:
            closed.append("waits")

    simulation = Simulation()
    simulation.start(waits())
    simulation.start(fails())
    with pytest.raises(Boom):
        simulation.run()
    assert closed == ["waits"]
    assert process_clock.now is now
    assert backoffs.SHARED_RANDOMNESS is source
    simulation.start(waits())
    assert simulation.run() == 1001
    assert process_clock.now is now
    assert backoffs.SHARED_RANDOMNESS is source


async def test_a_negative_sleep_takes_no_time(in_simulation: Virtual) -> None:
    await in_simulation.sleep(10)
    await in_simulation.sleep(-3)
    assert in_simulation.now() == 10


def test_a_client_that_awaits_something_else_is_a_misuse() -> None:
    async def client() -> None:
        await asyncio.sleep(0)

    with Simulation() as simulation, pytest.raises(RuntimeError, match=r"client waits .* simulation\.sleep"):
        simulation.start(client())
        simulation.run()


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda simulation: simulation.start(anyio.sleep), TypeError, r"a client is a coroutine, as client\(...\)"),
        (lambda simulation: simulation.run(until=math.nan), ValueError, "until must be a number, not nan"),
        (lambda simulation: simulation.sleep(math.nan).send(None), ValueError, "seconds must be a number, not nan"),
    ],
)
def test_wrong_arguments_of_a_simulation_are_refused(use: Any, error: type[Exception], message: str) -> None:
    with Simulation() as simulation, pytest.raises(error, match=message):
        use(simulation)


def test_a_client_cannot_start_in_the_past() -> None:
    async def client() -> None: ...

    coroutine = client()
    with Simulation() as simulation, pytest.raises(ValueError, match="after must be zero or more"):
        simulation.start(coroutine, after=-1)
    coroutine.close()


def _lengths_of_the_queue(policy: Policy[Any]) -> list[int]:
    """Let 20 clients make 100 calls each. Return the length of the queue of timers after each call."""
    with Simulation() as simulation:
        lengths: list[int] = []

        async def call(ctx: Context) -> None:
            await simulation.sleep(1)

        async def client() -> None:
            for _ in range(100):
                await simulation.execute(policy, call)
                lengths.append(len(simulation._queue))

        for number in range(20):
            simulation.start(client(), after=number / 100)
        simulation.run()
    assert len(lengths) == 20 * 100
    return lengths


def test_calls_that_end_before_their_timeouts_leave_no_entries_in_the_queue() -> None:
    """Such entries would stay until the timeouts expire, and slow down every step."""
    assert max(_lengths_of_the_queue(Timeout(10_000).wrap(Retry(), Timeout(9_000)))) <= 20


def test_waits_that_end_early_leave_few_entries_in_the_queue() -> None:
    """Each leaves one, for its latest possible end; they are dropped from time to time."""
    assert 500 < max(_lengths_of_the_queue(Bulkhead(19, queue=20, max_wait=100_000))) <= 1001


def test_a_call_that_is_woken_at_the_instant_of_its_timeout_is_cut_off() -> None:
    """The outer limit takes precedence; the clean-up may wait past it."""
    with Simulation() as simulation:
        bulkhead, ends = Bulkhead(1, queue=1), []

        async def hold(ctx: Context) -> None:
            await simulation.sleep(2)

        async def clean_up(ctx: Context) -> None:
            try:
                await simulation.execute(bulkhead, hold, ctx)
            finally:
                await simulation.sleep(3)

        async def client() -> None:
            with pytest.raises(TimeoutExceeded):
                await simulation.execute(Timeout(2), clean_up)
            ends.append(simulation.now())

        async def first() -> None:
            await simulation.execute(bulkhead, hold)
            ends.append(simulation.now())

        simulation.start(first())
        simulation.start(client())
        simulation.run()
        assert bulkhead.stats().in_flight == 0
    assert ends == [2, 5]


def test_dropping_stale_entries_keeps_the_timeouts_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is cut off when it is due."""
    monkeypatch.setattr("resilience.testing.simulation._MIN_ENTRIES", 0)
    with Simulation() as simulation:
        ends: list[float] = []

        async def hang(ctx: Context) -> None:
            await simulation.sleep(1000)

        async def client(limit: float) -> None:
            with pytest.raises(TimeoutExceeded):
                await simulation.execute(Timeout(limit), hang)
            ends.append(simulation.now())

        for limit in (5.0, 1.0, 3.0, 2.0, 4.0):
            simulation.start(client(limit))
        assert simulation.run() == 5
    assert ends == [1, 2, 3, 4, 5]


def test_the_garbage_collector_runs_rarely_during_a_simulation() -> None:
    """The more clients, the more rarely; the settings are restored, and a disabled collector stays disabled."""
    before = gc.get_threshold()
    seen: list[int] = []

    async def client(simulation: Simulation) -> None:
        seen.append(gc.get_threshold()[0])

    for threshold, clients in ((700, 1), (700, 5000), (0, 1)):
        gc.set_threshold(threshold, *before[1:])
        try:
            with Simulation() as simulation:
                for _ in range(clients):
                    simulation.start(client(simulation))
                simulation.run()
            assert gc.get_threshold() == (threshold, *before[1:])
        finally:
            gc.set_threshold(*before)
    assert seen == [50_000] + [100_000] * 5000 + [0]
