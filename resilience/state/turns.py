"""Turns: when each waiter may begin under one or more rates, in the order of arrival.

A place in the queue is not a reservation. Each waiter sleeps, on its own timer, until the instant at which the rates
allow it and all waiters before it. So waiters normally do not wake one another. A waiter that gives up leaves the
queue, and every waiter behind it may start earlier; the first of the queue is woken if its timer is now too late.

Timers of the same instant fire in any order. So a waiter that may begin lets the first of the queue begin before it, if
that may begin, too, and is then woken in its turn. But it waits only milliseconds for waiters that do not come, because
their event loop is stalled: they are late. Until one of them comes, the others count as if they were not in the queue.
One that has come late is waited for longer, so that a slow event loop gets its turns, too.

The instants come from a plan: the rates as they will be after all waiters have begun at their instants. A newcomer is
added at its end. Any change of the order or the rates discards the plan; it is rebuilt when it is next needed.

Decisions are made under one short lock; the caller of a method then wakes the waiter, which calls into event loops. The
lock is reentrant, and each step leaves a consistent state: the garbage collector may finalize an abandoned coroutine in
the middle of any step, and the coroutine then leaves the queue in the same thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from typing import Final, Generic, TypeAlias, TypeVar, final

from resilience.state.rates import EPSILON, Meter, Quota, Spread, Window

W = TypeVar("W")

#: The units that a call uses of each rate; the last item is for the quota.
Units: TypeAlias = tuple[float, ...]
#: The rates that must all allow a call; the last one is the quota.
Rates: TypeAlias = tuple[Meter, ...]

#: A waiter whose timer is too late by at most this many seconds is not woken.
WAKE_TOLERANCE: Final = 1e-3

#: For how many seconds, at first, a turn that may begin waits for the first one to begin; doubled with each wait, so
#: that a thousand turns of the same instant, which begin one after another, do not all look again all the time. After a
#: wait in vain, the next one is half as long: if the limit was raised, each turn of a stalled loop has to be woken.
ORDER_PATIENCE: Final = 0.02
SHORTEST_PATIENCE: Final = 0.001
#: A turn that came late is waited for twice as long the next time, but at most for so many seconds. Otherwise those of
#: a quick event loop would overtake it for ever if the timers of its own are always late by more than `ORDER_PATIENCE`.
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
        *("costs", "due", "gave_way_at", "grace", "has_begun", "instant", "is_late", "joined", "latest", "patience"),
        *("waiter", "waits"),
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
        self.is_late: bool = False  # whether another turn has waited in vain for this one to come
        self.grace: float = 0.0  # for how many seconds, at least, others wait for it to come
        self.gave_way_at: float = -inf  # when it last began to wait for the first turn to begin
        self.patience: float = ORDER_PATIENCE


#: The turn whose caller must be woken, and its waiter at that time; None if there is none.
Woken: TypeAlias = tuple[Turn[W], W] | None


@final
class Turns(Generic[W]):
    """The state machine. Methods that can make a turn begin earlier return the turn to wake."""

    __slots__ = (
        *("_has_fast_path", "_lock", "_plan", "_plan_ends", "_plan_error", "_queue"),
        *("_rates", "bucket", "fast_path", "quota", "rates", "rejected"),
    )

    def __init__(self, rates: tuple[Spread | Window, ...], quota: Quota) -> None:
        self._lock = threading.RLock()
        #: Holds a token while `bucket` alone decides on a call. A caller that removes it may charge the bucket without
        #: the lock, and then puts it back. Removed by `del`, which is not a call, so that no interrupt can lose it.
        self.fast_path: list[None] = []
        self._has_fast_path = False
        self.rejected: int = 0
        self.replace(rates, quota)
        self._queue: list[Turn[W]] = []  # unlike a deque, it may be changed in the middle of a loop over it
        self._plan: Rates | None = None
        self._plan_ends = -inf
        self._plan_error = 0.0  # by how many seconds the plan may be too early

    def take(self, costs: Units, now: float) -> bool:
        """Take a turn if the rates allow one now and no caller waits."""
        with self._lock:
            self._close_fast_path_locked()
            if self._queue and self._first_locked() is not None:
                return False
            if _instant(self._rates, costs, now) > now + EPSILON:
                return False
            _charge(self._rates, costs, now)
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
            return self._next_locked(costs, now) - now

    def join(self, turn: Turn[W], now: float) -> None:
        """Add a turn to the end of the queue and set `waits`; refuse it if its instant comes too late."""
        with self._lock:
            turn.joined = now
            turn.instant = turn.due = at = self._next_locked(turn.costs, now)
            if at > turn.latest:
                self.rejected += 1
                return
            self._close_fast_path_locked()
            turn.waits = True
            self._queue.append(turn)
            if self._plan is not None:
                _charge(self._plan, turn.costs, at)
                self._plan_ends = at

    def go(self, turn: Turn[W], now: float) -> Woken[W]:
        """Begin if the instant has come; leave if it would come too late; otherwise keep waiting, until `turn.due`."""
        with self._lock:
            if not turn.waits:
                return None
            first = self._first_to_come_locked(turn, now)
            if first is not None and now < turn.latest and self._gives_way_locked(turn, first, now):
                turn.gave_way_at, turn.due = now, min(now + max(turn.patience, first.grace), turn.latest)
                turn.patience *= 2
                return self._first_to_wake_locked(now)
            self._update_instant_locked(turn, first, now)
            if turn.instant > turn.latest:
                self.rejected += 1
                return self._leave_locked(turn, now, self._held_until_locked(now))
            if turn.instant > now + EPSILON:
                turn.due = turn.instant
                return self._first_to_wake_locked(now)
            # Turns before it do not count: each is charged when it begins, and one that never begins costs nothing.
            at = self._earliest_locked(turn)
            late = [rate.take(cost, at, now) for rate, cost in zip(self._rates, turn.costs, strict=True)]
            turn.has_begun = True
            plan, woken = self._plan, self._leave_locked(turn, now)
            self._plan_error += max(late)
            if self._plan_error <= WAKE_TOLERANCE + PLAN_TOLERANCE * (self._plan_ends - now):
                self._plan = plan
            return woken

    def leave(self, turn: Turn[W], now: float) -> Woken[W]:
        """Leave the queue. A no-op if the turn does not wait."""
        with self._lock:
            held_until = self._held_until_locked(now)
            return self._leave_locked(turn, now, held_until) if turn.waits else None

    def first(self) -> Turn[W] | None:
        """Return the first turn of the queue, even if it is late."""
        with self._lock:
            return self._queue[0] if self._queue else None

    def change(self, change: Callable[[], None], now: float) -> Woken[W]:
        """Apply a change of the rates under the lock."""
        with self._lock:
            self._close_fast_path_locked()
            held_until = self._held_until_locked(now)
            change()
            self._plan = None
            return self._first_to_wake_locked(now, held_until)

    def replace(self, rates: tuple[Spread | Window, ...], quota: Quota) -> None:
        """Replace the rates, within a `change`."""
        self.rates: tuple[Spread | Window, ...] = rates
        self.quota: Quota = quota
        self._rates: Rates = (*rates, quota)
        only = rates[0] if len(rates) == 1 else None
        #: The only rate, if it is a bucket for calls of one cost.
        self.bucket: Spread | None = only if isinstance(only, Spread) and only.has_fixed_cost else None

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

    def _next_locked(self, costs: Units, now: float) -> float:
        """Return the instant at which a newcomer could begin."""
        if self._first_locked() is None:
            self._plan = None  # it has no turns left, and does not count later uses without the queue
            return _instant(self._rates, costs, now)
        return _instant(self._plan_locked(), costs, max(now, self._plan_ends))

    def _earliest_locked(self, turn: Turn[W]) -> float:
        """Return the instant at which a turn could begin if there were no turns before it."""
        return _instant(self._rates, turn.costs, turn.joined)

    def _gives_way_locked(self, turn: Turn[W], first: Turn[W], now: float) -> bool:
        """Whether a turn may begin, but the first one as well."""
        if first is turn:
            return False
        return max(self._earliest_locked(first), self._earliest_locked(turn)) <= now + EPSILON

    def _first_locked(self) -> Turn[W] | None:
        """Return the first turn that counts."""
        return next(filter(self._counts_locked, self._queue), None)

    def _counts_locked(self, turn: Turn[W]) -> bool:
        """Whether the turns behind this one wait for it: it is not late, and will not be refused."""
        return not turn.is_late and self._earliest_locked(turn) <= turn.latest

    def _first_to_come_locked(self, turn: Turn[W], now: float) -> Turn[W] | None:
        """Return the first turn that counts, after marking those as late for which this one has waited in vain."""
        if turn.is_late:  # its event loop runs again, and others of it are about to come
            turn.grace = min(2 * (now - turn.due), LONGEST_GRACE)
            self._plan = None
            for it in self._queue:
                it.is_late = False
        for it in filter(self._counts_locked, self._queue):
            if it is turn or it.due > turn.gave_way_at or now < turn.gave_way_at + it.grace:
                return it
            self.quota.closed_until = max(self.quota.closed_until, min(now, self._earliest_locked(it)))
            self._plan, it.is_late = None, True
            waited = turn.due - turn.gave_way_at
            turn.patience = max(SHORTEST_PATIENCE, min(waited / 2, ORDER_PATIENCE))
        return None

    def _plan_locked(self) -> Rates:
        """Return the plan; if there is none, make it, and set the instant of each turn."""
        if self._plan is None:
            self._plan_error = 0.0
            rates, at = tuple(rate.copy() for rate in self._rates), -inf
            for turn in list(self._queue):
                turn.instant = _instant(rates, turn.costs, max(at, turn.joined))
                if turn.instant <= turn.latest and not turn.is_late:  # otherwise others do not wait for it
                    at = turn.instant
                    _charge(rates, turn.costs, at)
            self._plan, self._plan_ends = rates, at
        return self._plan

    def _update_instant_locked(self, turn: Turn[W], first: Turn[W] | None, now: float) -> None:
        """Set the instant at which this turn may begin."""
        if first is turn:
            turn.instant = self._earliest_locked(turn)
            return
        self._plan_locked()
        if turn.instant <= now + EPSILON:  # due by the plan, which may be too early
            self._plan = None
            self._plan_locked()

    def _leave_locked(self, turn: Turn[W], now: float, held_until: float = -inf) -> Woken[W]:
        turn.waits = False  # no call since the check of `waits`, nor until it has left: it leaves exactly once
        self._queue.remove(turn)
        self._plan = None
        return self._first_to_wake_locked(now, held_until)

    def _held_until_locked(self, now: float) -> float:
        """Return until when the first turn has held up the others: until now, or its instant if it is late."""
        first = self._first_locked()
        return -inf if first is None else min(now, self._earliest_locked(first))

    def _first_to_wake_locked(self, now: float, held_until: float = -inf) -> Woken[W]:
        """Return the first turn if its caller would sleep too long.

        It was held up until `held_until`, so it is not late, and makes up for nothing before that.
        """
        self.quota.closed_until = max(self.quota.closed_until, held_until)
        first = self._first_locked()
        if first is None or max(now, self._earliest_locked(first)) >= first.due - WAKE_TOLERANCE:
            return None
        first.due = now  # so that it is woken only once
        return first, first.waiter


def _instant(rates: Rates, costs: Units, at: float) -> float:
    """Return the earliest instant from `at` on at which all rates allow the costs."""
    for rate, cost in zip(rates, costs, strict=True):
        instant = rate.ready(cost, at)
        if instant > at:
            at = instant
    return at


def _charge(rates: Rates, costs: Units, at: float) -> None:
    for rate, cost in zip(rates, costs, strict=True):
        rate.take(cost, at, at)
