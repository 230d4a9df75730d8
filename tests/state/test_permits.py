"""Permits, against a queue that a child could keep: every order of arriving, leaving, releasing and resizing.

Here each step is made whole before the next one begins; `test_permits_steps.py` cuts them to pieces.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resilience.state.permits import Permits, Ticket, TicketState


class Crowd:
    """Callers with numbers who do what callers of `Permits` do, and somebody who keeps the queue by hand."""

    def __init__(self, limit: int, queue: int) -> None:
        self.permits: Permits[int] = Permits(limit, queue)
        self.names = itertools.count()
        self.tickets: dict[int, Ticket[int]] = {}
        self.woken: list[int] = []
        # By hand:
        self.limit, self.queue = limit, queue
        self.inside: list[int] = []
        self.waiting: deque[int] = deque()
        self.called: list[int] = []
        self.rejected = 0

    # --- what callers do ---

    def arrive(self) -> None:
        name = next(self.names)
        if self.permits.take():
            self.woken.append(name)
        else:
            self.tickets[name] = ticket = Ticket(name)
            self.wake(self.permits.join(ticket))
        self.waiting.append(name)
        self.serve()
        if name in self.waiting and len(self.waiting) > self.queue:
            self.waiting.remove(name)
            self.rejected += 1
            assert self.tickets[name].state is TicketState.GONE

    def release(self, name: int) -> None:
        self.inside.remove(name)
        self.wake(self.permits.give_back())
        self.serve()

    def time_out(self, name: int) -> None:
        """The wait is over; whoever has been granted the permit meanwhile keeps it."""
        left = self.permits.leave(self.tickets[name])
        assert left is (name in self.waiting)
        if left:
            self.waiting.remove(name)
            self.rejected += 1
            self.serve()

    def cancel(self, name: int) -> None:
        """Leave the queue, or pass on the permit that was granted and never used."""
        self.wake(self.permits.abandon(self.tickets[name]))
        if name in self.waiting:
            self.waiting.remove(name)
        else:
            self.inside.remove(name)
        self.serve()

    def resize(self, limit: int) -> None:
        self.limit = limit
        self.wake(self.permits.resize(limit))
        self.serve()

    # --- the books ---

    def wake(self, granted: list[Ticket[int]] | None) -> None:
        for ticket in granted or []:
            assert ticket.state is TicketState.GRANTED
            self.woken.append(ticket.waiter)

    def serve(self) -> None:
        while self.waiting and len(self.inside) < self.limit:
            name = self.waiting.popleft()
            self.inside.append(name)
            self.called.append(name)

    def check(self) -> None:
        counts = self.permits.counts()
        assert self.woken == self.called  # who, and in what order
        assert tuple(counts) == (self.limit, len(self.inside), len(self.waiting), self.rejected)
        assert all(self.tickets[name].state is TicketState.WAITING for name in self.waiting)

    @property
    def by_ticket(self) -> list[int]:
        """Those inside who have waited, and might be cancelled before they know that they are."""
        return [name for name in self.inside if name in self.tickets]


# --- every order, up to a depth --------------------------------------------------------------

Step = Callable[[Crowd], object]


def at(names: Callable[[Crowd], list[int] | deque[int]], index: int, do: Callable[[Crowd, int], None]) -> Step:
    def step(crowd: Crowd) -> None:
        there = names(crowd)
        if there and (index == 0 or len(there) > 1):  # the last one is the first one where there is only one
            do(crowd, there[index])

    return step


STEPS: dict[str, Step] = {
    "arrive": Crowd.arrive,
    "release first": at(lambda crowd: crowd.inside, 0, Crowd.release),
    "release last": at(lambda crowd: crowd.inside, -1, Crowd.release),
    "first times out": at(lambda crowd: crowd.waiting, 0, Crowd.time_out),
    "last is cancelled": at(lambda crowd: crowd.waiting, -1, Crowd.cancel),
    "granted one times out": at(lambda crowd: crowd.by_ticket, -1, Crowd.time_out),
    "granted one is cancelled": at(lambda crowd: crowd.by_ticket, -1, Crowd.cancel),
    "resize to 1": lambda crowd: crowd.resize(1),
    "resize to 3": lambda crowd: crowd.resize(3),
}


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "queue", "arrived"), [(1, 2, 2), (2, 1, 4), (3, 2, 5), (1, 0, 1)])
def test_every_order_of_five_steps(limit: int, queue: int, arrived: int) -> None:
    """After each of 59,049 orders of five steps, from several beginnings: the right ones, in the right order."""
    for order in itertools.product(STEPS, repeat=5):
        crowd = Crowd(limit, queue)
        for _ in range(arrived):
            crowd.arrive()
        for name in order:
            STEPS[name](crowd)
        crowd.check()


# --- long random orders ----------------------------------------------------------------------


class CrowdForLong(RuleBasedStateMachine):
    """The same steps in long random orders, looked at after each of them."""

    @initialize(limit=st.integers(1, 6), queue=st.integers(0, 5))
    def build(self, limit: int, queue: int) -> None:
        self.crowd = Crowd(limit, queue)

    @rule(times=st.integers(1, 3))
    def arrive(self, times: int) -> None:
        for _ in range(times):
            self.crowd.arrive()

    @precondition(lambda self: self.crowd.inside)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.crowd.release(data.draw(st.sampled_from(self.crowd.inside)))

    @precondition(lambda self: self.crowd.waiting)
    @rule(data=st.data())
    def time_out(self, data: st.DataObject) -> None:
        self.crowd.time_out(data.draw(st.sampled_from(self.crowd.waiting)))

    @precondition(lambda self: self.crowd.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.crowd.cancel(data.draw(st.sampled_from(self.crowd.waiting)))

    @precondition(lambda self: self.crowd.by_ticket)
    @rule(data=st.data())
    def cancel_after_the_grant(self, data: st.DataObject) -> None:
        self.crowd.cancel(data.draw(st.sampled_from(self.crowd.by_ticket)))

    @rule(limit=st.integers(1, 9))
    def resize(self, limit: int) -> None:
        self.crowd.resize(limit)

    @invariant()
    def the_books_agree(self) -> None:
        if hasattr(self, "crowd"):
            self.crowd.check()


TestCrowdForLong = CrowdForLong.TestCase
TestCrowdForLong.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_permits_that_are_made_in_batches_are_never_too_many(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large limit is made piece by piece; however small the pieces, every order comes out the same."""
    monkeypatch.setattr(Permits, "BATCH", batch, raising=False)
    for order in itertools.product(STEPS, repeat=4):
        crowd = Crowd(4, 2)
        for name in ("arrive", "arrive", "arrive", *order):
            STEPS[name](crowd)
        crowd.check()


# --- one rule each, in a few words -----------------------------------------------------------

W = TypeVar("W")


def queued(permits: Permits[W], waiter: W) -> Ticket[W]:
    """The ticket of somebody who has joined the queue."""
    ticket = Ticket(waiter)
    permits.join(ticket)
    return ticket


def test_abandoning_twice_gives_back_once() -> None:
    """A ticket is good for one permit."""
    permits: Permits[str] = Permits(1, 5)
    assert permits.take()
    first = queued(permits, "first")
    permits.give_back()
    permits.abandon(first)
    permits.abandon(first)
    assert permits.counts()[:3] == (1, 0, 0)
    assert permits.take()
    assert not permits.take()


class Interrupting(deque[Any]):
    """A deque in the middle of whose `pop`, or `popleft`, the same thread does something else, once."""

    def __init__(self, items: Iterable[Any], how: str, finalizer: Callable[[], object]) -> None:
        super().__init__(items)
        self._how = how
        self._finalizers = [finalizer]

    def pop(self) -> Any:  # type: ignore[override]
        return self._taken("pop", super().pop())

    def popleft(self) -> Any:
        return self._taken("popleft", super().popleft())

    def _taken(self, how: str, item: Any) -> Any:
        if how == self._how and self._finalizers:
            self._finalizers.pop()()
        return item


@pytest.mark.parametrize("how", ["pop", "popleft"])
@pytest.mark.parametrize("behind", [0, 1, 2])
def test_who_is_thrown_away_in_the_moment_of_the_grant_is_not_granted(how: str, behind: int) -> None:
    """Garbage is collected between any two lines: the permit goes to the next in the queue, or lies free again."""
    permits: Permits[int] = Permits(1, 5)
    assert permits.take()
    tickets = [queued(permits, number) for number in range(1 + behind)]
    it: Any = permits
    if how == "pop":
        it.free = Interrupting(permits.free, how, lambda: permits.abandon(tickets[0]))
    else:
        it._waiting = Interrupting(permits._waiting, how, lambda: permits.abandon(tickets[0]))
    assert permits.give_back() == tickets[1:2]
    assert permits.counts() == (1, min(behind, 1), max(behind - 1, 0), 0)
    assert tickets[0].state is TicketState.GONE
    if not behind:
        assert permits.take()
        assert permits.counts() == (1, 1, 0, 0)


@pytest.mark.parametrize("limit", [10**9, 10**18])
def test_a_huge_limit_costs_nothing_until_it_is_used(limit: int) -> None:
    """Permits are not laid out in advance: a thousand million of them are made in no time, and counted exactly."""
    permits: Permits[int] = Permits(limit, 0)
    for number in range(5000):
        if not permits.take():
            ticket = Ticket(number)
            assert permits.join(ticket) == [ticket]
    assert permits.counts() == (limit, 5000, 0, 0)
    for _ in range(5000):
        permits.give_back()
    assert permits.counts() == (limit, 0, 0, 0)
    permits.resize(2)
    assert permits.take()
    assert permits.take()
    assert not permits.take()


def test_the_first_in_a_full_queue_is_told_and_nobody_else() -> None:
    """None while there is room, and where there is no queue at all."""
    permits: Permits[str] = Permits(1, 2)
    assert permits.take()
    first = queued(permits, "first")
    assert permits.first_if_full() is None
    queued(permits, "second")
    assert permits.first_if_full() is first
    permits.drop(first)
    assert permits.first_if_full() is None
    nobody: Permits[str] = Permits(1, 0)
    assert nobody.take()
    assert nobody.first_if_full() is None


def test_where_nobody_may_wait_a_permit_is_taken_or_the_caller_is_counted_as_refused() -> None:
    """It looks again under the lock: for a permit that came back meanwhile, and for those still to be made."""
    permits: Permits[str] = Permits(Permits.BATCH + 1, 0)
    for _ in range(Permits.BATCH):
        assert permits.take()
    assert not permits.take()  # the rest is not made yet
    assert permits.take_or_refuse()
    assert not permits.take_or_refuse()
    assert permits.counts() == (Permits.BATCH + 1, Permits.BATCH + 1, 0, 1)
    permits.give_back()
    assert permits.take_or_refuse()
    assert permits.counts() == (Permits.BATCH + 1, Permits.BATCH + 1, 0, 1)


class ComesBack(list[None]):
    """The free permits, of which there are none; and after somebody has looked, one comes back from another thread."""

    def __bool__(self) -> bool:
        if len(self):
            return True
        self.append(None)
        return False


def test_a_permit_beyond_a_smaller_limit_is_not_granted_to_who_waits() -> None:
    """It comes back just after those that lay free have been withdrawn: the limit of now holds, not that of before."""
    permits: Permits[str] = Permits(2, queue=1)
    assert permits.take()
    assert permits.take()
    ticket = Ticket("waiting")
    assert not permits.join(ticket)
    permits.free = ComesBack()
    assert permits.resize(1) == []
    permits.free = list(permits.free)
    assert permits.settle() == []
    assert permits.counts() == (1, 1, 1, 0)
    assert permits.give_back() == [ticket]
    assert permits.counts() == (1, 1, 0, 0)


def test_a_permit_beyond_a_smaller_limit_is_not_taken_where_nobody_may_wait() -> None:
    """It comes back while a newcomer looks for one."""
    permits: Permits[str] = Permits(2, queue=0)
    assert permits.take()
    assert permits.take()
    permits.resize(1)
    permits.free = ComesBack()
    assert not permits.take_or_refuse()
    permits.free = list(permits.free)
    permits.settle()
    assert permits.counts() == (1, 1, 0, 1)


def test_where_nobody_may_wait_what_came_back_beyond_the_limit_does_not_stand_in_the_way() -> None:
    """Two came back where one may be out: one is withdrawn, the other one taken."""
    permits: Permits[str] = Permits(2, 0)
    assert permits.take()
    assert permits.take()
    permits.resize(1)
    permits.free.extend([None, None])  # given back, not settled yet
    assert permits.take_or_refuse()
    assert not permits.take_or_refuse()
    assert permits.counts() == (1, 1, 0, 1)


class Beaten:
    """A lock that this thread gets only after another one has had it, and done something."""

    def __init__(self, permits: Permits[Any], do: Callable[[], object]) -> None:
        self._lock, self._do = permits._lock, [do]

    def __enter__(self) -> None:
        if self._do:
            self._do.pop()()
        self._lock.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._lock.__exit__(*exc)


def test_the_first_ever_to_wait_is_not_overlooked_by_who_gives_back_meanwhile() -> None:
    """The queue is made when it is first needed: who waits for the lock has seen none yet."""
    permits: Permits[str] = Permits(2, queue=1)
    assert permits.take()
    assert permits.take()
    permits.resize(1)
    ticket = Ticket("first")
    it: Any = permits
    it._lock = Beaten(permits, lambda: permits.join(ticket))
    assert not permits.give_back()
    assert permits.counts()[1:3] == (1, 1)
    assert permits.give_back() == [ticket]


class Taken(list[None]):
    """Free permits; and after somebody has looked, another thread, which saw no flag yet, takes them."""

    def __bool__(self) -> bool:
        there = len(self) > 0
        self.clear()
        return there


def test_a_permit_that_is_taken_between_look_and_grant_is_granted_when_it_comes_back() -> None:
    """The one who took it gives it back, and finds the flag up then."""
    permits: Permits[str] = Permits(1, queue=1)
    assert permits.take()
    ticket = queued(permits, "waiting")
    permits.free = Taken([None])
    assert permits.settle() == []
    permits.free = []
    assert permits.counts()[1:3] == (1, 1)
    assert permits.give_back() == [ticket]


def test_a_permit_that_is_taken_before_it_is_withdrawn_is_withdrawn_when_it_comes_back() -> None:
    permits: Permits[str] = Permits(2, queue=1)
    assert permits.take()
    assert permits.take()
    permits.free = Taken([None])
    permits.resize(1)
    permits.free = []
    assert permits.counts()[:2] == (1, 2)
    permits.give_back()
    assert permits.counts()[:2] == (1, 1)
