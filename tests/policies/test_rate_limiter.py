"""RateLimiter: the order and the instants of turns, refusals, pauses, and hints of the service."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import FrozenInstanceError, replace
from datetime import timedelta
from math import inf, nan
from typing import Any

import anyio
import pytest
import trio

from resilience import Context, Fallback, Policy, Rate, RateLimiter, RateLimiterStats, Retry, Timeout, deadline, events
from resilience.clock import clock as process_clock
from resilience.errors import RateLimited, Rejected, TimeoutExceeded
from resilience.outcome import ErrorAnswer
from resilience.runtimes.blocking import BlockingWaiter
from resilience.testing import Simulation, VirtualClock, virtual_time
from tests.callers import wait_until
from tests.conftest import Boom, Script, World, no_collector
from tests.functions import raising
from tests.policies.blocks import entered
from tests.policies.bulkheads import works
from tests.policies.retries import RetryAfter


@pytest.fixture
def virtual() -> Iterator[VirtualClock]:
    """Virtual time, in each world."""
    with virtual_time() as clock:
        yield clock


class Arrivals:
    """Callers in simulated time, and when each began or was refused."""

    def __init__(self, limiter: Policy[Any], answer: Any = None) -> None:
        self._limiter = limiter
        self._answer = answer
        self.simulation = Simulation()
        self.began: dict[str, float] = {}
        self.refused: dict[str, tuple[float, float | None]] = {}
        self.instants: list[tuple[float, Any]] = []

    def at(
        self, instant: float, *names: str, budget: float | None = None, cost: float = 1.0, lasts: float = 0.0
    ) -> Arrivals:
        """Start these callers at this instant. Each call lasts so many seconds."""

        async def arrive(name: str) -> None:
            async def fn(ctx: Context) -> Any:
                self.began[name] = self.simulation.now()
                await self.simulation.sleep(lasts)
                if isinstance(self._answer, Exception):
                    raise self._answer
                return self._answer

            ctx = Context(timeout=budget, properties={"cost": cost})
            try:
                await self.simulation.execute(self._limiter, fn, ctx)
            except RateLimited as error:
                self.refused[name] = (self.simulation.now(), error.retry_after)
            except (TimeoutExceeded, RetryAfter):
                pass

        async def wait() -> None:
            await self.simulation.sleep(instant)
            for name in names:
                self.simulation.start(arrive(name))

        self.simulation.start(wait())
        return self

    def then(self, instant: float, do: Any) -> Arrivals:
        """Call `do` at this instant."""

        async def act() -> None:
            await self.simulation.sleep(instant)
            do()

        self.simulation.start(act())
        return self

    def run(self) -> Arrivals:
        with self.simulation:
            self.simulation.run()
        return self


# --- order and rate ----------------------------------------------------------------------------


async def test_calls_beyond_the_burst_wait_and_begin_at_the_rate(world: World, virtual: VirtualClock) -> None:
    limiter = RateLimiter(Rate(4, burst=2))
    instants = []
    for _ in range(5):
        await world.execute(limiter, Script(None, doing=lambda ctx: instants.append(virtual.now())).function())
    assert instants == [0, 0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    ("used", "instants"), [(60, [0, 2.0, 2.1]), (0, [0, 1.0, 1.1, 1.2])], ids=["gives up", "is let through"]
)
async def test_callers_behind_one_that_has_held_them_up_begin_one_by_one(
    tasks_world: World, virtual: VirtualClock, used: float, instants: list[float]
) -> None:
    """The second caller needs units that the first one has, which may refund them after 1 s; it gives up after 2 s."""
    rates = Rate(10, burst=1), Rate(60, per=60, cost=lambda ctx: ctx.properties["tokens"], actual=lambda used: used)
    limiter = RateLimiter(*rates)
    began: list[float] = []

    async def caller(tokens: float) -> None:
        async def fn(ctx: Context) -> float:
            began.append(virtual.now())
            await anyio.sleep(tokens / 60)
            return used if tokens == 60 else tokens

        with anyio.move_on_after(2.0 if tokens == 30 else inf):
            await limiter.aexecute(fn, Context(properties={"tokens": tokens}))

    async with anyio.create_task_group() as group:
        for tokens in (60, 30, 0, 0):
            group.start_soon(caller, tokens)
            await anyio.sleep(0)
    assert began == pytest.approx(instants)


def test_an_expensive_call_is_not_overtaken_by_cheap_ones() -> None:
    """Turns are first come, first served: at 10 units a second, those behind a call of 10 units wait for it."""
    limiter = RateLimiter(Rate(10, cost=lambda ctx: ctx.properties["cost"]))
    arrivals = Arrivals(limiter).at(0, "a", cost=6).at(0.25, "b", cost=10).at(0.5, "c", cost=1).run()
    assert arrivals.began == {"a": 0, "b": 1, "c": 2}


async def test_tasks_whose_turns_come_at_the_same_instant_begin_in_the_order_of_arrival(tasks_world: World) -> None:
    """Timers of the same instant fire in any order: here four at a time."""
    limiter = RateLimiter(Rate(4, per=0.02))
    arrived: list[int] = []
    began: list[int] = []

    async def caller(number: int) -> None:
        async def fn() -> None:
            began.append(number)

        arrived.append(number)
        await limiter.acall(fn)

    async with anyio.create_task_group() as group:
        for number in range(24):
            group.start_soon(caller, number)
    assert began == arrived


@pytest.mark.slow
@pytest.mark.serial
async def test_late_timers_do_not_lower_the_rate(in_asyncio: World) -> None:
    """Turns are charged by their schedule: a thousand tasks at a thousand a second take 1.00 s on an idle machine."""
    limiter, began = RateLimiter(Rate(1000, burst=1)), time.monotonic()
    async with anyio.create_task_group() as group:
        for _ in range(1000):
            group.start_soon(limiter.acall, anyio.sleep, 0)
    assert 0.98 < time.monotonic() - began < 1.2


# --- refusals ----------------------------------------------------------------------------------


async def test_a_call_whose_turn_comes_too_late_is_refused_at_once(world: World, virtual: VirtualClock) -> None:
    """For `max_wait`, the deadline and an outer Timeout alike: `RateLimited` carries the exact seconds."""
    for budget in (4.0, None):
        limiter = RateLimiter(Rate(1, per=10))
        assert await works(world, limiter) == "fine"
        error = await works(world, limiter if budget else Timeout(4).wrap(limiter), Context(timeout=budget))
        assert type(error) is RateLimited
        assert isinstance(error, Rejected)
        assert (error.policy, error.retry_after) == ("RateLimiter", 10)
    limiter = RateLimiter(Rate(1, per=10), max_wait=timedelta(seconds=5), name="partner")
    await works(world, limiter)
    error = await works(world, limiter)
    assert (error.policy, error.retry_after, str(error)) == ("partner", 10, "partner: its turn comes in 10 s")
    assert virtual.now() == 0
    assert limiter.stats() == RateLimiterStats(0, 10, 1)


@pytest.mark.parametrize(("seconds", "shown"), [(0.12345, "0.123"), (99.96, "100"), (999.9, "1000"), (86400, "86400")])
def test_a_long_wait_is_written_without_an_exponent(virtual: VirtualClock, seconds: float, shown: str) -> None:
    limiter = RateLimiter(Rate(1, per=seconds), max_wait=0)
    limiter.call(int)
    with pytest.raises(RateLimited, match=f"^RateLimiter: its turn comes in {shown} s$"):
        limiter.call(int)


@pytest.mark.parametrize("limit", [{"max_wait": 3.0}, {"budget": 3.0}])
def test_a_caller_that_a_pause_moves_beyond_its_limit_is_refused(limit: dict[str, float], heard: list[Any]) -> None:
    """It leaves the queue with `RateLimited` at its old turn, before the limit has passed; the event has its wait."""
    limiter = RateLimiter(Rate(1, burst=1), max_wait=limit.get("max_wait"))
    arrivals = Arrivals(limiter).at(0, "a", "b", "c", budget=limit.get("budget"))
    arrivals.then(0.5, lambda: limiter.pause(60)).run()
    assert arrivals.began == {"a": 0}
    assert arrivals.refused == {"b": (1, 59.5), "c": (2, 58.5)}
    refused = [it for it in heard if isinstance(it, events.CallRejected)]
    assert [(it.retry_after, it.waited) for it in refused] == [(59.5, 1), (58.5, 2)]
    assert limiter.stats().rejected == 2


async def test_a_caller_that_learns_too_late_of_its_refusal_gets_zero_seconds(
    tasks_world: World, virtual: VirtualClock
) -> None:
    """Its event loop was blocked until after its turn, which a pause had moved beyond its limit."""
    limiter = RateLimiter(Rate(1, per=0.1), max_wait=0.15)
    limiter.call(int)

    async def block() -> None:
        limiter.pause(0.2)
        virtual.advance(0.3)

    async with anyio.create_task_group() as group:
        group.start_soon(block)
        error = await works(tasks_world, limiter)
    assert (str(error), error.retry_after) == ("RateLimiter: its turn comes in 0 s", 0)


async def test_a_cost_above_the_limit_has_no_retry_after(world: World, virtual: VirtualClock, heard: list[Any]) -> None:
    limiter = RateLimiter(Rate(10, cost=lambda ctx: 11))
    error = await works(world, limiter)
    assert (type(error), error.retry_after) == (RateLimited, None)
    assert str(error) == "RateLimiter: it costs more than the limit"
    assert limiter.try_take() == inf
    assert limiter.try_take(10) == 0
    observed = RateLimiter(Rate(10, cost=lambda ctx: 11), observe_only=True)
    assert await works(world, observed) == "fine"
    assert [it.retry_after for it in heard if isinstance(it, events.CallRejected)] == [None, None]


def test_a_caller_whose_cost_exceeds_a_resized_limit_is_refused_and_blocks_no_other() -> None:
    limiter = RateLimiter(Rate(4, cost=lambda ctx: ctx.properties["cost"]))
    arrivals = Arrivals(limiter).at(0, "a", cost=4).at(0, "b", cost=3).at(0, "c", cost=1)
    arrivals.then(0.5, lambda: limiter.resize(2)).run()
    assert arrivals.began == {"a": 0, "c": 1}
    assert arrivals.refused == {"b": (1, None)}


# --- pauses, and hints of the service ----------------------------------------------------------


async def test_a_pause_delays_calls_although_units_are_free(world: World, virtual: VirtualClock) -> None:
    """Each pause does: a call that finds free units takes no lock, and sees the pause anyway."""
    limiter = RateLimiter(Rate(1000, burst=1000))
    limiter.pause(0)
    for resumed_at in (5, 10):
        assert [await works(world, limiter), await works(world, limiter)] == ["fine", "fine"]
        limiter.pause(5)
        assert limiter.try_take() == 5
        assert await works(world, limiter) == "fine"
        assert virtual.now() == resumed_at


def test_a_resize_by_another_thread_during_a_reset_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = RateLimiter(Rate(1, per=60))

    def now() -> float:
        monkeypatch.undo()
        limiter.resize(2)
        return process_clock.now()

    monkeypatch.setattr(process_clock, "now", now)
    limiter.reset()
    assert [limiter.try_take() == 0 for _ in range(3)] == [True, True, False]


def test_a_call_that_finds_free_units_is_charged_its_fixed_cost_at_the_current_rate() -> None:
    limiter = RateLimiter(Rate(10, burst=4, cost=2))
    arrivals = Arrivals(limiter).at(0, *"abc").then(5, lambda: limiter.resize(1)).at(20, "d").at(30, *"efg").run()
    assert arrivals.began == {"a": 0, "b": 0, "c": 0.2, "d": 20, "e": 30, "f": 30, "g": 32}


def test_units_that_were_refilled_since_are_not_given_back() -> None:
    """The first call ends while the units of the second are used, and has used less than it was charged."""
    limiter = RateLimiter(Rate(1, burst=4, cost=4, actual=lambda used: used))
    arrivals = Arrivals(limiter, answer=1).at(0, "a", lasts=11).at(10, "b", lasts=5).at(11.5, "c").run()
    assert arrivals.began == {"a": 0, "b": 10, "c": 14}


def test_units_that_a_reset_has_discarded_are_not_given_back() -> None:
    """After it, one call turns out to have used more than it was charged before, and another one less."""
    used = iter([10, 0, 4])
    limiter = RateLimiter(Rate(1, burst=8, cost=4, actual=lambda result: next(used)))
    arrivals = Arrivals(limiter).at(0, "more", lasts=2).at(0, "less", lasts=3).then(1, limiter.reset)
    assert arrivals.at(3.5, "next").run().began == {"more": 0, "less": 0, "next": 4}


def test_a_resize_reschedules_waiting_callers() -> None:
    limiter = RateLimiter(Rate(1, burst=1))
    arrivals = Arrivals(limiter).at(0, *"abcd").then(0.5, lambda: limiter.resize(2)).run()
    assert arrivals.began == {"a": 0, "b": 0.75, "c": 1.25, "d": 1.75}
    assert limiter.settings()["rate"] == Rate(2, burst=1)
    with pytest.raises(TypeError, match="2 rates"):
        RateLimiter(Rate(1), Rate(2)).resize(3)
    with pytest.raises(ValueError, match="-1"):
        limiter.resize(-1)


@pytest.mark.parametrize(
    ("retry_after", "pause"),
    [
        *((2, 2), (timedelta(0, 3), 3), (600, 60), (1.8e12, 60), (timedelta.max, 60)),
        *((None, 0), (0, 0), (-1, 0), (nan, 0), (inf, 0), ("2", 0), (True, 0)),
    ],
)
async def test_an_error_with_retry_after_pauses_the_limiter_for_at_most_a_minute(
    threads: World, virtual: VirtualClock, retry_after: Any, pause: float
) -> None:
    """A value that is no finite number of seconds is ignored."""
    limiter = RateLimiter(1000)
    await threads.attempt(limiter, Script(RetryAfter(retry_after)).function())
    assert limiter.stats().next_turn == pause
    assert await works(threads, limiter) == "fine"
    assert virtual.now() == pause


def test_statistics_assume_a_cost_of_one_if_it_is_computed(virtual: VirtualClock) -> None:
    limiter = RateLimiter(Rate(10, burst=10, cost=lambda ctx: 10))
    limiter.call(int)
    assert limiter.stats().next_turn == pytest.approx(0.1)


async def test_rejections_and_switched_off_hints_do_not_pause(world: World, virtual: VirtualClock) -> None:
    """A `Rejected` says nothing about the service; `retry_after=False` ignores errors, `longest_pause` caps them."""
    limiter = RateLimiter(1000)
    refusal = RateLimited("inner", retry_after=9)
    await world.attempt(limiter, Script(refusal).function())
    await world.attempt(limiter, Script(ExceptionGroup("children", [refusal])).function())
    assert limiter.stats().next_turn == 0
    limiter = RateLimiter(1000, retry_after=False)
    await world.attempt(limiter, Script(RetryAfter(9)).function())
    with suppress(RetryAfter), limiter.turn():
        raise RetryAfter(9)
    assert limiter.stats().next_turn == 0
    limiter = RateLimiter(1000, longest_pause=5)
    await world.attempt(limiter, Script(RetryAfter(0.25)).function())
    assert limiter.stats().next_turn == 0.25
    await world.attempt(limiter, Script(ExceptionGroup("children", [RetryAfter(9)])).function())
    assert limiter.stats().next_turn == 5


def test_the_quota_is_read_from_results() -> None:
    limiter = RateLimiter(1000, told=lambda result: result)
    arrivals = Arrivals(limiter, answer=(1, timedelta(seconds=20))).at(0, "a").at(0.5, "b", "c").run()
    assert arrivals.began == {"a": 0, "b": 0.5, "c": 20.5}
    limiter = RateLimiter(1000, told=lambda result: None)
    assert Arrivals(limiter).at(0, *"abc").run().began == dict.fromkeys("abc", 0)
    for said, shown in [(5, "5"), ((1, 2, 3), r"\(1, 2, 3\)")]:
        with pytest.raises(TypeError, match=rf"told\(result\) must return \(remaining, seconds\) or None, not {shown}"):
            RateLimiter(1000, told=lambda result: result).call(lambda it: it, said)


def test_actual_use_is_charged_or_credited_after_the_call() -> None:
    """A limit of 1,000 tokens a minute is charged by an estimate before the call, which is corrected after it."""

    def used(tokens: float) -> Any:
        return lambda ctx: tokens

    limiter = RateLimiter(
        Rate(60, per=60), Rate(1000, per=60, cost=lambda ctx: ctx.properties["tokens"], actual=lambda used: used)
    )
    with virtual_time() as clock:
        limiter.execute(used(100), Context(properties={"tokens": 900}))
        limiter.execute(used(900), Context(properties={"tokens": 900}))
        assert clock.now() == 0
        limiter.execute(used(2000), Context(properties={"tokens": 0}))
        assert limiter.try_take(1, 1) == 60


@pytest.mark.parametrize("bad", [nan, inf, -1, "3", None, True])
def test_an_invalid_cost_or_actual_use_is_an_error_and_uses_no_turn(bad: Any) -> None:
    for rate in (Rate(10, cost=lambda ctx: bad), Rate(10, actual=lambda result: bad)):
        limiter = RateLimiter(rate)
        with pytest.raises((ValueError, TypeError), match=r"cost|actual"):
            limiter.call(int)
        assert limiter.stats().next_turn == 0


def test_an_answer_that_is_an_error_is_not_read() -> None:
    answer, read = ErrorAnswer(Boom()), list[Any]()
    assert RateLimiter(10, told=read.append).call(lambda: answer) is answer
    assert not read


# --- blocks and turns without a call -----------------------------------------------------------


async def test_a_block_takes_a_turn_and_its_errors_pause_the_limiter(world: World, virtual: VirtualClock) -> None:
    limiter = RateLimiter(Rate(2, burst=1))
    block = limiter.turn()

    async def enter(error: Exception | None = None) -> float:
        async with entered(world, block):
            if error:
                raise error
        return virtual.now()

    assert [await enter(), await enter()] == [0, 0.5]
    with pytest.raises(RetryAfter):
        await enter(RetryAfter(5))
    assert (await enter(), virtual.now()) == (6, 6)
    with deadline(0.25), pytest.raises(RateLimited):
        await enter()


async def test_the_cost_of_a_block_is_computed_from_the_current_context(world: World, virtual: VirtualClock) -> None:
    limiter = RateLimiter(Rate(10, cost=lambda ctx: ctx.properties["cost"]), max_wait=0)

    async def fn(ctx: Context) -> Any:
        with limiter.turn():
            return limiter.try_take()

    assert await world.execute(Fallback("?"), fn, Context(properties={"cost": 6})) == 1


def test_less_than_one_call_a_second_needs_a_longer_period() -> None:
    with pytest.raises(ValueError, match=r"at least 1 call in a second, not 0.2; did you mean Rate\(1, per=5\)\?"):
        RateLimiter(0.2)


def test_a_turn_takes_one_cost_for_each_rate() -> None:
    limiter = RateLimiter(Rate(10, per=60), Rate(100, per=60))
    with limiter.turn(3, 90):
        pass
    assert limiter.try_take(7, 10) == 0
    assert limiter.try_take(0, 0) == 0
    assert limiter.try_take(1, 0) > 0
    assert limiter.try_take(0, 1) > 0
    with pytest.raises(TypeError, match=r"has 2 rates and takes a cost for each, not \(3,\)"):
        limiter.turn(3)
    with pytest.raises(TypeError, match=r"has 1 rate and takes a cost for each, not \(1, 2\)"):
        RateLimiter(1).try_take(1, 2)
    with pytest.raises(ValueError, match="-1"):
        limiter.try_take(1, -1)


def test_try_take_takes_no_turn_while_a_caller_waits() -> None:
    limiter = RateLimiter(Rate(1, burst=1))
    tried: list[Any] = []
    arrivals = Arrivals(limiter).at(0, "a", "b").then(0.25, lambda: tried.append(limiter.try_take()))
    arrivals.then(0.25, lambda: tried.append(limiter.stats())).run()
    assert tried == [1.75, RateLimiterStats(1, 1.75, 0)]
    with virtual_time() as clock:
        limiter.reset()
        assert limiter.try_take() == 0
        assert limiter.try_take() == 1
        clock.advance(1)
        assert limiter.try_take() == 0
    assert limiter.stats().rejected == 0


# --- observe_only ------------------------------------------------------------------------------


async def test_observe_only_admits_and_reports_refusals(world: World, virtual: VirtualClock, heard: list[Any]) -> None:
    """A call without a turn takes none, and its result and its errors are no hints."""
    limiter = RateLimiter(Rate(1, burst=1), told=lambda result: (0, 60), observe_only=True, name="trial")
    assert isinstance(await world.attempt(limiter, Script(Boom("no")).function()), Boom)
    for answer in ("fine", RetryAfter(60)):
        assert await world.attempt(limiter, Script(answer).function()) is answer
    with pytest.raises(RetryAfter):
        async with entered(world, limiter.turn()):
            raise RetryAfter(60)
    rejected = [it for it in heard if isinstance(it, events.CallRejected)]
    assert [(it.policy, it.reason, it.retry_after, it.shadow) for it in rejected] == [
        ("trial", "RateLimited", 1.0, True)
    ] * 3
    assert limiter.stats() == RateLimiterStats(0, 1, 3)
    assert virtual.now() == 0


async def test_a_block_with_a_turn_pauses_a_limiter_that_only_observes(world: World, virtual: VirtualClock) -> None:
    limiter = RateLimiter(1000, observe_only=True)
    with pytest.raises(RetryAfter):
        async with entered(world, limiter.turn()):
            raise RetryAfter(30)
    assert limiter.stats().next_turn == 30


# --- events, descriptions and values -----------------------------------------------------------


def test_a_retry_on_rate_limited_waits_for_the_turn() -> None:
    limiter = RateLimiter(Rate(1, per=10), max_wait=0)
    with virtual_time() as clock:
        limiter.call(int)
        assert Retry(on=RateLimited, backoff=[0.5]).wrap(limiter).call(int) == 0
        assert clock.now() == 10


def test_a_rate_is_a_value() -> None:
    """It is compared, hashed, copied and pickled by its fields, and immutable."""
    rate = Rate(60, timedelta(minutes=1), burst=5)
    assert rate == Rate(60, 60, burst=5) != Rate(60, 60)
    assert hash(rate) == hash(pickle.loads(pickle.dumps(rate)))
    assert copy.deepcopy(rate) == replace(rate) == rate
    for name in ("limit", "comment"):
        with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
            setattr(rate, name, 1)
    assert (rate.limit, rate.per, rate.cost) == (60, 60, 1)
    cost, actual = (lambda ctx: 1), (lambda result: 1)
    assert repr(Rate(1, cost=cost, actual=actual)) == f"Rate(1, cost={cost!r}, actual={actual!r})"


# --- ends of waiting callers -------------------------------------------------------------------


@contextmanager
def tasks_of_a_closed_loop(limiter: RateLimiter, number: int) -> Iterator[list[Any]]:
    """Let tasks wait for their turns, and close their loop. Yield their coroutines."""
    limiter.call(int)
    loop, coroutines = asyncio.new_event_loop(), [limiter.acall(anyio.sleep, 0) for _ in range(number)]
    tasks: list[Any] = [loop.create_task(it) for it in coroutines]
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert limiter.stats().queued == number
    yield coroutines
    assert limiter.stats().queued == 0
    for task in tasks:
        task._log_destroy_pending = False


@pytest.mark.parametrize("closed", [False, True], ids=["left", "closed"])
def test_tasks_of_a_closed_loop_delay_no_other_caller(virtual: VirtualClock, closed: bool) -> None:
    """They leave the queue, and the next caller begins at its own turn."""
    limiter = RateLimiter(Rate(2, burst=1))
    with tasks_of_a_closed_loop(limiter, 3) as coroutines:
        for it in coroutines if closed else ():
            it.close()
        limiter.call(int)
        assert virtual.now() == 0.5  # one turn, not four


def test_a_turn_can_be_taken_although_tasks_of_a_closed_loop_waited(virtual: VirtualClock) -> None:
    """`try_take` has no place in the queue behind them."""
    limiter = RateLimiter(Rate(1, per=10, burst=1))
    with tasks_of_a_closed_loop(limiter, 1):
        virtual.advance(20)
        assert limiter.try_take() == 0


def test_tasks_of_a_blocked_event_loop_take_no_turns_of_others() -> None:
    """Others get all turns that it does not take: here ten in each 50 ms, although 15 tasks are before them."""
    limiter = RateLimiter(Rate(10, per=0.05))
    began: list[str] = []
    blocked, released = threading.Event(), threading.Event()

    async def call(name: str) -> None:
        await limiter.acall(anyio.sleep, 0)
        began.append(name)

    async def gather(name: str, number: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(number):
                group.create_task(call(name))
            if name == "blocked":
                await asyncio.sleep(0)
                blocked.set()
                released.wait(10)

    with ThreadPoolExecutor() as threads:
        while limiter.try_take() == 0:
            pass
        end = threads.submit(asyncio.run, gather("blocked", 15))
        blocked.wait(10)
        since = time.monotonic()
        asyncio.run(gather("free", 40))
        seconds = time.monotonic() - since
        released.set()
        end.result(10)
    assert began == ["free"] * 40 + ["blocked"] * 15
    assert seconds < 5  # 0.25 s on an idle machine; until the other loop goes on, it would be 10 s


def test_waiting_tasks_of_an_ended_trio_run_leave_the_queue() -> None:
    """An attempt to wake the first one fails, and removes it; then the next one is woken."""
    limiter = RateLimiter(Rate(1, per=60, burst=1))
    limiter.call(int)
    left: list[Any] = []

    async def main() -> None:
        for _ in range(3):
            coroutine = limiter.acall(trio.sleep, 0)
            left.append(coroutine)
            coroutine.send(None)

    trio.run(main)
    assert limiter.stats().queued == 3
    limiter.reset()
    assert limiter.stats().queued == 0
    for coroutine in left:
        with pytest.raises(RuntimeError):
            coroutine.close()


def test_a_waiter_is_not_refused_because_no_stack_is_left_to_wake_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins at its instant. A `RecursionError` is a `RuntimeError`, but not the one of a closed event loop."""
    limiter = RateLimiter(Rate(1, per=0.3))
    limiter.call(int)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(limiter.call, len, "four")
        wait_until(lambda: limiter.stats().queued == 1)
        with monkeypatch.context() as patched, pytest.raises(RecursionError):
            patched.setattr(BlockingWaiter, "wake", raising(RecursionError))
            limiter.reset()
        assert call.result(10) == 4


async def asks_for_a_pause(ctx: Context) -> None:
    raise RetryAfter(0.5)


async def test_errors_and_refusals_leave_no_reference_cycle(world: World, virtual: VirtualClock) -> None:
    """The calls here fail with and without a wait, or are refused at once or later."""
    left: list[Any] = []

    async def fails(policy: Policy[Any]) -> None:
        left.append(weakref.ref(await world.attempt(policy, asks_for_a_pause)))

    async def main() -> None:
        await fails(RateLimiter(1))
        limiter = RateLimiter(Rate(1, burst=1), max_wait=1)
        await fails(limiter)
        await fails(limiter)
        limiter.pause(60)
        await fails(limiter)

    await main()
    with no_collector():
        await main()
        assert [it() for it in left] == [None] * 8
