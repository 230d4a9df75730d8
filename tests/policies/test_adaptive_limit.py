"""AdaptiveLimit: its permits, the limit that it learns, and the goodput of a server under load."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import anyio
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from resilience import AdaptiveLimit, Context, Policy, Sample, Seeking, events
from resilience.clock import clock as process_clock
from resilience.errors import LimitExceeded
from resilience.policies.adaptive_limit import LimitStats
from tests.callers import Stopped, wait_until
from tests.conftest import Boom, FakeClock, Script, Virtual, World
from tests.contention.beside import beside
from tests.functions import raising
from tests.policies.blocks import entered
from tests.policies.bulkheads import counts
from tests.policies.retries import Response
from tests.policies.simulated import overloaded
from tests.policies.test_machines import Call


class Recording:
    """An algorithm that returns the given limits and records its samples; it may do something during each update."""

    def __init__(self, *results: Any, doing: Callable[[], object] = int) -> None:
        self.results = list(results)
        self.doing = doing
        self.updates: list[tuple[float, Sample]] = []
        self.resets = 0

    def update(self, limit: float, sample: Sample) -> Any:
        self.updates.append((limit, sample))
        self.doing()
        return self.results.pop(0) if self.results else limit

    def reset(self) -> None:
        self.resets += 1


async def call_lasting(world: World, clock: FakeClock, limit: Policy[Any], seconds: float, ending: Any = "fine") -> Any:
    """Make a call that takes `seconds`."""

    async def fn(ctx: Context) -> Any:
        clock.advance(seconds)
        if isinstance(ending, BaseException):
            raise ending
        return ending

    return await world.attempt(limit, fn)


# --- permits -------------------------------------------------------------------------------------


async def test_a_call_beyond_the_limit_is_refused(world: World) -> None:
    """The error carries the name and the limit; the function is not called."""
    limit = AdaptiveLimit(60, initial=2, name="search")
    script = Script("fine")
    async with beside(world) as group:
        calls = [await group.inside(limit) for _ in range(2)]
        error = await world.attempt(limit, script.function())
        assert (type(error), error.policy, error.limit, error.retry_after) == (LimitExceeded, "search", 2, None)
        assert script.calls == 0
        assert counts(limit) == (2, 2, 0, 1)
        for call in calls:
            call.let_go()
            assert await call.result() == "fine"
    assert counts(limit) == (2, 0, 0, 1)


async def test_a_cancelled_call_releases_its_permit_and_is_no_sample(tasks_world: World) -> None:
    algorithm = Recording()
    limit = AdaptiveLimit(algorithm, initial=1, min_samples=1)
    with anyio.move_on_after(0.001):
        await limit.aexecute(lambda ctx: anyio.sleep(10))
    assert counts(limit) == (1, 0, 0, 0)
    assert algorithm.updates == []


async def test_a_block_holds_a_permit_and_its_latency_is_sampled(world: World, clock: FakeClock) -> None:
    algorithm = Recording(3)
    limit = AdaptiveLimit(algorithm, initial=1, min_samples=3, on=Boom)

    async def block(seconds: float, error: BaseException | None = None) -> None:
        async with entered(world, limit.slot()):
            assert counts(limit)[1] == 1
            clock.advance(seconds)
            if error is not None:
                raise error

    await block(1.0)
    for error in (Boom(), KeyError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            await block(2.0, error)
    await block(3.0)
    assert [sample.latency for _, sample in algorithm.updates] == [3.0]
    assert algorithm.updates[0][1].dropped
    assert counts(limit) == (3, 0, 0, 0)


def test_a_block_beyond_the_limit_or_entered_twice_is_refused() -> None:
    limit = AdaptiveLimit(60, initial=1)
    slot = limit.slot()
    with slot:
        with pytest.raises(LimitExceeded), limit.slot():
            pass
        with pytest.raises(RuntimeError, match="in use"), slot:
            pass
    assert counts(limit) == (1, 0, 0, 1)


async def test_a_queued_call_waits_for_max_wait_at_most(world: World) -> None:
    limit = AdaptiveLimit(60, initial=1, queue=1, max_wait=0.01)
    async with entered(world, limit.slot()):
        error = await world.attempt(limit, Script("never").function(), Context(timeout=5))
        assert isinstance(error, LimitExceeded)
    assert counts(limit)[:3] == (1, 0, 0)


# --- the learned limit ---------------------------------------------------------------------------


async def test_the_limit_rises_while_calls_are_fast_and_falls_while_slow(world: World, clock: FakeClock) -> None:
    """It rises by one if at least half of it was used, and falls to nine tenths."""
    changes: list[events.LimitChanged] = []
    limit = AdaptiveLimit(0.3, initial=2, min_samples=5, on_change=changes.append, name="search")
    for _ in range(5):
        await call_lasting(world, clock, limit, 0.1)
    assert limit.stats().limit == 3
    clock.advance(1)
    for _ in range(5):
        await call_lasting(world, clock, limit, 0.5)
    assert limit.stats().limit == 2
    assert [(it.policy, it.old, it.new, it.reason) for it in changes] == [
        ("search", 2, 3, "room"),
        ("search", 3, 2, "slow"),
    ]


async def test_the_limit_is_updated_after_min_samples_and_the_window(threads: World, clock: FakeClock) -> None:
    """The window is twice the shortest latency, if that is longer."""
    algorithm = Recording()
    limit = AdaptiveLimit(algorithm, min_samples=3, window=10)
    updated_after = []
    for number, seconds in enumerate([1, 1, 1, 2, 2, 2, 2, 2, 8, 8, 8, 8]):
        await call_lasting(threads, clock, limit, seconds)
        if len(algorithm.updates) > len(updated_after):
            updated_after.append(number)
    assert updated_after == [2, 7, 10]


async def test_a_sample_summarizes_the_calls_of_its_period(threads: World, clock: FakeClock) -> None:
    algorithm = Recording()
    limit = AdaptiveLimit(algorithm, initial=7, min_samples=10, on=Boom)
    for seconds in (1, 2, 3, 4, 5, 6, 7, 8):
        await call_lasting(threads, clock, limit, seconds)
    await call_lasting(threads, clock, limit, 100, KeyError())  # neither a success nor in `on`: no sample
    await call_lasting(threads, clock, limit, 9, Boom())
    await call_lasting(threads, clock, limit, 10)
    assert algorithm.updates == [(7.0, Sample(10.0, 1, False, True, pytest.approx(9 / 154), 10.0))]


@pytest.mark.parametrize("queue", [0, 1])
async def test_a_sample_is_full_after_a_refusal_or_while_a_call_waits(threads: World, queue: int) -> None:
    algorithm = Recording()
    limit = AdaptiveLimit(algorithm, initial=1, min_samples=1, queue=queue)
    async with beside(threads) as group:
        call = await group.inside(limit)
        if queue:
            second = await group.queued(limit)
        else:
            await threads.attempt(limit, Script("fine").function())
        call.let_go()
        assert await call.result() == "fine"
        if queue:
            second.let_go()
            assert await second.result() == "fine"
    assert [sample.full for _, sample in algorithm.updates][:1] == [True]


async def test_running_calls_beyond_a_lowered_limit_do_not_make_a_sample_full(threads: World, clock: FakeClock) -> None:
    """No call was refused or had to wait."""
    algorithm = Recording(1)
    limit = AdaptiveLimit(algorithm, initial=3, min_samples=1)
    async with beside(threads) as group:
        calls = [await group.inside(limit) for _ in range(3)]
        for call in calls:
            clock.advance(2)
            call.let_go()
            await call.result()
    await call_lasting(threads, clock, limit, 2)
    assert [(limit, sample.full) for limit, sample in algorithm.updates] == [(3, False), (1, False)]


async def test_a_call_begun_under_an_earlier_limit_is_left_out_of_the_latency(threads: World, clock: FakeClock) -> None:
    """It counts in `latency_of_all` only."""
    algorithm = Recording(21)
    limit = AdaptiveLimit(algorithm, min_samples=1, headroom=100)
    async with beside(threads) as group:
        call = await group.inside(limit)
        await call_lasting(threads, clock, limit, 0.1)
        assert limit.stats().limit == 21
        clock.advance(50)
        call.let_go()
        await call.result()
    assert len(algorithm.updates) == 1
    await call_lasting(threads, clock, limit, 0.2)
    assert algorithm.updates[1][1].latency == pytest.approx(0.2)
    assert algorithm.updates[1][1].latency_of_all > 50


@pytest.mark.parametrize(
    ("results", "limits"),
    [
        *(([1000], [10]), ([0], [2]), ([-5.0], [2]), ([7.9, 7.2], [7, 7]), ([(6, "a reason")], [6])),
        *(([float("inf")], [10]), ([5], [5])),
    ],
)
async def test_the_limit_keeps_bounds(threads: World, clock: FakeClock, results: list[Any], limits: list[int]) -> None:
    """The limit in use is the integer part of the learned one. Only its changes are reported."""
    seen = [5]
    changes: list[events.LimitChanged] = []
    limit = AdaptiveLimit(
        Recording(*results), initial=5, least=2, most=10, min_samples=1, headroom=100, on_change=changes.append
    )
    for _ in limits:
        await call_lasting(threads, clock, limit, 1)
        clock.advance(10)
        seen.append(limit.stats().limit)
    assert seen[1:] == limits
    assert [(it.old, it.new) for it in changes] == [(old, new) for old, new in pairwise(seen) if old != new]


async def test_a_raised_limit_admits_waiting_calls_at_once(virtual_tasks: Virtual) -> None:
    """They do not wait until running calls release their permits."""
    limit = AdaptiveLimit(Recording(3), initial=1, queue=5, min_samples=1)
    began: list[float] = []

    async def fn() -> None:
        began.append(anyio.current_time())
        await anyio.sleep(1)

    start = anyio.current_time()
    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(limit.call, fn)
    assert [round(it - start, 3) for it in began] == [0, 1, 1, 1]


def test_a_waiting_call_that_a_raised_limit_admits_does_not_wait_for_the_listener() -> None:
    """The listener may be slow, and the call that has raised the limit wakes no others until it has ended."""
    was_admitted, in_time = threading.Event(), list[bool]()
    limit = AdaptiveLimit(
        Recording(2),
        initial=1,
        queue=1,
        min_samples=1,
        on_change=lambda _: in_time.append(was_admitted.wait(5)),
    )
    waiting = threading.Thread(target=limit.call, args=(was_admitted.set,))

    def fn() -> None:
        waiting.start()
        wait_until(lambda: limit.stats().queued == 1)

    limit.call(fn)
    waiting.join()
    assert in_time == [True]


async def test_a_limit_far_above_the_usage_falls_by_one_in_each_update(threads: World, clock: FakeClock) -> None:
    """It falls until it is `headroom` times the most calls that ran at once."""
    limit = AdaptiveLimit(60, initial=8, min_samples=1, headroom=5)
    seen = []
    for _ in range(6):
        await call_lasting(threads, clock, limit, 1)
        clock.advance(10)
        seen.append(limit.stats().limit)
    assert seen == [7, 6, 5, 5, 5, 5]


async def test_an_algorithm_may_be_an_object_that_passes_its_calls_on(threads: World, clock: FakeClock) -> None:
    """Such as one that logs them, or a mock: its class has no `update`."""

    class Passing:
        def __init__(self, algorithm: Recording) -> None:
            self.algorithm = algorithm

        def __getattr__(self, name: str) -> Any:
            return getattr(self.algorithm, name)

    limit = AdaptiveLimit(Passing(Recording(3)), initial=2, min_samples=1)
    await call_lasting(threads, clock, limit, 1)
    assert limit.stats().limit == 3


@pytest.mark.parametrize(
    ("wrong", "error"),
    [(float("nan"), ValueError), *((it, TypeError) for it in ("5", None, (), (5,), (5, 3), (5, "a reason", 3)))],
)
async def test_an_algorithm_that_returns_no_usable_limit_loses_no_permit(
    threads: World, clock: FakeClock, wrong: Any, error: type[Exception]
) -> None:
    """No permit is lost, the result of the call is closed, and the next update takes place."""
    algorithm, response = Recording(wrong, 6), Response(200)
    limit = AdaptiveLimit(algorithm, initial=5, min_samples=1)
    raised = await call_lasting(threads, clock, limit, 1, response)
    assert (type(raised), response.closed) == (error, 1)
    assert "update(limit, sample)" in str(raised)
    clock.advance(10)
    assert await call_lasting(threads, clock, limit, 1) == "fine"
    assert counts(limit) == (5, 0, 0, 0)  # 6 is above the headroom: five times the one call that ran


async def test_reset_restores_the_limit_and_keeps_permits(threads: World, clock: FakeClock, heard: list[Any]) -> None:
    """No `LimitChanged` event is sent for it."""
    algorithm = Recording(2)
    limit = AdaptiveLimit(algorithm, initial=3, min_samples=1)
    await call_lasting(threads, clock, limit, 1)
    assert limit.stats().limit == 2
    before = algorithm.resets
    async with beside(threads) as group:
        call = await group.inside(limit)
        limit.reset()
        assert counts(limit) == (3, 1, 0, 0)
        call.let_go()
        assert await call.result() == "fine"
    assert algorithm.resets == before + 1
    assert [(it.old, it.new, it.reason) for it in heard if isinstance(it, events.LimitChanged)] == [(3, 2, "Recording")]


async def test_an_error_of_the_algorithms_reset_leaves_no_call_waiting(world: World, clock: FakeClock) -> None:
    """The limit is the initial one anyway, and the waiting calls that fit are admitted."""
    algorithm = Recording(1)
    limit = AdaptiveLimit(algorithm, initial=2, queue=1, min_samples=1)
    await call_lasting(world, clock, limit, 1)
    algorithm.reset = broken  # type: ignore[method-assign]
    async with beside(world) as group:
        running, waiting = await group.inside(limit), await group.queued(limit)
        with pytest.raises(Boom):
            limit.reset()
        await waiting.is_inside()
        for call in (running, waiting):
            call.let_go()
            assert await call.result() == "fine"
    assert counts(limit)[:3] == (2, 0, 0)


def broken() -> None:
    raise Boom


def test_an_update_that_overlaps_a_reset_is_discarded() -> None:
    """The algorithm, which is called by one at a time, is reset before its next update."""
    resets: list[int] = []
    algorithm = Recording(9, 9, doing=lambda: (adaptive.reset(), resets.append(algorithm.resets)))
    adaptive = AdaptiveLimit(algorithm, initial=3, min_samples=1, headroom=100)
    before = algorithm.resets
    adaptive.call(int)
    adaptive.call(int)
    assert adaptive.stats().limit == 3
    assert resets == [before, before + 1]


def test_the_second_of_two_threads_that_are_due_to_update_does_nothing() -> None:
    """The first one has used the samples."""
    algorithm = Recording()
    limit = AdaptiveLimit(algorithm, initial=3, min_samples=2, window=1e-9)
    limit.call(int)
    second = Stopped(lambda: limit.call(int), at="_in_turn")
    limit.call(int)
    assert len(algorithm.updates) == 1
    second.go_on()
    assert len(algorithm.updates) == 1


def test_a_call_that_ends_during_an_update_starts_no_second_update() -> None:
    algorithm = Recording(doing=lambda: len(algorithm.updates) < 5 and adaptive.call(int))
    adaptive = AdaptiveLimit(algorithm, initial=3, min_samples=1, window=1e-9)
    adaptive.call(int)
    assert len(algorithm.updates) == 1


def test_a_call_that_fails_during_an_update_counts_in_the_next_sample(clock: FakeClock) -> None:
    algorithm = Recording(4, doing=lambda: len(algorithm.updates) == 1 and adaptive.capture(raising(Boom)))
    adaptive = AdaptiveLimit(algorithm, initial=3, min_samples=1, window=1e-9, on=Boom, headroom=100)
    clock.advance(1)
    adaptive.call(int)
    assert adaptive.stats().limit == 4
    clock.advance(1)
    adaptive.call(int)
    assert [sample.dropped for _, sample in algorithm.updates] == [False, True]


# --- observe_only, descriptions and arguments ----------------------------------------------------


@pytest.mark.parametrize("queue", [0, 5])
async def test_observe_only_admits_and_learns(world: World, clock: FakeClock, heard: list[Any], queue: int) -> None:
    """A call without a permit is no sample, but marks the next one as full."""
    algorithm = Recording()
    limit = AdaptiveLimit(algorithm, initial=1, min_samples=1, queue=queue, observe_only=True)
    async with beside(world) as group:
        call = await group.inside(limit)
        assert await call_lasting(world, clock, limit, 5) == "fine"
        async with entered(world, limit.slot()):
            assert counts(limit) == (1, 1, 0, 2)
        assert algorithm.updates == []
        call.let_go()
        assert await call.result() == "fine"
    assert [sample.full for _, sample in algorithm.updates] == [True]
    rejected = [(it.reason, it.shadow) for it in heard if isinstance(it, events.CallRejected)]
    assert rejected == [("LimitExceeded", True)] * 2
    assert counts(limit) == (1, 0, 0, 2)


def test_the_initial_limit_is_twenty_by_default() -> None:
    assert AdaptiveLimit(2).stats() == LimitStats(20, 0, 0, 0)


# --- calls in any order --------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Calls that begin and end in any order, under a limit that the algorithm sets at random."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(process_clock, "now", lambda: self.now)
        self.algorithm = Recording()
        self.changes: list[events.LimitChanged] = []
        self.policy = AdaptiveLimit(
            self.algorithm, initial=2, most=4, min_samples=2, on=Boom, headroom=100, on_change=self.changes.append
        )
        self.calls: list[Any] = []
        self.rejected = 0

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(limit=st.integers(1, 4))
    def set_next_limit(self, limit: int) -> None:
        self.algorithm.results = [limit]

    @rule()
    def begin(self) -> None:
        before = len(self.calls)
        is_full = before >= self.policy.stats().limit
        try:
            call: Any = Call(self.policy)
        except LimitExceeded:
            self.rejected += 1
        else:
            self.calls.append(call)
        assert len(self.calls) == before + (not is_full)

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), how=st.sampled_from(["fine", "failed", "other", "cancelled", "closed"]))
    def end(self, data: st.DataObject, how: str) -> None:
        call = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        endings = {"fine": "fine", "failed": Boom(), "other": KeyError(), "cancelled": asyncio.CancelledError()}
        call.end(endings.get(how))

    @invariant()
    def statistics_are_exact(self) -> None:
        stats = self.policy.stats()
        assert stats.in_flight == len(self.calls)
        assert stats.rejected == self.rejected
        assert 1 <= stats.limit <= 4
        assert stats.limit == (self.changes[-1].new if self.changes else 2)
        for change, following in zip(self.changes, self.changes[1:], strict=False):
            assert change.new == following.old

    def teardown(self) -> None:
        for call in self.calls:
            call.end(None)
        assert self.policy.stats().in_flight == 0
        self.patch.undo()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


# --- a server under load -------------------------------------------------------------------------


def test_a_limit_prevents_the_collapse_of_an_overloaded_server() -> None:
    """Without it, at twice the capacity, the server works only for clients that have given up."""
    assert overloaded(None, 2.0, 16).share < 0.05
    with_limit = overloaded(AdaptiveLimit(0.3), 2.0, 60)
    assert with_limit.share >= 0.95
    assert with_limit.mean <= 0.2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("load", "share"), [(1.2, 0.94), (2.0, 0.97), (4.0, 0.97)])
def test_goodput_stays_near_capacity_at_any_load(load: float, share: float, seed: int) -> None:
    """At 1.2 a perfect limit of 15 would reach 0.956: by chance, few clients come now and then, and workers idle."""
    result = overloaded(AdaptiveLimit(0.3), load, 240, seed=seed)
    assert result.share >= share
    assert result.mean <= 0.2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_a_server_that_becomes_slower_keeps_its_goodput(seed: int) -> None:
    """At a load of 0.9 every call takes twice as long for two minutes, for which a lower limit is no remedy."""
    shifted = overloaded(AdaptiveLimit(0.3), 0.9, 480, lambda now: 2.0 if 120 <= now < 240 else 1.0, seed=seed)
    assert shifted.share >= 0.7


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("load", [1.3, 2.0])
def test_several_processes_share_an_overloaded_server_without_a_long_queue(load: float, seed: int) -> None:
    """At first their limits add up to twice the workers."""
    limits = [AdaptiveLimit(0.3, initial=4) for _ in range(5)]
    result = overloaded(limits[0], load, 240, seed=seed, others=limits[1:])
    assert result.share >= 0.94
    assert result.mean <= 0.25


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_limit_that_cannot_make_calls_quicker_does_not_starve_the_server(seed: int) -> None:
    """A tenth of its calls takes more than 0.23 s even if there is only one at a time."""
    assert overloaded(AdaptiveLimit(0.15), 0.9, 240, seed=seed).share >= 0.75


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_seeking_stays_near_the_number_of_workers(seed: int) -> None:
    """There are ten. Gradient algorithms drift up under a modest overload: Netflix/concurrency-limits, issue 134."""
    result = overloaded(AdaptiveLimit(Seeking()), 1.5, 300, seed=seed)
    assert result.share > 0.8
    assert max(result.limits[100:]) < 30
