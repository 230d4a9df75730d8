"""Turns: when each waiter may begin under one or more rates, in the order of arrival.

A place in the queue is not a reservation: a turn is charged when it begins. Each waiter sleeps, on its own timer, until
the instant at which the rates allow it and all waiters before it. If one gives up, those behind it may begin earlier;
only the first one is then woken, if its timer is now too late. Otherwise, no waiter wakes another one.

Three rules say who begins. They matter if waiters do not come when they are due.

1. Only the first one begins, because timers of the same instant fire in any order. Another one that is due gives way to
   the first, and is woken in its turn.
2. If it has given way in vain for milliseconds, the first one is late: its event loop is stalled. The others go on
   without it, as if it were not in the queue. When it comes, all late ones count again, because those of the same loop
   are about to come.
3. It may be late again the next time, and every time. So then, the others go on without it as well, but leave it its
   units, for twice as long as it was late before. It may come at any time, and begins at once.

The instants come from a plan: the rates as they will be after all waiters have begun at their instants. A newcomer is
added at its end. Any change of the order or the rates discards the plan; it is rebuilt when it is next needed. The plan
only tells when to look, or to refuse: whether the first one may begin is always computed from the rates.

Decisions are made under one short lock; the caller of a method then wakes the waiter, which calls into event loops. The
lock is reentrant, and each step leaves a consistent state: the garbage collector may finalize an abandoned coroutine in
the middle of any step, and the coroutine then leaves the queue in the same thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from typing import Final, Generic, TypeAlias, TypeVar, final

from resilience.state.rates import EPSILON, Quota, SlidingLog, Spread, Together, Units

W = TypeVar("W")

#: A waiter whose timer is too late by at most this many seconds is not woken.
WAKE_TOLERANCE: Final = 1e-3

#: For how many seconds, at first, a turn gives way; doubled each time, so that a thousand turns of the same instant,
#: which begin one after another, do not all look again all the time.
ORDER_PATIENCE: Final = 0.02
#: The units of a turn that comes late are kept for at most so many seconds.
LONGEST_GRACE: Final = 1.0

#: The share of a newcomer's wait by which the plan may be too early, because windows are charged when a call begins.
PLAN_TOLERANCE: Final = 0.01


@final
class Turn(Generic[W]):
    """A place in the queue.

    :param costs: the units that the call uses.
    :param latest: the last instant at which the call may still begin.
    :param waiter: wakes the caller.
    """

    __slots__ = (
        "costs",
        "due",
        "gave_way_at",
        "grace",
        "has_begun",
        "instant",
        "is_late",
        "joined",
        "latest",
        "patience",
        "waiter",
        "waits",
    )

    def __init__(self, costs: Units, latest: float, waiter: W) -> None:
        self.costs: Units = costs
        self.latest: float = latest
        self.waiter: W = waiter
        self.joined: float
        self.instant: float  # when the call may begin, as last computed
        self.due: float  # until when the caller sleeps
        self.waits: bool = False
        self.has_begun: bool = False
        self.patience: float = ORDER_PATIENCE  # for how many seconds it gives way
        self.gave_way_at: float = -inf  # when it last gave way
        self.is_late: bool = False  # whether another turn has given way to it in vain
        self.grace: float = 0.0  # for how many seconds its units are kept while it is late

    def woken(self, now: float) -> tuple[Turn[W], W]:
        """Note that the caller is woken, so that this happens once; return the waiter at this time with it."""
        self.due = now
        self.gave_way_at = -inf  # not in vain: it comes before its time, perhaps before the one to which it gave way
        return self, self.waiter


#: The turns whose callers must be woken, and their waiters at that time.
Woken: TypeAlias = list[tuple[Turn[W], W]]


@final
class Turns(Generic[W]):
    """The state machine. Methods that can make turns begin earlier return the turns to wake."""

    __slots__ = (
        "_all",
        "_has_fast_path",
        "_lock",
        "_plan",
        "_plan_error",
        "_queue",
        "bucket",
        "fast_path",
        "quota",
        "rates",
        "rejected",
    )

    def __init__(self, rates: tuple[Spread | SlidingLog, ...], quota: Quota) -> None:
        self._lock = threading.RLock()
        #: Holds a token while `bucket` alone decides on a call. A caller that removes it may charge the bucket without
        #: the lock, and then puts it back. Removed by `del`, which is not a call, so that no interrupt can lose it.
        self.fast_path: list[None] = []
        self._has_fast_path = False
        self.rejected: int = 0
        self._queue: list[Turn[W]] = []  # unlike a deque, it may be changed in the middle of a loop over it
        self.replace(rates, quota)
        self._plan: Together | None = None
        self._plan_error = 0.0  # by how many seconds the plan may be too early

    def take(self, costs: Units, now: float) -> bool:
        """Take a turn if the rates allow one now and no caller waits."""
        with self._lock:
            self._close_fast_path_locked()
            rates = self._all
            if self._queue:
                first, rates, _ = self._first_locked(now)
                if first is not None:
                    return False
            if rates.ready(costs, now) > now + EPSILON:
                return False
            self._all.take(costs, now, now)
            if not self._queue and self.bucket is not None and self.quota.has_expired(now):
                self._has_fast_path = True
                self.fast_path.append(None)
            return True

    def refuse(self, costs: Units, now: float) -> float:
        """Count a refusal; return the seconds until the next turn."""
        with self._lock:
            self.rejected += 1
            return self.seconds(costs, now)

    def seconds(self, costs: Units, now: float) -> float:
        """Return how many seconds a newcomer would wait."""
        with self._lock:
            return self._next_locked(costs, now)[0] - now

    def join(self, turn: Turn[W], now: float) -> None:
        """Add a turn to the end of the queue and set `waits`; refuse it if its instant comes too late."""
        with self._lock:
            turn.joined = now
            turn.instant, until = self._next_locked(turn.costs, now)
            turn.due = min(turn.instant, until)
            if turn.instant > turn.latest:
                self.rejected += 1
                return
            self._close_fast_path_locked()
            turn.waits = True
            self._queue.append(turn)
            if self._plan is not None:
                self._plan.take_in_order(turn.costs, turn.instant, now)

    def go(self, turn: Turn[W], now: float) -> Woken[W]:
        """Begin if the instant has come; leave if it would come too late; otherwise keep waiting, until `turn.due`."""
        with self._lock:
            if not turn.waits:
                return []
            if turn.is_late:
                turn.grace, self._plan = min(2 * (now - turn.due), LONGEST_GRACE), None
                for it in self._queue:
                    it.is_late = False
            is_last_look = now >= turn.latest
            if is_last_look:  # it cannot give way: all that should have come milliseconds ago are late
                turn.gave_way_at = max(turn.gave_way_at, now - ORDER_PATIENCE)
            first, rates, until = self._first_locked(now, turn)
            if first is None or first is turn:
                first, turn.instant = turn, rates.ready(turn.costs, turn.joined)
            elif is_last_look:
                self._plan = None  # it may be too early
                self._plan_locked(now)
            elif max(rates.ready(it.costs, it.joined) for it in (first, turn)) <= now + EPSILON:
                return self._give_way_locked(turn, now)
            else:
                self._plan_locked(now)
            if turn.instant > turn.latest:
                self.rejected += 1
                return self.leave(turn, now)
            if turn.instant > now + EPSILON:
                turn.due = min(turn.instant, until)
                return self._to_wake_locked(now)
            if first is turn or is_last_look:
                return self._begin_locked(turn, now)
            return self._give_way_locked(turn, now)

    def leave(self, turn: Turn[W], now: float) -> Woken[W]:
        """Leave the queue. A no-op if the turn does not wait."""
        with self._lock:
            self._hold_locked(self._first_locked(now)[0], now)
            return self._leave_locked(turn, now) if turn.waits else []

    def first(self) -> Turn[W] | None:
        """Return the first turn of the queue, even if it is late."""
        with self._lock:
            return self._queue[0] if self._queue else None

    def waiters(self) -> list[W]:
        """Return the waiters of all turns. One that is woken in vain looks, and waits on."""
        with self._lock:
            return [it.waiter for it in self._queue]

    def change(self, change: Callable[[], None], now: float) -> Woken[W]:
        """Apply a change of the rates under the lock."""
        with self._lock:
            self._close_fast_path_locked()
            self._hold_locked(self._first_locked(now)[0], now)
            try:
                change()
            finally:  # also if a signal handler has raised in the middle
                self._plan = None
            return self._to_wake_locked(now)

    def replace(self, rates: tuple[Spread | SlidingLog, ...], quota: Quota, now: float = -inf) -> None:
        """Replace the rates, within a `change`. Turns that wait make up for nothing before `now`."""
        # Without turns that wait no instant is kept, so that a limiter may be reset before its clock is replaced.
        together = Together((*rates, quota), not_before=now if self._queue else -inf)
        only = rates[0] if len(rates) == 1 else None
        bucket = only if isinstance(only, Spread) and only.has_fixed_cost else None
        # No call from here on, so that an interrupt replaces all of them, or none.
        self.rates: tuple[Spread | SlidingLog, ...] = rates
        self.quota: Quota = quota
        self._all: Together = together
        #: The only rate, if it is a bucket for calls of one cost.
        self.bucket: Spread | None = bucket

    def correct(self, units: list[float], began: float, now: float) -> None:
        """Charge or refund, within a `change`, the units that a call that began at `began` used beyond its costs."""
        for rate, more in zip(self.rates, units, strict=True):
            rate.correct(more, began, now)

    def counts(self, costs: Units, now: float) -> tuple[int, float, int]:
        """Return the number of waiters, the seconds that a newcomer would wait, and the number of refusals."""
        with self._lock:
            return len(self._queue), self.seconds(costs, now), self.rejected

    # --- private ---

    def _close_fast_path_locked(self) -> None:
        """Close the lock-free path, after waiting for a thread that is charging the bucket on it."""
        while self._has_fast_path:
            try:
                del self.fast_path[-1]
                self._has_fast_path = False
            except IndexError:  # pragma: no cover (never under the GIL: no thread switch in those few lines)
                continue

    def _next_locked(self, costs: Units, now: float) -> tuple[float, float]:
        """Return the instant at which a newcomer could begin, and until when units are kept that it might use."""
        first, rates, until = self._first_locked(now)
        if first is None:
            self._plan = None  # it has no turns left, and does not count later uses without the queue
        else:
            rates = self._plan_locked(now)
        return rates.ready(costs, now), until

    def _first_locked(self, now: float, judge: Turn[W] | None = None) -> tuple[Turn[W] | None, Together, float]:
        """Return the first turn that counts; the rates without the units that are kept for late ones, and until when.

        :param judge: a turn that has come. Those to which it has given way in vain are late.
        """
        rates, until = self._all, inf
        for it in self._queue:
            if it is judge:
                return it, rates, until
            if it.is_late and not it.grace:
                continue
            at = rates.ready(it.costs, it.joined)
            if at > it.latest:  # it will be refused
                continue
            if not it.is_late:
                if judge is None or it.due > judge.gave_way_at:
                    return it, rates, until
                self._hold_locked(it, now)
                self._plan, it.is_late, judge.patience = None, True, ORDER_PATIENCE
            if now < it.due + it.grace:
                rates, until = (rates.copy() if rates is self._all else rates), min(until, it.due + it.grace)
                rates.take_in_order(it.costs, at, now)
            elif it.grace:
                self._plan, it.grace = None, 0.0
        return None, rates, until

    def _plan_locked(self, now: float) -> Together:
        """Return the plan; if there is none, make it, and set the instant of each turn."""
        if self._plan is None:
            self._plan_error = 0.0
            plan = self._all.copy()
            for turn in list(self._queue):
                turn.instant = plan.ready(turn.costs, turn.joined)
                if turn.instant <= turn.latest and not (turn.is_late and now >= turn.due + turn.grace):
                    plan.take_in_order(turn.costs, turn.instant, now)
            self._plan = plan
        return self._plan

    def _give_way_locked(self, turn: Turn[W], now: float) -> Woken[W]:
        """Let a turn that is due wait for the first one. If that one sleeps too long, wake all before this turn.

        But not those that come in milliseconds by themselves.
        """
        woken = self._to_wake_locked(now)
        if woken:
            woken += [it.woken(now) for it in self._queue[: self._queue.index(turn)] if it.due > now + ORDER_PATIENCE]
        turn.gave_way_at, turn.due = now, min(now + turn.patience, turn.latest)
        turn.patience *= 2
        return woken

    def _begin_locked(self, turn: Turn[W], now: float) -> Woken[W]:
        # Turns before it do not count: each is charged when it begins, and one that never begins costs nothing.
        at = self._all.ready(turn.costs, turn.joined)
        late = self._all.take_in_order(turn.costs, at, now)
        turn.has_begun = True
        plan, woken = self._plan, self._leave_locked(turn, now)
        self._plan_error += late
        if plan is not None and self._plan_error <= WAKE_TOLERANCE + PLAN_TOLERANCE * (plan.not_before - now):
            self._plan = plan
        return woken

    def _leave_locked(self, turn: Turn[W], now: float) -> Woken[W]:
        turn.waits = False  # no call since the check of `waits`, nor until it has left: it leaves exactly once
        self._queue.remove(turn)
        self._plan = None
        return self._to_wake_locked(now)

    def _hold_locked(self, first: Turn[W] | None, now: float) -> None:
        """Note until when the first turn has held up the others: until now, or its instant if it is late."""
        if first is not None:
            self._all.not_before = min(now, self._all.ready(first.costs, first.joined))

    def _to_wake_locked(self, now: float) -> Woken[W]:
        """Return the first turn if its caller would sleep too long."""
        first, rates, until = self._first_locked(now)
        if first is None:
            return []
        due = max(now, min(rates.ready(first.costs, first.joined), until))
        return [first.woken(now)] if due < first.due - WAKE_TOLERANCE else []
