"""AdaptiveLimit: permits as a bulkhead's, with a limit that learns; and what that does to a server under load."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import anyio
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from resilience import (
    AdaptiveLimit,
    Context,
    DeadlineExceeded,
    LimitExceeded,
    Policy,
    Sample,
    Seeking,
    Timeout,
    TimeoutExceeded,
    events,
)
from resilience.clock import clock as process_clock
from resilience.policies.adaptive_limit import LimitStats
from resilience.testing import virtual_time
from tests.conftest import Boom, FakeClock, Script, World
from tests.contention.beside import beside
from tests.policies.simulated import overloaded
from tests.policies.test_machines import Call


class Recording:
    """An algorithm that answers what it was given, and remembers what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[float, Sample]] = []
        self.resets = 0

    def update(self, limit: float, sample: Sample) -> Any:
        self.asked.append((limit, sample))
        return self.answers.pop(0) if self.answers else limit

    def reset(self) -> None:
        self.resets += 1


async def takes(world: World, clock: FakeClock, limit: Policy[Any], seconds: float, ending: Any = "fine") -> Any:
    """Make a call that takes so long."""

    async def fn(ctx: Context) -> Any:
        clock.advance(seconds)
        if isinstance(ending, BaseException):
            raise ending
        return ending

    return await world.attempt(limit, fn)


def counts(limit: AdaptiveLimit) -> tuple[int, int, int, int]:
    it = limit.stats()
    return it.limit, it.in_flight, it.queued, it.rejected


# --- permits -------------------------------------------------------------------------------------


async def test_at_most_so_many_run_at_once(world: World) -> None:
    """One more is turned away, and told the limit."""
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


async def test_a_few_may_wait(world: World) -> None:
    """For a permit, or until `max_wait`, the deadline or a timeout."""
    limit = AdaptiveLimit(60, initial=1, queue=1, max_wait=0.01)
    fine = Script("fine").function()
    async with beside(world) as group:
        call = await group.inside(limit)
        assert isinstance(await world.attempt(limit, fine), LimitExceeded)
        assert isinstance(await world.attempt(limit, fine, Context(timeout=0.001)), DeadlineExceeded)
        assert isinstance(await world.attempt(Timeout(0.001).wrap(limit), fine), TimeoutExceeded)
        call.let_go()
        assert await call.result() == "fine"
    assert await world.attempt(limit, fine) == "fine"
    assert counts(limit)[:3] == (1, 0, 0)


async def test_a_cancelled_call_gives_its_permit_back_and_counts_for_nothing(tasks_world: World) -> None:
    import anyio

    algorithm = Recording()
    limit = AdaptiveLimit(algorithm, initial=1, min_samples=1)
    with anyio.move_on_after(0.001):
        await limit.aexecute(lambda ctx: anyio.sleep(10))
    assert counts(limit) == (1, 0, 0, 0)
    assert algorithm.asked == []


async def test_a_block_that_is_cancelled_where_it_waits_or_runs_leaves_nothing_behind(tasks_world: World) -> None:
    import anyio

    limit = AdaptiveLimit(60, initial=1, queue=1)
    async with limit.slot():
        with anyio.move_on_after(0.001):
            async with limit.slot():
                pytest.fail("there is no permit")
        assert counts(limit) == (1, 1, 0, 0)
    with anyio.move_on_after(0.001):
        async with limit.slot():
            await anyio.sleep(10)
    assert counts(limit) == (1, 0, 0, 0)


async def test_a_block_holds_a_permit_and_is_timed(world: World, clock: FakeClock) -> None:
    algorithm = Recording(3)
    limit = AdaptiveLimit(algorithm, initial=1, min_samples=3, on=Boom)

    async def block(seconds: float, error: BaseException | None = None) -> None:
        if world.blocking:
            with limit.slot():
                assert counts(limit)[1] == 1
                clock.advance(seconds)
                if error is not None:
                    raise error
        else:
            async with limit.slot():
                assert counts(limit)[1] == 1
                clock.advance(seconds)
                if error is not None:
                    raise error

    await block(1.0)
    for error in (Boom(), KeyError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            await block(2.0, error)
    await block(3.0)
    assert [sample.latency for _, sample in algorithm.asked] == [3.0]
    assert algorithm.asked[0][1].dropped
    assert counts(limit) == (3, 0, 0, 0)


def test_a_block_is_refused_as_a_call_is() -> None:
    limit = AdaptiveLimit(60, initial=1)
    slot = limit.slot()
    with slot:
        with pytest.raises(LimitExceeded), limit.slot():
            pass
        with pytest.raises(RuntimeError, match="in use"), slot:
            pass
    assert counts(limit) == (1, 0, 0, 1)


# --- what is learned -----------------------------------------------------------------------------


async def test_it_rises_while_calls_are_quick_and_falls_while_they_are_slow(world: World, clock: FakeClock) -> None:
    """By one where at least half of it was used; to nine tenths."""
    changes: list[events.LimitChanged] = []
    limit = AdaptiveLimit(0.3, initial=2, min_samples=5, on_change=changes.append, name="search")
    for _ in range(5):
        await takes(world, clock, limit, 0.1)
    assert limit.stats().limit == 3
    clock.advance(1)
    for _ in range(5):
        await takes(world, clock, limit, 0.5)
    assert limit.stats().limit == 2
    assert [(it.policy, it.old, it.new, it.reason) for it in changes] == [
        ("search", 2, 3, "room"),
        ("search", 3, 2, "slow"),
    ]


async def test_the_first_look_is_when_enough_have_ended_and_the_next_after_the_window(
    world: World, clock: FakeClock
) -> None:
    """Samples gather until both hold; twice the quickest call, if that is longer."""
    algorithm = Recording()
    limit = AdaptiveLimit(algorithm, min_samples=3, window=10)
    looks = []
    for number, seconds in enumerate([1, 1, 1, 2, 2, 2, 2, 2, 8, 8, 8, 8]):
        await takes(world, clock, limit, seconds)
        if len(algorithm.asked) > len(looks):
            looks.append(number)
    assert looks == [2, 7, 10]


async def test_what_a_sample_says(world: World, clock: FakeClock) -> None:
    algorithm = Recording()
    limit = AdaptiveLimit(algorithm, initial=7, min_samples=10, on=Boom)
    for seconds in (1, 2, 3, 4, 5, 6, 7, 8):
        await takes(world, clock, limit, seconds)
    await takes(world, clock, limit, 100, KeyError())  # says nothing
    await takes(world, clock, limit, 9, Boom())
    await takes(world, clock, limit, 10)
    assert algorithm.asked == [(7.0, Sample(10.0, 1, False, True, pytest.approx(9 / 154), 10.0))]


@pytest.mark.parametrize("queue", [0, 1])
async def test_it_is_full_where_a_call_was_turned_away_or_waits(world: World, queue: int) -> None:
    algorithm = Recording()
    limit = AdaptiveLimit(algorithm, initial=1, min_samples=1, queue=queue)
    async with beside(world) as group:
        call = await group.inside(limit)
        if queue:
            second = await group.queued(limit)
        else:
            await world.attempt(limit, Script("fine").function())
        call.let_go()
        assert await call.result() == "fine"
        if queue:
            second.let_go()
            assert await second.result() == "fine"
    assert [sample.full for _, sample in algorithm.asked][:1] == [True]


async def test_a_call_of_an_earlier_limit_counts_in_no_comparison(world: World, clock: FakeClock) -> None:
    """It ends under another one than it began under."""
    algorithm = Recording(21)
    limit = AdaptiveLimit(algorithm, min_samples=1, headroom=100)
    async with beside(world) as group:
        call = await group.inside(limit)
        await takes(world, clock, limit, 0.1)
        assert limit.stats().limit == 21
        clock.advance(50)
        call.let_go()
        await call.result()
    assert len(algorithm.asked) == 1
    await takes(world, clock, limit, 0.2)
    assert algorithm.asked[1][1].latency == pytest.approx(0.2)
    assert algorithm.asked[1][1].latency_of_all > 50


@pytest.mark.parametrize(
    ("answers", "limits"),
    [
        ([1000], [10]),
        ([0], [2]),
        ([-5.0], [2]),
        ([7.9, 7.2], [7, 7]),
        ([(6, "said so")], [6]),
        ([float("inf")], [10]),
        ([5], [5]),
    ],
)
async def test_the_limit_keeps_its_bounds(
    world: World, clock: FakeClock, answers: list[Any], limits: list[int]
) -> None:
    """The limit in use is the floor of what was learned."""
    limit = AdaptiveLimit(Recording(*answers), initial=5, least=2, most=10, min_samples=1, headroom=100)
    seen = []
    for _ in limits:
        await takes(world, clock, limit, 1)
        clock.advance(10)
        seen.append(limit.stats().limit)
    assert seen == limits


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_calls_that_wait_begin_as_soon_as_the_limit_is_higher(backend: str) -> None:
    """Not one after another, as permits come back."""
    limit = AdaptiveLimit(Recording(3), initial=1, queue=5, min_samples=1)
    began: list[float] = []

    async def fn() -> None:
        began.append(anyio.current_time())
        await anyio.sleep(1)

    async def main() -> None:
        start = anyio.current_time()
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(limit.call, fn)
        assert [round(it - start, 3) for it in began] == [0, 1, 1, 1]

    with virtual_time():
        anyio.run(main, backend=backend)


async def test_one_that_is_far_beyond_what_is_used_comes_down_by_one(world: World, clock: FakeClock) -> None:
    """Until it is `headroom` times that."""
    limit = AdaptiveLimit(60, initial=8, min_samples=1, headroom=5)
    seen = []
    for _ in range(6):
        await takes(world, clock, limit, 1)
        clock.advance(10)
        seen.append(limit.stats().limit)
    assert seen == [7, 6, 5, 5, 5, 5]


@pytest.mark.parametrize(("wrong", "error"), [(float("nan"), ValueError), ("5", TypeError), (None, TypeError)])
async def test_an_algorithm_that_answers_rubbish_is_told(
    world: World, clock: FakeClock, wrong: Any, error: type[Exception]
) -> None:
    """No permit is lost, and the next look is made."""
    algorithm = Recording(wrong, 6)
    limit = AdaptiveLimit(algorithm, initial=5, min_samples=1)
    told = await takes(world, clock, limit, 1)
    assert type(told) is error
    assert "update(limit, sample)" in str(told)
    clock.advance(10)
    assert await takes(world, clock, limit, 1) == "fine"
    assert counts(limit) == (5, 0, 0, 0)  # 6 is more than five times what ran


async def test_it_can_be_told_to_forget(world: World, clock: FakeClock, heard: list[Any]) -> None:
    """Calls that run keep their permits, and nothing is announced."""
    algorithm = Recording(2)
    limit = AdaptiveLimit(algorithm, initial=3, min_samples=1)
    await takes(world, clock, limit, 1)
    assert limit.stats().limit == 2
    before = algorithm.resets
    async with beside(world) as group:
        call = await group.inside(limit)
        limit.reset()
        assert counts(limit) == (3, 1, 0, 0)
        call.let_go()
        assert await call.result() == "fine"
    assert algorithm.resets == before + 1
    assert [(it.old, it.new, it.reason) for it in heard if isinstance(it, events.LimitChanged)] == [(3, 2, "Recording")]


async def test_an_algorithm_that_cannot_be_reset_leaves_no_waiter_behind(world: World, clock: FakeClock) -> None:
    """The limit is the initial one all the same, and whom it has room for is woken."""
    algorithm = Recording(1)
    limit = AdaptiveLimit(algorithm, initial=2, queue=1, min_samples=1)
    await takes(world, clock, limit, 1)
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


def test_what_was_learned_before_a_reset_is_dropped() -> None:
    """Also where the algorithm was being asked."""

    class Resetting(Recording):
        def update(self, limit: float, sample: Sample) -> Any:
            it.reset()
            return 9

    it = AdaptiveLimit(Resetting(), initial=3, min_samples=1, headroom=100)
    it.call(int)
    assert it.stats().limit == 3


def test_a_thread_that_comes_to_ask_after_another_one_does_not_ask_again() -> None:
    """That one has taken the calls which were noted."""
    algorithm = Recording()
    limit = AdaptiveLimit(algorithm, initial=3, min_samples=2, window=1e-9)
    limit.call(int)
    limit.call(int)
    limit._evaluate(limit._period, process_clock.now(), Context())
    assert len(algorithm.asked) == 1


def test_one_look_at_a_time() -> None:
    """What ends while the algorithm is asked does not ask as well."""

    class Nesting(Recording):
        def update(self, limit: float, sample: Sample) -> Any:
            self.asked.append((limit, sample))
            if len(self.asked) < 5:
                it.call(int)
            return limit

    algorithm = Nesting()
    it = AdaptiveLimit(algorithm, initial=3, min_samples=1, window=1e-9)
    it.call(int)
    assert len(algorithm.asked) == 1


def test_a_call_that_is_refused_while_the_algorithm_is_asked_counts_for_the_next_limit(clock: FakeClock) -> None:
    def fails() -> None:
        raise Boom

    class Nesting(Recording):
        def update(self, limit: float, sample: Sample) -> Any:
            if not self.asked:
                with pytest.raises(Boom):
                    it.call(fails)
            return super().update(limit, sample)

    algorithm = Nesting(4)
    it = AdaptiveLimit(algorithm, initial=3, min_samples=1, window=1e-9, on=Boom, headroom=100)
    clock.advance(1)
    it.call(int)
    assert it.stats().limit == 4
    clock.advance(1)
    it.call(int)
    assert [sample.dropped for _, sample in algorithm.asked] == [False, True]


# --- shadow mode, and what is told ---------------------------------------------------------------


@pytest.mark.parametrize("queue", [0, 5])
async def test_one_that_only_observes_refuses_nothing_and_learns(
    world: World, clock: FakeClock, heard: list[Any], queue: int
) -> None:
    """A call without a permit counts for nothing; but that there was one says that the limit is full."""
    algorithm = Recording()
    limit = AdaptiveLimit(algorithm, initial=1, min_samples=1, queue=queue, observe_only=True)
    async with beside(world) as group:
        call = await group.inside(limit)
        assert await takes(world, clock, limit, 5) == "fine"
        if world.blocking:
            with limit.slot():
                assert counts(limit) == (1, 1, 0, 2)
        else:
            async with limit.slot():
                assert counts(limit) == (1, 1, 0, 2)
        assert algorithm.asked == []
        call.let_go()
        assert await call.result() == "fine"
    assert [sample.full for _, sample in algorithm.asked] == [True]
    told = [(it.reason, it.shadow) for it in heard if isinstance(it, events.CallRejected)]
    assert told == [("LimitExceeded", True)] * 2
    assert counts(limit) == (1, 0, 0, 2)


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (
            AdaptiveLimit(0.3, initial=5, name="search"),
            "search: 1 to 200 at once, 5 now, lower while a tenth of the calls takes longer than 0.3 s; no queue",
        ),
        (
            AdaptiveLimit(Seeking(), queue=3, max_wait=2, observe_only=True),
            "AdaptiveLimit: 1 to 200 at once, 20 now, by Seeking(dither=0.15, gain=0.25, target=0.5); 3 may wait, "
            "at most 2 s; only observes",
        ),
    ],
)
def test_it_is_described(limit: AdaptiveLimit, told: str) -> None:
    assert limit.describe() == told


def test_it_is_shown() -> None:
    assert repr(AdaptiveLimit(2)) == "AdaptiveLimit(slower_than=2.0)"
    assert AdaptiveLimit(2).stats() == LimitStats(20, 0, 0, 0)


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({"initial": 5, "least": 6}, "initial must be at least 6"),
        ({"initial": 5, "most": 4}, "initial must be at most 4"),
        ({"least": 5, "most": 4}, "most must be at least 5"),
    ],
)
def test_bounds_that_contradict_one_another_are_refused(numbers: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        AdaptiveLimit(0.3, **numbers)


# --- many at once --------------------------------------------------------------------------------


def test_no_permit_is_lost_and_none_too_many_given_by_threads_at_once() -> None:
    """While the limit goes up and down at each look; refusals are counted exactly."""
    rng = random.Random(1)

    class Jumping(Recording):
        def update(self, limit: float, sample: Sample) -> Any:
            return rng.randint(1, 6)

    limit = AdaptiveLimit(Jumping(), initial=3, most=6, min_samples=5, window=1e-6, headroom=100)
    inside = most = refused = 0
    lock = threading.Lock()

    def fn() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        with lock:
            inside -= 1

    def work() -> None:
        nonlocal refused
        own = 0
        for _ in range(1500):
            try:
                limit.call(fn)
            except LimitExceeded:
                own += 1
        with lock:
            refused += own

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most <= 6
    assert (limit.stats().in_flight, limit.stats().rejected) == (0, refused)


class InUse(RuleBasedStateMachine):
    """Calls that come and go in any order under a limit that an algorithm moves as it likes."""

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
    def will_answer(self, limit: int) -> None:
        self.algorithm.answers = [limit]

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
    def the_books_agree(self) -> None:
        stats = self.policy.stats()
        assert stats.in_flight == len(self.calls)
        assert stats.rejected == self.rejected
        assert 1 <= stats.limit <= 4
        assert stats.limit == (self.changes[-1].new if self.changes else 2)
        for one, other in zip(self.changes, self.changes[1:], strict=False):
            assert one.new == other.old

    def teardown(self) -> None:
        for call in self.calls:
            call.end(None)
        assert self.policy.stats().in_flight == 0
        self.patch.undo()


TestInUse = InUse.TestCase
TestInUse.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


# --- a server under load -------------------------------------------------------------------------


def test_overload_without_a_limit_is_a_collapse_and_with_one_is_none() -> None:
    """At twice the capacity the server works only on what nobody waits for any more."""
    assert overloaded(None, 2.0, 30).share < 0.05
    with_limit = overloaded(AdaptiveLimit(0.3), 2.0, 40)
    assert with_limit.share >= 0.95
    assert with_limit.mean <= 0.2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("load", [1.2, 2.0, 4.0])
def test_it_holds_at_any_load(load: float, seed: int) -> None:
    result = overloaded(AdaptiveLimit(0.3), load, 120, seed=seed)
    assert result.share >= 0.95
    assert result.mean <= 0.2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_a_server_that_has_become_slow_is_not_starved(seed: int) -> None:
    """For two minutes everything takes twice as long, at a load of 0.9: fewer calls at once do not help."""
    shifted = overloaded(AdaptiveLimit(0.3), 0.9, 480, lambda now: 2.0 if 120 <= now < 240 else 1.0, seed=seed)
    assert shifted.share >= 0.7


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_seeking_finds_the_number_of_workers_and_does_not_drift(seed: int) -> None:
    """There are ten. (Gradient algorithms drift up under a modest overload: Netflix/concurrency-limits, issue 134.)"""
    result = overloaded(AdaptiveLimit(Seeking()), 1.5, 300, seed=seed)
    assert result.share > 0.8
    assert max(result.limits[100:]) < 30
