"""Rates: how many units may be used in how much time, and from which instant on the next use may begin.

    Spread   so many in a period, evenly, and at most `burst` at once after a quiet time: a bucket of tokens, kept as
             the one instant at which it is full again (GCRA, ITU-T I.371)
    Window   so many in any period, exactly: a log of what was used. A use leaves it when it is as old as the period
    Quota    so many until an instant, or none until then: what the other side has said

Each answers `ready(cost, now)`, the instant from which on a use may begin (minus infinity where nothing is against
it, infinity where it never may), and is charged by `take(cost, at, now)`: a use that was to begin at `at`, and begins
now. Instants that have passed are answers too: who was woken late is charged by the schedule, and so the lateness of
timers does not lower the rate.

Nothing here has a lock or a clock. `copy` is for those who look ahead.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, NamedTuple, Protocol, final

#: Instants closer than this are the same one, in seconds: no clock counts finer, and sums of floats are rounded.
SAME: Final = 1e-9


class Meter(Protocol):
    """What a queue asks of a rate."""

    def ready(self, cost: float, now: float) -> float:
        """Return the instant from which on a use may begin."""
        ...

    def take(self, cost: float, at: float, now: float) -> float:
        """Charge a use; return the seconds by which it was charged later than the schedule said."""
        ...

    def copy(self) -> Meter:
        """Make another one in the same state."""
        ...


@final
class Spread:
    """Evenly spread uses, with a burst."""

    __slots__ = ("_busy_since", "_usual", "burst", "full_at", "interval", "is_usual", "room", "step")

    #: The most seconds of lateness that are caught up, unless the burst is longer.
    CATCH_UP: Final = 0.25

    def __init__(self, limit: float, per: float, burst: float, usual: float | None = None) -> None:
        self.is_usual: bool = usual is not None  # each use costs the same, and is never corrected
        self.interval: float = per / limit
        self.burst: float = burst
        self.full_at: float = -inf
        self._usual = usual or 1.0
        self._measure()
        self._busy_since: float = -inf  # when the bucket was last full

    def ready(self, cost: float, now: float) -> float:
        """Return the instant for a use. What is larger than the bucket begins when that is full."""
        return self.full_at + ((cost if cost < self.burst else self.burst) - self.burst) * self.interval

    def take(self, cost: float, at: float, now: float) -> float:
        """Charge a use at the instant at which it was to begin."""
        earliest = now - max(self.CATCH_UP, self.burst * self.interval)
        begins = at if at > earliest else earliest
        if begins >= self.full_at:
            self.full_at = self._busy_since = begins
        self.full_at += cost * self.interval
        return begins - at

    def take_now(self, cost: float, now: float) -> bool:
        """Charge a use if it may begin now: `ready` and `take` in one."""
        if self.ready(cost, now) > now + SAME:
            return False
        self.take(cost, now, now)
        return True

    def correct(self, units: float, began: float, now: float) -> None:
        """Charge more for a use that began at `began`, or give back what it did not use.

        Nothing is given back for one that began before the bucket was last full: it has been refilled since.
        """
        if units > 0:
            self.full_at = max(self.full_at, now) + units * self.interval
        elif began >= self._busy_since and self.full_at > now:
            self.full_at = max(self.full_at + units * self.interval, now)

    def resize(self, limit: float, per: float, now: float) -> None:
        """Change the rate. What was used stays used."""
        old, self.interval = self.interval, per / limit
        self._measure()
        if self.full_at > now:
            self.full_at = now + (self.full_at - now) / old * self.interval

    def _measure(self) -> None:
        #: For a usual use: by how many seconds `full_at` may lie ahead when it begins, and by how many it is moved.
        self.room: float = max(0.0, self.burst - self._usual) * self.interval + SAME
        self.step: float = self._usual * self.interval

    def copy(self) -> Spread:
        """Make another one in the same state."""
        it = Spread(1.0, self.interval, self.burst)
        it.full_at, it._busy_since = self.full_at, self._busy_since
        return it


@final
class Window:
    """Exactly so many in any period."""

    __slots__ = ("_log", "_per", "_step", "_used", "limit")

    #: Uses within this share of the period are kept as one, at the instant of the last: the memory is bounded, and
    #: none leaves too early.
    STEPS: Final = 1024

    def __init__(self, limit: float, per: float) -> None:
        self.limit: float = limit
        self._per = per
        self._step = per / self.STEPS
        self._log: deque[tuple[float, float, float]] = deque()  # (first, last, units)
        self._used = 0.0

    def ready(self, cost: float, now: float) -> float:
        """Return the instant for a use; infinity for one that is larger than the limit.

        Nothing leaves the log here: `now` may lie ahead, and the next one be asked for an earlier instant.
        """
        if cost > self.limit:
            return inf
        rounding = SAME * self.limit
        excess = self._used + cost - self.limit
        if excess > rounding:
            for _, last, units in self._log:  # pragma: no branch (the log holds more than the excess)
                excess -= units
                if excess <= rounding:
                    return last + self._per
        return -inf

    def take_now(self, cost: float, now: float) -> bool:
        """Charge a use if it may begin now: `ready` and `take` in one."""
        log = self._log
        if log:
            first, last, units = log[-1]
            used = self._used + cost
            if used <= self.limit and last <= now < first + self._step and now < log[0][1] + self._per:  # most often
                self._used = used
                log[-1] = (first, now, units + cost)
                return True
        if self.ready(cost, now) > now + SAME:
            return False
        self.take(cost, now, now)
        return True

    def take(self, cost: float, at: float, now: float) -> float:
        """Charge a use when it begins, and forget those that are as old as the period."""
        log = self._log
        while log and log[0][1] + self._per <= now + SAME:
            self._used -= log.popleft()[2]
        if not log:
            self._used = 0.0  # no rounding is kept
        self._used += cost
        if log and now - log[-1][0] < self._step:
            first, last, units = log[-1]
            log[-1] = (first, now if now > last else last, units + cost)
        else:
            log.append((now, now, cost))
        return now - at

    def correct(self, units: float, began: float, now: float) -> None:
        """Charge more for a use that began at `began`, or give back what it did not use, if that has not left yet."""
        if units > 0:
            self.take(units, now, now)
            return
        for place, (first, last, used) in enumerate(self._log):
            if first <= began <= last:
                less = min(used, -units)
                self._log[place] = (first, last, used - less)
                self._used -= less
                return

    def resize(self, limit: float, per: float, now: float) -> None:
        """Change the limit. What was used stays used."""
        self.limit = limit

    def copy(self) -> Window:
        """Make another one in the same state."""
        it = Window(self.limit, self._per)
        it._log, it._used = self._log.copy(), self._used
        return it


class _Told(NamedTuple):
    """So many calls are left until an instant. `named` is the instant that was said first for this window."""

    remaining: float
    until: float
    named: float

    def leaves_less_than(self, other: _Told) -> bool:
        return self.remaining <= other.remaining and self.until >= other.until


@final
class Quota:
    """What the service has reported, and manual pauses. It counts calls, regardless of their cost, and only narrows."""

    __slots__ = ("_told", "closed_until")

    #: Resets that differ by no more seconds than this are those of one window.
    ONE_WINDOW: Final = 1.0

    def __init__(self, closed_until: float = -inf) -> None:
        self.closed_until: float = closed_until
        self._told: tuple[_Told, ...] = ()

    def learn(self, remaining: float, until: float, now: float) -> None:
        """Take over that `remaining` calls are left until an instant. Within one window the smaller number counts."""
        if remaining < 1:
            self.closed_until = max(self.closed_until, until)
            return
        new, others = _Told(remaining, until, until), []
        for it in self._told:
            if abs(it.named - until) <= self.ONE_WINDOW:
                new = _Told(min(it.remaining, remaining), max(it.until, until), it.named)
            elif it.until > now:
                others.append(it)
        if not any(it.leaves_less_than(new) for it in others):
            others = [it for it in others if not new.leaves_less_than(it)] + [new]
        self._told = tuple(others)

    def is_over(self, now: float) -> bool:
        """Whether there is nothing left to obey."""
        return self.closed_until <= now and all(it.until <= now for it in self._told)

    def ready(self, cost: float, now: float) -> float:
        """Return the instant for a call."""
        return max([self.closed_until, *(it.until for it in self._told if it.remaining < 1)])

    def take(self, cost: float, at: float, now: float) -> float:
        """Charge a call."""
        if self._told:
            self._told = tuple(it._replace(remaining=it.remaining - (now < it.until)) for it in self._told)
        return 0.0

    def copy(self) -> Quota:
        """Make another one in the same state."""
        it = Quota(self.closed_until)
        it._told = self._told
        return it
