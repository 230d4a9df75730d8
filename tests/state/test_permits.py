"""Permits, against a simple model: every order of arriving, leaving, releasing and resizing.

Here each step ends before the next one begins; `test_permits_steps.py` interleaves them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

import pytest

from resilience.state.permits import ONE_PERMIT, Permits, Place
from tests.state.taking import Caller, give_back, hand_on, queue_up, take


def woken(permits: Permits[Caller]) -> list[Caller]:
    """Grant free permits, and wake their holders, as the callers of the machine do; return the holders."""
    holders: list[Caller] = []
    hand_on(permits, holders.append)
    return holders


class Crowd:
    """Numbered callers of `Permits`, beside a simple model of its queue."""

    def __init__(self, limit: int, queue: int) -> None:
        self.permits: Permits[Caller] = Permits(limit, queue)
        self.names = map(str, itertools.count())
        self.callers: dict[str, Caller] = {}
        self.woken: list[str] = []
        # The model:
        self.limit, self.queue = limit, queue
        self.inside: list[str] = []
        self.waiting: deque[str] = deque()
        self.called: list[str] = []
        self.rejected = 0

    # --- the steps of callers ---

    def arrive(self) -> None:
        name = next(self.names)
        if take(self.permits):
            self.woken.append(name)
        else:
            self.callers[name] = Caller(name)
            queue_up(self.permits, self.callers[name], self.wake)
        self.waiting.append(name)
        self.serve()
        if name in self.waiting and len(self.waiting) > self.queue:
            self.waiting.remove(name)
            self.rejected += 1
            assert self.callers[name].place is Place.GONE

    def release(self, name: str) -> None:
        self.inside.remove(name)
        give_back(self.permits, self.wake)
        self.serve()

    def time_out(self, name: str) -> None:
        """End the wait; a caller that was just granted a permit keeps it."""
        self.permits.leave(self.callers[name])
        assert self.callers[name].place is (Place.GONE if name in self.waiting else Place.GRANTED)
        if name in self.waiting:
            self.waiting.remove(name)
            self.rejected += 1
            self.serve()

    def cancel(self, name: str) -> None:
        """Leave the queue, or pass on a granted permit that was not used."""
        self.permits.abandon(self.callers[name])
        hand_on(self.permits, self.wake)
        if name in self.waiting:
            self.waiting.remove(name)
        else:
            self.inside.remove(name)
        self.serve()

    def resize(self, limit: int) -> None:
        self.limit = limit
        self.permits.resize(limit)
        hand_on(self.permits, self.wake)
        self.serve()

    # --- the model ---

    def wake(self, caller: Caller) -> None:
        assert caller.place is Place.GRANTED
        self.woken.append(caller.name)

    def serve(self) -> None:
        while self.waiting and len(self.inside) < self.limit:
            name = self.waiting.popleft()
            self.inside.append(name)
            self.called.append(name)

    def check(self) -> None:
        assert self.woken == self.called  # the same callers in the same order
        assert self.permits.counts() == (self.limit, len(self.inside), len(self.waiting), self.rejected)
        assert all(self.callers[name].place is Place.WAITING for name in self.waiting)

    @property
    def after_a_wait(self) -> list[str]:
        """Callers that hold a permit after a wait: they may be cancelled before they learn of the grant."""
        return [name for name in self.inside if name in self.callers]


# --- every order, up to a depth --------------------------------------------------------------

Step = Callable[[Crowd], object]


def at(names: Callable[[Crowd], list[str] | deque[str]], index: int, do: Callable[[Crowd, str], None]) -> Step:
    def step(crowd: Crowd) -> None:
        callers = names(crowd)
        if callers and (index == 0 or len(callers) > 1):  # of a single caller, "last" would repeat "first"
            do(crowd, callers[index])

    return step


STEPS: dict[str, Step] = {
    "arrive": Crowd.arrive,
    "release first": at(lambda crowd: crowd.inside, 0, Crowd.release),
    "release last": at(lambda crowd: crowd.inside, -1, Crowd.release),
    "first times out": at(lambda crowd: crowd.waiting, 0, Crowd.time_out),
    "last is cancelled": at(lambda crowd: crowd.waiting, -1, Crowd.cancel),
    "granted one times out": at(lambda crowd: crowd.after_a_wait, -1, Crowd.time_out),
    "granted one is cancelled": at(lambda crowd: crowd.after_a_wait, -1, Crowd.cancel),
    "resize to 1": lambda crowd: crowd.resize(1),
    "resize to 3": lambda crowd: crowd.resize(3),
}


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "queue", "arrived"), [(1, 2, 2), (2, 1, 4), (3, 2, 5), (1, 0, 1)])
def test_every_order_of_five_steps(limit: int, queue: int, arrived: int) -> None:
    """After each of 59,049 orders of five steps, from several initial states, the permits agree with the model."""
    for order in itertools.product(STEPS, repeat=5):
        crowd = Crowd(limit, queue)
        for _ in range(arrived):
            crowd.arrive()
        for name in order:
            STEPS[name](crowd)
        crowd.check()


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_permits_made_in_batches_never_exceed_the_limit(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permits of a large limit are made in batches; the size of a batch makes no difference."""
    monkeypatch.setattr(Permits, "BATCH", batch, raising=False)
    for order in itertools.product(STEPS, repeat=4):
        crowd = Crowd(4, 2)
        for name in ("arrive", "arrive", "arrive", *order):
            STEPS[name](crowd)
        crowd.check()


# --- single rules ----------------------------------------------------------------------------


def full(limit: int, queue: int) -> Permits[Caller]:
    """Return permits of which all are taken."""
    permits: Permits[Caller] = Permits(limit, queue)
    assert all(take(permits) for _ in range(limit))
    return permits


def queued(permits: Permits[Caller], name: str) -> Caller:
    """Return a caller that has joined the queue."""
    caller = Caller(name)
    permits.join(caller)
    return caller


def released(permits: Permits[Caller]) -> list[Caller]:
    """Release a permit, and return the callers that are woken."""
    holders: list[Caller] = []
    give_back(permits, holders.append)
    return holders


def granted() -> tuple[Permits[Caller], Caller]:
    """Return permits with a limit of 1, and the waiter that was just granted it."""
    permits = full(1, 1)
    waiter = queued(permits, "waiter")
    assert released(permits) == [waiter]
    return permits, waiter


def test_a_caller_that_joins_is_told_of_a_waiter_that_was_not_woken_yet() -> None:
    permits = full(1, 2)
    waiter = queued(permits, "waiter")
    assert not permits.join(Caller("second"))
    permits.free += ONE_PERMIT
    assert permits.grant() is waiter  # and its caller is interrupted before it wakes it
    assert permits.join(Caller("third"))


def test_a_caller_that_joins_may_be_granted_a_permit_before_it_looks() -> None:
    holders: list[Caller] = []

    class Waiting(deque[Caller]):
        def append(self, caller: Caller) -> None:
            super().append(caller)
            give_back(permits, holders.append)  # in another thread

    permits = full(1, 1)
    permits.waiting = Waiting()
    caller = Caller("caller")
    assert not permits.join(caller)
    assert holders == [caller]


def test_a_limit_that_is_set_again_and_again_adds_nothing_to_the_queue() -> None:
    permits = full(3, 1)
    waiter = queued(permits, "waiter")
    for limit in (2, 1, 2, 1):
        permits.resize(limit)
    assert (len(permits.waiting), permits.counts()) == (2, (1, 3, 1, 0))
    assert [released(permits) for _ in range(3)] == [[], [], [waiter]]


def test_callers_that_do_not_fit_are_not_counted_until_they_leave() -> None:
    permits = full(1, 1)
    for name in ("waiter", "second", "third"):
        queued(permits, name)
    assert permits.counts() == (1, 1, 1, 0)


def test_a_permit_is_passed_on_once_unless_it_was_taken_up() -> None:
    permits, waiter = granted()
    for _ in range(2):
        permits.drop(waiter)  # no other waiter: it is free
        assert permits.counts()[1:3] == (0, 0)
    permits, waiter = granted()
    waiter.place = Place.TAKEN
    permits.drop(waiter)
    assert permits.counts()[1] == 1
    released(permits)
    permits.drop(waiter)
    assert permits.counts()[1] == 0


def test_a_waiter_that_two_callers_wake_delays_no_other_one() -> None:
    """Both look for the next one to wake."""
    permits = full(2, 2)
    first, second = queued(permits, "first"), queued(permits, "second")
    permits.free.append(None)
    assert [permits.grant(), permits.grant()] == [first, first]
    permits.free.append(None)
    assert permits.grant(first) is second
    assert permits.grant(first) is None
    assert permits.counts() == (2, 2, 0, 0)


def test_abandoning_a_wait_twice_releases_one_permit() -> None:
    permits, waiter = granted()
    permits.abandon(waiter)
    permits.abandon(waiter)
    assert permits.counts()[:3] == (1, 0, 0)
    assert take(permits)
    assert not take(permits)


@pytest.mark.parametrize("limit", [10**9, 10**18])
def test_a_huge_limit_takes_no_memory_and_is_counted_exactly(limit: int) -> None:
    permits: Permits[Caller] = Permits(limit, 0)
    for number in range(5000):
        if not take(permits):
            caller = queued(permits, str(number))
            assert woken(permits) == [caller]
    assert permits.counts() == (limit, 5000, 0, 0)
    for _ in range(5000):
        assert released(permits) == []
    assert permits.counts() == (limit, 0, 0, 0)
    permits.resize(2)
    assert woken(permits) == []
    assert take(permits)
    assert take(permits)
    assert not take(permits)


def test_a_raised_limit_grants_permits_to_more_waiters_than_are_made_at_a_time() -> None:
    limit = 3 * Permits.BATCH
    permits = full(1, limit)
    waiters = [queued(permits, str(number)) for number in range(limit)]
    permits.resize(limit)
    assert woken(permits) == waiters[:-1]
    assert permits.counts() == (limit, limit, 1, 0)


def test_the_first_waiter_of_a_full_queue_is_returned_to_those_that_have_no_place_in_it() -> None:
    permits = full(1, 1)
    first, second = queued(permits, "first"), queued(permits, "second")
    assert permits.first_if_full(first) is None
    assert permits.first_if_full(second) is first
    permits.resize(1)
    assert permits.first_if_full(second) is first
    permits.drop(first)
    assert permits.first_if_full(second) is None


def test_without_a_queue_make_room_frees_a_permit_or_counts_a_refusal() -> None:
    """It looks again under the lock: for a permit that was just released, and for those that are not made yet."""
    permits: Permits[Caller] = Permits(Permits.BATCH + 1, 0)
    for _ in range(Permits.BATCH):
        assert take(permits)
    assert not take(permits)  # the rest is not made yet
    assert permits.make_room()
    assert take(permits)
    assert not permits.make_room()
    assert permits.counts() == (Permits.BATCH + 1, Permits.BATCH + 1, 0, 1)
    released(permits)
    assert permits.make_room()
    assert take(permits)
    assert permits.counts() == (Permits.BATCH + 1, Permits.BATCH + 1, 0, 1)


class ReleasedAfterLook(list[None]):
    """An empty list of free permits, to which another thread releases one right after a check for free permits."""

    def __bool__(self) -> bool:
        if len(self):
            return True
        self.append(None)
        return False


def test_a_permit_beyond_a_lowered_limit_is_not_taken_without_a_queue() -> None:
    """It is released while a new caller looks for one."""
    permits = full(2, 0)
    permits.resize(1)
    permits.free = ReleasedAfterLook()
    assert not permits.make_room()
    permits.free = list(permits.free)
    assert woken(permits) == []
    assert permits.counts() == (1, 1, 0, 1)


def test_a_released_permit_beyond_a_lowered_limit_does_not_block_a_free_one() -> None:
    """Of two released permits at a limit of one, one is withdrawn and the other taken."""
    permits = full(2, 0)
    permits.resize(1)
    permits.free.extend([None, None])  # released, but nothing was granted yet
    assert permits.make_room()
    assert take(permits)
    assert not permits.make_room()
    assert permits.counts() == (1, 1, 0, 1)


class TakenAfterLook(list[None]):
    """Free permits that another thread, which saw no flag yet, takes right after a check for them."""

    def __bool__(self) -> bool:
        had_permits = len(self) > 0
        self.clear()
        return had_permits


def test_a_permit_that_is_taken_just_before_its_grant_is_replaced_by_a_new_one() -> None:
    """The rest of the permits is not made yet."""
    permits: Permits[Caller] = Permits(Permits.BATCH + 1, 1)
    for _ in range(Permits.BATCH):
        assert take(permits)
    waiter = queued(permits, "waiting")
    permits.free = TakenAfterLook([None])
    assert woken(permits) == [waiter]
    assert permits.counts()[:3] == (Permits.BATCH + 1, Permits.BATCH + 1, 0)
