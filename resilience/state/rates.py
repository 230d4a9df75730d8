"""Rates: how many units may be used in how much time, and at which instant the next use may begin.

    Spread      a limited number in a period, evenly spread, and at most `burst` at once after a quiet time: a token
                bucket, stored as the instant at which it is full again (GCRA, ITU-T I.371)
    SlidingLog  a limited number in any period, exactly: a log of the uses. A use leaves it when it is as old as the
                period
    Quota       a limited number, or none, until an instant: what the service has reported

`ready(cost, now)` returns the instant from which a use may begin: minus infinity if it may always begin, infinity if it
never may. `take(cost, at, now)` charges a use that was scheduled for `at` and begins at `now`. What `ready` returns and
`at` may be in the past: a waiter that is woken late is charged by the schedule, so late timers do not lower the rate.
`take` returns how many seconds later than `at` it has charged the use.

Pure: no lock, no clock. `copy` is for plans, which simulate future uses.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, NamedTuple, TypeAlias, final

#: Instants that are closer than this, in seconds, are equal: sums of floats are rounded, and no clock is finer.
EPSILON: Final = 1e-9

#: By how many units sums of fractional costs may be off; less than one unit for any limit.
_MOST_ROUNDING: Final = 0.001


@final
class Spread:
    """A token bucket: evenly spread uses, with a burst."""

    __slots__ = ("_busy_since", "_cost", "burst", "full_at", "has_fixed_cost", "increment", "interval", "tolerance")

    #: Up to how many seconds of lateness are made up for; more if the burst takes longer.
    CATCH_UP: Final = 0.25

    interval: float
    full_at: float
    #: For a use of the usual cost: how many seconds ahead `full_at` may be when it begins, and how many it adds.
    tolerance: float
    increment: float

    def __init__(self, limit: float, per: float, burst: float, fixed_cost: float | None = None) -> None:
        self.has_fixed_cost: bool = fixed_cost is not None  # each use costs the same, and is never corrected later
        self.burst: float = burst
        self._cost = fixed_cost or 1.0
        self._set_interval(per / limit, -inf)
        self._busy_since: float = -inf  # when the bucket was last full

    def ready(self, cost: float, now: float) -> float:
        """Return the instant from which a use may begin; for a cost above the burst, when the bucket is full."""
        return self.full_at + ((cost if cost < self.burst else self.burst) - self.burst) * self.interval

    def take(self, cost: float, at: float, now: float) -> float:
        """Charge a use at its scheduled instant."""
        earliest = now - max(self.CATCH_UP, self.burst * self.interval)
        begins = at if at > earliest else earliest
        if begins >= self.full_at:
            self.full_at = self._busy_since = begins
        elif begins < self._busy_since:  # another thread read the clock later, but came earlier
            self._busy_since = begins
        self.full_at += cost * self.interval
        return begins - at

    def correct(self, units: float, began: float, now: float) -> None:
        """Charge more for a use that began at `began`, or refund what it did not use (if `units` is negative).

        A use that began before the bucket was last full gets no refund: the bucket has been refilled since.
        """
        if units > 0:
            self.take(units, now, now)
        elif began >= self._busy_since and self.full_at > now:
            self.full_at = max(self.full_at + units * self.interval, now)

    def resize(self, limit: float, per: float, now: float) -> None:
        """Change the rate. Past uses still count."""
        interval, full_at = per / limit, self.full_at
        if full_at > now:
            full_at = now + (full_at - now) / self.interval * interval
        self._set_interval(interval, full_at)

    def _set_interval(self, interval: float, full_at: float) -> None:
        tolerance = max(0.0, self.burst - self._cost) * interval + EPSILON
        # No call from here on: an interrupt changes all of them, or none.
        self.interval, self.full_at = interval, full_at
        self.tolerance, self.increment = tolerance, self._cost * interval

    def copy(self) -> Spread:
        """Return an independent copy."""
        it = Spread(1.0, self.interval, self.burst)
        it.full_at, it._busy_since = self.full_at, self._busy_since
        return it


@final
class SlidingLog:
    """An exact limit in any period."""

    __slots__ = ("_log", "_most", "_per", "_step", "_used", "limit")

    #: Uses within this fraction of the period are one entry with the instant of the last use: that bounds the memory,
    #: and no use leaves too early.
    STEPS: Final = 1024

    def __init__(self, limit: float, per: float) -> None:
        self.resize(limit, per, 0.0)
        self._per = per
        self._step = per / self.STEPS
        self._log: deque[tuple[float, float, float]] = deque()  # (first, last, units)
        self._used = 0.0

    def ready(self, cost: float, now: float) -> float:
        """Return the instant from which a use may begin; infinity for a cost above the limit.

        The log is not pruned here: `now` may be in the future, and a later call may ask for an earlier instant.
        """
        if cost > self.limit:
            return inf
        excess = self._used + cost - self._most
        if excess > 0:
            for _, last, units in self._log:  # pragma: no branch (the log holds more than the excess)
                excess -= units
                if excess <= 0:
                    return last + self._per
        return -inf

    def take(self, cost: float, at: float, now: float) -> float:
        """Charge a use when it begins, and discard those that are as old as the period."""
        log = self._log
        # An interrupt may come as a call returns, so there is none between a change of the log and that of `_used`.
        while log and log[0][1] + self._per <= now + EPSILON:
            self._used -= log[0][2]
            del log[0]
        if not log:
            self._used = 0.0  # discards rounding errors
        if log and now - log[-1][0] < self._step:
            first, last, units = log[-1]  # later than `now` if another thread read the clock later, but came earlier
            first, last = min(first, now), max(last, now)
            self._used += cost
            log[-1] = (first, last, units + cost)
        else:
            self._used += cost
            log.append((now, now, cost))
        return now - at

    def correct(self, units: float, began: float, now: float) -> None:
        """Charge more for a use that began at `began`, or refund what it did not use, if it is still in the log."""
        if units > 0:
            self.take(units, now, now)
            return
        reach = began
        for place, (first, last, used) in enumerate(self._log):
            if first <= reach and began <= last:
                less = min(used, -units)
                self._log[place] = (first, last, used - less)
                self._used -= less
                units += less  # the rest is in a later entry, if they overlap
                reach = max(reach, last)

    def resize(self, limit: float, per: float, now: float) -> None:
        """Change the limit. Past uses still count."""
        self.limit: float = limit
        self._most = limit + min(EPSILON * limit, _MOST_ROUNDING)

    def copy(self) -> SlidingLog:
        """Return an independent copy."""
        it = SlidingLog(self.limit, self._per)
        it._log, it._used = self._log.copy(), self._used
        return it


class _Report(NamedTuple):
    """How many calls remain until an instant. `first_until` is the instant of the first report for this window."""

    remaining: float
    until: float
    first_until: float

    def leaves_less_than(self, other: _Report) -> bool:
        return self.remaining <= other.remaining and self.until >= other.until


@final
class Quota:
    """Limits that the service has reported, and pauses. It counts calls, regardless of cost, and only ever narrows."""

    __slots__ = ("_reports", "closed_until")

    #: Resets that are at most this many seconds apart belong to the same window.
    SAME_WINDOW: Final = 1.0
    #: The maximum number of reports. If resets are always a day ahead, a new window is reported each second.
    MOST_REPORTS: Final = 64

    def __init__(self, closed_until: float = -inf) -> None:
        self.closed_until: float = closed_until
        self._reports: tuple[_Report, ...] = ()

    def learn(self, remaining: float, until: float, now: float) -> None:
        """Allow only `remaining` more calls until an instant. Within one window, the smallest number counts."""
        if remaining < 1:
            self.closed_until = max(self.closed_until, until)
            return
        new = _Report(remaining, until, until)
        others = [it for it in self._reports if it.until > now]
        same = [it for it in others if abs(it.first_until - until) <= self.SAME_WINDOW]
        if same:
            old = min(same, key=lambda it: abs(it.first_until - until))  # the new report leaves no more than this one
            new = _Report(min(old.remaining, remaining), max(old.until, until), old.first_until)
        if not any(it.leaves_less_than(new) for it in others):
            others = [it for it in others if not new.leaves_less_than(it)] + [new]
        if len(others) > self.MOST_REPORTS:  # the strictest are those that end first; a daily limit ends last
            others.sort(key=lambda it: it.until)
            del others[-2]
        self._reports = tuple(others)

    def has_expired(self, now: float) -> bool:
        """Whether no pause and no report applies any more."""
        return self.closed_until <= now and all(it.until <= now for it in self._reports)

    def ready(self, cost: float, now: float) -> float:
        """Return the instant from which a call may begin."""
        instant = self.closed_until
        for it in self._reports:
            if it.remaining < 1 and it.until > instant:
                instant = it.until
        return instant

    def take(self, cost: float, at: float, now: float) -> float:
        """Charge a call."""
        if self._reports:
            self._reports = tuple(it._replace(remaining=it.remaining - (now < it.until)) for it in self._reports)
        return 0.0

    def copy(self) -> Quota:
        """Return an independent copy."""
        it = Quota(self.closed_until)
        it._reports = self._reports
        return it


#: What a queue needs of each: `ready`, `take` and `copy`.
Meter: TypeAlias = Spread | SlidingLog | Quota

#: The units that a call uses of each meter.
Units: TypeAlias = tuple[float, ...]


@final
class Together:
    """Several meters that must all allow a use."""

    __slots__ = ("_meters", "not_before")

    def __init__(self, meters: tuple[Meter, ...], not_before: float) -> None:
        self._meters = meters
        #: The instant before which no use may begin, because an earlier one in the queue has not begun before it.
        self.not_before: float = not_before

    def ready(self, costs: Units, since: float) -> float:
        """Return the first instant from `since` on from which a use may begin."""
        at = since if since > self.not_before else self.not_before
        for meter, cost in zip(self._meters, costs, strict=True):
            instant = meter.ready(cost, at)
            if instant > at:
                at = instant
        return at

    def take(self, costs: Units, at: float, now: float) -> float:
        """Charge a use to all meters. Return how many seconds later than `at` it was charged."""
        longest = -inf
        for meter, cost in zip(self._meters, costs, strict=True):
            late = meter.take(cost, at, now)
            if late > longest:
                longest = late
        return longest

    def take_in_order(self, costs: Units, at: float, now: float) -> float:
        """Charge a use that begins as soon as possible, but not before `at`; the next one may not begin before it."""
        self.not_before = at
        return self.take(costs, at, max(at, now))

    def copy(self) -> Together:
        """Return an independent copy."""
        return Together(tuple([meter.copy() for meter in self._meters]), self.not_before)
