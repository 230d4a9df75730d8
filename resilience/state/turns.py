"""Turns: when each waiter may begin under one or more rates, in the order of arrival.

A place in the queue is not a reservation. Each waiter sleeps, on its own timer, until the instant at which the rates
allow it and all waiters before it. So waiters normally do not wake one another, and a waiter whose event loop is
stalled delays no other: after its instant, later waiters go first. A waiter that gives up leaves the queue, and every
waiter behind it may start earlier; the first of the queue is woken if its timer is now too late.

Timers of the same instant fire in any order. So a waiter that may begin lets the first of the queue begin before it, if
that may begin, too, and is then woken in its turn; but it waits only milliseconds for one that does not come, and no
other turn waits for that one again.

The instants come from a plan: the rates as they will be after all waiters have begun at their instants. A newcomer is
added at its end. Any change of the order or the rates discards the plan; it is rebuilt when it is next needed.

Decisions are made under one short lock; the caller of a method then wakes the waiter, which calls into event loops. The
lock is reentrant, and each step leaves a consistent state: the garbage collector may finalize an abandoned coroutine in
the middle of any step, and the coroutine then leaves the queue in the same thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
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

#: For how many seconds, at first, a turn that may begin waits for the first one to begin; doubled with each wait.
ORDER_PATIENCE: Final = 0.02

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
        *("costs", "due", "has_begun", "instant", "is_late", "joined", "latest", "let_begin", "patience"),
        *("waiter", "waits"),
    )

    def __init__(self, costs: Units, latest: float, waiter: W) -> None:
        self.costs: Units = costs
        self.latest: float = latest
        self.waiter: W = waiter
        self.joined: float
        self.instant: float  # when the call may begin, as last computed
        self.due: float  # until when the caller sleeps; minus infinity once it has been woken
        self.waits: bool = False
        self.has_begun: bool = False
        self.let_begin: Turn[W] | None = None  # the first turn that it has waited for
        self.is_late: bool = False  # whether a turn has waited for this one in vain
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
        self._queue: deque[Turn[W]] = deque()
        self._plan: Rates | None = None
        self._plan_error = 0.0  # by how many seconds the plan may be too early

    def take(self, costs: Units, now: float) -> bool:
        """Take a turn if the rates allow one now and no caller waits."""
        with self._lock:
            self._close_fast_path_locked()
            if self._queue or _instant(self._rates, costs, now) > now + EPSILON:
                return False
            _charge(self._rates, costs, now)
            if self.bucket is not None and self.quota.has_expired(now):
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
            is_first = self._queue[0] is turn
            if not is_first and self._lets_first_begin_locked(turn, now):
                return None
            self._update_instant_locked(turn, is_first, now)
            if turn.instant > turn.latest:
                self.rejected += 1
                return self._leave_locked(turn, self._held_until_locked(now))
            if turn.instant > now + EPSILON:
                turn.due = turn.instant
                return None
            # Turns before it do not count: each is charged when it begins, and one that never begins costs nothing.
            at = self._earliest_locked(turn)
            late = [rate.take(cost, at, now) for rate, cost in zip(self._rates, turn.costs, strict=True)]
            turn.has_begun = True
            plan = self._plan if is_first else None
            woken = self._leave_locked(turn, -inf)
            self._plan_error += max(late)
            if self._queue and self._plan_error <= WAKE_TOLERANCE + PLAN_TOLERANCE * (self._plan_ends - now):
                self._plan = plan
            return woken

    def leave(self, turn: Turn[W], now: float) -> Woken[W]:
        """Leave the queue. A no-op if the turn does not wait."""
        with self._lock:
            held_until = self._held_until_locked(now)
            return self._leave_locked(turn, held_until) if turn.waits else None

    def first(self) -> Turn[W] | None:
        """Return the first turn of the queue."""
        with self._lock:
            return self._queue[0] if self._queue else None

    def change(self, change: Callable[[], None], now: float) -> Woken[W]:
        """Apply a change of the rates under the lock."""
        with self._lock:
            self._close_fast_path_locked()
            held_until = self._held_until_locked(now)
            change()
            self._plan = None
            return self._first_if_late_locked(held_until)

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
        if not self._queue:
            return _instant(self._rates, costs, now)
        return _instant(self._plan_locked(), costs, max(now, self._plan_ends))

    def _earliest_locked(self, turn: Turn[W]) -> float:
        """Return the instant at which a turn could begin if there were no turns before it."""
        return _instant(self._rates, turn.costs, turn.joined)

    def _plan_locked(self) -> Rates:
        """Return the plan; if there is none, make it, and set the instant of each turn."""
        if self._plan is None:
            self._plan_error = 0.0
            self._plan, self._plan_ends = self._look_ahead_locked(None)
        return self._plan

    def _look_ahead_locked(self, last: Turn[W] | None) -> tuple[Rates, float]:
        """Set the instant of each waiting turn, up to `last`: when it may begin after all turns before it.

        Return the rates as they will be after all of them have begun, and the instant of the last one.
        """
        rates, at = tuple(rate.copy() for rate in self._rates), -inf
        for turn in list(self._queue):
            turn.instant = _instant(rates, turn.costs, max(at, turn.joined))
            if turn is last:
                break
            if turn.instant <= turn.latest:  # otherwise it will leave the queue
                at = turn.instant
                _charge(rates, turn.costs, at)
        return rates, at

    def _lets_first_begin_locked(self, turn: Turn[W], now: float) -> bool:
        """Whether this turn now waits for the first one, which may begin as well, unless one has done so in vain."""
        first = self._queue[0]
        if turn.let_begin is first:
            first.is_late = True
        if first.is_late or self._earliest_locked(first) > now + EPSILON:
            return False
        turn.let_begin = first
        turn.due = min(now + turn.patience, turn.latest)
        turn.patience *= 2
        return now < turn.latest

    def _update_instant_locked(self, turn: Turn[W], is_first: bool, now: float) -> None:
        """Set the instant at which this turn may begin."""
        if is_first:
            turn.instant = self._earliest_locked(turn)
            return
        self._plan_locked()
        if turn.instant <= now + EPSILON:  # due by the plan: compute it exactly. Turns before it are late, so few
            self._look_ahead_locked(turn)

    def _leave_locked(self, turn: Turn[W], held_until: float) -> Woken[W]:
        turn.waits = False  # no call since the check of `waits`, so it leaves only once
        turn.let_begin = None  # no chain: a turn -> the one that it let begin -> the one before that
        with contextlib.suppress(ValueError):
            self._queue.remove(turn)
        self._plan = None
        return self._first_if_late_locked(held_until)

    def _held_until_locked(self, now: float) -> float:
        """Return until when the first turn has held up the others: until now, or its instant if it is late."""
        return min(now, self._earliest_locked(self._queue[0])) if self._queue else -inf

    def _first_if_late_locked(self, held_until: float) -> Woken[W]:
        """Return the first turn of the queue if its caller would sleep too long.

        It was held up until `held_until`, so it is not late, and makes up for nothing before that.
        """
        self.quota.closed_until = max(self.quota.closed_until, held_until)
        if not self._queue:
            return None
        first = self._queue[0]
        if self._earliest_locked(first) >= first.due - WAKE_TOLERANCE:
            return None
        first.due = -inf  # so that it is woken only once
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
