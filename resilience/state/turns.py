"""Turns: who may begin when, under one or more rates, in the order of arrival.

A place in the queue is no reservation. Each who waits sleeps, by a timer of its own, until the instant at which the
rates allow all that is before it and itself. So in the common course of things no waiter has to be woken by another,
and one whose event loop stands still holds up no other: what comes after its instant goes ahead of it. Who gives up
leaves its place. All behind it come earlier by that, and the first of the queue is woken where its timer is later.

The instants come from a plan: the rates as they will be when all who wait have begun at theirs. A newcomer is put at
its end. What changes the order or the rates throws it away, and who asks next makes it anew.

Decided under one short lock; waking, which calls into event loops, is left to the caller of the method. The lock is
reentrant, and each step leaves things in order: a coroutine that is thrown away may be finalized in the middle of any
of them, by the same thread, and leave its place.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Final, Generic, TypeAlias, TypeVar, final

from resilience.state.rates import SAME, Meter, Quota, Spread, Window

W = TypeVar("W")

#: Of each rate, so many units; the last are those of the quota.
Units: TypeAlias = tuple[float, ...]
#: What a call has to be allowed by.
Rates: TypeAlias = tuple[Meter, ...]

#: A waiter that sleeps longer than it has to by no more than this is not woken for it, in seconds.
LATE: Final = 1e-3

#: The share of a newcomer's wait by which the plan may be wrong, because windows are charged when a call begins.
WRONG: Final = 0.01


@final
class Turn(Generic[W]):
    """A place in the queue.

    :param costs: what the call costs.
    :param latest: the last instant at which its holder still wants to begin.
    :param waiter: wakes its holder.
    """

    __slots__ = ("costs", "due", "has_begun", "instant", "joined", "latest", "waiter", "waits")

    def __init__(self, costs: Units, latest: float, waiter: W) -> None:
        self.costs: Units = costs
        self.latest: float = latest
        self.waiter: W = waiter
        self.joined: float
        self.instant: float  # when it may begin, as far as is known
        self.due: float  # until when its holder sleeps; minus infinity where it has been woken
        self.waits: bool = False
        self.has_begun: bool = False


#: Who is to be woken: the turn, and its waiter at the time.
Woken: TypeAlias = tuple[Turn[W], W] | None


@final
class Turns(Generic[W]):
    """The machine. Methods that can bring a turn forward return who is to be woken for it."""

    __slots__ = (
        *("_is_quick", "_lock", "_only", "_plan", "_plan_ends", "_queue", "_rates", "_wrong"),
        *("bucket", "quick", "quota", "rates", "rejected"),
    )

    def __init__(self, rates: tuple[Spread | Window, ...], quota: Quota) -> None:
        self._lock = threading.RLock()
        #: Holds something while `bucket` alone decides on a call. Who takes that out (by `del`, which is no call, so no
        #: interrupt comes between) may charge the bucket without the lock, and then puts it back. See `_close_locked`.
        self.quick: list[None] = []
        self._is_quick = False
        self._only: Spread | Window | None = None  # the only rate, while none waits, and there is no quota
        self.rejected: int = 0
        self.replace(rates, quota)
        self._queue: deque[Turn[W]] = deque()
        self._plan: Rates | None = None
        self._plan_ends = -inf
        self._wrong = 0.0  # by how many seconds the plan may be too early

    def take(self, costs: Units, now: float) -> bool:
        """Take a turn, if there is one now and none waits."""
        with self._lock:
            return self._take_locked(costs, now)

    def _take_locked(self, costs: Units, now: float) -> bool:
        if self._only is not None and not self._is_quick:
            return self._only.take_now(costs[0], now)
        self._close_locked()
        if self._queue or _instant(self._rates, costs, now) > now + SAME:
            return False
        for rate, cost in zip(self._rates, costs, strict=True):
            rate.take(cost, now, now)
        if len(self.rates) == 1 and self.quota.is_over(now):
            self._only = self.rates[0]
            if self.bucket.is_usual:
                self._is_quick = True
                self.quick.append(None)
        return True

    def refuse(self, costs: Units, now: float) -> float:
        """Count a refusal; return the seconds after which there would be a turn."""
        with self._lock:
            self.rejected += 1
            return self.seconds(costs, now)

    def seconds(self, costs: Units, now: float) -> float:
        """Return the seconds that a newcomer would wait."""
        with self._lock:
            return self._next_locked(costs, now) - now

    def join(self, turn: Turn[W], now: float) -> None:
        """Take a place at the end of the queue, if its instant comes in time. It waits then."""
        with self._lock:
            turn.joined = now
            turn.instant = turn.due = at = self._next_locked(turn.costs, now)
            if at > turn.latest:
                self.rejected += 1
                return
            self._close_locked()
            turn.waits = True
            self._queue.append(turn)
            if self._plan is not None:
                _charge(self._plan, turn.costs, at)
                self._plan_ends = at

    def go(self, turn: Turn[W], now: float) -> Woken[W]:
        """Begin, if its instant has come, or leave where that is too late; else it waits on, until `turn.due`."""
        with self._lock:
            if not turn.waits:
                return None
            is_first = self._queue[0] is turn
            self._time_locked(turn, is_first, now)
            if turn.instant > turn.latest:
                self.rejected += 1
                return self._leave_locked(turn)
            if turn.instant > now + SAME:
                turn.due = turn.instant
                return None
            # As if none were before it: those will be charged in their turn, and no turn is lost where they never come.
            at = _instant(self._rates, turn.costs, turn.joined)
            late = [rate.take(cost, at, now) for rate, cost in zip(self._rates, turn.costs, strict=True)]
            turn.has_begun = True
            plan = self._plan if is_first else None
            woken = self._leave_locked(turn)
            self._wrong += max(late)
            if self._queue and self._wrong <= LATE + WRONG * (self._plan_ends - now):
                self._plan = plan
            return woken

    def leave(self, turn: Turn[W]) -> Woken[W]:
        """Give up a place; nothing, where it is given up already."""
        with self._lock:
            return self._leave_locked(turn) if turn.waits else None

    def first(self) -> Turn[W] | None:
        """Return the first of the queue."""
        with self._lock:
            return self._queue[0] if self._queue else None

    def change(self, change: Callable[[], None]) -> Woken[W]:
        """Change the rates."""
        with self._lock:
            self._close_locked()
            change()
            self._plan = None
            return self._first_if_late_locked()

    def replace(self, rates: tuple[Spread | Window, ...], quota: Quota) -> None:
        """Put other rates in the place of these, within a `change`."""
        self.rates: tuple[Spread | Window, ...] = rates
        self.quota: Quota = quota
        self._rates: Rates = (*rates, quota)
        #: The only rate, if that is a bucket; otherwise one that is never used.
        self.bucket: Spread = rates[0] if len(rates) == 1 and isinstance(rates[0], Spread) else Spread(1.0, 1.0, 1.0)

    def correct(self, units: list[float], began: float, now: float) -> None:
        """Charge or give back, within a `change`, what a call that began at `began` used beside its costs."""
        for rate, more in zip(self.rates, units, strict=True):
            if more:
                rate.correct(more, began, now)

    def counts(self, costs: Units, now: float) -> tuple[int, float, int]:
        """Return how many wait, how many seconds a newcomer would wait, and how many were refused."""
        with self._lock:
            return len(self._queue), self.seconds(costs, now), self.rejected

    # --- inside ---

    def _close_locked(self) -> None:
        """Let all calls come to the lock; a thread that is just charging the bucket without it is done after this."""
        self._only = None
        while self._is_quick:
            try:
                del self.quick[-1]
                self._is_quick = False
            except IndexError:  # pragma: no cover (never under the GIL, which no thread gives up in those few lines)
                continue

    def _next_locked(self, costs: Units, now: float) -> float:
        """Return the instant of a newcomer."""
        if not self._queue:
            return _instant(self._rates, costs, now)
        plan = self._plan or self._make_plan_locked()
        return _instant(plan, costs, max(now, self._plan_ends))

    def _make_plan_locked(self) -> Rates:
        """Make the plan for all who wait."""
        self._wrong = 0.0
        self._plan, self._plan_ends = plan, _ = self._look_ahead_locked(None)
        return plan

    def _look_ahead_locked(self, last: Turn[W] | None) -> tuple[Rates, float]:
        """Note for each who waits, up to `last`, the instant at which it may begin after those before it.

        Returned are the rates as they will be when all have begun, and the last instant.
        """
        rates, at = tuple(rate.copy() for rate in self._rates), -inf
        for turn in list(self._queue):
            turn.instant = _instant(rates, turn.costs, max(at, turn.joined))
            if turn is last:
                break
            if turn.instant <= turn.latest:  # else it will leave
                at = turn.instant
                _charge(rates, turn.costs, at)
        return rates, at

    def _time_locked(self, turn: Turn[W], is_first: bool, now: float) -> None:
        """Find out when this turn may begin."""
        if is_first:
            turn.instant = _instant(self._rates, turn.costs, turn.joined)
            return
        if self._plan is None:
            self._make_plan_locked()
        if turn.instant <= now + SAME:  # as planned; now exactly. Those before it are late, and so they are few
            self._look_ahead_locked(turn)

    def _leave_locked(self, turn: Turn[W]) -> Woken[W]:
        turn.waits = False  # nothing is called in between: it leaves once
        with contextlib.suppress(ValueError):
            self._queue.remove(turn)
        self._plan = None
        return self._first_if_late_locked()

    def _first_if_late_locked(self) -> Woken[W]:
        """Return the first of the queue, where it sleeps for longer than it has to."""
        if not self._queue:
            return None
        first = self._queue[0]
        if _instant(self._rates, first.costs, first.joined) >= first.due - LATE:
            return None
        first.due = -inf  # it is woken once
        return first, first.waiter


def _instant(rates: Rates, costs: Units, at: float) -> float:
    """Return the latest of the instants that each rate names, and of `at`."""
    for rate, cost in zip(rates, costs, strict=True):
        instant = rate.ready(cost, at)
        if instant > at:
            at = instant
    return at


def _charge(rates: Rates, costs: Units, at: float) -> None:
    for rate, cost in zip(rates, costs, strict=True):
        rate.take(cost, at, at)
